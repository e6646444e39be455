"""Proves, before anything runs, that a program is complete, ordered, matched and free of deadlock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest

import numpy as np

from pentad.schedules.draw.grid import order_grid
from pentad.schedules.ir.columns import CODE, Array, op_mask
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import SENDS, Key, Op
from pentad.schedules.ir.lookup import IS_REDUCTION
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.optimizer_pass import CompleteGrads, complete_weight_grads
from pentad.schedules.passes.post_validation import has_post_validation
from pentad.schedules.simulate.events import collectives, events_of
from pentad.schedules.verify.buffers import prove_buffers
from pentad.schedules.verify.check_data import prove_data, prove_slots, prove_waits, waits_for_compute
from pentad.schedules.verify.check_forward_only import prove_evaluation_end
from pentad.schedules.verify.check_order import error_at, prove_order, refuse
from pentad.schedules.verify.check_passes import (
    prove_gradient_buffers,
    prove_memory_passes,
    prove_microbatches_apart,
    prove_post_validation,
    reduces_every_microbatch,
)

_NO_ROWS = np.zeros(0, int)


def check(program: Program, *, replicas: int = 1, zero: int = 0) -> None:
    """Raises ScheduleError naming the culprit, with the instructions around it as a grid. `replicas` is the number of
    ranks that hold the same parameters, mirrors aside, and `zero` the stage of ZeRO. Proven in this order:

    Order: every stage has a rank; each instruction is unique, on a rank that holds its stage, with the peer or group of
    its op; every stage runs F and BW, or F, B and W, of every microbatch on one rank, and accumulates weight gradients
    in microbatch order; in a forward-only program every stage runs F of every microbatch.

    Data: waits name earlier instructions of the same stream; what is read was computed earlier on the same rank or is
    received, and nothing else is received; a slot is received into again only after its last reader.

    End of step: all shared gradients are reduced once, or once for every microbatch, after their last W and before
    NORM, and STEP runs after NORM. With ZeRO-2 and 3, no W adds to a buffer that another stage has, or to a sum that is
    being reduced; if every microbatch is reduced, no W adds to the sum of another one. A forward-only program has LOSS
    after its last F instead, and nothing that changes the training state.

    Optional passes: parameters are gathered, and activations recomputed or reloaded, before they are read.

    Communication: the k-th send of a communicator meets the k-th receive, of the same tensor; members of a group meet
    in the same order for all collectives; there is no cycle through lanes, waits, rendezvous and a host that waits for
    every compute action.

    Buffers: each is filled, read and freed once, in this order.
    """
    with _with_grid(program):
        prove_order(program)
        prove_waits(program)
        prove_data(program)
        prove_slots(program)
        if program.forward_only:
            prove_evaluation_end(program)
        else:
            _prove_end(program, replicas)
            if every := reduces_every_microbatch(program):
                prove_microbatches_apart(program)
            if every or zero > 1:
                prove_gradient_buffers(program)
        prove_memory_passes(program)
        _prove_transfers(program)
        prove_post_validation(program)
        _prove_collectives(program)
        _prove_no_cycle(program)
        prove_buffers(program)


def check_order(program: Program) -> None:
    """The part of `check` that a compute order must pass before transfers can be added."""
    with _with_grid(program):
        prove_order(program)


@contextmanager
def _with_grid(program: Program) -> Iterator[None]:
    """Adds the program's name and the grid to a ScheduleError."""
    try:
        yield
    except ScheduleError as error:
        grid = order_grid(program, (error.rank, error.index))
        raise ScheduleError(f"program {program.name} is refused: {error}\n{grid}", error.rank, error.index) from None


def _prove_end(program: Program, replicas: int) -> None:
    """Shared gradients are reduced, then comes NORM, then STEP.

    With post-validation STEP does not wait for NORM, but for the same gradients as NORM does.
    """
    columns, ranks = program.columns, np.arange(program.ranks)
    losses = columns.rows_of(op_mask({Op.LOSS}))
    refuse(program, losses, losses >= 0, lambda k: f"{columns.key(losses[k])} ends forward-only programs, not this one")
    norm, step = (program.lookup.rows(ranks, CODE[op], -1, np.full(len(ranks), -1)) for op in (Op.NORM, Op.STEP))
    last = program.lookup.last_compute
    waited = waits_for_compute(program, norm, last) | (last < columns.rank_offsets[:-1])
    post_validation = has_post_validation(program)
    for rank in range(program.ranks):
        if norm[rank] < 0 or step[rank] < 0:
            missing = "NORM" if norm[rank] < 0 else "STEP"
            raise ScheduleError(f"rank {rank} has no {missing}", rank, len(program.streams[rank]) - 1)
        chained = columns.groups[columns.group[norm[rank]]] == ""  # the NORM of a step with post-validation
        if not chained and columns.key(norm[rank]) not in columns.waits(step[rank]):
            raise error_at(program, step[rank], "STEP does not wait for NORM")
        if chained != post_validation:
            with_ = "without" if chained else "with"
            raise error_at(program, norm[rank], f"found {columns.key(norm[rank])} {with_} VALIDATE")
        if step[rank] < last[rank]:
            raise error_at(program, step[rank], f"STEP comes before {columns.key(last[rank])}")
        if not waited[rank]:
            raise error_at(program, norm[rank], f"NORM does not wait for {columns.key(last[rank])}")
    for rows in (norm, step) if post_validation else (norm,):
        _prove_reduced(program, replicas, rows)


def _prove_reduced(program: Program, replicas: int, readers: Array) -> None:
    """`readers[rank]` is the row that reads all gradients of a rank."""
    columns, lookup = program.columns, program.lookup
    reductions, every = columns.rows_of(IS_REDUCTION), reduces_every_microbatch(program)
    complete = complete_weight_grads(program, every_microbatch=every)
    ranks, stages, numbers, last = complete if every else _of_every_stage(program, complete)
    reduced, scattered = (lookup.rows(ranks, CODE[op], stages, numbers) for op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER))
    rows = np.where(reduced < 0, scattered, reduced)
    waited, is_read = waits_for_compute(program, rows, last) | (last < 0), np.zeros(columns.rows + 1, bool)
    for reader in readers.tolist():
        is_read[lookup.wait_targets[columns.wait_offsets[reader] : columns.wait_offsets[reader + 1]]] = True
    shared = np.array([replicas > 1 or len(program.holders(stage)) > 1 for stage in range(program.stages)])[stages]
    for k in np.flatnonzero(np.where(shared, (rows < 0) | ~waited | ~is_read[rows], rows >= 0)).tolist():
        rank, stage, number = int(ranks[k]), stages[k], numbers[k]
        if not shared[k]:
            text = f"{columns.key(rows[k])} reduces the gradients of stage {stage}, which no other rank holds"
            raise error_at(program, rows[k], text)
        if rows[k] < 0:
            of = f" of microbatch {number}" if every else ""
            text = f"rank {rank} never reduces the gradients of stage {stage}{of}"
            raise ScheduleError(text, rank, len(program.streams[rank]) - 1)
        if not waited[k]:
            raise error_at(program, rows[k], f"{columns.key(rows[k])} does not wait for {columns.key(last[k])}")
        reader = readers[rank]
        raise error_at(program, reader, f"{columns.key(reader).op} does not wait for {columns.key(rows[k])}")
    for row in np.setdiff1d(reductions, rows).tolist():
        raise error_at(program, row, f"{columns.key(row)} reduces what other instructions reduce")


def _of_every_stage(program: Program, complete: CompleteGrads) -> CompleteGrads:
    """An entry for every stage of every rank, with row -1 if it has no weight gradients."""
    held = [(rank, stage) for rank, stages in enumerate(program.placement) for stage in stages]
    ranks, stages = (np.array(part) for part in zip(*held, strict=True))
    row = np.full((program.ranks, program.stages), -1)
    row[complete.rank, complete.stage] = complete.row
    return CompleteGrads(ranks, stages, np.full(len(ranks), -1), row[ranks, stages])


def _prove_transfers(program: Program) -> None:
    columns = program.columns
    sends, receives = program.lookup.transfers
    sent, received = program.lookup.channels
    shift = np.where(columns.op[sends] == CODE[Op.SEND_F], 1, -1)
    expected = sent, columns.stage[sends] + shift, columns.microbatch[sends]
    if np.array_equal(expected, (received, columns.stage[receives], columns.microbatch[receives])):
        return
    for channel in dict.fromkeys(program.lookup.channel(np.sort(np.concatenate((sends, receives)))).tolist()):
        _prove_channel(program, channel, sends[sent == channel], receives[received == channel])


def _prove_channel(program: Program, channel: int, sends: Array, receives: Array) -> None:
    columns, ranks = program.columns, program.ranks
    forward, source, target = channel // ranks**2, channel // ranks % ranks, channel % ranks
    kind, shift = (Op.SEND_F, 1) if forward else (Op.SEND_B, -1)
    for k, (send, receive) in enumerate(zip_longest(sends, receives)):
        expected = None if send is None else Key(SENDS[kind], columns.stage[send] + shift, columns.microbatch[send])
        if receive is None or columns.key(receive) != expected:
            text = f"sends {_named(program, send)} and receives {_named(program, receive)}"
            where = f"transfer {k} ({kind} from rank {source} to rank {target})"
            raise ScheduleError(f"{where} {text}", *columns.position(send if receive is None else receive))


def _prove_collectives(program: Program) -> None:
    columns = program.columns
    for (_, ranks), rows in collectives(program).items():
        for rank in ranks[1:]:
            lead, others = rows.get(ranks[0], _NO_ROWS), rows.get(rank, _NO_ROWS)
            if len(lead) == len(others) and all(map(np.array_equal, columns.keys(lead), columns.keys(others))):
                continue
            for k, (first, row) in enumerate(zip_longest(lead.tolist(), others.tolist())):
                if first is None or row is None or columns.key(first) != columns.key(row):
                    text = f"{_named(program, first)} on rank {ranks[0]} and {_named(program, row)} on rank {rank}"
                    place = (rank, len(program.streams[rank]) - 1) if row is None else columns.position(row)
                    raise ScheduleError(f"collective {k} of ranks {ranks} is {text}", *place)


def _prove_no_cycle(program: Program) -> None:
    events = events_of(program, blocking_host=True)
    graph, columns = events.graph, program.columns
    if len(events.order) == graph.events:
        return
    stuck = np.ones(graph.events, bool)
    stuck[events.order] = False
    waits_for = np.zeros(graph.events, int)  # one of the stuck events that each stuck event waits for
    edges = np.flatnonzero(stuck[graph.source] & stuck[graph.target])
    waits_for[graph.target[edges]] = graph.source[edges]
    path = [int(np.argmax(stuck))]
    while waits_for[path[-1]] not in path:
        path.append(int(waits_for[path[-1]]))
    cycle = path[path.index(waits_for[path[-1]]) :]
    actions = [np.flatnonzero(events.event == event)[:2] for event in cycle]  # two members identify a collective
    rows = [columns.action_row[members].tolist() for members in actions]
    names = [" with ".join(f"{columns.key(row)} (rank {columns.rank[row]})" for row in members) for members in rows]
    raise ScheduleError("deadlock: " + " waits for ".join([*names, names[0]]), *columns.position(rows[0][0]))


def _named(program: Program, row: int | None) -> str:
    return "nothing" if row is None else str(program.columns.key(row))
