"""Slow ranks and links are named within ten steps, and no rank is named in a long run with mere noise."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.diagnosis.rank_times import (
    DATA,
    HOST_OP,
    RankTime,
    RankWaits,
    load,
    measured_of,
    save,
    times_of_step,
)
from pentad.schedules.diagnosis.slow_ranks import BASELINE, LONG, WARM_UP, SlowRank, SlowRanks
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.mesh import Mesh, to_mesh_ranks

compiled = cache(compile_program)
MESHES = {
    "dp2pp2": Mesh(dp=2, pp=2),
    "dp8": Mesh(dp=8),
    "pp4": Mesh(pp=4),
    "tp2cp2pp2": Mesh(tp=2, cp=2, pp=2),
}
FIRST = WARM_UP + BASELINE + 12  # the first step with an injected fault
WITHIN = 10
OPS = {"F": 1.0, "BW": 2.0}


class Noise:
    """Times of all ranks with lognormal jitter, both per rank and common to all, and rare, much slower outliers."""

    def __init__(self, mesh: Mesh, seed: int, jitter: float) -> None:
        self.mesh, self.draw, self.jitter = mesh, random.Random(seed), jitter
        self.program = compiled("1f1b", mesh.pp, 4)

    def step(self, number: int, slow: dict[int, float], data: dict[int, float], link: float = 0.0) -> list[RankTime]:
        together, found = self.draw.lognormvariate(0, 0.1), list[RankTime]()
        for rank in range(self.mesh.size):
            pp = self.mesh.coordinates(rank).pp
            own = together * self.draw.lognormvariate(0, self.jitter) * slow.get(rank, 1.0)
            own *= 3 if self.draw.random() < 0.01 else 1
            found += [RankTime(number, rank, op, pp, seconds * own * (1 + 0.1 * pp)) for op, seconds in OPS.items()]
            late = data.get(rank, 0.0) + (1.0 if self.draw.random() < 0.01 else 0.0)
            found.append(RankTime(number, rank, DATA, -1, self.draw.expovariate(100) + late))
            found.append(RankTime(number, rank, HOST_OP, -1, self.draw.lognormvariate(-4, 1)))
            for op, stage in (("RECV_F", pp), ("RECV_B", pp)):
                if (op == "RECV_F" and pp > 0) or (op == "RECV_B" and pp + 1 < self.mesh.pp):
                    slower = link if (op, rank) == ("RECV_F", self.mesh.size - 1) else 0.0
                    found.append(RankTime(number, rank, op, stage, self.draw.lognormvariate(-4, 0.5) + slower))
        return found


def run(mesh: Mesh, steps: int, seed: int, jitter: float, **injected: float) -> Iterator[SlowRank]:
    """What is found in a run whose last rank has slower compute, data or links from step FIRST on."""
    noise = Noise(mesh, seed, jitter)
    watch, last = SlowRanks(noise.program, mesh), mesh.size - 1
    for step in range(steps):
        now = injected if step >= FIRST else {}
        given = {last: now.get("compute", 1.0)}, {last: now.get("data", 0.0)}, now.get("link", 0.0)
        yield from watch.add(noise.step(step, *given))


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", ["pp4", "dp8", "dp2pp2", "tp2cp2pp2"])
def test_no_rank_is_named_in_two_thousand_quiet_steps(mesh: str, seed: int) -> None:
    steps = 2000 if seed else 500
    jitter = (0.01, 0.03, 0.1)[seed % 3]
    assert list(run(MESHES[mesh], steps, seed, jitter)) == []


@pytest.mark.sampled(9)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("kind", "amount", "jitter"),
    [("compute", 1.15, 0.02), ("compute", 1.08, 0.01), ("data", 0.6, 0.02), ("link", 0.8, 0.02)],
)
def test_what_is_slow_is_named_within_ten_steps(mesh: str, seed: int, kind: str, amount: float, jitter: float) -> None:
    sizes, last = MESHES[mesh], MESHES[mesh].size - 1
    if kind == "link" and sizes.pp == 1:
        pytest.skip("has no links")
    first, *more = list(run(sizes, FIRST + 25, seed, jitter, **{kind: amount}))
    inner = sizes.group(("tp", "cp", "ep"), last)
    sender = sizes.move(last, pp=sizes.coordinates(last).pp - 1) if kind == "link" else -1
    assert first.kind == kind and not first.over
    assert first.ranks == {"compute": inner, "link": (sender, last)}.get(kind, (last,))
    assert FIRST <= first.step < FIRST + WITHIN
    assert abs(first.since - FIRST) <= 4
    assert not more


def starved_by_a_third(times: list[RankTime], rank: int) -> list[RankTime]:
    """The times, with this rank waiting for a CPU core during a third of its compute."""
    return [e._replace(starved=e.seconds / 3) if e.rank == rank and e.op in OPS else e for e in times]


@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_whose_core_others_use_is_starved_and_not_slow(mesh: str) -> None:
    """Its instructions take 1.5 times as long, and its loader and transfers are late, too."""
    noise, last = Noise(MESHES[mesh], 0, 0.02), MESHES[mesh].size - 1
    watch, changes = SlowRanks(noise.program, noise.mesh), list[SlowRank]()
    for step in range(FIRST + 60):
        begun = step >= FIRST
        late = {last: 0.3} if begun else {}
        times = noise.step(step, {last: 1.5} if begun else {}, late, link=0.2 if begun else 0.0)
        changes += watch.add(starved_by_a_third(times, last) if begun else times)
        assert not watch.lasting()
    first, *more = changes
    assert (first.kind, first.ranks, first.over) == ("starved", (last,), False) and not more
    assert FIRST <= first.step < FIRST + WITHIN and first.excess == pytest.approx(0.5, rel=0.2)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_slow_rank_is_named_though_it_is_starved(mesh: str) -> None:
    noise, last = Noise(MESHES[mesh], 0, 0.01), MESHES[mesh].size - 1
    watch, changes = SlowRanks(noise.program, noise.mesh), list[SlowRank]()
    for step in range(FIRST + 40):
        times = noise.step(step, {last: 1.5 * (1.15 if step >= FIRST else 1)}, {})
        changes += watch.add(starved_by_a_third(times, last))
    assert [change.kind for change in changes] == ["starved", "compute"]
    assert FIRST <= changes[1].step < FIRST + WITHIN and changes[1].excess == pytest.approx(0.15, abs=0.04)


def test_a_rank_that_has_recovered_is_reported_once_and_can_be_named_again() -> None:
    noise = Noise(MESHES["dp8"], 3, 0.01)
    watch = SlowRanks(noise.program, noise.mesh)
    slow = [*[1.0] * 20, *[1.2] * 30, *[1.0] * 30, *[1.2] * 20]
    found = [change for step, factor in enumerate(slow) for change in watch.add(noise.step(step, {7: factor}, {}))]
    assert [(change.ranks, change.over) for change in found] == [((7,), False), ((7,), True), ((7,), False)]
    assert [op for op, *_ in found[0].evidence] and found[0].evidence[0][2] == pytest.approx(0.2, abs=0.05)


def test_what_is_acted_upon_lasts_and_is_clear() -> None:
    noise = Noise(MESHES["dp8"], 3, 0.01)
    watch = SlowRanks(noise.program, noise.mesh)
    factors, lasting = [*[1.0] * 20, *[1.2] * 12, *[1.0] * 30, *[1.065] * 60, *[1.2] * 40], []
    for step, factor in enumerate(factors):
        watch.add(noise.step(step, {7: factor}, {}))
        lasting += watch.lasting()
    began = len(factors) - 40
    assert {each.ranks for each in lasting} == {(7,)}
    assert began + LONG <= lasting[0].step < began + LONG + WITHIN and lasting[-1].step == len(factors) - 1
    assert lasting[-1].excess == pytest.approx(0.2, abs=0.03) and lasting[-1].evidence


def test_times_of_a_step_are_those_of_its_spans() -> None:
    mesh, program = Mesh(dp=2, pp=2), compiled("1f1b", 2, 4, replicas=2)
    costs = Costs((1.0, 2.0), (1.0, 1.0), (1.0, 1.0), transfer=0.25, step=0.5)
    spans = to_mesh_ranks(simulate(program, costs, step=7), mesh).spans
    waits = [RankWaits(rank, 0.1 * rank, (("F", 0, 0.5),) if rank == 0 else ()) for rank in range(4)]
    times = {(each.rank, each.op, each.stage): each for each in times_of_step(program, mesh, spans, waits)}
    assert {each.step for each in times.values()} == {7}
    assert times[0, "F", 0].seconds == pytest.approx(4) and times[0, "F", 0].waited == 0.5
    assert times[3, "BW", 1].seconds == pytest.approx(8)
    assert times[2, DATA, -1].seconds == pytest.approx(0.2)
    assert times[2, "RECV_F", 1].seconds == pytest.approx(4 * 0.25, abs=1e-6)  # the first of four is exposed
    assert times[1, HOST_OP, -1].seconds == pytest.approx(0, abs=1e-6)


def test_waits_inside_layers_are_divided_into_communication_and_a_late_peer() -> None:
    times = [RankTime(0, rank, "F", 0, 4.0, waited) for rank, waited in enumerate((1.0, 0.25))]
    found = measured_of(times, Mesh(tp=2)).layers
    assert (found[0].seconds, found[0].late, found[1].seconds, found[1].late) == (1.0, 0.75, 0.25, 0.0)


def test_tables_of_times_are_read_back(tmp_path: Path) -> None:
    times = tuple(Noise(MESHES["dp2pp2"], 0, 0.1).step(0, {}, {}))
    save(times, tmp_path / "times.arrow")
    assert load(tmp_path / "times.arrow") == times
    (tmp_path / "times.arrow").write_bytes(b"no table")
    with pytest.raises(PentadError, match="is not a readable table of rank times"):
        load(tmp_path / "times.arrow")
