"""Proves from a run's files alone that every sample of the committed steps was counted exactly once, whatever faults
occurred, or reports the first contradiction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.config.yaml_text import load_yaml
from pentad.orchestrator.records.checkpoint_places import checkpoints_in
from pentad.orchestrator.records.hash_chain import AUDIT, Entry, read_chain
from pentad.orchestrator.records.json_lines import complete_lines
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.batch import BatchSpec
from pentad.workers.checkpoint.checkpoint import MANIFEST, fingerprint, folder_of, has_manifest
from pentad.workers.checkpoint.location import Location
from pentad.workers.data.samples import Dataset
from pentad.workers.data.sources import open_dataset

_FIELDS = {
    "configuration": ("yaml",),
    "rewind": ("step",),
    "step": ("step", "batch", "samples", "loss", "generation"),
    "checkpoint": ("step", "manifest"),
}
OnProgress = Callable[[int, int], None]  # (steps whose samples have been compared, all steps)


class CommittedStep(NamedTuple):
    """A step that counts, recorded in line `line`. `samples` is the digest of its samples, those of the `batch` of the
    data that `config`, a configuration as YAML, describes."""

    line: int
    batch: int
    samples: int
    loss: float | None
    config: str


@dataclass
class History:
    """What a chain says: the steps that count, by number; the SHA-256 of checkpoints' manifests, by step; and the
    events of the journal, with their line numbers."""

    steps: dict[int, CommittedStep] = field(default_factory=dict)
    manifests: dict[int, str] = field(default_factory=dict)
    events: list[tuple[int, Entry]] = field(default_factory=list)
    generations: set[int] = field(default_factory=set)
    rewinds: int = 0  # those that undid steps
    undone: int = 0  # steps undone


class Verdict(NamedTuple):
    """What has been proven. `samples` is the number of samples in the steps, None if the data was not read;
    `checkpoints` is the number of recorded checkpoints that still exist."""

    steps: int
    samples: int | None
    rewinds: int
    undone: int
    generations: int
    checkpoints: int


def verify(
    run: Path,
    metrics: Sequence[Entry],
    journal: Iterable[Entry],
    *,
    data: bool,
    on_progress: OnProgress = lambda *_: None,
) -> Verdict:
    """Checks a run's audit.jsonl for consistency, and against its metrics.jsonl, its journal.jsonl, its checkpoints
    and, if `data`, the data.

    Raises PentadError at the first contradiction.
    """
    path = run / AUDIT
    if not path.exists():
        raise PentadError(f"{run} has no {AUDIT}: expected a run of this version of pentad")
    history = replay(read_chain(complete_lines(path), str(path)), str(path))
    _compare_metrics(history, metrics, run)
    _compare_journal(history, journal, run)
    checkpoints = _compare_checkpoints(history, checkpoints_in(run))
    samples = _compare_samples(history, str(path), on_progress) if data else None
    return Verdict(len(history.steps), samples, history.rewinds, history.undone, len(history.generations), checkpoints)


def replay(entries: Iterable[Entry], where: str) -> History:
    """The history that the entries describe. Raises PentadError if a step does not follow the one before it, or trains
    on a batch that is not later."""
    history, following, config = History(), 0, ""
    for line, entry in enumerate(entries, 1):
        at, event = f"{where} line {line}", entry["event"]
        if missing := [name for name in _FIELDS.get(event, ()) if name not in entry]:
            raise PentadError(f"{at} is a {event} without {', '.join(missing)}")
        match event:
            case "configuration":
                config = entry["yaml"]
            case "rewind":
                following = _rewind(history, following, entry["step"], at)
            case "step":
                if entry["step"] != following:
                    raise PentadError(f"{at} commits step {entry['step']}: expected step {following}")
                before = history.steps.get(following - 1)
                if before is not None and entry["batch"] <= before.batch:
                    text = f"{at} trains step {following} on batch {entry['batch']}, after batch {before.batch}"
                    raise PentadError(f"{text}: expected a later one")
                history.steps[following] = CommittedStep(line, entry["batch"], entry["samples"], entry["loss"], config)
                following += 1
            case "checkpoint":
                history.manifests[entry["step"]] = entry["manifest"]
        if event not in ("configuration", "rewind", "step"):
            history.events.append((line, entry))
        history.generations |= {entry["generation"]} if "generation" in entry else set()
    return history


def _rewind(history: History, following: int, step: int, at: str) -> int:
    """Undoes the steps from `step` on, and returns the next expected step, `step`. It may be ahead only before a run's
    first step, because earlier steps may be another run's."""
    if step > following and history.steps:
        raise PentadError(f"{at} continues from step {step}: expected one up to {following}, the next step")
    undone = [number for number in history.steps if number >= step]
    for number in undone:
        del history.steps[number]
    history.undone += len(undone)
    history.rewinds += bool(undone)
    return step


def _compare_metrics(history: History, metrics: Sequence[Entry], run: Path) -> None:
    first = min(history.steps, default=0)  # earlier steps are another run's, or predate audit.jsonl
    rows = [row for row in metrics if row["step"] >= first]
    found = {row["step"]: row["loss"] for row in rows}
    for number, count in Counter(row["step"] for row in rows).items():
        if count > 1:
            raise PentadError(f"{run / 'metrics.jsonl'} has step {number} twice: expected each step once")
    expected = {number: step.loss for number, step in history.steps.items()}
    for number in sorted(found.keys() | expected.keys()):
        if number not in expected or number not in found or found[number] != expected[number]:
            loss, committed = (its.get(number, "none") for its in (found, expected))
            text = f"{run / 'metrics.jsonl'} has the loss {loss} of step {number}"
            raise PentadError(f"{text}: expected {committed}, as {AUDIT} has it")


def _compare_journal(history: History, journal: Iterable[Entry], run: Path) -> None:
    """Requires the events in the journal, in their order. It may have more: a crash may have prevented an event's line
    in the chain."""
    rest = iter(journal)
    for line, entry in history.events:
        if entry not in rest:
            text = f"{run / 'journal.jsonl'} lacks the event {entry['event']!r} of {AUDIT} line {line}"
            raise PentadError(f"{text}, or has it elsewhere: expected the lines that the run wrote")


def _compare_checkpoints(history: History, root: Location) -> int:
    count = 0
    for step, expected in history.manifests.items():
        folder = folder_of(root, step)
        if has_manifest(folder):
            count += 1
            if (found := fingerprint(folder)) != expected:
                text = f"{folder / MANIFEST} has the SHA-256 {found[:12]}"
                raise PentadError(f"{text}: expected {expected[:12]}, with which it was committed")
    return count


def _compare_samples(history: History, where: str, on_progress: OnProgress) -> int:
    """Compares the digests of the samples that ranks counted with those of the data; returns the number of samples."""
    opened: dict[str, Dataset] = {}
    count = 0
    for done, (number, step) in enumerate(history.steps.items()):
        on_progress(done, len(history.steps))
        if step.config not in opened:
            opened = {
                step.config: _dataset(load(load_yaml(step.config, f"{where}, the configuration of step {number}")))
            }
        dataset = opened[step.config]
        if (expected := dataset.digest(step.batch)) != step.samples:
            text = f"{where} line {step.line}: step {number} counted samples with the digest {step.samples}"
            raise PentadError(f"{text}: expected {expected}, each sample of batch {step.batch} once")
        count += dataset.mixture.sizes.size(step.batch)
    return count


def _dataset(config: RunConfig) -> Dataset:
    batch = config.batch
    spec = BatchSpec(batch.global_batch_size, batch.sequence_length, 1, 1, batch.sizes.rampup)
    return open_dataset(config.data.spec, spec, config.model.vocab, config.run.seed)
