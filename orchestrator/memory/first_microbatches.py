"""The first microbatches of a step: they reach its peak of memory, and predict its time, with a small program."""

from __future__ import annotations

from collections.abc import Sequence

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.planning.estimate import simulated_seconds
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.ir.errors import PentadError

SAVING_ALL = ("gpipe", "looped-bfs")  # save the activations of every microbatch
ROUNDS = 3  # microbatches for each pipeline rank, after which every further one repeats what is held
FEWEST = 4


def shortened(config: RunConfig, rounds: int = ROUNDS) -> RunConfig:
    """The run with `rounds` microbatches of the same size for each pipeline rank. Unchanged if it has no more than
    that, or if what it holds depends on their number."""
    section, count = config.schedule, max(FEWEST, rounds * config.mesh.pp)
    is_steady = section.name in CATALOGUE and section.name not in SAVING_ALL and not config.batch.rampup
    if not is_steady or count >= section.microbatches:
        return config
    rows = config.batch.global_batch_size // section.microbatches
    try:
        return load(config, [f"schedule.microbatches={count}", f"batch.global_batch_size={count * rows}"])
    except PentadError:  # a number that the schedule does not allow
        return config


def estimated_seconds(config: RunConfig, device: str) -> float:
    """Seconds of a simulated step: those of its first microbatches, and for each further one what the last of these
    added."""
    short = shortened(config)
    seconds = simulated_seconds(make_plan(short, device))
    further = config.schedule.microbatches - short.schedule.microbatches
    if not further:
        return seconds
    shorter = shortened(config, ROUNDS - 1)
    if (added := short.schedule.microbatches - shorter.schedule.microbatches) < 1:
        return seconds * config.schedule.microbatches / short.schedule.microbatches
    return seconds + further * (seconds - simulated_seconds(make_plan(shorter, device))) / added


def with_words(config: RunConfig, words: Sequence[str]) -> RunConfig:
    return load(config, words) if words else config
