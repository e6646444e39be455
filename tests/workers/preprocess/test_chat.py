"""Conversations: tokens are those of transformers, and exactly what the assistant says is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import CHATML, FORGETFUL, HEADERS, INSTRUCT, MARKED_CHATML, MARKED_FORGETFUL, write_tokenizer
from corpora import build, documents
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus import Corpus
from pentad.workers.preprocess.chat_template import ChatTemplate, read_chat_template, special_tokens
from pentad.workers.preprocess.inspect import inspect_corpus

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "int"}}}}
CALL = {"function": {"name": "add", "arguments": {"a": 4, "unit": "é"}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": " It is 42. "}],
    "system and several turns": [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "é?"},
        {"role": "assistant", "content": "\n\n山 \U0001f3d4"},
        {"role": "user", "content": "And <|im_end|> now?"},
        {"role": "assistant", "content": "Nothing."},
    ],
    "empty turn": [
        {"role": "user", "content": "Say nothing."},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "   "},
    ],
    "unanswered": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
}
TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "4 and?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": {"sum": 9}},
    {"role": "assistant", "content": "9"},
]


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder / "rows.jsonl"


def built(folder: Path, rows: list[dict[str, Any]], chat_template: str | None, **options: Any) -> Corpus:
    tokenizer = write_tokenizer(folder / "model", chat_template, options.pop("trim_offsets", False))
    return build(write(folder, rows), tokenizer=tokenizer, chat=True, **options)


def trained(corpus: Corpus) -> list[str]:
    """The trained segments of the only document."""
    found = inspect_corpus(corpus.path, 10_000, 10_000)["samples"]
    assert len(found) == 1, "of one document"
    return [segment["text"] for segment in found[0] if segment["trained"]]


def masks(corpus: Corpus) -> list[list[int]]:
    flat, at, found = corpus.loss_mask(0, corpus.tokens).astype(int).tolist(), 0, []
    for document in documents(corpus):
        found.append(flat[at : at + len(document)])
        at += len(document)
    return found


def reference(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("template", [CHATML, HEADERS, INSTRUCT])
def test_tokens_are_those_of_transformers(tmp_path: Path, template: str, trim_offsets: bool) -> None:
    conversations = [*CONVERSATIONS.values()]
    rows: list[dict[str, Any]] = [{"messages": messages} for messages in conversations]
    tools: list[Any] = [None] * len(rows)
    if template is HEADERS:
        rows += [{"messages": TOOLS, "tools": [TOOL]}, {"messages": TOOLS, "tools": json.dumps([TOOL])}]
        conversations, tools = [*conversations, TOOLS, TOOLS], [*tools, [TOOL], [TOOL]]
    corpus = built(tmp_path, rows, template, trim_offsets=trim_offsets)
    tokenizer = reference(tmp_path / "model")
    assert documents(corpus) == [
        tokenizer.apply_chat_template(messages, tools=tool, return_dict=False)
        for messages, tool in zip(conversations, tools, strict=True)
    ]


@pytest.mark.parametrize("template", [MARKED_CHATML, MARKED_FORGETFUL])
def test_masks_are_those_of_transformers_where_the_template_marks_generations(tmp_path: Path, template: str) -> None:
    rows = [{"messages": messages} for messages in CONVERSATIONS.values()]
    corpus = built(tmp_path, rows, template)
    tokenizer = reference(tmp_path / "model")
    expected = [
        tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        for messages in CONVERSATIONS.values()
    ]
    assert documents(corpus) == [each["input_ids"] for each in expected]
    assert masks(corpus) == [each["assistant_masks"] for each in expected]


def test_without_marks_the_same_tokens_are_trained(tmp_path: Path) -> None:
    rows = [{"messages": messages} for messages in CONVERSATIONS.values()]
    found = []
    for number, template in enumerate((CHATML, MARKED_CHATML)):
        (tmp_path / str(number)).mkdir()
        corpus = built(tmp_path / str(number), rows, template)
        found.append((documents(corpus), masks(corpus)))
    assert found[0] == found[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("template", "name", "expected"),
    [
        (CHATML, "one turn", [" It is 42. <|im_end|>"]),
        (CHATML, "system and several turns", ["\n\n\n山 \U0001f3d4<|im_end|>", "Nothing.<|im_end|>"]),
        (CHATML, "empty turn", ["<|im_end|>", "   <|im_end|>"]),
        (CHATML, "unanswered", ["b<|im_end|>"]),
        (HEADERS, "one turn", ["It is 42.<|eot|>"]),
        (HEADERS, "empty turn", ["<|eot|>", "<|eot|>"]),
        (INSTRUCT, "one turn", ["  It is 42. </s>"]),
    ],
)
def test_a_turn_is_trained_up_to_the_token_that_ends_it(
    tmp_path: Path, template: str, name: str, expected: list[str]
) -> None:
    assert trained(built(tmp_path, [{"messages": CONVERSATIONS[name]}], template)) == expected


def test_calls_of_tools_are_trained_and_their_results_are_not(tmp_path: Path) -> None:
    found = trained(built(tmp_path, [{"messages": TOOLS, "tools": [TOOL]}], HEADERS))
    assert found == ['{"name": "add", "parameters": {"a": 4, "unit": "é"}}<|eot|>', "9<|eot|>"]


turns = st.lists(st.text(st.sampled_from("ab \n<|é'"), max_size=6), min_size=1, max_size=5)


@given(turns, st.booleans())
def test_every_character_is_trained_or_not_as_its_turn_is(contents: list[str], system: bool) -> None:
    """Against the text that the template builds, turn by turn."""
    roles = ["user", "assistant"] * 3
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    messages = [{"role": "system", "content": "s"}, *messages] if system else messages
    template = ChatTemplate("t", CHATML, {}, ("<|im_start|>", "<|im_end|>"))
    found = template.trained_text(messages, None, 0)
    expected = [f"{message['content']}<|im_end|>" for message in messages if message["role"] == "assistant"]
    assert [found.text[start:end] for start, end in found.trained] == expected
    before = [found.text[:start] for start, _ in found.trained]
    assert all(text.endswith("<|im_start|>assistant\n") for text in before)


PAIR = CONVERSATIONS["one turn"]
FORMS: dict[str, dict[str, Any]] = {
    "messages": {"messages": PAIR},
    "texts": {"prompt": "What is it?", "completion": " It is 42. "},
    "turns": {"prompt": PAIR[:1], "completion": PAIR[1:]},
    "mixed": {"prompt": PAIR[:1], "completion": " It is 42. "},
    "conversations": {
        "conversations": [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": " It is 42. "}]
    },
    "from and value as messages": {
        "messages": [{"from": "user", "value": "What is it?"}, {"from": "assistant", "value": " It is 42. "}]
    },
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("table", [False, True])
def test_every_form_of_a_row_is_the_same_conversation(tmp_path: Path, form: str, table: bool) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", CHATML)
    source = write(tmp_path, [FORMS[form] | {"id": 1}])
    if table:
        source = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist([FORMS[form]]), source)
    corpus = build(source, tokenizer=tokenizer, chat=True)
    expected = reference(tokenizer).apply_chat_template(PAIR, return_dict=False)
    assert documents(corpus) == [expected] and trained(corpus) == [" It is 42. <|im_end|>"]


def test_nulls_that_a_table_adds_to_messages_are_not_there(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", HEADERS)
    call: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"b": 1}}}]}
    ]
    rows: list[dict[str, Any]] = [
        {"messages": PAIR},
        {"messages": [*TOOLS[:2], TOOLS[3]]},
        {"messages": [PAIR[0], *call]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    corpus = build(tmp_path / "rows.parquet", tokenizer=tokenizer, chat=True)
    apply = reference(tokenizer).apply_chat_template
    assert documents(corpus) == [apply(row["messages"], return_dict=False) for row in rows]


def test_only_the_completion_is_trained(tmp_path: Path) -> None:
    several = CONVERSATIONS["system and several turns"]
    row = {"prompt": several[:4], "completion": several[4:]}
    for number, template in enumerate((CHATML, MARKED_CHATML)):
        (tmp_path / str(number)).mkdir()
        assert trained(built(tmp_path / str(number), [row], template)) == ["Nothing.<|im_end|>"]


def test_an_opening_turn_of_the_assistant_is_context(tmp_path: Path) -> None:
    greeting = [{"role": "assistant", "content": "Hi."}, *PAIR]
    assert trained(built(tmp_path, [{"messages": greeting}], INSTRUCT)) == ["  It is 42. </s>"]


def test_conversations_without_a_trained_turn_are_left_out_and_counted(tmp_path: Path) -> None:
    notes: list[str] = []
    rows: list[dict[str, Any]] = [{"messages": PAIR[:1]}, {"messages": None}, {"messages": []}, {"messages": PAIR}]
    corpus = built(tmp_path, rows, CHATML, note=notes.append)
    assert corpus.documents == 1
    assert notes[-2:] == ["left out: 2 empty rows", "left out: 1 conversation without a turn to train"]
    origin = inspect_corpus(corpus.path, 0, 1)["origin"]
    assert (origin["empty_rows"], origin["untrained_conversations"]) == (2, 1)
    assert origin["fields"] == "messages or conversations or prompt+completion" and len(origin["chat_template"]) == 64


def test_a_template_in_a_file_overrides_that_of_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(INSTRUCT)
    corpus = built(tmp_path, [{"messages": PAIR}], CHATML, template=tmp_path / "t.jinja")
    assert trained(corpus) == ["  It is 42. </s>"]


def test_a_template_file_that_is_not_there_is_named_with_its_option(tmp_path: Path) -> None:
    sentence = r"^--chat-template '.*none.jinja' cannot be read \(No such file or directory\): expected a readable"
    with pytest.raises(PentadError, match=sentence):
        built(tmp_path, [{"messages": PAIR}], CHATML, template=tmp_path / "none.jinja")


@pytest.mark.parametrize("where", ["list", "file"])
def test_a_template_is_found_where_transformers_writes_it(tmp_path: Path, where: str) -> None:
    folder = write_tokenizer(tmp_path, "unused" if where == "file" else None)
    if where == "file":
        (folder / "chat_template.jinja").write_text(CHATML)
    else:
        named = [{"name": "tool_use", "template": "unused"}, {"name": "default", "template": CHATML}]
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert read_chat_template(folder / "tokenizer.json", None)[1] == CHATML
    assert special_tokens(folder) == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("named", [["x"], [{"name": ["default"]}], [{"name": "default"}], {"default": "x"}])
def test_templates_of_another_form_are_none(tmp_path: Path, named: Any) -> None:
    folder = write_tokenizer(tmp_path, None)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with pytest.raises(PentadError, match=r"^--tokenizer is '.*', which has no chat template: expected"):
        read_chat_template(folder, None)
    (folder / "tokenizer_config.json").write_text("[" * 5000)
    with pytest.raises(PentadError, match=r"tokenizer_config.json is not JSON .*: expected the configuration of a"):
        read_chat_template(folder, None)


ROW = {"messages": PAIR}
MISTAKES: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "no template": (ROW, None, r"--tokenizer is '.*', which has no chat template: expected chat_template.jinja or"),
    "not a template": (ROW, "{% if %}", r"the chat template of '.*' is not a Jinja template \(.*\): expected a chat"),
    "rewrites": (
        {"messages": [PAIR[0], {"role": "assistant", "content": "<think>x</think>y"}, *PAIR]},
        FORGETFUL,
        r"rows.jsonl line 1: the chat template of '.*' rewrites earlier turns of a conversation: expected one that",
    ),
    "refused": (
        {"messages": [{"role": "poet", "content": ""}]},
        HEADERS,
        r"line 1: .* cannot render .*\(no role poet\)",
    ),
    "undefined": (ROW, "{{ strftime_now('%Y') }}", r"line 1: .* cannot render .*\('strftime_now' is undefined\)"),
    "unsafe": (ROW, "{{ messages.__class__.__mro__ }}", r"line 1: .* cannot render .*\(access to attribute"),
    "division by zero": (ROW, "{{ 1 / 0 }}", r"line 1: .* cannot render .*\(division by zero\)"),
    "too many": (ROW, "{{ range(10**9) }}", r"line 1: .* cannot render .*\(Range too big"),
    "no role": ({"messages": [{"content": "a"}]}, CHATML, r"line 1 has 'content' as message 0: expected 'role' and"),
    "no content": (
        {"messages": [PAIR[0], {"role": "assistant", "text": "a"}]},
        CHATML,
        r"line 1 has 'role', 'text' as message 1: expected 'role' and 'content', or",
    ),
    "null content": (
        {"messages": [PAIR[0], {"role": "assistant", "content": None}]},
        CHATML,
        r"line 1 has 'role' as message 1: expected 'role' and 'content', or",
    ),
    "no list": ({"messages": "a"}, CHATML, r"line 1 has a conversation of type str: expected a list of"),
    "unknown speaker": (
        {"conversations": [{"from": "cat", "value": "miaow"}]},
        CHATML,
        r"line 1 has from = 'cat' in message 0: expected one of human, user, gpt",
    ),
    "no column": ({"text": "a"}, CHATML, r"line 1 has the fields 'text': expected 'messages' or 'conv"),
    "tools": (ROW | {"tools": "{"}, CHATML, r"line 1 has 'tools' that are not JSON \(.*\): expected a list of tools"),
    "nothing to train": ({"messages": PAIR[:1]}, CHATML, r"SOURCE holds no conversation with a turn .*\(1 without\)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_leaves_nothing(tmp_path: Path, mistake: str) -> None:
    row, template, message = MISTAKES[mistake]
    with pytest.raises(PentadError, match=message):
        built(tmp_path, [row], template)
    assert not (tmp_path / "out").exists()


def test_text_files_hold_no_conversations(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(PentadError, match=r"a.txt is a text file: expected conversations in JSONL, Parquet or Arrow"):
        build(tmp_path / "a.txt", tokenizer=write_tokenizer(tmp_path / "model", CHATML), chat=True)
