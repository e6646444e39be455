"""Concurrent trials, with a row for each whatever happens; a sweep that was interrupted continues."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import TESTS

from pentad.orchestrator.cluster.ray_head import members_of, psutil
from pentad.orchestrator.config.config import load
from pentad.orchestrator.sweep import running
from pentad.orchestrator.sweep.free_devices import FreeDevices, find_free_devices
from pentad.orchestrator.sweep.grid import grid
from pentad.orchestrator.sweep.results import ARROW, CSV, SCHEMA, TrialRow, read_rows, write_rows
from pentad.orchestrator.sweep.running import RunningTrial, standing_text
from pentad.orchestrator.sweep.sweep import LOGS, PAGE, SweepProgress, run_trials, sweep
from pentad.orchestrator.sweep.trials import SweepRequest, Trial, trials_of
from pentad.schedules.ir.errors import PentadError

CONFIG = load(None, ["cluster.device=cpu"])


def trial(number: int, ranks: int = 1, *, pruned: bool = False) -> Trial:
    row = TrialRow(
        f"t{number}", "", "pentad train", "pruned", "no" if pruned else "", "cpu", "llama 1 M", 10**6, ranks=ranks
    )
    return Trial(row, None if pruned else CONFIG)


class StubTrials:
    """Starts trials that last this many polls; starting the trial `at` interrupts the sweep."""

    def __init__(self, polls: int = 1, at: str = "", outcome: str = "measured") -> None:
        self.polls, self.at, self.outcome = polls, at, outcome
        self.started, self.ended, self.live, self.most = list[str](), list[str](), dict[str, int](), 0

    def __call__(self, trial: Trial, free: FreeDevices, devices: tuple[str, ...]) -> StubTrial:
        if trial.name == self.at:
            raise KeyboardInterrupt
        self.started.append(trial.name)
        self.live[trial.name] = len(devices)
        self.most = max(self.most, sum(self.live.values()))
        return StubTrial(self, trial, devices)


class StubTrial:
    def __init__(self, stub: StubTrials, trial: Trial, devices: tuple[str, ...]) -> None:
        self.stub, self.trial, self.devices, self.left = stub, trial, devices, stub.polls

    def poll(self) -> TrialRow | None:
        self.left -= 1
        if self.left > 0:
            return None
        del self.stub.live[self.trial.name]
        pace = 1000.0 if self.stub.outcome == "measured" else None
        return self.trial.row._replace(outcome=self.stub.outcome, tokens_per_second=pace, step_seconds=0.1, cause="")  # type: ignore[arg-type]

    def end(self) -> None:
        self.stub.ended.append(self.trial.name)
        del self.stub.live[self.trial.name]


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pentad.orchestrator.sweep.sweep.POLL_SECONDS", 0.0)


def cpus(count: int) -> FreeDevices:
    return FreeDevices("cpu", list(map(str, range(count))), 2**16)


def swept(folder: Path, stub: StubTrials, count: int = 6, *, retry: bool = False) -> list[TrialRow]:
    trials = [*(trial(number) for number in range(count)), trial(count, pruned=True)]
    found = sweep(trials, cpus(2), folder, "Sweep", 60.0, lambda _: None, retry=retry, start=stub)
    assert found.ran == len(stub.started)
    return found.rows


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 6), st.integers(1, 3))
def test_each_trial_runs_once_and_never_are_more_devices_in_use_than_there_are(
    ranks: list[int], devices: int, polls: int
) -> None:
    stub, rows, seen = StubTrials(polls), list[TrialRow](), list[SweepProgress]()
    trials = [trial(number, count) for number, count in enumerate(ranks)]
    run_trials(trials, cpus(devices), stub, rows.append, seen.append)
    assert sorted(stub.started) == sorted(row.trial for row in rows) == sorted(each.name for each in trials)
    assert stub.most <= devices and not stub.live and not stub.ended
    assert not seen or seen[-1].done == len(ranks)


def test_gpus_of_this_machine_are_named_and_never_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    monkeypatch.setattr("pentad.orchestrator.sweep.free_devices.local_gpus", lambda: 3)
    free = find_free_devices(load(None, ["cluster.device=cuda"]).cluster)
    first, second = free.take(2), free.take(1)
    assert first is not None and second is not None and free.take(1) is None
    assert [free.variables(each)["CUDA_VISIBLE_DEVICES"] for each in (first, second)] == ["3,5", "7"]
    free.give_back(first)
    assert free.take(2) == first and free.most == 3


def test_an_interrupted_sweep_leaves_no_trial_and_runs_only_what_is_missing(tmp_path: Path) -> None:
    before = StubTrials(polls=2, at="t4")
    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path, before)
    assert not before.live
    done = {row.trial for row in read_rows(tmp_path) if row.outcome == "measured"}
    after = StubTrials()
    rows = swept(tmp_path, after)
    assert done and set(after.started) == {f"t{number}" for number in range(6)} - done
    assert [row.outcome for row in rows] == ["measured"] * 6 + ["pruned"]
    assert read_rows(tmp_path) == rows and (tmp_path / PAGE).stat().st_size > 1000
    assert swept(tmp_path, again := StubTrials()) == rows and not again.started


def test_failed_trials_run_again_only_with_retry_and_other_rows_are_kept(tmp_path: Path) -> None:
    swept(tmp_path, StubTrials(outcome="failed"), count=3)
    assert {row.outcome for row in swept(tmp_path, StubTrials(), count=3)} == {"failed", "pruned"}
    stub = StubTrials()
    assert [row.outcome for row in swept(tmp_path, stub, count=2, retry=True)] == ["measured", "measured", "pruned"]
    assert stub.started == ["t0", "t1"]
    assert {row.trial: row.outcome for row in read_rows(tmp_path)}["t2"] != "measured"


def test_the_tables_hold_the_rows(tmp_path: Path) -> None:
    rows = [
        TrialRow("a", "mesh.pp=2", 'pentad train "x, y"', "hang", "rank 1, it says", pp=2),
        TrialRow("b", "", "", mfu=0.5),
    ]
    write_rows(tmp_path, rows)
    assert read_rows(tmp_path) == rows
    table = pyarrow.csv.read_csv(tmp_path / CSV)
    assert table.column_names == SCHEMA.names and table["cause"].to_pylist() == ["rank 1, it says", ""]
    assert table["mfu"].to_pylist() == [None, 0.5]


def damaged(path: Path) -> Iterator[bytes]:
    yield path.read_bytes()[:-9]
    yield b""
    for changed in ({"outcome": "fine"}, {"trial": None}):
        table = pa.Table.from_pylist([TrialRow("a", "", "")._asdict() | changed], schema=SCHEMA)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, SCHEMA) as writer:
            writer.write_table(table)
        yield sink.getvalue().to_pybytes()


def test_a_table_that_no_sweep_wrote_is_refused_and_left_alone(tmp_path: Path) -> None:
    write_rows(tmp_path, [TrialRow("a", "", "")])
    for data in list(damaged(tmp_path / ARROW)):
        (tmp_path / ARROW).write_bytes(data)
        with pytest.raises(PentadError, match=r"results\.arrow is no table of trials"):
            swept(tmp_path, StubTrials())
        assert (tmp_path / ARROW).read_bytes() == data


def test_one_sweep_at_a_time_has_a_folder(tmp_path: Path) -> None:
    with pytest.raises(PentadError, match=r"^--out is '/proc/none', which cannot be written"):
        swept(Path("/proc/none"), StubTrials())

    class Second(StubTrials):
        def __call__(self, *on):
            with pytest.raises(PentadError, match=r"--out is .* is running a sweep: expected another folder"):
                swept(tmp_path, StubTrials())
            return super().__call__(*on)

    swept(tmp_path, Second(), count=1)


@pytest.mark.timeout(60)
def test_a_trial_that_is_stuck_ends_at_its_deadline_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "PROCESS", "stuck_trial")
    monkeypatch.setattr(running, "HEAD_SECONDS", 0.1)
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "support"))
    trials = trials_of(SweepRequest(None, grid(["cluster.device=cpu"]), 4), cpus(1), tmp_path / "runs")
    (tmp_path / LOGS).mkdir()
    stuck = RunningTrial(trials[0], cpus(1), ("0",), 30.0, tmp_path / LOGS)
    child = tmp_path / LOGS / f"{trials[0].name}.child"
    while not child.exists() or not child.read_text():
        assert stuck.poll() is None
    (leader,) = members_of({int(child.read_text())})
    stuck.deadline = 0.0
    row = stuck.poll()
    assert row is not None and row.outcome == "deadline"
    assert row.cause == "after 0 us: it was still starting"
    assert not members_of({leader.pid, stuck.process.pid})


def is_alive(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


ORPHAN = """
import os, subprocess, sys
child = "import os, time, sys; from pentad.orchestrator.sweep.trial_process import end_with; end_with(int(sys.argv[1]))"
child += "; print(os.getpid(), flush=True); time.sleep(600)"
made = subprocess.Popen([sys.executable, "-P", "-c", child, str(os.getpid())], stdout=subprocess.PIPE, text=True)
print(made.stdout.readline(), flush=True)
os._exit(0)
"""


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform != "linux", reason="wants: a kernel that tells children of their parent's death")
def test_a_trial_ends_when_the_sweep_is_killed() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", ORPHAN], capture_output=True, text=True, check=True)
    until = time.monotonic() + 20
    while (is_left := is_alive(int(done.stdout))) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_left
    orphan = [sys.executable, "-P", "-m", running.PROCESS, "none.yaml", "1"]
    assert subprocess.run(orphan, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize(("fault", "outcome"), [("memory", "memory"), ("hang", "hang"), ("killed", "failed")])
def test_a_trial_fails_of_the_fault_that_its_process_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, outcome: str
) -> None:
    answer = {"error": "rank 1 failed (more in failure.txt)", "fault": fault}
    (tmp_path / "failed_trial.py").write_text(f"print({json.dumps(answer)!r}); raise SystemExit(1)")
    (tmp_path / LOGS).mkdir()
    monkeypatch.setattr(running, "PROCESS", "failed_trial")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failed, row = RunningTrial(trial(0), cpus(1), ("0",), 30.0, tmp_path / LOGS), None
    while row is None:
        row = failed.poll()
    assert (row.outcome, row.cause) == (outcome, "rank 1 failed")


def test_the_ranks_that_are_silent_for_longest_are_named() -> None:
    rank = {"state": "running", "step": 3, "instruction": "1F0"}
    ranks = [{**rank, "rank": number, "heartbeat_age_seconds": float(number)} for number in range(6)]
    assert standing_text(ranks).startswith("rank 5 stood at 1F0 of step 3 (running), rank 4")
    assert "rank 1 " not in standing_text(ranks) and standing_text([]) == "no rank had started"
