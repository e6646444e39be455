"""Diagnoses ranks that should agree and do not: which are wrong, and whether data, hardware or software is at fault."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from pentad.schedules.ir.errors import enumerated
from pentad.workers.integrity.result import RankCheck

Kind = Literal["data", "hardware", "software"]
Digests = Mapping[str, Mapping[int, int]]  # by name and rank


class Verdict(NamedTuple):
    """`ranks` are at fault; if not `certain`, at least one of them is, and it is unknown which. They differ in `number`
    results or parts of the state, the first of which is `what`."""

    kind: Kind
    ranks: tuple[int, ...]
    what: str
    number: int
    certain: bool = True

    @property
    def sentence(self) -> str:
        """The verdict in words, such as 'the state of rank 3 differs from that of most of its replicas in ...'."""
        several = len(self.ranks) > 1
        names = f"rank{'s' if several else ''} {enumerated(self.ranks)}"
        more = f" and {self.number - 1} more" if self.number > 1 else ""
        match self.kind, self.certain:
            case "data", True:
                return f"the state of {names} differs from that of most of its replicas in {self.what}{more}"
            case "data", False:
                return f"the states of {names} differ in {self.what}{more}, and no majority says which is right"
            case "hardware", _:
                verb = "compute" if several else "computes"
                return f"{names} {verb} wrong results from the same inputs: {self.what}{more}"
            case _:
                return f"{names} give different results for the same inputs: {self.what}{more}, so it is not one GPU"


def find_verdict(checks: Sequence[RankCheck]) -> Verdict | None:
    """The verdict on the answers of all ranks, in rank order; None if all ranks that should agree do.

    | seen | verdict |
    |---|---|
    | at most half of the ranks get two different results from the same inputs | hardware: those ranks |
    | more than half do | software: a kernel is not deterministic |
    | states of replicas differ | data: those against the majority, or all that differ if there is none |
    | reproducible results of replicas with equal states differ | hardware: those against the majority |
    | the same, without a majority | software: all that differ |
    """
    if (unstable := _unstable(checks)) is not None:
        return unstable
    if (data := _disagreement(_by_name([check.state for check in checks]))) is not None:
        return Verdict("data", *data)
    results = _disagreement(_by_name([check.first for check in checks]))
    return results and Verdict("hardware" if results.certain else "software", *results)


class Disagreement(NamedTuple):
    ranks: tuple[int, ...]
    what: str
    number: int
    certain: bool


def _unstable(checks: Sequence[RankCheck]) -> Verdict | None:
    names = {
        rank: changed
        for rank, check in enumerate(checks)
        if (changed := [name for name, value in check.first.items() if check.second[name] != value])
    }
    if not names:
        return None
    ranks, first = tuple(names), next(iter(names.values()))
    kind: Kind = "hardware" if 2 * len(ranks) <= len(checks) else "software"
    return Verdict(kind, ranks, first[0], len(dict.fromkeys(name for each in names.values() for name in each)))


def _by_name(digests: Sequence[Mapping[str, int]]) -> Digests:
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, each in enumerate(digests):
        for name, value in each.items():
            found[name][rank] = value
    return found


def _disagreement(digests: Digests) -> Disagreement | None:
    """The ranks that differ from a majority; and where there is no majority, all that differ, unless the ranks already
    outvoted in other names explain the difference."""
    differing = {name: of for name, of in digests.items() if len(set(of.values())) > 1}
    if not differing:
        return None
    against: set[int] = set()
    for of in differing.values():
        value, number = Counter(of.values()).most_common(1)[0]
        if 2 * number > len(of):
            against |= {rank for rank, other in of.items() if other != value}
    unexplained = {
        name: of
        for name, of in differing.items()
        if len({value for rank, value in of.items() if rank not in against}) > 1
    }
    undecided = {rank for of in unexplained.values() for rank in of} - against
    ranks, shown = tuple(sorted(against | undecided)), unexplained or differing
    return Disagreement(ranks, next(iter(shown)), len(differing), not undecided)
