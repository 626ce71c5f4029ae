"""`reconv serve`: an HTTP server for trained models, with a page to try them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reconv.cli.options import (
    Command,
    CommandFunction,
    NumberRange,
    backend_options,
    check_run,
    complete_runs,
    model_options,
    print_note,
    trust_or_ask,
)
from reconv.core.errors import UsageError

if TYPE_CHECKING:
    from reconv.inference.backends.base import BackendName, Precision
    from reconv.inference.image_reader import DecoderName

_EXTRA = ("starlette", "uvicorn", "python_multipart", "prometheus_client")


def limit_options(command: CommandFunction) -> CommandFunction:
    """The options that bound what clients may use."""
    for name, metavar, kind, default, text in (
        ("--drain-s", "X", NumberRange(0), 30, "Seconds to finish what has begun after SIGTERM."),
        ("--timeout-s", "X", NumberRange(0.001), 30, "Seconds for a body to arrive, and for its prediction."),
        ("--max-connections", "N", click.IntRange(1), 512, "Open connections."),
        ("--max-images", "N", click.IntRange(1), 64, "Images of one request."),
        ("--max-decode-mb", "X", NumberRange(1), 1024, "Megabytes of memory for images that are being decoded."),
        (
            "--max-pixels",
            "X",
            NumberRange(0.001, 89.4),
            50,
            "Megapixels of one image; of a request 4 times that.",
        ),
        ("--max-json-mb", "X", NumberRange(0.001), 8, "Megabytes of the JSON of one request."),
        ("--max-body-mb", "X", NumberRange(0.001), 32, "Megabytes of one request."),
        ("--max-queue", "N", click.IntRange(1), 256, "Images of a model that may wait; beyond: 503 and Retry-After."),
        (
            "--max-wait-ms",
            "X",
            NumberRange(0, 1000),
            2,
            "How long a batch waits for images that have arrived and are being decoded.",
        ),
        ("--max-batch", "N", click.IntRange(1, 1024), 16, "Images that run on a device together."),
    ):
        option = click.option(name, metavar=metavar, type=kind, default=default, show_default=True, help=text)
        command = option(command)
    return command


@click.command(cls=Command)
@click.argument("runs", nargs=-1, required=True, metavar="[NAME=]RUN...", shell_complete=complete_runs)
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="The port; 0: any free one."
)
@click.option(
    "--token-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Require a bearer token: one of the lines of FILE.",
)
@click.option(
    "--processes",
    metavar="N",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Server processes on the port, each with its own copy of the models; limits are those of each.",
)
@click.option("--follow", is_flag=True, help="Take over each new checkpoint of the runs, without a dropped request.")
@limit_options
@click.option(
    "--read-threads",
    metavar="N",
    type=click.IntRange(1),
    help="Threads that decode images, of each process [default: its share of the cores].",
)
@model_options
@backend_options
def serve(
    runs: tuple[str, ...],
    host: str,
    port: int,
    token_file: Path | None,
    processes: int,
    follow: bool,
    max_batch: int,
    max_wait_ms: float,
    max_queue: int,
    max_body_mb: float,
    max_json_mb: float,
    max_pixels: float,
    max_decode_mb: float,
    max_images: int,
    max_connections: int,
    timeout_s: float,
    drain_s: float,
    read_threads: int | None,
    device: str,
    weights: str | None,
    best: bool,
    recipe: str | None,
    trust_code: bool,
    backend: BackendName,
    precision: Precision,
    calibration: str | None,
    decoder: DecoderName,
) -> None:
    """Serve the predictions of models over HTTP, and a page to try them at /.

    RUN is a run directory, a checkpoint directory, a weights file or published weights. Several are served by their
    names: NAME=RUN, else that of the run's folder. --device cuda:0,cuda:1 runs every model on several devices. The
    server listens on this machine only, unless --host says otherwise; API: /docs.

    \b
    Examples:
      reconv serve runs/quickstart/1
      curl -F image=@digit.png http://127.0.0.1:8000/predict
      reconv serve digits=runs/quickstart/1 flowers=runs/finetune/2 --port 9000
      reconv serve runs/resnet50/1 --processes 8 --max-batch 64
      reconv serve runs/resnet50/1 --follow --host 0.0.0.0 --token-file token.txt
    """
    for run in runs:
        check_run(run if "=" not in run else run.partition("=")[2])
    server = _import_server()
    limits = server.Limits(
        max_body_bytes=round(max_body_mb * 1e6),
        max_json_bytes=round(max_json_mb * 1e6),
        max_pixels=round(max_pixels * 1e6),
        max_decoding_bytes=round(max_decode_mb * 1e6),
        max_images=max_images,
        max_queue=max_queue,
        max_connections=max_connections,
        header_timeout_s=min(timeout_s, server.Limits().header_timeout_s),
        body_timeout_s=timeout_s,
        request_timeout_s=timeout_s,
        drain_timeout_s=drain_s,
    )
    load = server.LoadSettings(
        devices=tuple(device.split(",")),
        best=best,
        trust_code=trust_code if processes > 1 else trust_or_ask(trust_code),  # they have no terminal
        batch=server.BatchSettings(max_batch, max_wait_ms / 1000, max_queue),
        options={
            "weights": weights or "auto",
            "recipe": recipe,
            "backend": backend,
            "precision": precision,
            "calibration": calibration,
            "decoder": decoder,
        },
    )
    settings = server.ServeSettings(runs, load, limits, host, port, token_file, follow, read_threads, processes)
    server.serve(settings, print_note)


def _import_server() -> Any:
    try:
        from reconv.serve import server
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        raise UsageError(
            f"the server needs {error.name}, which is not installed", hint="pip install 'reconv[serve]'"
        ) from error
    return server
