"""Tokenizers: bytes of UTF-8, or a Hugging Face `tokenizers` file."""

import hashlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from holmes_hpc.errors import DataError
from holmes_hpc.records.untrusted import read_file

_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot|>", "[SEP]")
_LIMIT_S, _CHARACTERS_PER_S = 10, 100_000  # time limit of a text; a core tokenizes about a million characters/s


class ByteTokenizer:
    """A tokenizer without a file: 256 bytes of UTF-8 and the end of a document. `vocab`: the number of token ids;
    `eod`: the end-of-document token; `id`: a name, which must change if any text would get other token ids."""

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
        hint = "pip install 'holmes-hpc[tokenizers]', or omit the tokenizer to use bytes"
        what = "the tokenizers library is not installed"
        with DataError.instead_of(ImportError, where=path, hint=hint, what=what):
            from tokenizers import Tokenizer as HuggingFaceTokenizer
        with DataError.instead_of(OSError, where=path, hint="give a tokenizer.json"):
            raw = read_file(path)
        # The library raises bare Exception.
        what = "not a tokenizer.json of Hugging Face:"
        with DataError.instead_of(Exception, where=path, hint="give a tokenizer.json", what=what):
            self._inner: Any = HuggingFaceTokenizer.from_buffer(raw)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are parallel instead
        self._path, self._text, self._start = path, "", 0.0
        self.id = "tokenizers " + hashlib.sha256(raw).hexdigest()[:16]
        self.vocab: int = max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eod: int = next((i for i in map(self._inner.token_to_id, _END_NAMES) if i is not None), -1)
        if self.eod < 0:
            raise DataError("no end-of-document token", where=path, hint=f"add one of {', '.join(_END_NAMES)}")

    def encode(self, text: str) -> np.ndarray:
        self._text, self._start = text, time.monotonic()
        try:
            (encoding,) = self._inner.encode_batch([text], add_special_tokens=False)  # unlike encode, releases the GIL
        except BaseException as e:  # a panic of the library is no Exception
            raise self._error(text, " ".join(str(e).split())[:200] or type(e).__name__) from e
        finally:
            self._text = ""
        return np.array(encoding.ids, dtype=np.int32)

    def check_time(self) -> None:
        """Raise DataError if another thread has been encoding a text for too long."""
        text, limit_s = self._text, _LIMIT_S + len(self._text) / _CHARACTERS_PER_S
        if text and time.monotonic() - self._start > limit_s:
            raise self._error(text, f"it takes longer than {limit_s:.0f} s")

    def _error(self, text: str, problem: str) -> DataError:
        return DataError(
            f"cannot tokenize the text of {len(text):,} characters that starts with {text[:40]!a}: {problem}",
            where=self._path,
            hint="simplify the regular expression of its pre_tokenizer, or omit that text",
        )

    def decode(self, ids: np.ndarray) -> str:
        return str(self._inner.decode([int(i) for i in np.asarray(ids) if i != self.eod], skip_special_tokens=False))


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(path: str | None) -> Tokenizer:
    """Return the tokenizer in the file `path`; the byte tokenizer if None."""
    return FileTokenizer(path) if path else ByteTokenizer()


def run_limited(tokenizer: Tokenizer, task: Callable[[], None]) -> None:
    """Run `task`, which encodes texts. Raise DataError if a text takes too long.
    A regular expression in a tokenizer.json may need exponential time."""
    if isinstance(tokenizer, ByteTokenizer):
        return task()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            task()
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run, name="tokenizer", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(1)
        tokenizer.check_time()
    for error in errors:
        raise error
