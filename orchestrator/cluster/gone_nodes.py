"""Nodes whose raylet, Ray's process there, has ended. Ray notices that by its health checks, after seconds; the
operating system of the node knows at once: it refuses connections to the raylet's port."""

from __future__ import annotations

import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import ray
from ray._private.grpc_utils import init_grpc_channel

CONNECT_SECONDS = 0.3  # a host that is away does not refuse, and is left to Ray's health checks
TELL_SECONDS = 2.0
UNEXPECTED_TERMINATION = 2  # of the reasons for which a node is gone


def gone_nodes(nodes: Collection[str]) -> frozenset[str]:
    """Those of these nodes, by Ray's IDs, whose raylet has ended: with it, all ranks there. That it is slow, stopped or
    cut off is no reason: the kernel of its host accepts connections meanwhile."""
    known = {node["NodeID"]: node for node in ray.nodes()}
    found = [known[node] for node in sorted(nodes) if node in known]
    with ThreadPoolExecutor(max_workers=max(1, len(found))) as pool:
        refused = pool.map(_refuses, ((node["NodeManagerAddress"], node["NodeManagerPort"]) for node in found))
        return frozenset(
            node["NodeID"] for node, refuses in zip(found, refused, strict=True) if refuses or not node["Alive"]
        )


def forget_gone_nodes(nodes: Collection[str]) -> None:
    """Tells Ray which of these nodes are gone, so that it looks for other room for what they had."""
    for node in gone_nodes(nodes):
        with suppress(Exception):  # private to Ray: without it, its health checks find that out
            _unregister(node)


def _refuses(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _unregister(node: str) -> None:
    """What a raylet says itself as it ends, if it can."""
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    context, worker = ray.get_runtime_context(), ray._private.worker.global_worker
    request = gcs_service_pb2.UnregisterNodeRequest(node_id=bytes.fromhex(node))
    request.node_death_info.reason = UNEXPECTED_TERMINATION
    request.node_death_info.reason_message = "its raylet refuses connections"
    with init_grpc_channel(context.gcs_address) as channel:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        cluster = [("ray_cluster_id", worker.gcs_client.cluster_id.hex())]
        stub.UnregisterNode(request, timeout=TELL_SECONDS, metadata=cluster)
