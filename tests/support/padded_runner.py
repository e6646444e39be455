"""`pentad train` whose layers take equally long on all ranks, except 15 % longer on rank 1 or 3 after BEGINS steps:
`python -m padded_runner Slow1 OVERRIDES`; or whose stages take equally long, except 50 % longer on rank 0:
`python -m padded_runner LongFirst OVERRIDES`"""

from __future__ import annotations

import sys

from injections import pad_compute, slow_compute
from rich.console import Console

from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.run.train import train
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Instruction
from pentad.workers.parallel.async_ops import Task
from pentad.workers.runtime.runner import Runner

LAYER_SECONDS = {"F": 0.006, "BW": 0.012}  # most of it is sleep
STAGE_SECONDS = {"F": 0.03, "B": 0.03, "W": 0.03, "BW": 0.06}
FACTOR = 1.15
BEGINS = 40  # ranks without peers are compared with what they did in their first 34 steps


class PaddedRunner(Runner):
    slow_rank = -1

    def connect(self, address: str, timeout_seconds: float) -> None:
        super().connect(address, timeout_seconds)
        executor = self.executor
        assert executor is not None
        (stage,) = self.plan.stages_of(self.rank)
        layers = len(self.plan.layers[stage].numbers)
        pad_compute(self, {op: layers * seconds for op, seconds in LAYER_SECONDS.items()})
        padded, slow = executor._execute, list[bool]()

        def execute(part: Instruction) -> Task[None]:
            if self.rank == self.slow_rank and executor.step >= BEGINS and not slow:
                slow.append(True)
                slow_compute(self, FACTOR)
            yield from padded(part)

        executor._execute = execute  # type: ignore[method-assign]


class Slow1(PaddedRunner):
    slow_rank = 1


class Slow3(PaddedRunner):
    slow_rank = 3


class LongFirst(Runner):
    def connect(self, address: str, timeout_seconds: float) -> None:
        super().connect(address, timeout_seconds)
        factor = 1.5 if self.rank == 0 else 1.0
        pad_compute(self, {op: factor * seconds for op, seconds in STAGE_SECONDS.items()})


def command(name: str | int) -> tuple[str, ...]:
    """The command for a class; for Slow1 or Slow3 the rank is enough."""
    return (sys.executable, "-P", "-m", "padded_runner", name if isinstance(name, str) else f"Slow{name}")


if __name__ == "__main__":
    name = f"padded_runner:{sys.argv[1]}"
    try:
        train(load(None, sys.argv[2:]), display=Display(Console(), "run", 0), runner=name)
    except PentadError as error:
        sys.exit(f"pentad: {error}")
