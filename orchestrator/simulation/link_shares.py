"""How much of its time an operation of a plan keeps its rank's links busy, to GPUs of its host and to other hosts."""

from __future__ import annotations

import math

from pentad.orchestrator.planning.cost_model import layer_messages
from pentad.orchestrator.planning.estimate import even_piece, rates_of_plan
from pentad.orchestrator.planning.hardware import links_of, ranks_on_host
from pentad.orchestrator.planning.parameter_collectives import DENSE_AXES, EXPERT_AXES, local_parameters
from pentad.schedules.ir.instruction import Op
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.rates import Rates
from pentad.schedules.simulate.shared_links import LinkShares, Shares
from pentad.schedules.spec.mesh import Axis
from pentad.schedules.spec.plan import Plan

NOTHING: Shares = (0.0, 0.0)
ZERO_OPS = (Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_GATHER)


def link_shares(plan: Plan, costs: Costs) -> LinkShares:
    """With links of a host first, and those to other hosts second. What a collective between hosts sends on its host is
    not counted: that takes a small part of the faster link."""
    rates, stages = rates_of_plan(plan), range(plan.program.stages)
    backward = [_in_layers(plan, rates, stage, "B") for stage in stages]
    modes = [plan.recompute_mode(stage) for stage in stages]
    again = [_in_layers(plan, rates, stage, "F" if mode == "full" else mode) for stage, mode in enumerate(modes)]
    seconds: dict[Op, list[Shares]] = {
        Op.F: [_in_layers(plan, rates, stage, "F") for stage in stages],
        Op.B: backward,
        Op.BW: backward,
        Op.RECOMPUTE: [NOTHING if mode == "none" else its for mode, its in zip(modes, again, strict=True)],
    }
    takes = {
        Op.F: costs.forward,
        Op.B: costs.backward,
        Op.BW: tuple(map(sum, zip(costs.backward, costs.weight, strict=True))),
        Op.RECOMPUTE: costs.recompute or costs.forward,
    }
    by_stage = {op: tuple(map(_shares, its, takes[op])) for op, its in seconds.items()}
    collectives = tuple(_of_parameters(plan, rates, stage) for stage in stages)
    by_stage |= dict.fromkeys(ZERO_OPS, collectives)
    size = even_piece(plan).stream(plan.model.hidden)
    busy = size / links_of(rates, plan.mesh, ("pp",)).send.bandwidth
    return LinkShares(by_stage, _shares(_placed(plan, rates, ("pp",), busy), costs.transfer))


def _in_layers(plan: Plan, rates: Rates, stage: int, phase: str) -> Shares:
    """Seconds that messages inside the layers of a stage take on each link, hidden ones too."""
    found = [0.0, 0.0]
    for each in layer_messages(plan.model, plan.layers[stage], even_piece(plan), rates, phase):
        found[not each.on_host] += each.seconds + each.hidden
    return found[0], found[1]


def _of_parameters(plan: Plan, rates: Rates, stage: int) -> Shares:
    """The shares of a collective of a stage's parameters: of each link as much as it has of the bytes' time."""
    sizes = local_parameters(plan.model, plan.lora, plan.layers[stage], plan.mesh)
    seconds = [
        _placed(plan, rates, axes, size / links_of(rates, plan.mesh, axes).all_gather.bandwidth)
        for size, axes in zip(sizes, (DENSE_AXES, EXPERT_AXES), strict=True)
    ]
    on_host, between = map(sum, zip(*seconds, strict=True))
    return _shares((on_host, between), on_host + between)


def _placed(plan: Plan, rates: Rates, axes: tuple[Axis, ...], seconds: float) -> Shares:
    """Seconds on the link that the ranks along these axes have."""
    ranks = math.prod(getattr(plan.mesh, axis) for axis in axes)
    if ranks == 1:
        return NOTHING
    return (seconds, 0.0) if ranks_on_host(plan.mesh, axes, rates.host_order) == ranks else (0.0, seconds)


def _shares(busy: Shares, seconds: float) -> Shares:
    return tuple(min(1.0, each / seconds) if seconds else 0.0 for each in busy)
