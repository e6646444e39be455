"""Ten thousand randomly damaged programs: `check` agrees with an independent proof, except that it also demands waits
that follow from the rest of the program."""

from __future__ import annotations

import re
from functools import cache

import pytest
from random_mutants import KINDS, random_mutants
from reachability_proof import prove, stuck
from schedule_sizes import TYPICAL, allows

from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.program import Program
from pentad.schedules.spec.schedule_spec import ScheduleOptions
from pentad.schedules.verify.check import check

EACH = 90
SLOW = pytest.mark.slow
SIZES = [(2, 3), (2, 4), (3, 4), (4, 8)]
PROGRAMS = [
    (name, ranks, microbatches, gated)
    for name in CATALOGUE
    for ranks, microbatches in SIZES
    for gated in (False, True)
    if allows(name, ranks, microbatches)
]
SLICED = [("seq", p, m, gated) for p, m in [(2, 1), (2, 2), (2, 3), (3, 2)] for gated in (False, True)]
# A necessary wait must be stated even if it follows from other waits, lanes or other ranks.
MUST_BE_STATED = re.compile(r"which comes after it$|does not wait for \w+$|does not wait first|refills slot \d+")
compiled = cache(compile_program)


def refusal(program: Program) -> str:
    """The first line of the error of `check`; empty if it accepts the program."""
    try:
        check(program, replicas=2)
    except ScheduleError as error:
        return str(error).splitlines()[0]
    return ""


def right(program: Program) -> bool:
    """Whether the program computes a step and never hangs, whatever the costs."""
    try:
        prove(program, 2)
        return not stuck(program)
    except (AssertionError, LookupError, StopIteration):
        return False


def compare_verdicts(program: Program, seed: str) -> int:
    """Checks and proves random mutants; returns how many."""
    made = 0
    for kind, mutant in random_mutants(program, seed, EACH):
        said = refusal(mutant)
        if right(mutant):
            assert not said or MUST_BE_STATED.search(said), (kind, said)
        else:
            assert said, kind
        made += 1
    return made


def test_at_least_ten_thousand_are_drawn() -> None:
    assert EACH * len(PROGRAMS) >= 10_000
    assert {damage.__name__ for damage in KINDS} > {"dropped", "doubled", "swapped", "other_peer", "other_microbatch"}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "gated"),
    [
        pytest.param(*each, marks=[] if each[1:3] in (SIZES[:3] if each[0] in TYPICAL else [(2, 4)]) else [SLOW])
        for each in PROGRAMS
    ],
)
def test_a_mutant_is_refused_or_right(name: str, ranks: int, microbatches: int, gated: bool) -> None:
    program = compiled(name, ranks, microbatches, gated=gated, replicas=2)
    assert compare_verdicts(program, f"{name} {ranks} {microbatches} {gated}") == EACH


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "ranks", "microbatches", "gated"), SLICED)
def test_a_mutant_in_slices_is_refused_or_right(name: str, ranks: int, microbatches: int, gated: bool) -> None:
    options = ScheduleOptions(slices=2)
    program = compile_program("seq-1f1b", ranks, microbatches, gated=gated, replicas=2, options=options)
    assert compare_verdicts(program, f"{name} {ranks} {microbatches} {gated}") == EACH
