"""Copies as long as their hidden share delay no compute; longer ones do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.simulate.copy_slack import hidden_share
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.schedule_spec import MemoryOptions

UNITS = 4


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "dualpipe", "looped-bfs"])
@pytest.mark.parametrize("recompute", [False, True])
def test_compute_waits_for_copies_beyond_the_hidden_share_only(name: str, recompute: bool) -> None:
    stages = compile_program(name, 2, 4).stages
    every = frozenset(range(UNITS * stages))
    options = MemoryOptions(units=(UNITS,) * stages, offload=every, recompute=every if recompute else frozenset())
    program = compile_program(name, 2, 4, memory_options=options)
    plain, seconds = Costs.uniform(program.stages), 2.0
    shares = hidden_share(program, replace(plain, offload=(seconds,) * program.stages))

    def makespan(share: float) -> float:
        return simulate(program, replace(plain, offload=(share * seconds,) * program.stages)).makespan

    assert 0 < min(shares) < 1
    assert makespan(min(shares)) == pytest.approx(makespan(0.0), rel=1e-9)
    assert makespan(1.5) > makespan(0.0)
    assert hidden_share(program, replace(plain, offload=(1e-6,) * program.stages)) == [1.0, 1.0]
