"""Stop signals: SIGINT and SIGTERM."""

from __future__ import annotations

import signal

import pytest

from reconv.trainer.stop_signal import StopSignal


def test_second_ctrl_c_interrupts_also_after_a_sigterm() -> None:
    with StopSignal(same_press_s=0) as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal_number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_repeated_by_a_launcher_counts_once() -> None:
    with StopSignal(same_press_s=60) as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop.signal_number == signal.SIGINT


def test_a_ctrl_c_after_a_sigterm_still_waits_for_the_save() -> None:
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.signal_number == signal.SIGTERM
