"""What torch's profiler saw on a rank, as threads of a trace-event file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from pentad.schedules.simulate.step_profile import ASYNC, KERNEL, ProfileEvent, nested


def profile_threads(events: Sequence[ProfileEvent]) -> Iterator[tuple[str, list[ProfileEvent]]]:
    """(name, events) of threads whose events nest: kernels by stream, then operators by host thread, and what those
    began and did not wait for."""
    tracks = defaultdict[tuple[int, int], list[ProfileEvent]](list)
    for event in events:
        tracks[{KERNEL: 0, ASYNC: 2}.get(event.kind, 1), event.track].append(event)
    for (kind, track), its in sorted(tracks.items()):
        name = f"{('kernels, stream', 'operators, thread', 'async, thread')[kind]} {track}"
        for level, row in enumerate(nested(its)):
            yield name if level == 0 else f"{name} ({level + 1})", row
