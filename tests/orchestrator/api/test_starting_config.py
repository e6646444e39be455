"""`pentad init` writes configurations that load, fit and explain themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import Pentad
from full_disk import largest_file

from pentad.orchestrator.api.commented_yaml import commented_yaml
from pentad.orchestrator.api.model_sizes import MODEL_SIZES
from pentad.orchestrator.api.plans import planned
from pentad.orchestrator.api.starting_config import starting_config
from pentad.orchestrator.config.config import RunConfig, dump, load
from pentad.orchestrator.config.errors import sections_of
from pentad.orchestrator.config.model_section import ModelSection
from pentad.orchestrator.config.yaml_text import load_yaml
from pentad.orchestrator.memory.copy_slots import NCCL
from pentad.orchestrator.memory.first_microbatches import with_words
from pentad.orchestrator.planning.fit import DeviceMemory, device_memory
from pentad.orchestrator.search import search
from pentad.orchestrator.search.search import SearchResult
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.tensors import num_parameters
from pentad.workers.hf.config import make_config

# Billions of parameters as stated by the models' authors (for DeepSeek-V3, without multi-token prediction).
PUBLISHED = {
    **{"llama-1b": 1.24, "llama-3b": 3.21, "llama-8b": 8.03, "llama-70b": 70.6, "llama-405b": 406},
    **{"qwen3-0.6b": 0.6, "qwen3-1.7b": 1.7, "qwen3-4b": 4.0, "qwen3-8b": 8.2, "qwen3-14b": 14.8, "qwen3-32b": 32.8},
    **{"qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235, "mixtral-8x7b": 46.7, "mixtral-8x22b": 141, "deepseek-v3": 671},
}


def spec_of(name: str) -> ModelSpec:
    return ModelSection.model_validate(dict(MODEL_SIZES[name])).spec


@pytest.mark.parametrize("name", MODEL_SIZES)
def test_a_published_size_has_the_published_number_of_parameters(name: str) -> None:
    billions = num_parameters(spec_of(name)) / 1e9
    assert float(f"{billions:.{len(str(PUBLISHED[name]).replace('.', '').lstrip('0'))}g}") == PUBLISHED[name]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "gpus", "gib"),
    [
        ("llama-1b", 1, 80.0),
        ("llama-8b", 4, 139.0),
        pytest.param("qwen3-14b", 8, 139.0, marks=pytest.mark.slow),
        pytest.param("mixtral-8x7b", 16, 139.0, marks=pytest.mark.slow),
        pytest.param("llama-70b", 32, 79.0, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", 256, 139.0, marks=pytest.mark.slow),
    ],
)
def test_a_starting_configuration_loads_and_fits(pentad: Pentad, model: str, gpus: int, gib: float) -> None:
    sizes = ("--model", model, "--gpus", str(gpus), "--memory", str(gib))
    assert pentad("init", "run.yaml", *sizes) == (
        0,
        "run.yaml: see what it would run with `pentad plan run.yaml --device cuda`\n",
        "",
    )
    config = load(Path("run.yaml"))
    assert (config.run.name, config.mesh.size, config.model.spec) == (model, gpus, spec_of(model))
    assert planned(config, "cuda", gib).ok
    assert config.batch.global_batch_size * config.batch.sequence_length >= 2**20


def test_a_mesh_that_fits_over_nccl_only_is_written_so(monkeypatch: pytest.MonkeyPatch) -> None:
    room = device_memory("cuda", 80)

    def over_nccl(config: RunConfig, gpus: int, device: DeviceMemory, listed: int) -> SearchResult:
        return search.search(with_words(config, NCCL), gpus, device, listed=listed)

    monkeypatch.setattr("pentad.orchestrator.api.starting_config.search", over_nccl)
    found = starting_config("llama-1b", 2, room, data="builtin:pydoc", length=None, sequences=None)
    assert found.config.cluster.transport == "nccl"
    assert load(load_yaml(found.text, "text")) == found.config


@pytest.mark.slow
def test_the_model_of_a_folder_is_that_of_its_config(pentad: Pentad) -> None:
    spec = spec_of("qwen3-0.6b")
    Path("My model (v2)").mkdir()
    Path("My model (v2)", "config.json").write_text(json.dumps(make_config("qwen3", spec, positions=1024)))
    status, out, err = pentad("init", "--model", "My model (v2)", "--gpus", "2", "--memory", "80", "--data", "corpus")
    assert (status, err) == (0, "")
    assert "unless `pentad import-hf 'My model (v2)' runs/My-model-v2-` has read the model's." in out
    Path("run.yaml").write_text(out)
    config = load(Path("run.yaml"))
    assert (config.run.name, config.model.family, config.model.spec) == ("My-model-v2-", "qwen3", spec)
    assert (config.batch.sequence_length, config.data.path) == (1024, "corpus")
    facts = json.loads(pentad("init", "--model", "qwen3-0.6b", "--gpus", "2", "--memory", "80", "--json")[1])
    assert facts["file"] is None and RunConfig.model_validate(facts["config"]).mesh.size == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "lama-8b"], r"--model is 'lama-8b' \(did you mean llama-8b\?\): expected the folder of a Hugging"),
        (["--model", "."], r"config.json"),
        (
            ["--model", "llama-70b", "--gpus", "1"],
            r"--gpus is 1, of which no mesh fits in the .*: memory is \d+.\d+ GiB a",
        ),
        (["here.yaml", "--model", "llama-1b", "--gpus", "1", "--memory", "80"], r"OUT is 'here.yaml', which cannot be"),
        (["no/run.yaml", "--model", "llama-1b", "--gpus", "1", "--memory", "80"], "No such file or directory"),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(pentad: Pentad, arguments: list[str], sentence: str) -> None:
    Path("here.yaml").write_text("mine")
    status, out, err = pentad("init", *arguments)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert re.search(sentence, err), err
    assert [path.name for path in Path.cwd().iterdir()] == ["here.yaml"] and Path("here.yaml").read_text() == "mine"


def test_a_full_disk_leaves_no_file(pentad: Pentad) -> None:
    with largest_file(100):
        status, out, err = pentad("init", "mine.yaml", "--model", "llama-1b", "--gpus", "1", "--memory", "80")
    sentence = "pentad: OUT is 'mine.yaml', which cannot be written (File too large): expected a new file\n"
    assert (status, out, err, [*Path().iterdir()]) == (1, "", sentence, [])


def test_every_key_is_explained_in_the_words_of_the_reference() -> None:
    config = load(None, sections={"memory": {"recompute": "full", "recompute_stages": [0, 1]}})
    text = commented_yaml(config.model_dump())
    assert load_yaml(text, "text") == load_yaml(dump(config), "text")
    words = " ".join(line.partition("#")[2] for line in text.splitlines()).split()
    plain = " ".join(words)
    for path, schema in sections_of(RunConfig).items():
        section: object = config
        for name in path.split(".") if path else ():
            section = getattr(section, name, None)
        if not path or section is None:
            continue
        for field in schema["properties"].values():
            assert " ".join(field["description"].split()) in plain
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.slow
def test_more_memory_or_fewer_gpus_never_change_the_batch() -> None:
    configs = [
        starting_config("llama-1b", gpus, device_memory("cuda", gib), data="d", length=2048, sequences=64).config
        for gpus, gib in ((1, 139.0), (2, 40.0))
    ]
    assert {config.batch.model_dump_json() for config in configs} == {configs[0].batch.model_dump_json()}


def test_an_unknown_folder_names_the_sizes() -> None:
    with pytest.raises(PentadError, match=r"or one of llama-1b, .*deepseek-v3$"):
        starting_config("nowhere", 8, device_memory("cuda", 80.0), data="d", length=None, sequences=None)
