"""memory.logits: auto. Logits are kept where the run fits with them. Else F may make them in chunks, and W again, for
one more product with the head a microbatch."""

from __future__ import annotations

from pentad.orchestrator.activations.allocations import BYTES
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.memory.first_microbatches import shortened, with_words
from pentad.orchestrator.memory.variants import AUTO, Words
from pentad.orchestrator.planning.fit import DeviceMemory, fit_of, fits_host
from pentad.orchestrator.planning.layout import LOGIT_BYTES, compute_dtype, kept_logits
from pentad.orchestrator.planning.planning import make_plan

KEEP: Words = ("memory.logits=keep",)
RECOMPUTE: Words = ("memory.logits=recompute",)
# What keeps a plan as it is where the planner is to choose more than the logits.
SPENT_LATER = {"memory.recompute": "none", "memory.offload_fraction": "0.0", "memory.recompute_fraction": "1.0"}


def chosen_logits(config: RunConfig, device: str, room: DeviceMemory) -> Words:
    """RECOMPUTE if the run does not fit otherwise, without what else the planner may choose, and needs less so; else
    nothing, which keeps logits as they are."""
    if config.memory.logits != AUTO or kept_logits(config) or not _are_large(config, device):
        return ()
    short = with_words(shortened(config), _without_other_choices(config))
    kept = make_plan(short, device, memory=room, proved=False)
    if (fit := fit_of(kept, room)).ok and fits_host(short, kept):
        return ()
    chunked = make_plan(with_words(short, RECOMPUTE), device, memory=room, proved=False)
    return RECOMPUTE if fit_of(chunked, room).needed < fit.needed else ()


def _without_other_choices(config: RunConfig) -> Words:
    found = [f"{key}={value}" for key, value in SPENT_LATER.items() if _value(config, key) == AUTO]
    return (*found, "zero.max_gathered=null") if config.zero.max_gathered == AUTO else tuple(found)


def _value(config: RunConfig, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _are_large(config: RunConfig, device: str) -> bool:
    """Whether the logits of a rank take more than one chunk in a step."""
    mesh = config.mesh
    tokens = config.batch.global_batch_size * config.batch.sequence_length / (mesh.dp * mesh.ep * mesh.cp)
    return tokens * config.model.vocab / mesh.tp * BYTES[compute_dtype(config, device)] > LOGIT_BYTES
