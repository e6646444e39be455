"""Which checkpoints of a run are kept besides the newest ones. Needs no Ray."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.evaluations import best_of
from pentad.orchestrator.monitoring.runfolder import RunFolder
from pentad.schedules.ir.errors import PentadError
from pentad.workers.background import in_daemon
from pentad.workers.checkpoint.checkpoint import Checkpoint, Unreadable, fingerprint, open_checked, read_manifest
from pentad.workers.checkpoint.checksums import activity
from pentad.workers.checkpoint.location import Location
from pentad.workers.checkpoint.retention import listed

if TYPE_CHECKING:
    from pentad.orchestrator.monitoring.event_bus import EventBus

LOOKUP_SECONDS = 5.0  # working storage answers within this time
T = TypeVar("T")


def rollback_target(config: RunConfig, step: int) -> int | None:
    """The step to which a spike in `step` rolls the run back: the last multiple of checkpoint.every, whatever
    checkpoints exist. None without the policy."""
    every = config.checkpoint.every
    return step // every * every if config.spikes.policy == "rollback" else None


def kept_steps(config: RunConfig, saved: Collection[int], evaluations: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """Which of the `saved` steps to keep: the best by the lines of eval.jsonl, the milestones, and the one to which a
    spike right after the newest rolls the run back."""
    best, every = best_of(evaluations, config.checkpoint.keep_best, saved), config.checkpoint.keep_every
    target = rollback_target(config, max(saved, default=0))
    kept = [best.step] if best else []
    if target is not None:
        kept += sorted(step for step in saved if step <= target)[-1:]
    if every:
        kept += sorted(step for step in saved if step and step % every == 0)
    return tuple(kept)


def looked_up(read: Callable[[], T], seconds: float = LOOKUP_SECONDS) -> T:
    """The result of a read of the checkpoints' storage. Raises Unreadable if storage has returned nothing for
    `seconds`, so that nobody waits for one that hangs; reading a whole checkpoint may take longer."""
    result, seen = in_daemon(read), -1
    while seen != activity.chunks:
        seen = activity.chunks
        with suppress(TimeoutError):
            return result.result(seconds)
    raise Unreadable(f"the checkpoints' storage has not answered within {seconds:g} s")


def saved_steps(bus: EventBus) -> list[int]:
    """Steps of the checkpoints, lowest first; none while storage does not answer, which should not end a run that can
    do without."""
    with suppress(Unreadable):
        return looked_up(bus.folder.saved)
    return []


def record_committed(bus: EventBus, step: int) -> None:
    """Records the checkpoint of `step` steps in the journal if it is missing there, as when a rank was lost or a driver
    died while it was committed. Does nothing if storage cannot be read."""
    path = bus.folder.checkpoint(step)
    with suppress(PentadError):
        manifest, found = looked_up(lambda: (read_manifest(path), fingerprint(path)))
        events = [each for each in bus.folder.journal() if each["event"] == "checkpoint" and each["step"] == step]
        if not events or events[-1]["manifest"] != found:
            facts = {"manifest": found, "bytes": sum(shard.bytes for shard in manifest.shards)}
            bus.record("checkpoint", generation=manifest.meta.get("generation", 0), step=step, **facts)


def open_current(folder: RunFolder, checkpoint: Location) -> Checkpoint:
    """As `open_checked`; also raises PentadError if the run has since gone back to before this checkpoint. Then an
    unreachable rank of an earlier generation committed it too late."""
    found, events = open_checked(checkpoint), folder.journal()
    generation = found.meta.get("generation", 0)
    known = {tuple(each) for each in found.meta.get("skipped_batches", [])}
    for event in events:
        is_later = event["event"] in ("start", "recovered") and event.get("generation", 0) > generation
        if is_later and event["step"] < found.step:
            text = f"{checkpoint} is of generation {generation}, but {event['generation']} began with step"
            raise PentadError(f"{text} {event['step']}: expected a checkpoint from before that")
    rollbacks = [event for event in events if event["event"] == "rollback"]
    for first, count in rollbacks[-1]["skipped_batches"] if rollbacks else ():
        if first < found.step and (first, count) not in known:
            text = f"{checkpoint} was trained on batches that the run has left out since"
            raise PentadError(f"{text}: expected it to leave out {count} from step {first} on")
    return found


def newest_recorded(events: Iterable[dict[str, Any]]) -> int:
    """Step of the newest committed checkpoint by the lines of journal.jsonl, apart from those that a rollback has
    deleted or a restart has abandoned; -1 without one."""
    steps = {-1}
    for event in events:
        if event["event"] == "checkpoint":
            steps.add(event["step"])
        elif event["event"] in ("rollback", "start"):
            end = event["to"] if event["event"] == "rollback" else event["step"]
            steps = {step for step in steps if step <= end}
    return max(steps)


def require_listed(root: Location, events: Iterable[dict[str, Any]]) -> None:
    """Raises PentadError if the run has committed a checkpoint although `root` has none: the file system may not be
    mounted, or all were damaged and renamed. Starting from scratch would undo steps."""
    if (step := newest_recorded(events)) < 0:
        return
    if any(entry.state == "refused" for entry in listed(root)):
        text = f"no checkpoint in {root} is intact, and the damaged ones are renamed: expected an intact one"
    else:
        found = f"{root} has no checkpoint, but the run has committed that of {step} steps"
        text = f"{found}: expected the folder with it"
    raise PentadError(f"{text}, or checkpoint.restart_if_damaged = true to begin the run again")
