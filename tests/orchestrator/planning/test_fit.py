"""`pentad plan`, and what `pentad train` refuses before starting: too little memory, bad data, nothing to shard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Pentad


def test_memory_of_a_device_can_be_given(pentad: Pentad) -> None:
    small = "mesh.pp=2", "model.layers=2", "schedule.name=1f1b", "schedule.microbatches=2", "--device", "cuda"
    assert pentad("plan", *small, "--memory", "1")[0] == 0
    status, out, _ = pentad("plan", *small, "--memory", "0.05")
    assert status == 1
    assert "of a device of 0.05 GiB, which has 51.2 MiB" in out


def test_a_run_that_does_not_fit_is_refused_before_anything_starts(pentad: Pentad, tmp_path: Path) -> None:
    sizes = ("model.hidden=32768", "model.ffn=131072", "model.layers=80", "cluster.device=cpu")
    status, out, err = pentad("train", *sizes)
    assert status == 1
    assert "starting Ray" not in out
    assert err.startswith("pentad: run quickstart does not fit: all ranks together need ")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.path=nowhere"], "data.path is 'nowhere'"),
        (["model.vocab=100"], "model.vocab is 100: expected at least 257"),
        (["data.path=builtin:everything"], "data.path is builtin:everything: expected one of builtin:pydoc"),
        (["data.path=corpus", "model.vocab=256"], "model.vocab is 256: expected at least"),
    ],
)
def test_plan_checks_the_data_as_train_does(
    pentad: Pentad, corpus: str, tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    (tmp_path / "corpus").symlink_to(corpus)
    cache = f"data.cache={tmp_path / 'cache'}"
    status, out, _ = pentad("plan", *overrides, cache, "--device", "cuda")
    assert status == 1
    assert f"the data cannot be used on this machine: {sentence}" in out
    status, out, _ = pentad("plan", *overrides, cache, "--device", "cuda", "--json")
    facts = json.loads(out)
    assert (status, facts["fits"]["ok"], facts["data"]["ok"]) == (1, True, False)
    assert facts["data"]["error"].startswith(sentence)
    status, out, err = pentad("train", *overrides, cache, "cluster.device=cpu")
    assert status == 1
    assert sentence in err
    assert "starting Ray" not in out
    assert not (tmp_path / "cache").exists(), "plan built a corpus"


def test_zero_without_replicas_is_reported_in_one_sentence(pentad: Pentad) -> None:
    for verb in (("plan",), ("train", "cluster.device=cpu")):
        status, out, err = pentad(*verb, "zero.stage=3")
        assert (status, err.count("\n")) == (1, 1)
        assert "starting Ray" not in out
        assert "zero.stage is 3, but mesh.dp x mesh.cp x mesh.ep is 1" in err


def test_plan_shows_the_balance_of_context_parallel_ranks(pentad: Pentad) -> None:
    cut = ("mesh.cp=4", "schedule.name=1f1b")
    assert "cp ranks have zigzag parts: the busiest computes 1.000 times the least" in pentad("plan", *cut)[1]
    for method in ("ring", "all_gather", "ulysses"):
        facts = json.loads(pentad("plan", *cut, f"mesh.cp_method={method}", "model.kv_heads=8", "--json")[1])
        assert 1 <= facts["cp_imbalance"] <= 1.05
