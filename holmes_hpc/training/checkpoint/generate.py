"""`holmes generate`: a text that a checkpoint's model adds to a prompt, computed by `transformers`, in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from holmes_hpc.errors import ConfigError, DataError
from holmes_hpc.schema import refuse
from holmes_hpc.training.checkpoint import export
from holmes_hpc.training.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer


def generate(name: str, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
    """What follows `prompt`: at most `tokens` tokens, fewer where a document ends. `name`: as export.choose has it.

    `temperature` 0 takes the likeliest token, above that one is drawn, from `seed`. Raises ConfigError without
    transformers or for a prompt that does not fit, DataError where no tokenizer is known.
    """
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as e:
        raise ConfigError(
            "it is not UTF-8 text", where="--prompt", hint="check the terminal's encoding (`locale`)"
        ) from e
    chosen = export.choose(name)
    tokenizer, vocab, longest = _tokenizer(chosen), chosen.model.vocab, chosen.model.max_positions
    ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eod]
    refuse(
        "--prompt",
        (
            max(ids) >= vocab,
            f"token id {max(ids)} is not in the model's vocabulary of {vocab}",
            "set data.tokenizer to the tokenizer of the run's data",
        ),
        (
            len(ids) + tokens > longest,
            f"{len(ids)} tokens and {tokens} more are above the model's {longest}",
            "shorten it, or lower --tokens",
        ),
    )
    model = _model(chosen)
    torch.manual_seed(seed)
    drawn = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids], device=model.device),
            max_new_tokens=tokens,
            eos_token_id=tokenizer.eod,
            pad_token_id=tokenizer.eod,
            **drawn,
        )
    return tokenizer.decode(np.asarray(out[0, len(ids) :].tolist(), dtype=np.int64))


def _tokenizer(chosen: export.Chosen) -> Tokenizer:
    """Of the run's data, or of the folder that it began with; bytes where the vocabulary is theirs."""
    own = chosen.source and chosen.source / "tokenizer.json"
    if chosen.tokenizer or (own and own.is_file()):
        return FileTokenizer(chosen.tokenizer or str(own))
    if chosen.model.vocab == ByteTokenizer.vocab:
        return ByteTokenizer()
    raise DataError(
        "no tokenizer is known",
        where=f"model {chosen.model.name}",
        hint="train with data.tokenizer=tokenizer.json, the one of the data",
    )


def _model(chosen: export.Chosen) -> Any:
    import transformers

    weights = dict(export.convert(chosen.state, chosen.model))
    dtype = next(iter(weights.values())).dtype
    said = export.config(chosen.model, str(dtype).removeprefix("torch."), chosen.eod, chosen.source)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**said), dtype=dtype)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
