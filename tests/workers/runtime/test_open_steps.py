"""Calls whose last step stays open: every step is accounted for once, in order, with the bits of one long call."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from cells import Cell, join, outcome, repair, together
from plans import plan_of
from post_validation_cases import agree

from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.manifest import Shard
from pentad.workers.runtime.abort import Aborted

pytestmark = pytest.mark.timeout(150)
SPLITS = {
    "a step a call": [*((step, 1, True) for step in range(5)), (5, 1, False)],
    "closed by a call of no step": [(0, 6, True), (6, 0, False)],
    "closed between": [(0, 2, True), (2, 0, False), (2, 1, False), (3, 2, True), (5, 1, True), (6, 0, False)],
    "runs of no step": [(0, 0, True), (0, 0, False), (0, 3, True), (3, 0, True), (3, 3, True), (6, 0, True), (6, 0)],
}
CASES = [("zb-h2", 2, 2, 4, True), ("1f1b", 1, 2, 3, False)]
SLOW = [("zb-h2", 1, 4, 8, True), ("zb-v", 2, 2, 5, True), ("dualpipe", 1, 4, 8, True), ("dualpipe", 1, 4, 8, False)]
ALL = [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
slow = pytest.mark.slow
STEPS = 80


@pytest.fixture(scope="module")
def cells():
    made = [Cell() for _ in range(4)]
    yield made
    for cell in made:
        cell.stop()


def begin(cells, name, corpus, *, validated):
    plan = plan_of(name, 2, 2, 4, corpus, "float32", validated=validated)
    join(cells, plan, 1)
    together(cells, "restore", None, 0)
    return plan


def steps_of(results) -> list[list[int]]:
    """By rank."""
    return [[result.step for result in mine] for mine in results]


@pytest.mark.parametrize(("name", "dp", "pp", "m", "validated"), ALL)
def test_calls_however_split_give_the_accounts_and_bits_of_one(fleet, corpus, name, dp, pp, m, validated):
    plan = plan_of(name, dp, pp, m, corpus, "float32", validated=validated)
    whole = fleet.run(plan, [(0, 6)])
    for calls in SPLITS.values():
        agree(fleet.run(plan, calls), whole)


@pytest.mark.parametrize("validated", [True, False])
def test_a_call_returns_the_steps_that_are_complete(cells, corpus, validated):
    begin(cells, "zb-h2", corpus, validated=validated)
    asked = [(0, 1, True), (1, 1, True), (2, 3, True), (5, 0, True), (5, 2, False), (7, 1, True), (8, 0, False)]
    returned = [steps_of(together(cells, "run", *call))[3] for call in asked]
    together(cells, "close")
    assert returned == [[], [0], [1, 2, 3], [], [4, 5, 6], [], [7]]


@pytest.mark.parametrize("validated", [True, False])
def test_a_checkpoint_is_of_whole_steps_and_the_run_goes_on(cells, corpus, tmp_path, validated):
    begin(cells, "zb-h2", corpus, validated=validated)
    losses, after = outcome(cells, [*together(cells, "run", 0, 3)], 0)
    rest, end = outcome(cells, together(cells, "run", 3, 3), 0)
    together(cells, "close")

    begin(cells, "zb-h2", corpus, validated=validated)
    folder = checkpoint.folder_of(tmp_path, 3)
    done = [together(cells, "run", 0, 3, True)]
    shards = [Shard.from_plain(plain) for its in together(cells, "save", str(folder), 3) for plain in its]
    checkpoint.commit(folder, step=3, shards=shards, meta={})
    done += [together(cells, "run", 3, 3, True), together(cells, "run", 6, 0)]
    found, state = outcome(cells, [mine for call in done for mine in call], 0)
    together(cells, "close")
    assert [steps_of(call)[0] for call in done] == [[0, 1], [2, 3, 4], [5]]
    assert found == losses | rest
    assert all(torch.equal(state[key], value) for key, value in end.items())
    saved = read_all(folder)
    assert all(torch.equal(saved[key], value) for key, value in after.items())


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.open_checkpoint(folder)
    return checkpoint.read(found, found.where)


@pytest.mark.parametrize("validated", [True, False])
def test_what_is_open_when_an_epoch_ends_counts_if_it_is_in_the_weights(cells, corpus, validated):
    plan = begin(cells, "zb-h2", corpus, validated=validated)
    expected = outcome(cells, together(cells, "run", 0, 6), 0)
    together(cells, "close")

    plan = begin(cells, "zb-h2", corpus, validated=validated)
    done = together(cells, "run", 0, 4, True)
    cells[1].signal(signal.SIGKILL)
    version, stands = repair(cells, [1], plan, 2)
    assert version == (3 if validated else 4)  # nobody has heard the norm of step 3, or everybody has
    assert {tuple(result.step for result in stand.results) for stand in stands.values()} == {tuple(range(version))}
    done += [list(stand.results) for stand in stands.values()] + together(cells, "run", version, 6 - version)
    losses, state = outcome(cells, done, 0)
    together(cells, "close")
    assert losses == expected[0]
    assert all(torch.equal(state[key], value) for key, value in expected[1].items())


@pytest.mark.parametrize(
    ("name", "validated", "how"),
    [
        ("zb-h2", True, signal.SIGKILL),
        pytest.param("1f1b", False, signal.SIGKILL, marks=slow),
        pytest.param("zb-h2", True, signal.SIGSTOP, marks=slow),
        pytest.param("1f1b", False, signal.SIGSTOP, marks=slow),
    ],
)
def test_a_fault_amid_open_calls_loses_no_account(cells, corpus, name, validated, how):
    plan = begin(cells, name, corpus, validated=validated)
    expected = outcome(cells, together(cells, "run", 0, STEPS), 0)
    together(cells, "close")

    plan = begin(cells, name, corpus, validated=validated)
    asked = [[cell.call("run", step, 2, True) for step in range(0, STEPS, 2)] for cell in cells]
    cells[1].wait_for(5)
    cells[1].signal(how)
    time.sleep(0.3)
    version, stands = repair(cells, [1], plan, 2)
    assert 0 < version < STEPS, "the fault came too early or too late for this test"
    for rank, stand in stands.items():
        told = list(stand.results)
        for number in asked[rank]:
            try:
                told += cells[rank].answer(number)
            except (Aborted, RuntimeError):
                continue
        assert {result.step for result in told} == set(range(stand.version))
    done = together(cells, "run", version, STEPS - version)
    known = [list(stand.results) for stand in stands.values()]
    first = min(result.step for its in known for result in its)
    losses, state = outcome(cells, known + done, first)
    together(cells, "close")
    assert losses == {step: its for step, its in expected[0].items() if step >= first}
    assert all(torch.equal(state[key], value) for key, value in expected[1].items())
