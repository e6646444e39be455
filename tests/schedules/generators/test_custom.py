"""Custom schedules: a valid function becomes a program, an invalid one is refused naming the place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import custom_schedules
import pytest
from custom_schedules import body, refusal
from paths import ROOT

from pentad.schedules.catalogue import generate
from pentad.schedules.generators.custom import BW, MAX_STAGES, B, F, W, program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Instruction, Op, Overlap
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.optimizer_pass import add_reduce, add_step
from pentad.schedules.passes.transfers import add_transfers
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import ScheduleError
from pentad.schedules.spec.schedule_spec import ScheduleOptions
from pentad.schedules.verify.check import check

Write = Callable[[str], str]  # code of a file -> text that names its `plan`


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return partial(custom_schedules.write, tmp_path)


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
def test_a_custom_gpipe_equals_the_built_in_one(write: Write, ranks: int, microbatches: int) -> None:
    made = program(write(GPIPE), ranks, microbatches)
    assert made.hash == generate("gpipe", ranks, microbatches).hash
    compiled(made)


def test_built_in_generators_are_valid_custom_schedules(tmp_path: Path) -> None:
    file = ROOT / "schedules" / "generators" / "dualpipe.py"
    assert program(f"{file}:dualpipe_v", 4, 8).hash == generate("dualpipev", 4, 8).hash


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_function_with_the_parameter_gets_the_chunks(write: Write, chunks: int) -> None:
    made = program(write(LOOPED), 2, 4, chunks)
    assert (made.chunks, made.stages) == (chunks, 2 * chunks)
    assert made.placement == tuple(tuple(range(rank, 2 * chunks, 2)) for rank in range(2))
    compiled(made)


def test_without_chunks_the_function_s_own_default_is_used(write: Write) -> None:
    text = write(LOOPED.replace("chunks)", "chunks=3)", 1))
    assert generate(text, 2, 4).chunks == 3
    for chunks in (1, 2):
        assert generate(text, 2, 4, ScheduleOptions(chunks=chunks)).chunks == chunks
    assert generate(write(LOOPED), 2, 4).chunks == 1  # no default


def test_chunks_that_the_stages_do_not_make_are_refused(write: Write) -> None:
    assert "chunks is 2: expected 1, from the stages that it runs" in refusal(write(GPIPE), chunks=2)


def test_a_file_without_a_function_is_refused_with_the_form_that_is_expected() -> None:
    with pytest.raises(PentadError) as caught:
        generate("mine.py", 2, 4)
    expected = "expected FILE.py:FUNCTION, such as 'mine.py:my_schedule'"
    assert str(caught.value) == f"schedule.name is 'mine.py': {expected}"


def test_text_is_accepted_as_an_instruction(write: Write) -> None:
    made = program(write(body("yield '0F0'", "yield F(0, 1)", "yield '0B0'", "yield '(0F2+0BW1)'")), 1, 3)
    assert made.streams[0] == (F(0, 0), F(0, 1), B(0, 0), Overlap(F(0, 2), BW(0, 1)))


def test_numpy_integers_are_accepted(write: Write) -> None:
    made = program(
        write("import numpy\n" + body("yield from (F(numpy.int64(rank), mb) for mb in numpy.arange(2))")), 1, 2
    )
    assert all(type(number) is int for action in made.streams[0] for part in action.parts for number in part[1:3])


def test_a_list_is_accepted(write: Write) -> None:
    made = program(write(body("return [F(rank, 0), BW(rank, 0)]")), 2, 1)
    assert made.streams[1] == (F(1, 0), BW(1, 0))


def test_stages_on_two_ranks_make_one_chunk(write: Write) -> None:
    """As in DualPipe, half of the microbatches enter at each end."""
    lines = ["for mb, stage in ((0, rank), (1, ranks - 1 - rank)):", "    yield F(stage, mb)"]
    lines += ["for mb, stage in ((0, rank), (1, ranks - 1 - rank)):", "    yield BW(stage, mb)"]
    made = program(write(body(*lines)), 2, 2)
    assert (made.placement, made.chunks) == (((0, 1), (1, 0)), 1)
    compiled(made)


WRONG = {
    "a number": ("plan = 3\n", ["plan is 3", "expected a function"]),
    "a parameter too few": ("def plan(rank, ranks): ...\n", ["(rank, ranks)", "(rank, ranks, microbatches)"]),
    "other names": ("def plan(r, p, m): ...\n", ["(r, p, m)", "chunks"]),
    "a parameter too many": ("def plan(rank, ranks, microbatches, group): ...\n", ["microbatches, group)"]),
    "by position": ("def plan(rank, ranks, microbatches, /): ...\n", ["its parameters are"]),
    "unknown parameters": ("plan = type\n", ["parameters"]),
    "no yield": (body("return None"), ["rank 0 returns None", "yield"]),
    "nothing": (body("yield from ()"), ["rank 0 yields nothing"]),
    "nothing on one rank": (body("if rank == 0:", "    yield F(0, 0)"), ["rank 1 yields nothing"]),
    "raises": (
        body("yield F(rank, 0)", "yield F(rank, 1 // (1 - rank))"),
        ["rank 1 at position 1 raises ZeroDivisionError in line 4", "division"],
    ),
    "raises at once": (
        "def plan(rank, ranks, microbatches):\n    return [][rank]\n",
        ["position 0 raises IndexError in line 3"],
    ),
    "exits": (body("yield F(rank, 0)", "raise SystemExit"), ["rank 0 at position 1 raises SystemExit in line 4"]),
    "stops": (body("yield F(rank, 0)", "next(iter(()))"), ["raises StopIteration in line 4"]),
    "a float": (body("yield 3.5"), ["rank 0 at position 0 yields 3.5", "F(stage, microbatch)"]),
    "nonsense as text": (body("yield F(rank, 0)", "yield '2X0'"), ["rank 0 at position 1 yields '2X0'", "2F0"]),
    "None": (body("yield F(rank, 0)", "yield None"), ["position 1 yields None"]),
    "a pair of nothing": (
        "from pentad.schedules.ir.instruction import Overlap\n" + body("yield Overlap(1, 2)"),
        ["Overlap"],
    ),
    "something that cannot be shown": (
        "class Bad:\n    def __repr__(self): raise ValueError\n" + body("yield Bad()"),
        ["position 0 yields <Bad instance"],
    ),
    "a transfer": (body("yield '0SEND_F0>1'"), ["position 0 yields '0SEND_F0>1'", "F(stage, microbatch)", "compiler"]),
    "what is lowered": (body("yield F(rank, 0)._replace(peer=1)"), ["position 0 yields", "compiler"]),
    "a stage that is no number": (body("yield F('0', 0)"), ["yields F('0', 0)", "integers"]),
    "half a stage": (body("yield F(rank / 2, 0)"), ["yields F(0.0, 0)", "integers"]),
    "a stage below 0": (body("yield F(rank - 1, 0)"), ["yields F(-1, 0)", "at least 0"]),
    "a stage that is left out": (
        body("yield F(0, 0)", "yield F(2 * rank, 0)"),
        ["rank 1 at position 1 runs stage 2, but nothing runs stage 1"],
    ),
    "no end": (
        body("while True:", "    yield F(rank, 0)"),
        ["rank 0 yields more than 128 instructions", "1 stage:", "end"],
    ),
    "no end of microbatches": (
        "import itertools\n" + body("yield from (F(rank, mb) for mb in itertools.count())"),
        ["more than 128 instructions for 4 microbatches"],
    ),
    "no end of stages": (
        "import itertools\n" + body("yield from (F(stage, 0) for stage in itertools.count())"),
        [f"rank 0 yields more than {MAX_STAGES} stages"],
    ),
}


@pytest.mark.parametrize(("code", "words"), WRONG.values(), ids=WRONG)
def test_an_invalid_function_is_refused_naming_the_place(write: Write, code: str, words: list[str]) -> None:
    sentence = refusal(write(code))
    for word in words:
        assert word in sentence


REFUSED = {
    "backward before forward": (["yield BW(rank, 0)", "yield F(rank, 0)"], "0BW0 waits for 0F0"),
    "a circle": (
        ["yield from [F(0, 0), BW(0, 0), F(0, 1), BW(0, 1)] if rank == 0 else '1F1 1F0 1BW0 1BW1'.split()"],
        "0BW0 waits for 1BW0",
    ),
    "no backward": (["yield F(rank, 0)", "yield F(rank, 1)", "yield BW(rank, 0)"], "found 0F1"),
    "no weight gradient": (["yield from [F(rank, 0), B(rank, 0), F(rank, 1), BW(rank, 1)]"], "found 0F0, 0B0"),
    "twice": (["yield from [F(rank, 0), F(rank, 1), BW(rank, 0), BW(rank, 1), F(rank, 0)]"], "0F0 runs twice"),
    "weights out of order": (
        ["yield from [F(rank, 0), F(rank, 1), BW(rank, 1), BW(rank, 0)]"],
        "0BW0 comes after 0BW1",
    ),
    "too many microbatches": (["yield from [F(rank, mb) for mb in range(3)]"], "0F2 cannot run: there are 2"),
    "a pair of forwards": (["yield '(0F0+0F1)'", "yield BW(0, 0)", "yield BW(0, 1)"], "no pair of a forward"),
}


@pytest.mark.parametrize(("lines", "words"), REFUSED.values(), ids=REFUSED)
def test_an_invalid_order_is_refused_naming_the_instruction(write: Write, lines: list[str], words: str) -> None:
    ranks = 2 if "rank == 0" in lines[0] else 1
    with pytest.raises(ScheduleError) as error:
        compiled(program(write(body(*lines)), ranks, 2))
    assert words in str(error.value)
    assert error.value.rank == 0 and error.value.index >= 0
