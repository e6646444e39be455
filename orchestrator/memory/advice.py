"""What to change in a configuration whose ranks need more memory than they have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
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

# Overrides for what does not fit without them.
ON_HOST = ("memory.offload_fraction=1.0",), ("memory.optimizer=host",)


class _Change(NamedTuple):
    """Overrides with which a run fits, the plan with them, and its seconds."""

    seconds: float
    words: Words
    plan: Plan
    fit: Fit


def memory_advice(config: RunConfig, plan: Plan, fit: Fit) -> str:
    """A sentence with the change of ZeRO's stage, of recomputation or of the microbatches that costs least of those
    with which the run fits, by simulation at guessed costs, and with what it takes without the slots of peer copies, if
    they are too much; where none of these suffices, with what else is kept in host memory; or that nothing does."""
    tried = [(fit.needed, Words())]
    if sentence := _nearest(config, plan, fit.device, list(changes(config)), tried):
        return sentence
    kinds = (*ON_HOST, sum(ON_HOST, ())) if plan.device == "cuda" else ()
    most = next(reversed(_zero_stages(config)), ())
    suffice = [kind for kind in kinds if _nearest(config, plan, fit.device, [kind + most], tried)]
    if suffice:
        return _nearest(config, plan, fit.device, [kind + zero for kind in suffice for zero in ((), most)], tried)
    least, _ = min(tried)
    names = ["ZeRO stage", "recomputation", *["transport"] * has_copy_slots(plan), *["host memory"] * bool(kinds)]
    return f"no {', '.join(names)} or number of microbatches makes it fit: {format_bytes(least)} is the least"


def _nearest(config: RunConfig, plan: Plan, room: DeviceMemory, changed: list[Words], tried: Tried) -> str:
    """A sentence with the cheapest of these changes with which the run fits, '' if there is none; and, where its slots
    of peer copies are too much, with NCCL instead, if that costs less or is all that has to change."""
    found = list(filter(None, [_cheapest(config, plan, room, changed, tried)]))
    if has_copy_slots(plan):
        over_nccl = _cheapest(config, plan, room, [(*NCCL, *words) for words in changed], tried)
        if over_nccl is not None and saved_by_nccl(over_nccl.plan, plan, room):
            least = min((each.seconds for each in found), default=math.inf)
            found += [over_nccl] if over_nccl.seconds < (1 - WORTH) * least or over_nccl.words == NCCL else []
    found.sort(key=lambda each: (each.seconds, len(each.words)))
    sentences = "; or ".join(_sentence(each, plan, room) for each in found)
    return f"it fits {sentences}, at assumed rates" if found else ""


def _cheapest(
    config: RunConfig, plan: Plan, room: DeviceMemory, changed: Iterable[Words], tried: Tried
) -> _Change | None:
    """Of these changes with which the run fits; what was `tried` is added."""
    found = list[tuple[float, Words]]()
    for words in changed:
        with suppress(PentadError):  # the schedule or the model does not allow this change
            fitting = _fitting(with_words(config, words), plan.device, room, tried)
            found += ((seconds, (*words, *recompute)) for seconds, recompute in fitting)
    for _, words in sorted(found, key=lambda each: (each[0], len(each[1]), each[1])):  # of equals the least change
        changed_config = with_words(config, words)
        changed_plan = make_plan(changed_config, plan.device, memory=room)
        if (after := fit_of(changed_plan, room)).ok and fits_host(changed_config, changed_plan):
            return _Change(simulated_seconds(changed_plan), words, changed_plan, after)
        if not after.ok:
            tried.append((after.needed, words))
    return None


def _sentence(change: _Change, plan: Plan, room: DeviceMemory) -> str:
    """'with zero.stage=2: 68.3 GiB, and a step takes 1.42 s (3.4 %) longer'"""
    needs = format_bytes(change.fit.needed)
    kept = [memory(change.plan, plan.mesh.move(0, pp=pp)) for pp in range(plan.mesh.pp)]
    if host := max(each["host"] + each["host_optimizer"] for each in kept):
        needs += f", {format_bytes(host)} a rank in host memory"
    saved = saved_by_nccl(change.plan, plan, room)
    slots = f", {format_bytes(saved)} less for slots of peer copies" if saved else ""
    return f"with {_shown(change.words)}: {needs}{slots}, and {_cost(change.seconds, plan)}"


def _fitting(config: RunConfig, device: str, room: DeviceMemory, tried: Tried) -> Iterator[tuple[float, Words]]:
    """(seconds of a step, overrides) for what can be recomputed for the run to fit. The seconds of the fastest are
    estimated, those of the others in proportion to what their first microbatches take."""
    variants = Variants(shortened(config), device, room)
    found = sorted((variants.seconds(plan), words) for words, plan in fitting_recompute(variants, tried, slower=True))
    if found:
        least, fastest = found[0]
        scale = estimated_seconds(with_words(config, fastest), device) / least
        yield from ((seconds * scale, words) for seconds, words in found)


def changes(config: RunConfig) -> Iterator[Words]:
    """Overrides of ZeRO's stage, of the microbatches and of kept logits that need less memory, alone and together;
    first nothing."""
    zero = [(), *_zero_stages(config)]
    rows = config.batch.global_batch_size // (config.mesh.dp * config.mesh.ep)
    more = [count for count in (2 * config.schedule.microbatches, rows) if config.schedule.microbatches < count <= rows]
    logits = [(), RECOMPUTE] if config.memory.logits == "keep" and not kept_logits(config) else [()]
    counts = [(), *((f"schedule.microbatches={count}",) for count in dict.fromkeys(more))]
    yield from ((*stage, *microbatches, *made) for microbatches, stage, made in product(counts, zero, logits))


def _zero_stages(config: RunConfig) -> list[Words]:
    return [(f"zero.stage={stage}",) for stage in range(config.zero.stage + 1, 4)]


def _shown(words: Words) -> str:
    """Without what is the default anyway."""
    return " ".join(word for word in words if word != "memory.recompute_layers=null")


def _cost(seconds: float, plan: Plan) -> str:
    before = simulated_seconds(plan)
    added = seconds - before
    if added <= 0.001 * before:
        return "a step takes no longer"
    return f"a step takes {format_duration(added)} ({format_percent(added / before)}) longer"
