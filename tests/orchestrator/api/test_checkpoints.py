"""`pentad.load_checkpoint` gives the weights that were imported or trained, in each form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_files import take
from hf_models import make, save
from safetensors.torch import load_file

import pentad
from pentad.orchestrator.monitoring.display import Display
from pentad.workers.checkpoint.checkpoint import Checkpoint, open_checkpoint
from pentad.workers.checkpoint.shards import read

TOKENS = torch.arange(24).view(2, 12) % 64


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "mixtral", "qwen3-moe", "deepseek-v3")),
    ],
)
def test_every_form_has_the_weights_that_were_imported(name: str, tmp_path: Path) -> None:
    model = make(name)
    done = take(save(model, tmp_path / "files"), tmp_path / "imported")
    transformed = pentad.load_checkpoint(tmp_path / "imported", "transformers")
    assert type(transformed) is type(model)
    expected = model.state_dict()
    assert transformed.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in transformed.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(transformed.eval()(TOKENS).logits, model(TOKENS).logits)
    state = pentad.load_checkpoint(done.folder, "hf")
    files = load_file(tmp_path / "files" / "model.safetensors")
    assert state.keys() == files.keys()
    assert all(torch.equal(state[key], files[key]) for key in files)
    own, found = pentad.load_checkpoint(str(done.folder)), open_checkpoint(done.folder)
    stored = {key.removeprefix("model."): tensor for key, tensor in read(found, found.tensors).items()}
    assert own.keys() == stored.keys() and all(torch.equal(own[key], stored[key]) for key in own)


def test_a_dtype_is_that_of_all_tensors(tmp_path: Path) -> None:
    take(save(make("llama"), tmp_path / "files"), tmp_path / "imported")
    exact = pentad.load_checkpoint(tmp_path / "imported")
    for name, tensor in pentad.load_checkpoint(tmp_path / "imported", dtype="bfloat16").items():
        assert torch.equal(tensor, exact[name].bfloat16())
    found = pentad.load_checkpoint(tmp_path / "imported", "transformers", dtype="bfloat16")
    assert {tensor.dtype for tensor in found.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("name", "value"), [("form", "tf"), ("dtype", "float16")])
def test_another_form_or_dtype_is_refused(name: str, value: Any) -> None:
    with pytest.raises(pentad.PentadError, match=f"^{name} is '{value}': expected one of "):
        pentad.load_checkpoint("nowhere", **{name: value})


def test_a_source_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(pentad.PentadError, match=r"^CHECKPOINT is 'nowhere': expected a run's folder or a name"):
        pentad.load_checkpoint("nowhere")


def test_an_evaluation_takes_the_run_s_configuration_with_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take(save(make("llama"), tmp_path / "files"), tmp_path / "imported")
    calls = []

    def run(config: pentad.RunConfig, checkpoint: Checkpoint, display: Display) -> list[dict]:
        display.note("evaluating")
        calls.append((config, checkpoint))
        return [{"data": "wiki", "loss": 4.0}]

    monkeypatch.setattr("pentad.orchestrator.run.evaluate.evaluate", run)
    found = pentad.evaluate(tmp_path / "imported", data="wiki=builtin:pydoc", sequences=3, cluster={"device": "cpu"})
    assert (found, "evaluating" in capsys.readouterr().out) == ([{"data": "wiki", "loss": 4.0}], True)
    (config, checkpoint), sections = calls[0], calls[0][0].model_dump()
    assert (sections["eval"]["sequences"], config.cluster.device, checkpoint.step) == (3, "cpu", 0)
    assert pentad.evaluate(tmp_path / "imported", data=["builtin:pydoc"], quiet=True) and not capsys.readouterr().out
    with pytest.raises(pentad.PentadError, match="--data is missing: expected a corpus"):
        pentad.evaluate(tmp_path / "imported")
