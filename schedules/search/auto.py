"""The fastest schedule for given costs and a memory limit, from the catalogue or searched beyond it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pentad.schedules.catalogue import CATALOGUE, NO_OPTIONS, generate, mirrored, spec_of
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.search.bounds import Bound, lower_bound
from pentad.schedules.search.problem import Objective, Problem, capacity_of, orders_of
from pentad.schedules.search.search import Search, candidate_streams
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import compute_times
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.spec.schedule_spec import ScheduleOptions

AUTO = "auto"
MOST_CHUNKS = 4
EFFORT = 1_500_000  # operations placed by list schedules or timed by tabu search: some seconds
Placement = tuple[tuple[int, ...], ...]
# The costs of an order's stages; None if its placement is impossible, such as more stages than layers.
CostsOf = Callable[[Program], Costs | None]


class Candidate(NamedTuple):
    """A compute order within the limit. Times are in the unit of the costs; `end` is the time of norm and optimizer,
    which follow the compute. `peak` is in microbatches of all layers of a rank. `name` and `options` generate the
    order; if the name is `auto`, it was searched, and `origin` says from what."""

    name: str
    options: ScheduleOptions
    makespan: float
    longest: float
    peak: float
    program: Program
    origin: str = ""
    end: float = 0.0

    def step(self, objective: Objective) -> float:
        """The time of a whole step."""
        return getattr(self, objective) + self.end


@dataclass(frozen=True)
class Choice:
    """`candidates`, the best first, the `bound` of the best one's placement, and the least bound of all placements."""

    candidates: tuple[Candidate, ...]
    bound: Bound
    least_bound: Bound
    objective: Objective

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def gap(self) -> float:
        """By what share the best one exceeds the bound of its placement."""
        return max(getattr(self.best, self.objective) / self.bound.time - 1, 0.0)

    @property
    def best_known(self) -> Candidate | None:
        """The best candidate from the catalogue."""
        return next((candidate for candidate in self.candidates if candidate.name != AUTO), None)


class Placed(NamedTuple):
    """A placement of stages: some order of it, its costs and its bound."""

    program: Program
    costs: Costs
    bound: Bound


def choose(
    ranks: int,
    microbatches: int,
    costs_of: CostsOf,
    options: ScheduleOptions = NO_OPTIONS,
    objective: Objective = "makespan",
    effort: int = EFFORT,
    two_copies: bool | None = None,
    placement: Placement | None = None,
) -> Choice:
    """Tries every schedule, number of chunks and group, then searches; the least time of a step wins, then the least
    memory. A placement's costs include the end of its step, as ranks that hold all parameters twice also update them
    twice.

    The result is never slower than the catalogue. `effort` 0 skips the search. The memory limit counts activations
    only, so schedules that hold all parameters twice (dualpipe) are tried only if `two_copies` (None: if there is no
    limit). With a `placement`, only its orders are tried. Raises PentadError if nothing fits, and for options that it
    chooses itself.
    """
    check_auto_options(options)
    limit = options.memory_limit
    two_copies = limit is None if two_copies is None else two_copies
    candidates: list[Candidate] = []
    placed: dict[Placement, Placed] = {}
    for name, tried in _options_to_try(ranks, microbatches, limit):
        if not two_copies and CATALOGUE[name].placement is mirrored:
            continue
        order = generate(name, ranks, microbatches, tried)
        key = order.placement
        if placement not in (None, key):
            continue
        if key not in placed:
            costs = costs_of(order)
            if costs is None:
                continue
            placed[key] = Placed(order, costs, lower_bound(order, costs, limit, objective))
        costs = placed[key].costs
        if "costs" in CATALOGUE[name].accepts:
            order = generate(name, ranks, microbatches, tried, costs)
        candidate = _candidate(name, tried, order, costs)
        if limit is None or candidate.peak <= limit + 1e-9:
            candidates.append(candidate)
    if effort:
        candidates += _searched(placed, candidates, options, objective, effort)
    if not candidates:
        raise PentadError(f"schedule {AUTO}: none fits {ranks} ranks (mesh.pp) and {microbatches} microbatches")
    candidates.sort(key=lambda each: (_rounded(each.step(objective)), each.peak))
    least = min((place.bound for place in placed.values()), key=lambda bound: bound.time)
    return Choice(tuple(candidates), placed[candidates[0].program.placement].bound, least, objective)


def describe(choice: Choice) -> str:
    """One line: where the best candidate comes from, and how it compares to the catalogue and to its bound."""
    best, known = choice.best, choice.best_known
    options = "".join(f", {key} {value:g}" for key, value in best.options._asdict().items() if value is not None)
    source = f"{best.name} of the catalogue" if best.name != AUTO else f"searched from {best.origin}"
    time = getattr(best, choice.objective)
    if best.name != AUTO or known is None:
        gain = f"the fastest of {len(choice.candidates)}"
    else:
        gain = f"{100 * (1 - time / getattr(known, choice.objective)):.2f} % faster than {known.name}"
    chunks = best.program.chunks
    parts = f"{chunks} chunk{'s' * (chunks > 1)} a rank"
    gap = "meets its bound" if choice.gap < 1e-9 else f"{100 * choice.gap:.2f} % above its bound"
    return f"{source}{options}, {parts}, {gain}; {gap} of {choice.bound.time:.6g}: {choice.bound.why}"


def check_auto_options(options: ScheduleOptions) -> None:
    """Raises PentadError for options that `choose` chooses itself, and for a limit that no schedule can meet."""
    for option, value in (("chunks", options.chunks), ("group", options.group), ("slices", options.slices)):
        if value is not None:
            raise PentadError(f"{option} is {value}, but schedule {AUTO} chooses it: expected no {option}")
    if options.memory_limit is not None and not options.memory_limit >= 1:
        raise PentadError(f"schedule {AUTO}: memory_limit is {options.memory_limit:g}: expected at least 1")


def _searched(
    placed: dict[Placement, Placed],
    candidates: list[Candidate],
    options: ScheduleOptions,
    objective: Objective,
    effort: int,
) -> Iterator[Candidate]:
    """List schedules for every placement whose bound leaves room for improvement, then tabu search on the best."""
    best = min((getattr(each, objective) for each in candidates), default=float("inf"))
    hopeful = {key: place for key, place in placed.items() if _rounded(place.bound.time) < _rounded(best)}
    searches: list[Search] = []
    for key, place in sorted(hopeful.items(), key=lambda pair: pair[1].bound.time):
        if len({stage for held in key for stage in held}) < sum(map(len, key)):
            continue  # a stage on two ranks, as in dualpipe
        chunks, microbatches = place.program.chunks, place.program.microbatches
        capacity = capacity_of(options.memory_limit, chunks, microbatches)
        if capacity < 2 * chunks:
            continue
        problem = Problem(key, microbatches, chunks, place.costs, capacity, objective)
        search = Search(problem, problem.to_ticks(place.bound.time), [])
        for each in candidates:
            if each.program.placement == key:
                search.add(each.name, orders_of(problem, each.program.streams))
        search.list_schedules(effort // 2 // len(hopeful))
        searches.append(search)
    ranked = sorted((each for each in searches if each.best), key=lambda each: each.cost)
    for number, search in enumerate(ranked[:3]):
        search.tabu_search(effort // 2 // 2 ** (number + 1))
    for search in ranked:
        problem = search.problem
        for origin, streams in candidate_streams(search):
            program = Program(AUTO, streams, problem.placement, problem.microbatches, problem.chunks)
            yield _candidate(AUTO, options, program, problem.costs, origin)


def _candidate(name: str, options: ScheduleOptions, order: Program, costs: Costs, origin: str = "") -> Candidate:
    """A candidate with the times of its compute order, in which transfers never queue."""
    times = compute_times(order, costs)
    makespan = max(spans[-1][1] for spans in times) - min(spans[0][0] for spans in times)
    longest = max(spans[-1][1] - spans[0][0] for spans in times)
    end = costs.norm + costs.step
    return Candidate(name, options, makespan, longest, max(peak_activations(order)), order, origin, end)


def _rounded(time: float) -> float:
    """Rounds, so that sums of the same costs in different orders compare equal."""
    return float(f"{time:.9g}")


def _options_to_try(ranks: int, microbatches: int, limit: float | None) -> Iterator[tuple[str, ScheduleOptions]]:
    for name, found in CATALOGUE.items():
        if "slices" in found.accepts:  # the cost of a slice does not follow from that of a microbatch
            continue
        all_chunks = range(2, MOST_CHUNKS + 1) if "chunks" in found.accepts else [None]
        groups = sorted({ranks, 2 * ranks, microbatches}) if "group" in found.accepts else [None]
        for chunks in all_chunks:
            for group in groups:
                options = ScheduleOptions(chunks, group, limit if "memory_limit" in found.accepts else None)
                if (group or 0) <= max(microbatches, ranks) and _is_allowed(name, ranks, microbatches, options):
                    yield name, options


def _is_allowed(name: str, ranks: int, microbatches: int, options: ScheduleOptions) -> bool:
    try:
        spec_of(name, ranks, microbatches, options)
    except PentadError:
        return False
    return True
