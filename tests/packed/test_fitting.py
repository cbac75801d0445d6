"""What is known of packed files, and the layouts that agree with it."""

from __future__ import annotations

import pytest

from kvmnn.errors import SourceError
from kvmnn.packed.backends import BACKENDS
from kvmnn.packed.inference import PackedGeometry, _find_first_mismatch, infer_layout
from kvmnn.packed.layout import PackLayout


def test_merge_defaults_fills_only_missing_fields() -> None:
    said = PackedGeometry(kv_heads=2, dtype="fp16", lP=2, hP=8)
    other = PackedGeometry(kv_heads=4, head_dim=64, dtype="fp32", backend="x86-avx2", flash_block="none", lP=1, hP=4)
    assert said.merge_defaults(other) == PackedGeometry(
        kv_heads=2, head_dim=64, dtype="fp16", lP=2, hP=8, flash_block="none"
    )
    assert other.merge_defaults(said) == other
    assert PackedGeometry().merge_defaults(other) == other


def test_merge_defaults_does_not_mix_backend_with_pack_numbers() -> None:
    backend, numbers = PackedGeometry(backend="arm64-fp16"), PackedGeometry(dtype="fp32", lP=1, hP=4)
    assert backend.merge_defaults(numbers) == backend
    assert numbers.merge_defaults(backend) == numbers
    assert PackedGeometry(hP=4).merge_defaults(backend) == PackedGeometry(hP=4)
    assert PackedGeometry(lP=1).merge_defaults(numbers) == numbers


def test_list_candidates_one_pack_number_restricts_layouts() -> None:
    both = {(layout.lP, layout.hP) for _, layout in PackedGeometry(kv_heads=1, head_dim=4).list_candidates()}
    assert len(both) > 2 and len(BACKENDS) > 2
    for lP, hP in both:
        for known in ({"lP": lP}, {"hP": hP}, {"lP": lP, "hP": hP}):
            found = [layout for _, layout in PackedGeometry(kv_heads=1, head_dim=4, **known).list_candidates()]
            assert found
            assert all(getattr(layout, name) == value for layout in found for name, value in known.items())


def test_infer_layout_error_counts_candidates_or_explains_one() -> None:
    three = PackedGeometry(kv_heads=2, head_dim=6, dtype="fp16", flash_block=64)
    with pytest.raises(
        SourceError, match=r"^x: K and V files of 7 and 7 bytes fit none of the 3 layouts known for 2 kv"
    ):
        infer_layout("x", three, [(7, 7)])
    with pytest.raises(SourceError, match=r"^x: .*K file of 7 bytes is not a whole number"):
        infer_layout("x", PackedGeometry(kv_heads=2, head_dim=6, backend="arm64-fp16"), [(7, 7)])


def test_infer_layout_error_names_first_mismatched_layer() -> None:
    """Where each fits by itself it is the first."""
    layout = PackLayout.from_backend("x86-sse", kv_heads=1, head_dim=4)
    good = packed_sizes(layout)
    assert [_find_first_mismatch([layout], sizes) for sizes in ([good], [good, (1, 1), good], [(1, 1), good])] == [
        0,
        1,
        0,
    ]


def packed_sizes(layout: PackLayout) -> tuple[int, int]:
    """Of the files of a layer with room for 64 tokens."""
    return layout.key_bytes(64), layout.value_bytes(64)
