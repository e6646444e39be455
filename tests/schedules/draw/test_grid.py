"""Large programs are drawn as text in time proportional to their instructions."""

from __future__ import annotations

import time

import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.draw.grid import time_grid
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate


@pytest.mark.quiet
def test_a_large_grid_is_drawn_in_linear_time() -> None:
    program, costs = compile_program("zb-h1", 32, 128), Costs.uniform(32)
    timeline = simulate(program, costs)
    seconds = []
    for _ in range(3):  # garbage collection may slow one of them down
        began = time.process_time()
        rows = time_grid(program, timeline, costs).splitlines()
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.2  # takes 0.04 s; 0.4 s if every cell or rank scans all columns or spans
    assert [row.split()[-1] for row in rows] == ["W127"] * 32
