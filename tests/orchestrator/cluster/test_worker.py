"""The actor around a runner, without Ray: calls of another generation are refused, and it reports what it is doing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pentad.orchestrator.cluster import worker as workers
from pentad.orchestrator.cluster.lease import Keeper
from pentad.orchestrator.cluster.worker import StaleGeneration, Worker, WorkerPlace
from pentad.orchestrator.config.config import load
from pentad.orchestrator.config.version import release
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.checkpoint import read_manifest
from pentad.workers.checkpoint.shards import write_shard
from pentad.workers.lanes.progress_file import Progress

NODE, IP = "node", "10.0.0.1"


class StubRunner:
    """Records what it was asked to do."""

    def __init__(
        self, plan: Plan, rank: int, file: Path, generation: int, gpu: int, previous: Any, **more: Any
    ) -> None:
        self.rank, self.generation, self.gpu, self.previous, self.more = rank, generation, gpu, previous, more
        self.calls: list[Any] = []
        self.reservation: Future[None] = Future()
        self.reservation.set_result(None)
        self.at: Progress | None = None

    def position(self) -> Progress | None:
        return self.at

    def write(self, folder: str, step: int) -> Any:
        if folder == "full":
            raise PentadError("no space left")
        return folder, step

    def replicate(self, key: Any, address: str, token: bytes) -> Any:
        if address == "gone":
            raise PentadError("gone does not answer")
        return key, address

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, *given))


@cache
def plan() -> Plan:
    return make_plan(
        load(None, ["model.layers=4", "mesh.pp=2", "schedule.name=1f1b", "schedule.microbatches=2"]), "cpu"
    )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The GPUs that Ray gives the worker."""
    before, found = signal.getsignal(signal.SIGTERM), list[str]()
    node = SimpleNamespace(get_session_dir_path=lambda: str(tmp_path))
    context = SimpleNamespace(get_node_id=lambda: NODE)
    ray = SimpleNamespace(
        _private=SimpleNamespace(worker=SimpleNamespace(global_worker=SimpleNamespace(node=node))),
        get_gpu_ids=lambda: found,
        get_runtime_context=lambda: context,
        util=SimpleNamespace(get_node_ip_address=lambda: IP),
    )
    monkeypatch.setattr(workers, "ray", ray)
    yield found
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def worker(gpus: list[str]) -> Iterator[Worker]:
    """Rank 1 of two, in generation 3."""
    made = Worker("rank1", f"{__name__}:StubRunner")
    assert repr(made) == "rank1" and made.leave(0).version == -1
    assert made.start(3, plan(), 1, (5, 6), False) == ""
    yield made
    made.close()
    assert not made.progress_file.exists()


def test_calls_of_a_generation_that_is_over_or_yet_to_come_are_refused(worker: Worker) -> None:
    runner = worker.runner
    worker.call(3, "run", 0, 4)
    worker.leave(3)
    assert runner.calls == [("run", 0, 4), ("leave",)]
    for stale in (2, 4):
        for call in (
            lambda number: worker.call(number, "run"),
            lambda number: worker.write(number, "a", 1),
            lambda number: worker.replicate(number, None, "h:1", b""),
        ):
            with pytest.raises(StaleGeneration, match=f"generation {stale} is over, it is 3 now"):
                call(stale)
    assert len(runner.calls) == 2
    worker.fence(4)
    with pytest.raises(StaleGeneration, match="generation 4 is over, it is 4 now"):
        worker.fence(4)
    worker.abort(3)
    worker.abort(4)
    assert runner.calls[2:] == [("fence",), ("abort",)]
    with pytest.raises(StaleGeneration):
        worker.start(3, plan(), 1, (), True)
    assert worker.runner is runner
    worker.start(5, plan(), 0, (), True)
    assert worker.runner.previous is runner and worker.runner.rank == 0


def test_a_state_that_is_not_kept_is_gone_before_another_one_is_made(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.runner.itself = worker.runner  # a reference cycle, as of tensors and threads
    before, made = weakref.ref(worker.runner), StubRunner.__init__

    def init(self: StubRunner, *arguments: Any, **more: Any) -> None:
        assert before() is None, "there may be no room for two"
        made(self, *arguments, **more)

    monkeypatch.setattr(StubRunner, "__init__", init)
    worker.start(4, plan(), 0, (), False)
    assert worker.runner.previous is None


def test_storage_and_peers_at_fault_are_answers_and_end_nothing(worker: Worker) -> None:
    assert worker.write(3, "a", 7) == ("a", 7) and worker.write(3, "full", 7) == "no space left"
    key: Any = "key"
    assert worker.replicate(3, key, "h:1", b"") == ("key", "h:1")
    assert worker.replicate(3, key, "gone", b"") == "gone does not answer"
    assert worker.held_copies() == ("", [])
    address = worker.serve_copies("127.0.0.1", b"token")
    assert address.startswith("127.0.0.1:") and worker.serve_copies("127.0.0.1", b"other") == address
    assert worker.held_copies()[0] == address
    worker.forget_copies()


def test_too_little_memory_for_copies_ends_nothing(worker: Worker) -> None:
    """`replicate` says so, and training continues."""
    worker.runner.reservation = Future()
    worker.runner.reservation.set_exception(PentadError("no room"))
    assert worker.serve_copies("127.0.0.1", b"token").startswith("127.0.0.1:")


def test_a_checkpoint_is_committed_unless_its_generation_ends_meanwhile(worker: Worker, tmp_path: Path) -> None:
    import torch

    for step, generation in ((1, 3), (2, 3), (3, 2)):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        shards = [write_shard(folder, "a.safetensors", {"w": torch.zeros(2)}).plain()]
        if generation == 3:
            worker.commit(generation, str(folder), step, shards, {})
            assert read_manifest(folder).step == step
            assert worker.prune(generation, str(folder), 1, ()) == ""
        else:
            with pytest.raises(StaleGeneration):
                worker.commit(generation, str(folder), step, shards, {})
    assert worker.folder_problem(str(tmp_path)) is None
    assert "step-00000001" not in {path.name for path in (tmp_path / "checkpoints").iterdir()}, "one is kept"


def test_a_commit_that_was_given_up_is_none(worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    given_up, worker.runner.snapshots = list[int](), SimpleNamespace()
    worker.runner.snapshots.give_up = given_up.append
    folder = tmp_path / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    shards = [write_shard(folder, "a.safetensors", {"w": torch.zeros(2)}).plain()]
    commit = checkpoint.commit

    def hangs(*given: Any, **options: Any) -> Any:
        worker.give_up_save(3, 1)
        return commit(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "commit", hangs)
        with pytest.raises(PentadError, match="the checkpoint of step 1 was given up"):
            worker.commit(3, str(folder), 1, shards, {})
    assert given_up == [1] and {path.name for path in folder.iterdir()} == {"a.safetensors"}
    worker.commit(3, str(folder), 1, shards, {})
    assert read_manifest(folder).step == 1, "a later attempt counts"
    with pytest.raises(StaleGeneration):
        worker.give_up_save(2, 1)


def test_an_older_checkpoint_that_cannot_be_deleted_fails_no_commit(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from pentad.orchestrator.cluster import worker as module

    def refused(*_: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(module, "delete_older", refused)
    folder = tmp_path / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    worker.commit(3, str(folder), 1, [write_shard(folder, "a.safetensors", {"w": torch.zeros(2)}).plain()], {})
    assert "Permission denied" in worker.prune(3, str(folder), 1, ())
    assert read_manifest(folder).step == 1


def test_the_status_says_which_instruction_of_the_stream_runs(worker: Worker, gpus: list[str]) -> None:
    assert (worker.status().step, worker.status().instruction) == (-1, "")
    worker.progress_file.touch()
    stream = plan().program.streams[1]
    first = next(number for number, action in enumerate(stream) if "F0" in str(action))
    worker.runner.at = Progress(3, 9, first, 0.0)
    found = worker.status()
    assert (found.generation, found.step, found.counter) == (3, 9, first) and "F0" in found.instruction
    worker.notice.text, worker.notice.of_node = "received SIGTERM", "announced"
    assert (worker.status().leaving, worker.status().node_leaving) == ("received SIGTERM", "announced")
    assert worker.clock() <= worker.clock()


def test_a_gpu_is_read_now_and_then(worker: Worker, gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def reading(gpu: int) -> str:
        read.append(gpu)
        return "reading"

    monkeypatch.setattr(workers, "read_gpu", reading)
    worker.progress_file.touch()
    worker.runner.at, worker.gpu = Progress(3, 9, -1, 0.0), 2
    assert [worker.status().gpu for _ in range(3)] == ["reading"] * 3 and read == [2]
    monkeypatch.setattr(workers, "GPU_SECONDS", 0.0)
    assert worker.status().gpu == "reading" and read == [2, 2]


def test_a_placement_fits_the_plan_and_the_version_that_it_runs(worker: Worker) -> None:
    found = worker.rank_placement(plan(), release())
    assert found.fits and (found.generation, found.rank, found.bundles, found.token) == (3, 1, (5, 6), None)
    assert found.place == WorkerPlace(NODE, IP, -1, os.getpid(), str(worker.progress_file))
    other = make_plan(load(None, ["model.layers=4", "mesh.pp=2", "schedule.microbatches=4"]), "cpu")
    assert not worker.rank_placement(plan(), "0.0").fits and not worker.rank_placement(other, release()).fits


def test_a_spare_takes_the_gpu_of_a_process_once_that_is_gone(worker: Worker, gpus: list[str]) -> None:
    assert worker.warm("cpu") == worker.place() and worker.place().gpu == -1
    asleep = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    worker.kill(asleep.pid)
    asleep.wait()
    assert worker.take(asleep.pid, 3).gpu == 3 and worker.take(os.getpid(), -1).gpu == -1
    gpus.append("5")
    assert worker.place().gpu == 5
    gpus[:] = ["MIG-1"]
    assert worker.place().gpu == -1, "a MIG instance has a name"


def test_a_spare_loads_for_a_generation_that_the_others_are_yet_to_be_fenced_for(
    worker: Worker, gpus: list[str]
) -> None:
    worker.begin(0, -1, 4, plan(), 0, (5, 6))
    assert (worker.generation, worker.rank, worker.runner.rank, worker.runner.previous) == (4, 0, 0, None)
    with pytest.raises(StaleGeneration):
        worker.start(3, plan(), 0, (5, 6), False)


@pytest.mark.parametrize(("visible", "index"), [("5,7,4", 1), ("", 7), (None, 7)])
def test_the_cuda_index_of_a_gpu_is_its_position_among_the_visible_ones(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus.append("7")
    assert workers._visible_index(-1) == workers._visible_index(7) == index


@pytest.mark.parametrize(
    "method", [Worker.status, Worker.clock, Worker.read_progress_of, Keeper.renew, Keeper.view, Keeper.found]
)
def test_what_the_driver_asks_again_and_again_is_not_in_rays_timeline(method: Any) -> None:
    assert method.__ray_enable_task_events__ is False
