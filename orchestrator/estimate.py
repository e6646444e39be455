"""What a plan will cost before it runs: arithmetic, seconds and bytes, from sizes alone.

T tokens of a microbatch (of its slice, where sequences are cut), S sequence, H hidden, A = heads x head size, K =
key-value heads x head size, I ffn, V vocab. A product of [T, a] and [a, b] counts 2Tab FLOPs. Causal attention counts
the half of its square that is not masked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pentad.orchestrator.activations import BYTES, peaks, shares
from pentad.schedules.costs import Costs
from pentad.schedules.instruction import RECEIVES, Op, units_of
from pentad.schedules.plan import BatchShape, ModelShape, Plan
from pentad.schedules.pools import Slots, gradient_slots, weight_slots
from pentad.schedules.program import Program
from pentad.schedules.timeline import Timeline
from pentad.schedules.validation import is_validated

# Dense bf16 FLOP/s without sparsity, from the makers' data sheets (SXM modules), by what CUDA calls the device.
PEAKS = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}


@dataclass(frozen=True)
class Rates:
    """Guesses of what a rank attains: FLOP/s, bytes/s of memory, of links to other ranks and of that to the host,
    seconds before a transfer and a launch."""

    flops: float
    memory: float
    link: float
    host: float
    latency: float
    launch: float


# Only to start with, until a run has measured: an H200 with NVLink, and one CPU core with transfers through memory.
GUESSES = {
    "cuda": Rates(flops=400e12, memory=4e12, link=300e9, host=50e9, latency=10e-6, launch=15e-6),
    "cpu": Rates(flops=20e9, memory=10e9, link=1e9, host=5e9, latency=100e-6, launch=50e-6),
}


def guess_costs(
    model: ModelShape,
    layers: Sequence[tuple[int, int]],
    batch: BatchShape,
    device: str,
    dtype: str,
    slices: int = 1,
    modes: Sequence[str] = (),
) -> Costs:
    """Seconds from FLOPs and bytes at assumed rates (GUESSES); embedding and head count to the first and last stage.

    Slices of a sequence have even shares, as they have of attention on average. `modes` are the plan's of recompute.
    """
    rates = GUESSES[device]
    tokens = batch.rows * batch.length // slices
    attention = model.heads * model.head_dim
    square = 2 * tokens * batch.length * attention / rates.flops  # one layer's scores and mixture, half of them masked
    head = 2 * tokens * model.vocab * model.hidden / rates.flops
    lookup = 3 * BYTES["float32"] * model.vocab * model.hidden / rates.memory  # W of the embedding fills, reads, adds
    forward, backward, weight = [], [], []
    for first, end in layers:
        linear = 2 * tokens * (end - first) * model.layer_parameters / rates.flops
        last = head if end == model.layers else 0.0
        forward.append(linear + (end - first) * square + last)
        backward.append(linear + (end - first) * 2.5 * square + last)  # five products where F had two
        weight.append(linear + last + (lookup if first == 0 else 0.0))
    kept = [shares(model, layers, stage, tokens, dtype, slices) for stage in range(len(layers))]
    again = tuple(
        seconds if mode == "full" else 4 * tokens * (end - first) * model.hidden * model.ffn / rates.flops
        for (first, end), seconds, mode in zip(layers, forward, modes, strict=False)  # no modes, no costs
    )
    held = max(model.stage_parameters(first, end) for first, end in layers) * BYTES["float32"]
    ring = 2 * held * (batch.replicas - 1) / batch.replicas / rates.link
    return Costs(
        tuple(forward),
        tuple(backward),
        tuple(weight),
        transfer=rates.latency + tokens * model.hidden * BYTES[dtype] / rates.link,
        reduce=rates.latency + ring,
        norm=2 * rates.latency + held / rates.memory,
        step=7 * held / rates.memory,  # reads master, m, v, gradient; writes master, m, v
        launch=rates.launch,
        recompute=again,
        offload=tuple(rates.latency + (of.roots + of.leaves - of.still) / rates.host for of in kept),
    )


def costs_of(plan: Plan) -> Costs:
    """The guess of a plan's costs."""
    sizes = plan.model, plan.layers, plan.batch
    return guess_costs(*sizes, plan.device, plan.dtype, plan.program.slices, plan.recompute)


def read_costs(program: Program, timeline: Timeline) -> Costs | None:
    """Costs as measured: the median over all spans of an op on a stage, nothing if a stage has none.

    BW is split into halves. Transfers and collectives count their shortest span: the others contain waiting.
    """
    seconds: dict[tuple[str, int], list[float]] = {}
    for span in timeline.spans:
        seconds.setdefault((span.op, span.stage), []).append(max(span.end - span.start, 1e-9))

    def of(op: Op, stage: int) -> float:
        if (op, stage) in seconds:
            return median(seconds[op, stage])
        return median(seconds.get((Op.BW, stage), [0.0])) / 2

    def shortest(*ops: Op) -> float:
        return min((min(times) for (op, _), times in seconds.items() if op in ops), default=0.0)

    forward, backward, weight = (tuple(of(op, s) for s in range(program.stages)) for op in (Op.F, Op.B, Op.W))
    if not all((*forward, *backward, *weight)):
        return None
    stages = range(program.stages)
    recompute, offload = (
        tuple(of(op, s) if (op, s) in seconds else 0.0 for s in stages) for op in (Op.RECOMPUTE, Op.OFFLOAD)
    )
    return Costs(
        forward,
        backward,
        weight,
        transfer=shortest(*RECEIVES),
        reduce=shortest(Op.ALL_REDUCE) or 2 * shortest(Op.REDUCE_SCATTER, Op.ALL_GATHER),
        norm=shortest(Op.NORM),
        step=shortest(Op.STEP),
        recompute=recompute if any(recompute) else (),
        offload=offload if any(offload) else (),
    )


def flops_per_token(model: ModelShape, length: int, *, causal: bool = True) -> float:
    """Useful FLOPs of forward and backward: 6 a parameter without the input embedding, and 6 L A S of attention.

    Recomputed work is not counted. With `causal` false the masked half counts too, 12 L A S, as many others report it.
    """
    attention = model.layers * model.heads * model.head_dim * length
    return 6.0 * (model.parameters - model.vocab * model.hidden) + (6.0 if causal else 12.0) * attention


def peak_flops(device_name: str, dtype: str) -> float | None:
    """The dense peak that a utilisation refers to, where it is known: bfloat16 on devices in PEAKS."""
    return PEAKS.get(device_name) if dtype == "bfloat16" else None


def utilisation(tokens_per_second: float, plan: Plan, device_name: str) -> float | None:
    """MFU, 0 to 1, of all ranks by the causal convention; None where the device's peak is unknown (CPUs)."""
    peak = peak_flops(device_name, plan.dtype)
    work = tokens_per_second * flops_per_token(plan.model, plan.batch.length)
    return work / (plan.mesh.size * peak) if peak else None


def memory(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes of a rank of the mesh at the program's peak; workspaces and results on their way are not counted.

    'parameters' are in the compute dtype, 'master' is 0 where those are the master weights themselves. With ZeRO these
    and 'gradients' are shards and whatever is whole at some time (see schedules/pools.py). 'host' is what
    OFFLOAD takes there, no part of the total.
    """
    pp = plan.mesh.coordinates(rank).pp
    stream = plan.program.streams[pp]
    compute = BYTES[plan.dtype]
    main = max(compute, BYTES["float32"])
    shards = sum(map(plan.shard_size, plan.stages_of(rank)))
    weights = shards + _turns(plan, weight_slots(plan.program, pp)) if plan.zero == 3 else _whole(plan, rank)
    gradients = shards + _turns(plan, gradient_slots(plan.program, pp)[0]) if plan.zero > 1 else _whole(plan, rank)
    activations, away = peaks(plan, rank)
    slots = len({(part.op, part.slot) for part in units_of(stream) if part.op in RECEIVES})
    found = {
        "parameters": weights * compute,
        "master": shards * main if main != compute or is_validated(plan.program) else 0,
        "gradients": gradients * main,
        "optimizer": 2 * shards * main,
        "activations": activations,
        "slots": slots * plan.piece_tokens * plan.model.hidden * compute,
    }
    return {**found, "total": sum(found.values()), "host": away}


def traffic(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes that a rank sends in a step's collectives of a stage, by op, as rings do: of N in all and n holders (n-1)/n
    of N to gather weights or to scatter gradients, and both for an all-reduce."""
    wide = max(BYTES[plan.dtype], BYTES["float32"])
    found: Counter[str] = Counter()
    for part in units_of(plan.program.streams[plan.mesh.coordinates(rank).pp]):
        if part.op in (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE):
            holders = len(plan.holders(part.stage))
            whole = plan.shards(part.stage) * plan.shard_size(part.stage)
            times = 2 if part.op is Op.ALL_REDUCE else 1
            size = BYTES[plan.dtype] if part.op is Op.ALL_GATHER else wide
            found[part.op.value] += times * whole * (holders - 1) // holders * size
    return dict(found)


def _whole(plan: Plan, rank: int) -> int:
    """Elements of all stages of a rank, filled up to equal shards."""
    return sum(plan.shards(stage) * plan.shard_size(stage) for stage in plan.stages_of(rank))


def _turns(plan: Plan, slots: Slots) -> int:
    """Elements of buffers that stages take turns on: each is as long as its longest stage."""
    longest: Counter[int] = Counter()
    for (stage, _), slot in slots.items():
        longest[slot] = max(longest[slot], plan.shards(stage) * plan.shard_size(stage))
    return longest.total()
