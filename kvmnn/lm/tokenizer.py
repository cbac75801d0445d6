"""The tokenizer of a model folder: ids to text and back, the BOS token, and prompts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._util.dataclass import dataclass
from .._util.packages import import_optional
from .._util.text import pluralize
from ..errors import KvmnnError, SourceError, build_read_error
from ..files.mapped_file import MappedFile
from ..files.schema import read_object_or_empty
from .importer.catalog import build_missing_error, resolve_model_path

_CONFIG_FILE, _SPECIAL_TOKENS_FILE = "tokenizer_config.json", "special_tokens_map.json"
_MODEL_SETTINGS = ("config.json", "generation_config.json")
_PROBE_TEXT = "a 1."


@dataclass(frozen=True, kw_only=True)
class BosInfo:
    """The token that is added before a text."""

    #: Id of the token; None if no token is added before a text.
    token: int | None = None
    #: The token as text.
    text: str = ""
    #: The file and key that determine this; empty if no file does.
    reason: str = ""

    def format_note(self, num_texts: int, num_with_own: int = 0, *, noun: str = "text") -> str | None:
        """Format a note on the added bos; None if no file names one."""
        if self.token is None:
            return f"No token was added before the {noun}: {self.reason}." if self.reason else None
        token_text = f"token {self.token} ({self.text!r})"
        if num_with_own == num_texts:
            subject = f"The {noun} begins" if num_texts == 1 else f"All {num_texts:,} {noun}s begin"
            return f"{subject} with {token_text} already: none was added."
        subject = f"The {noun} begins" if num_texts == 1 else f"Each {noun} begins"
        exception = f"; {pluralize(num_with_own, noun)} had it already" if num_with_own else ""
        return f"{subject} with {token_text}, which was added{exception} ({self.reason})."


def find_bos(path: Path, tokenizer: Any) -> BosInfo:
    """Find the token that begins a text: as files require or forbid, else as the post-processor adds it."""

    def build_info(token: int, reason: str) -> BosInfo:
        return BosInfo(token=token, text=tokenizer.id_to_token(token) or "", reason=reason)

    config, special = (read_object_or_empty(path.with_name(name)) for name in (_CONFIG_FILE, _SPECIAL_TOKENS_FILE))
    add_bos = config.get("add_bos_token")
    if add_bos is False:
        return BosInfo(reason=f"{_CONFIG_FILE} has add_bos_token false")
    file_name, settings = (_SPECIAL_TOKENS_FILE, special) if "bos_token" not in config else (_CONFIG_FILE, config)
    if "bos_token" in settings and settings["bos_token"] is None:
        return BosInfo(reason=f"{file_name} has bos_token null")
    bos_text = settings.get("bos_token")
    if isinstance(bos_text, dict):
        bos_text = bos_text.get("content")
    bos_token = tokenizer.token_to_id(bos_text) if isinstance(bos_text, str) else None
    if add_bos is True and bos_token is not None:
        return build_info(bos_token, f"add_bos_token of {_CONFIG_FILE}")
    prefix_tokens = _list_prefix_tokens(tokenizer)
    if prefix_tokens:
        token = bos_token if bos_token is not None and bos_token in prefix_tokens else prefix_tokens[-1]
        return build_info(token, f"post-processor of {path.name}")
    opt_out_note = "" if add_bos is True else f'; "add_bos_token": false in {_CONFIG_FILE} leaves it out'
    if bos_token is not None:
        opt_out_note = opt_out_note.replace(f"in {file_name}", "there")
        return build_info(bos_token, f"bos_token of {file_name}{opt_out_note}")
    for name in _MODEL_SETTINGS:
        number = read_object_or_empty(path.with_name(name)).get("bos_token_id")
        if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < tokenizer.get_vocab_size():
            return build_info(number, f"bos_token_id of {name}{opt_out_note}")
    return BosInfo()


def _list_prefix_tokens(tokenizer: Any) -> Sequence[int]:
    """Return the special tokens that the post-processor adds before a text."""
    encoding = tokenizer.encode(_PROBE_TEXT, add_special_tokens=True)
    plain_ids = tokenizer.encode(_PROBE_TEXT, add_special_tokens=False).ids
    ids, mask = encoding.ids, encoding.special_tokens_mask
    length = next((index for index, special in enumerate(mask) if not special), 0)
    return ids[:length] if ids[length : length + len(plain_ids)] == plain_ids else ()


_TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """A tokenizer in Hugging Face format (``tokenizer.json``).

    Parameters
    ----------
    path
        The ``tokenizer.json`` itself; its neighbours ``tokenizer_config.json``, ``config.json`` and
        ``generation_config.json`` define which token begins a text.

    Attributes
    ----------
    bos_info : BosInfo
        The token that is put before a text, and the file that defines it.
    bos : int or None
        Id of that token.
    vocab_size : int
        Number of tokens, added ones included.

    Raises
    ------
    MissingDependencyError
        If the package tokenizers is not installed.
    SourceError
        If the file cannot be read or is no tokenizer.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        tokenizer_class = import_optional("tokenizers").Tokenizer
        try:
            text = self.path.read_text(encoding="utf-8")
        except OSError as error:
            raise build_read_error(f"{self.path}: tokenizer", error) from error
        except UnicodeDecodeError as error:
            raise SourceError(f"{self.path}: is not a tokenizer.json: no UTF-8 text") from error
        with self._wrap_errors("is not a tokenizer.json"):
            self._tokenizer: Any = tokenizer_class.from_str(text)
        # A file may ask for padding and truncation of every text; here all of a text is fed.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        with self._wrap_errors("fails on a short text"):
            self.bos_info = find_bos(self.path, self._tokenizer)
        self.bos = self.bos_info.token

    @classmethod
    def open_for_model(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Open the tokenizer of a model.

        Parameters
        ----------
        path
            A ``tokenizer.json``, or a model file or folder: then the file is looked for in that folder, in its
            subfolder ``model``, and one folder up.

        Raises
        ------
        SourceError
            If there is no tokenizer.
        """
        model_path = resolve_model_path(path)
        file = cls.find_file(model_path)
        if file is not None:
            return cls(file)
        if not model_path.exists():
            raise build_missing_error(model_path)
        raise SourceError(
            f"{model_path}: no {_TOKENIZER_FILE} next to the model or one folder up; save the model's tokenizer there "
            "(AutoTokenizer.save_pretrained) or name it with --tokenizer"
        )

    @staticmethod
    def find_file(path: str | os.PathLike[str]) -> Path | None:
        """Return the file that `open_for_model` reads; None if there is none."""
        model_path = resolve_model_path(path)
        if model_path.is_file() and model_path.suffix == ".json":
            return model_path
        folder = model_path if model_path.is_dir() else model_path.parent
        folders = [folder, folder / "model", folder.absolute().parent]
        return next(
            (candidate / _TOKENIZER_FILE for candidate in folders if (candidate / _TOKENIZER_FILE).is_file()), None
        )

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the token ids of `text` without added special tokens; int64 ``[token]``.

        Raises
        ------
        SourceError
            If the tokenizer fails: it gives up a search when the file's patterns make it too long.
        """
        with self._wrap_errors(f"fails on a text of {len(text):,} characters"):
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, ids: Iterable[int] | NDArray[np.int64]) -> str:
        """Return the text of `ids` without special tokens; raise as `encode` does."""
        numbers = [int(token) for token in ids]
        with self._wrap_errors(f"fails on {len(numbers):,} tokens"):
            return str(self._tokenizer.decode(numbers))

    @contextmanager
    def _wrap_errors(self, problem: str) -> Iterator[None]:
        try:
            with _convert_panics():
                yield
        except SourceError:
            raise
        except Exception as error:  # the package raises plain Exception
            text = " ".join(str(error).split())[:200]
            raise SourceError(f"{self.path}: {problem}: {text}") from error

    @staticmethod
    def count_bytes(text: str) -> int:
        """Return the UTF-8 bytes of `text`, the denominator of bits per byte."""
        return len(text.encode("utf-8"))


#: Locked while standard error is redirected to nowhere: take it to write there from another thread.
STDERR_LOCK = threading.Lock()


@contextmanager
def _convert_panics() -> Iterator[None]:
    """Convert panics of Rust into RuntimeErrors, and suppress their output on standard error."""
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


MAX_PROMPT_BYTES = 64 << 20  # of a file with a prompt


def read_prompt_file(path: str) -> str:
    """Return the text of a UTF-8 file, ``"-"`` for standard input."""
    file = MappedFile(path)
    if file.size > MAX_PROMPT_BYTES:
        raise SourceError(f"{file.label}: {file.size:,} bytes are too many for a prompt")
    return decode_utf8(file.read_head(file.size), file.label)


def decode_utf8(data: bytes, label: str) -> str:
    """Decode UTF-8 bytes; raise `SourceError`, prefixed with `label`, if they are invalid."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as exc:
        raise SourceError(f"{label}: is not UTF-8: byte {exc.start} is 0x{data[exc.start]:02x}") from None


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text, with the model's BOS token first."""
    ids: list[int] = tokenizer.encode(text).tolist()
    if tokenizer.bos is not None and ids[:1] != [tokenizer.bos]:
        ids.insert(0, tokenizer.bos)
    if not ids:
        raise KvmnnError("the text has no tokens, and the model has none that begins a text")
    return ids
