"""`pentad train` whose rank 1 computes four times as long in the first generation: `python -m slow_runner OVERRIDES`"""

from __future__ import annotations

import sys
import time

from rich.console import Console

from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.run.train import train
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Instruction
from pentad.schedules.simulate.timeline import COMPUTE
from pentad.workers.parallel.async_ops import Task
from pentad.workers.runtime.runner import Runner

COMMAND = (sys.executable, "-P", "-m", "slow_runner")
FACTOR = 4  # large, since on a busy machine a rank may take twice as long as another for no reason


class SlowRunner(Runner):
    def connect(self, address: str, timeout_seconds: float) -> None:
        super().connect(address, timeout_seconds)
        if (self.rank, self.generation) == (1, 1):
            assert self.executor is not None
            real = self.executor._execute

            def execute(part: Instruction) -> Task[None]:
                began = time.monotonic()
                yield from real(part)
                if part.op.value in COMPUTE:
                    time.sleep((FACTOR - 1) * (time.monotonic() - began))

            self.executor._execute = execute  # type: ignore[method-assign]


if __name__ == "__main__":
    try:
        train(load(None, sys.argv[1:]), display=Display(Console(), "run", 0), runner="slow_runner:SlowRunner")
    except PentadError as error:
        sys.exit(f"pentad: {error}")
