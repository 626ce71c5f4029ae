"""Exit codes and messages of everything that can go wrong on the command line."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import click
import pytest
import torch

import reconv.cli as cli
from reconv.cli.options import Command, bind_bare_json
from reconv.core.errors import DataError, ExitCode, ReconvError


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[str, BaseException]:
    """A command `fail` that raises what the test puts under "error"."""
    box: dict[str, BaseException] = {}

    @click.command(cls=Command)
    def fail() -> None:
        raise box["error"]

    monkeypatch.setitem(cli.reconv.commands, "fail", fail)
    return box


def _code(args: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    assert isinstance(end.value.code, int)
    return end.value.code


def test_every_reconv_error_has_its_exit_code(failing: dict[str, BaseException]) -> None:
    kinds = [kind for kind in ReconvError.__subclasses__() if kind.__module__ == ReconvError.__module__]
    assert len(kinds) >= 7
    for kind in kinds:
        failing["error"] = kind("it broke")
        assert _code(["fail"]) == kind.code


def test_train_without_a_recipe_prints_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert _code(["train"]) == ExitCode.USAGE
    assert sum(line.startswith("  reconv train ") for line in capsys.readouterr().err.splitlines()) == 3


@pytest.mark.parametrize("name", ["photos", "photos/"])
def test_a_folder_in_place_of_the_recipe_is_the_data_of_finetune(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("photos").mkdir()
    assert _code(["train", name]) == ExitCode.DATA
    assert f"training finetune --data {name}" in capsys.readouterr().err
    assert _code(["train", "photo/"]) == ExitCode.DATA
    assert "did you mean" in capsys.readouterr().err
    assert _code(["train", name, "--data", "images"]) == ExitCode.USAGE
    (Path("photos") / "recipe.yaml").touch()
    assert _code(["train", name]) == ExitCode.USAGE
    assert f"reconv resume {name}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["runs", "list", "models", "compare", "info", "version", "review"])
def test_commands_of_other_programs_are_answered_by_ours(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _code([name]) == ExitCode.USAGE
    message = capsys.readouterr().err
    named = message.split("`reconv ")[1].split("`")[0].split()
    assert named[0] in cli.reconv.commands or named == ["--version"], message


@pytest.mark.parametrize("args", [("predict", "nosuch", "a.jpg"), ("serve", "nosuch"), ("serve", "a=nosuch")])
def test_a_run_that_does_not_exist_is_found_before_torch_is_imported(args: tuple[str, ...]) -> None:
    script = "import sys; from reconv.cli import _run; print(_run(sys.argv[1:]), 'torch' in sys.modules)"
    Path("runs/quickstart/1/checkpoints").mkdir(parents=True)
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(int(ExitCode.CHECKPOINT)), "False"], done
    assert "use one of runs/quickstart/1" in done.stderr


@pytest.mark.parametrize("name", ["quickstart/1", "runs/quikstart/1", "quickstrat/1"])
def test_the_run_that_was_meant_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/quickstart/1/checkpoints").mkdir(parents=True)
    assert _code(["predict", name, "a.jpg"]) == ExitCode.CHECKPOINT
    assert "did you mean runs/quickstart/1?" in capsys.readouterr().err


def test_a_reconv_error_is_printed_to_stderr_without_a_traceback(
    failing: dict[str, BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing["error"] = DataError("no images", where="/data/train", why="the folder is empty", hint="reconv data get")
    assert _code(["fail"]) == ExitCode.DATA
    out, err = capsys.readouterr()
    assert out == ""
    assert all(part in err for part in ("no images", "/data/train", "the folder is empty", "reconv data get"))
    assert "Traceback" not in err


def test_debug_adds_the_traceback_and_keeps_the_code(
    failing: dict[str, BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing["error"] = DataError("no images")
    assert _code(["fail", "--debug"]) == ExitCode.DATA
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_unexpected_error_exits_with_1_and_names_debug(
    failing: dict[str, BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing["error"] = KeyError("weights")
    assert _code(["fail"]) == 1
    err = capsys.readouterr().err
    assert "KeyError" in err
    assert "--debug" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ExitCode.RESOURCES),
        (MemoryError(), ExitCode.RESOURCES),
        (torch.OutOfMemoryError("CUDA out of memory"), ExitCode.RESOURCES),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ExitCode.RESOURCES),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), ExitCode.RESOURCES),
        (OSError(errno.EIO, "Input/output error"), ExitCode.RESOURCES),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
    ],
)
def test_system_errors_have_exit_codes(failing: dict[str, BaseException], error: BaseException, code: ExitCode) -> None:
    failing["error"] = error
    assert _code(["fail"]) == code


@pytest.mark.parametrize(
    "args",
    [
        ["trian", "quickstart"],
        ["train"],
        ["train", "quickstart", "--no-such-option"],
        ["train", "quickstart", "--epochs", "0"],
        ["train", "quickstart", "--devices", "0"],
        ["train", "quickstart", "--nic", "nowhere0"],
        ["train", "quickstart", "--batch-size", "64", "--batch-per-device", "32"],
        ["train", "quickstart", "--set", "optimizer.momentum"],
        ["train", "quickstart", "--set", "optimizer.momentun=0.9"],
        ["train", "no-such-recipe"],
        ["recipes", "show", "quikstart"],
        ["data", "get", "imagenet"],
        ["predict", "runs/quickstart/1"],
        ["completion", "tcsh"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_without_a_traceback(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert _code(args) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert err
    assert "Traceback" not in err


def test_a_misspelled_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for typed, meant in (("trian", "train"), ("docter", "doctor"), ("reprot", "report")):
        assert _code([typed]) == ExitCode.USAGE
        assert f"'{meant}'" in capsys.readouterr().err


def test_a_folder_that_is_no_run_exits_with_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.png").touch()
    for args in (["report", str(tmp_path)], ["eval", str(tmp_path)], ["predict", str(tmp_path), "a.png"]):
        assert _code(args) == ExitCode.CHECKPOINT
        assert str(tmp_path) in capsys.readouterr().err


def test_a_recipe_in_place_of_a_run_is_called_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "my.yaml"
    recipe.write_text("extends: quickstart\n")
    (tmp_path / "a.png").touch()
    for args in (["eval", str(recipe)], ["predict", str(recipe), str(tmp_path / "a.png")]):
        assert _code(args) == ExitCode.USAGE
        printed = capsys.readouterr().err
        assert "is a recipe, not a run" in printed and f"reconv train {recipe}" in printed


def test_a_bare_json_option_does_not_take_the_next_argument() -> None:
    assert bind_bare_json(["--json", "quickstart"]) == ["--json=-", "quickstart"]
    assert bind_bare_json(["quickstart", "--json"]) == ["quickstart", "--json=-"]
    assert bind_bare_json(["--json", "out.json", "quickstart"]) == ["--json", "out.json", "quickstart"]
    assert bind_bare_json(["--json=out.txt"]) == ["--json=out.txt"]


def test_a_closed_stdout_causes_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "reconv", "recipes"], stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(write_end)
    assert done.stderr == ""
    assert done.returncode == ExitCode.PIPE_CLOSED


def test_output_to_a_closed_stdout_is_discarded() -> None:
    script = f"exec '{sys.executable}' -m reconv recipes >&-"
    done = subprocess.run(["sh", "-c", script], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_is_too_long_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["eval", "r" * 300], ["report", "r" * 300], ["data", "check", "d" * 300]):
        assert _code(arguments) == ExitCode.USAGE
        assert "255 bytes" in capsys.readouterr().err


def test_ctrl_c_exits_with_130() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        args = [sys.executable, "-m", "reconv", "data", "get", "cifar10", "--base-url", url]
        use_default_handler = partial(
            signal.signal, signal.SIGINT, signal.SIG_DFL
        )  # it is ignored where tests run in the background
        with subprocess.Popen(args, stderr=subprocess.PIPE, text=True, preexec_fn=use_default_handler) as child:
            try:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(60)
                    assert connection.recv(3) == b"GET"  # now the command waits for a response
                    child.send_signal(signal.SIGINT)
                    _, err = child.communicate(timeout=60)
            finally:
                child.kill()
    assert child.returncode == ExitCode.INTERRUPTED
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["train", "quickstart"], "to continue, run the same command with --resume.\n"),
        (["train", "quickstart", "--resume"], "to continue, run the same command.\n"),
        (["train", "quickstart", "--dry-run", "5"], "Interrupted.\n"),
        (["eval", "runs/quickstart/1"], "Interrupted.\n"),
    ],
    ids=" ".join,
)
def test_an_interrupt_names_the_command_to_continue(
    args: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(context: click.Context) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.reconv.commands[args[0]], "invoke", interrupt)
    assert _code(args) == ExitCode.INTERRUPTED
    err = capsys.readouterr().err
    assert expected in err


def test_an_error_with_closed_streams_keeps_its_exit_code() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    args = [sys.executable, "-m", "reconv", "train", "no-such-recipe"]
    done = subprocess.run(args, stdout=write_end, stderr=write_end, timeout=60)
    os.close(write_end)
    assert done.returncode == ExitCode.USAGE


@pytest.mark.parametrize("package", ["triton", "onnx"])
def test_nothing_is_printed_at_exit_about_objects_of_bindings(package: str) -> None:
    code = f"import {package}; from reconv.cli import main; main(['recipes', 'show', 'quickstart'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "" and "quickstart" in done.stdout


def test_a_process_with_a_gpu_ends_executors_and_keeps_what_was_written(tmp_path: Path) -> None:
    written = tmp_path / "log.csv"
    code = f"""
import atexit, sys
from concurrent.futures import ThreadPoolExecutor
import reconv.cli
pool = ThreadPoolExecutor(1)
pool.submit(print, "working").result()
atexit.register(print, "exiting")
file = open({str(written)!r}, "w")
file.write("epoch 1")
reconv.cli._has_cuda_context = lambda: True
sys.argv = ["reconv", "recipes", "show", "no-such-recipe"]
reconv.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert done.stdout.splitlines() == ["working", "exiting"]
    assert written.read_text() == "epoch 1"
