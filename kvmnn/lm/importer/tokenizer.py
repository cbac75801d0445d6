"""The tokenizer of a GGUF file as ``tokenizer.json`` and ``tokenizer_config.json``.

Two kinds are written: byte-level BPE (``gpt2`` in GGUF files), whose words are cut by the patterns that llama.cpp has
for the file's ``tokenizer.ggml.pre``; and SentencePiece (``llama``), as BPE with byte fallback whose merges follow from
the scores of the pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ...errors import ModelError
from ...formats.llama.gguf_tensors import GgufModel

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens in GGUF files."""
_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL_WITH_SLASH: Final = _TAIL.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_LLAMA3: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
# Letters that are not lower-case ASCII, then letters that are not upper-case ASCII: llama.cpp's form of the pattern.
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_TAIL_WITH_SLASH}"
)

PRE_TOKENIZERS: Final[Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "dbrx", "smaug-bpe"), (_LLAMA3,)
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "trillion", "granite-docling", "a.x-4.0"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), (r"\p{N}", _GPT2)),
    "tekken": (_TEKKEN,),
}
"""Patterns of words by ``tokenizer.ggml.pre``, as llama.cpp (0.3.36 of llama-cpp-python) has them; each splits what the
one before left."""
_WHOLE_WORD_PRE_TOKENIZERS: Final = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "tekken")
)
"""Pre-tokenizers whose words are looked up in the vocabulary before they are merged from parts."""


def build_tokenizer_files(model: GgufModel) -> dict[str, bytes]:
    """Build ``tokenizer.json`` and ``tokenizer_config.json`` of a GGUF model, by file name.

    Raises
    ------
    ModelError
        Where the file has no tokenizer, or one of another kind.
    """
    return _TokenizerBuilder(model).build_files()


class _TokenizerBuilder:
    def __init__(self, model: GgufModel) -> None:
        self._model, self._fields = model, model.fields
        self._kind = self._fields.get("tokenizer.ggml.model")
        tokens = self._fields.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens:
            raise self._error("has no tokenizer (tokenizer.ggml.tokens)")
        self.tokens = [bytes(token).decode("utf-8", "replace") for token in tokens]
        self.types = self._read_numbers("token_type", "<i4") or [_NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise self._error(f"has {len(self.tokens):,} tokens, and {len(self.types):,} types of them")

    def _error(self, message: str) -> ModelError:
        return ModelError(f"{self._model.label}: {message}")

    def _read_numbers(self, key: str, dtype: str) -> list[Any]:
        """A list of the header, which arrives as integers or, where it is long, as bytes."""
        values = self._fields.get(f"tokenizer.ggml.{key}")
        if values is None or isinstance(values, list):
            return list(values or ())
        data = np.ascontiguousarray(values)
        return list(data.view(dtype).tolist()) if data.nbytes % np.dtype(dtype).itemsize == 0 else []

    def build_files(self) -> dict[str, bytes]:
        vocab: dict[str, int] = {}
        for index, token in enumerate(self.tokens):
            # Tokens that a file repeats cannot be found by their text: the first one has it.
            vocab.setdefault(token, index)
        if len(vocab) != len(self.tokens):
            for index, token in enumerate(self.tokens):
                if vocab[token] != index:
                    vocab[f"<repeated_{index}>"] = index
        if self._kind == "gpt2":
            document = self._build_byte_level(vocab)
        elif self._kind == "llama":
            document = self._build_sentencepiece(vocab)
        else:
            raise self._error(
                f"its tokenizer is of the kind {self._kind!r:.40}: expected gpt2 (BPE) or llama (SentencePiece)"
            )
        document = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._list_added_tokens(),
            **document,
        }
        return {
            "tokenizer.json": json.dumps(document, ensure_ascii=False).encode(),
            "tokenizer_config.json": json.dumps(self._build_config(), ensure_ascii=False, indent=2).encode(),
        }

    def _list_added_tokens(self) -> list[dict[str, Any]]:
        # What stands in a text as it is: control tokens, and those that users defined. Tokens in brackets that are
        # marked as unused are neither.
        return [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) and token
        ]

    def _build_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        for name in ("bos", "eos", "unknown", "padding"):
            index = self._fields.get(f"tokenizer.ggml.{name}_token_id")
            if type(index) is int and 0 <= index < len(self.tokens):
                config[{"unknown": "unk_token", "padding": "pad_token"}.get(name, f"{name}_token")] = self.tokens[index]
        # llama.cpp: SentencePiece models begin with BOS where nothing says otherwise, BPE models do not.
        default = self._kind == "llama" or self._fields.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3", "llama-v3")
        config["add_bos_token"] = bool(self._fields.get("tokenizer.ggml.add_bos_token", default))
        config["add_eos_token"] = bool(self._fields.get("tokenizer.ggml.add_eos_token", False))
        template = self._fields.get("tokenizer.chat_template")
        if isinstance(template, str):
            config["chat_template"] = template
        return config

    def _build_byte_level(self, vocab: dict[str, int]) -> dict[str, Any]:
        name = self._fields.get("tokenizer.ggml.pre")
        patterns = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
        if patterns is None:
            raise self._error(
                f"its words are cut by the rule {name!r:.40} (tokenizer.ggml.pre), which is not known: expected one of "
                f"{', '.join(sorted(PRE_TOKENIZERS))}"
            )
        merges = self._fields.get("tokenizer.ggml.merges")
        if not isinstance(merges, list):
            raise self._error("its tokenizer has no merges (tokenizer.ggml.merges)")
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in patterns
        ]
        return {
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                **_MODEL_DEFAULTS,
                "ignore_merges": name in _WHOLE_WORD_PRE_TOKENIZERS,
                "vocab": vocab,
                "merges": list(_split_merges(bytes(merge).decode("utf-8", "replace") for merge in merges)),
            },
        }

    def _build_sentencepiece(self, vocab: dict[str, int]) -> dict[str, Any]:
        scores = self._read_numbers("scores", "<f4")
        if len(scores) != len(self.tokens):
            raise self._error(f"has {len(self.tokens):,} tokens, and {len(scores):,} scores of them")
        has_prefix = bool(self._fields.get("tokenizer.ggml.add_space_prefix", True))
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        steps = [{"type": "Prepend", "prepend": _SPACE}, replace] if has_prefix else [replace]
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if has_prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self._fields.get("tokenizer.ggml.unknown_token_id", 0)
        return {
            "normalizer": {"type": "Sequence", "normalizers": steps},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                **_MODEL_DEFAULTS,
                "unk_token": self.tokens[unknown] if type(unknown) is int and unknown < len(self.tokens) else None,
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": vocab,
                "merges": _derive_merges(vocab, scores),
            },
        }


_MODEL_DEFAULTS: Final[dict[str, Any]] = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}


def _split_merges(lines: Iterable[str]) -> Iterable[list[str]]:
    """Pairs of ``"left right"``; a space inside of a part is never its first character."""
    for line in lines:
        middle = line.index(" ", 1)
        yield [line[:middle], line[middle + 1 :]]


def _derive_merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Every pair of pieces that makes a piece, the best score first.

    SentencePiece merges the pair whose piece has the best score. Pairs of one piece are equally good; here those come
    first whose left part is short, as the leftmost pair is merged first.
    """
    pairs = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                pairs.append((-scores[index], index, cut, left, right))
    pairs.sort(key=lambda pair: pair[:3])
    return [[left, right] for *_, left, right in pairs]
