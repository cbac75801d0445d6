"""Results of pack, unpack, repack, compact and inspect equal the commands' output."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import packed_samples
import pytest

import kvmnn
from kvmnn import LayerCache
from kvmnn.arrays import Mismatch, compare_bitwise
from kvmnn.bundle import open_frames
from kvmnn.errors import OptionError
from kvmnn.formats import PackedOptions
from kvmnn.formats.mnn import (
    CompactionPlan,
    can_restore_prefix,
    compact,
    fingerprint_token_ids,
    inspect_packed,
    open_packed,
    pack,
    read_compaction_plans,
    repack,
    restore_prefix,
    unpack,
)
from kvmnn.packed.cache_info import CacheInfo, LayerInfo, TokenIdsFingerprint
from kvmnn.packed.inference import PackedGeometry
from kvmnn.packed.layout import HeadRowAccessor
from kvmnn.store import write_prefix
from kvmnn.store.results import StoredPrefix

TOKENS = 20
OPTIONS = PackedOptions(geometry=PackedGeometry(kv_heads=2, head_dim=6, backend="x86-avx2"), valid_tokens=(TOKENS,))
ARGUMENTS = ["--kv-heads", 2, "--head-dim", 6, "--backend", "x86-avx2", "--valid-tokens", TOKENS]


@pytest.fixture
def arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """K and V of two layers; as packed files they are in ``p``."""
    monkeypatch.chdir(tmp_path)
    made = packed_samples.arrays(2, 2, TOKENS, 6)
    packed_samples.write_prefix(Path("p"), made, capacity=TOKENS)
    return made


def same_as_command(result: Any, run: Callable[..., SimpleNamespace], *argv: object, code: int = 0) -> None:
    """The command prints the result's dict with --json, and its text; but for the time that it took."""
    found = json.loads(run(*argv, "--json", code=code).out)
    assert found.pop("verb") == str(argv[0]).rpartition(" ")[2]
    expected = json.loads(json.dumps(result.to_dict()))
    assert list(found) == list(expected)
    for document in (found, expected):
        document.pop("seconds", None)
    assert found == expected
    again = [*argv, "--force"] if "-o" in argv else argv
    said, text = (re.sub(r"\d+ MB/s", "N MB/s", each) for each in (run(*again, code=code).out, f"{result}\n"))
    assert said == text


def removed(folder: str) -> str:
    """`folder`, emptied."""
    for path in Path(folder).iterdir():
        path.unlink()
    return folder


def test_pack_and_unpack_results_equal_command_json(
    arrays: list[np.ndarray], run: Callable[..., SimpleNamespace]
) -> None:
    unpacked = unpack(kvmnn.open("p", packed=OPTIONS), "a.safetensors")
    assert (unpacked.label, unpacked.raw_bytes) == ("LOSSLESS", sum(array.nbytes for array in arrays))
    assert [array.name for array in unpacked.arrays][:2] == ["layer_0.key", "layer_0.value"]
    Path("a.safetensors").unlink()
    same_as_command(unpacked, run, "mnn unpack", "p", *ARGUMENTS, "-o", "a.safetensors")
    packed = pack(kvmnn.open("a.safetensors"), "q", name="other")
    assert (packed.label, packed.info.name, packed.cast.words) == ("LOSSLESS", "other", 4 * arrays[0].size)
    removed("q")
    same_as_command(packed, run, "mnn pack", "a.safetensors", "--name", "other", "-o", "q")
    assert compare_bitwise(kvmnn.open("q"), kvmnn.open("p", packed=OPTIONS)).equal


def test_pack_into_its_input_is_refused(arrays: list[np.ndarray]) -> None:
    with pytest.raises(kvmnn.OutputError, match="is the input itself"):
        pack(kvmnn.open("p", packed=OPTIONS), "p", name="sys", force=True)


def test_repack_result_reports_cast(arrays: list[np.ndarray], run: Callable[..., SimpleNamespace]) -> None:
    source = kvmnn.open("p", packed=OPTIONS)
    made = repack(source, "q", "arm64-fp16", name="sys")
    assert made.label == "LOSSY"
    assert made.cast.changed > 0
    np.testing.assert_array_equal(kvmnn.open("q")["layer_1.key"].to_numpy(), arrays[2].astype(np.float16))
    removed("q")
    argv = ARGUMENTS
    same_as_command(made, run, "mnn repack", "p", *argv, "--target-backend", "arm64-fp16", "-o", "q")


def test_restore_prefix_result_equals_command_json(
    arrays: list[np.ndarray], run: Callable[..., SimpleNamespace]
) -> None:
    run("encode", "p", *ARGUMENTS, "-o", "b/")
    frames = open_frames("b")
    assert can_restore_prefix(frames, "q") and not can_restore_prefix(frames, "q.npz")
    restored = restore_prefix(frames, "q")
    assert (restored.pack_result.label, restored.raw_bytes, restored.warnings) == ("LOSSLESS", 4 * arrays[0].nbytes, ())
    removed("q")
    same_as_command(restored, run, "decode", "b", "-o", "q")
    expected = PackedOptions(token_ids=TokenIdsFingerprint.from_ids(range(TOKENS)))
    with pytest.raises(kvmnn.SourceError, match=r"b: the manifest does not say which token ids .*\(--ignore contra"):
        restore_prefix(frames, "r", expected=expected, force=True)
    forced = restore_prefix(frames, "r", expected=replace(expected, ignore_contradictions=True))
    assert len(forced.warnings) == 1


def made_again(arrays: list[np.ndarray], how: str) -> None:
    """Files in ``q``, of frames or of what a store gives."""
    if how == "frames":
        restore_prefix(open_frames("b"), "q", force=True)
    else:
        layers = [LayerCache(layer=n, keys=arrays[2 * n], values=arrays[2 * n + 1]) for n in range(2)]
        prefix = StoredPrefix(tokens=TOKENS, requested_tokens=TOKENS, layers=layers)
        geometry = PackedGeometry(backend="x86-avx2")
        write_prefix(prefix, range(TOKENS), "q", where="s", geometry=geometry, name="sys", force=True)


@pytest.mark.parametrize("how", ["frames", "store"])
def test_restored_files_are_not_synced(
    arrays: list[np.ndarray], run: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    run("encode", "p", *ARGUMENTS, "-o", "b/")
    synced: list[int] = []
    monkeypatch.setattr("kvmnn.files.atomic.os.fsync", synced.append)
    made_again(arrays, how)
    assert synced == []
    found = kvmnn.open("q")
    for one, array in zip(found.arrays, arrays, strict=True):
        np.testing.assert_array_equal(one.to_numpy(), array)
    pack(kvmnn.open("b"), "packed", PackedGeometry(backend="x86-avx2"))
    assert len(synced) > 4


@pytest.mark.parametrize("how", ["frames", "store"])
def test_restore_wrong_words_are_detected(
    arrays: list[np.ndarray], run: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    run("encode", "p", *ARGUMENTS, "-o", "b/")
    write = HeadRowAccessor.write_rows

    def wrong(access: HeadRowAccessor, head: np.ndarray, start: int, rows: np.ndarray) -> None:
        write(access, head, start, rows ^ np.uint8(1))

    monkeypatch.setattr(HeadRowAccessor, "write_rows", wrong)
    with pytest.raises(kvmnn.KvmnnError, match=r"sys_0\.k: does not give back what was packed into it"):
        made_again(arrays, how)
    assert not Path("q").exists()


def test_restore_damaged_frame_is_named(arrays: list[np.ndarray], run: Callable[..., SimpleNamespace]) -> None:
    """Only what reads back is hashed; if that is wrong, the damaged frame is named."""
    run("encode", "p", *ARGUMENTS, "-o", "b/")
    file = sorted(Path("b").glob("*.frame"))[1]
    data = bytearray(file.read_bytes())
    data[-3] ^= 0x10
    file.write_bytes(data)
    with pytest.raises(kvmnn.ManifestError, match=r"b: array '.*': the frame does not match the manifest's sha256"):
        restore_prefix(open_frames("b"), "q")
    assert not Path("q").exists()


def test_compact_result_equals_command_json(arrays: list[np.ndarray], run: Callable[..., SimpleNamespace]) -> None:
    described = open_packed("p", OPTIONS)
    made = compact(described, [CompactionPlan(12, ((0, 4),))], "q")
    assert (made.label, made.tokens_before, made.tokens_after) == ("LOSSY", 40, 24)
    assert made.after.layers[1].positions == ((0, 12),)
    removed("q")
    same_as_command(made, run, "mnn compact", "p", *ARGUMENTS, "--remove", 12, "--reserve", "0:4", "-o", "q")


def test_inspect_results_equal_command_json(arrays: list[np.ndarray], run: Callable[..., SimpleNamespace]) -> None:
    packed_samples.write_prefix(Path("two"), arrays[:2], capacity=TOKENS)
    packed_samples.write_prefix(Path("two"), arrays[:2], capacity=TOKENS, name="x")
    for path, options, argv in (("p", OPTIONS, ARGUMENTS), ("p", None, []), ("two", None, [])):
        found = inspect_packed(path, options)
        assert found is not None
        document = json.loads(run("inspect", path, *argv, "--json").out)["inputs"][0]
        assert document == json.loads(json.dumps(found.to_dict()))
        assert run("inspect", path, *argv).out == f"{found}\n"
    np.save("a.npy", arrays[0])
    assert inspect_packed("a.npy") is None


def test_compare_bitwise_result_equals_command_json(
    arrays: list[np.ndarray], run: Callable[..., SimpleNamespace]
) -> None:
    np.save("k.npy", arrays[0])
    arrays[0][1, 2, 3] = 7
    np.save("l.npy", arrays[0])
    found = compare_bitwise(kvmnn.open("k.npy"), kvmnn.open("l.npy"))
    assert found.first is not None
    assert (found.first_input, found.second_input, found.first.index) == ("k.npy", "l.npy", (1, 2, 3))
    same_as_command(found, run, "diff", "k.npy", "l.npy", code=1)
    assert str(Mismatch(array="k", index=(0,), first=1.0, second=2.0)) == "array 'k', index [0]: 1.0 and 2.0"


def test_pack_missing_option_is_refused(arrays: list[np.ndarray]) -> None:
    np.savez("a.npz", k=arrays[0], v=arrays[1])
    plain = kvmnn.open("a.npz")
    with pytest.raises(OptionError, match="layouts are known for what was said"):
        pack(plain, "q", name="x")
    with pytest.raises(OptionError, match="needs a name"):
        pack(plain, "q", PackedGeometry(backend="x86-avx2"))
    with pytest.raises(OptionError, match="is not a packed cache: use pack"):
        repack(plain, "q", "x86-avx2")
    with pytest.raises(OptionError, match="holds no packed files"):
        open_packed("a.npz")
    with pytest.raises(OptionError, match=r"the arrays have 20 tokens, ids\.npy has 3 ids"):
        np.save("ids.npy", np.arange(3))
        pack(plain, "q", PackedGeometry(backend="x86-avx2"), name="x", token_ids=fingerprint_token_ids("ids.npy"))
    assert not Path("q").exists()


def _one_layer() -> CacheInfo:
    layer = LayerInfo(layer=0, tokens=TOKENS, capacity=TOKENS, positions=((0, TOKENS),))
    return CacheInfo(kind="prefix", name="x", layout=kvmnn.PackLayout(2, 6, "fp32", 1, 4), layers=(layer,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "found {}, expected a list"),
        ('{"layers": [1]}', r"layers\[0\]: found 1, expected an object"),
        ("[1]", r"\[0\]: found 1, expected an object"),
        ('[{"layer": 0, "remove": 3, "pairs": [[1]]}]', r"pairs\[0\]: has 1 entries"),
        ('[{"layer": 0, "layer": 0}]', "the same key twice"),
        ("[" * 100_000, "is not valid JSON"),
        ('[{"layer": 1, "remove": 3, "pairs": []}]', "has 1 plan for layer 1: expected"),
    ],
)
def test_read_compaction_plans_invalid_plan_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(kvmnn.KvmnnError, match=message):
        read_compaction_plans(str(path), _one_layer())
