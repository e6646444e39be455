"""Small plans, and the same training in a single process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from reference_model import GlobalBatch, Trained, is_by_microbatch, train

from pentad.schedules.catalogue import generate
from pentad.schedules.compiler import NO_MEMORY_OPTIONS, compile_program
from pentad.schedules.ir.instruction import Overlap, instructions_of
from pentad.schedules.spec.batch import BatchSizes, BatchSpec, RampupStage
from pentad.schedules.spec.cp_layout import CpMethod
from pentad.schedules.spec.data import DataSpec, SourceSpec
from pentad.schedules.spec.learning_rate import LearningRate
from pentad.schedules.spec.lora import LoraSpec
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import Fp8Spec, ModelSpec
from pentad.schedules.spec.optimizer import OptimizerSpec
from pentad.schedules.spec.plan import Plan, num_units, split_layers, split_layers_into_units
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions
from pentad.schedules.spec.tensors import LayerRange
from pentad.schedules.spec.zero_layout import pool_sizes
from pentad.workers.data.batch_loader import rows_by_slot
from pentad.workers.data.samples import Dataset
from pentad.workers.data.sources import open_dataset
from pentad.workers.params.parameters import DTYPES

STEPS = 3
TILE = 8  # tokens, in rank processes: small, so that even small models have two tiles per matrix product
MODEL = ModelSpec(layers=8, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=300)
SHALLOW = replace(MODEL, layers=4)


def plan_of(
    name: str,
    dp: int,
    pp: int,
    microbatches: int,
    data: str | DataSpec,
    dtype: str = "float64",
    slices: int | None = None,
    *,
    clip: float = 0.5,
    post_validation: bool = False,
    recompute: str = "none",
    recompute_fraction: float = 1.0,
    max_resident: float | None = None,
    chunks: int | None = None,
    memory_options: MemoryOptions = NO_MEMORY_OPTIONS,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    model: ModelSpec = MODEL,
    cp_method: CpMethod = "ring",
    document_mask: bool = False,
    unit_layers: int | None = None,
    lora: LoraSpec | None = None,
    offload: float = 0.0,
    host_optimizer: bool = False,
    logit_rows: int = 0,
    fp8: Fp8Spec | None = None,
    zero_shards: int = 0,
) -> Plan:
    """For CPU ranks, two sequences of 8 tokens a microbatch. `document_mask` needs a path; `offload` is a fraction."""
    order = generate(name, pp, microbatches, ScheduleOptions(chunks=chunks, slices=slices))
    layers, units = _units(model, order.placement, unit_layers)
    recomputed = frozenset(stage for stage, each in enumerate(layers) if recompute != "none" and each.numbers)
    mesh, units = Mesh(dp=dp, pp=pp, cp=cp, tp=tp, ep=ep), units or memory_options.units
    fractions = tuple(offload if each.numbers else 0.0 for each in layers) if offload else ()
    gathered = fp8 if memory_options.zero == 3 else None, DTYPES[dtype].itemsize, zero_shards
    sizes = pool_sizes(model, lora, layers, mesh, len(order.holders(0)), *gathered)
    memory_options = memory_options._replace(sizes=sizes, units=units, recompute=recomputed, max_resident=max_resident)
    fitted = memory_options._replace(offload=frozenset(np.flatnonzero(fractions).tolist()), logits_in_w=logit_rows > 0)
    given: dict[str, Any] = {"memory_options": fitted, "order": order, "replicas": dp * cp * ep}
    kept: dict[str, Any] = {"host_optimizer": host_optimizer, "cp_method": cp_method, "lora": lora, "fp8": fp8}
    kept |= {"recompute_fraction": recompute_fraction, "logit_rows": logit_rows, "offload": fractions}
    kept |= {"zero": memory_options.zero, "zero_shards": zero_shards}
    return Plan(
        name="exact",
        mesh=mesh,
        program=compile_program(name, pp, microbatches, post_validation=post_validation, **given),
        layers=layers,
        model=model,
        batch=BatchSpec(2 * dp * ep * microbatches, 8, microbatches, dp * ep),
        optimizer=OptimizerSpec(LearningRate(1e-2, 1e-3, 2, STEPS), 0.9, 0.95, 1e-8, 0.1, clip_norm=clip),
        data=data if isinstance(data, DataSpec) else data_of(data, document_mask=document_mask),
        seed=7,
        dtype=dtype,
        device="cpu",
        transport="gloo",
        recompute=tuple(recompute if each.numbers else "none" for each in layers) if recomputed else (),
        **kept,
    )


def _units(
    model: ModelSpec, placement: Sequence[Sequence[int]], unit_layers: int | None
) -> tuple[tuple[LayerRange, ...], tuple[int, ...]]:
    """(the layers of all units, the number of units of each stage, empty for whole stages)."""
    stages = split_layers(model.layers, placement, head=1.0)
    if model.custom is not None:
        stages = tuple(LayerRange(*each[:2]) for each in stages)
    if unit_layers is None:
        return stages, ()
    units = tuple(num_units(each, unit_layers) for each in stages)
    return split_layers_into_units(stages, units), units


def data_of(*paths: str, document_mask: bool = False, **more: Any) -> DataSpec:
    """Sources of equal weight called a, b, c ..."""
    sources = tuple(SourceSpec(chr(ord("a") + number), path) for number, path in enumerate(paths))
    return DataSpec(sources, document_mask=document_mask, eod_mask_loss=document_mask, **more)


def plan_on_mesh(data: str | DataSpec, name: str, sizes: dict[str, int], **more: Any) -> Plan:
    """`plan_of` with the mesh sizes as a dictionary and a suitable number of microbatches."""
    axes: dict[str, Any] = {"dp": 1, "pp": 1, **sizes}
    return plan_of(name, microbatches=2 * axes["pp"] if name == "dualpipe" else 4, data=data, **axes, **more)


def with_rampup(plan: Plan, stages: dict[int, int], compiled: Callable[[int], Plan]) -> Plan:
    """The plan with stages of a batch-size ramp: `stages` are numbers of steps by number of microbatches; their
    programs come from `compiled`."""
    rows = plan.batch.replicas * plan.batch.micro_batch_size
    rampup = tuple(RampupStage(microbatches * rows, steps) for microbatches, steps in stages.items())
    programs = tuple(compiled(microbatches).program for microbatches in stages)
    return replace(plan, batch=replace(plan.batch, rampup=rampup), rampup_programs=programs)


def reference(plan: Plan, steps: int = STEPS) -> Trained:
    """The first steps of the plan in a single process, independent of how the mesh divides the batch."""
    rows, balance = (plan.batch.micro_batch_size, plan.batch) if is_by_microbatch(plan) else (2, None)
    given = plan.model, rows, plan.batch.sequence_length, plan.optimizer, plan.lora, plan.fp8
    return _reference(plan.data, plan.batch.sizes, *given, balance, steps)


@functools.cache
def _reference(
    data: DataSpec,
    sizes: BatchSizes,
    model: ModelSpec,
    micro_batch_size: int,
    sequence_length: int,
    optimizer: OptimizerSpec,
    lora: LoraSpec | None,
    fp8: Fp8Spec | None,
    balance: BatchSpec | None,
    steps: int,
) -> Trained:
    """`balance` says how sequences are dealt to microbatches; None if results do not depend on it."""
    plan = plan_of("gpipe", 1, 1, sizes.global_batch_size // 2, data, model=model)
    batch = replace(plan.batch, rampup=sizes.rampup, sequence_length=sequence_length)
    plan = replace(plan, optimizer=optimizer, lora=lora, fp8=fp8, batch=batch)
    assert plan.batch.micro_batch_size == micro_batch_size
    return train(plan, global_batches(plan, balance, steps))


def global_batches(plan: Plan, balance: BatchSpec | None = None, steps: int = STEPS) -> list[GlobalBatch]:
    """The global batches of the first steps."""
    dataset = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    return [global_batch(dataset, step, balance) for step in range(steps)]


def global_batch(dataset: Dataset, step: int, balance: BatchSpec | None = None) -> GlobalBatch:
    """Rows in the order in which they are drawn, or in which `balance` deals them to microbatches."""
    rows = np.stack(dataset.rows(step), 1)
    rows = rows if balance is None else rows[rows_by_slot(dataset, balance, step)]
    samples = [dataset.sample(*map(int, row)) for row in rows]
    inputs, following, is_target, starts = zip(*samples, strict=True)
    documents = np.zeros_like(inputs)
    if dataset.data.document_mask:
        for row, each in zip(documents, starts, strict=True):
            row[list(each)] = 1
    found = (inputs, following, is_target, documents.cumsum(1))
    return GlobalBatch(*(torch.from_numpy(np.array(each)) for each in found))


def is_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-10) -> bool:
    return float((found - expected).norm()) <= tolerance * float(expected.norm())


def without_overlap(plan: Plan) -> Plan:
    """The same instructions without overlapped pairs."""
    streams = tuple(tuple(instructions_of(stream)) for stream in plan.program.streams)
    assert any(isinstance(action, Overlap) for stream in plan.program.streams for action in stream)
    return replace(plan, program=replace(plan.program, streams=streams))
