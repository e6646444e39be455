"""Loggers get every step once, with its own number and time, whatever happens to the run, and cannot disturb it."""

import csv
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from event_files import Scalar, images, scalars, texts
from full_disk import largest_file

from pentad.orchestrator.config.config import load
from pentad.orchestrator.loggers import loggers
from pentad.orchestrator.loggers.csv_file import CsvFile
from pentad.orchestrator.loggers.logger import LoggedRun
from pentad.orchestrator.loggers.logger import scalars as numbers_of
from pentad.orchestrator.loggers.loggers import Loggers, check_loggers
from pentad.orchestrator.loggers.process import LOGGERS, serve
from pentad.orchestrator.monitoring.runfolder import METRIC_KEYS, RunFolder
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.compiler import compile_program
from pentad.schedules.draw.pixels import GAP, ROW, WIDTH
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline

Start = Callable[..., Loggers]


def row(step: int, **more: Any) -> dict[str, Any]:
    return {**dict.fromkeys(METRIC_KEYS, 0.5), "step": step, "time": 1e9 + step, "mfu": None, "skipped": False, **more}


def csv_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def start(tmp_path: Path, notes: list[str]) -> Iterator[Start]:
    """Starts the loggers of run `trial` at a step; they are closed at the end of the test."""
    config = load(None, [f"run.folder={tmp_path}", "run.name=trial", "cluster.device=cpu"])
    opened: list[Loggers] = []
    with RunFolder(config, make_plan(config, "cpu")) as folder:

        def do(use: str, first: int = 0) -> Loggers:
            with_loggers = load(None, [f"run.folder={tmp_path}", "run.name=trial", f"loggers.use=[{use}]"])
            opened.append(Loggers(with_loggers, folder, first, notes.append))
            return opened[-1]

        yield do
        for each in opened:
            each.close()


def test_every_step_is_logged_once_through_resumes_and_rewinds(start: Start, tmp_path: Path, notes: list[str]) -> None:
    first = start("csv, tensorboard")
    first.on_steps([row(0, loss=9.0), row(1, loss=8.0), row(2, loss=7.0)], [])
    saved = {"event": "checkpoint", "step": 2}
    (tmp_path / "trial" / "journal.jsonl").write_text(json.dumps(saved) + "\n")
    first.on_event(saved)
    evaluation = {"step": 1, "time": 1e9, "data": "web", "loss": 7.5, "perplexity": 1808.0, "generation": 1}
    both = evaluation, {**evaluation, "data": "code", "loss": 6.5}
    (tmp_path / "trial" / "eval.jsonl").write_text("".join(json.dumps(each) + "\n" for each in both))
    first.on_evaluation([*both, {**evaluation, "data": "math", "loss": None}], ())
    first.on_rewind(1)  # to the start of step 1, after the evaluation
    first.on_steps([row(1, loss=6.0), row(2, loss=5.0), row(3, loss=4.0)], [])
    first.close()
    resumed = start("csv, tensorboard", 2)
    resumed.on_steps([row(2, loss=3.0, sources={"web": 1.5, "code": None}), row(3, loss=None)], [])
    run, program = tmp_path / "trial", compile_program("1f1b", 2, 4)
    spans = simulate(program, Costs.uniform(program.stages, 1.0, 1.0, 1.0)).spans
    Timeline("measured", tuple(span._replace(step=3) for span in spans)).save(run / "timeline.arrow")
    resumed.close()
    expected = [Scalar("train/loss", 0, 1e9, 9.0), Scalar("train/loss", 1, 1e9 + 1, 6.0)]
    expected.append(Scalar("train/loss", 2, 1e9 + 2, 3.0))
    shown = scalars(run / "tensorboard")
    assert [each for each in shown if each.tag == "train/loss"] == expected
    assert [each for each in shown if each.tag == "train/sources/web"] == [Scalar("train/sources/web", 2, 1e9 + 2, 1.5)]
    assert [each for each in shown if each.tag == "eval/web/loss"] == [Scalar("eval/web/loss", 1, 1e9, 7.5)]
    names = "step", "train/loss", "train/sources/web", "eval/web/loss", "eval/code/loss"
    found = [tuple(each[name] for name in names) for each in csv_rows(run)]
    assert found == [
        *[("0", "9.0", "", "", ""), ("1", "", "", "7.5", "6.5"), ("1", "6.0", "", "", "")],
        *[("2", "3.0", "1.5", "", ""), ("3", "", "", "", "")],
    ]
    described = texts(run / "tensorboard")
    assert described["checkpoint/text_summary"] == str(run / "checkpoints" / "step-00000002")
    assert images(run / "tensorboard") == {"timeline": (3, 2 * (ROW + GAP) + GAP, WIDTH)}
    assert '"steps": 60' in described["config/text_summary"]
    assert notes == []


def test_steps_that_a_dead_driver_had_recorded_and_not_logged_are_logged_by_the_next(
    start: Start, tmp_path: Path, notes: list[str]
) -> None:
    run = tmp_path / "trial"
    first = start("csv, tensorboard")
    first.on_steps([row(step, loss=9.0 - step) for step in range(3)], [])
    first.close()
    (run / "journal.jsonl").write_text(json.dumps({"event": "checkpoint", "step": 2}) + "\n")
    recorded = [row(step, loss=9.0 - step) for step in range(5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in recorded))
    evaluation = {"step": 4, "time": 1e9, "data": "web", "loss": 7.5, "perplexity": 1808.0, "generation": 1}
    (run / "eval.jsonl").write_text(json.dumps(evaluation) + "\n")
    adopting = start("csv, tensorboard", 5)
    adopting.on_steps([row(5, loss=4.0)], [])
    adopting.close()
    found = [(each["step"], each["train/loss"], each["eval/web/loss"]) for each in csv_rows(run)]
    steps = [(str(step), str(9.0 - step), "") for step in range(6)]
    assert found == [*steps[:4], ("4", "", "7.5"), *steps[4:]]
    shown = scalars(run / "tensorboard")
    assert [each.step for each in shown if each.tag == "train/loss"] == list(range(6))
    assert notes == []


def test_a_driver_that_dies_has_logged_what_it_sent(start: Start, tmp_path: Path) -> None:
    (process,) = start("csv")._processes
    for step in range(50):
        process.offer({"row": row(step)})
    process.finish()  # closes the pipe, as the end of the driver's process does
    assert process.process.wait(20) == 0
    assert len(csv_rows(tmp_path / "trial")) == 50


def test_a_logger_that_fails_costs_one_note(start: Start, tmp_path: Path, notes: list[str]) -> None:
    (tmp_path / "trial" / "metrics.csv").mkdir()
    broken = start("csv")
    broken._processes[0].process.wait(20)
    for step in range(100):
        broken.on_steps([row(step)], [])
    broken.close()
    (note,) = notes
    assert note.startswith("logger csv has failed and logs nothing more ([Errno 21] Is a directory")
    assert "Traceback" in (tmp_path / "trial" / "loggers" / "csv.log").read_text()


@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_a_full_disk_costs_a_logger_and_one_note(start: Start, notes: list[str], kind: str) -> None:
    with largest_file(2500):
        full = start(kind)
    for step in range(50):
        full.on_steps([row(step)], [])
    began = time.monotonic()
    full.close()
    assert time.monotonic() - began < 20.0
    assert notes == [f"logger {kind} has failed and logs nothing more ([Errno 27] File too large)"]


def test_a_logger_that_cannot_start_costs_one_note(start: Start, notes: list[str], tmp_path: Path) -> None:
    (tmp_path / "trial" / "loggers").touch()
    missing = start("csv")
    missing.on_steps([row(0)], [])
    missing.close()
    (note,) = notes
    assert note.startswith("logger csv cannot start and logs nothing ([Errno 17] File exists")


def test_a_logger_that_is_killed_costs_one_note(start: Start, notes: list[str]) -> None:
    killed = start("csv")
    killed._processes[0].process.kill()
    killed.close()
    (note,) = notes
    assert note.startswith("logger csv was killed and logs nothing more; see ")


def test_a_logger_that_hangs_neither_slows_the_run_nor_lives_on(
    start: Start, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(loggers, "MOST_QUEUED", 100)
    hung = start("csv")
    process = hung._processes[0].process
    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    for step in range(2000):
        hung.on_steps([row(step)], [])
    assert time.monotonic() - began < 1.0
    hung.close()
    assert process.poll() == -signal.SIGKILL
    late, missed = notes
    assert late.startswith("logger csv did not finish in 0.2 s and was ended")
    assert missed.startswith("logger csv was too slow and misses 1")


def test_the_numbers_of_a_row_are_logged_by_name() -> None:
    found = numbers_of(row(7, loss=2.5, grad_norm=None, skipped=True, sources={"web": {"loss": 1.0}, "name": "text"}))
    assert (found["train/loss"], found["train/skipped"], found["train/sources/web/loss"]) == (2.5, True, 1.0)
    assert not {"train/grad_norm", "train/mfu", "train/step", "train/time", "train/sources/name"} & found.keys()


class Listed:
    """A logger that lists the steps that it is given."""

    steps: ClassVar[list[int]] = []

    def __init__(self, *_: object) -> None:
        self.steps.clear()

    def log(self, step: int, time: float, values: dict[str, float]) -> None:
        self.steps.append(step)

    def rewind(self, step: int) -> None:
        self.steps[:] = [each for each in self.steps if each < step]

    def close(self, state: str) -> None:
        pass


def test_an_evaluation_that_the_file_has_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logger may read it in the file before or after the driver sends it."""
    monkeypatch.setitem(LOGGERS, "csv", f"{__name__}:Listed")
    rows = [{"step": step, "time": 1e9, "data": "holdout", "loss": 1.0, "perplexity": 2.7} for step in (0, 2, 4)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = LoggedRun("trial", str(tmp_path), 0, 2, {}, {})._asdict()
    sent = [{"evaluation": [rows[1]]}, {"evaluation": [rows[2]]}]
    serve("csv", [run, *sent, {"end": "finished"}], print)
    assert Listed.steps == [0, 2, 4]
    serve("csv", [run, *sent, {"rewind": 2}, *sent, {"end": "finished"}], print)
    assert Listed.steps == [0, 2, 4]


def test_a_line_that_a_crash_has_cut_off_is_dropped(tmp_path: Path) -> None:
    run = LoggedRun("trial", str(tmp_path), 0, 0, {}, {})
    table = CsvFile(run, print)
    table.log(0, 1.0, {"train/loss": 2.0, "train/lr": 0.1})
    with table.path.open("a") as file:
        file.write("1,2.0")
    CsvFile(run._replace(first=1), print).log(1, 2.0, {"train/loss": 1.0})
    assert [(each["step"], each["train/loss"]) for each in csv_rows(tmp_path)] == [("0", "2.0"), ("1", "1.0")]


def test_a_logger_without_its_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(PentadError) as error:
        check_loggers(["tensorboard", "wandb"])
    assert str(error.value) == (
        "loggers.use has tensorboard,wandb: expected loggers whose packages are installed "
        "(pip install 'pentad[tensorboard,wandb]')"
    )


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("loggers.use=[csv, csv]", "loggers.use is ['csv', 'csv']: expected each logger once"),
        ("loggers.wandb.mode=offline", "loggers.wandb has keys, but loggers.use is []: expected wandb in loggers.use"),
        ("loggers.use=[tensorbord]", "(did you mean tensorboard?)"),
        ("loggers.use=csv", "loggers.use is 'csv': expected a list"),
    ],
)
def test_wrong_loggers_are_refused(override: str, sentence: str) -> None:
    with pytest.raises(PentadError) as error:
        load(None, [override])
    assert sentence in str(error.value)
