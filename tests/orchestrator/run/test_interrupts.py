"""Ctrl-C and SIGTERM, sent to this process."""

import signal

import pytest

from pentad.orchestrator.run.interrupts import Interrupts


def test_the_first_signal_asks_for_a_stop_the_second_interrupts_and_others_are_ignored() -> None:
    before, asked = signal.getsignal(signal.SIGTERM), []
    with Interrupts() as interrupts:
        interrupts.stop = lambda: asked.append("stop")
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert asked == ["stop"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_before_the_ranks_run_interrupts_at_once() -> None:
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
