"""A run's events for other programs: CSV, TensorBoard, Weights & Biases, MLflow and MLPerf logs.

An exporter is off until the recipe's `loggers` names it, works offline, and never affects the run.
"""

from reconv.logging.exporters.choose import ExporterSet, require_packages

__all__ = ["ExporterSet", "require_packages"]
