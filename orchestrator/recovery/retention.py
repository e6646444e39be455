"""Which checkpoints of a run are kept beside the newest ones. Needs no Ray."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.evaluations import best_of
from pentad.orchestrator.monitoring.runfolder import RunFolder
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import fingerprint, read_manifest
from pentad.workers.checkpoint.location import Location
from pentad.workers.checkpoint.retention import listed

if TYPE_CHECKING:
    from pentad.orchestrator.monitoring.event_bus import EventBus


def rollback_target(config: RunConfig, step: int) -> int | None:
    """The step to which a spike in `step` takes the run back, None without that policy: the last one of a checkpoint by
    steps, so that it depends on nothing else."""
    every = config.checkpoint.every
    return step // every * every if config.spikes.policy == "rollback" else None


def kept_steps(config: RunConfig, saved: Collection[int], evaluations: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """The checkpoints to keep of these steps: the best one by the lines of eval.jsonl, the milestones, and the one to
    which a spike right after the newest takes the run back."""
    best, every = best_of(evaluations, config.checkpoint.keep_best, saved), config.checkpoint.keep_every
    target = rollback_target(config, max(saved, default=0))
    kept = [best.step] if best else []
    if target is not None:
        kept += sorted(step for step in saved if step <= target)[-1:]
    if every:
        kept += sorted(step for step in saved if step and step % every == 0)
    return tuple(kept)


def pinned_checkpoints(config: RunConfig, folder: RunFolder, step: int) -> tuple[int, ...]:
    """Those to keep beside the newest ones once there is one of `step` steps, the newest."""
    saved = {saved for saved in folder.saved() if saved < step}
    return kept_steps(config, saved | {step}, folder.evaluations())


def record_committed(bus: EventBus, step: int) -> None:
    """Writes to the journal that there is a checkpoint of `step` steps, if it lacks that: it was committed when a rank
    was lost, or when a former driver died. Storage that cannot be read costs the line alone."""
    path = bus.folder.checkpoint(step)
    with suppress(PentadError):
        manifest, found = read_manifest(path), fingerprint(path)
        events = [each for each in bus.folder.journal() if each["event"] == "checkpoint" and each["step"] == step]
        if not events or events[-1]["manifest"] != found:
            facts = {"manifest": found, "bytes": sum(shard.bytes for shard in manifest.shards)}
            bus.record("checkpoint", generation=manifest.meta.get("generation", 0), step=step, **facts)


def newest_recorded(events: Iterable[dict[str, Any]]) -> int:
    """Steps of the newest checkpoint that was committed, by the lines of journal.jsonl, and that no rollback has
    deleted, nor a run that began again has left behind; -1 without one."""
    steps = {-1}
    for event in events:
        if event["event"] == "checkpoint":
            steps.add(event["step"])
        elif event["event"] in ("rollback", "start"):
            end = event["to"] if event["event"] == "rollback" else event["step"]
            steps = {step for step in steps if step <= end}
    return max(steps)


def require_listed(root: Location, events: Iterable[dict[str, Any]]) -> None:
    """Raises PentadError if the run has committed a checkpoint: for a `root` without any, as while a file system is not
    mounted, or once all were renamed because they are damaged. To begin at the start would undo steps."""
    if (step := newest_recorded(events)) < 0:
        return
    if any(entry.state == "refused" for entry in listed(root)):
        text = f"no checkpoint in {root} is intact, and the damaged ones are renamed: expected an intact one"
    else:
        found = f"{root} has no checkpoint, but the run has committed that of {step} steps"
        text = f"{found}: expected the folder with it"
    raise PentadError(f"{text}, or checkpoint.restart_if_damaged = true to begin the run again")
