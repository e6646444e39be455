"""memory.logits: auto, memory.recompute: auto and zero.max_gathered: auto: the values that fit with the least simulated
time; then data.document_costs: auto, at the plan's rates, and data.capacity_factor: auto, as many tokens as there is
room for.

All become ordinary values of the configuration, so a run with `auto` equals the run with these values bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from typing import NamedTuple

import numpy as np

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.memory.capacity import fitting_factor
from pentad.orchestrator.memory.first_microbatches import with_words
from pentad.orchestrator.memory.logits import KEEP, RECOMPUTE, are_open, without_other_choices
from pentad.orchestrator.memory.variants import AUTO, Variants, Words
from pentad.orchestrator.planning.estimate import costs_of, simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory, fit_of, fits_host
from pentad.orchestrator.planning.layout import unit_placement
from pentad.orchestrator.planning.memory_tiers import largest_stage
from pentad.orchestrator.planning.planning import GATHERED_UNITS, make_plan
from pentad.schedules.ir.columns import Array
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.passes.recompute import mode_of, parts_of, recomputed_parts
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan

Tried = list[tuple[int, Words]]  # bytes that the fullest rank needs with these overrides, for what does not fit


class Choice(NamedTuple):
    """Overrides that replace `auto`, and the plan with them."""

    words: Words
    plan: Plan


def with_choices(config: RunConfig, device: str, room: DeviceMemory) -> RunConfig:
    """The configuration with every `auto` replaced by the planner's choice, for ranks with this memory."""
    found = choose(config, device, room)
    return config if found is None else with_words(config, found.words)


def choose(config: RunConfig, device: str, room: DeviceMemory) -> Choice | None:
    """What replaces `auto`; None if there is no `auto`. The capacity factor gets the memory that the fastest plan
    leaves. Raises PentadError if the configuration allows nothing."""
    found, data = _with_logits(config, device, room), config.data
    if data.balance == "none" or AUTO not in (data.capacity_factor, data.document_costs):
        return found
    words, plan = found or Choice((), make_plan(config, device, memory=room))
    if data.document_costs == AUTO and (costs := plan.batch.document_costs) is not None:
        words = (*words, f"data.document_costs=[{costs.quadratic}, {costs.ring}]")
    if data.capacity_factor == AUTO:
        words = (*words, f"data.capacity_factor={fitting_factor(with_words(config, words), plan, room)}")
    return Choice(words, make_plan(with_words(config, words), device, memory=room))


def _with_logits(config: RunConfig, device: str, room: DeviceMemory) -> Choice | None:
    """Logits are kept if the run then fits without other choices. Otherwise those choices are made both with kept and
    with recomputed logits, and the faster result is taken."""
    if not are_open(config, device):
        return _fastest(config, device, room)
    others = without_other_choices(config)
    plain = with_words(config, others)
    kept = make_plan(plain, device, memory=room)
    if fit_of(kept, room).ok and fits_host(plain, kept):
        return _fastest(config, device, room) if others else Choice((), kept)
    found = [] if others else [Choice((), kept)]
    for words in (KEEP, RECOMPUTE) if others else (RECOMPUTE,):
        given = with_words(config, words)
        rest = _fastest(given, device, room) or Choice((), make_plan(given, device, memory=room))
        found.append(Choice((*words, *rest.words), rest.plan))
    return min(found, key=lambda each: _cost(each.plan, room))


def _cost(plan: Plan, room: DeviceMemory) -> tuple[bool, float]:
    """Lower is better: seconds if the plan fits, bytes if not; what fits always comes first."""
    fit = fit_of(plan, room)
    return not fit.ok, simulated_seconds(plan) if fit.ok else fit.needed


def _fastest(config: RunConfig, device: str, room: DeviceMemory) -> Choice | None:
    """The plan that fits with the least simulated time, then with the least recomputation and memory; if none fits, the
    one that needs the least."""
    if AUTO not in (config.memory.recompute, config.zero.max_gathered):
        return None
    tried, found = Tried(), list[tuple[float, int, Words]]()
    for gathered in _gathered(config, device):
        variants = Variants(with_words(config, gathered), device, room)
        is_open = config.memory.recompute == AUTO
        for recompute, plan in fitting_recompute(variants, tried) if is_open else [variants.as_it_is]:
            fit, words = variants.fit(plan), (*gathered, *recompute)
            if fit.ok:
                found.append((variants.seconds(plan), fit.needed, words))
            else:
                tried.append((fit.needed, words))
    for _, _, words in sorted(found):
        plan = make_plan(with_words(config, words), device, memory=room)
        if (fit := fit_of(plan, room)).ok:
            return Choice(words, plan)
        tried.append((fit.needed, words))
    words = (*_no_gathering(config), *min(tried)[1])
    return Choice(words, make_plan(with_words(config, words), device, memory=room))


def fitting_recompute(variants: Variants, tried: Tried, *, slower: bool = False) -> Iterator[tuple[Words, Plan]]:
    """Overrides of memory.recompute that fit, with their plans: unchanged ('none' for auto) if that fits. Otherwise the
    fewest layers for 'full' and for each combination of parts of layers that includes all that now recompute. Unless
    `slower`, a combination that is no faster in any unit than another one is tried only with fewer layers than that.
    Adds what does not fit to `tried`."""
    as_it_is, plan = variants.as_it_is
    if (fit := variants.fit(plan)).ok:
        yield as_it_is, plan
        return
    tried.append((fit.needed, as_it_is))
    given = variants.config.memory.mode
    plans = list[tuple[Array, str, Plan]]()
    for mode in _modes_with("none" if given == AUTO else given, plan.model):
        with suppress(PentadError):  # a mode that the model or other keys do not allow
            plans.append((_recompute_seconds(every := variants.plan(mode)), mode, every))
    found = list[tuple[Array, int]]()
    for seconds, mode, every in sorted(plans, key=lambda each: float(each[0].sum())):
        faster = [] if slower else [layers for other, layers in found if (other <= seconds).all()]
        if layers := _fewest_layers(variants, mode, every, min(faster, default=largest_stage(every) + 1), tried):
            found.append((seconds, layers))
            is_every = layers == largest_stage(every)
            yield variants.words(mode, None if is_every else layers), every if is_every else variants.plan(mode, layers)


def _recompute_seconds(plan: Plan) -> Array:
    """Seconds of RECOMPUTE by unit."""
    return np.array(costs_of(plan).recompute)


def _modes_with(mode: str, model: ModelSpec) -> Iterator[str]:
    """Modes that recompute at least what `mode` does: every combination of parts, by its short name if it has one."""
    parts = parts_of(model)
    short = {recomputed_parts(each).intersection(parts): each for each in ("selective", "attention", mode)}
    for count in range(1, len(parts) + 1):
        for names in map(frozenset[str], combinations(parts, count)):
            if names.issuperset(recomputed_parts(mode).intersection(parts)):
                yield short.get(names, mode_of(names))
    if mode != "full":
        yield "full"


def _fewest_layers(variants: Variants, mode: str, every: Plan, below: int, tried: Tried) -> int | None:
    """Bisects memory.recompute_layers; `every` has all layers. None if even `below` - 1 layers do not fit."""
    if not (high := below - 1):
        return None
    if high < largest_stage(every):
        if not variants.fits(variants.plan(mode, high)):
            return None
    elif not (fit := variants.fit(every)).ok:
        tried.append((fit.needed, variants.words(mode)))
        return None
    low = 0  # does not fit with `low` layers, fits with `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if variants.fits(variants.plan(mode, middle)) else (middle, high)
    return high


def _gathered(config: RunConfig, device: str) -> Iterator[Words]:
    """Two units at once, or all units of a rank throughout its microbatches, at the smallest unit size."""
    if config.zero.max_gathered != AUTO:
        yield ()
        return
    smallest = ("zero.max_gathered=null", "memory.unit_layers=1", *_no_recompute(config))
    units = max(map(len, unit_placement(with_words(config, smallest), device)))
    yield from ((f"zero.max_gathered={count}",) for count in (GATHERED_UNITS, units))


def _no_recompute(config: RunConfig) -> Words:
    return ("memory.recompute=none",) if config.memory.recompute == AUTO else ()


def _no_gathering(config: RunConfig) -> Words:
    """The default of zero.max_gathered, which needs the least memory; an override after it takes precedence."""
    return ("zero.max_gathered=null",) if config.zero.max_gathered == AUTO else ()
