"""What is composed without Hydra is what Hydra composes."""

import pytest

from holmes_hpc.config.by_hydra import composed
from holmes_hpc.config.configuration import from_dict
from holmes_hpc.config.models import BATCHES, MODELS
from holmes_hpc.config.options import OPTIONS, plain

pytestmark = pytest.mark.integration

PLAIN = [
    *([f"model={name}"] for name in ("gpt_3_6b", "llama3_1_8b")),
    ["batch=paper_3_6b", "model=gpt_3_6b"],
    *([f"{group}={option}"] for group, options in OPTIONS.items() for option in options if option != "indexed"),
    ["data=indexed", "data.prefix=/data/a-b_c.d/text"],
    ["name=run-7", "train.lr=1e-3"],
    ["train.steps=+7", "train.lr=0.5E-2", "train.overlap_grad_reduce=FALSE", "plan.tp=null", "name=7"],
    ["batch.global_size=64", "batch.micro_size=2", "slurm.qos=high", "partitions=gpu", "slurm.account=Null"],
]
LEFT_TO_HYDRA = [
    "plan.nodes={ib-a: 2}",
    "partitions=[a,b]",
    "+labels.system=x",
    "~train.lr",
    "train.lr=1_000",
    "train.lr=.5",
    "train.lr=inf",
    "name=${oc.env:HOME}",
    "name='a b'",
    "train.lr",
    "name=a:b",
    "hydra.run.dir=x",
    "labels=x",
    'name="7"',
    "name=",
    "train.stps=1",
    "model=gpt_3_6",
    "data=indexed",
    "plan.nodes.ib-a=2",
    "name=1.2.3",
    "name=-x",
    "slurm.mem=8G",
]


@pytest.mark.parametrize("overrides", PLAIN)
def test_plain_overrides_are_composed_as_hydra_does(overrides: list[str]) -> None:
    made = plain(overrides)
    assert made is not None and from_dict(made) == from_dict(composed(overrides))


def test_every_named_model_brings_the_batch_that_hydra_gives_it() -> None:
    for name, model in MODELS.items():
        made = plain([f"model={name}"])
        assert (made is None) == (name not in BATCHES)
        if made is not None:
            assert (from_dict(made).model, from_dict(made).batch) == (model, BATCHES[name])


@pytest.mark.parametrize("override", LEFT_TO_HYDRA)
def test_anything_else_is_left_to_hydra(override: str) -> None:
    assert plain([override]) is None and plain(["name=a", "name=b"]) is None
