"""Profiled steps in a run's folder: complete or absent, and on the clock of their timeline."""

from __future__ import annotations

from pathlib import Path

import pytest
from profiles import events_of, profile_of_spans
from trace_cases import simulated

from pentad.orchestrator.records.profiles import (
    FACTS,
    drop_profiles,
    folder_of,
    load_profile,
    profiled_steps,
    save_profile,
)
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.step_profile import RankProfile

SPANS = simulated("1f1b").spans


@pytest.mark.parametrize("shift", [0.0, 1234.5])
def test_a_profile_is_read_on_the_clock_of_its_timeline(tmp_path: Path, shift: float) -> None:
    save_profile(tmp_path, profile_of_spans(3, SPANS, shift=shift))
    found = load_profile(tmp_path, 3)
    assert (found.step, found.timeline.spans, found.names[2]) == (3, SPANS, "rank 2 (pp2)")
    for rank, events in found.events.items():
        expected = events_of([span for span in SPANS if span.rank == rank], kernels=True)
        assert len(events) == len(expected) > 0
        for event, other in zip(events, expected, strict=True):
            assert abs(event.start - other.start) <= 1 and event == other._replace(start=event.start)


def test_a_step_that_runs_again_replaces_its_profile(tmp_path: Path) -> None:
    save_profile(tmp_path, profile_of_spans(3, SPANS))
    fewer = [span for span in SPANS if span.rank < 2]
    save_profile(tmp_path, profile_of_spans(3, fewer, kernels=False))
    found = load_profile(tmp_path, 3)
    assert [*found.events] == [0, 1] and found.timeline.spans == tuple(fewer)
    assert {path.name for path in folder_of(tmp_path, 3).iterdir()} == {
        *("rank-0.arrow", "rank-1.arrow", "timeline.arrow", "profile.json")
    }


def test_only_complete_profiles_count_and_later_ones_are_dropped(tmp_path: Path) -> None:
    assert profiled_steps(tmp_path) == []
    for step in (10, 2, 9):
        save_profile(tmp_path, profile_of_spans(step, SPANS))
    (folder_of(tmp_path, 2) / FACTS).unlink()
    assert profiled_steps(tmp_path) == [9, 10]
    drop_profiles(tmp_path, 10)
    assert profiled_steps(tmp_path) == [9] and not folder_of(tmp_path, 10).exists()


def test_a_rank_without_events_says_why(tmp_path: Path) -> None:
    profile = profile_of_spans(3, SPANS)
    profile.ranks[1] = RankProfile(problem="CUPTI is in use")
    profile.ranks[2] = profile.ranks[2]._replace(left_out=5)
    assert profile.problems == {"CUPTI is in use": [1]}
    save_profile(tmp_path, profile)
    found = load_profile(tmp_path, 3)
    assert (found.events[1], found.problems, found.left_out) == ((), {1: "CUPTI is in use"}, {2: 5})


@pytest.mark.parametrize("name", ["profile.json", "rank-1.arrow", "timeline.arrow"])
def test_a_damaged_profile_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    save_profile(tmp_path, profile_of_spans(3, SPANS))
    path = folder_of(tmp_path, 3) / name
    path.write_bytes(b'{"step": 3, "ranks": [{"rank": "x"}]}')
    with pytest.raises(PentadError, match=f"{name} is not a readable"):
        load_profile(tmp_path, 3)
