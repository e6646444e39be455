"""Plans of a run whose layers have moved between stages, because a rank is slow (elastic.slow_rank: rebalance)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.planning import make_plan, with_inputs_of
from pentad.schedules.diagnosis.rank_costs import costs_of_ranks
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.search.layer_moves import LayerMoves, best_layers
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import head_in_layers


def find_moves(plan: Plan, steps: Iterable[Sequence[RankTime]]) -> LayerMoves | None:
    """The best layers per stage at the costs of these steps; None if their times are incomplete."""
    costs = costs_of_ranks(plan.program, plan.mesh, steps)
    if costs is None:
        return None
    return best_layers(plan.program, costs, layers_per_stage(plan), lambda layers: stage_work(plan, layers))


def layers_per_stage(plan: Plan) -> tuple[int, ...]:
    stage_of, counts = plan.program.stage_of, dict[int, int]()
    for stage, unit in zip(stage_of, plan.layers, strict=True):
        counts[stage] = counts.get(stage, 0) + len(unit.numbers)
    return tuple(counts.values())


def stage_work(plan: Plan, layers: Sequence[int]) -> list[float]:
    """Work of stages with this many layers each: in layers, with the head as in `split_layers`; in FLOPs for a custom
    model."""
    if plan.model.custom is not None:
        each = iter(plan.model.custom.layers)
        return [sum(layer.flops for layer in islice(each, count)) for count in layers]
    head = head_in_layers(plan.model, plan.batch.sequence_length)
    return [count + head * (stage == len(layers) - 1) for stage, count in enumerate(layers)]


def with_layers(config: RunConfig, layers: Sequence[int]) -> RunConfig:
    """The configuration with this many layers per stage."""
    schedule = config.schedule.model_copy(update={"layers_per_stage": list(layers)})
    return config.model_copy(update={"schedule": schedule})


def rebalanced_plan(config: RunConfig, plan: Plan) -> Plan:
    """The plan of the same ranks with the layers per stage of `config`. Raises PentadError if there is none."""
    return with_inputs_of(make_plan(config, plan.device, hosts=plan.hosts, model=plan.model), plan)


def layer_facts(config: RunConfig) -> dict[str, Any]:
    """What the journal records about a configuration whose layers move."""
    pipeline = [config.mesh.pp, config.schedule.name, config.schedule.chunks]
    return {"pipeline": pipeline, "configured": config.schedule.layers_per_stage}


def with_rebalanced_layers(config: RunConfig, journal: Callable[[], Sequence[Mapping[str, Any]]]) -> RunConfig:
    """The configuration of a resuming run, with the last layers per stage in its journal, unless its pipeline or layers
    were changed since."""
    if config.elastic.slow_rank != "rebalance":
        return config
    events = [row for row in journal() if row["event"] == "rebalanced"]
    facts = layer_facts(config)
    known = [layers for row in events for layers in (row["configured"], row["layers"])]
    is_same = facts["configured"] in known and events[-1]["pipeline"] == facts["pipeline"]
    return with_layers(config, events[-1]["layers"]) if is_same else config
