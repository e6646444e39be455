"""`pentad train` on a cluster with one node, the first to be examined, that has a slow network or a GPU that computes
wrong results: `python -m bad_node SlowNode OVERRIDES`, or WrongNode."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import ray

from pentad.orchestrator.cli.cli import main
from pentad.orchestrator.doctor import nodes
from pentad.orchestrator.doctor.finding import Finding
from pentad.workers.health.results import Burned, Link

UNIT = Burned("GPU 0", "NVIDIA H200", "a", 100, 0, 0.1, 660e12)


class BadNode(nodes.Examiner):
    def is_bad(self) -> bool:
        own, known = ray.get_runtime_context().get_node_id(), Path(self.config.run.folder) / "bad-node"
        with suppress(FileExistsError), os.fdopen(os.open(known, os.O_CREAT | os.O_EXCL | os.O_WRONLY), "w") as file:
            file.write(own)
        return known.read_text() == own


class SlowNode(BadNode):
    def network(self, device: str, address: str, rank: int, size: int) -> Finding:
        link = Link((rank + 1) % size, rank, 1e9 if self.is_bad() else 10e9, 30e-6)
        return Finding("ok", "", figures={"links": [link._asdict()]})


class WrongNode(BadNode):
    def examine(self, name: str) -> Finding:
        if name != "burn":
            return super().examine(name)
        digests = "a", "b" if self.is_bad() else "a"
        units = [UNIT._replace(unit=f"GPU {number}", digest=each)._asdict() for number, each in enumerate(digests)]
        return Finding("ok", "fast", figures={"seconds": 5.0, "units": units})


if __name__ == "__main__":
    nodes.Examiner = {"SlowNode": SlowNode, "WrongNode": WrongNode}[sys.argv[1]]  # type: ignore[misc]
    sys.exit(main(["train", *sys.argv[2:]]))
