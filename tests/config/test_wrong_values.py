"""Wrong values over all groups: refused when the configuration is made, in one line that says what is allowed."""

import pytest

from holmes_hpc.config.composition import load
from holmes_hpc.errors import HolmesError

# override -> words of the line
WRONG = {
    "train.warmup_steps=abc": ("train.warmup_steps is 'abc'", "whole number from 0"),
    "train.seed=abc": ("train.seed is 'abc'", "whole number from 0, below 4294967296"),
    "train.lr_decay_steps=x": ("lr_decay_steps is 'x'", "whole number from 1, or null"),
    "train.beta1=2": ("beta1 is 2", "number from 0, below 1"),
    "train.min_lr=1": ("min_lr is 1", "up to lr, which is 0.001"),
    "train.lr=nan": ("lr is nan", "number from 0"),
    "train.lr=-1e-3": ("lr is -0.001", "number from 0"),
    "train.steps=0": ("steps is 0", "whole number from 1"),
    "train.steps=2.5": ("steps is 2.5", "whole number"),
    "train.trace=2": ("trace is 2", "true or false"),
    "train.dtype=bf61": ("dtype is 'bf61'", "did you mean 'bf16'?)"),
    "train.device=gpu": ("device is 'gpu'", "auto, cpu, cuda"),
    "train.watchdog_s=0": ("watchdog_s is 0", "above 0 (s)"),
    "train.pace_layer_ms=fast": ("pace_layer_ms is 'fast'", "number above 0 (ms), or null"),
    "+train.optimiser=muon": ("train", "unknown key 'optimiser'"),
    "train.stpes=3": ("unknown key 'train.stpes'", "did you mean 'train.steps'?"),
    "+calibraton=x": ("unknown key 'calibraton'", "did you mean 'calibration'?"),
    "data.learnable=maybe": ("data.learnable is 'maybe'", "true or false"),
    "data.kind=sythetic": ("kind is 'sythetic'", "did you mean 'synthetic'?)"),
    "data.seed=4294967296": ("seed is 4294967296", "below 4294967296"),
    "data=indxed": ("no data 'indxed'", "did you mean 'indexed'?"),
    "plan.tp=two": ("plan.tp is 'two'", "whole number from 1, or null"),
    "plan.distributed_optimizer=maybe": ("distributed_optimizer is 'maybe'", "use true or false, null or auto"),
    "plan.nodes={ib-a: 0}": ("plan.nodes is {'ib-a': 0}", "whole numbers from 1"),
    "plan.layers_per_stage=[1,x]": ("layers_per_stage is", "list of whole numbers from 1"),
    "plan.schedule=1fb1": ("schedule is '1fb1'", "did you mean '1f1b'?)"),
    "plan.max_memory_gib=-3": ("max_memory_gib is -3", "above 0 (GiB)"),
    "plan.edge_connections=0": ("edge_connections is 0", "whole number from 1"),
    "model.heads=0": ("heads is 0", "whole number from 1"),
    "model.dropout=1": ("dropout is 1", "from 0, below 1"),
    "model=lama2_7b": ("no model 'lama2_7b'", "did you mean 'llama2_7b'?"),
    "batch.micro_size=a": ("batch.micro_size is 'a'", "whole number from 1 (sequences)"),
    "slurm.timeout_min=0": ("slurm.timeout_min is 0", "whole number from 1"),
    "slurm.timeout_min=soon": ("slurm.timeout_min is 'soon'", "use minutes (1 or more)"),
    "slurm.timeout_min='0:00'": ("slurm.timeout_min is '0:00'", "1-12:00:00"),
    "slurm.cpus_per_task=many": ("cpus_per_task is 'many'", "whole number from 1, or null"),
    "slurm.mem=64GBB": ("slurm.mem is '64GBB'", "K, M, G or T: 64G"),
    "slurm.pools={ib-a: {mem: 5X}}": ("slurm.mem is '5X'", "64G"),
    "train.lr=1e-3,2e-3": ("train.lr has several values", "holmes-train -m"),
    "slurm.setup=source": ("setup is 'source'", "list of texts"),
    "slurm.pools={ib-a: {qos: 3}}": ("slurm.pools.ib-a", "qos is 3", "text, or null"),
    "slurm.pools={ib-a: {qso: x}}": ("slurm.pools.ib-a", "unknown key 'qso'", "did you mean 'qos'?"),
    "launcher.kind=slrum": ("launcher.kind is 'slrum'", "did you mean 'slurm'?)"),
    "partitions=3": ("partitions is 3", "text or a list of texts"),
    "labels=x": ("labels is 'x'", "keys with values"),
    "elastic=true": ("elastic=true is no name of a group", "write elastic.KEY=VALUE"),
    "batch=3": ("batch=3 is no name of a group",),
    "labels={x: y}": ("unknown key 'labels'", "write +labels.NAME=VALUE"),
}


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(HolmesError) as refused:
        load(["train.lr=x", "train.steps=0", "plan.tp=two", "slurm.mem=3Q"])
    lines = {str(error).partition(";")[0] for error in (refused.value, *refused.value.others)}
    assert lines == {"train.lr is 'x'", "train.steps is 0", "plan.tp is 'two'", "slurm.mem is '3Q'"}


def test_all_unknown_keys_are_named_at_once() -> None:
    with pytest.raises(HolmesError) as refused:
        load(["train.stps=1", "plan.tp=2", "epochs=3", "+labels.a=b"])
    lines = [str(error).partition(";")[0] for error in (refused.value, *refused.value.others)]
    assert lines == ["overrides: unknown key 'train.stps'", "overrides: unknown key 'epochs'"]


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_value_is_one_line_that_says_what_is_allowed(override: str) -> None:
    with pytest.raises(HolmesError) as refused:
        load([override])
    line = str(refused.value)
    assert refused.value.exit_code == 2 and "\n" not in line
    for words in WRONG[override]:
        assert words in line, line
