"""Ten thousand damaged programs: none is accepted that an independent proof refuses, and none refused that it accepts,
but for rules that ask a program to say itself what could also be concluded from the rest of it."""

from __future__ import annotations

import re
from functools import cache

import pytest
from proof import prove, stuck
from random_mutants import KINDS, random_mutants
from seq import seq_order
from sizes import allows

from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.compiler import compile_program, lower
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.verify.check import check

EACH = 90
SIZES = [(2, 3), (2, 4), (3, 4), (4, 8)]
PROGRAMS = [
    (name, ranks, microbatches, gated)
    for name in CATALOGUE
    for ranks, microbatches in SIZES
    for gated in (False, True)
    if allows(name, ranks, microbatches)
]
SLICED = [("seq", p, m, gated) for p, m in [(2, 1), (2, 2), (2, 3), (3, 2)] for gated in (False, True)]
# What follows from other waits, from order on lanes or from what other ranks do is still to be said where it is needed.
ASKED = re.compile(r"which comes after it$|does not wait for \w+$|does not wait first|refills slot \d+")
compiled = cache(compile_program)


def refusal(program: Program) -> str:
    """The first sentence of what `check` says; empty if it accepts."""
    try:
        check(program, replicas=2)
    except ScheduleError as error:
        return str(error).splitlines()[0]
    return ""


def right(program: Program) -> bool:
    """Whether it does what a step needs, whatever the costs, and never hangs."""
    try:
        prove(program, 2)
        return not stuck(program)
    except (AssertionError, LookupError, StopIteration):
        return False


def judged_alike(program: Program, seed: str) -> int:
    """How many mutants were drawn."""
    made = 0
    for kind, mutant in random_mutants(program, seed, EACH):
        said = refusal(mutant)
        if right(mutant):
            assert not said or ASKED.search(said), (kind, said)
        else:
            assert said, kind
        made += 1
    return made


def test_at_least_ten_thousand_are_drawn() -> None:
    assert EACH * len(PROGRAMS) >= 10_000
    assert {damage.__name__ for damage in KINDS} > {"dropped", "doubled", "swapped", "re_peered", "other_microbatch"}


@pytest.mark.parametrize(("name", "ranks", "microbatches", "gated"), PROGRAMS)
def test_a_mutant_is_refused_or_right(name: str, ranks: int, microbatches: int, gated: bool) -> None:
    program = compiled(name, ranks, microbatches, gated=gated, replicas=2)
    assert judged_alike(program, f"{name} {ranks} {microbatches} {gated}") == EACH


@pytest.mark.parametrize(("name", "ranks", "microbatches", "gated"), SLICED)
def test_a_mutant_in_slices_is_refused_or_right(name: str, ranks: int, microbatches: int, gated: bool) -> None:
    order = seq_order(ranks, microbatches, 2)
    program = lower(order, Costs.uniform(order.stages), gated=gated, replicas=2)
    assert judged_alike(program, f"{name} {ranks} {microbatches} {gated}") == EACH
