"""Run directories as tables, statistics, figures and reports."""

from holmes_hpc.results.columns import RUN_COLUMNS, STAGE_COLUMNS, STEP_COLUMNS
from holmes_hpc.results.loading.loader import load_runs, load_stages, load_steps
from holmes_hpc.results.plans import read_plan

__all__ = ["RUN_COLUMNS", "STAGE_COLUMNS", "STEP_COLUMNS", "load_runs", "load_stages", "load_steps", "read_plan"]
