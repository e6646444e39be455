"""Adds the endpoints of a driver that is itself a Ray job to the job's metadata, where `pentad jobs` finds them."""

from __future__ import annotations

import json
import os
from contextlib import suppress

import ray

TIMEOUT_SECONDS = 5.0


def announce(endpoints: dict[str, str]) -> bool:
    """Adds this driver's endpoints to the metadata of its Ray job, once it has joined the cluster.

    False if it is not a job or Ray does not accept them. Never raises: no run should end because of this.
    """
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        return False
    with suppress(Exception):  # private to Ray: may raise anything in another version
        from ray.dashboard.modules.job.common import JobInfoStorageClient  # imports aiohttp, which takes a while

        job = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]["job_submission_id"]
        key = JobInfoStorageClient.JOB_DATA_KEY.format(job_id=job).encode()
        namespace = ray._private.ray_constants.KV_NAMESPACE_JOB
        store = ray._private.worker.global_worker.gcs_client
        # No race: Ray itself writes this key only before the driver starts and after it ends.
        info = json.loads(store.internal_kv_get(key, namespace, timeout=TIMEOUT_SECONDS))
        info["metadata"] = (info["metadata"] or {}) | {f"pentad/{name}": value for name, value in endpoints.items()}
        store.internal_kv_put(key, json.dumps(info).encode(), True, namespace, timeout=TIMEOUT_SECONDS)
        return True
    return False
