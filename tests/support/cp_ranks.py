"""Rank processes that compute context-parallel attention, each with its shard of the sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from dense_attention import dense_attention
from gpus import gpu_of
from pool import Pool, answer_orders
from torch import Tensor

from pentad.kernels.attention.attention_reference import AttentionOptions
from pentad.schedules.spec.cp_layout import CP_LAYOUTS, CpMethod, positions
from pentad.workers.parallel import cp_ring
from pentad.workers.parallel.async_ops import AsyncResult, run_to_completion
from pentad.workers.parallel.context_parallel import ContextParallelGroup

Rows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Case:
    """Attention over sequences of `length` tokens on `cp` ranks; `documents` has the start positions of each row's
    documents."""

    cp: int
    method: CpMethod
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    length: int = 32
    head_dim: int = 8
    value_dim: int = 8
    documents: tuple[tuple[int, ...], ...] | None = None
    scale: float | None = None
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float64
    deterministic: bool = True
    repeats: int = 1
    seed: int = 0

    def inputs(self) -> list[Tensor]:
        """q, k, v and dout of full sequences, as views of [B, S, heads, D]."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        dims = (self.head_dim, self.head_dim, self.value_dim, self.value_dim)
        full = [
            torch.randn(self.batch, self.length, n, d, generator=generator, dtype=torch.float64)
            for n, d in zip(heads, dims, strict=True)
        ]
        return [x.to(self.dtype).transpose(1, 2) for x in full]

    def sink_scores(self) -> Tensor | None:
        """[heads]"""
        return torch.linspace(-1, 2, self.heads, dtype=self.dtype) if self.sinks else None

    def positions(self, rank: int) -> Tensor:
        """[B, S / cp] positions held by a rank, by row."""
        given = self.length, self.cp, rank, CP_LAYOUTS[self.method]
        rows = ((0,),) * self.batch if self.documents is None else self.documents
        return torch.stack([torch.from_numpy(positions(*given, starts)) for starts in rows])

    def shard(self, x: Tensor, rank: int) -> Tensor:
        """What a rank holds of x [B, heads, S, D], as a view of [B, S / cp, heads, D]."""
        rows = zip(x.transpose(1, 2), self.positions(rank), strict=True)
        return torch.stack([row[held] for row, held in rows]).transpose(1, 2)

    def expected(self) -> list[Tensor]:
        """out, dq, dk and dv of plain attention in float64, and the gradient of the sinks."""
        q, k, v, dout = (x.double() for x in self.inputs())
        q, k, v = leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        indices = None if self.documents is None else document_indices(self.documents, self.length)
        sinks = self.sink_scores()
        if sinks is not None:
            leaves.append(sinks.double().requires_grad_())
        out = dense_attention(q, k, v, self.scale, indices, self.window, self.softcap, *leaves[3:])
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    def join(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Full tensors from the ranks' shards, and the sum of their gradients of sinks."""
        found = []
        for kind in range(4):
            full = torch.empty(*parts[0][kind].shape[:2], self.length, parts[0][kind].shape[3], dtype=self.dtype)
            for rank in range(self.cp):
                for row, (held, part) in enumerate(zip(self.positions(rank), parts[rank][kind], strict=True)):
                    full[row, :, held] = part
            found.append(full)
        return [*found, torch.stack([part[4] for part in parts]).sum(0)] if self.sinks else found


def document_indices(documents: Rows, length: int) -> Tensor:
    """[B, S]: the index of the document at every position."""
    every = torch.arange(length)
    return torch.stack([torch.searchsorted(torch.tensor(starts), every, right=True) for starts in documents])


@dataclass
class Answer:
    """One rank's results: outputs and gradients of the first run, whether all runs were bit-identical, how many buffers
    received keys in one pass, the log of ring operations, and the number of elements saved from F to B."""

    parts: list[Tensor]
    same: bool
    buffers: int
    log: list[str]
    saved: int


def run_rank(case: Case, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> Answer:
    """Forward and backward of one rank, `case.repeats` times."""
    cp_group = ContextParallelGroup(group, case.cp, rank, method=case.method)
    scale = case.scale or 1.0 / math.sqrt(case.head_dim)
    options = AttentionOptions(True, scale, case.deterministic, softcap=case.softcap).within(case.window)
    documents, sinks = None, case.sink_scores()
    if sinks is not None:
        sinks = sinks.to(device)
    if case.documents is not None:
        documents = cp_group.document_mask(case.documents, case.length, device, case.window)
    log: list[str] = []
    buffers: set[int] = set()
    keys: set[int] = set()  # addresses of keys in this pass: those sent first, and all receive buffers
    real_pass_on = cp_ring.pass_on

    def logged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            log.append(name)
            return function(*args)

        return call

    def pass_on(ring: cp_ring.Ring, sent: Tensor, buffer: Tensor) -> AsyncResult[Tensor]:
        if not keys or sent.data_ptr() in keys:
            log.append("keys")
            buffers.add(buffer.data_ptr())
            keys.update((sent.data_ptr(), buffer.data_ptr()))
        else:
            log.append("gradients")
        in_flight = real_pass_on(ring, sent, buffer)
        in_flight.result = logged("wait", in_flight.result)
        return in_flight

    runs, most = [], 0
    with (
        patch.object(cp_ring, "pass_on", pass_on),
        patch.object(cp_ring, "block_forward", logged("block", cp_ring.block_forward)),
        patch.object(cp_ring, "block_backward", logged("block", cp_ring.block_backward)),
    ):
        for _ in range(case.repeats):
            log.clear()
            q, k, v, dout = (case.shard(x, rank).to(device) for x in case.inputs())
            out, saved = run_to_completion(cp_group.attend(q, k, v, options, documents, sinks))
            size = num_elements(saved)
            most = max(most, len(buffers))
            buffers.clear()
            keys.clear()
            log.append("backward")
            grads, dsinks = run_to_completion(cp_group.attend_backward(dout, saved, sinks))
            runs.append([out, *grads, *([] if dsinks is None else [dsinks])])
            most = max(most, len(buffers))
            buffers.clear()
            keys.clear()
    same = all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))
    return Answer([x.cpu() for x in runs[0]], same, most, log, size)


def num_elements(saved: object) -> int:
    """The number of elements of all float tensors in nested tuples."""
    if isinstance(saved, Tensor):
        return saved.numel() if saved.is_floating_point() else 0
    return sum(map(num_elements, saved)) if isinstance(saved, tuple) else 0


class Ranks(Pool):
    """`size` processes, each with a GPU, or on CPU with gloo."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        super().__init__(size, _serve, device)

    def run(self, case: Case) -> list[Answer]:
        """The answers of all ranks of a case; fails with the traceback of the first rank that does."""
        self.send([case] * case.cp)
        return self.answers(case.cp, Answer)


def _serve(end: Connection, rank: int, size: int, kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, gpu_of(rank)) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(str(Path(folder, "store")), size)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=80)
    )
    groups = {cp: dist.new_group(list(range(cp))) for cp in range(2, size + 1, 2)}
    answer_orders(end, lambda case: run_rank(case, rank, groups[case.cp], device))
