"""Examiners of a cluster's nodes; the first to start finds its node odd, and the second one dies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from pentad.orchestrator.doctor.finding import Finding
from pentad.orchestrator.doctor.nodes import Examiner
from pentad.workers.health.results import Link


class OddExaminer(Examiner):
    """On the odd node: other versions, a clock that is a minute ahead, and a slow network, without actually waiting."""

    is_odd = False

    def start(self, gpus: Sequence[str]) -> dict[str, float]:
        number = next(number for number in count() if self._is_first(f"{number}"))
        self.is_odd = number == 0
        if number == 1:
            os._exit(1)
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

    def _is_first(self, name: str) -> bool:
        """Whether this process is the first to create a file of this name in the run's folder."""
        try:
            os.close(os.open(Path(self.config.run.folder) / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True
