"""The learning rate of each step, and how it changes with the number of steps."""

import math

from holmes_hpc.config.train import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the learning rate of `step` (from 1). It rises linearly over `warmup_steps`, decays to `min_lr` at
    `lr_decay_steps` (default: the last step), and stays there. The decay is half a cosine (Loshchilov and Hutter 2017),
    linear, or, for wsd, linear over only its last `wsd_decay_steps` steps (Hu et al. 2024, arXiv 2404.06395)."""
    peak, low, warmup = train.lr, train.min_lr, train.warmup_steps
    if step <= warmup:
        return float(peak * step / warmup)
    end_step = train.lr_decay_steps or train.steps
    if step >= end_step:
        return float(low)
    decay_start = end_step - train.decay_steps if train.lr_schedule == "wsd" else warmup
    progress = max(0.0, (step - decay_start) / max(1, end_step - decay_start))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if train.lr_schedule == "cosine" else 1 - progress
    return float(low + (peak - low) * remaining)


def describe_lr_change(old: TrainConfig, new: TrainConfig, step: int) -> str | None:
    """Return a message on how the settings `new` change the learning rate from `step` on, and how to keep the old rate.
    None if the decay still ends at the same step, if `new` sets `lr_decay_steps`, or if the rate never decays."""
    if new.lr_decay_steps is not None or new.min_lr == new.lr:
        return None
    end = old.lr_decay_steps or old.steps
    if end == new.steps:
        return None
    old_lr, new_lr = learning_rate(step, old), learning_rate(step, new)
    detail = f": at step {step} it is {new_lr:.3g}, was {old_lr:.3g}" if old_lr != new_lr else f", not {end}"
    change = f"the decay of the learning rate ({new.lr_schedule}) now ends at step {new.steps}{detail}"
    return f"{change}; train.lr_decay_steps={end} keeps the old end"
