"""Where a rank's GPU is in its program, which the host issues ahead of it."""

from __future__ import annotations

import time

from pentad.workers.lanes.progress_file import Progress
from pentad.workers.lanes.streams import CudaStreams
from pentad.workers.runtime.executor import Executor


class GpuPosition:
    """Remembers how long a GPU has been at its instruction."""

    def __init__(self) -> None:
        self.last = (0, -1, 0.0)  # step, counter, and since when

    def read(self, executor: Executor) -> Progress | None:
        """The instruction that the GPU has reached or, if it is idle, that the host is about to issue; None on a CPU,
        where the progress file has it. From any thread."""
        if not isinstance(executor.lanes, CudaStreams):
            return None
        waits, axis = executor.lanes.progress.layer_wait()
        state = executor.progress.read()._replace(waits=waits, axis=axis)
        if (found := _reached(executor, executor.lanes)) is None:
            return state
        step, counter, program = found
        if (step, counter) != self.last[:2]:
            self.last = (step, counter, time.monotonic())
        return state._replace(step=step, counter=counter, since=self.last[2], program=program)


def _reached(executor: Executor, lanes: CudaStreams) -> tuple[int, int, int] | None:
    """Step, counter and program number of the instruction that the GPU has reached; None if it is idle."""
    program, number, found = executor.running, executor.round, lanes.position()
    if program is None or found is None:
        return None
    (behind, part), step = found, executor.step
    if not program.forward_only and (issued := executor.issued.get(step - behind)) is not None:
        program = issued.program
    counter = next((i for i, action in enumerate(program.stream) if part in action.parts), None)
    if counter is None:  # another program has begun meanwhile
        return None
    if program.forward_only:
        return step, counter + max(0, number - behind) * len(program.stream), program.number
    return step - behind, counter, program.number
