"""What is evaluated and when, and which options can be combined with it."""

from __future__ import annotations

import pytest

from pentad.orchestrator.config.config import dump, load
from pentad.orchestrator.config.data_sections import EvalSection
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError

HELD_OUT = ["data.holdout=0.1", "eval.every=10"]
LIST = "eval.data=[{name: wiki, path: data/wiki}, {name: code, path: data/code}]"


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["data.holdout=0.1"], ["holdout"]),
        (["eval.data=data/wiki"], ["wiki"]),
        (["eval.data=builtin:pydoc"], ["pydoc"]),
        ([LIST, "data.holdout=0.1"], ["holdout", "wiki", "code"]),
    ],
)
def test_data_sets_have_names(overrides: list[str], names: list[str]) -> None:
    config = load(None, ["eval.every=0", "data.holdout=0", *overrides])
    assert config.data_sets == names
    plan = make_plan(config, "cpu")
    assert plan.eval is not None and [each.name for each in plan.eval.data_sets] == names
    assert plan.eval.program.forward_only and plan.eval.program.placement == plan.program.placement


def test_a_run_without_data_for_it_evaluates_nothing() -> None:
    plan = make_plan(load(None, ["data.holdout=0", "eval.every=0"]), "cpu")
    assert plan.eval is None and plan.programs == (plan.program,)


def test_a_dumped_configuration_loads_again(tmp_path) -> None:
    config = load(None, [LIST, *HELD_OUT, "checkpoint.keep_best=wiki", "checkpoint.every=20"])
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("every", [0, 1, 3, 10, 30])
@pytest.mark.parametrize("at_start", [False, True])
def test_evaluations_are_due_at_multiples_and_at_the_end(every: int, at_start: bool) -> None:
    section, steps = EvalSection(every=every, at_start=at_start), 20
    due = [step for step in range(steps + 1) if section.next_due(step, steps) == step]
    assert due == [
        s for s in range(steps + 1) if (s == 0 and at_start) or s == steps or (s and every and s % every == 0)
    ]
    assert section.count(steps) == len(due)
    for first in range(steps + 2):
        assert section.next_due(first, steps) == next((step for step in due if step >= first), None)


BEST = "checkpoint.keep_best"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.holdout=0"], "eval.every is 10: expected data to evaluate on: data.holdout above 0, or eval.data"),
        (["data.holdout=0.6"], "data.holdout is 0.6: expected at most 0.5"),
        (["data.holdout=0", "eval.every=0", "eval.at_start=true"], "eval.at_start is true: expected data to evaluate"),
        ([f"{BEST}=wiki", "checkpoint.every=10"], f"{BEST} is 'wiki': expected false, true or holdout"),
        (
            [f"{BEST}=true"],
            "checkpoint.every is 0: expected a multiple of eval.every = 10, so that checkpoint.keep_best",
        ),
        ([f"{BEST}=true", "checkpoint.every=15"], "checkpoint.every is 15: expected a multiple of eval.every = 10"),
        ([f"{BEST}=true", "checkpoint.every=5", "eval.every=0"], "checkpoint.every is 5: expected eval.every above 0"),
        (["eval.data=[{name: holdout, path: a}]"], "eval.data is a list with the name holdout: expected another name"),
        (["eval.data=[{name: a, path: a}, {name: a, path: b}]"], "eval.data is a list with the name a twice"),
        (["eval.data=[{name: a}]"], "eval.data[0].path is missing: expected a value: folder that `pentad data build`"),
        (["eval.data=[{name: a, path: b, sise: 3}]"], "eval.data[0].sise is unknown: expected one of eval.data[0]."),
        (["eval.data=[a]"], "eval.data[0] is 'a': expected a mapping with keys such as eval.data[0].name"),
        (["eval.data=3"], "eval.data is 3: expected a list"),
        (["eval.sequences=0"], "eval.sequences is 0: expected at least 1"),
    ],
)
def test_mistakes_are_reported_in_one_sentence(overrides: list[str], message: str) -> None:
    with pytest.raises(PentadError) as caught:
        load(None, [*HELD_OUT, *overrides])
    assert message in str(caught.value) and "\n" not in str(caught.value)
