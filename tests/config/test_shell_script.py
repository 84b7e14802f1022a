"""Scripts are read as bash runs them, or refused."""

import shlex
import subprocess
from pathlib import Path

import pytest

from holmes_hpc.config.megatron_arguments import read_arguments
from holmes_hpc.errors import ConfigError

SMALL = "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --vocab-size 99"
RUN = f"torchrun pretrain_gpt.py {SMALL} --tensor-model-parallel-size $TP ${{ARGS[@]}}"
RECORD = 'torchrun() { printf "%s\\0" "${@:2}"; }; python() { :; }\n'

READ = [
    "[ $N -gt 2 ] && TP=8",
    "[ $N -le 2 ] && TP=8 || TP=4",
    "[[ $FP8 == 1 ]] && ARGS+=(--fp8-format hybrid)",
    '[ "$N" = 1 ] && ARGS+=(--bf16) && TP=4',
    "[[ $N = 2 ]] && { TP=8; ARGS+=(--bf16); }",
    "if [ $# -gt 5 ] || [[ ${#ARGS[@]} -gt 5 ]]; then echo usage; exit 1; fi",
    "mkdir -p $(dirname x/y) && cd . || exit 1",
    "if [[ $MODEL == llama* ]]; then ARGS+=(--swiglu); else ARGS+=(--bf16); fi",
    'if [ $MODEL = "llama*" ]; then ARGS+=(--swiglu); fi',
    "if [ $N = 3 ]; then TP=8; elif [ $N = 1 ]; then TP=4; elif [ $N = 1 ]; then TP=16; else TP=1; fi",
    "if [ $N = 1 ]; then TP=8; elif [ $N = 1 ]; then TP=4; else TP=16; fi",
    'if [ $N = 1 ] && [ ! $TP = 2 ]; then TP=8; else if [ -z "" ]; then ARGS+=(--bf16); fi; fi',
    "ARGS=( --save $(pwd)\n --data-path 'my data (v2)'\n --swiglu )",
    "ARGS=( --bf16 \\\n# --fp16 \\\n--seed 1 `# the seed` \\\n--swiglu )",
    "ARGS=(); python tools/convert.py --load-dir x --tensor-model-parallel-size 16",
    "other() { LOG=8; }\nfunction another { echo --fp16; }",
    "TP=${TP:-8}; ARGS=(${MORE:-} --bf16)",
]
REFUSED = [
    "other() { TP=8; }\nother",
    "function other { ARGS=(--bf16); }; other",
    "[ $UNKNOWN -gt 2 ] && TP=8",
    "grep -q a b && ARGS+=(--bf16)",
    "$UNKNOWN && TP=8",
    "[ -d data ] || TP=8",
    "$UNKNOWN || [ a = b ] && TP=8",
    "[ -d data ] || [ a = b ] && TP=8",
    "case $N in 1) TP=8;; esac",
    "for n in 1 2; do ARGS+=(--bf16); done",
    "if $UNKNOWN; then TP=4; else TP=8; fi",
    RUN.replace("$TP", "16"),
    f"run() {{ {RUN.replace('$TP', '16')}; }}",
    "TP=$((2 * 4))",
]


@pytest.mark.integration
@pytest.mark.parametrize("change", READ)
def test_a_script_has_the_arguments_that_bash_gives_to_the_program(change: str, tmp_path: Path) -> None:
    script = f"N=1; TP=2; FP8=0; MODEL=llama2; ARGS=( --seed 1 )\n{change}\n{RUN}\n"
    bash = ["bash", "-c", RECORD + script]
    words = subprocess.run(bash, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split("\0")[:-1]
    read, ran = read_arguments(script), read_arguments(shlex.join(words))
    assert (read.keys, read.facts) == (ran.keys, ran.facts)


@pytest.mark.parametrize("change", REFUSED)
def test_a_script_that_cannot_be_understood_is_refused(change: str) -> None:
    with pytest.raises(ConfigError, match=r"depends on a condition|has a shell variable|several commands may train"):
        read_arguments(f"N=1; TP=2; ARGS=( --seed 1 )\n{change}\n{RUN}\n")
