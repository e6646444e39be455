"""Small plans for exactness tests, and what one process makes of them."""

from __future__ import annotations

import functools

import torch
from reference_model import Trained, is_balanced, train

from pentad.schedules.compiler import ALL_KEPT, compile_program
from pentad.schedules.ir.program import Program
from pentad.schedules.spec.cp_layout import CpMethod
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import ModelShape
from pentad.schedules.spec.plan import BatchShape, OptimizerShape, Plan, split_layers
from pentad.schedules.spec.schedule_spec import MemoryOptions, Options
from pentad.workers.data.corpus import Corpus, open_corpus
from pentad.workers.data.samples import document_starts, microbatch

STEPS = 3
TILE = 4  # tokens: in ranks of tests, products of small models have tiles as well
MODEL = ModelShape(layers=8, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=300)


def plan_of(
    name: str,
    dp: int,
    pp: int,
    microbatches: int,
    data: str,
    dtype: str = "float64",
    slices: int | None = None,
    *,
    clip: float = 0.5,
    validated: bool = False,
    recompute: str = "none",
    keep: float | None = None,
    chunks: int | None = None,
    savings: MemoryOptions = ALL_KEPT,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    model: ModelShape = MODEL,
    context: CpMethod = "ring",
    packed: bool = False,
) -> Plan:
    mesh = Mesh(dp=dp, pp=pp, cp=cp, tp=tp, ep=ep)

    def compiled(savings: MemoryOptions) -> Program:
        options = Options(chunks=chunks, slices=slices)
        return compile_program(
            name, pp, microbatches, replicas=dp * cp * ep, validated=validated, options=options, savings=savings
        )

    program = compiled(savings)
    again = frozenset(range(program.stages) if recompute != "none" else ())
    if again or keep is not None:
        program = compiled(savings._replace(recompute=again, max_resident=keep))
    return Plan(
        name="exact",
        mesh=mesh,
        program=program,
        layers=split_layers(model.layers, program.placement, head=1.0),
        model=model,
        batch=BatchShape(2 * dp * ep * microbatches, 8, microbatches, dp * ep),
        optimizer=OptimizerShape(1e-2, 1e-3, 2, STEPS, 0.9, 0.95, 1e-8, 0.1, clip_norm=clip),
        data=data,
        cache="",
        seed=7,
        dtype=dtype,
        device="cpu",
        transport="gloo",
        recompute=(recompute,) * program.stages if again else (),
        zero=savings.zero,
        cp_method=context,
        document_mask=packed,
    )


def reference(plan: Plan) -> Trained:
    """STEPS steps of the plan in one process; they do not depend on how a mesh cuts the batch."""
    rows = plan.batch.rows if is_balanced(plan) else 2
    return _reference(plan.data, plan.batch.global_batch_size, plan.model, plan.document_mask, rows)


@functools.cache
def _reference(data: str, sequences: int, model: ModelShape, packed: bool, rows: int) -> Trained:
    plan = plan_of("gpipe", 1, 1, sequences // 2, data, model=model)
    assert plan.batch.rows == rows
    corpus, batches, documents = open_corpus(data, False), [], []
    for step in range(STEPS):
        inputs, targets = microbatch(corpus, plan.seed, step, sequences, range(sequences), plan.batch.length)
        batches.append((torch.from_numpy(inputs), torch.from_numpy(targets)))
        documents.append(torch.stack([numbered(corpus, plan, step * sequences + row) for row in range(sequences)]))
    return train(plan, batches, documents if packed else None)


def numbered(corpus: Corpus, plan: Plan, number: int) -> torch.Tensor:
    """[S]: a number for the document of every position of a sequence."""
    begins = torch.zeros(plan.batch.length, dtype=torch.int64)
    begins[list(document_starts(corpus, plan.seed, number, plan.batch.length))] = 1
    return begins.cumsum(0)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-10) -> bool:
    return float((found - expected).norm()) <= tolerance * float(expected.norm())
