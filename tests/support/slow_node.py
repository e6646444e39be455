"""`pentad train` on a cluster whose network is slow on one node, the first to be examined: `python -m slow_node
OVERRIDES`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import ray

from pentad.orchestrator.cli.cli import main
from pentad.orchestrator.doctor import nodes
from pentad.orchestrator.doctor.finding import Finding
from pentad.workers.health.results import Link


class SlowNode(nodes.Examiner):
    def network(self, device: str, address: str, rank: int, size: int) -> Finding:
        own, known = ray.get_runtime_context().get_node_id(), Path(self.config.run.folder) / "slow-node"
        with suppress(FileExistsError), os.fdopen(os.open(known, os.O_CREAT | os.O_EXCL | os.O_WRONLY), "w") as file:
            file.write(own)
        link = Link((rank + 1) % size, rank, 1e9 if known.read_text() == own else 10e9, 30e-6)
        return Finding("ok", "", figures={"links": [link._asdict()]})


if __name__ == "__main__":
    nodes.Examiner = SlowNode  # type: ignore[misc]
    sys.exit(main(["train", *sys.argv[1:]]))
