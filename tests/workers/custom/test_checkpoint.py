"""A custom model from plan to checkpoint to job: other meshes resume it, and its file is submitted with the job."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from custom_models import GPT, custom_model, reference
from fleet import Fleet, assemble, losses_of
from plans import STEPS, is_close, plan_of

from pentad.orchestrator.config.config import load
from pentad.orchestrator.jobs import job_package
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.recovery.placed_plans import shrunk_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan, split_layers_by_cost
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.manifest import Shard
from pentad.workers.hf.config import parse_section


def plan_for(corpus: str, model: ModelSpec, name: str, dp: int, pp: int, microbatches: int, zero: int) -> Plan:
    return plan_of(name, dp, pp, microbatches, corpus, model=model, memory_options=MemoryOptions(zero=zero))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(("zb-h1", 2, 2, 2, 3), ("1f1b", 1, 4, 4, 0), marks=pytest.mark.slow),
        pytest.param(("dualpipe", 1, 2, 4, 0), ("gpipe", 2, 1, 2, 2), marks=pytest.mark.slow),
    ],
)
def test_another_mesh_resumes_from_a_checkpoint(fleet: Fleet, corpus: str, tmp_path: Path, before, after) -> None:
    """Dropout is that of an uninterrupted run, as the microbatches are the same."""
    model = custom_model(tmp_path, "gpt_dropout", layers=4)
    first, second = (plan_for(corpus, model, *case) for case in (before, after))
    folder = tmp_path / "step-00000002"
    saved = fleet.run(first, [(0, 2)], save=str(folder))
    shards = [Shard.from_plain(shard) for outcome in saved for shard in outcome.shards]
    checkpoint.commit(folder, step=2, shards=shards, meta={})
    outcomes = fleet.run(second, [(2, 1)], restore=str(folder))
    losses, _, _, weights = reference(second)
    sums = losses_of(outcomes)
    assert sum(sums.values()) / second.batch.tokens == pytest.approx(losses[STEPS - 1], rel=1e-10)
    parts = [{n.removeprefix("model."): v for n, v in o.state.items() if n.startswith("model.")} for o in outcomes]
    assert all(is_close(value, weights[name]) for name, value in assemble(parts, weights).items())


def test_a_job_contains_the_model_file(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "my.py"
    file.parent.mkdir()
    file.write_text(GPT)
    config = load(None, [f"model.custom={file}:gpt"])
    package = Path(job_package.runtime_environment(config, tmp_path)["working_dir"])
    assert (package / "model" / "my.py").read_text() == GPT
    text = (package / job_package.CONFIG).read_text()
    assert "model/my.py:gpt" in text
    assert str(tmp_path) not in text


@pytest.mark.slow
def test_a_shrunk_mesh_keeps_the_model_when_its_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text(GPT)
    config = load(None, [f"model.custom={file}:gpt", "mesh.dp=2", "elastic.min_ranks=1"])
    full = make_plan(config, "cpu")
    assert full.model.custom is not None
    assert full.model.custom.source == GPT
    file.write_text(GPT.replace("4 * hidden", "5 * hidden"))
    shrunk = shrunk_plan(config, full, 3)
    assert shrunk is not None
    assert shrunk.model == full.model
    assert make_plan(config, "cpu").model != full.model


def test_sizes_that_the_function_has_no_parameters_for_may_be_omitted(tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text(
        "from torch import nn\n\n\ndef two(vocab, hidden):\n"
        "    return [nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab)]\n"
    )
    (tmp_path / "run.yaml").write_text(
        f"run: {{name: two, steps: 1}}\nmodel: {{custom: '{file}:two', hidden: 8, vocab: 300}}\n"
        "schedule: {name: zb-h1, microbatches: 2}\nmesh: {pp: 2}\nbatch: {global_batch_size: 4, sequence_length: 8}\n"
        "data: {path: 'builtin:pydoc'}\n"
    )
    plan = make_plan(load(tmp_path / "run.yaml", []), "cpu")
    assert [tuple(layers.numbers) for layers in plan.layers] == [(0,), (1,)]
    assert [plan.size(shard) for shard in plan.param_shards] == [300 * 8, 300 * 8 + 300]


def test_it_cannot_be_exported_to_hugging_face() -> None:
    with pytest.raises(PentadError, match=r"model.custom is my.py:two: expected null"):
        parse_section({"custom": "my.py:two", "layers": 2, "hidden": 8, "vocab": 300})


@pytest.mark.parametrize(
    ("costs", "placement", "expected"),
    [
        ([0, 1, 1, 1, 3], [[0], [1]], ((0, 4), (4, 5))),
        ([5, 1, 1, 1, 1, 1], [[0], [1]], ((0, 1), (1, 6))),
        ([1, 1, 1, 1], [[0, 3], [1, 2]], ((0, 1), (1, 2), (2, 3), (3, 4))),
        ([0, 0, 0], [[0], [1]], ((0, 1), (1, 3))),
        ([1, 1, 1, 1, 1, 6], [[0, 3], [1, 2]], ((0, 1), (1, 3), (3, 5), (5, 6))),
    ],
)
def test_layers_are_split_by_cost(costs, placement, expected) -> None:
    layers = split_layers_by_cost(costs, placement)
    assert layers[0][0] == 0 and layers[-1][1] == len(costs)
    assert tuple(each[:2] for each in layers) == expected


@pytest.mark.slow
def test_dropout_does_not_depend_on_what_was_drawn_before(tmp_path: Path, corpus: str, fleet: Fleet) -> None:
    model = custom_model(tmp_path, "gpt_dropout")
    torch.manual_seed(1)
    one, two = (fleet.run(plan_for(corpus, model, "gpipe", 1, pp, 2, 0), [(0, 1)]) for pp in (1, 2))
    assert one[0].results[0].losses == pytest.approx(two[1].results[0].losses, rel=1e-12)
