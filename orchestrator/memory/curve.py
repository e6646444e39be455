"""What a rank holds during a simulated step, by kind and by unit: the planner's estimate at every moment."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate, groupby

from pentad.orchestrator.activations.activation_peaks import bytes_over_stream, run_order
from pentad.orchestrator.activations.allocations import BYTES, wide_bytes
from pentad.orchestrator.planning.estimate import costs_of, memories
from pentad.schedules.draw.memory import MemoryCurve, Sample, UnitName
from pentad.schedules.draw.page_program import DrawnMemory
from pentad.schedules.ir.instruction import COMPUTE, Instruction, Op, instructions_of
from pentad.schedules.passes.zero_buffers import (
    gradient_pool,
    gradient_sizes,
    longest,
    sharded_stages,
    weight_pool,
    weight_sizes,
)
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.plan import Plan

MOST_SAMPLES = 480  # of a rank; of more, the highest in each part of the step are kept
ON_COMPUTE_LANE = COMPUTE | {Op.RECOMPUTE}
Change = tuple[float, int]  # second, bytes


def memory_curves(plan: Plan, timeline: Timeline | None = None) -> list[MemoryCurve]:
    """By pipeline rank, for a step simulated at guessed costs, or for that of `timeline`."""
    timeline = timeline or simulate(plan.program, costs_of(plan))
    spans = {(span.rank, span.name): (span.start, span.end) for span in timeline.spans}
    needs = memories(plan)
    return [_curve(plan, pp, needs[rank], spans) for pp, rank in enumerate(plan.mesh.group(("pp",), 0))]


def planned_memory(plan: Plan) -> DrawnMemory:
    """The bytes that a step's instructions take and free, and those that each rank holds throughout."""
    starts, ends, fixed = list[int](), list[int](), list[int]()
    needs = memories(plan)
    for pp, stream in enumerate(plan.program.streams):
        held, peaks = (each.tolist() for each in bytes_over_stream(plan, plan.program, pp))
        fixed.append(needs[plan.mesh.move(0, pp=pp)]["total"] - max(peaks, default=0))
        order = run_order(plan.program, pp, is_local=plan.is_local).tolist()
        changes = _changes(list(instructions_of(stream)), held, peaks, order)
        for column, change in zip((starts, ends), zip(*changes, strict=True), strict=True):
            column += change
    return DrawnMemory(True, 1, fixed, starts, ends)


def _changes(parts: list[Instruction], held: list[int], peaks: list[int], order: list[int]) -> list[list[int]]:
    """The changes at the start and at the end of each instruction of a stream, which run in this order. As in
    `_activations`, a RELOAD's memory is taken with the compute before it; that of a pair whose forward runs last, with
    its backward."""
    changes = [[0, 0] for _ in parts]
    last, before, pending = -1, 0, 0
    for row, after, peak in zip(order, held, peaks, strict=True):
        part = parts[row]
        if row < last:  # the forward of a pair, which takes more only if it needs more than the backward did
            more = max(0, peak - before + changes[last][1])
            changes[last] = [changes[last][0] + more, changes[last][1] - more + after - before]
        elif part.op in ON_COMPUTE_LANE:
            changes[row] = [peak - before + pending, after - peak]
            last, pending = row, 0
        elif part.op is Op.RELOAD and last < 0:
            pending += after - before
        elif part.op is Op.RELOAD:
            changes[last][1] += after - before
        before = after
    return changes


def _curve(plan: Plan, pp: int, need: dict[str, int], spans: dict[tuple[int, str], tuple[float, float]]) -> MemoryCurve:
    program, compute, wide = plan.program, BYTES[plan.dtype], wide_bytes(plan.dtype)
    times = [(part, *spans[pp, str(part.key)]) for part in instructions_of(program.streams[pp])]
    held = sharded_stages(program, pp)
    weights = {unit: compute * sum(weight_sizes(program, unit)) for unit in held if plan.zero == 3}
    gradients = {unit: wide * sum(gradient_sizes(program, unit)) for unit in held if plan.zero > 1}
    gathered = _in_use(times, {Op.ALL_GATHER}, Op.FREE, weights)
    summed = _in_use(times, {Op.W, Op.BW}, Op.REDUCE_SCATTER, gradients)
    pools = [0, 0]
    if plan.zero == 3:
        pools[0] = compute * sum(longest([weight_pool(each, pp, held) for each in plan.programs]))
    if plan.zero > 1:
        pools[1] = wide * sum(longest([gradient_pool(each, pp) for each in plan.trained_programs]))
    activations, highest = _activations(plan, pp, times)
    rest = sum(need[kind] for kind in ("slots", "tables", "graphs", "activations")) - highest
    fixed = {
        "optimizer state and master weights": need["optimizer"] + need["master"],
        "weights": need["parameters"] - pools[0],
        "gradients": need["gradients"] - pools[1],
        "transfers, tables, graphs and workspaces": rest,
    }
    units = [UnitName(unit, str(plan.layers[unit])) for unit in program.placement[pp]]
    samples = _merged(gathered, summed, activations, [unit.number for unit in units])
    return MemoryCurve(pp, fixed, sum(pools), units, _thinned(samples, sum(pools)))


def _in_use(
    times: list[tuple[Instruction, float, float]], begins: set[Op], end: Op, sizes: dict[int, int]
) -> list[Change]:
    """When units take and leave their places in a pool, and their bytes: from the start of the first of `begins` to the
    end of `end`."""
    found, held = list[Change](), set[int]()
    for part, start, ended in times:
        if part.stage not in sizes:
            continue
        if part.op in begins and part.stage not in held:
            held.add(part.stage)
            found.append((start, sizes[part.stage]))
        elif part.op is end and part.stage in held:
            held.discard(part.stage)
            found.append((ended, -sizes[part.stage]))
    return sorted(found, key=lambda change: change[0])


def _activations(
    plan: Plan, pp: int, times: list[tuple[Instruction, float, float]]
) -> tuple[list[tuple[float, dict[int, int], int]], int]:
    """(second, bytes by unit, bytes of a workspace) after each change, and the most bytes at once. Memory is taken in
    the order of the stream; a RELOAD takes it with the compute before it, though its copy overlaps with the next one.
    """
    by_unit, before = defaultdict[int, int](int), 0
    found, latest = [(0.0, dict[int, int](), 0)], 0.0
    held, peaks = bytes_over_stream(plan, plan.program, pp)
    order = run_order(plan.program, pp, is_local=plan.is_local)
    for row, after, peak in zip(order.tolist(), held.tolist(), peaks.tolist(), strict=True):
        part, start, end = times[row]
        if part.op not in ON_COMPUTE_LANE and part.op is not Op.RELOAD:
            continue
        start, latest = (latest, latest) if part.op is Op.RELOAD else (max(latest, start), max(latest, end))
        found.append((start, found[-1][1], peak - before))
        by_unit[part.stage] += after - before
        before = after
        found.append((latest, dict(by_unit), 0))
    return found, int(peaks.max(initial=0))


def _merged(
    gathered: list[Change], summed: list[Change], activations: list[tuple[float, dict[int, int], int]], units: list[int]
) -> Iterator[Sample]:
    """A sample at every change in any of the three."""
    held = [list(accumulate((size for _, size in changes), initial=0)) for changes in (gathered, summed)]
    seconds = [[change[0] for change in gathered], [change[0] for change in summed], [each[0] for each in activations]]
    for time in sorted({time for times in seconds for time in times}):
        at = [bisect_right(times, time) for times in seconds]
        _, by_unit, workspace = activations[max(0, at[2] - 1)]
        saved = tuple(by_unit.get(unit, 0) for unit in units)
        yield Sample(time, held[0][at[0]], held[1][at[1]], saved, workspace)


def _thinned(samples: Iterator[Sample], pools: int) -> list[Sample]:
    """At most MOST_SAMPLES: the highest of each of this many equal parts of the time, at the start of the part."""
    found = list(samples)
    if len(found) <= MOST_SAMPLES:
        return found
    width = (found[-1].second - found[0].second) / MOST_SAMPLES or 1.0
    parts = groupby(found, lambda sample: int((sample.second - found[0].second) / width))
    return [max(its, key=lambda sample: sample.activations) for _, its in parts]
