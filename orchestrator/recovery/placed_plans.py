"""Plans of ranks that have been placed, or have moved, or are fewer than before."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import product

from pydantic import ValidationError

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.planning import make_plan, transport_of, with_inputs_of
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.mesh import ORDER
from pentad.schedules.spec.plan import Plan


def plan_on(config: RunConfig, device: str, *, hosts: tuple[int, ...], expected: Plan) -> Plan:
    """The plan of ranks that have been placed on these hosts: the `expected` one, if they are as it was made for.
    Raises PentadError if cluster.transport cannot be used there."""
    if expected.device == device:
        return on_hosts(config, expected, hosts)
    return with_inputs_of(make_plan(config, device, hosts=hosts), expected)


def on_hosts(config: RunConfig, plan: Plan, hosts: tuple[int, ...]) -> Plan:
    """A plan of this configuration for ranks on these hosts, by rank: itself if they are there; with another program
    if other axes than before are on one host each. Raises PentadError if cluster.transport cannot be used there."""
    if plan.device == "cpu" or plan.hosts == hosts:
        return plan
    moved = replace(plan, hosts=hosts, transport=transport_of(config, plan.device, hosts))
    if all(moved.transport_along(axis) == plan.transport_along(axis) for axis in ORDER):
        return moved
    units = plan.program.units or (1,) * plan.program.stages
    its = _with_sizes(config, plan.mesh.dp, plan.mesh.pp)  # of a mesh that may have shrunk
    return with_inputs_of(make_plan(its, plan.device, hosts=hosts, model=plan.model, units=units), plan)


def shrunk_plan(config: RunConfig, full: Plan, ranks: int) -> Plan | None:
    """The plan of the same run on the largest mesh of at most `ranks` ranks, or None if elastic.min_ranks allows none.

    The batch, its samples and its microbatches stay the same: fewer replicas take more microbatches each, and a
    shorter pipeline splits the layers anew. Of meshes of one size, the one with the longest pipeline: its stages
    change least. On GPUs its hosts are assumed: `on_hosts` corrects them.
    """
    inner = config.mesh.cp * config.mesh.tp * config.mesh.ep  # stay as they are
    least = config.elastic.min_ranks or config.mesh.size
    sizes = product(range(1, config.mesh.dp + 1), range(1, config.mesh.pp + 1))
    fitting = [(dp, pp) for dp, pp in sizes if least <= dp * pp * inner <= ranks]
    for dp, pp in sorted(fitting, key=lambda size: (-size[0] * size[1], -size[1])):
        if config.mesh.dp * config.schedule.microbatches % dp:
            continue
        with suppress(ValidationError, PentadError):  # too few layers or microbatches, or an odd pipeline
            smaller = _with_sizes(config, dp, pp)
            units = full.program.units or (1,) * full.program.stages
            kept = units if pp == config.mesh.pp else None
            plan = make_plan(smaller, full.device, model=full.model, units=kept)
            return with_inputs_of(plan, full)
    return None


def _with_sizes(config: RunConfig, dp: int, pp: int) -> RunConfig:
    """The configuration with the same batch on this many replicas and pipeline ranks. Raises ValidationError or
    PentadError where that is not possible."""
    if (dp, pp) == (config.mesh.dp, config.mesh.pp):
        return config
    changed = config.model_dump()
    changed["mesh"] |= {"dp": dp, "pp": pp}
    mesh = config.mesh.model_copy(update=changed["mesh"])
    changed["zero"]["shards"] = config.zero.shards_on(mesh, has_experts=config.model.experts is not None)
    changed["schedule"]["microbatches"] = config.mesh.dp * config.schedule.microbatches // dp
    if pp != config.mesh.pp:  # other stages, with more layers each
        changed["memory"]["recompute_stages"] = changed["schedule"]["layers_per_stage"] = None
    return RunConfig.model_validate(changed)
