"""The instruction at which a GPU is reported, from how much of each lane it has completed."""

from __future__ import annotations

from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.instruction import Instruction, Op, instructions_of
from pentad.workers.lanes.gpu_progress import GpuProgress
from pentad.workers.lanes.streams import CudaStreams

compiled = cache(compile_program)


def lanes_with(steps: list[list[Instruction]], completed: dict[str, int]) -> CudaStreams:
    """Lanes to which the instructions of these steps were issued, and the number that each lane has completed."""
    issued = Counter(part.lane for step in steps for part in step)
    lanes, progress = CudaStreams.__new__(CudaStreams), GpuProgress.__new__(GpuProgress)
    streams: dict[str, Any] = dict.fromkeys(sorted(issued))
    lanes.streams, lanes.progress, progress.issued = streams, progress, issued
    progress.index = {lane: number for number, lane in enumerate(streams)}
    progress.counts = np.array([completed.get(lane, 0) for lane in streams])
    events = [SimpleNamespace(events=[(part, None, None) for part in step]) for step in steps]
    timer: Any = SimpleNamespace(steps=events)
    lanes.timer = timer
    return lanes


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipev"])
@given(st.data())
def test_a_gpu_is_at_its_first_incomplete_computation_or_the_norm_before_it(name: str, data: st.DataObject) -> None:
    program = compiled(name, 2, 4, replicas=2)
    parts = list(instructions_of(program.streams[data.draw(st.integers(0, 1))]))
    given_ = data.draw(st.integers(0, len(parts)))
    steps, order = [parts, parts[:given_]], [(1, part) for part in parts] + [(0, part) for part in parts[:given_]]
    by_lane = Counter(part.lane for _, part in order)
    completed = {lane: data.draw(st.integers(0, count), label=lane) for lane, count in by_lane.items()}
    left = {lane: [each for each in order if each[1].lane == lane][completed[lane] :] for lane in by_lane}
    found = lanes_with(steps, completed).position()
    if not left.get("compute"):
        assert found is None
        return
    behind, first = left["compute"][0]
    norm = next(part for part in parts if part.op is Op.NORM)
    waits = norm.key in first.waits and (behind, norm) in left[norm.lane]
    assert found == ((behind, norm) if waits else (behind, first))
    assert (found[1].op is Op.NORM) <= (first.op is Op.STEP)


def test_waits_are_counted_from_the_beginning_of_an_action_and_left_out_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress, written, captures = GpuProgress.__new__(GpuProgress), list[int](), [False]
    progress.words, progress.num_waits = torch.zeros(1, dtype=torch.int32), 0

    def write(number: int) -> None:
        written.append(number)
        progress.words[-1] = number

    monkeypatch.setattr(progress, "_write_wait", write)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures[0])
    assert progress.layer_wait() == (-1, "")
    progress.end_waits()
    assert not written, "nothing is written for an action without waits"
    for number, axis in enumerate(("tp", "cp", "tp"), 1):
        progress.begin_wait(axis)
        progress.end_wait()
        assert progress.layer_wait() == (number, axis)
    progress.end_waits()
    captures[0] = True
    progress.begin_wait("tp")
    assert progress.layer_wait() == (-1, "") and len(written) == 4
