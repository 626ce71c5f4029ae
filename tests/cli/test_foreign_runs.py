"""Commands that open a stranger's run import nothing of it, write nothing outside and send nothing without consent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_server import FileServer, serve
from foreign_folders import (
    OWNED,
    change_recipe,
    change_run,
    checkpoints,
    copy_of,
    missing_packages,
    run_command,
    set_field,
    train_run,
    trap,
    unchanged_imports,
    write_files,
)
from PIL import Image

from reconv.api.training import start
from reconv.checkpoint.mirror import lease as run_lease
from reconv.checkpoint.mirror import upload as run_mirror
from reconv.cluster.launch import Launch
from reconv.core.custom_code import CodeConsent, OtherCodeError
from reconv.core.errors import ExitCode
from reconv.serve.metrics import ServerMetrics
from reconv.serve.model_loader import LoadSettings, ModelLoader, with_consents
from reconv.serve.models import ServedModel
from reconv.trainer.options import RunOptions

COMMANDS: dict[str, tuple[str, ...]] = {
    "eval": ("eval", "run"),
    "predict": ("predict", "run", "a.png"),
    "export": ("export", "run", "--to", "safetensors", "--out", "exported"),
    "bench infer": ("bench", "infer", "run", "--batches", "1", "--iterations", "1"),
    "average": ("average", "run", "--last", "2step"),
    "report": ("report", "run"),
    "status": ("status", "run"),
    "resume": ("resume", "run"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(autouse=True)
def _no_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has given no addresses of copies; leases are taken at once."""
    monkeypatch.setenv("RECONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run_lease, "_SETTLE_S", 0.0)
    monkeypatch.setattr(run_mirror, "_POLL_S", 0.02)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Iterator[Path]:
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.png")
    with unchanged_imports(tmp_path):
        yield copy_of(trained, tmp_path / "run")


METRIC = """
class Mean:
    def update(self, outputs, targets): self.mean = float(outputs.mean())
    def compute(self): return {"mean": self.mean}
"""


def owned(folder: Path) -> list[Path]:
    return sorted(folder.rglob(OWNED))


def shadows() -> dict[str, str]:
    """A module for each package that is not installed, and for some that are."""
    return {f"{name}.py": trap("raise ImportError") for name in [*missing_packages(), "yaml", "torch"]}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_without_code_has_no_say_in_what_is_imported(name: str, run: Path, tmp_path: Path) -> None:
    write_files(run / "lib", shadows())
    write_files(tmp_path, shadows())
    change_run(run, lambda recipe: set_field(recipe, "code_path", [str(run / "lib")]))
    before = list(sys.path)
    assert run_command(*COMMANDS[name]) == ExitCode.OK
    assert owned(tmp_path) == []
    assert sys.path == before


def test_a_package_that_is_not_installed_is_never_taken_from_folders_of_code(run: Path, tmp_path: Path) -> None:
    """The user has agreed to import one module of the folder."""
    write_files(run / "lib", {**shadows(), "mean.py": METRIC})
    write_files(tmp_path, shadows())

    def change(recipe: dict[str, Any]) -> None:
        recipe.update(code_path=[str(run / "lib")], metrics=[{"name": "mean:Mean", "options": {}}])

    change_run(run, change)
    assert run_command("eval", "run") == ExitCode.USAGE
    assert run_command("eval", "run", "--trust-code") == ExitCode.OK
    assert sys.modules["mean"].__file__ == str(run / "lib/mean.py")
    assert run_command("bench", "infer", "run", "--batches", "1", "--iterations", "1", "--trust-code") == ExitCode.OK
    assert owned(tmp_path) == []


def test_the_current_folder_does_not_stand_in_for_packages(run: Path, tmp_path: Path) -> None:
    write_files(tmp_path, shadows())
    root = str(Path(__file__).parents[2])
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    installed = subprocess.run([sys.executable, "-P", "-c", "import reconv"], capture_output=True, env=environ)
    if installed.returncode:  # a checkout that is not installed
        environ["PYTHONPATH"] = root
    done = subprocess.run(
        [sys.executable, "-m", "reconv", "report", "run"], capture_output=True, text=True, env=environ, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert owned(tmp_path) == []


def evil(recipe: dict[str, Any]) -> None:
    recipe.update(metrics=[{"name": f"{os.getcwd()}/run/evil.py:Evil", "options": {}}])


@pytest.mark.parametrize("option", [(), ("--trust-code",)])
def test_a_later_checkpoint_that_names_other_code_is_left_out(
    option: tuple[str, ...], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(run, {"evil.py": trap("class Evil: pass")})
    change_recipe(checkpoints(run)[-1], evil)
    assert run_command("eval", "run", "--all", *option) == ExitCode.OK
    error = capsys.readouterr().err
    assert "skipped step-000000002" in error and "evil.py" in error
    assert owned(run) == []


@pytest.mark.parametrize("trust", [False, True])
def test_a_server_keeps_its_model_if_a_later_checkpoint_names_other_code(trust: bool, run: Path) -> None:
    write_files(run, {"evil.py": trap("class Evil: pass")})
    first, second = checkpoints(run)
    change_recipe(second, evil)
    second.rename(run / second.name)
    model, lines, metrics = ServedModel("m", str(run)), list[str](), ServerMetrics()
    settings = with_consents(LoadSettings(trust_code=trust, options={"weights": "auto", "recipe": None}), [model])
    assert list(settings.consents) == ["m"] * trust
    loader = ModelLoader([model], settings, metrics, lines.append, follow=True, on_error=pytest.fail)
    loader.start()
    loader.wait()
    (run / second.name).rename(second)
    for _ in range(200):
        if refused := [line for line in lines if "cannot be loaded" in line]:
            break
        time.sleep(0.05)
    loader.stop(10)
    assert "evil.py" in refused[0] and "step 1 is still served" in refused[0]
    assert model.current is not None and model.current.predictor.path == first
    assert owned(run) == []


@pytest.fixture
def web() -> Iterator[FileServer]:
    """A server on this machine, which no command has a reason to ask."""
    with serve(FileServer(b"")) as running:
        yield running


ADDRESS_COMMANDS: dict[str, tuple[str, ...]] = {
    "eval": ("eval", "run"),
    "eval --all": ("eval", "run", "--all"),
    "export": ("export", "run", "--to", "onnx", "--out", "exported"),
    "resume": ("resume", "run", "--epochs", "3"),
    "train --resume": ("train", "quickstart", "--set", "data.source=auto", "--out", "run", "--resume"),
}


@pytest.mark.parametrize("name", ADDRESS_COMMANDS)
def test_an_address_that_the_user_has_not_given_is_not_asked(
    name: str, run: Path, web: FileServer, capsys: pytest.CaptureFixture[str]
) -> None:
    change_run(run, lambda recipe: recipe["data"].update(source="auto", path=f"{web.url}/data"))
    assert run_command(*ADDRESS_COMMANDS[name]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert f"{web.url}/data" in error and "that you have not given" in error
    assert web.asked == []
    assert run_command(*ADDRESS_COMMANDS[name], "--data", f"{web.url}/data") not in (ExitCode.OK, ExitCode.USAGE)
    assert web.asked, "given now"
    web.asked.clear()
    run_command(*ADDRESS_COMMANDS[name])
    assert web.asked, "given before"


@pytest.mark.parametrize("field", ["model.init", "distill.teacher", "model.resume_from"])
def test_addresses_of_weights_are_asked_about_too(field: str, run: Path, web: FileServer) -> None:
    for checkpoint in checkpoints(run):
        shutil.rmtree(checkpoint)
    change_run(run, lambda recipe: set_field(recipe, field, f"{web.url}/weights.pth"))
    assert run_command("resume", "run") == ExitCode.USAGE
    assert web.asked == []


@pytest.fixture
def store(run: Path, tmp_path: Path) -> Path:
    """Where the run says that its copy is: one with a newer checkpoint, other code, and files that no run has."""
    copy = copy_of(run, tmp_path / "store/run")
    newest = checkpoints(run)[-1]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    for folder in (".", "lib", "images"):
        write_files(copy / folder, {"evil.py": trap("class Evil: pass"), ".profile": "", "authorized_keys": ""})
    change_run(copy, evil)
    (run / "mirror.json").write_text(json.dumps({"url": copy.as_uri()}))
    return copy


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_a_copy_at_an_address_that_the_user_has_not_given_is_left_alone(
    run: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_below(run), files_below(store)
    assert run_command("resume", "run") == ExitCode.USAGE
    assert store.as_uri() in capsys.readouterr().err
    assert run_command("train", "quickstart", "--out", "run", "--resume") == ExitCode.USAGE
    assert (files_below(run), files_below(store)) == before
    assert run_command("resume", "run", "--mirror", "off") == ExitCode.OK
    assert files_below(store) == before[1]


def test_the_code_that_a_copy_names_is_asked_about_after_it_was_taken_back(
    run: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(run, {"evil.py": trap("class Evil: pass")})
    assert run_command("resume", "run", "--mirror", store.as_uri()) == ExitCode.USAGE
    assert "names code that would be imported" in capsys.readouterr().err
    assert len(checkpoints(run)) == 2, "it was taken back first"
    assert not {"lib", "lib/evil.py", ".profile", "authorized_keys", "images/.profile"} & files_below(run)
    assert owned(tmp_path) == []


def test_a_recipe_that_changes_after_the_question_is_not_imported(run: Path, store: Path, tmp_path: Path) -> None:
    """The copy gets a newer checkpoint between the question and the start of training."""
    write_files(run, {"evil.py": trap("class Evil: pass")})
    consent = CodeConsent(True)
    consent.require([], (), "run")
    with pytest.raises(OtherCodeError, match="other code"):
        options = RunOptions(str(run / "recipe.yaml"), resume=True, consent=consent)
        start(options, Launch(), out=run, mirror=store.as_uri())
    assert "evil.py" in (run / "recipe.yaml").read_text()
    assert owned(tmp_path) == []


@pytest.mark.parametrize("name", ["images", "events.jsonl", "lock", "notes.txt", "checkpoints/step-000000002/x.json"])
def test_links_out_of_a_run_are_neither_followed_nor_copied(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / ("outside" if name == "images" else "outside.txt")
    outside.mkdir() if name == "images" else outside.write_text("private")
    shutil.rmtree(run / name) if name == "images" else (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside)
    copy = tmp_path / "copy"
    assert run_command("resume", "run", "--mirror", copy.as_uri(), "--epochs", "2") == ExitCode.CHECKPOINT
    assert str(outside) in capsys.readouterr().err
    assert not copy.exists()
    assert list(outside.iterdir()) == [] if name == "images" else outside.read_text() == "private"


def test_a_checkpoint_whose_recipe_contradicts_itself_is_an_error_of_the_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_run(run, lambda recipe: set_field(recipe, "model.trainable", ["fc"]))
    assert run_command("resume", "run", "--fork", "--out", "forked") == ExitCode.CHECKPOINT
    assert "cannot read the recipe of this checkpoint" in capsys.readouterr().err
