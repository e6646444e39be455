"""Loads the tokens that one rank needs for a step, ahead of time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from pentad.kernels.backend import IGNORE_INDEX
from pentad.schedules.ir.program import Program
from pentad.schedules.search.batch_planner import balanced
from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.cp_layout import positions
from pentad.schedules.spec.plan import Plan
from pentad.workers.data.samples import Dataset, MapRows, Sample, digest_of
from pentad.workers.data.shares import HostShare, read_shares, step_groups
from pentad.workers.model.layer_context import local_positions
from pentad.workers.parallel.context_share import ContextShare

T = TypeVar("T")
MOST_AHEAD = 16  # steps
POLL_SECONDS = 0.05
READERS = 8  # threads, so that all reads of a step, from disk or network, are requested at once
AHEAD_BYTES = 2**26


class Tokens(NamedTuple):
    """One slice of a microbatch, its rows concatenated: T = rows x positions of this (context) rank in the slice.

    All tensors are int64 on the device; a target of -100 has no loss. `document_starts` are, by row, the positions in
    the full sequence at which a document starts, beginning with 0; empty without document masks. `mtp_inputs` are the
    next tokens without any masking; None if only targets past the end are masked, because `targets` and `mtp_targets`
    then hold the same tokens. The `positions` in the full sequence are None if they are the same for all sequences on
    this rank. With data-aware groups, the tokens are those of a `share`.
    """

    inputs: torch.Tensor  # [T]
    targets: torch.Tensor  # [T]
    mtp_targets: torch.Tensor  # [mtp_layers, T]: the 1st, 2nd, ... token after the target; see `mtp_targets` below
    mtp_inputs: torch.Tensor | None  # [mtp_layers, T]: the 1st, 2nd, ... token after the input
    document_starts: tuple[tuple[int, ...], ...]
    positions: torch.Tensor | None = None  # [T]
    share: ContextShare | None = None


class Batch(NamedTuple):
    """A rank's part of a step, which runs the plan's program number `program`: its tokens by slice (slice s of
    microbatch m has the key m * slices + s). The microbatches in `empty` are skipped, because the pipeline has no
    documents in them.

    A rank that computes losses knows how many target tokens the global batch has; the others have 0. `counts`
    [sources + 1], float64 on the device, are these target tokens by source of the data, followed by the digest of the
    rows whose losses this rank counts; every row is counted by one rank. `row_sources` and `rows_by_slot` (see the
    function), both [batch size], are on the host.
    """

    tokens: dict[int, Tokens]
    target_tokens: int
    counts: torch.Tensor
    row_sources: np.ndarray
    rows_by_slot: np.ndarray
    program: int
    empty: frozenset[int] = frozenset()


class HostBatch(NamedTuple):
    """What a loader thread prepares: `tokens` [microbatches, slices, kinds, T] int64, pinned for a GPU, where kinds are
    the fields of Tokens in order; `counts` [sources + 1] float64, also pinned; document starts by microbatch; the
    source of every row; `rows_by_slot` (see the function); and the number of the program. With data-aware groups,
    `tokens` [KINDS, all T] concatenates the tokens of `shares`, one share for each of the first microbatches; in later
    microbatches no rank has a document."""

    tokens: torch.Tensor
    counts: torch.Tensor
    document_starts: list[tuple[tuple[int, ...], ...]]
    row_sources: np.ndarray
    rows_by_slot: np.ndarray
    program: int = 0
    shares: tuple[HostShare, ...] = ()


class LocalPart(NamedTuple):
    """The microbatches of its replica that a rank reads, their slots in the global batch, the slots whose losses it
    counts, and the microbatches whose losses it computes as the first of its tp ranks."""

    microbatches: list[int]
    slots: list[int]
    counted_slots: set[int]
    counted: set[int]


class BatchLoader:
    """Loads one rank's part of any step; its content depends only on seed, step and row.

    When steps are requested in ascending order, the next ones are prepared in the background.
    """

    def __init__(self, plan: Plan, rank: int, dataset: Dataset, device: torch.device) -> None:
        self.plan, self.rank, self.dataset, self.device = plan, rank, dataset, device
        self.slices, self.positions = plan.program.slices, local_positions(plan, rank).numpy()
        self.parts = [local_part(plan, rank, program) for program in plan.programs]
        self.no_counts = torch.zeros(len(dataset.sources) + 1, dtype=torch.float64, device=device)
        # The tokens of the step loaded last, by shape: captured CUDA graphs read them at fixed addresses.
        self.on_device = dict[torch.Size, torch.Tensor]()
        self.has_losses = plan.program.stages - 1 in plan.stages_of(rank)
        self.pool = ThreadPoolExecutor(READERS, thread_name_prefix="pentad-read")
        self.prefetcher = Prefetcher(self._load, lambda batch: 8 * batch.tokens.numel(), AHEAD_BYTES)

    def __call__(self, step: int, check: Callable[[], None] = lambda: None) -> Batch:
        """Waits for the data of a step, calling `check` meanwhile. Raises PentadError for damaged data."""
        number = self.plan.program_of(step)
        if not self.parts[number].microbatches:
            assert self.plan.batch.document_costs is None, "with document masks, every stage reads microbatches"
            row_sources, _ = self.dataset.rows(step)
            return Batch({}, 0, self.no_counts, row_sources, np.arange(len(row_sources)), number)
        host = self.prefetcher.get(step, check)
        counts, target_tokens = host.counts.to(self.device, non_blocking=True), int(host.counts[:-1].sum())
        part = self.parts[host.program]
        rows = host.row_sources, host.rows_by_slot
        found = Batch(self._on_device(host, part), target_tokens, counts, *rows, host.program)
        return found._replace(empty=frozenset(part.microbatches) - found.tokens.keys()) if host.shares else found

    def load(self, read: Callable[[int], Sample]) -> dict[int, Tokens]:
        """Tokens by slice, as for a step, where `read` returns the sample in a slot of a full global batch."""
        part = self.parts[0]
        return self._on_device(self._prepared([read(slot) for slot in part.slots]), part) if part.microbatches else {}

    def _on_device(self, host: HostBatch, part: LocalPart) -> dict[int, Tokens]:
        if host.shares:
            return _shares_on_device(host, self.device)
        shape = host.tokens.shape
        if shape not in self.on_device:
            self.on_device[shape] = torch.empty_like(host.tokens, device=self.device)
        tokens = self.on_device[shape].copy_(host.tokens, non_blocking=True)
        return {
            mb * self.slices + number: self._tokens(each, its)
            for mb, of_mb, its in zip(part.microbatches, tokens, host.document_starts, strict=True)
            for number, each in enumerate(of_mb)
        }

    def _tokens(self, kinds: torch.Tensor, starts: tuple[tuple[int, ...], ...]) -> Tokens:
        """Tokens from an array of [kinds, T]."""
        mtp, positions = 2 + self.plan.model.mtp_layers, None
        if self.plan.shares_documents:
            kinds, positions = kinds[:-1], kinds[-1]
        return Tokens(kinds[0], kinds[1], kinds[2:mtp], kinds[mtp:] if len(kinds) > mtp else None, starts, positions)

    def close(self) -> None:
        """Ends the background work."""
        self.prefetcher.close()
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, step: int) -> HostBatch:
        """Reads this rank's part of a step; all its reads are requested at once."""
        dataset, number = self.dataset, self.plan.program_of(step)
        counts = dataset.target_counts(step, self.pool.map) if self.has_losses else np.zeros(len(dataset.sources))
        if self.plan.batch.capacity:
            return self._load_shares(step, counts)
        part = self.parts[number]
        row_sources, row_indices = dataset.rows(step)
        sources, indices = row_sources.tolist(), row_indices.tolist()
        by_slot = rows_by_slot(dataset, self.plan.batch, step, self.pool.map)
        rows = by_slot[part.slots].tolist()
        samples = list(self.pool.map(lambda row: dataset.sample(sources[row], indices[row]), rows))
        read = zip(part.slots, rows, samples, strict=True)
        counted = {row: each for slot, row, each in read if slot in part.counted_slots}
        found = self._prepared(samples, np.append(counts, digest_of(step, counted)))
        return found._replace(row_sources=row_sources, rows_by_slot=by_slot, program=number)

    def _load_shares(self, step: int, counts: np.ndarray) -> HostBatch:
        plan, dataset = self.plan, self.dataset
        groups = step_groups(dataset, plan.batch, plan.mesh, step, self.pool.map)
        number = plan.program_of(step, len(groups.shares))
        given = plan, self.rank, dataset, step, groups, self.parts[number].counted
        shares, digest = read_shares(*given, self.pool.map)
        found = HostBatch(
            # Fancy indexing of columns leaves numpy arrays in column order.
            torch.from_numpy(np.ascontiguousarray(np.concatenate([share.tokens for share in shares], axis=1))),
            torch.from_numpy(np.append(counts, digest).astype(np.float64)),
            [],
            dataset.rows(step)[0],
            np.arange(plan.batch.sizes.size(step)),
            number,
            tuple(shares),
        )
        return self._pinned(found)

    def _prepared(self, samples: list[Sample], counts: np.ndarray | None = None) -> HostBatch:
        """The batch from the samples of this rank's slots."""
        size, is_masked = self.plan.batch.micro_batch_size, self.plan.data.document_mask
        kinds = np.array([self._kinds(sample)[:, self._positions(sample)] for sample in samples])
        # [microbatches, rows, kinds, positions] -> [microbatches, slices, kinds, T]
        local = torch.from_numpy(kinds).unflatten(0, (-1, size)).unflatten(3, (self.slices, -1))
        starts = [sample.document_starts for sample in samples]
        found = HostBatch(
            local.permute(0, 3, 2, 1, 4).flatten(3).contiguous(),
            torch.from_numpy(np.zeros(0) if counts is None else counts.astype(np.float64)),
            [tuple(starts[at : at + size]) if is_masked else () for at in range(0, len(starts), size)],
            np.empty(0, np.int64),
            np.empty(0, np.int64),
        )
        return self._pinned(found)

    def _pinned(self, found: HostBatch) -> HostBatch:
        if self.device.type != "cuda":
            return found
        torch.cuda.set_device(self.device)  # set per thread
        return found._replace(tokens=found.tokens.pin_memory(), counts=found.counts.pin_memory())

    def _positions(self, sample: Sample) -> np.ndarray:
        """The positions of a sequence that this rank holds."""
        plan = self.plan
        if not plan.shares_documents:
            return self.positions
        sizes = plan.batch.sequence_length, plan.mesh.cp, plan.mesh.coordinates(self.rank).cp
        return positions(*sizes, "zigzag", sample.document_starts)

    def _kinds(self, sample: Sample) -> np.ndarray:
        """[kinds, S]: the arrays of a sample for the fields of Tokens."""
        mtp_layers, following = self.plan.model.mtp_layers, sample.following
        targets = np.where(sample.is_target, following, IGNORE_INDEX)
        is_masked = self.plan.data.document_mask
        kinds = [sample.inputs, targets, *mtp_targets(sample, mtp_layers, separate=is_masked)]
        if mtp_layers and (is_masked or not self.dataset.all_count):
            kinds += [_shifted(following, k, 0) for k in range(mtp_layers)]
        if self.plan.shares_documents:
            kinds.append(np.arange(len(targets)))
        return np.stack(kinds)


def local_part(plan: Plan, rank: int, program: Program) -> LocalPart:
    """What a rank reads for a program. The first stage embeds tokens and the last one computes the loss; with document
    masks every stage needs the document starts."""
    at, last, size = plan.mesh.coordinates(rank), program.stages - 1, plan.batch.micro_batch_size
    stages = range(program.stages) if plan.data.document_mask else (0, last)
    own = [(stage, piece // program.slices) for (stage, piece), pp in program.compute_rank.items() if pp == at.pp]
    local = {mb for stage, mb in own if stage in stages}
    counted = {mb for stage, mb in own if stage == last and at.tp == 0}
    first = (at.dp * plan.mesh.ep + at.ep) * program.microbatches  # the replica's first in the global batch
    slots = {mb: range((first + mb) * size, (first + mb + 1) * size) for mb in sorted(local)}
    counted_slots = {*chain(*(slots[mb] for mb in counted))} if at.cp == 0 else set()
    return LocalPart(sorted(local), [*chain(*slots.values())], counted_slots, counted)


def rows_by_slot(dataset: Dataset, batch: BatchSpec, step: int, map_rows: MapRows = map) -> np.ndarray:
    """[batch size] int64: the row of a step's global batch in every slot. Slots are ordered by replica, microbatch and
    sequence. `map_rows` may read rows in parallel."""
    size = batch.sizes.size(step)
    if batch.document_costs is None:
        return np.arange(size)
    work = batch.document_costs.rows(dataset.document_lengths(step, map_rows), batch.sequence_length)
    return balanced(work, batch.micro_batch_size, batch.replicas).order


def _shares_on_device(host: HostBatch, device: torch.device) -> dict[int, Tokens]:
    """The tokens by microbatch, for those in which the rank has any."""
    sizes = [share.tokens.shape[1] for share in host.shares]
    parts = host.tokens.to(device, non_blocking=True).split(sizes, 1)
    none = host.tokens.new_empty(0, 0)
    return {
        mb: Tokens(tokens[0], tokens[1], none, None, (), None, ContextShare(*share[:3], tokens[2], tokens[3]))
        for mb, (share, tokens) in enumerate(zip(host.shares, parts, strict=True))
        if tokens.shape[1]
    }


def mtp_targets(sample: Sample, layers: int, *, separate: bool) -> list[np.ndarray]:
    """The 1st, 2nd, ... token after each target [S], -100 where it does not count or is past the end of the sequence;
    with `separate` documents also where it is past the end of the target's document."""
    targets = np.where(sample.is_target, sample.following, IGNORE_INDEX)
    found = [_shifted(targets, k, IGNORE_INDEX) for k in range(1, layers + 1)]
    for k, each in enumerate(found, 1) if separate else ():
        last = np.subtract.outer(sample.document_starts[1:], np.arange(1, k + 1))  # the last k positions of documents
        each[last[last >= 0].astype(np.int64)] = IGNORE_INDEX
    return found


def _shifted(tokens: np.ndarray, by: int, fill: int) -> np.ndarray:
    """`tokens` [S] shifted left by `by`, with `fill` at the end."""
    return np.concatenate([tokens[by:], np.full(by, fill)])


class Prefetcher(Generic[T]):
    """Calls `load(step)` for ascending steps, ahead of `get`, while all that is ready takes at most `limit` bytes (by
    `size`), but for at least one step. It never loads further ahead than `get` has advanced, so that a run of few steps
    does not load many.

    After a jump to another step, that step is loaded next: what `get` returns never depends on what was ready.
    """

    def __init__(self, load: Callable[[int], T], size: Callable[[T], int], limit: int) -> None:
        self.load: Callable[[int], T] | None = load  # None: closed
        self.size, self.limit = size, limit
        self.changed = threading.Condition()
        self.ready: dict[int, T | BaseException] = {}
        self.first, self.requested, self.next_step, self.loading = 0, 0, 0, -1
        self.thread: threading.Thread | None = None

    def get(self, step: int, check: Callable[[], None]) -> T:
        """Waits for a step, calling `check` meanwhile. Raises what `load` raised for it."""
        with self.changed:
            self.requested, self.ready = step, {ahead: each for ahead, each in self.ready.items() if ahead >= step}
            if step not in self.ready and step != self.loading:
                self.ready.clear()
                self.first = self.first if step == self.next_step else step
                self.next_step = step
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="pentad-data", daemon=True)
                self.thread.start()
            while step not in self.ready:
                self.changed.notify_all()
                check()
                self.changed.wait(POLL_SECONDS)
            found = self.ready.pop(step)
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """Drops what is ready, and `load`, which may hold open files and refer back to this object."""
        with self.changed:
            self.load = None
            self.ready.clear()
            self.changed.notify_all()

    def _run(self) -> None:
        while True:
            with self.changed:
                while (load := self.load) is not None and not self._has_room():
                    self.changed.wait(POLL_SECONDS)  # polls: not to compete with the host at the start of a step
                if load is None:
                    return
                step = self.loading = self.next_step
                self.next_step = step + 1
            found: T | BaseException
            try:
                found = load(step)
            except BaseException as error:  # raised by `get`
                found = error
            with self.changed:
                self.loading = -1
                if step >= self.requested and step + 1 == self.next_step:  # otherwise a jump has made it obsolete
                    self.ready[step] = found
                # Only the consumer may free it: freeing pinned memory in this thread while another thread captures a
                # CUDA graph would end the capture.
                del found
                self.changed.notify_all()

    def _has_room(self) -> bool:
        values = list(self.ready.values())
        most = min(MOST_AHEAD, 1 + self.requested - self.first)
        if any(isinstance(each, BaseException) for each in values) or len(values) >= most:
            return False
        sizes = [self.size(each) for each in values if not isinstance(each, BaseException)]
        return not sizes or sum(sizes) + max(sizes) <= self.limit
