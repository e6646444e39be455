"""A search for data with a document mask: no schedule slices sequences, and nothing uses CUDA graphs."""

from __future__ import annotations

import json

import pytest
from commands import Pentad


@pytest.mark.parametrize("memory", [pytest.param("80", marks=pytest.mark.slow), "0.07"])
def test_schedules_that_slice_sequences_are_left_out(pentad: Pentad, memory: str) -> None:
    """The search used to fail when it suggested such a schedule as faster with more memory."""
    words = ("data.document_mask=true", "mesh.dp=1", "mesh.cp=1", "mesh.tp=1", "mesh.ep=1")
    status, out, err = pentad("plan", *words, "--gpus", "2", "--memory", memory, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    commands = [each["command"] for each in (*found["choices"], *found["flips"])]
    assert found["choices"] and not any("seq-1f1b" in each for each in commands)


def test_what_the_host_takes_to_launch_layers_is_not_waiting_for_gradients(pentad: Pentad) -> None:
    """95 % of this step used to be called waiting for weights, gradients and copies, with nothing to gather."""
    words = ("data.document_mask=true", "mesh.dp=1", "mesh.cp=1", "mesh.tp=1", "mesh.ep=1", "zero.stage=0")
    best = json.loads(pentad("plan", *words, "--gpus", "2", "--memory", "80", "--json")[1])["choices"][0]
    assert sum(best["shares"].values()) == pytest.approx(best["step_seconds"])
    assert best["shares"]["collectives"] < 0.1 * best["step_seconds"]
    assert best["shares"]["layers"] > 0.5 * best["step_seconds"]
