"""Loads the models beside the running server, and with `--follow` each new checkpoint of their runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reconv.api import Predictor
from reconv.build.saved_model import read_saved_model
from reconv.checkpoint.locate import LocatedWeights
from reconv.checkpoint.store import is_checkpoint_name
from reconv.core.custom_code import CodeConsent, OtherCodeError, TrustCode
from reconv.core.errors import CheckpointError, ReconvError, UsageError
from reconv.core.text import printable
from reconv.inference.backends.base import LogFunction, no_log
from reconv.inference.predictor import find_model
from reconv.logging.run_dir import RunDir
from reconv.serve.metrics import ServerMetrics
from reconv.serve.model_info import model_info
from reconv.serve.models import BatchSettings, LoadedModel, ServedModel

POLL_S = 1.0  # how often a run is looked at
_Stamp = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Settings for loading weights."""

    devices: Sequence[str] = ("auto",)
    best: bool = False
    trust_code: TrustCode = False
    batch: BatchSettings = field(default_factory=BatchSettings)
    options: dict[str, Any] = field(default_factory=dict)  # further ones of `Predictor.from_located`
    consents: Mapping[str, CodeConsent] = field(default_factory=dict)  # to the code of models, by their names


def with_consents(settings: LoadSettings, models: Sequence[ServedModel]) -> LoadSettings:
    """The settings with consent to the code that the runs name now, for processes that are started later."""
    consents: dict[str, CodeConsent] = {}
    for model in models if settings.trust_code is True else ():
        with suppress(CheckpointError):  # it is reported where the model is loaded
            located = find_model(model.run, settings.best, no_log)
            consents[model.name] = CodeConsent(True)
            weights, recipe = settings.options.get("weights", "auto"), settings.options.get("recipe")
            read_saved_model(located, weights=weights, recipe=recipe, trust_code=consents[model.name])
    return replace(settings, consents=consents)


@dataclass(slots=True)
class _Followed:
    """Last seen state of a run."""

    run: RunDir | None = None  # None: it has no checkpoint yet
    stamp: _Stamp = ()
    is_waiting: bool = False


class ModelLoader:
    """Loads models in a thread of its own; until then the server is not ready."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        settings: LoadSettings,
        metrics: ServerMetrics,
        log: LogFunction,
        *,
        follow: bool,
        on_error: Callable[[], None],
    ) -> None:
        self.error: BaseException | None = None  # why a model could not be loaded at the start
        self._models, self._settings, self._metrics, self._log = models, settings, metrics, log
        self._follow, self._on_error = follow, on_error
        self._consents = dict(settings.consents)  # without one, to the code of the model's first checkpoint
        self._stop, self._is_tried = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="reconv-load", daemon=True)

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread.ident is None:
            self._thread.start()

    def wait(self) -> None:
        """Wait until the models are loaded, cannot be, or have no checkpoint yet."""
        self._is_tried.wait()

    def stop(self, timeout_s: float) -> None:
        """Load nothing more, and wait for what is being loaded, but not for long."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        followed = {model.name: _Followed() for model in self._models}
        try:
            for model in self._models:
                if self._stop.is_set():
                    return
                self._load_first(model, followed[model.name])
        except BaseException as error:  # of any kind: the process ends with it
            self.error = error
            self._on_error()
            return
        finally:
            self._is_tried.set()
        while self._follow and not self._stop.wait(POLL_S):
            for model in self._models:
                self._load_new(model, followed[model.name])

    def _load_first(self, model: ServedModel, followed: _Followed) -> None:
        try:
            located = find_model(model.run, self._settings.best, self._log)
        except CheckpointError as error:
            if not self._follow:
                raise
            if not followed.is_waiting:
                self._log(printable(f"{model.name}: waiting for a checkpoint in {model.run} ({error.what})"))
            followed.is_waiting = True
            return
        if self._follow and (located.kind != "run" or located.run is None):
            raise UsageError(
                f"--follow is for runs, and {model.run} is a {located.kind}",
                hint="give the run directory, such as runs/quickstart/1, or omit --follow",
            )
        followed.run = located.run
        followed.stamp = () if located.run is None else _stamp(located.run)
        self._take_over(model, located)

    def _load_new(self, model: ServedModel, followed: _Followed) -> None:
        """Load the run's checkpoint if it has another one; what cannot be loaded is logged and left alone."""
        try:
            if followed.run is None:
                self._load_first(model, followed)
                return
            stamp = _stamp(followed.run)
            if stamp == followed.stamp:
                return
            followed.stamp = stamp
            located = find_model(followed.run.path, self._settings.best, self._log)
            if model.current is None or located.checkpoint != model.current.predictor.path:
                self._take_over(model, located)
        except Exception as error:
            self._metrics.reloads.labels(model.name, "failed").inc()
            text = error.what if isinstance(error, ReconvError) else f"{type(error).__name__}: {error}"
            why = f": {error.why}" if isinstance(error, OtherCodeError) else ""
            where = f" ({error.where})" if isinstance(error, ReconvError) and error.where else ""
            step = "" if model.current is None else f"; step {model.current.predictor.step or 0:,} is still served"
            self._log(printable(f"{model.name}: a new checkpoint cannot be loaded: {text}{why}{where}{step}"))

    def _take_over(self, model: ServedModel, located: LocatedWeights) -> None:
        """Load and warm a checkpoint beside the one that is served, then replace that."""
        is_first = model.current is None
        loaded = self._load(model, located)
        if self._stop.is_set():
            return
        model.replace(loaded)
        predictor = loaded.predictor
        self._metrics.step.labels(model.name).set(predictor.step or 0)
        if not is_first:
            self._metrics.reloads.labels(model.name, "loaded").inc()
        step = "" if predictor.step is None else f", step {predictor.step:,}"
        devices = ", ".join(replica.device.describe() for replica in loaded.predictors)
        how = predictor.backend.describe()
        self._log(printable(f"ready: {model.name} ({predictor.weights} weights{step}) on {devices}: {how}"))

    def _load(self, model: ServedModel, located: LocatedWeights) -> LoadedModel:
        settings = self._settings
        predictors = [
            Predictor.from_located(
                located,
                device=device,
                trust_code=self._consents.setdefault(model.name, CodeConsent.of(settings.trust_code)),
                log=self._log,
                **settings.options,
            )
            for device in settings.devices
        ]
        info = model_info(predictors)
        return LoadedModel(predictors, info, settings.batch, self._metrics.on_batch(model.name))


def _stamp(run: RunDir) -> _Stamp:
    """Stamp that changes with a run's newest or best checkpoint."""
    folders = [path for path in run.checkpoints.iterdir() if is_checkpoint_name(path.name)]
    files = [path for path in (run.best, run.averaged) if path.exists()]
    return tuple(sorted((path.name, _modified(path)) for path in (*folders, *files)))


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # retention has deleted it since the folder was listed
        return 0
