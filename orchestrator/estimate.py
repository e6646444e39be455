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
from pentad.schedules.mesh import Mesh
from pentad.schedules.model import ModelShape
from pentad.schedules.plan import BatchShape, Plan, Share
from pentad.schedules.pools import Slots, gradient_slots, weight_slots
from pentad.schedules.program import Program
from pentad.schedules.tensors import active, parameters
from pentad.schedules.timeline import Timeline
from pentad.schedules.validation import is_validated

# Dense bf16 FLOP/s without sparsity, from the makers' data sheets (SXM modules), by what CUDA calls the device.
PEAKS = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}


ALONE = Mesh()


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
    mesh: Mesh = ALONE,
) -> Costs:
    """Seconds from FLOPs and bytes at assumed rates (GUESSES); embedding and head count to the first and last stage.

    Slices of a sequence have even shares, as they have of attention on average. `modes` are the plan's of recompute.
    Of a `mesh` its axes tp and cp count, which share out a stage's work, and those that hold copies of it.
    """
    rates = GUESSES[device]
    tokens = batch.rows * batch.length // slices // mesh.cp
    width = rates.flops * mesh.tp  # of all that share a product
    attention = model.heads * model.head_dim
    square = 2 * tokens * batch.length * attention / width  # one layer's scores and mixture, half of them masked
    head = 2 * tokens * model.vocab * model.hidden / width
    # W of the embedding fills, reads, adds
    lookup = 3 * BYTES["float32"] * model.vocab * model.hidden / mesh.tp / rates.memory
    stream = tokens * model.hidden * BYTES[dtype] / mesh.tp
    gather = rates.latency + stream * (mesh.tp - 1) / rates.link if mesh.tp > 1 else 0.0
    forward, backward, weight = list[float](), list[float](), list[float]()
    for first, end in layers:
        if model.own is not None:
            own = batch.rows * sum(layer.flops for layer in model.own.layers[first:end]) / rates.flops
            for each in (forward, backward, weight):
                each.append(own)
            continue
        count = end - first
        linear = 2 * tokens * sum(active(model, layer) for layer in range(first, end)) / width
        last = head if end == model.layers else 0.0
        forward.append(linear + count * (square + 4 * gather) + last)  # two gathers, two scatters
        backward.append(linear + count * (2.5 * square + 6 * gather) + last)  # five products where F had two
        weight.append(linear + last + (lookup if first == 0 else 0.0))
    kept = [shares(model, layers, stage, tokens, dtype, slices, mesh.tp) for stage in range(len(layers))]
    again = tuple(
        seconds if mode == "full" else 4 * tokens * (end - first) * model.hidden * model.ffn / width
        for (first, end), seconds, mode in zip(layers, forward, modes, strict=False)  # no modes, no costs
    )
    held = max(parameters(model, first, end) for first, end in layers) / mesh.tp * BYTES["float32"]
    copies = batch.replicas * mesh.cp
    ring = 2 * held * (copies - 1) / copies / rates.link
    return Costs(
        tuple(forward),
        tuple(backward),
        tuple(weight),
        transfer=rates.latency + stream / rates.link,
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
    return guess_costs(*sizes, plan.device, plan.dtype, plan.program.slices, plan.recompute, plan.mesh)


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
    """Useful FLOPs of forward and backward: 6 a parameter that a token meets, without the input embedding, and
    6 L A S of attention.

    Recomputed work is not counted. With `causal` false the masked half counts too, 12 L A S, as many others report it.
    """
    if model.own is not None:  # what products count, of attention's square all: nothing says what is masked
        return 3.0 * sum(layer.flops for layer in model.own.layers) / length
    attention = model.layers * model.heads * model.head_dim * length
    met = sum(active(model, layer) for layer in range(model.layers)) + model.vocab * model.hidden + model.hidden
    return 6.0 * met + (6.0 if causal else 12.0) * attention


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
    shards = sum(map(plan.shard_size, plan.shares_of(rank)))
    weights = gradients = _whole(plan, rank)
    if plan.zero == 3:
        weights = shards + _turns(plan, rank, weight_slots(plan.program, pp))
    if plan.zero > 1:
        gradients = shards + _turns(plan, rank, gradient_slots(plan.program, pp)[0])
    activations, away = peaks(plan, rank)
    slots = len({(part.op, part.slot) for part in units_of(stream) if part.op in RECEIVES})
    found = {
        "parameters": weights * compute,
        "master": shards * main if main != compute or is_validated(plan.program) else 0,
        "gradients": gradients * main,
        "optimizer": 2 * shards * main,
        "activations": activations,
        "slots": slots * plan.stream_tokens * plan.model.hidden * compute,
    }
    return {**found, "total": sum(found.values()), "host": away}


def traffic(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes that a rank sends in a step's collectives of a stage, by op, as rings do: of N in all and n holders (n-1)/n
    of N to gather weights or to scatter gradients, and both for an all-reduce."""
    wide = max(BYTES[plan.dtype], BYTES["float32"])
    found: Counter[str] = Counter()
    for part in units_of(plan.program.streams[plan.mesh.coordinates(rank).pp]):
        if part.op in (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE):
            times = 2 if part.op is Op.ALL_REDUCE else 1
            size = BYTES[plan.dtype] if part.op is Op.ALL_GATHER else wide
            for share in shares_at(plan, rank, part.stage):
                holders, whole = len(plan.holders(share)), plan.shards(share) * plan.shard_size(share)
                found[part.op.value] += times * whole * (holders - 1) // holders * size
    return dict(found)


def _whole(plan: Plan, rank: int) -> int:
    """Elements of all stages of a rank, filled up to equal shards."""
    return sum(plan.shards(share) * plan.shard_size(share) for share in plan.shares_of(rank))


def shares_at(plan: Plan, rank: int, stage: int) -> list[Share]:
    """What a rank holds of a stage."""
    return [share for share in plan.shares_of(rank) if share.stage == stage]


def _turns(plan: Plan, rank: int, slots: Slots) -> int:
    """Elements of buffers that stages take turns on: each is as long as its longest stage."""
    longest: Counter[tuple[int, bool]] = Counter()
    for (stage, _), slot in slots.items():
        for share in shares_at(plan, rank, stage):
            at = slot, share.experts
            longest[at] = max(longest[at], plan.shards(share) * plan.shard_size(share))
    return longest.total()
