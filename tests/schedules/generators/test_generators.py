# ruff: noqa: E501 - grids are wide
"""Schedules match the papers in their grids, memory and sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_sizes import programs

from pentad.schedules.catalogue import CATALOGUE, generate
from pentad.schedules.compiler import compile_program, summary
from pentad.schedules.draw.grid import order_grid, time_grid
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Key, Op, Overlap, parse
from pentad.schedules.ir.program import index_of
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.simulate.simulate import simulate

# 4 ranks, 8 microbatches, F = B = W = 1, free transfers. A cell is one unit of time, `.` is idle, and lower case is the
# second chunk or, in DualPipe, a microbatch that enters at the last rank.
GRIDS = {
    "1f1b": """
F0 F1 F2 F3  .  .  .  .  .  . B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4  . B5 W5  . B6 W6  . B7 W7
 . F0 F1 F2  .  .  .  . B0 W0 F3 B1 W1 F4 B2 W2 F5 B3 W3 F6 B4 W4 F7 B5 W5  . B6 W6  . B7 W7
 .  . F0 F1  .  . B0 W0 F2 B1 W1 F3 B2 W2 F4 B3 W3 F5 B4 W4 F6 B5 W5 F7 B6 W6  . B7 W7
 .  .  . F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3 F4 B4 W4 F5 B5 W5 F6 B6 W6 F7 B7 W7""",
    "zb-h1": """
F0 F1 F2 F3  .  .  . B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7
 . F0 F1 F2  .  . B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7
 .  . F0 F1  . B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7
 .  .  . F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7""",
    "zb-h2": """
F0 F1 F2 F3 F4 F5 F6 B0 W0 F7 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 B6 W6 B7 W7
 . F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 W0 F7 B3 W1 B4 W2 B5 W3 B6 W4 B7 W5 W6 W7
 .  . F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 W0 F7 B5 W1 B6 W2 B7 W3 W4 W5 W6 W7
 .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 W0 F7 B7 W1 W2 W3 W4 W5 W6 W7""",
    "zb-v": """
F0 F1 F2 F3 F4 F5 F6 f0 b0 w0 f1 b1 w1 f2 b2 w2 f3 b3 w3 F7 B0 W0 f4 b4 w4 B1 W1 f5 b5 w5 B2 W2 f6 b6 w6 B3 W3 f7 b7 w7 B4 W4 B5 W5 B6 W6 B7 W7
 . F0 F1 F2 F3 F4 f0 F5 f1 b0 w0 f2 b1 w1 f3 b2 w2 F6 B0 W0 f4 b3 w3 F7 B1 W1 f5 b4 w4 B2 W2 f6 b5 w5 B3 W3 f7 b6 w6 B4 b7 B5 W4 B6 W5 B7 W6 w7 W7
 .  . F0 F1 F2 f0 F3 f1 F4 f2 b0 w0 f3 b1 w1 F5 B0 W0 f4 b2 w2 F6 B1 W1 f5 b3 w3 F7 B2 W2 f6 b4 w4 B3 W3 f7 b5 w5 B4 b6 B5 b7 B6 W4 B7 W5 w6 w7 W6 W7
 .  .  . F0 f0 F1 f1 F2 f2 F3 f3 b0 w0 F4 B0 W0 f4 b1 w1 F5 B1 W1 f5 b2 w2 F6 B2 W2 f6 b3 w3 F7 B3 W3 f7 b4 w4 B4 b5 B5 b6 B6 b7 B7 W4 w5 w6 w7 W5 W6 W7""",
    "dualpipe": """
F0 F1 F2 f0 b0 w0 f1 F3 b1 w1  . f2 B0 W0 b2 w2  . f3 B1 W1 b3 w3 B2 W2 B3 W3
 . F0 f0 F1 f1 F2 b0 w0 f2 B0 W0 F3 b1 w1 f3 B1 W1 b2 w2 B2 W2  . b3 B3 w3 W3
 . f0 F0 f1 F1 f2 B0 W0 F2 b0 w0 f3 B1 W1 F3 b1 w1 B2 W2 b2 w2  . B3 b3 W3 w3
f0 f1 f2 F0 B0 W0 F1 f3 B1 W1  . F2 b0 w0 B2 W2  . F3 b1 w1 B3 W3 b2 w2 b3 w3""",
}
# makespan, longest, and the peak activations of each rank
FACTS = {
    "gpipe": (33, 33, [8, 8, 8, 8]),
    "1f1b": (33, 33, [4, 3, 2, 1]),
    "zb-h1": (27, 27, [4, 3.5, 3, 2.5]),
    "zb-h2": (27, 24, [7, 6, 5, 4]),
    "zb-v": (25.5, 24, [4, 4, 4, 4]),
    "dualpipe": (26, 26, [5, 5, 5, 5]),
}
RATES = {  # bubbles, relative to makespan and to longest
    "gpipe": (0.2727, 0.2727),
    "1f1b": (0.2727, 0.2727),
    "zb-h1": (0.1111, 0.1111),
    "zb-h2": (0.1111, 0.0),
    "zb-v": (0.0588, 0.0),
    "dualpipe": (0.0769, 0.0769),
}


@pytest.mark.parametrize("name", GRIDS)
def test_grids_match_the_papers(name: str) -> None:
    program = compile_program(name, 4, 8)
    costs = Costs.uniform(program.stages, chunks=program.chunks)
    drawn = time_grid(program, simulate(program, costs), costs)
    assert drawn.splitlines() == GRIDS[name].strip("\n").splitlines()


@pytest.mark.parametrize("name", FACTS)
def test_times_and_memory_match_the_papers(name: str) -> None:
    program = compile_program(name, 4, 8)
    facts = summary(program, Costs.uniform(program.stages, chunks=program.chunks))
    assert (facts["makespan"], facts["longest"], facts["peak_activations"]) == FACTS[name]
    assert tuple(round(facts["bubble"][kind], 4) for kind in ("makespan", "longest")) == RATES[name]
    assert (facts["name"], facts["ranks"], facts["microbatches"]) == (name, 4, 8)


@given(st.integers(1, 9), st.integers(1, 24))
def test_peak_activations_follow_the_formulas(p: int, m: int) -> None:
    """In microbatches on rank r: GPipe m; 1F1B p-r; ZB-H1 p-r, and r of which only the half for W is left; ZB-H2
    2(p-r)-1, and 2r such halves. Never more than m."""
    ranks = range(p)
    assert peak_activations(generate("gpipe", p, m)) == [m] * p
    assert peak_activations(generate("1f1b", p, m)) == [min(p - r, m) for r in ranks]
    for name, full, halves in (
        ("zb-h1", [p - r for r in ranks], ranks),
        ("zb-h2", [2 * (p - r) - 1 for r in ranks], range(0, 2 * p, 2)),
    ):
        expected = [min(w, m) + min(h, max(m - w, 0)) / 2 for w, h in zip(full, halves, strict=True)]
        assert peak_activations(generate(name, p, m)) == expected


@given(st.integers(1, 6), st.integers(0, 8))
def test_dualpipe_saves_one_microbatch_more_than_there_are_ranks(half: int, more: int) -> None:
    p = 2 * half
    assert peak_activations(generate("dualpipe", p, 2 * (p + more))) == [p + 1] * p


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CATALOGUE)
@given(data=st.data())
def test_every_microbatch_goes_once_through_every_stage_in_order(name: str, data: st.DataObject) -> None:
    """F, then B, then W (or F, then BW), each op in microbatch order per rank and stage; backwards of a microbatch's
    slices go from the last to the first."""
    program = data.draw(programs(name))
    seen = []
    for rank, stream in enumerate(program.streams):
        parts = [part for action in stream for part in action.parts]
        position = {part.key: k for k, part in enumerate(parts)}
        seen += [key for key in position if key.op is Op.F]
        assert len(position) == len(parts)
        for part in parts:
            assert part.stage in program.placement[rank]
            if part.op is Op.F:
                ops = [op for op in (Op.F, Op.BW, Op.B, Op.W) if Key(op, part.stage, part.microbatch) in position]
                assert ops in ([Op.F, Op.BW], [Op.F, Op.B, Op.W])
                places = [position[Key(op, part.stage, part.microbatch)] for op in ops]
                assert places == sorted(places)
        for stage in program.placement[rank]:
            for kinds in ((Op.F,), (Op.B, Op.BW), (Op.W, Op.BW)):
                order = [part.microbatch for part in parts if part.stage == stage and part.op in kinds]
                back = 1 if kinds == (Op.F,) else -1
                assert order == sorted(order, key=lambda piece: (piece // program.slices, back * piece))
    assert sorted(seen) == [Key(Op.F, s, piece) for s in range(program.stages) for piece in range(program.total_slices)]


@given(st.integers(1, 6), st.integers(0, 8))
def test_dualpipe_overlaps_a_forward_with_a_backward_of_the_other_direction(half: int, more: int) -> None:
    p, m = 2 * half, 4 * half + 2 * more
    program = generate("dualpipe", p, m)
    for rank, stream in enumerate(program.streams):
        pairs = [action for action in stream if isinstance(action, Overlap)]
        near = min(rank, p - 1 - rank)
        # Step 4 has two pairs a round, except that the two middle ranks lack the first; step 5 has one a round.
        assert len(pairs) == 2 * (m // 2 - p + near + 1) - (near == half - 1) + (half - near - 1)
        assert all((pair.forward.microbatch < m // 2) != (pair.backward.microbatch < m // 2) for pair in pairs)
        assert all(pair.forward.stage + pair.backward.stage == p - 1 for pair in pairs)


def test_dualpipe_sends_half_of_the_microbatches_in_at_each_end() -> None:
    program = generate("dualpipe", 4, 12)
    assert program.placement == ((0, 3), (1, 2), (2, 1), (3, 0))
    assert all(program.compute_rank[0, mb] == (0 if mb < 6 else 3) for mb in range(12))
    assert all(index_of(stream) for stream in program.streams)


# Errors name the key, the value found and what is expected.


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "key", "found", "expected"),
    [
        ("1f1b", 0, 4, "mesh.pp", "is 0", "at least 1"),
        ("gpipe", -1, 4, "mesh.pp", "is -1", "at least 1"),
        ("zb-h1", 4, 0, "microbatches", "is 0", "at least 1"),
        ("dualpipe", 3, 8, "mesh.pp", "is 3", "an even number"),
        ("dualpipe", 1, 2, "mesh.pp", "is 1", "an even number"),
        ("dualpipe", 4, 9, "microbatches", "is 9", "an even number"),
        ("dualpipe", 4, 6, "microbatches", "is 6", "at least 2 x ranks (mesh.pp) = 8"),
    ],
)
def test_invalid_sizes_are_refused(
    name: str, ranks: int, microbatches: int, key: str, found: str, expected: str
) -> None:
    with pytest.raises(PentadError) as caught:
        compile_program(name, ranks, microbatches)
    sentence = str(caught.value)
    assert sentence.endswith(f" for schedule {name}") and "\n" not in sentence
    assert sentence.index(key) < sentence.index(found) < sentence.index(expected)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("1f1", "1f1b"),
        ("zbh1", "zb-h1"),
        ("ZB-H2", "zb-h2"),
        ("dual_pipe", "dualpipe"),
        ("gpip", "gpipe"),
        ("dualpip", "dualpipe"),
    ],
)
def test_an_unknown_schedule_is_refused_naming_the_nearest(name: str, near: str) -> None:
    with pytest.raises(PentadError) as caught:
        generate(name, 4, 8)
    known = ", ".join(CATALOGUE)
    assert str(caught.value) == f"schedule.name is {name!r}: expected one of {known} (did you mean {near!r}?)"


def test_an_unknown_name_far_from_all_is_refused_with_the_list() -> None:
    with pytest.raises(PentadError, match=r"^schedule\.name is 'xyz': expected one of gpipe, 1f1b, .* dualpipev$"):
        generate("xyz", 4, 8)


# Drawings and the summary.


def test_a_grid_is_to_scale() -> None:
    program, costs = compile_program("zb-h1", 2, 2), Costs.uniform(2, 1.0, 2.0, 1.0)
    assert time_grid(program, simulate(program, costs), costs).splitlines() == [
        "F0 F1  .  . B0 -- W0 B1 -- W1",
        " . F0 B0 -- F1 B1 -- W0 W1",
    ]


def test_an_order_grid_marks_the_culprit_and_its_neighbours() -> None:
    program = compile_program("1f1b", 2, 4)
    rows = order_grid(program, (1, 8)).splitlines()
    assert [row.split(":")[0] for row in rows] == ["rank 0", "rank 1"]
    assert f">{program.streams[1][8].key}<" in rows[1].split()
    assert len(rows[1].split()) == 2 + 1 + 13  # rank, its number, ..., six before, it, six after
    assert ">" not in rows[0]


def test_the_texts_of_a_summary_parse_back() -> None:
    program = compile_program("dualpipe", 4, 8, gated=True, replicas=2)
    facts = summary(program, Costs.uniform(4))
    assert [tuple(map(parse, stream)) for stream in facts["program"]] == list(program.streams)
    assert [tuple(map(parse, stream)) for stream in facts["streams"]] == list(generate("dualpipe", 4, 8).streams)
    assert facts["placement"] == [[0, 3], [1, 2], [2, 1], [3, 0]]
    assert facts["hash"] == program.hash
