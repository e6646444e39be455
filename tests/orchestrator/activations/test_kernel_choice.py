"""precision.kernels: what plans choose from it and from measured times, and what they refuse."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Pentad
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pentad.kernels.attention.attention_cudnn import part_of
from pentad.orchestrator.activations.activation_memory import sublayers
from pentad.orchestrator.activations.allocations import Piece, piece_of
from pentad.orchestrator.activations.attention_memory import AttentionShape, in_order_workspace
from pentad.orchestrator.activations.kernel_choice import kernel_shapes
from pentad.orchestrator.calibration.calibrate import with_earlier
from pentad.orchestrator.calibration.view import show_table
from pentad.orchestrator.config.config import load
from pentad.orchestrator.gpus.rate_table import RateTable, read_table, write_table
from pentad.orchestrator.monitoring.plan_view import facts_table
from pentad.orchestrator.planning import numerics
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.hardware import rates_of
from pentad.orchestrator.planning.layout import shapes_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.rates import KernelChoice, KernelTimes
from pentad.schedules.spec.plan import Plan

GPU = "NVIDIA H200"
SIZES = ("model.hidden=1024", "model.heads=8", "model.ffn=4096", "batch.sequence_length=2048", f"cluster.gpu={GPU}")
EXPERTS = tuple(f"model.experts.{key}" for key in ("num_experts=8", "top_k=2", "intermediate_size=512"))
MLA_SIZES = ("kv_lora_rank=64", "qk_nope_head_dim=128", "qk_rope_head_dim=64", "v_head_dim=128")
LATENT = ("model.family=deepseek-v3", *(f"model.mla.{size}" for size in MLA_SIZES), *EXPERTS)
MIXTRAL = ("model.family=mixtral", *EXPERTS)
ANY_ORDER = "precision.deterministic=false"


def plan_with(*overrides: str, device: str = "cuda") -> Plan:
    return make_plan(load(None, [*SIZES, *overrides]), device)


def table(*kernels: KernelTimes) -> RateTable:
    rates = rates_of("cuda", GPU)
    given: dict[str, Any] = {"ranks": (1, 1), "assumed": (), "rates": rates, "kernels": kernels}
    return RateTable(version=4, gpu=GPU, measured="2026-11-30", **given)


def times_of(plan: Plan, slow: str = "") -> list[KernelTimes]:
    """Kernel times of all calls of a plan; Triton is the fastest unless it is `slow`."""
    seconds = ("cudnn", 2.0), ("triton", 3.0 if slow == "triton" else 1.0)
    return [KernelTimes(*shape, seconds) for shape in kernel_shapes(plan.model, piece_of(plan))]


REFUSED = [
    ("triton", (), "cpu", "on CPUs: expected auto or torch"),
    ("cudnn", (ANY_ORDER,), "cpu", "on CPUs: expected auto or torch"),
    ("triton", ("precision.compute=float64",), "cuda", "with precision.compute = float64: expected auto or torch"),
    ("cudnn", (ANY_ORDER, "precision.compute=float64"), "cuda", "with precision.compute = float64: expected auto or t"),
    ("cudnn", (ANY_ORDER, "precision.compute=float32"), "cuda", "with precision.compute = float32, but cuDNN's"),
    ("cudnn", (ANY_ORDER, "data.document_mask=true"), "cuda", "with data.document_mask = true, but cuDNN's"),
    ("cudnn", (ANY_ORDER, "model.family=mistral", "model.sliding_window=8"), "cuda", "with sliding windows"),
    ("cudnn", (ANY_ORDER, "schedule.name=seq-1f1b"), "cuda", "with schedule.name = seq-1f1b, but cuDNN's"),
    ("cudnn", (), "cuda", "with precision.deterministic = true, but cuDNN's backward adds in a fixed order on Hopper"),
    ("cudnn", (ANY_ORDER, "model.heads=4"), "cuda", "with heads of 256 and values of 256, but cuDNN's are of at most"),
]


@pytest.mark.parametrize(("name", "overrides", "device", "sentence"), REFUSED)
def test_kernels_that_ranks_do_not_have_are_refused(
    name: str, overrides: tuple[str, ...], device: str, sentence: str
) -> None:
    with pytest.raises(PentadError) as error:
        plan_with(f"precision.kernels={name}", *overrides, device=device)
    text = str(error.value)
    assert text.startswith(f"precision.kernels is {name} {sentence}") and "\n" not in text
    assert text.partition(": expected ")[2] in ("auto or torch", "auto or triton")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("precision.kernels=cuda",), "precision.kernels is 'cuda': expected one of auto, torch, triton or cudnn"),
        (("kernels=torch",), "kernels is unknown; did you mean precision.kernels?"),
    ],
)
def test_a_mistake_is_one_sentence(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(PentadError) as error:
        load(None, [*SIZES, *overrides])
    assert str(error.value).startswith(sentence) and "\n" not in str(error.value)


def test_ranks_may_have_any_kernels_that_serve_them() -> None:
    for device, names in (("cpu", ("auto", "torch")), ("cuda", ("auto", "torch", "triton"))):
        for name in names:
            assert plan_with(f"precision.kernels={name}", device=device).kernels == KernelChoice(name)
    for method in ("ring", "all_gather", "ulysses"):  # blocks are causal on the diagonal, unmasked elsewhere
        plan = plan_with("precision.kernels=cudnn", ANY_ORDER, "mesh.cp=2", f"mesh.cp_method={method}")
        assert plan.kernels == KernelChoice("cudnn")
    latent = plan_with("precision.kernels=cudnn", ANY_ORDER, *LATENT)
    assert latent.kernels.name == "cudnn"


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "has_cudnn_frontend", lambda: True)


@pytest.mark.usefixtures("frontend")
def test_cudnn_adds_in_order_on_hopper_where_its_frontend_is_installed() -> None:
    assert plan_with().kernels == KernelChoice(cudnn_frontend=True)
    assert plan_with("precision.kernels=cudnn").kernels == KernelChoice("cudnn", cudnn_frontend=True)
    for others in ((ANY_ORDER,), ("cluster.gpu=NVIDIA A100-SXM4-80GB",)):
        assert plan_with(*others).kernels == KernelChoice()
    assert plan_with(device="cpu").kernels == KernelChoice()
    with pytest.raises(
        PentadError, match=r"^precision\.kernels is cudnn with .* attention to 65536 tokens, .* 2 GiB: exp"
    ):
        plan_with("precision.kernels=cudnn", "batch.sequence_length=65536")


SHAPES = st.tuples(
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([64, 1000, 2048, 4096, 8192, 16384, 32768]),
    st.sampled_from([(1, 1), (4, 4), (8, 2), (32, 8)]),
    st.sampled_from([(64, 64), (128, 128), (192, 128), (256, 256), (160, 160)]),
)


@given(sizes=SHAPES)
def test_plans_have_room_for_the_parts_in_which_cudnn_adds_in_order(sizes: tuple[Any, ...]) -> None:
    rows, length, (heads, kv_heads), (width, value) = sizes
    piece = Piece(rows, length, "bfloat16", "cuda", kernels=KernelChoice(cudnn_frontend=True))
    found = in_order_workspace(AttentionShape(piece, heads, kv_heads, width, value, 0))
    tensors = (
        torch.empty(rows, n, length, w, device="meta")
        for n, w in ((heads, width), (kv_heads, width), (kv_heads, value))
    )
    part = part_of(*tensors)
    if part is None:
        assert found == 0
        return
    count, tiles = part.rows * part.kv_heads * (heads // kv_heads), -(-length // 128) * 128
    gradients = count * length * (width + value) * 2 if heads > kv_heads else 0
    assert found == 2 * count * tiles**2 + gradients
    assert (
        in_order_workspace(AttentionShape(piece._replace(kernels=KernelChoice()), heads, kv_heads, width, value, 0))
        == 0
    )


def test_references_wait_for_the_gpu_which_graphs_cannot() -> None:
    graphs = "cluster.cuda_graphs=true"
    assert plan_with(graphs).cuda_graphs and not plan_with("precision.kernels=torch").cuda_graphs
    with pytest.raises(PentadError, match=r"^cluster\.cuda_graphs is true: expected false with precision\.kernels = t"):
        plan_with(graphs, "precision.kernels=torch")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("overrides", [MIXTRAL, (), ("data.document_mask=true",), (ANY_ORDER,)])
def test_a_plan_takes_what_was_measured_at_its_shapes(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    path = tmp_path / "table.json"
    usual = plan_with(*overrides)
    for slow, kernel in (("", "triton"), ("triton", "cudnn")):
        write_table(table(*times_of(usual, slow)), path)
        found = plan_with(f"cluster.rates={path}", *overrides).kernels
        keys = [each.key for each in times_of(usual)]
        assert found == KernelChoice("auto", tuple((key, kernel) for key in keys)) and keys
    assert usual.kernels == KernelChoice(), "without a table the usual ones"
    assert plan_with("cluster.rates=builtin", *overrides).kernels == KernelChoice()
    assert plan_with(f"cluster.rates={path}", *overrides, "batch.sequence_length=1024").kernels == KernelChoice()
    assert plan_with(f"cluster.rates={path}", *overrides, "precision.kernels=triton").kernels.measured == ()


def test_calibration_measures_the_calls_of_the_plan() -> None:
    for overrides in ((), (ANY_ORDER,), ("data.document_mask=true",), ("mesh.cp=2", "mesh.cp_method=ulysses")):
        plan = plan_with(*overrides)
        assert shapes_of(load(None, [*SIZES, *overrides]), "cuda") == kernel_shapes(plan.model, piece_of(plan)) != []
    heads = kernel_shapes(plan.model, piece_of(plan))[0][1][2:4]
    assert heads == (plan.model.heads // 2, plan.model.kv_heads // 2), "Ulysses exchanges heads for whole sequences"
    for overrides in (("mesh.cp=2",), ("schedule.name=seq-1f1b",), ("precision.compute=float32",)):
        assert shapes_of(load(None, [*SIZES, *overrides]), "cuda") == []
    assert shapes_of(load(None, [*SIZES]), "cpu") == []


def test_a_table_keeps_what_other_configurations_have_measured(tmp_path: Path) -> None:
    path, plans = tmp_path / "table.json", [plan_with(), plan_with("batch.sequence_length=1024")]
    first, second = (table(*times_of(plan)) for plan in plans)
    assert with_earlier(first, path) == first
    write_table(with_earlier(first, path), path)
    write_table(with_earlier(second, path), path)
    assert read_table(path, GPU).kernels == (*second.kernels, *first.kernels)
    again = table(*times_of(plans[0], slow="triton"))
    assert with_earlier(again, path).kernels == (*again.kernels, *second.kernels)


@pytest.mark.parametrize("seconds", [0.0, float("nan")])
def test_a_table_with_impossible_times_is_refused(tmp_path: Path, seconds: float) -> None:
    path = tmp_path / "table.json"
    write_table(table(KernelTimes("attention", (1, 2, 3, 4, 5, 6), (("cudnn", seconds),))), path)
    with pytest.raises(PentadError, match=r"^cluster.rates is .*: expected a table that"):
        plan_with(f"cluster.rates={path}")


def text_of(plan: Plan) -> str:
    text = io.StringIO()
    Console(width=300, file=text).print(facts_table(plan, costs_of(plan)))
    return text.getvalue()


def test_the_plan_says_what_runs_that_usually_does_not() -> None:
    plan = plan_with(*MIXTRAL)
    assert "kernels" not in text_of(plan)
    measured = tuple((each.key, each.fastest) for each in times_of(plan))
    text = text_of(replace(plan, kernels=KernelChoice("auto", measured)))
    assert "triton for attention's F, triton for attention's B, triton and triton for experts' products" in text
    assert "torch's references" in text_of(replace(plan, kernels=KernelChoice("torch")))
    assert "kernels" not in text_of(plan_with("precision.kernels=torch", device="cpu")), "they run there anyway"


def test_calibration_shows_what_was_measured() -> None:
    text = io.StringIO()
    show_table(
        table(KernelTimes("attention", (1, 2, 3, 4, 5, 6), (("cudnn", 2e-3), ("triton", 1e-3)))),
        Console(file=text, width=200),
    )
    assert "attention of 1 x 2 x 3 x 4 x 5 x 6" in text.getvalue() and "cudnn 2 ms, triton 1 ms" in text.getvalue()


def test_memory_is_that_of_the_kernels_that_run() -> None:
    """References hold all scores at once; deterministic flash attention holds dq in many parts."""
    plan = plan_with()
    shape = kernel_shapes(plan.model, piece_of(plan))[1]
    flash = KernelChoice("auto", ((KernelTimes(*shape, ()).key, "flash"),))

    def bytes_of(kernels: KernelChoice) -> int:
        piece = piece_of(replace(plan, kernels=kernels))
        return sum(each.bytes for each in chain(*chain(*sublayers(plan.model, False, False, piece))))

    scores = plan.batch.micro_batch_size * plan.model.heads * plan.batch.sequence_length**2 * 4
    assert bytes_of(KernelChoice("torch")) - bytes_of(plan.kernels) > 4 * scores
    assert bytes_of(flash) > bytes_of(plan.kernels) == bytes_of(KernelChoice("triton"))


def test_the_command_says_what_would_run(pentad: Pentad) -> None:
    status, out, _ = pentad("plan", *SIZES, "precision.kernels=torch", "cluster.device=cuda")
    assert "torch's references of all operations" in out, status
