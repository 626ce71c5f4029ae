"""`reconv push`: upload a trained classifier to the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from reconv.cli.options import (
    Command,
    check_run,
    complete_runs,
    emit_json,
    json_option,
    print_line,
    print_note,
    trust_option,
    trust_or_ask,
)


@click.command(cls=Command)
@click.argument("run", type=click.Path(), shell_complete=complete_runs)
@click.argument("repo", metavar="hf://OWNER/MODEL")
@click.option("--private", is_flag=True, help="Let only you see the repository, if it is new.")
@click.option("--force", is_flag=True, help="Replace the model that the repository has.")
@click.option("--best", is_flag=True, help="Push the best checkpoint instead of the newest.")
@click.option("--raw", "weights", flag_value="raw", help="Push the weights as trained.")
@click.option("--ema", "weights", flag_value="ema", help="Push the EMA weights (the default if there are any).")
@click.option("--averaged", "weights", flag_value="averaged", help="Push the average of the run's checkpoints.")
@trust_option
@json_option
def push(run: str, repo: str, weights: str | None, trust_code: bool, json_file: str | None, **options: Any) -> None:
    """Push RUN to the Hugging Face Hub: weights, config.json in timm's format, and a model card.

    The token is that of HF_TOKEN, or of `hf auth login`; HF_ENDPOINT names another hub. Images and recipes of data are
    not uploaded.

    \b
    Examples:
      reconv push runs/finetune/1 hf://me/flowers
      reconv push runs/finetune/1 hf://me/flowers --best --private
      reconv train finetune --data flowers/ --init hf://me/flowers
    """
    check_run(run)
    from reconv.exporters.hub import push as push_run

    result = push_run(
        run, repo, weights=weights or "auto", trust_code=trust_or_ask(trust_code), log=print_note, **options
    )
    if json_file is not None:
        emit_json(asdict(result), json_file)
        return
    print_line(f"{result.page}: {', '.join(f'{name} {size:,} bytes' for name, size in result.files.items())}")
    print_line(f"use it: reconv train finetune --data DIR --init {result.repo}")
