"""Checks that a Ray cluster answers at an address and accepts the token, before ray.init, which retries for minutes."""

from __future__ import annotations

import socket
from contextlib import suppress

import grpc
import ray
from ray.exceptions import AuthenticationError

from pentad.schedules.ir.errors import PentadError

TIMEOUT_SECONDS = 10.0


def check_joinable(address: str, mode: str) -> None:
    """Asks the cluster at 'HOST:PORT' or 'auto' for its ID, in the present environment, whose cluster.auth is `mode`.

    Raises PentadError if none answers or it wants another token. If 'auto' finds no cluster, ray.init reports it.
    """
    if address == "auto":
        found = None
        with suppress(Exception):  # private to Ray: may raise anything in another version
            found = ray._private.services.canonicalize_bootstrap_address(address)
        if found and "//" not in found:
            _request_cluster_id(found, mode)
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise _no_cluster(address, str(error)) from None
    _request_cluster_id(address, mode)


def _request_cluster_id(address: str, mode: str) -> None:
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.gcs_service_pb2 import GetClusterIdRequest
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

    expected = "expected the cluster's token in RAY_AUTH_TOKEN, or in a file that RAY_AUTH_TOKEN_PATH names"
    try:
        with init_grpc_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
            NodeInfoGcsServiceStub(channel).GetClusterId(GetClusterIdRequest(), timeout=TIMEOUT_SECONDS)
    except AuthenticationError:
        raise PentadError(f"cluster.auth is {mode!r}, but no token was found here: {expected}") from None
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            raise _no_cluster(address, f"what listens there is not a Ray head: {error.code().name}") from None
        if mode == "disabled":
            raise PentadError(
                f"cluster.auth is 'disabled', but the Ray cluster at {address} asks for a token"
            ) from None
        raise PentadError(f"the Ray cluster at {address} refuses the token found here: {expected}") from None


def _no_cluster(address: str, reason: str) -> PentadError:
    where = f"cluster.address is {address!r}, where no Ray cluster answers ({reason})"
    return PentadError(f"{where}: expected local, auto or HOST:PORT")
