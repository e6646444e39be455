"""How the control service takes a call: who may, how long, how many at once, and errors of one sentence."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2

from pentad.orchestrator.control.control_messages import METHODS, MOST_BYTES, Method
from pentad.orchestrator.control.service import Refused

OPEN = "grpc.health.v1.Health"  # a probe has no token
CALLERS = 16  # at once, of each method: one that is stuck keeps none of the others waiting
PROBES = 64  # at once, of each method of health
SECONDS = 60.0  # for a call without a deadline
MOST_SECONDS = 3600.0  # for any other, and for a stream
OPTIONS = (
    ("grpc.so_reuseport", 0),  # else a second service on a taken port starts, and gets every other call
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_send_message_length", MOST_BYTES),
    ("grpc.max_concurrent_streams", 64),  # of a connection
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
)
_HEALTH = (
    Method(OPEN, "Check", health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse, False),
    Method(OPEN, "Watch", health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse, True),
)
_log = logging.getLogger(__name__)


def make_server(methods: Any, health: Any, token: str) -> Any:
    """A server of both services, to be made and used inside the event loop. `methods` and `health` have a coroutine
    function for each method, of the request and of what writes an answer of a stream."""
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((_service(METHODS, methods, token), _service(_HEALTH, health, None)))
    return server


def _service(methods: Iterable[Method], does: Any, token: str | None) -> Any:
    handlers = {}
    for method in methods:
        call = _guarded(method, getattr(does, method.name), token)
        kind = grpc.unary_stream_rpc_method_handler if method.streams else grpc.unary_unary_rpc_method_handler
        # No deserializer: the bytes of a caller without the token are not even read.
        handlers[method.name] = kind(call, response_serializer=method.response.SerializeToString)
    return grpc.method_handlers_generic_handler(method.service, handlers)


def _guarded(method: Method, do: Callable[..., Awaitable[Any]], token: str | None) -> Callable[..., Awaitable[Any]]:
    """`do` for those who may call it; `token` None: everyone."""
    callers = 0
    most = CALLERS if token else PROBES

    async def answer(raw: bytes, context: Any) -> Any:
        nonlocal callers
        if token is not None and not _holds(context, token):
            raise Refused(
                grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong: expected that of control.json"
            )
        if callers >= most:
            sentence = f"{method.name} has {callers} callers: expected at most {most} at once"
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)
        request = method.request.FromString(raw)
        callers += 1
        try:
            async with asyncio.timeout(_seconds(method, context)):
                return await do(request, context.write)
        finally:
            callers -= 1

    async def call(raw: bytes, context: Any) -> Any:
        try:
            return await answer(raw, context)
        except Exception as error:
            refused = _refusal(method, error)
        await context.abort(refused.code, str(refused))

    return call


def _refusal(method: Method, error: Exception) -> Refused:
    """What the caller is told: never more of a fault of ours than its kind."""
    codes = grpc.StatusCode
    match error:
        case Refused():
            return error
        case DecodeError():
            return Refused(codes.INVALID_ARGUMENT, f"the request is no {method.request.DESCRIPTOR.full_name}")
        case TimeoutError():
            return Refused(codes.DEADLINE_EXCEEDED, f"{method.name} took longer than the call may last")
    _log.error("control service: %s failed", method.name, exc_info=error)
    return Refused(codes.INTERNAL, f"{method.name} failed in the run's driver ({type(error).__name__})")


def _holds(context: Any, token: str) -> bool:
    given = dict(context.invocation_metadata() or ()).get("authorization", "")
    return hmac.compare_digest(str(given).encode(), f"Bearer {token}".encode())


def _seconds(method: Method, context: Any) -> float:
    left = context.time_remaining()
    return min(MOST_SECONDS, (MOST_SECONDS if method.streams else SECONDS) if left is None else max(0.0, left))
