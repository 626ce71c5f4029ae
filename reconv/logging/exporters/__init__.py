"""A run's events in the forms other programs read; each is off until `loggers` names it, none needs a network.

Owns those forms. Refuses to know the engine: an exporter is told events and nothing else. Invariant: what is written
is a function of the events, and nothing an exporter does or fails to do changes the run.
"""

from reconv.logging.exporters.exporter_set import ExporterSet, require_packages

__all__ = ["ExporterSet", "require_packages"]
