"""What a plan will cost before it runs, and what a run has cost: FLOPs, seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from operator import mul

from pentad.orchestrator.activations.activation_peaks import activation_peaks, activations_of
from pentad.orchestrator.activations.allocations import BYTES, INDEX, Piece, piece_of, wide_bytes
from pentad.orchestrator.activations.memory_signature import signature_of
from pentad.orchestrator.activations.offloaded_tensors import cuts_of
from pentad.orchestrator.gpus.table import GPUS
from pentad.orchestrator.planning.comm_volume import padded_elements, param_shards_at
from pentad.orchestrator.planning.cost_model import guess_costs
from pentad.orchestrator.planning.hardware import rates_of
from pentad.schedules.ir.lookup import IS_RECEIVE
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.post_validation import has_post_validation
from pentad.schedules.passes.zero import rows_of_rank
from pentad.schedules.passes.zero_buffers import gradient_pool, longest, sharded_stages, weight_pool
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.events import Events, acyclic_events
from pentad.schedules.simulate.rates import Rates
from pentad.schedules.simulate.simulate import event_times
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.optimizer import PIECE_ELEMENTS, PIECES, ROUND_ELEMENTS
from pentad.schedules.spec.plan import ParamShard, Plan, aligned_part
from pentad.schedules.spec.row_slots import row_slots_size
from pentad.schedules.spec.tensors import LayerRange, active_parameters, fp8_matrices
from pentad.schedules.spec.zero_layout import (
    INBOX_ELEMENTS,
    Reduced,
    first_layout,
    inbox_of,
    num_muon_elements,
    outbox_of,
    reduced_shards,
)

GRAPHS_BYTES = 3 * 2**30  # the most GPU memory that CUDA graphs were seen to take (docs/performance.md)
ON_HOST = ("host", "snapshot", "host_optimizer", "copies", "compared")  # kinds of memory that are not on the GPU
States = dict[int, dict[str, int]]  # by rank: memory without activations
AMAX_BYTES = 2 * (3 + 64) * BYTES["float32"]  # of the operands of a matrix (workers/linear/amax_history.py)
CUBLAS = 32 * 2**20  # bytes of cuBLAS's workspace on a Hopper GPU


def costs_of(plan: Plan, rates: Rates | None = None) -> Costs:
    """A plan's guessed costs for microbatches of equal size, those that its program was compiled with; or the costs at
    other `rates`."""
    offloaded = [each.bytes for each in cuts_of(_with_even_batch(plan))]
    piece, rates = even_piece(plan), rates or rates_of_plan(plan)
    given = plan.model, plan.layers, plan.program.placement, piece, rates, plan.recompute, plan.zero, plan.lora
    return guess_costs(*given, offloaded, host_optimizer=plan.host_optimizer, bf16_reduce=plan.bf16_reduce)


def rates_of_plan(plan: Plan) -> Rates:
    return plan.rates or rates_of(plan.device, plan.gpu)


def even_piece(plan: Plan) -> Piece:
    """What costs are guessed for: a piece of a microbatch of equal size."""
    return piece_of(_with_even_batch(plan))._replace(document_mask=False, deterministic=True)


def _with_even_batch(plan: Plan) -> Plan:
    return replace(plan, batch=replace(plan.batch, capacity=0))


def step_seconds(timeline: Timeline) -> float:
    """Seconds from the first start to the last end."""
    return max(span.end for span in timeline.spans) - min(span.start for span in timeline.spans)


def simulated_seconds(plan: Plan, events: Events | None = None, rates: Rates | None = None) -> float:
    """`step_seconds` of a step simulated at guessed costs, without building its spans. `events` are the program's, if
    already known; `rates` replace the plan's."""
    times = event_times(plan.program, events or acyclic_events(plan.program), costs_of(plan, rates))
    return float(times.ends.max() - times.starts.min())


def flops_per_token(model: ModelSpec, length: int, *, causal: bool = True, frozen: bool = False) -> float:
    """Useful FLOPs of forward and backward: 6 for each active parameter except the input embedding, and 6 L A S for the
    attention of L layers with A = heads x head size and sequences of S = `length` (PaLM, arXiv 2204.02311, appendix B),
    less with sliding windows. `frozen` parameters have no gradients and count 4 instead of 6.

    Recomputation does not count. With `causal` false the masked half of attention counts too, 12 L A S, as in many
    reports.
    """
    if model.custom is not None:  # all scores of attention count, since nothing says which are masked
        return 3.0 * sum(layer.flops for layer in model.custom.layers) / length
    layers, value = model.layers + model.mtp_layers, model.mla.v_head_dim if model.mla else model.qk_head_dim
    attended = sum(model.attended_length(layer, length) for layer in range(layers))
    attention = model.heads * (model.qk_head_dim + value) / 2 * attended
    parameters = sum(active_parameters(model, layer) for layer in range(layers)) + model.hidden
    parameters += (1 + model.mtp_layers) * model.vocab * model.hidden + 2 * model.mtp_layers * model.hidden**2
    return (4.0 if frozen else 6.0) * parameters + (6.0 if causal else 12.0) * attention


def peak_flops(device_name: str, dtype: str) -> float | None:
    """FLOP/s of dense products that MFU refers to: of bfloat16 on GPUs of the table; None if unknown."""
    found = GPUS.get(device_name)
    return found.bf16 if found and dtype == "bfloat16" else None


def mfu(tokens_per_second: float, plan: Plan, device_name: str) -> float | None:
    """Model FLOPs utilisation of all ranks, 0 to 1, with causal attention; None if the device's peak is unknown."""
    peak = peak_flops(device_name, plan.dtype)
    if peak is None:
        return None
    work = tokens_per_second * flops_per_token(plan.model, plan.batch.sequence_length, frozen=plan.lora is not None)
    return work / (plan.mesh.size * peak)


def memory(plan: Plan, rank: int, state: States | None = None) -> dict[str, int]:
    """Peak bytes of a rank of the mesh, by kind. `state` caches, by rank, what does not depend on activations, for
    plans that differ only in recomputation and offloading.

    'parameters' are in the compute dtype; 'master' is what master weights need in addition. With ZeRO, 'parameters',
    'master', 'gradients' and 'optimizer' count shards and gather buffers. 'activations' include workspaces, also
    Muon's. 'tables' are tokens, rotary tables and cuBLAS's workspace, 'graphs' what CUDA graphs take outside of
    tensors. ON_HOST kinds are not part of 'total': 'host' is offloaded activations, 'snapshot' a copy of the rank's
    part of a checkpoint, 'host_optimizer' the master weights and optimizer state in host memory ('optimizer' is then
    the buffer through which they pass), and 'copies' are the parts of this rank and of another one, for two steps each
    (elastic.replicate_every). 'compared' are the gradients of a step in the compute dtype (precision.compare_every),
    whose activations count if they are larger.
    """
    known = {} if state is None else state
    if rank not in known:
        known[rank] = _state(plan, rank)
    activations, host = activation_peaks(plan, rank)
    found = known[rank] | {"activations": _with_muon(plan, rank, activations), "host": host}
    found |= {"total": sum(size for kind, size in found.items() if kind not in (*ON_HOST, "total"))}
    if plan.fp8 is None or not plan.fp8.compare_every:
        return found
    largest = max(found, memory(replace(plan, fp8=None), rank), key=lambda kinds: kinds["total"])
    kept = wide_bytes(plan.dtype) * sum(map(plan.zero_shard_size, plan.param_shards_of(rank)))
    return {**largest, "compared": kept}


def _state(plan: Plan, rank: int) -> dict[str, int]:
    """`memory` of a rank, without activations."""
    pp = plan.mesh.coordinates(rank).pp
    compute, wide = BYTES[plan.dtype], wide_bytes(plan.dtype)
    trained, frozen = plan.param_shards_of(rank), plan.frozen_shards_of(rank)
    layouts = [first_layout(plan, shard) for shard in trained]
    shards, gradients = sum(each.part for each in layouts), sum(each.padded_size for each in layouts)
    weights = sum(each.gathered_size(compute) for each in layouts)
    weights += sum(padded_elements(plan, shard) for shard in frozen)
    share, in_8_bits = 1.0, sum(each.part - each.compute_part for each in layouts)
    if plan.zero == 3:
        sharded = sharded_stages(plan.program, pp)
        pools = [weight_pool(program, pp, sharded) for program in plan.programs]
        share = min(1.0, sum(longest(pools)) / weights)
        weights = shards - in_8_bits + sum(map(plan.zero_shard_size, frozen)) + sum(longest(pools))
    if plan.zero > 1:
        gradients = shards + sum(longest([gradient_pool(program, pp) for program in plan.trained_programs]))
    received = len(set().union(*(_receive_slots(program, pp) for program in plan.programs)))
    is_apart = has_post_validation(plan.program) or plan.host_optimizer
    beside = wide if is_apart else wide - compute  # for weights that are not in FP8
    master = sum(each.compute_part * beside + (each.part - each.compute_part) * wide for each in layouts)
    optimizer = sum(optimizer_bytes(plan, shard, rank) for shard in trained)
    on_host = master + optimizer if plan.host_optimizer else 0
    if plan.host_optimizer:
        master, optimizer = 0, PIECES * PIECE_ELEMENTS * (wide + 2 * state_bytes(plan))
    found = {
        "parameters": weights * compute + in_8_bits + fp8_weights(plan, rank, share),
        "master": master,
        "gradients": gradients * wide,
        "optimizer": optimizer,
        "activations": 0,
        "slots": received * plan.sequence_parallel_tokens * plan.model.hidden * compute
        + reduction_bytes(plan, rank)
        + row_slots_size(plan) * compute,
        "tables": _tables(plan, rank),
        "graphs": GRAPHS_BYTES * plan.cuda_graphs,
    }
    kinds = (0, snapshot_bytes(plan, rank), on_host, copies_bytes(plan, rank), 0)
    return {**found, "total": 0, **dict(zip(ON_HOST, kinds, strict=True))}


def reduction_bytes(plan: Plan, rank: int) -> int:
    """`bytes_of_reductions` of a rank's parameter shards."""
    is_copied, shards = plan.transport_along("dp") == "peer", reduced_shards(plan, rank)
    return bytes_of_reductions(shards, plan.dtype, plan.device, is_copied=is_copied, bf16=plan.bf16_reduce)


def bytes_of_reductions(shards: Sequence[Reduced], dtype: str, device: str, *, is_copied: bool, bf16: bool) -> int:
    """Bytes of the buffers in which gradients from other ranks arrive, and in bfloat16 those from which the rank sends:
    on a GPU for one chunk, on a CPU for all reductions, since all of them may be in flight. Peer copies (`is_copied`)
    need an inbox."""
    inbox = inbox_of(shards) if is_copied else 0
    if not bf16:
        return inbox * wide_bytes(dtype)
    sent = [each.replicas * aligned_part(each.part, each.replicas) for each in shards if each.replicas > 1]
    sent += [each.parts * each.part for each in shards if each.parts > 1 and not is_copied]
    at_once = sum(sent) if device == "cpu" else min(INBOX_ELEMENTS, max(sent, default=0))
    return (inbox + is_copied * outbox_of(shards) + 2 * at_once) * BYTES["bfloat16"]


def copy_slots_bytes(plan: Plan, rank: int) -> int:
    """The part of 'slots' in `memory` that peer copies take and NCCL does not."""
    if plan.transport != "peer":
        return 0

    def taken(of: Plan) -> int:
        return reduction_bytes(of, rank) + row_slots_size(of) * BYTES[of.dtype]

    return taken(plan) - taken(replace(plan, transport="nccl"))


def fp8_weights(plan: Plan, rank: int, share: float) -> int:
    """Bytes of a rank's weights in FP8, in both forms, and of the histories of maxima with delayed scaling. `share` is
    the share of layers that is resident, as with ZeRO-3 FP8 weights come and go with the gathered ones; if weights are
    gathered in FP8, one of the forms is the gathered weight itself."""
    if plan.fp8 is None:
        return 0
    held = [plan.layers[stage] for stage in plan.stages_of(rank)]
    layers, has_head = [number for each in held for number in each.numbers], any(each.has_head for each in held)
    matrices = list(fp8_matrices(plan.model, plan.fp8, layers, has_head=has_head))
    maxima = len(matrices) * AMAX_BYTES if plan.fp8.delayed else 0
    made = 2 * sum(math.prod(each.local_shape(plan.mesh)) for each in matrices)
    return int(share * (made - sum(map(plan.size_in_8_bits, plan.param_shards_of(rank))))) + maxima


def _receive_slots(program: Program, pp: int) -> set[tuple[int, int]]:
    """(op code, slot) of all that a pipeline rank receives."""
    columns, rows = program.columns, rows_of_rank(program, pp, IS_RECEIVE)
    return set(zip(columns.op[rows].tolist(), columns.slot[rows].tolist(), strict=True))


def memories(plan: Plan, state: States | None = None) -> list[dict[str, int]]:
    """`memory` of every rank; those with the same stages need the same, unless their shards differ."""
    if shards_differ(plan):
        return [memory(plan, rank, state) for rank in range(plan.mesh.size)]
    of_pipeline = pipeline_memories(plan, state)
    return [of_pipeline[plan.mesh.coordinates(rank).pp] for rank in range(plan.mesh.size)]


def pipeline_memories(plan: Plan, state: States | None = None) -> list[dict[str, int]]:
    """`memory` of the first rank of each pipeline stage."""
    if shards_differ(plan):
        return [memory(plan, rank, state) for rank in plan.mesh.group(("pp",), 0)]
    by_signature, found = dict[Hashable, dict[str, int]](), list[dict[str, int]]()
    for pp, rank in enumerate(plan.mesh.group(("pp",), 0)):
        if (signature := signature_of(plan, pp)) not in by_signature:
            by_signature[signature] = memory(plan, rank, state)
        found.append(by_signature[signature])
    return found


def shards_differ(plan: Plan) -> bool:
    """Whether ranks with the same stages need different memory: with Muon, as each matrix lies in one ZeRO shard or
    another."""
    return plan.optimizer.name == "muon" and plan.zero > 0


def fullest_bytes(plan: Plan, limit: int, state: States | None = None) -> int:
    """Bytes of the fullest rank, or of the first one found that exceeds `limit`."""
    last, most = plan.mesh.pp - 1, 0
    for pp in dict.fromkeys((0, last, *range(plan.mesh.pp))):
        most = max(most, memory(plan, plan.mesh.move(0, pp=pp), state)["total"])
        if most > limit:
            break
    return most


def optimizer_bytes(plan: Plan, shard: ParamShard, rank: int) -> int:
    """Bytes of the moments in a rank's ZeRO shard: two for each element, or one where Muon updates."""
    moments = 2 * plan.zero_shard_size(shard) - num_muon_elements(plan, shard, rank)
    return moments * state_bytes(plan)


def state_bytes(plan: Plan) -> int:
    """Bytes of a moment of one element."""
    return BYTES["bfloat16"] if plan.optimizer.bf16_state else wide_bytes(plan.dtype)


def snapshot_bytes(plan: Plan, rank: int) -> int:
    """Bytes of the master weights and moments that a rank stores in checkpoints: its equal part of what it and its
    replicas hold. 0 if they are in host memory anyway, as nothing is copied then."""
    return 0 if plan.host_optimizer else _saved_bytes(plan, rank)


def checkpoint_bytes(plan: Plan) -> int:
    """Bytes of a checkpoint's files, without what is small beside master weights and moments."""
    return sum(_saved_bytes(plan, rank) for rank in range(plan.mesh.size))


def _saved_bytes(plan: Plan, rank: int) -> int:
    return sum(
        (plan.zero_shard_size(shard) * wide_bytes(plan.dtype) + optimizer_bytes(plan, shard, rank))
        // (plan.num_holders(shard) // plan.num_zero_shards(shard))
        for shard in plan.param_shards_of(rank)
    )


def copies_bytes(plan: Plan, rank: int) -> int:
    """Bytes of replicated state: a rank's own part and the largest part that it may hold for another rank, each twice,
    as the last copy stays valid while the next one is made."""
    if not plan.replicate_every:
        return 0
    return 2 * (snapshot_bytes(plan, rank) + max(snapshot_bytes(plan, each) for each in plan.mesh.group(("pp",), 0)))


def _with_muon(plan: Plan, rank: int, activations: int) -> int:
    """Activations, plus Muon's directions of all matrices, which the first forwards of the next step still hold; or the
    buffers of Muon's exchanges, at most eight times the largest round, if those are larger than the activations."""
    directions = [num_muon_elements(plan, shard, rank) for shard in plan.param_shards_of(rank)]
    largest = max(map(mul, directions, map(plan.num_zero_shards, plan.param_shards_of(rank))))
    exchange = 8 * min(ROUND_ELEMENTS, largest) * BYTES[plan.dtype]
    return sum(directions) * BYTES[plan.dtype] + max(activations, exchange)


def stage_memory(plan: Plan, rank: int) -> list[dict[str, int]]:
    """Bytes of each stage of a rank: its state, and what one piece saves from F to B ('saved') and from B to W
    ('deferred')."""
    wide, found = wide_bytes(plan.dtype), []
    for stage in plan.stages_of(rank):
        shards, activations = param_shards_at(plan, rank, stage), activations_of(plan, stage)
        full, own = sum(map(plan.size, shards)), sum(optimizer_bytes(plan, shard, rank) for shard in shards)
        frozen = sum(plan.size(shard) for shard in plan.frozen_shards_of(rank) if shard.stage == stage)
        state = {"parameters": (full + frozen) * BYTES[plan.dtype], "gradients": full * wide, "optimizer": own}
        found.append({"stage": stage, **state, "saved": activations.saved, "deferred": activations.deferred})
    return found


def _tables(plan: Plan, rank: int) -> int:
    """Bytes of the rotary tables of each stage, a step's tokens on ranks that read them, and cuBLAS's workspace."""
    model, stages = plan.model, plan.stages_of(rank)
    length = plan.batch.sequence_length // plan.mesh.cp
    most, held = plan.batch.most_microbatches, plan.batch.capacity or plan.batch.micro_batch_size * length
    mtp = model.mtp_layers * (2 if plan.data.eod_mask_loss or plan.data.document_mask else 1)  # also inputs if masked
    kinds = 4 if plan.batch.capacity else 2 + mtp + plan.shares_documents  # also positions, and rows
    tokens = kinds * held * most * INDEX
    if plan.batch.capacity or plan.shares_documents:  # tables of all positions, and those of microbatches in flight
        length += plan.batch.sequence_length + min(most, 2 * plan.mesh.pp) * held
    reads_tokens = {0, plan.program.stages - 1} & set(stages)
    tables = sum(num_rotary_tables(model, plan.layers[stage]) for stage in stages)
    rotary = tables * length * model.rotary_width * wide_bytes(plan.dtype)
    return rotary + (tokens if reads_tokens else 0) + (CUBLAS if plan.device == "cuda" else 0)


def num_rotary_tables(model: ModelSpec, layers: LayerRange) -> int:
    """Rotary tables of a stage: one for every kind of layer."""
    end = layers.end + model.mtp_layers * layers.has_head
    return len({model.layer_kind(layer) for layer in range(layers.first, end)})
