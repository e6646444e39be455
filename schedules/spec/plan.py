"""The plan: everything a worker needs to run, as plain data that is sent once."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.rates import USUAL_KERNELS, KernelChoice, Rates
from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.cp_layout import CP_LAYOUTS, CpMethod
from pentad.schedules.spec.data import DataSpec
from pentad.schedules.spec.eval_spec import EvalSpec
from pentad.schedules.spec.lora import LoraSpec, shard_size, shard_tensors
from pentad.schedules.spec.mesh import Axis, Coordinates, Mesh, are_copied
from pentad.schedules.spec.model import Fp8Spec, ModelSpec
from pentad.schedules.spec.optimizer import OptimizerSpec, SpikeSpec
from pentad.schedules.spec.tensors import TILE_ELEMENTS, LayerRange, Tensor, gathered_in_8_bits, layers_of_sizes

ALIGNMENT = 64  # elements: 128 bytes of bfloat16, the widest access of kernels and NCCL


class ParamShard(NamedTuple):
    """The parameters of a stage on one tensor rank: those of the experts of one expert rank (`experts`), or all others
    (`ep` is 0). All its holders have the same values. The `frozen` ones of LoRA are only weights: neither reduced nor
    updated nor saved."""

    stage: int
    tp: int = 0
    experts: bool = False
    ep: int = 0
    frozen: bool = False


ShardPart = tuple[ParamShard, int]  # a shard, and the number of a part that ZeRO cuts its state into


@dataclass(frozen=True)
class Plan:
    """Mesh, program, model and settings of a run.

    `program` is that of a step with a full batch, `rampup_programs` are those of the stages of `batch.rampup`, and
    `longer_programs` those of full batches with more microbatches, as listed in `batch.longer`. `layers[stage]` are a
    stage's decoder layers; stage 0 also has the embedding, and the last one the final norm, head and loss. `dtype` is
    that of compute ('bfloat16', 'float32', 'float64'); master weights, gradients and optimizer state are float32, or
    float64 if compute is. `device` is 'cuda' or 'cpu'. `transport` is 'gloo' on CPUs; on GPUs 'peer' (copies inside
    hosts, see `transport_along`) or 'nccl'. `hosts` has the host of each rank; empty: all are on one.

    `data` is what is trained on, and `eval` what the run evaluates, if anything. `seed` is the run's only source of
    randomness. `deterministic` asks for bit-reproducible kernels; `kernels` says which implementations ranks run. With
    `cuda_graphs`, compute is replayed as captured in an earlier step.

    `recompute[stage]` is a mode or names of parts of layers (schedules/passes/recompute.py); empty means none
    everywhere. Row-wise parts are recomputed only for the share `recompute_fraction` of rows, the last ones. Logits are
    kept from F to W or, with `logit_rows`, computed in chunks of so many rows, and again in W. `offload[stage]` is the
    share of the bytes of saved activations that OFFLOAD takes; empty: all; `offload_prefetch` is as in MemoryOptions,
    and `offload_slots[stage]` are the bytes that one OFFLOAD needs in host memory and, for what stays of a cut tensor,
    on the device. With `host_optimizer` master weights and optimizer state are in host memory. `zero` is the ZeRO stage
    (arXiv 1910.02054): from 1 on the holders of a stage shard its master weights and optimizer state, from 2 on its
    gradients, with 3 its compute weights; over all holders, or within groups of `zero_shards` of them (arXiv
    2205.00119). With `bf16_reduce` gradients are reduced in bfloat16, with sums in float32. `cp_method` is how context
    ranks attend to each other's tokens. Expert ranks send each other tokens in `expert_slots` slots; with 0 a GPU gets
    all tokens. Tensor ranks share a node unless `tp_across_nodes`. A step that is a spike by `spikes` changes no weight
    (None: only one whose norm is not finite). With `lora` the model is frozen, and its adapters are the parameters.
    `fp8` says which products are in 8 bits (None: none). `gpu` names the GPU that the plan was made for ('': unknown),
    and `rates` are those of its costs (None: what is assumed of that GPU). The state of each rank is copied into the
    memory of another one every `replicate_every` steps (0: never). The file or URL `notice` announces that a node is
    about to be taken away. In `profile_steps` ranks run torch's profiler.
    """

    name: str
    mesh: Mesh
    program: Program
    layers: tuple[LayerRange, ...]
    model: ModelSpec
    batch: BatchSpec
    optimizer: OptimizerSpec
    data: DataSpec
    seed: int
    dtype: str
    device: str
    transport: str
    hosts: tuple[int, ...] = ()
    deterministic: bool = True
    cuda_graphs: bool = False
    recompute: tuple[str, ...] = ()
    recompute_fraction: float = 1.0
    logit_rows: int = 0
    offload: tuple[float, ...] = ()
    offload_prefetch: int = 1
    offload_slots: tuple[tuple[int, int], ...] = ()
    host_optimizer: bool = False
    zero: int = 0
    zero_shards: int = 0
    bf16_reduce: bool = False
    cp_method: CpMethod = "ring"
    expert_slots: int = 0
    tp_across_nodes: bool = False
    eval: EvalSpec | None = None
    spikes: SpikeSpec | None = None
    lora: LoraSpec | None = None
    fp8: Fp8Spec | None = None
    rampup_programs: tuple[Program, ...] = ()
    longer_programs: tuple[Program, ...] = ()
    gpu: str = ""
    rates: Rates | None = None
    replicate_every: int = 0
    notice: str | None = None
    profile_steps: tuple[int, ...] = ()
    kernels: KernelChoice = USUAL_KERNELS

    @property
    def programs(self) -> tuple[Program, ...]:
        """All programs of the ranks: of a training step, of the batch ramp, of more microbatches, and last of the
        evaluation, if there are any."""
        trained = self.trained_programs
        return trained if self.eval is None else (*trained, self.eval.program)

    @property
    def trained_programs(self) -> tuple[Program, ...]:
        """The programs with backwards."""
        return (self.program, *self.rampup_programs, *self.longer_programs)

    def program_of(self, batch: int, microbatches: int = 0) -> int:
        """The index in `programs` of the one that trains on a batch, counted from 0, if no pipeline has more than
        `microbatches` of it."""
        stage = self.batch.sizes.stage(batch)
        if stage < len(self.batch.rampup):
            return 1 + stage
        if microbatches <= self.batch.microbatches:
            return 0
        return 1 + stage + bisect_left(self.batch.longer, microbatches)

    def with_program(self, number: int) -> Plan:
        """The plan of the steps that run this one of the training `programs`."""
        program, batch = self.programs[number], replace(self.batch, rampup=(), longer=())
        if 0 < number <= len(self.rampup_programs):
            batch = batch.with_microbatches(program.microbatches)
        return replace(self, program=program, batch=batch, rampup_programs=(), longer_programs=())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that a rank of the mesh holds."""
        return self.program.placement[self.mesh.coordinates(rank).pp]

    def transport_along(self, axis: Axis) -> str:
        """What moves data between ranks along an axis: 'gloo', 'nccl', or 'peer' where `are_copied`."""
        if self.transport != "peer":
            return self.transport
        found = are_copied(
            *(self.mesh, axis, self.hosts),
            zero=self.zero,
            zero_shards=self.zero_shards,
            has_mirrors=len(self.program.holders(0)) > 1,
            is_dynamic=self.batch.capacity > 0,
        )
        return "peer" if found else "nccl"

    def ranks_beside(self, rank: int) -> tuple[int, ...]:
        """The ranks on the host of a rank, itself included, in ascending order."""
        return tuple(each for each in range(self.mesh.size) if not self.hosts or self.hosts[each] == self.hosts[rank])

    def recompute_mode(self, stage: int) -> str:
        """What a stage recomputes."""
        return self.recompute[stage] if self.recompute else "none"

    @property
    def is_local(self) -> bool:
        """Whether layers need no communication."""
        return self.mesh.is_local and not self.batch.capacity

    @property
    def shares_documents(self) -> bool:
        """Whether context ranks split each document by itself, so that the positions on a rank differ between
        sequences."""
        return CP_LAYOUTS[self.cp_method] == "zigzag" and self.mesh.cp > 1 and self.data.document_mask

    @property
    def recomputation(self) -> str:
        """What stages that recompute anything recompute, the same for all of them; 'none' if there are none."""
        return next((mode for mode in self.recompute if mode != "none"), "none")

    @property
    def is_tied(self) -> bool:
        """Whether two stages train copies of the embedding, as the head or for multi-token prediction."""
        has_copies = self.model.tie_word_embeddings or self.model.mtp_layers > 0
        return self.lora is None and has_copies and self.program.stages > 1

    def has_experts(self, stage: int) -> bool:
        return len(self.expert_layers(stage)) > 0

    def router_bias_layers(self, stage: int) -> tuple[int, ...]:
        """Layers of a stage whose experts have biases; multi-token prediction layers come last."""
        experts = self.model.experts
        return tuple(self.expert_layers(stage)) if experts is not None and experts.has_bias else ()

    def expert_layers(self, stage: int) -> range:
        """Layers of a stage that have experts; multi-token prediction layers come last."""
        experts, layers = self.model.experts, self.layers[stage]
        if experts is None:
            return range(0)
        mtp_layers = self.model.mtp_layers if layers.has_head else 0
        return range(max(layers.first, experts.first_k_dense), layers.end + mtp_layers)

    def param_shards_of(self, rank: int) -> tuple[ParamShard, ...]:
        """What a rank of the mesh trains, by stage."""
        at = self.mesh.coordinates(rank)
        return tuple(shard for stage in self.stages_of(rank) for shard in self._param_shards(stage, at.tp, at.ep))

    def frozen_shards_of(self, rank: int) -> tuple[ParamShard, ...]:
        """What a rank of the mesh holds and never changes, by stage: with LoRA the model, else nothing."""
        if self.lora is None:
            return ()
        at, shards = self.mesh.coordinates(rank), list[ParamShard]()
        for stage in self.stages_of(rank):
            shards.append(ParamShard(stage, at.tp, frozen=True))
            if self.has_experts(stage):
                shards.append(ParamShard(stage, at.tp, True, at.ep, frozen=True))
        return tuple(shards)

    @property
    def param_shards(self) -> tuple[ParamShard, ...]:
        """Everything that the mesh trains, without copies."""
        places = product(range(self.program.stages), range(self.mesh.tp), range(self.mesh.ep))
        return tuple(dict.fromkeys(shard for place in places for shard in self._param_shards(*place)))

    def holders(self, shard: ParamShard) -> tuple[int, ...]:
        """Ranks of the mesh that hold a shard, in ascending order: DualPipe mirrors, replicas, and context ranks."""
        eps = (shard.ep,) if shard.experts else range(self.mesh.ep)
        pps = self.program.holders(shard.stage)
        held = product(range(self.mesh.dp), pps, range(self.mesh.cp), (shard.tp,), eps)
        return tuple(sorted(self.mesh.rank(Coordinates(*at)) for at in held))

    def num_holders(self, shard: ParamShard) -> int:
        """The number of `holders`, without listing them."""
        eps = 1 if shard.experts else self.mesh.ep
        return self.mesh.dp * len(self.program.holders(shard.stage)) * self.mesh.cp * eps

    def tp_holders(self, shard: ParamShard) -> tuple[int, ...]:
        """Ranks of the mesh that hold a part of the tensors of a shard, in ascending order: `holders` for every tp."""
        shards = (shard._replace(tp=tp) for tp in range(self.mesh.tp))
        return tuple(sorted(rank for each in shards for rank in self.holders(each)))

    def owner(self, shard: ParamShard) -> int:
        """The rank that saves a shard to checkpoints: its first holder."""
        return self.holders(shard)[0]

    def tensors(self, shard: ParamShard) -> tuple[Tensor, ...]:
        """The tensors that a shard has parts of; those that are gathered in 8 bits come last."""
        layers, narrow = self.layers[shard.stage], self._in_8_bits(shard)
        found = shard_tensors(self.model, self.lora, layers, experts=shard.experts, frozen=shard.frozen)
        return tuple(sorted(found, key=lambda tensor: tensor.name in narrow)) if narrow else found

    def size(self, shard: ParamShard) -> int:
        """Elements of a shard."""
        return shard_size(self.tensors(shard), self.mesh)

    def num_zero_shards(self, shard: ParamShard) -> int:
        """Equal parts that ZeRO cuts the state of a shard into, in the order of its holders; 1 without ZeRO. Frozen
        weights have no state that ZeRO-1 and 2 could cut."""
        return (self.zero_shards or self.num_holders(shard)) if self.zero > (2 if shard.frozen else 0) else 1

    def zero_shard_size(self, shard: ParamShard) -> int:
        """Elements of a ZeRO shard, padding included."""
        narrow, count = self.size_in_8_bits(shard), self.num_zero_shards(shard)
        return aligned_part(self.size(shard) - narrow, count) + aligned_part(narrow, count, TILE_ELEMENTS)

    def size_in_8_bits(self, shard: ParamShard) -> int:
        """Elements of a shard that ZeRO-3 gathers in 8 bits."""
        narrow = self._in_8_bits(shard) if self.num_zero_shards(shard) > 1 else ()
        return shard_size(tuple(t for t in self.tensors(shard) if t.name in narrow), self.mesh) if narrow else 0

    def _in_8_bits(self, shard: ParamShard) -> frozenset[str]:
        given = self.model, self.fp8, self.layers[shard.stage]
        return gathered_in_8_bits(*given, experts=shard.experts) if self.fp8 and self.zero == 3 else frozenset()

    def _param_shards(self, stage: int, tp: int, ep: int) -> tuple[ParamShard, ...]:
        is_trained = self.has_experts(stage) and (self.lora is None or self.lora.adapts_experts)
        return (ParamShard(stage, tp), *((ParamShard(stage, tp, True, ep),) if is_trained else ()))

    @property
    def slice_tokens(self) -> int:
        """Tokens that go through a rank's stage at once: the context rank's share of one slice of a microbatch. With
        data-aware groups as many as it can hold."""
        if self.batch.capacity:
            return self.batch.capacity
        return self.batch.micro_batch_size * self.batch.sequence_length // self.program.slices // self.mesh.cp

    @property
    def sequence_parallel_tokens(self) -> int:
        """Tokens of a slice in a rank's residual stream, which is sharded over tensor ranks (sequence parallelism)."""
        return self.slice_tokens // self.mesh.tp


def aligned_part(size: int, count: int, alignment: int = ALIGNMENT) -> int:
    """Elements of each of `count` equal parts of a buffer, padded so that each part starts aligned."""
    return size if count == 1 else -(-size // (count * alignment)) * alignment


def split_layers(layers: int, placement: Sequence[Sequence[int]], head: float = 0.0) -> tuple[LayerRange, ...]:
    """The layers of each stage, if all cost the same, such that the busiest rank does as little as possible.

    `placement[rank]` are the stages of a rank; `head` is the extra work of the last stage in layers (see
    `head_in_layers`). Among equal ranks the later one, which holds fewer activations, gets one more layer.
    Raises PentadError for fewer layers than stages.
    """
    stages = _num_stages(layers, placement)
    sizes, heads = [1] * stages, [0.0] * (stages - 1) + [head]
    holders = [[held for held in placement if stage in held] for stage in range(stages)]

    def load(stage: int) -> tuple[float, float, int]:
        loads = (sum(sizes[each] + heads[each] for each in held) for held in holders[stage])
        return max(loads), sizes[stage] + heads[stage], -stage

    least = sorted(map(load, range(stages)))  # a heap of loads, perhaps outdated: they only grow
    for _ in range(layers - stages):
        while (now := load(-least[0][2])) != least[0]:
            heapreplace(least, now)
        sizes[-now[2]] += 1
    return layers_of_sizes(sizes)


def split_layers_by_cost(costs: Sequence[float], placement: Sequence[Sequence[int]]) -> tuple[LayerRange, ...]:
    """The layers of each stage of a custom model, whose `costs` differ: first the most expensive stage is made as cheap
    as possible, then single borders move while that lowers the loads of the ranks, compared from the busiest down.

    `placement[rank]` are the stages of a rank. Raises PentadError for fewer layers than stages.
    """
    borders = _min_max_borders(costs, _num_stages(len(costs), placement))

    def loads(borders: list[int]) -> list[float]:
        stages = [sum(costs[first:end]) for first, end in pairwise(borders)]
        return sorted((sum(stages[stage] for stage in held) for held in placement), reverse=True)

    best, improved = loads(borders), True
    while improved:
        improved = False
        for at in range(1, len(borders) - 1):
            for move in (-1, 1):
                moved = [*borders[:at], borders[at] + move, *borders[at + 1 :]]
                if moved[at - 1] < moved[at] < moved[at + 1] and (new := loads(moved)) < best:
                    borders, best, improved = moved, new, True
    return tuple(LayerRange(*each) for each in pairwise(borders))


def split_layers_into_units(stages: Sequence[LayerRange], units: Sequence[int]) -> tuple[LayerRange, ...]:
    """The layers of every unit, where stage s has `units[s]` of them: as equal as possible, larger ones first.

    If a stage has several units, its embedding is a unit by itself, the first one, and its head another, the last one.
    """
    return tuple(unit for layers, count in zip(stages, units, strict=True) for unit in _cut(layers, count))


def num_units(layers: LayerRange, unit_layers: int) -> int:
    """The number of units of a stage with at most `unit_layers` layers each: 1, or what `split_layers_into_units`
    needs."""
    count = math.ceil(len(layers.numbers) / unit_layers)
    return 1 if count == 1 else count + layers.has_embedding + layers.has_head


def _cut(layers: LayerRange, count: int) -> Iterator[LayerRange]:
    if count == 1:
        yield layers
        return
    if layers.has_embedding:
        yield LayerRange(layers.first, layers.first, has_embedding=True)
    size, larger = divmod(len(layers.numbers), count - layers.has_embedding - layers.has_head)
    sizes = (size + (index < larger) for index in range(count - layers.has_embedding - layers.has_head))
    yield from (LayerRange(*each) for each in pairwise(accumulate(sizes, initial=layers.first)))
    if layers.has_head:
        yield LayerRange(layers.end, layers.end, has_head=True)


def _num_stages(layers: int, placement: Sequence[Sequence[int]]) -> int:
    stages = 1 + max(stage for held in placement for stage in held)
    if layers < stages:
        raise PentadError(
            f"model.layers is {layers}: expected at least one for each of {stages} pipeline stages (mesh.pp)"
        )
    return stages


def _min_max_borders(costs: Sequence[float], stages: int) -> list[int]:
    """Borders between stages that minimize the most expensive stage; dynamic programming over the number of stages."""
    sums = list(accumulate(costs, initial=0.0))
    best: dict[int, tuple[float, list[int]]] = {end: (sums[end], [0, end]) for end in range(1, len(sums))}
    for count in range(2, stages + 1):
        ends = range(count, len(sums))
        best = {
            end: min((max(best[at][0], sums[end] - sums[at]), [*best[at][1], end]) for at in range(count - 1, end))
            for end in ends
        }
    return best[len(costs)][1]
