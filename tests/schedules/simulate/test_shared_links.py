"""Operations that use a link at the same time share it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.columns import Array
from pentad.schedules.ir.instruction import RECEIVES, SENDS, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs, instruction_seconds
from pentad.schedules.simulate.events import acyclic_events
from pentad.schedules.simulate.shared_links import LinkShares, Shares, shared_seconds
from pentad.schedules.simulate.simulate import event_times

compiled = cache(compile_program)
NONE = LinkShares({}, (0.0, 0.0))
PROGRAMS = [("gpipe", 2, 3), ("1f1b", 3, 4), ("zb-h1", 3, 4), ("zb-v", 2, 4), ("dualpipe", 2, 4)]


def rows_named(program: Program, seconds: Array) -> dict[tuple[int, str], float]:
    parts = [(rank, part) for rank, stream in enumerate(program.streams) for action in stream for part in action.parts]
    return {(rank, str(part.key)): float(took) for (rank, part), took in zip(parts, seconds, strict=True)}


def test_by_hand_a_transfer_and_a_forward_share_a_link() -> None:
    """From 1 s on, rank 0 sends microbatch 0 while it computes microbatch 1, half of which is messages on the same
    link: both run at 1 / (1 + 0.5 * 1) of their speed and end at 2.5 s. The same holds on rank 1, which then computes
    microbatch 0 while it receives microbatch 1."""
    program = compiled("gpipe", 2, 2)
    costs = Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), transfer=1.0)
    shares = LinkShares({Op.F: ((0.5,), (0.5,))}, (1.0,))
    events = acyclic_events(program)
    found = rows_named(program, shared_seconds(program, events, costs, shares))
    assert found[0, "0F0"] == 1.0
    assert found[0, "0F1"] == pytest.approx(1.5)
    assert found[0, "0SEND_F0"] == found[1, "1RECV_F0"] == pytest.approx(1.5)
    assert found[1, "1F0"] == found[1, "1RECV_F1"] == pytest.approx(1.5)
    assert found[1, "1F1"] == 1.0


def test_by_hand_the_gradients_of_replicas_are_reduced_beside_transfers() -> None:
    """The end of the last rank's backward starts both its reduction (4 s) and the transfer of its gradient (1 s). While
    they share the link, the transfer takes 2 s and the reduction does 1 s of its work: it takes 5 s in all."""
    program = compiled("gpipe", 2, 1, replicas=2)
    costs = Costs((1.0, 1.0), (1.0, 1.0), (0.0, 0.0), transfer=1.0, reduce=(4.0, 4.0))
    shares = LinkShares({Op.ALL_REDUCE: ((1.0,), (1.0,))}, (1.0,))
    found = rows_named(program, shared_seconds(program, acyclic_events(program), costs, shares))
    (reduction,) = (took for (rank, name), took in found.items() if rank == 1 and "ALL_REDUCE" in name)
    (transfer,) = (took for (rank, name), took in found.items() if rank == 1 and "SEND_B" in name)
    assert (transfer, reduction) == pytest.approx((2.0, 5.0))


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
def test_without_shares_nothing_takes_longer(name: str, ranks: int, microbatches: int) -> None:
    program = compiled(name, ranks, microbatches, replicas=2)
    costs = replace(Costs.uniform(program.stages, transfer=0.3), reduce=(0.7,) * program.stages)
    found = shared_seconds(program, acyclic_events(program), costs, NONE)
    assert found == pytest.approx(instruction_seconds(program, costs))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
def test_shared_seconds_are_those_of_small_steps_of_time(name: str, ranks: int, microbatches: int) -> None:
    program = compiled(name, ranks, microbatches, replicas=2)
    stages = program.stages
    each = tuple(1 + (stage % 3) / 8 for stage in range(stages))
    costs = replace(Costs(each, each, each, transfer=0.5), reduce=(1.5,) * stages)
    by_stage: dict[Op, tuple[Shares, ...]] = dict.fromkeys((Op.F, Op.B, Op.W, Op.BW), ((0.25, 0.0),) * stages)
    shares = LinkShares(by_stage | {Op.ALL_REDUCE: ((0.5, 0.9),) * stages}, (0.8, 0.1))
    events = acyclic_events(program)
    times = event_times(program, events, costs, shared_seconds(program, events, costs, shares))
    expected = stepped_ends(program, costs, shares, 0.002)
    assert times.ends == pytest.approx(expected, abs=0.05)
    assert times.ends.max() > event_times(program, events, costs).ends.max()  # they do meet


def stepped_ends(program: Program, costs: Costs, shares: LinkShares, step: float) -> Array:
    """The ends of events, found by advancing all running ones in equal time steps."""
    events = acyclic_events(program)
    parts = [(rank, part) for rank, stream in enumerate(program.streams) for action in stream for part in action.parts]
    seconds = instruction_seconds(program, costs)
    members: list[list[int]] = [[] for _ in events.action]
    for row, action in enumerate(program.columns.action.tolist()):
        members[events.event[action]].append(row)
    halves = program.columns.is_second
    left, uses = np.zeros(len(members)), list[dict[tuple[int, int, str], float]]()
    for event, rows in enumerate(members):
        lead = [row for row in rows if parts[row][0] == parts[rows[0]][0] and (row == rows[0] or halves[row])]
        left[event] = total = sum(seconds[row] for row in lead)
        used = dict[tuple[int, int, str], float]()
        for row in rows:
            rank, part = parts[row]
            transfer = part.op in SENDS or part.op in RECEIVES
            of = (
                shares.transfer
                if transfer
                else shares.by_stage[part.op][part.stage]
                if part.op in shares.by_stage
                else ()
            )
            ways = ("out",) if part.op in SENDS else ("in",) if part.op in RECEIVES else ("out", "in")
            weight = 1.0 if transfer or not total else seconds[row] / total
            for link, share in enumerate(of if total and part.peer != rank else ()):
                for way in ways:
                    used[rank, link, way] = used.get((rank, link, way), 0.0) + weight * share
        uses.append(used)
    before: list[list[int]] = [[] for _ in members]
    for source, target in zip(events.graph.source.tolist(), events.graph.target.tolist(), strict=True):
        before[target].append(source)
    ends, now = np.full(len(members), np.inf), 0.0
    while np.isinf(ends).any():
        while True:  # events that take no time end at once
            open_events = np.flatnonzero(np.isinf(ends)).tolist()
            running = [each for each in open_events if all(ends[source] <= now for source in before[each])]
            if not (ended := [each for each in running if left[each] <= 0]):
                break
            ends[ended] = now
        for event in running:
            slowest = 1.0
            for place, share in uses[event].items():
                others = sum(uses[other].get(place, 0.0) for other in running if other != event)
                slowest = max(slowest, 1 + share * others)
            left[event] -= step / slowest
        now += step
    return ends
