"""Rank processes on the GPUs of this machine."""

from collections import ChainMap
from math import prod
from pathlib import Path
from typing import Any

import pytest
from commands import pentad
from fleet import Fleet
from gpus import num_places

__all__ = ["pentad"]
AXES = ("dp", "pp", "cp", "tp", "ep")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out cases of more ranks than there are places, before cases are sampled."""
    large = {item for item in items if item.path.parent == Path(__file__).parent and num_ranks(item) > num_places()}
    if large:
        items[:] = [item for item in items if item not in large]
        config.hook.pytest_deselected(items=list(large))


def num_ranks(item: pytest.Item) -> int:
    """The size of the test's mesh, as far as its parameters tell."""
    parameters: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    dicts = [each for each in (parameters.get("sizes"), parameters.get("axes")) if isinstance(each, dict)]
    sizes = ChainMap(*dicts, parameters)
    return prod(sizes[axis] for axis in AXES if isinstance(sizes.get(axis), int))


@pytest.fixture(scope="module")
def gpus():
    fleet = Fleet(min(4, num_places()))
    yield fleet
    fleet.stop()
