"""Print, in the order of their start, a rank's forward passes and the gathers of its parameters by bucket."""

from __future__ import annotations

from typing import Any

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

from holmes_hpc.training.model import gpt

start_gather, forward = Group.start_param_sync, gpt.forward_step


def print_gather(group: Any, force_sync: bool = False) -> None:
    print("event gather", *(bucket.bucket_id for bucket in group.buckets), len(group.params), flush=True)
    start_gather(group, force_sync)


def print_forward(*arguments: Any, **options: Any) -> Any:
    print("event forward", flush=True)
    return forward(*arguments, **options)


Group.start_param_sync, gpt.forward_step = print_gather, print_forward  # type: ignore[method-assign, assignment]
