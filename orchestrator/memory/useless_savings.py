"""Whether a run recomputes for nothing, or needs more memory because it shards more."""

from __future__ import annotations

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.memory.first_microbatches import with_words
from pentad.orchestrator.planning.estimate import simulated_seconds
from pentad.orchestrator.planning.fit import Fit, fit_of, fits_host
from pentad.orchestrator.planning.formatting import format_bytes, format_duration, format_percent
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.passes.recompute import config_text
from pentad.schedules.spec.plan import Plan

WORTH = 0.01  # of the memory: saving less does not count
RESET = "recompute=none", "recompute_layers=null", "recompute_stages=null", "recompute_fraction=1.0"
WITHOUT = tuple(f"memory.{key}" for key in RESET)
LESS_ZERO = "zero.stage=1", "zero.max_gathered=null", "zero.reduce=null"


def recompute_note(config: RunConfig, plan: Plan, fit: Fit) -> str:
    """A sentence if the run fits without recomputation too, or needs as much memory without it; else ''. Says nothing
    with memory.offload_fraction: auto, which weighs recomputation itself."""
    if config.memory.recompute == "none" or config.memory.offload_fraction == "auto":
        return ""
    plain = make_plan(with_words(config, WITHOUT), plan.device, memory=fit.device, proved=False)
    without, key = fit_of(plain, fit.device), f"memory.recompute is {config_text(config.memory.mode)}"
    saved = without.needed - fit.needed
    if saved > WORTH * fit.needed and not (without.ok and fits_host(config, plain)):
        return ""
    seconds = simulated_seconds(plan)
    gain = seconds - simulated_seconds(plain)
    pace = f"a step takes {format_duration(gain)} ({format_percent(gain / seconds)}) less without it"
    if saved <= WORTH * fit.needed:
        return f"{key}, which saves {format_bytes(max(0, saved))}: {pace}, at assumed rates"
    return f"{key}, but the run needs {format_bytes(without.needed)} without it, which fits: {pace}, at assumed rates"


def zero_note(config: RunConfig, plan: Plan, fit: Fit) -> str:
    """A sentence if the run needs less memory with ZeRO-1, which has no buffers to gather weights and reduce gradients
    in; else ''. Says nothing of runs that offload as much as they must, as these fill their memory with any stage."""
    if plan.zero < 2 or (any(plan.offload) and config.memory.offload_fraction == "auto"):
        return ""
    other = make_plan(with_words(config, LESS_ZERO), plan.device, memory=fit.device, proved=False)
    more = fit.needed - fit_of(other, fit.device).needed
    if more <= 0:
        return ""
    held = plan.program.placement[plan.mesh.coordinates(fit.rank).pp]
    why = f"full weights and gradients of two units are held at once, and rank {fit.rank} has {len(held)}"
    return f"zero.stage is {plan.zero}, with which the run needs {format_bytes(more)} more than with 1: {why}"
