"""The run folder has complete files, one live run, and no records of steps that will be run again."""

import errno
import gzip
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from paths import ROOT, SUPPORT

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.monitoring.runfolder import FIXED, METRIC_KEYS, RunFolder, resolve_run, saved_config
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.json_lines import read_lines
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.mesh import to_mesh_ranks

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / ".typings")}


def config_in(folder: Path, *overrides: str) -> RunConfig:
    return load(None, [f"run.folder={folder}", "run.name=trial", *overrides])


def opened(folder: Path, *overrides: str) -> RunFolder:
    config = config_in(folder, *overrides)
    return RunFolder(config, make_plan(config, "cpu"))


def row(step: int, **more: object) -> dict:
    return {**dict.fromkeys(METRIC_KEYS, 0.5), "generation": 1, "step": step, "tokens": 4, "mfu": None, **more}


def test_a_new_run_writes_its_configuration_and_program(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        assert not run.resumed
        assert run.path == tmp_path / "trial"
        assert run.checkpoints == run.path / "checkpoints" and (run.path / "checkpoints").is_dir()
        assert saved_config(run.path) == config_in(tmp_path)
        assert Program.load(run.path / "program.arrow").hash == run.plan.program.hash


def test_ranks_find_the_checkpoints_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(Path("runs")) as run:
        assert run.path == Path("runs/trial")
        assert run.checkpoints == tmp_path / "runs" / "trial" / "checkpoints"


def test_metrics_and_journal_have_one_line_per_entry(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.metrics(row(0, extra="kept"))
        run.metrics(row(1, loss=math.nan, grad_norm=math.inf))
        run.event("checkpoint", step=1)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert set(METRIC_KEYS) <= set(lines[0])
    assert lines[0]["extra"] == "kept"
    assert lines[1]["loss"] is None
    assert lines[1]["grad_norm"] is None
    (event,) = read_lines(run.path / "journal.jsonl")
    assert (event["event"], event["step"]) == ("checkpoint", 1)
    assert event["time"] > 1e9


def test_after_a_rewind_every_step_appears_once(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        for step in range(6):
            run.metrics(row(step, generation=1))
    with opened(tmp_path) as run:
        assert run.resumed
        run.rewind(4)
        for step in range(4, 8):
            run.metrics(row(step, generation=2))
    lines = read_lines(run.path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(8))
    assert [line["generation"] for line in lines] == [1] * 4 + [2] * 4


def test_total_tokens_are_those_of_the_steps_that_count(tmp_path: Path) -> None:
    tokens = [3, 5, 7, 11]
    with opened(tmp_path) as run:
        for step in range(4):
            run.metrics(row(step, tokens=tokens[step]))
        run.rewind(3)  # a recovery
        run.metrics(row(3, tokens=13))
    with opened(tmp_path) as run:  # a resume
        run.rewind(2)
        assert [line["total_tokens"] for line in run.metrics(row(2, tokens=7))] == [15]
    assert [line["total_tokens"] for line in read_lines(run.path / "metrics.jsonl")] == [3, 8, 15]


def test_an_incomplete_line_left_by_a_crash_is_dropped(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.metrics(row(0))
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "lo')
    assert [line["step"] for line in read_lines(run.path / "metrics.jsonl")] == [0]
    with opened(tmp_path) as run:
        run.metrics(row(1))
    assert [line["step"] for line in read_lines(run.path / "metrics.jsonl")] == [0, 1]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.ffn=256", "model.ffn is 256, but the run in .*trial has 384: choose another run.name than trial"),
        ("batch.global_batch_size=32", "batch.global_batch_size is 32, but"),
        ("batch.sequence_length=64", "batch.sequence_length is 64, but"),
        ("run.seed=1", "run.seed is 1, but"),
    ],
)
def test_another_run_of_the_same_name_is_refused_and_untouched(tmp_path: Path, override: str, sentence: str) -> None:
    with opened(tmp_path) as run:
        before = (run.path / "config.yaml").read_text()
    with pytest.raises(PentadError, match=sentence):
        opened(tmp_path, override)
    assert (run.path / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    "override", ["run.steps=100", "optimizer.learning_rate=1e-4", "schedule.name=1f1b", "data.cache=x", "mesh.pp=2"]
)
def test_a_resumed_run_may_change_options_that_do_not_affect_its_data_or_model(tmp_path: Path, override: str) -> None:
    opened(tmp_path).close()
    with opened(tmp_path, override) as run:
        assert run.resumed
        assert saved_config(run.path) == config_in(tmp_path)  # kept until the new configuration runs
        run.begin(config_in(tmp_path, override))
        assert saved_config(run.path) == config_in(tmp_path, override)


def test_a_run_folder_of_the_old_format_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        path = run.path / "config.yaml"
    old = path.read_text().replace("global_batch_size", "sequences").replace("mtp_layers", "predicted")
    path.write_text(old)
    sentence = r"config.yaml is of another version of pentad \(model.predicted is unknown.*\): expected a run folder of"
    with pytest.raises(PentadError, match=sentence) as raised:
        opened(tmp_path)
    assert "\n" not in str(raised.value)
    assert path.read_text() == old


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trial").mkdir()
    (tmp_path / "trial" / "thesis.tex").write_text("years of work")
    with pytest.raises(PentadError, match=r"trial exists and is not a run's folder: expected a new one"):
        opened(tmp_path)
    assert os.listdir(tmp_path / "trial") == ["thesis.tex"]


def test_a_folder_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PentadError, match=r"run.folder is '.*file', where .* cannot be written"):
        opened(tmp_path / "file")


def test_two_live_runs_of_one_name_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(PentadError, match=f"is running already .process {os.getpid()}."):
        opened(tmp_path)
    opened(tmp_path).close()


def test_a_killed_run_leaves_no_lock(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); sys.path.insert(0, {str(SUPPORT)!r})\n"
    code += f"from test_runfolder import opened\nfrom pathlib import Path\nrun = opened(Path({str(tmp_path)!r}))\n"
    code += "import os, signal; print('held', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert ended.stdout == "held\n"
    with opened(tmp_path) as run:
        assert run.resumed


def test_the_documentation_lists_the_keys_that_may_not_change() -> None:
    (row,) = (line for line in (ROOT / "docs" / "stages.md").read_text().splitlines() if "| may not" in line)
    keys = re.findall(r"`([\w.]+)`", row.split("|")[1])
    assert sorted(key if "." in key else f"{key}." for key in keys) == sorted(FIXED)


@pytest.mark.parametrize("line", ["{garbage", "5", '{"step": 1}', "\0", "\0" * 7])
def test_a_damaged_line_is_reported_and_kept(tmp_path: Path, line: str) -> None:
    with opened(tmp_path) as run:
        run.metrics(row(0))
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(
        PentadError, match=r"metrics.jsonl line 2 is .*: expected an object.*: repair or remove"
    ) as raised:
        opened(tmp_path)
    assert "utf-32" not in str(raised.value), "lines are UTF-8; a disk that lost power leaves zeros"
    assert (run.path / "metrics.jsonl").read_text().endswith(f"\n{line}\n")


@pytest.mark.parametrize("name", ["metrics.jsonl", "journal.jsonl", "program.arrow"])
def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path, name: str) -> None:
    opened(tmp_path).close()
    (tmp_path / "trial" / name).unlink(missing_ok=True)
    (tmp_path / "trial" / name).mkdir()
    with pytest.raises(PentadError, match=rf"{name} cannot be written"), opened(tmp_path) as run:
        run.begin(config_in(tmp_path))
    (tmp_path / "trial" / name).rmdir()
    opened(tmp_path).close()  # the lock has been released


def test_timelines_that_cannot_be_written_leave_the_old_ones_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as run:
        plan = run.plan
        costs = costs_of(plan)
        measured = to_mesh_ranks(simulate(plan.program, costs), plan.mesh)
        run.timelines(measured, costs)
        files = {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()}

        def full(path: Path, content: bytes) -> int:
            with path.open("wb") as file:
                file.write(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(PentadError, match=r"arrow cannot be written \(No space left on device, \d+ bytes free\)"):
            run.timelines(measured, costs)
    assert {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()} == files


def test_timelines_are_written_in_all_formats(tmp_path: Path) -> None:
    with opened(tmp_path, "mesh.dp=2") as run:
        plan = run.plan
        costs = costs_of(plan)
        measured = replace(to_mesh_ranks(simulate(plan.program, costs), plan.mesh), source="measured")
        run.timelines(measured, costs)
    assert Timeline.load(run.path / "timeline.arrow") == measured
    events = json.loads(gzip.decompress((run.path / "trace.json.gz").read_bytes()))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert "measured rank 5 (dp1 pp2)" in names
    assert "<title>" in (run.path / "timeline.html").read_text()


def test_a_run_is_found_by_name_and_by_path(tmp_path: Path) -> None:
    opened(tmp_path).close()
    assert resolve_run("trial", tmp_path) == tmp_path / "trial"
    assert resolve_run(str(tmp_path / "trial")) == tmp_path / "trial"
    with pytest.raises(
        PentadError, match=r"RUN is 'trail' \(did you mean trial\?\): expected a run's folder or a name under"
    ):
        resolve_run("trail", tmp_path)
    for number in range(20):
        (tmp_path / f"sweep-{number:02}").mkdir()
        (tmp_path / f"sweep-{number:02}" / "config.yaml").touch()
    with pytest.raises(PentadError, match=r"the runs there are sweep-00, .*, sweep-08 and 12 more$"):
        resolve_run("nothing", tmp_path)
    with pytest.raises(PentadError, match="there are none"):
        resolve_run("trial", tmp_path / "nowhere")
