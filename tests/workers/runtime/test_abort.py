"""A rank that loses its partners keeps its process and weights, and goes on with others to the same bits."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from axes_cases import FAMILIES, MIXED
from cells import Cell, join, lose_one, together
from custom_models import made
from plans import plan_of

from pentad.schedules.ir.instruction import Op
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.manifest import Shard
from pentad.workers.runtime.abort import Aborted
from pentad.workers.runtime.runner import Runner

pytestmark = pytest.mark.timeout(150)
SLOW = pytest.mark.slow
SQUARE: dict[str, Any] = {"dp": 2, "pp": 2, "microbatches": 4}
LINE: dict[str, Any] = {"pp": 4, "microbatches": 8}


def small(name: str, corpus: str, axes: dict[str, Any]) -> Plan:
    return plan_of(**{"name": name, "dp": 1, "pp": 1, "data": corpus, "dtype": "float32", **axes})


@pytest.fixture(scope="module")
def cells():
    made = [Cell() for _ in range(4)]
    yield made
    for cell in made:
        cell.stop()


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("1f1b", {"pp": 2, "microbatches": 4}),
        ("1f1b", SQUARE),
        ("zb-h2", SQUARE),
        ("dualpipe", LINE),
        ("zb-v", {"pp": 2, "tp": 2, "microbatches": 4}),
        ("1f1b", {"dp": 2, "ep": 2, "microbatches": 2, "model": MIXED}),
        ("1f1b", {"pp": 2, "cp": 2, "microbatches": 2, "model": FAMILIES["qwen3"]}),
    ],
)
def test_a_call_behind_one_that_failed_does_nothing(cells, corpus, name, axes):
    """The driver queues calls. What a rank lacks the norm of only stays whole until it hears it."""
    plan, missed = small(name, corpus, axes), 2
    ranks = cells[: plan.mesh.size]
    join(ranks, plan, 1)
    together(ranks, "restore", None, 0)
    together(ranks, "run", 0, missed + 1)
    expected = together(ranks, "state")
    together(ranks, "close")

    join(ranks, plan, 1)
    together(ranks, "restore", None, 0)
    ranks[1].answer(ranks[1].call("lose_touch", missed))
    asked = [[cell.call("run", first, 4) for first in (0, 4)] for cell in ranks]
    with pytest.raises(RuntimeError, match="closed by peer"):
        ranks[1].answer(asked[1][0])
    with pytest.raises(Aborted):  # the others are in the step behind by then, and would take part in any
        ranks[1].answer(asked[1][1])
    ranks[0].wait_for(missed + 1)
    for cell in ranks:
        cell.answer(cell.now("fence"))
    stands = together(ranks, "leave")
    heard = [(missed + 1, False)] * len(ranks)
    assert [(stand.version, stand.ready) for stand in stands] == [heard[0], (missed, True), *heard[2:]]
    ranks[1].answer(ranks[1].call("advance", stands[0].norm))
    for found, state in zip(together(ranks, "state"), expected, strict=True):
        assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_lost_shard_comes_back_from_a_checkpoint(cells, corpus, tmp_path):
    """Ranks that live through it keep their processes, and the part that they hold of every stage is not enough."""
    plan = plan_of("1f1b", 2, 2, 4, corpus, "float32", savings=MemoryOptions(zero=3))
    join(cells, plan, 1)
    together(cells, "restore", None, 0)
    together(cells, "run", 0, 6)
    expected = together(cells, "state")
    together(cells, "close")

    folder = checkpoint.folder_of(tmp_path, 2)
    join(cells, plan, 1)
    together(cells, "restore", None, 0)
    together(cells, "run", 0, 2)
    plain = [shard for shards in together(cells, "save", str(folder), 2) for shard in shards]
    checkpoint.commit(folder, step=2, shards=[Shard.from_plain(shard) for shard in plain], meta={})
    asked = [cell.call("run", 2, 80) for cell in cells]
    cells[1].wait_for(4)
    cells[1].signal(signal.SIGKILL)
    for rank in (0, 2, 3):
        cells[rank].answer(cells[rank].now("fence"))
        with pytest.raises((Aborted, RuntimeError)):
            cells[rank].answer(asked[rank])
        cells[rank].answer(cells[rank].call("leave"))
    cells[1].stop()
    cells[1] = Cell()
    join(cells, plan, 2)
    together(cells, "restore", str(folder), 2)
    together(cells, "run", 2, 4)
    for found, state in zip(together(cells, "state"), expected, strict=True):
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], state[name]) for name in state)
    together(cells, "close")


def test_an_heir_that_came_too_late_takes_nothing_along(corpus, tmp_path):
    """Its generation may be over before it is made; the next one inherits from the same rank."""
    first = Runner(small("1f1b", corpus, {"microbatches": 2, "model": MIXED}), 0, tmp_path / "board")
    first.restore(None, 3)
    found = {at: [torch.rand_like(part) for part in held.given()] for at, held in first.parameters.items()}
    for at, parts in found.items():
        for mine, part in zip(first.parameters[at].given(), parts, strict=True):
            mine.copy_(part)
    for generation in (2, 3):
        heir = Runner(first.plan, 0, tmp_path / "board", generation, before=first, blank=True)
    assert heir.version == 3 and heir.stages[0].balance is not None and heir.stages[0].balance.bias.all()
    for at, parts in found.items():
        assert all(torch.equal(*pair) for pair in zip(heir.parameters[at].given(), parts, strict=True))


def test_a_step_cut_off_at_its_norm_can_still_be_taken(corpus, tmp_path):
    """A GPU behind its host goes on through NORM, STEP and a forward of the next step when the generation ends
    meanwhile; partners may have heard the norm and taken the step."""
    runners = []
    for number in (0, 1):
        plan = small("1f1b", corpus, {"microbatches": 2, "model": MIXED})
        runners.append(Runner(plan, 0, tmp_path / str(number)))
        runners[-1].connect(runners[-1].serve("127.0.0.1", 30.0), 30.0)
        runners[-1].restore(None)
        *_, newest = runners[-1].run(0, 3 - number)
        if number == 0:
            norm = newest.grad_norm
            runners[-1].close()
    late = runners[-1]
    executor: Any = late.executor
    end = executor.end
    real = end.reduce
    end.reduce = lambda step, _: real(step, lambda: end.fence.fill_(torch.nan))
    executor.run(2, late.feed(2))
    executor.stream = executor.stream[:1]
    assert executor.stream[0].op is Op.F
    executor.run(3, late.feed(3))
    stand = late.leave()
    assert (stand.version, stand.ready, stand.norm) == (2, True, newest.grad_norm)
    late.advance(norm)
    given = [[part for held in each.parameters.values() for part in held.given()] for each in runners]
    assert all(torch.equal(*pair) for pair in zip(*given, strict=True))


@pytest.mark.parametrize(
    ("how", "name", "axes"),
    [
        (signal.SIGKILL, "dualpipe", LINE),
        (signal.SIGSTOP, "zb-h2", SQUARE),
        pytest.param(signal.SIGKILL, "zb-h2", SQUARE, marks=SLOW),
        pytest.param(signal.SIGSTOP, "dualpipe", LINE, marks=SLOW),
        pytest.param(signal.SIGKILL, "1f1b", SQUARE, marks=SLOW),
        pytest.param(signal.SIGSTOP, "1f1b", SQUARE, marks=SLOW),
        pytest.param(None, "1f1b", SQUARE, marks=SLOW),
    ],
)
def test_a_run_with_a_lost_rank_ends_with_the_bits_of_one_without(cells, corpus, name, axes, how):
    lose_one(cells, small(name, corpus, axes), 80, how)


INNER = [
    ("1f1b", {"dp": 2, "ep": 2, "microbatches": 2, "model": MIXED}),
    pytest.param("1f1b", {"dp": 2, "ep": 2, "microbatches": 2, "model": FAMILIES["deepseek-v3"]}, marks=SLOW),
    pytest.param("dualpipe", {"pp": 2, "ep": 2, "microbatches": 4, "model": MIXED}, marks=SLOW),
    pytest.param("dualpipe", {"pp": 2, "tp": 2, "microbatches": 4}, marks=SLOW),
    pytest.param("zb-h2", {"dp": 2, "tp": 2, "microbatches": 2}, marks=SLOW),
    pytest.param("zb-v", {"pp": 2, "cp": 2, "microbatches": 4, "model": FAMILIES["qwen3"]}, marks=SLOW),
    pytest.param("1f1b", {"cp": 4, "microbatches": 2}, marks=SLOW),
    pytest.param("1f1b", {**SQUARE, "model": replace(FAMILIES["qwen3"], mtp_layers=1)}, marks=SLOW),
]


@pytest.mark.parametrize(("name", "axes"), INNER)
def test_ranks_that_share_layers_or_experts_do_so_again(cells, corpus, name, axes):
    lose_one(cells, small(name, corpus, axes), 24, signal.SIGKILL)


@pytest.mark.parametrize(("name", "axes"), [("zb-h2", SQUARE), pytest.param("dualpipe", LINE, marks=SLOW)])
def test_a_model_of_somebody_elses_is_repaired(cells, corpus, tmp_path, name, axes):
    model = made(tmp_path, "dropping", layers=6)
    lose_one(cells, small(name, corpus, {**axes, "model": model}), 40, signal.SIGKILL)
