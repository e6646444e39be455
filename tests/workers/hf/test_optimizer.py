"""The optimizer's state beside Hugging Face files: a run that continues from them has the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_files import give, refused, take, tensors_of
from plans import MODEL, plan_of
from resume import run_and_save
from safetensors.torch import load_file

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.optimizer import moment_offset_of
from pentad.workers.checkpoint.checkpoint import commit, folder_of, open_checkpoint
from pentad.workers.checkpoint.shards import read, write_shard


def with_moments(folder: Path, step: int, weights: dict[str, torch.Tensor], meta: dict[str, int] | None = None) -> Path:
    """A checkpoint of `weights` and random moments."""
    moments = {
        name.replace("model.", f"optimizer.{kind}.", 1): torch.randn_like(tensor)
        for kind in "mv"
        for name, tensor in weights.items()
        if not name.endswith("experts.bias")
    }
    path = folder_of(folder, step)
    commit(path, step=step, shards=[write_shard(path, "a.safetensors", weights | moments)], meta=meta or {})
    return path


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["llama-tied", "mixtral", "deepseek-v3-mtp"])
def test_moments_return_with_the_step(name: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    done = take(saved(name), tmp_path / "in")
    checkpoint = with_moments(tmp_path, 17, tensors_of(done))
    exported = give(checkpoint, tmp_path / "out", done.family, done.model, optimizer=True, limit=20_000)
    assert len(exported.files) > 1
    moments = [load_file(path) for path in (tmp_path / "out/optimizer/m").glob("*.safetensors")]
    weights = [load_file(tmp_path / "out" / file) for file in exported.files]
    names = {name for file in weights for name in file if not name.endswith("correction_bias")}
    assert {name for file in moments for name in file} == {
        name for name in names if "embed_tokens" not in name.partition("layers")[2] and "shared_head.head" not in name
    }
    again = take(tmp_path / "out", tmp_path / "again", optimizer=True)
    assert (again.step, again.folder.name, again.model) == (17, "step-00000017", done.model)
    found, before = tensors_of(again), open_checkpoint(checkpoint)
    expected = read(before, before.tensors)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    plain = take(tmp_path / "out", tmp_path / "plain")
    assert plain.step == 0 and tensors_of(plain).keys() == tensors_of(done).keys()


def test_a_run_continues_from_its_export_with_the_same_bits(fleet, corpus, tmp_path: Path) -> None:
    plan = plan_of("1f1b", 1, 2, 4, corpus, "float32", model=MODEL)
    folder = folder_of(tmp_path, 2)
    run_and_save(fleet, plan, 2, folder)
    give(folder, tmp_path / "out", "llama", MODEL, optimizer=True)
    again = take(tmp_path / "out", tmp_path / "again", optimizer=True)
    states = [fleet.run(plan, [(2, 1)], restore=str(each)) for each in (folder, again.folder)]
    for before, after in zip(*states, strict=True):
        assert before.results[0].losses == after.results[0].losses
        assert before.results[0].grad_norm == after.results[0].grad_norm
        assert before.state.keys() == after.state.keys()
        assert all(torch.equal(after.state[name], tensor) for name, tensor in before.state.items())


def test_an_export_keeps_the_age_of_moments(saved: Callable[[str], Path], tmp_path: Path) -> None:
    done = take(saved("llama"), tmp_path / "in")
    checkpoint = with_moments(tmp_path, 3, tensors_of(done), {"moment_offset": 5})
    give(checkpoint, tmp_path / "out", done.family, done.model, optimizer=True)
    again = take(tmp_path / "out", tmp_path / "again", optimizer=True)
    assert (again.step, moment_offset_of(open_checkpoint(again.folder).meta)) == (3, 5)


def test_an_export_without_the_state_is_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    done = take(saved("llama"), tmp_path / "in")
    with pytest.raises(PentadError, match=r"has no optimizer state: expected one of a step that was trained"):
        give(done.folder, tmp_path / "out", done.family, done.model, optimizer=True)
    with pytest.raises(PentadError, match=r"has no optimizer/state.json: expected an export with --optimizer"):
        take(saved("llama"), tmp_path / "out", optimizer=True)
    checkpoint = with_moments(tmp_path, 3, tensors_of(done))
    give(checkpoint, tmp_path / "out", done.family, done.model, optimizer=True)
    for wrong in (
        {"step": -1, "kinds": ["m"]},
        {"step": 3, "kinds": ["../m"]},
        {"step": 3},
        {"step": 3, "kinds": ["m"], "moment_offset": -4},
    ):
        (tmp_path / "out/optimizer/state.json").write_text(json.dumps(wrong))
        refused(tmp_path / "out", tmp_path, "state.json has no valid step and kinds", optimizer=True)
    (tmp_path / "out/optimizer/state.json").write_text(json.dumps({"step": 3, "kinds": ["m", "x"]}))
    refused(tmp_path / "out", tmp_path, "x/model.safetensors is missing", optimizer=True)
