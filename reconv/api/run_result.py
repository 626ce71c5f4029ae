"""The result of training: the run directory, its summary, its history and the trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from reconv.core.errors import UsageError
from reconv.logging import formatting as fmt
from reconv.logging.event_log import latest_by_step, read_events
from reconv.logging.events import EvalFinished, TrainProgress
from reconv.logging.run_dir import RunDir
from reconv.trainer.run import RunOutcome

if TYPE_CHECKING:
    from reconv.inference.predictor import Predictor


class History(Sequence[Mapping[str, Any]]):
    """The training metrics and evaluations of a run by step, each as a dict; a step counts as its last attempt has it.

    Rows have `step`, `epoch`, `split` (train or val), `weights` (raw, ema or averaged; of evaluations), `loss`, `lr`
    and the metrics that were measured.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = tuple(rows)

    @classmethod
    def read(cls, events: Path) -> History:
        """The history in `events.jsonl`; empty if there is no such file."""
        return cls(
            [_row(e) for e in latest_by_step(read_events(events)) if isinstance(e, TrainProgress | EvalFinished)]
        )

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<History of {len(self)} rows>"

    def to_pandas(self) -> Any:
        """The rows as a pandas DataFrame, with NaN for what was not measured."""
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError as error:
            raise UsageError(
                "to_pandas needs pandas, which is not installed",
                why=str(error),
                hint="pip install pandas, or use the rows as they are: a list of dicts",
            ) from error
        return pandas.DataFrame([dict(row) for row in self])


def _row(event: TrainProgress | EvalFinished) -> dict[str, Any]:
    at: dict[str, Any] = {"step": event.step, "epoch": event.epoch}
    if isinstance(event, TrainProgress):
        return {**at, "split": "train", "weights": None, "lr": event.lr, "loss": event.loss, **event.metrics}
    return {**at, "split": "val", "weights": event.weights, "lr": None, **event.metrics}


@dataclass(frozen=True, slots=True, repr=False)
class RunResult(RunOutcome):
    """The run directory, its summary and its exit code, with its history and its model."""

    @classmethod
    def of(cls, outcome: RunOutcome) -> RunResult:
        """The result of a run that has ended."""
        return cls(outcome.folder, outcome.summary, outcome.exit_code, outcome.was_finished)

    @property
    def metric(self) -> str | None:
        """The name of the metric that decides which checkpoint is best; None if nothing was evaluated."""
        name = self.summary.get("metric")
        return None if name is None else str(name)

    @property
    def value(self) -> float | None:
        """The metric after the last step."""
        return self.summary.get("value")

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.folder / str(self.summary.get("report") or "report.html")

    def load(self, **options: Any) -> Predictor:
        """The trained model; see `reconv.load` for the options, such as `best=True`."""
        from reconv.inference.predictor import load  # training needs none of it

        return load(self.folder, **options)

    @property
    def history(self) -> History:
        """Training metrics and evaluations by step, read from the events of the run."""
        return History.read(RunDir(self.folder).events)

    @property
    def state(self) -> str:
        """Finished, stopped, diverged or failed, and the step."""
        state = fmt.state(self.summary)
        state = "finished" if state in ("met", "missed") else state  # the result says whether it is as expected
        return f"{state} at step {self.summary['steps']:,} of {self.summary['total_steps']:,}"

    def __str__(self) -> str:
        return f"{self.folder}: {self.state}, {fmt.result(self.summary)}"

    def __repr__(self) -> str:
        return f"<RunResult {self}>"

    def _repr_html_(self) -> str:
        """A table with the result and a link to the report, in a notebook."""
        summary = self.summary
        best = "" if summary.get("best") is None else fmt.metric_text(summary["metric"], summary["best"])
        rows = {
            "result": escape(fmt.result(summary)),
            "best": escape(f"{best} at step {summary['best_step']:,}") if best else "",
            "state": escape(self.state),
            "run": f"<code>{escape(str(self.folder))}</code>",
            "report": f'<a href="{escape(str(self.report), quote=True)}">{escape(self.report.name)}</a>',
        }
        if summary.get("resume_command"):
            rows["to resume"] = "the same call with <code>resume=True</code>"
        cells = "".join(f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in rows.items() if text)
        return f"<table>{cells}</table>"
