"""The burn's products are the same everywhere and right; a wrong one is noticed."""

import os

import pytest
import torch

from pentad.workers.health import burn as burns
from pentad.workers.health.burn import burn
from pentad.workers.health.links import measure_links

SECONDS = 0.02


def test_every_core_computes_the_same_right_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(burns.SIZE, "cpu", 64)
    units = burn("cpu", SECONDS)
    assert len({unit.digest for unit in units}) == 1
    assert len({unit.unit for unit in units}) == len(units)
    assert all(unit.products > 0 == unit.differing and unit.error < 1 and unit.rate > 0 for unit in units)


@pytest.mark.parametrize("from_product", [1, 2], ids=["always wrong", "wrong later"])
def test_one_wrong_bit_is_noticed(monkeypatch: pytest.MonkeyPatch, from_product: int) -> None:
    monkeypatch.setitem(burns.SIZE, "cpu", 64)
    right, calls = torch.mm, 0

    def wrong(*factors: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        nonlocal calls
        calls += 1
        product = right(*factors) if out is None else right(*factors, out=out)
        if calls >= from_product:
            product.view(torch.int32)[0, 0] ^= 1 << 22
        return product

    monkeypatch.setattr(torch, "mm", wrong)
    core = min(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {core})
    (unit,) = burn("cpu", SECONDS)
    assert (unit.error > 1) if from_product == 1 else (unit.error < 1 and unit.differing == unit.products)


@pytest.mark.gpu
def test_gpus_compute_the_same_right_products_fast() -> None:
    units = burn("cuda", 2.0)
    assert len(units) == torch.cuda.device_count()
    assert len({(unit.model, unit.digest) for unit in units}) == len({unit.model for unit in units})
    assert all(unit.differing == 0 and unit.error < 1 and unit.rate > 1e13 for unit in units)


@pytest.mark.gpu
def test_links_of_gpus_are_measured_both_ways() -> None:
    links, gpus = measure_links(), torch.cuda.device_count()
    assert len(links) == gpus * (gpus - 1)
    assert all(link.bandwidth > 1e9 and 0 < link.latency < 1e-3 for link in links)
