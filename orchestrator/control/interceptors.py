"""Guards every call of the control service: token, deadline, number of callers, and errors in one sentence."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2

from pentad.orchestrator.control.control_messages import MAX_MESSAGE_BYTES, METHODS, Method
from pentad.orchestrator.control.service import Refused

HEALTH = "grpc.health.v1.Health"  # probes have no token
MAX_CALLERS = 16  # of each method at once, so that slow calls of one do not block the others
MAX_PROBES = 64  # of each health method at once
DEFAULT_SECONDS = 60.0  # for a call without a deadline
MAX_SECONDS = 3600.0  # for a call with a deadline, and for a stream
OPTIONS = (
    ("grpc.so_reuseport", 0),  # otherwise a second service could share a taken port and get half of the calls
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 64),  # per connection
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
)
_HEALTH = (
    Method(HEALTH, "Check", health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse, False),
    Method(HEALTH, "Watch", health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse, True),
)
_log = logging.getLogger(__name__)


def make_server(methods: Any, health: Any, token: str) -> Any:
    """A server of both services; create and use it inside the event loop. `methods` and `health` have one coroutine
    function per method, which takes the request and a function that writes one message of a stream."""
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((_service(METHODS, methods, token), _service(_HEALTH, health, None)))
    return server


def _service(methods: Iterable[Method], implementation: Any, token: str | None) -> Any:
    handlers = {}
    for method in methods:
        call = _guarded(method, getattr(implementation, method.name), token)
        kind = grpc.unary_stream_rpc_method_handler if method.streams else grpc.unary_unary_rpc_method_handler
        # No deserializer: requests without the token are not even parsed.
        handlers[method.name] = kind(call, response_serializer=method.response.SerializeToString)
    return grpc.method_handlers_generic_handler(method.service, handlers)


def _guarded(method: Method, do: Callable[..., Awaitable[Any]], token: str | None) -> Callable[..., Awaitable[Any]]:
    """`do`, restricted to callers with the `token` (None: open to everyone)."""
    limit = MAX_CALLERS if token else MAX_PROBES
    slots = asyncio.Semaphore(limit)

    async def call(raw: bytes, context: Any) -> Any:
        try:
            if token is not None and not _has_token(context, token):
                expected = "expected that of control.json"
                raise Refused(grpc.StatusCode.UNAUTHENTICATED, f"the token is missing or wrong: {expected}")
            if slots.locked():
                sentence = f"{method.name} has {limit} callers: expected at most {limit} at once"
                raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)
            async with slots, asyncio.timeout(_seconds(method, context)):
                return await do(method.request.FromString(raw), context.write)
        except Exception as error:
            refused = _refusal(method, error)
        await context.abort(refused.code, str(refused))

    return call


def _refusal(method: Method, error: Exception) -> Refused:
    """The error that the caller sees; it reveals only the type of an internal error."""
    codes = grpc.StatusCode
    match error:
        case Refused():
            return error
        case DecodeError():
            return Refused(codes.INVALID_ARGUMENT, f"the request is not a {method.request.DESCRIPTOR.full_name}")
        case TimeoutError():
            return Refused(codes.DEADLINE_EXCEEDED, f"{method.name} took longer than the call may last")
    _log.error("control service: %s failed", method.name, exc_info=error)
    return Refused(codes.INTERNAL, f"{method.name} failed in the run's driver ({type(error).__name__})")


def _has_token(context: Any, token: str) -> bool:
    given = dict(context.invocation_metadata() or ()).get("authorization", "")
    return hmac.compare_digest(str(given).encode(), f"Bearer {token}".encode())


def _seconds(method: Method, context: Any) -> float:
    left = context.time_remaining()
    return min(MAX_SECONDS, (MAX_SECONDS if method.streams else DEFAULT_SECONDS) if left is None else max(0.0, left))
