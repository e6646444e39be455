"""Made-up profiles of a step."""

from __future__ import annotations

from collections.abc import Sequence

from pentad.orchestrator.records.profiles import StepProfile
from pentad.schedules.simulate.step_profile import INSTRUCTION, KERNEL, OPERATOR, ProfileEvent, RankProfile, pack
from pentad.schedules.simulate.timeline import Span


def events_of(spans: Sequence[Span], *, kernels: bool, shift: float = 0.0) -> list[ProfileEvent]:
    """For every compute instruction of a rank: its mark, an operator and, with `kernels`, a kernel on stream 7 for half
    of the span; on a clock that is `shift` seconds ahead."""
    found = list[ProfileEvent]()
    for span in (span for span in spans if span.lane == "compute"):
        start, length = round(1e9 * (span.start + shift)), round(1e9 * (span.end - span.start))
        where = span.name, span.op
        found.append(ProfileEvent(INSTRUCTION, span.name, *where, 1, start, length))
        found.append(ProfileEvent(OPERATOR, "aten::mm", *where, 1, start, length // 4))
        if kernels:
            found.append(ProfileEvent(KERNEL, "gemm<bf16>", *where, 7, start + length // 2, length // 2))
    return found


def profile_of_spans(step: int, spans: Sequence[Span], *, kernels: bool = True, shift: float = 0.0) -> StepProfile:
    """A profiled step of the ranks of these spans, on clocks that are `shift` seconds ahead of the spans'."""
    ranks = sorted({span.rank for span in spans})
    by_rank = {rank: [span for span in spans if span.rank == rank] for rank in ranks}
    packed = {rank: RankProfile(pack(events_of(its, kernels=kernels, shift=shift))) for rank, its in by_rank.items()}
    names, offsets = {rank: f"rank {rank} (pp{rank})" for rank in ranks}, dict.fromkeys(ranks, -shift)
    return StepProfile(step, tuple(spans), packed, names, offsets)
