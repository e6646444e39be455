"""Writes what the documentation takes from the code: `make docs`. tests/docs/test_generated.py keeps it current."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from pentad.orchestrator.activations.activation_peaks import layer_effects
from pentad.orchestrator.activations.allocations import Piece
from pentad.orchestrator.api.curves import Curves
from pentad.orchestrator.config.reference import completion_keys, configuration_page
from pentad.orchestrator.gpus.table import GB, GIB, GPUS, TFLOPS
from pentad.orchestrator.monitoring.exporter import METRICS
from pentad.orchestrator.planning.part_flops import part_flops
from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.compiler import compile_program
from pentad.schedules.draw.learning_rates import svg_learning_rates
from pentad.schedules.draw.losses import Evaluation, LossCurve, Window
from pentad.schedules.draw.svg import svg_grid
from pentad.schedules.passes.recompute import PARTS, recomputed_parts
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.learning_rate import DecayShape, LearningRate, ScheduleName
from pentad.schedules.spec.model import MLA, Experts, ModelSpec
from pentad.schedules.spec.tensors import LayerRange, active_parameters

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "tests" / "bench" / "results"
PICTURES = DOCS / "images" / "schedules"
RANKS, MICROBATCHES = 4, 8


def files() -> Iterator[tuple[Path, str]]:
    """Every file that is generated or has generated parts, and what it should contain."""
    yield DOCS / "configuration.md", configuration_page()
    yield DOCS.parent / "orchestrator" / "config" / "keys.txt", completion_keys()
    schedules, observability = DOCS / "schedules.md", DOCS / "observability.md"
    yield schedules, _filled(schedules, catalogue=_catalogue(), pictures=_pictures())
    yield observability, _filled(observability, metrics=_metrics())
    yield DOCS / "memory.md", _filled(DOCS / "memory.md", gpus=_gpus(), recompute=_recompute())
    yield DOCS / "images" / "learning-rates.svg", svg_learning_rates(learning_rates())
    for name in ("mixture", "fine-tuning"):
        yield DOCS / "images" / f"{name}-losses.svg", measured_curves(RESULTS / f"{name}-cpu.json").svg()
    for name in CATALOGUE:
        program = compile_program(name, RANKS, MICROBATCHES)
        timeline = simulate(program, Costs.uniform(program.stages))
        yield PICTURES / f"{name}.svg", svg_grid(timeline, title=name, timed=False)


def learning_rates() -> dict[str, LearningRate]:
    """Every learning rate schedule, with 100 steps, 10 of them warm-up, and a minimum of a tenth of the peak."""
    options: dict[str, dict[str, int]] = {"wsd": {"stable_steps": 60}, "cosine_with_restarts": {"cycles": 3}}
    shapes = {name: get_args(DecayShape) if name == "wsd" else ("",) for name in get_args(ScheduleName)}
    return {
        f"{name}, {shape}" if shape else name: LearningRate(
            1.0, 0.1, 10, 100, name, decay_shape=shape or "linear", **options.get(name, {})
        )
        for name in shapes
        for shape in shapes[name]
    }


def measured_curves(path: Path) -> Curves:
    """The curves that `pentad curves RUN --json` printed."""
    facts = json.loads(path.read_text(encoding="utf-8"))
    curves = [
        LossCurve(
            each["name"],
            tuple(Window(**window) for window in each["training"]),
            tuple(Evaluation(**evaluation) for evaluation in each["held_out"]),
        )
        for each in facts["curves"]
    ]
    run = Path(facts["run"]).name
    return Curves(run, tuple(curves), facts["steps"], facts["tokens"], tuple(facts["changes"]))


def _filled(page: Path, **parts: str) -> str:
    """The page with new text between the markers of each part."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        assert after, f"{page} has no part {name}"
        text = before + begin + part + end + after
    return text


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _catalogue() -> str:
    rows = []
    for name, entry in CATALOGUE.items():
        program = compile_program(name, RANKS, MICROBATCHES)
        bubble = simulate(program, Costs.uniform(program.stages)).bubble()
        peak = f"{max(peak_activations(program)):g}"
        rows.append(
            (
                f"[`{name}`](#{name})",
                entry.summary,
                peak,
                f"{100 * bubble.makespan:.1f} %",
                f"{100 * bubble.longest:.1f} %",
                entry.paper,
            )
        )
    return _table(("name", "what it does", "activations", "`makespan`", "`longest`", "paper"), rows)


def _pictures() -> str:
    return "\n".join(f"### {name}\n\n![{name}](images/schedules/{name}.svg)\n" for name in CATALOGUE)


def _metrics() -> str:
    rows = [
        (f"`{name}`", metric.kind, ", ".join(f"`{label}`" for label in metric.labels), metric.help)
        for name, metric in METRICS.items()
    ]
    return _table(("metric", "type", "labels besides `job`", "meaning"), rows)


def _gpus() -> str:
    heads = (
        "GPU",
        "GiB",
        "bfloat16, TFLOP/s",
        "8 bits",
        "memory, GB/s",
        "to GPUs, GB/s",
        "to the host, GB/s",
        "source",
    )
    rows = [
        (
            f"`{name}`",
            f"{gpu.memory / GIB:.0f}",
            f"{gpu.bf16 / TFLOPS:,.0f}",
            f"{gpu.fp8 / TFLOPS:,.0f}" if gpu.fp8 else "-",
            *(f"{rate / GB:,.0f}" for rate in (gpu.bandwidth, gpu.link, gpu.host_link)),
            gpu.source,
        )
        for name, gpu in GPUS.items()
    ]
    return _table(heads, rows)


# Value of memory.recompute -> what F does not save.
RECOMPUTED = {
    "mlp": "gate and up products of a dense feed-forward network",
    "moe": "the same of experts, shared ones included",
    "core_attn": "the result of attention and its log-sum-exps",
    "qkv_linear": "queries, keys and values, and inputs of their norms",
    "mla_up_proj": "queries, keys and values of multi-head latent attention, and its latents",
    "attn_proj": "the residual stream after attention; results of a norm between them",
    "selective": "`mlp` and `moe`",
    "attention": "all of these but `core_attn`",
    "full": "all but the input of a unit",
}


def _recompute() -> str:
    """Table of memory.recompute for a layer of Llama-3 8B and an expert layer of DeepSeek-V3, with one sequence on one
    GPU."""
    experts = Experts(256, 8, 2048, 2048, num_groups=8, topk_groups=4)
    models = (
        ModelSpec(1, 4096, 32, 8, 14336, 128256),
        ModelSpec(1, 7168, 128, 128, 18432, 129280, experts=experts, mla=MLA(512, 1536, 128, 64, 128)),
    )
    rows = []
    for mode, what in RECOMPUTED.items():
        cells = [cell for model in models for cell in _recomputed(model, mode)]
        rows.append((f"`{mode}`" if mode not in PARTS else f"`[{mode}]`", what, *cells))
    heads = ("`memory.recompute`", "not saved", "8B, MiB", "FLOPs", "DeepSeek-V3, MiB", "FLOPs")
    return _table(heads, rows)


def _recomputed(model: ModelSpec, mode: str) -> tuple[str, str]:
    """(MiB of a layer that are not saved, FLOPs of recomputing them relative to those of F, B and W)."""
    length, layer = 8192, LayerRange(0, 1)
    piece = Piece(1, length, "bfloat16", "cuda")
    totals = layer_effects(model, model.experts is not None, False, piece).totals
    flops = part_flops(model, layer, length)
    products, attention = 2 * active_parameters(model, 0), flops["core_attn"]
    freed = totals.saved - piece.stream(model.hidden) if mode == "full" else totals.recomputed(mode, piece)
    again = products + attention if mode == "full" else sum(flops.get(part, 0) for part in recomputed_parts(mode))
    if not freed:
        return "-", "-"
    return f"{freed / 2**20:,.0f}", f"{again / (3 * products + 3.5 * attention):.1%}".replace("%", " %")


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for path, text in files():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
