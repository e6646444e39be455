"""Conversations: turns rows of three forms into messages, and messages into tokens with a loss mask."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus_writer import Document, token_dtype
from pentad.workers.data.tokenizer import vocab_size
from pentad.workers.preprocess.chat_template import ChatTemplate, Message, Rendered
from pentad.workers.preprocess.readers import Columns, SourceRow

_AT_ONCE = 64  # conversations
# Values of `from` in rows of `conversations`, and the roles that they mean.
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "observation"), "tool"),
    "system": "system",
}
# Keys with the content of a message.
_SAID = {"content", "tool_calls", "function_call", "reasoning_content", "thinking"}


class Conversation(NamedTuple):
    """A conversation; the assistant's turns from message `first` on are trained. The template gets `tools` by that
    name."""

    messages: list[Message]
    tools: Any
    first: int


def chat_columns(field: str | None) -> Columns:
    """The columns of rows with conversations: `field`, or those of one of the three forms."""
    forms = (("messages",), ("conversations",), ("prompt", "completion"))
    return Columns(((field,),) if field else forms, ("tools",))


def conversation(row: SourceRow) -> Conversation | None:
    """The conversation in a row of `chat_columns`; None if it is null or empty. Raises PentadError with the position.

    A row has a list of {role, content} or {from, value}, or a prompt and a completion, each a text or such a list.
    """
    values = dict(row.values)
    tools = values.pop("tools", None)
    if isinstance(tools, str):
        tools = _json(tools, row.where)
    if "completion" in values and "prompt" in values:
        prompt, completion = (_messages(values[key], role, row.where) for key, role in _SIDES)
        return Conversation([*prompt, *completion], _without_nulls(tools) or None, len(prompt)) if completion else None
    (turns,) = values.values()
    messages = _messages(turns, None, row.where)
    return Conversation(messages, _without_nulls(tools) or None, 0) if messages else None


_SIDES = (("prompt", "user"), ("completion", "assistant"))


def _messages(turns: Any, role: str | None, where: Callable[[], str]) -> list[Message]:
    """The messages of a list of turns, or of a single text said by `role`."""
    if turns is None:
        return []
    if isinstance(turns, str) and role:
        return [{"role": role, "content": turns}]
    if not isinstance(turns, list):
        expected = "expected a list of {role, content} or {from, value}" + (", or a text" if role else "")
        raise PentadError(f"{where()} has a conversation of type {type(turns).__name__}: {expected}")
    return [_message(turn, number, where) for number, turn in enumerate(turns)]


def _message(turn: Any, number: int, where: Callable[[], str]) -> Message:
    given = {key for key in turn if turn[key] is not None} if isinstance(turn, dict) else set()
    if given & _SAID and isinstance(turn.get("role"), str):
        # Arrow stores keys that a message lacks as null, but templates test whether they exist.
        return {key: _without_nulls(value) for key, value in turn.items() if value is not None or key == "content"}
    if "from" in given and isinstance(turn.get("value"), str):
        if turn["from"] not in _ROLES:
            fault = f"from = {turn['from']!r} in message {number}"
            raise PentadError(f"{where()} has {fault}: expected one of {', '.join(_ROLES)}")
        return {"role": _ROLES[turn["from"]], "content": turn["value"]}
    found = ", ".join(repr(key) for key in turn if key in given) if given else f"a {type(turn).__name__}"
    raise PentadError(
        f"{where()} has {found} as message {number}: expected 'role' and 'content', or 'from' and 'value'"
    )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _json(text: str, where: Callable[[], str]) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise PentadError(f"{where()} has 'tools' that are not JSON ({error}): expected a list of tools") from None


class ChatEncoder:
    """Encodes conversations as transformers' apply_chat_template does, with a loss mask."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.template, self.dtype = template, token_dtype(vocab_size(tokenizer))
        # With a post-processor, a token's offsets would leave out its leading space.
        content = json.loads(tokenizer.to_str())
        self.tokenizer = Tokenizer.from_str(json.dumps(content | {"post_processor": None}))

    def documents(
        self, rows: Iterable[SourceRow], skipped: dict[str, int], report: Callable[[int], None]
    ) -> Iterator[Document]:
        """One document per conversation, exactly as the template renders it.

        Counts in `skipped` what is left out, and passes to `report` the characters encoded since its last call.
        """
        texts = self._rendered(rows, skipped)
        while group := list(islice(texts, _AT_ONCE)):
            report(sum(len(each.text) for each in group))
            encodings = self.tokenizer.encode_batch([each.text for each in group], add_special_tokens=False)
            for rendered, encoding in zip(group, encodings, strict=True):
                mask = loss_mask(np.array(encoding.offsets, np.int64).reshape(-1, 2), rendered.trained)
                if mask.any():
                    yield Document(np.array(encoding.ids, self.dtype), mask)
                else:
                    skipped["untrained"] += 1

    def _rendered(self, rows: Iterable[SourceRow], skipped: dict[str, int]) -> Iterator[Rendered]:
        for row in rows:
            found = conversation(row)
            if found is None:
                skipped["empty"] += 1
                continue
            try:
                yield self.template.trained_text(*found)
            except PentadError as error:
                raise PentadError(f"{row.where()}: {error}") from None


def loss_mask(places: np.ndarray, trained: Iterable[tuple[int, int]]) -> np.ndarray:
    """[T] uint8: 1 for each token with a character in one of the `trained` spans. `places` [T, 2] are the tokens'
    (start, end) in characters."""
    mask = np.zeros(len(places), np.uint8)
    for start, end in trained:
        mask |= (places[:, 0] < end) & (places[:, 1] > start)
    return mask
