"""Files of small models, saved by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The files of a model; do not change them."""
    import hf_models  # imports transformers, which takes seconds

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = hf_models.save(hf_models.make(name), tmp_path_factory.mktemp(name))
        return made[name]

    return get
