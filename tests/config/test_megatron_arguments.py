"""Megatron-LM's arguments as keys, facts about software, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from holmes_hpc.config.megatron_arguments import MegatronArguments, read_arguments
from holmes_hpc.errors import ConfigError

SMALL = "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --vocab-file v --merge-file m "


def read(words: str) -> MegatronArguments:
    return read_arguments(SMALL + words)


def test_defaults_are_those_of_megatron() -> None:
    a = read("--bf16")
    assert {k: v for k, v in a.keys.items() if k in ("model.tied", "model.bias", "model.rope", "model.swiglu")} == {
        "model.tied": True,
        "model.bias": True,
        "model.rope": False,
        "model.swiglu": False,
    }
    assert a.keys["model.dropout"] == 0.1 and a.keys["model.vocab"] == 50257
    assert a.keys["train.overlap_grad_reduce"] is a.keys["plan.distributed_optimizer"] is False
    assert a.facts["attention"] == "transformer_engine" and a.facts["fused_wgrad"] and not a.facts["overlap_tp"]
    assert read("--bf16 --tp-comm-overlap-cfg a.yaml").ignored[-1] == "--tp-comm-overlap-cfg"
    assert a.keys["train.grad_dtype"] == "fp32" and "plan.cp" not in a.keys and a.ignored == ("--vocab-file",)


@pytest.mark.parametrize(
    ("words", "layers", "chunks"),
    [
        ("--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2", [2, 4, 4, 2], None),
        ("--decoder-last-pipeline-num-layers 3", [3, 3, 3, 3], None),
        ("--num-layers-per-virtual-pipeline-stage 1", None, 3),
        ("--num-virtual-stages-per-pipeline-rank 3", None, 3),
        (
            "--num-layers 14 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
            " --num-layers-per-virtual-pipeline-stage 1",
            [3, 4, 4, 3],
            4,
        ),
    ],
)
def test_layers_and_virtual_stages(words: str, layers: list[int] | None, chunks: int | None) -> None:
    keys = read(f"--pipeline-model-parallel-size 4 {words}").keys
    assert keys.get("plan.layers_per_stage") == layers and keys.get("plan.virtual_stages") == chunks
    assert keys["plan.schedule"] == ("interleaved" if chunks else "1f1b")


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("--fp16 --transformer-impl local", {"attention": "softmax"}),
        ("--bf16 --transformer-impl local --use-flash-attn", {"attention": "flash"}),
        ("--bf16 --attention-backend unfused --no-masked-softmax-fusion", {"attention": "unfused"}),
        ("--overlap-param-gather", {"aligned_gather": True}),
        ("--overlap-param-gather --no-align-param-gather", {"aligned_gather": False}),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --num-distributed-optimizer-instances 4",
            {"sharding": "gradients", "instances": 4},
        ),
        ("--recompute-activations", {"recompute_parts": ("scores",)}),
        ("--recompute-granularity selective --recompute-modules core_attn mlp", {"recompute_parts": ("scores", "ffn")}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", {"recompute_layers": 2}),
        ("--fp8-format hybrid --no-gradient-accumulation-fusion", {"fp8": True, "fused_wgrad": False}),
    ],
)
def test_facts_about_software(words: str, facts: dict[str, object]) -> None:
    assert read(words).facts.items() >= facts.items()


def test_a_mixture_of_experts() -> None:
    """Those of Megatron-LM's script for Qwen3-30B-A3B, and the defaults of a mixture."""
    words = (
        "--num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-aux-loss-coeff 1e-3 --moe-grouped-gemm "
        "--moe-router-load-balancing-type aux_loss --moe-router-pre-softmax --expert-model-parallel-size 8 "
        "--moe-token-dispatcher-type flex --moe-enable-deepep --moe-router-enable-expert-bias --moe-z-loss-coeff 1e-4"
    )
    keys = read(words).keys
    assert {name.removeprefix("model.experts."): value for name, value in keys.items() if "experts" in name} == {
        "count": 128,
        "ffn": 768,
        "top_k": 8,
        "balance": 1e-3,
        "score": "softmax_all",
        "bias": 1e-3,
        "z_loss": 1e-4,
    }
    assert keys["plan.ep"] == 8 and read(words).facts["deduplicated"]
    assert keys["plan.ep_comm"] == "alltoall"
    defaults = read("--num-experts 8").keys
    assert defaults["plan.ep_comm"] == "allgather"
    assert defaults["model.experts.balance"] == 0 and defaults["model.experts.score"] == "softmax"
    assert not any("experts" in name for name in read("--num-experts 1 --moe-router-topk 1").keys)


def test_a_file_of_the_functional_tests(tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    values = {"--num-layers": 12, "--hidden-size": 512, "--num-attention-heads": 8, "--micro-batch-size": 1}
    values |= {
        "--rampup-batch-size": "[8 8 100]",
        "--bf16": True,
        "--swiglu": False,
        "--tokenizer-type": "NullTokenizer",
    }
    path.write_text(yaml.safe_dump({"MODEL_ARGS": {**values, "--vocab-size": 131073, "--save": "${CHECKPOINT}"}}))
    a = read_arguments(str(path))
    assert a.keys["batch.micro_size"] == 1 and a.keys["model.vocab"] == 131073 and not a.keys["model.swiglu"]
    assert a.approximated == ("--rampup-batch-size (the full batch)",) and "--save ${CHECKPOINT}" in a.ignored


def test_tp_splits_experts_by_default_as_in_megatron() -> None:
    words = "--num-experts 8 --tensor-model-parallel-size 2 --moe-token-dispatcher-type allgather"
    assert read(words).keys["plan.etp"] == 2
    assert read(f"{words} --expert-tensor-parallel-size 4").keys["plan.etp"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--num-experts 8 --tensor-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
            "use --expert-tensor-parallel-size 1",
        ),
        ("--num-experts 8 --moe-layer-freq ([0]*3+[1]*58)", "model.experts.first_dense"),
        ("--multi-latent-attention", "not modelled"),
        ("--outer-dp-sharding-strategy optim", "across instances is not modelled"),
        ("--optimizer sgd", "only Adam"),
        ("--use-megatron-fsdp", "add --data-parallel-sharding-strategy"),
        ("--moe-layer-recompute", "recomputes only the experts"),
        ("--position-embedding-type alibi", "alibi cannot be predicted; use learned_absolute, rope"),
        ("--recompute-granularity selective --recompute-modules moe_act", "moe_act cannot be predicted"),
        ("--seq-length long", "--seq-length is 'long'; write a whole number"),
        ("--seq-length $SEQ", "shell variable"),
        ("--tokenizer-type Llama2Tokenizer", "add --vocab N"),
        ("--save 'x", "close its quotes"),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4",
            "a pipeline stage has 6 layers; give --num-layers-per-virtual-pipeline-stage a divisor",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"\A--megatron-args: ") as error:
        read(words)
    assert message in str(error.value)


def test_a_file_may_have_an_argument_on_each_line(tmp_path: Path) -> None:
    file = tmp_path / "arguments.txt"
    file.write_text(SMALL.replace(" ", "\n"))
    assert read_arguments(str(file)) == read_arguments(SMALL)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no file 'none\.yaml'"):
        read_arguments("none.yaml")


def test_a_script_of_arrays(tmp_path: Path) -> None:
    """The arrays' brackets may stand beside an argument, and other commands follow them."""
    script = tmp_path / "train.sh"
    script.write_text(
        "GPT_ARGS=(--num-layers 24 --hidden-size 1024 --num-attention-heads 16\n"
        "  --vocab-size 99 --max-position-embeddings 1024)\n"
        "export CUDA_DEVICE_MAX_CONNECTIONS=1\nDISTRIBUTED_ARGS=(--nproc_per_node $GPUS --nnodes 1)\n"
        "MORE+=(\n  --bf16\n  --hiden-size 4096\n)\n"
        'torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${GPT_ARGS[@]}" "${MORE[@]}"\n'
    )
    a = read_arguments(str(script))
    assert a.keys["model.max_positions"] == 1024 and a.keys["model.hidden"] == 1024 and a.keys["train.dtype"] == "bf16"
    assert a.ignored == ("--hiden-size (did you mean --hidden-size?)",)


LAUNCH = """#!/bin/bash
GPUS_PER_NODE=8
CHECKPOINT_PATH=$1 #<Specify path>
LOGS="2"
DISTRIBUTED_ARGS=( --nproc_per_node $GPUS_PER_NODE --nnodes $NODES )
OPTIONS="--swiglu \\
  --normalization RMSNorm"
GPT_MODEL_ARGS=(
    $OPTIONS
    --hidden-size 4096 --num-attention-heads 32
)
DATA_ARGS=( --save $CHECKPOINT_PATH --merge-file $2 --tensor-model-parallel-size $LOGS )
if [ -n "$FP8" ]; then
  FP8_ARGS=( --fp8-format hybrid )
fi
cd $ROOT; echo ${EXTRA[@]}
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} "${DATA_ARGS[@]}" --num-layers 32 ARGUMENT 2>&1 | tee $LOGS/$HOST
echo "$?" $HOST
"""


def test_variables_of_a_launch_script_have_the_values_that_it_assigns(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(LAUNCH.replace("ARGUMENT", "--bf16"))
    a = read_arguments(str(script))
    sizes = {"model.swiglu": True, "model.rmsnorm": True, "model.hidden": 4096, "plan.tp": 2, "model.layers": 32}
    assert a.keys.items() >= sizes.items() and a.keys["train.dtype"] == "bf16"
    assert a.ignored == ("--save ${CHECKPOINT_PATH}",)


def test_a_default_counts_if_the_script_leaves_the_variable_unset_or_empty() -> None:
    sizes = "--micro-batch-size ${A:-1} --seq-length ${B:-512} --global-batch-size ${C}"
    script = f"A=8\nB=\nC=${{C:-32}}\ntorchrun pretrain_gpt.py {SMALL} --max-position-embeddings 512 {sizes}"
    a = read_arguments(script)
    assert a.keys.items() >= {"batch.micro_size": 8, "batch.sequence_length": 512, "batch.global_size": 32}.items()
    with pytest.raises(ConfigError, match="has a shell variable"):
        read_arguments(f"{SMALL} --micro-batch-size ${{A:-$B}}")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("${EXTRA[@]}", "${EXTRA[@]} cannot be read; write its options into the command"),
        ("--seed 1 $EXTRA", "$EXTRA cannot be read"),
        ("--seed ${EXTRA[@]}", "${EXTRA[@]} cannot be read"),
        ('--seed "$@"', "$@ cannot be read"),
        ("${FP8_ARGS[@]}", "--fp8-format hybrid depends on a condition; write its value"),
        ("--bf16 $EXTRA", "--bf16 $EXTRA has a shell variable"),
    ],
)
def test_other_variables_of_a_script_are_refused(argument: str, message: str, tmp_path: Path) -> None:
    """They may hold any option, so the model would be another one."""
    script = tmp_path / "train.sh"
    script.write_text(LAUNCH.replace("ARGUMENT", argument))
    with pytest.raises(ConfigError) as error:
        read_arguments(str(script))
    assert message in str(error.value)


CONDITIONS = """
FORMAT=${1:-"fp8"}
KIND=A
ARGS=( --bf16 --overlap-grad-reduce )
if [[ "$FORMAT" == "fp8" ]] || [ -z "$UNKNOWN" ]; then
  ARGS=( "${ARGS[@]}" "--fp8-format hybrid" )
else
  ARGS=( --fp16 )
  ARGS+=( --tensor-model-parallel-size 2 )
fi
if [ ! -f train/pretrain_gpt.py ]; then echo "no file"; mkdir $(dirname $X); fi
if [ -n "$WANDB" ]; then
  ARGS+=( --wandb-project "$WANDB" --log-interval=5 )
fi
if [ $KIND != "A" ];
then
  torchrun pretrain_gpt.py --num-layers 4
else
  if [ $KIND = "A" ]; then ARGS+=(--swiglu); fi
  torchrun train/pretrain_gpt.py SIZES ${ARGS[@]}
fi
python tools/preprocess_data.py --input x
"""


def test_branches_of_a_script_count_if_their_conditions_hold() -> None:
    a = read_arguments(CONDITIONS.replace("SIZES", SMALL))
    assert a.keys.items() >= {"train.dtype": "bf16", "model.swiglu": True, "train.overlap_grad_reduce": True}.items()
    assert a.facts["fp8"] and a.keys["model.layers"] == 12 and "plan.tp" not in a.keys
    assert a.ignored[-2:] == ("--wandb-project ${CONDITION} $WANDB", "--log-interval ${CONDITION} 5")


@pytest.mark.parametrize(
    "condition",
    [
        '[ "$X" = 1 ]',
        "[ -d data ]",
        '[[ -n "$X" && 1 == 1 ]]',
        "[ a = b ]; then :; elif $X",
        "true; then :; elif [ a = a ]",
    ],
)
def test_options_under_unknown_conditions_are_refused(condition: str) -> None:
    for change in ("A+=(--bf16)", "A=(--bf16)", 'A="$A --bf16"', 'A="--bf16"'):
        script = f"A=( --seed 1 )\nif {condition}; then\n  {change}\nfi\ntorchrun pretrain_gpt.py {SMALL} ${{A[@]}}"
        with pytest.raises(ConfigError, match="--bf16 depends on a condition; write its value"):
            read_arguments(script)


def test_brackets_that_open_before_the_program_close_nothing_else() -> None:
    """A subshell's bracket, and that of an array that contains the program's name."""
    for command in (
        "(cd /data && torchrun --nnodes 1 pretrain_gpt.py {} )",
        "ARGS=( pretrain_gpt.py {} )\nexport A=1",
        "ARGS=(pretrain_gpt.py {})",
    ):
        a = read_arguments(command.format(SMALL + "--num-query-groups 4 --group-query-attention --seed 3"))
        assert a.keys["model.kv_heads"] == 4 and a.ignored == ("--vocab-file", "--seed")
