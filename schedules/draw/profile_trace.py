"""What torch's profiler saw on a rank, as threads of a trace-event file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from pentad.schedules.simulate.step_profile import KERNEL, ProfileEvent, nested


def profile_threads(events: Sequence[ProfileEvent]) -> Iterator[tuple[str, list[ProfileEvent]]]:
    """(name, events) of threads whose events nest: kernels by stream, then operators by host thread."""
    tracks = defaultdict[tuple[bool, int], list[ProfileEvent]](list)
    for event in events:
        tracks[event.kind != KERNEL, event.track].append(event)
    for (on_host, track), its in sorted(tracks.items()):
        name = f"operators, thread {track}" if on_host else f"kernels, stream {track}"
        for level, row in enumerate(nested(its)):
            yield name if level == 0 else f"{name} ({level + 1})", row
