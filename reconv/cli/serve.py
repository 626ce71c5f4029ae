"""`reconv serve`: an HTTP server for trained models, with a page to try them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reconv.cli.options import Command, backend_options, model_options, print_note, trust_or_ask
from reconv.errors import UsageError


@click.command(cls=Command)
@click.argument("runs", nargs=-1, required=True, metavar="[NAME=]RUN...")
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
@click.option("--follow", is_flag=True, help="Take over each new checkpoint of a run.")
@click.option(
    "--max-batch",
    metavar="N",
    type=click.IntRange(1, 1024),
    default=16,
    show_default=True,
    help="Images that run on the device together.",
)
@click.option(
    "--max-wait-ms",
    metavar="X",
    type=click.FloatRange(0, 1000),
    default=2,
    show_default=True,
    help="How long a batch waits for images that have arrived and are being decoded.",
)
@click.option(
    "--max-queue",
    metavar="N",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Images of a model that may be waiting; beyond, the answer is 503 with Retry-After.",
)
@model_options
@backend_options
def serve(
    runs: tuple[str, ...],
    host: str,
    port: int,
    token_file: Path | None,
    follow: bool,
    max_batch: int,
    max_wait_ms: float,
    max_queue: int,
    device: str,
    weights: str | None,
    best: bool,
    recipe: str | None,
    trust_code: bool,
    backend: str,
    precision: str,
    decoder: str,
) -> None:
    """Serve the predictions of models over HTTP, and a page to try them at /.

    \b
    Examples:
      reconv serve runs/quickstart/1
      curl --data-binary @digit.png -H 'Content-Type: image/png' http://127.0.0.1:8000/predict
    """
    server = _import_server()
    settings = server.ServeSettings(
        runs=runs,
        host=host,
        port=port,
        devices=tuple(device.split(",")),
        token_file=token_file,
        batch=server.BatchSettings(max_batch, max_wait_ms / 1000, max_queue),
        follow=follow,
        load_options={
            "weights": weights or "auto",
            "best": best,
            "recipe": recipe,
            "backend": backend,
            "precision": precision,
            "decoder": decoder,
        },
        trust_code=trust_or_ask(trust_code),
    )
    server.serve(settings, print_note)


def _import_server() -> Any:
    try:
        from reconv.serve import server
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "python_multipart", "prometheus_client"):
            raise
        raise UsageError(
            f"the server needs {error.name}, which is not installed", then="pip install 'reconv[serve]'"
        ) from error
    return server
