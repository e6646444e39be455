"""From a schedule's name to a proven program: the chain of passes."""

from __future__ import annotations

from typing import Any

from pentad.schedules.catalogue import NONE, generate
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.gc_pause import gc_paused
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.offload import add_offload
from pentad.schedules.passes.optimizer_pass import add_reduce, add_step
from pentad.schedules.passes.pools import add_turns
from pentad.schedules.passes.recompute import add_recompute
from pentad.schedules.passes.transfers import add_transfers
from pentad.schedules.passes.validation import add_validated_step
from pentad.schedules.passes.zero import add_gathers
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.schedule_spec import MemoryOptions, Options
from pentad.schedules.verify.check import check, check_order, peak_activations

ALL_KEPT = MemoryOptions()


def compile_program(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    costs: Costs | None = None,
    gated: bool = False,
    replicas: int = 1,
    validated: bool = False,
    options: Options = NONE,
    savings: MemoryOptions = ALL_KEPT,
    order: Program | None = None,
) -> Program:
    """A program for one replica of `ranks` pipeline ranks, proven. `costs` decide where receives stand (default: equal
    costs) and are what some schedules plan with, `gated` is for transports whose receives must not wait on the GPU,
    `replicas` is the mesh's dp, `validated` lets a step run ahead of its global norm (see validation.py), `options` are
    what the schedule is asked for, `savings` what is done to need less memory, `order` the compute order where it was
    searched and no generator has it.

    Raises PentadError on sizes the schedule does not allow and ScheduleError when the proof fails.
    """
    with gc_paused():
        order = order or generate(name, ranks, microbatches, options, costs)
        known = costs or Costs.uniform(order.stages)
        return lower(order, known, gated=gated, replicas=replicas, validated=validated, savings=savings)


def lower(
    order: Program,
    costs: Costs,
    *,
    gated: bool = False,
    replicas: int = 1,
    validated: bool = False,
    savings: MemoryOptions = ALL_KEPT,
) -> Program:
    """The program that runs a compute order (see `compile_program`), proven. Raises ScheduleError when it is none."""
    check_order(order)
    moved = add_transfers(order, costs, gated=gated, validated=validated)
    counts, stages = savings.buckets, order.stages
    if counts and (len(counts) != stages or min(counts) < 1):
        raise PentadError(f"buckets are {counts}: expected one count of at least 1 for each of {stages} stages")
    spared = add_savings(moved, savings)
    reduced = add_reduce(spared, replicas=replicas, scatter=savings.zero > 0, buckets=savings.buckets)
    turned = add_turns(reduced) if savings.zero > 1 else reduced
    program = add_validated_step(turned) if validated else add_step(turned)
    check(program, replicas=replicas, buckets=savings.buckets)
    return program


def add_savings(program: Program, savings: MemoryOptions) -> Program:
    """The program with all that is to spare memory. Raises PentadError on what it does not allow."""
    if not 0 <= savings.zero <= 3:
        raise PentadError(f"zero is {savings.zero}: expected a stage of ZeRO, 0 to 3")
    if savings.recompute:
        program = add_recompute(program, savings.recompute)
    if savings.zero:
        program = add_gathers(program, zero=savings.zero, prefetch=savings.prefetch, gathered=savings.max_gathered)
    return program if savings.max_resident is None else add_offload(program, savings.max_resident)


def summary(program: Program, costs: Costs) -> dict[str, Any]:
    """The facts of a program as plain data (the JSON of `pentad schedule`): times in the unit of the costs."""
    timeline = simulate(program, costs)
    bubble = timeline.bubble()
    return {
        "name": program.name,
        "ranks": program.ranks,
        "microbatches": program.microbatches,
        "chunks": program.chunks,
        "slices": program.slices,
        "placement": [list(stages) for stages in program.placement],
        "makespan": timeline.makespan,
        "longest": timeline.longest,
        "bubble": {"makespan": bubble.makespan, "longest": bubble.longest},
        "peak_activations": peak_activations(program),
        "streams": [[str(unit) for unit in stream] for stream in program.compute().streams],
        "program": [[str(unit) for unit in stream] for stream in program.streams],
        "hash": program.hash,
    }
