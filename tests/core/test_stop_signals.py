"""Which signals stop a run."""

from __future__ import annotations

import signal

import pytest

from reconv.core.errors import ExitCode, UsageError
from reconv.core.stop_signals import handled_stop_signals, signal_name, stop_signals


def test_the_signals_of_schedulers_and_terminals_are_stop_signals() -> None:
    names = {signal_name(number) for number in stop_signals({})}
    assert names == {"SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"}


def test_further_ones_are_named_in_the_environment() -> None:
    further = stop_signals({"RECONV_STOP_SIGNAL": "SIGQUIT, rtmin+3,USR1"})[len(stop_signals({})) :]
    assert further == (signal.SIGQUIT, signal.SIGRTMIN + 3)
    assert [signal_name(number) for number in further] == ["SIGQUIT", "SIGRTMIN+3"]


@pytest.mark.parametrize("name", ["KILL", "SIGSTOP", "SIGSEGV", "SIGFOO", "RTMIN+99", "12", "TERM+1"])
def test_a_signal_that_cannot_be_used_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be a stop signal") as refusal:
        stop_signals({"RECONV_STOP_SIGNAL": name})
    assert refusal.value.code == ExitCode.USAGE and refusal.value.where == "RECONV_STOP_SIGNAL"


def test_nohup_keeps_its_meaning() -> None:
    assert signal.SIGHUP in handled_stop_signals()
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in handled_stop_signals()
    finally:
        signal.signal(signal.SIGHUP, previous)
