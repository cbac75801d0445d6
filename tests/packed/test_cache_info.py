"""The document next to packed files: strict about everything in it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from kvmnn import KvmnnError, ManifestError, PackLayout
from kvmnn.packed.cache_info import (
    CacheInfo,
    LayerInfo,
    TokenIdsFingerprint,
    cache_info_to_dict,
    dump_cache_info,
    load_cache_info,
    merge_runs,
)

INFO = CacheInfo(
    kind="prefix",
    name="sys",
    layout=PackLayout(2, 16, "fp16", 2, 64, None),
    layers=(
        LayerInfo(layer=0, tokens=50, capacity=114, positions=((0, 50),)),
        LayerInfo(layer=1, tokens=25, capacity=114, positions=((0, 20), (30, 5))),
    ),
    token_ids=TokenIdsFingerprint.from_ids([1, 2, 3]),
    model="ab" * 32,
)


def test_cache_info_round_trips():
    assert load_cache_info(dump_cache_info(INFO), "x") == INFO
    assert INFO.live_bytes == 75 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema"], "kvmnn-manifest", "x: schema: found .*, expected 'kvmnn-cache'"),
        (["schema_version"], 2, "x: schema_version: found 2, expected 1"),
        (["kind"], "dump", "x: kind: found .*, expected one of prefix, live"),
        (["name"], None, "x: name: found null, expected a string"),
        (["kv_heads"], 0, "x: kv_heads: found 0, expected an integer of at least 1"),
        (["head_dim"], True, "x: head_dim: found true"),
        (["lP"], 2**31, "x: lP: found 2147483648, expected a 32-bit integer"),
        (["hP"], 1.0, r"x: hP: found 1\.0"),
        (["flash_block"], 0, "x: flash_block: found 0"),
        (["dtype"], "int8", "x: dtype: found .*, expected one of fp16, bf16, fp32"),
        (["token_ids", "count"], 0, r"x: token_ids\.count: found 0"),
        (["token_ids", "sha256"], "AB" * 32, r"x: token_ids\.sha256: found .*, expected 64 hexadecimal digits"),
        (["model"], "abc", "x: model: found .*, expected 64 hexadecimal digits"),
        (["layers"], [], "x: layers: has 0 entries"),
        (["layers", 0, "tokens"], 115, r"x: layers\[0\]: layer 0: 115 tokens: expected .* capacity of 114"),
        (["layers", 1, "tokens"], 26, r"x: layers\[1\]: layer 1: the positions are not those of 26 tokens"),
        (["layers", 1, "positions", 1], [30], r"x: layers\[1\]\.positions\[1\]: has 1 entries"),
        (["layers", 1, "positions", 1], [-1, 5], r"x: layers\[1\]\.positions\[1\]\[0\]: found -1"),
        (
            ["layers", 1, "positions", 1],
            [2**31 - 6, 6],
            r"x: layers\[1\]\.positions\[1\]: found .* below 2,147,483,647",
        ),
        (["layers", 0, "layer"], 1, "x: layers: are not in order, each once"),
    ],
)
def test_load_cache_info_error_names_the_field(path, value, message):
    document = json.loads(dump_cache_info(INFO))
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ManifestError, match=message):
        load_cache_info(json.dumps(document), "x")
    if isinstance(path[-1], str):
        del inner[path[-1]]
        with pytest.raises(ManifestError, match=rf"{path[-1]}: is missing"):
            load_cache_info(json.dumps(document), "x")


ROTATED = replace(
    INFO,
    layers=(INFO.layers[0], replace(INFO.layers[1], positions=((0, 25),), text_positions=((0, 20), (30, 5)))),
    next_position=50,
)


def test_cache_info_rotated_keys_have_text_positions() -> None:
    assert load_cache_info(dump_cache_info(ROTATED), "x") == ROTATED
    assert ROTATED.layers[1].text_position_runs == ((0, 20), (30, 5)) and ROTATED.layers[0].text_position_runs == (
        (0, 50),
    )
    assert (
        INFO.next_token_position,
        ROTATED.next_token_position,
        replace(INFO, next_position=90).next_token_position,
    ) == (50, 50, 90)
    document = cache_info_to_dict(INFO)
    assert "next_position" not in document and "text_positions" not in document["layers"][1]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["layers", 1, "text_positions"], [[0, 20]], r"layer 1: the positions in the text are not those of 25 tokens"),
        (["layers", 1, "text_positions", 0], [2**62, 2**62], r"text_positions\[0\]: found .* below 2,147,483,647"),
        (["layers", 1, "text_positions"], None, r"text_positions: found null, expected a list"),
        (["next_position"], 0, "next_position: found 0"),
        (["next_position"], 2**40, "next_position: found 1099511627776, expected a 32-bit integer"),
    ],
)
def test_load_cache_info_wrong_text_positions_are_refused(path, value, message) -> None:
    document = json.loads(dump_cache_info(ROTATED))
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ManifestError, match=message):
        load_cache_info(json.dumps(document), "x")


@pytest.mark.parametrize("text", ["", "[", "[1]", '{"a": 1, "a": 2}', "[" * 100_000, b"\xff"])
def test_load_cache_info_malformed_document_is_refused(text):
    with pytest.raises(ManifestError, match=r"x: (is not valid JSON|document: found)"):
        load_cache_info(text, "x")


def test_load_cache_info_ignores_unknown_keys():
    assert load_cache_info(json.dumps(cache_info_to_dict(INFO) | {"later": 1}), "x") == INFO


@pytest.mark.parametrize("ids", [[], [[1]], [1.5], [-1], [2**32], ["1"], [True]])
def test_token_ids_fingerprint_invalid_ids_are_refused(ids):
    with pytest.raises(KvmnnError, match=r"token ids: (number 1: )?expected"):
        TokenIdsFingerprint.from_ids(ids)


def test_merge_runs_joins_adjacent_runs():
    assert merge_runs([(0, 2), (2, 3), (9, 1), (10, 1), (4, 1)]) == ((0, 5), (9, 2), (4, 1))


def test_token_ids_fingerprint_hashes_little_endian_32_bits() -> None:
    ids = [5, 2**31, 2**32 - 1]
    assert (
        TokenIdsFingerprint.from_ids(ids).sha256
        == hashlib.sha256(b"".join(each.to_bytes(4, "little") for each in ids)).hexdigest()
    )
