"""Whether a run needs more memory because it shards more."""

from __future__ import annotations

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.memory.first_microbatches import with_words
from pentad.orchestrator.planning.fit import Fit, fit_of
from pentad.orchestrator.planning.formatting import format_bytes
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.spec.plan import Plan

LESS = "zero.stage=1", "zero.max_gathered=null", "zero.reduce=null"


def zero_note(config: RunConfig, plan: Plan, fit: Fit) -> str:
    """A sentence if the run needs less memory with ZeRO-1, which has no buffers for what others gather and reduce; else
    ''."""
    if plan.zero < 2:
        return ""
    other = make_plan(with_words(config, LESS), plan.device, memory=fit.device, proved=False)
    more = fit.needed - fit_of(other, fit.device).needed
    if more <= 0:
        return ""
    held = plan.program.placement[plan.mesh.coordinates(fit.rank).pp]
    why = f"full weights and gradients of two units are held at once, and rank {fit.rank} has {len(held)}"
    return f"zero.stage is {plan.zero}, with which the run needs {format_bytes(more)} more than with 1: {why}"
