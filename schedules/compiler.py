"""From a schedule's name to a proven program: the chain of passes."""

from __future__ import annotations

from typing import Any

from pentad.schedules.catalogue import NONE, generate
from pentad.schedules.check import check, check_order, peak_activations
from pentad.schedules.costs import Costs
from pentad.schedules.finish import add_reduce, add_step
from pentad.schedules.program import Program
from pentad.schedules.shape import Options
from pentad.schedules.simulate import simulate
from pentad.schedules.transfers import add_transfers
from pentad.schedules.uncollected import uncollected


def compile_program(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    costs: Costs | None = None,
    gated: bool = False,
    replicas: int = 1,
    options: Options = NONE,
) -> Program:
    """A program for one replica of `ranks` pipeline ranks, proven. `costs` decide where receives stand (default: equal
    costs) and are what some schedules plan with, `gated` is for transports whose receives must not wait on the GPU,
    `replicas` is the mesh's dp, `options` are what the schedule is asked for.

    Raises PentadError on sizes the schedule does not allow and ScheduleError when the proof fails.
    """
    with uncollected():
        order = generate(name, ranks, microbatches, options, costs)
        return lower(order, costs or Costs.uniform(order.stages), gated=gated, replicas=replicas)


def lower(order: Program, costs: Costs, *, gated: bool = False, replicas: int = 1) -> Program:
    """The program that runs a compute order (see `compile_program`), proven. Raises ScheduleError when it is none."""
    check_order(order)
    moved = add_transfers(order, costs, gated=gated)
    program = add_step(add_reduce(moved, replicas=replicas))
    check(program, replicas=replicas)
    return program


def summary(program: Program, costs: Costs) -> dict[str, Any]:
    """The facts of a program as plain data (the JSON of `pentad schedule`): times in the unit of the costs."""
    timeline = simulate(program, costs)
    bubble = timeline.bubble()
    return {
        "name": program.name,
        "ranks": program.ranks,
        "microbatches": program.microbatches,
        "chunks": program.chunks,
        "placement": [list(stages) for stages in program.placement],
        "makespan": timeline.makespan,
        "longest": timeline.longest,
        "bubble": {"makespan": bubble.makespan, "longest": bubble.longest},
        "peak_activations": peak_activations(program),
        "streams": [[str(unit) for unit in stream] for stream in program.compute().streams],
        "program": [[str(unit) for unit in stream] for stream in program.streams],
        "hash": program.hash,
    }
