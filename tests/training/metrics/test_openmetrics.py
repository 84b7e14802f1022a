"""Live metrics in OpenMetrics' text format: their figures, the file and the port, and failures to write them."""

from __future__ import annotations

import json
import re
import socket
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import spawn

from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import ConfigError
from holmes_hpc.planning.plan.plan import Predicted
from holmes_hpc.records.metrics import PARTS
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.metrics import openmetrics
from holmes_hpc.training.metrics.openmetrics import CONTENT_TYPE, GPU_FIGURES, Exporter, GpuFigures
from holmes_hpc.training.network.audit import planned_bytes

PLAN = replace(spawn.plan(pp=2, dp=2), predicted=Predicted(1, 1, 1, 1, (1, 1), {"ethernet": 100.0, "ib-0": 50.0}, {}))


def line(step: int, time_s: float = 0.0) -> dict:
    return {
        "step": step,
        "time": time_s or time.time(),
        "step_time_s": 2.0,
        "loss": 3.5,
        "tokens_per_s": 64.0,
        "model_tflops_per_gpu": 0.01,
        "share_of_limit": 0.75,
        "breakdown": [dict.fromkeys(PARTS, 0.25), dict.fromkeys(PARTS, 0.5)],
        "nic_bytes": {"ethernet": {"tx": 7, "rx": 5}},
        "fabric_bytes": {"ib-0": {"roce-1": 30}, "roce-1": {"ib-0": 40}},
        "peak_memory_bytes": [20, 40],
    }


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "one")


def exporter(run: RunDirectory, target: int | str, attempt: int = 1, saved_step: int = 0) -> Exporter:
    session, checkpoints = SimpleNamespace(plan=PLAN, run=run, attempt=attempt), SimpleNamespace(saved_step=saved_step)
    train = TrainConfig(steps=9, openmetrics=target)
    return Exporter(session, train, {"ethernet": 1.5}, checkpoints, planned_bytes(PLAN, "fp32"))  # type: ignore[arg-type]


def samples(text: str) -> dict[str, float]:
    """Return sample -> value, without the label `run`; check the text's form."""
    lines = text.splitlines()
    assert lines[-1] == "# EOF" and text.endswith("\n")
    values = {}
    for text_line in lines[:-1]:
        match = re.fullmatch(r'(# (TYPE|HELP) holmes_.*)|holmes_(\w+)\{run="one",?(.*)\} (\S+)', text_line)
        assert match, text_line
        if match[3]:
            values[f"{match[3]}{{{match[4]}}}"] = float(match[5])
    return values


def test_the_file_has_the_last_steps_figures_and_the_attempts_sums(run: RunDirectory, monkeypatch) -> None:
    monkeypatch.setattr(openmetrics, "EVERY_S", 60.0)
    metrics, path = exporter(run, "holmes.prom", saved_step=2), run.path / "holmes.prom"
    gpus = [[0.5, 300.0, 60.0, 1e9], [float("nan")] * 4, [0.25, 200.0, float("nan"), 2e9], [0.0] * 4]
    for step in (1, 2, 3):
        metrics.add(line(step), {"nodes ib1 and roce1": 20.0}, gpus)
        assert samples(path.read_text())["step{}"] == 1  # the next write is due after a minute
    metrics.write()
    values = samples(path.read_text())
    assert values["step{}"] == 3 and values["steps{}"] == 9 and values["loss{}"] == 3.5
    assert values["share_of_limit_ratio{}"] == 0.75
    assert values["mfu_ratio{}"] == pytest.approx(0.01 / PLAN.site.pools[0].gpu.peak_tflops)
    assert values['part_seconds{stage="1",part="compute"}'] == 0.5
    assert values['nic_bytes_total{network="ethernet",direction="tx"}'] == 21
    assert values['nic_planned_bytes_total{network="ethernet"}'] == 450  # with headers
    assert values['nic_planned_bytes_total{network="ib-0"}'] == 150
    assert values['fabric_bytes_total{sender="roce-1",receiver="ib-0"}'] == 120
    planned = {k: v for k, v in values.items() if k.startswith("fabric_planned")}
    edge = 3 * PLAN.micro_batches * 2 * PLAN.batch.sequence_length * PLAN.model.hidden * 4
    assert planned == {
        f'fabric_planned_bytes_total{{sender="{a}",receiver="{b}"}}': edge
        for a, b in (("ib-0", "roce-1"), ("roce-1", "ib-0"))
    }
    assert values["slow_links{}"] == 1 and values['slow_link_ratio{link="nodes ib1 and roce1"}'] == 20
    assert values["checkpoint_step{}"] == 2 and values['peak_memory_bytes{stage="1"}'] == 40
    assert values['gpu_power_watts{rank="2"}'] == 200 and 'gpu_power_watts{rank="1"}' not in values
    assert sorted(path.parent.glob(".holmes.prom*")) == []  # no temporary file stays


def test_goodput_counts_each_step_once_from_the_submission_on(run: RunDirectory) -> None:
    for step in (1, 2, 3, 4):
        run.append_metrics({"step": step, "attempt": 1, "step_time_s": 10.0})
    submitted = time.time()
    metrics = exporter(run, "m.prom", attempt=2, saved_step=3)  # step 4 is lost
    metrics.add(line(4, submitted + 64.0), {}, [[]] * 4)
    values = samples((run.path / "m.prom").read_text())
    assert values["goodput_ratio{}"] == pytest.approx((3 * 10 + 2) / 64, rel=0.03) and values["restarts{}"] == 1


def test_a_port_serves_the_metrics_and_a_busy_one_is_one_warning(run: RunDirectory, capsys) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        exporter(run, port)
        assert re.fullmatch(
            f".*warning: port {port}: Address already in use; training goes on without .*\n", capsys.readouterr().out
        )
    metrics, served = exporter(run, port), []
    for step in (0, 5):
        if step:
            metrics.add(line(step), {}, [[]] * 4)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
            assert response.headers["Content-Type"] == CONTENT_TYPE
            served.append(samples(response.read().decode()))
    assert not served[0] and served[1]["step{}"] == 5  # before the first step, a valid answer without samples
    assert capsys.readouterr().out == ""


def test_a_file_that_cannot_be_written_is_one_warning(run: RunDirectory, capsys, monkeypatch) -> None:
    monkeypatch.setattr(openmetrics, "EVERY_S", 0.0)
    metrics = exporter(run, "missing/m.prom")
    metrics.add(line(1), {}, [[]] * 4)
    metrics.add(line(2), {}, [[]] * 4)
    out = capsys.readouterr().out
    assert out.count("warning: ") == 1 and "missing/m.prom: No such file or directory; training goes on" in out
    (run.path / "missing").mkdir()
    metrics.add(line(3), {}, [[]] * 4)
    assert samples((run.path / "missing" / "m.prom").read_text())["step{}"] == 3


@pytest.mark.parametrize("target", [0, 65536, "/tmp/metrics.txt"])
def test_a_port_out_of_range_or_a_file_that_nobody_reads_is_refused(target: int | str) -> None:
    with pytest.raises(ConfigError, match=f"train.openmetrics is {target}"):
        TrainConfig(openmetrics=target)


def test_figures_that_nvml_lacks_are_left_out(monkeypatch) -> None:
    def absent(device: object) -> int:
        raise ModuleNotFoundError("pynvml")

    for name, figure in (("utilization", 50), ("power_draw", 300_000), ("device_memory_used", 7)):
        monkeypatch.setattr(openmetrics.torch.cuda, name, lambda device, figure=figure: figure)
    monkeypatch.setattr(openmetrics.torch.cuda, "temperature", absent)
    figures = GpuFigures(openmetrics.torch.device("cuda", 0))
    read = dict(zip(GPU_FIGURES, figures.read(), strict=True))
    assert str(read.pop("gpu_temperature_celsius")) == "nan"
    assert read == {"gpu_utilization_ratio": 0.5, "gpu_power_watts": 300, "gpu_memory_bytes": 7}
    monkeypatch.setattr(openmetrics.torch.cuda, "utilization", absent)
    assert figures.read()[0] == 0.5  # five seconds are not over
    assert GpuFigures(None).read() == []


def test_the_grafana_board_shows_every_family_and_no_other() -> None:
    board = json.loads((Path(openmetrics.__file__).parent / "grafana.json").read_text(encoding="utf-8"))
    shown = {
        (match[1], tuple(re.findall(r"{{(\w+)}}", target["legendFormat"])))
        for panel in board["panels"]
        for target in panel["targets"]
        for match in re.finditer(r"holmes_(\w+?)(?:_total)?{run=~", target["expr"])
    }
    assert {name for name, _ in shown} == set(openmetrics.FAMILIES)
    assert all(set(labels) <= {"run", *openmetrics.FAMILIES[name][1]} for name, labels in shown)
