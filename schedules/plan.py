"""All that a worker needs to run: plain data, sent once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from pentad.schedules.errors import PentadError
from pentad.schedules.mesh import Mesh
from pentad.schedules.program import Program


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama-family decoder: `heads` query heads share `kv_heads` key-value heads."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer: q, k, v, o, gate, up, down and two norms."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.ffn + 2 * self.hidden

    def head_in_layers(self, length: int) -> float:
        """Multiplications of the output head over those of a decoder layer, at a sequence length (causal attention)."""
        return self.vocab * self.hidden / (self.layer_parameters + length * self.heads * self.head_dim)

    @property
    def parameters(self) -> int:
        return self.stage_parameters(0, self.layers)

    def stage_parameters(self, first: int, end: int) -> int:
        """Of layers `first` to `end`, with the embedding, and with the head and last norm, where these are."""
        embedding = self.vocab * self.hidden
        ends = (embedding if first == 0 else 0) + (embedding + self.hidden if end == self.layers else 0)
        return (end - first) * self.layer_parameters + ends


@dataclass(frozen=True)
class BatchShape:
    """`sequences` of `length` tokens a step over the whole mesh, cut into `microbatches` a replica."""

    sequences: int
    length: int
    microbatches: int
    replicas: int

    @property
    def rows(self) -> int:
        """Sequences of one microbatch."""
        return self.sequences // (self.microbatches * self.replicas)

    @property
    def tokens(self) -> int:
        """Tokens of a step over the whole mesh."""
        return self.sequences * self.length


@dataclass(frozen=True)
class OptimizerShape:
    """AdamW with decoupled weight decay, linear warm-up and a cosine to `min_learning_rate`."""

    learning_rate: float
    min_learning_rate: float
    warmup_steps: int
    steps: int
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0; a pure function, so that every rank and a resumed run agree."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        left = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        low = self.min_learning_rate
        return low + 0.5 * (self.learning_rate - low) * (1 + math.cos(math.pi * left))


@dataclass(frozen=True)
class Plan:
    """Mesh, program and shapes of a run.

    `layers[stage]` is (first, end) of the decoder layers that a stage holds; stage 0 also embeds, the last one has the
    final norm, head and loss. `dtype` is of compute ('bfloat16', 'float32', 'float64'); master weights, gradients and
    optimizer state are float32 (float64 when compute is). `device` is 'cuda' or 'cpu'; `transport` moves activations:
    'gloo' on CPU, 'peer' (copies between the GPUs of one host) or 'nccl'. `data` is a corpus folder, or 'builtin:NAME'
    which is built in the folder `cache`, and `fingerprint` tells the corpus from others; `seed` is the run's only
    source of randomness; `deterministic` asks for kernels whose two runs have the same bits. `recompute[stage]` is what
    RECOMPUTE means there: 'full' (F keeps what it got, no more), 'selective' (all but norms and the widest product) or
    'none'; empty: none anywhere. `zero` is the stage
    of ZeRO (arXiv 1910.02054): from 1 on the holders of a stage keep a shard each of its master weights and optimizer
    state, from 2 on of its gradients, with 3 of its compute weights too.
    """

    name: str
    mesh: Mesh
    program: Program
    layers: tuple[tuple[int, int], ...]
    model: ModelShape
    batch: BatchShape
    optimizer: OptimizerShape
    data: str
    cache: str
    seed: int
    dtype: str
    device: str
    transport: str
    deterministic: bool = True
    fingerprint: str = ""
    recompute: tuple[str, ...] = ()
    zero: int = 0

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that a rank of the mesh holds."""
        return self.program.placement[self.mesh.coordinates(rank).pp]

    def mode(self, stage: int) -> str:
        """What a stage recomputes."""
        return self.recompute[stage] if self.recompute else "none"

    def holders(self, stage: int) -> tuple[int, ...]:
        """Ranks of the mesh that hold a stage, mirrors and replicas, lowest first."""
        held = product(range(self.mesh.dp), self.program.holders(stage))
        return tuple(sorted(self.mesh.move(0, dp=dp, pp=pp) for dp, pp in held))

    def shards(self, stage: int) -> int:
        """Equal parts that the state of a stage is cut into, in the order of its holders."""
        return len(self.holders(stage)) if self.zero else 1

    def shard_size(self, stage: int) -> int:
        """Elements of a shard; the last one is filled up."""
        return -(-self.model.stage_parameters(*self.layers[stage]) // self.shards(stage))

    @property
    def piece_tokens(self) -> int:
        """Tokens that go through a stage at once: a microbatch's share of a slice."""
        return self.batch.rows * self.batch.length // self.program.slices

    def owner(self, stage: int) -> int:
        """The rank that saves a stage: its first holder in the first replica."""
        first = self.program.holders(stage)[0]
        return next(r for r in range(self.mesh.size) if self.mesh.coordinates(r) == (0, first, 0, 0, 0))


def split_layers(layers: int, placement: Sequence[Sequence[int]], head: float = 0.0) -> tuple[tuple[int, int], ...]:
    """(first, end) of each stage's consecutive layers, the busiest rank's stages as cheap as can be.

    `placement[rank]` are the stages of a rank; `head` is what the last stage does besides, in layers
    (`ModelShape.head_in_layers`). Of equal ranks the later one, which keeps fewer activations, gets a layer more.
    Raises PentadError for fewer layers than stages.
    """
    stages = 1 + max(stage for held in placement for stage in held)
    if layers < stages:
        text = f"model.layers is {layers}, but {stages} pipeline stages (mesh.pp) need at least one layer each"
        raise PentadError(text)
    sizes = [1] * stages

    def cost(stage: int) -> float:
        return sizes[stage] + (head if stage == stages - 1 else 0.0)

    def burden(stage: int) -> tuple[float, float, int]:
        return max(sum(map(cost, held)) for held in placement if stage in held), cost(stage), -stage

    for _ in range(layers - stages):
        sizes[min(range(stages), key=burden)] += 1
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))
