"""Unknown keys: words of other programs, and mistyped keys of all groups."""

import random
import re

import pytest

from holmes_hpc.config.composition import load
from holmes_hpc.config.configuration import GROUPS, Configuration
from holmes_hpc.config.group_options import unknown_key
from holmes_hpc.config.other_names import _KEYS
from holmes_hpc.errors import ConfigError, is_typo
from holmes_hpc.schema import keys

ALL_KEYS = [*keys(Configuration), *(f"{group}.{key}" for group, cls in GROUPS.items() for key in keys(cls))]
# what users type -> the key here, or words of the hint
WORDS = {
    "slurm.partition": "partitions=[NAME,…]",
    "slurm.time": "'slurm.timeout_min'",
    "slurm.nodes": "'plan.nodes'",
    "slurm.gpus": "'plan.gpus_per_node'",
    "slurm.job_name": "'name'",
    "train.tokens": "train.steps=N",
    "epochs": "epochs are not supported",
    "num_train_epochs": "epochs are not supported",
    "slurm.mem_per_gpu": "slurm.mem=SIZE",
    "precision": "'train.dtype'",
    "train.bf16": "train.dtype=bf16",
    "num_layers_per_virtual_pipeline_stage": "plan.virtual_stages=N",
    "num_experts": "model.experts.KEY=…",
    "expert_model_parallel_size": "'plan.ep'",
    "context_parallel": "plan.cp",
    "expert_tensor_parallel_size": "'plan.etp'",
    "train.learning_rate": "'train.lr'",
    "per_device_train_batch_size": "'batch.micro_size'",
    "gradient_accumulation_steps": "batch.global_size=N",
    "max_seq_length": "'batch.sequence_length'",
    "model.num_hidden_layers": "'model.layers'",
    "num_attention_heads": "'model.heads'",
    "max_grad_norm": "'train.clip_grad'",
    "save_steps": "'train.checkpoint_interval'",
    "tensor_model_parallel_size": "'plan.tp'",
}
SEED, MISTYPED = 20261126, 60


def mistype(key: str, rng: random.Random) -> str:
    """Return `key` with one letter dropped, swapped with the next, or doubled; never another key."""
    while True:
        i = rng.randrange(len(key))
        word = rng.choice(
            (key[:i] + key[i + 1 :], key[:i] + key[i : i + 2][::-1] + key[i + 2 :], key[: i + 1] + key[i:])
        )
        if word not in (*ALL_KEYS, ""):
            return word


def test_the_right_key_is_named_for_words_of_other_programs_and_mistyped_keys() -> None:
    rng = random.Random(SEED)
    correct = [word for word, hint in WORDS.items() if hint in unknown_key(word).hint]
    assert set(correct) == set(WORDS)
    groups = [[key for key in ALL_KEYS if key.startswith(f"{group}.")] for group in GROUPS]
    groups.append([key for key in ALL_KEYS if "." not in key])
    wrong = []
    for number in range(MISTYPED):
        key = rng.choice(groups[number % len(groups)])
        word = mistype(key, rng)
        named = re.findall("'([^']+)'", unknown_key(word).hint)
        correct += [word] if key in named else []
        wrong += [(word, named)] if key not in named and named else []
    assert len(correct) >= 75 and not wrong


@pytest.mark.parametrize("override", ["model=deepseek_v3", "mixtral_8x3b", "model=qwen3_5_a3b"])
def test_a_model_with_experts_gets_no_lookalike(override: str) -> None:
    with pytest.raises(ConfigError, match="only mixtral_8x7b, mixtral_8x22b, qwen3_30b_a3b and"):
        load([override])


def test_synonyms_are_of_keys_and_are_no_keys() -> None:
    assert set(_KEYS.values()) <= set(ALL_KEYS)
    assert not {key.rpartition(".")[2] for key in ALL_KEYS} & set(_KEYS)


@pytest.mark.parametrize(
    ("word", "key"),
    [("train.max_step", "train.steps"), ("model.num_layer", "model.layers"), ("micro_batchsize", "batch.micro_size")],
)
def test_a_mistyped_name_of_another_program_gets_its_key(word: str, key: str) -> None:
    assert unknown_key(word).hint == f"did you mean {key!r}?"


@pytest.mark.parametrize("word", ["foo", "train.zzz", "dosomething"])
def test_a_word_like_no_key_gets_no_lookalike(word: str) -> None:
    assert unknown_key(word).hint == "docs/configuration.md lists all keys"


@pytest.mark.parametrize(
    ("word", "is_one"),
    [("stes", True), ("stpes", True), ("steeps", True), ("stops", True), ("setsp", False), ("st", False)],
)
def test_a_typo_is_one_letter_dropped_swapped_added_or_replaced(word: str, is_one: bool) -> None:
    assert is_typo(word, "steps") == is_one
