"""Proves, before anything runs, that a program is complete, ordered, matched and free of deadlock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from pentad.schedules.draw.grid import order_grid
from pentad.schedules.ir.columns import OPS, Array
from pentad.schedules.ir.instruction import SENDS, Key, Op
from pentad.schedules.ir.lookup import IS_COMPUTE, IS_REDUCTION
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.optimizer_pass import last_weights, numbers_of
from pentad.schedules.passes.validation import is_validated
from pentad.schedules.simulate.dependencies import ScheduleError
from pentad.schedules.simulate.events import collectives, events_of
from pentad.schedules.simulate.memory import kept
from pentad.schedules.verify.buffers import prove_buffers
from pentad.schedules.verify.check_data import behind, prove_data, prove_slots, prove_waits
from pentad.schedules.verify.check_order import prove_order
from pentad.schedules.verify.check_savings import prove_savings
from pentad.schedules.verify.check_validation import prove_validation


def check(program: Program, *, replicas: int = 1, buckets: tuple[int, ...] = ()) -> None:
    """Raises ScheduleError naming the culprit, with the grid of instructions around it. `replicas` is the mesh's dp,
    `buckets` are those of `Savings`.

    Proven, in this order: every stage is held; each instruction is on a rank that holds its stage, with the peer or
    group that its op has, and none is there twice; every microbatch has F, then B and W or BW, on one rank, weight
    gradients in microbatch order; waits name earlier instructions; every result is there, or received, before it is
    used, and nothing else is received; slots are refilled only after their last reader; all buckets of gradients are
    reduced after their last W and before NORM, NORM before STEP; the k-th send of a communicator meets the k-th receive
    of the same tensor; collectives of a group meet in the same order on every member; no cycle through lanes, waits,
    rendezvous and a host that waits at every compute unit; every buffer is filled, read and given back once, in that
    order.
    """
    with _drawn(program):
        prove_order(program)
        prove_waits(program)
        prove_data(program)
        prove_slots(program)
        _prove_ending(program, replicas, buckets)
        prove_savings(program)
        _prove_transfers(program)
        prove_validation(program)
        _prove_collectives(program)
        _prove_no_cycle(program)
        prove_buffers(program)


def check_order(program: Program) -> None:
    """The part of `check` that a compute order must pass before transfers can be placed."""
    with _drawn(program):
        prove_order(program)


@contextmanager
def _drawn(program: Program) -> Iterator[None]:
    """Puts the grid under what is said of a program."""
    try:
        yield
    except ScheduleError as error:
        grid = order_grid(program, mark=(error.rank, error.index))
        raise ScheduleError(f"program {program.name} is refused: {error}\n{grid}", error.rank, error.index) from None


def peak_activations(program: Program) -> list[float]:
    """Most activations each rank keeps at once, in microbatches of a whole rank; B frees half of one, W the rest."""
    changes = kept(program)
    return [float(np.max(np.cumsum(changes[a:b]), initial=0.0)) for a, b in pairwise(program.columns.first.tolist())]


def _prove_ending(program: Program, replicas: int, buckets: tuple[int, ...]) -> None:
    """Lowered programs only: every shared stage is reduced, NORM behind that and behind all compute, then STEP: behind
    NORM, or behind what NORM waits for where the step is validated later."""
    columns, ranks = program.columns, np.arange(program.ranks)
    norm, step = (program.lookup.rows(ranks, OPS.index(op), -1, np.full(len(ranks), -1)) for op in (Op.NORM, Op.STEP))
    compute = columns.rows_of(IS_COMPUTE)
    last = np.append(compute, -1)[np.searchsorted(compute, columns.first[1:]) - 1]
    waited, validated = behind(program, norm, last) | (last < columns.first[:-1]), is_validated(program)
    for rank in range(program.ranks):
        if norm[rank] < 0 or step[rank] < 0:
            missing = "NORM" if norm[rank] < 0 else "STEP"
            raise ScheduleError(f"rank {rank} has no {missing}", rank, len(program.streams[rank]) - 1)
        ahead = columns.groups[columns.group[norm[rank]]] == ""
        if not ahead and columns.key(norm[rank]) not in columns.waits(step[rank]):
            raise ScheduleError(f"rank {rank}: STEP does not wait for NORM", *columns.place(step[rank]))
        if ahead != validated:
            has = "no " * ahead + "VALIDATE"
            raise ScheduleError(f"rank {rank} has {columns.key(norm[rank])} with {has}", *columns.place(norm[rank]))
        if step[rank] < last[rank]:
            text = f"rank {rank}: STEP comes before {columns.key(last[rank])}"
            raise ScheduleError(text, *columns.place(step[rank]))
        if not waited[rank]:
            text = f"rank {rank}: NORM does not wait for {columns.key(last[rank])}"
            raise ScheduleError(text, *columns.place(norm[rank]))
    for ends in (norm, step) if validated else (norm,):
        _prove_reduced(program, replicas, buckets, [(row, set(columns.waits(row))) for row in ends])


def _prove_reduced(program: Program, replicas: int, buckets: tuple[int, ...], ends: list[tuple[int, set[Key]]]) -> None:
    """`ends[rank]` is the row that wants whole gradients, with the keys that it waits for."""
    columns, weights = program.columns, last_weights(program)
    held = [
        (rank, stage, number)
        for rank, stages in enumerate(program.placement)
        for stage in stages
        for number in numbers_of(buckets, stage)
    ]
    ranks, stages, numbers = (np.array(part) for part in zip(*held, strict=True))
    whole, scattered = (
        program.lookup.rows(ranks, OPS.index(op), stages, numbers) for op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER)
    )
    rows = np.where(whole < 0, scattered, whole)
    final = np.array([weights.get((rank, stage), -1) for rank, stage, _ in held])
    waited = behind(program, rows, final) | (final < 0)
    for k, (rank, stage, number) in enumerate(held):
        key = columns.key(rows[k]) if rows[k] >= 0 else Key(Op.ALL_REDUCE, stage, number)
        shared = replicas > 1 or len(program.holders(stage)) > 1
        if rows[k] >= 0 and not shared:
            text = f"rank {rank} reduces the gradients of stage {stage}, which no other rank holds"
            raise ScheduleError(text, *columns.place(rows[k]))
        if rows[k] < 0 and shared:
            bucket = f" (bucket {number})" if number >= 0 else ""
            text = f"rank {rank} never reduces the gradients of stage {stage}{bucket}"
            raise ScheduleError(text, rank, len(program.streams[rank]) - 1)
        if shared and not waited[k]:
            text = f"rank {rank}: {key} does not wait for {columns.key(final[k])}"
            raise ScheduleError(text, *columns.place(rows[k]))
        end, keys = ends[rank]
        if shared and key not in keys:
            raise ScheduleError(f"rank {rank}: {columns.key(end).op} does not wait for {key}", *columns.place(end))
    found = columns.rows_of(IS_REDUCTION)
    for row in np.setdiff1d(found, rows).tolist():
        text = f"rank {columns.rank[row]} runs {columns.key(row)}, which is no bucket of the stage or one reduced twice"
        raise ScheduleError(text, *columns.place(row))


def _prove_transfers(program: Program) -> None:
    columns = program.columns
    sends, receives = program.lookup.transfers
    sent, received = program.lookup.channels
    shift = np.where(columns.op[sends] == OPS.index(Op.SEND_F), 1, -1)
    if len(sends) == len(receives) and np.array_equal(sent, received):
        same = columns.stage[sends] + shift == columns.stage[receives]
        if (same & (columns.microbatch[sends] == columns.microbatch[receives])).all():
            return
    for one in dict.fromkeys(program.lookup.channel(np.sort(np.concatenate((sends, receives)))).tolist()):
        _prove_channel(program, one, sends[sent == one], receives[received == one])


def _prove_channel(program: Program, channel: int, sends: Array, receives: Array) -> None:
    columns, ranks = program.columns, program.ranks
    forward, source, target = channel // ranks**2, channel // ranks % ranks, channel % ranks
    kind, shift = (Op.SEND_F, 1) if forward else (Op.SEND_B, -1)
    sent, received = list(map(columns.key, sends)), list(map(columns.key, receives))
    for k in range(max(len(sent), len(received))):
        expected = Key(SENDS[kind], sent[k].stage + shift, sent[k].microbatch) if k < len(sent) else None
        if k < len(received) and received[k] == expected:
            continue
        row = receives[k] if k < len(receives) else sends[k]
        text = f"sends {_named(sent, k)} and receives {_named(received, k)}"
        where = f"transfer {k} ({kind} from rank {source} to rank {target})"
        raise ScheduleError(f"{where} {text}", *columns.place(row))


def _prove_collectives(program: Program) -> None:
    columns = program.columns
    for (_, ranks), sides in collectives(program).items():
        first, *others = ([columns.key(row) for row in sides.get(rank, [])] for rank in ranks)
        for rank, keys in zip(ranks[1:], others, strict=True):
            if keys != first:
                same = (k for k, (mine, other) in enumerate(zip(keys, first, strict=False)) if mine != other)
                k = next(same, min(len(keys), len(first)))
                end = (rank, len(program.streams[rank]) - 1)
                text = f"{_named(first, k)} on rank {ranks[0]} and {_named(keys, k)} on rank {rank}"
                place = columns.place(sides[rank][k]) if k < len(keys) else end
                raise ScheduleError(f"collective {k} of ranks {ranks} is {text}", *place)


def _prove_no_cycle(program: Program) -> None:
    events = events_of(program, issued=True)
    graph, columns = events.graph, program.columns
    if len(events.order) == graph.events:
        return
    stuck = np.ones(graph.events, bool)
    stuck[events.order] = False
    cause = np.zeros(graph.events, int)  # one of those that each waits for
    edges = np.flatnonzero(stuck[graph.earlier] & stuck[graph.later])
    cause[graph.later[edges]] = graph.earlier[edges]
    path = [int(np.argmax(stuck))]
    while cause[path[-1]] not in path:
        path.append(int(cause[path[-1]]))
    cycle = path[path.index(cause[path[-1]]) :]
    units = [np.flatnonzero(events.event == event)[:2] for event in cycle]  # a collective is known by two
    rows = [columns.unit_row[members].tolist() for members in units]
    names = [" with ".join(f"{columns.key(row)} (rank {columns.rank[row]})" for row in members) for members in rows]
    raise ScheduleError("deadlock: " + " waits for ".join([*names, names[0]]), *columns.place(rows[0][0]))


def _named(keys: list[Key], k: int) -> str:
    return str(keys[k]) if k < len(keys) else "nothing"
