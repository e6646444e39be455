"""Ranks are not taken to hang too early or during a pause, and the right ones are named."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from pentad.orchestrator.cluster.rank_status import Status
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.recovery.hang_detection import HangDetector, positions_in_program
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs

PLAN = make_plan(load(None, ["mesh.pp=2", "model.layers=4", "schedule.name=1f1b"]), "cpu")
COSTS = Costs.uniform(2, 0.01, 0.01, 0.01)


class Clock:
    """Two ranks, and a clock that the test controls. `look` checks every half second, as the driver does."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        patch.setattr(time, "monotonic", lambda: self.now)
        self.heard = {0: self.now, 1: self.now}
        self.group = SimpleNamespace(
            plan=PLAN, generation=1, actors=[0, 1], last_heard=self.heard, peek=lambda rank: None
        )
        self.hangs = HangDetector(self.group, hang_seconds=4.0, first_seconds=60.0)  # type: ignore[arg-type]
        self.at = {0: (7, 3), 1: (7, 3)}

    def look(self, seconds: float, *, stepping: bool = True, costs: Costs | None = COSTS, moving: bool = False,
             deaf: tuple[int, ...] = ()):  # fmt: skip
        """The stalls seen within `seconds`."""
        stalls = []
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            if moving:
                self.at = {rank: (step, (counter + 1) % 4) for rank, (step, counter) in self.at.items()}
            for rank in {0, 1} - set(deaf):
                self.heard[rank] = self.now
            statuses = {rank: Status(1, step, "x", 0.5, counter) for rank, (step, counter) in self.at.items()}
            if stall := self.hangs.check(statuses, costs, stepping=stepping):
                stalls.append(stall)
        return stalls


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_ranks_that_make_progress_are_never_late(clock: Clock) -> None:
    assert clock.look(300, moving=True) == []


def test_a_stall_is_reported_early_and_late_at_its_deadline(clock: Clock) -> None:
    clock.look(1, moving=True)
    stalls = clock.look(5)
    assert not stalls[0].late
    assert stalls[0].seconds == 2.0
    assert stalls[-1].late
    assert [stall.late for stall in stalls].index(True) == 5  # 4.5 s: the first check after 4 s plus the longest op


@pytest.mark.parametrize(("op", "deadline"), [(Op.F, 4.0 + 10 * 0.01), (Op.BW, 4.0 + 10 * (0.5 + 0.5))])
def test_the_deadline_follows_the_instruction_that_does_not_end(clock: Clock, op: Op, deadline: float) -> None:
    costs = Costs.uniform(2, 0.01, 0.5, 0.5)
    clock.at = {rank: (7, first_action(PLAN.program, rank, op)) for rank in (0, 1)}
    late = [stall.seconds for stall in clock.look(20, costs=costs) if stall.late]
    assert deadline < late[0] <= deadline + 0.5


def test_the_longest_instruction_counts_between_steps(clock: Clock) -> None:
    assert clock.hangs.deadline(Costs.uniform(2, 0.01, 0.5, 0.25), [(0, None)]) == 4.0 + 10 * 0.5


def test_a_wait_inside_a_layer_that_ends_is_progress(clock: Clock) -> None:
    for waits in range(40):
        clock.now += 0.5
        clock.heard.update({0: clock.now, 1: clock.now})
        at = {rank: Status(1, 7, "x", 0.5, 3, waits=waits, axis="tp") for rank in (0, 1)}
        assert clock.hangs.check(at, COSTS, stepping=True) is None


def first_action(program: Program, rank: int, op: Op) -> int:
    return next(i for i, action in enumerate(program.streams[rank]) if action.parts[0].op is op)


def test_the_start_timeout_is_the_deadline_until_a_step_is_measured(clock: Clock) -> None:
    assert not any(stall.late for stall in clock.look(59, costs=None))
    assert clock.look(3, costs=None)[-1].late


def test_a_first_step_that_compiles_its_kernels_is_not_reported_as_waiting(clock: Clock) -> None:
    assert clock.look(14.5, costs=None) == []
    assert [stall.late for stall in clock.look(1, costs=None)] == [False]


def test_a_first_step_is_reported_no_later_than_it_is_late(clock: Clock) -> None:
    clock.hangs.first_seconds = 5.0
    assert [stall.late for stall in clock.look(6, costs=None)] == [False, True]


def test_a_pause_or_a_long_checkpoint_is_not_a_hang(clock: Clock) -> None:
    assert clock.look(600, stepping=False) == []
    assert clock.look(1.5) == []
    assert clock.look(60, moving=True) == []


def test_a_rank_that_does_not_answer_is_late_even_between_steps(clock: Clock) -> None:
    stall = clock.look(8, stepping=False, deaf=(1,))[-1]
    assert stall.late
    assert stall.causes == (1,)
    assert clock.hangs.fault(stall).detector == "heartbeat"


def test_the_silent_one_of_two_stalled_ranks_is_the_cause(clock: Clock) -> None:
    norm = next(i for i, action in enumerate(PLAN.program.streams[0]) if "NORM" in str(action.key))
    other = next(i for i, action in enumerate(PLAN.program.streams[1]) if "NORM" in str(action.key))
    clock.at = {0: (7, norm), 1: (7, other)}
    assert clock.look(6, deaf=(0,))[-1].causes == (0,)


def test_a_silent_rank_is_the_cause_even_if_its_partner_looks_like_it(clock: Clock) -> None:
    """A frozen process has posted a send that was never transmitted."""
    streams = PLAN.program.streams
    posted = next(i for i, action in enumerate(streams[0]) if str(action.key) == "0F2")
    clock.at = {0: (7, posted), 1: (7, next(i for i, action in enumerate(streams[1]) if str(action.key) == "1F0"))}
    assert clock.look(6, deaf=(0,))[-1].causes == (0,)


def test_a_suspended_machine_has_no_late_rank(clock: Clock) -> None:
    clock.look(1, moving=True)
    clock.now += 3600.0
    assert not any(stall.late for stall in clock.look(1))


EVALUATES = make_plan(load(None, ["mesh.pp=2", "model.layers=4", "data.holdout=0.1", "eval.every=2"]), "cpu")


def status(step: int, counter: int, *, evaluating: bool = False) -> Status:
    return Status(1, step, "x", 5.0, counter, program=int(evaluating))


def test_positions_are_those_in_the_program_of_the_ranks_furthest_behind() -> None:
    assert EVALUATES.eval is not None
    actions = len(EVALUATES.eval.program.streams[0])
    inside = status(2, actions + 3, evaluating=True)
    number, positions = positions_in_program(EVALUATES, [inside, status(1, -1)])
    assert (number, [at[:2] for at in positions]) == (1, [(1, 3), (-1, -1)])  # rank 1 has yet to begin
    number, positions = positions_in_program(EVALUATES, [inside, status(1, 4)])
    assert (number, [at[:2] for at in positions]) == (0, [(2, -1), (1, 4)])  # rank 1 is in the step before
    number, positions = positions_in_program(EVALUATES, [inside, status(2, 1)])
    assert (number, positions[0][:2], positions[1].counter) == (1, (1, 3), -1)  # rank 1 has left
    assert positions[1].step > 10**6
    number, positions = positions_in_program(EVALUATES, [inside, status(2, -1, evaluating=True)])
    assert (number, positions[1].counter) == (1, -1) and positions[1].step > 10**6
    number, positions = positions_in_program(EVALUATES, [status(7, 3), status(6, -1)])
    assert (number, [at[:2] for at in positions]) == (0, [(7, 3), (6, -1)])


def test_ranks_in_another_stage_of_a_ramp_are_between_steps() -> None:
    ramp = "batch.rampup=[{global_batch_size: 4, steps: 3}]"
    plan = make_plan(load(None, ["mesh.pp=2", "model.layers=4", ramp]), "cpu")
    behind, ahead = Status(1, 2, "x", 5.0, 4, program=1), Status(1, 3, "x", 5.0, 6, program=0)
    number, positions = positions_in_program(plan, [ahead, behind])
    assert (number, [at[:2] for at in positions]) == (1, [(3, -1), (2, 4)])
    number, positions = positions_in_program(plan, [behind, behind])
    assert (number, [at[:2] for at in positions]) == (1, [(2, 4), (2, 4)])


def test_a_rank_that_an_evaluation_waits_for_is_the_cause(clock: Clock) -> None:
    assert EVALUATES.eval is not None
    clock.group.plan = EVALUATES
    first = next(i for i, action in enumerate(EVALUATES.eval.program.streams[1]) if action.parts[0].op is Op.F)
    stuck = {0: status(2, 0, evaluating=True), 1: status(2, first, evaluating=True)}
    for _ in range(20):
        clock.now += 0.5
        clock.heard.update({0: clock.now, 1: clock.now})
        stall = clock.hangs.check(stuck, COSTS, stepping=True)
    assert stall is not None and stall.causes == (0,) and "in 0F0" in stall.verdict.sentence
