"""memory.recompute: auto, and zero.max_gathered: auto: what fits and takes the least simulated time.

Both end as ordinary values of the configuration, so a run with `auto` is the one with these values, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.memory.first_microbatches import shortened, with_words
from pentad.orchestrator.planning.estimate import simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory, fit_of
from pentad.orchestrator.planning.planning import GATHERED_UNITS, make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import RECOMPUTE_MODES, Plan

AUTO = "auto"


Words = tuple[str, ...]
Tried = list[tuple[int, Words]]  # bytes that the fullest rank needs with these overrides, for what does not fit


def with_choices(config: RunConfig, device: str, room: DeviceMemory) -> RunConfig:
    """The configuration with the planner's choices in place of `auto`, for ranks with this memory."""
    return with_words(config, choices(config, device, room))


def choices(config: RunConfig, device: str, room: DeviceMemory) -> Words:
    """Overrides in place of `auto`: of those that fit the ones with the least simulated time, then the least memory; if
    none fits, those that need least. Raises PentadError if the configuration allows none."""
    if AUTO not in (config.memory.recompute, config.zero.max_gathered):
        return ()
    tried, found = Tried(), list[tuple[float, int, Words]]()
    for gathered in _gathered(config, device):
        placed = with_words(config, gathered)
        modes = fitting_recompute(placed, device, room, tried) if config.memory.recompute == AUTO else [Words()]
        for recompute in modes:
            words = (*gathered, *recompute)
            plan = make_plan(with_words(config, words), device)
            if (fit := fit_of(plan, room)).ok:
                found.append((simulated_seconds(plan), fit.needed, words))
            else:
                tried.append((fit.needed, words))
    if found:
        return min(found)[2]
    return (*_no_gathering(config), *min(tried)[1])


def fitting_recompute(config: RunConfig, device: str, room: DeviceMemory, tried: Tried) -> Iterator[Words]:
    """Overrides of memory.recompute that fit, by the first microbatches: as it is ('none' for auto) if that fits, else
    for that mode and each that recomputes more the fewest layers. Adds the others to `tried`."""
    given = config.memory.recompute
    start = "none" if given == AUTO else given
    short, as_it_is = shortened(config), ("memory.recompute=none",) if given == AUTO else ()
    if (fit := fit_of(make_plan(with_words(short, as_it_is), device), room)).ok:
        yield as_it_is
        return
    tried.append((fit.needed, as_it_is))
    for mode in RECOMPUTE_MODES[RECOMPUTE_MODES.index(start) :]:
        if mode != "none":
            with suppress(PentadError):  # a mode that the model or other keys do not allow
                if words := _fewest_layers(short, mode, device, room, tried):
                    yield words


def _fewest_layers(config: RunConfig, mode: str, device: str, room: DeviceMemory, tried: Tried) -> Words | None:
    """Bisects memory.recompute_layers; null, all layers, if no fewer will do, and None if not even those."""
    every = (f"memory.recompute={mode}", "memory.recompute_layers=null")

    def needed(words: Words) -> tuple[Plan, bool]:
        plan = make_plan(with_words(config, words), device)
        fit = fit_of(plan, room)
        if not fit.ok:
            tried.append((fit.needed, words))
        return plan, fit.ok

    plan, fits = needed(every)
    if not fits:
        return None
    low, high = 0, largest_stage(plan)  # with `low` it does not fit, with `high` it does
    while high - low > 1:
        middle = (low + high) // 2
        _, fits = needed((every[0], f"memory.recompute_layers={middle}"))
        low, high = (low, middle) if fits else (middle, high)
    return every if high == largest_stage(plan) else (every[0], f"memory.recompute_layers={high}")


def largest_stage(plan: Plan) -> int:
    """Layers of the largest stage of a pipeline."""
    counts = [0] * (1 + plan.program.stage_of[-1])
    for unit, layers in enumerate(plan.layers):
        counts[plan.program.stage_of[unit]] += len(layers.numbers)
    return max(counts)


def _gathered(config: RunConfig, device: str) -> Iterator[Words]:
    """Two units at once, or all of a rank through all its microbatches, however small they are; mirrors gather all."""
    if config.zero.max_gathered != AUTO:
        yield ()
        return
    smallest = ("zero.max_gathered=null", "memory.unit_layers=1", *_no_recompute(config))
    placement = make_plan(with_words(shortened(config), smallest), device).program.placement
    units, has_mirrors = max(map(len, placement)), sum(map(len, placement)) > 1 + max(map(max, placement))
    if has_mirrors:
        yield ("zero.max_gathered=null",)
        return
    yield from ((f"zero.max_gathered={count}",) for count in (GATHERED_UNITS, units))


def _no_recompute(config: RunConfig) -> Words:
    return ("memory.recompute=none",) if config.memory.recompute == AUTO else ()


def _no_gathering(config: RunConfig) -> Words:
    """The default of zero.max_gathered, which needs least; an override after it has the last word."""
    return ("zero.max_gathered=null",) if config.zero.max_gathered == AUTO else ()
