"""TensorBoard's event files, in the subfolder `tensorboard` of the run's folder."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tensorboardX import SummaryWriter

from pentad.orchestrator.loggers.logger import LoggedRun, Logger, Note
from pentad.schedules.draw.pixels import timeline_pixels
from pentad.schedules.simulate.timeline import Timeline

FOLDER, TIMELINE = "tensorboard", "timeline.arrow"
FLUSH_SECONDS = 10


class TensorBoard(Logger):
    """Writes event files. After a rewind a new file hides those steps of the older files that are logged again."""

    def __init__(self, run: LoggedRun, note: Note) -> None:
        self.folder = Path(run.folder, FOLDER)
        self.writer = _writer(self.folder, run.first)
        self.writer.add_text("config", f"```\n{json.dumps(run.config, indent=2)}\n```", run.first)

    def log(self, step: int, time: float, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step, walltime=time)

    def rewind(self, step: int) -> None:
        self.writer.close()
        self.writer = _writer(self.folder, step)

    def checkpoint(self, step: int, folder: str) -> None:
        self.writer.add_text("checkpoint", folder, step)

    def close(self, state: str) -> None:
        if (path := self.folder.parent / TIMELINE).exists():
            measured = Timeline.load(path)
            for step in measured.steps[-1:]:
                self.writer.add_image("timeline", timeline_pixels(measured.of_step(step)), step, dataformats="HWC")
        self.writer.close()


def _writer(folder: Path, first: int) -> SummaryWriter:
    suffix = f".{time.time_ns()}"  # two files created in the same second need different names
    return SummaryWriter(str(folder), purge_step=first, flush_secs=FLUSH_SECONDS, filename_suffix=suffix)
