"""`pentad train` whose run folder stops responding at step FROM, for some seconds or for good:
`python -m hanging_driver SECONDS OVERRIDES`, inf for good"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hanging_disk import HangingDisk

from pentad.orchestrator.cli.cli import main
from pentad.orchestrator.monitoring.runfolder import RunFolder

COMMAND = (sys.executable, "-P", "-m", "hanging_driver")
FROM = 4
metrics = RunFolder.metrics


def hanging(seconds: float, patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`metrics` of a run folder that hangs once a step of at least FROM is to be recorded."""
    disks = list[HangingDisk]()

    def record(folder: RunFolder, *rows: dict[str, Any]) -> list[dict[str, Any]]:
        if not disks and rows[-1]["step"] >= FROM:
            disks.append(HangingDisk(patch, folder.path))
            disks[0].hangs = True
            if seconds < math.inf:
                threading.Timer(seconds, setattr, (disks[0], "hangs", False)).start()
        return metrics(folder, *rows)

    return record


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "metrics", hanging(float(sys.argv[1]), patch))
        status = main(["train", *sys.argv[2:]])
    sys.exit(status)
