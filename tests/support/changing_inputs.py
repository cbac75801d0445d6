"""Inputs that change while they are read, each case in a process of its own.

A script: a case and a folder a line on standard input, what the case ended in a line on standard output, both JSON.
Without its guard the case's process dies of SIGBUS. `Server` starts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import kvmnn
from kvmnn.analysis import measure_dumps
from kvmnn.bundle import DecodeOptions, EncodeOptions, encode_source, open_frames, verify_frame_set
from kvmnn.compressor import compress_source, kvcm
from kvmnn.compressor.checkpoint import open_checkpoint
from kvmnn.errors import KvmnnError
from kvmnn.files.change_detection import InputGuard
from kvmnn.files.mapped_file import MappedFile
from kvmnn.formats import ReadOptions, restore
from kvmnn.formats.mnn import pack, unpack
from kvmnn.packed.inference import PackedGeometry
from kvmnn.runtime import read_trace
from kvmnn.store import PrefixStore, read_exported, read_layer_caches

ROWS = 2048
WORDS = np.arange(ROWS * 512, dtype=np.uint32).astype(np.float32).reshape(ROWS, 512)  # 4 MiB
CUT = 64 << 10
SMALL = EncodeOptions(frame_bytes=256 << 10, threads=1)


def cut(path: Path) -> None:
    os.truncate(path, CUT)


def rewritten(path: Path) -> None:
    """Other bytes in the same place, the size as before."""
    half = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(half)
        file.write(bytes(half))


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(100))


CHANGES: dict[str, Callable[[Path], None]] = {"cut": cut, "rewritten": rewritten, "longer": longer}


def once(action: Callable[[], None]) -> Callable[[int], None]:
    """For `progress`: the first call does it."""
    waiting = [action]

    def call(_: int) -> None:
        if waiting:
            waiting.pop()()

    return call


# -- verbs ------------------------------------------------------------------------------------------------------------


def encoded(folder: Path, change: Callable[[Path], None]) -> object:
    np.save(folder / "in.npy", WORDS)
    changes = once(lambda: change(folder / "in.npy"))
    return encode_source(kvmnn.open(folder / "in.npy"), folder / "out.frame", SMALL, progress=changes)


def encoded_dump(folder: Path, change: Callable[[Path], None]) -> object:
    dump(folder)
    changes = once(lambda: change(folder / "in" / "k_t0_2048.bin"))
    return encode_source(kvmnn.open(folder / "in"), str(folder / "out") + "/", SMALL, progress=changes)


def frames_of(folder: Path) -> Path:
    np.save(folder / "words.npy", WORDS)
    encode_source(kvmnn.open(folder / "words.npy"), folder / "in.frame", SMALL)
    return folder / "in.frame"


def decoded(folder: Path, change: Callable[[Path], None]) -> object:
    path = frames_of(folder)
    options = DecodeOptions(threads=1)
    return restore(open_frames(str(path)), str(folder / "out.npy"), options, progress=once(lambda: change(path)))


def verified(folder: Path, change: Callable[[Path], None]) -> object:
    path = frames_of(folder)
    options = DecodeOptions(threads=1)
    return verify_frame_set(open_frames(str(path)), options=options, progress=once(lambda: change(path)))


def compared(folder: Path, change: Callable[[Path], None]) -> object:
    path, other = frames_of(folder), folder / "words.npy"
    options = DecodeOptions(threads=1)
    return verify_frame_set(open_frames(str(path)), kvmnn.open(other), options, progress=once(lambda: change(other)))


def measured(folder: Path, change: Callable[[Path], None]) -> object:
    dump(folder)
    file = folder / "in" / "v_t0_2048.bin"
    return measure_dumps([str(folder / "in")], real=True, threads=1, progress=once(lambda: change(file)))


VERBS = (encoded, encoded_dump, decoded, verified, compared, measured)

# -- readers ----------------------------------------------------------------------------------------------------------


def dump(folder: Path) -> None:
    inside = folder / "in"
    inside.mkdir()
    for part in "kv":
        (inside / f"{part}_t0_{ROWS}.bin").write_bytes(WORDS.astype("<f2").tobytes())
    meta = {"layer_id": 0, "stage": "prefill", "token_begin": 0, "token_end": ROWS, "seq_len": ROWS, "kv_heads": 4}
    meta |= {"head_dim": 128, "bytes_per_elem": 2, "dtype": "fp16"}
    meta |= {f"{part}_file": f"{part}_t0_{ROWS}.bin" for part in "kv"}
    (inside / f"meta_t0_{ROWS}.json").write_text(json.dumps(meta))


def pieces_of(path: Path, **options: object) -> Iterator[object]:
    source = kvmnn.open(path, **options)  # type: ignore[arg-type]
    yield path
    for array in source.arrays:
        for piece in array.iter_chunks(1 << 20):
            yield int(piece.sum())


def npy(folder: Path) -> Iterator[object]:
    np.save(folder / "a.npy", WORDS)
    yield from pieces_of(folder / "a.npy")


def npz(folder: Path) -> Iterator[object]:
    np.savez(folder / "a.npz", k=WORDS)
    yield from pieces_of(folder / "a.npz")


def deflated(folder: Path) -> Iterator[object]:
    np.savez_compressed(folder / "a.npz", k=np.random.default_rng(0).random((512, 1024), np.float32))
    yield from pieces_of(folder / "a.npz")


def tensors(folder: Path) -> Iterator[object]:
    np.save(folder / "a.npy", WORDS)
    restore(open_frames(str(frames_of(folder))), str(folder / "a.safetensors"))
    yield from pieces_of(folder / "a.safetensors")


def raw(folder: Path) -> Iterator[object]:
    (folder / "a.raw").write_bytes(WORDS.tobytes())
    yield from pieces_of(folder / "a.raw", dtype="fp32")


def dumped(folder: Path) -> Iterator[object]:
    dump(folder)
    for entry in pieces_of(folder / "in"):
        yield folder / "in" / "k_t0_2048.bin" if isinstance(entry, Path) else entry


def checkpoint(folder: Path) -> Iterator[object]:
    from compressor_files import checkpoint as write_checkpoint

    path = write_checkpoint(folder / "c.pth", {"compress_tk.0.weight": WORDS})
    opened = open_checkpoint(path)
    yield Path(path)
    yield from (int(storage.read().sum()) for storage in opened.storages.values())


def weights(folder: Path) -> Iterator[object]:
    from compressor_files import weight_file as weight_bytes

    path = folder / "w.bin"
    path.write_bytes(weight_bytes(count=6, head_dim=64, factor=5))
    opened = kvcm.read_weight_file(path)
    yield path
    yield from (float(block.weight.sum()) for block in opened.iter_blocks())


def packed(folder: Path) -> Iterator[object]:
    """An engine's prefix cache; what reads it is another verb each time."""
    keys, values = WORDS[:, :256].reshape(ROWS, 4, 64), WORDS[:, 256:].reshape(ROWS, 4, 64)
    np.savez(folder / "kv.npz", **{f"layer_0.{n}": a.transpose(1, 0, 2) for n, a in (("key", keys), ("value", values))})
    geometry = PackedGeometry(backend="arm64-fp32")
    pack(kvmnn.open(folder / "kv.npz"), folder / "cache", geometry, name="sys")
    source = kvmnn.open(folder / "cache")
    yield folder / "cache" / "sys_0.k"
    yield source


def packed_again(folder: Path) -> Iterator[object]:
    steps = packed(folder)
    yield next(steps)
    yield pack(next(steps), folder / "out", PackedGeometry(backend="x86-sse"), name="other")  # type: ignore[arg-type]


def unpacked(folder: Path) -> Iterator[object]:
    steps = packed(folder)
    yield next(steps)
    yield unpack(next(steps), str(folder / "out.npz"))  # type: ignore[arg-type]


def arrays_packed(folder: Path) -> Iterator[object]:
    list(packed(folder))
    source = kvmnn.open(folder / "kv.npz")
    yield folder / "kv.npz"
    yield pack(source, folder / "out", PackedGeometry(backend="arm64-fp32"), name="sys")


def stored(folder: Path) -> Iterator[object]:
    list(packed(folder))
    source = kvmnn.open(folder / "kv.npz")
    yield folder / "kv.npz"
    with PrefixStore(folder / "store") as store:
        yield store.put(range(ROWS), read_layer_caches(source), model="m")


def replayed(folder: Path) -> Iterator[object]:
    list(packed(folder))
    source = kvmnn.open(folder / "kv.npz")
    yield folder / "kv.npz"
    yield read_trace(source)


def taken_in(folder: Path) -> Iterator[object]:
    """A text of a store as one file, cut once its beginning was read."""
    list(stored(folder))
    with PrefixStore(folder / "store") as store:
        store.export(range(ROWS), folder / "text", model="m")
    beginning = MappedFile(folder / "text")
    beginning.read_head(100)
    yield folder / "text"
    beginning.view(0, beginning.size).sum()
    yield read_exported(folder / "text")


def compressed(folder: Path) -> Iterator[object]:
    from compressor_files import weight_file as weight_bytes

    (folder / "w.bin").write_bytes(weight_bytes(count=6, head_dim=64, factor=5))
    words = WORDS.reshape(1, 4, -1, 64)
    np.savez(folder / "kv.npz", k=words, v=words)
    source = kvmnn.open(folder / "kv.npz", ReadOptions(forbid_reinterpretation=True))
    yield folder / "kv.npz"
    yield compress_source(folder / "w.bin", source, str(folder / "kv.npz"), str(folder / "out.npz"), axes="lhtd")


READERS = (npy, npz, deflated, tensors, raw, dumped, checkpoint, weights)
READERS += (packed_again, unpacked, arrays_packed, stored, replayed, taken_in, compressed)


def read(kind: Callable[[Path], Iterator[object]], folder: Path) -> object:
    with InputGuard():
        steps = kind(folder)
        path = next(steps)
        assert isinstance(path, Path)
        cut(path)
        return sum(1 for _ in steps)


def outcome(case: str, folder: Path) -> str:
    known = {job.__name__: job for job in (*VERBS, *READERS)}
    name, _, how = case.partition("-")
    try:
        found = known[name](folder, CHANGES[how]) if how else read(known[name], folder)  # type: ignore[operator, arg-type]
        return f"went through: {str(found).splitlines()[0]}"
    except KvmnnError as error:
        return f"{type(error).__name__}: {error}"


def serve() -> None:
    """Children of a process that has imported everything, and has no threads yet."""
    for line in sys.stdin:
        case, folder = json.loads(line)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(writing, outcome(case, Path(folder)).encode())
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        os.close(writing)
        with open(reading) as file:
            text = file.read()
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text]), flush=True)


class Server:
    """The parent of the children, for the tests."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def __call__(self, case: str, folder: Path) -> tuple[int, str]:
        """The exit code (negative: the signal), and what the case ended in."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([case, str(folder)]), file=self._process.stdin, flush=True)
        code, text = json.loads(self._process.stdout.readline())
        return code, text

    def close(self) -> None:
        self._process.communicate()


if __name__ == "__main__":
    serve()
