"""A rank that loses its partners keeps its process and weights, and goes on with others to the same bits."""

from __future__ import annotations

import signal
import time

import pytest
import torch
from cells import Cell, join, together
from plans import plan_of

from pentad.workers.fence import Fenced

STEPS = 60


@pytest.fixture(scope="module")
def cells():
    made = [Cell() for _ in range(4)]
    yield made
    for cell in made:
        cell.stop()


def outcome(cells, results, first):
    """Losses by step and microbatch, and the state by name, of ranks that agree on both."""
    losses, state = {}, {}
    for mine in results:
        for result in mine:
            if result.step >= first:
                losses.setdefault(result.step, {}).update(result.losses)
    for found in together(cells, "state"):
        for name, value in found.items():
            assert torch.equal(state.setdefault(name, value), value), name
    return losses, state


def repair(cells, lost, plan, epoch):
    """What the driver does: fences the living, takes stock, replaces the lost, hands the newest state on."""
    living = [rank for rank in range(4) if rank not in lost]
    for number in [(cells[rank], cells[rank].now("fence")) for rank in living]:
        number[0].answer(number[1])
    asked = {rank: cells[rank].call("leave") for rank in living}
    stands = {rank: cells[rank].answer(number) for rank, number in asked.items()}
    version = max(stand.version for stand in stands.values())
    norm = next(stand.norm for stand in stands.values() if stand.version == version)
    for rank, stand in stands.items():
        if stand.version == version - 1 and stand.ready:
            cells[rank].answer(cells[rank].call("advance", norm))
    current = [r for r, s in stands.items() if s.version == version or s.ready]
    for rank in lost:
        cells[rank].stop()
        cells[rank] = Cell()
    join(cells, plan, epoch)
    holders = {s: [r for r in range(4) if s in plan.stages_of(r)] for s in range(plan.program.stages)}
    sources = {s: next(r for r in held if r in current) for s, held in holders.items() if set(held) - set(current)}
    together(cells, "receive", sources, version)
    return version, stands


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "dualpipe"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_with_a_lost_rank_ends_with_the_bits_of_one_without(cells, corpus, name, how):
    dp, pp = (1, 4) if name == "dualpipe" else (2, 2)
    plan = plan_of(name, dp, pp, 8 if name == "dualpipe" else 4, corpus, "float32")
    join(cells, plan, 1)
    together(cells, "restore", None, 0)
    wanted = outcome(cells, together(cells, "run", 0, STEPS), 0)
    together(cells, "close")

    join(cells, plan, 1)
    together(cells, "restore", None, 0)
    asked = [cell.call("run", 0, STEPS) for cell in cells]
    time.sleep(0.15)
    cells[1].signal(how)
    time.sleep(0.3)
    began = time.monotonic()
    version, stands = repair(cells, [1], plan, 2)
    assert 0 < version < STEPS, "the fault came too early or too late for this test"
    for rank in (0, 2, 3):
        with pytest.raises((Fenced, RuntimeError)):
            cells[rank].answer(asked[rank])
    known = [list(stand.results) for stand in stands.values()]
    done = together(cells, "run", version, STEPS - version)
    losses, state = outcome(cells, known + done, 0)
    together(cells, "close")
    assert losses == wanted[0]
    assert all(torch.equal(state[key], value) for key, value in wanted[1].items())
    assert time.monotonic() - began < 30
