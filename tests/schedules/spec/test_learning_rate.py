"""Learning rates against torch's and transformers' schedulers.

Our step 0 is torch's first optimizer step. transformers' warm-up begins at 0, ours at 1/warmup of the peak, so that
every step learns; after the warm-up both are the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as torch_schedulers

from pentad.schedules.spec.learning_rate import DecayShape, LearningRate, ScheduleName

PEAK, LOW, WARMUP, STEPS = 3e-3, 3e-4, 10, 50
OPTIONS: dict[str, dict[str, Any]] = {"wsd": {"stable_steps": 15}, "cosine_with_restarts": {"cycles": 4}}
SCHEDULES = get_args(ScheduleName)


def rates(schedule: ScheduleName, *, low: float = LOW, warmup: int = WARMUP, **options: Any) -> list[float]:
    rate = LearningRate(PEAK, low, warmup, STEPS, schedule, **{**OPTIONS.get(schedule, {}), **options})
    return [rate.at(step) for step in range(STEPS + 1)]


def torch_rates(make: Callable[[torch.optim.Optimizer], torch_schedulers.LRScheduler], steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedulers that step without an optimizer, and SequentialLR's own warning
        scheduler = make(optimizer)
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    return found


def test_the_warm_up_is_torchs_linear_one() -> None:
    expected = torch_rates(lambda o: torch_schedulers.LinearLR(o, 1 / WARMUP, total_iters=WARMUP - 1), WARMUP)
    for schedule in SCHEDULES:
        assert rates(schedule)[:WARMUP] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        ("constant", lambda o: torch_schedulers.ConstantLR(o, factor=1.0)),
        ("linear", lambda o: torch_schedulers.LinearLR(o, 1.0, LOW / PEAK, STEPS - WARMUP)),
        ("cosine", lambda o: torch_schedulers.CosineAnnealingLR(o, STEPS - WARMUP, LOW)),
        ("cosine_with_restarts", lambda o: torch_schedulers.CosineAnnealingWarmRestarts(o, 10, eta_min=LOW)),
    ],
)
def test_after_the_warm_up_schedules_are_torchs(schedule: ScheduleName, make: Callable[..., Any]) -> None:
    found, length = rates(schedule), STEPS - WARMUP
    assert found[WARMUP:STEPS] == pytest.approx(torch_rates(make, length), rel=1e-9)
    assert found[STEPS] == pytest.approx(PEAK if schedule == "constant" else LOW)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "constant"])
def test_the_table_of_a_small_schedule(schedule: ScheduleName) -> None:
    """The first and last steps of every phase: peak 1, minimum 0, 4 steps of warm-up, 12 in all."""
    expected = {
        "linear": [0.25, 0.5, 0.75, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0, 0],
        "cosine": [0.25, 0.5, 0.75, 1, 1, 0.96194, 0.853553, 0.691342, 0.5, 0.308658, 0.146447, 0.0380602, 0, 0],
        "cosine_with_restarts": [0.25, 0.5, 0.75, 1, 1, 0.853553, 0.5, 0.146447, 1, 0.853553, 0.5, 0.146447, 0, 0],
        "inverse_sqrt": [0.25, 0.5, 0.75, 1, *(2 / (4 + step) ** 0.5 for step in range(10))],
        "wsd": [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0],
    }[schedule]
    options: dict[str, Any] = {"wsd": {"stable_steps": 4}, "cosine_with_restarts": {"cycles": 2}}.get(schedule, {})
    rate = LearningRate(1.0, 0.0, 4, 12, schedule, **options)
    assert [rate.at(step) for step in range(14)] == pytest.approx(expected, abs=1e-6)


@given(
    st.sampled_from(SCHEDULES), st.sampled_from(get_args(DecayShape)), st.integers(0, 50), st.integers(1, 50),
    st.integers(0, 50), st.integers(1, 4), st.integers(0, 200),
)  # fmt: skip
def test_rates_stay_between_their_bounds(schedule, shape, warmup, steps, stable, cycles, step) -> None:
    rate = LearningRate(1e-3, 1e-4, warmup, steps, schedule, stable, shape, cycles)
    assert 0 < rate.at(step) <= 1e-3 * (1 + 1e-12)
    assert step < warmup or rate.at(step) >= 1e-4 * (1 - 1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "inverse_sqrt", "wsd"])
@pytest.mark.parametrize("shape", get_args(DecayShape))
def test_rates_never_rise_after_the_warm_up(schedule: ScheduleName, shape: DecayShape) -> None:
    assert all(after <= before for before, after in pairwise(rates(schedule, decay_shape=shape)[WARMUP:]))


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("shape", get_args(DecayShape))
@pytest.mark.parametrize("schedule", ["linear", "cosine", "cosine_with_restarts", "inverse_sqrt", "wsd"])
def test_after_the_warm_up_schedules_are_transformers(schedule: ScheduleName, shape: DecayShape) -> None:
    optimization = pytest.importorskip("transformers").optimization
    phases = {"num_warmup_steps": WARMUP, "num_training_steps": STEPS}
    low = 0.0 if schedule in ("cosine_with_restarts", "inverse_sqrt", "linear") else LOW
    make = {
        "linear": lambda o: optimization.get_linear_schedule_with_warmup(o, **phases),
        "cosine": lambda o: optimization.get_cosine_with_min_lr_schedule_with_warmup(o, **phases, min_lr=LOW),
        "cosine_with_restarts": lambda o: optimization.get_cosine_with_hard_restarts_schedule_with_warmup(
            o, **phases, num_cycles=4
        ),
        "inverse_sqrt": lambda o: optimization.get_inverse_sqrt_schedule(o, WARMUP),
        "wsd": lambda o: optimization.get_wsd_schedule(
            o, WARMUP, STEPS - WARMUP - 15, STEPS, num_stable_steps=15, decay_type=shape, min_lr_ratio=LOW / PEAK
        ),
    }[schedule]
    expected = torch_rates(make, STEPS + 1)
    assert rates(schedule, low=low, decay_shape=shape)[WARMUP:] == pytest.approx(expected[WARMUP:], rel=1e-9, abs=1e-15)
