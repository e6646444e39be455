"""Timelines as pixels: each rank's row shows as much idle time as it has."""

from __future__ import annotations

import numpy as np
import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.draw.pixels import GAP, IDLE, ROW, WIDTH, timeline_pixels
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h2"])
def test_a_rank_is_grey_where_it_is_idle(name: str) -> None:
    program = compile_program(name, 4, 8)
    timeline = simulate(program, Costs.uniform(program.stages, 1.0, 1.0, 1.0))
    found = timeline_pixels(timeline)
    assert found.shape == (4 * (ROW + GAP) + GAP, WIDTH, 3)
    for rank, (_, _, busy) in timeline.busy_by_rank.items():
        row = found[GAP + rank * (ROW + GAP) + ROW // 2]
        assert (row == IDLE).all(1).mean() == pytest.approx(1 - busy / timeline.makespan, abs=0.01)
        assert len(np.unique(row, axis=0)) == 1 + len({span.op for span in timeline.compute if span.rank == rank})
