"""The head of the Ray cluster is lost: with its tables on disk or in Redis the run survives, else it ends in time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import pytest
from elastic_cases import PAIR, SMALL, STEPS, Outcome, outcome
from multinode import Cluster, Run, multinode_cluster

from pentad.orchestrator.control.control_client import connect

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
OVERRIDES = (*SMALL, *PAIR, "schedule.name=1f1b", "checkpoint.every=10", "checkpoint.every_seconds=0")
AWAY_SECONDS = 8.0
TABLES = ("disk", "redis")


def expected_on(nodes: Cluster, folder: Path) -> Outcome:
    run = Run(nodes, folder / "reference", *OVERRIDES)
    assert run.end() == 0, run.describe()
    return outcome(run, STEPS)


def same(run: Run, expected: Outcome) -> bool:
    rows, state = outcome(run, STEPS)
    return rows == expected[0] and all(state[name].equal(value) for name, value in expected[1].items())


@pytest.mark.parametrize("tables", TABLES)
def test_a_run_survives_a_head_that_comes_back(tmp_path: Path, tables: Literal["disk", "redis"]) -> None:
    with multinode_cluster(tables=tables) as nodes:
        nodes.resize(1, 1)
        expected = expected_on(nodes, tmp_path)
        run = Run(nodes, tmp_path / "run", *OVERRIDES)
        try:
            run.wait_for_step(8)
            with connect(run.folder) as client:
                client.request("pause")  # else it might end meanwhile
                nodes.stop_head()
                time.sleep(AWAY_SECONDS)
                nodes.start_head()
                client.request("resume", 60)
            assert run.end() == 0, run.describe()
            assert same(run, expected) and not run.events("lost")
            run.assert_gone()
        finally:
            run.stop()


@pytest.mark.parametrize("tables", TABLES)
def test_a_driver_that_dies_while_the_head_is_away_is_replaced_when_that_is_back(
    tmp_path: Path, tables: Literal["disk", "redis"]
) -> None:
    with multinode_cluster(tables=tables) as nodes:
        nodes.resize(1, 1)
        expected = expected_on(nodes, tmp_path)
        run = Run(nodes, tmp_path / "run", *OVERRIDES)
        try:
            run.wait_for_step(8)
            nodes.stop_head()
            run.stop()
            time.sleep(AWAY_SECONDS)
            nodes.start_head()
            again = Run(nodes, tmp_path / "run", *OVERRIDES)
            assert again.end() == 0, again.describe()
            assert [row["how"] for row in again.events("recovered")] == ["adopt"], again.describe()
            assert same(again, expected)
            again.assert_gone()
        finally:
            run.stop()


def test_without_its_head_a_run_ends_within_50_seconds_and_resumes_on_another_cluster(tmp_path: Path) -> None:
    with multinode_cluster() as nodes:
        nodes.resize(1, 1)
        run = Run(nodes, tmp_path / "run", *OVERRIDES, "run.steps=100000")
        try:
            run.wait_for_checkpoint(10)
            nodes.stop_head()
            lost = time.monotonic()
            assert run.end() == 1, run.describe()
            assert time.monotonic() < lost + 50
            text = " ".join(run.printed.read_text().split())
            assert "Traceback" not in text
            assert text.endswith("the same command resumes from the newest checkpoint"), run.describe()
            assert run.events()[-1]["event"] == "failure"
            while nodes.ranks():  # they end with Ray's processes, which wait a minute for the head
                assert time.monotonic() < lost + 90, nodes.ranks()
                time.sleep(0.5)
        finally:
            run.stop()
    before = run.rows()
    with multinode_cluster() as nodes:
        nodes.resize(1, 1)
        steps = len(before) + 10
        again = Run(nodes, tmp_path / "run", *OVERRIDES, f"run.steps={steps}")
        assert again.end() == 0, again.describe()
        assert "resuming from step" in again.printed.read_text()
        assert outcome(again, steps)[0][:10] == [(row["loss"], row["grad_norm"]) for row in before[:10]]
        again.assert_gone()
