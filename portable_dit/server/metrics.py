"""What Prometheus reads at /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from portable_dit.server.messages import PictureFile, Summary

PREFIX = "portable_dit"
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """One registry for each server, so that two in one process do not share their counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.queue_seconds = self._histogram("queue_wait_seconds", "Time from acceptance to the device.")
        self._stages = self._histogram("stage_seconds", "Time in a stage, by picture.", ("stage",))
        self._requests = self._histogram("request_seconds", "Time of a request on the worker.")
        self.http_requests = Counter(
            f"{PREFIX}_http_requests",
            "Answers by path and status.",
            ("path", "status"),
            registry=self.registry,
        )
        self.steps = Counter(f"{PREFIX}_steps", "Denoise steps done.", registry=self.registry)
        self.pictures = Counter(f"{PREFIX}_pictures", "Pictures drawn.", registry=self.registry)
        self._batches = Histogram(
            f"{PREFIX}_batch_pictures",
            "Pictures that were denoised side by side, by picture.",
            buckets=BATCHES,
            registry=self.registry,
        )
        self._apart = Counter(
            f"{PREFIX}_pictures_kept_apart",
            "Pictures that were not denoised beside others since that might have changed a bit.",
            registry=self.registry,
        )
        self.failures = Counter(
            f"{PREFIX}_failures", "Accepted requests without pictures.", ("code",), registry=self.registry
        )
        self.worker_deaths = Counter(f"{PREFIX}_worker_deaths", "Workers lost.", registry=self.registry)
        self.queue_length = self._gauge("queue_length", "Requests that wait.")
        self.running = self._gauge("running", "Requests that are drawn.")
        self.ready = self._gauge("workers_ready", "Workers that can draw.")
        self.resident = self._gauge("worker_resident_bytes", "Resident memory of the workers.")
        self.peak = self._gauge("device_peak_bytes", "Highest memory of a device so far.")
        self.server_resident = self._gauge("server_resident_bytes", "Resident memory of the server.")

    def drawn(self, file: PictureFile) -> None:
        self.pictures.inc()
        self._batches.observe(file.batch)
        if file.batch < file.wanted:
            self._apart.inc()
        for stage, seconds in file.seconds.items():
            self._stages.labels(stage).observe(seconds)

    def finished(self, summary: Summary) -> None:
        self._stages.labels("text_encode").observe(summary.seconds["text_encode"])
        self._requests.observe(summary.seconds["total"])
        if summary.peak_bytes is not None:
            self.peak.set(summary.peak_bytes)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _histogram(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", help, labels, buckets=SECONDS, registry=self.registry)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", help, registry=self.registry)
