"""Suggests cluster.transport nccl, which needs no slots, where the slots of peer copies take too much memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.memory.choice import choose
from pentad.orchestrator.memory.first_microbatches import with_words
from pentad.orchestrator.memory.logits import KEEP, without_other_choices
from pentad.orchestrator.memory.variants import AUTO, Words
from pentad.orchestrator.planning.estimate import copy_slots_bytes, simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory, Fit, fit_of
from pentad.orchestrator.planning.formatting import format_bytes, format_duration, format_percent
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan

NCCL: Words = ("cluster.transport=nccl",)
WORTH = 0.01  # of a step: a smaller gain is not worth a change


def has_copy_slots(plan: Plan) -> bool:
    return most_copied(plan) > 0


def most_copied(plan: Plan) -> int:
    """The most bytes that slots of peer copies take on a rank."""
    return max(copy_slots_bytes(plan, rank) for rank in plan.mesh.group(("pp",), 0))


def saved_by_nccl(plan: Plan, copied: Plan, room: DeviceMemory) -> int:
    """The bytes that a fitting plan over NCCL saves on its fullest rank compared with the transport of `copied`, if it
    would not fit with that; else 0."""
    other = fit_of(replace(plan, transport=copied.transport), room)
    return 0 if other.ok else other.needed - fit_of(plan, room).needed


def copy_slots_note(config: RunConfig, plan: Plan, fit: Fit) -> str:
    """A sentence if the planner chose this plan's recomputation and offloading, and without slots of peer copies would
    choose less of them and a shorter step; else ''."""
    section = config.memory
    is_open = AUTO in (section.recompute, section.recompute_fraction, section.offload_fraction, section.logits)
    if not (is_open and has_copy_slots(plan)):
        return ""
    with suppress(PentadError):  # other keys do not allow NCCL
        changed, seconds, saved = with_words(config, NCCL), simulated_seconds(plan), 0
        if seconds - _least_seconds(changed, plan, fit.device) <= WORTH * seconds:
            return ""
        choice = choose(changed, plan.device, fit.device)
        other = make_plan(changed, plan.device, memory=fit.device) if choice is None else choice.plan
        gain = seconds - simulated_seconds(other)
        if gain > WORTH * seconds and fit_of(other, fit.device).ok:
            saved = saved_by_nccl(other, plan, fit.device)
        if saved:
            keys = " ".join((*NCCL, *(() if choice is None else choice.words)))
            pace = f"a step takes {format_duration(gain)} ({format_percent(gain / seconds)}) less, at assumed rates"
            return f"with {keys} it fits without {format_bytes(saved)} of slots of peer copies: {pace}"
    return ""


def _least_seconds(config: RunConfig, plan: Plan, room: DeviceMemory) -> float:
    """A lower bound on the seconds of a step, whatever recomputes or is offloaded: as if memory had no limit."""
    changed = with_words(config, (*without_other_choices(config), *(KEEP if config.memory.logits == AUTO else ())))
    return simulated_seconds(make_plan(changed, plan.device, memory=replace(room, bytes=2**62), proved=False))
