"""What training returns: the run directory, its summary, and the trained model."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reconv.logging import formatting as fmt

if TYPE_CHECKING:
    from reconv.inference.predictor import Predictor


@dataclass(frozen=True, slots=True, repr=False)
class RunResult:
    """The run directory, its summary and its exit code."""

    folder: Path
    summary: dict[str, Any]
    exit_code: int
    was_finished: bool = False  # before this command, which had nothing to do

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
        from reconv.inference.predictor import load

        return load(self.folder, **options)

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
