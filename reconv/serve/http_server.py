"""One process that serves requests: its models, queue and event loop, on a socket that already listens."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import uvicorn

from reconv.core.errors import ExitCode, ResourceError
from reconv.core.machine import Machine, usable_cores
from reconv.device.base import device_kind
from reconv.inference.backends.base import LogFunction
from reconv.serve.http.access import LOOPBACK, SECURITY_HEADERS, Access
from reconv.serve.http.app import build_app
from reconv.serve.http.connections import limited_protocol
from reconv.serve.limits import Limits
from reconv.serve.metrics import ServerMetrics
from reconv.serve.model_loader import LoadSettings, ModelLoader
from reconv.serve.models import name_models
from reconv.serve.serving import Serving
from reconv.serve.shared_listener import ConnectionCounts, SharedListener

BACKLOG = 2048  # connections that wait to be accepted
_STOP_LOADING_S = 1.0
# The event loop gives up the GIL at every call of the system, and a thread that decodes keeps it for as long: 5 ms by
# default, many times in each request.
_SWITCH_S = 0.0005


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of `reconv serve`."""

    runs: Sequence[str]
    load: LoadSettings
    limits: Limits
    host: str = LOOPBACK[0]
    port: int = 8000
    token_file: Path | None = None
    follow: bool = False
    num_readers: int | None = None  # of each process; None: its share of the cores
    num_processes: int = 1

    @property
    def is_local(self) -> bool:
        return self.host in LOOPBACK


@dataclass(frozen=True, slots=True)
class Shared:
    """Resources that one of several server processes shares with the others."""

    metrics_folder: Path
    counts: ConnectionCounts
    process: int  # counted from 0


class HttpServer:
    """The server of one process, alone or one of several."""

    def __init__(
        self,
        settings: ServeSettings,
        tokens: tuple[bytes, ...],
        listener: socket.socket,
        log: LogFunction,
        shared: Shared | None = None,
    ) -> None:
        cores = max(1, usable_cores(Machine()) // settings.num_processes)
        threads = network_threads(settings.load.devices, settings.num_processes, cores)
        if threads is not None:
            torch.set_num_threads(threads)
        self._listener = listener
        self._metrics = ServerMetrics(None if shared is None else shared.metrics_folder)
        self._models = name_models(settings.runs)
        self._serving = Serving(self._models, settings.limits, self._metrics, settings.num_readers or cores)
        access = Access(tokens, LOOPBACK if settings.is_local else ())
        self._uvicorn = _DrainingServer(self._serving, access, listener, shared)
        models = list(self._models.values())
        self._loader = ModelLoader(
            models, settings.load, self._metrics, log, follow=settings.follow, on_error=self._uvicorn.stop
        )
        self._is_broken = False

    def load(self) -> bool:
        """Load the models before `run`; False: a run has no checkpoint yet and is waited for (`--follow`)."""
        self._loader.start()
        self._loader.wait()
        if self._loader.error is not None:
            raise self._loader.error
        return self._serving.is_ready

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`; raises the error of a model that cannot be loaded."""
        # uvicorn raises the signal again after it has ended, to end the process by it; the exit code must be 0.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: self.stop())
        sys.setswitchinterval(_SWITCH_S)
        gc.collect()
        gc.freeze()  # else JSON of many lists makes the collector look at a million objects of packages, for 0.2 s
        self._loader.start()
        self._uvicorn.run(sockets=[self._listener])
        self._loader.stop(_STOP_LOADING_S)
        self._serving.readers.close()
        self._serving.large.close()
        if self._loader.error is not None:
            raise self._loader.error
        if self._is_broken:
            raise ResourceError("a device failed several times in a row", hint="look for its errors in the log above")

    def stop(self) -> None:
        """Finish what has begun, then end `run`; from any thread."""
        self._uvicorn.stop()

    def stop_if_broken(self) -> None:
        """Stop if a device is lost, so that a supervisor starts another process."""
        if not self._serving.is_healthy and not self._is_broken:
            self._is_broken = True
            self.stop()

    def sample_metrics(self) -> None:
        """Update the metrics that are not counted as things happen."""
        self._serving.sample_metrics()


def end_process(code: ExitCode) -> NoReturn:
    """End this process now.

    A thread that is still in torch would abort an orderly end: it loads a model, or runs a batch of a client that has
    gone.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def network_threads(devices: Sequence[str], num_processes: int, cores: int) -> int | None:
    """The threads of a network in one of several processes; None: torch's own choice.

    On a GPU torch has next to nothing to do on the CPU, and its threads would take the cores from those that decode.
    Several networks on the CPU share its cores (`--device cpu,cpu`).
    """
    if "OMP_NUM_THREADS" in os.environ:
        return None
    if any(device_kind(device) == "cuda" for device in devices):
        return 1
    return max(1, cores // len(devices)) if num_processes > 1 or len(devices) > 1 else None


class _DrainingServer(uvicorn.Server):
    """A server that is not ready any more as soon as it is asked to stop."""

    def __init__(self, serving: Serving, access: Access, listener: socket.socket, shared: Shared | None) -> None:
        self._serving = serving
        self._shared = None if shared is None else SharedListener(listener, shared.counts, shared.process)
        http = limited_protocol(serving.limits, *([] if self._shared is None else [self._shared.on_count]))
        super().__init__(_uvicorn_config(serving, access, http))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._shared is None:
            await super().startup(sockets)
            return
        await super().startup([])
        self._shared.start(self._make_connection)
        self.servers: list[Any] = [self._shared]

    def _make_connection(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        connection: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return connection

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._serving.is_draining = True
        super().handle_exit(sig, frame)

    def stop(self) -> None:
        """Stop as after a signal, from any thread."""
        self._serving.is_draining = True
        self.should_exit = True


def _uvicorn_config(serving: Serving, access: Access, http: type[asyncio.Protocol]) -> uvicorn.Config:
    limits = serving.limits
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of each request that is not HTTP
    return uvicorn.Config(
        build_app(serving, access),
        http=http,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        headers=list(SECURITY_HEADERS),
        timeout_keep_alive=round(limits.keep_alive_s),
        timeout_graceful_shutdown=round(limits.drain_timeout_s),
        h11_max_incomplete_event_size=16 << 10,
        backlog=BACKLOG,
    )
