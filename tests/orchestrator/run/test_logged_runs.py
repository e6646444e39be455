"""A run on real Ray with loggers: resumed, recovered from checkpoints, failed, and resumed again."""

import csv
from pathlib import Path

import pytest
from event_files import scalars, texts
from rich.console import Console

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.run.train import train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]
SMALL = ["mesh.pp=2", "model.layers=4", "schedule.microbatches=4", "batch.global_batch_size=8", "cluster.device=cpu"]


def test_loggers_agree_with_metrics_through_resume_and_recovery(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(steps: int, behaviour: str) -> None:
        options = ["loggers.use=[csv, tensorboard]", "checkpoint.every=3", f"run.steps={steps}"]
        config = load(None, [f"run.folder={tmp_path}", f'data.path="{behaviour}"', *SMALL, *options])
        train(config, display=Display(Console(width=200), config.run.name, steps), runner="fake_runner:FakeRunner")

    run(4, "fake:")
    folder = tmp_path / "quickstart"
    (folder / "checkpoints" / "step-00000004" / "manifest.json").unlink()  # step 3 runs again
    with pytest.raises(WorkerError):
        run(12, "fake:step=7,rank=1,how=die")  # step 6 runs again three times
    run(12, "fake:")
    rows = read_lines(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(12))
    with (folder / "metrics.csv").open(newline="") as file:
        table = [(int(row["step"]), row["train/loss"]) for row in csv.DictReader(file)]
    assert [(step, float(loss)) for step, loss in table if loss] == [(row["step"], row["loss"]) for row in rows]
    shown = scalars(folder / "tensorboard")
    for key in ("loss", "total_tokens"):
        found = [(each.step, each.value) for each in shown if each.tag == f"train/{key}"]
        assert [step for step, _ in found] == [row["step"] for row in rows]
        assert [value for _, value in found] == pytest.approx([row[key] for row in rows])
    assert texts(folder / "tensorboard")["checkpoint/text_summary"].endswith("checkpoints/step-00000012")
    assert [path.read_text() for path in folder.glob("loggers/*.log")] == ["", ""]
    assert "logger" not in capsys.readouterr().out.replace("loggers", "")
