"""Arrays to frames and a manifest, and back: the very bytes, or a clear refusal."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvmnn
from kvmnn.arrays.named_array import NamedArray
from kvmnn.bundle import manifest
from kvmnn.bundle.comparing import compare
from kvmnn.bundle.decoding import decode_frames
from kvmnn.bundle.encoding import EncodeOptions, encode_to_bytes, encode_to_directory, encode_to_file
from kvmnn.bundle.frame_set import DecodeOptions, FrameSet, open_frames
from kvmnn.errors import FrameError, KvmnnError, LimitError, ManifestError
from kvmnn.files.names import file_names
from kvmnn.files.output import DirectoryOutput, FileOutput
from kvmnn.formats import open as open_source
from kvmnn.threads import pipeline

KEYS = np.random.default_rng(1).standard_normal((8, 50, 64)).astype(np.float16)
CUT = EncodeOptions(frame_bytes=4096)


def named(values: np.ndarray, name: str = "k", dtype: str = "fp16") -> NamedArray:
    data = values.ravel(order="K").view(np.uint8)

    def read(step: int):
        for start in range(0, data.size, step):
            yield data[start : start + step]

    return NamedArray(name=name, dtype=dtype, shape=values.shape, array_dtype=values.dtype.str, reader=read)


def bundle(folder: Path, *arrays: NamedArray, options: EncodeOptions = CUT) -> Path:
    with DirectoryOutput(folder) as output:
        encode_to_directory(arrays, output, options)
        output.commit()
    return folder


def frame_file(path: Path, array: NamedArray, options: EncodeOptions = CUT) -> Path:
    with FileOutput(path) as output:
        encode_to_file([array], output, options)
        output.commit()
    return path


def joined(frames: FrameSet, **options: object) -> list[bytes]:
    parts: list[list[bytes]] = [[] for _ in frames.arrays]
    for index, data in decode_frames(frames, DecodeOptions(**options), check_frames=True):  # type: ignore[arg-type]
        parts[index].append(bytes(data))
    return [b"".join(part) for part in parts]


def edit(path: Path, change) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


# -- what is written ---------------------------------------------------------------------------------------------------


def test_frames_are_cut_along_the_leading_axes_and_listed_in_order(tmp_path):
    path = frame_file(tmp_path / "k.frame", named(KEYS))
    document = manifest.load(tmp_path / "k.frame.json")
    (array,) = document.arrays
    stored = path.read_bytes()
    rows = 4096 // 128
    position = 0
    for number, entry in enumerate(array.frames):
        assert (entry.file, entry.offset) == ("k.frame", position)
        part = stored[position : position + entry.bytes]
        expected = KEYS.reshape(-1, 64)[number * rows : (number + 1) * rows]
        assert part == kvmnn.encode(expected)
        assert entry.sha256 == hashlib.sha256(part).hexdigest()
        assert entry.raw_bytes == expected.nbytes
        position += entry.bytes
    assert position == len(stored) == array.stored_bytes
    assert array.sha256 == hashlib.sha256(KEYS.tobytes()).hexdigest()
    assert document.zstd_version == kvmnn.frames.zstd.version()
    assert document.predictors == ("raw", "delta_seq", "xor_seq")


def test_a_lone_frame_is_what_the_library_makes():
    assert encode_to_bytes(named(KEYS), EncodeOptions()) == kvmnn.encode(KEYS)
    with pytest.raises(LimitError, match="needs 13 frames"):
        encode_to_bytes(named(KEYS), CUT)


def test_options_reach_the_encoder(tmp_path):
    options = EncodeOptions(predictors="raw", hi_predictors="xor_seq", codecs=("rle",), effort="fast")
    expected = kvmnn.encode(KEYS, predictors="raw", hi_predictors="xor_seq", codecs=("rle",), effort="fast")
    path = frame_file(tmp_path / "k.frame", named(KEYS), options)
    assert path.read_bytes() == expected
    document = manifest.load(tmp_path / "k.frame.json")
    assert (document.predictors, document.hi_predictors, document.codecs, document.effort) == (
        ("raw",), ("xor_seq",), ("rle",), "fast",
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"frame_bytes": 3}, {"effort": "slow"}, {"codecs": ()}, {"predictors": ("none",)}, {"frame_bytes": -1}],
)
def test_bad_options_are_refused_at_once(options):
    with pytest.raises(KvmnnError):
        EncodeOptions(**options)


def test_a_frame_that_does_not_decode_to_its_input_is_never_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("kvmnn.bundle.encoding.matches", lambda *_, **__: False)
    with pytest.raises(KvmnnError, match="did not decode to its own input"):
        frame_file(tmp_path / "k.frame", named(KEYS))
    assert not list(tmp_path.iterdir())
    frame_file(tmp_path / "k.frame", named(KEYS), replace(CUT, verify=False))


@given(st.lists(st.text(max_size=200), max_size=6))
def test_file_names_are_plain_and_distinct(names):
    found = file_names(names, ".frame")
    assert len({name.lower() for name in found}) == len(names)
    for name in found:
        assert name.endswith(".frame")
        assert not set(name) & set("/\\:\0\n ")
        assert not name.startswith(".")
        assert len(name) < 140


def test_file_names_keep_what_they_can():
    assert file_names(["run/layer_0/k_t0_16", "K", "k", "..", ""], ".npy") == [
        "run_layer_0_k_t0_16.npy", "K.npy", "k~2.npy", "array.npy", "array~2.npy",
    ]  # fmt: skip


# -- and back ----------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    arrays=st.lists(
        st.tuples(
            st.sampled_from([("fp16", "<f2"), ("bf16", "<u2"), ("fp32", "<f4"), ("fp16", ">i2"), ("fp32", "|u1")]),
            st.lists(st.integers(1, 40), max_size=3),
            st.sampled_from(["C", "F"]),
            st.integers(0, 255),
        ),
        min_size=1,
        max_size=4,
    ),
    threads=st.sampled_from([1, 2, None]),
    effort=st.sampled_from(["exact", "fast"]),
)
def test_every_array_comes_back(tmp_path_factory, arrays, threads, effort):
    folder = tmp_path_factory.mktemp("bundle")
    random = np.random.default_rng(len(arrays))
    made, expected = [], []
    for number, ((dtype, kind), shape, order, spread) in enumerate(arrays):
        width = np.dtype(kind).itemsize
        shape = [*shape, 4] if width == 1 else shape
        data = random.integers(0, spread + 1, int(np.prod(shape)) * width, np.uint8)
        reader = partial(lambda d, step: (d[i : i + step] for i in range(0, d.size, step)), data)
        made.append(NamedArray(name=f"a{number}", dtype=dtype, shape=tuple(shape), array_dtype=kind, order=order,
                               reader=reader))  # fmt: skip
        swapped = data.view(f"u{width}").byteswap().view(np.uint8) if kind.startswith(">") else data
        expected.append(swapped.tobytes())
    options = EncodeOptions(frame_bytes=4096, threads=threads, effort=effort)
    frames = open_frames(str(bundle(folder / "out", *made, options=options)))
    assert joined(frames, threads=threads) == expected
    assert compare(frames, made) is None
    for entry, array in zip(frames.arrays, made, strict=True):
        assert (entry.name, entry.dtype, entry.shape, entry.array_dtype, entry.order) == (
            array.name, array.dtype, array.shape, array.array_dtype, array.order,
        )  # fmt: skip


def test_a_renamed_pair_still_belongs_together(tmp_path):
    frame_file(tmp_path / "k.frame", named(KEYS))
    (tmp_path / "k.frame").rename(tmp_path / "x.frame")
    (tmp_path / "k.frame.json").rename(tmp_path / "x.frame.json")
    assert joined(open_frames(str(tmp_path / "x.frame"))) == [KEYS.tobytes()]


def test_a_frame_alone(tmp_path):
    (tmp_path / "k.frame").write_bytes(kvmnn.encode(KEYS))
    frames = open_frames(str(tmp_path / "k.frame"))
    assert frames.document is None
    assert frames.arrays[0].shape == (KEYS.size,)
    assert joined(frames) == [KEYS.tobytes()]
    assert open_frames(str(tmp_path / "k.frame"), options=DecodeOptions(dtype="bf16")).arrays[0].dtype == "bf16"
    with pytest.raises(FrameError, match=r"k\.frame: .*fp32"):
        open_frames(str(tmp_path / "k.frame"), options=DecodeOptions(dtype="fp32"))


def test_the_side_manifest_can_be_ignored(tmp_path):
    frame_file(tmp_path / "k.frame", named(KEYS), EncodeOptions())
    assert open_frames(str(tmp_path / "k.frame"), use_manifest=False).arrays[0].shape == (KEYS.size,)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\x93NUMPY\x01\x00v\x00{", r"\(it is a .npy file\)"),
        (b"\xff" * 40, "k.frame: "),
        (kvmnn.encode(KEYS) + b"\0", "k.frame: "),
        (kvmnn.encode(KEYS)[:-1], "k.frame: "),
    ],
)
def test_not_a_frame(tmp_path, data, message):
    (tmp_path / "k.frame").write_bytes(data)
    with pytest.raises(FrameError, match=message):
        open_frames(str(tmp_path / "k.frame"))


def test_limit(tmp_path):
    frames = open_frames(str(bundle(tmp_path / "out", named(KEYS))))
    assert joined(frames, max_bytes=KEYS.nbytes) == [KEYS.tobytes()]
    with pytest.raises(LimitError, match=f"above the limit of {KEYS.nbytes - 1}"):
        joined(frames, max_bytes=KEYS.nbytes - 1)


# -- damage ------------------------------------------------------------------------------------------------------------


def damaged(tmp_path: Path, change, file: str = "manifest.json") -> FrameSet:
    folder = bundle(tmp_path / "out", named(KEYS), named(-KEYS, "v"))
    if file == "manifest.json":
        edit(folder / file, change)
    else:
        (folder / file).write_bytes(change((folder / file).read_bytes()))
    return open_frames(str(folder))


def test_a_changed_frame_is_found(tmp_path):
    frames = damaged(tmp_path, lambda data: data[:-1] + bytes([data[-1] ^ 1]), "v.frame")
    with pytest.raises(ManifestError, match=r"array 'v': frame 12 \(offset \d+\) the frame does not match"):
        joined(frames)
    with pytest.raises(KvmnnError):
        list(decode_frames(frames))


def test_swapped_frames_are_found_even_if_their_own_hashes_are_not_checked(tmp_path):
    def change(document):
        parts = document["arrays"][1]["frames"]
        parts[0], parts[1] = parts[1], parts[0]

    with pytest.raises(ManifestError, match="array 'v': its bytes do not match the manifest's sha256"):
        list(decode_frames(damaged(tmp_path, change)))


@pytest.mark.parametrize("cut", [0, 100])
def test_a_short_frame_file_is_found(tmp_path, cut):
    with pytest.raises(ManifestError, match=f"has {cut} bytes, but the manifest puts a frame"):
        joined(damaged(tmp_path, lambda data: data[:cut], "v.frame"))


def test_a_frame_of_another_size_than_the_manifest_says(tmp_path):
    def change(document):
        parts = document["arrays"][0]["frames"]
        parts[0]["raw_bytes"] += 2
        parts[1]["raw_bytes"] -= 2

    with pytest.raises(FrameError, match=r"array 'k': frame 0 \(offset 0\) holds 4096 bytes, the manifest says 4098"):
        joined(damaged(tmp_path, change))


def test_missing_and_escaping_files(tmp_path):
    def rename(name: str):
        def change(document):
            for part in document["arrays"][0]["frames"]:
                part["file"] = name

        return change

    frames = damaged(tmp_path, rename("gone.frame"))
    with pytest.raises(ManifestError, match=r"'gone.frame' is missing"):
        joined(frames)
    (tmp_path / "outside").write_bytes((tmp_path / "out" / "k.frame").read_bytes())
    (tmp_path / "out" / "link").symlink_to("../outside")
    edit(tmp_path / "out" / "manifest.json", rename("link"))
    with pytest.raises(ManifestError, match="'link' leads out of the manifest's directory"):
        joined(open_frames(str(tmp_path / "out")))


def test_a_directory_without_manifest(tmp_path):
    with pytest.raises(ManifestError, match="not a kvmnn bundle"):
        open_frames(str(tmp_path))


# -- comparing ---------------------------------------------------------------------------------------------------------


def test_the_first_difference_is_named(tmp_path):
    frames = open_frames(str(bundle(tmp_path / "out", named(KEYS), named(-KEYS, "v"))))
    other = (-KEYS).copy()
    other[3, 7, 9] += 1
    other[5, 0, 0] += 1
    found = compare(frames, [named(KEYS), named(other, "v")])
    assert found is not None
    assert found.array == "v"
    assert found.what.startswith("first differs at element [3, 7, 9]")


def test_sets_of_arrays_must_be_the_same(tmp_path):
    frames = open_frames(str(bundle(tmp_path / "out", named(KEYS), named(KEYS, "v"))))
    assert compare(frames, [named(KEYS, "v"), named(KEYS)]) is None
    assert "frames only" in compare(frames, [named(KEYS)]).what
    assert "not in the frames" in compare(frames, [named(KEYS), named(KEYS, "v"), named(KEYS, "w")]).what
    assert (
        "shape [8, 50, 64] became [400, 64]" in compare(frames, [named(KEYS.reshape(400, 64)), named(KEYS, "v")]).what
    )
    assert "has 51200 bytes, 'k' has 51072" in compare(frames, [named(KEYS.ravel()[:-64]), named(KEYS, "v")]).what
    assert compare(frames, [named(KEYS.ravel()), named(KEYS, "v")]) is None


def test_memory_order_counts(tmp_path):
    np.save(tmp_path / "f.npy", np.asfortranarray(KEYS))
    frames = open_frames(str(bundle(tmp_path / "out", named(KEYS))))
    assert "order C became F" in compare(frames, open_source(str(tmp_path / "f.npy")).arrays).what


# -- the pipeline ------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 40), max_size=30), threads=st.integers(1, 4))
@settings(deadline=None)
def test_order_and_bound(sizes, threads):
    scale = pipeline.IN_FLIGHT // 20
    running, peak, lock = 0, 0, threading.Lock()

    def work(item: tuple[int, int], allowed: int | None) -> int:
        nonlocal running, peak
        with lock:
            running += item[1] * scale
            peak = max(peak, running)
        with lock:
            running -= item[1] * scale
        return item[0]

    items = list(enumerate(sizes))
    done = list(pipeline.ordered(work, items, lambda item: item[1] * scale, threads))
    assert done == [(item, item[0]) for item in items]
    assert peak <= max([pipeline.IN_FLIGHT, *(size * scale for size in sizes)])


def test_the_first_failure_comes_through():
    def work(item: int, threads: int | None) -> int:
        if item >= 5:
            raise KvmnnError(f"item {item}")
        return item

    seen = []
    with pytest.raises(KvmnnError, match="item 5"):
        seen.extend(item for item, _ in pipeline.ordered(work, range(10), lambda _: 1, 2) if item < 100)
    assert threading.active_count() < 40


def test_a_lone_item_has_all_threads():
    assert [r for _, r in pipeline.ordered(lambda _, threads: threads, [1], lambda _: 1, 3)] == [3]
    assert [r for _, r in pipeline.ordered(lambda _, threads: threads, [1, 2], lambda _: 1, 3)] == [1, 1]
    assert [r for _, r in pipeline.ordered(lambda _, threads: threads, [1, 2], lambda _: pipeline.IN_FLIGHT, 3)] == [
        3,
        3,
    ]
