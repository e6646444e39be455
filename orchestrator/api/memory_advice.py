"""What to change in a configuration whose ranks need more memory than they have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.planning.estimate import costs_of, step_seconds
from pentad.orchestrator.planning.fit import Fit, fit_of
from pentad.orchestrator.planning.formatting import format_bytes, format_percent
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.plan import RECOMPUTE_MODES, Plan


def memory_advice(config: RunConfig, plan: Plan, fit: Fit) -> str:
    """A sentence with the change of ZeRO's stage, of recomputation or of the microbatches that costs least of those
    with which the run fits, by simulation at guessed costs; or that none does."""
    before, least = _seconds(plan), fit.needed
    found = list[tuple[float, int, str]]()
    for words in changes(config):
        with suppress(PentadError):  # the schedule or the model does not allow this change
            changed = make_plan(load(config, words), plan.device)
            after = fit_of(changed, fit.device)
            least = min(least, after.needed)
            if after.ok:
                found.append((_seconds(changed), after.needed, " ".join(words)))
    if not found:
        tried = "no ZeRO stage, recomputation or number of microbatches makes it fit"
        return f"{tried}: {format_bytes(least)} is the least"
    seconds, needed, change = min(found)
    slower = seconds / before - 1
    cost = f"a step takes {format_percent(slower)} longer" if slower > 0.001 else "a step takes no longer"
    return f"it fits with {change}: {format_bytes(needed)}, and {cost}, at assumed rates"


def changes(config: RunConfig) -> Iterator[list[str]]:
    """Overrides that need less memory, alone and together."""
    zero = [[], *([f"zero.stage={stage}"] for stage in range(config.zero.stage + 1, 4))]
    following = RECOMPUTE_MODES[RECOMPUTE_MODES.index(config.memory.recompute) + 1 :]
    modes = [[], *([f"memory.recompute={mode}"] for mode in following)]
    rows = config.batch.global_batch_size // (config.mesh.dp * config.mesh.ep)
    more = [count for count in (2 * config.schedule.microbatches, rows) if config.schedule.microbatches < count <= rows]
    counts = [[], *([f"schedule.microbatches={count}"] for count in dict.fromkeys(more))]
    for microbatches in counts:
        for stage in zero:
            for mode in modes:
                if words := [*stage, *mode, *microbatches]:
                    yield words


def _seconds(plan: Plan) -> float:
    return step_seconds(simulate(plan.program, costs_of(plan)))
