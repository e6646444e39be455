"""Training a tokenizer, which Rust does without seeing signals."""

import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from corpora import build

from pentad.workers.preprocess import build as module


def test_an_interrupt_does_not_wait_for_the_training_of_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def train(texts: Iterable[str], vocab: int) -> None:  # like Rust: other threads read the text while this one waits
        def read() -> None:
            with suppress(KeyboardInterrupt):
                for _ in texts:
                    time.sleep(0.01)
            ended.set()

        threading.Thread(target=read, daemon=True).start()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            ended.wait(20)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    monkeypatch.setattr(module, "train_tokenizer", train)
    for number in range(1000):
        (tmp_path / f"{number}.txt").write_text("a")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore the signal
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            build(f"{tmp_path}/*.txt")
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 5
    assert ended.wait(5)  # and it does not go on in the background
