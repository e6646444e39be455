"""The points of a grid, and which of them are not trials."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentad.orchestrator.config.config import load
from pentad.orchestrator.sweep.free_devices import FreeDevices
from pentad.orchestrator.sweep.grid import grid, values_of
from pentad.orchestrator.sweep.trials import SweepRequest, Trial, first_valid, trial_config, trials_of
from pentad.schedules.ir.errors import PentadError

SMALL = ("model.layers=4", "cluster.device=cpu")


def free(devices: int = 2, most: int = 2**16) -> FreeDevices:
    return FreeDevices("cpu", list(map(str, range(devices))), most)


def trials(*words: str, search: int = 0, gpus: tuple[int, ...] = (), most: int = 2**16) -> list[Trial]:
    return trials_of(SweepRequest(None, grid([*SMALL, *words]), 4, search, gpus), free(most=most), Path("runs"))


@settings(max_examples=10)
@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=3, unique=True), min_size=1, max_size=4))
def test_a_grid_has_every_combination_once(values: list[list[int]]) -> None:
    found = grid([f"a.k{number}={','.join(map(str, each))}" for number, each in enumerate(values)])
    assert len(set(found)) == len(found) == prod(map(len, values))
    for point in found:
        assert all(int(word.partition("=")[2]) in each for word, each in zip(point.words, values, strict=True))
        assert len(point.varied) == sum(len(each) > 1 for each in values)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1f1b", ["1f1b"]),
        ("1f1b, zb-h2", ["1f1b", "zb-h2"]),
        ("[mlp,core_attn]", ["[mlp,core_attn]"]),
        ("[mlp,core_attn],full,none", ["[mlp,core_attn]", "full", "none"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("null,2", ["null", "2"]),
    ],
)
def test_values_are_between_the_commas_outside_brackets_and_quotes(text: str, values: list[str]) -> None:
    assert values_of(f"k={text}") == values


@pytest.mark.parametrize("text", ["1,,2", "1,", ",1", "[1,2", "1],[2", "1,1", "'a,b", "a,[b]c"])
def test_what_is_ambiguous_is_refused(text: str) -> None:
    with pytest.raises(PentadError, match=r"^mesh\.pp is .*: expected values with commas between them"):
        values_of(f"mesh.pp={text}")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["mesh.pp=1", "mesh.pp=2"], "mesh.pp is given twice"),
        (["run.seed=1,2"], "run.seed has several values: expected one"),
        (["cluster.device=cpu,cuda"], "cluster.device has several values: expected one"),
        ([f"a.b={','.join(map(str, range(50)))}", f"a.c={','.join(map(str, range(50)))}"], "the grid has 2,500 points"),
    ],
)
def test_a_grid_that_is_no_grid_is_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(PentadError, match=sentence):
        grid(words)


def test_what_cannot_run_is_pruned_with_its_reason_and_the_rest_is_planned() -> None:
    found = trials("mesh.pp=1,2,8", "schedule.name=1f1b,zb-h1", most=4)
    assert [trial.config is None for trial in found] == [False, False, False, False, True, True]
    assert len({trial.name for trial in found}) == 6
    for trial in found[:4]:
        assert trial.row.predicted_seconds and trial.row.predicted_bytes and trial.row.model.startswith("llama ")
    for trial in found[4:]:
        assert trial.row.outcome == "pruned" and trial.row.ranks == 8 and trial.row.pp == 8
        assert trial.row.cause.startswith("model.layers is 4: expected at least one for each of 8 pipeline stages")
    (large,) = trials("mesh.dp=8", "mesh.pp=1", "schedule.microbatches=2", most=4)
    assert large.row.cause == "mesh is dp8, which has 8 ranks: expected at most 4, the CPUs that are free"
    (huge,) = trials("model.hidden=65536", "model.heads=64", "model.ffn=262144", "mesh.pp=1")
    assert huge.row.cause.startswith("does not fit: ") and huge.config is None and huge.row.layout


def test_one_configuration_in_other_words_is_one_trial() -> None:
    same = trials("mesh.pp=1", "optimizer.learning_rate=0.003,3e-3,0.1")
    assert len(same) == 2 and same[0].name == trials("optimizer.learning_rate=0.003", "mesh.pp=1")[0].name


def test_the_searchs_best_meshes_are_trials_on_each_number_of_gpus() -> None:
    found = trials("schedule.name=1f1b", "zero.stage=0", search=2, gpus=(1, 2))
    assert [trial.row.ranks for trial in found] == [1, 2, 2]
    assert all(trial.row.settings for trial in found[1:])
    for trial in found:
        assert load(None, trial.row.command.split()[2:]).mesh.size == trial.row.ranks


def test_axes_that_no_mesh_of_the_gpus_has_are_a_pruned_row() -> None:
    (fits, other) = trials("mesh.dp=2,4", "zero.stage=0", "batch.global_batch_size=4", search=1, gpus=(2,))
    assert (fits.row.cause, fits.row.ranks) == ("", 2)
    assert other.row.cause == "mesh.dp is 4: expected a divisor of the number of GPUs, 2"


def test_a_trial_is_a_few_steps_of_the_run_and_nothing_beside_them() -> None:
    words = ["data.holdout=0.1", "eval.every=5", "checkpoint.every=5", "checkpoint.keep_best=true", "loggers.use=[csv]"]
    words += ["optimizer.warmup_steps=50", "run.steps=60", "spikes.policy=rollback", "elastic.driver_lease=60"]
    words += ["batch.rampup=[{global_batch_size: 8, steps: 20}]", "elastic.spares=2"]
    ports = ("port", "control_port", "page_port")
    words += [f"metrics.{name}={9000 + number}" for number, name in enumerate(ports)]
    before = load(None, words)
    found = trial_config(before, 4, "cpu")
    assert found.run.steps == 4 and not found.data.holdout and not found.eval.every and not found.loggers.use
    assert not any((found.checkpoint.every, found.checkpoint.every_seconds, found.checkpoint.at_end))
    assert not any(getattr(found.metrics, name) for name in ports), "several trials may listen at once"
    assert not any((found.elastic.max_failures, found.elastic.spares, found.elastic.driver_lease, found.batch.rampup))
    assert found.optimizer.curve(4) == before.optimizer.curve(60)


def test_a_sweep_in_which_nothing_is_valid_is_a_mistake() -> None:
    assert first_valid(None, grid(["mesh.pp=3,4", "schedule.name=dualpipe"])).mesh.pp == 4
    with pytest.raises(PentadError, match=r"mesh\.pq is unknown"):
        first_valid(None, grid(["mesh.pq=3,4"]))
    with pytest.raises(PentadError, match=r"batch\.global_batch_size is 16"):
        first_valid(None, grid(["mesh.dp=4"]))
    assert first_valid(None, grid(["mesh.dp=4"]), searched=True).mesh.dp == 4
