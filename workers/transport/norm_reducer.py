"""Carries the partial sums of every step's global norm along the pipeline, beside the train thread."""

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
PATIENCE = timedelta(milliseconds=200)


class NormPartial(NamedTuple):
    """This rank's part of a step's sums: float64 on the host, whole once `arrived` says so."""

    step: int
    sums: torch.Tensor
    arrived: Callable[[], bool]


class NormReducer:
    """One rank's courier: it adds this rank's part to what comes from the rank before and passes the sum on.

    The last rank's sum of every pipeline is what `hear` returns on all ranks. Few bytes a step, so they go by the store
    that the ranks met at, over a connection of the courier's own, and occupy neither the GPU nor a communicator.
    """

    def __init__(self, store: dist.TCPStore, pipeline: int, pp: int, pipelines: int, ranks: int) -> None:
        self.store, self.pipeline, self.pp, self.pipelines, self.ranks = store, pipeline, pp, pipelines, ranks
        self.parcels: queue.SimpleQueue[NormPartial | None] = queue.SimpleQueue()
        self.whole: dict[int, torch.Tensor] = {}
        self.given = -1  # the last step whose part was whole
        self.closed = False
        self.news = threading.Condition()
        self.failed: Exception | None = None
        threading.Thread(target=self._run, name="courier", daemon=True).start()

    def bring(self, parcel: NormPartial) -> None:
        self.parcels.put(parcel)

    def hear(self, step: int, check: Callable[[], None]) -> torch.Tensor:
        """The sums of a step over all ranks [pipelines, entries]; calls `check` while it waits, which may raise."""
        while True:
            check()
            with self.news:
                if step in self.whole or self.news.wait_for(lambda: step in self.whole or self.failed, POLL_SECONDS):
                    if self.failed is not None:
                        raise self.failed
                    return self.whole.pop(step)

    def close(self) -> None:
        self.closed = True
        self.parcels.put(None)

    def _run(self) -> None:
        try:
            while (parcel := self.parcels.get()) is not None:
                self._carry(parcel)
        except Exception as error:  # the train thread is told, if it still listens
            with self.news:
                self.failed = error
                self.news.notify_all()

    def _carry(self, parcel: NormPartial) -> None:
        while not parcel.arrived():
            if self.closed:
                return
            time.sleep(POLL_SECONDS)
        self.given = parcel.step
        sums = parcel.sums.numpy().copy()
        if self.pp > 0:
            sums += self._take(parcel.step, self.pipeline, self.pp - 1)
        self.store.set(_name(parcel.step, self.pipeline, self.pp), sums.tobytes().hex())
        whole = np.stack([self._take(parcel.step, number, self.ranks - 1) for number in range(self.pipelines)])
        self.store.delete_key(
            _name(parcel.step - 1, self.pipeline, self.pp)
        )  # all have heard that one: they gave this one
        with self.news:
            self.whole[parcel.step] = torch.from_numpy(whole)
            self.news.notify_all()

    def _take(self, step: int, pipeline: int, pp: int) -> np.ndarray:
        name = _name(step, pipeline, pp)
        while True:
            try:
                self.store.wait([name], PATIENCE)
                return np.frombuffer(bytes.fromhex(self.store.get(name).decode()), dtype=np.float64)
            except dist.DistStoreError:
                if self.closed:
                    raise


def _name(step: int, pipeline: int, pp: int) -> str:
    return f"norm/{step}/{pipeline}/{pp}"
