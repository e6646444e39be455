"""The settings of a layout that save memory, by ZeRO, recomputation and offloading, from fast to slow."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, groupby, product

from pentad.orchestrator.planning.planning import GATHERED_UNITS
from pentad.orchestrator.search.layout import Layout
from pentad.orchestrator.search.space import Setting, Sharding, Space
from pentad.schedules.ir.errors import PentadError


def shardings_of(space: Space, layout: Layout) -> Iterator[tuple[Sharding, ...]]:
    """Those that differ on this layout, in rows in which more is sharded and gathered again. Raises PentadError
    where nothing can be sharded, but ZeRO is held."""
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
    # In 8 bits ZeRO-3 gathers less at a time.
    apart = layout.work.fp8 is not None and layout.work.fp8.gathers
    for _, row in groupby(found, key=lambda each: (each[0] > 0, apart and each[0] > 2)):
        yield tuple(row)


def savings_of(space: Space, setting: Setting, layout: Layout, *, most: bool = False) -> list[list[Setting]]:
    """Recomputation by mode, in more and more layers, and more and more offloading; where one of them is held, not
    all orders of the other are from fast to slow: what recomputes is not copied. `most` leaves out what the last
    settings do not need."""
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
    """What takes least of each kind of settings of a group."""
    return [setting] * is_plain + [each[-1] for each in savings_of(space, setting, layout, most=True) if is_saving]
