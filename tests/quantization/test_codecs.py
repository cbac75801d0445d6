"""Codecs of caches next to gguf-py and KIVI's own functions, and an evaluation of them next to plain loops."""

from __future__ import annotations

import csv
import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from repository import FIXTURES
from tiny_decoders import Tiny

from kvmnn.errors import KvmnnError
from kvmnn.evaluation import RefusalWarning, evaluate
from kvmnn.evaluation.settings import EvaluationSettings
from kvmnn.formats.llama.state import GGML_TYPES, dequantize
from kvmnn.lm.documents import Document
from kvmnn.lm.runner import Runner
from kvmnn.lm.session import DecoderSession
from kvmnn.policies import create_policy
from kvmnn.quantization import CacheShape, FieldSizes, QuantizedRows, create_codec
from kvmnn.quantization.codec import CacheCodec, TextCoder

SHAPE = CacheShape(1, 2, 64)
BLOCKS = np.load(FIXTURES / "quantization" / "blocks.npz")
KIVI = np.load(FIXTURES / "quantization" / "kivi.npz")
POSITIONS = np.arange(64)


def coder_of(spec: str) -> TextCoder:
    codec = create_codec(spec)
    assert codec is not None
    return codec.start_text(SHAPE)


def pack(name: str, codes: np.ndarray, parameters: np.ndarray) -> bytes:
    """Blocks as ggml lays them out, by plain loops."""
    blocks = bytearray()
    bits = int(name[1])
    for block, numbers in zip(codes.reshape(-1, 32).tolist(), parameters, strict=True):
        blocks += numbers.tobytes()
        if bits == 8:
            blocks += bytes((code - 128) & 255 for code in block)
            continue
        if bits == 5:
            blocks += sum((code >> 4) << place for place, code in enumerate(block)).to_bytes(4, "little")
        blocks += bytes((block[i] & 15) | (block[i + 16] & 15) << 4 for i in range(16))
    return bytes(blocks)


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_block_codecs_make_the_blocks_of_gguf(name: str) -> None:
    found = coder_of(name).quantize(0, "key", BLOCKS["rows"], POSITIONS)
    codes, parameters = found.fields
    parameters = parameters.reshape(-1, 2 if name.endswith("_1") else 1)
    assert pack(name, codes, parameters) == BLOCKS[name].tobytes()
    ggml_type = next(entry for entry in GGML_TYPES.values() if entry.name == name)
    blocks = BLOCKS[name].reshape(128, 2, -1)
    read = np.empty((128, 64), np.float32)
    dequantize(ggml_type, np.ascontiguousarray(blocks), read)
    assert found.rows.tobytes() == read.tobytes()
    assert coder_of(name).measure(0, "key", found.fields).plain_bytes == BLOCKS[name].nbytes


@pytest.mark.parametrize(("spec", "block_bytes"), [("tq3", 14), ("tq4", 18), ("tq4:parts=keys", 18)])
def test_rotated_codecs_count_the_blocks_of_mnn(spec: str, block_bytes: int) -> None:
    """The blocks themselves: tests/packed/test_rotated_codes.py."""
    coder, rows = coder_of(spec), np.random.default_rng(2).standard_normal((2, 64, 64)).astype(np.float32)
    found = coder.quantize(0, "key", rows, POSITIONS)
    sizes = coder.measure(0, "key", found.fields)
    assert sizes.plain_bytes == rows.size // 32 * block_bytes
    assert 0 < sizes.coded_bytes <= sizes.plain_bytes + 2 * 16  # scales that do not compress are stored as they are
    error = np.sqrt(np.mean((found.rows - rows) ** 2))
    assert error == pytest.approx({14: 0.18, 18: 0.095}[block_bytes], rel=0.05)
    assert coder.count_due("key", 9) == 9 and coder.count_due("value", 9) == (0 if "keys" in spec else 9)


@pytest.mark.parametrize(("bits", "group"), [(2, 32), (4, 32), (4, 16), (8, 64)])
@pytest.mark.parametrize("part", ["key", "value"])
def test_kivi_reads_what_its_own_functions_read(part, bits: int, group: int) -> None:
    coder = coder_of(f"kivi:k={bits},v={bits},group={group},recent=0")
    found = coder.quantize(0, part, KIVI["rows"].astype(np.float32), POSITIONS)
    assert np.array_equal(found.fields[0], KIVI[f"{part}_{bits}_{group}_codes"])
    assert found.rows.astype(np.float16).tobytes() == KIVI[f"{part}_{bits}_{group}_read"].tobytes()
    assert coder.measure(0, part, found.fields).plain_bytes == 2 * 64 * 64 * (bits / 8 + 4 / group)


def test_kivi_equal_numbers_are_exact() -> None:
    rows = np.full((2, 64, 64), 1.5, np.float32)
    found = coder_of("kivi:recent=0").quantize(0, "key", rows, POSITIONS)
    assert np.array_equal(found.rows, rows)


@pytest.mark.parametrize(
    ("prompt", "recent", "group", "keys", "values"),
    [(300, 128, 32, [256, 256, 384], [172, 173, 272]), (100, 0, 32, [96, 96, 192], [100, 101, 200])],
)
def test_kivi_quantizes_when_its_cache_does(prompt: int, recent: int, group: int, keys, values) -> None:
    """After a prompt, one step and 100 steps: K in whole residuals (or groups), V all but the residual."""
    coder = coder_of(f"kivi:recent={recent},group={group}")
    for part, wanted in (("key", keys), ("value", values)):
        done = coder.count_due(part, prompt)
        counts = [done]
        for step in range(1, 101):
            done += coder.count_due(part, prompt + step - done)
            counts += [done] if step in (1, 100) else []
        assert counts == wanted


def test_kivi_counts_groups_that_have_tokens_left() -> None:
    coder = coder_of("kivi:recent=0,group=32")
    fields = coder.quantize(0, "key", BLOCKS["rows"], POSITIONS).fields
    left = [entry[:, [1, 2, 31]] for entry in fields]
    assert coder.measure(0, "key", left).plain_bytes == 2 * 3 * 64 // 2 + 2 * 64 * 4


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("q4", "no codec 'q4' of caches: expected q8_0"),
        ("q8_0:bits=3", "q8_0 has no option 'bits': expected recent, when"),
        ("q8_0:recent=x", "q8_0: recent is 'x': expected a number"),
        ("q8_0:recent=-1", "recent is -1: expected at least 0"),
        ("q8_0:when=now", "when is 'now': expected 'always' or 'prompt'"),
        ("kivi:k=9", "k is 9: expected 1 to 8 bits"),
        ("kivi:group=0", "group is 0"),
        ("kivi:group=24", "recent is 128: expected a multiple of group, 24"),
        ("tq4:parts=values", "tq4: parts is 'values': expected 'both' or 'keys'"),
        ("none:recent=3", "no codec 'none'"),
    ],
)
def test_create_codec_refuses(spec: str, message: str) -> None:
    with pytest.raises(KvmnnError, match=message):
        create_codec(spec)


def test_codec_spec_is_canonical() -> None:
    codec = create_codec("kivi:when=prompt,recent=0,k=4,v=2")
    assert codec is not None and codec.spec == "kivi:v=2,recent=0,when=prompt"
    assert create_codec(codec.spec) == codec and create_codec("none") is None


@pytest.mark.parametrize(("spec", "head_dim"), [("q8_0", 48), ("tq3", 48), ("kivi:v_group=48", 64)])
def test_start_text_refuses_other_head_dims(spec: str, head_dim: int) -> None:
    codec = create_codec(spec)
    assert codec is not None
    with pytest.raises(KvmnnError, match=f"do not fit a head_dim of {head_dim}"):
        codec.start_text(CacheShape(1, 2, head_dim))


# -- in a running model -----------------------------------------------------------------------------------------------


class _MarkCoder(TextCoder):
    """Adds 1 to every number, and stores the positions of tokens."""

    def quantize(self, layer, part, rows, positions, head=0) -> QuantizedRows:
        heads = rows.shape[0]
        marks = np.broadcast_to(positions[None, :, None], (heads, len(positions), 1)).astype(np.int32)
        return QuantizedRows(rows + 1, (marks, rows.astype(np.float32)))

    def measure(self, layer, part, fields) -> FieldSizes:
        return FieldSizes(fields[0].size, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MarkCodec(CacheCodec):
    name = "mark"

    def start_text(self, shape: CacheShape) -> TextCoder:
        return _MarkCoder()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    Tiny().save(folder / "model.onnx")
    return folder


IDS = np.random.default_rng(8).integers(0, 40, 60)


@pytest.mark.parametrize("policy", [None, "streaming", "h2o_decayed_heads"])
def test_tokens_are_quantized_once_and_their_fields_follow_them(model: Path, policy: str | None) -> None:
    session = DecoderSession.open(model, attentions=policy == "h2o_decayed_heads")
    made = None if policy is None else create_policy(policy, budget=16)
    runner = Runner(session, made, codec=_MarkCodec())
    for begin in range(0, 60, 5):
        runner.step(IDS[begin : begin + 5], end_chunk=True)
    store = runner._kv_store
    for layer, cache in enumerate(runner.cache.copy_layers()):
        positions = np.broadcast_to(cache.positions, (cache.kv_heads, cache.tokens))
        for table, rows in zip(store._tables[layer], (cache.keys, cache.values), strict=True):
            assert table.num_quantized.tolist() == [cache.tokens] * cache.kv_heads
            marks, exact = table.get_fields(slice(0, cache.kv_heads), cache.tokens)
            assert np.array_equal(marks[:, :, 0], positions)
            assert np.array_equal(rows, exact + np.float32(1))
    sizes = runner.collect_quantized_sizes()
    assert all(part.pending_rows.size == 0 for part in sizes) and len(sizes) == 2 * session.interface.layers


def document() -> Document:
    ids = np.random.default_rng(4).integers(0, 40, 61)
    return Document(name="a", ids=ids, nbytes=200, sha256="0" * 64, begins_with_bos=False, requested_tokens=60)


def test_evaluate_codecs_alone_and_with_policies() -> None:
    text = FIXTURES / "lm" / "texts" / "calendar.py.txt"
    settings = EvaluationSettings(tokens=48, chunk=8, timing=False)
    codecs = ["none", "q8_0", "q4_0:when=prompt"]
    result = evaluate(FIXTURES / "lm", text, "recent_only:budget=16", codecs=codecs, settings=settings, jobs=0)
    labels = [row.label for row in result.rows]
    assert labels == [
        "full",
        "recent_only 16",
        "q8_0",
        "recent_only 16 + q8_0",
        "q4_0:when=prompt",
        "recent_only 16 + q4_0:when=prompt",
    ]
    assert result.refused == ()
    full, cut, q8, cut_q8, q4, _ = result.rows
    assert q8.kind == "LOSSY" and q8.codec == "q8_0" and q8.quantized_bits == 8.5 and not q8.is_full
    assert q8.lossy_ratio == pytest.approx(16 / 8.5) and cut_q8.lossy_ratio == pytest.approx(3 * 16 / 8.5)
    assert q8.bytes_per_token == pytest.approx(full.bytes_per_token * 8.5 / 16)
    assert q4.bytes_per_token == pytest.approx(full.bytes_per_token * (8 * 4.5 / 16 + 40) / 48)
    assert (q8.quantized_share, cut_q8.quantized_share, cut.quantized_share) == (1, 1, None)
    assert q4.quantized_share == pytest.approx(8 / 48)
    assert None not in (q8.divergence, cut.divergence, cut_q8.divergence)
    assert 0 < q8.divergence.kl < 0.01 < cut.divergence.kl
    assert q8.coded_bits is not None and q8.coded_bits < 8.5
    assert cut.codec is None and "codec" not in cut.to_dict()
    assert any(note.startswith("Codecs: ") for note in result.notes)


def test_evaluate_codec_has_all_options_and_bits() -> None:
    """A label leaves out the options at their defaults, of which the bits of a paper's row are."""
    text = FIXTURES / "lm" / "texts" / "calendar.py.txt"
    settings = EvaluationSettings(tokens=64, chunk=16, timing=False)
    codecs = ["kivi:k=4,v=4,group=32,recent=32", "kivi:group=64,recent=0"]
    result = evaluate(FIXTURES / "lm", text, codecs=codecs, settings=settings, jobs=0)
    full, small, large = result.rows
    assert [row.label for row in result.rows] == ["full", "kivi:recent=32", "kivi:group=64,recent=0"]
    common = {"k": 4, "v": 4, "group": 32, "v_group": 0, "recent": 32, "when": "always"}
    assert (full.codec_options, small.codec_options) == (None, common)
    assert (small.quantized_bits, large.quantized_bits) == (5.0, 4.5)
    assert small.to_dict()["codec_options"] == common and "codec_options" not in full.to_dict()
    lines = list(csv.DictReader(io.StringIO(result.to_csv())))
    options = {name: str(value) for name, value in common.items()}
    assert options == {name: lines[2][f"codec_options.{name}"] for name in common}
    table = result.format_table()
    headings, _, *rows = (line.split(" | ") for line in table.split("\n")[:5])
    assert [cells[headings.index("bits/element")] for cells in rows] == ["-", "5.00", "4.50"]
    assert "bits/element" in result.to_text("latex")


def test_evaluate_keys_alone_counts_values_as_fp16() -> None:
    text = FIXTURES / "lm" / "texts" / "calendar.py.txt"
    settings = EvaluationSettings(tokens=24, chunk=8, timing=False)
    result = evaluate(FIXTURES / "lm", text, codecs=["tq4", "tq4:parts=keys"], settings=settings, jobs=0)
    full, both, keys = result.rows
    assert both.bytes_per_token == pytest.approx(full.bytes_per_token * 4.5 / 16)
    assert keys.bytes_per_token == pytest.approx(full.bytes_per_token * (4.5 + 16) / 32)
    assert (keys.label, keys.kind, keys.quantized_bits, keys.quantized_share) == ("tq4:parts=keys", "LOSSY", 4.5, 0.5)
    assert 0 < keys.divergence.kl < 0.01 and keys.divergence.kl != both.divergence.kl and both.lossless_ratio > 0.99


def test_evaluate_codec_equals_a_cache_quantized_by_hand() -> None:
    """The whole text in two steps: K and V of the first are quantised at its end, by this test's own arithmetic."""
    folder = FIXTURES / "lm"
    session = DecoderSession.open(folder)
    ids = np.arange(3, 64) % 50 + 5
    first = session.run_step(ids[:40], np.arange(40), session.create_empty_past())
    past = []
    for pair in first.present_pairs:
        read = []
        for rows in pair:
            blocks = rows.reshape(-1, 32)
            scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
            codes = np.rint(blocks / np.where(scale == 0, 1, scale))
            read.append((codes * scale.astype(np.float16).astype(np.float32)).reshape(rows.shape))
        past.append(tuple(read))
    wanted = session.run_step(ids[40:60], np.arange(40, 60), past).logits
    codec = create_codec("q8_0:when=prompt")
    runner = Runner(session, codec=codec)
    runner.step(ids[:40], end_chunk=True)
    found = runner.step(ids[40:60], end_chunk=True)
    np.testing.assert_allclose(found, wanted, atol=2e-3)  # ties of two roundings differ
    exact = session.run_step(ids[40:60], np.arange(40, 60), first.present_pairs).logits
    assert np.abs(found - wanted).max() < np.abs(found - exact).max() / 5


def test_codecs_that_do_not_fit_are_refused_by_name(model: Path) -> None:
    settings = EvaluationSettings(tokens=60, chunk=4, timing=False)
    with pytest.warns(RefusalWarning, match="q8_0 was not run: "), pytest.warns(RefusalWarning, match="kivi"):
        result = evaluate(model, document(), codecs=["q8_0", "kivi:group=7,recent=0"], settings=settings, jobs=0)
    assert [entry.label for entry in result.refused] == ["q8_0", "kivi:group=7,recent=0"]
    assert "do not fit a head_dim" in result.refused[0].reason
    with pytest.raises(KvmnnError, match="packed or in the lossless runtime or by a codec"):
        Runner(DecoderSession.open(FIXTURES / "lm"), codec=create_codec("q8_0"), packed="x86-avx2")
