"""What to change in a configuration whose ranks need more memory than they have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.memory.choice import Tried, fitting_recompute
from pentad.orchestrator.memory.first_microbatches import estimated_seconds, shortened, with_words
from pentad.orchestrator.memory.variants import Variants, Words
from pentad.orchestrator.planning.estimate import simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory, Fit, fit_of
from pentad.orchestrator.planning.formatting import format_bytes, format_duration, format_percent
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan


def memory_advice(config: RunConfig, plan: Plan, fit: Fit) -> str:
    """A sentence with the change of ZeRO's stage, of recomputation or of the microbatches that costs least of those
    with which the run fits, by simulation at guessed costs; or that none does."""
    tried, found = [(fit.needed, Words())], list[tuple[float, Words]]()
    for words in changes(config):
        with suppress(PentadError):  # the schedule or the model does not allow this change
            changed = with_words(config, words)
            fitting = _fitting(changed, plan.device, fit.device, tried)
            found += ((seconds, (*words, *recompute)) for seconds, recompute in fitting)
    for _, words in sorted(found):
        changed_plan = make_plan(with_words(config, words), plan.device)
        if (after := fit_of(changed_plan, fit.device)).ok:
            added = simulated_seconds(changed_plan) - simulated_seconds(plan)
            return f"it fits with {_shown(words)}: {format_bytes(after.needed)}, and {_cost(added, plan)}"
        tried.append((after.needed, words))
    least, _ = min(tried)
    return f"no ZeRO stage, recomputation or number of microbatches makes it fit: {format_bytes(least)} is the least"


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
    """Overrides of ZeRO's stage and of the microbatches that need less memory, alone and together; first nothing."""
    zero = [(), *((f"zero.stage={stage}",) for stage in range(config.zero.stage + 1, 4))]
    rows = config.batch.global_batch_size // (config.mesh.dp * config.mesh.ep)
    more = [count for count in (2 * config.schedule.microbatches, rows) if config.schedule.microbatches < count <= rows]
    for microbatches in [(), *((f"schedule.microbatches={count}",) for count in dict.fromkeys(more))]:
        for stage in zero:
            yield (*stage, *microbatches)


def _shown(words: Words) -> str:
    """Without what is the default anyway."""
    return " ".join(word for word in words if word != "memory.recompute_layers=null")


def _cost(added: float, plan: Plan) -> str:
    share = added / simulated_seconds(plan)
    if share <= 0.001:
        return "a step takes no longer, at assumed rates"
    return f"a step takes {format_duration(added)} ({format_percent(share)}) longer, at assumed rates"
