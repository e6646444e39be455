"""Detects nodes whose raylet (Ray's process on a node) has ended. Ray's health checks take seconds to notice, but the
node's operating system refuses connections to the raylet's port at once."""

from __future__ import annotations

import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import ray
from ray._private.grpc_utils import init_grpc_channel

CONNECT_SECONDS = 0.3  # an unreachable host refuses nothing, and is left to Ray's health checks
TELL_SECONDS = 2.0
UNEXPECTED_TERMINATION = 2  # one of Ray's reasons for the death of a node


def gone_nodes(nodes: Collection[str]) -> frozenset[str]:
    """The nodes among these, by Ray's IDs, whose raylet has ended, and with it all ranks there. A raylet that is slow,
    stopped or cut off does not count: its host's kernel still accepts connections, or does not answer."""
    known = {node["NodeID"]: node for node in ray.nodes()}
    found = [known[node] for node in sorted(nodes) if node in known]
    with ThreadPoolExecutor(max_workers=max(1, len(found))) as pool:
        refused = pool.map(_refuses, ((node["NodeManagerAddress"], node["NodeManagerPort"]) for node in found))
        return frozenset(
            node["NodeID"] for node, refuses in zip(found, refused, strict=True) if refuses or not node["Alive"]
        )


def forget_gone_nodes(nodes: Collection[str]) -> None:
    """Tells Ray which of these nodes are gone, so that it finds other room for their bundles."""
    for node in gone_nodes(nodes):
        with suppress(Exception):  # private to Ray: if it fails, the health checks find out
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
    """Unregisters a node, as its raylet does itself if it ends in an orderly way."""
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    context, worker = ray.get_runtime_context(), ray._private.worker.global_worker
    request = gcs_service_pb2.UnregisterNodeRequest(node_id=bytes.fromhex(node))
    request.node_death_info.reason = UNEXPECTED_TERMINATION
    request.node_death_info.reason_message = "its raylet refuses connections"
    with init_grpc_channel(context.gcs_address) as channel:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        cluster = [("ray_cluster_id", worker.gcs_client.cluster_id.hex())]
        stub.UnregisterNode(request, timeout=TELL_SECONDS, metadata=cluster)
