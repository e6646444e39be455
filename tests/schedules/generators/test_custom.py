"""Schedules from a user's file: what is right becomes a program, what is wrong is told with its place."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from paths import ROOT

from pentad.schedules.catalogue import generate
from pentad.schedules.generators.custom import BW, MOST_STAGES, B, F, W, program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Instruction, Op, Overlap
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.optimizer_pass import add_reduce, add_step
from pentad.schedules.passes.transfers import add_transfers
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import ScheduleError
from pentad.schedules.spec.schedule_spec import ScheduleSpec
from pentad.schedules.verify.check import check

Write = Callable[[str], str]  # the code of a file -> the text that names its `plan`
SMALL = ScheduleSpec(2, 4)
HEAD = "from pentad.schedules.generators.custom import BW, B, F, W\n"
PLAN = "def plan(rank, ranks, microbatches):\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(code: str) -> str:
        (tmp_path / "my.py").write_text(HEAD + textwrap.dedent(code))
        return f"{tmp_path}/my.py:plan"

    return written


def plan(*lines: str) -> str:
    return PLAN + "".join(f"    {line}\n" for line in lines)


def told(text: str, shape: ScheduleSpec = SMALL) -> str:
    with pytest.raises(PentadError) as error:
        program(text, shape)
    said = str(error.value)
    assert said.startswith(f"schedule {text}: ") and "\n" not in said and len(said) < 600
    return said


def compiled(order: Program, replicas: int = 1) -> Program:
    moved = add_transfers(order, Costs.uniform(order.stages), gated=False)
    made = add_step(add_reduce(moved, replicas=replicas))
    check(made, replicas=replicas)
    return made


GPIPE = """
def plan(rank, ranks, microbatches):
    yield from [F(rank, mb) for mb in range(microbatches)]
    yield from [BW(rank, mb) for mb in range(microbatches)]
"""
LOOPED = """
def plan(rank, ranks, microbatches, chunks):
    stages = range(rank, ranks * chunks, ranks)
    for stage in stages:
        for mb in range(microbatches):
            yield F(stage, mb)
    for stage in reversed(stages):
        for mb in range(microbatches):
            yield B(stage, mb)
            yield W(stage, mb)
"""


def test_the_constructors_are_the_four_compute_instructions() -> None:
    assert [F(2, 0), B(2, 0), W(2, 0), BW(2, 0)] == [Instruction(op, 2, 0) for op in (Op.F, Op.B, Op.W, Op.BW)]


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 4), (4, 8)])
def test_an_own_gpipe_is_the_catalogue_s(write: Write, ranks: int, microbatches: int) -> None:
    made = program(write(GPIPE), ScheduleSpec(ranks, microbatches))
    assert made.hash == generate("gpipe", ranks, microbatches).hash
    compiled(made)


def test_the_catalogue_s_generators_are_own_schedules(tmp_path: Path) -> None:
    file = ROOT / "schedules" / "generators" / "zero_bubble.py"
    assert program(f"{file}:zb_h2", ScheduleSpec(4, 8)).hash == generate("zb-h2", 4, 8).hash


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_chunks_reach_a_function_that_has_the_parameter(write: Write, chunks: int) -> None:
    made = program(write(LOOPED), ScheduleSpec(2, 4, chunks))
    assert (made.chunks, made.stages) == (chunks, 2 * chunks)
    assert made.placement == tuple(tuple(range(rank, 2 * chunks, 2)) for rank in range(2))
    compiled(made)


def test_chunks_that_the_stages_do_not_make_are_refused(write: Write) -> None:
    assert "chunks is 2" in told(write(GPIPE), ScheduleSpec(2, 4, 2))


def test_text_is_an_instruction_too(write: Write) -> None:
    made = program(write(plan("yield '0F0'", "yield F(0, 1)", "yield '0B0'", "yield '(0F2+0BW1)'")), ScheduleSpec(1, 3))
    assert made.streams[0] == (F(0, 0), F(0, 1), B(0, 0), Overlap(F(0, 2), BW(0, 1)))


def test_numpy_s_numbers_are_whole_numbers(write: Write) -> None:
    made = program(
        write("import numpy\n" + plan("yield from (F(numpy.int64(rank), mb) for mb in numpy.arange(2))")),
        ScheduleSpec(1, 2),
    )
    assert all(type(number) is int for unit in made.streams[0] for part in unit.parts for number in part[1:3])


def test_a_list_is_as_good_as_a_generator(write: Write) -> None:
    made = program(write(plan("return [F(rank, 0), BW(rank, 0)]")), ScheduleSpec(2, 1))
    assert made.streams[1] == (F(1, 0), BW(1, 0))


def test_stages_on_two_ranks_make_one_chunk(write: Write) -> None:
    """Half of the microbatches enter at each end, as in DualPipe."""
    lines = ["for mb, stage in ((0, rank), (1, ranks - 1 - rank)):", "    yield F(stage, mb)"]
    lines += ["for mb, stage in ((0, rank), (1, ranks - 1 - rank)):", "    yield BW(stage, mb)"]
    made = program(write(plan(*lines)), ScheduleSpec(2, 2))
    assert (made.placement, made.chunks) == (((0, 1), (1, 0)), 1)
    compiled(made)


WRONG = {
    "a number": ("plan = 3\n", ["plan is 3", "expected a function"]),
    "a parameter too few": ("def plan(rank, ranks): ...\n", ["(rank, ranks)", "(rank, ranks, microbatches)"]),
    "other names": ("def plan(r, p, m): ...\n", ["(r, p, m)", "chunks"]),
    "a parameter too many": ("def plan(rank, ranks, microbatches, group): ...\n", ["microbatches, group)"]),
    "by position": ("def plan(rank, ranks, microbatches, /): ...\n", ["its parameters are"]),
    "no parameters to tell": ("plan = type\n", ["parameters"]),
    "no yield": (plan("return None"), ["rank 0 returns None", "yield"]),
    "nothing": (plan("yield from ()"), ["rank 0 yields nothing"]),
    "nothing on one rank": (plan("if rank == 0:", "    yield F(0, 0)"), ["rank 1 yields nothing"]),
    "raises": (
        plan("yield F(rank, 0)", "yield F(rank, 1 // (1 - rank))"),
        ["rank 1 at position 1 raises ZeroDivisionError in line 4", "division"],
    ),
    "raises at once": (
        "def plan(rank, ranks, microbatches):\n    return [][rank]\n",
        ["position 0 raises IndexError in line 3"],
    ),
    "exits": (plan("yield F(rank, 0)", "raise SystemExit"), ["rank 0 at position 1 raises SystemExit in line 4"]),
    "stops": (plan("yield F(rank, 0)", "next(iter(()))"), ["raises StopIteration in line 4"]),
    "a float": (plan("yield 3.5"), ["rank 0 at position 0 yields 3.5", "F(stage, microbatch)"]),
    "nonsense as text": (plan("yield F(rank, 0)", "yield '2X0'"), ["rank 0 at position 1 yields '2X0'", "2F0"]),
    "None": (plan("yield F(rank, 0)", "yield None"), ["position 1 yields None"]),
    "a pair of nothing": (
        "from pentad.schedules.ir.instruction import Overlap\n" + plan("yield Overlap(1, 2)"),
        ["Overlap"],
    ),
    "something that cannot be shown": (
        "class Bad:\n    def __repr__(self): raise ValueError\n" + plan("yield Bad()"),
        ["position 0 yields <Bad instance"],
    ),
    "a transfer": (plan("yield '0SEND_F0>1'"), ["position 0 yields '0SEND_F0>1'", "F(stage, microbatch)", "compiler"]),
    "what is lowered": (plan("yield F(rank, 0)._replace(peer=1)"), ["position 0 yields", "compiler"]),
    "a stage that is no number": (plan("yield F('0', 0)"), ["yields F('0', 0)", "whole numbers"]),
    "half a stage": (plan("yield F(rank / 2, 0)"), ["yields F(0.0, 0)", "whole numbers"]),
    "a stage below 0": (plan("yield F(rank - 1, 0)"), ["yields F(-1, 0)", "at least 0"]),
    "a stage that is left out": (
        plan("yield F(0, 0)", "yield F(2 * rank, 0)"),
        ["rank 1 at position 1 runs stage 2, but nothing runs stage 1"],
    ),
    "no end": (
        plan("while True:", "    yield F(rank, 0)"),
        ["rank 0 yields more than 128 instructions", "1 stage,", "end"],
    ),
    "no end of microbatches": (
        "import itertools\n" + plan("yield from (F(rank, mb) for mb in itertools.count())"),
        ["more than 128 instructions for 4 microbatches"],
    ),
    "no end of stages": (
        "import itertools\n" + plan("yield from (F(stage, 0) for stage in itertools.count())"),
        [f"rank 0 yields more than {MOST_STAGES} stages"],
    ),
}


@pytest.mark.parametrize(("code", "words"), WRONG.values(), ids=WRONG)
def test_a_function_that_is_wrong_is_told_with_its_place(write: Write, code: str, words: list[str]) -> None:
    said = told(write(code))
    for word in words:
        assert word in said


REFUSED = {
    "backward before forward": (["yield BW(rank, 0)", "yield F(rank, 0)"], "0BW0 waits for 0F0"),
    "a circle": (
        ["yield from [F(0, 0), BW(0, 0), F(0, 1), BW(0, 1)] if rank == 0 else '1F1 1F0 1BW0 1BW1'.split()"],
        "0BW0 waits for 1BW0",
    ),
    "no backward": (["yield F(rank, 0)", "yield F(rank, 1)", "yield BW(rank, 0)"], "found 0F1"),
    "no weight gradient": (["yield from [F(rank, 0), B(rank, 0), F(rank, 1), BW(rank, 1)]"], "found 0F0, 0B0"),
    "twice": (["yield from [F(rank, 0), F(rank, 1), BW(rank, 0), BW(rank, 1), F(rank, 0)]"], "runs 0F0 twice"),
    "weights out of order": (
        ["yield from [F(rank, 0), F(rank, 1), BW(rank, 1), BW(rank, 0)]"],
        "0BW0 comes after 0BW1",
    ),
    "too many microbatches": (["yield from [F(rank, mb) for mb in range(3)]"], "runs 0F2, but there are 2"),
    "a pair of forwards": (["yield '(0F0+0F1)'", "yield BW(0, 0)", "yield BW(0, 1)"], "no pair of a forward"),
}


@pytest.mark.parametrize(("lines", "words"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_order_is_refused_and_its_culprit_named(write: Write, lines: list[str], words: str) -> None:
    ranks = 2 if "rank == 0" in lines[0] else 1
    with pytest.raises(ScheduleError) as error:
        compiled(program(write(plan(*lines)), ScheduleSpec(ranks, 2)))
    assert words in str(error.value)
    assert error.value.rank == 0 and error.value.index >= 0
