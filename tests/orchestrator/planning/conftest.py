"""Layers that are shared with ranks which do not exist."""

import pytest
from layer_cases import shared_layers


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Communication of layers is answered without other ranks."""
    shared_layers(monkeypatch)
