"""Runs with checkpoints in an object store: the same bits as with a folder; they continue when the store is away."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bits import same_bits
from fake_ray import FakeRun
from object_store import BUCKET, SECRET, ObjectStore, served
from saves import tensors_of
from stores import change, shards_in

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.monitoring.runfolder import RunFolder, find_checkpoint, has_checkpoint, resumed_config
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.checkpoint_places import check_store, checkpoints_in, checkpoints_of, home_of
from pentad.orchestrator.run import driver
from pentad.orchestrator.run.train import train
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint import location as locations
from pentad.workers.checkpoint import storage
from pentad.workers.checkpoint.checkpoint import Start, committed
from pentad.workers.checkpoint.checksums import Written
from pentad.workers.checkpoint.location import RemotePath
from pentad.workers.checkpoint.storage import storage_of

FIRST_PORT = 21_480
SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]
STORE = "s3://nowhere/prefix"


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that stands in for s3:// locations."""
    from pyarrow import fs

    (tmp_path / "bucket").mkdir()
    local = fs.SubTreeFileSystem(str(tmp_path / "bucket"), fs.LocalFileSystem())
    monkeypatch.setattr(locations, "_open", lambda store, options: (local, ""))
    storage._remote.cache_clear()
    yield tmp_path / "bucket"
    storage._remote.cache_clear()


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load(None, [f"run.folder={tmp_path}/runs", "run.name=trial", f"checkpoint.path={STORE}"])


def test_a_folder_elsewhere_has_what_describes_its_checkpoints(config: RunConfig, tmp_path: Path) -> None:
    there = tmp_path / "elsewhere"
    config = load(config, [f"checkpoint.path=file://{there}"])
    assert check_store(config) is None
    with RunFolder(config, make_plan(config, "cpu")) as folder:
        folder.begin(config)
        assert folder.checkpoints == there / "trial" / "checkpoints" == checkpoints_in(folder.path)
    assert (there / "trial/config.yaml").read_text() == (folder.path / "config.yaml").read_text()


def test_the_store_has_what_describes_its_checkpoints(bucket: Path, config: RunConfig) -> None:
    root = checkpoints_of(config)
    assert str(root) == f"{STORE}/trial/checkpoints"
    assert "no other run may write there" in (check_store(config) or "")
    with RunFolder(config, make_plan(config, "cpu")) as folder:
        folder.begin(config)
        assert folder.checkpoints == root == checkpoints_in(folder.path)
    assert (bucket / "prefix/trial/config.yaml").read_text() == (folder.path / "config.yaml").read_text()
    assert (home_of(folder.checkpoint(20)) / "config.yaml").read_text() == (folder.path / "config.yaml").read_text()
    assert not (folder.path / "checkpoints").exists() and not has_checkpoint(config)


def test_a_run_whose_folder_is_gone_resumes_from_the_store_and_only_as_the_same_run(
    bucket: Path, config: RunConfig, tmp_path: Path
) -> None:
    with RunFolder(config, make_plan(config, "cpu")) as folder:
        folder.begin(config)
    elsewhere = replace_run(config, folder=f"{tmp_path}/elsewhere")
    assert resumed_config(elsewhere) is not None
    with pytest.raises(PentadError, match=r"run.seed is 7, but the run in .* has 0"):
        resumed_config(replace_run(elsewhere, seed=7))


def replace_run(config: RunConfig, **values: Any) -> RunConfig:
    return load(config, [f"run.{key}={value}" for key, value in values.items()])


def test_another_place_for_the_checkpoints_of_a_run_is_refused(bucket: Path, config: RunConfig) -> None:
    with RunFolder(config, make_plan(config, "cpu")) as folder:
        folder.begin(config)
    with pytest.raises(PentadError, match=r"checkpoint.path is null, but the run in .* has 's3://nowhere/prefix'"):
        resumed_config(load(config, ["checkpoint.path=null"]))


def test_a_store_that_is_down_is_one_sentence_before_anything_starts(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    uri = "s3://nowhere/prefix?scheme=http&endpoint_override=127.0.0.1:9&region=us-east-1"
    monkeypatch.setattr("pentad.orchestrator.run.train.launch", None)
    with pytest.raises(PentadError) as raised:
        train(load(config, [f"checkpoint.path={uri}"]))
    sentence = str(raised.value)
    assert sentence.startswith(f"checkpoint.path is '{uri}', which cannot be written (") and "\n" not in sentence
    assert sentence.endswith("expected a store that can be reached, with the credentials in the environment")


def test_credentials_in_a_uri_are_refused(config: RunConfig) -> None:
    with pytest.raises(PentadError, match="expected it in the environment") as raised:
        load(config, ["checkpoint.path=s3://me:secret@bucket/x"])
    assert "secret" not in str(raised.value)


def test_a_run_goes_on_while_its_store_is_away_and_says_at_the_end_what_is_lost(
    bucket: Path, start: Callable[..., FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "mesh.dp=1", "mesh.pp=4", "checkpoint.every=4", "checkpoint.every_seconds=0", "run.steps=14"
    run = start(*options, f"checkpoint.path={STORE}")
    store = storage_of(run.folder.checkpoints)
    write = store.write

    def write_or_fail(file: RemotePath, *arguments: Any) -> Written:
        if file.parent.name in ("step-00000008", "step-00000014"):
            raise PentadError("AWS Error NETWORK_CONNECTION")
        return write(file, *arguments)

    monkeypatch.setattr(store, "write", write_or_fail)
    run.group.restore(Start())
    with pytest.raises(PentadError, match=r"^the last state, after step 14, was not saved: .*NETWORK_CONNECTION"):
        driver._run_generations(run.config, run.group, run.bus, run.requests, Start())
    assert [(row["event"], row["step"]) for row in run.events("checkpoint") + run.events("checkpoint failed")] == [
        ("checkpoint", 4), ("checkpoint", 12), ("checkpoint failed", 8),
    ]  # fmt: skip


# With a real object store.

SMALL = [
    *("model.layers=4", "model.hidden=32", "model.ffn=64", "model.vocab=300", "batch.sequence_length=32"),
    *("schedule.name=1f1b", "schedule.microbatches=4", "optimizer.learning_rate=3e-3", "cluster.device=cpu"),
    *("cluster.dashboard=false", "checkpoint.every_seconds=0"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with served(tmp_path_factory, FIRST_PORT) as store:
        yield store


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "pentad.orchestrator.cli.cli", *words]


def pentad(folder: Path, *words: str, status: int = 0) -> str:
    done = subprocess.run(command(*words), cwd=folder, timeout=400, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def events(folder: Path, run: str) -> list[tuple[str, int]]:
    path = folder / "runs" / run / "journal.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(row["event"], row["step"]) for row in rows if row["event"].startswith("checkpoint")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_in_a_store_resumes_on_another_mesh_and_everything_reads_it(server: ObjectStore, tmp_path: Path) -> None:
    place = f"s3://{BUCKET}/{tmp_path.name}"
    for name, where in (("stored", [f"checkpoint.path={place}"]), ("local", [])):
        words = [f"run.name={name}", *SMALL, "data.holdout=0.1", "checkpoint.every=2", *where]
        pentad(tmp_path, "train", *words, "run.steps=4", "mesh.pp=2", "mesh.dp=1")
        pentad(tmp_path, "train", *words, "run.steps=8", "mesh.pp=1", "mesh.dp=2")
    uri = f"{place}/stored"
    stored, local = (find_checkpoint(text, "CHECKPOINT") for text in (uri, f"{tmp_path}/runs/local"))
    assert stored.step == local.step == 8
    assert same_bits(tensors_of(stored.folder), tensors_of(local.folder))
    assert list(committed(stored.folder.parent)) == [6, 8] and not list((tmp_path / "runs/stored").glob("check*"))
    for run in ("stored", uri):
        rows = json.loads(pentad(tmp_path, "checkpoint", "list", run, "--json"))["checkpoints"]
        assert [(row["step"], row["state"]) for row in rows] == [(6, "complete"), (8, "complete")]
        assert json.loads(pentad(tmp_path, "checkpoint", "verify", run, "--json"))["intact"]
    assert "8 steps" in pentad(tmp_path, "verify", "stored")
    losses = [json.loads(pentad(tmp_path, "eval", run, "--json"))["evaluations"] for run in (uri, "local")]
    assert losses[0] == losses[1]
    for run in ("local", str(stored.folder)):
        pentad(tmp_path, "export-hf", run, f"hf-{Path(run).name}")
        pentad(tmp_path, "convert", run, f"dcp-{Path(run).name}", "--to", "dcp")
    files = [(tmp_path / f"hf-{name}" / "model.safetensors").read_bytes() for name in ("local", stored.folder.name)]
    assert files[0] == files[1]
    pentad(tmp_path, "train", "run.name=next", f"run.init_from={uri}", *SMALL, "run.steps=1", "mesh.pp=2")
    assert pentad(tmp_path, "checkpoint", "prune", "stored").startswith("0 checkpoints")
    change(shards_in(stored.folder)[0], lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    assert shards_in(stored.folder)[0].name in pentad(tmp_path, "checkpoint", "verify", uri, status=1)
    written = [path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in content for content in written)


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_outlives_its_store_and_a_killed_one_resumes(server: ObjectStore, tmp_path: Path) -> None:
    words = ["run.name=trial", f"checkpoint.path=s3://{BUCKET}/{tmp_path.name}", *SMALL, "checkpoint.every=10"]
    words += ["mesh.pp=2", "run.steps=100000"]

    def begin() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command("train", *words), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def count(kind: str) -> int:
        return sum(event == kind for event, _ in events(tmp_path, "trial"))

    process = begin()
    wait_for(process, lambda: count("checkpoint") > 0)
    server.stop()
    wait_for(process, lambda: count("checkpoint failed") > 1)
    server.start()
    saved = count("checkpoint")
    wait_for(process, lambda: count("checkpoint") > saved)
    process.kill()  # between two checkpoints or in the middle of one
    process.wait()
    last = max(step for event, step in events(tmp_path, "trial") if event == "checkpoint")
    process = begin()
    wait_for(process, lambda: count("checkpoint") > saved + 2)
    assert max(step for event, step in events(tmp_path, "trial") if event == "checkpoint") > last
    server.stop()
    wait_for(process, lambda: events(tmp_path, "trial")[-1][0] == "checkpoint failed")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    server.start()
    assert process.returncode == 1 and "the last state, after step" in output and "was not saved" in output
