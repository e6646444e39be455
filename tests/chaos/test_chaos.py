"""The driver in virtual time, with faults from a seed. A failure names its seed: `pytest tests/chaos --seed N`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import pytest
from chaos_history import Simulation, play
from chaos_scenario import CELLS, FAULTS, MESHES, POINTS, SCHEDULES, Fault, Scenario, scenario

from pentad.orchestrator.recovery import recovery

DEFAULT, SLOW, AT_ONCE = 8, 10_000, 250


def play_all(scenarios: Iterable[Scenario], memory: Path, current: list[Simulation]) -> list[Simulation]:
    found = []
    for each in scenarios:
        try:
            found.append(play(each, memory, current))
        except Exception as error:
            told = "\n".join([str(each), *current[0].faults.happened, *current[0].log])
            pytest.fail(f"{told}\n{type(error).__name__}: {error}\nagain: pytest tests/chaos --seed {each.seed}")
    return found


def with_a(kind: str, number: int) -> Iterator[Scenario]:
    """The first scenarios with this kind of fault."""
    return islice((each for each in map(scenario, count()) if any(f.kind == kind for f in each.faults)), number)


def test_runs_keep_their_promises_through_faults(
    pytestconfig: pytest.Config, memory: Path, current: list[Simulation]
) -> None:
    given = pytestconfig.getoption("--seed", None)
    play_all(map(scenario, range(DEFAULT) if given is None else [given]), memory, current)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, SLOW, AT_ONCE))
def test_thousands_of_runs_keep_their_promises(first: int, memory: Path, current: list[Simulation]) -> None:
    played = play_all(map(scenario, range(first, first + AT_ONCE)), memory, current)
    assert sum(bool(each.faults.happened) for each in played) > 0.85 * AT_ONCE


@pytest.mark.parametrize("number", [3, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_slow_ranks_move_between_other_faults(
    number: int, memory: Path, current: list[Simulation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In longer runs, to give them the time."""
    monkeypatch.setattr(recovery, "CHECK_SECONDS", 0.0)
    played = play_all((replace(each, steps=30) for each in with_a("slow rank", number)), memory, current)
    assert sum(each.evictions for each in played) > 0.1 * number


@pytest.mark.parametrize("number", [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_spares_take_the_places_of_lost_ranks_between_other_faults(
    number: int, memory: Path, current: list[Simulation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults come later here, so that spares are ready."""
    monkeypatch.setattr(recovery, "CHECK_SECONDS", 0.0)
    played = play_all(map(spared, with_a("kill", number)), memory, current)
    assert sum(each.spares_used for each in played) > 0.3 * number


def spared(early: Scenario) -> Scenario:
    faults = tuple(replace(fault, step=fault.step + 12) for fault in early.faults)
    return replace(early, steps=30, overrides=(*early.overrides, "elastic.spares=2"), faults=faults)


def test_a_run_is_paused_for_every_fault_that_waits_for_that(memory: Path, current: list[Simulation]) -> None:
    faults = tuple(Fault("kill", "idle", step, 0) for step in (2, 8, 14))
    (played,) = play_all([replace(scenario(0), steps=30, faults=faults)], memory, current)
    assert len(played.faults.happened) == 3


def test_a_head_that_is_killed_twice_ends_one_driver(memory: Path, current: list[Simulation]) -> None:
    faults = tuple(Fault("head killed", "before STEP", 2, number) for number in (0, 0))
    play_all([replace(scenario(0), faults=faults)], memory, current)


def test_a_rank_finds_a_byte_that_flipped_and_all_go_back_to_the_checkpoint_before(
    memory: Path, current: list[Simulation]
) -> None:
    faults = Fault("driver killed", "before NORM", 5, 0), Fault("flipped byte", "connecting", 0, 1)
    overrides = ("checkpoint.every=2", "checkpoint.keep=2", "elastic.driver_lease=0")
    (played,) = play_all([replace(scenario(2), overrides=overrides, faults=faults)], memory, current)
    assert (played.damaged, played.refused) == (1, 1)


@pytest.mark.parametrize("number", [6, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_shards_with_replicas_keep_the_promises(number: int, memory: Path, current: list[Simulation]) -> None:
    """For example, that no step is lost whose parts are all on living ranks."""
    mesh, nodes = ("mesh.dp=4", "mesh.pp=2", "zero.stage=2", "zero.shards=2"), tuple(f"node{r // 2}" for r in range(8))
    scenarios = (replace(each, mesh=mesh, nodes=nodes) for each in with_a("kill", number))
    play_all(scenarios, memory, current)


def test_meshes_shrink_and_grow_through_memory_between_other_faults(memory: Path, current: list[Simulation]) -> None:
    """Some faults happen while the mesh changes."""
    played = play_all(map(scenario, (147, 337, 415, 1009)), memory, current)
    assert all(each.handed_over for each in played)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [8, 14, 26])
def test_a_seed_gives_the_same_history_again(seed: int, memory: Path, current: list[Simulation]) -> None:
    once, again = (play(scenario(each), memory, current) for each in (seed, seed))
    assert (once.faults.happened, once.log, once.world.now) == (again.faults.happened, again.log, again.world.now)


def test_every_fault_meets_every_point_schedule_and_mesh() -> None:
    assert (len(FAULTS), len(POINTS), len(SCHEDULES), len(MESHES)) == (18, 14, 6, 9)
    firsts = set()
    for seed in range(CELLS):
        found = scenario(seed)
        fault = found.faults[1 if found.faults[0].kind == "kill" and len(found.faults) > 1 else 0]
        firsts.add((fault.kind, fault.point, found.schedule, found.mesh))
    assert len(firsts) > 0.9 * CELLS  # else a kill, whose recovery the fault meets, comes first
