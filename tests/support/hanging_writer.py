"""`pentad train` in which rank 1's file of the checkpoint after STEP steps never reaches the disk:
`python -m hanging_writer OVERRIDES`"""

from __future__ import annotations

import sys
import threading

from rich.console import Console

from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.run.train import train
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint import atomic_io
from pentad.workers.runtime.results import WrittenShards
from pentad.workers.runtime.runner import Runner

COMMAND = (sys.executable, "-P", "-m", "hanging_writer")
STEP = 4


class HangingWriter(Runner):
    def write(self, folder: str, step: int) -> WrittenShards:
        if (self.rank, step) == (1, STEP):
            atomic_io._DirectFile.sync = lambda file: threading.Event().wait()  # type: ignore[assignment]
        return super().write(folder, step)


if __name__ == "__main__":
    try:
        train(load(None, sys.argv[1:]), display=Display(Console(), "run", 0), runner="hanging_writer:HangingWriter")
    except PentadError as error:
        sys.exit(f"pentad: {error}")
