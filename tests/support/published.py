"""Published best configurations and their measurements: the Ultra-Scale Playbook's runs of nanotron 0.5 on nodes of
eight H100s, 256 sequences of 4096 tokens per step.

Model sizes are those of Llama 3.2 and 3.1 without grouped-query attention and with a vocabulary of 131072, which gives
the parameter counts of the source to three digits (the two small models have tied embeddings).
"""

from __future__ import annotations

from typing import NamedTuple

from pentad.schedules.spec.model import ModelSpec


def _llama(layers: int, hidden: int, heads: int, ffn: int, *, tied: bool = False) -> ModelSpec:
    return ModelSpec(layers, hidden, heads, heads, ffn, 131072, tie_word_embeddings=tied)


MODELS = {
    "1.34B": _llama(16, 2048, 32, 8192, tied=True),
    "3.57B": _llama(28, 3072, 24, 8192, tied=True),
    "8.86B": _llama(32, 4096, 32, 14336),
    "80B": _llama(80, 8192, 64, 28672),
}


class Published(NamedTuple):
    """One run; MFU in percent (attention counted without causal masking), memory in GB."""

    nodes: int
    model: str
    mfu: float
    memory: float
    dp: int
    tp: int
    pp: int
    microbatches: int
    micro_batch_size: int
    zero: int


ROWS = [
    Published(1, "1.34B", 44.32, 41.8, 4, 1, 2, 16, 4, 1),
    Published(1, "3.57B", 46.68, 56.9, 4, 1, 2, 32, 2, 1),
    Published(1, "8.86B", 45.22, 63.1, 2, 1, 4, 128, 1, 1),
    Published(2, "1.34B", 41.59, 19.5, 8, 1, 2, 32, 1, 1),
    Published(2, "3.57B", 43.77, 54.3, 8, 1, 2, 16, 2, 1),
    Published(2, "8.86B", 43.94, 58.3, 4, 4, 1, 16, 4, 1),
    Published(4, "1.34B", 38.38, 16.4, 16, 1, 2, 16, 1, 1),
    Published(4, "3.57B", 40.39, 53.3, 16, 1, 2, 8, 2, 1),
    Published(4, "8.86B", 43.31, 61.1, 16, 1, 2, 16, 1, 1),
    Published(4, "80B", 14.76, 66.0, 1, 8, 4, 256, 1, 0),
    Published(8, "1.34B", 32.47, 16.3, 32, 1, 2, 8, 1, 1),
    Published(8, "3.57B", 35.53, 36.7, 32, 1, 2, 8, 1, 1),
    Published(8, "8.86B", 39.50, 59.1, 32, 1, 2, 8, 1, 1),
    Published(8, "80B", 30.65, 63.1, 1, 4, 16, 256, 1, 0),
    Published(16, "1.34B", 29.46, 38.8, 64, 2, 1, 1, 4, 0),
    Published(16, "3.57B", 34.59, 66.2, 32, 4, 1, 1, 8, 0),
    Published(16, "8.86B", 36.33, 66.9, 16, 8, 1, 2, 8, 0),
    Published(16, "80B", 34.29, 61.2, 1, 4, 32, 256, 1, 0),
    Published(32, "1.34B", 23.20, 19.6, 64, 4, 1, 1, 4, 0),
    Published(32, "3.57B", 26.77, 39.0, 64, 4, 1, 1, 4, 0),
    Published(32, "8.86B", 32.71, 63.4, 32, 8, 1, 1, 8, 0),
    Published(32, "80B", 30.75, 64.2, 4, 4, 16, 64, 1, 1),
    Published(64, "1.34B", 5.25, 8.4, 128, 2, 2, 1, 2, 1),
    Published(64, "3.57B", 10.49, 16.4, 128, 4, 1, 1, 2, 1),
    Published(64, "8.86B", 18.69, 57.8, 128, 4, 1, 1, 2, 0),
    Published(64, "80B", 17.79, 53.5, 32, 16, 1, 4, 2, 1),
]
