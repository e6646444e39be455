"""The error for a key without its section names the places where it may belong."""

import pytest

from pentad.orchestrator.config.config import load
from pentad.schedules.ir.errors import PentadError


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("steps=4", "steps is unknown; did you mean run.steps?"),
        ("every=4", "every is unknown; did you mean checkpoint.every or eval.every?"),
        ("global_batch_size=8", "global_batch_size is unknown; did you mean batch.global_batch_size?"),
        ("lr=1", "lr is unknown; did you mean optimizer.learning_rate?"),
        ("optimiser=1", "optimiser is unknown; did you mean optimizer?"),
        ("epochs=1", "epochs is unknown; did you mean data.sources[].epochs?"),
        ("bananas=1", "bananas is unknown: expected a key in one of the sections run, model"),
    ],
)
def test_a_key_without_a_section_names_those_that_have_it(override: str, sentence: str) -> None:
    with pytest.raises(PentadError) as caught:
        load(None, [override])
    assert str(caught.value).startswith(sentence)
