"""The fraction of its time for which an operation of a plan keeps its rank's links busy, to GPUs of its host and to
other hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pentad.orchestrator.planning.estimate import even_piece, rates_of_plan
from pentad.orchestrator.planning.hardware import links_of, ranks_on_host
from pentad.orchestrator.planning.parameter_collectives import local_parameters
from pentad.orchestrator.simulation.layer_spans import messages_of
from pentad.schedules.ir.instruction import Op
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.rates import Rates
from pentad.schedules.simulate.shared_links import LinkShares, Shares
from pentad.schedules.spec.mesh import DENSE_AXES, EXPERT_AXES, Axis
from pentad.schedules.spec.plan import Plan

NOTHING: Shares = (0.0, 0.0)
PASSED_ON = ("all_gather", "reduce_scatter", "all_reduce")  # passed on from rank to rank, along a ring
ZERO_OPS = (Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_GATHER)


def link_shares(plan: Plan, costs: Costs) -> LinkShares:
    """Shares by op and stage: of links within a host first, of those to other hosts second."""
    rates, stages = rates_of_plan(plan), range(plan.program.stages)
    takes = {
        Op.F: costs.forward,
        Op.B: costs.backward,
        Op.BW: tuple(map(sum, zip(costs.backward, costs.weight, strict=True))),
        Op.RECOMPUTE: costs.recompute or costs.forward,
    }
    by_stage = {
        op: tuple(_shares(_in_layers(plan, rates, op, stage), its[stage]) for stage in stages)
        for op, its in takes.items()
    }
    by_stage |= dict.fromkeys(ZERO_OPS, tuple(_of_parameters(plan, rates, stage) for stage in stages))
    size = even_piece(plan).stream(plan.model.hidden)
    return LinkShares(by_stage, _shares(_busy(plan, rates, ("pp",), "send", size), costs.transfer))


def _in_layers(plan: Plan, rates: Rates, op: Op, stage: int) -> Shares:
    """Seconds for which messages inside the layers of a stage keep each link busy, including hidden ones."""
    found = [0.0, 0.0]
    if op is Op.RECOMPUTE and plan.recompute_mode(stage) == "none":
        return NOTHING
    for each in messages_of(plan, op.value, stage):
        for link, seconds in enumerate(_busy(plan, rates, (each.axis,), each.kind, each.bytes, in_layers=True)):
            found[link] += seconds
    return found[0], found[1]


def _of_parameters(plan: Plan, rates: Rates, stage: int) -> Shares:
    """The shares of a collective of a stage's parameters. Such a collective keeps the link that takes longest busy all
    the time."""
    sizes = local_parameters(plan.model, plan.lora, plan.layers[stage], plan.mesh)
    both = zip(sizes, (DENSE_AXES, EXPERT_AXES), strict=True)
    seconds = [_busy(plan, rates, axes, "all_gather", size, group=plan.zero_shards) for size, axes in both]
    return _shares([sum(its) for its in zip(*seconds, strict=True)], sum(max(its) for its in seconds))


def _busy(
    plan: Plan, rates: Rates, axes: tuple[Axis, ...], kind: str, size: int, *, in_layers: bool = False, group: int = 0
) -> Shares:
    """Seconds for which `size` bytes of the ranks along these axes, or of each `group` of them, keep each link of a
    rank busy. In a collective between hosts, bytes also pass from rank to rank within each host."""
    ranks, held = math.prod(getattr(plan.mesh, axis) for axis in axes), ranks_on_host(plan.mesh, axes, rates.host_order)
    if group:
        ranks, held = group, math.gcd(held, group)
    if ranks == 1:
        return NOTHING
    seconds = size / links_of(rates, plan.mesh, axes, in_layers=in_layers, group=group).of(kind).bandwidth
    if held == ranks:
        return seconds, 0.0
    return size / rates.intra_host.of(kind).bandwidth if held > 1 and kind in PASSED_ON else 0.0, seconds


def _shares(busy: Sequence[float], seconds: float) -> Shares:
    return tuple(min(1.0, each / seconds) if seconds else 0.0 for each in busy)
