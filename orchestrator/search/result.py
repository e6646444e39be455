"""What a search has found."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from pentad.orchestrator.planning.fit import DeviceMemory
from pentad.orchestrator.search.planned import Planned
from pentad.orchestrator.search.space import Setting, Space
from pentad.schedules.spec.mesh import Mesh


@dataclass(frozen=True)
class Refusal:
    """Why no setting of a mesh was listed: a sentence; and the bytes that each needs at least, if memory is why."""

    why: str
    least_bytes: int = 0

    @classmethod
    def for_memory(cls, mesh: Mesh, available: int, least: int) -> Refusal:
        here, needed = (f"{each / 2**30:.2f} GiB" for each in (available, least))
        return cls(f"memory is {here} a rank: expected more than {needed} for mesh {mesh}", least)


class Missed(NamedTuple):
    """A setting that does not fit, and the least seconds that it could take."""

    setting: Setting
    seconds: float


@dataclass
class SearchResult:
    """The fastest plan of each of the best meshes, best first; `refusals` by mesh; `missed` is what might be fastest of
    all that does not fit; `planned` is the number of settings that were."""

    device: DeviceMemory
    space: Space
    held: Collection[str] = ()
    choices: list[Planned] = field(default_factory=list)
    refusals: dict[Mesh, Refusal] = field(default_factory=dict)
    missed: Missed | None = None
    planned: int = 0

    @property
    def num_possible(self) -> int:
        return len(self.space.meshes) - len(self.refusals)
