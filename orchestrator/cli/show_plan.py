"""`pentad plan`: what a run will do, what it needs, and what its ranks will send each other."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from pentad.orchestrator.api.comparison import figures
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.plan_view import layers_text, print_plan
from pentad.orchestrator.monitoring.tables import fitted_table
from pentad.orchestrator.planning.comm_volume import collective_bytes, comm_volume
from pentad.orchestrator.planning.estimate import costs_of, memories, mfu, stage_memory, step_seconds
from pentad.orchestrator.planning.fit import DeviceMemory, Fit, fit_of
from pentad.orchestrator.planning.formatting import format_bytes, format_count, format_duration, format_percent
from pentad.orchestrator.planning.hardware import known_gpu, require_tp_on_node
from pentad.orchestrator.planning.planning import make_plan, require_shards
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.cp_layout import CP_LAYOUTS, CpLayout, imbalance
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import num_parameters
from pentad.workers.data.sources import check_data


def show_plan(config: RunConfig, device: str, memory: DeviceMemory, console: Console, *, as_json: bool) -> int:
    """Prints what would run on 'cpu' or 'cuda', with guessed costs. Returns the exit status: 1 if it would not."""
    if device == "cuda":
        require_tp_on_node(config.mesh.mesh, across=config.mesh.tp_across_nodes)
    plan = make_plan(config, device)
    require_shards(config, plan)
    costs, fit = costs_of(plan), fit_of(plan, memory)
    data_error = _data_error(config)
    status = int(not fit.ok or bool(data_error))
    if as_json:
        print(json.dumps({**_facts(plan, costs, fit), "data": {"ok": not data_error, "error": data_error}}))
        return status
    print_plan(console, plan, costs)
    pace = _pace(plan, simulate(plan.program, costs))
    used = "" if pace["mfu"] is None else f", {format_percent(pace['mfu'])} MFU"
    text = f" {format_duration(pace['step_seconds'])} a step, {format_count(pace['tokens_per_second'])} tokens/s{used}"
    console.print(Text(f"{text}: from assumed rates, which a run measures"))
    _print_rank(plan, fit.rank, console)
    console.print(Text(f" {fit.sentence}", "green" if fit.ok else "bold red"), soft_wrap=True)
    if data_error:
        console.print(Text(f" the data cannot be used on this machine: {data_error}", "bold red"), soft_wrap=True)
    return status


def _data_error(config: RunConfig) -> str:
    """What `train` would say of the corpus, '' if it could be read."""
    try:
        check_data(config.data.path, config.model.vocab, config.batch.sequence_length, config.data.cache)
    except PentadError as error:
        return str(error)
    return ""


def _print_rank(plan: Plan, rank: int, console: Console) -> None:
    """What the stages of a rank need, and what the rank sends."""
    kinds = ("parameters", "gradients", "optimizer", "saved", "deferred")
    heads: tuple[str, ...] = ("stage", "layers", "parameters>", "gradients>", "optimizer>", "F keeps>", "B keeps>")
    drop: tuple[str, ...] = ("gradients", "B keeps", "parameters", "layers")
    rows = [
        (str(of["stage"]), layers_text(plan, of["stage"]), *(format_bytes(of[kind]) for kind in kinds))
        for of in stage_memory(plan, rank)
    ]
    console.print(Text(f"\n rank {rank}", "bold"))
    console.print(fitted_table(heads, rows, console.width, drop=drop, wrapped="layers"))
    if sent := comm_volume(plan, rank):
        heads, drop = ("sends along", "by", "operations>", "a step>"), ("operations", "by")
        rows = [
            (axis, kind.lower().replace("_", " "), f"{operations:,}", format_bytes(nbytes))
            for (axis, kind), (operations, nbytes) in sorted(sent.items())
        ]
        console.print()
        console.print(fitted_table(heads, rows, console.width, drop=drop))
    if plan.mesh.cp > 1:
        text = f" cp ranks have {_layout(plan)} parts: the busiest computes {_imbalance(plan):.3f} times the least"
        console.print(Text(text))
    console.print()


def _pace(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    seconds = step_seconds(timeline)
    tokens_per_second = plan.batch.tokens / seconds
    used = mfu(tokens_per_second, plan, known_gpu()) if plan.device == "cuda" else None
    return {"step_seconds": seconds, "tokens_per_second": tokens_per_second, "mfu": used}


def _layout(plan: Plan) -> CpLayout:
    return CP_LAYOUTS[plan.cp_method]


def _imbalance(plan: Plan) -> float:
    return 1.0 if plan.cp_method == "ulysses" else imbalance(plan.batch.sequence_length, plan.mesh.cp, _layout(plan))


def _facts(plan: Plan, costs: Costs, fit: Fit) -> dict[str, Any]:
    timeline, each = simulate(plan.program, costs), memories(plan)
    ranks = [
        {
            "rank": rank,
            "coordinates": plan.mesh.coordinates(rank)._asdict(),
            "stages": list(plan.stages_of(rank)),
            "layers": [list(plan.layers[stage]) for stage in plan.stages_of(rank)],
            "memory": each[rank],
            "traffic": collective_bytes(plan, rank),
        }
        for rank in range(plan.mesh.size)
    ]
    sent = [{**of._asdict(), **sent._asdict()} for of, sent in sorted(comm_volume(plan, fit.rank).items())]
    device = fit.device
    fits = {"ok": fit.ok, "needed": fit.needed, "available": device.bytes, "where": device.where, "rank": fit.rank}
    return {
        "run": plan.name,
        "device": plan.device,
        "dtype": plan.dtype,
        "transport": plan.transport,
        "mesh": asdict(plan.mesh),
        "parameters": num_parameters(plan.model),
        "tokens": plan.batch.tokens,
        "schedule": plan.program.name,
        "microbatches": plan.program.microbatches,
        "hash": plan.program.hash,
        "ranks": ranks,
        "fullest": {"rank": fit.rank, "stages": stage_memory(plan, fit.rank), "sends": sent},
        "cp_imbalance": _imbalance(plan),
        "predicted": {**figures(timeline), **_pace(plan, timeline)},
        "costs": asdict(costs),
        "fits": fits,
    }
