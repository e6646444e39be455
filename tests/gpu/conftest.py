"""Rank processes on the GPUs of this machine."""

import pytest
from fleet import Fleet
from gpus import num_places


@pytest.fixture(scope="module")
def gpus():
    fleet = Fleet(min(4, num_places()))
    yield fleet
    fleet.stop()
