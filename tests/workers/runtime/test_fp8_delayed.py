"""Delayed scaling on ranks: the maxima of the previous step are part of the training state."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_runs, same_bits
from fleet import BadGradient, Fleet, Outcome
from fp8_plans import DELAYED, TENSOR, ZERO_3, fp8_plan
from plans import is_close
from resume import assert_repeatable, commit, run_and_save
from worker_processes import call_all, losses_and_state, recover, start_run

from pentad.workers.checkpoint import checkpoint, shards
from pentad.workers.linear.amax_history import PREFIX

slow = pytest.mark.slow
SMALL: dict[str, Any] = {"layers": 2, "microbatches": 2}


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The maxima of a checkpoint, by name."""
    found = checkpoint.open_checked(folder)
    return shards.read(found, [name for name in found.tensors if name.startswith(PREFIX)])


def run_to(fleet: Fleet, plan, steps: int, folder: Path, bad: BadGradient | None = None) -> list[Outcome]:
    outcomes = fleet.run(plan, [(0, steps)], save=str(folder), bad_gradient=bad)
    commit(folder, steps, [entry for outcome in outcomes for entry in outcome.shards])
    return outcomes


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("zb-h2", {"pp": 2, "post_validation": True, **SMALL}),
        pytest.param("1f1b", {"tp": 2, **SMALL}, marks=slow),
        pytest.param("1f1b", {"dp": 2, "pp": 2, **ZERO_3}, marks=slow),
        pytest.param("dualpipe", {"pp": 2, "microbatches": 4}, marks=slow),
    ],
)
def test_repeated_and_resumed_runs_are_bit_identical(fleet, corpus, tmp_path, name, sizes):
    assert_repeatable(fleet, replace(fp8_plan(DELAYED, name, sizes, corpus), dtype="float32"), tmp_path)


@pytest.mark.parametrize("value", [math.nan, pytest.param(1e3, marks=slow)])
@pytest.mark.parametrize(
    "sizes", [{"pp": 2, **SMALL}, pytest.param({"pp": 2, "dp": 2, **SMALL}, marks=slow)], ids=["pp2", "pp2 dp2"]
)
def test_a_step_that_is_taken_back_leaves_the_maxima_of_a_run_with_a_barrier(fleet, corpus, tmp_path, sizes, value):
    """It is skipped for a non-finite norm or repeated for a clipped one; later steps have the same bits."""
    runs, maxima = [], []
    for optimistic in (True, False):
        plan = fp8_plan(DELAYED, "zb-h2", {**sizes, "post_validation": optimistic, "clip": 50.0}, corpus)
        folder = checkpoint.folder_of(tmp_path / str(optimistic), 4)
        runs.append(run_to(fleet, replace(plan, dtype="float32"), 4, folder, BadGradient(0, 1, value)))
        maxima.append(saved(folder))
    assert_same_runs(*runs)
    assert [r.skipped for r in runs[0][0].results] == [False, not math.isfinite(value), False, False]
    assert same_bits(*maxima) and len(maxima[0]) == 8


@pytest.mark.parametrize("optimistic", [False, pytest.param(True, marks=slow)])
def test_a_skipped_step_changes_no_maximum(fleet, corpus, tmp_path, optimistic):
    plan = fp8_plan(DELAYED, "zb-h2", {"pp": 2, **SMALL, "post_validation": optimistic}, corpus)
    folders = [checkpoint.folder_of(tmp_path / name, steps) for name, steps in (("one", 1), ("two", 2), ("bad", 2))]
    for folder, steps, fault in zip(folders, (1, 2, 2), (None, None, BadGradient(1, 1, math.nan)), strict=True):
        run_to(fleet, replace(plan, dtype="float32"), steps, folder, fault)
    one, two, bad = map(saved, folders)
    assert same_bits(one, bad)
    assert all((values > 0).all() and not torch.equal(values, two[name]) for name, values in one.items())


@pytest.mark.slow
def test_a_resumed_run_on_another_mesh_has_the_maxima_of_all_ranks(fleet, corpus, tmp_path):
    """Saved by two tensor ranks, read by two stages, against one process that never stopped."""
    sizes = [{"tp": 2}, {"pp": 2}, {}]
    split, staged, alone = (fp8_plan(DELAYED, "1f1b", {**SMALL, **each}, corpus) for each in sizes)
    folders = [checkpoint.folder_of(tmp_path / name, steps) for name, steps in (("a", 1), ("b", 3), ("c", 3))]
    run_and_save(fleet, split, 1, folders[0])
    found = fleet.run(staged, [(1, 2)], restore=str(folders[0]), save=str(folders[1]))
    commit(folders[1], 3, [entry for outcome in found for entry in outcome.shards])
    (want,) = run_and_save(fleet, alone, 3, folders[2])
    assert [r.grad_norm for r in found[0].results] == pytest.approx([r.grad_norm for r in want.results[1:]], rel=1e-10)
    a, b = saved(folders[1]), saved(folders[2])
    assert a.keys() == b.keys() and all(is_close(a[name], b[name], 1e-6) for name in a)


@pytest.mark.slow
def test_scales_do_not_depend_on_slices(fleet, corpus, tmp_path):
    """They do only while there are no maxima: then each slice is scaled by its own."""
    folder = checkpoint.folder_of(tmp_path, 1)
    whole = fp8_plan(DELAYED, "1f1b", {"pp": 2, **SMALL}, corpus)
    sliced = fp8_plan(DELAYED, "seq-1f1b", {"pp": 2, "slices": 2, **SMALL}, corpus)
    first, *_ = run_and_save(fleet, whole, 1, folder)
    want, found = (fleet.run(plan, [(1, 2)], restore=str(folder)) for plan in (whole, sliced))
    for one, other in zip(want[0].results, found[0].results, strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-10)
    assert fleet.run(sliced, [(0, 1)])[0].results[0].grad_norm != pytest.approx(first.results[0].grad_norm, rel=1e-6)


@pytest.mark.slow
def test_a_run_without_maxima_begins_with_current_scaling(fleet, corpus, tmp_path):
    """Whether it starts from a checkpoint of another recipe or from weights alone."""
    folder = checkpoint.folder_of(tmp_path, 2)
    current, delayed = (fp8_plan(spec, "1f1b", {"pp": 2, **SMALL}, corpus) for spec in (TENSOR, DELAYED))
    run_and_save(fleet, current, 2, folder)
    want, found = (fleet.run(plan, [(2, 2)], restore=str(folder)) for plan in (current, delayed))
    assert found[0].results[0].grad_norm == want[0].results[0].grad_norm
    assert found[0].results[1].grad_norm != want[0].results[1].grad_norm
    run_and_save(fleet, delayed, 2, folder_of_delayed := checkpoint.folder_of(tmp_path / "delayed", 2))
    of_weights = (
        fleet.run(plan, [(2, 1)], restore=str(folder_of_delayed), optimizer=False) for plan in (current, delayed)
    )
    first, second = (outcomes[0].results[0].grad_norm for outcomes in of_weights)
    assert first == second


@slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("optimistic", [False, True])
def test_a_repaired_rank_has_the_maxima_of_the_others(workers, corpus, optimistic):
    sizes = {"dp": 2, "pp": 2, **SMALL, "post_validation": optimistic}
    plan = replace(fp8_plan(DELAYED, "zb-h2", sizes, corpus), dtype="float32")
    steps = 10
    start_run(workers, plan)
    expected = losses_and_state(workers, call_all(workers, "run", 0, steps), 0)
    call_all(workers, "close")
    start_run(workers, plan)
    for worker in workers:
        worker.call("run", 0, 80)
    workers[1].wait_for_step(4)
    workers[1].signal(signal.SIGKILL)
    version, _ = recover(workers, [1], plan, 2)
    assert 0 < version < steps
    results = call_all(workers, "run", version, steps - version)
    found = losses_and_state(workers, results, version)
    assert same_bits(found[1], expected[1])
    assert found[0] == {step: expected[0][step] for step in range(version, steps)}
    call_all(workers, "close")
