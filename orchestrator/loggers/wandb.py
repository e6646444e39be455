"""Weights & Biases: online, or offline in the subfolder `wandb` of the run's folder, for `wandb sync`."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import wandb

from pentad.orchestrator.loggers.logger import LoggedRun, Logger, Note

STATE, PAGE = "loggers/wandb.json", "timeline.html"
INIT_SECONDS = 20.0


class Wandb(Logger):
    """One W&B run for all resumes. W&B's own step counts the rows logged, so it never goes backwards; the x-axis is
    `step`, so the curves continue where the run does."""

    def __init__(self, run: LoggedRun, note: Note) -> None:
        self.path, self.folder = Path(run.folder, STATE), Path(run.folder)
        saved = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.id, self.logged = saved.get("id") or secrets.token_hex(4), saved.get("logged", 0)
        self.run = self._init(run, note)
        self.logged = max(self.logged, self.run.step)
        self._save()
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, time: float, values: dict[str, float]) -> None:
        self.run.log({**values, "step": step, "time": time}, step=self.logged)
        self.logged += 1
        self._save()

    def checkpoint(self, step: int, folder: str) -> None:
        self.run.summary["checkpoint"] = folder

    def close(self, state: str) -> None:
        if (page := self.folder / PAGE).exists():
            self.run.log({"timeline": wandb.Html(str(page))}, step=self.logged)
            self.logged += 1
            self._save()
        self.run.finish(exit_code=int(state == "failed"))

    def _init(self, run: LoggedRun, note: Note) -> Any:
        """Starts the W&B run; offline if the server cannot be reached or there is no key, so that nothing is lost."""
        timeout = float(os.environ.get("WANDB_INIT_TIMEOUT", INIT_SECONDS))
        settings = wandb.Settings(init_timeout=timeout, console="off")
        options = {key: run.settings[key] for key in ("project", "entity")} | {"name": run.name, "id": self.id}
        options |= {"dir": run.folder, "config": run.config, "settings": settings}
        if run.settings["mode"] == "online":
            try:
                return wandb.init(mode="online", resume="allow", **options)
            except wandb.Error as error:
                wandb.teardown()  # forgets the attempt
                reason = str(error).splitlines()[0]
                where = self.folder / "wandb"
                note(f"W&B logs offline ({reason}); `wandb sync {where}/offline-run-*` uploads it later")
        return wandb.init(mode="offline", **options)

    def _save(self) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({"id": self.id, "logged": self.logged}))
        os.replace(partial, self.path)
