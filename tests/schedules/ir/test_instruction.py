"""Instructions and their text form convert both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import (
    COLLECTIVES,
    RECEIVES,
    SENDS,
    Instruction,
    Key,
    Op,
    Overlap,
    parse,
    parse_key,
)

NUMBERS = st.integers(-1, 999_999)
KEYS = st.builds(Key, st.sampled_from(Op), NUMBERS, NUMBERS)
INSTRUCTIONS = st.builds(
    Instruction,
    st.sampled_from(Op),
    NUMBERS,
    NUMBERS,
    peer=NUMBERS,
    group=st.just("") | st.from_regex(r"[a-z]\w{0,7}", fullmatch=True).filter(str.isascii),
    slot=NUMBERS,
    waits=st.lists(KEYS, max_size=3).map(tuple),
)
ACTIONS = INSTRUCTIONS | st.builds(Overlap, INSTRUCTIONS, INSTRUCTIONS)

INVALID = [
    *("", " ", "F0x", "2G0", "f0", "2F0 ", " 2F0", "2F0\n", "2F-1", "-2F0", "2.0F0", "2I0", "OVERLAP_F_B"),
    *("02F0", "2F00", "٢F0", "2²F0", "9" * 5000 + "F0", "2F" + "9" * 10),  # a number has one form
    *("2SEND_F0<3", "2RECV_F0>3", "2SEND_F0>", "2SEND_F0>-1", "2SEND_F0@1>3", "NORM#", "NORM#a b", "0RECV_F1@"),
    *(
        "2F0 after",
        "2F0 after ",
        "2F0 after 1F0,",
        "2F0 after 1F0, 1F1",
        "2F0 after x",
        "2F0 after 01F0",
        "2F0after 1F0",
    ),
    *("(", "()", "(2F0)", "(2F0+)", "(+2F0)", "(2F0+2B0", "2F0+2B0", "(2F0+2B0+2W0)", "((2F0+2B0)+2W0)", "(2F0 + 2B0)"),
]


@given(ACTIONS)
def test_parse_inverts_str(action: Instruction | Overlap) -> None:
    assert parse(str(action)) == action
    assert type(parse(str(action))) is type(action)


@given(KEYS)
def test_parse_key_inverts_str(key: Key) -> None:
    assert parse_key(str(key)) == key


@given(st.lists(ACTIONS, unique=True, max_size=20))
def test_different_instructions_have_different_texts(actions: list[Instruction | Overlap]) -> None:
    assert len(set(map(str, actions))) == len(actions)


@pytest.mark.parametrize("text", INVALID)
def test_invalid_text_is_refused_in_a_sentence_that_quotes_it(text: str) -> None:
    with pytest.raises(PentadError, match=r"^instruction is '.*': expected STAGE OP MICROBATCH as in '2F0'") as caught:
        parse(text)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=12) | st.text("0123F BWSEND_RECV<>#@+(),after", max_size=24))
def test_any_text_is_refused_or_the_canonical_form_of_its_instruction(text: str) -> None:
    for read in (parse, parse_key):
        try:
            assert str(read(text)) == text
        except PentadError as error:
            assert ": expected STAGE OP MICROBATCH" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("text", "instruction"),
    [
        ("2F0", Instruction(Op.F, 2, 0)),
        ("0BW11", Instruction(Op.BW, 0, 11)),
        ("2SEND_F0>3 after 2F0", Instruction(Op.SEND_F, 2, 0, peer=3, waits=(Key(Op.F, 2, 0),))),
        ("3RECV_F0<2@1 after 3W5", Instruction(Op.RECV_F, 3, 0, peer=2, slot=1, waits=(Key(Op.W, 3, 5),))),
        ("2ALL_REDUCE#stage2", Instruction(Op.ALL_REDUCE, 2, group="stage2")),
        ("NORM#pp", Instruction(Op.NORM, group="pp")),
        ("(1F4+2BW0)", Overlap(Instruction(Op.F, 1, 4), Instruction(Op.BW, 2, 0))),
        ("STEP after NORM", Instruction(Op.STEP, waits=(Key(Op.NORM, -1, -1),))),
    ],
)
def test_the_documented_examples_are_parsed_and_written(text: str, instruction: Instruction | Overlap) -> None:
    assert parse(text) == instruction
    assert str(instruction) == text


@given(INSTRUCTIONS)
def test_a_lane_is_for_transfers_with_one_peer_or_for_one_kind_of_work(part: Instruction) -> None:
    if part.op in SENDS or part.op in RECEIVES:
        assert str(part.op) in part.lane
        assert part.lane.endswith(str(part.peer))
    elif part.op in COLLECTIVES:
        assert part.lane in ("gather", "reduce")
    else:
        assert part.lane in ("compute", "offload", "reload")
    assert part.parts == (part,)


@given(INSTRUCTIONS, INSTRUCTIONS)
def test_an_overlapped_pair_has_the_waits_of_both_halves(forward: Instruction, backward: Instruction) -> None:
    pair = Overlap(forward, backward)
    assert pair.waits == forward.waits + backward.waits
    assert (pair.key, pair.lane, pair.parts) == (forward.key, "compute", (forward, backward))
