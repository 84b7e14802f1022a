"""Text generation for `holmes generate`: a checkpoint's model continues a prompt, computed by `transformers`."""

from typing import Any

import numpy as np
import torch

from holmes_hpc.config.hugging_face import FAMILIES
from holmes_hpc.errors import ConfigError, DataError
from holmes_hpc.training.checkpoint import export
from holmes_hpc.training.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer


def generate(name: str, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
    """Return the text that continues `prompt`: at most `tokens` tokens, fewer if the document ends. `name`: see
    export.find_source. `temperature`: 0 picks the most likely token. Raise ConfigError for a prompt that does not fit,
    DataError if there is no tokenizer."""
    hint = "check the terminal's encoding (`locale`)"
    with ConfigError.instead_of(UnicodeEncodeError, where="--prompt", hint=hint, what="not UTF-8 text"):
        prompt.encode("utf-8")
    source = export.find_source(name)
    tokenizer, vocab, max_positions = _tokenizer(source), source.model.vocab, source.model.max_positions
    ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eod]
    problem = f"token id {max(ids)} is not in the model's vocabulary of {vocab}"
    hint = "set data.tokenizer to the tokenizer of the run's data"
    ConfigError.refuse("--prompt", (max(ids) >= vocab, problem, hint))
    problem = f"{len(ids)} tokens and {tokens} new ones exceed the model's {max_positions} positions"
    ConfigError.refuse("--prompt", (len(ids) + tokens > max_positions, problem, "shorten it, or lower --tokens"))
    model = _model(source)
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    with torch.no_grad():
        end_ids = {"eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.eod}
        prompt_ids = torch.tensor([ids], device=model.device)
        output_ids = model.generate(prompt_ids, max_new_tokens=tokens, **end_ids, **sampling)
    return tokenizer.decode(np.asarray(output_ids[0, len(ids) :].tolist(), dtype=np.int64))


def _tokenizer(source: export.ExportSource) -> Tokenizer:
    """Return the tokenizer of the run's data, or of the Hugging Face folder from which the run started.
    If neither exists and the vocabulary has the size of the byte tokenizer's, return the byte tokenizer."""
    file = source.config_folder and source.config_folder / "tokenizer.json"
    if source.tokenizer or (file and file.is_file()):
        return FileTokenizer(source.tokenizer or str(file))
    if source.model.vocab == ByteTokenizer.vocab:
        return ByteTokenizer()
    hint = "train with data.tokenizer=tokenizer.json, the file that the data was prepared with"
    raise DataError("the run has no tokenizer for its data", where=f"model {source.model.name}", hint=hint)


def _model(source: export.ExportSource) -> Any:
    weights = dict(export.convert(source.state, source.model))
    import transformers  # slow

    dtype = next(iter(weights.values())).dtype
    dtype_name = str(dtype).removeprefix("torch.")
    content = export.hugging_face_config(source.model, dtype_name, source.eod, source.config_folder)
    model_class = getattr(transformers, FAMILIES[content["model_type"]].architecture)
    config = transformers.AutoConfig.for_model(**content)
    model = model_class.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)  # fuses experts' tensors
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
