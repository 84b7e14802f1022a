"""What is composed of the declared options is what Hydra composes of the files."""

import pytest

from holmes_hpc.config import composition
from holmes_hpc.config.composition import composed
from holmes_hpc.config.configuration import from_dict
from holmes_hpc.config.group_options import OPTIONS
from holmes_hpc.config.models import BATCHES, MODELS
from holmes_hpc.errors import ConfigError

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
QUOTED = [
    "plan.nodes={ib-a: 2}",
    "partitions=[a,b]",
    "+labels.system=x",
    "++train.lr=1",
    "train.lr=1_000",
    "train.lr=.5",
    "name=${oc.env:HOME}",
    "name='a b'",
    "name=a:b",
    'name="7"',
    "+plan.nodes.ib-a=2",
    "name=1.2.3",
    "slurm.mem=8G",
    "slurm.timeout_min=1-12:00:00",
]
LEFT_TO_HYDRA = ["~train.lr", "hydra.run.dir=x", "+sweep=ablation"]
REFUSED = [
    "train.lr",
    "train.lr=1,2",
    "+train.lr=1",
    "+model=gpt_small",
    "labels.system=x",
    "plan.nodes.ib-a=2",
    "train.stps=1",
    "model=gpt_3_6",
    "model=[gpt_tiny]",
    "data=indexed",
    "name=-x}",
    "plan@x=default",
]


def only_by_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "_compose_declared", lambda _: None)


@pytest.mark.parametrize("overrides", [*PLAIN, *([word] for word in QUOTED)], ids=" ".join)
def test_declared_options_are_composed_as_hydra_does(monkeypatch: pytest.MonkeyPatch, overrides: list[str]) -> None:
    with monkeypatch.context() as without_hydra:
        without_hydra.delattr(composition, "_compose_by_hydra")
        config = from_dict(composed(overrides))
    only_by_hydra(monkeypatch)
    assert config == from_dict(composed(overrides))


def test_every_named_model_brings_the_batch_that_hydra_gives_it() -> None:
    for name, model in MODELS.items():
        if name in BATCHES:
            config = from_dict(composed([f"model={name}"]))
            assert (config.model, config.batch) == (model, BATCHES[name])


@pytest.mark.parametrize("override", LEFT_TO_HYDRA)
def test_what_the_declared_options_cannot_say_is_left_to_hydra(monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    config = composed([override])
    only_by_hydra(monkeypatch)
    assert config == composed([override])


@pytest.mark.parametrize("override", REFUSED)
def test_what_hydra_refuses_is_refused_alike(monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        composed([override])
    only_by_hydra(monkeypatch)
    with pytest.raises(ConfigError) as by_hydra:
        composed([override])
    assert str(refused.value) == str(by_hydra.value)


@pytest.mark.parametrize("word", ["data.split=90,10", "data.split='90,10'", 'data.split="90,10"'])
def test_a_split_needs_no_quotes(word: str) -> None:
    assert composed([word])["data"]["split"] == "90,10"


@pytest.mark.parametrize("name", ["1e5", "007", "2026-01", "5", "null", "a-1"])
def test_the_name_of_a_run_is_taken_literally(name: str) -> None:
    assert composed([f"name={name}"])["name"] == (None if name == "null" else name)
