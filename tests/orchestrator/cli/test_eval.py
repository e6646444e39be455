"""`pentad eval`: what it evaluates, and mistakes in one sentence before anything starts."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Pentad
from rich.console import Console

from pentad.orchestrator.config.config import RunConfig, dump, load
from pentad.orchestrator.monitoring.display import print_evaluation
from pentad.orchestrator.monitoring.evaluations import evaluation_rows
from pentad.orchestrator.monitoring.runfolder import find_checkpoint
from pentad.orchestrator.run import driver
from pentad.orchestrator.run.evaluate import eval_config
from pentad.schedules.spec.plan import Plan
from pentad.workers.checkpoint.checkpoint import Start, commit, folder_of
from pentad.workers.checkpoint.shards import write_shard
from pentad.workers.runtime.results import EvalResult

QUIET = ["data.holdout=0", "eval.every=0"]
MODEL = {"family": "llama", "layers": 2, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 16, "vocab": 300}


def save(home: Path, meta: dict) -> None:
    """Writes a checkpoint of 4 steps without weights."""
    folder = folder_of(home / "checkpoints", 4)
    folder.mkdir(parents=True)
    commit(folder, step=4, shards=[write_shard(folder, "a.safetensors", {"model.norm": torch.zeros(2)})], meta=meta)


def save_run(name: str, *overrides: str) -> None:
    save(Path("runs", name), {})
    Path("runs", name, "config.yaml").write_text(dump(load(None, [f"run.name={name}", *overrides])))


def test_a_run_is_evaluated_as_it_was_configured_unless_options_say_otherwise(pentad: Pentad) -> None:
    save_run("mine", "data.holdout=0.1", "eval.every=10", "checkpoint.every=10", "checkpoint.keep_best=holdout")
    found = find_checkpoint("mine", "CHECKPOINT")
    config = eval_config(found, (), None, ["mesh.pp=2"])
    assert (config.data_sets, config.mesh.pp, config.eval.sequences) == (["holdout"], 2, 16)
    config = eval_config(found, ["a=x/y", "builtin:pydoc", "x/z"], 5, ())
    assert (config.data_sets, config.eval.sequences) == (["a", "pydoc", "z"], 5)


def test_an_imported_model_gets_one_rank_and_the_length_it_was_trained_on(pentad: Pentad) -> None:
    save(Path("mine"), {"model": MODEL})
    Path("mine/hf").mkdir()
    Path("mine/hf/config.json").write_text('{"max_position_embeddings": 64}')
    config = eval_config(find_checkpoint("mine", "CHECKPOINT"), ["builtin:pydoc"], None, ["batch.global_batch_size=4"])
    assert (config.mesh.size, config.batch.sequence_length, config.batch.global_batch_size) == (1, 64, 4)
    assert config.data_sets == ["pydoc"]


def test_what_the_ranks_find_is_printed_with_the_checkpoint_that_they_had(
    pentad: Pentad, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def ranks(config: RunConfig, plan: Plan, *rest: Any) -> list[dict[str, Any]]:
        asked.append((plan, *rest))
        return evaluation_rows(4, [EvalResult("holdout", 4.0, 2, 1)], 0.5, 1)

    monkeypatch.setattr(driver, "evaluate_on", ranks)
    monkeypatch.setattr("pentad.orchestrator.run.evaluate.launch", lambda section, ranks: nullcontext(f"{ranks} ranks"))
    words = [f"model.{key}={value}" for key, value in MODEL.items()]
    save_run("mine", *words, f"data.path={corpus}", "data.holdout=0.1", "eval.every=10", "mesh.pp=2")
    status, out, err = pentad("eval", "mine", "--json")
    facts = json.loads(out)
    assert (status, err, facts["step"]) == (0, "", 4) and facts["checkpoint"].endswith("step-00000004")
    assert [(each["data"], each["loss"], each["tokens"]) for each in facts["evaluations"]] == [("holdout", 2.0, 2)]
    assert "perplexity" in pentad("eval", "mine", "mesh.pp=1")[1]
    (plan, start, head, *_), (_, _, other, *_) = asked
    assert (head, other) == ("2 ranks", "1 ranks") and plan.mesh.pp == 2
    assert start == Start(Path("runs/mine/checkpoints/step-00000004").absolute(), 4, optimizer=False)


@pytest.mark.parametrize(
    ("data", "name", "path"),
    [
        ("builtin:pydoc", "pydoc", "builtin:pydoc"),
        ("wiki=corpora/x", "wiki", "corpora/x"),
        ("wiki=s3://bucket/x?region=eu", "wiki", "s3://bucket/x?region=eu"),
        ("s3://bucket/x?endpoint_override=host:9000&scheme=http", "x",
         "s3://bucket/x?endpoint_override=host:9000&scheme=http"),
        ("./lang=en", "lang=en", "./lang=en"),
    ],
)  # fmt: skip
def test_data_may_have_a_name_before_its_path(pentad: Pentad, data: str, name: str, path: str) -> None:
    save_run("mine", *QUIET)
    (found,) = eval_config(find_checkpoint("mine", "CHECKPOINT"), [data], None, ()).eval.data or []
    assert (found.name, found.path) == (name, path)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("other",), "CHECKPOINT is 'other'"),
        (("mine", "run.yaml"), "run.yaml is no override: expected section.key=VALUE"),
        (("mine", "mesh.pq=2"), "mesh.pq is unknown: expected one of mesh.{dp, pp"),
        (("mine",), "--data is missing: expected a corpus"),
        (("imported",), "--data is missing: expected a corpus"),
        (("mine", "--data", "nowhere"), "nowhere', which is not a folder: expected a corpus"),
        (
            ("mine", "--data", "a=builtin:pydoc", "--data", "a=builtin:pydoc"),
            "eval.data is a list with the name a twice",
        ),
        (("mine", "--data", "builtin:pydoc", "--sequences", "0"), "Invalid value for '--sequences'"),
    ],
)
def test_a_mistake_is_one_sentence(pentad: Pentad, arguments: tuple[str, ...], message: str) -> None:
    save_run("mine", "model.vocab=300", *QUIET, f"data.cache={Path.cwd()}")
    save(Path("imported"), {"model": MODEL})
    before = sorted(Path("runs").rglob("*"))
    status, out, err = pentad("eval", *arguments, "--json")
    assert status != 0 and out == ""
    assert err.startswith("pentad: ") and err.count("\n") == 1 and message in err
    assert sorted(Path("runs").rglob("*")) == before


def test_the_table_has_a_row_for_each_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    results = [EvalResult("wiki", 16.0, 8, 1), EvalResult("code", float("nan"), 4, 1)]
    print_evaluation(Console(width=80), "runs/mine", evaluation_rows(20, results, 0.5, 1))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert lines == [
        ["runs/mine:", "after", "20", "steps,", "500", "ms"],
        ["data", "loss", "perplexity", "tokens", "sequences"],
        ["wiki", "2.0000", "7.39", "8", "1"],
        ["code", "-", "-", "4", "1"],
    ]
