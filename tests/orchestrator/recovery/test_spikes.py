"""What a run does about loss spikes; on ranks in this process (`fake_ray`)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from fake_ray import FakeRun
from small_checkpoint import save_small

from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.runfolder import RunFolder
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.recovery import newest_checkpoint, spikes
from pentad.orchestrator.recovery.retention import kept_steps
from pentad.orchestrator.recovery.spikes import skipped_batches
from pentad.orchestrator.run import driver
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.batch import batch_of
from pentad.workers.checkpoint.checkpoint import Start, has_manifest
from pentad.workers.checkpoint.retention import delete_checkpoint

STEPS = 40
SQUARE = ("mesh.dp=2", "mesh.pp=2", "schedule.microbatches=4")  # replicas hold identical state
LINE = ("mesh.dp=1", "mesh.pp=4", "schedule.microbatches=8")  # no rank's state is anywhere else
COPIED = (*LINE, "elastic.replicate_every=3")  # except in memory
DEFAULT = (SQUARE, 4), (LINE, 1), (COPIED, 1)
StartRun = Callable[..., FakeRun]


def drive(run: FakeRun) -> int:
    run.group.restore(Start())
    return driver._run_generations(run.config, run.group, run.bus, run.requests, Start())


def expected(spikes: Collection[int], every: int) -> tuple[list[int], list[list[int]]]:
    """The batch of each step of a run that rolls back, and what it skips, from a step-by-step simulation."""
    batches, skipped, batch = list[int](), list[list[int]](), 0
    while len(batches) < STEPS:
        if batch in spikes:
            target = len(batches) // every * every
            skipped.append([target, len(batches) + 1 - target])
            del batches[target:]
        else:
            batches.append(batch)
        batch += 1
    return batches, skipped


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mesh", "seed"),
    [
        pytest.param(mesh, seed, marks=[] if (mesh, seed) in DEFAULT else [pytest.mark.slow])
        for mesh in (SQUARE, LINE, COPIED)
        for seed in range(12)
    ],
)
def test_a_rollback_depends_on_the_spikes_alone_whatever_dies(
    start: StartRun, mesh: tuple[str, ...], seed: int
) -> None:
    """Spikes on random batches, two of them consecutive, while ranks die."""
    rng = random.Random(seed)
    run = start(*mesh, "checkpoint.every=5", "spikes.policy=rollback")
    found = set(rng.sample(range(2, 50), 5))
    run.fake.spikes = found | {min(found) + 1}
    run.fake.faults = {step: (rng.randrange(4),) for step in rng.sample(range(8, 40), 3)} if seed else {}
    assert drive(run) == STEPS
    batches, skipped = expected(run.fake.spikes, 5)
    assert [run.fake.trained[step] for step in range(STEPS)] == batches
    assert [batch_of(step, run.group.skipped_batches) for step in range(STEPS)] == batches
    rows = read_lines(run.folder.path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert not any(row["skipped"] for row in rows)
    rollbacks = run.events("rollback")
    assert [event["skipped_batches"][-1] for event in rollbacks] == skipped
    assert [(event["to"], event["step"] + 1 - event["to"]) for event in rollbacks] == list(map(tuple, skipped))
    assert skipped_batches(run.folder, Start()) == tuple(map(tuple, skipped))


def test_a_checkpoint_of_batches_that_have_been_left_out_since_does_not_count(start: StartRun) -> None:
    """A rank that could not be reached commits it after the run has rolled back."""
    run = start(*LINE, "checkpoint.every=10", "spikes.policy=rollback")
    run.fake.spikes, run.fake.faults = {17}, {25: (1,)}
    late = run.folder.checkpoint(24)

    def on_call(rank: object, method: str) -> None:
        if method == "run" and run.events("rollback") and not run.events("lost") and not has_manifest(late):
            save_small(late, 24, {"skipped_batches": []})

    run.fake.on_call = on_call
    assert drive(run) == STEPS
    (refused,) = run.events("checkpoint refused")
    assert "left out since" in refused["cause"] and [row["step"] for row in run.events("recovered")] == [20]
    assert [run.fake.trained[step] for step in range(STEPS)] == expected({17}, 10)[0]


def test_checkpoints_of_steps_that_no_longer_count_are_deleted(start: StartRun) -> None:
    run = start(*SQUARE, "checkpoint.every=10", "spikes.policy=rollback")
    run.fake.spikes = {17}
    seen: list[list[int]] = []

    def on_call(rank: object, method: str) -> None:
        if method == "restore":
            seen.append(run.folder.saved())

    run.fake.on_call = on_call
    run.save(13)  # saved by time, of steps that will be abandoned
    drive(run)
    assert seen[-1] == [0, 10]
    assert run.folder.saved() == [0, 10, 20, 30, 40]  # the fake deletes none


def test_a_checkpoint_after_a_spike_is_not_committed_and_a_driver_that_dies_meets_the_spike_again(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run always resumes from a step before the spike, or from one of the steps that replace it."""
    run = start(*SQUARE, "checkpoint.every=10", "spikes.policy=rollback", "eval.every=0")
    run.fake.spikes = {19}
    run.save(13)

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "roll_back", dies)
    with pytest.raises(KeyboardInterrupt):
        drive(run)
    assert run.rows()[-1]["skipped"] and run.folder.saved() == [0, 10, 13]


def test_a_rollback_that_is_cut_short_leaves_no_checkpoint_after_the_one_it_has_deleted(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, deleted = start(*SQUARE, "checkpoint.every=10", "spikes.policy=rollback"), list[int]()

    def dies_at_the_second(folder: Path) -> None:
        if deleted:
            raise KeyboardInterrupt
        deleted.append(int(folder.name[5:]))
        delete_checkpoint(folder)

    for step in (10, 13, 16, 18):
        run.save(step)
    monkeypatch.setattr(newest_checkpoint, "delete_checkpoint", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        spikes.roll_back(run.config, run.group, run.bus, 18)
    assert deleted == [18] and run.folder.saved() == [10, 13, 16]


@pytest.mark.parametrize("hangs_in", ["saved", "delete_checkpoint"])
def test_a_rollback_waits_for_storage_that_hangs_as_long_as_a_recovery_does(
    start: StartRun, monkeypatch: pytest.MonkeyPatch, hangs_in: str
) -> None:
    seconds = "cluster.start_timeout_seconds=0.2", "checkpoint.hang_seconds=0.2"
    run, hangs = start(*SQUARE, "checkpoint.every=10", "spikes.policy=rollback", *seconds), threading.Event()
    for step in (0, 10, 13):
        run.save(step)
    at = RunFolder if hangs_in == "saved" else newest_checkpoint
    monkeypatch.setattr(at, hangs_in, lambda *_: hangs.wait())
    began = time.monotonic()
    with pytest.raises(PentadError, match=r"^the checkpoints' storage has not answered within 0\.2 s$"):
        spikes.roll_back(run.config, run.group, run.bus, 18)
    assert time.monotonic() < began + 10 and not run.events("rollback")
    hangs.set()


def test_the_checkpoint_to_go_back_to_outlives_newer_ones(start: StartRun) -> None:
    run = start(*SQUARE, "checkpoint.every=10", "spikes.policy=rollback")
    found = [kept_steps(run.config, saved, []) for saved in ([0], [0, 10, 13], [0, 10, 13, 23])]
    assert found == [(0,), (10,), (13,)]  # the one of step 20 could not be written


def test_too_many_rollbacks_to_the_same_checkpoint_end_the_run(start: StartRun) -> None:
    run = start(*SQUARE, "checkpoint.every=10", "spikes.policy=rollback", "spikes.max_consecutive=2")
    run.fake.spikes = set(range(12, 100))
    with pytest.raises(PentadError, match=r"^step 10 is a spike after 2 rollbacks to step 10: expected at most "):
        drive(run)
    assert [event["to"] for event in run.events("rollback")] == [10, 10]


def test_without_its_checkpoint_a_rollback_is_one_sentence(start: StartRun) -> None:
    run = start(*SQUARE, "checkpoint.every=10", "spikes.policy=rollback")
    run.save(13)
    run.group.restore(Start(run.folder.checkpoint(13), 13))
    run.fake.spikes = {15}
    words = "step 15 is a spike, and there is no checkpoint of at most 10 steps to go back to: "
    with pytest.raises(PentadError, match=words):
        driver._run_generations(run.config, run.group, run.bus, run.requests, Start(run.folder.checkpoint(13), 13))


@pytest.mark.parametrize("most", [3, 4])
def test_skipped_steps_are_in_the_journal_and_too_many_in_a_row_end_the_run(start: StartRun, most: int) -> None:
    run = start(*SQUARE, "spikes.policy=skip", f"spikes.max_consecutive={most}")
    run.fake.spikes = {5, 20, 21, 22}
    if most == 3:
        with pytest.raises(PentadError, match=r"^steps 20 to 22 were all skipped: expected fewer than spikes.max_"):
            drive(run)
    else:
        assert drive(run) == STEPS
    assert [(event["step"], event["grad_norm"]) for event in run.events("skip")] == [(s, 1.0) for s in (5, 20, 21, 22)]


def test_a_run_stops_at_a_spike_with_a_checkpoint(start: StartRun) -> None:
    run = start(*SQUARE, "spikes.policy=stop")
    run.fake.spikes = {12}
    done = drive(run)
    assert 12 < done < 20
    assert run.folder.saved() == [done]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["spikes.policy=rollback"], "checkpoint.every is 0: expected at least 1 for spikes.policy = rollback"),
        (["spikes.min_steps=200"], "spikes.min_steps is 200: expected at most spikes.window = 128"),
        (["spikes.policy=skipp"], "did you mean skip?"),
        (["spikes.window=1"], "spikes.window is 1: expected at least 2"),
    ],
)
def test_wrong_settings_are_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(PentadError) as error:
        load(None, overrides)
    assert sentence in str(error.value)
