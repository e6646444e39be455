"""The points of a sweep: all combinations of the comma-separated values that the command line gives for each key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import yaml

from pentad.orchestrator.config.errors import shown
from pentad.schedules.ir.errors import PentadError

MOST_TRIALS = 2048
FIXED = ("run.", "cluster.")


class Point(NamedTuple):
    """Overrides of the configuration, and those among them that differ between points."""

    words: tuple[str, ...]
    varied: tuple[str, ...] = ()


def grid(words: Sequence[str]) -> list[Point]:
    """The points of words such as `key=value` and `key=value,value`; the last key varies fastest. Raises PentadError
    for ambiguous words and too many points."""
    keys = [word.partition("=")[0] for word in words]
    for number, key in enumerate(keys):
        if key in keys[:number]:
            raise PentadError(f"{key} is given twice: expected all its values in one word, such as {key}=A,B")
    choices = [[f"{key}={value}" for value in values_of(word)] for key, word in zip(keys, words, strict=True)]
    varied = [len(each) > 1 for each in choices]
    for key, varies in zip(keys, varied, strict=True):
        if varies and key.startswith(FIXED):
            raise PentadError(f"{key} has several values: expected one, since all trials share it")
    if (count := math.prod(map(len, choices))) > MOST_TRIALS:
        raise PentadError(f"the grid has {count:,} points: expected at most {MOST_TRIALS:,}")
    return [
        Point(each, tuple(word for word, varies in zip(each, varied, strict=True) if varies))
        for each in product(*choices)
    ]


def values_of(word: str) -> list[str]:
    """The values in a word, split at commas outside of brackets and quotes: 'a=[x,y],z' has '[x,y]' and 'z'."""
    key, _, text = word.partition("=")
    if "," not in text:
        return [text]
    expected = "expected values with commas between them (quotes make one text of commas and brackets)"
    sequence = f"[{text}]"
    try:
        node = yaml.compose(sequence, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        node = None
    if not isinstance(node, yaml.SequenceNode) or node.end_mark.index != len(sequence) or text.rstrip().endswith(","):
        raise PentadError(f"{key} is {shown(text)}: {expected}")
    found = [sequence[each.start_mark.index : each.end_mark.index] for each in node.value]
    if len(set(found)) < len(found) or not all(found):
        raise PentadError(f"{key} is {shown(text)}, with a value that is empty or given twice: {expected}")
    return found
