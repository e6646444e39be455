"""Fixtures of the planner's tests."""

import pytest
from fake_groups import fake_collectives


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers communicate without other ranks."""
    fake_collectives(monkeypatch)
