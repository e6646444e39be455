"""Rank processes that compute attention together, each its part of the positions."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from gpus import gpu_of
from pool import Pool
from torch import Tensor

from pentad.kernels.attention.attention import attention_reference
from pentad.schedules.spec.cp_layout import PLACEMENTS, CpMethod, positions
from pentad.workers.parallel import cp_ring
from pentad.workers.parallel.async_ops import AsyncResult, run_to_completion
from pentad.workers.parallel.context_parallel import ContextParallelGroup

Rows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Case:
    """An attention of rows of `length` positions by `cp` ranks; `documents` begin at these positions of each row."""

    cp: int
    variant: CpMethod
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    length: int = 32
    width: int = 8
    value: int = 8
    documents: tuple[tuple[int, ...], ...] | None = None
    scale: float | None = None
    dtype: torch.dtype = torch.float64
    deterministic: bool = True
    times: int = 1
    seed: int = 0

    def inputs(self) -> list[Tensor]:
        """q, k, v and dout of the whole sequences, as views of [B, S, heads, D]."""
        made = torch.Generator().manual_seed(self.seed)
        sizes = zip(
            (self.heads, self.kv_heads, self.kv_heads, self.heads),
            (self.width, self.width, self.value, self.value),
            strict=True,
        )
        whole = [torch.randn(self.batch, self.length, n, d, generator=made, dtype=torch.float64) for n, d in sizes]
        return [x.to(self.dtype).transpose(1, 2) for x in whole]

    def held(self, rank: int) -> Tensor:
        return torch.from_numpy(positions(self.length, self.cp, rank, PLACEMENTS[self.variant]))

    def expected(self) -> list[Tensor]:
        """out, dq, dk and dv by the definition, in float64."""
        q, k, v, dout = (x.double() for x in self.inputs())
        q, k, v = leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        numbers = None if self.documents is None else numbered(self.documents, self.length)
        out = attention_reference(q, k, v, self.scale, numbers)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    def joined(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Whole tensors from those of the ranks."""
        found = []
        for kind in range(4):
            whole = torch.empty(*parts[0][kind].shape[:2], self.length, parts[0][kind].shape[3], dtype=self.dtype)
            for rank in range(self.cp):
                whole[:, :, self.held(rank)] = parts[rank][kind]
            found.append(whole)
        return found


def numbered(documents: Rows, length: int) -> Tensor:
    """[B, S] the number of the document that a position is in."""
    every = torch.arange(length)
    return torch.stack([torch.searchsorted(torch.tensor(starts), every, right=True) for starts in documents])


@dataclass
class Answer:
    """One rank's out and gradients (of its first run); whether all runs had the same bits; in how many rooms it got
    keys of others in one pass; what a ring did, in order; and the elements that were kept from F to B."""

    parts: list[Tensor]
    same: bool
    rooms: int
    log: list[str]
    kept: int


def run_rank(case: Case, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> Answer:
    """Forward and backward of one rank, `case.times` over."""
    mine = case.held(rank).to(device)
    context = ContextParallelGroup(group, case.cp, rank, case.variant, case.scale)
    documents = None if case.documents is None else context.document_mask(case.documents, case.length, device)
    log: list[str] = []
    rooms: set[int] = set()
    keys: set[int] = set()  # memory with keys of this pass, which come first, and go on from where they came
    real = cp_ring.pass_on

    def told(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def both(*args: Any) -> Any:
            log.append(name)
            return call(*args)

        return both

    def seen(group: dist.ProcessGroup, sent: Tensor, room: Tensor) -> AsyncResult[Tensor]:
        if not keys or sent.data_ptr() in keys:
            log.append("keys")
            rooms.add(room.data_ptr())
            keys.update((sent.data_ptr(), room.data_ptr()))
        else:
            log.append("gradients")
        coming = real(group, sent, room)
        coming.result = told("wait", coming.result)
        return coming

    runs, most = [], 0
    with (
        patch.object(cp_ring, "pass_on", seen),
        patch.object(cp_ring, "attend_block", told("block", cp_ring.attend_block)),
        patch.object(cp_ring, "attend_block_backward", told("block", cp_ring.attend_block_backward)),
    ):
        for _ in range(case.times):
            log.clear()
            q, k, v, dout = (x.to(device)[:, :, mine] for x in case.inputs())
            out, kept = run_to_completion(context.attend(q, k, v, documents, case.deterministic))
            size = elements(kept)
            most = max(most, len(rooms))
            rooms.clear()
            keys.clear()
            log.append("backward")
            runs.append([out, *run_to_completion(context.attend_backward(dout, kept))])
            most = max(most, len(rooms))
            rooms.clear()
            keys.clear()
    same = all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))
    return Answer([x.cpu() for x in runs[0]], same, most, log, size)


def elements(kept: object) -> int:
    """Of all tensors of floats in nested tuples."""
    if isinstance(kept, Tensor):
        return kept.numel() if kept.is_floating_point() else 0
    return sum(map(elements, kept)) if isinstance(kept, tuple) else 0


class Ranks:
    """`size` processes, one GPU each or gloo on the host."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.pool = Pool(size, _serve, device)

    def run(self, case: Case) -> list[Answer]:
        """What each rank of a case gives; raises with a rank's traceback when one fails."""
        self.pool.send([case] * case.cp)
        return self.pool.answers(case.cp, Answer)

    def stop(self) -> None:
        self.pool.stop()


def _serve(end: Connection, rank: int, size: int, kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, gpu_of(rank)) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    files = dist.FileStore(str(Path(folder, "store")), size)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", store=files, rank=rank, world_size=size, timeout=timedelta(seconds=80)
    )
    groups = {cp: dist.new_group(list(range(cp))) for cp in range(2, size + 1, 2)}
    while True:
        try:
            case = end.recv()
        except EOFError:
            return
        try:
            end.send(run_rank(case, rank, groups[case.cp], device))
        except BaseException:
            end.send(traceback.format_exc())
