"""Before Ray tries to join a cluster, it is known whether that is possible; if not, one sentence says why."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import ray
from ray.core.generated.gcs_service_pb2 import GetClusterIdReply
from ray.exceptions import AuthenticationError

from pentad.orchestrator.cluster.cluster_join import check_joinable
from pentad.schedules.ir.errors import PentadError


class Head(grpc.GenericRpcHandler):
    """Answers every call with `code`."""

    code = grpc.StatusCode.OK

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self.code is not grpc.StatusCode.OK:
                context.abort(self.code, "refused")
            return GetClusterIdReply().SerializeToString()

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Head, str]]:
    """The server in place of a Ray head, and its address."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    handler, server = Head(), grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield handler, f"127.0.0.1:{port}"
    server.stop(0).wait()


def refusal(address: str, mode: str) -> str:
    with pytest.raises(PentadError) as error:
        check_joinable(address, mode)
    return str(error.value)


def test_a_head_that_answers_can_be_joined_and_one_that_refuses_says_why(head: tuple[Head, str]) -> None:
    handler, address = head
    check_joinable(address, "token")
    handler.code = grpc.StatusCode.UNIMPLEMENTED
    assert "where no Ray cluster answers (what listens there is not a Ray head: UNIMPLEMENTED)" in refusal(address, "")
    handler.code = grpc.StatusCode.UNAUTHENTICATED
    asks = f"cluster.auth is 'disabled', but the Ray cluster at {address} asks for a token"
    assert refusal(address, "disabled") == asks
    assert refusal(address, "token").startswith(f"the Ray cluster at {address} refuses the token found here: expected")


def test_a_missing_token_is_said_to_be_missing(head: tuple[Head, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: Any) -> None:
        raise AuthenticationError("no token")

    monkeypatch.setattr("ray._private.grpc_utils.init_grpc_channel", without)
    assert refusal(head[1], "token").startswith("cluster.auth is 'token', but no token was found here: expected")


def test_auto_asks_the_head_that_ray_would_join_and_leaves_the_rest_to_ray(
    head: tuple[Head, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, address = head
    handler.code = grpc.StatusCode.UNAUTHENTICATED
    found: list[Any] = [address, None, "ray://h:1", OSError("unreadable")]

    def canonical(given: str) -> Any:
        answer = found.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray._private.services, "canonicalize_bootstrap_address", canonical)
    assert "refuses the token" in refusal("auto", "token")
    for _ in range(3):
        check_joinable("auto", "token")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:port", "nowhere"])
def test_where_nothing_listens_there_is_no_cluster(address: str) -> None:
    sentence = refusal(address, "token")
    assert sentence.startswith(f"cluster.address is '{address}', where no Ray cluster answers (")
    assert sentence.endswith("): expected local, auto or HOST:PORT")
