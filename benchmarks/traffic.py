"""The files of the package that a step, a set-up, a prediction and a resume cross, in order.

    python -m benchmarks.traffic [step|setup|predict|resume|closure]

A file is crossed if one of its functions is entered in any thread. What runs while a module is imported is not counted,
from the search for its file, which asks our hook for folders of custom code, to the end of its body; nor are the
callbacks and log lines of a training loop around a step. Each flow runs in a process of its own, on the CPU
and with a folder of JPEG files. `closure` counts the modules that the predictor imports, and those after a prediction.
"""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

GOALS = {"step": 32, "setup": 55, "predict": 50, "resume": 28, "closure": 230}  # the most files or modules we want
NOT_FOR_PREDICTIONS = ("reconv.optim", "reconv.trainer", "reconv.exporters")
_SETTINGS = {
    "model.name": "resnet18",
    "data.source": "folder",
    "data.preprocess.size": 64,
    "data.preprocess.channels": 3,
    "data.preprocess.mean": [0.5, 0.5, 0.5],
    "data.preprocess.std": [0.5, 0.5, 0.5],
    "augment.crop": "random_resized",
    "augment.hflip": 0.5,
    "length": "12step",
    "batch.size": 4,
    "evaluate.every": "off",
}


_IMPORT = "_find_and_load", "<frozen importlib._bootstrap>"


class Crossed:
    """The files whose functions were entered while recording, in order of the first call."""

    def __init__(self, regions: tuple[Callable[..., Any], ...] = ()) -> None:
        import reconv

        self._root = str(Path(reconv.__file__).parent) + "/"
        self._functions: dict[str, dict[str, None]] = {}
        self._regions = {inspect.unwrap(function).__code__ for function in regions}
        self._depth = 0  # of regions that this thread is in
        self._num_returns = 0
        self._window: tuple[CodeType, int, int] | None = None
        self._main = threading.get_ident()
        self.is_recording = False
        self._imports = threading.local()  # depth of imports in each thread

    def observe(self) -> None:
        """Observe every thread from now on; `is_recording` and the regions decide what counts."""
        threading.setprofile(self._observe)
        sys.setprofile(self._observe)

    def between_returns(self, function: Callable[..., Any], first: int, last: int) -> None:
        """Record the regions, and other threads, from one return of a function to another."""
        self._window = inspect.unwrap(function).__code__, first, last

    def _observe(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_main = threading.get_ident() == self._main
        if code in self._regions and is_main:
            self._depth += {"call": 1, "return": -1}[event]
        if code.co_name == "<module>" or (code.co_name, code.co_filename) == _IMPORT:
            self._imports.depth = getattr(self._imports, "depth", 0) + {"call": 1, "return": -1}.get(event, 0)
        is_function = bool(code.co_flags & inspect.CO_OPTIMIZED) and not getattr(self._imports, "depth", 0)
        is_ours = is_function and code.co_filename.startswith(self._root)
        in_region = self._depth > 0 or not self._regions or (self._window is not None and not is_main)
        if event == "call" and is_ours and self.is_recording and in_region:
            name = code.co_filename.removeprefix(self._root)
            self._functions.setdefault(name, {}).setdefault(code.co_qualname)
        if event == "return" and self._window is not None and code is self._window[0]:
            self._num_returns += 1
            self.is_recording = self._window[1] <= self._num_returns < self._window[2]

    def show(self) -> int:
        """Print each file with the functions that were entered; returns the number of files."""
        sys.setprofile(None)
        for number, (name, functions) in enumerate(self._functions.items(), 1):
            print(f"{number:4}  {name:44} {', '.join(functions)}")
        return len(self._functions)


def _options(folder: Path, resume: bool = False, **settings: Any) -> Any:
    """The options of a short run on the photographs."""
    from reconv.trainer.options import RunOptions

    overrides = tuple((name, value, "traffic") for name, value in {**_SETTINGS, **settings}.items())
    return RunOptions("quickstart", overrides, folder / "photos", folder / "run", resume, folder, "cpu")


def _train(folder: Path, resume: bool = False, **settings: Any) -> None:
    from reconv.trainer.run import run_training

    run_training(_options(folder, resume, **settings), None)


def _write_photos(root: Path) -> None:
    """A folder with two classes of JPEG files."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for split, count in (("train", 32), ("val", 4)):
        for name in ("cat", "dog"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (90, 120, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")


def _step(folder: Path) -> int:
    """Two steps in mid-run, with what the loader and its workers do meanwhile."""
    from reconv.data.pipeline.train_loader import StreamedLoader
    from reconv.trainer.step import TrainStep

    crossed = Crossed((StreamedLoader.steps, TrainStep.__call__))
    crossed.between_returns(TrainStep.__call__, 4, 6)
    crossed.observe()
    _train(folder)
    return crossed.show()


def _setup(folder: Path) -> int:
    """Everything before a run directory is made."""
    from reconv.trainer.prepare import prepare_run

    crossed = Crossed()
    crossed.observe()
    crossed.is_recording = True
    with prepare_run(_options(folder)):
        crossed.is_recording = False
    return crossed.show()


def _predict(folder: Path) -> int:
    """`reconv predict RUN one.jpg`, from its arguments to the printed table."""
    _train(folder)
    script = "import sys; from benchmarks import traffic; traffic.predict_command(*sys.argv[1:])"
    image = folder / "photos" / "val" / "cat" / "0.jpg"
    return subprocess.run([sys.executable, "-c", script, str(folder / "run"), str(image)]).returncode


def predict_command(run: str, image: str) -> None:
    """Predict one image by the command line; exits with the number of files."""
    crossed = Crossed()
    crossed.observe()
    crossed.is_recording = True
    from reconv.cli import reconv as command

    command(["predict", run, image, "--device", "cpu"], standalone_mode=False)
    sys.exit(crossed.show())


def _resume(folder: Path) -> int:
    """Resume a run as far as it differs from a new one: find and check it, read its checkpoint, restore it."""
    from reconv.trainer import opened_run
    from reconv.trainer.run import TrainingRun

    _train(folder, length="6step")
    crossed = Crossed(
        (
            opened_run.ResumeLookup.find,
            opened_run.with_durations_of_run,
            opened_run.open_existing,
            opened_run.find_restore_point,
            TrainingRun._restore,
        )
    )
    crossed.observe()
    crossed.is_recording = True
    _train(folder, resume=True)
    return crossed.show()


def _closure(folder: Path) -> int:
    """The modules loaded by the predictor, and after `Predictor.load` and one prediction."""
    _train(folder)
    script = "import sys; from benchmarks import traffic; traffic.predict_once(*sys.argv[1:])"
    image = folder / "photos" / "val" / "cat" / "0.jpg"
    return subprocess.run([sys.executable, "-c", script, str(folder / "run"), str(image)]).returncode


def predict_once(run: str, image: str) -> None:
    """Load a predictor and predict an image; exits with the number of modules that are loaded then."""
    from reconv.inference.predictor import Predictor

    imported = _loaded()
    Predictor.load(run, device="cpu").predict([image])
    modules = _loaded()
    print(f"{len(imported)} modules are loaded by reconv.inference.predictor, {len(modules)} after a prediction:")
    print(*(f"{'' if name in imported else '+ '}{name}" for name in modules), sep="\n")
    print("of training:", [name for name in modules if name.startswith(NOT_FOR_PREDICTIONS)] or "none")
    sys.exit(len(modules))


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "reconv"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flow", nargs="?", choices=GOALS)
    flow = parser.parse_args().flow
    if flow is None:
        counts = {name: subprocess.run([sys.executable, "-m", "benchmarks.traffic", name]).returncode for name in GOALS}
        print(*(f"{name:10}{count:4} (goal {GOALS[name]})" for name, count in counts.items()), sep="\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        _write_photos(Path(folder) / "photos")
        measures = {"step": _step, "setup": _setup, "predict": _predict, "resume": _resume, "closure": _closure}
        count = measures[flow](Path(folder))
    print(f"{flow}: {count} files or modules, goal {GOALS[flow]}")
    sys.exit(count)


if __name__ == "__main__":
    main()
