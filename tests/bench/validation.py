"""Scores the planner on published measurements of other programs (docs/validation.md).

PYTHONPATH=.typings:tests/support python tests/bench/validation.py --fit
PYTHONPATH=.typings:tests/support python tests/bench/validation.py --json FILE --svg FILE

`published/*.json` have the rows. `--fit` fits the constants in published/constants.json to the rows listed in a file's
`train`, and writes them; scores are over all other rows. A prediction is the step that `pentad plan` would simulate at
those constants; if a source leaves something open, it is the median over the possible values.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from published import MODELS, ROWS
from record import stamp, write
from scatter import svg_scatter

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.gpus.table import GPUS
from pentad.orchestrator.planning.estimate import flops_per_token, memories, simulated_seconds
from pentad.orchestrator.planning.hardware import GROUPED_EFFICIENCY, rates_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.events import Events, acyclic_events
from pentad.schedules.simulate.rates import AttentionRates, ExpertRates, Link, Links, Rates
from pentad.schedules.spec.plan import Plan

PUBLISHED = Path(__file__).parent / "published"
CONSTANTS = PUBLISHED / "constants.json"
FAMILIES = (
    *("vtrain-multi-node", "vtrain-single-node", "bloom", "megatron-a100"),
    *("megatron-h100", "torchtitan-bf16", "torchtitan-fp8", "megatron-bridge", "llama-3", "nanotron", "moe"),
)
ATTAINED_NETWORK = 0.8  # of the link's bit rate, as in the planner's own figure
FULL_WATTS = 700  # of an H100 and an H200 in SXM form
HOST_ORDER = ("pp", "dp", "ep", "cp", "tp")  # in these programs
STEPS = (1.3, 1.14, 1.07, 1.03)  # factors by which a fit changes a constant
AXES = ("dp", "pp", "cp", "tp", "ep")
MODEL = ("family", "layers", "hidden", "heads", "head_dim", "vocab", "tie_word_embeddings", "experts", "mla")
Facts = dict[str, Any]


def sections(facts: Facts) -> dict[str, Any]:
    """A row as pentad's configuration. A network with two matrices has as many elements as a gated one of 2/3 the
    width."""
    tp = facts.get("tp", 1)
    model = {key: facts[key] for key in (*MODEL, "mtp_layers", "sliding_window") if key in facts}
    model["ffn"] = facts.get("ffn") or tp * round(8 * facts["hidden"] / 3 / tp)
    model["kv_heads"] = facts.get("kv_heads", facts["heads"])
    mesh = {axis: facts[axis] for axis in AXES if axis in facts} | {"tp_across_nodes": True}
    replicas = facts.get("dp", 1) * facts.get("ep", 1)
    schedule = {"name": "interleaved" if facts.get("chunks", 1) > 1 else "1f1b", "chunks": facts.get("chunks")}
    if schedule["name"] == "1f1b":
        schedule["chunks"] = None
    return {
        "run": {"name": "published", "steps": 1},
        "model": model,
        "mesh": mesh | {"cp_method": facts.get("cp_method", "ring")},
        "schedule": schedule | {"microbatches": max(1, facts["batch"] // replicas // facts["micro_batch"])},
        "batch": {"global_batch_size": facts["batch"], "sequence_length": facts["length"]},
        "data": {"path": "builtin:pydoc"},
        "precision": {"matmul": facts.get("matmul", "compute"), "deterministic": False},
        "memory": {"recompute": facts.get("recompute", "none"), "unit_layers": facts.get("unit_layers")},
        "zero": {"stage": facts.get("zero", 0)},
        "cluster": {"gpu": facts["gpu"], "device": "cuda", "address": "auto", "transport": "nccl", "rates": "builtin"},
    }


@dataclass(frozen=True, eq=False)
class Row:
    """A published measurement, with everything that its file says about it."""

    family: str
    number: int
    facts: Facts
    is_training: bool

    @cached_property
    def choices(self) -> list[Facts]:
        unknown: dict[str, list[Any]] = self.facts.get("unknown", {})
        known = {key: value for key, value in self.facts.items() if key != "unknown"}
        return [known | dict(zip(unknown, each, strict=True)) for each in product(*unknown.values())]

    @cached_property
    def plans(self) -> list[tuple[Plan, Events]]:
        """The plans of all choices that can run."""
        found, reason = [], ""
        for facts in self.choices:
            try:
                plan = make_plan(RunConfig.model_validate(sections(facts)), "cuda", proved=False)
                found.append((plan, acyclic_events(plan.program)))
            except (PentadError, ValueError) as error:
                reason = str(error)
        if not found:
            raise PentadError(f"{self.family} {self.number}: {reason}")
        return found

    @property
    def gpus(self) -> int:
        return int(np.prod([self.facts.get(axis, 1) for axis in AXES]))

    @cached_property
    def seconds(self) -> float | None:
        """Measured seconds of a step."""
        facts, tokens = self.facts, self.facts["batch"] * self.facts["length"]
        if "seconds" in facts:
            return float(facts["seconds"])
        if "tokens" in facts:
            return float(tokens / facts["tokens"] / self.gpus)
        if "tflops" in facts:
            return tokens * self._flops_per_token / facts["tflops"] / 1e12 / self.gpus
        return None

    @property
    def _flops_per_token(self) -> float:
        """FLOPs a token by the source's convention; that of Megatron-LM's paper (arXiv 2104.04473, 3.4) includes full
        recomputation."""
        facts = self.facts
        if facts["convention"] == "megatron recompute":
            hidden, layers = facts["hidden"], facts["layers"]
            rest = facts["length"] / 6 / hidden + facts["vocab"] / 16 / layers / hidden
            return float(96 * layers * hidden**2 * (1 + rest))
        model = RunConfig.model_validate(sections(self.choices[0])).model.spec
        return flops_per_token(model, facts["length"], causal=facts["convention"] == "causal")

    def predicted(self, rates: Rates) -> float:
        rates = _on(rates, self.facts)
        return median(simulated_seconds(plan, events, rates) for plan, events in self.plans)

    def memory(self) -> float:
        """Predicted GiB of the fullest rank, with units of one layer where layers recompute, and 4 bytes of master
        weights."""
        found = []
        for facts in self.choices:
            fewer = facts["micro_batch"] * facts.get("dp", 1) * facts.get("ep", 1) * 2 * facts.get("pp", 1)
            short = facts | {"unit_layers": None, "batch": min(facts["batch"], fewer)}
            plan = make_plan(RunConfig.model_validate(sections(short)), "cuda", proved=False)
            found.append(max(each["total"] + each["master"] for each in memories(plan)) / 2**30)
        return median(found)


@dataclass(frozen=True)
class Family:
    name: str
    source: str
    constants: str
    group: list[str]
    rows: list[Row]


@cache
def family(name: str) -> Family:
    given = playbook() if name == "nanotron" else json.loads((PUBLISHED / f"{name}.json").read_text())
    common = given["common"] | {"gpu": given["gpu"], "gbit": given["gbit"]}
    rows = []
    for number, values in enumerate(given["rows"]):
        facts = dict(zip(given["columns"], values, strict=True)) if "columns" in given else values
        rows.append(Row(name, number, common | facts, number in given["train"]))
    return Family(name, given["source"], given["constants"], given["group"], rows)


def playbook() -> dict[str, Any]:
    """The rows of tests/support/published.py."""
    rows = []
    for row in ROWS:
        spec = MODELS[row.model]
        sizes = {key: getattr(spec, key) for key in ("layers", "hidden", "heads", "ffn", "vocab")}
        sizes |= {"tie_word_embeddings": spec.tie_word_embeddings, "name": row.model}
        mesh = {"dp": row.dp, "tp": row.tp, "pp": row.pp, "zero": row.zero, "micro_batch": row.micro_batch_size}
        rows.append(sizes | mesh | {"tflops": row.mfu / 100 * 989, "memory": row.memory})
    return {
        "source": "the Ultra-Scale Playbook: nanotron 0.5 (MFU, attention without causal mask; GB)",
        "gpu": "NVIDIA H100 80GB HBM3",
        "gbit": 400,
        "constants": "nanotron",
        "group": [],
        "train": [0, 1, 2],
        "common": {"batch": 256, "length": 4096, "convention": "full"},
        "rows": rows,
    }


@cache
def constants() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CONSTANTS.read_text())
    return found


def _on(rates: Rates, facts: Facts) -> Rates:
    """Rates on the hosts and cards of these programs, with data-sheet links between hosts. If products are cut into as
    many parts as there are tp ranks, the bytes of all parts but the first overlap with another part's product."""
    hidden = 1 - 1 / facts.get("tp", 1) if facts.get("tp_overlap") else 0.0
    links = Links.uniform(rates.inter_host.send.latency, ATTAINED_NETWORK * facts["gbit"] * 1e9 / 8)
    rates = replace(_on_card(rates, facts), inter_host=links, host_order=HOST_ORDER, tp_hidden=hidden)
    if facts.get("gradients") != "float16":
        return rates
    # Only gradients are all-reduced, and the planner counts 4 bytes for each.
    sides = {name: getattr(rates, name) for name in ("intra_host", "peer", "inter_host")}
    return replace(rates, **{name: replace(each, all_reduce=_twice(each.all_reduce)) for name, each in sides.items()})


def _on_card(rates: Rates, facts: Facts) -> Rates:
    """With other memory bandwidth, and less power than the GPU's usual: dynamic power is proportional to the clock
    times the square of a voltage that follows it, so the clock follows the cube root (Brooks et al., IEEE Micro 20(6),
    2000)."""
    usual = GPUS[facts["gpu"]].bandwidth
    faster = facts.get("bandwidth", usual) / usual
    memory = {name: faster * getattr(rates, name) for name in ("memory", "elementwise", "update")}
    return replace(rates.scaled("flops", (facts.get("watts", FULL_WATTS) / FULL_WATTS) ** (1 / 3)), **memory)


def _twice(link: Link) -> Link:
    return replace(link, bandwidth=2 * link.bandwidth)


def rates_with(gpu: str, given: dict[str, Any]) -> Rates:
    """The planner's own rates for a GPU, with the constants of a program."""
    found, values = rates_of("cuda", gpu), given["data_sheet"] | given["fitted"]
    flops, elementwise = values["flops"], values.get("elementwise", found.elementwise)
    attention = ((1.0, values.get("attention", flops)),)
    others: dict[str, Any] = dict.fromkeys(("issue", "peer_issue"), values["issue"])
    others["layer_issue"] = (*[values["layer_issue"]] * 2, 0.0)
    if "intra_host" in values:
        others["intra_host"] = others["peer"] = Links.uniform(values["intra_host_latency"], values["intra_host"])
    return replace(
        found,
        products=((1.0, flops),),
        experts=(ExpertRates.uniform(*(GROUPED_EFFICIENCY * flops,) * 3),),
        attention=(AttentionRates(128, attention, attention),),
        elementwise=elementwise,
        **others,
    )


def rates_for(row: Row) -> Rates:
    return rates_with(row.facts["gpu"], constants()[family(row.family).constants])


def fit(name: str) -> dict[str, float]:
    """The constants of a program that minimize the mean absolute logarithm of predicted over measured seconds on
    training rows; the means of all files have equal weight."""
    given = constants()[name]
    files = [[row for row in family(each).rows if row.is_training] for each in FAMILIES]
    files = [rows for each, rows in zip(FAMILIES, files, strict=True) if rows and family(each).constants == name]

    def loss(values: dict[str, float]) -> float:
        fitted = {**given, "fitted": values}
        errors = [[_log_ratio(row, rates_with(row.facts["gpu"], fitted)) for row in rows] for rows in files]
        return sum(float(np.abs(each).mean()) for each in errors)

    values = dict(given["fitted"])
    best = loss(values)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for key, factor in product(values, (step, 1 / step)):
                tried = values | {key: float(f"{values[key] * factor:.4g}")}
                if (found := loss(tried)) < best - 1e-6:
                    best, values, moved = found, tried, True
        print(f"{name}: {best:.4f} with {values}", flush=True)
    return values


def _log_ratio(row: Row, rates: Rates) -> float:
    assert row.seconds is not None
    return float(np.log(row.predicted(rates) / row.seconds))


def digest() -> str:
    """A hash of the constants."""
    return hashlib.sha256(CONSTANTS.read_bytes()).hexdigest()


def score(name: str) -> dict[str, Any]:
    """A family's predictions in the order of its rows (None: the row cannot be expressed, or has no time), and error
    figures over all rows that no constant was fitted to."""
    rows, lacking = family(name).rows, {}
    predicted: list[float | None] = []
    for row in rows:
        try:
            predicted.append(None if row.seconds is None else float(f"{row.predicted(rates_for(row)):.5g}"))
        except PentadError as error:
            lacking[row.number] = str(error).replace("\n", " ")[:300]
            predicted.append(None)
    pairs = [(row, each) for row, each in zip(rows, predicted, strict=True) if each is not None]
    scored = [(row, each) for row, each in pairs if not row.is_training]
    found: dict[str, Any] = {"rows": len(rows), "trained_on": sum(row.is_training for row in rows)}
    found |= errors([(each, row.seconds or 0.0) for row, each in scored])
    found["spearman"] = spearman([(each, row.seconds or 0.0) for row, each in pairs])
    found |= _by_group(family(name), pairs) | {"memory": memory_errors(rows)}
    worst = sorted(scored, key=lambda pair: -abs(np.log(pair[1] / (pair[0].seconds or 1.0))))[:8]
    found["worst"] = [
        {"row": row.number, "predicted": each, "measured": round(row.seconds or 0, 5)} for row, each in worst
    ]
    return found | {"not_expressed": lacking, "predicted": predicted}


def errors(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Errors of (predicted, measured), relative to measured."""
    if not pairs:
        return {"scored": 0}
    found = np.array([abs(predicted / measured - 1) for predicted, measured in pairs])
    figures = {"median": np.median(found), "p90": np.quantile(found, 0.9), "max": found.max(), "mean": found.mean()}
    return {"scored": len(found), **{key: round(float(value), 4) for key, value in figures.items()}}


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Rank correlation of two orders with few ties."""
    if len(pairs) < 3:
        return None
    one, other = (np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in zip(*pairs, strict=True))
    return round(float(np.corrcoef(one, other)[0, 1]), 3)


def _by_group(of: Family, pairs: Sequence[tuple[Row, float]]) -> dict[str, Any]:
    """For groups of settings that a user could choose among: how much slower the predicted fastest is than the actual
    fastest, and the rank correlation."""
    groups: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for row, predicted in pairs:
        key = tuple(row.facts[each] for each in of.group)
        groups.setdefault(key, []).append((predicted, row.seconds or 0.0))
    groups = {key: each for key, each in groups.items() if of.group and len(each) > 2}
    if not groups:
        return {}
    regrets = {key: round(min(each)[1] / min(seconds for _, seconds in each) - 1, 4) for key, each in groups.items()}
    ranked = {key: spearman(each) for key, each in groups.items()}
    found: dict[str, Any] = {"regret": {"median": round(median(regrets.values()), 4), "max": max(regrets.values())}}
    found["groups"] = {"spearman_median": round(median(filter(None, ranked.values())), 3)}
    if len(groups) < 10:
        each = {" ".join(map(str, key)): {"regret": regrets[key], "spearman": ranked[key]} for key in groups}
        found["groups"] |= each
    return found


def memory_errors(rows: Sequence[Row]) -> dict[str, Any]:
    found = [(row.number, row.memory(), row.facts["memory"]) for row in rows if "memory" in row.facts]
    signed = [[number, round(predicted, 1), measured] for number, predicted, measured in found]
    return errors([(predicted, measured) for _, predicted, measured in found]) | ({"gib": signed} if signed else {})


def points(results: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    for name, found in results.items():
        for row, predicted in zip(family(name).rows, found["predicted"], strict=True):
            if predicted is not None and not row.is_training:
                yield name, row.seconds or 0.0, predicted


def table(results: dict[str, Any]) -> str:
    """The table in docs/validation.md."""
    lines = [
        "| rows | fitted on | scored | median | p90 | max | mean | Spearman |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        percents = (f"{100 * found[key]:.1f} %" for key in ("median", "p90", "max", "mean"))
        order = "" if found["spearman"] is None else f"{found['spearman']:.2f}"
        lines.append(f"| {name} | {found['trained_on']} | {found['scored']} | {' | '.join(percents)} | {order} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--only", nargs="*", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    if given.fit:
        names = dict.fromkeys(family(each).constants for each in given.only)
        fitted = {name: constants()[name] | {"fitted": fit(name)} for name in names}
        CONSTANTS.write_text(json.dumps(constants() | fitted, indent=1) + "\n")
        return
    results = {}
    for name in given.only:
        results[name] = score(name)
        shown = {key: value for key, value in results[name].items() if key not in ("predicted", "worst")}
        print(f"{name}: {json.dumps(shown)}", flush=True)
    print(table(results))
    write(given.json, {**stamp(), "constants": digest(), "families": results})
    if given.svg is not None:
        given.svg.write_text(svg_scatter(list(points(results)), title="Seconds of a step, predicted over measured"))


if __name__ == "__main__":
    main()
