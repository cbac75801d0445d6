"""Record what torch computes with the shipped model: the numbers that kvmnn's steps have to equal.

`python tools/lm/record_logits.py [OUT.npz]` (needs torch and transformers: `pip install '.[peers]'`) runs the first
tokens of a held-out text through transformers' GPTNeoXForCausalLM (float32, eager attention) and stores, for each of
five ways to feed them, some logits: the same 16 vocabulary ids at a few positions. The default output is
fixtures/lm/torch_logits.npz.

Arrays of the file: `ids` int64 [token], `vocabulary` int64 [16]; for each way W `W.positions` int64 [n] and `W.logits`
float32 [n, 16]; `decode`: token by token; `chunks`: `chunks.size` tokens at once; `cut`: after `cut.prefix` tokens in
one step the cache is cut to `cut.kept` in all layers and heads, then the other positions are fed at once; `layers`: as
before, but layer i's head h keeps `layers.kept.{i}`[h]; `versions`: those of torch and transformers.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from kvmnn.errors import KvmnnError
from kvmnn.files.atomic import FileOutput

FIXTURE = Path(__file__).resolve().parent.parent.parent / "fixtures" / "lm"
TEXT = "traceback.py.txt"
TOKENS = 256
CHUNK = 37
PREFIX = 224
TAIL = 24  # tokens fed at once on a cut cache
SEED = 6
LAYERS_UNCUT = 2
POSITIONS = (0, 1, 2, 36, 37, 100, 200, 255)
VOCABULARY = 16

Indices = npt.NDArray[np.int64]
Recorded = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", default=FIXTURE / "torch_logits.npz", metavar="OUT")
    parser.add_argument("-f", "--force", action="store_true", help="replace a file that exists")
    options = parser.parse_args(arguments)
    try:
        recorded = record(FIXTURE)
        archive = io.BytesIO()
        np.savez_compressed(archive, **recorded)
        with FileOutput(options.output, force=options.force) as output:
            output.file.write(archive.getvalue())
            output.commit()
    except KvmnnError as exc:
        print(f"record_logits.py: error: {exc}", file=sys.stderr)
        return 1
    except ImportError as exc:
        print(f"record_logits.py: error: {exc.name} is missing: pip install torch transformers", file=sys.stderr)
        return 3
    values = sum(array.size for name, array in recorded.items() if name.endswith(".logits"))
    print(f"{options.output}: {values} logits")
    return 0


def record(folder: Path) -> Recorded:
    """Run all ways of feeding the text's first tokens; the arrays of the file.

    Raises
    ------
    KvmnnError
        Where the model is damaged.
    ImportError
        Without torch and transformers.
    """
    import torch
    import transformers
    from torch_reference import TorchDecoder, load_model

    decoder = TorchDecoder(load_model(folder))
    random = np.random.default_rng(SEED)
    text = (folder / "texts" / TEXT).read_text(encoding="utf-8")
    ids = [0, *Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids][:TOKENS]
    feeder = Feeder(decoder, np.array(ids, np.int64))
    vocabulary = np.sort(random.choice(decoder.model.config.vocab_size, VOCABULARY, replace=False))
    equal, unequal = kept_tokens(random, decoder.layers, decoder.heads)
    logits = {
        "prefill": feeder.in_steps([TOKENS]),
        "decode": feeder.in_steps([1] * TOKENS),
        "chunks": feeder.in_steps([CHUNK] * (TOKENS // CHUNK) + [TOKENS % CHUNK]),
    }
    recorded: Recorded = {
        "ids": feeder.ids,
        "vocabulary": vocabulary,
        "chunks.size": np.int64(CHUNK),
        "cut.prefix": np.int64(PREFIX),
        "cut.kept": equal,
        **{f"layers.kept.{layer}": kept for layer, kept in enumerate(unequal)},
        "versions": np.array([f"torch {torch.__version__}", f"transformers {transformers.__version__}"]),
    }
    for name, rows in logits.items():
        recorded[f"{name}.positions"] = np.array(POSITIONS)
        recorded[f"{name}.logits"] = rows[np.ix_(np.array(POSITIONS), vocabulary)]
    cuts = {"cut": [np.stack([equal] * decoder.heads)] * decoder.layers, "layers": unequal}
    for name, kept in cuts.items():
        recorded[f"{name}.positions"] = np.arange(PREFIX, PREFIX + TAIL)
        recorded[f"{name}.logits"] = feeder.after_cut(kept)[:, vocabulary]
    return recorded


class Feeder:
    """Feeds a text to torch in steps."""

    def __init__(self, decoder: Any, ids: Indices) -> None:
        self.decoder = decoder
        self.ids = ids
        self.positions = np.arange(len(ids), dtype=np.int64)

    def in_steps(self, sizes: list[int]) -> npt.NDArray[np.float32]:
        """Logits of all tokens, fed in steps of `sizes`, with the full cache."""
        past, rows, first = self.decoder.empty(), [], 0
        for size in sizes:
            step = self._step(first, size, past)
            past, first = step.present_pairs, first + size
            rows.append(step.logits)
        return np.concatenate(rows)

    def after_cut(self, kept: list[Indices]) -> npt.NDArray[np.float32]:
        """Logits of the tokens after the prefix, its cache cut to `kept`, each ``[head, token]``."""
        present = self._step(0, PREFIX, self.decoder.empty()).present_pairs
        past = [
            tuple(np.take_along_axis(array, indices[None, :, :, None], 2) for array in pair)
            for pair, indices in zip(present, kept, strict=True)
        ]
        logits: npt.NDArray[np.float32] = self._step(PREFIX, TAIL, past).logits
        return logits

    def _step(self, first: int, size: int, past: Any) -> Any:
        chosen = slice(first, first + size)
        return self.decoder.step(self.ids[chosen], self.positions[chosen], past)


def kept_tokens(random: np.random.Generator, layers: int, heads: int) -> tuple[Indices, list[Indices]]:
    """A third of the prefix for all; and for every layer another number, for every head other tokens."""

    def some(number: int) -> Indices:
        return np.sort(random.choice(PREFIX, number, replace=False))

    lengths = [PREFIX if layer < LAYERS_UNCUT else PREFIX // (layer + 1) for layer in range(layers)]
    return some(PREFIX // 3), [np.stack([some(length) for _ in range(heads)]) for length in lengths]


if __name__ == "__main__":
    sys.exit(main())
