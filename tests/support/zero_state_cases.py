"""What test_zero_state.py shares with other tests."""

from __future__ import annotations

from pathlib import Path

from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.manifest import Shard


def resumed(fleet, plan, folder: Path, step: int, calls, *, before=None) -> list:
    """Saves a plan's state at a step and goes on from there, with another plan if one is given."""
    half = fleet.run(before or plan, [(0, step)], save=str(folder))
    shards = [Shard.from_plain(plain) for outcome in half for plain in outcome.shards]
    checkpoint.commit(folder, step=step, shards=shards, meta={})
    return fleet.run(plan, calls, restore=str(folder))
