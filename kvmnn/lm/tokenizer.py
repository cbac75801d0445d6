"""Text to token ids and back, with the tokenizer that lies beside a model."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SourceError
from ..optional import import_optional
from .text_start import find_bos

_TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """A tokenizer of the Hugging Face kind (``tokenizer.json``).

    Parameters
    ----------
    path
        The ``tokenizer.json`` itself; its neighbours ``tokenizer_config.json``, ``config.json`` and
        ``generation_config.json`` say which token begins a text (`find_bos`).

    Attributes
    ----------
    bos_info : TextStart
        The token that is put before a text, and what says so.
    bos : int or None
        That token.
    vocab_size : int
        How many tokens there are, added ones included.

    Raises
    ------
    MissingDependencyError
        Where the package tokenizers is not installed.
    SourceError
        When the file cannot be read or is no tokenizer.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        tokenizer_class = import_optional("tokenizers").Tokenizer
        try:
            text = self.path.read_text(encoding="utf-8")
        except OSError as error:
            raise SourceError(f"{self.path}: tokenizer cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise SourceError(f"{self.path}: is not a tokenizer.json: no UTF-8 text") from error
        try:
            with _convert_panics():
                self._tokenizer: Any = tokenizer_class.from_str(text)
        except Exception as error:  # the package raises plain Exception
            raise SourceError(f"{self.path}: is not a tokenizer.json: {_format_error(error)}") from error
        # A file may ask for padding and truncation of every text; here all of a text is fed.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        try:
            with _convert_panics():
                self.bos_info = find_bos(self.path, self._tokenizer)
        except SourceError:
            raise
        except Exception as error:
            raise SourceError(f"{self.path}: fails on a short text: {_format_error(error)}") from error
        self.bos = self.bos_info.token

    @classmethod
    def open_for_model(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a model.

        Parameters
        ----------
        path
            A ``tokenizer.json``, or a model file or folder: then the file is looked for in that folder, in its
            subfolder ``model``, and one folder up.

        Raises
        ------
        SourceError
            When there is none.
        """
        model_path, file = Path(path), cls.find_file(path)
        if file is not None:
            return cls(file)
        if not model_path.exists():
            raise SourceError(f"{model_path}: does not exist")
        raise SourceError(
            f"{model_path}: no {_TOKENIZER_FILE} beside the model or one folder up; save the model's tokenizer there "
            "(AutoTokenizer.save_pretrained) or name it with --tokenizer"
        )

    @staticmethod
    def find_file(path: str | os.PathLike[str]) -> Path | None:
        """Return the file that `open_for_model` reads; None where there is none."""
        model_path = Path(path)
        if model_path.is_file() and model_path.suffix == ".json":
            return model_path
        folder = model_path if model_path.is_dir() else model_path.parent
        folders = [folder, folder / "model", folder.absolute().parent]
        return next(
            (candidate / _TOKENIZER_FILE for candidate in folders if (candidate / _TOKENIZER_FILE).is_file()), None
        )

    def encode(self, text: str) -> NDArray[np.int64]:
        """Token ids of `text`, without special tokens put around it; int64 ``[token]``.

        Raises
        ------
        SourceError
            When the tokenizer fails: the file's patterns may be such that a search in the text is given up.
        """
        try:
            with _convert_panics():
                return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
        except Exception as error:
            raise SourceError(
                f"{self.path}: fails on a text of {len(text):,} characters: {_format_error(error)}"
            ) from error

    def decode(self, ids: Iterable[int] | NDArray[np.int64]) -> str:
        """The text of `ids`; special tokens are left out. Errors as of `encode`."""
        numbers = [int(token) for token in ids]
        try:
            with _convert_panics():
                return str(self._tokenizer.decode(numbers))
        except Exception as error:
            raise SourceError(f"{self.path}: fails on {len(numbers):,} tokens: {_format_error(error)}") from error

    @staticmethod
    def count_bytes(text: str) -> int:
        """Bytes of `text` in UTF-8: what bits per byte are counted over."""
        return len(text.encode("utf-8"))


STDERR_LOCK = threading.Lock()
"""Held while standard error leads nowhere: who writes to it from another thread takes the lock."""


@contextmanager
def _convert_panics() -> Iterator[None]:
    """Panics of Rust become a RuntimeError; what Rust says of them itself, on standard error, is not shown."""
    with STDERR_LOCK, ExitStack() as stack:
        with suppress(OSError):  # standard error is closed: nothing is shown anyway
            saved_stderr = os.dup(2)
            stack.callback(os.close, saved_stderr)
            with open(os.devnull, "wb") as devnull:
                os.dup2(devnull.fileno(), 2)
            stack.callback(os.dup2, saved_stderr, 2)
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise RuntimeError(str(error)) from None


def _format_error(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
