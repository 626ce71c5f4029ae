"""Counters and times of the server, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServerMetrics:
    """The metrics of one server, in a registry of their own.

    Several processes keep them in files in `folder`, and each reports the sums over all of them. It must be the
    PROMETHEUS_MULTIPROC_DIR of the environment with which they were started.
    """

    def __init__(self, folder: Path | None = None) -> None:
        registry = CollectorRegistry(auto_describe=True)
        if folder is None:
            ProcessCollector(registry=registry)
            PlatformCollector(registry=registry)
            self.registry = registry
        else:
            self.registry = CollectorRegistry()
            MultiProcessCollector(self.registry, str(folder))  # type: ignore[no-untyped-call]
        self.requests = Counter(
            "reconv_requests", "Requests by route and status", ("route", "status"), registry=registry
        )
        self.rejected = Counter(
            "reconv_rejected_requests", "Requests refused by a limit", ("reason",), registry=registry
        )
        self.in_flight = Gauge(
            "reconv_in_flight_requests", "Requests in flight", registry=registry, multiprocess_mode="livesum"
        )
        self.stage_s = Histogram(
            "reconv_stage_seconds",
            "Time of a prediction by stage: body, read (decode and resize), queue, network, total",
            ("model", "stage"),
            buckets=_SECONDS,
            registry=registry,
        )
        self.batch_size = Histogram(
            "reconv_batch_images", "Images of a batch", ("model",), buckets=_IMAGES, registry=registry
        )
        self.network_s = Histogram(
            "reconv_batch_seconds", "Time of a batch on the device", ("model",), buckets=_SECONDS, registry=registry
        )
        self.pending = Gauge(
            "reconv_pending_images",
            "Images being read, queued or computed",
            ("model",),
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.step = Gauge(
            "reconv_model_step",
            "Training step of the served checkpoint",
            ("model",),
            registry=registry,
            multiprocess_mode="liveall",
        )
        self.reloads = Counter(
            "reconv_model_reloads",
            "Checkpoints taken over, or that could not be",
            ("model", "result"),
            registry=registry,
        )

        self._counters: dict[tuple[str, int], Counter] = {}  # a lookup by labels takes as long as ten of these
        self._histograms: dict[tuple[str, str], Histogram] = {}

    def count(self, route: str, status: int) -> None:
        """Count a request."""
        counter = self._counters.get((route, status))
        if counter is None:
            counter = self._counters[route, status] = self.requests.labels(route, str(status))
        counter.inc()

    def observe(self, model: str, stages: Mapping[str, float]) -> None:
        """Add the seconds that the stages of a prediction took."""
        for stage, seconds in stages.items():
            histogram = self._histograms.get((model, stage))
            if histogram is None:
                histogram = self._histograms[model, stage] = self.stage_s.labels(model, stage)
            histogram.observe(seconds)

    def on_batch(self, model: str) -> Callable[[int, float], None]:
        """Callback of a batcher after each batch of a model."""
        sizes, seconds = self.batch_size.labels(model), self.network_s.labels(model)

        def observe(num_images: int, network_s: float) -> None:
            sizes.observe(num_images)
            seconds.observe(network_s)

        return observe

    def to_text(self) -> bytes:
        """All metrics, as Prometheus reads them."""
        return generate_latest(self.registry)
