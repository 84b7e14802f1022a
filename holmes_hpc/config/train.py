"""The configuration group `train`: steps, optimizer, overlap, outputs, time limits and restarts."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from holmes_hpc.errors import Case, ConfigError
from holmes_hpc.schema import Checked, key

EARLY_STEPS = ("off", "stage")
GRAD_DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Profile(Checked, where="train.profile"):
    """The steps and ranks that torch's profiler traces."""

    start: Annotated[int, key("first step", ge=1)]
    stop: Annotated[int, key("last step", ge=1)]
    ranks: Annotated[tuple[int, ...], key("global ranks", ge=0)] = (0,)

    def check_ranks(self, world_size: int) -> None:
        """Raise ConfigError for a rank that a run of `world_size` ranks lacks."""
        last_rank, hint = max(self.ranks, default=0), f"use 0 to {world_size - 1}"
        problem = f"rank {last_rank} does not exist"
        ConfigError.refuse("train.profile.ranks", (last_rank >= world_size, problem, hint))


@dataclass(frozen=True)
class TrainConfig(Checked, where="train", dotted=True):
    """The settings of a training run. Intervals are in steps; 0 switches them off."""

    steps: Annotated[int, key("total optimizer steps, counted from the run's first", ge=1)] = 20
    seed: Annotated[
        int, key("seed of initial weights and dropout, and of the data order if data.seed is null", ge=0, lt=1 << 32)
    ] = 1234
    device: Annotated[
        str, key("auto: CUDA if there is a device, except for a plan with CPU ranks", one_of=("auto", "cpu", "cuda"))
    ] = "auto"
    dtype: Annotated[
        str,
        key(
            "type of weights and activations; auto: bf16 on GPUs (fp16 if one has no bf16), fp32 on CPUs",
            one_of=("auto", "fp32", "bf16", "fp16"),
        ),
    ] = "auto"
    grad_dtype: Annotated[
        str | None,
        key("type of gradient sums and their traffic: fp32, or that of the weights; null: fp32", one_of=GRAD_DTYPES),
    ] = None
    fp8: Annotated[
        str | None,
        key(
            "fp8 matrix products with Transformer Engine, scaled by the largest values of recent steps (delayed), of "
            "the tensor (tensorwise) or of each block (mxfp8, Blackwell); null: none",
            one_of=("delayed", "tensorwise", "mxfp8"),
        ),
    ] = None
    # the optimizer
    optimizer: Annotated[
        str,
        key(
            "adam: AdamW; muon: Muon for matrices and AdamW for the rest (needs Megatron-Core "
            "0.18 or later and the package emerging-optimizers)",
            one_of=("adam", "muon"),
        ),
    ] = "adam"
    lr: Annotated[float, key("peak learning rate", ge=0)] = 1.0e-3
    min_lr: Annotated[float, key("learning rate after the decay, at most lr", ge=0)] = 1.0e-4
    warmup_steps: Annotated[int, key("steps over which the learning rate rises to lr", ge=0)] = 0
    lr_decay_steps: Annotated[int | None, key("step at which lr reaches min_lr; null: steps", ge=1)] = None
    lr_schedule: Annotated[
        str,
        key(
            "decay after the warm-up: cosine or linear down to min_lr; "
            "wsd: constant at lr, then linear over the last wsd_decay_steps",
            one_of=("cosine", "linear", "wsd"),
        ),
    ] = "cosine"
    wsd_decay_steps: Annotated[int | None, key("decay steps of lr_schedule wsd; null: a tenth of all", ge=1)] = None
    weight_decay: Annotated[float, key("decoupled weight decay of matrices (norms and biases do not decay)", ge=0)] = (
        0.01
    )
    beta1: Annotated[float, key("Adam's decay of the first moment", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, key("Adam's decay of the second moment", ge=0, lt=1)] = 0.95
    eps: Annotated[float, key("Adam's epsilon", gt=0)] = 1.0e-8
    clip_grad: Annotated[float, key("norm to which gradients are clipped; 0: no clipping", ge=0)] = 1.0
    early_step: Annotated[
        str | None,
        key(
            "stage: stages update weights before the gradient norm is known, and undo it if wrong; null: as planned",
            one_of=EARLY_STEPS,
        ),
    ] = None
    # overlap of data-parallel traffic with compute
    overlap_grad_reduce: Annotated[bool, key("reduce gradients during the backward pass")] = True
    overlap_param_gather: Annotated[bool, key("gather parameters during the forward pass")] = True
    # outputs and their intervals
    log_interval: Annotated[int, key("steps between log lines", ge=1)] = 1
    eval_interval: Annotated[int, key("steps between validations", ge=0)] = 0
    eval_steps: Annotated[int, key("validation batches", ge=1)] = 4
    checkpoint_interval: Annotated[
        int, key("steps between checkpoints; 0: save only if a signal ends the run", ge=0)
    ] = 0
    checkpoint_keep: Annotated[int, key("number of newest checkpoints to keep", ge=1)] = 2
    checkpoint_dir: Annotated[
        str | None, key("folder that all nodes share, with a subfolder for each run; null: the run directory")
    ] = None
    checkpoint_async: Annotated[bool, key("write checkpoints during the next steps")] = True
    trace: Annotated[bool, key("write trace/rank-*.jsonl: compute and send times of each micro-batch")] = False
    profile: Annotated[
        Profile | None, key("torch's profiler writes trace/profile-rank-*.json.gz: {start: 10, stop: 12, ranks: [0]}")
    ] = None
    tensorboard: Annotated[bool, key("also write metrics for TensorBoard")] = False
    wandb: Annotated[str | None, key("also send metrics to this Weights & Biases project")] = None
    mlflow: Annotated[str | None, key("also send metrics to this MLflow tracking address")] = None
    openmetrics: Annotated[
        int | str | None, key("file of live metrics, or port of rank 0's node that serves them", ge=1, lt=1 << 16)
    ] = None
    # time limits and restarts
    max_restarts: Annotated[
        int,
        key(
            "restarts after failures while the run makes new steps; those after preemption or the time limit do not "
            "count",
            ge=0,
        ),
    ] = 0
    watchdog_s: Annotated[
        float, key("step time that counts as a hang; ten times that for set-up and checkpoints", unit="s", gt=0)
    ] = 600
    net_timeout_s: Annotated[
        float,
        key(
            "time after which the rendezvous, the set-up of a group, or on CPUs any collective is a hang",
            unit="s",
            gt=0,
        ),
    ] = 120
    # for experiments
    pace_layer_ms: Annotated[
        float | None,
        key(
            "emulated compute: a layer's forward pass takes this long by waiting, its backward pass twice; null: off",
            unit="ms",
            gt=0,
        ),
    ] = None
    pace_factors: Annotated[
        Mapping[str, float] | None,
        key(
            "multiples of pace_layer_ms for a pool, or for single nodes: {roce-a: 3, 'ib[3-4]': 2}; null: 1 for all",
            gt=0,
        ),
    ] = None
    measure: Annotated[
        bool, key("after the steps, time their parts and the networks, for calibration.yaml (holmes calibrate)")
    ] = False

    def _mistakes(self) -> Iterator[Case]:
        end_key = "lr_decay_steps" if self.lr_decay_steps else "steps"
        end_step, is_wsd = self.lr_decay_steps or self.steps, self.lr_schedule == "wsd"
        problem = f"train.grad_dtype is {self.grad_dtype}, but train.dtype is {self.dtype}"
        is_wrong_dtype = self.grad_dtype not in (None, "fp32", self.dtype) and self.dtype != "auto"
        yield is_wrong_dtype, problem, "use fp32, or the type of the weights"
        cannot_undo = self.optimizer == "muon" or self.dtype == "fp16" or self.fp8 == "delayed"
        problem = "train.early_step is stage, but steps of muon, fp16 and fp8 delayed cannot be undone"
        yield self.early_step == "stage" and cannot_undo, problem, "remove train.early_step, or use adam and bf16"
        hint = f"use a number from 0 up to lr, which is {self.lr}"
        yield self.min_lr > self.lr, f"train.min_lr is {self.min_lr}", hint
        if self.profile is not None:
            is_outside = not self.profile.start <= self.profile.stop <= self.steps
            hint = f"use a step from start up to steps, which is {self.steps}"
            yield is_outside, f"train.profile.stop is {self.profile.stop}", hint
        is_unread = isinstance(self.openmetrics, str) and not self.openmetrics.endswith(".prom")
        yield is_unread, f"train.openmetrics is {self.openmetrics}", "use a name that ends with .prom, or a port"
        hint = f"use a whole number from 0 up to {end_key}, which is {end_step}"
        yield self.warmup_steps > end_step, f"train.warmup_steps is {self.warmup_steps}", hint
        problem = f"train.wsd_decay_steps is set, but train.lr_schedule is {self.lr_schedule}"
        hint = "remove train.wsd_decay_steps, or add train.lr_schedule=wsd"
        yield self.wsd_decay_steps is not None and not is_wsd, problem, hint
        hint = "use a whole number from 1 up to the number of steps after the warm-up,"
        hint += f" which is {end_step - self.warmup_steps}"
        is_long = is_wsd and self.warmup_steps + self.decay_steps > end_step
        yield is_long, f"train.wsd_decay_steps is {self.decay_steps}", hint

    @property
    def decay_steps(self) -> int:
        """The steps over which the learning rate falls with lr_schedule wsd."""
        return self.wsd_decay_steps or math.ceil((self.lr_decay_steps or self.steps) / 10)
