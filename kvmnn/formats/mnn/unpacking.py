"""Packed files, or anything else that kvmnn reads, into files of plain arrays or a KV dump."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from ...arrays.completeness import Completeness, completeness_document, report_missing
from ...arrays.engine_notes import note_completeness
from ...arrays.layers import sorted_layers
from ...arrays.named_array import ArrayInfo, Piece
from ...arrays.own_order import order_notes
from ...arrays.source import Source
from ...arrays.undoing import Undo, rounded
from ...errors import OptionError
from ...files.names import is_directory, with_contents
from ...files.output import DirectoryOutput, is_device
from ...packed.cache_info import CacheInfo
from ...packed.summary import cache_document, describe_layouts, kept_tokens
from ...text import LOSSLESS, LOSSY, UNCHANGED, at_rate, count, span
from ...threads.pipeline import Progress
from ..beside import write_beside
from ..npz import comment_of
from ..reading import positions_beside
from ..writing import left_there, lost, metadata_for, write_arrays
from .dump_writing import write_dump

Form = Literal["arrays", "dump", "packed-dump"]
FORMS: tuple[Form, ...] = ("arrays", "dump", "packed-dump")
"""What `unpack` writes: files of arrays, or a KV dump of the engine, plain or packed."""

_STEP = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """Plain arrays that were written.

    Parameters
    ----------
    input, output
        Paths.
    arrays
        What was written.
    lossy
        Whether the words were made from int8 codes.
    seconds
        Time that it took.
    notes
        One line for each thing about the input that was inferred, then for what the output has no place for.
    cache
        The packed cache that the arrays come from, where that is known.
    dequantised
        Types of another engine whose blocks the numbers were made from.
    undone
        What llama.cpp had done to K and V and was undone.
    reread
        Whether what was written was read again and compared; dumps and devices are not.
    completeness
        The state of the model that the arrays contain, where that is known.
    doubt
        Why the arrays may not be what the engine stored; empty unless the caller insisted on reading them.
    has_padding
        Whether texts of a batch have rows that are no tokens.
    """

    input: str
    output: str
    arrays: tuple[ArrayInfo, ...]
    lossy: bool
    seconds: float
    notes: tuple[str, ...] = ()
    cache: CacheInfo | None = None
    dequantised: tuple[str, ...] = ()
    undone: tuple[Undo, ...] = ()
    reread: bool = False
    completeness: Completeness | None = None
    doubt: str = ""
    has_padding: bool = False

    @property
    def raw_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def label(self) -> str | None:
        """``LOSSLESS`` where what was written was read back and compared, else ``UNCHANGED``: words as they were.

        ``LOSSY`` for int8, for rotations undone, and where files were read against what they show; None where blocks
        were read as the numbers that they stand for, and nothing was rounded since.
        """
        if rounded(self.undone) or self.doubt:
            return LOSSY
        if self.dequantised:
            return None
        if self.lossy:
            return LOSSY
        return LOSSLESS if self.reread else UNCHANGED

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "input": self.input,
            "output": self.output,
            "label": self.label,
            "raw_bytes": self.raw_bytes,
            "seconds": self.seconds,
            "notes": list(self.notes),
            "dequantised": list(self.dequantised),
            "undone": list(self.undone),
            "cache": cache_document(self.cache),
            **completeness_document(self.completeness),
            "arrays": [{"name": a.name, "dtype": a.dtype, "shape": list(a.shape)} for a in self.arrays],
        }

    def _describe_elements(self) -> str:
        """Which elements were compared: of packed files those of live tokens, where the layout has them."""
        if self.cache is None:
            return "all rows, padding included" if self.has_padding else "live elements"
        tokens = span(sorted({layer.tokens for layer in self.cache.layers}))
        return f"live elements: {tokens} tokens in {describe_layouts(self.cache)}"

    def __str__(self) -> str:
        proof = self._describe_elements() + (", read back and compared" if self.reread else ", copied as they are")
        how = "int8 times scale plus bias" if self.lossy else proof
        how = f"dequantised from {', '.join(self.dequantised)}" if self.dequantised else how
        how += f", undone: {', '.join(self.undone)}" if self.undone else ""
        how = f"read as specified, although {self.doubt}" if self.doubt else how
        said = f"{self.label} ({how})" if self.label else how
        line = (
            f"{self.output}: {count(len(self.arrays), 'array')}, {self.raw_bytes:,} bytes, {said}"
            f"{at_rate(self.raw_bytes, self.seconds)}"
        )
        return "\n".join([line, *(f"  {each}" for each in report_missing(self.completeness))])


def unpack(
    source: Source,
    output: str,
    *,
    form: Form = "arrays",
    run_id: str = "kvmnn",
    force: bool = False,
    progress: Progress | None = None,
) -> Unpacked:
    """Write the arrays of a packed cache, or of any other source, as plain arrays or as a KV dump.

    Parameters
    ----------
    source
        What `kvmnn.open` gives.
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

    Raises
    ------
    OptionError
        For a packed dump of what is not a packed cache.
    KvmnnError
        When the output cannot hold the arrays, exists, or cannot be written.
    """
    started = time.perf_counter()
    left: list[str] = []
    if form == "arrays":
        runs, metadata = _runs(source, progress), metadata_for(source, output)
        if is_directory(output):  # where the description of packed files has no place
            metadata |= positions_beside(source.cache)
        files = write_arrays(output, source.arrays, runs, metadata, force=force, protect=source.files)
        left += left_there(output, files, metadata)
    else:
        _write_dump(source, output, form, run_id, force, progress)
    return Unpacked(
        input=" ".join(source.inputs),
        output=output,
        arrays=tuple(source.arrays),
        lossy=source.lossy,
        seconds=time.perf_counter() - started,
        notes=(*source.notes, *order_notes(source), *_lost(source, output, form), *left),
        cache=source.cache,
        dequantised=source.code_types,
        undone=source.undone or (),
        reread=form == "arrays" and not is_device(output),
        completeness=source.completeness,
        doubt=source.doubt,
        has_padding=source.engine_cache is not None and source.engine_cache.has_padding,
    )


def _suffix(output: str) -> str:
    return PurePath(output).suffix.lower()


def _lost(source: Source, output: str, form: Form) -> Iterator[str]:
    """What the output has no place for: of what engine, and which tokens of the text a cache that was cut holds."""
    if form == "arrays" and _suffix(output) == ".safetensors":
        return
    if form == "arrays" and any(array.dtype == "bf16" for array in source.arrays):
        yield f"{output} has bf16 words as uint16 where its format is numpy's, which has no bf16: .safetensors has"
    yield from lost(source, output if form == "arrays" else f"{output}/")
    is_npz = _suffix(output) == ".npz" and comment_of(metadata_for(source, output)) is not None
    says = form == "arrays" and (is_npz or is_directory(output))
    kept = kept_tokens(source.cache) if source.cache and not says else []
    if kept:
        more = f" and so on for {count(len(kept), 'layer')}" if len(kept) > 1 else ""
        yield f"{output} does not say which tokens of the text it holds, .safetensors and .npz do: {kept[0]}{more}"


def _write_dump(source: Source, output: str, form: Form, run_id: str, force: bool, progress: Progress | None) -> None:
    layout = source.cache.layout if source.cache else None
    if form == "packed-dump" and layout is None:
        raise OptionError(
            f"{' '.join(source.inputs)}: is not a packed cache, so nothing says how to pack it: use --as dump"
        )
    if form == "packed-dump" and source.cache is not None and not source.cache.is_uniform:
        raise OptionError(f"{' '.join(source.inputs)}: heads differ by layer: use --as dump")
    arrays = sorted_layers(source)
    with DirectoryOutput(output, force=force, protect=with_contents(source.files)) as directory:
        write_dump(
            arrays,
            directory,
            run_id,
            packed_as=layout if form == "packed-dump" else None,
            flash=layout is None or layout.flash_block is not None,
            progress=progress,
        )
        write_beside(directory, note_completeness(source))
        directory.commit()


def _runs(source: Source, progress: Progress | None) -> Iterator[tuple[int, Piece]]:
    for index, array in enumerate(source.arrays):
        for piece in array.pieces(_STEP):
            yield index, piece
            if progress:
                progress(piece.size)
            del piece
