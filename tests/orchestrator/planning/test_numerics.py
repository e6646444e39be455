"""Products in 8 bits as configured: what plans contain, and what is refused."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from pentad.orchestrator.config.config import load
from pentad.orchestrator.gpus.rate_table import CPU, RateTable, write_table
from pentad.orchestrator.monitoring.plan_view import facts_table
from pentad.orchestrator.planning.comm_volume import CommKind, comm_volume
from pentad.orchestrator.planning.estimate import costs_of, memory
from pentad.orchestrator.planning.hardware import rates_of
from pentad.orchestrator.planning.numerics import require_fp8
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.rates import ExpertRates
from pentad.schedules.spec.model import Fp8Spec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import fp8_matrices
from pentad.workers.linear.amax_history import AmaxHistory

MODEL = {"family": "llama", "layers": 4, "hidden": 256, "heads": 2, "kv_heads": 2, "ffn": 512, "vocab": 300}

MLA = {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
EXPERTS = {"num_experts": 4, "top_k": 2, "intermediate_size": 96}
SHARDED: dict[str, Any] = {"mesh": {"pp": 2, "dp": 2}, "batch": {"global_batch_size": 4}, "zero": {"stage": 3}}
LATENT = {"model": {"family": "deepseek-v3", "mla": MLA, "experts": EXPERTS}}


def plan_with(precision: dict[str, Any], **sections: dict[str, Any]) -> Plan:
    given: dict[str, Any] = {
        "run": {"name": "fp8", "steps": 2},
        "model": MODEL,
        "mesh": {"pp": 2},
        "schedule": {"name": "1f1b", "microbatches": 2},
        "batch": {"global_batch_size": 2, "sequence_length": 128},
        "data": {"path": "builtin:pydoc"},
    }
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section}
    return make_plan(load({**given, "precision": precision}), "cpu")


def test_the_configured_recipe_is_the_plans() -> None:
    assert plan_with({}).fp8 is None
    found = plan_with({"matmul": "fp8-row", "fp8_gradients": "e5m2", "fp8_skip_last_layers": 1}).fp8
    assert found == Fp8Spec("row", "e5m2", skip_last=1, sample_every=100)
    assert [found.covers(layer, 4) for layer in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("precision", "sections", "text"),
    [
        ({"matmul": "fp8-block"}, {}, "gathered in FP8 where layers multiply in it"),
        ({"matmul": "fp8-tensor", "fp8_scaling": "delayed"}, {}, "gathered in FP8 where layers multiply in it"),
        ({"matmul": "fp8-row"}, {}, "gathered in float32: F and B scale rows and columns of weights apart"),
        (
            {"matmul": "fp8-block", "compare_every": 5},
            {},
            "gathered in float32: some steps compare with gradients in the compute dtype",
        ),
        ({"matmul": "fp8-block"}, {"memory": {"optimizer": "host"}}, "float32: master weights are in host memory"),
        (
            {"matmul": "fp8-block"},
            {"schedule": {"name": "zb-h2", "post_validation": True}},
            "float32: post-validation updates them before the master weights",
        ),
        ({"matmul": "fp8-block"}, {"zero": {"stage": 2}}, ""),
        ({"matmul": "compute"}, {}, ""),
    ],
)
def test_the_plan_says_what_zero_3_gathers(precision: dict[str, Any], sections: dict[str, Any], text: str) -> None:
    plan = plan_with({**precision, "compute": "float32"}, **{**SHARDED, **sections})
    output = io.StringIO()
    Console(file=output, width=200).print(facts_table(plan, costs_of(plan)))
    assert text in output.getvalue() and ("gathered" in output.getvalue()) == bool(text)
    assert any(map(plan.size_in_8_bits, plan.param_shards)) == ("FP8" in text)


def test_weights_gathered_in_8_bits_have_half_the_bytes() -> None:
    """On the links, in shards and where they are gathered; there they also serve as one of a matrix's two FP8 forms."""
    narrow = plan_with({"matmul": "fp8-block", "compute": "bfloat16"}, **SHARDED)
    wide = plan_with({"matmul": "fp8-row", "compute": "bfloat16"}, **SHARDED)
    matrices = sum(map(narrow.size_in_8_bits, narrow.param_shards_of(0)))
    gathered, full = (comm_volume(plan, 0)[CommKind("dp", "ALL_GATHER")] for plan in (narrow, wide))
    assert (gathered.operations, full.bytes - gathered.bytes) == (2 * full.operations, matrices // 2)
    parameters = [memory(plan, 0)["parameters"] for plan in (wide, narrow)]
    assert parameters[0] - parameters[1] == matrices // 2 + matrices + matrices
    seconds = [costs_of(replace(plan, device="cuda")).gather for plan in (wide, narrow)]
    assert all(less < more for more, less in zip(*seconds, strict=True))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"batch": {"sequence_length": 96}}, r"at once \(batch.sequence_length x sequences / mesh.cp / slices\) is 96"),
        ({"model": {"ffn": 320}}, "model.ffn is 320: expected a multiple of 128"),
        ({"model": {"heads": 4, "kv_heads": 1}}, r"keys' width \(model.kv_heads x head_dim\) is 64"),
        (
            {"mesh": {"pp": 1, "tp": 2}, "model": {"ffn": 384}},
            r"model.ffn on each of 2 tensor ranks \(mesh.tp\) is 192",
        ),
        (
            {"precision": {"fp8_scaling": "delayed"}},
            "fp8_scaling is delayed with precision.matmul = fp8-block: expected",
        ),
        (
            {"precision": {"matmul": "compute", "fp8_scaling": "delayed"}},
            "fp8_scaling is delayed with precision.matmul = compute: expected current, or matmul = fp8-tensor",
        ),
        ({"precision": {"matmul": "compute", "compare_every": 5}}, "is 5 with precision.matmul = compute: expected 0"),
        (
            {"precision": {"fp8_head": True}},
            r"model.vocab is 300: expected a multiple of 128, precision.fp8_head = false",
        ),
        (
            {"precision": {"fp8_head": True}, "mesh": {"pp": 1, "tp": 2}, "model": {"vocab": 384}},
            r"model.vocab on each of 2 tensor ranks \(mesh.tp\) is 192",
        ),
        ({"precision": {"matmul": "compute", "fp8_head": True}}, "fp8_head is true with precision.matmul = compute"),
        (
            {"precision": {"matmul": "compute", "fp8_experts": "always"}},
            "fp8_experts is always with precision.matmul = compute: expected auto or never, or matmul = fp8-block",
        ),
        (LATENT, r"model\.mla\.kv_lora_rank is 64"),
        (
            {"precision": {"fp8_skip_first_layers": 3, "fp8_skip_last_layers": 1}},
            "is 4: expected fewer than model.layers",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(sections: dict[str, Any], message: str) -> None:
    precision = {"matmul": "fp8-block", **sections.pop("precision", {})}
    with pytest.raises(PentadError, match=message) as error:
        plan_with(precision, **sections)
    assert "\n" not in str(error.value)


def test_delayed_scaling_is_the_plans_and_takes_less_time_on_a_gpu() -> None:
    """In a layer of hidden size 256 with ffn 512, F no longer reads 256 + 256 + 256 + 2 x 512 values a token, and B no
    longer 256 (dy of out) + 768 (of qkv) + 256 (of down) + 3 x 512 (inputs of the gated unit's gradient) + 256 (of
    heads)."""
    current, delayed = (plan_with({"matmul": "fp8-tensor", "fp8_scaling": each}) for each in ("current", "delayed"))
    assert current.fp8 is not None and delayed.fp8 == replace(current.fp8, delayed=True)
    on_cpu = [costs_of(plan).forward for plan in (current, delayed)]
    assert on_cpu[0] == on_cpu[1]
    rates = replace(rates_of("cuda", "NVIDIA H200"), layer_issue=(0.0, 0.0, 0.0))
    before, after = (costs_of(replace(plan, device="cuda", rates=rates)) for plan in (current, delayed))
    layers, second = 2, 128 * 4 / rates.elementwise
    assert before.forward[0] - after.forward[0] == pytest.approx(layers * (3 * 256 + 2 * 512) * second)
    assert before.backward[0] - after.backward[0] == pytest.approx(layers * (2 * 256 + 768 + 3 * 512 + 256) * second)
    assert before.weight == after.weight


def test_casts_of_rows_are_kernels_of_their_own_on_a_gpu() -> None:
    """In a layer of hidden size 256 with ffn 512, F moves 2 x 2 x 256 (norms) + 512 more values a token, and B 2 x 3 x
    256 + 8 x 512; B also reads the gradients of qkv (768), out and down once more."""
    rates = replace(rates_of("cuda", "NVIDIA H200"), layer_issue=(0.0, 0.0, 0.0))
    plan = replace(plan_with({"matmul": "fp8-row"}), device="cuda", rates=rates)
    assert plan.fp8 is not None
    found, tensor = (costs_of(replace(plan, fp8=replace(plan.fp8, scaling=each))) for each in ("row", "tensor"))
    products = found.weight[0] - tensor.weight[0]  # F, B and W have equally many FLOPs
    layers, second = 2, 128 * 4 / rates.elementwise
    assert found.forward[0] - tensor.forward[0] == pytest.approx(products + layers * (4 * 256 + 512) * second)
    more = layers * (6 * 256 + 8 * 512 + 768 + 2 * 256) * second
    assert found.backward[0] - tensor.backward[0] == pytest.approx(products + more)


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_a_head_in_8_bits_is_the_plans_with_its_weights_and_time(scaling: str) -> None:
    given = {"model": {"vocab": 512}}
    without, found = (plan_with({"matmul": f"fp8-{scaling}", "fp8_head": each}, **given) for each in (False, True))
    assert found.fp8 is not None and found.fp8.head and without.fp8 == replace(found.fp8, head=False)
    more = [memory(found, rank)["parameters"] - memory(without, rank)["parameters"] for rank in range(2)]
    assert more == [0, 2 * 512 * 256]
    rates = replace(rates_of("cuda", "NVIDIA H200"), layer_issue=(0.0, 0.0, 0.0))
    before, after = (costs_of(replace(plan, device="cuda", rates=rates)) for plan in (without, found))
    assert before.forward[0] == after.forward[0]
    assert before.forward[1] > after.forward[1] and before.weight[1] > after.weight[1]


def test_the_plan_counts_the_maxima_of_operands() -> None:
    current, delayed = (plan_with({"matmul": "fp8-tensor", "fp8_scaling": each}) for each in ("current", "delayed"))
    for rank in range(2):
        history = AmaxHistory.of(delayed, rank, torch.device("cpu"))
        assert history is not None and len(history.names) == 8
        held = (history.values, history.used, history.newest, history.maxima)
        assert memory(delayed, rank)["parameters"] - memory(current, rank)["parameters"] == sum(t.nbytes for t in held)


def test_a_gpu_without_8_bit_products_is_refused() -> None:
    plan = replace(plan_with({"matmul": "fp8-tensor"}), device="cuda")
    require_fp8(plan, "NVIDIA H200")
    for gpu in ("NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB", "NVIDIA A10G", "NVIDIA RTX A6000", "Tesla T4"):
        with pytest.raises(PentadError, match=f"fp8-tensor on {gpu}, which multiplies no 8-bit numbers"):
            require_fp8(plan, gpu)


@pytest.mark.parametrize("name", ["tensor", "row", "block"])
def test_products_in_float64_are_refused_on_gpus(name: str) -> None:
    plan = plan_with({"matmul": f"fp8-{name}", "compute": "float64"})
    require_fp8(plan, "")  # CPUs emulate it
    with pytest.raises(PentadError, match=f"fp8-{name} with precision.compute = float64 on GPUs: expected .* float32"):
        require_fp8(replace(plan, device="cuda"), "NVIDIA H200")


@pytest.mark.parametrize("gpu", ["NVIDIA B200", "NVIDIA L40S", "NVIDIA RTX 4000 Ada Generation"])
def test_blocks_need_a_hopper_gpu(gpu: str) -> None:
    tensor, block = (replace(plan_with({"matmul": f"fp8-{name}"}), device="cuda") for name in ("tensor", "block"))
    require_fp8(tensor, gpu)
    for hopper in ("", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H20"):
        require_fp8(block, hopper)
    with pytest.raises(PentadError, match=f"fp8-block on {gpu}: expected a Hopper GPU, or fp8-tensor"):
        require_fp8(block, gpu)


LARGE = {"family": "qwen3-moe", "hidden": 256, "experts": {"num_experts": 4, "top_k": 2, "intermediate_size": 1024}}


def test_experts_multiply_in_8_bits_if_they_are_to() -> None:
    plan = plan_with({"matmul": "fp8-block", "fp8_experts": "always"}, model=LARGE)
    assert plan.fp8 is not None and plan.fp8.experts
    names = {each.name.partition(".")[2] for each in fp8_matrices(plan.model, plan.fp8, range(1))}
    assert {"0.experts.gate_up", "0.experts.down"} < names
    assert "FP8" in facts_of(plan)


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_a_table_of_rates_decides_about_experts(tmp_path: Path, times: float) -> None:
    """The rates at the experts' number of rows decide; at other numbers they say the opposite. Each of 128 tokens
    visits two of four experts."""
    narrow = (32.0, 1e9 / times), (64.0, times * 1e9), (128.0, 1e9 / times)
    rates = replace(rates_of("cpu"), experts=(ExpertRates.uniform(1e9, 1e9, 1e9), ExpertRates(narrow, narrow, narrow)))
    found = RateTable(version=4, gpu=CPU, measured="2026-01-01", ranks=(1, 1), assumed=(), rates=rates)
    write_table(found, tmp_path / "rates.json")
    plan = plan_with({"matmul": "fp8-block"}, model=LARGE, cluster={"rates": str(tmp_path / "rates.json")})
    assert plan.fp8 is not None and plan.fp8.experts == (times > 1)
    reason = "in 8 bits their products take 2.00 times as long with 64 rows of an expert by the rates of this GPU"
    assert ("FP8, W in" if times > 1 else reason) in facts_of(plan)


@pytest.mark.parametrize(
    ("precision", "changes", "reason"),
    [
        ({}, {"experts": {"num_experts": 4, "top_k": 2, "intermediate_size": 96}}, "256 x 96 on a rank are not whole"),
        ({}, {}, "in 8 bits their products take 1.06 times as long on an H200"),
        ({"matmul": "fp8-row"}, {}, "fp8-row has no products of experts"),
        ({"fp8_experts": "never"}, {}, "in 8 bits their products take"),
    ],
)
def test_the_plan_says_why_experts_stay_in_the_compute_dtype(
    precision: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    plan = plan_with({"matmul": "fp8-block", **precision}, model=LARGE | changes)
    assert plan.fp8 is not None and not plan.fp8.experts and reason in facts_of(plan)


def test_experts_that_cannot_multiply_in_8_bits_are_refused_if_they_are_to() -> None:
    for matmul, experts in (("fp8-row", LARGE["experts"]), ("fp8-block", EXPERTS)):
        with pytest.raises(PentadError, match=r"precision\.fp8_experts is always, but .*: expected auto or never"):
            plan_with({"matmul": matmul, "fp8_experts": "always"}, model=LARGE | {"experts": experts})
    with pytest.raises(PentadError, match=r"but the model has no experts: expected auto or never$"):
        plan_with({"matmul": "fp8-block", "fp8_experts": "always"})


def test_the_plan_says_what_is_scaled_how() -> None:
    precision = {"matmul": "fp8-tensor", "fp8_scaling": "delayed", "fp8_head": True}
    found = facts_of(plan_with(precision, model={"vocab": 512}), "matmul")
    assert "FP8 in all layers and the head, a scale per tensor by the step before, gradients e4m3" in found
    found = facts_of(plan_with({"matmul": "fp8-row", "fp8_power_of_two_scales": True}), "matmul")
    assert "FP8 in all layers, a scale per row, a power of two, gradients e4m3" in found


def facts_of(plan: Plan, row: str = "experts") -> str:
    text = io.StringIO()
    Console(width=300, file=text).print(facts_table(plan, costs_of(plan)))
    return next(line for line in text.getvalue().splitlines() if line.strip().startswith(row))


@pytest.mark.parametrize(("width", "tp"), [(256, 1), (256, 2), (384, 2), (0, 1)])
def test_shared_experts_multiply_in_8_bits_if_they_are_whole_tiles(width: int, tp: int) -> None:
    experts = {**EXPERTS, "shared_intermediate_size": width}
    mla = {"kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 128, "v_head_dim": 128}
    model = {"family": "deepseek-v3", "experts": experts, "mla": mla}
    plan = plan_with({"matmul": "fp8-row"}, model=model, mesh={"pp": 1, "tp": tp})
    fits = width // tp % 128 == 0 and width > 0
    assert plan.fp8 is not None and plan.fp8.shared_experts == fits
    names = {each.name for each in fp8_matrices(plan.model, plan.fp8, range(4))}
    assert ("layers.3.shared.down" in names) == fits
    assert ("the shared expert float32: its width of 192 on a rank" in facts_of(plan)) == (width == 384)


def test_small_experts_stay_in_the_compute_dtype() -> None:
    """Layers of experts have no feed-forward network whose size could be invalid."""
    plan = plan_with({"matmul": "fp8-block"}, model={"family": "qwen3-moe", "ffn": 96, "experts": EXPERTS})
    assert plan.fp8 is not None
    names = {each.name.partition(".")[2] for each in fp8_matrices(plan.model, plan.fp8, range(1))}
    assert names == {"0.attention.qkv", "0.attention.out"}
    partial = {"family": "qwen3-moe", "ffn": 96, "experts": {**EXPERTS, "first_k_dense": 1}}
    remedy = r"a multiple of 128, precision\.fp8_skip_first_layers = 1, or"
    with pytest.raises(PentadError, match=rf"model\.ffn is 96: expected {remedy}"):
        plan_with({"matmul": "fp8-block"}, model=partial)
    assert plan_with({"matmul": "fp8-block", "fp8_skip_first_layers": 1}, model=partial).fp8


def test_the_plan_counts_what_a_comparison_of_gradients_takes() -> None:
    """Activations in the compute dtype, and gradients in host memory."""
    given: dict[str, Any] = {"schedule": {"name": "zb-h2", "microbatches": 4}, "batch": {"global_batch_size": 4}}
    plain, alone, compared = (
        plan_with(precision, **given)
        for precision in ({}, {"matmul": "fp8-block"}, {"matmul": "fp8-block", "compare_every": 10})
    )
    for rank in range(2):
        wide, narrow, found = (memory(plan, rank) for plan in (plain, alone, compared))
        assert narrow["activations"] < wide["activations"] and narrow["compared"] == wide["compared"] == 0
        assert found["total"] == max(narrow["total"], wide["total"]) and found["activations"] in (
            narrow["activations"],
            wide["activations"],
        )
        assert found["compared"] == found["gradients"] == sum(map(compared.size, compared.param_shards_of(rank))) * 4
