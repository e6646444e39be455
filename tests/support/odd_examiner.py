"""Examiners of the nodes of a cluster, the first of which to start finds its node odd."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pentad.orchestrator.doctor.finding import Finding
from pentad.orchestrator.doctor.nodes import Examiner
from pentad.workers.health.results import Link


class OddExaminer(Examiner):
    """Other versions, a clock that is a minute ahead, a slow network: without waiting for any of it."""

    is_odd = False

    def start(self, gpus: Sequence[str]) -> dict[str, float]:
        self.is_odd = self._is_first()
        return super().start(gpus)

    def examine(self, name: str) -> Finding:
        found = super().examine(name)
        return found._replace(text="Python 2.7") if self.is_odd and name == "versions" else found

    def serve(self, size: int) -> str:
        return "127.0.0.1:1"

    def network(self, device: str, address: str, rank: int, size: int) -> Finding:
        link = Link((rank + 1) % size, rank, 1e9 if self.is_odd else 10e9, 30e-6)
        return Finding("ok", "", figures={"links": [link._asdict()]})

    def clock(self) -> float:
        return super().clock() + 60 * self.is_odd

    def _is_first(self) -> bool:
        try:
            os.close(os.open(Path(self.config.run.folder) / "first", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class DeadExaminer(OddExaminer):
    """The process of the odd one ends when it starts."""

    def start(self, gpus: Sequence[str]) -> dict[str, float]:
        times = super().start(gpus)
        if self.is_odd:
            os._exit(1)
        return times
