"""Write packed files, or any other input that kvmnn reads, as plain arrays or a KV dump."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import field, replace
from pathlib import PurePath
from typing import Any, Literal

from ..._util.dataclass import dataclass
from ..._util.parallel import Progress
from ..._util.text import LOSSLESS, LOSSY, UNCHANGED, format_range, format_rate, pluralize
from ...arrays.array import ArrayInfo
from ...arrays.completeness import Completeness, format_missing
from ...arrays.engine_metadata import add_completeness_metadata
from ...arrays.engine_transforms import describe_order
from ...arrays.layers import collect_layers
from ...arrays.llama_transforms import Transform, has_lossy_inverse
from ...arrays.source import LOSSY_KEY, Source, join_losses, list_losses, qualify_label
from ...errors import OptionError
from ...files.atomic import DirectoryOutput, is_device, refuse_input_folder
from ...files.file_names import is_directory_output, list_with_contents
from ...files.schema import Record, json_key
from ...packed.cache_info import CacheInfo, build_cache_document, describe_evicted_layers, describe_layouts
from ..npz import build_comment
from ..sidecars import write_sidecars
from ..tensor_selection import build_packed_positions_sidecar
from ..writer import build_output_metadata, iter_source_chunks, list_lost_information, list_stale_files, write_arrays

OutputForm = Literal["arrays", "dump", "packed-dump"]
OUTPUT_FORMS: tuple[OutputForm, ...] = ("arrays", "dump", "packed-dump")
"""Output forms of `unpack`: files of arrays, or a KV dump of the engine, plain or packed."""


def _build_array_documents(arrays: tuple[ArrayInfo, ...]) -> list[dict[str, Any]]:
    return [{"name": array.name, "dtype": array.dtype, "shape": list(array.shape)} for array in arrays]


@dataclass(frozen=True, kw_only=True)
class UnpackResult(Record):
    """Result of unpacking."""

    #: Paths of input and output.
    input: str
    output: str
    #: Duration.
    seconds: float
    #: One line for each inferred property of the input, then for what the output cannot store.
    notes: tuple[str, ...] = ()
    #: Quantised types that the values were dequantised from.
    dequantised: tuple[str, ...] = ()
    #: Transforms of llama.cpp that were inverted.
    undone: tuple[Transform, ...] = ()
    #: The packed cache that the arrays were read from; None if unknown.
    cache: CacheInfo | None = field(default=None, metadata={"convert": build_cache_document})
    #: How much of the model's state the arrays contain; None if unknown.
    completeness: Completeness | None = field(default=None, metadata={"omit": True})
    #: The arrays that were written.
    arrays: tuple[ArrayInfo, ...] = field(metadata={"convert": _build_array_documents})
    #: Whether the words were dequantised from int8.
    is_lossy: bool = field(metadata={"json": False})
    #: Whether the output was read back and compared; dumps and devices are not.
    is_read_back: bool = field(default=False, metadata={"json": False})
    #: Why the arrays may differ from what the engine stored; empty unless the reading was forced.
    doubt: str = field(default="", metadata={"json": False})
    #: Lines of `notes` about what K and V had lost before.
    losses: tuple[str, ...] = field(default=(), metadata={"json": False})
    #: Whether texts of a batch have padding.
    has_padding: bool = field(default=False, metadata={"json": False})

    @property
    @json_key(before="seconds")
    def raw_bytes(self) -> int:
        """Return the number of bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    @json_key(after="output")
    def label(self) -> str | None:
        """Return ``LOSSLESS`` if the output was read back and compared, else ``UNCHANGED``.

        ``LOSSY`` for int8, inverted rotations, and files read against contradicting evidence; None for dequantised
        blocks that were not rounded afterwards. Where K and V had lost something before, ``LOSSLESS copy of LOSSY K and
        V``, or ``UNCHANGED copy ...``.
        """
        if has_lossy_inverse(self.undone) or self.doubt:
            return LOSSY
        if self.dequantised:
            return qualify_label(None, self.losses)
        if self.is_lossy:
            return LOSSY
        return qualify_label(LOSSLESS if self.is_read_back else UNCHANGED, self.losses)

    def _describe_elements(self) -> str:
        """Return which elements were compared: for packed files those of live tokens."""
        if self.cache is None:
            return "all rows, padding included" if self.has_padding else "live elements"
        tokens_text = format_range(sorted({layer.tokens for layer in self.cache.layers}))
        return f"live elements: {tokens_text} tokens in {describe_layouts(self.cache)}"

    def __str__(self) -> str:
        proof_text = "read back and compared" if self.is_read_back else "copied as they are"
        details_text = "int8 times scale plus bias" if self.is_lossy else f"{self._describe_elements()}, {proof_text}"
        details_text = f"dequantised from {', '.join(self.dequantised)}" if self.dequantised else details_text
        details_text += f", undone: {', '.join(self.undone)}" if self.undone else ""
        details_text = f"read as specified, although {self.doubt}" if self.doubt else details_text
        label_text = f"{self.label} ({details_text})" if self.label else details_text
        line = (
            f"{self.output}: {pluralize(len(self.arrays), 'array')}, {self.raw_bytes:,} bytes, {label_text}"
            f"{format_rate(self.raw_bytes, self.seconds)}"
        )
        return "\n  ".join([line, *self.losses, *format_missing(self.completeness)])


def unpack(
    source: Source,
    output: str,
    *,
    form: OutputForm = "arrays",
    run_id: str = "kvmnn",
    force: bool = False,
    progress: Progress | None = None,
    is_in_memory: bool = False,
) -> UnpackResult:
    """Write the arrays of a packed cache, or of any other source, as plain arrays or as a KV dump.

    Parameters
    ----------
    source
        A result of `kvmnn.open`.
    output
        A ``.npz`` or ``.safetensors`` file, a directory (ends in a slash, or is one) for a ``.npy`` file of each array
        or for a dump, or any other file for one array.
    form
        ``"arrays"``, ``[kv_head, token, head_dim]``; ``"dump"``, ``[token, kv_head, head_dim]`` as the engine dumps
        them; ``"packed-dump"``, its packed variant.
    run_id
        Of a dump.
    force
        Replace files that exist; the inputs are never replaced.
    progress
        Called with bytes of arrays.
    is_in_memory
        Whether all arrays are: files of arrays are compared with them and not by hashes, which takes less time.

    Raises
    ------
    OptionError
        For a packed dump of a source that is not a packed cache.
    KvmnnError
        When the output cannot store the arrays, exists, or cannot be written.
    """
    refuse_input_folder(output, source.inputs)
    start_time = time.perf_counter()
    losses = tuple(list_losses(source.metadata))
    stale_notes: list[str] = []
    if source.doubt:  # what this call loses: the label says it, and the output records it
        loss = join_losses(source.metadata.get(LOSSY_KEY, ""), source.doubt)
        source = replace(source, metadata=source.metadata | {LOSSY_KEY: loss})
    if form == "arrays":
        chunks, metadata = iter_source_chunks(source, progress), build_output_metadata(source, output)
        if is_directory_output(output):  # where the description of packed files has no place
            metadata |= build_packed_positions_sidecar(source.cache)
        compare_with = source.arrays if is_in_memory else None
        files = write_arrays(
            output, source.arrays, chunks, metadata, compare_with=compare_with, force=force, exclude=source.files
        )
        stale_notes += list_stale_files(output, files, metadata)
    else:
        _write_kv_dump(source, output, form, run_id, force, progress)
    return UnpackResult(
        input=" ".join(source.inputs),
        output=output,
        arrays=tuple(source.arrays),
        is_lossy=source.lossy,
        losses=losses,
        seconds=time.perf_counter() - start_time,
        notes=(*source.notes, *describe_order(source), *_iter_lost_information(source, output, form), *stale_notes),
        cache=source.cache,
        dequantised=source.code_types,
        undone=source.inverted_transforms or (),
        is_read_back=form == "arrays" and not is_device(output),
        completeness=source.completeness,
        doubt=source.doubt,
        has_padding=source.engine_cache is not None and source.engine_cache.has_padding,
    )


def _iter_lost_information(source: Source, output: str, form: OutputForm) -> Iterator[str]:
    """Yield notes on what the output cannot store: the engine, and the token positions of an evicted cache."""
    suffix = PurePath(output).suffix.lower()
    if form == "arrays" and suffix == ".safetensors":
        return
    if form == "arrays" and any(array.dtype == "bf16" for array in source.arrays):
        yield f"{output} has bf16 words as uint16 where its format is numpy's, which has no bf16: .safetensors has"
    yield from list_lost_information(source, output if form == "arrays" else f"{output}/")
    is_npz = suffix == ".npz" and build_comment(build_output_metadata(source, output)) is not None
    is_complete = form == "arrays" and (is_npz or is_directory_output(output))
    evicted_layers = describe_evicted_layers(source.cache) if source.cache and not is_complete else []
    if evicted_layers:
        more_text = f" and so on for {pluralize(len(evicted_layers), 'layer')}" if len(evicted_layers) > 1 else ""
        yield (
            f"{output} does not say which tokens of the text it holds, .safetensors and .npz do: "
            f"{evicted_layers[0]}{more_text}"
        )


def _write_kv_dump(
    source: Source, output: str, form: OutputForm, run_id: str, force: bool, progress: Progress | None
) -> None:
    layout = source.cache.layout if source.cache else None
    if form == "packed-dump" and layout is None:
        raise OptionError(
            f"{' '.join(source.inputs)}: is not a packed cache, so nothing says how to pack it: use --output-kind dump"
        )
    if form == "packed-dump" and source.cache is not None and not source.cache.is_uniform:
        raise OptionError(f"{' '.join(source.inputs)}: heads differ by layer: use --output-kind dump")
    arrays = collect_layers(source)
    from .dump import write_dump  # with frames and packed files, which arrays do not need

    with DirectoryOutput(output, force=force, exclude=list_with_contents(source.files)) as directory:
        write_dump(
            arrays,
            directory,
            run_id,
            packed_as=layout if form == "packed-dump" else None,
            flash=layout is None or layout.flash_block is not None,
            progress=progress,
        )
        write_sidecars(directory, add_completeness_metadata(source))
        directory.commit()
