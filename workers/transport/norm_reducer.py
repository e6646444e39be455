"""Adds up the partial sums of the global gradient norm along the pipeline, in a thread beside the train thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

POLL_SECONDS = 5e-4
STORE_TIMEOUT = timedelta(milliseconds=200)


class NormPartial(NamedTuple):
    """This rank's sums of a step: float64 on the host, valid once `arrived()` is true."""

    step: int
    sums: torch.Tensor
    arrived: Callable[[], bool]


class NormReducer:
    """Adds this rank's sums to those of the previous pipeline rank and passes them on.

    The totals of all pipelines' last ranks then go to all ranks. They are a few bytes a step, so they travel through
    the TCP store, over a connection of their own, and occupy neither the GPU nor a communicator. Sums that arrive after
    an abort, when `cancelled` is not 0, are not passed on: a GPU whose waits an abort has ended computes nonsense.
    """

    def __init__(
        self, store: dist.TCPStore, pipeline: int, pp: int, num_pipelines: int, pp_size: int, cancelled: torch.Tensor
    ) -> None:
        self.cancelled = cancelled
        self.store, self.pipeline, self.pp = store, pipeline, pp
        self.num_pipelines, self.pp_size = num_pipelines, pp_size
        self.submitted: queue.SimpleQueue[NormPartial | None] = queue.SimpleQueue()
        self.totals: dict[int, torch.Tensor] = {}
        self.reduced = 0  # steps so far: a rollback repeats a step's number, and old sums may still be in the store
        self.newest_partial = -1  # newest step whose partial sums have arrived on the host
        self.closed = False
        self.changed = threading.Condition()
        self.error: Exception | None = None
        threading.Thread(target=self._run, name="norm reducer", daemon=True).start()

    def submit(self, partial: NormPartial) -> None:
        self.submitted.put(partial)

    def wait(self, step: int, check: Callable[[], None]) -> torch.Tensor:
        """The sums of a step over all ranks [pipelines, entries]; calls `check`, which may raise, while it waits."""
        while True:
            check()
            with self.changed:
                if self.changed.wait_for(lambda: step in self.totals or self.error, POLL_SECONDS):
                    if self.error is not None:
                        raise self.error
                    return self.totals.pop(step)

    def close(self) -> None:
        self.closed = True
        self.submitted.put(None)

    def _run(self) -> None:
        try:
            while (partial := self.submitted.get()) is not None:
                self._reduce(partial)
        except Exception as error:  # for the train thread, in `wait`
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _reduce(self, partial: NormPartial) -> None:
        while not partial.arrived():
            if self.closed:
                return
            time.sleep(POLL_SECONDS)
        if self.cancelled.item() != 0:
            return
        self.newest_partial = partial.step
        sums = partial.sums.numpy().copy()
        if self.pp > 0:
            sums += self._receive(self.pipeline, self.pp - 1)
        self.store.set(_key(self.reduced, self.pipeline, self.pp), sums.tobytes().hex())
        totals = np.stack([self._receive(pipeline, self.pp_size - 1) for pipeline in range(self.num_pipelines)])
        # Every rank has contributed to this step, and so has read the previous step's sums.
        self.store.delete_key(_key(self.reduced - 1, self.pipeline, self.pp))
        self.reduced += 1
        with self.changed:
            self.totals[partial.step] = torch.from_numpy(totals)
            self.changed.notify_all()

    def _receive(self, pipeline: int, pp: int) -> np.ndarray:
        key = _key(self.reduced, pipeline, pp)
        while True:
            try:
                self.store.wait([key], STORE_TIMEOUT)
                return np.frombuffer(bytes.fromhex(self.store.get(key).decode()), dtype=np.float64)
            except dist.DistStoreError:
                if self.closed:
                    raise


def _key(number: int, pipeline: int, pp: int) -> str:
    return f"norm/{number}/{pipeline}/{pp}"
