"""Sweeps of real trials, with faults: on this machine, and on a Ray cluster of several nodes."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from footprint import Footprint
from multinode import multinode_cluster

from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.sweep.free_devices import FreeDevices, find_free_devices
from pentad.orchestrator.sweep.grid import grid
from pentad.orchestrator.sweep.results import TrialRow, read_rows
from pentad.orchestrator.sweep.running import RunningTrial
from pentad.orchestrator.sweep.sweep import LOGS, PAGE, SweepProgress, sweep
from pentad.orchestrator.sweep.trials import SweepRequest, Trial, first_valid, trials_of

pytestmark = pytest.mark.slow
TINY = (
    *("model.layers=4", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.ffn=128", "mesh.pp=2"),
    *("batch.sequence_length=32", "cluster.device=cpu", "elastic.hang_seconds=5"),
    "cluster.start_timeout_seconds=200",  # on a busy machine
)


class Fault(RunningTrial):
    """After the first step, sends a signal to rank 1, or to the driver, whose deadline then passes soon."""

    number: int = 0
    of_driver = False

    def poll(self) -> TrialRow | None:
        if self.number and read_lines(self.folder / "metrics.jsonl"):
            (place,) = [row for row in read_lines(self.folder / "journal.jsonl") if row["event"] == "place"]
            os.kill(self.process.pid if self.of_driver else place["ranks"][1]["pid"], self.number)
            self.number = 0
            if self.of_driver:
                self.deadline = time.monotonic() - self.began + 1.0
        return super().poll()


@pytest.mark.timeout(1200)
def test_a_sweep_of_eight_trials_with_a_hang_and_a_crash_ends_by_itself_with_eight_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*TINY, "schedule.name=1f1b,zb-h1", "schedule.microbatches=2,4", "memory.recompute=none,full")
    trials = trials_of(SweepRequest(None, grid(words), 12), FreeDevices("cpu", list("012345"), 6), tmp_path / "runs")
    faults = {trials[1].name: signal.SIGSTOP, trials[4].name: signal.SIGKILL}
    found, seen = Footprint(), list[SweepProgress]()
    monkeypatch.setenv("FOOTPRINT", found.mark)

    def start(trial: Trial, free: FreeDevices, devices: tuple[str, ...]) -> Fault:
        made = Fault(trial, free, devices, 400.0, tmp_path / LOGS)
        made.number = faults.get(made.trial.name, 0)
        return made

    def report(progress: SweepProgress) -> None:
        seen.append(progress)
        with suppress(AssertionError):  # no trial has written a file yet
            found.record()

    rows = sweep(trials, FreeDevices("cpu", list("012345"), 6), tmp_path, "Sweep", 400.0, report, start=start).rows
    assert found.files
    found.assert_gone()
    assert len(rows) == len(read_rows(tmp_path)) == 8
    assert max(progress.running for progress in seen) == 3
    by_name = {row.trial: row for row in rows}
    hung, crashed = (by_name[name] for name in faults)
    assert hung.outcome == "hang" and "rank 1" in hung.cause, hung
    assert crashed.outcome == "failed" and "rank 1" in crashed.cause and "killed" in crashed.cause, crashed
    others = [row for row in rows if row not in (hung, crashed)]
    assert all(row.outcome == "measured" and row.step_seconds and row.predicted_seconds for row in others), others
    assert not list(tmp_path.glob("runs/*/checkpoints/step-*"))
    assert json.loads((tmp_path / PAGE).read_text().partition('id="data">')[2].partition("</script>")[0])["trials"]


@pytest.mark.timeout(600)
def test_trials_on_a_cluster_run_beside_each_other_and_give_back_what_they_had(tmp_path: Path) -> None:
    with multinode_cluster() as nodes:
        nodes.resize(2, 2)
        words = (*TINY, f"cluster.address={nodes.address}", "schedule.name=1f1b,zb-h1,gpipe")
        points = grid(words)
        free = find_free_devices(first_valid(None, points).cluster)
        assert (free.device, free.most) == ("cpu", 4)
        trials, seen = trials_of(SweepRequest(None, points, 12), free, tmp_path / "runs"), list[SweepProgress]()

        def start(trial: Trial, free: FreeDevices, devices: tuple[str, ...]) -> Fault:
            made = Fault(trial, free, devices, 300.0, tmp_path / LOGS)
            made.of_driver = made.trial is trials[1]
            made.number = 0 if made.trial is trials[2] else signal.SIGSTOP
            return made

        rows = sweep(trials, free, tmp_path, "Sweep", 300.0, seen.append, start=start).rows
        assert [row.outcome for row in rows] == ["hang", "deadline", "measured"], rows
        assert "rank 1" in rows[0].cause and "its driver did not answer" in rows[1].cause
        assert max(progress.running for progress in seen) == 2
        until = time.monotonic() + 30
        while (nodes.ranks() or nodes.free_cpus() < 4) and time.monotonic() < until:
            time.sleep(0.2)
        assert not nodes.ranks() and nodes.free_cpus() == 4
