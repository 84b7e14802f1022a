"""Live metrics of a run in OpenMetrics' text format: in a file for node_exporter's textfile collector, or on a port of
rank 0. grafana.json beside this file is a Grafana dashboard."""

import math
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import torch

from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import HolmesError
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.records.files import to_json, write_whole
from holmes_hpc.records.rates import finite, goodput, number
from holmes_hpc.tables import read_table
from holmes_hpc.training.checkpoint.save_and_load import Checkpoints
from holmes_hpc.training.network.audit import PlannedBytes
from holmes_hpc.training.network.destinations import planned_fabric_bytes
from holmes_hpc.training.rank.log import log_line
from holmes_hpc.training.session import Session

EVERY_S = 5.0  # least time between two writes, or between two readings of a GPU
CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
GPU_FIGURES = ("gpu_utilization_ratio", "gpu_power_watts", "gpu_temperature_celsius", "gpu_memory_bytes")


class Family(NamedTuple):
    """A family of metrics. `field`: the field of a metrics line with the value, "" if it comes from elsewhere."""

    help: str
    labels: Sequence[str] = ()
    kind: str = "gauge"
    field: str = ""


FAMILIES = {name: Family(**facts) for name, facts in read_table(__file__).items()}
Factors = Mapping[str, float]  # network -> bytes on the wire per byte of payload
Sample = tuple[str, Sequence[Any], float]  # family, values of its labels, value


class GpuFigures:
    """The GPU_FIGURES of a rank's GPU, read with NVML at most every five seconds. A figure is NaN if the GPU lacks it,
    or if the package nvidia-ml-py is missing. `device`: None to read no figures."""

    def __init__(self, device: torch.device | None) -> None:
        self._device, self._read_at = device, -math.inf
        self._figures = [] if device is None else [math.nan] * len(GPU_FIGURES)

    def read(self) -> list[float]:
        if self._device is not None and time.monotonic() - self._read_at >= EVERY_S:
            self._read_at = time.monotonic()
            readers = (  # function, divisor of its unit
                (torch.cuda.utilization, 100),
                (torch.cuda.power_draw, 1000),
                (torch.cuda.temperature, 1),
                (torch.cuda.device_memory_used, 1),
            )
            self._figures = [self._figure(reader) / divisor for reader, divisor in readers]
        return self._figures

    def _figure(self, reader: Callable[..., float]) -> float:
        try:
            return float(reader(self._device))
        except Exception:  # NVML's errors have no other class
            return math.nan


class Exporter:
    """The exporter of ``train.openmetrics``. If it cannot write or listen, training goes on with one warning.
    `checkpoints`: the run's checkpoints; `planned`: the result of :func:`audit.planned_bytes`."""

    def __init__(
        self, session: Session, train: TrainConfig, factors: Factors, checkpoints: Checkpoints, planned: PlannedBytes
    ) -> None:
        plan, run, self._checkpoints = session.plan, session.run, checkpoints
        self._constants = {"steps": train.steps, "restarts": session.attempt - 1}
        predicted = plan.predicted.nic_bytes_per_step if plan.predicted is not None else {}
        self._planned = {network: amount * factors.get(network, 1.0) for network, amount in predicted.items()}
        self._planned_between = planned_fabric_bytes(plan, planned)
        self._peak_tflops = statistics.fmean(plan.site.pool(place.pool).gpu.peak_tflops for place in plan.places)
        self._created = str(run.read_run()["created"])
        # This attempt does not repeat the steps up to its checkpoint.
        useful_lines = [line for line in run.metrics() if line["step"] <= checkpoints.saved_step]
        self._run_name = run.name
        self._useful_s = float(finite([number(line.get("step_time_s")) for line in useful_lines]).sum())
        self._totals = defaultdict[tuple[str, ...], float](float)  # of this attempt's steps, by family and labels
        self._latest: tuple[Any, ...] | None = None  # arguments of :meth:`add`
        self._text, self._written_at, self._has_failed = "# EOF\n", -math.inf, False
        self._path = None if isinstance(train.openmetrics, int) else run.path / str(train.openmetrics)
        if isinstance(train.openmetrics, int):
            try:
                serve(train.openmetrics, lambda: self._text)
            except OSError as e:
                hint = "training goes on without these metrics; resume with another train.openmetrics"
                log_line(f"warning: port {train.openmetrics}: {e.strerror or e}; {hint}")

    def add(self, line: Mapping[str, Any], slow: Mapping[str, float], gpus: Sequence[Sequence[float]]) -> None:
        """Add a step, and write its metrics if the last write was at least five seconds ago. `line`: the step's line of
        metrics.jsonl; `slow`: slow link -> its slowdown; `gpus`: each rank's GPU_FIGURES."""
        self._useful_s += line["step_time_s"]
        for network, amount in self._planned.items():
            self._totals["nic_planned_bytes", network] += amount
        for name, sums in (
            ("nic_bytes", line["nic_bytes"]),
            ("fabric_bytes", line.get("fabric_bytes", {})),
            ("fabric_planned_bytes", self._planned_between),
        ):
            for first_label, amounts in sums.items():
                for second_label, amount in amounts.items():
                    self._totals[name, first_label, second_label] += amount
        self._latest = line, slow, gpus
        if time.monotonic() - self._written_at >= EVERY_S:
            self.write()

    def write(self) -> None:
        """Write the metrics of the latest step, if there is one."""
        if self._latest is None:
            return
        self._written_at, self._text = time.monotonic(), to_text(self._run_name, self._samples(*self._latest))
        if self._path is not None:
            try:
                write_whole(self._path, self._text, sync=False)
            except HolmesError as e:
                if not self._has_failed:
                    hint = "training goes on without these metrics; make train.openmetrics writable"
                    log_line(f"warning: {self._path}: {e.what}; {hint}")
                self._has_failed = True

    def _samples(self, line: Mapping[str, Any], slow: Mapping[str, float], gpus: Sequence[Any]) -> list[Sample]:
        return [
            *((name, (), value) for name, value in self._constants.items()),
            *((name, (), line[family.field]) for name, family in FAMILIES.items() if family.field),
            ("mfu_ratio", (), line["model_tflops_per_gpu"] / self._peak_tflops),
            ("goodput_ratio", (), goodput(self._useful_s, self._created, line["time"])),
            ("checkpoint_step", (), self._checkpoints.saved_step),
            ("slow_links", (), len(slow)),
            *(("slow_link_ratio", (link,), ratio) for link, ratio in slow.items()),
            *(
                ("part_seconds", (stage, part.removesuffix("_s")), seconds)
                for stage, parts in enumerate(line["breakdown"])
                for part, seconds in parts.items()
            ),
            *(("peak_memory_bytes", (stage,), amount) for stage, amount in enumerate(line["peak_memory_bytes"])),
            *(
                (name, (rank,), figure)
                for rank, figures in enumerate(gpus)
                for name, figure in zip(GPU_FIGURES, figures, strict=False)  # none on CPUs
                if not math.isnan(figure)
            ),
            *((name, labels, total) for (name, *labels), total in self._totals.items()),
        ]


def to_text(run: str, samples: Iterable[Sample]) -> str:
    """Return samples of a run in OpenMetrics' text format, which node_exporter reads too."""
    lines = []
    for name, values in grouped((name, (labels, value)) for name, labels, value in samples):
        lines += [f"# TYPE holmes_{name} {FAMILIES[name].kind}", f"# HELP holmes_{name} {FAMILIES[name].help}"]
        lines += [f"{_sample_name(name, run, *labels)} {value}" for labels, value in values]
    return "\n".join([*lines, "# EOF\n"])


@cache
def _sample_name(name: str, *labels: Any) -> str:
    """Return a sample's name with its labels. Cached, because this is the slowest part of :func:`to_text`.
    `labels`: the run's name, then the values of the family's labels."""
    family = FAMILIES[name]
    pairs = ",".join(f"{k}={to_json(str(v))}" for k, v in zip(("run", *family.labels), labels, strict=True))
    return f"holmes_{name}{'_total' if family.kind == 'counter' else ''}{{{pairs}}}"


def serve(port: int, get_text: Callable[[], str]) -> None:
    """Serve the text of `get_text` on all addresses of this node, on daemon threads. OSError if the port is in use."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds for each read from or write to the connection

        def do_GET(self) -> None:
            body = get_text().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("", port), Handler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
