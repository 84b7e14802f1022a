"""The type of weights that ``train.dtype=auto`` means for kinds of GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sites import A100

from holmes_hpc.fabric.site import CPU, auto_dtype
from holmes_hpc.planning.cost.costs import Costs


@pytest.mark.parametrize("name", ["v100-32gb", "v100-16gb", "p100", "t4", "rtx-8000", "rtx-6000", "Tesla V100-SXM2"])
def test_gpus_without_bf16_mean_fp16_without_flash_attention(name: str) -> None:
    old, new = replace(A100, name=name, attention=None), replace(A100, attention=None)
    costs = Costs()
    assert (costs.dtype_of(old), costs.dtype_of(new)) == ("fp16", "bf16")
    assert (costs.software_on(old).attention, costs.software_on(new).attention) == ("sdpa", "flash")
    assert (auto_dtype([new, old]), auto_dtype([new]), auto_dtype([CPU])) == ("fp16", "bf16", "fp32")
    assert all(replace(A100, name=n).has_bf16 for n in ("rtx-6000-ada", "rtx-pro-6000", "rtx-a6000", "l40s", "h100"))
