"""`pentad convert`: formats recognized by content, files that are copied along, and one sentence for a mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from commands import Pentad
from dcp_files import load, save
from full_disk import largest_file
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pentad.workers.checkpoint.checkpoint import folder_of, open_checkpoint
from pentad.workers.checkpoint.shards import read

SECTION = "model: {family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 48, vocab: 64, norm_eps: 1e-6}\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return hf_models.save(hf_models.make("llama"), tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def sharded(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as torch.distributed.checkpoint saves it, without config.json."""
    model = AutoModelForCausalLM.from_pretrained(files)
    return save({"model": model.state_dict(), "step": 3}, tmp_path_factory.mktemp("dcp"))


def convert(pentad: Pentad, *arguments: object) -> Any:
    status, out, err = pentad("convert", *map(str, arguments), "--json")
    assert status == 0, err
    assert [path.name for path in Path().iterdir() if path.name.startswith(".")] == []
    return json.loads(out)


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], tensor) for name, tensor in right.items())


def test_a_model_returns_from_every_format(pentad: Pentad, files: Path, sharded: Path) -> None:
    convert(pentad, sharded, "hf", "--to", "hf", "--model", files)
    facts = convert(pentad, sharded, "mine", "--to", "pentad", "--model", files)
    assert (facts["step"], facts["family"], facts["parameters"]) == (0, "llama", 19_616)
    assert convert(pentad, "mine", "dcp", "--to", "dcp")["files"] == ["__0_0.distcp"]
    convert(pentad, "dcp", "titan", "--to", "torchtitan")
    convert(pentad, "titan", "last", "--to", "hf")
    for out in ("hf", "last"):
        assert_same(load_file(f"{out}/model.safetensors"), load_file(files / "model.safetensors"))
        before, after = (json.loads((folder / "config.json").read_text()) for folder in (files, Path(out)))
        assert after == before | {"dtype": "float32"}
        assert (Path(out) / "generation_config.json").read_bytes() == (files / "generation_config.json").read_bytes()


def test_hugging_face_files_become_a_checkpoint_of_dcp(pentad: Pentad, files: Path) -> None:
    assert convert(pentad, files, "out", "--to", "dcp", "--dtype", "bfloat16")["dtype"] == "bfloat16"
    state = AutoModelForCausalLM.from_pretrained(files, dtype=torch.bfloat16).state_dict()
    assert_same(load({name: torch.zeros_like(tensor) for name, tensor in state.items()}, Path("out")), state)


def test_a_yaml_file_says_what_the_model_is(pentad: Pentad, files: Path, sharded: Path) -> None:
    Path("run.yaml").write_text(SECTION + "run: {steps: 3}\n")
    convert(pentad, sharded, "mine", "--to", "pentad", "--model", "run.yaml")
    convert(pentad, files, "theirs", "--to", "pentad")
    found = [open_checkpoint(folder_of(Path(out) / "checkpoints", 0)) for out in ("mine", "theirs")]
    assert_same(*(read(each, each.tensors) for each in found))
    convert(pentad, "mine", "out", "--to", "hf")
    assert AutoModelForCausalLM.from_pretrained("out").config.num_key_value_heads == 2


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["DCP", "out", "--to", "hf"], ["has no config.json: expected --model"]),
        (["DCP", "out", "--to", "hf", "--model", "nowhere"], ["--model is 'nowhere': expected a folder"]),
        (["DCP", "out", "--to", "hf", "--model", "bad.yaml"], ["model.layers is missing"]),
        (["DCP", "out", "--to", "hf", "--model", "list.yaml"], ["model"]),
        (["DCP", "out", "--to", "pentad", "--model", "wide.yaml"], ["has shape [32]: expected [64]"]),
        (["HF", "out", "--to", "dcp", "--model", "bad.yaml"], ["--model is 'bad.yaml': expected none"]),
        (["nowhere", "out", "--to", "dcp"], ["SOURCE is 'nowhere'"]),
        (["mine", "out", "--to", "pentad"], ["--to is pentad: expected another format"]),
        (["nowhere", "out", "--to", "pentad"], ["SOURCE is 'nowhere': expected a run's folder"]),
        (["mine", "out", "--to", "onnx"], ["Invalid value for '--to': 'onnx' is not one of 'pentad', 'hf'"]),
        (["mine", "out", "--to", "dcp", "--optimizer"], ["has nothing of the optimizer: expected m and v"]),
        (["mine", "out", "--to", "hf", "--optimizer", "--dtype", "bfloat16"], ["--dtype is bfloat16: expected"]),
        (["DCP", "full", "--to", "dcp", "--model", "HF"], ["OUT is 'full', which exists and is not empty"]),
        (["broken", "out", "--to", "hf", "--model", "HF"], [".metadata: a pickle is damaged"]),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    pentad: Pentad, files: Path, sharded: Path, arguments: list[str], words: list[str]
) -> None:
    Path("bad.yaml").write_text("model: {family: llama}\n")
    Path("list.yaml").write_text("- 1\n")
    Path("wide.yaml").write_text(SECTION.replace("hidden: 32", "hidden: 64"))
    Path("full").mkdir()
    Path("full/mine").write_text("kept")
    Path("broken").mkdir()
    Path("broken/.metadata").write_bytes(b"x")
    if "mine" in arguments:
        assert pentad("import-hf", str(files), "mine", "--json")[0] == 0
    before = sorted(Path().rglob("*"))
    given = [{"DCP": str(sharded), "HF": str(files)}.get(each, each) for each in arguments]
    status, out, err = pentad("convert", *given)
    assert status != 0 and out == "" and err.startswith("pentad: ")
    lines = [line for line in err.splitlines() if not line.startswith(("read ", "written "))]
    assert all(line.startswith("pentad: ") for line in lines) and len(lines) <= 6
    assert all(word in err for word in words), err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("to", ["pentad", "hf", "dcp"])
def test_a_full_disk_is_named_and_leaves_nothing(pentad: Pentad, files: Path, sharded: Path, to: str) -> None:
    with largest_file(20_000):
        status, _, err = pentad("convert", str(sharded), "new/out", "--to", to, "--model", str(files))
    where = "OUT is 'new/out'" if to == "pentad" else r"a temporary folder beside OUT is '/.*/\.convert-.*'"
    sentence = rf"^pentad: {where}, which cannot be written \(File too large\)"
    assert status == 1 and re.search(sentence, err, re.MULTILINE)
    assert [*Path().iterdir()] == []
