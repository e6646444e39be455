"""The critical path of a step, from its times: it adds up to the step, and shows a pause where there was one."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise

import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.diagnosis.step_path import Piece, step_paths
from pentad.schedules.diagnosis.step_view import HOST
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.critical_path import critical_path
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Span, Timeline
from pentad.schedules.spec.mesh import Mesh, to_mesh_ranks
from pentad.schedules.spec.schedule_spec import MemoryOptions

compiled = cache(compile_program)
ZERO3 = MemoryOptions(zero=3, max_gathered=None, reduce="microbatch")
OFFLOAD = MemoryOptions(offload=frozenset({0}))
CASES = [
    ("1f1b", {}, MemoryOptions()),
    ("zb-h2", {"dp": 2}, MemoryOptions()),
    ("zb-v", {"dp": 2, "tp": 2}, ZERO3),
    ("dualpipe", {"dp": 2}, MemoryOptions()),
    ("interleaved", {}, OFFLOAD),
    ("seq-1f1b", {"cp": 2}, MemoryOptions()),
]
cases = pytest.mark.parametrize(("name", "axes", "memory"), CASES, ids=[case[0] for case in CASES])


def step_of(
    name: str, axes: dict[str, int], memory: MemoryOptions, *, post_validation: bool = False
) -> tuple[Program, Mesh, Costs, Timeline]:
    mesh = Mesh(pp=4, **axes)
    program = compiled(name, 4, 8, replicas=mesh.size // 4, memory_options=memory, post_validation=post_validation)
    costs = Costs.uniform(program.stages, 1e-3, 1.3e-3, 0.7e-3, chunks=program.chunks, transfer=7e-5)
    return program, mesh, costs, to_mesh_ranks(simulate(program, costs), mesh)


def paused(timeline: Timeline, moment: float, length: float) -> Timeline:
    """The timeline on another clock, with a pause of `length` at `moment`: nothing starts during it, and what is
    running takes that much longer."""
    before, after = moment - 1e-12, moment + 1e-12
    spans = (
        span._replace(
            start=1e5 + span.start + length * (span.start > before),
            end=1e5 + span.end + length * (span.end > after or span.start > before),
        )
        for span in timeline.spans
    )
    return Timeline("measured", tuple(spans))


def jittered(timeline: Timeline, seed: int) -> Timeline:
    """Every span is longer by a random time; spans that move data are also shifted by one, earlier or later."""
    drawn = random.Random(seed)
    spans = list[Span]()
    for span in timeline.spans:
        by = 0.0 if span.lane == "compute" else drawn.uniform(-4e-5, 4e-5)
        spans.append(span._replace(start=span.start + by, end=span.end + by + drawn.uniform(0, 5e-5)))
    return Timeline("measured", tuple(spans))


def found(program: Program, mesh: Mesh, timeline: Timeline) -> tuple[Piece, ...]:
    (path,) = step_paths(program, mesh, timeline).values()
    return path


@cases
@pytest.mark.parametrize("seed", [1, 2])
def test_the_pieces_follow_each_other_from_the_first_start_to_the_last_end(
    name: str, axes: dict[str, int], memory: MemoryOptions, seed: int
) -> None:
    program, mesh, _, timeline = step_of(name, axes, memory)
    timeline = jittered(timeline, seed)
    path = found(program, mesh, timeline)
    zero, last = min(span.start for span in timeline.spans), max(timeline.spans, key=lambda span: span.end)
    assert path[0].start == 0 and path[-1].end == round((last.end - zero) * 1e9)
    assert all(before.end == after.start and after.end >= after.start for before, after in pairwise(path))
    ends = {(span.rank, span.name): round((span.end - zero) * 1e9) for span in timeline.spans}
    for piece in path:
        pp = mesh.coordinates(piece.rank).pp
        parts = program.streams[pp][program.positions[pp][piece.key]].parts
        assert piece.end <= max(ends[piece.rank, str(part.key)] for part in parts)
    assert path[-1].end == ends[path[-1].rank, str(path[-1].key)]


@cases
def test_a_simulated_step_has_the_critical_path_of_its_costs(
    name: str, axes: dict[str, int], memory: MemoryOptions
) -> None:
    """It is as long, and has no moment at which nothing ran."""
    program, mesh, costs, timeline = step_of(name, axes, memory)
    path = found(program, mesh, timeline)
    assert sum(piece.end - piece.start for piece in path if piece.kind == HOST) <= len(path)
    expected = critical_path(program, costs)[-1].end
    assert path[-1].end / 1e9 == pytest.approx(expected, abs=2e-9)


@pytest.mark.parametrize("name", ["zb-h2", "1f1b"])
def test_post_validation_leads_back_along_the_chain_of_norms(name: str) -> None:
    program, mesh, costs, timeline = step_of(name, {}, MemoryOptions(), post_validation=True)
    path = found(program, mesh, timeline)
    assert path[-1].end / 1e9 == pytest.approx(critical_path(program, costs)[-1].end, abs=2e-9)


@cases
def test_a_pause_between_instructions_is_a_piece_of_the_host(
    name: str, axes: dict[str, int], memory: MemoryOptions
) -> None:
    """A pause between two instructions of the path lengthens the step by its own length, and no other piece of the
    path."""
    program, mesh, _, timeline = step_of(name, axes, memory)
    path = found(program, mesh, timeline)
    at = next(piece for piece in path[len(path) // 2 :] if piece.kind == "compute")
    moment = next(s.start for s in timeline.spans if (s.rank, s.name) == (at.rank, str(at.key)))
    late = found(program, mesh, paused(timeline, moment, 0.5))
    assert late[-1].end == pytest.approx(path[-1].end + 0.5e9, abs=20)
    host = sum(piece.end - piece.start for piece in late if piece.kind == HOST)
    assert host == pytest.approx(0.5e9, abs=20 * len(late))


def test_a_step_of_another_program_or_order_has_no_path() -> None:
    program, mesh, costs, timeline = step_of("1f1b", {"dp": 2}, MemoryOptions())
    assert step_paths(compiled("1f1b", 4, 6, replicas=2), mesh, timeline) == {}  # as in a batch ramp
    assert step_paths(compiled("gpipe", 4, 8, replicas=2), mesh, timeline) == {}  # the same instructions
    assert step_paths(program, mesh, Timeline("measured", timeline.spans[1:])) == {}
    other = to_mesh_ranks(simulate(compiled("1f1b", 4, 10, replicas=2), costs), mesh)
    assert step_paths(program, mesh, other) == {}
