"""The result of an import, stored in the folder of the model, and whether that folder is complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Final, Literal

from ..._util.dataclass import dataclass
from ...errors import REPLACE_HINT, KvmnnError, OptionError, OutputError
from ...files.schema import Record, read_object_or_empty

WeightDtype = Literal["fp32", "fp16", "int8"]
WEIGHT_DTYPES: Final[tuple[WeightDtype, ...]] = ("fp32", "fp16", "int8")
GRAPH_FILE: Final = "model.onnx"
WEIGHTS_FILE: Final = "model.onnx.data"
RESULT_FILE: Final = "import.json"
TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("generation_config.json", "special_tokens_map.json"),
)
_MODEL_FILES: Final = frozenset({GRAPH_FILE, WEIGHTS_FILE, RESULT_FILE, "config.json", *TOKENIZER_FILES})


@dataclass(frozen=True, kw_only=True)
class WeightCheck(Record):
    """A text that was read with the weights as they were written, and in float32."""

    #: Tokens whose successor was scored.
    tokens: int
    #: Mean negative log-likelihood, nats per token.
    nll: float
    reference_nll: float
    #: Share of the tokens at which both have the same most probable one.
    equal_best: float

    def __str__(self) -> str:
        return (
            f"check: {self.nll:.4f} nats over {self.tokens} tokens of a text, {self.reference_nll:.4f} in fp32 "
            f"({self.nll - self.reference_nll:+.4f}); the same best token at {100 * self.equal_best:.1f} %"
        )


@dataclass(frozen=True, kw_only=True)
class ImportResult(Record):
    """A model that was imported."""

    #: The file, folder or name of the catalog.
    source: str
    #: SHA-256 of the source, if it is a model of the catalog.
    sha256: str | None = field(default=None, metadata={"omit": True})
    #: The folder that was written.
    output: str
    architecture: str
    #: Of the weights in the folder. Arithmetic is in float32; products with int8 matrices round activations to int8.
    dtype: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    #: Number of weights, and their bytes in the folder.
    parameters: int
    weight_bytes: int
    #: Element types of the tensors in the source, with the number of tensors.
    tensor_types: dict[str, int]
    #: What int8 weights cost on a text; None for others.
    check: WeightCheck | None = field(default=None, metadata={"omit": True})

    def __str__(self) -> str:
        types = ", ".join(f"{count} {name}" for name, count in self.tensor_types.items())
        text = (
            f"{self.output}: {self.architecture}, {self.layers} layers, {self.query_heads} query and {self.kv_heads} "
            f"kv heads of {self.head_dim}, {self.parameters / 1e6:.1f} million parameters\n"
            f"weights: {types} tensors, written as {self.dtype} ({self.weight_bytes / 1e6:,.0f} MB)"
        )
        return text if self.check is None else f"{text}\n{self.check}"


def validate_weight_dtype(dtype: str) -> None:
    """Raise `OptionError` unless weights can be stored in `dtype`."""
    if dtype not in WEIGHT_DTYPES:
        raise OptionError(f"dtype {dtype!r:.40}: expected one of {', '.join(WEIGHT_DTYPES)}")


def read_import_result(folder: Path) -> ImportResult | None:
    """Return the result of the import into a folder; None without one, or without its whole graph and weights."""
    document = read_object_or_empty(folder / RESULT_FILE)
    try:
        result = ImportResult.from_dict({**document, "output": str(folder)}, str(folder / RESULT_FILE))
    except KvmnnError:
        return None
    weights_path = folder / WEIGHTS_FILE
    is_complete = (folder / GRAPH_FILE).is_file() and weights_path.is_file()
    return result if is_complete and weights_path.stat().st_size == result.weight_bytes else None


def describe_weights(folder: Path, config: Mapping[str, object]) -> dict[str, Any]:
    """Describe a model as far as files say it: ``architecture``, and ``weights``, their element types.

    Parameters
    ----------
    folder
        The folder of its graph.
    config
        Its ``config.json``.
    """
    imported = read_import_result(folder)
    if imported is not None:
        types = " and ".join(f"{count} {name}" for name, count in imported.tensor_types.items())
        weights = f"weights of {types} tensors stored as {imported.dtype}"
        return {"architecture": imported.architecture, "weights": weights}
    keys = ("model_type", "torch_dtype", "dtype")
    architecture, *dtypes = (str(config[key])[:40] if config.get(key) else "" for key in keys)
    dtype = next((name for name in dtypes if name), "")
    description = {"architecture": architecture, "weights": f"{dtype} in config.json" if dtype else ""}
    return {key: text for key, text in description.items() if text}


def check_replaceable(folder: Path, *, overwrite: bool) -> None:
    """Raise `OutputError` if an import must not replace `folder`: only a model that was imported may be."""
    if not folder.is_dir():
        return
    names = {path.name for path in folder.iterdir()}
    if not names:
        return
    foreign_names = sorted(name for name in names - _MODEL_FILES if ".kvmnn-" not in name)
    if RESULT_FILE not in names:
        raise OutputError(f"{folder}: is a folder of something else, which an imported model does not replace")
    if foreign_names:
        shown_names = ", ".join(foreign_names[:3]) + (" ..." if len(foreign_names) > 3 else "")
        raise OutputError(
            f"{folder}: holds {shown_names}, which no import wrote: expected a new folder, or an imported model alone"
        )
    if not overwrite:
        raise OutputError(f"{folder}: exists already ({REPLACE_HINT} replaces it)")
