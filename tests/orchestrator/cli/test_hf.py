"""`pentad import-hf` and `pentad export-hf`: arguments, output and files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import hf_models
import pytest
import torch
import transformers
from commands import Pentad
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pentad.orchestrator.config.model_section import ModelSection
from pentad.orchestrator.config.yaml_text import load_yaml
from pentad.workers.checkpoint.checkpoint import commit, folder_of, open_checkpoint
from pentad.workers.checkpoint.shards import read, write_shard
from pentad.workers.data.tokenizer import train_tokenizer
from pentad.workers.hf.config import make_section, parse_config, parse_section

SECTION = "model: {family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 48, vocab: 64, norm_eps: 1e-6}\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    torch.manual_seed(0)
    folder = hf_models.save(hf_models.make("llama"), tmp_path_factory.mktemp("files"))
    train_tokenizer(["some text"], 300).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def test_an_imported_model_is_exported_to_the_same_files(pentad: Pentad, files: Path) -> None:
    status, out, err = pentad("import-hf", str(files), "mine")
    assert (status, out.count("\n")) == (0, 2), err
    assert "llama, 19,616 parameters" in out and "read 76.6 KiB of 76.6 KiB" in err
    found = open_checkpoint(folder_of(Path("mine/checkpoints"), 0))
    assert found.step == 0
    section = load_yaml(Path("mine/model.yaml").read_text(), "model.yaml")["model"]
    assert section["family"] == "llama" and section["experts"] is None
    assert parse_section(section) == parse_section(found.meta["model"])
    for path in ("mine", str(found.folder)):
        out_folder = f"out-{len(path)}"
        status, out, err = pentad("export-hf", path, out_folder, "--json")
        assert status == 0, err
        facts = json.loads(out)
        assert (facts["step"], facts["dtype"], facts["files"]) == (0, "float32", ["model.safetensors"])
        before, after = (load_file(folder / "model.safetensors") for folder in (files, Path(out_folder)))
        assert all(torch.equal(before[name], after[name]) for name in before)
        config = json.loads((Path(out_folder) / "config.json").read_text())
        given = json.loads((files / "config.json").read_text())
        assert config == given | {"dtype": "float32"}
        assert AutoTokenizer.from_pretrained(out_folder).decode([1, 2]) is not None


def test_a_run_that_began_as_an_import_exports_what_the_import_kept(pentad: Pentad, files: Path) -> None:
    assert pentad("import-hf", str(files), "runs/mine", "--json")[0] == 0
    found = open_checkpoint(folder_of(Path("runs/mine/checkpoints"), 0))
    folder = folder_of(found.folder.parent, 5)
    commit(folder, step=5, shards=[write_shard(folder, "a.safetensors", read(found, found.tensors))], meta={})
    Path("runs/mine/config.yaml").write_text(SECTION + "batch: {sequence_length: 16}\ndata: {path: corpus}\n")
    status, out, err = pentad("export-hf", "mine", "out", "--json")
    assert status == 0 and json.loads(out)["step"] == 5, err
    names = {path.name for path in files.iterdir()}
    assert {"generation_config.json", "tokenizer.json"} < names == {path.name for path in Path("out").iterdir()}
    for name in names - {"model.safetensors", "config.json"}:
        assert (Path("out") / name).read_bytes() == (files / name).read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (files, Path("out")))
    assert after == before | {"dtype": "float32"}


def test_generation_stops_at_the_end_of_a_document(pentad: Pentad, files: Path) -> None:
    """A model trained from scratch uses the end token of its corpus, not the default of its class."""
    assert pentad("import-hf", str(files), "runs/mine", "--json")[0] == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path("runs/mine/hf", name).unlink()
    Path("text.txt").write_text("some text " * 50)
    assert pentad("data", "build", "text.txt", "corpus", "--vocab", "300", "--json")[0] == 0
    sources = "data: {path: null, sources: [{path: corpus}, {path: other}]}\n"
    Path("runs/mine/config.yaml").write_text(SECTION + "batch: {sequence_length: 16}\n" + sources)
    for out in ("import", "scratch"):
        assert pentad("export-hf", "mine", out, "--json")[0] == 0
        model = AutoModelForCausalLM.from_pretrained(out)
        assert model.generation_config.eos_token_id == 0 == AutoTokenizer.from_pretrained(out).eos_token_id
        with torch.no_grad():
            for weight in (model.lm_head.weight, model.model.norm.weight):
                weight.fill_(0.0)  # all logits are equal, so the first token, which is the end, is chosen
        assert model.generate(torch.tensor([[5, 6]]), do_sample=False, max_new_tokens=9).tolist() == [[5, 6, 0]]
        shutil.rmtree("runs/mine/hf", ignore_errors=True)


def test_a_bfloat16_export_in_several_files_opens_in_transformers(pentad: Pentad, files: Path) -> None:
    assert pentad("import-hf", str(files), "mine", "--json")[0] == 0
    status, out, err = pentad(
        "export-hf", "mine", "narrow", "--dtype", "bfloat16", "--max-shard-size", "0.00001", "--json"
    )
    assert status == 0, err
    facts = json.loads(out)
    assert len(facts["files"]) > 2
    assert all((Path("narrow") / file).stat().st_size < 15_000 for file in facts["files"])
    model = AutoModelForCausalLM.from_pretrained("narrow")
    assert model.dtype == torch.bfloat16
    expected = load_file(files / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name].bfloat16())


def test_a_run_is_exported_from_its_newest_checkpoint_with_the_tokenizer_of_its_corpus(
    pentad: Pentad, files: Path
) -> None:
    assert pentad("import-hf", str(files), "mine", "--json")[0] == 0
    found = open_checkpoint(folder_of(Path("mine/checkpoints"), 0))
    Path("text.txt").write_text("some text " * 50)
    assert pentad("data", "build", "text.txt", "corpus", "--vocab", "300", "--json")[0] == 0
    for step in (2, 7):
        folder = folder_of(Path("runs/ours/checkpoints"), step)
        tensors = {name: tensor + step for name, tensor in read(found, found.tensors).items()}
        halves = [dict(list(tensors.items())[start::2]) for start in (0, 1)]
        shards = [write_shard(folder, f"stage-{number}.safetensors", half) for number, half in enumerate(halves)]
        commit(folder, step=step, shards=shards, meta={"run": "ours"})
    Path("runs/ours/config.yaml").write_text(SECTION + "batch: {sequence_length: 99}\ndata: {path: corpus}\n")
    status, out, err = pentad("export-hf", "ours", "out", "--json")
    assert status == 0, err
    assert json.loads(out)["step"] == 7
    before, after = (load_file(folder / "model.safetensors") for folder in (files, Path("out")))
    assert all(torch.equal(before[name] + 7, after[name]) for name in before)
    config = json.loads(Path("out/config.json").read_text())
    assert (config["max_position_embeddings"], config["eos_token_id"], config["bos_token_id"]) == (99, 0, None)
    assert AutoTokenizer.from_pretrained("out").eos_token_id == 0


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_an_imported_model_section_is_a_valid_configuration(name: str) -> None:
    prefix, values = hf_models.MODELS[name]
    config = getattr(transformers, hf_models.CONFIGS.get(prefix, f"{prefix}Config"))(
        **values, architectures=[f"{prefix}ForCausalLM"]
    )
    family, model = parse_config(config.to_dict())
    assert ModelSection.model_validate(make_section(family, model)).spec == model


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["import-hf", "nowhere", "out"], ["DIR is 'nowhere'"]),
        (["export-hf", "nowhere", "out"], ["CHECKPOINT is 'nowhere'"]),
        (["export-hf", "empty", "out"], ["no valid checkpoint"]),
        (["export-hf", "bare", "out"], ["whose model is unknown", "config.yaml"]),
        (["export-hf", "step-00000003", "out"], ["step-00000003", "manifest.json"]),
        (["export-hf", "bare", "out", "--dtype", "float16"], ["--dtype"]),
    ],
)
def test_an_error_is_reported_in_one_sentence(pentad: Pentad, arguments: list[str], words: list[str]) -> None:
    Path("empty/checkpoints").mkdir(parents=True)
    folder = folder_of(Path("bare/checkpoints"), 1)
    commit(folder, step=1, shards=[write_shard(folder, "a.safetensors", {"model.norm": torch.ones(3)})], meta={})
    status, out, err = pentad(*arguments)
    assert status != 0 and out == "" and err.startswith("pentad: ") and err.count("\n") == 1
    assert all(word in err for word in words), err
    assert not Path("out").exists()
