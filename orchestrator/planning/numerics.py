"""From the optimizer and precision sections to what the ranks run."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace

from pentad.orchestrator.activations.allocations import FP8_TILE
from pentad.orchestrator.activations.kernel_choice import chosen_kernels
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.config.training_sections import PrecisionSection
from pentad.orchestrator.planning.fp8_costs import in_8_bits, shared_in_8_bits
from pentad.orchestrator.planning.hardware import gpu_of, kernel_times
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.rates import KernelChoice, Rates
from pentad.schedules.spec.model import Fp8Spec, ModelSpec, Scaling
from pentad.schedules.spec.optimizer import OptimizerSpec, ParamGroup
from pentad.schedules.spec.plan import Plan

SCALINGS: dict[str, Scaling] = {"fp8-tensor": "tensor", "fp8-row": "row", "fp8-block": "block"}
# Names of GPUs without FP8 (before compute capability 8.9), and of those where cuBLAS takes float32 scales of blocks
# (9.0, Hopper).
WITHOUT_FP8 = re.compile(r"\b(A\d|V100|P\d|T4|[RG]TX [123]0\d\d|Quadro)")
# Also the ones on which cuDNN's deterministic backward of attention was measured.
HOPPER = re.compile(r"\bG?H(100|200|800|20)\b")


def optimizer_spec(config: RunConfig) -> OptimizerSpec:
    given = config.optimizer
    return OptimizerSpec(
        learning_rate=given.curve(config.run.steps),
        beta1=given.beta1,
        beta2=given.beta2,
        eps=given.eps,
        weight_decay=given.weight_decay,
        clip_norm=given.clip_norm,
        name=given.name,
        groups=tuple(ParamGroup(**group.model_dump()) for group in given.groups or ()),
        bf16_state=config.precision.optimizer_state == "bfloat16",
        momentum=given.momentum,
        nesterov=given.nesterov,
        adjust_lr_fn=given.adjust_lr_fn,
        z_loss=given.z_loss,
    )


def fp8_spec(config: RunConfig, model: ModelSpec, rates: Rates) -> Fp8Spec | None:
    """The FP8 products of a run, None without any. Experts use FP8 where that is faster at these rates. Raises
    PentadError for models whose products have no FP8 form yet."""
    given = config.precision
    if given.matmul == "compute":
        if given.compare_every:
            every = f"precision.compare_every is {given.compare_every} with precision.matmul = compute"
            raise PentadError(f"{every}: expected 0, or a matmul in FP8 to compare with precision.compute")
        return None
    kinds = {"lora.rank": config.lora.rank is not None, "a custom model": model.custom is not None}
    if found := [kind for kind, is_used in kinds.items() if is_used]:
        expected = "compute, or one of the model families with all weights trained"
        raise PentadError(f"precision.matmul is {given.matmul} with {found[0]}: expected {expected}")
    skipped = given.fp8_skip_first_layers, given.fp8_skip_last_layers
    if sum(skipped) >= model.layers:
        keys = f"precision.fp8_skip_first_layers + precision.fp8_skip_last_layers is {sum(skipped)}"
        raise PentadError(f"{keys}: expected fewer than model.layers = {model.layers}, or precision.matmul = compute")
    scaling = SCALINGS[given.matmul]
    recipe = scaling, given.fp8_gradients, given.fp8_power_of_two_scales
    experts, shared = in_8_bits(config, model, rates), shared_in_8_bits(config, model)
    delayed, other = given.fp8_scaling == "delayed", config.memory.optimizer == "host"
    kept = why_gathered_wide(scaling, given.compare_every, host=other, twice=config.schedule.post_validation)
    spec = Fp8Spec(*recipe, *skipped, given.fp8_sample_every, experts, given.compare_every, shared, delayed)
    return replace(spec, head=given.fp8_head, gathers=not kept)


def why_gathered_wide(scaling: Scaling, compare_every: int, *, host: bool, twice: bool) -> str:
    """Why ZeRO-3 gathers all weights in the compute dtype; '' if it gathers those of FP8 products in FP8. `host`:
    master weights are in host memory; `twice`: compute weights are updated first, then master weights
    (post-validation)."""
    reasons = {
        "F and B scale rows and columns of weights apart": scaling == "row",
        "some steps compare with gradients in the compute dtype": compare_every > 0,
        "master weights are in host memory": host,
        "post-validation updates them before the master weights": twice,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def require_fp8(plan: Plan, gpu: str) -> None:
    """Raises PentadError if FP8 products do not fit the plan's shapes or the GPU of this name ('': unknown)."""
    if plan.fp8 is None:
        return
    matmul = f"precision.matmul is fp8-{plan.fp8.scaling}"
    if plan.device == "cuda" and WITHOUT_FP8.search(gpu):
        raise PentadError(f"{matmul} on {gpu}, which multiplies no 8-bit numbers: expected precision.matmul = compute")
    if plan.device == "cuda" and gpu and plan.fp8.scaling == "block" and not HOPPER.search(gpu):
        raise PentadError(f"{matmul} on {gpu}: expected a Hopper GPU, or fp8-tensor, fp8-row or compute")
    if plan.device == "cuda" and plan.dtype == "float64":
        expected = "expected precision.compute = bfloat16 or float32, or precision.matmul = compute"
        raise PentadError(f"{matmul} with precision.compute = float64 on GPUs: {expected}")
    for what, size in _sizes(plan, plan.fp8).items():
        if size % FP8_TILE:
            dense = plan.model.dense_layers  # those before the layers with experts
            skips = what.startswith("model.ffn") and 0 < dense < plan.model.layers
            others = f"precision.fp8_skip_first_layers = {dense}, " if skips else ""
            others = "precision.fp8_head = false, " if what.startswith("model.vocab") else others
            expected = f"expected a multiple of {FP8_TILE}, {others}or matmul = compute"
            raise PentadError(f"{matmul}, but {what} is {size}: {expected}")


def named_kernels(section: PrecisionSection, gpu: str) -> KernelChoice:
    """The configured kernels, before any have been measured, for ranks on this GPU ('': on CPUs), with the libraries of
    this process."""
    is_used = section.deterministic and bool(HOPPER.search(gpu)) and has_cudnn_frontend()
    return KernelChoice(section.kernels, cudnn_frontend=is_used)


def has_cudnn_frontend() -> bool:
    """Whether nvidia-cudnn-frontend is installed."""
    return importlib.util.find_spec("cudnn") is not None


def with_kernels(config: RunConfig, plan: Plan) -> Plan:
    """The plan with the kernels that its ranks will use. Raises PentadError for kernels that they cannot."""
    gpu = gpu_of(config.cluster) if plan.device == "cuda" else ""
    plan = replace(plan, kernels=named_kernels(config.precision, gpu))
    return replace(plan, kernels=chosen_kernels(plan, kernel_times(config.cluster) if plan.device == "cuda" else ()))


def _sizes(plan: Plan, fp8: Fp8Spec) -> dict[str, int]:
    """Rows and columns of the operands on a rank, or of the parts into which tensor ranks divide them."""
    model, mla, tp = plan.model, plan.model.mla, plan.mesh.tp
    rank = f" on each of {tp} tensor ranks (mesh.tp)" if tp > 1 else ""
    found = {
        "model.hidden": model.hidden,
        f"queries' width (model.heads x head_dim){rank}": model.heads * model.qk_head_dim // tp,
        "tokens that a rank holds at once (batch.sequence_length x sequences / mesh.cp / slices)": plan.slice_tokens,
    }
    if mla is None:
        found[f"keys' width (model.kv_heads x head_dim){rank}"] = max(1, model.kv_heads // tp) * model.qk_head_dim
    else:
        keys = f"width of keys and values (model.heads x (qk_nope_head_dim + v_head_dim)){rank}"
        found[keys] = model.heads * (mla.qk_nope_head_dim + mla.v_head_dim) // tp
        found[f"values' width (model.heads x v_head_dim){rank}"] = model.heads * mla.v_head_dim // tp
        found |= {"model.mla.kv_lora_rank": mla.kv_lora_rank, "model.mla.q_lora_rank": mla.q_lora_rank}
    if any(fp8.covers(layer, model.layers) for layer in range(model.dense_layers)):
        found[f"model.ffn{rank}"] = model.ffn // tp
    if fp8.head:
        found[f"model.vocab{rank}"] = model.vocab // tp
    return found
