"""Why nothing can listen at an address, in one sentence."""

from __future__ import annotations

import errno


def why_not(key: str, host: str, port: int, error: OSError | UnicodeError) -> str:
    """What a config of metrics.host `host` and `key` `port` does wrong, when listening there raised `error`."""
    number, reason = (error.errno, error.strerror) if isinstance(error, OSError) else (None, "no name of a host")
    if number == errno.EADDRINUSE:
        from pentad.orchestrator.cluster import _holder  # imports ray

        return f"{key} is {port}, but {_holder(port)} has that port ({reason}); wanted a free one, or 0 for any"
    if number == errno.EACCES:
        return f"{key} is {port}, which needs more rights than yours, wanted one from 1024 on, or 0 for any"
    return f"metrics.host is {host!r}, where nothing can listen ({reason}), wanted an address of this machine"
