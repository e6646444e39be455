"""Renders conversations with a tokenizer's chat template, and finds the text that a model is trained to generate."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pentad.schedules.ir.errors import PentadError

# Unicode noncharacters, which no text contains: in a rendered text they mark what {% generation %} encloses.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
Message = dict[str, Any]
# What an expression in a template may raise.
_OF_EXPRESSIONS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class Rendered(NamedTuple):
    """A conversation as text, and its trained parts as (start, end) in characters."""

    text: str
    trained: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template. `text` is a Jinja template as in transformers; `tokens` are the values of bos_token, eos_token
    and so on; `special` are all special tokens of the tokenizer; `name` is used in errors."""

    name: str = field(repr=False)
    text: str
    tokens: dict[str, str] = field(default_factory=dict)
    special: tuple[str, ...] = ()

    def render(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
        """The conversation as text; with `prompt`, followed by the beginning of the assistant's next turn.

        Raises PentadError if the template refuses the conversation.
        """
        return self._render(self._compiled, messages, tools, prompt)

    def _render(self, template: Template, messages: Sequence[Message], tools: Any, prompt: bool) -> str:
        values = {"messages": list(messages), "tools": tools, "documents": None, "add_generation_prompt": prompt}
        try:
            return template.render({**self.tokens, **values})
        except (TemplateError, *_OF_EXPRESSIONS) as error:
            raise PentadError(f"{self.name} cannot render the conversation ({error}): expected one it knows") from None

    def check(self) -> None:
        """Raises PentadError if the text is not a template."""
        assert self._compiled

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def _compiled(self) -> Template:
        return self._compile(_Generation)

    @cached_property
    def _marking(self) -> Template:
        return self._compile(_MarkedGeneration)

    def _compile(self, generation: type[Extension]) -> Template:
        extensions = [generation, "jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(self.text)
        except (TemplateError, RecursionError, ValueError) as error:  # including errors of compiling its Python code
            raise PentadError(f"{self.name} is not a Jinja template ({error}): expected a chat template") from None

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the template marks what is trained with {% generation %}."""
        return re.search(r"\{%-?\+?\s*generation\s*[-+]?%\}", self.text) is not None

    @cached_property
    def _turn_end(self) -> re.Pattern[str] | None:
        """A pattern for the last special token of a turn; whitespace after it belongs to the template, not the turn."""
        names = {*self.special, self.tokens.get("eos_token", "")} - {""}
        return re.compile(f"(?:{'|'.join(map(re.escape, sorted(names)))})(\\s*)\\Z") if names else None

    def trained_text(self, messages: Sequence[Message], tools: Any, first: int) -> Rendered:
        """The conversation as text, with the assistant's turns from message `first` on to be trained.

        If the template marks generations, those are trained. Otherwise a turn extends from the end of the template's
        generation prompt to the special token that ends it; a turn that opens the conversation answers nothing and is
        not trained. Raises PentadError for a template that rewrites earlier turns."""
        if self.marks_generation:
            return self._marked(messages, tools, first)
        text = self.render(messages, tools)
        turns = [n for n, message in enumerate(messages) if n >= max(first, 1) and message["role"] == "assistant"]
        return Rendered(text, tuple(self._turn(text, messages, tools, turn) for turn in turns))

    def _turn(self, text: str, messages: Sequence[Message], tools: Any, turn: int) -> tuple[int, int]:
        before = self.render(messages[:turn], tools, prompt=True)
        after = text if turn + 1 == len(messages) else self.render(messages[: turn + 1], tools)
        if not (after.startswith(before) and text.startswith(after)):
            expected = "expected one that only appends, or that marks with {% generation %} what is trained"
            raise PentadError(f"{self.name} rewrites earlier turns of a conversation: {expected} (see --chat-template)")
        tail = self._turn_end.search(after, len(before)) if self._turn_end else None
        return len(before), tail.start(1) if tail else len(after)

    def _marked(self, messages: Sequence[Message], tools: Any, first: int) -> Rendered:
        text, spans = _split(self._render(self._marking, messages, tools, False))
        if text != self.render(messages, tools):
            expected = "expected one that prints what {% generation %} encloses as it is"
            raise PentadError(f"{self.name} changes text that it generated: {expected}")
        before = len(_split(self._render(self._marking, messages[:first], tools, False))[1]) if first else 0
        return Rendered(text, tuple(span for span in spans[before:] if span[0] < span[1]))


def _split(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """A text without its marks, and the spans that they enclosed."""
    text, spans = "", list[tuple[int, int]]()
    for number, piece in enumerate(re.split(f"[{_OPEN}{_CLOSE}]", marked)):
        if number % 2:
            spans.append((len(text), len(text) + len(piece)))
        text += piece
    return text, spans


class _Generation(Extension):
    """{% generation %}, with which a template marks what the assistant writes (transformers: AssistantTracker)."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_generated"), [], [], body).set_lineno(line)

    def _generated(self, caller: Any) -> str:
        return str(caller())


class _MarkedGeneration(_Generation):
    def _generated(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def special_tokens(tokenizer: Path) -> dict[str, str]:
    """The values of bos_token, eos_token and so on in the tokenizer's configuration files."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    named = {**_json_file(folder / "special_tokens_map.json"), **_json_file(folder / "tokenizer_config.json")}
    found = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: value for key, value in found.items() if key.endswith("_token") and isinstance(value, str)}


def read_chat_template(tokenizer: Path, file: Path | None) -> tuple[str, str]:
    """The template in `file`, or else in the folder of `tokenizer`: its name for errors, and its text.

    Raises PentadError if there is none.
    """
    if file is not None:
        name = f"--chat-template '{file}'"
        return name, _text(file, name)
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    stored = folder / "chat_template.jinja"
    found = _text(stored) if stored.is_file() else _json_file(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several templates with names
        named = [entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = named[-1].get("template") if named else None
    if not isinstance(found, str):
        expected = "expected chat_template.jinja or a chat_template in tokenizer_config.json (or --chat-template)"
        raise PentadError(f"--tokenizer is '{tokenizer}', which has no chat template: {expected}")
    return f"the chat template of '{tokenizer}'", found


def _json_file(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise PentadError(f"{file} is not JSON ({error}): expected the configuration of a tokenizer") from None
    return content if isinstance(content, dict) else {}


def _text(file: Path, name: str = "") -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PentadError(f"{name or file} cannot be read ({reason}): expected a readable UTF-8 file") from None


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without Jinja's HTML escapes, as templates expect it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
