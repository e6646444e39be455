"""Which meshes of so many GPUs a run fits on, and how fast it would be there.

Every factorisation into five axes is tried, with microbatches of a few sizes, and with as little recompute and ZeRO as
gives its ranks room. Time and memory are estimated from the first microbatches of a step; the best ones are compiled
and simulated as a run would be. For schedule 'auto', which takes its time to search, zb-1p stands in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.cost_model import parameters_held
from pentad.orchestrator.planning.estimate import costs_of, memory
from pentad.orchestrator.planning.fit import Room
from pentad.orchestrator.planning.hardware import NODE, refuse_wide
from pentad.orchestrator.planning.planning import buckets_of, draft
from pentad.schedules.catalogue import generate
from pentad.schedules.compiler import add_memory_passes, compile_program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.gc_pause import gc_paused
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.optimizer_pass import add_reduce
from pentad.schedules.passes.transfers import add_transfers
from pentad.schedules.passes.zero import add_gradient_buffer_waits
from pentad.schedules.search.auto import AUTO
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import unit_times
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.plan import BatchSpec, Plan, split_layers
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions
from pentad.schedules.spec.tensors import head_in_layers
from pentad.schedules.spec.validate import check_divisibility

ROWS = (1, 2, 4, 8)  # sequences of a microbatch
MODES = ("none", "selective", "full")
LINEAR = ("gpipe", "looped-bfs")  # keep more with every microbatch
BEST = 10  # estimates that are compiled


class Found(NamedTuple):
    """A plan with room for it; `bytes` are those of its fullest rank."""

    plan: Plan
    seconds: float
    bytes: int

    @property
    def pace(self) -> float:
        """Tokens a second."""
        return self.plan.batch.tokens / self.seconds


class Survey(NamedTuple):
    """`found` are the quickest, best first, of so many that `fit`; `left_out` says why others were, in a sentence about
    one of them, and how many."""

    found: list[Found]
    fit: int
    left_out: dict[str, int]


def survey(config: RunConfig, gpus: int, room: Room) -> Survey:
    """Of the legal meshes of `gpus` ranks."""
    guesses: list[Found] = []
    reasons: dict[str, tuple[str, int]] = {}
    with gc_paused():
        for mesh in meshes(gpus):
            try:
                guesses.append(_best(config, mesh, room))
            except PentadError as error:
                kind = str(error).partition(" is ")[0]
                sentence, number = reasons.get(kind, (str(error), 0))
                reasons[kind] = sentence, number + 1
    guesses.sort(key=lambda each: each.seconds)
    compiled = [_compiled(config, each) for each in guesses[:BEST]]
    found = sorted((each for each in compiled if each.bytes <= room.bytes), key=lambda each: each.seconds)
    return Survey(found, len(guesses), dict(reasons.values()))


def meshes(ranks: int) -> Iterator[Mesh]:
    """All of so many ranks."""
    for pp in _divisors(ranks):
        for tp in _divisors(ranks // pp):
            for cp in _divisors(ranks // pp // tp):
                for ep in _divisors(ranks // pp // tp // cp):
                    yield Mesh(ranks // pp // tp // cp // ep, pp, cp, tp, ep)


def changed(plan: Plan) -> dict[str, str | int]:
    """What a configuration needs to become this plan."""
    axes = {f"mesh.{axis}": getattr(plan.mesh, axis) for axis in ("dp", "pp", "cp", "tp", "ep")}
    return {
        **axes,
        "schedule.microbatches": plan.batch.microbatches,
        "zero.stage": plan.zero,
        "memory.recompute": max(plan.recompute, default="none", key=MODES.index),
    }


def _best(config: RunConfig, mesh: Mesh, room: Room) -> Found:
    """The quickest estimate of a mesh that has room. Raises PentadError where there is none."""
    refuse_wide(mesh, across=config.mesh.tp_across_nodes)
    replicas, batch = mesh.dp * mesh.ep, config.batch
    if batch.global_batch_size % replicas:
        expected = f"a multiple of mesh.dp x mesh.ep = {replicas}"
        raise PentadError(f"batch.global_batch_size is {batch.global_batch_size}: expected {expected}")
    _require_state(config, mesh, room)
    share, found, leanest = batch.global_batch_size // replicas, list[Found](), 0
    refused: PentadError | None = None
    for rows in (rows for rows in ROWS if share % rows == 0):
        try:
            for plan in _drafts(config, mesh, share // rows):
                needed = _fullest(plan)
                leanest = min(leanest or needed, needed)
                if needed <= room.bytes:
                    found.append(Found(plan, _seconds(plan, share // rows), needed))
                    break
        except PentadError as error:
            refused = error
    if found:
        return min(found, key=lambda each: each.seconds)
    if refused is not None and not leanest:
        raise refused
    raise _no_room(mesh, room, leanest)


def _require_state(config: RunConfig, mesh: Mesh, room: Room) -> None:
    """Raises PentadError where there is none for weights and gradients (6 bytes a parameter) and for shards of master
    weights and moments (12), as ranks have on average."""
    model = config.model.shape
    check_divisibility(model, mesh, config.batch.sequence_length, mesh.tp, cp_method=config.mesh.cp_method)
    held = parameters_held(model, 0, model.layers, mesh) / mesh.pp
    least = held * (6 + 12 / (mesh.size / mesh.tp / mesh.pp))
    if least > room.bytes and not config.zero.max_gathered:
        raise _no_room(mesh, room, least)


def _no_room(mesh: Mesh, room: Room, needed: float) -> PentadError:
    at_least = f"at least {needed / 2**30:.0f} GiB"
    return PentadError(f"room is {room.bytes / 2**30:.0f} GiB a rank, but mesh {mesh} needs {at_least}")


def _drafts(config: RunConfig, mesh: Mesh, microbatches: int) -> Iterator[Plan]:
    """Plans with less and less memory, and a program of a few microbatches. Raises PentadError where none is legal."""
    model, length = config.model.shape, config.batch.sequence_length
    name, options = config.schedule.name, config.options
    if name == AUTO:
        name = "zb-1p"
    few = microbatches if name in LINEAR else min(microbatches, 2 * mesh.pp + 2)
    order = _order(name, mesh.pp, few, options)
    replicas = mesh.dp * mesh.ep
    rows = config.batch.global_batch_size // (replicas * microbatches)
    check_divisibility(model, mesh, length, rows, order.slices, config.mesh.cp_method)
    layers = split_layers(model.layers, order.placement, head_in_layers(model, length))
    alone = replicas * mesh.cp == 1 and all(len(order.holders(stage)) == 1 for stage in range(order.stages))
    # stages that are alone on a rank are whole in a buffer anyway: to shard more spares nothing
    stages = [0] if alone else [0, 1] if order.chunks == 1 else [0, 1, 2, 3]
    batch = BatchSpec(config.batch.global_batch_size, length, microbatches, replicas)
    transport = "peer" if mesh.size <= NODE and mesh.pp > 1 else "nccl"
    plan = draft(config, model, "cuda", order, layers, transport=transport)
    for mode in MODES:
        for zero in stages:
            gathered = config.zero.max_gathered if zero == 3 else None
            again = frozenset(range(order.stages)) if mode != "none" else frozenset()
            # one of shards of the optimizer's state needs no other buffers
            memory_options = MemoryOptions(zero=zero if zero > 1 else 0, max_gathered=gathered, recompute=again)
            program = _program(name, mesh.pp, few, options, memory_options)
            modes = (mode,) * order.stages if again else ()
            yield replace(plan, mesh=mesh, batch=batch, program=program, zero=zero, recompute=modes)


def _fullest(plan: Plan) -> int:
    """Bytes of the fullest of a few ranks: both ends of the pipeline, their neighbours and the middle."""
    last = plan.mesh.pp - 1
    some = {pp for pp in (0, 1, last // 2, last - 1, last) if 0 <= pp <= last}
    return max(memory(plan, plan.mesh.move(0, pp=pp))["total"] for pp in some)


def _seconds(plan: Plan, microbatches: int) -> float:
    """A step's, from the time of a few microbatches and what each more takes on the busiest rank."""
    order = plan.program.compute()
    costs = _with_recompute(costs_of(plan))
    starts, ends = unit_times(order, costs)
    each = [costs.forward[s] + costs.backward[s] + costs.weight[s] + 3 * costs.launch for s in range(order.stages)]
    busiest = max(sum(each[stage] for stage in held) for held in order.placement) * order.slices
    mirrors = max(len(order.holders(stage)) for stage in range(order.stages))
    more = (microbatches - order.microbatches) * busiest / mirrors
    end = costs.reduce * order.chunks if plan.batch.replicas * plan.mesh.cp > 1 else 0.0
    return float(ends.max() - starts.min()) + more + end + costs.norm + costs.step


def _with_recompute(costs: Costs) -> Costs:
    """In an order of forwards and backwards alone."""
    if not costs.recompute:
        return costs
    backward = tuple(map(sum, zip(costs.backward, costs.recompute, strict=True)))
    return replace(costs, backward=backward)


def _compiled(config: RunConfig, guess: Found) -> Found:
    """As a run would be, with all of its microbatches."""
    plan, costs = guess.plan, costs_of(guess.plan)
    again = frozenset(stage for stage, mode in enumerate(plan.recompute) if mode != "none")
    program = compile_program(
        plan.program.name,
        plan.mesh.pp,
        plan.batch.microbatches,
        costs=costs,
        gated=plan.transport == "nccl",
        replicas=plan.batch.replicas * plan.mesh.cp,
        options=config.options,
        memory_options=MemoryOptions(
            zero=plan.zero,
            max_gathered=config.zero.max_gathered if plan.zero == 3 else None,
            recompute=again,
            buckets=buckets_of(config, plan.model, plan.layers, plan.mesh, plan.dtype),
        ),
    )
    whole = replace(plan, program=program)
    spans = simulate(program, costs).spans
    seconds = max(span.end for span in spans) - min(span.start for span in spans)
    return Found(whole, seconds, _fullest(whole))


@lru_cache(maxsize=256)
def _order(name: str, ranks: int, microbatches: int, options: ScheduleOptions) -> Program:
    return generate(name, ranks, microbatches, options)


@lru_cache(maxsize=512)
def _program(name: str, ranks: int, microbatches: int, options: ScheduleOptions, memory_options: MemoryOptions) -> Program:
    """With all that takes memory, and no proof: nobody runs it."""
    order = _order(name, ranks, microbatches, options)
    spared = add_memory_passes(add_transfers(order, Costs.uniform(order.stages), gated=False), memory_options)
    reduced = add_reduce(spared, replicas=1 + (memory_options.zero > 0), scatter=memory_options.zero > 0)
    return add_gradient_buffer_waits(reduced) if memory_options.zero > 1 else reduced


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
