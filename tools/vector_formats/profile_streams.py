"""`kvmnn-linear/1`, `kvmnn-transform/1`, `kvmnn-profile/1`: streams of a profile with their words, and profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvmnn import linear, transform
from kvmnn.arrays.layer_cache import LayerCache
from kvmnn.errors import KvmnnError
from kvmnn.profiles import Profile

from .common import CaseResult, Checker, run_list, sha256, unknown_lists

_STREAM_FIELDS = {"name", "profile", "streams", "shapes", "dtype", "positions", "words_sha256", "refused"}
_PROFILE_FIELDS = {"name", "file", "key", "layers", "kinds", "sections", "refused"}

Decode = Callable[[Any, Profile, Sequence[LayerCache]], LayerCache]


def run_linear(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    """A case names a `profile` and the `streams` of all layers; the hash is of K, then V of each, little-endian,
    ``[kv_head, token, dim]``.

    Where `refused` is true no decoder may accept the stream.
    """
    yield from _run(folder, index, _decode_linear)


def run_transform(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    """The same of lossy streams: the hash is of the words that decoding gives."""
    yield from _run(folder, index, _decode_transform)


def run_profile(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    """A case names a `file`, its `key`, and its `sections` with type and shape."""
    yield from unknown_lists(index, ("cases",))
    yield from run_list(index["cases"], "cases", partial(_check_profile, folder))


def _run(folder: Path, index: dict[str, Any], decode: Decode) -> Iterator[CaseResult]:
    yield from unknown_lists(index, ("cases",))
    yield from run_list(index["cases"], "cases", partial(_check_streams, folder, decode))


def _decode_linear(stream: Any, profile: Profile, lower: Sequence[LayerCache]) -> LayerCache:
    return linear.decode_layer(stream, profile, lower)


def _decode_transform(stream: Any, profile: Profile, lower: Sequence[LayerCache]) -> LayerCache:
    return transform.decode_layer(stream, profile, lower)


def _check_streams(folder: Path, decode: Decode, case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_STREAM_FIELDS)
    profile = Profile.read(folder / case["profile"])
    decoded: list[LayerCache] = []
    words = b""
    try:
        for name in case["streams"]:
            cache = decode((folder / name).read_bytes(), profile, decoded[::-1][:2])
            decoded.append(cache)
            words += cache.keys.tobytes() + cache.values.tobytes()
    except KvmnnError:
        if case["refused"]:
            return
        raise
    if case["refused"]:
        check.problems.append("decoded, but it must be refused")
        return
    check.field("dtype", decoded[0].dtype)
    check.field("shapes", [[list(cache.keys.shape), list(cache.values.shape)] for cache in decoded])
    check.field("positions", decoded[0].positions.tolist())
    check.field("words_sha256", sha256(words))


def _check_profile(folder: Path, case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_PROFILE_FIELDS)
    try:
        profile = Profile.read(folder / case["file"])
    except KvmnnError:
        if case["refused"]:
            return
        raise
    if case["refused"]:
        check.problems.append("read, but it must be refused")
        return
    check.field("key", profile.key.hex())
    check.field("layers", len(profile.layers))
    check.field("kinds", list(profile.kinds))
    sections = {name: [str(array.dtype), list(array.shape)] for name, array in sorted(profile.arrays.items())}
    check.field("sections", sections)
