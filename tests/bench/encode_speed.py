"""Times encoding text as `pentad data build` does, and as the library `tokenizers` does it alone.

PYTHONPATH=.typings:tests/support python tests/bench/encode_speed.py SOURCE TOKENIZER [--megabytes N] [--out FILE.json]

Rates are megabytes of UTF-8 text by CPU second. `encoder` and `tokenizers` are those of one thread, for each part of
the text in its order; the library's is that of a bare `encode_batch_fast` on the first megabyte of every part, whose
tokens are compared. `build` is the whole build from JSONL in two processes, with their start, reading, writing and
checksums, and `build_by_clock` the same by second of the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "FASTOKENS_BPE_THREADS": "1", "RAYON_NUM_THREADS": "1"}

import numpy as np
from record import record

from pentad.workers.data.encoder import Encoder
from pentad.workers.data.tokenizer import load_tokenizer
from pentad.workers.preprocess.build import BuildRequest, build_corpus
from pentad.workers.preprocess.part_builder import text_chunks, text_columns
from pentad.workers.preprocess.readers import FileSpan
from pentad.workers.preprocess.source_files import find_files

T = TypeVar("T")
PARTS, AT_ONCE, COMPARED = 4, 2**23, 2**20  # parts of the text; characters at once, and of a part for the library


def groups(source: str, megabytes: int) -> list[list[str]]:
    """The documents of a source, in groups of about AT_ONCE characters."""
    found: list[list[str]] = [[]]
    size = total = 0
    for file in find_files([source]):
        for chunk in text_chunks([FileSpan(file)], text_columns(None), {"empty": 0}):
            if total >= megabytes * 1e6:
                return found
            if size >= AT_ONCE:
                found.append([])
                size = 0
            found[-1].append(chunk.text)
            size, total = size + len(chunk.text), total + len(chunk.text)
    return found


def rate(texts: list[str], action: Callable[[], T]) -> tuple[float, T]:
    """Megabytes of `texts` per CPU second of an action, and its result."""
    size = sum(len(text.encode()) for text in texts) / 1e6
    began = time.process_time()
    result = action()
    return round(size / (time.process_time() - began), 2), result


def compare(source: str, tokenizer: Path, megabytes: int) -> dict[str, Any]:
    ours, library = Encoder(load_tokenizer(tokenizer), 0), load_tokenizer(tokenizer)
    rates: dict[str, list[float]] = {"encoder": [], "tokenizers": []}
    texts = groups(source, megabytes)
    for part in np.array_split(np.arange(len(texts)), PARTS):
        own = [texts[number] for number in part]
        flat = [text for group in own for text in group]
        first = head(flat)
        speed, encoded = rate(flat, partial(encode_all, ours, own))
        rates["encoder"].append(speed)
        speed, plain = rate(first, partial(library.encode_batch_fast, first, add_special_tokens=False))
        rates["tokenizers"].append(speed)
        assert all(ids.tolist() == each.ids for ids, each in zip(encoded, plain, strict=False)), "other tokens"
    size = sum(len(text.encode()) for group in texts for text in group) / 1e6
    return {"megabytes": round(size, 1), **rates, **whole_build(texts, tokenizer, size)}


def encode_all(encoder: Encoder, groups: list[list[str]]) -> list[np.ndarray]:
    return [ids for group in groups for ids in encoder.encode(group)]


def head(texts: list[str]) -> list[str]:
    """The first texts, with about COMPARED characters in total."""
    ends = np.cumsum([len(text) for text in texts])
    return texts[: int(np.searchsorted(ends, COMPARED)) + 1]


def whole_build(texts: list[list[str]], tokenizer: Path, megabytes: float) -> dict[str, float]:
    """Megabytes of text per CPU second of all processes of a build, and per second of wall time."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        with rows.open("w") as sink:
            for group in texts:
                sink.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in group)
        request = BuildRequest((str(rows),), Path(folder) / "out", tokenizer, workers=2)
        began = os.times()
        build_corpus(request, lambda line: None, lambda progress: None)
        ended = os.times()
    cpu = sum(ended[:4]) - sum(began[:4])
    return {"build": round(megabytes / cpu, 1), "build_by_clock": round(megabytes / (ended[4] - began[4]), 1)}


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
