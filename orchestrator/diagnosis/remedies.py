"""Remedies for the causes that make a step long: for each, a configuration key or other advice."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.planning.formatting import format_percent
from pentad.orchestrator.planning.planning import make_plan, reasons_against_graphs
from pentad.orchestrator.records.gpu_clocks import GpuClocks
from pentad.schedules.catalogue import CATALOGUE, generate
from pentad.schedules.compiler import compile_program
from pentad.schedules.diagnosis.attribution import STARVED
from pentad.schedules.diagnosis.causes import Cause
from pentad.schedules.diagnosis.replay import RECOMPUTE
from pentad.schedules.diagnosis.step_view import BETWEEN_STAGES, COPIES, HOST, PARAMETERS
from pentad.schedules.ir.errors import PentadError, ScheduleError
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.simulate.simulate import simulate_step_time
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import ScheduleOptions

LESS_ENERGY = "precision.matmul=fp8-tensor"
_COOLER = {  # by what holds GPUs' clocks down
    "power": "a higher limit (`nvidia-smi -pl`)",
    "thermal": "better cooling of their hosts",
    "hardware": "look at power cables and supplies",
}
MOST_ACTIONS = 4096  # most forwards in a program for which other schedules are tried


class Remedy(NamedTuple):
    """What takes time (`cause`), what would remove it (`remedy`), and the `seconds` of a step that this would save."""

    cause: str
    remedy: str
    seconds: float


def remedy_of(cause: Cause, config: RunConfig, plan: Plan | None, places: Mapping[int, str]) -> Remedy:
    """The remedy of a cause, in words. `plan` is the plan of `config`, None if unknown; `places` says where the ranks
    are."""
    mesh, seconds, ranks = config.mesh, cause.seconds, cause.ranks
    match cause.kind:
        case "slow rank":
            text = f"rank {ranks[0]} computes {format_percent(cause.factor - 1)} longer than its peers"
            return Remedy(text, f"look at {places.get(ranks[0], 'its GPU')}, or replace it", seconds)
        case "slow link":
            source, target = (f"rank {rank} ({places[rank]})" if rank in places else f"rank {rank}" for rank in ranks)
            times = f"{cause.factor:.3g} times as long" if cause.factor < 1000 else "far longer"
            return Remedy(f"transfers from {source} to {target} take {times} as others", "look at that link", seconds)
        case "uneven stages":
            pp = config.mesh.mesh.coordinates(ranks[0]).pp
            text = f"pp{pp} computes {format_percent(cause.factor - 1)} longer than the mean of the stages"
            return Remedy(text, f"model.layers or mesh.pp (now {mesh.pp}) that divide evenly", seconds)
        case "inside layers":
            axis = max(("tp", "cp", "ep"), key=lambda axis: getattr(mesh, axis))
            size = getattr(mesh, axis)
            other = "dp" if axis != "cp" else "pp"
            return Remedy("communication inside layers", f"mesh.{axis}={size // 2} with more mesh.{other}", seconds)
        case kind if kind == BETWEEN_STAGES:
            peer = config.cluster.transport == "nccl"
            text = "cluster.transport=auto" if peer else f"mesh.pp={max(1, mesh.pp // 2)} with more mesh.dp"
            return Remedy("transfers between stages", text, seconds)
        case kind if kind == PARAMETERS:
            text = "gathers, reductions and the norm" if mesh.size > 1 else "the norm of the gradients"
            return Remedy(text, _fewer_collectives(config), seconds)
        case "optimizer":
            return _optimizer(config, seconds)
        case kind if kind == RECOMPUTE:
            return Remedy("recomputation of activations", "memory.recompute=none, if it fits", seconds)
        case kind if kind == COPIES:
            return Remedy("copies to and from host memory", _fewer_copies(config), seconds)
        case "data":
            return Remedy("waiting for the loader", "data on a local disk, built with `pentad data build`", seconds)
        case kind if kind == STARVED:
            return Remedy("other processes had the ranks' cores", "look at what else runs on their hosts", seconds)
        case kind if kind == HOST:
            return Remedy("the host issues late", _less_to_issue(config, plan), seconds)
        case kind:
            raise AssertionError(kind)


def better_schedule(program: Program, costs: Costs, config: RunConfig) -> Remedy | None:
    """The schedule with the shortest step at these costs among those with the same stage placement; None if no other is
    faster, or none was tried."""
    options = config.schedule.options
    if program.forward_only or config.memory.recompute != "none" or program.ranks == 1:
        return None
    if program.stages * program.total_slices > MOST_ACTIONS or program.slices > 1 or program.name not in CATALOGUE:
        return None
    found = dict[str, tuple[float, float]]()  # seconds of a step, and microbatches whose activations are held
    for name, entry in CATALOGUE.items():
        chunks = options.chunks if "chunks" in entry.accepts else None
        given = name, program.ranks, program.microbatches
        try:
            if name != "auto" and generate(*given, ScheduleOptions(chunks=chunks)).placement == program.placement:
                other = compile_program(*given, costs=costs, options=ScheduleOptions(chunks=chunks))
                found[name] = (simulate_step_time(other, costs).makespan, max(peak_activations(other)))
        except (PentadError, ScheduleError):
            continue  # does not support these sizes
    if program.name not in found:
        return None
    (now, held), best = found[program.name], min(found, key=lambda name: found[name])
    seconds, more = found[best]
    if seconds >= now:
        return None
    memory = f", with activations of {more:g} microbatches instead of {held:g}" if more > held else ""
    return Remedy(f"the bubble that {program.name} has", f"schedule.name={best}{memory}", now - seconds)


def remedy_of_clocks(clocks: GpuClocks, config: RunConfig, plan: Plan | None, seconds: float) -> Remedy:
    """What would let the GPUs' clocks rise, which saves `seconds` at most. `plan` as in `remedy_of`."""
    remedy = _COOLER.get(clocks.reason, "see `nvidia-smi -q -d PERFORMANCE`")
    if clocks.reason == "power" and plan is not None and plan.fp8 is None:
        with suppress(PentadError, ScheduleError):  # a model, or a GPU, without FP8
            make_plan(load(config, [LESS_ENERGY]), "cuda")
            remedy = f"{LESS_ENERGY}, whose GEMMs take less energy; or {remedy}"
    share = format_percent(1 / clocks.slowdown)
    return Remedy(f"{clocks.cause} holds the GPUs at {share} of their highest clock", remedy, seconds)


def left_of_parts(config: RunConfig) -> dict[str, float]:
    """The share of a part that would remain with its remedy, if not 0: that of an update which ZeRO would shard."""
    divides = not config.zero.stage and config.mesh.replicas > 1 and config.memory.optimizer == "device"
    return {"optimizer": 1 / config.mesh.replicas} if divides else {}


def _less_to_issue(config: RunConfig, plan: Plan | None) -> str:
    if plan is not None and not plan.cuda_graphs and not reasons_against_graphs(plan):
        return "cluster.cuda_graphs=true"
    if config.schedule.microbatches == 1:
        return "batch.global_batch_size: larger instructions"
    return f"schedule.microbatches={config.schedule.microbatches // 2}: fewer, larger instructions"


def _optimizer(config: RunConfig, seconds: float) -> Remedy:
    if config.memory.optimizer == "host":
        return Remedy("the update passes through host memory", "memory.optimizer=device, if it fits", seconds)
    if not config.zero.stage and config.mesh.replicas > 1:
        return Remedy("every replica updates all parameters", "zero.stage=1", seconds)
    return Remedy("the update", "batch.global_batch_size: fewer updates for the same tokens", seconds)


def _fewer_collectives(config: RunConfig) -> str:
    if config.zero.stage == 3:
        return f"{'zero.max_gathered=null' if config.zero.max_gathered else 'zero.stage=2'}, if it fits"
    if config.zero.stage == 2 and config.zero.reduce == "microbatch":
        return "zero.reduce=step"
    if config.mesh.replicas > 1:
        return "batch.global_batch_size: fewer reductions for the same tokens"
    if config.schedule.post_validation or config.mesh.size == 1:
        return "batch.global_batch_size: fewer updates for the same tokens"
    return "schedule.post_validation=true"


def _fewer_copies(config: RunConfig) -> str:
    if config.memory.max_resident_microbatches:
        return "memory.max_resident_microbatches=null"
    if config.memory.offload_fraction == "auto":
        return "memory.offload_fraction=0, if it fits"
    return "memory.offload_fraction=auto"


def place_names(entries: list[dict[str, Any]]) -> dict[int, str]:
    """The places of ranks, such as 'node 10.0.0.4, GPU 2', from the last `place` event of a journal."""
    placed = [entry for entry in entries if entry.get("event") == "place"]
    found = {}
    for each in placed[-1].get("ranks", []) if placed else []:
        gpu = f", GPU {each['gpu']}" if each.get("gpu", -1) >= 0 else ""
        found[each["rank"]] = f"node {each['node']}{gpu}"
    return found
