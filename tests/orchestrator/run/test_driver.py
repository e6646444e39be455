"""Complete runs: what they write, how they resume, how they end. Ranks run without torch, on real Ray."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from select import select
from typing import Any

import pytest
from fake_runner import loss_of
from footprint import Footprint
from paths import SUPPORT
from rich.console import Console

from pentad.orchestrator.api.comparison import compare
from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.run.interrupts import OnStep
from pentad.orchestrator.run.train import FILES
from pentad.orchestrator.run.train import train as run_training
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.timeline import Timeline
from pentad.workers.checkpoint.checkpoint import newest

Train = Callable[..., tuple[dict[str, Any], str]]
FAKE = "fake_runner:FakeRunner"
ONE = ["mesh.pp=1", "schedule.name=1f1b"]  # one rank, where a second would show nothing more
TWO = ["mesh.pp=2", "schedule.name=zb-h2"]
SMALL = [
    *ONE,
    *("model.layers=4", "schedule.microbatches=4", "batch.global_batch_size=8"),
    *("cluster.device=cpu", "cluster.dashboard=false", "elastic.max_failures=0"),
]


@pytest.fixture
def train(cluster: clusters.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Train:
    """Trains on the module's cluster in the test's folder; returns the summary and the output."""

    def do(*overrides: str, behaviour: str = "fake:", on_step: OnStep | None = None) -> tuple[dict[str, Any], str]:
        config = config_of(tmp_path, behaviour, *overrides)
        display = Display(Console(width=200), config.run.name, config.run.steps)
        result = run_training(config, display=display, runner=FAKE, on_step=on_step)
        return result, capsys.readouterr().out

    return do


def config_of(folder: Path, behaviour: str, *overrides: str) -> RunConfig:
    return load(None, [f"run.folder={folder}", f'data.path="{behaviour}"', *SMALL, *overrides])


def events(folder: Path) -> list[tuple]:
    return [(row["event"], row.get("step")) for row in read_lines(folder / "quickstart" / "journal.jsonl")]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "quickstart" / "metrics.jsonl")


def steps_saved(folder: Path) -> int:
    found = newest(folder / "checkpoints").checkpoint
    return found.step if found else 0


@pytest.mark.slow
def test_a_run_writes_all_its_files(train: Train, tmp_path: Path) -> None:
    result, printed = train(*TWO, "run.steps=5", "checkpoint.every=2", "metrics.timeline_steps=3")
    folder = tmp_path / "quickstart"
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    losses = [sum(loss_of(step, number) for number in range(4)) / 1024 for step in range(5)]
    assert [row["loss"] for row in rows] == pytest.approx(losses)
    assert [event for event in events(tmp_path) if event[0] != "evaluation"] == [
        ("start", 0), ("place", None), ("checkpoint", 2), ("checkpoint", 4), ("checkpoint", 5), ("end", 5),
    ]  # fmt: skip
    assert [row["step"] for row in read_lines(folder / "eval.jsonl")] == [5]
    assert_evaluation_is_drawn(folder)
    assert result["state"] == "finished"
    assert (result["run"], result["folder"], result["steps"]) == ("quickstart", str(folder), 5)
    assert (result["loss"], result["first_loss"]) == (rows[-1]["loss"], rows[0]["loss"])
    assert result["tokens_per_second"] > 0
    assert 0 < result["bubble_measured"] < 1
    assert set(result["files"]) == set(FILES)
    assert Timeline.load(folder / "timeline.arrow").steps == (2, 3, 4)
    assert Program.load(folder / "program.arrow").name == "zb-h2"
    assert steps_saved(folder) == 5
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000004", "step-00000005"]
    assert "step 4" in printed
    json.dumps(result)


@pytest.mark.slow
def test_steps_run_while_a_checkpoint_is_written(train: Train, tmp_path: Path) -> None:
    """Writing takes a second: the next checkpoint by steps waits for the first one, and the end for both."""
    behaviour = "fake:seconds=0.02,saving=1"
    train("run.steps=30", "checkpoint.every=10", "checkpoint.keep=9", "eval.every=0", behaviour=behaviour)
    journal = read_lines(tmp_path / "quickstart" / "journal.jsonl")
    saved = {row["step"]: row for row in journal if row["event"] == "checkpoint"}
    assert list(saved) == [10, 20, 30] and saved[10]["waited_seconds"] == 0 < saved[20]["waited_seconds"] < 1.5
    times = [row["time"] for row in metrics(tmp_path)]
    assert times[9] < times[18] < saved[10]["time"] < saved[20]["time"] < saved[30]["time"]


def assert_evaluation_is_drawn(folder: Path) -> None:
    """The measured evaluation is drawn beside a simulation of its own program at its own costs."""
    found = compare(folder, evaluation=True)
    assert found.step == 5 and found.run.program.forward_only and "evaluation after 5 steps" in repr(found)
    names = {(span.rank, span.name) for span in found.measured.spans}
    assert names == {(span.rank, span.name) for span in found.simulated.spans}
    assert {(0, "0F0"), (1, "LOSS")} <= names
    with pytest.raises(PentadError, match=r"^--step is 4: expected an evaluation after 5$"):
        compare(folder, 4, evaluation=True)


@pytest.mark.slow
def test_a_run_resumes_from_its_newest_checkpoint_without_duplicate_metrics(train: Train, tmp_path: Path) -> None:
    train("run.steps=4", "checkpoint.every=2", "checkpoint.keep=9")
    with (tmp_path / "quickstart" / "metrics.jsonl").open("a") as file:  # as left by a crash after the checkpoint
        file.write(json.dumps({**metrics(tmp_path)[-1], "step": 4}) + "\n")
    result, printed = train("run.steps=7")
    assert "resuming from step 4" in printed
    assert [(row["step"], row["generation"]) for row in metrics(tmp_path)] == [(s, 1 if s < 4 else 2) for s in range(7)]
    last = [("start", 4), ("place", None), ("evaluation", 7), ("checkpoint", 7), ("end", 7)]
    assert events(tmp_path)[-5:] == last
    assert result["steps"] == 7

    shard = tmp_path / "quickstart" / "checkpoints" / "step-00000007" / "stage-000.safetensors"
    shard.write_bytes(bytes(shard.stat().st_size))
    result, printed = train("run.steps=8")
    assert "checkpoint refused and renamed to step-00000007.refused-1" in printed
    assert "resuming from step 4" in printed
    assert [row["step"] for row in metrics(tmp_path)] == list(range(8))

    for shard in tmp_path.glob("quickstart/checkpoints/step-0000000?/stage-000.safetensors"):
        shard.write_bytes(bytes(shard.stat().st_size))
    before = metrics(tmp_path)
    with pytest.raises(PentadError, match=r"^no checkpoint in .* is intact .*: expected an intact one, or ch"):
        train("run.steps=9")
    assert metrics(tmp_path) == before


@pytest.mark.slow
def test_a_run_without_an_intact_checkpoint_begins_again_if_told_to(train: Train, tmp_path: Path) -> None:
    train("run.steps=3")
    (shard,) = tmp_path.glob("quickstart/checkpoints/step-00000003/stage-000.safetensors")
    shard.write_bytes(bytes(shard.stat().st_size))
    _, printed = train("run.steps=4", "checkpoint.restart_if_damaged=true")
    assert "starting from the initial weights at step 0" in printed
    assert [(row["step"], row["generation"]) for row in metrics(tmp_path)] == [(step, 2) for step in range(4)]


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_gone_begins_again_only_if_told_to(train: Train, tmp_path: Path) -> None:
    train("run.steps=3")
    root = tmp_path / "quickstart" / "checkpoints"
    before, away = metrics(tmp_path), root.rename(tmp_path / "away")
    with pytest.raises(PentadError, match=r"has no checkpoint, but the run has committed that of 3 steps: expected"):
        train("run.steps=4")
    assert metrics(tmp_path) == before
    away.rename(root)
    assert "resuming from step 3" in train("run.steps=4")[1]
    root.rename(tmp_path / "gone")
    assert train("run.steps=2", "checkpoint.restart_if_damaged=true") and len(metrics(tmp_path)) == 2


@pytest.mark.slow
def test_a_finished_run_does_nothing_and_keeps_its_program(train: Train, tmp_path: Path) -> None:
    train("run.steps=2", "schedule.name=1f1b")
    before = events(tmp_path)
    for steps, words in ((2, "its run.steps = 2"), (1, "2 steps, more than its run.steps = 1: nothing is left to do")):
        result, printed = train(f"run.steps={steps}", "schedule.name=gpipe")
        assert f"already completed {words}" in printed and (result["state"], result["steps"]) == ("finished", 2)
    assert events(tmp_path) == before
    assert Program.load(tmp_path / "quickstart" / "program.arrow").name == "1f1b"
    train("run.steps=3", "schedule.name=gpipe")
    assert Program.load(tmp_path / "quickstart" / "program.arrow").name == "gpipe"


@pytest.mark.slow
def test_a_callback_that_raises_ends_the_run_with_a_checkpoint_and_it_resumes(train: Train, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def on_step(row: dict[str, Any]) -> None:
        assert row in metrics(tmp_path)  # written before the call
        seen.append(row)
        if row["step"] == 5:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train("run.steps=100000", on_step=on_step)
    done = len(metrics(tmp_path))
    assert [row["step"] for row in seen] == [0, 1, 2, 3, 4, 5] and 5 < done < 100000
    assert events(tmp_path)[-2:] == [("checkpoint", done), ("stop", done)]
    assert train(f"run.steps={done + 2}", on_step=seen.append)[0]["state"] == "finished"
    assert [row["step"] for row in seen[6:]] == [done, done + 1]


@pytest.mark.slow
def test_a_step_with_a_non_finite_norm_is_reported(train: Train) -> None:
    _, printed = train("run.steps=3", behaviour="fake:nan=1")
    assert "step 1 had a non-finite gradient norm: its update was skipped" in printed


@pytest.mark.slow
def test_a_failed_rank_ends_the_run_with_complete_files(train: Train, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        train(*TWO, "run.steps=9", behaviour="fake:rank=1,step=3,how=die")
    folder = tmp_path / "quickstart"
    assert str(caught.value).startswith("rank 1 (dp0 pp1, node 127.0.0.1, pid ")
    assert str(caught.value).endswith(f"its process was killed or crashed (more in {folder / 'failure.txt'})")
    assert "actor" in (folder / "failure.txt").read_text()
    assert events(tmp_path) == [("start", 0), ("place", None), ("failure", None)]
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2][: len(metrics(tmp_path))]
    assert Timeline.load(folder / "timeline.arrow").steps
    # The folder is unlocked and the places are free.
    result, _ = train(*TWO, "run.steps=2", behaviour="fake:rank=1,step=3,how=die")
    assert result["state"] == "finished"


@pytest.mark.slow
def test_a_full_disk_at_the_end_is_a_failure(train: Train, tmp_path: Path) -> None:
    with pytest.raises(
        PentadError, match=r"^the last state, after step 2, was not saved: checkpoint.every finds the disk full$"
    ):
        train("run.steps=2", behaviour="fake:full=1")
    assert events(tmp_path)[-1] == ("failure", None)


RUN = """
import sys
from pathlib import Path
from rich.console import Console
from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.run.train import train
try:
    display = Display(Console(), "trial", 0)
    print(train(load(None, sys.argv[1:]), display=display, runner="fake_runner:FakeRunner"))
except KeyboardInterrupt:
    sys.exit(130)
"""


class Started:
    """A run in its own process group, as a shell would start it."""

    def __init__(self, folder: Path, *overrides: str, terminal: int | None = None) -> None:
        self.footprint = Footprint()
        path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
        arguments = [f"run.folder={folder}", *SMALL, "run.steps=100000", *overrides]
        self.folder, self.out = folder, (folder / "out").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, *arguments],
            stdin=terminal,
            stdout=self.out if terminal is None else terminal,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=None if terminal is None else lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**self.footprint.environment, "PYTHONPATH": path},
        )

    def printed(self) -> str:
        return Path(self.out.name).read_text()

    def wait_for(self, steps: int) -> None:
        until = time.monotonic() + 45
        while len(metrics(self.folder)) < steps:
            assert self.process.poll() is None, self.printed()
            assert time.monotonic() < until, self.printed()
            time.sleep(0.05)
        self.footprint.record()

    def interrupt(self, number: int) -> None:
        """Sends a signal as a terminal does: to the entire process group, including Ray's processes."""
        os.killpg(self.process.pid, number)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    runs: list[Started] = []

    def do(name: str, *overrides: str, terminal: int | None = None) -> Started:
        (tmp_path / name).mkdir()
        runs.append(Started(tmp_path / name, *overrides, terminal=terminal))
        return runs[-1]

    yield do
    for run in runs:
        if run.process.poll() is None:
            run.interrupt(signal.SIGKILL)
            run.process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ctrl_c_and_sigterm_stop_with_a_checkpoint_and_leave_nothing(
    started: Callable[..., Started], number: signal.Signals
) -> None:
    run = started(number.name, 'data.path="fake:seconds=0.05"')
    run.wait_for(3)
    run.interrupt(number)
    assert run.process.wait(30) == 0, run.printed()
    done = len(metrics(run.folder))
    assert f"stopped after step {done}" in run.printed()
    assert "Traceback" not in run.printed()
    assert steps_saved(run.folder / "quickstart") == done
    assert events(run.folder)[-2:] == [("checkpoint", done), ("stop", done)]
    assert (run.folder / "quickstart" / "timeline.html").exists()
    run.footprint.assert_gone()


@pytest.mark.slow
@pytest.mark.usefixtures("hangup")
def test_a_run_whose_terminal_closes_ends_with_a_checkpoint(started: Callable[..., Started]) -> None:
    primary, terminal = os.openpty()
    run = started("closed", 'data.path="fake:seconds=0.05"', terminal=terminal)
    os.close(terminal)

    def read() -> None:  # else its buffer would fill up
        while not closing.is_set():
            if select([primary], [], [], 0.1)[0]:
                os.read(primary, 65536)

    closing, reader = threading.Event(), threading.Thread(target=read)
    reader.start()
    run.wait_for(3)
    closing.set()
    reader.join()
    os.close(primary)  # the kernel sends SIGHUP
    assert run.process.wait(30) == 0
    done = len(metrics(run.folder))
    assert events(run.folder)[-2:] == [("checkpoint", done), ("stop", done)]
    assert steps_saved(run.folder / "quickstart") == done
    run.footprint.assert_gone()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a second Ctrl-C", "SIGKILL"])
def test_a_run_that_is_stopped_at_once_leaves_nothing(started: Callable[..., Started], how: str) -> None:
    run = started("hung", 'data.path="fake:rank=0,step=3,how=hang"')
    run.wait_for(1)
    if how == "SIGKILL":
        run.process.kill()
        assert run.process.wait(20) == -signal.SIGKILL
    else:
        run.interrupt(signal.SIGINT)
        time.sleep(0.5)
        assert run.process.poll() is None  # the steps in flight never end
        run.interrupt(signal.SIGINT)
        assert run.process.wait(20) == 130, run.printed()
        assert events(run.folder)[-1][0] == "failure"
    assert "Traceback" not in run.printed()
    run.footprint.assert_gone()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["pentad.orchestrator.cluster.ray_head", "gcs_server"])
def test_a_run_that_loses_its_ray_head_says_so_and_leaves_nothing(started: Callable[..., Started], which: str) -> None:
    run = started("headless", 'data.path="fake:seconds=0.05"')
    run.wait_for(2)
    run.footprint.record()
    (head,) = (line.split()[0] for line in run.footprint.processes() if which in line)
    os.kill(int(head), signal.SIGKILL)
    began = time.monotonic()
    assert run.process.wait(20) == 1, run.printed()
    assert time.monotonic() < began + 10
    last = run.printed().strip().splitlines()[-1]
    assert re.fullmatch(r"pentad: the Ray head at 127\S+ has not answered for 2 s; the same command resumes .*", last)
    assert events(run.folder)[-1][0] == "failure"
    run.footprint.assert_gone(10.0)


@pytest.mark.slow
def test_a_run_resumes_only_with_its_corpus(cluster, tmp_path) -> None:
    def run(steps: int, fingerprint: str) -> dict[str, Any]:
        config = config_of(tmp_path, "fake:", f"run.steps={steps}")
        plan = make_plan(config, "cpu")
        source = replace(plan.data.sources[0], fingerprint=fingerprint)
        return run_training(config, runner=FAKE, plan=replace(plan, data=replace(plan.data, sources=(source,))))

    run(2, "a" * 64)
    with pytest.raises(PentadError, match=r"data\.path is .*fingerprint bbbb.*expected aaaa"):
        run(4, "b" * 64)
    assert run(4, "a" * 64)["steps"] == 4
