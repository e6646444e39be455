"""Checkpoints obey the same laws in a folder and in a store: a manifest commits them, and damage is found and named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save
from object_store import BUCKET, ObjectStore, served, served_google
from stores import change, place, shards_in, without_grace

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint import checkpoint, s3_requests
from pentad.workers.checkpoint.checkpoint import (
    Unreadable,
    commit,
    committed,
    folder_of,
    newest,
    open_checkpoint,
    read_manifest,
    recover,
)
from pentad.workers.checkpoint.location import Location, RemotePath, location
from pentad.workers.checkpoint.retention import delete_older, discard, listed, superseded, verified
from pentad.workers.checkpoint.shards import read, write_shard
from pentad.workers.checkpoint.storage import read_bytes, storage_of

FIRST_PORT = 21_420
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with served(tmp_path_factory, FIRST_PORT) as store:
        yield store


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    with served_google(tmp_path_factory, FIRST_PORT + 9) as uri:
        yield uri


@pytest.fixture(params=["store", *(pytest.param(name, marks=SLOW) for name in ("folder", "s3", "gs"))])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "gs":
        return location(request.getfixturevalue("google")(f"{BUCKET}/{tmp_path.name}/checkpoints"))
    if request.param == "s3":
        request.getfixturevalue("server")
        return location(f"s3://{BUCKET}/{tmp_path.name}/checkpoints")
    return place(request.param, tmp_path / "checkpoints")


def steps(root: Location) -> list[int]:
    return list(committed(root))


def test_what_ranks_write_at_once_is_read_back(root: Location) -> None:
    folder = folder_of(root, 1)
    tensors = {f"t{rank}": torch.randn(3 + rank, 5) for rank in range(4)}
    with ThreadPoolExecutor(4) as pool:
        shards = list(pool.map(lambda name: write_shard(folder, f"{name}.safetensors", {name: tensors[name]}), tensors))
    assert newest(root).checkpoint is None
    commit(folder, step=1, shards=shards, meta={})
    commit(folder, step=1, shards=shards, meta={})  # changes nothing
    found = newest(root).checkpoint
    assert found is not None and found.step == 1
    again = read(found, found.tensors)
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("uri", ["s3://bucket/prefix", "s3://bucket/a/b?region=x&scheme=http", "hdfs://host:8020/x"])
def test_a_place_in_a_store_is_its_uri(uri: str) -> None:
    found = location(uri)
    assert str(found) == uri and location(str(found / "step-1")).parent == found
    assert (found / "step-1").name == "step-1" and (found / "a").with_name("b") == found / "b"


def test_a_file_uri_is_a_folder() -> None:
    assert location("file:///some/folder%20here") == Path("/some/folder here") == location("/some/folder here")


def test_older_checkpoints_are_deleted_and_listed_ones_have_their_state(root: Location) -> None:
    for step in (10, 20, 30, 40):
        save(root, step)
    assert [folder.name for folder in delete_older(root, 2, pinned=[10])] == ["step-00000020"]
    assert [(entry.step, entry.state) for entry in listed(root)] == [(step, "complete") for step in (10, 30, 40)]
    assert [entry.step for entry in superseded(root, 1, lambda saved: ())] == [10, 30]
    assert delete_older(root, 2, pinned=[10]) == ()


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1])])
@pytest.mark.parametrize("of_manifest", [True, False])
def test_truncated_and_flipped_files_are_found_named_and_replaced(
    root: Location, damage: Callable[[bytes], bytes], of_manifest: bool
) -> None:
    save(root, 10)
    folder = save(root, 20)
    (file,) = [folder / n for n in storage_of(folder).files(folder) if n.startswith("manifest")] if of_manifest else [
        shards_in(folder)[1]
    ]  # fmt: skip
    change(file, damage)
    (entry,) = (entry for entry in map(verified, listed(root)) if entry.step == 20)
    assert entry.state == "damaged" and ("manifest" if of_manifest else file.name) in entry.problem
    found = recover(root)
    assert found.checkpoint is not None and found.checkpoint.step == 10 and "refused-1" in found.refused[0][0].name
    assert (steps(root) == [10] and [entry.state for entry in listed(root)][-1] == "refused") or isinstance(root, Path)
    save(root, 20)  # the step runs again
    open_checkpoint(folder)
    assert steps(root) == [10, 20]


@pytest.mark.parametrize(
    "root", ["folder", "store", *(pytest.param(name, marks=SLOW) for name in ("s3", "gs"))], indirect=True
)
def test_of_two_writers_one_wins_and_the_other_is_told(root: Location) -> None:
    """Where a store lets both write, the later generation wins."""
    folder, told = folder_of(root, 20), list[str]()

    def write(generation: int) -> None:
        file = f"stage-{generation}.safetensors"
        shard = write_shard(folder, file, {"x": torch.tensor(generation)})
        ready.wait()
        try:
            commit(folder, step=20, shards=[shard], meta={"run": f"run{generation}", "generation": generation})
        except PentadError as error:
            told.append(str(error))

    ready = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    is_exclusive = storage_of(root).is_exclusive(root)
    found = open_checkpoint(folder)
    winner = found.meta["generation"]
    assert read(found, ["x"])["x"].item() == winner
    assert len(told) == (3 if is_exclusive else 0) and (is_exclusive or winner == 3)
    assert all("another writer has committed it" in text for text in told)


@pytest.mark.parametrize(
    "root", ["folder", "store", *(pytest.param(name, marks=SLOW) for name in ("s3", "gs"))], indirect=True
)
def test_a_checkpoint_of_an_earlier_generation_of_the_run_gives_way(root: Location) -> None:
    folder = folder_of(root, 20)
    for generation in (1, 3):
        shard = write_shard(folder, f"stage-{generation}.safetensors", {"x": torch.tensor(generation)})
        commit(folder, step=20, shards=[shard], meta={"run": "run", "generation": generation})
        found = open_checkpoint(folder)
        assert read(found, ["x"])["x"].item() == found.meta["generation"] == generation


def test_a_save_that_fails_or_dies_leaves_the_newest_checkpoint_and_is_swept(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root, 10)
    folder = folder_of(root, 20)

    @contextmanager
    def publishing() -> Iterator[None]:
        raise PentadError("the generation is over")
        yield

    with pytest.raises(PentadError, match="the generation is over"):
        write_shard(folder, "a.safetensors", {"x": torch.zeros(2_000_000)}, publishing)
    assert shards_in(folder) == []
    write_shard(folder, "a.safetensors", {"x": torch.zeros(9)})  # the process ends here
    write_shard(folder_of(root, 10).with_name("step-00000030"), "a.safetensors", {"x": torch.zeros(9)})
    assert steps(root) == [10] and newest(root).checkpoint is not None
    discard(folder)
    save(root, 20)
    save(root, 30)
    delete_older(root, 3)
    if isinstance(root, RemotePath):
        assert len(shards_in(folder)) == len(shards_in(folder_of(root, 30))) == 3, "perhaps another writer's"
        without_grace(monkeypatch, root)
        delete_older(root, 3)
    for step in (10, 20, 30):
        listed_files = {shard.file for shard in read_manifest(folder_of(root, step)).shards}
        assert listed_files <= {file.name for file in shards_in(folder_of(root, step))}
    assert len(shards_in(folder)) == 2 or isinstance(root, Path)
    assert steps(root) == [10, 20, 30]


def test_a_store_that_is_away_is_one_sentence_and_no_missing_checkpoint(
    root: Location, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkpoint, "RETRY_SECONDS", (0.0, 0.0))
    if isinstance(root, Path):
        pytest.skip("a store")
    folder, storage = save(root, 10), storage_of(root)
    if root.store.startswith("s3"):
        root = RemotePath(root.store, root.path, "scheme=http&region=us-east-1&endpoint_override=127.0.0.1:9")
        folder = folder_of(root, 10)
    else:
        monkeypatch.setattr(storage, "filesystem", Away())
    for look in (committed, newest, recover, listed, lambda root: delete_older(root, 1)):
        with pytest.raises(Unreadable) as raised:
            look(root)
        assert "\n" not in str(raised.value)
    with pytest.raises(PentadError, match=r"step-00000020.* cannot be written \(.*\): expected a store") as written:
        write_shard(folder_of(root, 20), "a.safetensors", {"x": torch.zeros(2)})
    assert "\n" not in str(written.value)
    with pytest.raises(Unreadable):
        open_checkpoint(folder)


class Away:
    """The file system of a store that cannot be reached."""

    type_name = "s3"

    def __getattr__(self, name: str) -> Callable[..., None]:
        def fail(*_: object, **__: object) -> None:
            raise OSError("AWS Error NETWORK_CONNECTION: curlCode: 7, Could not connect. Detail: [errno 111]\nmore")

        return fail


KILLED = """
import sys, torch
from pentad.workers.checkpoint.checkpoint import commit, folder_of
from pentad.workers.checkpoint.location import location
from pentad.workers.checkpoint.shards import write_shard
root = location(sys.argv[1])
for step in range(1, 1000):
    shards = []
    for stage in range(3):
        tensors = {f"x{stage}": torch.full((1_000_000,), step)}
        shards.append(write_shard(folder_of(root, step), f"{stage}.safetensors", tensors))
        print("shard", step, stage, flush=True)
    commit(folder_of(root, step), step=step, shards=shards, meta={})
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [0.0, 0.4, 1.1])
def test_a_save_that_is_killed_costs_nothing_but_itself(
    server: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    root = location(f"s3://{BUCKET}/{tmp_path.name}/checkpoints")
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(root)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    while process.stdout.readline() != "shard 2 0\n":
        assert process.poll() is None
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    found = newest(root)
    assert found.refused == () and found.checkpoint is not None
    last = found.checkpoint.step
    value = read(found.checkpoint, ["x2"])["x2"]
    assert value.unique().tolist() == [last]
    save(root, last + 1)  # the same command again
    monkeypatch.setattr(storage_of(root), "grace_seconds", -60.0)
    delete_older(root, 1)
    assert steps(root) == [last + 1]
    storage: Any = storage_of(root)
    key = str(root).removeprefix(f"s3://{BUCKET}/")
    assert s3_requests.abort_uploads(storage.address, storage.keys, f"{key}/", time.time() + 60) == 0
    for folder in storage.folders(root):
        assert folder == f"step-{last + 1:08d}" or not storage.files(root / folder)
    assert len(read_bytes(folder_of(root, last + 1) / "manifest.json")) > 100


def test_a_folder_that_another_rank_makes_meanwhile_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow fails if a folder is missing at its first look but present at its second."""
    root, looks = place("store", tmp_path / "checkpoints"), list[str]()
    storage: Any = storage_of(root)
    storage.make_folder(root)

    class Files:
        def get_file_info(self, selector: Any) -> list[Any]:
            looks.append(selector.base_dir)
            if len(looks) == 1:
                raise FileNotFoundError(selector.base_dir)
            return list(found.get_file_info(selector))

    found = storage.filesystem
    monkeypatch.setattr(storage, "filesystem", Files())
    assert storage.files(root) == {} and len(looks) == 2
