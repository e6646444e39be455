"""The data section: a mixture of sources in the plan, and each mistake in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from pentad.orchestrator.config.config import dump, load
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.data import WeightChange

MIXED = (
    "data.path=null",
    "data.sources=[{path: corpora/web, weight: 0.7}, {path: s3://bucket/code/, weight: 0.3, epochs: 2, name: code}]",
)


def refusal(*overrides: str) -> str:
    with pytest.raises(PentadError) as caught:
        load(None, list(overrides))
    return str(caught.value)


def test_sources_are_in_the_plan() -> None:
    curriculum = "data.curriculum=[{step: 5, weights: {web: 0}}, {step: 9, weights: {code: 1}}]"
    data = make_plan(load(None, [*MIXED, curriculum, "data.document_mask=true"]), "cpu").data
    assert [(each.name, each.weight, each.epochs) for each in data.sources] == [("web", 0.7, None), ("code", 0.3, 2.0)]
    assert [each.path for each in data.sources] == [str(Path("corpora/web").absolute()), "s3://bucket/code/"]
    assert data.curriculum == (WeightChange(5, (0.0, 0.3)), WeightChange(9, (0.0, 1.0)))
    assert data.document_mask and data.eod_mask_loss


def test_a_mixture_is_dumped_as_it_is_loaded(tmp_path: Path) -> None:
    config = load(None, [*MIXED, "data.curriculum=[{step: 5, weights: {web: 0.1}}]"])
    (tmp_path / "run.yaml").write_text(dump(config))
    assert load(tmp_path / "run.yaml", []) == config


def test_each_source_holds_out_a_data_set_of_its_own() -> None:
    plan = make_plan(load(None, [*MIXED, "data.holdout=0.1", "eval.every=10"]), "cpu")
    assert plan.eval is not None and plan.data.holdout == 0.1
    assert [each.name for each in plan.eval.data_sets] == ["holdout-web", "holdout-code"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("data.path=null",), "data.path is null: expected a corpus, or null and data.sources"),
        (MIXED[1:], "data.path is builtin:pydoc, but there are data.sources: expected a corpus, or null"),
        (("data.packing=documents",), "data.document_mask is false: expected true for data.packing = documents"),
        (("data.balance=documents",), "data.document_mask is false: expected true for data.balance = documents"),
        (
            (*MIXED, "data.sources=[{path: a, weight: 0}]"),
            "data.sources has weights that sum to 0: expected a positive",
        ),
        ((*MIXED, "data.sources=[{path: a, weight: -1}]"), "data.sources[0].weight is -1: expected at least 0"),
        ((*MIXED, "data.sources=[{path: a, epochs: 0}]"), "data.sources[0].epochs is 0: expected more than 0"),
        ((*MIXED, "data.sources=[{path: x/a}, {path: y/a}]"), "data.sources[1].name is a: expected another than"),
        ((*MIXED, "data.sources=[{path: a, weigth: 2}]"), "weigth is unknown; did you mean data.sources[0].weight?"),
        ((*MIXED, "data.sources=[{path: a, weight: 1e-9}, {path: b, weight: 0.3}]"), "data.sources: a weight is 1e-09"),
        ((*MIXED, "data.curriculum=[{step: 2, weights: {wep: 1}}]"), "weights has wep: expected names of data.sources"),
        (("data.curriculum=[{step: 2, weights: {a: 1}}]",), "has a: expected names of data.sources (there are none)"),
        (
            (*MIXED, "data.curriculum=[{step: 2, weights: {web: 1}}, {step: 2, weights: {web: 1}}]"),
            "data.curriculum[1].step is 2: expected more than 2",
        ),
        (
            (*MIXED, "data.curriculum=[{step: 2, weights: {web: 0, code: 0}}]"),
            "data.curriculum[0] has weights that sum to 0",
        ),
    ],
)
def test_a_mistake_is_one_sentence(overrides: tuple[str, ...], sentence: str) -> None:
    assert sentence in refusal(*overrides) and "\n" not in refusal(*overrides)
