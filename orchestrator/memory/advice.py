"""What to change in a configuration whose ranks need more memory than they have."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import product
from typing import NamedTuple

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.memory.choice import Tried, fitting_recompute
from pentad.orchestrator.memory.copy_slots import NCCL, WORTH, has_copy_slots, saved_by_nccl
from pentad.orchestrator.memory.first_microbatches import estimated_seconds, shortened, with_words
from pentad.orchestrator.memory.logits import RECOMPUTE
from pentad.orchestrator.memory.variants import Variants, Words
from pentad.orchestrator.planning.estimate import memory, simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory, Fit, fit_of, fits_host
from pentad.orchestrator.planning.formatting import format_bytes, format_duration, format_percent
from pentad.orchestrator.planning.layout import kept_logits
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan

# Overrides that are suggested only if nothing fits without them.
ON_HOST = ("memory.offload_fraction=1.0",), ("memory.optimizer=host",)
ALL_RECOMPUTED = {"recompute": "full", "recompute_layers": None, "recompute_stages": None, "recompute_fraction": 1.0}
MOST_PLANNED = 8_000  # layers x microbatches, beyond which planning every change takes minutes


class _Change(NamedTuple):
    """Overrides with which a run fits, the plan with them, and the seconds of its step."""

    seconds: float
    words: Words
    plan: Plan
    fit: Fit


def memory_advice(config: RunConfig, plan: Plan, fit: Fit) -> str:
    """A sentence with the change that makes the run fit at the least cost, by simulation at guessed costs: of ZeRO's
    stage, recomputation or the number of microbatches; and the cost over NCCL, if slots of peer copies are too large.
    If none of these suffices, with what to keep in host memory as well; or that nothing does. For runs too large to
    plan every change, only a few are tried, and the sentence says so."""
    advice = _Advice(config, plan, fit.device, [(fit.needed, Words())])
    layers, count = config.model.layers, shortened(config).schedule.microbatches
    if layers * count > MOST_PLANNED:
        why = f"{layers:,} layers x {count:,} microbatches are too many to try more than a few changes"
        return f"{advice.of_most()}; {why}"
    if sentence := advice.nearest(changes(config)):
        return sentence
    kinds = (*ON_HOST, sum(ON_HOST, ())) if plan.device == "cuda" else ()
    most = next(reversed(_more_zero(config)), ())
    suffice = [kind for kind in kinds if advice.found([kind + most])]
    if suffice:
        return advice.nearest(kind + zero for kind in suffice for zero in ((), most))
    least, _ = min(advice.tried)
    names = ["ZeRO stage", "recomputation", *["transport"] * has_copy_slots(plan), *["host memory"] * bool(kinds)]
    return f"no {', '.join(names)} or number of microbatches makes it fit: {format_bytes(least)} is the least"


class _Advice:
    """Changes to a run on devices with this much memory. What does not fit is added to `tried`."""

    def __init__(self, config: RunConfig, plan: Plan, room: DeviceMemory, tried: Tried) -> None:
        self.config, self.plan, self.room, self.tried = config, plan, room, tried
        self._fitting, self._change = cache(self._find_fitting), cache(self._make_change)  # both by overrides

    def nearest(self, changed: Iterable[Words]) -> str:
        """A sentence with the changes `found`; '' if there are none."""
        sentences = "; or ".join(_sentence(each, self.plan, self.room) for each in self.found([*changed]))
        return f"it fits {sentences}, at assumed rates" if sentences else ""

    def of_most(self) -> str:
        """A sentence with full ZeRO and recomputation, or with only one of them if that suffices; else with everything
        in host memory that can be."""
        zero = next(reversed(_more_zero(self.config)), ())
        section = self.config.memory
        again = {key: value for key, value in ALL_RECOMPUTED.items() if getattr(section, key) != value}
        recompute = tuple(
            f"memory.{key}={value if key == 'recompute' else json.dumps(value)}" for key, value in again.items()
        )
        kept = section.offload_fraction == 1.0, section.optimizer == "host"  # there already
        on_host = sum((words for words, is_kept in zip(ON_HOST, kept, strict=True) if not is_kept), Words())
        on_device = (*zero, *recompute)
        most = [*filter(None, dict.fromkeys((on_device, (*on_device, *on_host * (self.plan.device == "cuda")))))]
        if (first := next(filter(None, map(self._allowed, most)), None)) is None:
            least, _ = min(self.tried)
            what = f"it does not fit with {_shown(most[-1])} either" if most else "all that saves memory is in use"
            return f"{what}: {format_bytes(least)} is the least"
        fewer = [words for words in (zero, recompute) if words not in ((), first.words) and first.words == on_device]
        best = min([first, *filter(None, map(self._allowed, fewer))], key=lambda each: (each.seconds, len(each.words)))
        return f"it fits {_sentence(best, self.plan, self.room)}, at assumed rates"

    def _allowed(self, words: Words) -> _Change | None:
        with suppress(PentadError):
            return self._change(words)
        return None

    def found(self, changed: Sequence[Words]) -> list[_Change]:
        """The cheapest of these changes with which the run fits. If its slots of peer copies are too large, also the
        cheapest over NCCL, if that costs less or is all that has to change."""
        found = list(filter(None, [self._cheapest(changed)]))
        if has_copy_slots(self.plan):
            over_nccl = self._cheapest([(*NCCL, *words) for words in changed])
            if over_nccl is not None and saved_by_nccl(over_nccl.plan, self.plan, self.room):
                least = min((each.seconds for each in found), default=math.inf)
                found += [over_nccl] if over_nccl.seconds < (1 - WORTH) * least or over_nccl.words == NCCL else []
        return sorted(found, key=lambda each: (each.seconds, len(each.words)))

    def _cheapest(self, changed: Iterable[Words]) -> _Change | None:
        found = [each for words in changed for each in self._fitting(words)]
        found.sort(key=lambda each: (each[0], len(each[1]), each[1]))  # of equals, the smallest change
        return next(filter(None, (self._change(words) for _, words in found)), None)

    def _find_fitting(self, words: Words) -> list[tuple[float, Words]]:
        """(seconds of a step, overrides): these overrides, plus what has to recompute for the run to fit."""
        found = list[tuple[float, Words]]()
        with suppress(PentadError):  # a change that the schedule or the model does not allow
            fitting = _fitting(with_words(self.config, words), self.plan.device, self.room, self.tried)
            found += ((seconds, (*words, *recompute)) for seconds, recompute in fitting)
        return found

    def _make_change(self, words: Words) -> _Change | None:
        """None if the run does not fit."""
        config = with_words(self.config, words)
        plan = make_plan(config, self.plan.device, memory=self.room)
        if (fit := fit_of(plan, self.room)).ok and fits_host(config, plan):
            return _Change(simulated_seconds(plan), words, plan, fit)
        if not fit.ok:
            self.tried.append((fit.needed, words))
        return None


def _sentence(change: _Change, plan: Plan, room: DeviceMemory) -> str:
    """'with zero.stage=2: 68.3 GiB, and a step takes 1.42 s (3.4 %) longer'"""
    needs = format_bytes(change.fit.needed)
    kept = [memory(change.plan, rank) for rank in plan.mesh.group(("pp",), 0)]
    if host := max(each["host"] + each["host_optimizer"] for each in kept):
        needs += f", {format_bytes(host)} a rank in host memory"
    saved = saved_by_nccl(change.plan, plan, room)
    slots = f", {format_bytes(saved)} less for slots of peer copies" if saved else ""
    return f"with {_shown(change.words)}: {needs}{slots}, and {_cost(change.seconds, plan)}"


def _fitting(config: RunConfig, device: str, room: DeviceMemory, tried: Tried) -> Iterator[tuple[float, Words]]:
    """(seconds of a step, overrides) for what can be recomputed so that the run fits. The seconds of the fastest are
    estimated for the full step; the others are scaled by the time of their first microbatches."""
    variants = Variants(shortened(config), device, room)
    found = sorted((variants.seconds(plan), words) for words, plan in fitting_recompute(variants, tried, slower=True))
    if found:
        least, fastest = found[0]
        scale = estimated_seconds(with_words(config, fastest), device) / least
        yield from ((seconds * scale, words) for seconds, words in found)


def changes(config: RunConfig) -> Iterator[Words]:
    """Overrides of ZeRO, the number of microbatches and kept logits that need less memory, alone and combined; the
    first is empty."""
    zero = [(), *_more_zero(config)]
    rows = config.batch.global_batch_size // (config.mesh.dp * config.mesh.ep)
    more = [count for count in (2 * config.schedule.microbatches, rows) if config.schedule.microbatches < count <= rows]
    logits = [(), RECOMPUTE] if config.memory.logits == "keep" and not kept_logits(config) else [()]
    counts = [(), *((f"schedule.microbatches={count}",) for count in dict.fromkeys(more))]
    yield from ((*stage, *microbatches, *made) for microbatches, stage, made in product(counts, zero, logits))


def _more_zero(config: RunConfig) -> list[Words]:
    """Overrides that shard more, or over more ranks; the last one needs the least memory."""
    stages: list[Words] = [(f"zero.stage={stage}",) for stage in range(config.zero.stage + 1, 4)]
    if config.zero.shards is None:
        return stages
    return [*stages, *((*stage, "zero.shards=null") for stage in ((), *stages))]


def _shown(words: Words) -> str:
    """The overrides, without what is the default anyway."""
    return " ".join(word for word in words if word != "memory.recompute_layers=null")


def _cost(seconds: float, plan: Plan) -> str:
    before = simulated_seconds(plan)
    added = seconds - before
    if added <= 0.001 * before:
        return "a step takes no longer"
    return f"a step takes {format_duration(added)} ({format_percent(added / before)}) longer"
