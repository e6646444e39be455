"""Generated documentation is up to date: `make docs` changes nothing."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from paths import ROOT


@pytest.fixture
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_and_pictures_are_current(generate: ModuleType) -> None:
    stale = [path.name for path, text in generate.files() if not path.exists() or path.read_text("utf-8") != text]
    assert not stale, "run `make docs`"
