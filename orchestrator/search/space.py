"""What the search chooses from: the values of every key, and the settings that they make."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd, prod
from pathlib import Path
from typing import Any, NamedTuple

from pentad.orchestrator.config.config import RunConfig, load, unchecked
from pentad.orchestrator.planning.hardware import ranks_on_host
from pentad.schedules.catalogue import CATALOGUE, NO_OPTIONS, generate, spec_of
from pentad.schedules.ir.columns import op_mask
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.recompute import RECOMPUTE_MODES, config_value
from pentad.schedules.spec.mesh import DENSE_AXES, EXPERT_AXES, Mesh
from pentad.schedules.spec.schedule_spec import ScheduleOptions

AXES = ("dp", "pp", "cp", "tp", "ep")
MOST_ROWS = 64  # sequences of a microbatch
CHUNKS = (2, 3, 4)
OFFLOADED = (0.25, 0.5, 0.75, 1.0)  # shares of the saved activations
UNSPLIT = ("1f1b", "looped-bfs")  # on one pipeline rank all others run the same work in an order of one of these
# Keys that only some settings allow and none needs: reset unless held.
RESET: dict[str, Any] = {
    "schedule.group": None,
    "schedule.memory_limit": None,
    "schedule.slices": None,
    "schedule.layers_per_stage": None,
    "memory.recompute_stages": None,
    "memory.recompute_fraction": 1.0,
    "memory.max_resident_microbatches": None,
    "zero.prefetch": 1,
    "zero.reduce": None,
}
PLAIN = {"name": "1f1b", "microbatches": 1, "chunks": None}  # a schedule that every mesh allows
TRANSPORT = "cluster.transport"  # tried only where nothing else makes a mesh fit
Placement = tuple[tuple[int, ...], ...]
Sharding = tuple[int, int | None]  # a stage of ZeRO, gathered units
_W = op_mask({Op.W})


class Order(NamedTuple):
    """A schedule and its chunks (None: its default). `given` are the other options, equal for all orders of a space."""

    name: str
    chunks: int | None = None
    given: ScheduleOptions = NO_OPTIONS

    @property
    def options(self) -> ScheduleOptions:
        return self.given._replace(chunks=self.chunks)


class Setting(NamedTuple):
    """Everything that the search chooses. `max_gathered` None is the default of zero.max_gathered, `recompute` a mode
    of a plan, `recompute_layers` None all layers, and `shards` None one ZeRO group of all ranks that share parameters.
    """

    mesh: Mesh
    microbatches: int
    order: Order
    zero: int = 0
    max_gathered: int | None = None
    unit_layers: int | None = None
    recompute: str = "none"
    recompute_layers: int | None = None
    offload: float = 0.0
    shards: int | None = None

    @property
    def saving(self) -> tuple[str, int | None, float]:
        """The choices that save activations: mode, layers and offloaded share."""
        return self.recompute, self.recompute_layers, self.offload

    @property
    def values(self) -> dict[str, Any]:
        """The values by key of the configuration."""
        return {
            **{f"mesh.{axis}": getattr(self.mesh, axis) for axis in AXES},
            "schedule.name": self.order.name,
            "schedule.microbatches": self.microbatches,
            "schedule.chunks": self.order.chunks,
            "zero.stage": self.zero,
            "zero.max_gathered": self.max_gathered,
            "memory.unit_layers": self.unit_layers,
            "memory.recompute": config_value(self.recompute),
            "memory.recompute_layers": self.recompute_layers,
            "memory.offload_fraction": self.offload,
            "zero.shards": self.shards,
        }


KEYS = tuple(Setting(Mesh(), 1, Order("1f1b")).values)


@dataclass(frozen=True)
class Space:
    """The values of each key that the search tries. `microbatches` None: a microbatch has any power of two of sequences
    up to MOST_ROWS. A setting recomputes or offloads, not both, unless the configuration holds one of them. `shards`
    None: all ranks that share parameters, or if they are on several hosts, also those of each host."""

    meshes: tuple[Mesh, ...]
    microbatches: tuple[int, ...] | None
    orders: tuple[Order, ...]
    zero: tuple[int, ...] = (0, 1, 2, 3)
    max_gathered: tuple[int | None, ...] = (None,)
    unit_layers: tuple[int | None, ...] = (None, 1)
    recompute: tuple[str, ...] = RECOMPUTE_MODES
    recompute_layers: tuple[int | None, ...] | None = None  # None: any number
    offload: tuple[float, ...] = (0.0, *OFFLOADED)
    shards: tuple[int | None, ...] | None = None

    @property
    def modes(self) -> tuple[str, ...]:
        """In every setting, all layers recompute in one of these modes."""
        return self.recompute if self.recompute_layers == (None,) else ("none",)

    def shards_on(self, config: RunConfig, mesh: Mesh) -> tuple[int | None, ...]:
        """The ZeRO group sizes to try. Smaller groups than a host's ranks would send at least as much between hosts and
        save less memory."""
        if self.shards is not None:
            return self.shards
        dense, experts = ranks_on_host(mesh, DENSE_AXES), ranks_on_host(mesh, EXPERT_AXES)
        groups = (dense, mesh.dp * mesh.cp) if config.model.experts is None else (experts, mesh.dp * mesh.cp)
        count = gcd(dense, *groups)
        return (None, count) if count > 1 and dense < mesh.dp * mesh.cp * mesh.ep else (None,)

    def microbatch_counts(self, config: RunConfig, mesh: Mesh) -> list[int]:
        """The numbers of microbatches on this mesh that also divide the batches of a ramp-up."""
        replicas, sequences = mesh.dp * mesh.ep, config.batch.global_batch_size
        if sequences % replicas:
            return []
        share, counts = sequences // replicas, list[int]()
        batches = [sequences, *(stage.global_batch_size for stage in config.batch.sizes.rampup)]
        sizes = [1 << power for power in range(MOST_ROWS.bit_length())]
        for count in self.microbatches or (share // rows for rows in sizes if share % rows == 0):
            rows, rest = divmod(share, count)
            if not rest and all(size % (replicas * rows) == 0 for size in batches):
                counts.append(count)
        return counts

    def orders_on(self, mesh: Mesh, microbatches: int) -> Sequence[Order]:
        """The orders that differ on this many pipeline ranks, with this many microbatches."""
        unsplit = [order for order in self.orders if order.name in UNSPLIT]
        if mesh.pp > 1 or not unsplit:
            return self.orders
        return unsplit[:1] if microbatches == 1 else unsplit

    def settings(self, config: RunConfig) -> Iterator[Setting]:
        """All settings, possible or not: many."""
        for mesh in self.meshes:
            for count in self.microbatch_counts(config, mesh):
                orders = self.orders_on(mesh, count)
                axes = orders, self.zero, self.max_gathered, self.unit_layers, self.shards_on(config, mesh)
                for order, zero, gathered, unit, shards in product(*axes):
                    if (zero < 3 and gathered is not None) or (not zero and shards is not None):
                        continue
                    base = Setting(mesh, count, order, zero, gathered, unit, shards=shards)
                    for mode, share in product(self.recompute, self.offload):
                        if mode == "none" or (share and len(self.recompute) > 1 and len(self.offload) > 1):
                            if mode == "none":
                                yield base._replace(offload=share)
                            continue
                        layers = self.recompute_layers or (*range(1, config.model_spec().layers + 1), None)
                        yield from (
                            base._replace(recompute=mode, recompute_layers=number, offload=share) for number in layers
                        )


def load_for_search(file: Path | None, words: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """The configuration and the words that lead to it. If the file's schedule does not go with the `words` of the
    command line, these include a plain schedule, as the search chooses another anyway. Raises PentadError as `load`
    does."""
    try:
        return load(file, words), [*words]
    except PentadError:
        given = {word.partition("=")[0] for word in words}
        schedule = unchecked(file, words).get("schedule") or {}
        plain = [
            f"schedule.{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in PLAIN.items()
            if f"schedule.{key}" not in given and schedule.get(key, value) != value
        ]
        with suppress(PentadError):
            return load(file, [*words, *plain]), [*words, *plain]
        raise


def space_of(config: RunConfig, gpus: int, held: Collection[str] = ()) -> Space:
    """All settings for this many GPUs in which the keys `held` have their configured values; `auto` holds nothing.
    Without experts, mesh.ep is 1 unless it is held. Raises PentadError if no mesh has this many GPUs."""
    free = {key for key in KEYS if key not in held or value_of(config, key) == "auto"}
    model = config.model_spec("bfloat16")

    def values(key: str, found: tuple[Any, ...]) -> tuple[Any, ...]:
        return found if key in free else (value_of(config, key),)

    meshes = [
        mesh
        for mesh in all_meshes(gpus)
        if (mesh.ep == 1 or model.experts is not None or "mesh.ep" not in free)
        and all(f"mesh.{axis}" in free or getattr(mesh, axis) == value_of(config, f"mesh.{axis}") for axis in AXES)
    ]
    if not meshes:
        axes = [f"mesh.{axis}" for axis in AXES if f"mesh.{axis}" not in free]
        size, wanted = prod(value_of(config, axis) for axis in axes), "a divisor of " * (len(axes) < len(AXES))
        raise PentadError(f"{' x '.join(axes)} is {size}: expected {wanted}the number of GPUs, {gpus}")
    names = values("schedule.name", tuple(CATALOGUE))
    section, orders = config.schedule, list[Order]()
    options = {key: getattr(section, key) for key in ("group", "memory_limit", "slices") if f"schedule.{key}" in held}
    options = {key: value for key, value in options.items() if value is not None}
    for name in names:
        if name in CATALOGUE and not options.keys() <= CATALOGUE[name].accepts:
            continue
        accepts = name in CATALOGUE and "chunks" in CATALOGUE[name].accepts
        chunks = CHUNKS if accepts and "schedule.chunks" in free else (config.schedule.chunks,)
        if "schedule.chunks" in free and not accepts:
            chunks = (None,)
        orders += [Order(name, count, ScheduleOptions(**options)) for count in chunks]
    modes = RECOMPUTE_MODES if model.custom is None else ("none", "full")
    counts = None if "schedule.microbatches" in free else (config.schedule.microbatches,)
    any_layers = {"memory.recompute", "memory.recompute_layers"} <= free
    layers = None if any_layers else (config.memory.recompute_layers,)
    return Space(
        meshes=tuple(meshes),
        microbatches=counts,
        orders=tuple(orders),
        zero=values("zero.stage", (0, 1, 2, 3)),
        max_gathered=values("zero.max_gathered", (None, model.layers + 2)),
        unit_layers=values("memory.unit_layers", (None, 1)),
        recompute=modes if "memory.recompute" in free else (config.memory.mode,),
        recompute_layers=layers,
        offload=values("memory.offload_fraction", (0.0, *OFFLOADED) if model.custom is None else (0.0,)),
        shards=None if "zero.shards" in free else (config.zero.shards,),
    )


def all_meshes(ranks: int) -> Iterator[Mesh]:
    """Every factorisation of a number of ranks into the five axes."""
    divisors = [each for each in range(1, ranks + 1) if ranks % each == 0]
    for pp, tp, cp in product(divisors, repeat=3):
        rest, remainder = divmod(ranks, pp * tp * cp)
        if not remainder:
            yield from (Mesh(rest // ep, pp, cp, tp, ep) for ep in divisors if rest % ep == 0)


def value_of(config: RunConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def reset(config: RunConfig, held: Collection[str]) -> RunConfig:
    """The configuration without the keys that only some settings allow, unless they are held."""
    values = {key: value for key, value in RESET.items() if key not in held and value_of(config, key) != value}
    return load(config, sections=_nested(values)) if values else config


def with_setting(config: RunConfig, setting: Setting, held: Collection[str] = ()) -> RunConfig:
    """The configuration with a setting, without conflicting keys. Raises PentadError if it is impossible."""
    values = {**{key: value for key, value in RESET.items() if key not in held}, **setting.values}
    return load(
        config, sections=_nested({key: value for key, value in values.items() if value_of(config, key) != value})
    )


def overrides(config: RunConfig, changed: RunConfig) -> dict[str, Any]:
    """The keys and values in which a configuration with a setting differs from the original."""
    keys = *KEYS, *RESET, TRANSPORT
    return {key: value_of(changed, key) for key in keys if value_of(config, key) != value_of(changed, key)}


def given_and_changed(words: Iterable[str], config: RunConfig, changed: RunConfig) -> tuple[list[str], list[str]]:
    """The `words` that a configuration with a setting keeps, and the overrides that lead to it."""
    values = overrides(config, changed)
    texts = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]
    return [word for word in words if word.partition("=")[0] not in values], texts


def _nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        found.setdefault(section, {})[name] = value
    return found


@lru_cache(maxsize=64)
def splits_backward(order: Order) -> bool:
    """Whether a schedule runs W separately from B."""
    found: Program = generate(order.name, 2, 8, order.options)
    return bool(_W[found.columns.op].any())


@lru_cache(maxsize=4096)
def placement_of(order: Order, ranks: int, microbatches: int, slices: int) -> Placement:
    """The stages of every pipeline rank. Raises PentadError for sizes that the schedule does not allow."""
    spec = spec_of(order.name, ranks, microbatches, order.options._replace(slices=slices if slices > 1 else None))
    return tuple(CATALOGUE[order.name].placement(rank, spec) for rank in range(ranks))
