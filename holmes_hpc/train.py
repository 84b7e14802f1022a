"""The Hydra application: one rank under srun or torchrun, a single process, or a sweep with a launcher.

srun python -m holmes_hpc.train plan_file=runs/a/plan.yaml run_dir=runs/a
torchrun --nproc-per-node 4 -m holmes_hpc.train plan.pp=2 run_dir=runs/b
holmes-train model=gpt_tiny train.steps=20
holmes-train -m --config-dir sweeps +sweep=nic_environments hydra/launcher=holmes_slurm
"""

import functools
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from holmes_hpc import console
from holmes_hpc.config.composition import explained, for_hydra, resolve
from holmes_hpc.config.configuration import Configuration, LauncherConfig
from holmes_hpc.config.flags import quoted
from holmes_hpc.errors import HolmesError
from holmes_hpc.interpreter import check_working_directory
from holmes_hpc.planning.request import load_site, local_site, make_plan, node_settings
from holmes_hpc.rank import rank_and_size, run_rank
from holmes_hpc.records.ownership import careful_umask
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.lifecycle.create import create_run, record_fields
from holmes_hpc.submission.lifecycle.outcome import build_result
from holmes_hpc.submission.plan_job import PlannedJob


def _with_local_plan(config: Configuration) -> Configuration:
    """Plan for the ranks of this machine, and return `config` with the plan's path. Rank 0 creates the run."""
    rank, size = rank_and_size()
    if not config.run_dir:
        raise HolmesError("no run_dir, which several ranks must share", where="train", hint="add run_dir=DIR")
    plan = make_plan(config, local_site(size, config.train.device))
    config = replace(config, plan_file=str(Path(config.run_dir) / "plan.yaml"))
    if rank == 0:
        create_run(config, plan, list(HydraConfig.get().overrides.task))
    return config


def _run_and_record(config: Configuration) -> float | None:
    """Run this rank and return the final loss. Rank 0 writes result.json, because no batch script does."""
    assert config.run_dir is not None
    run, code = RunDirectory(config.run_dir), 1
    try:
        loss: float | None = run_rank(config.to_dict()).get("loss")
        code = 0
        return loss
    finally:
        if rank_and_size()[0] == 0:
            run.write_result(build_result(run, code), writer="follower")


def app(cfg: DictConfig) -> float | None:
    """Run this process as one rank, and return the final loss for sweepers that optimise it."""
    try:
        config = resolve(cfg, HydraConfig.get().overrides.task)
        if not config.plan_file:
            config = config.with_data()
            if not config.run_dir and rank_and_size()[1] == 1:
                config = replace(config, run_dir=HydraConfig.get().runtime.output_dir)
            return _run_and_record(_with_local_plan(config))
        return run_rank(config.to_dict()).get("loss")
    except HolmesError as e:
        _exit_with(e)


def plan_job(cfg: DictConfig, where: str) -> PlannedJob:
    """Return one planned job of a sweep, to run on "slurm" or "local". Both launchers of hydra_plugins call it."""
    config = replace(resolve(cfg), launcher=LauncherConfig(where))
    site = None if where == "local" or config.plan_file else _site(config.site_file, node_settings(config))
    plan = make_plan(config, site)
    config = replace(config, model=plan.model, batch=plan.batch).with_data()
    return PlannedJob(plan, config.to_dict(), run_rank, config.slurm, record_fields(config, plan))


_site = functools.cache(load_site)  # read once for all jobs of a sweep


app.plan_job = plan_job  # type: ignore[attr-defined]


def main() -> None:
    careful_umask()
    rank = rank_and_size()[0]
    overrides = [argument for argument in sys.argv[1:] if "=" in argument]
    run_dir = next((argument.split("=", 1)[1] for argument in overrides if argument.startswith("run_dir=")), None)
    if run_dir and not any(argument.startswith("hydra.run.dir=") for argument in overrides):
        sys.argv.append("hydra.run.dir=" + quoted(run_dir))
    if rank > 0:  # only rank 0 writes Hydra's own files
        sys.argv += ["hydra.output_subdir=null", "hydra/job_logging=disabled", "hydra/hydra_logging=disabled"]
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # main() prints the errors of this package as one line
    try:
        check_working_directory()
        sys.argv[1:] = for_hydra(sys.argv[1:])
        hydra.main(config_path="pkg://holmes_hpc.generated_conf", config_name="config", version_base="1.3")(app)()
    except HydraException as e:
        _exit_with(explained(e))
    except HolmesError as e:
        _exit_with(e)
    except KeyboardInterrupt:  # the launcher has already reported which jobs continue
        console.problem("interrupted")
        sys.exit(130)


def _exit_with(error: HolmesError) -> NoReturn:
    console.problem(error)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
