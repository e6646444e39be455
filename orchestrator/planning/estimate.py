"""What a plan will cost before it runs, and what a run has cost: arithmetic, seconds and bytes.

A = heads x head size, S sequence.
"""

from __future__ import annotations

from collections import Counter
from statistics import median

from pentad.orchestrator.planning.activation_memory import BYTES, INDEX
from pentad.orchestrator.planning.activation_peaks import activation_peaks, activations_of
from pentad.orchestrator.planning.comm_volume import shares_at
from pentad.orchestrator.planning.cost_model import guess_costs
from pentad.orchestrator.planning.hardware import DEVICES
from pentad.schedules.ir.instruction import RECEIVES, REDUCTIONS, Op, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.validation import has_post_validation
from pentad.schedules.passes.zero import BufferSlots, gradient_slots, weight_slots
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.timeline import Timeline, attributed_seconds
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import active_parameters

CUBLAS = 32 * 2**20  # bytes of its workspace on a Hopper GPU


def costs_of(plan: Plan) -> Costs:
    """The guess of a plan's costs."""
    sizes = plan.model, plan.layers, plan.batch, plan.device, plan.dtype, plan.program.slices
    return guess_costs(*sizes, plan.recompute, plan.mesh, plan.cp_method, plan.zero)


def read_costs(program: Program, timeline: Timeline) -> Costs | None:
    """Costs as measured: the median over all spans of an op on a stage, nothing if a stage has none.

    BW is split into halves, and the time of a pair is shared out. Transfers and collectives count their shortest span:
    the others contain waiting.
    """
    seconds: dict[tuple[str, int], list[float]] = {}
    for span, took in attributed_seconds(timeline.spans):
        parts = program.buckets[span.stage] if span.op in REDUCTIONS else 1
        seconds.setdefault((span.op, span.stage), []).append(max(parts * took, 1e-9))

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


def flops_per_token(model: ModelSpec, length: int, *, causal: bool = True) -> float:
    """Useful FLOPs of forward and backward: 6 a parameter that a token meets, without the input embedding, and
    6 L A S of attention.

    Recomputed work is not counted. With `causal` false the masked half counts too, 12 L A S, as many others report it.
    """
    if model.custom is not None:  # what products count, of attention's square all: nothing says what is masked
        return 3.0 * sum(layer.flops for layer in model.custom.layers) / length
    layers, value = model.layers + model.mtp_layers, model.mla.v_head_dim if model.mla else model.qk_head_dim
    attention = layers * model.heads * (model.qk_head_dim + value) / 2 * length
    met = sum(active_parameters(model, layer) for layer in range(layers)) + model.hidden
    met += (1 + model.mtp_layers) * model.vocab * model.hidden + 2 * model.mtp_layers * model.hidden**2
    return 6.0 * met + (6.0 if causal else 12.0) * attention


def peak_flops(device_name: str, dtype: str) -> float | None:
    """The dense peak that a utilisation refers to, where it is known: bfloat16 on devices in DEVICES."""
    found = DEVICES.get(device_name)
    return found.flops if found and dtype == "bfloat16" else None


def utilisation(tokens_per_second: float, plan: Plan, device_name: str) -> float | None:
    """MFU, 0 to 1, of all ranks by the causal convention; None where the device's peak is unknown (CPUs)."""
    peak = peak_flops(device_name, plan.dtype)
    work = tokens_per_second * flops_per_token(plan.model, plan.batch.sequence_length)
    return work / (plan.mesh.size * peak) if peak else None


def memory(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes of a rank of the mesh at the program's peak, what layers need for a moment included.

    'parameters' are in the compute dtype, 'master' is 0 where those are the master weights themselves. With ZeRO these
    and 'gradients' are shards and whatever is whole at some time (see passes/zero.py). 'tables' are what is small:
    tokens, rotations, what cuBLAS works in. 'host' is what OFFLOAD takes there, no part of the total.
    """
    pp = plan.mesh.coordinates(rank).pp
    stream = plan.program.streams[pp]
    compute = BYTES[plan.dtype]
    main = max(compute, BYTES["float32"])
    shards = sum(map(plan.zero_shard_size, plan.param_shards_of(rank)))
    weights = gradients = _whole(plan, rank)
    if plan.zero == 3:
        weights = shards + _turns(plan, rank, weight_slots(plan.program, pp))
    if plan.zero > 1:
        gradients = shards + _turns(plan, rank, gradient_slots(plan.program, pp)[0])
    activations, host = activation_peaks(plan, rank)
    slots = len({(part.op, part.slot) for part in instructions_of(stream) if part.op in RECEIVES})
    found = {
        "parameters": weights * compute,
        "master": shards * main if main != compute or has_post_validation(plan.program) else 0,
        "gradients": gradients * main,
        "optimizer": 2 * shards * main,
        "activations": activations,
        "slots": slots * plan.sequence_parallel_tokens * plan.model.hidden * compute,
        "tables": _tables(plan, rank),
    }
    return {**found, "total": sum(found.values()), "host": host}


def memories(plan: Plan) -> list[dict[str, int]]:
    """`memory` of every rank: those that have the same stages need the same."""
    first = {pp: memory(plan, plan.mesh.move(0, pp=pp)) for pp in range(plan.mesh.pp)}
    return [first[plan.mesh.coordinates(rank).pp] for rank in range(plan.mesh.size)]


def stage_memory(plan: Plan, rank: int) -> list[dict[str, int]]:
    """Bytes of each stage of a rank: what it has all the time, and what one piece keeps between F and B ('saved') and
    between B and W ('deferred')."""
    main, found = max(BYTES[plan.dtype], BYTES["float32"]), []
    for stage in plan.stages_of(rank):
        at, of = shares_at(plan, rank, stage), activations_of(plan, stage)
        whole, shards = sum(map(plan.size, at)), sum(map(plan.zero_shard_size, at))
        state = {"parameters": whole * BYTES[plan.dtype], "gradients": whole * main, "optimizer": 2 * shards * main}
        found.append({"stage": stage, **state, "saved": of.saved, "deferred": of.deferred})
    return found


def _tables(plan: Plan, rank: int) -> int:
    """Cosines and sines of each stage, the tokens of a step on ranks that read them, and cuBLAS's workspace."""
    model, stages = plan.model, plan.stages_of(rank)
    width = model.mla.qk_rope_head_dim if model.mla is not None else model.qk_head_dim
    part = plan.batch.sequence_length // plan.mesh.cp
    tokens = (2 + model.mtp_layers) * plan.batch.micro_batch_size * part * plan.batch.microbatches * INDEX
    reads = {0, plan.program.stages - 1} & set(stages)
    turned = len(stages) * part * width * max(BYTES[plan.dtype], BYTES["float32"])
    return turned + (tokens if reads else 0) + (CUBLAS if plan.device == "cuda" else 0)


def _whole(plan: Plan, rank: int) -> int:
    """Elements of all stages of a rank, filled up to equal shards."""
    return sum(plan.num_zero_shards(share) * plan.zero_shard_size(share) for share in plan.param_shards_of(rank))


def _turns(plan: Plan, rank: int, slots: BufferSlots) -> int:
    """Elements of buffers that stages take turns on: each is as long as its longest stage."""
    longest: Counter[tuple[int, bool]] = Counter()
    for (stage, _), slot in slots.items():
        for share in shares_at(plan, rank, stage):
            at = slot, share.experts
            longest[at] = max(longest[at], plan.num_zero_shards(share) * plan.zero_shard_size(share))
    return longest.total()
