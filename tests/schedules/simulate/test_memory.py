"""Saved activations over time: their maximum is the peak computed from the order alone, whatever the costs."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_activations import activations_over_time

from pentad.schedules.compiler import compile_program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.simulate.simulate import simulate

PROGRAMS = [("gpipe", 1, 3), ("1f1b", 4, 6), ("zb-h1", 3, 5), ("zb-h2", 3, 6), ("zb-v", 3, 6), ("dualpipe", 4, 8)]
compiled = cache(compile_program)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
@given(data=st.data())
@settings(max_examples=5)
def test_the_maximum_is_the_peak_and_nothing_is_left(
    name: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    program = compiled(name, ranks, microbatches)
    each = st.tuples(*[st.floats(0.1, 4)] * program.stages)
    costs = Costs(data.draw(each), data.draw(each), data.draw(each), transfer=data.draw(st.sampled_from([0.0, 0.5])))
    saved = activations_over_time(program, simulate(program, costs))
    assert [max(share for _, share in rank) for rank in saved] == pytest.approx(peak_activations(program))
    for rank in saved:
        assert rank == sorted(rank, key=lambda change: change[0])
        assert rank[-1][1] == pytest.approx(0)
        assert min(share for _, share in rank) >= -1e-9


def test_a_microbatch_is_saved_from_its_forward_to_its_backward() -> None:
    saved = activations_over_time(compiled("zb-h1", 1, 2), simulate(compiled("zb-h1", 1, 2), Costs.uniform(1)))
    assert saved == [[(0, 1), (2, 0.5), (3, 0), (3, 1), (5, 0.5), (6, 0)]]
