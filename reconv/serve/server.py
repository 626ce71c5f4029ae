"""`reconv serve`: opens the port and serves until a signal, in this process or in several."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from reconv.core.errors import ExitCode, ResourceError
from reconv.inference.backends.base import LogFunction
from reconv.serve.http.access import read_tokens
from reconv.serve.http_server import BACKLOG, HttpServer, ServeSettings, end_process
from reconv.serve.limits import Limits
from reconv.serve.model_loader import LoadSettings, with_consents
from reconv.serve.models import BatchSettings, name_models
from reconv.serve.processes import serve_in_processes

__all__ = ["BatchSettings", "Limits", "LoadSettings", "ServeSettings", "serve"]


def serve(settings: ServeSettings, log: LogFunction) -> NoReturn:
    """Serve until SIGTERM or SIGINT, then end the process; raises the error of a model that cannot be loaded."""
    tokens = () if settings.token_file is None else read_tokens(settings.token_file)
    models = name_models(settings.runs)  # raises an error here rather than in each process
    listener = open_port(settings.host, settings.port)
    log(f"listening on http://{_url_host(settings.host)}:{listener.getsockname()[1]}")
    log = _without_errors(log)
    if not tokens and not settings.is_local:
        log("warning: anyone who can reach this address can use the models; --token-file limits that")
    if settings.num_processes == 1:
        HttpServer(settings, tokens, listener, log).run()
    else:
        settings = replace(settings, load=with_consents(settings.load, list(models.values())))
        serve_in_processes(settings, tokens, listener, log)
    log("stopped")
    end_process(ExitCode.OK)


def _without_errors(log: LogFunction) -> LogFunction:
    """A server goes on when its log can no longer be written: the reader has gone, or the disk is full."""

    def write(text: str) -> None:
        with suppress(OSError):
            log(text)

    return write


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def open_port(host: str, port: int) -> socket.socket:
    """A socket that listens; `port` 0 is any free one."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ResourceError(
            f"cannot listen on {host} port {port}",
            why=str(error.strerror),
            hint="choose another one: --port 8001 (0: any free one)",
        ) from error
    return listener
