"""The metrics line of a step: gather a row from each rank during the next step, and write metrics.jsonl on rank 0.

Rank 0 can also send the line to TensorBoard, Weights & Biases or MLflow.
"""

import importlib
import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import ConfigError
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import hardware_flops_per_step, model_flops_per_step
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.predict import limit_s, stage_speeds
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.metrics import PARTS
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.network.nic_bytes import Rows, sum_by_kind
from holmes_hpc.waiting import wait_until

Write = Callable[[int, Mapping[str, float]], None]
RANKS_EVERY = 100  # steps between the lines of ranks.jsonl
# The columns of a row: loss sum, loss count, peak memory, step time, tokens of its experts, seven byte counts,
# seconds, what the rank has sent to each destination, and (with train.openmetrics) its GPU figures.
_SECONDS = (*PARTS, "expert_s")  # expert_s is within compute_s
_LOSS, _COUNT, _MEMORY, _STEP, _EXPERT_TOKENS = 0, 1, 2, 3, 4
NIC_COLUMNS = slice(5, 12)  # every rank's byte counts, as :meth:`Traffic.take` returned them
_PARTS = NIC_COLUMNS.stop
SENT_COLUMNS = slice(_PARTS + len(_SECONDS), None)  # every rank's `sent`, as in :func:`rank_row`


def peak_memory_bytes(cuda: bool) -> int:
    """Return the peak memory of this rank in bytes: GPU memory with `cuda`, otherwise its process's memory."""
    return torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rank_row(
    loss_sum: float,
    loss_count: int,
    step_time_s: float,
    parts: Mapping[str, float],
    nic: tuple[float, ...],
    memory: int,
    sent: Sequence[float] = (),
    expert_tokens: int = 0,
) -> torch.Tensor:
    """Return one rank's row for one step, a vector in fp64.

    `loss_sum`, `loss_count`: sum and number of its micro-batches' losses on the first TP rank of the last stage, 0 on
    other ranks; `parts`: seconds of each part of the step; `nic`: byte counts of :meth:`Traffic.take`; `memory`: peak
    bytes; `sent`: the values of :meth:`Destinations.row`, then those of :meth:`GpuFigures.read`; `expert_tokens`: the
    count of :class:`TokenCounter` in experts.py."""
    first = loss_sum, loss_count, memory, step_time_s, expert_tokens
    return torch.tensor([*first, *nic, *(parts.get(p, 0.0) for p in _SECONDS), *sent], dtype=torch.float64)


def metrics_line(
    plan: Plan, rows: Rows, step: int, unix_time_s: float, fields: Mapping[str, Any], speeds: Sequence[float]
) -> dict[str, Any]:
    """Return a line of metrics.jsonl, unrounded. holmes_hpc/records/metrics.yaml lists its fields.

    `fields`: further fields of the line; `speeds`: see :func:`speeds_of`.
    """
    counted = rows[:, _COUNT] > 0
    losses, count = sum(rows[counted, _LOSS].tolist()), rows[:, _COUNT].sum()  # numpy's sum would round differently
    step_time_s = float(rows[0, _STEP])
    samples_per_s = plan.batch.global_size / step_time_s
    tera_gpu_seconds = 1e12 * plan.world_size * step_time_s
    rows_of_stage = [_rows_of(ranks.ravel(), rows) for ranks in plan.parallel.grid()]
    # The mean over the stage's ranks, in seconds. The parts add up to the step's time.
    means = [stage_rows[:, _PARTS : _PARTS + len(PARTS)].mean(axis=0) for stage_rows in rows_of_stage]
    stages = [dict(zip(PARTS, seconds.tolist(), strict=True)) for seconds in means]
    hardware_flops = hardware_flops_per_step(plan.model, plan.batch, plan.parallel.vocabulary_parts, plan.recompute)
    return {
        "step": step,
        "time": unix_time_s,
        "step_time_s": step_time_s,
        "loss": losses / count if count else math.nan,
        **fields,
        **(_experts(plan, rows_of_stage) if plan.model.experts.count else {}),
        "tokens_per_s": samples_per_s * plan.batch.sequence_length,
        "samples_per_s": samples_per_s,
        "model_tflops_per_gpu": model_flops_per_step(plan.model, plan.batch) / tera_gpu_seconds,
        "hardware_tflops_per_gpu": hardware_flops / tera_gpu_seconds,
        "breakdown": stages,
        "share_of_limit": limit_s([stage["compute_s"] for stage in stages], speeds) / step_time_s,
        "nic_bytes": sum_by_kind(plan, rows[:, NIC_COLUMNS]),
        "peak_memory_bytes": [int(stage_rows[:, _MEMORY].max()) for stage_rows in rows_of_stage],
    }


def _rows_of(ranks: Rows, rows: Rows) -> Rows:
    """Return the rows of `ranks`, which ascend: a view, because a copy takes long, unless ranks between are missing."""
    first, end = ranks[0], ranks[-1] + 1
    return rows[first:end] if end - first == len(ranks) else rows[ranks]


def _experts(plan: Plan, rows_of_stage: Sequence[Rows]) -> dict[str, float]:
    """Return the fields on experts. `rows_of_stage`: the rows of each stage's ranks."""
    experts, tokens = plan.model.experts, [rows[:, _EXPERT_TOKENS] for rows in rows_of_stage]
    fields = {
        "expert_imbalance": max(float(counts.max() * len(counts) / max(1, counts.sum())) for counts in tokens),
        "expert_s": max(float(part_by_rank(rows, "expert_s").mean()) for rows in rows_of_stage),
    }
    if experts.capacity is not None:
        routed = plan.batch.tokens * experts.top_k * (plan.model.layers - experts.first_dense) * plan.parallel.etp
        fields["dropped_tokens"] = 1 - float(sum(counts.sum() for counts in tokens)) / routed
    return fields


def speeds_of(plan: Plan, train: TrainConfig) -> list[float]:
    """Return the speeds of the plan's stages, relative to each other."""
    return stage_speeds(Layout.of(plan, Costs(pace_layer_ms=train.pace_layer_ms, pace_factors=train.pace_factors)))


def log_text(line: Mapping[str, Any], last_step: int) -> str:
    """Return a metrics line as text for the log."""
    norm = line["grad_norm"]
    return (
        f"step {line['step']}/{last_step}: loss {line['loss']:.4f}, grad norm "
        f"{norm if norm is None else format(norm, '.3f')}, {line['step_time_s']:.3f} s, "
        f"{line['samples_per_s']:.2f} samples/s, {line['model_tflops_per_gpu']:.3g} model TFLOP/s per GPU"
    )


def rank_line(rows: Rows, step: int) -> dict[str, Any]:
    """Return a line of ranks.jsonl: values of every rank for which the metrics line has only one value per stage."""
    return {
        "step": step,
        "compute_s": part_by_rank(rows, "compute_s").tolist(),
        "peak_memory_bytes": rows[:, _MEMORY].astype(int).tolist(),
    }


def part_by_rank(rows: Rows, part: str) -> Rows:
    """Return every rank's seconds in a part of the step (one of _SECONDS), (ranks,)."""
    return rows[:, _PARTS + _SECONDS.index(part)]


class Gathering:
    """A pending gather of one step's rows to rank 0. `tree`: the control tree of a large run, which replaces the
    `group` of all ranks; `fields`: further fields of the step's metrics line."""

    def __init__(
        self, row: torch.Tensor, rank: int, size: int, group: Any, tree: Any, step: int, fields: Mapping[str, Any]
    ) -> None:
        self.step, self.fields, self.unix_time_s = step, dict(fields), time.time()
        self.step_time_s = float(row[_STEP])
        self._row, self._is_on_tree = row, tree is not None  # the row must live until the gather ends
        self._rows = row.new_empty(size, len(row)) if rank == 0 and tree is None else None
        targets = None if self._rows is None else list(self._rows)
        self._work = tree.gather(row) if tree else dist.gather(row, targets, dst=0, group=group, async_op=True)

    def ready(self, wait_s: float) -> bool:
        """Return whether the gather is complete; wait for it at most `wait_s` seconds."""
        return wait_until(self._work.is_completed, wait_s, wait_s / 10)

    def finish(self) -> Rows | None:
        """Wait for the gather. Return every rank's row on rank 0, None on other ranks."""
        result = self._work.wait()
        rows = result if self._is_on_tree else self._rows
        return None if rows is None else rows.numpy()


def flatten(entry: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a metrics line under flat names: ``breakdown/0/compute_s``, ``nic_bytes/ethernet/tx``."""
    for key, value in entry.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}/")
        elif isinstance(value, list):
            yield from flatten({str(i): item for i, item in enumerate(value)}, f"{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and key != "step":
            yield name, float(value)


class Loggers:
    """The experiment loggers of the configuration. Raise ConfigError if a logger's package is not installed."""

    def __init__(self, train: TrainConfig, run: RunDirectory) -> None:
        openers = [(tensorboard, train.tensorboard), (wandb, train.wandb), (mlflow, train.mlflow)]
        loggers = [open_logger(run, value, train) for open_logger, value in openers if value]
        self._logs, self._closes = [log for log, _ in loggers], [close for _, close in loggers]

    def write(self, entry: Mapping[str, Any]) -> None:
        values = dict(flatten(entry)) if self._logs else {}
        for log in self._logs:
            log(int(entry["step"]), values)

    def close(self) -> None:
        for close in self._closes:
            close()


def tensorboard(run: RunDirectory, value: Any, train: TrainConfig) -> tuple[Write, Callable[[], None]]:
    """Open event files under tensorboard/ of the run directory. Return its log and close functions."""
    writer = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(run.path / "tensorboard"))

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, number in values.items():
            writer.add_scalar(name, number, step)

    return log, writer.close


def wandb(run: RunDirectory, value: Any, train: TrainConfig) -> tuple[Write, Callable[[], None]]:
    """Open a W&B run in the project `value`, named after the run directory. Return its log and close functions.
    A later attempt of the run continues the same W&B run."""
    logger = _import("wandb", "wandb").init(
        project=str(value), name=run.name, id=run.name, resume="allow", dir=str(run.path), config=asdict(train)
    )
    return (lambda step, values: logger.log(dict(values), step=step)), logger.finish


def mlflow(run: RunDirectory, value: Any, train: TrainConfig) -> tuple[Write, Callable[[], None]]:
    """Open a run at the tracking URI `value`. Return its log and close functions."""
    package = _import("mlflow", "mlflow")
    package.set_tracking_uri(str(value))
    package.start_run(run_name=run.name)
    package.log_params({k: v for k, v in asdict(train).items() if v is not None})
    return (
        lambda step, values: package.log_metrics({k.replace("/", "."): v for k, v in values.items()}, step=step)
    ), package.end_run


def _import(module: str, package: str) -> Any:
    what, hint = f"{package} is not installed", f"pip install 'holmes-hpc[{package}]', or unset it"
    with ConfigError.instead_of(ImportError, where=f"train.{package}", hint=hint, what=what):
        return importlib.import_module(module)
