"""memory.logits: auto. Logits are kept where the run fits with them. Else F may make them in chunks, and W again, for
one more product with the head a microbatch."""

from __future__ import annotations

from pentad.orchestrator.activations.allocations import BYTES
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.memory.variants import AUTO, Words
from pentad.orchestrator.planning.layout import LOGIT_BYTES, compute_dtype, kept_logits

KEEP: Words = ("memory.logits=keep",)
RECOMPUTE: Words = ("memory.logits=recompute",)


def are_open(config: RunConfig, device: str) -> bool:
    """Whether the planner is to choose, and has a choice: the logits of a rank take more than one chunk in a step."""
    if config.memory.logits != AUTO or kept_logits(config):
        return False
    mesh = config.mesh
    tokens = config.batch.global_batch_size * config.batch.sequence_length / (mesh.dp * mesh.ep * mesh.cp)
    return tokens * config.model.vocab / mesh.tp * BYTES[compute_dtype(config, device)] > LOGIT_BYTES


def without_other_choices(config: RunConfig) -> Words:
    """Overrides of what else the planner may choose, with what it chooses where everything fits."""
    section = config.memory
    given = {
        "memory.recompute=none": section.recompute,
        "memory.offload_fraction=0.0": section.offload_fraction,
        "memory.recompute_fraction=1.0": section.recompute_fraction,
        "zero.max_gathered=null": config.zero.max_gathered,
    }
    return tuple(word for word, value in given.items() if value == AUTO)
