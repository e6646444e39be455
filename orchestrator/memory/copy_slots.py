"""cluster.transport nccl where the slots of peer copies are too much: it needs none."""

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
WORTH = 0.01  # of a step: less is no reason to change anything


def has_copy_slots(plan: Plan) -> bool:
    return most_copied(plan) > 0


def most_copied(plan: Plan) -> int:
    """The most bytes that slots of peer copies take on a rank."""
    return max(copy_slots_bytes(plan, rank) for rank in plan.mesh.group(("pp",), 0))


def saved_by_nccl(plan: Plan, copied: Plan, room: DeviceMemory) -> int:
    """Bytes of the fullest rank that a plan over NCCL, which fits, would need more with the transport of the `copied`
    one, if it would not fit then; else 0."""
    other = fit_of(replace(plan, transport=copied.transport), room)
    return 0 if other.ok else other.needed - fit_of(plan, room).needed


def copy_slots_note(config: RunConfig, plan: Plan, fit: Fit) -> str:
    """A sentence if the planner, which chose what this plan recomputes and offloads, would choose less without slots of
    peer copies, for a shorter step; else ''."""
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
    """Of a step with any recomputation and offloading: with none, in as much memory as that takes."""
    changed = with_words(config, (*without_other_choices(config), *(KEEP if config.memory.logits == AUTO else ())))
    return simulated_seconds(make_plan(changed, plan.device, memory=replace(room, bytes=2**62), proved=False))
