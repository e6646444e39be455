"""All that a worker needs to run: plain data, sent once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.spec.cp_layout import CpMethod
from pentad.schedules.spec.mesh import Coordinates, Mesh
from pentad.schedules.spec.model import ModelShape
from pentad.schedules.spec.tensors import local_size

LINE = 64  # elements: 128 bytes of bfloat16, where kernels and NCCL read widest
TILE = 8192  # tokens at least, of which a product is summed while the next ones' is computed; docs/axes.md has figures


@dataclass(frozen=True)
class BatchShape:
    """`sequences` of `length` tokens a step over the whole mesh, cut into `microbatches` a replica; there are
    dp x ep `replicas`, which hold different samples."""

    global_batch_size: int
    length: int
    microbatches: int
    replicas: int

    @property
    def rows(self) -> int:
        """Sequences of one microbatch."""
        return self.global_batch_size // (self.microbatches * self.replicas)

    @property
    def tokens(self) -> int:
        """Tokens of a step over the whole mesh."""
        return self.global_batch_size * self.length


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


class ParamShard(NamedTuple):
    """A part of a stage's parameters that all of its holders have alike: that of a tensor rank and, where it is that of
    the `experts`, of an expert rank (else `ep` is 0)."""

    stage: int
    tp: int = 0
    experts: bool = False
    ep: int = 0


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
    state, from 2 on of its gradients, with 3 of its compute weights too. `context` is how context ranks attend to each
    other's tokens: 'ring', 'gather' or 'exchange'; tensor ranks are on one node, unless `tensor_across_nodes`. Of
    `packed` sequences no document attends to another.
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
    cp_method: CpMethod = "ring"
    tp_across_nodes: bool = False
    document_mask: bool = False

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that a rank of the mesh holds."""
        return self.program.placement[self.mesh.coordinates(rank).pp]

    def mode(self, stage: int) -> str:
        """What a stage recomputes."""
        return self.recompute[stage] if self.recompute else "none"

    @property
    def is_tied(self) -> bool:
        """Whether two stages have copies of the embedding, which is the head too or read by predicted layers."""
        return (self.model.tie_word_embeddings or self.model.mtp_layers > 0) and self.program.stages > 1

    def has_experts(self, stage: int) -> bool:
        experts = self.model.experts
        return experts is not None and self.layers[stage][1] > experts.first_k_dense

    def balanced(self, stage: int) -> tuple[int, ...]:
        """Layers of a stage whose experts are evened out by biases; those that predict further tokens come last."""
        experts, (first, end) = self.model.experts, self.layers[stage]
        if experts is None or not experts.bias_update_rate or not self.has_experts(stage):
            return ()
        more = self.model.mtp_layers if end == self.model.layers else 0
        return tuple(range(max(first, experts.first_k_dense), end + more))

    def shares_of(self, rank: int) -> tuple[ParamShard, ...]:
        """What a rank of the mesh holds, by stage."""
        at = self.mesh.coordinates(rank)
        return tuple(share for stage in self.stages_of(rank) for share in self._shares(stage, at.tp, at.ep))

    @property
    def shares(self) -> tuple[ParamShard, ...]:
        """All that the mesh holds, once."""
        places = product(range(self.program.stages), range(self.mesh.tp), range(self.mesh.ep))
        return tuple(dict.fromkeys(share for place in places for share in self._shares(*place)))

    def holders(self, share: ParamShard) -> tuple[int, ...]:
        """Ranks of the mesh that hold a share, lowest first: mirrors, replicas, and those that have other parts of a
        sequence."""
        eps = (share.ep,) if share.experts else range(self.mesh.ep)
        pps = self.program.holders(share.stage)
        held = product(range(self.mesh.dp), pps, range(self.mesh.cp), (share.tp,), eps)
        return tuple(sorted(self.mesh.rank(Coordinates(*at)) for at in held))

    def owner(self, share: ParamShard) -> int:
        """The rank that saves a share: its first holder in the first replica."""
        return self.mesh.rank(Coordinates(0, self.program.holders(share.stage)[0], 0, share.tp, share.ep))

    def size(self, share: ParamShard) -> int:
        """Elements of a share."""
        return local_size(self.model, *self.layers[share.stage], self.mesh, experts=share.experts)

    def shards(self, share: ParamShard) -> int:
        """Equal parts that the state of a share is cut into, in the order of its holders."""
        return len(self.holders(share)) if self.zero else 1

    def buckets(self, share: ParamShard) -> int:
        """Equal parts, one behind the other, of which each shard has its part of each."""
        return self.program.buckets[share.stage] if self.shards(share) > 1 else 1

    def shard_size(self, share: ParamShard) -> int:
        """Elements of a shard, of every bucket as many; what lacks in the end is filled up."""
        buckets = self.buckets(share)
        return buckets * part_of(self.size(share), buckets * self.shards(share))

    def _shares(self, stage: int, tp: int, ep: int) -> tuple[ParamShard, ...]:
        experts = (ParamShard(stage, tp, True, ep),) if self.has_experts(stage) else ()
        return (ParamShard(stage, tp), *experts)

    @property
    def piece_tokens(self) -> int:
        """Tokens that go through a rank's stage at once: of a microbatch's slice, those of a context rank."""
        return self.batch.rows * self.batch.length // self.program.slices // self.mesh.cp

    @property
    def stream_tokens(self) -> int:
        """Tokens of a piece in a rank's part of the residual stream, which tensor ranks share out."""
        return self.piece_tokens // self.mesh.tp


def part_of(size: int, count: int) -> int:
    """Elements of each of `count` equal parts of a buffer; of more than one, so many that each begins on a line."""
    return size if count == 1 else -(-size // (count * LINE)) * LINE


def tiles(tokens: int) -> int:
    """Parts in which tensor ranks compute and sum a product of so many tokens."""
    return max(1, tokens // TILE)


def split_layers(layers: int, placement: Sequence[Sequence[int]], head: float = 0.0) -> tuple[tuple[int, int], ...]:
    """(first, end) of each stage's consecutive layers, the busiest rank's stages as cheap as can be.

    `placement[rank]` are the stages of a rank; `head` is what the last stage does besides, in layers
    (`head_in_layers`). Of equal ranks the later one, which keeps fewer activations, gets a layer more.
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
