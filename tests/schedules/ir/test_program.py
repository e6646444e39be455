"""A program survives conversion to a table, bytes, a file and a pickle, and its hash identifies it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutants import mutants

from pentad.schedules.catalogue import CATALOGUE, generate
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Instruction, Key, Op, Overlap
from pentad.schedules.ir.program import SCHEMA, VERSION, Program, index_of
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate

compiled = cache(compile_program)
NUMBERS = st.integers(-1, 2**31 - 1)
KEYS = st.builds(Key, st.sampled_from(Op), st.integers(-1, 999), st.integers(-1, 999))
PARTS = st.builds(
    Instruction,
    st.sampled_from(Op),
    *[NUMBERS] * 3,
    st.sampled_from(["", "pp", "stage3"]),
    NUMBERS,
    st.lists(KEYS, max_size=3).map(tuple),
)
STREAMS = st.lists(PARTS | st.builds(Overlap, PARTS, PARTS), max_size=6).map(tuple)
STAGES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    rows = draw(st.lists(st.tuples(STREAMS, STAGES), min_size=1, max_size=4))
    name = draw(st.text(st.characters(codec="utf-8"), max_size=9))
    streams, placement = zip(*rows, strict=True)
    return Program(name, streams, placement, draw(st.integers(0, 99)), draw(st.integers(1, 9)))


@given(programs())
def test_conversions_keep_the_program_and_its_hash(program: Program) -> None:
    forms = [
        Program.from_arrow(program.to_arrow()),
        Program.from_bytes(program.to_bytes()),
        pickle.loads(pickle.dumps(program)),
        copy.deepcopy(program),
    ]
    for form in forms:
        assert form == program
        assert form.hash == program.hash


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_saved_program_loads_and_any_arrow_reader_can_read_it(name: str, tmp_path: Path) -> None:
    program = compile_program(name, 4, 8, replicas=2)
    program.save(tmp_path / "program.arrow")
    assert Program.load(tmp_path / "program.arrow") == program
    table = pa.ipc.open_file(tmp_path / "program.arrow").read_all()
    assert table.schema.equals(SCHEMA)
    assert table.num_rows == sum(len(action.parts) for stream in program.streams for action in stream)


def test_a_pickle_contains_the_arrow_table() -> None:
    program = compiled("dualpipe", 4, 8)
    assert program.__reduce__() == (Program.from_bytes, (program.to_bytes(),))
    assert program.to_bytes() in pickle.dumps(program)


@pytest.mark.parametrize("name", ["zb-h1", "dualpipe"])
def test_the_hash_changes_with_any_instruction(name: str) -> None:
    program = compiled(name, 2, 4, replicas=2)
    changed = [mutant.program for mutant in mutants(program, gated=False)]
    assert program.hash not in {other.hash for other in changed}
    assert len({other.hash for other in changed}) == len({other.streams for other in changed})


def test_the_hash_covers_everything_but_the_name() -> None:
    program = compiled("1f1b", 2, 4)
    assert replace(program, name="another").hash == program.hash
    others = [replace(program, microbatches=5), replace(program, chunks=2), replace(program, placement=((1,), (0,)))]
    others += [replace(program, streams=tuple(program.streams)[::-1]), program.compute()]
    assert len({other.hash for other in [program, *others]}) == 6
    assert compile_program("1f1b", 2, 4).hash == program.hash


@pytest.mark.parametrize("name", CATALOGUE)
def test_compute_undoes_lowering(name: str) -> None:
    assert compiled(name, 4, 8, gated=True, replicas=2).compute() == generate(name, 4, 8)


def test_holders_of_a_stage_and_the_rank_that_computes_a_microbatch() -> None:
    program = compiled("dualpipe", 4, 8)
    assert (program.ranks, program.stages) == (4, 4)
    assert program.holders(0) == (0, 3)
    assert program.holders(4) == ()
    assert [program.compute_rank[0, mb] for mb in range(8)] == [0] * 4 + [3] * 4
    assert compiled("1f1b", 4, 8).compute_rank == {(stage, mb): stage for stage in range(4) for mb in range(8)}


def test_index_of_gives_the_first_action_with_a_key_and_one_index_for_a_pair() -> None:
    pair = Overlap(Instruction(Op.F, 0, 1), Instruction(Op.BW, 1, 0))
    stream = (Instruction(Op.F, 0, 0), pair, Instruction(Op.F, 0, 0))
    assert index_of(stream) == {Key(Op.F, 0, 0): 0, Key(Op.F, 0, 1): 1, Key(Op.BW, 1, 0): 1}


def test_repr_is_one_short_line() -> None:
    program = compiled("zb-v", 4, 64)
    expected = f"<Program zb-v: 4 ranks, 8 stages, 64 microbatches, hash {program.hash[:12]}>"
    assert repr(program) == expected
    assert repr(program.streams) == f"<Columns: 4 ranks, {program.columns.rows} instructions>"


# Invalid tables and files.


def table_with(**columns: object) -> pa.Table:
    """The table of a program with these values in its last row."""
    table = compiled("1f1b", 2, 2).to_arrow()
    for name, value in columns.items():
        field = SCHEMA.field(name)
        values = [*table.column(name).to_pylist()[:-1], value]
        table = table.set_column(SCHEMA.get_field_index(name), field, pa.array(values, field.type))
    return table


INVALID = {
    "shuffled": compiled("1f1b", 2, 2).to_arrow().take([1, 0, *range(2, compiled("1f1b", 2, 2).to_arrow().num_rows)]),
    "unknown op": table_with(op="JUMP"),
    "rank without stages": table_with(rank=2),
    "negative rank": table_with(rank=-1),
    "gap in the order": table_with(index=99),
    "lane of another op": table_with(lane="reduce"),
    "null stage": table_with(stage=None),
    "null waits": table_with(waits=None),
    "null wait": table_with(waits=[None]),
    "wait that is no key": table_with(waits=["later"]),
}


@pytest.mark.parametrize("fault", INVALID)
def test_a_table_with_invalid_rows_is_refused(fault: str) -> None:
    with pytest.raises(PentadError, match=r"^the Arrow table has the columns of a program but invalid rows: "):
        Program.from_arrow(INVALID[fault])


def test_three_instructions_at_one_position_are_refused() -> None:
    table = generate("1f1b", 1, 3).to_arrow()
    same = table.set_column(1, SCHEMA.field("index"), pa.array([0] * table.num_rows, pa.int32()))
    with pytest.raises(PentadError, match="but invalid rows: expected"):
        Program.from_arrow(same)


@pytest.mark.parametrize("change", [{"version": "0"}, {"version": None}, None])
def test_a_table_of_another_version_is_refused(change: dict[str, str | None] | None) -> None:
    table = compiled("1f1b", 2, 2).to_arrow()
    meta = {key.decode(): value.decode() for key, value in table.schema.metadata.items()} | (change or {})
    kept = {key: value for key, value in meta.items() if value is not None} if change else None
    with pytest.raises(
        PentadError, match=f"^the Arrow table has the columns .*: expected a program, version {VERSION}"
    ):
        Program.from_arrow(table.replace_schema_metadata(kept))


@pytest.mark.parametrize("key", ["name", "placement", "microbatches", "chunks"])
def test_a_table_without_its_metadata_is_refused(key: str) -> None:
    table = compiled("1f1b", 2, 2).to_arrow()
    meta = {k: v for k, v in table.schema.metadata.items() if k.decode() != key}
    with pytest.raises(PentadError, match="but invalid rows: expected"):
        Program.from_arrow(table.replace_schema_metadata(meta))


@pytest.mark.parametrize(
    ("meta", "column", "fault"),
    [
        ({"placement": "0;2"}, {}, r"its placement holds the stages \[0, 2\]: expected 0 to 1"),
        ({"microbatches": "99"}, {}, "microbatches is 99: expected 1 to"),
        ({"chunks": "0"}, {}, "chunks is 0: expected 1 to"),
        ({}, {"stage": 2}, "an instruction has stage 2: expected -1 to 1"),
        ({}, {"peer": 5}, "an instruction has peer 5: expected -1 to 1"),
        ({"units": "3,1"}, {}, r"units is \(3, 1\): expected positive numbers whose sum is 2"),
        ({"units": "2,0"}, {}, r"units is \(2, 0\): expected positive numbers whose sum is 2"),
        ({"sizes": "4,4"}, {}, r"sizes is \(\(4, 4\),\): expected as many counts of elements for each of 2 stages"),
        ({"sizes": "4;4,4"}, {}, "sizes is .*: expected as many counts of elements for each of 2 stages"),
    ],
)
def test_numbers_that_the_instructions_do_not_bear_out_are_refused(
    tmp_path: Path, meta: dict[str, str], column: dict[str, int], fault: str
) -> None:
    """Allocations rely on them."""
    table = table_with(**column)
    kept = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    path = tmp_path / "program.arrow"
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema.with_metadata(kept | meta)) as writer:
        writer.write_table(table.replace_schema_metadata(kept | meta))
    with pytest.raises(PentadError, match=f"is not a readable program: {fault}"):
        Program.load(path)


@pytest.mark.parametrize("type_", [pa.large_string(), pa.binary()])
def test_a_table_with_other_column_types_is_refused(type_: pa.DataType) -> None:
    table = compiled("1f1b", 2, 2).to_arrow()
    meta, lane = table.schema.metadata, SCHEMA.get_field_index("lane")
    table = table.set_column(lane, pa.field("lane", type_), table.column(lane).cast(type_))
    with pytest.raises(PentadError, match="expected a program, version"):
        Program.from_arrow(table.replace_schema_metadata(meta))


def test_a_file_without_a_program_is_refused_in_one_sentence_with_its_path(tmp_path: Path) -> None:
    contents = {
        "garbage": b"garbage",
        "empty": b"",
        "truncated": compiled("1f1b", 2, 2).to_bytes()[:1000],
        "stream": compiled("1f1b", 2, 2).to_bytes()[8:],
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    simulate(compiled("1f1b", 2, 2), Costs.uniform(2)).save(tmp_path / "timeline")
    (tmp_path / "folder").mkdir()
    for name in [*contents, "timeline", "folder", "missing"]:
        with pytest.raises(PentadError) as caught:
            Program.load(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name} is not a readable program: ")
        assert "\n" not in str(caught.value)


DATA = compile_program("dualpipe", 2, 4).to_bytes()


@given(st.integers(0, len(DATA) - 1), st.integers(0, 255))
def test_a_damaged_byte_is_refused_or_changes_the_hash(offset: int, value: int) -> None:
    original = Program.from_bytes(DATA)
    try:
        program = Program.from_bytes(DATA[:offset] + bytes([value]) + DATA[offset + 1 :])
    except PentadError:
        return
    assert replace(program, name=original.name) == original or program.hash != original.hash
