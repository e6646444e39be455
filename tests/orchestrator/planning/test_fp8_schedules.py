"""How much memory 8-bit operands of deferred W save in zero-bubble schedules: the figures of docs/fp8.md."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import memories
from pentad.orchestrator.planning.planning import make_plan

GIB = 2**30
PIPELINE = ["mesh.tp=1", "mesh.pp=4", "batch.sequence_length=8192", "batch.global_batch_size=16"]
SCHEDULES = ("1f1b", "zb-h1", "zb-h2")


@cache
def planned(schedule: str, matmul: str) -> tuple[float, float]:
    """GiB of activations and GiB in all, each on the rank with the most, of an 8B model on four GPUs."""
    overrides = [*PIPELINE, "schedule.microbatches=16", f"schedule.name={schedule}", f"precision.matmul={matmul}"]
    ranks = memories(make_plan(load(Path("deploy/jobs/llama-8b.yaml"), overrides), "cuda"))
    return max(each["activations"] for each in ranks) / GIB, max(each["total"] for each in ranks) / GIB


@pytest.mark.timeout(60)
def test_zb_h1_in_8_bits_fits_where_1f1b_in_16_bits_does() -> None:
    """By activations; and by all memory, compared with 1F1B that also holds weights in 8 bits."""
    (wanted, _), (found, total) = planned("1f1b", "compute"), planned("zb-h1", "fp8-block")
    assert found < 1.05 * wanted < planned("zb-h1", "compute")[0] / 1.3
    assert total < 1.01 * planned("1f1b", "fp8-block")[1]


@pytest.mark.timeout(60)
def test_zb_h2_in_8_bits_defers_half_the_bytes() -> None:
    beyond = [planned("zb-h2", each)[0] - planned("1f1b", each)[0] for each in ("compute", "fp8-block")]
    assert beyond[1] < 0.55 * beyond[0]
    assert planned("zb-h2", "fp8-block")[1] < planned("zb-h2", "compute")[1] - 10


@pytest.mark.timeout(60)
def test_the_page_shows_what_is_planned() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", Path("docs/fp8.md").read_text(), re.M
    )
    assert [name for name, *_ in rows] == [*SCHEDULES]
    for name, *figures in rows:
        want = [*planned(name, "compute"), *planned(name, "fp8-block")]
        assert [float(each) for each in figures] == pytest.approx(want, abs=0.06)
