"""Times encoding text with a tokenizer word by word, as `pentad data build` does, and whole documents at a time.

PYTHONPATH=.typings:tests/support python tests/bench/encode_speed.py SOURCE TOKENIZER [--megabytes N] [--out FILE.json]

Rates are megabytes of UTF-8 text by CPU second of one process with one thread, for each part of the text in its order:
the words of the first part are all new. Tokens of both are compared.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
from record import record

from pentad.workers.data.encoder import Encoder
from pentad.workers.data.tokenizer import load_tokenizer
from pentad.workers.preprocess.part_builder import text_chunks, text_columns
from pentad.workers.preprocess.readers import Span
from pentad.workers.preprocess.source_files import find_files

PARTS, AT_ONCE = 4, 2**23  # parts of the text; characters


def groups(source: str, megabytes: int) -> list[list[str]]:
    """The documents of a source, about AT_ONCE characters together."""
    found: list[list[str]] = [[]]
    size = total = 0
    for file in find_files([source]):
        for chunk in text_chunks([Span(file)], text_columns(None), {"empty": 0}):
            if total >= megabytes * 1e6:
                return found
            if size >= AT_ONCE:
                found.append([])
                size = 0
            found[-1].append(chunk.text)
            size, total = size + len(chunk.text), total + len(chunk.text)
    return found


def measure(texts: list[list[str]], encode: Callable[[list[str]], list[np.ndarray]]) -> tuple[list[float], int]:
    """Megabytes by CPU second of each part, and a checksum of the tokens."""
    rates, checksum = [], 0
    for part in np.array_split(np.arange(len(texts)), PARTS):
        size = sum(len(text.encode()) for number in part for text in texts[number])
        began = time.process_time()
        for number in part:
            checksum = hash((checksum, *(ids.tobytes() for ids in encode(texts[number]))))
        rates.append(round(size / 1e6 / (time.process_time() - began), 2))
    return rates, checksum


def compare(source: str, tokenizer: Path, megabytes: int) -> dict[str, Any]:
    texts = groups(source, megabytes)
    words, plain = (Encoder(load_tokenizer(tokenizer), 0) for _ in range(2))
    plain.rule = None
    by_word, first = measure(texts, words.encode)
    whole, second = measure(texts, lambda group: [ids for text in group for ids in plain.encode([text])])
    assert first == second, "other tokens"
    size = sum(len(text.encode()) for group in texts for text in group) / 1e6
    return {"megabytes": round(size, 1), "word_by_word": by_word, "whole_documents": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    section = f"{Path(options.source).name}, {options.tokenizer.name}"
    record(options.out, section, partial(compare, options.source, options.tokenizer, options.megabytes))


if __name__ == "__main__":
    main()
