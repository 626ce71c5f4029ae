"""`reconv serve`: opens the port, loads the models, answers until a signal, and finishes what has begun."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from reconv.api import Predictor
from reconv.custom_code import TrustCode
from reconv.errors import ResourceError, UsageError
from reconv.machine import Machine, cores_per_process
from reconv.printable import printable
from reconv.serve.access import LOOPBACK, SECURITY_HEADERS, Access, read_tokens
from reconv.serve.app import build_app
from reconv.serve.connections import limited_protocol
from reconv.serve.limits import Limits
from reconv.serve.metrics import ServerMetrics
from reconv.serve.models import BatchSettings, LoadedModel, ServedModel
from reconv.serve.serving import Serving

LogFunction = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What `reconv serve` was asked for."""

    runs: Sequence[str]
    host: str = LOOPBACK[0]
    port: int = 8000
    devices: Sequence[str] = ("auto",)
    token_file: Path | None = None
    batch: BatchSettings = field(default_factory=BatchSettings)
    limits: Limits = field(default_factory=Limits)
    follow: bool = False
    load_options: dict[str, Any] = field(default_factory=dict)  # of `Predictor.load`
    trust_code: TrustCode = False


def serve(settings: ServeSettings, log: LogFunction) -> None:
    """Serve until SIGTERM or SIGINT; raises the error of a model that cannot be loaded."""
    tokens = () if settings.token_file is None else read_tokens(settings.token_file)
    access = Access(tokens, LOOPBACK if settings.host in LOOPBACK else ())
    metrics = ServerMetrics()
    models = name_models(settings.runs)
    num_readers = max(2, cores_per_process(Machine(), 1))
    serving = Serving(models, settings.limits, metrics, num_readers)
    listener = open_port(settings.host, settings.port)
    server = uvicorn.Server(_uvicorn_config(serving, access, settings.limits))
    loader = _Loader(serving, settings, log, server)
    url_host = f"[{settings.host}]" if ":" in settings.host else settings.host
    log(f"listening on http://{url_host}:{listener.getsockname()[1]}")
    if not tokens and settings.host not in LOOPBACK:
        log("warning: anyone who can reach this address can use the models; --token-file limits that")
    # uvicorn raises the signal again after it has ended, to end the process by it; the exit code must be 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)
    thread = threading.Thread(target=loader.run, name="reconv-load", daemon=True)
    thread.start()
    server.run(sockets=[listener])
    if loader.error is not None:
        raise loader.error
    log("stopped")


def _uvicorn_config(serving: Serving, access: Access, limits: Limits) -> uvicorn.Config:
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
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        raise ResourceError(
            f"cannot listen on {host} port {port}",
            why=str(error.strerror),
            then="choose another one: --port 8001 (0: any free one)",
        ) from error
    return listener


class _Loader:
    """Loads the models beside the server, which answers that it is not ready until then."""

    def __init__(self, serving: Serving, settings: ServeSettings, log: LogFunction, server: uvicorn.Server) -> None:
        self._serving, self._settings, self._log, self._server = serving, settings, log, server
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for model in self._serving.models.values():
                model.replace(self._load(model))
                assert model.current is not None
                predictor = model.current.predictor
                step = "" if predictor.step is None else f", step {predictor.step:,}"
                devices = ", ".join(replica.device.kind for replica in model.current.predictors)
                self._log(printable(f"ready: {model.name} ({predictor.weights} weights{step}) on {devices}"))
        except BaseException as error:
            self.error = error
            self._server.should_exit = True

    def _load(self, model: ServedModel) -> LoadedModel:
        settings = self._settings
        predictors = [
            Predictor.load(
                model.run, device=device, trust_code=settings.trust_code, log=self._log, **settings.load_options
            )
            for device in settings.devices
        ]
        return LoadedModel(predictors, settings.batch, self._serving.metrics.on_batch(model.name))
