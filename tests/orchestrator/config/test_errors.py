"""Errors of a configuration even name values that cannot be printed."""

import json
from pathlib import Path

import pytest

from pentad.orchestrator.config.config import load
from pentad.schedules.ir.errors import PentadError


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"\ud800": {}}, "\\ud800 is unknown: expected a key in one of the sections run, model,"),
        ({"model": {"\ud800": 3}}, "model.\\ud800 is unknown: expected one of model.{family,"),
        (
            {"data": {"sources": [{"\ud800": 1}]}},
            "data.sources[0].\\ud800 is unknown: expected one of data.sources",
        ),
        ({"run": {"name": "\ud800"}}, "run.name is '\\ud800': expected valid Unicode"),
    ],
)
def test_half_a_surrogate_pair_is_named(tmp_path: Path, given: object, sentence: str) -> None:
    """JSON is YAML, and its escapes can express what UTF-8 cannot encode."""
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(given))
    with pytest.raises(PentadError) as caught:
        load(path)
    assert any(each.startswith(sentence) for each in caught.value.sentences)
