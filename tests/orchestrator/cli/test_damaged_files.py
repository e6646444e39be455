"""A damaged file of a run costs one sentence, or nothing: never a traceback, a crash, a hang or escape codes."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import pyarrow as pa
import pytest
from commands import Pentad
from damage import damaged_bytes, damaged_values

from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.runfolder import METRIC_KEYS, RunFolder
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.workers.preprocess.readers import Columns, FileSpan, read_rows
from pentad.workers.preprocess.source_files import SourceFile

SIZES = ["model.layers=2", "mesh.pp=2", "schedule.name=1f1b", "schedule.microbatches=2", "batch.global_batch_size=2"]
COMMANDS: dict[str, list[tuple[str, ...]]] = {  # that read each file
    "timeline.arrow": [("timeline", "trial")],
    "program.arrow": [
        ("timeline", "trial"),
        ("schedule", "runs/trial/program.arrow", "--ranks", "2", "--microbatches", "2"),
    ],
    "metrics.jsonl": [("curves", "trial"), ("logs", "trial"), ("status", "trial")],
    "eval.jsonl": [("curves", "trial"), ("status", "trial")],
    "journal.jsonl": [("logs", "trial"), ("status", "trial"), ("runs",), ("curves", "trial")],
    "config.yaml": [("plan", "runs/trial/config.yaml"), ("status", "trial"), ("runs",)],
    "control.json": [("status", "trial", "--timeout", "0.1")],
}
_SECONDS = 10.0  # the most a command may take, even on a busy machine


@pytest.fixture
def trial(tmp_path: Path) -> Path:
    """A run in runs/trial with two steps, an evaluation and a timeline."""
    config = load(None, [*SIZES, "run.name=trial", f"run.folder={tmp_path / 'runs'}"])
    plan = make_plan(config, "cpu")
    costs = costs_of(plan)
    with RunFolder(config, plan) as folder:
        folder.timelines(Timeline("measured", simulate(plan.program, costs, step=1).spans), costs)
        folder.event("start", generation=1, mesh="pp2")
        counts = {"tokens": 256, "target_tokens": 256, "generation": 1}
        for step in range(2):
            folder.metrics(dict.fromkeys(METRIC_KEYS, 1.5) | {"step": step, **counts})
        numbers: dict[str, float] = {"tokens": 8, "sequences": 1, "seconds": 0.1, "generation": 1}
        folder.evaluated([{"step": 2, "time": 1e9, "data": "valid", "loss": 2.0, "perplexity": 7.4, **numbers}])
        folder.event("mixture", step=1, generation=1)
        folder.event("failure", error="rank 1 is lost", cause="killed")
    (folder.path / "control.json").write_text(json.dumps({"address": "127.0.0.1:1", "token": "x", "host": ""}))
    return folder.path


def check(pentad: Pentad, path: Path, intact: bytes, content: bytes, what: object) -> None:
    """Each command that reads the file succeeds or prints sentences, in time."""
    endpoint = path.parent / "control.json"
    if path != endpoint:
        endpoint.unlink(missing_ok=True)
    path.write_bytes(content)
    for words in COMMANDS[path.name]:
        began = time.monotonic()
        try:
            status, out, err = pentad(*words)
        except Exception as error:
            error.add_note(f"{what}: {' '.join(words)}: {content[:2000]!r}")
            raise
        assert time.monotonic() - began < _SECONDS, what
        assert status in (0, 1), (what, err)
        lines = err.splitlines()
        assert (status == 0) == (not lines) or words[0] == "plan", (what, words, err)
        assert all(line.startswith("pentad: ") and len(line) < 2000 for line in lines), (what, err)
        assert "\x1b" not in out + err, (what, words)
    path.write_bytes(intact)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", COMMANDS)
def test_damaged_files_of_a_run_cost_a_sentence(pentad: Pentad, trial: Path, name: str) -> None:
    _damage(pentad, trial / name, range(1))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", COMMANDS)
def test_many_damaged_files_of_a_run_cost_a_sentence(pentad: Pentad, trial: Path, name: str) -> None:
    _damage(pentad, trial / name, range(1, 300))


def _damage(pentad: Pentad, path: Path, seeds: range) -> None:
    intact = path.read_bytes()
    for seed in seeds:
        for damaged in (damaged_bytes,) if path.suffix == ".arrow" else (damaged_bytes, damaged_values):
            check(pentad, path, intact, damaged(intact, seed), (path.name, damaged.__name__, seed))


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 3000), marks=pytest.mark.slow)])
def test_a_damaged_arrow_source_gives_rows_or_a_sentence(tmp_path: Path, seeds: range) -> None:
    path = tmp_path / "source.arrow"
    table = pa.table({"text": ["one", "two words", None] * 9, "messages": [[{"role": "user", "content": "x"}]] * 27})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    intact = path.read_bytes()
    columns, refused = Columns((("text", "messages"),)), list[str]()
    for seed in seeds:
        path.write_bytes(damaged_bytes(intact, seed))
        try:
            assert all(row.values.keys() == {"text", "messages"} for row in read_rows(span_of(path), columns))
        except PentadError as error:
            refused.append(str(error))
    assert all("source.arrow" in sentence and "\n" not in sentence for sentence in refused)
    assert len(refused) > len(seeds) // 4


YAML = {
    "bomb": "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdef", "bcdefg", strict=True))
    + "run: {name: *g}\n",
    "a list in itself": "run: &a [*a]\n",
    "timestamp without a value": "run: {seed: !!timestamp }\n",
    "number without a value": "run: {seed: !!int }\n",
    "truth without a value": "run: {seed: !!bool }\n",
    "unknown tag": "run: {seed: !mine }\n",
    "NUL in a path": 'data: {path: "a\\0b"}\n',
    "NUL in an include": 'include: "a\\0b"\n',
    "colours": 'data: {path: "\\e[31mred"}\n',
    "half a pair": 'data: {path: "\\ud800"}\n',
    "deep": "[" * 1000,
    "huge count": f"model: {{layers: {'9' * 30}}}\n",
    "large file": "# " + "x" * 2**20,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", YAML)
def test_a_hostile_configuration_costs_sentences(pentad: Pentad, case: str) -> None:
    Path("hostile.yaml").write_text(YAML[case])
    began = time.process_time()
    status, _, err = pentad("plan", "hostile.yaml")
    assert time.process_time() - began < _SECONDS
    assert status == 1
    assert err
    assert all(line.startswith("pentad: ") and len(line) < 400 and line.isprintable() for line in err.splitlines()), err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--gpus", "1000000000"), "less than or equal to 16384"),
        (("mesh.pp=10000", "model.layers=10000"), "mesh.pp is 10000: expected at most 1024"),
        (("mesh.dp=100000000", "batch.global_batch_size=800000000"), "ranks: expected at most 65536"),
        (("/dev/zero",), "CONFIG is '/dev/zero', which is a pipe or device: expected a YAML file"),
        (("/dev/full",), "CONFIG is '/dev/full', which is a pipe or device: expected a YAML file"),
        (("pipe",), "CONFIG is 'pipe', which is a pipe or device: expected a YAML file"),
        (("\x1b[31mred.yaml",), "CONFIG is '\\x1b[31mred.yaml'"),
    ],
)
def test_what_would_not_end_is_refused(pentad: Pentad, words: tuple[str, ...], sentence: str) -> None:
    os.mkfifo("pipe")
    began = time.monotonic()
    status, _, err = pentad("plan", *words)
    assert time.monotonic() - began < _SECONDS
    assert status in (1, 2)
    assert sentence in err
    assert err.count("\n") == 1
    assert "\x1b" not in err


@pytest.mark.parametrize(
    "words",
    [
        ("batch.sequence_length=2147483520",),
        ("batch.global_batch_size=2147483520",),
        ("model.hidden=2147483632",),
        ("model.vocab=2147483647", "model.hidden=2147483632", "mesh.dp=2", "zero.stage=3"),
        ("model.hidden=1048576", "model.layers=500", "batch.sequence_length=1048576", "batch.global_batch_size=16384"),
    ],
)
def test_sizes_that_no_machine_has_are_refused(pentad: Pentad, words: tuple[str, ...]) -> None:
    """And refusing them takes neither memory nor time."""
    began, limit = time.process_time(), resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30), limit[1]))
    try:
        status, _, err = pentad("plan", *words)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert time.process_time() - began < _SECONDS
    assert status == 1
    assert err.count("\n") <= 1


@pytest.mark.timeout(30)
def test_a_model_whose_config_is_a_pipe_is_refused(pentad: Pentad) -> None:
    Path("model").mkdir()
    os.mkfifo("model/config.json")
    status, _, err = pentad("import-hf", "model", "out")
    assert (status, err.count("\n")) == (1, 1)
    assert "model/config.json is a pipe or device: expected a file" in err


def test_escape_sequences_of_a_journal_are_shown_not_obeyed(pentad: Pentad, trial: Path) -> None:
    (trial / "control.json").unlink()
    with (trial / "journal.jsonl").open("a") as file:
        file.write(
            json.dumps({"time": 1.0, "event": "failure", "error": "\x1b]0;title\x07", "cause": "\x1b[2J"}) + "\n"
        )
    trial.rename(trial.with_name("\x1b[31mred"))
    for words in (("logs", "\x1b[31mred"), ("status", "\x1b[31mred"), ("runs",), ("status", "rad")):
        _, out, err = pentad(*words)
        assert "\x1b" not in out + err, words
        assert "\\x1b" in out + err, words


def span_of(path: Path) -> FileSpan:
    return FileSpan(SourceFile(str(path), path.stat().st_size, 0))
