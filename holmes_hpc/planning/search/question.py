"""What a plan is searched for."""

from __future__ import annotations

from typing import NamedTuple

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.cost.costs import Costs


class Question(NamedTuple):
    """A model and a batch to train on a site, what is fixed of the plan, and the costs it is judged by."""

    model: ModelSpec
    batch: Batch
    site: Site
    options: PlanOptions
    costs: Costs
