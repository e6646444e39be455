"""A checkpoint that is copied and written while the next steps run holds the bits of its step, and only those."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from bits import same_bits
from full_disk import largest_file
from plans import SHALLOW, plan_of
from saves import assert_saved_beside_training, committed, saved_at_rest, tensors_of, written
from small_models import MOE
from worker_processes import call_all, losses_and_state, recover, start_run

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.lora import LoraSpec
from pentad.schedules.spec.optimizer import SpikeSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.abort import Aborted
from pentad.workers.checkpoint import atomic_io, checkpoint
from pentad.workers.checkpoint.shards import write_shard
from pentad.workers.checkpoint.snapshot import Snapshots

pytestmark = pytest.mark.timeout(150)
slow = pytest.mark.slow
ZERO = [MemoryOptions(zero=zero) for zero in range(4)]
SPIKES = SpikeSpec(threshold=0.5, window=2, min_steps=1)
LORA = LoraSpec(rank=2, alpha=4.0, targets=("q_proj", "v_proj"))
CASES: dict[str, Any] = {
    "1f1b, ZeRO-3": ("1f1b", 2, 2, 4, {"memory_options": ZERO[3]}),
    "zb-h2, every update taken back": ("zb-h2", 1, 4, 8, {"clip": 0.01, "post_validation": True}),
}
SLOW: dict[str, Any] = {
    "1f1b": ("1f1b", 2, 2, 4, {}),
    "dualpipe": ("dualpipe", 1, 4, 8, {}),
    "zb-h2, no update taken back": ("zb-h2", 2, 2, 4, {"clip": 1e6, "post_validation": True}),
    "routing biases": ("1f1b", 1, 2, 4, {"ep": 2, "model": replace(MOE, layers=4)}),
    "LoRA": ("1f1b", 2, 2, 4, {"lora": LORA}),
    "dualpipe, updates taken back": ("dualpipe", 1, 4, 8, {"clip": 0.5, "post_validation": True}),
    "zb-h2, ZeRO-3": ("zb-h2", 2, 2, 4, {"clip": 0.5, "post_validation": True, "memory_options": ZERO[3]}),
    "tp": ("zb-h2", 1, 2, 4, {"tp": 2, "clip": 0.5, "post_validation": True}),
    "ZeRO-1": ("1f1b", 4, 1, 2, {"memory_options": ZERO[1]}),
    "state on the host": ("1f1b", 2, 2, 4, {"host_optimizer": True, "memory_options": ZERO[1]}),
    "ZeRO-2": ("zb-v", 2, 2, 5, {"memory_options": ZERO[2]}),
}


def plan_for(case: str, corpus: str) -> Plan:
    name, dp, pp, m, more = (CASES | SLOW)[case]
    return plan_of(name, dp, pp, m, corpus, "float32", **{"model": SHALLOW} | more)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=slow) for case in SLOW)])
def test_a_checkpoint_saved_while_the_next_steps_run_has_the_bits_of_its_step(workers, corpus, tmp_path, case):
    plan = plan_for(case, corpus)
    assert_saved_beside_training(workers[: plan.mesh.size], plan, tmp_path)


@pytest.mark.slow
def test_a_snapshot_has_the_window_of_spikes_of_its_step(workers, corpus, tmp_path):
    plan = replace(plan_for("zb-h2, no update taken back", corpus), spikes=SPIKES)
    saved_at_rest(workers, plan, tmp_path / "rest", 3)
    start_run(workers, plan)
    folder = checkpoint.folder_of(tmp_path, 3)
    for call in (("run", 0, 3, True), ("snapshot", 3), ("run", 3, 3, True)):
        call_all(workers, *call)
    found = committed(written(workers, folder, 3), folder, 3)
    call_all(workers, "run", 6, 0)
    call_all(workers, "close")
    rest = tensors_of(checkpoint.folder_of(tmp_path / "rest", 3))
    assert same_bits(found, rest)


@pytest.mark.slow
def test_after_a_fence_no_file_appears_and_the_next_generation_saves(workers, corpus, tmp_path):
    """Rank 1 dies before its part of the snapshot is complete: no other rank's part may appear later."""
    plan, folder = plan_for("zb-h2, no update taken back", corpus), checkpoint.folder_of(tmp_path, 3)
    start_run(workers, plan)
    for call in (("run", 0, 3, True), ("snapshot", 3)):  # completed by the end of the open step, which never comes
        call_all(workers, *call)
    asked = written(workers, folder, 3)
    time.sleep(0.2)
    workers[1].signal(signal.SIGKILL)
    version, _ = recover(workers, [1], plan, 2)
    for worker, number in [asked[0], *asked[2:]]:
        with pytest.raises(Aborted):
            worker.answer(number)
    assert not list(tmp_path.glob("*/*.safetensors"))
    call_all(workers, "run", version, 3 - version)
    call_all(workers, "snapshot", 3)
    found = committed(written(workers, folder, 3), folder, 3)
    call_all(workers, "close")
    saved_at_rest(workers, plan, tmp_path / "rest", 3)
    rest = tensors_of(checkpoint.folder_of(tmp_path / "rest", 3))
    assert same_bits(found, rest)


def test_a_full_disk_leaves_no_file_and_training_and_the_next_checkpoint_go_on(workers, corpus, tmp_path):
    plan = plan_for("1f1b", corpus)
    expected = saved_at_rest(workers, plan, tmp_path / "rest", 3, 6)
    start_run(workers, plan)
    first, second = (checkpoint.folder_of(tmp_path / "beside", step) for step in (3, 6))
    answers = call_all(workers, "run", 0, 3, True)
    call_all(workers, "snapshot", 3)
    with largest_file(1000, workers[1].process.pid):
        asked = written(workers, first, 3)
        for worker, number in (asked[0], *asked[2:]):
            assert worker.answer(number).entries
        with pytest.raises(PentadError, match="File too large"):
            workers[1].answer(asked[1][1])
    assert {path.name[:9] for path in first.iterdir()} == {"stage-000", "stage-001"}
    assert len([*first.iterdir()]) == 3, "those of the other ranks"
    answers += call_all(workers, "run", 3, 3)
    call_all(workers, "snapshot", 6)
    found = committed(written(workers, second, 6), second, 6)
    losses, _ = losses_and_state(workers, answers, 0)
    call_all(workers, "close")
    assert losses == expected[0]
    assert same_bits(found, tensors_of(checkpoint.folder_of(tmp_path / "rest", 6)))


class Fixture:
    """Snapshots of one tensor on a CPU."""

    def __init__(self, **options: Any) -> None:
        self.state, self.version = torch.zeros(4), torch.zeros((), dtype=torch.int64)
        self.snapshots = Snapshots(torch.device("cpu"), **options)
        self.snapshots.version = 0
        self.files = {"a": {"x": self.state}}
        self.snapshots.reserve(self.files)

    def step(self) -> None:
        step = int(self.version) + 1
        with self.snapshots.update(step):
            self.state.fill_(step)
            self.version.fill_(step)

    def take(self, step: int) -> list[float]:
        return self.snapshots.take(step, lambda: None)[0]["a"]["x"].tolist()


def test_a_snapshot_is_copied_after_its_update_and_before_the_next():
    it = Fixture()
    it.snapshots.request(0, it.files, it.version)
    it.step()
    assert it.take(0) == [0.0] * 4
    it.snapshots.release()
    it.snapshots.request(3, it.files, it.version)
    for _ in range(5):
        it.step()
    assert it.take(3) == [3.0] * 4


def test_state_on_the_host_is_written_in_place_before_the_next_update():
    is_over = threading.Event()

    def check() -> None:
        if is_over.is_set():
            raise Aborted

    it = Fixture(in_place=True, check=check)
    assert it.snapshots.memory is not None and it.snapshots.memory.buffer.numel() == 0
    it.snapshots.request(1, it.files, it.version)
    it.step()
    assert it.take(1) == [1.0] * 4
    updating = threading.Thread(target=it.step)
    updating.start()
    updating.join(0.1)
    assert updating.is_alive() and it.state.tolist() == [1.0] * 4
    it.snapshots.release()
    updating.join(10)
    assert it.state.tolist() == [2.0] * 4
    it.snapshots.request(2, it.files, it.version)
    is_over.set()
    with pytest.raises(Aborted):
        it.step()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_write_that_hangs_and_is_given_up_stops_no_update_and_leaves_no_file(tmp_path, monkeypatch, in_place):
    """Its memory is not used for another snapshot before the write has returned."""
    it, found = Fixture(in_place=in_place), list[str]()
    hangs, answers = threading.Event(), threading.Event()
    sync = atomic_io._DirectFile.sync

    def late(file: atomic_io._DirectFile) -> None:
        hangs.set()
        answers.wait(60)
        sync(file)

    def write() -> None:
        files, _ = it.snapshots.take(1, lambda: None)
        publishing = partial(it.snapshots.publishing, 1, nullcontext)
        try:
            write_shard(folder, "a.safetensors", files["a"], publishing)
        except PentadError as error:
            found.append(str(error))
        finally:
            it.snapshots.release()

    monkeypatch.setattr(atomic_io._DirectFile, "sync", late)
    folder = checkpoint.folder_of(tmp_path, 1)
    it.snapshots.request(1, it.files, it.version)
    it.step()
    thread = threading.Thread(target=write)
    thread.start()
    assert hangs.wait(60)
    it.snapshots.give_up(1)
    it.step()
    assert it.snapshots._copy is not None
    answers.set()
    thread.join(60)
    assert found == ["the snapshot of step 1 was given up before it had been written"]
    assert not [*folder.iterdir()]
    it.snapshots.request(2, it.files, it.version)
    assert it.take(2) == [2.0] * 4
    it.snapshots.give_up(2)
    it.snapshots.release()
    it.snapshots.request(2, it.files, it.version)
    with it.snapshots.publishing(2, nullcontext):
        assert it.take(2) == [2.0] * 4, "a later attempt counts"


def test_a_second_snapshot_at_once_and_one_of_the_past_are_refused():
    it = Fixture()
    it.step()
    it.snapshots.request(0, it.files, it.version)
    with pytest.raises(PentadError, match="no snapshot of step 0"):
        it.take(0)
    it.snapshots.release()
    it.snapshots.request(1, it.files, it.version)
    it.snapshots.request(1, it.files, it.version)
    with pytest.raises(PentadError, match="one at a time"):
        it.take(1)


def test_the_next_snapshot_is_taken_after_one_that_failed():
    it = Fixture()
    it.snapshots.fail(PentadError("no memory"))
    with pytest.raises(PentadError, match="no memory"):
        it.take(0)
    it.snapshots.request(1, it.files, it.version)
    it.step()
    assert it.take(1) == [1.0] * 4


def test_whoever_waits_for_a_snapshot_is_freed_by_a_fence_and_by_a_failure():
    it, found = Fixture(), list[Exception]()

    def check() -> None:
        raise Aborted

    with pytest.raises(Aborted):
        it.snapshots.take(1, check)

    def wait() -> None:
        try:
            it.take(1)
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    it.snapshots.fail(PentadError("no memory"))
    thread.join(10)
    assert [str(error) for error in found] == ["no memory"]
