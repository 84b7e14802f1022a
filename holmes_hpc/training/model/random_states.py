"""The states of the random number generators that training uses (dropout)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel


def generators() -> dict[str, Any]:
    """The host's, the device's, and those that Megatron-Core keeps beside it."""
    return {
        "host": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """Go on from what :func:`generators` gave."""
    torch.set_rng_state(states["host"])
    torch.cuda.set_rng_state(states["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
