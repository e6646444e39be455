"""`pentad.plan` and `pentad plan`: what a run will do, what it needs, and what its ranks will send each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from pentad.orchestrator.api.comparison import figures
from pentad.orchestrator.api.configs import Config, load_config
from pentad.orchestrator.api.rendering import as_text
from pentad.orchestrator.checked_folders import check_corpora
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.memory.advice import memory_advice
from pentad.orchestrator.memory.capacity import Capacity, capacity_of, capacity_sentence
from pentad.orchestrator.memory.choice import choose
from pentad.orchestrator.memory.copy_slots import copy_slots_note
from pentad.orchestrator.memory.curve import memory_curves
from pentad.orchestrator.memory.first_microbatches import with_words
from pentad.orchestrator.memory.useless_savings import recompute_note, zero_note
from pentad.orchestrator.monitoring.plan_view import bubble_text, layers_text, plan_view
from pentad.orchestrator.monitoring.runfolder import with_kept_division
from pentad.orchestrator.monitoring.tables import fitted_table, line
from pentad.orchestrator.planning.balance import DataBalance, data_balance, require_pools
from pentad.orchestrator.planning.comm_volume import collective_bytes, comm_volume, transports
from pentad.orchestrator.planning.estimate import costs_of, memories, mfu, stage_memory, step_seconds
from pentad.orchestrator.planning.eval_cost import EvalCost, eval_cost
from pentad.orchestrator.planning.fit import Fit, device_memory, fit_of, host_note, require_host
from pentad.orchestrator.planning.formatting import format_bytes, format_count, format_duration, format_percent
from pentad.orchestrator.planning.hardware import gpu_of, local_device, require_tp_on_node
from pentad.orchestrator.planning.planning import make_plan, require_shards
from pentad.orchestrator.simulation.band import PlanBand, plan_band
from pentad.orchestrator.simulation.layer_spans import with_layer_spans
from pentad.schedules.draw.memory import memory_page
from pentad.schedules.draw.svg import svg_grid
from pentad.schedules.draw.trace import trace_bytes
from pentad.schedules.ir.argument_types import checks_types
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.passes.recompute import config_text
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.cp_layout import CP_LAYOUTS, CpLayout, imbalance
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import num_parameters
from pentad.workers.data.sources import check_data, count_eval_sequences, open_prepared

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, repr=False)
class PlannedRun:
    """What would run: the plan, guessed costs of its instructions in seconds, whether it fits into memory, and what its
    evaluations cost (None: there are none) beside this many training steps. `data_error` says what is wrong with the
    data ('' if nothing is), `remedy` what to change if the plan does not fit, `note` what gains nothing or was not
    checked, and `chosen` what the planner chose for `auto`, as overrides. `balance` is how evenly documents divide over
    ranks (None: attention crosses documents, or the data are not prepared), `capacity` why data.capacity_factor: auto
    is no larger (None: it is given, or nothing fits), and `band` how long 5 to 95 % of steps take (None: none were
    drawn)."""

    plan: Plan
    costs: Costs
    fit: Fit
    evaluation: EvalCost | None
    training_steps: int
    data_error: str = ""
    remedy: str = ""
    note: str = ""
    chosen: tuple[str, ...] = ()
    balance: DataBalance | None = None
    capacity: Capacity | None = None
    band: PlanBand | None = None

    @property
    def ok(self) -> bool:
        """Whether the plan fits and the data can be read here."""
        return self.fit.ok and not self.data_error

    @cached_property
    def timeline(self) -> Timeline:
        """A step simulated at the guessed costs."""
        return simulate(self.plan.program, self.costs)

    @cached_property
    def step_seconds(self) -> float:
        return step_seconds(self.timeline)

    @property
    def rates(self) -> str:
        """The source of the rates that costs were guessed from."""
        return "" if self.plan.rates is None else self.plan.rates.source

    @property
    def tokens_per_second(self) -> float:
        return self.plan.batch.tokens / self.step_seconds

    @property
    def mfu(self) -> float | None:
        """The fraction of the GPUs' peak FLOP/s; None on CPUs."""
        return mfu(self.tokens_per_second, self.plan, self.plan.gpu) if self.plan.device == "cuda" else None

    @property
    def evaluation_share(self) -> float | None:
        """The share of the run's time that evaluations take; None if they or their data are unknown."""
        return None if self.evaluation is None else self.evaluation.share(self.training_steps * self.step_seconds)

    def memory_page(self) -> str:
        """HTML of what every pipeline rank holds during a simulated step, by kind and by unit."""
        plan, fit = self.plan, self.fit
        fullest = f"{fit.rank} ({plan.mesh.coordinates(fit.rank)})"
        facts = {
            "mesh": str(plan.mesh),
            "program": f"{plan.program.name}, {plan.program.microbatches} microbatches",
            "ZeRO": str(plan.zero),
            "recomputation": config_text(plan.recomputation),
            "a step": f"{format_duration(self.step_seconds)}, simulated from rates {self.rates}",
            "fullest rank": f"{fullest}, {format_bytes(fit.needed)} of {format_bytes(fit.device.bytes)}",
        }
        title = f"{plan.name}: memory over a step"
        return memory_page(memory_curves(plan, self.timeline), title=title, facts=facts, available=fit.device.bytes)

    def write_trace(self, path: Path) -> None:
        """Writes the simulated step of every pipeline rank, with messages inside layers, for Perfetto (.json.gz)."""
        path.write_bytes(trace_bytes([with_layer_spans(self.timeline, self.plan, self.costs)], process_names=None))

    def facts(self) -> dict[str, Any]:
        """What `pentad plan --json` prints, in bytes and seconds."""
        plan, each = self.plan, memories(self.plan)
        ranks = [
            {
                "rank": rank,
                "coordinates": plan.mesh.coordinates(rank)._asdict(),
                "stages": list(plan.stages_of(rank)),
                "layers": [list(plan.layers[stage][:2]) for stage in plan.stages_of(rank)],
                "memory": each[rank],
                "traffic": collective_bytes(plan, rank),
            }
            for rank in range(plan.mesh.size)
        ]
        fit, balance = self.fit, self.balance
        sent = [{**of._asdict(), **sent._asdict()} for of, sent in sorted(comm_volume(plan, fit.rank).items())]
        pace = {
            "rates": self.rates,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "band": None if self.band is None else self.band.facts(),
        }
        fits = {"ok": fit.ok, "needed": fit.needed, "available": fit.device.bytes, "where": fit.device.where}
        fits |= {"remedy": self.remedy} if self.remedy else {}
        fits |= {"note": self.note} if self.note else {}
        return {
            "run": plan.name,
            "device": plan.device,
            "dtype": plan.dtype,
            "transport": transports(plan),
            "cuda_graphs": plan.cuda_graphs,
            "kernels": {"name": plan.kernels.name, "measured": list(plan.kernels.measured)},
            "expert_slots": plan.expert_slots,
            "mesh": asdict(plan.mesh),
            "parameters": num_parameters(plan.model),
            "tokens": plan.batch.tokens,
            "rampup": [stage._asdict() for stage in plan.batch.rampup],
            "schedule": plan.program.name,
            "microbatches": plan.program.microbatches,
            "offload": list(plan.offload),
            "hash": plan.program.hash,
            "ranks": ranks,
            "fullest": {"rank": fit.rank, "stages": stage_memory(plan, fit.rank), "sends": sent},
            "cp_imbalance": _imbalance(plan),
            "balance": balance and {**balance._asdict(), "pools": [each._asdict() for each in balance.pools]},
            "predicted": {**figures(self.timeline), **pace},
            "evaluation": self._evaluation_facts(),
            "costs": asdict(self.costs),
            "chosen": list(self.chosen),
            "capacity": None if self.capacity is None else self.capacity.facts,
            "fits": {**fits, "rank": fit.rank},
            "data": {"ok": not self.data_error, "error": self.data_error},
        }

    def _evaluation_facts(self) -> dict[str, Any] | None:
        found = self.evaluation
        if found is None:
            return None
        return {
            "every": found.every,
            "evaluations": found.count,
            "rounds": found.rounds,
            "round": {**figures(found.round), "seconds": found.round_seconds},
            "seconds": found.seconds,
            "share": self.evaluation_share,
            "activations": list(found.activations),
            "extra_bytes": list(found.extra_bytes),
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from plan_view(console, self.plan, self.costs)
        used = "" if self.mfu is None else f", {format_percent(self.mfu)} MFU"
        pace = f"{format_duration(self.step_seconds)} a step, {format_count(self.tokens_per_second)} tokens/s{used}"
        yield line(f" {pace}: from rates {self.rates}")
        if self.band is not None:
            yield line(f" {self.band.sentence}")
        if self.evaluation is not None:
            yield line(f" {_evaluation_sentence(self.evaluation, self.evaluation_share)}")
        if self.balance is not None:
            yield from (line(f" {sentence}") for sentence in _balance_sentences(self.balance))
        elif self.plan.data.document_mask and not (self.plan.batch.rampup or self.data_error):
            yield line(f" {UNREAD}")
        yield from _rank_view(self.plan, self.fit.rank, console.width)
        yield line(f" {self.fit.sentence}", style="green" if self.fit.ok else "bold red")
        if self.chosen:
            yield line(f" chosen: {' '.join(self.chosen)}")
        if self.capacity is not None:
            yield line(f" {capacity_sentence(self.capacity, self.fit.device)}")
        for sentence in filter(None, (self.remedy, self.note)):
            yield line(f" {sentence}")
        if self.data_error:
            yield line(f" the data cannot be used on this machine: {self.data_error}", style="bold red")

    __repr__ = as_text

    def _repr_svg_(self) -> str:
        program = self.plan.program
        title = f"{self.plan.name}: {program.name}, {program.microbatches} microbatches, {self.plan.mesh}, simulated"
        return svg_grid(self.timeline, title=title, timed=True)


UNREAD = "how documents divide over ranks is shown once a run has built or packed the corpus, on this machine"


@checks_types
def plan(
    config: Config = None,
    *,
    device: Device | None = None,
    device_gib: float | None = None,
    draws: int = 0,
    **sections: Any,
) -> PlannedRun:
    """What `pentad.train` would run, from guessed costs; starts and writes nothing, and needs neither torch nor Ray.

    `config` and `sections` are as in `train`. `device` is the kind of device that ranks have (None: as found here),
    `device_gib` its memory (None: that of cluster.gpu, else of the GPU here, else of an H200). `draws` is how many
    steps with random deviations to simulate as well, 0 or at least 2. Raises PentadError for a mistake in the
    configuration.
    """
    if draws < 0 or draws == 1:
        raise PentadError(f"draws is {draws}: expected 0 or at least 2")
    if device_gib is not None and not 0 < device_gib < math.inf:
        raise PentadError(f"device_gib is {device_gib:g}: expected a finite number greater than 0")
    return planned(load_config(config, **sections), device, device_gib, draws=draws)


def planned(
    config: RunConfig,
    device: Device | None = None,
    device_gib: float | None = None,
    pools: Sequence[int] = (),
    draws: int = 0,
) -> PlannedRun:
    """As `plan`, for a loaded configuration; also balances `pools` of other numbers of dp x ep x cp ranks."""
    place = device or local_device(config.cluster, config.mesh.size)[0]
    if place == "cuda":
        require_tp_on_node(config.mesh.mesh, across=config.mesh.tp_across_nodes)
    room = device_memory(place, device_gib, gpu=gpu_of(config.cluster))
    config = with_kept_division(config)
    is_open, choice = config.data.capacity_factor == "auto", choose(config, place, room)
    chosen = () if choice is None else choice.words
    given, config = config, with_words(config, chosen)
    found = make_plan(config, place, memory=room) if choice is None else choice.plan
    require_shards(config, found)
    require_host(config, found)
    require_pools(found, pools)
    costs, fit = costs_of(found), fit_of(found, room)
    sequences, data_error = _data(config, found)
    evaluation = eval_cost(config, found, costs, sequences)
    remedy = "" if fit.ok else memory_advice(config, found, fit)
    note = ""
    if fit.ok:
        note = copy_slots_note(given, found, fit) or zero_note(config, found, fit) or host_note(config, found)
        note = note or ("" if chosen else recompute_note(config, found, fit))
    factor, balance = config.data.capacity_factor, None
    assert factor != "auto"
    capacity = capacity_of(config, found, room, factor) if is_open and fit.ok else None
    try:
        balance = None if data_error else _balance(found, config.run.steps, pools)
    except PentadError as error:  # a damaged shard, which is first read here
        data_error = str(error)
    notes = data_error, remedy, note, chosen, balance, capacity, plan_band(found, draws) if draws else None
    return PlannedRun(found, costs, fit, evaluation, config.run.steps, *notes)


def _balance(plan: Plan, steps: int, pools: Sequence[int]) -> DataBalance | None:
    """The balance of the first steps with a full batch; None without a document mask, as all sequences then cost the
    same."""
    if not plan.data.document_mask or plan.batch.rampup:
        return None
    dataset = open_prepared(plan.data, plan.batch, plan.model.vocab, plan.seed)
    return None if dataset is None else data_balance(plan, dataset, steps, pools)


def _data(config: RunConfig, plan: Plan) -> tuple[list[int | None], str]:
    """How many sequences of each data set an evaluation reads (None: unknown), and the error that `train` would report
    about the corpora, '' if there is none."""
    sizes, found = (config.model.vocab, config.batch.sequence_length), list[int | None]()
    try:
        check_corpora(each.path for each in config.data.spec.sources)
        check_data(config.data.spec, *sizes, config.batch.sizes, config.run.steps)
        for each in () if plan.eval is None else plan.eval.data_sets:
            counts = config.eval.sequences, count_eval_sequences(each, *sizes, config.data.cache)
            found.append(min((count for count in counts if count is not None), default=None))
    except PentadError as error:
        return [None], str(error)
    return found, ""


def _balance_sentences(found: DataBalance) -> Iterator[str]:
    """'documents of the first 4 steps, sequences as they are drawn: the last rank ends at 1.32 times the mean'"""
    steps = "the first step" if found.steps == 1 else f"the first {found.steps} steps"
    ways = {
        "fixed": ("sequences as they are drawn", found.fixed),
        "packed": ("sequences dealt by cost", found.packed),
        "dynamic": (f"ranks by document ({format_percent(found.groups)} of tokens in groups)", found.dynamic),
    }
    if found.trained == "dynamic":
        least, most = found.microbatches
        ways["dynamic"] = (f"{ways['dynamic'][0]}, pipelines of {least} to {most} microbatches", found.dynamic)
    way, ratio = ways.pop(found.trained)
    others = ", ".join(f"{its:.2f} {other}" for other, its in ways.values())
    yield f"documents of {steps}, {way}: the last rank ends at {ratio:.2f} times the mean"
    yield f"simulated: {others}; ranks by document end within {format_percent(found.gap)} of the least possible"
    for pool in found.pools:
        each = f"{pool.fixed:.2f} sequences as they are drawn, {pool.packed:.2f} dealt by cost"
        yield f"simulated on {pool.ranks:,} ranks: {each}, {pool.dynamic:.2f} ranks by document"


def _evaluation_sentence(cost: EvalCost, share: float | None) -> str:
    """'an evaluation every 20 steps: 2 rounds of 40 ms (bubble ...), 3.1 % of the run's time'"""
    when = f"every {cost.every} steps" if cost.every else "after the last step"
    rounds = "rounds" if cost.rounds is None else "1 round" if cost.rounds == 1 else f"{cost.rounds} rounds"
    timing = f"{rounds} of {format_duration(cost.round_seconds)} (bubble {bubble_text(cost.round.bubble())})"
    part = "" if share is None else f", {format_percent(share)} of the run's time"
    extra = max(cost.extra_bytes)
    peak = f", {format_bytes(extra)} more memory than training" if extra else ""
    return f"an evaluation {when}: {timing}{part}{peak}"


def _rank_view(plan: Plan, rank: int, width: int) -> Iterator[RenderableType]:
    """What the stages of a rank need, and what the rank sends."""
    kinds = ("parameters", "gradients", "optimizer", "saved", "deferred")
    heads: tuple[str, ...] = ("stage", "layers", "parameters>", "gradients>", "optimizer>", "F keeps>", "B keeps>")
    drop: tuple[str, ...] = ("gradients", "B keeps", "parameters", "layers")
    rows = [
        (str(of["stage"]), layers_text(plan, of["stage"]), *(format_bytes(of[kind]) for kind in kinds))
        for of in stage_memory(plan, rank)
    ]
    yield Text(f"\n rank {rank}", "bold")
    yield fitted_table(heads, rows, width, drop=drop, wrapped=["layers"])
    if sent := comm_volume(plan, rank):
        heads, drop = ("sends along", "by", "operations>", "a step>"), ("operations", "by")
        rows = [
            (axis, kind.lower().replace("_", " "), f"{operations:,}", format_bytes(nbytes))
            for (axis, kind), (operations, nbytes) in sorted(sent.items())
        ]
        yield Text()
        yield fitted_table(heads, rows, width, drop=drop)
    if plan.mesh.cp > 1:
        text = f" cp ranks have {_layout(plan)} parts: the busiest computes {_imbalance(plan):.3f} times the least"
        yield Text(text)
    yield Text()


def _layout(plan: Plan) -> CpLayout:
    return CP_LAYOUTS[plan.cp_method]


def _imbalance(plan: Plan) -> float:
    return 1.0 if plan.cp_method == "ulysses" else imbalance(plan.batch.sequence_length, plan.mesh.cp, _layout(plan))
