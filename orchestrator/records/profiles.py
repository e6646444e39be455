"""The profiled steps of a run: a folder each, with the events of torch's profiler on every rank, and the timeline."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from pentad.orchestrator.records.json_lines import reported
from pentad.orchestrator.records.run_files import replace_file
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import MOST_JSON, regular_file
from pentad.schedules.simulate.step_profile import ProfileEvent, RankProfile, unpack
from pentad.schedules.simulate.timeline import Span, Timeline

PROFILES = "profiles"
FACTS, TIMELINE = "profile.json", "timeline.arrow"


class StepProfile(NamedTuple):
    """A profiled step as reported by the ranks: profiles and names in drawings by rank; `offsets` seconds convert a
    rank's times to the clock of the `spans`."""

    step: int
    spans: tuple[Span, ...]
    ranks: dict[int, RankProfile]
    names: dict[int, str]
    offsets: dict[int, float]

    @property
    def problems(self) -> dict[str, list[int]]:
        """The problems, and the ranks on which they occurred."""
        found = dict[str, list[int]]()
        for rank, profile in sorted(self.ranks.items()):
            if profile.problem:
                found.setdefault(profile.problem, []).append(rank)
        return found

    @property
    def bytes(self) -> int:
        return sum(len(profile.data) for profile in self.ranks.values())


class SavedProfile(NamedTuple):
    """A profile in a run's folder: the events of each rank on the clock of the timeline. `left_out` counts a rank's
    shortest events, for which its profile had no room."""

    step: int
    timeline: Timeline
    events: dict[int, tuple[ProfileEvent, ...]]
    names: dict[int, str]
    left_out: dict[int, int]
    problems: dict[int, str]


def folder_of(run: Path, step: int) -> Path:
    return run / PROFILES / f"step-{step}"


def profiled_steps(run: Path) -> list[int]:
    """The steps with complete profiles, lowest first."""
    found = (re.fullmatch(r"step-(\d+)", path.parent.name) for path in (run / PROFILES).glob(f"step-*/{FACTS}"))
    return sorted(int(match[1]) for match in found if match)


def save_profile(run: Path, profile: StepProfile) -> None:
    """Saves a profile in a run's folder, unless it is empty, replacing any of the same step. Raises PentadError if it
    cannot be written."""
    if not profile.bytes:
        return
    folder = folder_of(run, profile.step)
    shutil.rmtree(folder, ignore_errors=True)
    with reported(folder):
        folder.mkdir(parents=True)
    for rank, each in profile.ranks.items():
        if each.data:
            replace_file(_events_of(folder, rank), each.data)
    replace_file(folder / TIMELINE, Timeline("measured", profile.spans).to_bytes())
    ranks = [
        {
            "rank": rank,
            "name": profile.names[rank],
            "offset": profile.offsets[rank],
            "left_out": each.left_out,
            "problem": each.problem,
        }
        for rank, each in sorted(profile.ranks.items())
    ]
    replace_file(folder / FACTS, json.dumps({"step": profile.step, "ranks": ranks}).encode())  # last: marks it complete


def drop_profiles(run: Path, step: int) -> None:
    """Deletes the profiles of `step` and later steps, which will run again."""
    for each in profiled_steps(run):
        if each >= step:
            shutil.rmtree(folder_of(run, each), ignore_errors=True)


def load_profile(run: Path, step: int) -> SavedProfile:
    """Loads the profile of a step. Raises PentadError if it is damaged."""
    folder = folder_of(run, step)
    timeline = Timeline.load(folder / TIMELINE)
    ranks = {rank["rank"]: rank for rank in _facts(folder / FACTS)}
    return SavedProfile(
        step,
        timeline,
        {rank: _events(_events_of(folder, rank), facts["offset"]) for rank, facts in ranks.items()},
        {rank: facts["name"] for rank, facts in ranks.items()},
        {rank: facts["left_out"] for rank, facts in ranks.items() if facts["left_out"]},
        {rank: facts["problem"] for rank, facts in ranks.items() if facts["problem"]},
    )


def _facts(path: Path) -> list[dict[str, Any]]:
    kinds: dict[str, Any] = {"rank": int, "name": str, "offset": (int, float), "left_out": int, "problem": str}
    try:
        ranks = json.loads(regular_file(path, MOST_JSON).read_bytes())["ranks"]
        if all(isinstance(rank[key], kind) for rank in ranks for key, kind in kinds.items()):
            return ranks
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise PentadError(f"{path} is not a readable profile: expected ranks with {', '.join(kinds)}")


def _events_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.arrow"


def _events(path: Path, offset: float) -> tuple[ProfileEvent, ...]:
    """A rank's events, shifted by `offset` seconds; empty for a rank that could not be profiled."""
    if not path.is_file():
        return ()
    try:
        shift, events = round(offset * 1e9), unpack(regular_file(path).read_bytes())
    except (OSError, PentadError) as error:
        raise PentadError(f"{path} is not a readable profile: {error}") from None
    return tuple(event._replace(start=event.start + shift) for event in events) if shift else events
