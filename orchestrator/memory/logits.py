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
    """Overrides of what else the planner may choose, with what it chooses where everything fits."""
    section = config.memory
    given = {
        "memory.recompute=none": section.recompute,
        "memory.offload_fraction=0.0": section.offload_fraction,
        "memory.recompute_fraction=1.0": section.recompute_fraction,
        "zero.max_gathered=null": config.zero.max_gathered,
    }
    return tuple(word for word, value in given.items() if value == AUTO)


def _are_large(config: RunConfig, device: str) -> bool:
    """Whether the logits of a rank take more than one chunk in a step."""
    mesh = config.mesh
    tokens = config.batch.global_batch_size * config.batch.sequence_length / (mesh.dp * mesh.ep * mesh.cp)
    return tokens * config.model.vocab / mesh.tp * BYTES[compute_dtype(config, device)] > LOGIT_BYTES
