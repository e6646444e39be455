"""Runs on real ranks whose folder hangs for the driver, for seconds or for good."""

from __future__ import annotations

import pytest
from elastic_cases import PAIR, Start
from hanging_driver import COMMAND
from multinode import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = 60


@pytest.mark.parametrize("seconds", ["8", "inf"])
def test_all_steps_run_and_the_end_says_what_was_not_written(nodes: Cluster, start_run: Start, seconds: str) -> None:
    nodes.resize(2)
    words = "checkpoint.every=0", "checkpoint.every_seconds=0", "checkpoint.at_end=false", f"run.steps={STEPS}"
    run = start_run(*PAIR, *words, command=(*COMMAND, seconds))
    status, printed = run.end(), run.printed.read_text().replace("\n", " ")
    if seconds == "8":
        assert status == 0, run.describe()
        assert [row["step"] for row in run.rows()] == list(range(STEPS)), run.describe()
        assert run.events("end"), run.describe()
    else:
        assert status == 1, run.describe()
        assert f"step {STEPS - 1}" in printed and "has taken nothing for" in printed, run.describe()
        assert "lines of metrics.jsonl" in printed and len(run.rows()) < STEPS
