"""The settings of a layout that save memory by ZeRO, recomputation and offloading, from fast to slow; and whether any
may fit, in whatever order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import chain, groupby, product

from pentad.orchestrator.planning.planning import GATHERED_UNITS
from pentad.orchestrator.search.branches import LaidOut, Ordered, Shape
from pentad.orchestrator.search.layout import Layout, Work
from pentad.orchestrator.search.memory_bounds import (
    IMPOSSIBLE,
    least_in_any_order,
    least_state_bytes,
    most_copy_bytes,
)
from pentad.orchestrator.search.space import Order, Setting, Sharding, Space
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.mesh import Mesh


def shardings_of(space: Space, layout: Layout) -> Iterator[tuple[Sharding, ...]]:
    """The shardings that differ on this layout, in rows along which more is sharded and regathered. Raises PentadError
    if ZeRO is held but there is nothing to shard."""
    if not layout.is_shared:
        if 0 not in space.zero:
            stage = min(space.zero)
            raise PentadError(f"zero.stage is {stage}: expected 0 for mesh {layout.mesh}, with nothing to shard")
        yield ((0, None),)
        return
    units = max(map(len, layout.units.of_ranks))
    is_default = units <= GATHERED_UNITS and len(space.max_gathered) > 1
    found = [
        (zero, gathered)
        for zero, gathered in product(space.zero, space.max_gathered)
        if (gathered is None or (zero == 3 and not is_default)) and (zero or not layout.piece.zero_shards)
    ]
    found.sort(key=lambda each: (each[0], -(layout.gathered(each[1]) or units)))
    # In FP8 ZeRO-3 gathers fewer bytes.
    apart = layout.work.fp8 is not None and layout.work.fp8.gathers
    for _, row in groupby(found, key=lambda each: (each[0] > 0, apart and each[0] > 2)):
        yield tuple(row)


def savings_of(space: Space, setting: Setting, layout: Layout, *, most: bool = False) -> list[list[Setting]]:
    """Recomputation by mode, in more and more layers, and more and more offloading. Where the search holds one of them,
    not every list of the other runs from fast to slow, since what recomputes is not copied. `most` leaves out what the
    most saving settings do not need."""
    layers = space.recompute_layers or (*range(1, max(len(held.numbers) for held in layout.units.stages)), None)
    layers = layers[-1:] if most and "none" in space.recompute else layers
    modes = [mode for mode in space.recompute if mode != "none"]
    by_mode = [[setting._replace(recompute=mode, recompute_layers=count) for count in layers] for mode in modes]
    if "none" not in space.recompute:
        return [[each._replace(offload=share) for share in space.offload] for each in chain(*by_mode)]
    if 0.0 not in space.offload:
        by_mode = [[each._replace(offload=space.offload[0])] for each in chain(*by_mode)]
    offloading = [setting._replace(offload=share) for share in space.offload if share]
    return [settings for settings in (*by_mode, offloading) if settings]


def most_saving(space: Space, setting: Setting, layout: Layout, is_plain: bool, is_saving: bool) -> list[Setting]:
    """The settings with the least memory of each kind in a group."""
    return [setting] * is_plain + [each[-1] for each in savings_of(space, setting, layout, most=True) if is_saving]


class Room:
    """Says what may fit into `bytes` of a rank in any order. `least` is, by mesh, what settings that do not fit need at
    least. Everything may fit until `refuses` is set, once the first setting that does not fit has been named."""

    def __init__(self, work: Work, space: Space, size: int) -> None:
        self.work, self.space, self.bytes, self.refuses = work, space, size, False
        self.least: dict[Mesh, int] = {}
        self.crowded = set[Mesh]()  # on which a plan may fit without slots of peer copies
        self._most = cache(lambda mesh: max(space.microbatch_counts(work.config, mesh)))
        self._too_few: dict[tuple[Mesh, Order, int | None, int | None], int] = {}  # most microbatches that do not fit

    def needs(self, mesh: Mesh, least: int, copied: int = 0) -> None:
        """Notes that a setting of a mesh does not fit: its least bytes, and how many of them peer copies take."""
        self.least[mesh] = min(least, self.least.get(mesh, least))
        if least - copied <= self.bytes:
            self.crowded.add(mesh)

    def has_room(self, layout: Layout, least: int) -> bool:
        """Whether something that needs at least `least` bytes may fit."""
        if least > self.bytes:
            self.needs(layout.mesh, least, most_copy_bytes(layout))
        return least <= self.bytes or not self.refuses

    def may_hold_state(self, mesh: Mesh, shapes: Iterable[Shape]) -> bool:
        """Whether any order of a mesh has room for the state of all its ranks."""
        least = IMPOSSIBLE
        for shape, order in ((each, order) for each in shapes for order in self.space.orders_on(*each[:2])):
            with suppress(PentadError):
                shards = self.space.shards_on(self.work.config, mesh)[0] or 0
                layout = self.work.layout(*shape[:2], order, self.space.unit_layers[0], by_layer=False, shards=shards)
                least = min(least, least_state_bytes(layout, max(self.space.zero), of_ends=False))
            if least <= self.bytes:
                return True
        if least < IMPOSSIBLE:
            self.needs(mesh, least)
        return False

    def has_room_for_state(self, layout: Layout) -> bool:
        """Until the first setting that does not fit is named, counts only the ends of the pipeline."""
        least = least_state_bytes(layout, max(self.space.zero), of_ends=not self.refuses)
        if least > self.bytes:
            self.needs(layout.mesh, least)
        return least <= self.bytes

    def may_hold_any(self, shape: Shape, orders: Iterable[Order]) -> bool:
        """Whether anything of a shape may fit, or is impossible for other reasons, which should be named. Once
        something does not fit, the smallest microbatches are tried first: what does not fit with these never does, as
        larger ones need no less memory in any order."""
        if not self.refuses:
            return True
        most = shape._replace(microbatches=self._most(shape.mesh))
        tried, shards = [shape], self.space.shards_on(self.work.config, shape.mesh)
        for given in product(orders, self.space.unit_layers, shards):
            for each in tried:
                found = self.may_hold(Ordered(shape, *given)) and self._holds(Ordered(each, *given))
            if found:
                return True
            tried = [most, shape]
        return shape.mesh not in self.least

    def _holds(self, branch: Ordered) -> bool:
        """Whether anything in a branch may fit; false if its order does not allow its number of microbatches."""
        with suppress(PentadError):
            return bool(self.laid_out(branch))
        return False

    def may_hold(self, branch: Ordered) -> bool:
        """Whether anything in a branch may fit: not if nothing did with microbatches of this size or smaller."""
        return branch.shape.microbatches > self._too_few.get((branch.mesh, *branch[1:]), 0)

    def laid_out(self, branch: Ordered) -> list[LaidOut]:
        """What may fit, by the layout of units."""
        found = [each for each in self._layouts(branch) if self._may_fit(each)]
        if not found:
            self._too_few[branch.mesh, *branch[1:]] = branch.shape.microbatches
        return found

    def _may_fit(self, each: LaidOut) -> bool:
        saved, every = most_saving(self.space, *each[:4]), [*chain.from_iterable(each.shardings)]
        return self.has_room(each.layout, least_in_any_order(each.layout, saved, every, self.bytes))

    def _layouts(self, branch: Ordered) -> list[LaidOut]:
        shape, order, unit_layers, shards = branch
        layout_of = partial(self.work.layout, *shape[:2], order, shards=shards or 0)
        layout = layout_of(unit_layers, by_layer=False)
        is_other = unit_layers is not None and None in self.space.unit_layers
        if is_other and layout.units.counts == layout_of(None, by_layer=False).units.counts:
            return []
        # by default, units that recompute or offload have one layer; settings whose units are like that anyway may save
        # too
        by_layer = layout_of(unit_layers, by_layer=True)
        is_same = layout.units.counts == by_layer.units.counts
        has_plain = "none" in self.space.recompute and 0.0 in self.space.offload
        setting = Setting(*shape[:2], order, unit_layers=unit_layers, shards=shards)
        shardings = [*shardings_of(self.space, by_layer)]
        found = [LaidOut(setting, layout, has_plain, is_same, shardings)]
        if not is_same and 1 not in self.space.unit_layers:
            found.append(LaidOut(setting, by_layer, False, True, shardings))
        return found
