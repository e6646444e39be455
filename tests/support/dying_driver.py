"""`pentad train` in a driver that dies by SIGKILL at some point: `python -m dying_driver POINT OVERRIDES`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from pentad.orchestrator.cli.cli import main
from pentad.orchestrator.cluster.copies import GroupCopies
from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.monitoring.runfolder import RunFolder
from pentad.orchestrator.recovery.regroup import Regroup
from pentad.orchestrator.run.measure import History
from pentad.orchestrator.run.saving import Saving

STEP = 6
Condition = Callable[..., bool]


def always(*_: Any) -> bool:
    return True


def runs(group: Any, rank: int, method: str, *arguments: Any) -> bool:
    return method == "run" and rank == 1 and arguments[0] >= STEP


def copies(copies: Any, step: int) -> bool:
    return step >= STEP


# Class and method, on which call, and whether after it.
POINTS: dict[str, tuple[type, str, Condition, bool]] = {
    "before the ranks have a state": (WorkerGroup, "restore", always, False),
    "a call has reached some of the ranks": (WorkerGroup, "call_runner", runs, False),
    "the ranks have taken steps that are not recorded": (
        History,
        "add",
        lambda history, results: results[0][0].step >= STEP,
        False,
    ),
    "a step is in audit.jsonl, but not in metrics.jsonl": (
        RunFolder,
        "_audit",
        lambda folder, *entries: any((each["event"], each.get("step")) == ("step", STEP) for each in entries),
        True,
    ),
    "a checkpoint is written, but not committed": (Saving, "_commit", always, False),
    "a checkpoint is committed, but not recorded": (Saving, "_record", always, False),
    "a copy in memory is made, but does not count": (GroupCopies, "commit", copies, False),
    "a lost rank is not replaced": (Regroup, "_members", always, False),
    "a lost rank is replaced, but has no state": (Regroup, "_receive", always, False),
    "the ranks have their state again, but what they did is not recorded": (Regroup, "_receive", always, True),
    "copies are about to be restored": (GroupCopies, "restore", always, False),
}


def die_at(point: str) -> None:
    kind, name, condition, after = POINTS[point]
    method = getattr(kind, name)

    def dying(*arguments: Any, **options: Any) -> Any:
        dies = condition(*arguments)
        if dies and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = method(*arguments, **options)
        if dies:
            if kind is RunFolder:
                arguments[0].files.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(kind, name, dying)


def command(point: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "dying_driver", point)


if __name__ == "__main__":
    die_at(sys.argv[1])
    sys.exit(main(["train", *sys.argv[2:]]))
