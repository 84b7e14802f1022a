"""Take early optimizer steps even right below the clip, from the second step on: some must be rolled back."""

from __future__ import annotations

from holmes_hpc.training.model import early_step

early_step.RECENT, early_step.SAFE_SHARE = 1, 1.0
