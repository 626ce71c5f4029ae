"""Commands that open a stranger's run import nothing of it, write nothing outside and send nothing without consent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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

from reconv.errors import ExitCode
from reconv.serve.metrics import ServerMetrics
from reconv.serve.model_loader import LoadSettings, ModelLoader, with_consents
from reconv.serve.models import ServedModel

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
