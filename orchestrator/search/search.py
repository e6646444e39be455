"""The fastest plan that fits on each mesh, best first: branch and bound over a `Space`.

A heap holds branches of the space, keyed by a lower bound on the time of any plan in them (placement_bounds.py,
time_bounds.py), and planned settings, keyed by their time. Its first item is divided or planned, until that item is a
planned setting: nothing else on its mesh is faster. Plans whose memory bound exceeds the device are never compiled
(memory_bounds.py); if the bound for any order exceeds it, not even the order is made.

Recomputation and offloading cost time and save memory. So in a `Chain` of settings that do more and more of one, the
first that fits is the fastest: it is found by bisection, unless memory bounds find it sooner. The first that fits
beside CUDA graphs is found likewise, where graphs may gain more than its additional saving costs.

Meshes on which nothing fits because of the slots of peer copies are searched again over NCCL.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import chain, count, groupby, product
from operator import attrgetter

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.memory.copy_slots import NCCL
from pentad.orchestrator.memory.first_microbatches import with_words
from pentad.orchestrator.memory.variants import Variants
from pentad.orchestrator.planning.estimate import GRAPHS_BYTES, shards_differ, simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory, fit_of
from pentad.orchestrator.planning.hardware import require_tp_on_node
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.search.branches import Branch, Chain, Fitting, Group, LaidOut, Ordered, Shape
from pentad.orchestrator.search.layout import Layout, Work
from pentad.orchestrator.search.memory_bounds import (
    IMPOSSIBLE,
    MemoryBounds,
    most_copy_bytes,
)
from pentad.orchestrator.search.memory_savings import Room, most_saving, savings_of
from pentad.orchestrator.search.placement_bounds import order_bound, placement_bound, shape_bound
from pentad.orchestrator.search.result import Missed, Planned, Refusal, SearchResult, without_evaluation
from pentad.orchestrator.search.space import TRANSPORT, Order, Setting, Space, reset, space_of, with_setting
from pentad.orchestrator.search.time_bounds import Timed
from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.ir.errors import PentadError, ScheduleError
from pentad.schedules.ir.gc_pause import gc_paused
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.verify.check import check

LISTED = 5
ROUNDING = 1e-9
Need = tuple[int, float | None]  # bytes of a setting's fullest rank but for optional graphs; seconds if it fits


def search(
    config: RunConfig, gpus: int, device: DeviceMemory, held: Collection[str] = (), listed: int = LISTED
) -> SearchResult:
    """Searches all meshes of `gpus` GPUs with this much memory each, and all settings of keys that are not `held`."""
    with gc_paused():
        return search_space(config, space_of(config, gpus, held), device, held, listed)


def search_space(
    config: RunConfig, space: Space, device: DeviceMemory, held: Collection[str] = (), listed: int = LISTED
) -> SearchResult:
    """As `search`, over a given space. Raises PentadError for a schedule that is not in the catalogue, and for a held
    memory.recompute_fraction other than 1."""
    if "memory.recompute_fraction" in held and config.memory.recompute_fraction != 1:
        raise PentadError(f"memory.recompute_fraction is {config.memory.recompute_fraction}: expected 1 for a search")
    for order in space.orders:
        if order.name not in CATALOGUE:
            raise PentadError(f"schedule.name is {order.name}: expected one of {', '.join(CATALOGUE)} for a search")
    found = _Search(config, space, device, held)
    found.run(listed)
    if TRANSPORT not in held:
        _add_over_nccl(found, listed)
    return found.found


def _add_over_nccl(first: _Search, listed: int) -> None:
    """Adds plans for the meshes on which nothing fits only because of the slots of peer copies."""
    found = first.found
    meshes = tuple(mesh for mesh in found.refusals if mesh in first.room.crowded)
    if not meshes:
        return
    space = replace(first.space, meshes=meshes)
    second = _Search(with_words(first.config, NCCL), space, first.device, first.held)
    second.run(listed)
    found.planned += second.found.planned
    found.choices = sorted([*found.choices, *second.found.choices], key=lambda each: each.seconds)[:listed]
    for mesh in meshes:
        refusal = second.found.refusals.get(mesh)
        if refusal is None:
            del found.refusals[mesh]
        elif 0 < refusal.least_bytes < found.refusals[mesh].least_bytes:
            found.refusals[mesh] = refusal


class _Search:
    def __init__(self, config: RunConfig, space: Space, device: DeviceMemory, held: Collection[str]) -> None:
        self.config, self.space, self.device, self.held = config, space, device, held
        self.compared = without_evaluation(config)
        self.evaluates_nothing = self.compared == config
        self.work, self.found = Work(reset(config, held), space.modes), SearchResult(device, space, held)
        self._heap: list[tuple[float, int, Branch]] = []
        self._numbers = count()
        self._refused: dict[Mesh, Counter[str]] = {}
        self._known = dict[Setting, Need]()
        self.room = Room(self.work, space, device.bytes)

    def run(self, listed: int) -> None:
        shapes = [*chain.from_iterable(map(self._possible, self.space.meshes))]
        if any(self.room.may_hold_state(mesh, of_mesh) for mesh, of_mesh in groupby(shapes, key=attrgetter("mesh"))):
            for shape in shapes:
                self._push(shape_bound(self.work, *shape), shape)
        listed_meshes = set[Mesh]()
        while self._heap and len(listed_meshes) < listed:
            _, _, branch = heapq.heappop(self._heap)
            mesh = branch.mesh
            if mesh in listed_meshes:
                continue
            if isinstance(branch, Fitting):
                proved = self._proved(branch)
                if proved is not None and proved.seconds > branch.seconds * (1 + ROUNDING):
                    self._push(proved.seconds, Fitting(branch.setting, proved.seconds, proved.bytes, proved.plan))
                elif proved is not None:
                    listed_meshes.add(mesh)
                    self.found.choices.append(proved)
            else:
                try:
                    self._divide(branch)
                except PentadError as error:
                    self._refuse(mesh, error)
        decided = listed_meshes.union(branch.mesh for _, _, branch in self._heap)
        for mesh in self.space.meshes:
            if mesh not in decided:
                self._conclude(mesh)

    def _push(self, bound: float, branch: Branch) -> None:
        """A planned setting goes before a branch that may be as fast, rounding aside."""
        key = bound * (1 - ROUNDING) if isinstance(branch, Fitting) else bound
        heapq.heappush(self._heap, (key, next(self._numbers), branch))

    def _refuse(self, mesh: Mesh, error: PentadError) -> None:
        self._refused.setdefault(mesh, Counter())[str(error)] += 1

    def _possible(self, mesh: Mesh) -> Iterator[Shape]:
        """The shapes of a mesh whose sizes divide."""
        try:
            require_tp_on_node(mesh, across=self.config.mesh.tp_across_nodes)
            counts = self.space.microbatch_counts(self.config, mesh)
            if not counts:
                size, replicas = self.config.batch.global_batch_size, mesh.dp * mesh.ep
                expected = f"a multiple of mesh.dp x mesh.ep = {replicas}"
                raise PentadError(f"batch.global_batch_size is {size}: expected {expected}")
        except PentadError as error:
            self._refuse(mesh, error)
            return
        for shape in self._shapes(mesh, counts):
            try:
                self.work.piece(*shape)
                self.work.stages(tuple((rank,) for rank in range(mesh.pp)))  # no order has fewer stages
                yield shape
            except PentadError as error:
                self._refuse(mesh, error)

    def _shapes(self, mesh: Mesh, counts: Sequence[int]) -> Iterator[Shape]:
        for microbatches in counts:
            slices = set(map(self.work.slices, self.space.orders_on(mesh, microbatches)))
            yield from (Shape(mesh, microbatches, each) for each in sorted(slices))

    def _divide(self, branch: Branch) -> None:
        match branch:
            case Shape():
                self._orders(branch)
            case Ordered():
                self._layouts(branch)
            case LaidOut():
                self._groups(branch)
            case Group():
                self._settings(branch)
            case Chain():
                self._step(branch)

    def _orders(self, shape: Shape) -> None:
        orders = self.space.orders_on(shape.mesh, shape.microbatches)
        orders = [order for order in orders if self.work.slices(order) == shape.slices]
        for order in orders if self.room.may_hold_any(shape, orders) else ():
            try:
                self._order(shape, order)
            except PentadError as error:
                self._refuse(shape.mesh, error)

    def _order(self, shape: Shape, order: Order) -> None:
        """Branches by units; more units never take less time."""
        for shards in self.space.shards_on(self.config, shape.mesh):
            layout = self.work.layout(*shape[:2], order, self.space.unit_layers[0], by_layer=False, shards=shards or 0)
            for unit in self.space.unit_layers if self.room.has_room_for_state(layout) else ():
                branch = Ordered(shape, order, unit, shards)
                if self.room.may_hold(branch):
                    self._push(placement_bound(layout, order, shape.microbatches), branch)

    def _layouts(self, branch: Ordered) -> None:
        if self.room.may_hold(branch):
            for each in self.room.laid_out(branch):
                self._push(order_bound(each.layout, branch.order, branch.shape.microbatches), each)

    def _groups(self, branch: LaidOut) -> None:
        """Branches by ZeRO stage and gathered units. Only here is the order made, and only if any may fit."""
        setting, layout, is_plain, is_saving, shardings = branch
        saved, timed = most_saving(self.space, *branch[:4]), Timed(layout, setting.order, setting.microbatches)
        bounds = MemoryBounds(layout, timed)
        for row in shardings:
            if self.room.has_room(layout, bounds.least_of(saved, row, self.device.bytes)):
                self._push_group(Group(setting, timed, bounds, is_plain, is_saving, row))

    def _push_group(self, group: Group, least: float = 0.0) -> None:
        """Pushes the group with the first of its later shardings, which takes at least `least` seconds."""
        if group.later:
            (zero, gathered), *later = group.later
            setting = group.setting._replace(zero=zero, max_gathered=gathered)
            self._push(max(least, group.timed.bound(zero, gathered)), group._replace(setting=setting, later=(*later,)))

    def _settings(self, group: Group) -> None:
        setting, timed, bounds, is_plain, is_saving = group[:5]
        rooms = self._rooms(timed.layout)
        if is_plain:
            needed, seconds = self._plain(setting, bounds)
            rooms = [room for room in rooms if room < needed]
            if seconds is not None and not rooms:
                self._push_group(group, seconds)
                return
            if seconds is None and self.found.missed is None and needed < IMPOSSIBLE and self._is_possible(setting):
                self.found.missed = Missed(setting, timed.bound(setting.zero, setting.max_gathered))
                self.room.refuses = True
        chains = dict(self._chains(group, rooms)) if is_saving else {}
        self._push_group(group._replace(chains={**group.chains, **chains}))
        for each in chains.values():
            self._push(each.seconds(each.low + 1), each)

    def _rooms(self, layout: Layout) -> list[int]:
        """The limits in bytes within which to find the first saving setting: the device, and the device without the
        memory of CUDA graphs, since a setting that leaves no room for graphs may be slower than one that saves more."""
        return [self.device.bytes, *[self.device.bytes - GRAPHS_BYTES] * layout.gains_by_graphs]

    def _plain(self, setting: Setting, bounds: MemoryBounds) -> Need:
        least = bounds.least(setting, self.device.bytes)
        if least <= self.device.bytes:
            return self._planned(setting, bounds.timed)
        self.room.needs(setting.mesh, least, most_copy_bytes(bounds.layout))
        return least, None

    def _chains(self, group: Group, rooms: Sequence[int]) -> Iterator[tuple[tuple[int, int], Chain]]:
        setting, timed, bounds = group[:3]
        plain, variants = timed.bound(setting.zero, setting.max_gathered), cache(self._variants)
        if None in self.space.unit_layers:
            setting = setting._replace(unit_layers=None)
        for (number, settings), room in product(enumerate(savings_of(self.space, setting, timed.layout)), rooms):
            if settings[0].offload and room < self.device.bytes:
                continue  # plans that offload use no graphs
            least, key = bounds.least(settings[-1], room), (number, room)
            if least <= room:
                of, faster = partial(variants, setting), group.chains.get(key)
                yield key, Chain(settings, of, timed, bounds, plain, room, -1, len(settings), faster)
            elif room == self.device.bytes:  # not even its last setting fits
                self.room.needs(setting.mesh, least, most_copy_bytes(timed.layout))

    def _variants(self, setting: Setting) -> Variants:
        return Variants(with_setting(self.compared, setting, self.held), "cuda", self.device)

    def _step(self, chain: Chain) -> None:
        """Plans one more setting: among those not yet decided, the first that fits judging by what the last one needed.
        Before that, bounds its time by a simulation, which is tighter than `seconds`."""
        if chain.bounded is None:
            chain.low, chain.bounded = chain.first_within(chain.room) - 1, -1
            self._push(chain.seconds(chain.low + 1), chain)
            return
        first, chain.high = chain.low + 1, chain.end
        if first >= chain.high:
            return
        if chain.bounded < first:
            chain.bounded = first
            self._push(max(chain.seconds(first), chain.timed.simulated_with(chain.settings[first])), chain)
            return
        at = min(max(chain.first_within(chain.room - chain.excess), first), chain.high - 1)
        needed, seconds = self._planned(chain.settings[at], chain.timed, chain.variants)
        chain.excess = max(0, needed - chain.least(at))
        fits = seconds is not None and needed <= chain.room
        chain.low, chain.high = (chain.low, at) if fits else (at, chain.high)
        if chain.low + 1 < chain.high:
            self._push(chain.seconds(chain.low + 1), chain)

    def _planned(self, setting: Setting, timed: Timed, of: Callable[[], Variants] | None = None) -> Need:
        """Plans a setting, one of some variants or with a program of its own, and pushes it if it fits, unless that was
        done for a schedule with the same compute order."""
        if (alike := setting._replace(order=timed.first_alike)) not in self._known:
            self._known[alike] = self._plan(setting, timed, of)
        return self._known[alike]

    def _plan(self, setting: Setting, timed: Timed, of: Callable[[], Variants] | None) -> Need:
        try:
            if of is None:
                variants = self._variants(setting)
                plan = variants.own
            else:
                variants = of()
                plan = variants.plan(setting.recompute, setting.recompute_layers, setting.offload)
            self.found.planned += 1
            needed = variants.needed(plan)
            if needed > self.device.bytes:
                self.room.needs(setting.mesh, needed, most_copy_bytes(timed.layout))
                return needed, None
            seconds = variants.seconds(plan)
            is_final = self.evaluates_nothing and variants.is_exact(plan) and not shards_differ(plan)
            self._push(seconds, Fitting(setting, seconds, needed, plan if is_final else None))
            return needed - GRAPHS_BYTES * (plan.cuda_graphs and self.config.cluster.cuda_graphs is None), seconds
        except (PentadError, ScheduleError) as error:  # nothing is proven yet, so the simulation may find a deadlock
            self._refuse(setting.mesh, PentadError(str(error)))
            return IMPOSSIBLE, None

    def _is_possible(self, setting: Setting) -> bool:
        """Whether the keys of a setting go together; a setting that needs too much memory was not planned, which would
        say so."""
        with suppress(PentadError):
            return with_setting(self.config, setting, self.held) is not None
        return False

    def _proved(self, timed: Fitting) -> Planned | None:
        """Its own plan, if it has one; else the plan of the full configuration, evaluation included, which may leave no
        room for CUDA graphs. None if that does not fit."""
        config = with_setting(self.config, timed.setting, self.held)
        if timed.plan is not None:
            for program in timed.plan.trained_programs:
                check(program, replicas=config.mesh.replicas, zero=config.zero.stage)
            return Planned(timed.setting, config, timed.plan, timed.seconds, timed.bytes)
        with suppress(PentadError):
            plan = make_plan(config, "cuda", memory=self.device)
            fit = fit_of(plan, self.device)
            if fit.ok:
                return Planned(timed.setting, config, plan, simulated_seconds(plan), fit.needed)
            self.room.needs(timed.setting.mesh, fit.needed)
        return None

    def _conclude(self, mesh: Mesh) -> None:
        """Notes why a mesh has no plan."""
        if mesh in self.room.least:
            self.found.refusals[mesh] = Refusal.for_memory(mesh, self.device.bytes, self.room.least[mesh])
        else:
            refused = self._refused.get(mesh, Counter({"no setting is possible": 1}))
            self.found.refusals[mesh] = Refusal(refused.most_common(1)[0][0])
