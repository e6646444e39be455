"""Exchanges between the ranks that share a layer: by copy engines between the GPUs of a host, otherwise by the process
group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.kernels.optimizer.add_shards import add_shards_
from pentad.workers.parallel.async_ops import (
    Arrival,
    AsyncResult,
    LayerWork,
    all_gather_rows,
    ready,
    reduce_scatter_rows,
)
from pentad.workers.parallel.point_to_point import exchange


class Rows(Protocol):
    """Exchanges of rows between the ranks of a group, in the same order on each (workers/transport/peer_rows.py)."""

    def begin_step(self) -> None: ...

    def fits(self, elements: int, like: Tensor) -> bool: ...

    def gather(self, own: Tensor, full: Tensor, *, keep: bool) -> Arrival: ...

    def slot(self, shape: Sequence[int], like: Tensor) -> Tensor: ...

    def read(self, parts: Sequence[tuple[int, int, Tensor]], readers: Sequence[int] | None = None) -> Arrival: ...

    def scatter(self, parts: Sequence[tuple[int, int, Tensor]], write: Callable[[int], object]) -> Arrival: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class RowGroup:
    """The `size` ranks that share a layer; this one is number `rank`. A single rank has no group and communicates
    nothing. Messages that fit into the slots of `rows` are exchanged through it."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0
    rows: Rows | None = None

    def all_gather(self, x: Tensor, *, keep: bool = True) -> AsyncResult[Tensor]:
        """The rows of all ranks in order [size T, ...], from this rank's [T, ...]. Unless `keep`, this rank's own rows
        may be missing."""
        if self.group is None:
            return ready(x)
        if self.rows is None or not self.rows.fits(x.numel(), x):
            return all_gather_rows(x, self.group)
        x = x.contiguous()
        full = x.new_empty(self.size, *x.shape)
        work = LayerWork(self.rows.gather(x, full, keep=keep), self.group)
        return AsyncResult((work,), lambda: full.flatten(0, 1), full)

    def reduce_scatter(self, partial: Tensor) -> AsyncResult[Tensor]:
        """This rank's rows [T / size, ...] of the sum over ranks of partial results [T, ...]."""
        if self.group is None:
            return ready(partial)
        if self.rows is None or not self.rows.fits(partial.numel(), partial):
            return reduce_scatter_rows(partial, self.group)
        slot = self.rows.slot(partial.shape, partial)
        for others in self._others(partial.shape[0]):
            slot[others].copy_(partial[others])
        arrived, parts = self._terms(slot)
        work = LayerWork(self.rows.read(parts), self.group)
        return AsyncResult((work,), lambda: self._add(partial[self._own(partial.shape[0])], arrived), arrived, partial)

    def all_to_all(self, sent: Tensor) -> AsyncResult[Tensor]:
        """What each rank has for this one [size, ...], given what this one has for each [size, ...]."""
        if self.group is None:
            return ready(sent)
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        if self.rows is None or not self.rows.fits(sent.numel(), sent):
            work: Arrival = dist.all_to_all_single(received.view(-1), sent.view(-1), group=self.group, async_op=True)
        else:
            slot, elements = self.rows.slot(sent.shape, sent), sent[0].numel()
            for others in self._others(self.size):
                slot[others].copy_(sent[others])
            received[self.rank].copy_(sent[self.rank])
            work = self.rows.read([(index, self.rank * elements, received[index]) for index in self._peers])
        return AsyncResult((LayerWork(work, self.group),), lambda: received, sent)

    def pass_on(self, sent: Tensor, buffer: Tensor, to: int, source: int) -> AsyncResult[Tensor]:
        """Sends to rank `to` of the group and receives into `buffer` from rank `source`. No other rank has to take
        part, unless `rows` is used."""
        assert self.group is not None
        work: Arrival
        if self.rows is not None and self.rows.fits(sent.numel(), sent):
            self.rows.slot(sent.shape, sent).copy_(sent)
            work = self.rows.read([(source, 0, buffer)], [to])
        else:
            work = exchange(self.group, [(sent, to)], [(buffer, source)])
        return AsyncResult((LayerWork(work, self.group),), lambda: buffer, sent)

    def sum(self, counts: Tensor) -> AsyncResult[Tensor]:
        """Sums integers over the ranks."""
        return self._all_reduce(counts, dist.ReduceOp.SUM, lambda each: each.sum(0))

    def maximum(self, values: Tensor) -> AsyncResult[Tensor]:
        """The elementwise maximum over the ranks."""
        return self._all_reduce(values, dist.ReduceOp.MAX, lambda each: each.amax(0))

    def _all_reduce(
        self, x: Tensor, op: dist.ReduceOp.RedOpType, reduce: Callable[[Tensor], Tensor]
    ) -> AsyncResult[Tensor]:
        if self.group is None:
            return ready(x)
        if self.rows is not None and self.rows.fits(x.numel(), x):
            return self.all_gather(x[None]).then(reduce)
        total = x.clone()
        work = dist.all_reduce(total, op=op, group=self.group, async_op=True)
        return AsyncResult((LayerWork(work, self.group),), lambda: total)

    @property
    def _peers(self) -> list[int]:
        return [index for index in range(self.size) if index != self.rank]

    def _rows_of(self, rank: int, rows: int) -> slice:
        """A rank's share of `rows` rows."""
        return slice(rank * rows // self.size, (rank + 1) * rows // self.size)

    def _own(self, rows: int) -> slice:
        """This rank's share of `rows` rows."""
        return self._rows_of(self.rank, rows)

    def _others(self, rows: int) -> list[slice]:
        """All other rows: those before this rank's, and those after."""
        own = self._own(rows)
        return [each for each in (slice(0, own.start), slice(own.stop, rows)) if each.start < each.stop]

    def _terms(self, slot: Tensor) -> tuple[Tensor, list[tuple[int, int, Tensor]]]:
        """(other ranks' partial results [size - 1, T / size, ...] for this rank's rows, where to read each); `slot` [T,
        ...] holds this rank's partial results for theirs."""
        own = slot[self._own(slot.shape[0])]
        arrived, start = own.new_empty(len(self._peers), *own.shape), self.rank * own.numel()
        return arrived, [(index, start, term) for index, term in zip(self._peers, arrived, strict=True)]

    def _add(self, own: Tensor, arrived: Tensor) -> Tensor:
        """The sum of the ranks' terms, in the order of ranks."""
        total = torch.empty(own.shape, dtype=own.dtype, device=own.device)
        add_shards_(total.view(-1), own.reshape(-1), arrived.flatten(1), self.rank, accumulate=False)
        return total
