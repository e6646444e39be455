"""`pentad calibrate --from RUN`: adjusts a table of rates so that plans predict the times of a run's instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from pentad.orchestrator.gpus.rate_table import RateTable
from pentad.orchestrator.planning.estimate import costs_of, simulated_seconds
from pentad.orchestrator.planning.hardware import NODE_GPUS, is_on_host, launched
from pentad.orchestrator.search.replanned_order import measured_costs
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.ir.columns import op_mask
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import COMPUTE
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.rates import Link, Rates
from pentad.schedules.simulate.timeline import COMPUTE as TIMED
from pentad.schedules.spec.mesh import Axis
from pentad.schedules.spec.plan import Plan

LEAST_STEPS = 4
MOST = 8.0  # times as fast or as slow; anything beyond is not a matter of rates
HALVINGS = 40  # of the interval in which a factor is searched


@dataclass(frozen=True)
class Refined:
    """A refined table, and the factors by which its compute, updates and transfers are faster than before (1: not
    measured). Seconds of a step: measured (median), predicted with the table `before`, and `after` with this one.
    `starved` is the fraction of compute time in which other processes had the cores of CPU ranks, which is in no rate.
    """

    table: RateTable
    compute: float
    update: float
    transfer: float
    measured: float
    before: float
    after: float
    starved: float

    def facts(self) -> dict[str, Any]:
        factors = {"compute": self.compute, "update": self.update, "transfer": self.transfer}
        seconds = {name: getattr(self, name) for name in ("measured", "before", "after")}
        return {"factors": factors, "step_seconds": seconds, "starved": self.starved}


def refine(
    table: RateTable, plan: Plan, steps: Sequence[Sequence[RankTime]], seconds: Sequence[float], run: str
) -> Refined:
    """Refines a table with a run's `steps`, without those to warm up, and the `seconds` that these steps took.

    Compute (products, attention, experts and the rest of layers) gets a single factor, as it is not measured which of
    these deviates. Raises PentadError if too little was measured, or no rates explain it.
    """
    rates, plan = table.rates, _with_rates(plan, table.rates)
    found = measured_costs(plan, steps)
    if found is None or len(steps) < LEAST_STEPS:
        count = len(steps) if found is not None else 0
        raise PentadError(f"RUN is '{run}', which has {count} measured steps: expected at least {LEAST_STEPS}")
    compute = _compute_factor(plan, rates, _compute(plan, found), run)
    guess, changed = costs_of(plan), rates.scaled("flops", compute)
    changed = replace(changed, elementwise=compute * rates.elementwise)
    update = 1.0 if plan.host_optimizer else _factor(guess.step, found.step)
    changed = replace(changed, update=update * rates.update)
    transfer = _factor(guess.transfer, found.transfer) if plan.mesh.pp > 1 else 1.0
    changed = _with_transfers(plan, changed, transfer)
    refined = table.model_copy(update={"rates": changed, "refined": (*table.refined, run)})
    after = simulated_seconds(_with_rates(plan, changed))
    before, starved = simulated_seconds(plan), _starved_share(steps)
    return Refined(refined, compute, update, transfer, median(seconds), before, after, starved)


def _starved_share(steps: Sequence[Sequence[RankTime]]) -> float:
    times = [each for step in steps for each in step if each.op in TIMED]
    return sum(each.starved for each in times) / sum(each.seconds for each in times)


def _with_rates(plan: Plan, rates: Rates) -> Plan:
    return replace(plan, rates=launched(rates) if plan.cuda_graphs else rates)


def _compute(plan: Plan, costs: Costs) -> float:
    """Seconds of one F, B and W (or BW) of every stage, and of recomputation."""
    again = [seconds * (plan.recompute_mode(stage) != "none") for stage, seconds in enumerate(costs.recompute)]
    kinds = op_mask(COMPUTE)[plan.program.columns.op]
    launched = {*zip(plan.program.columns.op[kinds].tolist(), plan.program.columns.stage[kinds].tolist(), strict=True)}
    launches = costs.launch * (len(launched) + sum(map(bool, again)))
    return sum((*costs.forward, *costs.backward, *costs.weight, *again)) + launches


def _compute_factor(plan: Plan, rates: Rates, seconds: float, run: str) -> float:
    """The factor on the speed of compute at which F, B and W take `seconds`."""

    def at(factor: float) -> float:
        changed = replace(rates.scaled("flops", factor), elementwise=factor * rates.elementwise)
        return _compute(plan, costs_of(_with_rates(plan, changed)))

    slow, fast = 1 / MOST, MOST
    if not at(fast) < seconds < at(slow):
        expected = f"between {at(fast):.3g} s, below which links and the host set the pace, and {at(slow):.3g} s"
        raise PentadError(f"RUN is '{run}', whose F, B and W take {seconds:.3g} s a microbatch: expected {expected}")
    for _ in range(HALVINGS):
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if at(middle) > seconds else (slow, middle)
    return (slow * fast) ** 0.5


def _factor(guessed: float, measured: float) -> float:
    return min(MOST, max(1 / MOST, guessed / measured)) if guessed and measured else 1.0


def _with_transfers(plan: Plan, rates: Rates, times: float) -> Rates:
    """Rates with sends between the stages of this plan `times` as fast."""
    axes: tuple[Axis, ...] = ("pp",)
    on_host = is_on_host(plan.mesh, axes, rates.host_order)
    name = "inter_host" if not on_host else "peer" if plan.mesh.size <= NODE_GPUS else "intra_host"
    links = getattr(rates, name)
    faster = replace(links, send=Link(links.send.latency / times, links.send.bandwidth * times))
    return replace(rates, **{name: faster})
