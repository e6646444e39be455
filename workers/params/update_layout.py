"""Which elements of a shard the optimizer updates alike, and where their state is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pentad.schedules.spec.optimizer import OptimizerSpec, UpdateRule
from pentad.schedules.spec.zero_layout import ZeroLayout
from pentad.workers.params.local_tensor import LocalTensor, local_matrices


class TensorPart(NamedTuple):
    """Elements `span` of a local tensor, which a shard holds at `where`.

    With AdamW, their second moments are at `place` among those of the shard, where Muon's elements have none; with
    Muon, their directions are at `place` among those of the shard, where only Muon's elements have any.
    """

    local: LocalTensor
    where: slice
    span: slice
    rule: UpdateRule
    place: slice


class Run(NamedTuple):
    """Consecutive elements of a shard that are updated alike; `place` is as in TensorPart. Muon multiplies the learning
    rate by `adjustment`."""

    where: slice
    rule: UpdateRule
    adjustment: float
    place: slice


class UpdateLayout(NamedTuple):
    """`rules` are those of the local tensors; `parts` and `runs` are in the order of the shard, of whose elements
    `num_adamw` (including padding) and `num_muon` use these methods."""

    rules: tuple[UpdateRule, ...]
    parts: tuple[TensorPart, ...]
    runs: tuple[Run, ...]
    num_adamw: int
    num_muon: int


def update_layout(spec: OptimizerSpec, local_tensors: Sequence[LocalTensor], layout: ZeroLayout) -> UpdateLayout:
    parts, runs, used = [], list[Run](), {"adamw": 0, "muon": 0}

    def place_of(rule: UpdateRule, size: int) -> slice:
        used[rule.method] += size
        return slice(used[rule.method] - size, used[rule.method])

    found: list[tuple[slice, tuple[slice, LocalTensor] | None]] = [(index, None) for index in layout.padding()]
    for local, start, end in spans(local_tensors):
        found += [(index, (span, local)) for index, span in layout.overlap(start, end)]
    last = UpdateRule("adamw", 1.0, 0.0)
    for index, of in sorted(found, key=lambda each: each[0].start):
        size = index.stop - index.start
        if of is None:
            rule = last._replace(method="adamw")  # keeps the padding zero
            runs.append(Run(index, rule, 1.0, place_of(rule, size)))
            continue
        span, local = of
        last = spec.rule_of(local.tensor)
        parts.append(TensorPart(local, index, span, last, place_of(last, size)))
        runs += _runs(spec, parts[-1])
    rules = tuple(spec.rule_of(local.tensor) for local in local_tensors)
    return UpdateLayout(rules, tuple(parts), tuple(_merged(runs, layout.compute_part)), used["adamw"], used["muon"])


def spans(local_tensors: Sequence[LocalTensor]) -> Iterator[tuple[LocalTensor, int, int]]:
    """The local tensors, each with its start and end among all parameters of the stage."""
    start = 0
    for local in local_tensors:
        yield local, start, start + local.size
        start += local.size


def _runs(spec: OptimizerSpec, part: TensorPart) -> Iterator[Run]:
    """The runs of one part: matrices fused into one tensor can have different adjustments."""
    at, span, place = part.where, part.span, part.place
    if part.rule.method == "adamw":
        yield Run(part.where, part.rule, 1.0, place)
        return
    for matrix in local_matrices(part.local):
        first, last = max(matrix.start, span.start) - span.start, min(matrix.end, span.stop) - span.start
        if first < last:
            index = slice(at.start + first, at.start + last)
            adjustment = spec.adjustment(matrix.rows, matrix.columns)
            yield Run(index, part.rule, adjustment, slice(place.start + first, place.start + last))


def _merged(runs: Sequence[Run], border: int) -> Iterator[Run]:
    """Joins neighbours that are updated alike into one run, but not across the border between what is gathered in the
    compute dtype and in 8 bits."""
    if not runs:
        return
    current = runs[0]
    for run in runs[1:]:
        alike = (current.rule, current.adjustment) == (run.rule, run.adjustment)
        if alike and current.where.stop == run.where.start != border:
            where, place = slice(current.where.start, run.where.stop), slice(current.place.start, run.place.stop)
            current = current._replace(where=where, place=place)
        else:
            yield current
            current = run
    yield current
