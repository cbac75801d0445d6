"""TQ3 and TQ4 next to blocks that MNN 3.6.1 wrote, next to plain loops, and next to the matrix of their rotation."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from engine_client import needs_engine
from repository import FIXTURES

from kvmnn.packed.rotated_codes import TQ3, TQ4, RotatedFormat

RECORDED = np.load(FIXTURES / "quantization" / "mnn_blocks.npz")
FORMATS = [pytest.param(TQ3, id="tq3"), pytest.param(TQ4, id="tq4")]


def make_extreme_blocks() -> np.ndarray:
    """Blocks of zeros, of one number, of numbers of all sizes, and of numbers that are none."""
    generator = np.random.default_rng(7)
    blocks = generator.standard_normal((40, 32)).astype(np.float32)
    blocks[0] = 0
    blocks[1] = -2.5
    blocks[2, 1:] = 0
    blocks[3:20] *= np.float32(10) ** np.arange(-12, 22, 2, np.float32)[:17, None]
    blocks[20] *= np.float32(1e-5)  # subnormal in fp16
    blocks[21] = generator.choice([-1, 1], 32)
    blocks[22, 5] = np.inf
    blocks[23, 9] = np.nan
    return blocks


def quantize_by_loops(block: np.ndarray, form: RotatedFormat) -> bytes:
    """One block, a number at a time, each rounded to float32."""
    number = np.float32
    with np.errstate(all="ignore"):
        squares = number(0)
        for value in block:
            squares = number(squares + number(value * value))
        scale = np.sqrt(number(squares / number(32)))
        scale = number(1e-10) if scale < number(1e-10) else scale
        inverse = number(number(1) / scale)
        signs = [-1 if place * 0x9E3779B9 >> 31 & 1 else 1 for place in range(32)]
        row = [number(number(value * inverse) * number(sign)) for value, sign in zip(block, signs, strict=True)]
        for step in (1, 2, 4, 8, 16):
            for place in range(32):
                if not place & step:
                    row[place], row[place + step] = row[place] + row[place + step], row[place] - row[place + step]
        norm = number(1) / np.sqrt(number(32))
        codes = [sum(bool(number(value * norm) > bound) for bound in form.bounds) for value in row]
    (word,) = struct.unpack("<I", scale.tobytes())
    exponent = (word >> 23 & 255) - 127 + 15
    half = 0x7C00 if exponent > 30 else 0 if exponent < 1 else exponent << 10 | word >> 13 & 1023
    packed = sum(code << form.bits * place for place, code in enumerate(codes))
    return struct.pack("<H", half | word >> 16 & 0x8000) + packed.to_bytes(4 * form.bits, "little")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("part", ["keys", "values"])
def test_quantize_makes_the_recorded_blocks(form: RotatedFormat, part: str) -> None:
    recorded = RECORDED[f"{form.name}_{part}"]
    made = form.pack(*form.quantize(RECORDED[part].reshape(-1, 32)))
    assert recorded.shape == (3, 12, 2, form.nbytes) and made.tobytes() == recorded.tobytes()
    assert form.pack(*form.unpack(made)).tobytes() == recorded.tobytes()


@pytest.mark.parametrize("form", FORMATS)
def test_quantize_extreme_blocks_equal_loops(form: RotatedFormat) -> None:
    blocks = make_extreme_blocks()
    made = form.pack(*form.quantize(blocks))
    for block, found in zip(blocks, made, strict=True):
        if not np.isnan(block).any():  # whose sign the processor chooses
            assert found.tobytes() == quantize_by_loops(block, form)
    codes, scales = form.unpack(made)
    assert (codes[23] == 0).all() and np.isinf(scales[[22, 23]]).all()
    assert scales[0] == 0 and not form.dequantize(codes, scales)[0].any()


@pytest.mark.parametrize("form", FORMATS)
def test_dequantize_is_the_inverse_rotation_of_levels(form: RotatedFormat) -> None:
    codes, scales = form.quantize(np.random.default_rng(1).standard_normal((500, 32)).astype(np.float32))
    matrix = np.array([[(-1) ** (i & j).bit_count() for j in range(32)] for i in range(32)]) / np.sqrt(32)
    signs = np.array([-1 if place * 0x9E3779B9 >> 31 & 1 else 1 for place in range(32)])
    expected = form.levels.astype(np.float64)[codes] @ matrix * signs * scales.astype(np.float64)
    np.testing.assert_allclose(form.dequantize(codes, scales), expected, atol=2e-6)


@needs_engine
@pytest.mark.parametrize("form", FORMATS)
def test_levels_are_those_in_the_engine(form: RotatedFormat) -> None:
    """The codebook lies in the installed engine once, as it is."""
    engine = pytest.importorskip("_mnncengine")
    assert Path(engine.__file__).read_bytes().count(form.levels.tobytes()) == 1
