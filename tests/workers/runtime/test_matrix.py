"""Law 1 over the five axes: alone, in pairs and in triples, every schedule with experts, every stage of ZeRO.

All are slow: test_axes.py has those that always run. Models have experts wherever nothing else is said.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from axes_cases import HEADS, MIXED, equals_one_process, made
from fleet import Fleet

from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
AXES = ("dp", "pp", "cp", "tp", "ep")
SCHEDULES = ("1f1b", "zb-h2", "zb-v", "dualpipe", "dualpipev")
ALONE = [{axis: size} for axis in AXES for size in (2, 4)]
PAIRS = [dict.fromkeys(pair, 2) for pair in combinations(AXES, 2)]
TRIPLES = [dict.fromkeys(triple, 2) for triple in combinations(AXES, 3)]


def shown(value: Any) -> str:
    return "-".join(f"{axis}{size}" for axis, size in value.items()) if isinstance(value, dict) else str(value)


def schedule_for(sizes: dict[str, int]) -> str:
    return "zb-h2" if "pp" in sizes else "gpipe"


@pytest.fixture(scope="module")
def octet():
    found = Fleet(8)
    yield found
    found.stop()


@pytest.mark.parametrize("sizes", ALONE, ids=shown)
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "experts"])
def test_an_axis_alone(fleet, corpus, sizes, dense):
    if dense and "ep" in sizes:
        pytest.skip("no experts to share out")
    model = HEADS if dense else MIXED
    equals_one_process(fleet, made(corpus, schedule_for(sizes), sizes, model=model))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", ["ring", "all_gather", "ulysses"])
def test_every_way_of_context_ranks(fleet, corpus, variant, size):
    equals_one_process(fleet, made(corpus, "1f1b", {"cp": size}, model=HEADS, context=variant))


@pytest.mark.parametrize("sizes", PAIRS, ids=shown)
def test_two_axes(fleet, corpus, sizes):
    equals_one_process(fleet, made(corpus, schedule_for(sizes), sizes, model=MIXED))


@pytest.mark.parametrize("sizes", TRIPLES, ids=shown)
def test_three_axes(octet, corpus, sizes):
    equals_one_process(octet, made(corpus, schedule_for(sizes), sizes, model=MIXED))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_with_experts_and_shards(fleet, corpus, name, zero):
    equals_one_process(fleet, made(corpus, name, {"ep": 2, "pp": 2}, model=MIXED, savings=MemoryOptions(zero=zero)))


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_makes_again_what_it_did_not_keep(fleet, corpus, name, recompute):
    equals_one_process(fleet, made(corpus, name, {"ep": 2, "pp": 2}, model=MIXED, recompute=recompute))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shards_of_experts_over_replicas(octet, corpus, zero):
    sizes = {"dp": 2, "ep": 2, "tp": 2}
    equals_one_process(octet, made(corpus, "1f1b", sizes, model=MIXED, savings=MemoryOptions(zero=zero)))
