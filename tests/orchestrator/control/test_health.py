"""The health service: which ranks are SERVING and whether the run is; probes need no token."""

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from controls import NOT_SERVING, SERVING, Served, rank, seen, serving
from grpc_health.v1 import health_pb2

from pentad.orchestrator.control.service import healths
from pentad.orchestrator.monitoring.run_state import RANK_STATES, RunView


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as made:
        yield made


@pytest.mark.parametrize("state", RANK_STATES)
def test_a_rank_is_serving_while_it_answers(state: str) -> None:
    expected = state in ("running", "waiting", "idle")
    now = time.monotonic()
    named = healths(seen("running", rank(3, state)), closed=False, now=now)
    assert named == {"": True, "pentad.v1.Control": True, "pentad.rank.3": expected}
    assert not healths(seen("running", rank(3, state, age=6.0)), closed=False, now=now)["pentad.rank.3"]


@pytest.mark.parametrize(
    ("view", "closed", "serves"),
    [
        (seen("paused"), False, True),
        (seen("recovering"), False, True),
        (seen("recovering", rank(0), rank(1, "lost")), False, False),
        *((seen(state), False, False) for state in ("finished", "stopped", "failed")),
        (seen(), True, False),
    ],
)
def test_a_run_is_serving_unless_it_has_ended_or_lost_ranks(view: RunView, closed: bool, serves: bool) -> None:
    named = healths(view, closed=closed, now=time.monotonic())
    assert named[""] is named["pentad.v1.Control"] is serves


def test_probes_need_no_token_and_see_a_rank_come_and_go(served: Served) -> None:
    assert served.serves("")
    assert served.serves("pentad.v1.Control")
    assert served.serves("pentad.rank.1")
    with pytest.raises(grpc.RpcError, match="service is unknown: expected '', "):
        served.serves("pentad.rank.2")
    updates = served.health.Watch(health_pb2.HealthCheckRequest(service="pentad.rank.1"), timeout=10)
    assert next(updates).status == SERVING
    served.control.on_view(seen("running", rank(0), rank(1, "hung")))
    assert next(updates).status == NOT_SERVING
    served.control.on_ranks_placed(seen("running", rank(0)))
    assert next(updates).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    served.control.on_view(seen())
    assert next(updates).status == SERVING
    served.control.close()
    assert [answer.status for answer in updates] == [NOT_SERVING]
