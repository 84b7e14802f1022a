"""The learning rate of each step, and what more steps make of it."""

from __future__ import annotations

import math

from holmes_hpc.config.train import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """The learning rate of `step` (from 1): linear warm-up over `warmup_steps`, then down to `min_lr` at
    `lr_decay_steps` (default: the last step), constant after that. Down in a half cosine (Loshchilov and Hutter 2017),
    in a line, or (wsd) in a line over the last `wsd_decay_steps` alone (Hu et al. 2024, arXiv 2404.06395)."""
    peak, low, warm = train.lr, train.min_lr, train.warmup_steps
    if step <= warm:
        return float(peak * step / warm)
    end = train.lr_decay_steps or train.steps
    if step >= end:
        return float(low)
    first = end - train.decay_steps if train.lr_schedule == "wsd" else warm
    done = max(0.0, (step - first) / max(1, end - first))
    left = 0.5 * (1 + math.cos(math.pi * done)) if train.lr_schedule == "cosine" else 1 - done
    return float(low + (peak - low) * left)


def moved(before: TrainConfig, after: TrainConfig, step: int) -> str | None:
    """In one line, what another number of steps makes of the learning rate from `step` on, and what keeps its end; None
    where it stays, or `lr_decay_steps` says where it is to end."""
    if after.lr_decay_steps is not None or after.min_lr == after.lr:
        return None
    end = before.lr_decay_steps or before.steps
    if end == after.steps:
        return None
    was, now = learning_rate(step, before), learning_rate(step, after)
    here = f": at step {step} it is {now:.3g}, was {was:.3g}" if was != now else f", not {end}"
    return (
        f"the learning rate's {after.lr_schedule} now ends at step {after.steps}{here}; "
        f"train.lr_decay_steps={end} keeps the old end"
    )
