"""Ranks on the GPUs of this machine."""

import pytest
from fleet import Fleet
from gpus import room


@pytest.fixture(scope="module")
def gpus():
    made = Fleet(min(4, room()))
    yield made
    made.stop()
