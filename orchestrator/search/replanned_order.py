"""Plans with another compute order, at the costs that a run has measured (schedule.replan)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.fit import device_memory, fit_of, require_host
from pentad.orchestrator.planning.formatting import format_percent
from pentad.orchestrator.planning.layout import objective_of
from pentad.orchestrator.planning.planning import make_plan, with_inputs_of
from pentad.schedules.diagnosis.rank_costs import costs_of_ranks
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program
from pentad.schedules.search.auto import AUTO
from pentad.schedules.search.reorder import adds_alike, reorder
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate_step_time
from pentad.schedules.spec.plan import Plan

LEAST_GAIN = 0.02  # share of a step's simulated time that a new order must save
PAUSE_SECONDS = 5.0  # cost of an exchange, which the gain over the remaining steps must exceed
EVENT = "replanned"


class ReplannedOrder(NamedTuple):
    """The configuration and plan with another `order`, and the simulated seconds of a step before and after."""

    config: RunConfig
    plan: Plan
    order: Program
    before: float
    after: float

    @property
    def gain(self) -> float:
        """Share of a step's time that is saved."""
        return 1 - self.after / self.before


def find_order(config: RunConfig, plan: Plan, steps: Sequence[Sequence[RankTime]], left: int) -> ReplannedOrder | str:
    """A faster order at the costs of these steps, for a run with `left` steps left; or why the run keeps its own."""
    costs = measured_costs(plan, steps)
    if costs is None:
        return f"the times of the first {len(steps)} steps are not complete"
    try:
        order = reorder(plan.program, costs, config.schedule.options, objective_of(config))
        order = replace(order, name=f"{order.name}, re-planned")
        found = replanned(config, plan, order, costs)
        require_host(config, found.plan)
    except PentadError as error:
        return str(error)
    return _refusal(plan, found, left) or found


def replanned(config: RunConfig, plan: Plan, order: Program, costs: Costs) -> ReplannedOrder:
    """The plan of the same ranks with this order. Raises PentadError if there is none."""
    changed = config.model_copy(update={"schedule": config.schedule.with_order(order)})
    units = plan.program.units or (1,) * plan.program.stages
    made = with_inputs_of(make_plan(changed, plan.device, hosts=plan.hosts, model=plan.model, units=units), plan)
    times = (simulate_step_time(each.program, costs) for each in (plan, made))
    before, after = (getattr(each, objective_of(config)) for each in times)
    return ReplannedOrder(changed, made, order, before, after)


def _refusal(plan: Plan, found: ReplannedOrder, left: int) -> str:
    """Why a run with `left` steps left keeps its order; '' if it should change."""
    if found.gain < LEAST_GAIN:
        return f"by simulation no order takes {format_percent(LEAST_GAIN)} off a step"
    if (saved := left * (found.before - found.after)) < PAUSE_SECONDS:
        return f"the {left} steps that are left would gain {saved:.3g} s, and an exchange may take {PAUSE_SECONDS:g} s"
    programs = zip(plan.trained_programs, found.plan.trained_programs, strict=True)
    if found.plan.layers != plan.layers or not all(adds_alike(*each) for each in programs):
        return "the faster order adds up gradients in another order, and so would change bits"
    memory = device_memory(plan.device, gpu=plan.gpu)
    fit = fit_of(found.plan, memory)
    return fit.sentence if not fit.ok and fit_of(plan, memory).ok else ""


def measured_costs(plan: Plan, steps: Iterable[Sequence[RankTime]]) -> Costs | None:
    """The costs of instructions by unit: medians over these steps, and estimates for what no rank measured. None if
    compute times are incomplete.

    Where B and W of a unit ran as BW, their time is divided in the estimated ratio.
    """
    steps, guess = list(steps), costs_of(plan)
    found = costs_of_ranks(plan.program, plan.mesh, steps)
    if found is None:
        return None
    alone = {part.stage for stream in plan.program.streams for each in stream for part in each.parts if part.op is Op.B}
    backward, weight = list(found.backward), list(found.weight)
    for unit in set(range(plan.program.stages)) - alone:
        both, share = backward[unit] + weight[unit], guess.backward[unit] / (guess.backward[unit] + guess.weight[unit])
        backward[unit], weight[unit] = share * both, (1 - share) * both
    updates = [max((each.seconds for each in step if each.op == Op.STEP.value), default=0.0) for step in steps]
    return replace(
        guess,
        forward=found.forward,
        backward=tuple(backward),
        weight=tuple(weight),
        transfer=found.transfer or guess.transfer,
        step=median(updates) or guess.step,
        launch=0.0,  # contained in measured times
        slowdown=found.slowdown,
        recompute=found.recompute,
    )


def replans(config: RunConfig) -> bool:
    return config.schedule.name == AUTO and config.schedule.replan is not False


def order_facts(config: RunConfig) -> dict[str, Any]:
    """What the journal records about a configuration whose order changes."""
    schedule = config.schedule
    return {"pipeline": [config.mesh.pp, schedule.microbatches, schedule.memory_limit, schedule.post_validation]}


def with_replanned_order(
    config: RunConfig, journal: Callable[[], Sequence[Mapping[str, Any]]], file: Path
) -> RunConfig:
    """The configuration of a resuming run, with the last order in its journal, read from `file`, unless its pipeline
    was changed since. Raises PentadError if the file has another order."""
    if not replans(config):
        return config
    events = [row for row in journal() if row["event"] == EVENT]
    if not events or events[-1]["pipeline"] != order_facts(config)["pipeline"]:
        return config
    order, layers = Program.load(file), config.schedule.layers_per_stage
    if order.hash != events[-1]["order"]:
        expected = f"{events[-1]['order'][:12]}, as the run's journal has it: schedule.replan=false does without"
        raise PentadError(f"{file} has the order {order.hash[:12]}: expected {expected}")
    if layers is not None and len(layers) != order.stages:
        return config
    return config.model_copy(update={"schedule": config.schedule.with_order(order)})
