"""Names ranks and links that are slower than their peers, from every rank's seconds of each step.

A rank's compute excludes its waits, so a rank that only waits for a slow one is not slow. On a CPU it also excludes the
time for which other processes had the core; a rank that loses much time in this way is named as starved. A rank is
compared with those that have the same stages. Without such peers it is compared with itself in its first steps,
relative to how all other ranks have changed since. The score is the logarithm of the ratio, whose noise is symmetric:
on a busy machine a rank takes twice as long as another as often as half as long. A score's uncertainty comes from its
own changes from step to step: noisy ranks need larger differences. Scores of data, hosts and links must also exceed the
noise of compute and the time for which the rank is starved, as the threads that load and transfer are delayed as much.
Those of compute must exceed a share COLD of that time, as a rank that gets its core back finds other processes' data in
the caches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import expm1, log
from statistics import median
from typing import NamedTuple, TypeVar

from pentad.schedules.diagnosis.rank_times import DATA, HOST_OP, RankTime
from pentad.schedules.ir.instruction import RECEIVES
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.timeline import COMPUTE
from pentad.schedules.spec.mesh import LAYER_AXES, Mesh

LEAST = 0.06  # the smallest difference that counts, as a share of a step's compute; one of 8 % stays above it
WINDOW = 8  # steps whose median score decides
REMEMBERED = 64  # steps for which scores are kept
SURE = 2.2  # times the noise of one step: five standard deviations of the median of WINDOW steps
SURE_ALONE = 2.8  # the same for ranks without peers, whose baseline steps are noisy too
WARM_UP, BASELINE = 2, 32  # steps ignored at first; steps that a rank without peers is later compared with
COLD = 0.15  # share of its starved time by which a rank's compute may take longer for that reason
FEW = 4  # ranks above which the median that a rank is compared with includes the rank itself
KINDS = ("compute", "starved", "data", "host", "link")
CLEAR, LONG = 0.08, 16  # how much slower, and for how many steps in a row, before a rank's place is to blame
K = TypeVar("K")
Entity = tuple[str, int, int]  # kind, rank, and the receiver of a link or -1


class SlowRank(NamedTuple):
    """`ranks` (for a link, its sender and receiver) have been slow since step `since`, which was found at `step`: they
    take `excess` longer, as a share of a step's compute. `kind` is 'compute', 'starved' (other processes have the
    core), 'data', 'host' or 'link'. `evidence` has the ops that take longer, with their stage and the share by which
    they do. Several ranks of 'compute' wait for each other inside layers, so which of them is slow is not known. `over`
    is set once a rank is no longer slow."""

    kind: str
    ranks: tuple[int, ...]
    step: int
    since: int
    excess: float
    evidence: tuple[tuple[str, int, float], ...] = ()
    over: bool = False


class _Series:
    """The scores of an entity, newest last, and how much they change from step to step."""

    def __init__(self) -> None:
        self.scores: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)
        self.changes: deque[float] = deque(maxlen=REMEMBERED)
        self.above = 0  # steps in a row for which the score has been too large

    def add(self, step: int, score: float) -> None:
        if self.scores:
            self.changes.append(abs(score - self.scores[-1][1]))
        self.scores.append((step, score))

    @property
    def middle(self) -> float:
        return median(score for _, score in list(self.scores)[-WINDOW:])

    @property
    def noise(self) -> float:
        """Standard deviation of one score, robust to jumps and outliers."""
        return median(self.changes) / 0.954 if self.changes else 0.0

    def since(self) -> int:
        """The step at which the score rose: from there on, at most one score in four is below half of the present
        one."""
        half, low, found = self.middle / 2, 0, self.scores[-1][0]
        for count, (step, score) in enumerate(reversed(self.scores), 1):
            low += score < half
            if count >= WINDOW and 4 * low > count:
                break
            found = step if score >= half else found
        return found


class SlowRanks:
    """The slow ranks of one program on one mesh; a rank is reported once, until it is no longer slow."""

    def __init__(self, program: Program, mesh: Mesh) -> None:
        self.mesh, self.steps = mesh, 0
        ranks = range(mesh.size)
        self.peers = [tuple(other for other in mesh.group(("dp", *LAYER_AXES), rank)) for rank in ranks]
        self.inner = [mesh.group(LAYER_AXES, rank) for rank in ranks]
        self.sender = {
            (rank, str(action.key.op), action.key.stage): mesh.move(rank, pp=action.parts[0].peer)
            for rank in ranks
            for action in program.streams[mesh.coordinates(rank).pp]
            if action.key.op in RECEIVES
        }
        self.alone = len(self.peers[0]) == 1
        self.series: dict[Entity, _Series] = {}
        self.levels = {rank: _Series() for rank in ranks}  # compute relative to all ranks
        self.starved = {rank: _Series() for rank in ranks}  # as a share of a step's compute
        self.named: dict[Entity, SlowRank] = {}
        self.clear: dict[Entity, int] = {}  # steps in a row for which a named rank has taken CLEAR longer
        self.first: dict[int, list[float]] = {rank: [] for rank in ranks}
        self.by_op: dict[tuple[int, str, int], deque[float]] = {}

    def add(self, times: Sequence[RankTime]) -> list[SlowRank]:
        """Adds the times of a step; returns the ranks that have become slow, and those that no longer are."""
        self.steps += 1
        work = _work(times)
        if self.steps <= WARM_UP or len(work) < self.mesh.size:
            return []
        for each in times:
            if each.op in COMPUTE:
                key = each.rank, each.op, each.stage
                self.by_op.setdefault(key, deque(maxlen=WINDOW // 2)).append(each.own)
        step = times[0].step
        for entity, score in self._scores(times, work).items():
            self.series.setdefault(entity, _Series()).add(step, score)
        changes = [*self._ended(step), *self._begun(step, any(each.waited for each in times))]
        self.clear = {
            entity: self.clear.get(entity, 0) + 1
            for entity in self.named
            if entity[0] == "compute" and expm1(self.series[entity].middle) >= CLEAR
        }
        return changes

    def lasting(self) -> list[SlowRank]:
        """Ranks that have computed CLEAR longer than their peers for LONG steps."""
        return [
            self.named[entity]._replace(
                step=self.series[entity].scores[-1][0],
                excess=expm1(self.series[entity].middle),
                evidence=self._evidence(entity[1]),
            )
            for entity, steps in self.clear.items()
            if steps >= LONG
        ]

    def _scores(self, times: Sequence[RankTime], work: dict[int, float]) -> dict[Entity, float]:
        typical = max(1e-9, median(work.values()))
        found = self._compute_scores(work)
        starved = dict.fromkeys(work, 0.0)
        for each in times:
            starved[each.rank] += each.starved
        for rank, lost in starved.items():
            self.starved[rank].add(self.steps, lost / typical)
        found |= {("starved", rank, -1): above / typical for rank, above in _above_others(starved).items()}
        for kind, op in (("data", DATA), ("host", HOST_OP)):
            seconds = {each.rank: each.own for each in times if each.op == op}
            found |= {(kind, rank, -1): above / typical for rank, above in _above_others(seconds).items()}
        links = dict.fromkeys({(source, key[0]) for key, source in self.sender.items()}, 0.0)
        for each in times:
            if (source := self.sender.get((each.rank, each.op, each.stage))) is not None:
                links[source, each.rank] += each.seconds
        return found | {("link", *link): above / typical for link, above in _above_others(links).items()}

    def _compute_scores(self, work: dict[int, float]) -> dict[Entity, float]:
        """Logarithm of the ratio of each rank's compute to that of its peers."""
        logs = {rank: log(max(1e-9, seconds)) for rank, seconds in work.items()}
        for rank, above in _above_others(logs).items():
            self.levels[rank].add(self.steps, above)
        if self.alone:
            return self._changes(logs)
        groups = [_above_others({rank: logs[rank] for rank in peers}) for peers in dict.fromkeys(self.peers)]
        return {("compute", rank, -1): above for group in groups for rank, above in group.items()}

    def _changes(self, logs: dict[int, float]) -> dict[Entity, float]:
        """How much each rank has changed since the first BASELINE steps, relative to the other ranks."""
        if self.mesh.size == 1:
            return {}
        if len(self.first[0]) < BASELINE:
            for rank, each in logs.items():
                self.first[rank].append(each)
            return {}
        changes = {rank: each - median(self.first[rank]) for rank, each in logs.items()}
        return {("compute", rank, -1): above for rank, above in _above_others(changes).items()}

    def _begun(self, step: int, layers_measured: bool) -> list[SlowRank]:
        noise = {kind: median([s.noise for (k, *_), s in self.series.items() if k == kind] or [0.0]) for kind in KINDS}
        noise_of_compute = median(series.noise for series in self.levels.values())
        found = list[SlowRank]()
        for kind in KINDS:
            sure = SURE_ALONE if self.alone and kind == "compute" else SURE
            least = max(noise[kind], noise_of_compute if kind != "compute" else 0.0)
            for entity, series in self.series.items():
                if entity[0] != kind or entity in self.named or len(series.scores) < WINDOW:
                    continue
                is_slow = series.middle >= max(LEAST, sure * max(least, series.noise), self._starved(entity))
                series.above = series.above + 1 if is_slow else 0
                if series.above < (2 if kind == "link" else 1) or self._is_explained(entity):
                    continue
                found.append(self._name(entity, series, step, layers_measured))
        return found

    def _starved(self, entity: Entity) -> float:
        """The part of a score's uncertainty due to other processes on the cores of its ranks."""
        kind, *ranks = entity
        share = {"compute": COLD, "starved": 0.0}.get(kind, 1.0)
        return share * max(self.starved[rank].middle for rank in ranks if rank >= 0)

    def _is_explained(self, entity: Entity) -> bool:
        """Whether a rank that is named already explains the score: a slow rank also sends late and issues instructions
        late. A starved rank may be slow as well."""
        kind, rank, other = entity
        explaining = (named for named in self.named.values() if kind != "compute" or named.kind != "starved")
        return any({rank, other} & {*named.ranks} for named in explaining)

    def _name(self, entity: Entity, series: _Series, step: int, layers_measured: bool) -> SlowRank:
        kind, rank, other = entity
        ranks: tuple[int, ...] = (rank, other) if kind == "link" else (rank,)
        if kind == "compute" and not layers_measured:
            ranks = self.inner[rank]
        evidence = self._evidence(rank) if kind == "compute" else ()
        since = series.since()
        excess = median(score for at, score in series.scores if at >= since)
        excess = expm1(excess) if kind == "compute" else excess
        self.named[entity] = SlowRank(kind, ranks, step, since, excess, evidence)
        return self.named[entity]

    def _evidence(self, rank: int) -> tuple[tuple[str, int, float], ...]:
        """The two ops whose time differs most from that of the peers."""
        peers, found = [peer for peer in self.peers[rank] if peer != rank], list[tuple[str, int, float]]()
        for (who, op, stage), seconds in self.by_op.items():
            others = [median(self.by_op[key]) for peer in peers if (key := (peer, op, stage)) in self.by_op]
            if who == rank and others and (usual := median(others)):
                found.append((op, stage, median(seconds) / usual - 1))
        return tuple(sorted(found, key=lambda each: -each[2])[:2])

    def _ended(self, step: int) -> list[SlowRank]:
        over = [entity for entity in self.named if self.series[entity].middle < LEAST / 2]
        return [self.named.pop(entity)._replace(step=step, over=True) for entity in over]


def _work(times: Iterable[RankTime]) -> dict[int, float]:
    found = dict[int, float]()
    for each in times:
        if each.op in COMPUTE:
            found[each.rank] = found.get(each.rank, 0.0) + each.own
    return found


def _above_others(values: dict[K, float]) -> dict[K, float]:
    """How far each value is above the median of the others; with more than FEW values, above the median of all."""
    if len(values) > FEW:
        usual = median(values.values())
        return {key: value - usual for key, value in values.items()}
    others = {own: [value for key, value in values.items() if key != own] for own in values}
    return {key: value - (median(others[key]) if others[key] else 0.0) for key, value in values.items()}
