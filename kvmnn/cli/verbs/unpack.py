"""``kvmnn unpack``: packed files to plain arrays."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ...text import LOSSLESS, LOSSY, count, megabytes_per_second
from .. import loading, packed_options, prefix_output, printing, shared_options
from ..printing import UsageError

if TYPE_CHECKING:
    from ...arrays.named_array import Piece
    from ...arrays.source import Source

_TEXT = """Turn packed K and V into plain arrays [kv_head, token, head_dim], called layer_<n>.key and layer_<n>.value.

IN is the directory of a prefix cache, of live cache files or of a packed KV dump, or one of their .k or .v files;
anything else that kvmnn reads will do as well.

  -o X.npz, X.safetensors      all arrays; .safetensors keeps what pack needs to restore the files
  -o DIR/                      one .npy file for each array
  -o X.npy, -o X               one array (--tensor layer_0.key chooses)
  --as dump -o DIR/            a KV dump as the engine writes it, [token, kv_head, head_dim]
  --as packed-dump -o DIR/     its packed variant

Live elements only: padding and room are left out. Of caches that the engine keeps in int8 (--int8) the codes times
their scales plus biases come back as fp32, and what cannot be recovered is said."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "unpack", run, "packed files to plain arrays", _TEXT)
    parser.add_argument("input", metavar="IN")
    shared_options.add_output(parser, "file or directory")
    shared_options.add_source(parser, "what the words are, where the pack numbers do not say")
    parser.add_argument("--as", dest="form", choices=("arrays", "dump", "packed-dump"), default="arrays")
    parser.add_argument("--run-id", default="kvmnn", metavar="ID", help="of a dump (default: kvmnn)")
    packed_options.add_packed(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    if arguments.output is None:
        raise UsageError("no output given: use -o X.safetensors, -o X.npz or -o DIR/")
    source = loading.load([arguments.input], arguments, frames=True)
    loading.report_skipped(source, arguments)
    started = time.perf_counter()
    if arguments.form == "arrays":
        _write(source, arguments)
    else:
        _write_dump(source, arguments)
    seconds = time.perf_counter() - started
    nbytes = sum(array.nbytes for array in source.arrays)
    if arguments.json:
        printing.print_json(
            {
                "verb": "unpack",
                "input": arguments.input,
                "output": arguments.output,
                "label": LOSSY if source.lossy else LOSSLESS,
                "raw_bytes": nbytes,
                "seconds": seconds,
                "notes": source.notes,
                "cache": printing.cache_document(source.cache),
                "arrays": [{"name": a.name, "dtype": a.dtype, "shape": list(a.shape)} for a in source.arrays],
            }
        )
    how = f"{LOSSY} (int8 times scale plus bias)" if source.lossy else f"{LOSSLESS} (live elements copied as they are)"
    printing.say(
        arguments,
        f"{arguments.output}: {count(len(source.arrays), 'array')}, {nbytes:,} bytes, {how}, "
        f"{megabytes_per_second(nbytes, seconds)}",
    )
    return 0


def _write(source: Source, arguments: argparse.Namespace) -> None:
    from ...files.output import DirectoryOutput, FileOutput
    from ...formats.writing import write_directory, writer_for

    arrays, output = source.arrays, arguments.output
    protect = [arguments.input]
    with printing.progress(arguments, sum(array.nbytes for array in arrays), "unpack") as step:
        runs = _runs(source, step)
        if printing.is_directory(output):
            with DirectoryOutput(output, force=arguments.force, protect=protect) as directory:
                write_directory(directory, arrays, runs)
                directory.commit()
            return
        writer = writer_for(output, arrays)
        with FileOutput(output, force=arguments.force, protect=protect) as file:
            writer(file.file, arrays, runs, source.metadata)
            file.commit()


def _write_dump(source: Source, arguments: argparse.Namespace) -> None:
    from ...files.output import DirectoryOutput
    from ...formats.mnn.dump_writing import write_dump

    packed_as = None
    if arguments.form == "packed-dump":
        if source.cache is None:
            raise UsageError(f"{arguments.input}: is not a packed cache, so nothing says how to pack it: use --as dump")
        packed_as = source.cache.layout
    arrays = prefix_output.layers_of(source, arguments)
    protect = prefix_output.with_contents([arguments.input])
    total = sum(array.nbytes for array in source.arrays)
    with (
        printing.progress(arguments, total, "unpack") as step,
        DirectoryOutput(arguments.output, force=arguments.force, protect=protect) as directory,
    ):
        flash = source.cache is None or source.cache.layout.flash_block is not None
        write_dump(arrays, directory, arguments.run_id, packed_as=packed_as, flash=flash, progress=step)
        directory.commit()


def _runs(source: Source, step: Callable[[int], object] | None) -> Iterator[tuple[int, Piece]]:
    for index, array in enumerate(source.arrays):
        for piece in array.pieces(8 << 20):
            yield index, piece
            if step:
                step(piece.size)
            del piece
