"""Evaluations have the losses of one process on every mesh, and leave no trace in the training state."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest
from bits import assert_same_runs, same_bits
from evaluations import EVALUATED, assert_evaluates_like_one_process, losses_of, with_eval
from plans import STEPS, plan_of, plan_on_mesh
from resume import save_and_resume
from small_models import FAMILIES, HEADS, MOE
from worker_processes import (
    WorkerProcess,
    call_all,
    losses_and_state,
    ranks_of,
    recover,
    start_generation,
    start_run,
    uninterrupted,
)

from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint import checkpoint

pytestmark = pytest.mark.timeout(150)
slow = pytest.mark.slow
SEQUENCES = 21  # no multiple of a batch: the last one is padded
CASES = [
    ("dualpipe", {"pp": 2, "ep": 2}, replace(MOE, layers=2), {"memory_options": MemoryOptions(zero=3)}),
    pytest.param("gpipe", {}, MOE, {}, marks=slow),
    pytest.param("zb-h2", {"pp": 4}, MOE, {}, marks=slow),
    pytest.param("dualpipev", {"pp": 2, "dp": 2}, MOE, {}, marks=slow),
    pytest.param("v-min", {"pp": 4}, HEADS, {}, marks=slow),
    pytest.param("interleaved", {"pp": 2, "dp": 2}, HEADS, {"memory_options": MemoryOptions(3, 1, 1)}, marks=slow),
    pytest.param("zb-h2", {"pp": 2, "dp": 2}, MOE, {"memory_options": MemoryOptions(zero=1)}, marks=slow),
    pytest.param("1f1b", {"dp": 4}, HEADS, {"memory_options": MemoryOptions(zero=2)}, marks=slow),
    pytest.param("seq-1f1b", {"pp": 2, "tp": 2}, HEADS, {"slices": 2}, marks=slow),
    pytest.param("1f1b", {"tp": 4}, MOE, {}, marks=slow),
    pytest.param("1f1b", {"ep": 4}, MOE, {}, marks=slow),
    pytest.param("zb-h2", {"cp": 2, "pp": 2}, HEADS, {"cp_method": "all_gather"}, marks=slow),
    pytest.param("1f1b", {"cp": 2, "tp": 2}, HEADS, {"cp_method": "ulysses"}, marks=slow),
    pytest.param("1f1b", {"cp": 4}, MOE, {"cp_method": "ring"}, marks=slow),
    pytest.param("1f1b", {"cp": 2, "pp": 2}, HEADS, {"document_mask": True}, marks=slow),
    pytest.param("zb-h1", {"pp": 2, "dp": 2}, HEADS, {"recompute": "full"}, marks=slow),
    pytest.param("dualpipe", {"pp": 4}, HEADS, {"max_resident": 3.0}, marks=slow),
    pytest.param("1f1b", {"pp": 4}, replace(FAMILIES["deepseek-v3"], mtp_layers=1), {}, marks=slow),
    pytest.param("zb-v", {"pp": 2, "tp": 2}, FAMILIES["qwen3"], {}, marks=slow),
    pytest.param("zb-h2", {"pp": 2, "dp": 2}, HEADS, {"post_validation": True}, marks=slow),
    pytest.param("zb-h2", {"pp": 4}, HEADS, {"post_validation": True, "clip": 1e9}, marks=slow),
]


@pytest.mark.parametrize(("name", "sizes", "model", "more"), CASES)
def test_evaluations_have_the_losses_of_one_process_and_change_nothing(fleet, corpus, name, sizes, model, more):
    plan = plan_on_mesh(corpus, name, sizes, model=model, **more)
    max_gathered = more.get("memory_options", MemoryOptions()).max_gathered
    with_evaluations = with_eval(plan, SEQUENCES, max_gathered=max_gathered)
    if more.get("clip") == 1e9:  # the reference clips
        evaluated = fleet.run(with_evaluations, EVALUATED)
    else:
        evaluated = assert_evaluates_like_one_process(fleet, with_evaluations)
    trained = fleet.run(plan, [(0, 2), (2, STEPS - 2)])
    assert_same_runs(evaluated, trained)
    for one, other in zip(evaluated, trained, strict=True):
        for a, b in zip(one.gradients, other.gradients, strict=True):
            assert a.keys() == b.keys() and all(a[key].equal(b[key]) for key in a)


@slow
@pytest.mark.parametrize("name", ["zb-h2", "dualpipe"])
def test_a_resumed_run_has_the_same_evaluations(fleet, corpus, tmp_path, name):
    plan = with_eval(plan_of(name, 1, 4, 8, corpus, dtype="float32", model=MOE), SEQUENCES)
    whole = fleet.run(plan, EVALUATED)
    calls = [(2,), (2, STEPS - 2), (STEPS,)]
    resumed = save_and_resume(fleet, plan, checkpoint.folder_of(tmp_path, 2), 2, calls)
    for one, other in zip(whole, resumed, strict=True):
        assert losses_of(one)[1:] == losses_of(other)
        assert one.results[2].losses == other.results[0].losses


@slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", ["zb-h2", "dualpipe"])
def test_a_rank_lost_in_an_evaluation_costs_nothing_but_the_evaluation(workers, corpus, name, fault):
    plan = with_eval(plan_of(name, 2, 2, 4, corpus, dtype="float32", model=MOE), 1000)
    expected = uninterrupted(workers, plan, 5)
    start_run(workers, plan)
    first = call_all(workers, "run", 0, 3)
    asked = [worker.call("evaluate", 3) for worker in workers]
    time.sleep(0.5)
    assert not workers[0].end.poll()
    workers[1].signal(fault)
    time.sleep(0.2)
    version, _ = recover(workers, [1], plan, 2)
    assert version == 3
    for rank in (0, 2, 3):
        with pytest.raises(Exception, match=r"^$|peer|reset|closed|socket"):
            workers[rank].answer(asked[rank])
    found = call_all(workers, "evaluate", 3)
    rest = call_all(workers, "run", 3, 2)
    results = [a + b for a, b in zip(first, rest, strict=True)]
    assert all(each.data_sets == found[0].data_sets for each in found)
    losses, state = losses_and_state(workers, results, 0)
    call_all(workers, "close")
    assert losses == expected[0] and same_bits(state, expected[1])
    start_run(workers, plan)
    call_all(workers, "run", 0, 3)
    assert [each.data_sets for each in call_all(workers, "evaluate", 3)] == [each.data_sets for each in found]
    call_all(workers, "close")


def test_evaluations_outlive_a_generation_but_not_their_weights(
    rank_processes: list[WorkerProcess], corpus: str
) -> None:
    plan = with_eval(plan_of("1f1b", pp=2, dp=1, microbatches=4, data=corpus, model=HEADS), SEQUENCES)

    def left(ranks: list[WorkerProcess]) -> list[list[tuple[int, object]]]:
        """The evaluations that the ranks know of at the end of their generation."""
        for number, rank in [(rank.call_now("fence"), rank) for rank in ranks]:
            rank.answer(number)
        found = [snapshot.evaluations for snapshot in call_all(ranks, "leave")]
        return [[(each.step, each.data_sets) for each in its] for its in found]

    with ranks_of(rank_processes, 2) as ranks:
        start_run(ranks, plan)
        call_all(ranks, "run", 0, 1)
        first = call_all(ranks, "evaluate", 1)
        call_all(ranks, "run", 1, 1)
        both = zip(first, call_all(ranks, "evaluate", 2), strict=True)
        expected = [[(each.step, each.data_sets) for each in its] for its in both]
        assert left(ranks) == expected
        start_generation(ranks, plan, 2)
        call_all(ranks, "receive", {}, 2)
        assert left(ranks) == expected
        start_generation(ranks, plan, 3)
        call_all(ranks, "restore", None, 0)
        assert left(ranks) == [[], []]
