"""Sending the metrics to TensorBoard, Weights & Biases or MLflow as well, by rank 0 when asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import ConfigError
from holmes_hpc.records.run import RunDirectory

Write = Callable[[int, Mapping[str, float]], None]


def figures(entry: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line of metrics.jsonl under flat names: ``breakdown/0/compute_s``, ``nic_bytes/ethernet/tx``."""
    for key, value in entry.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from figures(value, f"{name}/")
        elif isinstance(value, list):
            yield from figures({str(i): item for i, item in enumerate(value)}, f"{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and key != "step":
            yield name, float(value)


class Loggers:
    """All that the configuration asks for. ConfigError, with what to install, for one that is not there."""

    def __init__(self, train: TrainConfig, run: RunDirectory) -> None:
        made = [(tensorboard, train.tensorboard), (wandb, train.wandb), (mlflow, train.mlflow)]
        opened = [make(run, value, train) for make, value in made if value]
        self._logs, self._closes = [log for log, _ in opened], [close for _, close in opened]

    def write(self, entry: Mapping[str, Any]) -> None:
        values = dict(figures(entry)) if self._logs else {}
        for log in self._logs:
            log(int(entry["step"]), values)

    def close(self) -> None:
        for close in self._closes:
            close()


def tensorboard(run: RunDirectory, value: Any, train: TrainConfig) -> tuple[Write, Callable[[], None]]:
    """Event files under tensorboard/ of the run directory."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise _missing("tensorboard", "train.tensorboard") from e
    writer: Any = SummaryWriter(str(run.path / "tensorboard"))

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, number in values.items():
            writer.add_scalar(name, number, step)

    return log, writer.close


def wandb(run: RunDirectory, value: Any, train: TrainConfig) -> tuple[Write, Callable[[], None]]:
    """A run of the project `value`, named after the run directory; another attempt goes on with it."""
    try:
        import wandb as package
    except ImportError as e:
        raise _missing("wandb", "train.wandb") from e
    opened = package.init(
        project=str(value), name=run.name, id=run.name, resume="allow", dir=str(run.path), config=asdict(train)
    )
    return (lambda step, values: opened.log(dict(values), step=step)), opened.finish


def mlflow(run: RunDirectory, value: Any, train: TrainConfig) -> tuple[Write, Callable[[], None]]:
    """A run under the tracking address `value`."""
    try:
        import mlflow as package
    except ImportError as e:
        raise _missing("mlflow", "train.mlflow") from e
    package.set_tracking_uri(str(value))
    package.start_run(run_name=run.name)
    package.log_params({k: v for k, v in asdict(train).items() if v is not None})
    return (
        lambda step, values: package.log_metrics({k.replace("/", "."): v for k, v in values.items()}, step=step)
    ), package.end_run


def _missing(package: str, key: str) -> ConfigError:
    return ConfigError(
        f"{package} is not installed", where=key, hint=f"pip install 'holmes-hpc[{package}]', or unset it"
    )
