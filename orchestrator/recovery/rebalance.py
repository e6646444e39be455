"""Moves layers away from ranks that stay slow (elastic.slow_rank: rebalance)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.diagnosis.slow_ranks import sentence
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.planning.fit import device_memory, fit_of
from pentad.orchestrator.planning.formatting import format_percent
from pentad.orchestrator.search.rebalanced_plan import (
    find_moves,
    layer_facts,
    layers_per_stage,
    rebalanced_plan,
    with_layers,
)
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.diagnosis.slow_ranks import SlowRank
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.search.layer_moves import LayerMoves
from pentad.schedules.spec.plan import Plan

AGAIN = 1000  # steps before layers move again because of the same rank
LEAST_GAIN = 0.02  # simulated fraction of the step time that a move must save
STEPS = 8  # newest steps whose median times are the costs


class LayerChange(NamedTuple):
    """The configuration and plan with other layers per stage, and the facts for the journal."""

    config: RunConfig
    plan: Plan
    facts: dict[str, Any]


class Rebalance:
    """Moves layers in one run. A slow rank is considered once per generation and AGAIN steps; once layers have moved,
    their division is reconsidered every AGAIN steps."""

    def __init__(self, config: RunConfig, group: WorkerGroup, bus: EventBus) -> None:
        self.config, self.group, self.bus = config, group, bus
        self.moved: dict[int, int] = {}  # the step after which layers last moved because of a rank
        self.seen: set[tuple[int, ...]] = set()  # (generation, step // AGAIN, *ranks) already considered
        self.said: set[str] = set()
        self.looked = 0  # the step at which layers were last considered
        self.change: LayerChange | None = None  # for the next step boundary

    def due(self, full: Plan) -> LayerChange | None:
        """The change that is due at the next step boundary, if any; `full` is the plan of the ranks."""
        if self.config.elastic.slow_rank != "rebalance" or self.change is not None:
            return self.change
        step = self.bus.view.step
        slow = [each for each in self.bus.lasting_slow_ranks if each.kind == "compute"]
        fresh = [each for each in slow if not self._has_moved(each, step)]
        is_old = bool(self.moved) and step >= self.looked + AGAIN
        key = (self.group.generation, step // AGAIN, *(rank for each in fresh for rank in each.ranks))
        if (fresh and key not in self.seen) or is_old:
            self.seen.add(key)
            self.looked = step
            self.change = self._change(full, fresh)
        return self.change

    def take(self) -> LayerChange | None:
        """The pending change, if any, which the caller now makes."""
        change, self.change = self.change, None
        if change is not None:
            self.config = change.config
            self.moved |= dict.fromkeys(change.facts["ranks"], self.bus.view.step)
        return change

    def cancel(self) -> None:
        """Drops the pending change: what was measured no longer holds."""
        self.change = None

    def _has_moved(self, slow: SlowRank, step: int) -> bool:
        return any(step < self.moved.get(rank, -AGAIN) + AGAIN for rank in slow.ranks)

    def _change(self, full: Plan, slow: Sequence[SlowRank]) -> LayerChange | None:
        names = [sentence(each, self.bus.view.ranks, self.bus.gpus) for each in slow]
        cause = "; ".join(names) or f"{AGAIN} steps after layers moved"
        ranks = [rank for each in slow for rank in each.ranks]
        facts: dict[str, Any] = {"generation": self.group.generation, "ranks": ranks}
        found = _found(self.config, full, list(islice(reversed(self.bus.folder.rank_times), STEPS)))
        if not isinstance(found, str):
            moves, plan, config = found
            before, after = layers_per_stage(full), moves.layers
            text = f"{cause}: layers per stage {_text(before)} become {_text(after)}, by simulation "
            text += f"{format_percent(moves.gain)} off a step"
            facts |= {"before": before, "layers": after, "predicted_seconds": [moves.before, moves.after]}
            return LayerChange(config, plan, {**facts, **layer_facts(self.config), "sentence": text})
        if slow and found not in self.said:
            self.said.add(found)
            text = f"{cause}; layers stay where they are: {found}"
            self.bus.record("not rebalanced", step=self.bus.view.step, **facts, cause=found, sentence=text)
            self.bus.display.note(text)
        return None


def _found(
    config: RunConfig, plan: Plan, steps: Sequence[tuple[RankTime, ...]]
) -> tuple[LayerMoves, Plan, RunConfig] | str:
    """The layers that move, judged by these steps, with the resulting plan and configuration; or why none do."""
    if plan.mesh.pp == 1:
        return "mesh.pp is 1, so no other stage can take layers, and all replicas get equally many microbatches"
    moves = find_moves(plan, steps)
    if moves is None:
        return f"the times of the last {STEPS} steps are not complete"
    if moves.gain < LEAST_GAIN:
        return (
            f"by simulation no layers per stage take {format_percent(LEAST_GAIN)} off a step with "
            f"{_text(layers_per_stage(plan))}"
        )
    changed = with_layers(config, moves.layers)
    try:
        moved = rebalanced_plan(changed, plan)
    except PentadError as error:
        return str(error)
    memory = device_memory(plan.device, gpu=plan.gpu)
    fit = fit_of(moved, memory)
    if not fit.ok and fit_of(plan, memory).ok:
        return f"layers per stage {_text(moves.layers)}: {fit.sentence}"
    return moves, moved, changed


def _text(layers: Sequence[int]) -> str:
    return "/".join(map(str, layers))
