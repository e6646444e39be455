"""When a run searches for flipped bits, and what it does about them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from listed_calls import Ranks, Run, loop_runner

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.runfolder import JOURNAL
from pentad.orchestrator.records.json_lines import read_lines
from pentad.schedules.ir.errors import PentadError


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return loop_runner(tmp_path)


def steps_of(ranks: Ranks, kind: str) -> list[int]:
    return [call[1] for call in ranks.log if call[0] == kind]


def test_a_run_searches_every_so_many_steps_and_before_each_checkpoint(run: Run) -> None:
    ranks, loop = run("run.steps=23", "elastic.check_every=5", "checkpoint.every=4", seconds=0.02)
    assert steps_of(ranks, "check") == [4, 5, 8, 10, 12, 15, 16, 20, 23]
    assert steps_of(ranks, "save") == steps_of(ranks, "commit") == [4, 8, 12, 16, 20, 23]
    assert all(ranks.log.index(("check", step, False)) < ranks.log.index(("save", step)) for step in (4, 20, 23))
    assert (loop.done, loop.bus.view.verdict) == (23, "")


def test_a_run_does_not_search_by_default(run: Run) -> None:
    ranks, _ = run("run.steps=23", "checkpoint.every=4")
    assert not steps_of(ranks, "check")


def broken(ranks: Ranks) -> None:
    ranks.states[8, 1] = 1


def failure(run: Run, folder: Path, *overrides: str) -> tuple[Any, dict[str, Any], Ranks]:
    """(the error, the event, the ranks) of a run whose ranks differ after 8 steps."""
    kept: list[Ranks] = []

    def prepare(ranks: Ranks) -> None:
        broken(ranks)
        kept.append(ranks)

    with pytest.raises(PentadError) as caught:
        run("run.steps=23", "elastic.check_every=4", "checkpoint.every=8", *overrides, prepare=prepare)
    (journal,) = folder.glob(f"*/{JOURNAL}")
    (event,) = [row for row in read_lines(journal) if row["event"] == "flipped bits"]
    return caught.value, event, kept[0]


def test_a_run_whose_ranks_differ_stops_and_commits_no_checkpoint_of_that(run: Run, tmp_path: Path) -> None:
    error, event, ranks = failure(run, tmp_path)
    assert not isinstance(error, WorkerError)
    assert re.match(r"after step 8, the state of rank 1 differs from that of most of its replicas in w \(", str(error))
    assert "elastic.check_policy = stop ends the run" in str(error)
    assert {key: event[key] for key in ("step", "verdict", "ranks", "certain", "what", "policy", "passed")} == {
        **{"step": 8, "verdict": "data", "ranks": [1], "certain": True, "what": "w", "policy": "stop"},
        "passed": 4,
    }
    assert ranks.calls is not None and ranks.calls.bus.view.verdict.startswith("data: after step 8")
    assert steps_of(ranks, "save") in ([], [8]) and not steps_of(ranks, "commit")


def test_a_run_that_evicts_gives_up_the_rank_that_is_wrong(run: Run, tmp_path: Path) -> None:
    error, event, ranks = failure(run, tmp_path, "elastic.check_policy=evict")
    assert isinstance(error, WorkerError)
    assert (error.lost, error.fault, error.detector) == ((1,), "corrupt", "check")
    assert event["policy"] == "evict" and not steps_of(ranks, "commit")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("precision.deterministic=false", "precision.deterministic = false, whose results differ from run to run"),
        ("mesh.pp=1", "a single rank, which has no other one to agree with"),
    ],
)
def test_bits_are_compared_only_where_they_should_be_equal(override: str, reason: str) -> None:
    with pytest.raises(PentadError, match=f"elastic.check_every is 5: expected 0 with {reason}"):
        load(None, ["mesh.pp=2", "elastic.check_every=5", override])
