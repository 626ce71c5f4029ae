"""`reconv serve`: opens the port, loads the models, answers until a signal, and finishes what has begun."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from reconv.errors import ResourceError, UsageError
from reconv.machine import Machine, cores_per_process
from reconv.serve.access import LOOPBACK, SECURITY_HEADERS, Access, read_tokens
from reconv.serve.app import build_app
from reconv.serve.connections import limited_protocol
from reconv.serve.limits import Limits
from reconv.serve.metrics import ServerMetrics
from reconv.serve.model_loader import LoadSettings, ModelLoader
from reconv.serve.models import BatchSettings, ServedModel
from reconv.serve.serving import Serving

__all__ = ["BatchSettings", "Limits", "LoadSettings", "ServeSettings", "serve"]
LogFunction = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What `reconv serve` was asked for."""

    runs: Sequence[str]
    load: LoadSettings
    limits: Limits
    host: str = LOOPBACK[0]
    port: int = 8000
    token_file: Path | None = None
    follow: bool = False
    num_readers: int | None = None  # None: one per core


def serve(settings: ServeSettings, log: LogFunction) -> None:
    """Serve until SIGTERM or SIGINT; raises the error of a model that cannot be loaded."""
    tokens = () if settings.token_file is None else read_tokens(settings.token_file)
    is_local = settings.host in LOOPBACK
    metrics = ServerMetrics()
    models = name_models(settings.runs)
    serving = Serving(models, settings.limits, metrics, settings.num_readers or cores_per_process(Machine(), 1))
    listener = open_port(settings.host, settings.port)
    server = _DrainingServer(_uvicorn_config(serving, Access(tokens, LOOPBACK if is_local else ())), serving)
    log(f"listening on http://{_url_host(settings.host)}:{listener.getsockname()[1]}")
    if not tokens and not is_local:
        log("warning: anyone who can reach this address can use the models; --token-file limits that")
    loader = ModelLoader(
        list(models.values()), settings.load, metrics, log, follow=settings.follow, on_error=server.stop
    )
    # uvicorn raises the signal again after it has ended, to end the process by it; the exit code must be 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)
    loader.start()
    server.run(sockets=[listener])
    loader.stop()
    serving.readers.close()
    if loader.error is not None:
        raise loader.error
    log("stopped")


class _DrainingServer(uvicorn.Server):
    """A server that is not ready any more as soon as it is asked to stop."""

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
        super().__init__(config)
        self._serving = serving

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._serving.is_draining = True
        super().handle_exit(sig, frame)

    def stop(self) -> None:
        """Stop as after a signal, from any thread."""
        self._serving.is_draining = True
        self.should_exit = True


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _uvicorn_config(serving: Serving, access: Access) -> uvicorn.Config:
    limits = serving.limits
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of each request that is not HTTP
    return uvicorn.Config(
        build_app(serving, access),
        http=limited_protocol(limits),
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
    )


def name_models(runs: Sequence[str]) -> dict[str, ServedModel]:
    """The models by their names: NAME=RUN, or that of the run's recipe."""
    models: dict[str, ServedModel] = {}
    for run in runs:
        name, equals, path = run.partition("=")
        if not equals:
            name, path = default_name(run), run
        if name in models:
            then = f"name them: reconv serve first={models[name].run} second={path}"
            raise UsageError(f"two models are named {name!r}", then=then)
        if not name or "/" in name:
            raise UsageError(f"{name!r} is not a name for a model", then="use NAME=RUN, without slashes in NAME")
        models[name] = ServedModel(name, path)
    return models


def default_name(run: str) -> str:
    """A name for a run: `quickstart` for runs/quickstart/1, the stem of a weights file, or as it was given."""
    path = Path(run)
    if path.parent.name == "checkpoints":
        path = path.parent.parent
    name = path.parent.name if path.name.isdecimal() and path.parent.name else path.name
    return (name.removesuffix(".safetensors") or "model").replace(":", "-")


def open_port(host: str, port: int) -> socket.socket:
    """A socket that listens; `port` 0 is any free one."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ResourceError(
            f"cannot listen on {host} port {port}",
            why=str(error.strerror),
            then="choose another one: --port 8001 (0: any free one)",
        ) from error
    return listener
