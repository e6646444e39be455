"""A Ray cluster as a run would start it, with its dashboard up."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from pentad.orchestrator.cluster.cluster import Cluster, join
from pentad.orchestrator.cluster.local_head import LocalHead, launch
from pentad.orchestrator.config.sections import ClusterSection

DASHBOARD_SECONDS = 60.0


@contextmanager
def start_cluster(section: ClusterSection, ranks: int) -> Iterator[Cluster]:
    """Starts or joins the configured cluster, and leaves it; a local one ends then."""
    with launch(section, ranks) as head, join(section, ranks, head) as cluster:
        cluster.start_dashboard()
        if head is not None and head.dashboard:
            _wait_for_dashboard(head)
        yield cluster


def _wait_for_dashboard(head: LocalHead) -> None:
    deadline = time.monotonic() + DASHBOARD_SECONDS
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{head.dashboard}/api/version", timeout=DASHBOARD_SECONDS).close()
            return
        except urllib.error.HTTPError:  # the dashboard wants the token
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(
        f"no dashboard within {DASHBOARD_SECONDS:g} s: {(head.folder / 'head.log').read_text()[-200:]}"
    )
