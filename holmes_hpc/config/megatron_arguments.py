"""Translation of Megatron-LM's arguments to configuration keys and facts about its software (docs/from-megatron.md).

Arguments are read, never executed: from a command, a shell script, a file of arguments, or a functional test's YAML.
"""

import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holmes_hpc.config.shell_script import CONDITION, END, script_words
from holmes_hpc.errors import ConfigError, counted
from holmes_hpc.fabric.site import TRANSFORMER_ENGINE
from holmes_hpc.records.files import read_text, read_yaml
from holmes_hpc.tables import read_table

WHERE = "--megatron-args"
_TABLE: dict[str, Any] = read_table(__file__)
REQUIRED = {name: _TABLE["numbers"][name] for name in _TABLE["required"]}  # argument: key
_FSDP, _SHARDING, _MODULES = _TABLE["fsdp"], _TABLE["sharding"], _TABLE["modules"]


@dataclass(frozen=True)
class MegatronArguments:
    """The arguments of a training command. `keys`: configuration keys and their values; `facts`: fields of Software and
    their values; `approximated`: arguments that are predicted only approximately; `ignored`: unused arguments."""

    keys: dict[str, Any]
    facts: dict[str, Any]
    approximated: tuple[str, ...]
    ignored: tuple[str, ...]

    def description(self) -> Iterator[str]:
        """Yield a line for each group of keys, the software, the approximated arguments and the ignored arguments."""
        for group in ("model", "batch", "plan", "train"):
            values = {k.partition(".")[2]: v for k, v in self.keys.items() if k.startswith(f"{group}.")}
            yield f"{group}: " + ", ".join(f"{k}={_text(v)}" for k, v in values.items())
        yield "software: " + ", ".join(f"{name}={_text(value)}" for name, value in self.facts.items())
        for title, names in (("approximated", self.approximated), ("ignored", self.ignored)):
            if names:
                yield f"{title}: {', '.join(names)}"


def read_arguments(source: str, user_keys: Collection[str] = ()) -> MegatronArguments:
    """Return the arguments in `source`, which is the name of a file or a command. `user_keys`: configuration keys that
    the user sets in addition. Raise ConfigError for an argument whose effect cannot be predicted."""
    values = _Values(_parse(source))
    for name, value in values.texts.items():
        for pattern, harmless, reason in _TABLE["refused"]:
            if re.fullmatch(pattern, name) and value not in harmless:
                raise _error(f"--{name} {value}".rstrip(), f"{reason}: leave it out")
    keys: dict[str, Any] = {key: values.number(name) for name, key in _TABLE["numbers"].items() if values.has(name)}
    keys |= {**_model(values, user_keys), **_experts(values), **_layers(values, keys)}
    keys |= _layout(values, keys.get("plan.virtual_stages", 1))
    return MegatronArguments(
        keys,
        dict(_facts(values, keys["plan.recompute"])),
        tuple(f"--{name} ({text})" for name, text in _TABLE["approximated"].items() if values.has(name)),
        tuple(_ignored(name, text, values.used) for name, text in values.texts.items() if name not in values.used),
    )


def _ignored(name: str, text: str, used: Collection[str]) -> str:
    """Return the text that reports an unused argument, with the known argument that it may misspell. If its value
    contains a shell variable, the text shows the value, because the variable may stand for other arguments."""
    matches = difflib.get_close_matches(name, used, 1, 0.9)
    return f"--{name}" + f" {text}" * ("$" in text) + "".join(f" (did you mean --{match}?)" for match in matches)


def _parse(source: str) -> dict[str, str]:
    """Return {argument: its values, separated by spaces}; a switch has an empty text, or is left out if false."""
    is_file = os.path.isfile(source)  # a command may be too long for a Path
    if not is_file and "--" not in source:
        raise _error(f"no file {source!r}", "give a file, or a command with options such as --num-layers")
    if is_file and source.endswith((".yaml", ".yml")):
        data = read_yaml(source)
        data = data.get("MODEL_ARGS", data)
        if not isinstance(data, Mapping):
            raise _error(f"MODEL_ARGS in {source} has no arguments", "write --NAME: VALUE below it")
        texts = {k: "" if v is True or v is None else re.sub(r"[][(),]", " ", str(v)) for k, v in data.items()}
        words = [word for name, text in texts.items() if data[name] is not False for word in (str(name), text)]
    else:
        words = _words(read_text(source) if is_file else source)
    values, name = dict[str, str](), ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("_", "-")
            values[name] = value
        elif "$" in word and (not name or values[name].replace(CONDITION, "") or re.search(r"\[[@*]\]|\$[@*]", word)):
            raise _error(f"{word} cannot be read", "write its options into the command")
        elif not word:
            name = ""
        elif name:
            values[name] = f"{values[name]} {word}".strip()
    return values


def _words(text: str) -> list[str]:
    """Split a command or a script into words. If it runs .py files, return only the arguments of the one that trains.
    They end at the first operator or newline whose next word is not an option."""
    with ConfigError.instead_of(ValueError, where=WHERE, hint="close its quotes", what="cannot be split into words:"):
        words = list(script_words(text))
    commands = dict[tuple[str, ...], str]()
    for script in [i for i, word in enumerate(words) if word.endswith(".py")]:
        arguments = words[script + 1 :]
        following = [*arguments[1:], ""]
        ends = (i for i, word in enumerate(arguments) if word == END and not following[i].startswith("--"))
        arguments = arguments[: next(ends, None)]
        if any(word.startswith(("--", "$")) for word in arguments):
            commands.setdefault(tuple(arguments), words[script])
    trains = [arguments for arguments in commands if any(word.startswith("--num-layers") for word in arguments)]
    if len(choices := trains or list(commands)) > 1:
        names = ", ".join(commands[arguments] for arguments in choices)
        raise _error(f"several commands may train: {names}", "keep one of them")
    return [word for word in (choices[0] if choices else words) if word != END]


class _Values:
    """The arguments and their values. `used`: the names of arguments that were looked up."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts, self.used = texts, set[str]()

    def has(self, *names: str) -> bool:
        self.used.update(names)
        for name in names:
            if "$" in (text := self.texts.get(name, "")) and name != "merge-file":
                problem = "depends on a condition" if text.startswith(CONDITION) else "has a shell variable"
                text = text.removeprefix(CONDITION).strip()
                raise _error(f"--{name} {text}".strip() + f" {problem}", "write its value")
        return any(name in self.texts for name in names)

    def words(self, name: str, default: str) -> list[str]:
        return (self.texts[name] if self.has(name) else default).split() or [""]

    def text(self, name: str, default: str, *allowed: str) -> str:
        """Return the value of an argument. Raise ConfigError if it is neither the default nor one of `allowed`."""
        value = self.words(name, default)[0]
        if value not in (default, *allowed):
            choices = ", ".join(dict.fromkeys(choice for choice in (default, *allowed) if choice))
            raise _error(f"--{name} {value} cannot be predicted", f"use {choices}")
        return value

    def number(self, name: str, default: int = 0) -> int:
        value = self.words(name, str(default))[0]
        if not value.isdecimal():
            raise _error(f"--{name} is {value!r}", "write a whole number")
        return int(value)

    def fraction(self, name: str, default: float) -> float:
        value = self.words(name, str(default))[0]
        with ConfigError.instead_of(ValueError, where=WHERE, hint="write a number", what=f"--{name} is {value!r}"):
            return float(value)


def _model(a: _Values, user_keys: Collection[str]) -> dict[str, Any]:
    """Return the keys of the model's architecture. By default, Megatron-LM trains a GPT-2 with dropout 0.1."""
    rope = a.text("position-embedding-type", "learned_absolute", "rope") == "rope"
    keys = {
        "model.swiglu": a.has("swiglu"),
        "model.rmsnorm": a.text("normalization", "LayerNorm", "RMSNorm") == "RMSNorm",
        "model.rope": rope or a.has("use-rotary-position-embeddings"),
        "model.tied": not a.has("untie-embeddings-and-output-weights"),
        "model.bias": not a.has("disable-bias-linear"),
        "model.qkv_bias": a.has("add-qkv-bias"),
        "model.qk_norm": a.has("qk-layernorm"),
        "model.dropout": max(a.fraction("hidden-dropout", 0.1), a.fraction("attention-dropout", 0.1)),
    }
    if a.has("group-query-attention"):
        keys["model.kv_heads"] = a.number("num-query-groups", 1)
    if not a.has("vocab-size") and "model.vocab" not in user_keys:
        if a.words("tokenizer-type", "GPT2BPETokenizer" if a.has("merge-file") else "")[0] != "GPT2BPETokenizer":
            raise _error("the size of the vocabulary is not among the arguments", "add --vocab N")
        keys["model.vocab"] = 50257
    return keys


def _experts(a: _Values) -> dict[str, Any]:
    """Return the keys of a mixture of experts; no keys for a dense model. By default, Megatron-LM splits each expert
    over the tensor-parallel ranks, and does not balance the experts' loads."""
    if a.number("num-experts", 1) <= 1:
        return {}
    sigmoid = a.text("moe-router-score-function", "softmax", "sigmoid") == "sigmoid"
    has_bias = a.has("moe-router-enable-expert-bias")
    keys: dict[str, Any] = {
        "balance": 0.0,
        "score": "sigmoid" if sigmoid else "softmax_all" if a.has("moe-router-pre-softmax") else "softmax",
        "bias": a.fraction("moe-router-bias-update-rate", 1e-3) if has_bias else 0.0,
    }
    for name, key in _TABLE["experts"].items():
        if a.has(name):
            number = a.fraction(name, 0.0)
            keys[key] = int(number) if number.is_integer() else number
    is_gather = a.text("moe-token-dispatcher-type", "allgather", "alltoall", "flex") == "allgather"
    etp = a.number("expert-tensor-parallel-size", a.number("tensor-model-parallel-size", 1))
    if etp > 1 and not is_gather:
        hint = "use --expert-tensor-parallel-size 1, or --moe-token-dispatcher-type allgather"
        raise _error("experts that TP splits are predicted only with all-gathered tokens", hint)
    dispatcher = {"plan.ep_comm": "allgather" if is_gather else "alltoall", "plan.etp": etp}
    return {f"model.experts.{key}": value for key, value in keys.items()} | dispatcher


def _layers(a: _Values, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys plan.layers_per_stage and plan.virtual_stages, if the arguments set them.
    `sizes`: the keys whose values are numbers, such as model.layers and plan.pp."""
    keys, layers, pp = dict[str, Any](), sizes.get("model.layers", 0), sizes.get("plan.pp", 1)
    missing_layers = [int(a.has(f"account-for-{part}-in-pipeline-split")) for part in ("embedding", "loss")]
    names = [f"decoder-{end}-pipeline-num-layers" for end in ("first", "last")]
    fixed = [a.number(name) if a.has(name) else None for name in names]
    free_stages = pp - sum(count is not None for count in fixed)
    per_stage = (layers + sum(missing_layers) - sum(count or 0 for count in fixed)) // max(1, free_stages)
    if pp > 1 and (any(missing_layers) or a.has(*names)):
        ends = [per_stage - n if count is None else count for n, count in zip(missing_layers, fixed, strict=True)]
        keys["plan.layers_per_stage"] = [ends[0], *[per_stage] * (pp - 2), ends[1]]
    if a.has("num-layers-per-virtual-pipeline-stage"):
        keys["plan.virtual_stages"], rest = divmod(per_stage, max(1, a.number("num-layers-per-virtual-pipeline-stage")))
        if rest:
            hint = "give --num-layers-per-virtual-pipeline-stage a divisor of that"
            raise _error(f"a pipeline stage has {counted(per_stage, 'layer')}", hint)
    return keys


def _layout(a: _Values, virtual_stages: int) -> dict[str, Any]:
    """Return the keys of schedule, sharding, overlap, precision and recomputation."""
    granularity, element = "selective" * a.has("recompute-activations") or "none", 4 if _grad_dtype(a) == "fp32" else 2
    return {
        "plan.sequence_parallel": a.has("sequence-parallel") and a.number("tensor-model-parallel-size", 1) > 1,
        "plan.distributed_optimizer": a.has("use-distributed-optimizer", *_FSDP),
        "plan.recompute": a.text("recompute-granularity", granularity, "selective", "full"),
        "plan.schedule": "interleaved" if virtual_stages > 1 else "1f1b",
        "plan.transport": "single",
        **({"plan.bucket_bytes": a.number("ddp-bucket-size") * element} if a.has("ddp-bucket-size") else {}),
        **({"plan.strategy": "hierarchical-dp"} if a.has("use-tp-pp-dp-mapping") else {}),
        "train.dtype": _dtype(a),
        "train.grad_dtype": _grad_dtype(a),
        "train.overlap_grad_reduce": a.has("overlap-grad-reduce", *_FSDP),
        "train.overlap_param_gather": a.has("overlap-param-gather", *_FSDP),
    }


def _facts(a: _Values, recompute: str) -> Iterator[tuple[str, Any]]:
    """Yield (field of Software, value). Megatron-LM's defaults apply to missing arguments."""
    is_local = a.text("transformer-impl", "transformer_engine", "local") == "local"
    backend = a.text("attention-backend", "auto", "flash", "fused", "unfused", "local")
    is_fused = a.has("use-flash-attn") if is_local and backend == "auto" else backend not in ("unfused", "local")
    if is_fused and _dtype(a) != "fp32":
        yield "attention", "flash" if is_local else TRANSFORMER_ENGINE
    else:
        yield "attention", "unfused" if a.has("no-masked-softmax-fusion") else "softmax"
    yield "fp8", a.has("fp8-format")
    yield "overlap_tp", a.has("tp-comm-overlap")
    yield "fused_wgrad", not a.has("no-gradient-accumulation-fusion")
    yield "aligned_gather", a.has("overlap-param-gather") and not a.has("no-align-param-gather")
    yield "fused_elementwise", not a.has("no-bias-gelu-fusion", "no-bias-swiglu-fusion", "no-bias-dropout-fusion")
    yield "deduplicated", a.has("moe-enable-deepep")
    yield "instances", a.number("num-distributed-optimizer-instances", 1)
    if a.has(*_FSDP):
        default = "optim_grads_params" if a.has("use-torch-fsdp2") else "no_shard"
        if (strategy := a.text("data-parallel-sharding-strategy", default, *_SHARDING)) not in _SHARDING:
            hint = "add --data-parallel-sharding-strategy optim_grads_params, or leave out --use-megatron-fsdp"
            raise _error("Megatron-FSDP shards nothing by default", hint)
        yield "sharding", _SHARDING[strategy]
    if recompute == "full" and a.text("recompute-method", "uniform", "block") == "block":
        yield "recompute_layers", a.number("recompute-num-layers")
    if recompute == "selective":
        modules = a.words("recompute-modules", "core_attn")
        if unknown := [module for module in modules if module not in _MODULES]:
            raise _error(f"--recompute-modules {unknown[0]} cannot be predicted", f"use {', '.join(_MODULES)}")
        yield "recompute_parts", tuple(_MODULES[module] for module in modules)


def _dtype(a: _Values) -> str:
    return "bf16" if a.has("bf16") else "fp16" if a.has("fp16") else "fp32"


def _grad_dtype(a: _Values) -> str:
    """Return the data type in which gradients are accumulated and reduced."""
    if a.has("bf16") and a.has("grad-reduce-in-bf16"):
        return "bf16"
    return "fp16" if a.has("fp16") and not a.has("accumulate-allreduce-grads-in-fp32") else "fp32"


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(str, value))
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _error(message: str, hint: str) -> ConfigError:
    return ConfigError(message, where=WHERE, hint=hint)
