"""What is wrong with a command line, in one sentence that also says what is right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import typer


def usage_sentence(error: Any, root: Any, words: Sequence[str]) -> str:
    """The sentence for a click error in the command line `words` of the command `root`; '' if help was printed."""
    sentence = error.format_message().rstrip(".").replace(": Value error, ", ": ")  # a prefix of pydantic's
    if not sentence:  # a command without its verb
        return ""
    path, command = "pentad", root
    for word in words:
        if word in getattr(command, "commands", {}):
            path, command = f"{path} {word}", command.commands[word]
    option = getattr(error, "option_name", "")
    known = {name: each for each in command.params for name in each.opts}
    if option in known and sentence.endswith("requires an argument"):
        sentence += f": {known[option].get_help_record(typer.Context(command))[0]}"
    elif option and option not in known and "words" in known:
        sentence = _with_keys(sentence, option, getattr(error, "possibilities", None) or ())
    return f"{sentence} (see `{path} --help`)"


def _with_keys(sentence: str, option: str, near: Iterable[str]) -> str:
    """The sentence, plus the configuration keys that may have been meant by an option, unless one of the options `near`
    it is more likely."""
    if any(each.startswith(option) for each in near):
        return sentence
    from pentad.orchestrator.config.config import RunConfig
    from pentad.orchestrator.config.errors import is_key, near_keys

    word = option.lstrip("-").replace("-", "_")
    found = [word] if is_key(word, RunConfig) else near_keys(word, RunConfig)
    keys = [key for key in found if is_key(key, RunConfig) and "[]" not in key]
    if named := [key for key in keys if key.endswith(word)]:
        return f"No such option: {option}; keys are set without dashes: {_assigned(named)}"
    if keys and not {*near} - {"--help"}:
        return f"No such option: {option}; keys have no dashes: did you mean {_assigned(keys)}?"
    return sentence


def _assigned(keys: Iterable[str]) -> str:
    return " or ".join(f"{key}=VALUE" for key in keys)
