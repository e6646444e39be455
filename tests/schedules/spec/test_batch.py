"""Batches follow one another without a gap, whatever their sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.spec.batch import BatchSizes, RampupStage

STAGES = st.lists(st.builds(RampupStage, st.integers(1, 9), st.integers(1, 5)), max_size=4)


@given(STAGES, st.integers(1, 9))
def test_every_sample_is_in_one_batch(stages: list[RampupStage], full: int) -> None:
    sizes = BatchSizes(full, tuple(stages))
    expected = [stage.global_batch_size for stage in stages for _ in range(stage.steps)] + [full] * 3
    first = 0
    for batch, size in enumerate(expected):
        assert (sizes.size(batch), sizes.first_sample(batch)) == (size, first)
        assert {sizes.batch_of_sample(sample) for sample in range(first, first + size)} == {batch}
        first += size
