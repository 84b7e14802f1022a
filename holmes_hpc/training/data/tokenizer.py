"""Tokenizers: bytes of UTF-8, or a Hugging Face `tokenizers` file."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from holmes_hpc.errors import DataError
from holmes_hpc.records.untrusted import read_file

_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot|>", "[SEP]")


class ByteTokenizer:
    """A tokenizer without a file: 256 bytes of UTF-8 and the end of a document.

    `vocab`: the number of ids; `eod`: the end-of-document id; `id`: changes if any text would get other ids.
    """

    vocab, eod, id = 257, 256, "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Return the 1-D ids of a text, without the end of document."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids, without the end of document."""
        array = np.asarray(ids)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of Hugging Face's `tokenizers` library."""

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer as HuggingFaceTokenizer
        except ImportError as e:
            raise DataError(
                "the tokenizers library is not installed",
                where=path,
                hint="pip install 'holmes-hpc[tokenizers]', or omit the tokenizer to use bytes",
            ) from e
        try:
            raw = read_file(path)
            self._inner: Any = HuggingFaceTokenizer.from_buffer(raw)
        except OSError as e:
            raise DataError(e.strerror or str(e), where=path, hint="give a tokenizer.json") from e
        except Exception as e:  # the library raises bare Exception
            raise DataError(
                f"not a tokenizer.json of Hugging Face: {e}", where=path, hint="give a tokenizer.json"
            ) from e
        self.id = "tokenizers " + hashlib.sha256(raw).hexdigest()[:16]
        self.vocab: int = max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eod: int = next((i for i in map(self._inner.token_to_id, _END_NAMES) if i is not None), -1)
        if self.eod < 0:
            raise DataError("no end-of-document token", where=path, hint=f"add one of {', '.join(_END_NAMES)}")

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, ids: np.ndarray) -> str:
        return str(self._inner.decode([int(i) for i in np.asarray(ids) if i != self.eod], skip_special_tokens=False))


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(path: str | None) -> Tokenizer:
    """Return the tokenizer in the file `path`; the byte tokenizer if None."""
    return FileTokenizer(path) if path else ByteTokenizer()
