"""From a schedule's name to a proven program: the chain of passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pentad.schedules.catalogue import NO_OPTIONS, generate
from pentad.schedules.generators.forward_only import forward_only
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.gc_pause import gc_paused
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.loss_pass import add_loss
from pentad.schedules.passes.offload import add_offload, add_offload_beyond
from pentad.schedules.passes.optimizer_pass import add_reduce, add_step
from pentad.schedules.passes.post_validation import add_post_validation
from pentad.schedules.passes.recompute import add_recompute
from pentad.schedules.passes.transfers import add_transfers
from pentad.schedules.passes.units import split_into_units
from pentad.schedules.passes.zero import add_gathers
from pentad.schedules.passes.zero_buffers import add_gradient_buffer_waits, is_double_buffered
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.simulate.simulate import simulate_step_time
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions
from pentad.schedules.verify.check import check, check_order

NO_MEMORY_OPTIONS = MemoryOptions()


def compile_program(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    costs: Costs | None = None,
    gated: bool = False,
    replicas: int = 1,
    post_validation: bool = False,
    options: ScheduleOptions = NO_OPTIONS,
    memory_options: MemoryOptions = NO_MEMORY_OPTIONS,
    order: Program | None = None,
    proved: bool = True,
) -> Program:
    """The proven program for one replica of `ranks` pipeline ranks.

    `costs`, per unit, decide where receives go (default: equal costs), and some schedules are planned from them.
    `gated` is for transports whose receives must not wait on the GPU. `replicas` is the number of data-parallel
    replicas of the mesh. `post_validation` lets a step run ahead of its global norm (see post_validation.py). `options`
    are the schedule's; `memory_options` trade time for memory. `order` is a compute order to use instead of the
    schedule's. `proved=False` skips the proof, which takes half of the time: for programs that are compared and never
    run.

    Raises PentadError for sizes or options that are not allowed, and ScheduleError when the proof fails.
    """
    with gc_paused():
        units = memory_options.units
        order = order or generate(name, ranks, microbatches, options, costs and costs.of_stages(units))
        if units:
            if proved:
                check_order(order)
            order = split_into_units(order, units)
        return lower(
            order,
            costs or Costs.uniform(order.stages),
            gated=gated,
            replicas=replicas,
            post_validation=post_validation,
            memory_options=memory_options,
            proved=proved,
        )


def lower(
    order: Program,
    costs: Costs,
    *,
    gated: bool = False,
    replicas: int = 1,
    post_validation: bool = False,
    memory_options: MemoryOptions = NO_MEMORY_OPTIONS,
    proved: bool = True,
) -> Program:
    """The proven program that runs a compute order; the arguments are as in `compile_program`.

    Raises ScheduleError when the order or the program is invalid, and PentadError for options that are not allowed.
    """
    if proved:
        check_order(order)
    program = add_transfers(order, costs, gated=gated, post_validation=post_validation)
    program = add_memory_passes(program, memory_options)
    program = add_reductions(program, replicas, memory_options)
    program = add_post_validation(program) if post_validation else add_step(program)
    if proved:
        check(program, replicas=replicas, zero=memory_options.zero)
    return program


def compile_forward_only(
    trained: Program, costs: Costs | None = None, *, gated: bool = False, memory_options: MemoryOptions
) -> Program:
    """The proven program that evaluates the model that `trained`, lowered or not, trains: its forwards, then LOSS.

    Only ZeRO's part of `memory_options` applies: nothing is saved that could be recomputed or offloaded.
    """
    with gc_paused():
        order = forward_only(trained)
        check_order(order)
        program = add_transfers(order, costs or Costs.uniform(order.stages), gated=gated)
        options = memory_options._replace(
            recompute=frozenset(), max_resident=None, offload=frozenset(), sizes=trained.sizes, logits_in_w=False
        )
        program = add_loss(add_memory_passes(program, options))
        check(program)
        return program


def add_memory_passes(program: Program, options: MemoryOptions) -> Program:
    """Adds recomputation, ZeRO's gathers and offloading. Raises PentadError for options that are not allowed."""
    if not 0 <= options.zero <= 3:
        raise PentadError(f"zero.stage is {options.zero}: expected 0 to 3")
    if options.zero > 1:
        program = replace(program, sizes=options.sizes, logits_in_w=options.logits_in_w and options.zero == 3)
    if options.recompute:
        program = add_recompute(program, options.recompute)
    if options.zero:
        program = add_gathers(program, zero=options.zero, prefetch=options.prefetch, max_gathered=options.max_gathered)
    if options.max_resident is not None:
        return add_offload_beyond(program, options.max_resident)
    return add_offload(program, options.offload, options.offload_prefetch) if options.offload else program


def add_reductions(program: Program, replicas: int, options: MemoryOptions) -> Program:
    """Adds gradient reductions and, with ZeRO-2 and 3, the waits for the buffers that they share. Raises PentadError if
    gradients are to be reduced every microbatch with any other ZeRO stage."""
    if options.zero < 2:
        if options.reduce == "microbatch":
            raise PentadError(f"zero.reduce is microbatch with zero.stage = {options.zero}: expected zero.stage 2 or 3")
        return add_reduce(program, replicas=replicas, scatter=options.zero > 0)
    every = options.reduce == "microbatch"
    reduced = add_reduce(program, replicas=replicas, scatter=True, every_microbatch=every)
    if options.reduce is None and not is_double_buffered(reduced):
        reduced = add_reduce(program, replicas=replicas, scatter=True, every_microbatch=True)
    return add_gradient_buffer_waits(reduced)


def summary(program: Program, costs: Costs, *, with_streams: bool = True) -> dict[str, Any]:
    """Facts about a program as plain data, with times in the unit of the costs: the JSON of `pentad schedule`.

    `with_streams` adds every instruction as text, which for a large program takes longer than everything else.
    """
    makespan, longest, bubble = simulate_step_time(program, costs)
    facts = {
        "name": program.name,
        "ranks": program.ranks,
        "microbatches": program.microbatches,
        "chunks": program.chunks,
        "slices": program.slices,
        "placement": [list(stages) for stages in program.placement],
        "makespan": makespan,
        "longest": longest,
        "bubble": {"makespan": bubble.makespan, "longest": bubble.longest},
        "peak_activations": peak_activations(program),
    }
    if with_streams:
        facts["streams"] = [[str(unit) for unit in stream] for stream in program.compute().streams]
        facts["program"] = [[str(unit) for unit in stream] for stream in program.streams]
    return {**facts, "hash": program.hash}
