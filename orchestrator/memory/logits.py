"""memory.logits: auto. Logits are kept if the run then fits. Otherwise F may make them in chunks, and W again, which
costs one more product with the head for each microbatch."""

from __future__ import annotations

from pentad.orchestrator.activations.allocations import BYTES
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.memory.variants import AUTO, Words
from pentad.orchestrator.planning.layout import LOGIT_BYTES, compute_dtype, kept_logits

KEEP: Words = ("memory.logits=keep",)
RECOMPUTE: Words = ("memory.logits=recompute",)


def are_open(config: RunConfig, device: str) -> bool:
    """Whether the planner should choose and there is a choice: a rank's logits in a step exceed one chunk."""
    if config.memory.logits != AUTO or kept_logits(config):
        return False
    mesh = config.mesh
    tokens = config.batch.global_batch_size * config.batch.sequence_length / (mesh.dp * mesh.ep * mesh.cp)
    return tokens * config.model.vocab / mesh.tp * BYTES[compute_dtype(config, device)] > LOGIT_BYTES


def without_other_choices(config: RunConfig) -> Words:
    """Overrides that set the planner's other choices to what it chooses if everything fits."""
    section = config.memory
    given = {
        "memory.recompute=none": section.recompute,
        "memory.offload_fraction=0.0": section.offload_fraction,
        "memory.recompute_fraction=1.0": section.recompute_fraction,
        "zero.max_gathered=null": config.zero.max_gathered,
    }
    return tuple(word for word, value in given.items() if value == AUTO)
