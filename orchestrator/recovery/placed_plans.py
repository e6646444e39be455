"""Plans for ranks that have been placed, have moved, or have become fewer."""

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
    """The plan for ranks placed on these hosts: the `expected` one if its assumptions hold there. Raises PentadError if
    cluster.transport cannot be used there."""
    if expected.device == device:
        return on_hosts(config, expected, hosts)
    return with_inputs_of(make_plan(config, device, hosts=hosts), expected)


def on_hosts(config: RunConfig, plan: Plan, hosts: tuple[int, ...]) -> Plan:
    """The plan for ranks on these hosts (by rank): `plan` itself if they are there already, and a new program if the
    transport along some axis changes. Raises PentadError if cluster.transport cannot be used there."""
    if plan.device == "cpu" or plan.hosts == hosts:
        return plan
    moved = replace(plan, hosts=hosts, transport=transport_of(config, plan.device, hosts))
    if all(moved.transport_along(axis) == plan.transport_along(axis) for axis in ORDER):
        return moved
    units = plan.program.units or (1,) * plan.program.stages
    its = _with_sizes(config, plan.mesh.dp, plan.mesh.pp)  # the mesh may have shrunk
    return with_inputs_of(make_plan(its, plan.device, hosts=hosts, model=plan.model, units=units), plan)


def shrunk_plan(config: RunConfig, full: Plan, ranks: int) -> Plan | None:
    """The plan of the same run on the largest mesh of at most `ranks` ranks, or None if elastic.min_ranks allows none.

    The batch, its samples and its microbatches stay the same: fewer replicas take more microbatches each, and a
    shorter pipeline splits the layers anew. Among meshes of the same size, the longest pipeline wins, because its
    stages change least. On GPUs the hosts are only assumed; `on_hosts` corrects them.
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
    """The configuration with the same batch on `dp` replicas and `pp` pipeline ranks. Raises ValidationError or
    PentadError if that is impossible."""
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
