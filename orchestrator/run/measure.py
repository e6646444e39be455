"""Turns the ranks' step results into lines of metrics.jsonl, measured costs, and the last timeline."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from itertools import chain
from statistics import median
from typing import Any

from pentad.orchestrator.planning.estimate import costs_of, mfu
from pentad.orchestrator.records.fp8_health import fp8_row, gradients_row
from pentad.orchestrator.records.profiles import StepProfile
from pentad.schedules.diagnosis.rank_times import RankTime, RankWaits, times_of_step
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.events import Events, acyclic_events
from pentad.schedules.simulate.read_costs import read_costs
from pentad.schedules.simulate.simulate import simulate_step_time
from pentad.schedules.simulate.timeline import Span, Timeline
from pentad.schedules.spec.plan import Plan
from pentad.workers.runtime.results import Evaluation, LossSum, StepResult, total_load

COST_STEPS = 10  # steps from whose spans costs are measured


class History:
    """The steps of one generation so far. `costs` are guessed until every op of the program has been measured.

    `offsets[rank]` seconds convert a rank's times to the driver's clock; `keep` is the number of steps in `timeline`;
    `program` is the index, in the plan's programs, of the one that the last step ran.
    """

    def __init__(
        self, plan: Plan, generation: int, *, keep: int, offsets: Sequence[float] = (), device_name: str = ""
    ) -> None:
        self.plan, self.generation, self.keep, self.device_name = plan, generation, keep, device_name
        self.offsets = offsets or (0.0,) * plan.mesh.size
        self.recent: deque[tuple[Span, ...]] = deque(maxlen=max(keep, COST_STEPS))
        self.program, self.since = 0, 0  # `since`: how many steps in a row have run it
        self.recent_evaluations: deque[tuple[Span, ...]] = deque(maxlen=keep)
        self.costs = costs_of(plan)
        self.events: dict[int, Events] = {}  # by index of the programs that have run
        self.planned: dict[int, float] = {}  # their bubbles with `costs`
        self.measured: Costs | None = None
        self.end: float | None = None

    @property
    def timeline(self) -> Timeline:
        """The last `keep` steps as measured, without those of another program."""
        return self._last(min(self.keep, self.since))

    @property
    def eval_timeline(self) -> Timeline:
        """The last rounds of the last `keep` evaluations, as measured."""
        return Timeline("measured", tuple(chain.from_iterable(self.recent_evaluations)))

    def add(self, results: Sequence[Sequence[StepResult]]) -> list[dict[str, Any]]:
        """Adds the results of a call, [rank][step]; returns the row of each step, without `total_tokens` but with
        `rank_times`, `expert_load`, `expert_slots` and `profile`.

        The results of lost ranks may be missing.
        """
        steps = list(zip(*results, strict=True))
        spans = [self._spans(step) for step in steps]
        self.recent.extend(spans)
        for step in steps:
            self.since = self.since + 1 if step[0].program == self.program else 1
            self.program = step[0].program
        if (measured := read_costs(self.plan.program, self._last(COST_STEPS))) is not None:
            self.measured = self.costs = measured
            self.planned.clear()
        return [self._row(*each) for each in zip(steps, spans, strict=True)]

    def add_evaluation(self, results: Sequence[Evaluation]) -> tuple[Span, ...]:
        """Adds the results of an evaluation, by rank; its time is not part of the next step. Returns the spans of its
        last round."""
        self.pause()
        spans = self._spans(results)
        self.recent_evaluations.append(spans)
        return spans

    def pause(self) -> None:
        """Excludes the time until the next step from that step, because it does not directly follow the last."""
        self.end = None

    def _planned_bubble(self, number: int) -> float:
        if number not in self.planned:
            program = self.plan.programs[number]
            if number not in self.events:
                self.events[number] = acyclic_events(program)
            self.planned[number] = simulate_step_time(program, self.costs, self.events[number]).bubble.makespan
        return self.planned[number]

    def _last(self, count: int) -> Timeline:
        steps = list(self.recent)[max(0, len(self.recent) - count) :]
        return Timeline("measured", tuple(span for spans in steps for span in spans))

    def _spans(self, results: Sequence[StepResult] | Sequence[Evaluation]) -> tuple[Span, ...]:
        return tuple(
            span._replace(start=span.start + offset, end=span.end + offset) if offset else span
            for result in results
            for span in result.spans
            for offset in (self.offsets[span.rank],)
        )

    def _z_losses(self, step: Sequence[StepResult], tokens: int) -> dict[str, float | None]:
        """The weighted z-losses, if any, which are not part of `loss`: the logits' per target token, and the routers'
        per token, summed over layers."""
        found, experts = dict[str, float | None](), self.plan.model.experts
        if weight := self.plan.optimizer.z_loss:
            squares = max(result.squared_lse for result in step)
            found["z_loss"] = finite(weight * squares / max(1, target_tokens(step)))
        if experts is not None and experts.router_z_loss_coef:
            squares = max(result.router_squared_lse for result in step)
            found["router_z_loss"] = finite(experts.router_z_loss_coef * squares / tokens)
        return found

    def _row(self, step: Sequence[StepResult], spans: tuple[Span, ...]) -> dict[str, Any]:
        start, end = min(s.start for s in spans), max(s.end for s in spans)
        seconds = end - (start if self.end is None else self.end)
        self.end = end
        tokens = self.plan.with_program(step[0].program).batch.tokens
        timeline = Timeline("measured", spans)
        return {
            "step": step[0].step,
            "time": time.time() - time.monotonic() + end,
            "loss": finite(mean_loss(step)),
            **self._z_losses(step, tokens),
            "grad_norm": finite(step[0].grad_norm),
            "lr": step[0].learning_rate,
            "tokens": tokens,
            "target_tokens": target_tokens(step),
            "samples": step[0].samples,
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "mfu": mfu(tokens / seconds, self.plan, self.device_name),
            "bubble_planned": self._planned_bubble(step[0].program),
            "bubble_measured": timeline.bubble().makespan if timeline.compute else None,
            "generation": self.generation,
            "skipped": step[0].skipped,
            "peak_bytes": max(result.peak_bytes for result in step),
            "host_seconds": max(result.host_seconds for result in step),
            "data_wait_seconds": max(result.data_wait_seconds for result in step),
            "rank_times": self._rank_times(step, spans),
            "expert_load": total_load(result.expert_load for result in step),
            "expert_slots": step[0].expert_slots,
            **self._sources(step),
            **fp8_row(sample for result in step for sample in result.fp8),
            **self._profile(step, spans),
            **gradients_row(sums for result in step for sums in result.fp8_gradients),
        }

    def _rank_times(self, step: Sequence[StepResult], spans: tuple[Span, ...]) -> tuple[RankTime, ...]:
        ran = (each for each in step if each.spans)
        waits = [RankWaits(r.spans[0].rank, r.data_wait_seconds, r.layer_waits, r.starved) for r in ran]
        return times_of_step(self.plan.programs[step[0].program], self.plan.mesh, spans, waits)

    def _profile(self, step: Sequence[StepResult], spans: tuple[Span, ...]) -> dict[str, StepProfile]:
        """The profile of a step in metrics.profile_steps, from the ranks whose results are known."""
        ranks = {result.spans[0].rank: result.profile for result in step if result.profile is not None}
        if not ranks:
            return {}
        names = {rank: f"rank {rank} ({self.plan.mesh.coordinates(rank)})" for rank in ranks}
        offsets = {rank: self.offsets[rank] for rank in ranks}
        return {"profile": StepProfile(step[0].step, spans, ranks, names, offsets)}

    def _sources(self, step: Sequence[StepResult]) -> dict[str, Any]:
        """Loss and target tokens by source, if there are several."""
        if len(self.plan.data.sources) == 1:
            return {}
        pairs = zip(self.plan.data.sources, source_losses(step), strict=True)
        return {"sources": {source.name: _source_row(part) for source, part in pairs}}


def _source_row(part: LossSum) -> dict[str, Any]:
    loss = finite(part.loss / part.target_tokens) if part.target_tokens else None
    return {"loss": loss, "target_tokens": part.target_tokens}


def source_losses(step: Sequence[StepResult]) -> tuple[LossSum, ...]:
    """The losses by source; every rank that has any has them all."""
    return next(result.sources for result in step if result.sources)


def target_tokens(step: Sequence[StepResult]) -> int:
    """Tokens whose losses count."""
    return sum(part.target_tokens for part in source_losses(step))


def mean_loss(step: Sequence[StepResult]) -> float:
    """Loss per target token, summed in ascending order of microbatches, so that every mesh gets the same bits; 0 for a
    step without target tokens."""
    losses = {number: loss for result in step for number, loss in result.losses.items()}
    return sum(losses[number] for number in sorted(losses)) / max(1, target_tokens(step))


def finite(value: float) -> float | None:
    """The value, or None (JSON's null) for infinities and NaN."""
    return value if math.isfinite(value) else None


def typical_pace(rows: Sequence[dict[str, Any]]) -> float:
    """Median tokens per second, without the first step, which warms up."""
    return median(row["tokens_per_second"] for row in (rows[1:] or rows))
