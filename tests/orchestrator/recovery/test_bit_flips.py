"""Verdicts on digests that differ, and recoveries from ranks with wrong state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_ray import FakeRun

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.recovery.bit_flips import Verdict, find_verdict
from pentad.workers.integrity.result import RankCheck

GOOD, BAD, WORSE, WORST = 1, 2, 3, 4


def checks(
    state: dict[str, list[int | None]] | None = None,
    first: list[int | None] | None = None,
    second: list[int | None] | None = None,
) -> list[RankCheck]:
    """Checks of ranks with digests `state[name][rank]` that compute the same thing twice, with digests `first[rank]`
    and `second[rank]`. None: the rank does not have it."""
    columns = [*(state or {}).values(), first or [], second or []]
    of_state, size = state or {}, max(map(len, columns))
    first = first or [GOOD] * size
    second = second or first

    def of(rank: int, digests: dict[str, list[int | None]]) -> dict[str, int]:
        return {name: value for name, values in digests.items() if (value := values[rank]) is not None}

    return [RankCheck(of(r, of_state), of(r, {"F": first}), of(r, {"F": second})) for r in range(size)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(checks({"w": [GOOD] * 4}), None, id="all agree"),
        pytest.param(checks({"w": [GOOD, None, None], "v": [None, BAD, WORSE]})[:2], None, id="no replica"),
        pytest.param(
            checks({"w": [GOOD, BAD, GOOD]}), Verdict("data", (1,), "w", 1), id="one state against a majority"
        ),
        pytest.param(
            checks({"w": [GOOD, BAD]}), Verdict("data", (0, 1), "w", 1, certain=False), id="two states, no majority"
        ),
        pytest.param(
            checks({"w": [GOOD, BAD, None, None], "norm": [GOOD, BAD, GOOD, GOOD]}),
            Verdict("data", (1,), "w", 2),
            id="a majority elsewhere explains what has none",
        ),
        pytest.param(
            checks({"w": [GOOD, BAD, None, None], "norm": [GOOD, GOOD, GOOD, BAD]}),
            Verdict("data", (0, 1, 3), "w", 2, certain=False),
            id="a majority elsewhere explains nothing here",
        ),
        pytest.param(
            checks(first=[GOOD, BAD, GOOD, GOOD], second=[GOOD] * 4),
            Verdict("hardware", (1,), "F", 1),
            id="wrong once, before",
        ),
        pytest.param(
            checks(first=[GOOD] * 3, second=[GOOD, GOOD, BAD]),
            Verdict("hardware", (2,), "F", 1),
            id="wrong once, again",
        ),
        pytest.param(
            checks(first=[GOOD, BAD, GOOD]), Verdict("hardware", (1,), "F", 1), id="always wrong, against a majority"
        ),
        pytest.param(
            checks(first=[GOOD, BAD]),
            Verdict("software", (0, 1), "F", 1, certain=False),
            id="two results, each twice",
        ),
        pytest.param(
            checks(first=[GOOD, BAD, WORSE]),
            Verdict("software", (0, 1, 2), "F", 1, certain=False),
            id="all differ, each twice the same",
        ),
        pytest.param(
            checks(first=[GOOD, BAD, GOOD], second=[WORSE, WORST, GOOD]),
            Verdict("software", (0, 1), "F", 1),
            id="most ranks do not repeat themselves",
        ),
        pytest.param(
            checks(first=[GOOD, GOOD], second=[GOOD, BAD]),
            Verdict("hardware", (1,), "F", 1),
            id="one of two ranks does not repeat itself",
        ),
        pytest.param(
            checks({"w": [GOOD, GOOD, BAD]}, first=[GOOD, GOOD, BAD]),
            Verdict("data", (2,), "w", 1),
            id="a wrong state explains a wrong result",
        ),
        pytest.param(
            checks({"w": [GOOD, GOOD, BAD]}, first=[GOOD] * 3, second=[GOOD, GOOD, BAD]),
            Verdict("hardware", (2,), "F", 1),
            id="no state explains two results",
        ),
    ],
)
def test_what_differs_says_who_and_what_is_wrong(given: list[RankCheck], expected: Verdict | None) -> None:
    assert find_verdict(given) == expected


@pytest.mark.parametrize("kind", ["data", "hardware", "software"])
@pytest.mark.parametrize("certain", [True, False])
def test_a_verdict_is_a_sentence_with_the_ranks(kind: str, certain: bool) -> None:
    sentence = Verdict(kind, (1, 3), "model.norm", 4, certain).sentence  # type: ignore[arg-type]
    assert "ranks 1 and 3" in sentence and "model.norm and 3 more" in sentence


SQUARE = ("mesh.dp=2", "mesh.pp=2", "schedule.microbatches=4")


def wrong(run: FakeRun, *ranks: int) -> WorkerError:
    """The fault of living ranks with wrong state."""
    return WorkerError(f"rank {ranks[0]} is wrong", ranks[0], "", ranks, "corrupt", "check")


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
@pytest.mark.parametrize("copies", [0, 3])
def test_ranks_that_are_wrong_are_replaced_and_all_go_back_to_the_checkpoint(
    start: Callable[..., FakeRun], ranks: tuple[int, ...], copies: int
) -> None:
    """Replicas and copies in memory may derive from wrong state; a checkpoint was compared before it was written."""
    run = start(*SQUARE, f"elastic.replicate_every={copies}")
    run.save(4)
    if copies:
        run.copies.begin_generation()
        run.copies.submit(6)
        run.copies.commit(6)
    state = run.recovery.recover(wrong(run, *ranks), 7)
    (recovered,) = run.events("recovered")
    assert (recovered["how"], recovered["step"], recovered["steps_replayed"]) == ("checkpoint", 4, 3)
    assert state.version == 4 and run.versions() == [4] * 4
    assert [rank for rank in range(4) if run.fake.members()[rank] is not run.before[rank]] == list(ranks)
    assert not [rank for rank in run.before if rank.number in ranks and rank.is_alive]
    assert {(row["rank"], row["fault"], row["detector"]) for row in run.events("lost")} == {
        (rank, "corrupt", "check") for rank in ranks
    }


def test_where_nobody_is_known_to_be_wrong_all_go_back_and_nobody_is_replaced(start: Callable[..., FakeRun]) -> None:
    run = start(*SQUARE)
    run.save(4)
    fault = WorkerError("ranks 0 and 1 differ", 0, "", (), "corrupt", "check")
    state = run.recovery.recover(fault, 7)
    assert state.version == 4 and run.versions() == [4] * 4
    assert run.fake.members() == run.before and not run.events("lost")
    run.recovery.recover(wrong(run, 0), 8)  # now the wrong rank is known, and replaced
    assert [row["rank"] for row in run.events("lost")] == [0]
    with pytest.raises(WorkerError, match="ranks 0 and 1 differ; in the same place"):
        run.recovery.recover(fault, 9)


def test_a_rank_that_is_wrong_again_in_the_same_place_ends_the_run(start: Callable[..., FakeRun]) -> None:
    run = start(*SQUARE)
    run.save(4)
    run.recovery.recover(wrong(run, 1), 7)
    run.recovery.recover(wrong(run, 2), 8)
    with pytest.raises(WorkerError, match="rank 1 is wrong; in the same place, this happened before"):
        run.recovery.recover(wrong(run, 1), 9)
