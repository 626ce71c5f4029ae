"""Handling of ranks that fail, hang or disappear: one state machine per rank decides who prints the error.

    RUNNING     Sends heartbeats and watches those of the others.
                -> DIAGNOSING  A collective raised an error: the main thread asks which rank is the cause.
                -> ABORTING    Another rank has failed or is lost, and the main thread does not notice because it is
                               stuck in a collective.
                -> STOPPED     The run has finished, or this rank has an error to report.
    DIAGNOSING  The main thread will report and stop by itself.
                -> STOPPED
    ABORTING    A thread prints the error, passes the exit barrier and exits the process.
    STOPPED     Sends no more heartbeats; its silence is not a loss.
                -> EXITED      After a finished run rank 0 waits a little for the ranks that still use its
                               store. Otherwise the rank passes the exit barrier.
    EXITED      The process may end.

The exit barrier waits until every other rank has reported what it has to report, is silent, or cannot be reached:
launchers kill all processes as soon as the first one exits. A checkpoint that is being saved is always finished first.

The first rank that fails puts its error into the store, and prints it. The others raise the same error with the same
exit code and print nothing. With --devices and --elastic nothing is printed by the ranks: they write their errors to
files, and the launching process prints the one that is the cause.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reconv.core.errors import ExitCode, InterruptedRunError, RankLostError, ReconvError, RemoteRankError
from reconv.core.machine import process_state
from reconv.core.text import printable_lines
from reconv.distributed.environment import LaunchEnv
from reconv.distributed.process_group import Pace
from reconv.storage.files import system_error, write_atomic

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from reconv.distributed.liveness import Beat, Heartbeat
    from reconv.distributed.process_group import Outcome, ProcessGroup

HEARTBEAT_S = 1.0
_SHORT_TIMEOUT_S = 4 * HEARTBEAT_S  # of silence, once it is known that something has failed
_EXIT_GRACE_S = 10.0  # for the other ranks to leave after a finished run
# For the main thread to notice by itself that another rank has failed. It may be stuck in a collective with that rank,
# which keeps its connections open as long as anything refers to them, such as the traceback of an error.
_NOTICE_S = 2 * HEARTBEAT_S
_STOP_TIMEOUT_S = 2 * HEARTBEAT_S + 10
_POLL_S = 0.02
_FAILED = "failed"  # the key of the first error in the store
SAVING = "saving"  # the phase that is never interrupted
RESUME = "run the same command with --resume; torchrun --max-restarts does so by itself"
# Found by all ranks at the same step, so that none needs to report it to the others.
_ON_ALL_RANKS = (
    ExitCode.PREEMPTED,
    ExitCode.DIVERGED,
    ExitCode.INTERRUPTED,
    ExitCode.TERMINATED,
    ExitCode.FAULTY_DEVICE,
)


class RankState(Enum):
    """The states of a rank, described above."""

    RUNNING = auto()
    DIAGNOSING = auto()
    ABORTING = auto()
    STOPPED = auto()
    EXITED = auto()


_TRANSITIONS: Mapping[RankState, tuple[RankState, ...]] = {
    RankState.RUNNING: (RankState.DIAGNOSING, RankState.ABORTING, RankState.STOPPED),
    RankState.DIAGNOSING: (RankState.STOPPED,),
    RankState.ABORTING: (),  # the process exits
    RankState.STOPPED: (RankState.EXITED,),
    RankState.EXITED: (),
}


class FailureMonitor:
    """The state machine of this rank, and the threads that watch the other ranks and the store."""

    def __init__(self, launch_env: LaunchEnv, heartbeat: Heartbeat, store: Store, heartbeat_timeout_s: float) -> None:
        """`store` is kept alive until this rank has exited: rank 0 may serve it to the others."""
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.on_lost_rank: Callable[[ReconvError], None] = lambda error: None  # called before the process is aborted
        self.if_lost = RESUME  # what the user can do when a rank is lost
        self._launch_env = launch_env
        self._heartbeat = heartbeat
        self._store: Store | None = store
        self._state = RankState.RUNNING
        self._state_changed = threading.Condition()
        self._stop_beating = threading.Event()
        self._reported: RemoteRankError | None = (
            None  # by another rank; kept, because the store may disappear with that rank
        )
        self._reading = threading.Lock()
        heartbeat.send()  # at once: a rank that dies within the first second can be named too
        self._watching = threading.Thread(target=self._watch_ranks, name="reconv-heartbeat", daemon=True)
        self._watching.start()
        threading.Thread(target=self._watch_store, name="reconv-store-watch", daemon=True).start()

    @property
    def state(self) -> RankState:
        return self._state

    def set_phase(self, phase: str) -> None:
        """Set this rank's current activity, for the message should it be lost."""
        self._heartbeat.phase = phase

    def set_pace(self, pace: Pace) -> None:
        """Set the pace of this rank's steps, which its heartbeats have."""
        self._heartbeat.pace = pace

    def paces(self) -> dict[int, tuple[str, Pace]]:
        """The host and the pace of each rank that has sent one."""
        own = self._heartbeat.pace
        beats = {rank: peer.record for rank, peer in self._heartbeat.peers.items()}
        found = {r: (beat.host, Pace(*beat.pace)) for r, beat in beats.items() if beat is not None and beat.pace}
        return found if own is None else {self._launch_env.rank: (platform.node(), own), **found}

    def _enter(self, state: RankState) -> bool:
        """Change the state if the transition exists. Returns whether it does."""
        with self._state_changed:
            if state not in _TRANSITIONS[self._state]:
                return False
            self._state = state
            self._state_changed.notify_all()
            return True

    def _wait_until(self, *states: RankState, timeout_s: float) -> bool:
        with self._state_changed:
            return self._state_changed.wait_for(lambda: self._state in states, timeout_s)

    # RUNNING -> DIAGNOSING

    def diagnose(self) -> ReconvError:
        """Cause of a failed collective: the error another rank has reported, or the rank whose heartbeats stopped."""
        self._enter(RankState.DIAGNOSING)
        self._wait_for_abort()
        deadline_s = time.monotonic() + 2 * _EXIT_GRACE_S
        while time.monotonic() < deadline_s:
            found = self._find_failure(_SHORT_TIMEOUT_S)
            if found is not None:
                return found
            time.sleep(HEARTBEAT_S / 4)
        return RankLostError("the connection to another rank was closed", where=self._here(), hint=self.if_lost)

    def _wait_for_abort(self) -> None:
        """Once a thread aborts this process, the main thread must not do anything else."""
        while self._state is RankState.ABORTING:
            time.sleep(HEARTBEAT_S)

    # RUNNING -> ABORTING

    def _watch_ranks(self) -> None:
        aborting: threading.Thread | None = None
        while not self._stop_beating.wait(HEARTBEAT_S):
            self._heartbeat.send()
            found = self._find_failure(self.heartbeat_timeout_s, receive=True)
            if found is None or self._heartbeat.phase == SAVING or self._state is not RankState.RUNNING:
                continue
            if aborting is None:  # in a thread of its own: a rank that is aborting still sends heartbeats
                aborting = threading.Thread(target=self._abort, args=(found,), name="reconv-abort", daemon=True)
                aborting.start()

    def _abort(self, error: ReconvError) -> None:
        """Exit this process while its main thread is stuck in a collective, which nothing can interrupt."""
        with self._state_changed:
            grace_s = 0.0 if error.code == ExitCode.RANK_LOST else _NOTICE_S
            self._state_changed.wait_for(lambda: self._state is not RankState.RUNNING, grace_s)
        if not self._enter(RankState.ABORTING):
            return
        try:
            if not isinstance(error, RemoteRankError):
                error.is_reported = self.report(error)
            self._announce(error)
            self._stop_heartbeats()
            self._continue_stopped_processes()
            self.exit_barrier(has_failed=True)
        finally:
            os._exit(error.code)

    def _continue_stopped_processes(self) -> None:
        """Send SIGCONT to stopped processes of the same launcher: only then do they see that they should exit."""
        for peer in self._heartbeat.peers.values():
            is_here = peer.record is not None and peer.record.host == platform.node()
            if self._launch_env.failure_dir and peer.record is not None and is_here:
                with suppress(ProcessLookupError):
                    os.kill(peer.record.pid, signal.SIGCONT)

    def _watch_store(self) -> None:
        """Exit this process when the store is out of reach: any other thread may wait for its reply forever."""
        while not self._wait_until(RankState.EXITED, timeout_s=HEARTBEAT_S):
            found = self._store_lost(self.heartbeat_timeout_s)
            if found is not None and self._heartbeat.phase != SAVING and self._state is not RankState.DIAGNOSING:
                self._announce(found)
                os._exit(found.code)

    def _announce(self, error: ReconvError) -> None:
        """Print the error of a process that is aborted, or write it to a file for the launching process."""
        if self._launch_env.failure_dir:
            write_failure(Path(self._launch_env.failure_dir), self._launch_env.rank, error)
        elif not error.is_reported:
            print(f"error: {error}", file=sys.stderr, flush=True)
        self.on_lost_rank(error)

    # -> STOPPED -> EXITED

    def report(self, error: ReconvError) -> bool:
        """Put the error that ends this rank into the store. Returns whether another rank prints the same error here."""
        record = {"rank": self._launch_env.rank, "host": platform.node(), **error.to_dict()}
        try:
            first = self._heartbeat.messages.put_first(_FAILED, record)
        except RuntimeError:  # rank 0, which hosts the store, is lost
            return False
        is_same = first["what"] == error.what or error.code == ExitCode.RANK_LOST
        return first["rank"] != self._launch_env.rank and is_same and self._is_printed_here(first)

    def stop(self) -> None:
        """Take no further part: from now on this rank's silence is not a loss."""
        self._wait_for_abort()
        self._enter(RankState.STOPPED)
        self._stop_heartbeats()

    def _stop_heartbeats(self) -> None:
        self._stop_beating.set()
        self._watching.join(_STOP_TIMEOUT_S)
        self._heartbeat.send(is_stopped=True)

    def finish(self) -> None:
        """Stop after a finished run; rank 0, which hosts the store, waits a little for ranks that still need it."""
        self.stop()
        deadline_s = time.monotonic() + _EXIT_GRACE_S
        while self._launch_env.rank == 0 and time.monotonic() < deadline_s:
            if self._all_peers(lambda beat: beat.is_stopped, _SHORT_TIMEOUT_S):
                break
            time.sleep(_POLL_S)
        self._exit()

    def exit_barrier(self, has_failed: bool) -> None:
        """Wait until no other rank has anything more to report; silent ranks are not waited for.

        Where no rank has failed another one may still be saving, and may be silent for longer.
        """
        self._heartbeat.send(is_stopped=True, is_exiting=True)
        timeout_s = _SHORT_TIMEOUT_S if has_failed else self.heartbeat_timeout_s
        with suppress(KeyboardInterrupt):  # of a user who does not want to wait
            while not self._all_peers(lambda beat: beat.is_exiting, timeout_s):
                time.sleep(_POLL_S)
        self._exit()

    def _exit(self) -> None:
        self._enter(RankState.EXITED)
        self._store = None

    def _all_peers(self, is_ready: Callable[[Beat], bool], timeout_s: float) -> bool:
        """True if every other rank is ready, has been silent for `timeout_s`, or can no longer be reached."""
        if self._store_lost(_SHORT_TIMEOUT_S) is not None or not self._heartbeat.receive():
            return True
        return all(
            peer.silent_s() > timeout_s or (peer.record is not None and is_ready(peer.record))
            for peer in self._heartbeat.peers.values()
        )

    # What has failed

    def _find_failure(self, timeout_s: float, receive: bool = False) -> ReconvError | None:
        """The error that another rank has reported, or the rank that has been silent for `timeout_s`."""
        with self._reading:
            if receive:
                self._heartbeat.receive()
            return self._reported_error() or self._store_lost(timeout_s) or self._silent_rank(timeout_s)

    def _reported_error(self) -> RemoteRankError | None:
        if self._reported is not None:
            return self._reported
        try:
            record = self._heartbeat.messages.get(_FAILED)
        except RuntimeError:
            return None
        if record is None or record["rank"] == self._launch_env.rank:
            return None
        where = f"rank {record['rank']} on {record['host']}" + (f", {record['where']}" if record["where"] else "")
        is_reported = self._is_printed_here(record)
        self._reported = RemoteRankError.from_dict({**record, "where": where, "is_reported": is_reported})
        return self._reported

    def _is_printed_here(self, record: Mapping[str, Any]) -> bool:
        """True if the user of this rank sees what the other rank prints: rank 0 may run on another machine."""
        return self._launch_env.rank != 0 or record["host"] == platform.node()

    def _silent_rank(self, timeout_s: float) -> RankLostError | None:
        running = {
            r: peer for r, peer in self._heartbeat.peers.items() if peer.record is None or not peer.record.is_stopped
        }
        if not running:
            return None
        rank, peer = min(running.items(), key=lambda item: item[1].seen_s)
        if peer.silent_s() <= timeout_s:
            return None
        beat = peer.record
        return RankLostError(
            f"rank {rank} is lost: no heartbeat for {peer.silent_s():.0f} s",
            where="no heartbeat was ever received" if beat is None else f"{beat.host}, process {beat.pid}",
            why=_with_last_seen(_process_state(beat), beat),
            hint=self.if_lost,
        )

    def _store_lost(self, timeout_s: float) -> RankLostError | None:
        silent_s = self._heartbeat.store_silent_s()
        if silent_s <= timeout_s:
            return None
        rank0 = self._heartbeat.peers[0].record if 0 in self._heartbeat.peers else None
        return RankLostError(
            f"rank 0 cannot be reached: its store has not replied for {silent_s:.0f} s",
            where=f"{self._launch_env.master_addr}:{self._launch_env.master_port}, seen from {self._here()}",
            why=_with_last_seen("its machine is down, or the network connection is broken", rank0),
            hint=self.if_lost,
        )

    def _here(self) -> str:
        return f"rank {self._launch_env.rank} on {platform.node()}"


def _with_last_seen(state: str, beat: Beat | None) -> str:
    """The state of a rank, and below it what its last heartbeat says."""
    if beat is None:
        return state
    seen = f"{state}; last phase: {beat.phase}; last stack of its main thread, innermost last:"
    return printable_lines(seen, *(f"           {frame}" for frame in beat.stack))


def _process_state(beat: Beat | None) -> str:
    """Description of a process's state, if it runs on this machine."""
    if beat is None or beat.host != platform.node():
        return "the process was killed, is stopped, or its machine is disconnected"
    return process_state(beat.pid)


@contextmanager
def report_failures(process_group: ProcessGroup) -> Iterator[None]:
    """Leave the process group at the end; report an error to the other ranks, or raise the one they have reported.

    An error that several ranks have in common is printed by one of them.
    """
    outcome: Outcome = "failed"
    try:
        yield
        outcome = "finished"
    except RemoteRankError:
        raise
    except ReconvError as error:
        if error.code in _ON_ALL_RANKS:
            outcome, error.is_reported = "stopped", not process_group.is_rank0
        else:
            error.is_reported = process_group.report_failure(error)
        raise
    except Exception as error:
        cause = process_group.diagnose(error)
        if cause is not None:
            raise cause from error
        if isinstance(error, OSError) and error.errno is not None:
            refused = system_error(error)
            refused.is_reported = process_group.report_failure(refused)
            raise refused from error
        own = ReconvError(f"unexpected {type(error).__name__}: {error}")
        if process_group.report_failure(own):
            raise RemoteRankError.of(own, is_reported=True) from error
        raise
    except KeyboardInterrupt:
        process_group.report_failure(InterruptedRunError())
        raise
    finally:
        process_group.close(outcome)


# With --devices: errors as files for the launching process. They are complete before a process exits.


def write_failure(folder: Path, rank: int, error: ReconvError) -> None:
    """Write the error that ends this rank, unless it has already written one."""
    file = folder / f"{rank}.json"
    if not file.exists():
        write_atomic(file, json.dumps(error.to_dict()))


def read_failures(folder: Path) -> list[RemoteRankError]:
    """The errors that the ranks have written, errors not already reported by another rank first."""
    errors = [RemoteRankError.from_dict(json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))]
    return sorted(errors, key=lambda error: error.is_reported)


def choose_failure(errors: Sequence[RemoteRankError], rank: int, exit_code: int, pid: int, message: str) -> ReconvError:
    """The error to print when `rank` was the first to exit: one that a rank has reported, else that `rank` is lost."""
    causes = [error for error in errors if error.code != ExitCode.RANK_LOST]
    was_killed = exit_code < 0
    if causes or (errors and not was_killed):
        return RemoteRankError.of([*causes, *errors][0])
    what = f"was killed by {signal.Signals(-exit_code).name}" if was_killed else f"exited with code {exit_code}"
    known = (error.why for error in errors if error.what.startswith(f"rank {rank} "))
    return RankLostError(
        f"rank {rank} {what}",
        where=f"process {pid}",
        why=next(known, "" if was_killed else message),
        hint="see logs/ in the run directory; then run the same command with --resume",
    )
