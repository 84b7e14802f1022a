"""What came out: run directories as tables, statistics, figures and reports."""

from holmes_hpc.results.columns import RUN_COLUMNS, STAGE_COLUMNS, STEP_COLUMNS, unpack
from holmes_hpc.results.loading.loader import load_runs, load_stages, load_steps

__all__ = ["RUN_COLUMNS", "STAGE_COLUMNS", "STEP_COLUMNS", "load_runs", "load_stages", "load_steps", "unpack"]
