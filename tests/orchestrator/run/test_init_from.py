"""Stages of training: a run starts from the weights of another one, and its journal says what differs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from corpora import write_corpus
from peft_files import write_adapter
from rich.console import Console

from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.config.config import dump, load
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.run.init_from import origin_of, start_notes
from pentad.orchestrator.run.train import train
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.atomic_io import write_file
from pentad.workers.checkpoint.manifest import Shard
from pentad.workers.data.tokenizer import train_tokenizer

SMALL = ["mesh.pp=1", "model.layers=4", "schedule.name=gpipe", "schedule.microbatches=4", "batch.global_batch_size=8",
         "cluster.device=cpu", "elastic.max_failures=0", "data.path='fake:'"]  # fmt: skip


def config_of(folder: Path, *overrides: str):
    return load(None, [f"run.folder={folder}", *SMALL, *overrides])


def run(folder: Path, *overrides: str) -> dict[str, Any]:
    """Trains without torch, and returns the journal's newest "start" event."""
    config = config_of(folder, *overrides)
    display = Display(Console(quiet=True), config.run.name, config.run.steps)
    train(config, display=display, runner="fake_runner:FakeRunner")
    return [row for row in read_lines(folder / config.run.name / "journal.jsonl") if row["event"] == "start"][-1]


def steps(folder: Path, name: str) -> list[int]:
    return [row["step"] for row in read_lines(folder / name / "metrics.jsonl")]


def saved(folder: Path, name: str, *overrides: str, step: int = 4) -> None:
    """Writes the folder of a run of `step` steps, with dummy tensors."""
    at = checkpoint.folder_of(folder / name / "checkpoints", step)
    at.mkdir(parents=True)
    (folder / name / "config.yaml").write_text(dump(config_of(folder, f"run.name={name}", *overrides)))
    content = safetensors.numpy.save({"steps": np.array(step)})
    written = write_file(at / "stage-000.safetensors", [memoryview(content)])
    shard = Shard(
        "stage-000.safetensors", written.bytes, written.sha256, {"steps": {"dtype": "I64", "shape": []}}, written.crc32
    )
    checkpoint.commit(at, step=step, shards=[shard], meta={})


@pytest.mark.slow
def test_a_stage_starts_from_another_runs_weights_and_records_what_is_different(
    cluster: clusters.Cluster, tmp_path: Path
) -> None:
    saved(tmp_path, "first")
    (tmp_path / "first" / "hf").mkdir()
    (tmp_path / "first" / "hf" / "generation_config.json").write_text("{}")
    init = ("run.init_from=first", "batch.sequence_length=64", "schedule.name=1f1b")
    start = run(tmp_path, "run.name=second", "run.steps=3", *init)
    assert start["step"] == 0
    assert start["checkpoint"] == str(tmp_path / "first" / "checkpoints" / "step-00000004")
    assert {"batch.sequence_length", "schedule.name", "run.steps", "run.init_from"} <= set(start["changes"])
    assert start["changes"]["batch.sequence_length"] == [128, 64]
    assert steps(tmp_path, "second") == [0, 1, 2]
    assert (tmp_path / "second" / "hf" / "generation_config.json").read_text() == "{}"  # which an export needs

    start = run(tmp_path, "run.name=second", "run.steps=5", *init)  # resumes from its own checkpoint
    assert (start["step"], start["changes"]) == (3, {"run.steps": [3, 5]})
    assert steps(tmp_path, "second") == [0, 1, 2, 3, 4]

    start = run(tmp_path, "run.name=third", "run.steps=6", *init, "run.init_step=true", "run.init_optimizer=true")
    assert start["step"] == 4
    assert steps(tmp_path, "third") == [4, 5]


@pytest.mark.parametrize(
    ("taken", "offset"),
    [((), 0), (("optimizer",), 4), (("step",), -4), (("optimizer", "step"), 0)],
)
def test_bias_correction_counts_the_updates_that_moments_have_seen(tmp_path: Path, taken, offset) -> None:
    saved(tmp_path, "first")
    init = [f"run.init_{each}=true" for each in taken]
    assert origin_of(config_of(tmp_path, "run.init_from=first", "run.steps=9", *init)).moment_offset == offset


@pytest.mark.slow
def test_a_stage_and_its_resumes_know_how_old_its_moments_are(cluster: clusters.Cluster, tmp_path: Path) -> None:
    saved(tmp_path, "first")
    init = ("run.init_from=first", "run.init_optimizer=true")
    for number in (3, 5):  # the latter resumes
        run(tmp_path, "run.name=second", f"run.steps={number}", *init)
        folder = checkpoint.folder_of(tmp_path / "second" / "checkpoints", number)
        assert checkpoint.read_manifest(folder).meta["moment_offset"] == 4
    again = origin_of(config_of(tmp_path, "run.init_from=second", "run.init_optimizer=true", "run.init_step=true"))
    assert (again.start.step, again.moment_offset) == (5, 4)


def test_adapters_of_peft_are_checked_before_a_run_starts(tmp_path: Path) -> None:
    saved(tmp_path, "first")
    adapter = write_adapter(tmp_path / "adapter", load(None, SMALL).model.spec)
    lora = ("run.init_from=first", "lora.rank=2", "lora.alpha=4", f"lora.init_from={adapter}")
    origin = origin_of(config_of(tmp_path, *lora))
    assert (origin.start.folder, origin.adapter) == (None, adapter)
    assert origin.base is not None and origin.base.folder == str(tmp_path / "first" / "checkpoints" / "step-00000004")
    with pytest.raises(PentadError, match=r"^lora\.alpha is 8: expected 4, the lora_alpha of .*adapter_config\.json"):
        origin_of(config_of(tmp_path, *lora, "lora.alpha=8"))


def test_a_checkpoint_is_named_by_its_folder_or_its_run(tmp_path: Path) -> None:
    saved(tmp_path, "first")
    folder = tmp_path / "first" / "checkpoints" / "step-00000004"
    for text in ("first", str(tmp_path / "first"), str(folder)):
        start, changes, *_ = origin_of(config_of(tmp_path, f"run.init_from={text}"))
        assert start == (folder, 0, False)
        assert set(changes) == {"run.init_from"}


def test_rope_scaling_may_change_between_stages(tmp_path: Path) -> None:
    saved(tmp_path, "first")
    given = ("rope_type=yarn", "factor=4.0", "original_max_position_embeddings=128", "low_freq_factor=1.0",
             "high_freq_factor=32.0")  # fmt: skip
    scaling = [f"model.rope_scaling.{each}" for each in given]
    _, changes, *_ = origin_of(config_of(tmp_path, "run.init_from=first", "model.rope_theta=1000000.0", *scaling))
    assert changes["model.rope_scaling"][0] is None
    assert changes["model.rope_scaling"][1]["factor"] == 4.0
    assert changes["model.rope_theta"] == (10000.0, 1000000.0)


def notes(folder: Path, *overrides: str) -> list[str]:
    config = config_of(folder, *overrides)
    origin = origin_of(config) if config.run.init_from else None
    return [*start_notes(config, origin)]


def test_keys_of_the_model_that_differ_are_shown(tmp_path: Path) -> None:
    saved(tmp_path, "first")
    given = ("run.init_from=first", "model.norm_eps=0.1", "model.head_dim=16", "run.seed=1")
    assert notes(tmp_path, *given) == ["model.norm_eps is 0.1, where run.init_from = first has 1e-05"]
    (tmp_path / "second").mkdir()  # an import, from which a run of its name starts
    section = (tmp_path / "first" / "config.yaml").read_text().splitlines()[1]
    (tmp_path / "second" / "model.yaml").write_text(section)
    assert notes(tmp_path, "run.name=second") == []
    (note,) = notes(tmp_path, "run.name=second", "model.rope_theta=2.0")
    assert note == f"model.rope_theta is 2.0, where the import in {tmp_path / 'second'} has 10000.0"


def test_data_of_another_tokenizer_than_that_of_the_weights_is_shown(tmp_path: Path) -> None:
    saved(tmp_path, "first")
    tokenizers = [train_tokenizer([text * 9], 300) for text in ("abcabd", "xyzxyw")]
    for name, tokenizer in zip(("same", "other"), tokenizers, strict=True):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name, ["text"], tokenizer)
    given = ("run.init_from=first", f"data.path={tmp_path / 'other'}")
    assert notes(tmp_path, *given) == []  # the weights come without a tokenizer
    (tmp_path / "first" / "hf").mkdir()
    (tmp_path / "first" / "hf" / "tokenizer.json").write_text(tokenizers[0].to_str())
    assert notes(tmp_path, "run.init_from=first", f"data.path={tmp_path / 'same'}") == []
    (note,) = notes(tmp_path, *given)
    kept = tmp_path / "quickstart" / "hf"
    merges = tokenizers[1].get_vocab_size() - 257  # bytes and the end token are the same
    assert note.startswith(f"data.path is {tmp_path / 'other'}: {merges} of its {257 + merges} tokens are not those")
    assert note.endswith(f"came with the weights: expected a corpus built with --tokenizer {kept}")
    (tmp_path / "first" / "hf" / "tokenizer.json").write_text("{}")  # of another version, perhaps
    assert notes(tmp_path, *given) == []


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["run.init_from=nothing"],
            "run.init_from is 'nothing': expected a run's folder or a name under .*/: .* first",
        ),
        (["run.init_from=first", "model.ffn=256"], "model.ffn is 256: expected 384, as in run.init_from = first"),
        (
            ["run.init_from=first", "model.family=qwen3"],
            "model.family is 'qwen3': expected 'llama', as in run.init_from = first",
        ),
        (
            ["run.init_from=first", "model.family=gemma2", "model.sliding_window=64"],
            "model.family is 'gemma2': expected 'llama', as in run.init_from = first",
        ),
        (
            ["run.init_from=first", "model.tie_word_embeddings=true"],
            "model.tie_word_embeddings is true: expected false, as in run.init_from = first",
        ),
        (
            ["run.init_from=first", "run.init_step=true", "run.steps=4"],
            "run.steps is 4: expected more than 4, the steps of run.init_from",
        ),
        (["run.init_step=true"], "run.init_step is true: expected false without run.init_from"),
        (["run.init_from=quickstart"], "run.init_from is 'quickstart': expected another run than run.name"),
    ],
)
def test_a_stage_that_cannot_start_is_refused_by_one_sentence(tmp_path: Path, overrides, sentence) -> None:
    saved(tmp_path, "first")
    with pytest.raises(PentadError, match=f"^{sentence}"):
        origin_of(config_of(tmp_path, *overrides))
    assert not (tmp_path / "quickstart").exists()


@pytest.mark.parametrize(("scoring", "is_kept"), [("sigmoid", True), ("softmax", False)])
def test_routing_biases_are_never_dropped_between_stages(tmp_path: Path, scoring: str, is_kept: bool) -> None:
    """With softmax scores, only experts with a bias_update_rate have biases."""
    experts = {"num_experts": 4, "top_k": 2, "intermediate_size": 64, "scoring_func": scoring}
    mixtral = ["model.family=mixtral", *(f"model.experts.{key}={value}" for key, value in experts.items())]
    saved(tmp_path, "first", *mixtral, "model.experts.bias_update_rate=0.01")
    config = config_of(tmp_path, *mixtral, "run.init_from=first")
    if is_kept:
        assert "model.experts" in origin_of(config).changes
    else:
        with pytest.raises(PentadError, match=r"^model\.experts is .*'bias_update_rate': 0\.0.*: expected .*0\.01"):
            origin_of(config)


def test_a_damaged_checkpoint_of_the_stage_before_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "first")
    shard = tmp_path / "first" / "checkpoints" / "step-00000004" / "stage-000.safetensors"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(PentadError, match=r"run\.init_from is 'first', which has no valid checkpoint"):
        origin_of(config_of(tmp_path, "run.init_from=first"))
