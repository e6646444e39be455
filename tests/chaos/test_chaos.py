"""The driver in virtual time, through faults from a seed. A failure names its seed: `pytest tests/chaos --seed N`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import pytest
from chaos_history import Simulation, play
from chaos_scenario import CELLS, FAULTS, MESHES, POINTS, SCHEDULES, scenario

from pentad.orchestrator.recovery import recovery

DEFAULT, SLOW, AT_ONCE = 30, 10_000, 250


def play_all(seeds: Iterable[int], memory: Path, current: list[Simulation], steps: int = 8) -> list[Simulation]:
    found = []
    for seed in seeds:
        try:
            found.append(play(replace(scenario(seed), steps=steps), memory, current))
        except Exception as error:
            told = "\n".join([str(scenario(seed)), *current[0].faults.happened, *current[0].log])
            pytest.fail(f"{told}\n{type(error).__name__}: {error}\nagain: pytest tests/chaos --seed {seed}")
    return found


def test_runs_keep_their_promises_through_faults(
    pytestconfig: pytest.Config, memory: Path, current: list[Simulation]
) -> None:
    given = pytestconfig.getoption("--seed", None)
    play_all(range(DEFAULT) if given is None else range(given, given + 1), memory, current)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, SLOW, AT_ONCE))
def test_thousands_of_runs_keep_their_promises(first: int, memory: Path, current: list[Simulation]) -> None:
    played = play_all(range(first, first + AT_ONCE), memory, current)
    assert sum(bool(each.faults.happened) for each in played) > 0.9 * AT_ONCE


@pytest.mark.parametrize("number", [3, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_slow_ranks_move_between_other_faults(
    number: int, memory: Path, current: list[Simulation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In runs that are long enough for that."""
    monkeypatch.setattr(recovery, "CHECK_SECONDS", 0.0)
    slow = (seed for seed in count() if any(fault.kind == "slow rank" for fault in scenario(seed).faults))
    played = play_all(islice(slow, number), memory, current, steps=30)
    assert sum(each.evictions for each in played) > 0.1 * number


def test_a_seed_gives_the_same_history_again(memory: Path, current: list[Simulation]) -> None:
    once, again = (play(scenario(seed), memory, current) for seed in (5, 5))
    assert (once.faults.happened, once.log, once.world.now) == (again.faults.happened, again.log, again.world.now)


def test_every_fault_meets_every_point_schedule_and_mesh() -> None:
    assert (len(FAULTS), len(POINTS), len(SCHEDULES), len(MESHES)) == (18, 14, 6, 9)
    firsts = set()
    for seed in range(CELLS):
        found = scenario(seed)
        fault = found.faults[1 if found.faults[0].kind == "kill" and len(found.faults) > 1 else 0]
        firsts.add((fault.kind, fault.point, found.schedule, found.mesh))
    assert len(firsts) > 0.9 * CELLS  # else the first one is a kill, for the second to meet the recovery
