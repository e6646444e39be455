"""The meshes of a number of GPUs that a run fits on, fastest first.

All factorisations into five axes are tried, with microbatches of a few sizes, and as little recomputation and ZeRO as
makes them fit. Time and memory are estimated from the first microbatches of a step; the best meshes are compiled and
simulated as for a run. zb-1p stands in for schedule 'auto', whose search takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.cost_model import local_parameters
from pentad.orchestrator.planning.estimate import costs_of, memory, step_seconds
from pentad.orchestrator.planning.fit import DeviceMemory
from pentad.orchestrator.planning.hardware import NODE_GPUS, require_tp_on_node
from pentad.orchestrator.planning.layout import split, units_of
from pentad.orchestrator.planning.planning import draft, max_gathered, reduction
from pentad.schedules.catalogue import generate, spec_of
from pentad.schedules.compiler import add_memory_passes, add_reductions, compile_program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.gc_pause import gc_paused
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.recompute import RECOMPUTE_MODES, config_text
from pentad.schedules.passes.transfers import add_transfers
from pentad.schedules.passes.units import split_into_units
from pentad.schedules.search.auto import AUTO
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import action_times
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.plan import Plan, split_layers_into_units
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions
from pentad.schedules.spec.tensors import all_layers
from pentad.schedules.spec.validate import check_divisibility
from pentad.schedules.spec.zero_layout import pool_sizes

ROWS = (1, 2, 4, 8)  # sequences of a microbatch
SAVING_ALL = ("gpipe", "looped-bfs")  # save the activations of every microbatch
COMPILED = 10  # of the best estimates
_order = lru_cache(maxsize=256)(generate)


class MeshChoice(NamedTuple):
    """A plan that fits; `bytes` are those of its fullest rank."""

    plan: Plan
    seconds: float
    bytes: int

    @property
    def tokens_per_second(self) -> float:
        return self.plan.batch.tokens / self.seconds


class MeshSearch(NamedTuple):
    """The fastest `choices` of all that fit, best first, and how many meshes were `rejected`, by a sentence about one
    of them."""

    choices: list[MeshChoice]
    num_fitting: int
    rejected: dict[str, int]


def search_meshes(config: RunConfig, gpus: int, device: DeviceMemory) -> MeshSearch:
    """Tries all meshes of `gpus` ranks with this much memory each."""
    estimates: list[MeshChoice] = []
    reasons: dict[str, tuple[str, int]] = {}
    with gc_paused():
        for mesh in all_meshes(gpus):
            try:
                estimates.append(_fastest(config, mesh, device))
            except PentadError as error:
                key = str(error).partition(" is ")[0]
                sentence, number = reasons.get(key, (str(error), 0))
                reasons[key] = sentence, number + 1
    estimates.sort(key=lambda each: each.seconds)
    compiled = [_compiled(config, each) for each in estimates[:COMPILED]]
    choices = sorted((each for each in compiled if each.bytes <= device.bytes), key=lambda each: each.seconds)
    return MeshSearch(choices, len(estimates), dict(reasons.values()))


def all_meshes(ranks: int) -> Iterator[Mesh]:
    """Every factorisation of a number of ranks."""
    divisors = [each for each in range(1, ranks + 1) if ranks % each == 0]
    for pp, tp, cp, ep in product(divisors, repeat=4):
        dp, rest = divmod(ranks, pp * tp * cp * ep)
        if not rest:
            yield Mesh(dp, pp, cp, tp, ep)


def overrides_of(plan: Plan) -> dict[str, str | int]:
    """The keys and values that make a configuration give this plan."""
    axes = {f"mesh.{axis}": getattr(plan.mesh, axis) for axis in ("dp", "pp", "cp", "tp", "ep")}
    return {
        **axes,
        "schedule.microbatches": plan.batch.microbatches,
        "zero.stage": plan.zero,
        "memory.recompute": config_text(plan.recomputation),
    }


def _fastest(config: RunConfig, mesh: Mesh, device: DeviceMemory) -> MeshChoice:
    """The fastest estimate for a mesh that fits. Raises PentadError if there is none."""
    require_tp_on_node(mesh, across=config.mesh.tp_across_nodes)
    replicas, sequences = mesh.dp * mesh.ep, config.batch.global_batch_size
    if sequences % replicas:
        expected = f"a multiple of mesh.dp x mesh.ep = {replicas}"
        raise PentadError(f"batch.global_batch_size is {sequences}: expected {expected}")
    _require_state_fits(config, mesh, device)
    per_replica, fitting, others = sequences // replicas, list[MeshChoice](), list[MeshChoice]()
    refusal: PentadError | None = None
    batches = [sequences, *(stage.global_batch_size for stage in config.batch.sizes.rampup)]
    for rows in (rows for rows in ROWS if all(size % (replicas * rows) == 0 for size in batches)):
        try:
            for plan in _drafts(config, mesh, per_replica // rows):
                needed = _peak_bytes(plan, device.bytes)
                if needed <= device.bytes:
                    fitting.append(MeshChoice(plan, _seconds(plan, per_replica // rows), needed))
                    break
                others.append(MeshChoice(plan, math.inf, needed))
        except PentadError as error:
            refusal = error
    if fitting:
        return min(fitting, key=lambda each: each.seconds)
    if refusal is not None and not others:
        raise refusal
    raise _does_not_fit(mesh, device, _least_bytes(others))


def _least_bytes(others: list[MeshChoice]) -> float:
    """What the smallest of these plans needs, whose `bytes` are those of some of their ranks."""
    least = math.inf
    for each in sorted(others, key=lambda each: each.bytes):
        if each.bytes >= least:
            break
        least = min(least, _peak_bytes(each.plan))
    return least


def _require_state_fits(config: RunConfig, mesh: Mesh, device: DeviceMemory) -> None:
    """Raises PentadError if the average rank has no room for weights (2 bytes a parameter), and of what is trained for
    gradients (4 bytes), master weights (4 bytes) and moments, of which Muon has one; all are sharded but frozen
    weights."""
    model = config.model_spec("bfloat16")
    if model.custom is not None and mesh.tp * mesh.cp * mesh.ep > 1:
        raise PentadError(f"mesh is {mesh}: expected dp and pp only for model.custom")
    check_divisibility(model, mesh, config.batch.sequence_length, mesh.tp, cp_method=config.mesh.cp_method)
    lora = config.lora_spec
    weights, trained = (sum(local_parameters(model, of, all_layers(model), mesh)) / mesh.pp for of in (None, lora))
    moments = (1 if config.optimizer.name == "muon" else 2) * (4 if config.precision.optimizer_state == "auto" else 2)
    replicas = mesh.size / mesh.tp / mesh.pp
    least = 2 * weights / (replicas if lora is None else 1) + trained * (4 + 4 + moments) / replicas
    if least > device.bytes:
        raise _does_not_fit(mesh, device, least)


def _does_not_fit(mesh: Mesh, device: DeviceMemory, needed: float) -> PentadError:
    at_least = f"at least {needed / 2**30:.0f} GiB"
    return PentadError(f"memory is {device.bytes / 2**30:.0f} GiB a rank: expected {at_least} for mesh {mesh}")


def _drafts(config: RunConfig, mesh: Mesh, microbatches: int) -> Iterator[Plan]:
    """Plans with less and less memory and a program of the first microbatches. Raises PentadError if none is legal."""
    model, length = config.model_spec("bfloat16"), config.batch.sequence_length
    name = "zb-1p" if config.schedule.name == AUTO else config.schedule.name
    first = microbatches if name in SAVING_ALL else min(microbatches, 2 * mesh.pp + 2)
    order = _order(name, mesh.pp, first, config.options)
    replicas = mesh.dp * mesh.ep
    rows = config.batch.global_batch_size // (replicas * microbatches)
    check_divisibility(model, mesh, length, rows, order.slices, config.mesh.cp_method)
    stages, shared = split(model, order.placement, length), _is_shared(mesh, order)
    units = units_of(config, model, stages, mesh, "bfloat16", shared=shared)
    order, layers = split_into_units(order, units), split_layers_into_units(stages, units)
    transport = "peer" if 1 < mesh.size <= NODE_GPUS else "nccl"
    plan = draft(config, model, "cuda", order, layers, transport=transport)
    batch = BatchSpec(config.batch.global_batch_size, length, microbatches, replicas, config.batch.sizes.rampup)
    for smaller in batch.rampup_microbatches:  # which the schedule may refuse
        spec_of(name, mesh.pp, smaller, config.options)
    for mode in RECOMPUTE_MODES if model.custom is None else ("none", "full"):
        for zero in _zero_stages(mesh, order):
            modes = tuple(mode if each.numbers else "none" for each in layers) if mode != "none" else ()
            # stage 1 changes no buffer of the program
            placed = replace(plan, mesh=mesh, zero=zero if zero > 1 else 0, recompute=modes)
            memory_options = _memory_options(config, placed, units)
            program = _program(name, mesh.pp, first, config.options, memory_options)
            yield replace(plan, mesh=mesh, batch=batch, program=program, zero=zero, recompute=modes)


def _memory_options(config: RunConfig, plan: Plan, units: tuple[int, ...]) -> MemoryOptions:
    has_mirrors = _has_mirrors(plan.program)
    return MemoryOptions(
        zero=plan.zero,
        max_gathered=max_gathered(config, plan.zero, units or (1,), has_mirrors=has_mirrors),
        recompute=frozenset(stage for stage, mode in enumerate(plan.recompute) if mode != "none"),
        units=units,
        reduce=reduction(config, plan.zero),
        sizes=pool_sizes(plan.model, plan.lora, plan.layers, plan.mesh, 1 + has_mirrors),
    )


def _zero_stages(mesh: Mesh, order: Program) -> Sequence[int]:
    """Stages of ZeRO that may save memory: none without a second holder, and 1 if a rank has only one unit, which is
    gathered anyway."""
    if not _is_shared(mesh, order):
        return (0,)
    return (0, 1) if order.chunks == 1 else (0, 1, 2, 3)


def _is_shared(mesh: Mesh, order: Program) -> bool:
    """Whether several ranks hold the same parameters."""
    return mesh.dp * mesh.ep * mesh.cp > 1 or _has_mirrors(order)


def _has_mirrors(order: Program) -> bool:
    return any(len(order.holders(stage)) > 1 for stage in range(order.stages))


def _peak_bytes(plan: Plan, limit: float = math.inf) -> int:
    """Of the fullest of a few ranks: both ends of the pipeline, their neighbours and the middle. The first rank beyond
    `limit` decides."""
    last, peak = plan.mesh.pp - 1, 0
    for pp in sorted({pp for pp in (0, 1, last // 2, last - 1, last) if 0 <= pp <= last}):
        peak = max(peak, memory(plan, plan.mesh.move(0, pp=pp))["total"])
        if peak > limit:
            break
    return peak


def _seconds(plan: Plan, microbatches: int) -> float:
    """Of a step: the time of the first microbatches, and that of each further one on the busiest rank."""
    order, costs = plan.program.compute(), costs_of(plan)
    if costs.recompute:  # a compute order has no RECOMPUTE: its seconds are in those of B
        costs = replace(costs, backward=tuple(map(sum, zip(costs.backward, costs.recompute, strict=True))))
    starts, ends = action_times(order, costs)
    stages = [costs.forward[s] + costs.backward[s] + costs.weight[s] + 3 * costs.launch for s in range(order.stages)]
    busiest = max(sum(stages[stage] for stage in held) for held in order.placement) * order.slices
    holders = max(len(order.holders(stage)) for stage in range(order.stages))
    further = (microbatches - order.microbatches) * busiest / holders
    collectives = [sum(each) for each in zip(costs.reduce, costs.gather or (0.0,) * order.stages, strict=True)]
    reduction = max(sum(collectives[stage] for stage in held) for held in order.placement)
    reduction *= plan.batch.replicas * plan.mesh.cp > 1
    return float(ends.max() - starts.min()) + further + reduction + costs.norm + costs.step


def _compiled(config: RunConfig, estimate: MeshChoice) -> MeshChoice:
    """With all microbatches, as for a run."""
    plan, costs = estimate.plan, costs_of(estimate.plan)
    program = compile_program(
        plan.program.name,
        plan.mesh.pp,
        plan.batch.microbatches,
        costs=costs,
        gated=plan.transport == "nccl",
        replicas=plan.batch.replicas * plan.mesh.cp,
        options=config.options,
        memory_options=_memory_options(config, plan, plan.program.units),
    )
    plan = replace(plan, program=program)
    return MeshChoice(plan, step_seconds(simulate(program, costs)), _peak_bytes(plan))


@lru_cache(maxsize=512)
def _program(
    name: str, ranks: int, microbatches: int, options: ScheduleOptions, memory_options: MemoryOptions
) -> Program:
    """With all that takes memory, but not checked, since it never runs."""
    order = split_into_units(_order(name, ranks, microbatches, options), memory_options.units)
    spared = add_memory_passes(add_transfers(order, Costs.uniform(order.stages), gated=False), memory_options)
    return add_reductions(spared, 1 + (memory_options.zero > 0), memory_options)
