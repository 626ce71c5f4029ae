"""Stop signals: what the first and the following ones do."""

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


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGTERM"])
def test_a_repeated_signal_of_a_scheduler_does_not_end_the_save(name: str) -> None:
    number = signal.Signals[name]
    before = signal.getsignal(number)
    with StopSignal(same_press_s=0) as stop:
        for _ in range(3):
            signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal_number == number
    assert signal.getsignal(number) is before


def test_a_third_ctrl_c_interrupts_again() -> None:
    with StopSignal(same_press_s=0):
        signal.raise_signal(signal.SIGINT)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


def test_the_signal_of_the_environment_stops_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECONV_STOP_SIGNAL", "SIGRTMIN+1")
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGRTMIN + 1)
        assert stop.signal_number == signal.SIGRTMIN + 1
