"""The function that a text such as 'path/my.py:my_schedule' names, and what is told when the user's file fails.

What the file holds is read once: ranks elsewhere run the text that a plan brings them.
"""

from __future__ import annotations

import difflib
import inspect
import re
import reprlib
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.abc import ExecutionLoader
from importlib.machinery import ModuleSpec
from importlib.util import decode_source, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pentad.schedules.ir.errors import PentadError

PARAMETERS = "(rank, ranks, microbatches)"


class Kind(NamedTuple):
    """What a function is of, in the words of its mistakes."""

    word: str
    parameters: str
    example: str


SCHEDULE = Kind("schedule", PARAMETERS, "my.py:my_schedule")


def function_of(text: str, kind: Kind = SCHEDULE, source: str | None = None) -> Callable[..., Any]:
    """Runs the file, or the `source` that it held, and returns the function. What it prints goes to stderr.

    Raises PentadError when there is no such file or function, or the file fails.
    """
    file, _, name = text.rpartition(":")
    source = source_of(text, kind) if source is None else source
    module = _module(text, Path(file), source, kind)
    if name not in module.__dict__:
        own = [key for key, value in module.__dict__.items() if getattr(value, "__module__", "") == module.__name__]
        near = difflib.get_close_matches(name, own, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise mistake(text, f"{file} has no {name!r}{hint}: expected a function {kind.parameters}", kind)
    found = module.__dict__[name]
    if not callable(found):
        raise mistake(text, f"{name} is {reprlib.repr(found)}: expected a function {kind.parameters}", kind)
    return found


def source_of(text: str, kind: Kind = SCHEDULE) -> str:
    """What the file holds. Raises PentadError when it cannot be read."""
    file = text.rpartition(":")[0]
    if not file.endswith(".py"):
        raise mistake(text, f"the file is {file!r}: expected a .py file and a function, as in {kind.example}", kind)
    try:
        return decode_source(Path(file).read_bytes())
    except (OSError, ValueError, SyntaxError) as error:  # ValueError: a zero byte in the name, or no text
        reason = getattr(error, "strerror", None) or error
        said = f"the file {file!r} cannot be read ({reason}): expected a .py file that holds the function"
        raise mistake(text, said, kind) from None


def is_chunked(text: str, function: Callable[..., Any]) -> bool:
    """Whether it takes `chunks`; it is called by the names of its parameters."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise mistake(text, f"it does not tell its parameters: expected a function {PARAMETERS}") from None
    chunked = "chunks" in signature.parameters
    try:
        signature.bind(**dict.fromkeys(["rank", "ranks", "microbatches", *(["chunks"] if chunked else [])], 1))
    except TypeError:
        found = f"its parameters are ({', '.join(signature.parameters)})"
        raise mistake(text, f"{found}: expected {PARAMETERS} and, should it need it, chunks") from None
    return chunked


def raised(text: str, error: BaseException) -> str:
    """'ZeroDivisionError in line 7 (division by zero)': the line is the last one of the user's file."""
    file = str(Path(text.rpartition(":")[0]))
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    message = str(error)
    if isinstance(error, SyntaxError) and error.filename == file:
        lines, message = [error.lineno or 0], error.msg
    if not lines and error.__cause__:  # a StopIteration inside a generator
        return raised(text, error.__cause__)
    where = f" in line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{where}" + (f" ({' '.join(message.split())[:200]})" if message else "")


def mistake(text: str, said: str, kind: Kind = SCHEDULE) -> PentadError:
    return PentadError(f"{kind.word} {text}: {said}")


class _Text(ExecutionLoader):
    """Loads a module from the text of its file: what was edited counts, and no cache is left beside it."""

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.source = path, source

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def get_source(self, fullname: str) -> str:
        return self.source

    def is_package(self, fullname: str) -> bool:
        return False


def _module(text: str, path: Path, source: str, kind: Kind) -> ModuleType:
    name = re.sub(r"\W", "_", str(path.resolve()))
    loader = _Text(path, source)
    module = module_from_spec(ModuleSpec(name, loader))
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        with redirect_stdout(sys.stderr):
            loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        said = f"{path} cannot be imported: {raised(text, error)}: expected a file that runs"
        raise mistake(text, said, kind) from None
    return module
