"""Rows of 10,000 packed documents, of one document, and of both train like one process on every axis."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exactness import assert_equals_one_process
from fleet import Fleet
from mixtures import DTYPE
from plans import STEPS, data_of, global_batch, plan_of
from reference_model import GlobalBatch, train
from small_models import HEADS, MOE

from pentad.schedules.spec.batch import DocumentCosts
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.data.corpus_writer import Document, write_index, write_shard
from pentad.workers.data.sources import open_dataset
from pentad.workers.data.tokenizer import train_tokenizer

slow = pytest.mark.slow
MANY = 10_000
SMALL = replace(HEADS, layers=2)
MESHES: list[Any] = [
    pytest.param(MANY, "1f1b", {"pp": 2, "cp": 2}, {"cp_method": "ring"}, marks=slow),
    pytest.param(MANY, "zb-h2", {"pp": 2, "cp": 2}, {"cp_method": "all_gather"}, marks=slow),
    pytest.param(MANY, "gpipe", {"cp": 2, "tp": 2}, {"cp_method": "ulysses"}, marks=slow),
    pytest.param(MANY, "dualpipev", {"pp": 2}, {"model": replace(HEADS, layers=4), "microbatches": 4}, marks=slow),
    pytest.param(MANY, "1f1b", {"ep": 2, "tp": 2}, {"model": replace(MOE, layers=2)}, marks=slow),
    pytest.param(MANY, "gpipe", {"dp": 4}, {"memory_options": MemoryOptions(zero=3)}, marks=slow),
]


def corpus_of(folder: Path, lengths: list[int]) -> str:
    """Documents with this many tokens, the end token included."""
    folder.mkdir()
    random = np.random.default_rng(0)
    documents = [Document(np.append(random.integers(1, 257, length - 1), 0).astype(DTYPE)) for length in lengths]
    write_index(folder, train_tokenizer(["a"], 300), [write_shard(folder, 0, documents, DTYPE)])
    return str(folder)


def long_plan(path: str, folder: Path, length: int, name: str, sizes: dict[str, int], **more: Any) -> Plan:
    """Rows of `length` tokens, one a microbatch."""
    data = data_of(path, document_mask=True, packing="documents", cache=str(folder))
    plan = plan_of(**{"dp": 1, "pp": 1, "model": SMALL, "microbatches": 2, **sizes, **more}, name=name, data=data)
    costs, rows = DocumentCosts(1.0, 3.0), plan.batch.replicas * plan.program.microbatches
    return replace(
        plan, batch=replace(plan.batch, global_batch_size=rows, sequence_length=length, document_costs=costs)
    )


@pytest.mark.parametrize(("length", "name", "sizes", "more"), MESHES)
def test_documents_of_one_position_are_rows_of_one_token(
    fleet: Fleet, tmp_path: Path, length: int, name: str, sizes: dict[str, int], more: dict[str, Any]
) -> None:
    """A document of two tokens is one position, which attends to itself alone: the reference has rows of one token."""
    plan = long_plan(corpus_of(tmp_path / "many", 12 * length * [2]), tmp_path, length, name, sizes, **more)
    assert {len(row) for row in dataset_of(plan).document_lengths(0)} == {length}
    batches = [_of_one_token(global_batch(dataset_of(plan), step)) for step in range(STEPS)]
    experts = plan.model.experts
    if experts is not None and experts.aux_loss_coef:  # it depends on the microbatches
        plan = replace(plan, model=replace(plan.model, experts=replace(experts, aux_loss_coef=0.0)))
    assert_equals_one_process(fleet, plan, train(plan, batches))


def dataset_of(plan: Plan) -> Any:
    return open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)


def _of_one_token(batch: GlobalBatch) -> GlobalBatch:
    return GlobalBatch(*(each.reshape(-1, 1) for each in batch))._replace(
        documents=torch.zeros(batch.inputs.numel(), 1, dtype=torch.int64)
    )


@pytest.mark.parametrize(
    ("name", "sizes", "more"),
    [
        ("1f1b", {"pp": 2, "cp": 2}, {}),
        pytest.param("gpipe", {"cp": 4}, {"cp_method": "all_gather"}, marks=slow),
        pytest.param("gpipe", {"cp": 2, "tp": 2}, {"cp_method": "ulysses"}, marks=slow),
        pytest.param("1f1b", {"dp": 2, "ep": 2}, {"model": replace(MOE, layers=2)}, marks=slow),
    ],
)
def test_rows_of_one_document_and_of_many_share_a_step(
    fleet: Fleet, tmp_path: Path, name: str, sizes: dict[str, int], more: dict[str, Any]
) -> None:
    """Rows of 64 tokens: one document, 64 documents, and short ones around one that crosses the ranks' parts."""
    lengths = [*[65] * 8, *[2] * 64 * 8, *[40, *[2] * 25] * 8]
    plan = long_plan(corpus_of(tmp_path / "mixed", lengths), tmp_path, 64, name, sizes, **more)
    plan = replace(plan, batch=replace(plan.batch, global_batch_size=2 * plan.batch.global_batch_size))
    rows = [len(row) for step in range(STEPS) for row in dataset_of(plan).document_lengths(step)]
    assert {1, 26, 64} >= set(rows) and len(set(rows)) > 1
    assert_equals_one_process(fleet, plan, steps=STEPS)
