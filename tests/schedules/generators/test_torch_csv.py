"""CSV of torch.distributed.pipelining: torch reads ours, we read torch's, and any other file is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from schedule_sizes import allows
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import PipelineStage

from pentad.schedules.catalogue import CATALOGUE, generate, mirrored
from pentad.schedules.generators.torch_csv import read, torch_csv
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.optimizer_pass import add_reduce, add_step
from pentad.schedules.passes.transfers import add_transfers
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.verify.check import check

WITHOUT_SLICES = {name: entry for name, entry in CATALOGUE.items() if entry.slices == 1}  # torch has none
SIZES = [(name, *size) for name in WITHOUT_SLICES for size in ((1, 1), (2, 4), (4, 8), (3, 7)) if allows(name, *size)]
LOADED = [name for name, entry in WITHOUT_SLICES.items() if entry.placement is not mirrored]  # else torch refuses


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "order.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def lone_stage(ranks: int, stages: int) -> Any:
    """A stage of rank 0 without a module or process group."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, stages, None
    return stage


def prove(program: Program) -> None:
    check(add_step(add_reduce(add_transfers(program, Costs.uniform(program.stages), gated=False), replicas=1)))


@pytest.mark.sampled(19)
@pytest.mark.parametrize(("name", "ranks", "microbatches"), SIZES)
def test_our_files_are_read_back(tmp_path: Path, name: str, ranks: int, microbatches: int) -> None:
    program = generate(name, ranks, microbatches)
    found = read(written(tmp_path, torch_csv(program)))
    assert found.streams == program.streams
    assert found.microbatches == microbatches
    if name in LOADED:
        assert found.hash == program.hash
    else:  # a row does not say which of its two stages is the mirror
        assert [set(stages) for stages in found.placement] == [set(stages) for stages in program.placement]
    prove(found)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", LOADED)
def test_torch_loads_and_lowers_ours_and_we_read_its_lowered_form(tmp_path: Path, name: str) -> None:
    program = generate(name, 4, 8)
    runtime = _PipelineScheduleRuntime([lone_stage(program.ranks, program.stages)], program.microbatches)
    runtime._load_csv(str(written(tmp_path, torch_csv(program))))
    homes = {stage: rank for rank, stages in enumerate(program.placement) for stage in stages}
    assert runtime.stage_index_to_group_rank == homes
    runtime._dump_csv(str(tmp_path / "compute.csv"), "compute_only")
    assert read(tmp_path / "compute.csv").streams == program.streams
    runtime._dump_csv(str(tmp_path / "lowered.csv"), "compute_comms")
    assert "SEND_F" in (tmp_path / "lowered.csv").read_text()
    assert read(tmp_path / "lowered.csv").streams == program.streams


@pytest.mark.parametrize("style", ["compute_only", "compute_comms"])
def test_torch_s_own_pairs_are_read(tmp_path: Path, style: Any) -> None:
    """torch's DualPipeV, which overlaps forwards and backwards."""
    schedule = ScheduleDualPipeV([lone_stage(4, 8), lone_stage(4, 8)], 8)
    schedule._dump_csv(str(tmp_path / "order.csv"), style)
    program = read(tmp_path / "order.csv")
    assert (program.ranks, program.microbatches, program.chunks) == (4, 8, 2)
    assert program.placement == ((0, 7), (1, 6), (2, 5), (3, 4))
    assert any(len(action.parts) == 2 for action in program.streams[0])
    prove(program)


@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_torch_s_orders_are_read_and_proven(tmp_path: Path, name: str, ranks: int, microbatches: int) -> None:
    chunks = 1 if name == "GPipe" else 2
    order = get_schedule_ops(name, ranks, microbatches, num_stages_per_rank=chunks)
    rows = [",".join("" if action is None else str(action) for action in row) for row in order]
    program = read(written(tmp_path, "\r\n".join(rows) + "\r\n"))
    assert (program.ranks, program.stages, program.microbatches) == (ranks, chunks * ranks, microbatches)
    assert program.chunks == chunks
    assert re.findall(r"\w+", torch_csv(program)) == re.findall(r"\d+[FIWB]\d+", " ".join(rows))
    prove(program)


BAD = {
    "empty": ("", ["is empty", "2F0"]),
    "an empty row": ("0F0,0B0\n\n1F0,1B0\n", ["row 2 runs nothing", "rank 1"]),
    "only bubbles": ("0F0,0B0\n,,\n", ["row 2 runs nothing", "rank 1"]),
    "only transfers": ("0F0,0B0\n1RECV_F0,1SEND_B0\n", ["row 2 runs nothing"]),
    "a foreign letter": ("0F0,0B0\n1F0,1X0\n", ["row 2, column 2", "'1X0'", "2F0"]),
    "our own letters": ("0F0,0BW0\n", ["row 1, column 2", "'0BW0'"]),
    "no microbatch": ("0F,0B0\n", ["row 1, column 1", "'0F'"]),
    "a sign": ("-1F0,0B0\n", ["row 1, column 1", "'-1F0'"]),
    "other digits": ("0F\N{ARABIC-INDIC DIGIT ONE},0B0\n", ["row 1, column 1"]),
    "a number that is too long": (f"0F0,{'9' * 5000}F0\n", ["row 1, column 2", "999...'"]),
    "a pair in the wrong order": ("(0B1;0F0)OVERLAP_F_B\n", ["row 1, column 1", "'(0B1;0F0)OVERLAP_F_B'"]),
    "a pair that is not closed": ("(0F1;0B0\n", ["row 1, column 1"]),
    "a table": ("name,age\nAda,36\n", ["row 1, column 1", "'name'"]),
    "a missing stage": ("0F0,0B0\n,2F0,2B0\n", ["row 2, column 2", "stage 2", "nothing runs stage 1"]),
    "not UTF-8": (b"0F0,\xff\n", ["not UTF-8", "byte 4"]),
    "a zero byte": (b"0F0,\0\n", ["order.csv"]),
    "a cell that is too long": ('0F0,"' + "x" * 200_000, ["line 1", "field"]),
}


@pytest.mark.parametrize(("text", "words"), BAD.values(), ids=BAD)
def test_any_other_file_is_refused_naming_the_place(tmp_path: Path, text: str | bytes, words: list[str]) -> None:
    path = written(tmp_path, text)
    with pytest.raises(PentadError) as error:
        read(path)
    for word in [str(path), *words]:
        assert word in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("name", ["nowhere.csv", "."])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PentadError, match="cannot be read"):
        read(tmp_path / name)


CELLS = st.from_regex(r"[0-2](F|I|W|B|SEND_F|UNSHARD)[0-2]?", fullmatch=True) | st.sampled_from(["", "(0F1;0B0)", " "])


@given(st.text() | st.binary() | st.lists(st.lists(CELLS, max_size=5).map(",".join), max_size=4).map("\n".join))
@example("0F999999999,0B999999999")
def test_any_content_is_read_or_refused(tmp_path_factory: Any, text: str | bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    try:
        program = read(path)
    except PentadError:
        return
    path.write_text(torch_csv(program))
    assert read(path) == program
