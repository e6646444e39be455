"""Curves of a run: means over target tokens, corpora by their names, windows that end where the mixture changes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from commands import Pentad

import pentad as api
from pentad.orchestrator.config.config import dump, load
from pentad.orchestrator.monitoring.evaluations import EVAL_KEYS
from pentad.orchestrator.monitoring.runfolder import METRIC_KEYS

MIXED = ["data.path=null", "data.sources=[{path: a/essays, weight: 3}, {path: b, name: code}]"]


def run_of(folder: Path, overrides: list[str], metrics: list[dict], held_out: list[dict], changes: list[int]) -> Path:
    """The folder of a run with these rows; keys that they lack are 0."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(load(None, [f"run.name={folder.name}", *overrides])))
    rows: dict[str, list[dict[str, Any]]] = {
        "metrics.jsonl": [dict.fromkeys(METRIC_KEYS, 0) | row for row in metrics],
        "eval.jsonl": [dict.fromkeys(EVAL_KEYS, 0) | row for row in held_out],
        "journal.jsonl": [{"event": "start"}, *({"event": "mixture", "step": step} for step in changes)],
    }
    for name, lines in rows.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def mixed_row(step: int) -> dict[str, Any]:
    """A row of two sources with different losses and tokens; the second has none in every fourth step."""
    code = (
        {"loss": None, "target_tokens": 0}
        if step % 4 == 3
        else {"loss": 4 + 1 / (step + 1), "target_tokens": 10 + step}
    )
    sources = {"essays": {"loss": 8 - step / 100, "target_tokens": 30 + step}, "code": code}
    return {"step": step, "loss": 5.0, "total_tokens": 64 * (step + 1), "sources": sources}


@pytest.mark.parametrize(("steps", "changes"), [(1, []), (39, []), (90, [50]), (300, [1, 150, 299])])
def test_a_window_is_the_mean_over_its_target_tokens(tmp_path: Path, steps: int, changes: list[int]) -> None:
    metrics = [mixed_row(step) for step in range(steps)]
    found = api.Run(run_of(tmp_path / "run", MIXED, metrics, [], changes)).curves()
    assert (found.steps, found.tokens, list(found.changes)) == (steps, 64 * steps, changes)
    essays, code = found.curves
    assert (essays.name, code.name) == ("essays", "code")
    bounds = [(window.first, window.end) for window in essays.training]
    assert bounds == [(window.first, window.end) for window in code.training]
    assert [step for first, end in bounds for step in range(first, end)] == list(range(steps))
    assert set(changes) <= {first for first, _ in bounds} and len(bounds) <= 40 + len(changes)
    for curve in (essays, code):
        for window in curve.training:
            parts = [metrics[step]["sources"][curve.name] for step in range(window.first, window.end)]
            tokens = sum(part["target_tokens"] for part in parts)
            total = math.fsum((part["loss"] or 0) * part["target_tokens"] for part in parts)
            assert window.tokens == tokens
            assert window.loss == (pytest.approx(total / tokens, rel=1e-12) if tokens else None)


def test_held_out_data_has_the_name_of_its_corpus_and_others_have_their_own(tmp_path: Path) -> None:
    held_out: list[dict[str, Any]] = [
        {"step": step, "data": data, "loss": loss}
        for step, loss in ((0, 8.5), (20, None), (40, 6.5))
        for data in ("holdout-essays", "wiki")
    ]
    run = api.Run(run_of(tmp_path / "run", MIXED, [mixed_row(0)], held_out, []))
    assert [(curve.name, list(curve.held_out)) for curve in run.curves().curves] == [
        ("essays", [(0, 8.5), (40, 6.5)]),
        ("code", []),
        ("wiki", [(0, 8.5), (40, 6.5)]),
    ]
    rows: list[dict[str, Any]] = [
        {"step": 0, "loss": 8.25, "target_tokens": 7},
        {"step": 1, "loss": None, "target_tokens": 7},
    ]
    one = api.Run(run_of(tmp_path / "one", ["data.path=x/wiki/"], rows, [{"data": "holdout", "loss": 8.0}], []))
    (curve,) = one.curves().curves
    assert (curve.name, list(curve.held_out)) == ("wiki", [(0, 8.0)])
    assert list(curve.training) == [(0, 1, 8.25, 7), (1, 2, None, 0)]


def test_a_run_that_got_a_second_source_has_its_first_steps_in_the_first(tmp_path: Path) -> None:
    rows = [{"step": 0, "loss": 8.25, "target_tokens": 7}, mixed_row(1)]
    essays, code = api.Run(run_of(tmp_path / "run", MIXED, rows, [], [1])).curves().curves
    assert essays.training[0] == (0, 1, 8.25, 7) and code.training[0] == (0, 1, None, 0)


def test_the_command_prints_and_draws_what_the_api_returns(pentad: Pentad, tmp_path: Path) -> None:
    rows, held_out = [mixed_row(step) for step in range(30)], [{"data": "holdout-code", "loss": 4.125}]
    run = api.Run(run_of(tmp_path / "runs" / "trial", MIXED, rows, held_out, [12]))
    status, out, err = pentad("curves", "trial", "--svg", "curves.svg")
    assert (status, err) == (0, "") and "curves.svg" in out
    assert all(line.rstrip() in out for line in repr(run.curves()).splitlines()) and "4.1250" in out
    assert Path("curves.svg").read_text() == run.curves().svg() == run.curves()._repr_svg_()
    assert json.loads(pentad("curves", "trial", "--json")[1]) == {"run": "runs/trial", **run.curves().facts()}


def test_a_run_without_a_loss_is_refused_in_one_sentence(pentad: Pentad, tmp_path: Path) -> None:
    run_of(tmp_path / "runs" / "trial", MIXED, [], [], [])
    status, out, err = pentad("curves", "trial", "--svg", "curves.svg")
    assert (status, out) == (1, "") and not Path("curves.svg").exists()
    assert err == (
        "pentad: RUN is 'runs/trial', which has no finite loss in metrics.jsonl: expected a run that has trained\n"
    )
