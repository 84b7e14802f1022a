"""Codecs of the activations between pipeline stages: unchanged or rounded (`plan.edge_dtype`, on TCP only).

Rounding changes activations and their gradients, and so the losses (docs/schedule.md has figures).
"""

import math

import torch

SCALE_BYTES = 4  # an fp32 scale beside every row


class Codec:
    """The format of a tensor on the wire. `dtype`: a type of the same range to round to; None: the tensor's own.
    `encode` returns the contiguous tensor to send; `buffer` returns the tensor to receive into for a `target`; `decode`
    writes the received value into `target`. Without a conversion the buffer is `target` itself."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype or tensor.dtype)

    def buffer(self, target: torch.Tensor) -> torch.Tensor:
        return target if self._dtype is None else torch.empty_like(target, dtype=self._dtype)

    def decode(self, wire: torch.Tensor, target: torch.Tensor) -> None:
        if wire is not target:
            target.copy_(wire)


class RowScaled(Codec):
    """A codec that rounds to a type of small range, with one scale per row (one token's hidden vector).
    The scale maps the row's largest absolute value to the largest value of the type, because gradients of activations
    are often too small for fp16. The tensor on the wire has bytes, (rows, columns * size + 4). The last four bytes of a
    row are its largest absolute value in fp32. A row with inf or nan arrives as nan, so that loss scaling and checks
    for bad values still detect it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.max_value = dtype, torch.finfo(dtype).max

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.reshape(-1, tensor.shape[-1]).float()
        largest = rows.abs().amax(dim=1, keepdim=True)
        scale = self.max_value / largest.clamp(min=torch.finfo(torch.float32).tiny * self.max_value)
        return torch.cat([(rows * scale).to(self.dtype).view(torch.uint8), largest.view(torch.uint8)], dim=1)

    def buffer(self, target: torch.Tensor) -> torch.Tensor:
        row_bytes = target.shape[-1] * self.dtype.itemsize + SCALE_BYTES
        return torch.empty(math.prod(target.shape[:-1]), row_bytes, dtype=torch.uint8, device=target.device)

    def decode(self, wire: torch.Tensor, target: torch.Tensor) -> None:
        values = wire[:, :-SCALE_BYTES].contiguous().view(self.dtype).float()
        largest = wire[:, -SCALE_BYTES:].contiguous().view(torch.float32)
        target.copy_((values * (largest / self.max_value)).reshape(target.shape))


IDENTITY = Codec()
_CODECS: dict[str, tuple[int, Codec]] = {  # bytes of a value on the wire (64: more than any type has), codec
    "same": (64, IDENTITY),
    "bf16": (2, Codec(torch.bfloat16)),
    "fp16": (2, RowScaled(torch.float16)),
    "fp8": (1, RowScaled(torch.float8_e4m3fn)),
}


def codec(edge_dtype: str, model_dtype: torch.dtype) -> Codec:
    """Return the codec of `plan.edge_dtype` for activations of `model_dtype`; IDENTITY if it saves no bytes."""
    size, chosen = _CODECS[edge_dtype]
    return chosen if size < model_dtype.itemsize else IDENTITY
