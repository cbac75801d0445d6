"""GGUF files and checkpoints become decoders that compute what torch computes of the same weights."""

import json
import lzma
import struct
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from tiny_models import MODELS

from kvmnn.errors import KvmnnError, ModelError, OptionError, OutputError, SourceError
from kvmnn.lm import DecoderSession, Tokenizer, import_model
from kvmnn.lm.importer.importer import quantize_int8

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

FIXTURES = Path(__file__).parents[2] / "fixtures" / "lm_import"
CHUNK, STRIDE = 25, 7


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / "logits.npz"))


def run_model(folder: Path, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits of all tokens, fed in chunks, and K of the last token in each layer."""
    session = DecoderSession.open(folder)
    past, logits = session.create_empty_past(), []
    for begin in range(0, len(ids), CHUNK):
        chunk = ids[begin : begin + CHUNK]
        step = session.run_step(chunk, np.arange(begin, begin + len(chunk)), past)
        past = step.present_pairs
        logits.append(np.array(step.logits))
    return np.concatenate(logits), np.stack([keys[0, :, -1] for keys, _ in past])


def write_gguf(path: Path, name: str) -> Path:
    path.write_bytes(tiny_models.build_gguf(*tiny_models.build_gguf_parts(MODELS[name])))
    return path


@pytest.mark.parametrize("name", MODELS)
def test_import_model_checkpoint_computes_as_torch(tmp_path, reference, name) -> None:
    source = tmp_path / "checkpoint"
    tiny_models.write_checkpoint(source, MODELS[name], shards=1 + (name == "llama"))
    (source / "tokenizer.json").write_text("{}")
    result = import_model(source, tmp_path / "model")
    assert result.architecture == MODELS[name].architecture or name == "mistral_window"
    assert result.parameters == sum(values.size for values in tiny_models.build_weights(MODELS[name]).values())
    logits, keys = run_model(tmp_path / "model", reference["ids"])
    np.testing.assert_allclose(logits[::STRIDE], reference[f"{name}.logits"], atol=2e-4, rtol=0)
    np.testing.assert_allclose(keys, reference[f"{name}.keys"], atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.has_gguf])
def test_import_model_gguf_computes_as_torch(tmp_path, reference, name) -> None:
    result = import_model(write_gguf(tmp_path / "m.gguf", name), tmp_path / "model")
    assert (result.layers, result.query_heads, result.kv_heads) == (4, 4, 2)
    logits, keys = run_model(tmp_path / "model", reference["ids"])
    np.testing.assert_allclose(logits[::STRIDE], reference[f"{name}.logits"], atol=2e-4, rtol=0)
    np.testing.assert_allclose(keys, reference[f"{name}.keys"], atol=2e-4, rtol=0)


def test_import_model_fp16_rounds_matrices_only(tmp_path, reference) -> None:
    source = write_gguf(tmp_path / "m.gguf", "qwen3")
    full = import_model(source, tmp_path / "full")
    half = import_model(source, tmp_path / "half", dtype="fp16")
    assert half.weight_bytes < 0.6 * full.weight_bytes
    logits, _ = run_model(tmp_path / "half", reference["ids"])
    error = np.abs(logits[::STRIDE] - reference["qwen3.logits"]).max()
    assert 1e-5 < error < 0.05


def test_import_model_reports_progress_in_bytes(tmp_path) -> None:
    steps: list[int] = []
    result = import_model(write_gguf(tmp_path / "m.gguf", "llama"), tmp_path / "model", progress=steps.append)
    assert result.weight_bytes - 64 * len(steps) < sum(steps) <= result.weight_bytes


def test_session_gives_attention_and_takes_bias_without_copies(tmp_path, reference) -> None:
    import_model(write_gguf(tmp_path / "m.gguf", "llama"), tmp_path / "model")
    before = sorted(path.name for path in (tmp_path / "model").iterdir())
    session = DecoderSession.open(tmp_path / "model", attentions=True, bias=True)
    ids = reference["ids"][:10]
    step = session.run_step(ids, np.arange(10), session.create_empty_past())
    assert step.attentions is not None
    np.testing.assert_allclose(np.sum(step.attentions, axis=-1), 1, atol=1e-5)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == before


def test_import_model_keeps_chat_template_and_special_tokens(tmp_path) -> None:
    fields, tensors = tiny_models.build_gguf_parts(MODELS["llama"])
    fields |= {"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.add_bos_token": True}
    (tmp_path / "m.gguf").write_bytes(tiny_models.build_gguf(fields, tensors))
    import_model(tmp_path / "m.gguf", tmp_path / "model")
    config = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages }}"
    assert config["add_bos_token"] is True
    assert config["bos_token"] == "<0x00>"


@pytest.mark.parametrize("index", range(2), ids=["bpe", "sentencepiece"])
def test_tokenizer_cuts_texts_as_llama_cpp(tmp_path, index) -> None:
    case = json.loads(lzma.decompress((FIXTURES / "tokenizers.json.xz").read_bytes()))[index]
    header, tensors = tiny_models.build_gguf_parts(MODELS["llama"])
    fields = {key: value for key, value in header.items() if not key.startswith("tokenizer.")} | case["fields"]
    for name in ("token_embd.weight", "output.weight"):
        shape = (len(case["fields"]["tokenizer.ggml.tokens"]), tiny_models.HIDDEN)
        tensors[name] = np.resize(tensors[name], shape)
    (tmp_path / "m.gguf").write_bytes(tiny_models.build_gguf(fields, tensors))
    import_model(tmp_path / "m.gguf", tmp_path / "model")
    tokenizer = Tokenizer.open_for_model(tmp_path / "model")
    assert [tokenizer.encode(text).tolist() for text in case["texts"]] == case["ids"]
    assert sum(map(len, case["ids"])) > 150


def test_unknown_architecture_is_refused_by_name(tmp_path) -> None:
    fields, tensors = tiny_models.build_gguf_parts(MODELS["llama"])
    (tmp_path / "m.gguf").write_bytes(tiny_models.build_gguf(fields | {"general.architecture": "mamba"}, tensors))
    with pytest.raises(ModelError, match=r"'mamba' cannot be imported: expected one of gemma3, granite, llama"):
        import_model(tmp_path / "m.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"llama.attention.head_count_kv": 3}, "do not share 3 kv heads"),
        ({"llama.block_count": 5}, r"has no tensor blk\.4\."),
        ({"llama.block_count": 3}, r"has tensors that a decoder .* does not have: blk\.3\."),
        ({"llama.block_count": 1 << 31}, "expected at most 512"),
        ({"llama.feed_forward_length": 47}, r"blk\.0\.ffn_gate\.weight has the shape \[48, 32\]: expected \[47, 32\]"),
        ({"llama.attention.head_count": 0}, "attention.head_count is 0"),
        ({"llama.attention.head_count": "four"}, "attention.head_count is 'four'"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
        ({"tokenizer.ggml.model": "wordpiece"}, "of the kind 'wordpiece'"),
        ({"tokenizer.ggml.scores": [0.0]}, "scores of them"),
        ({"tokenizer.ggml.model": "gpt2"}, r"tokenizer\.ggml\.pre"),
        ({"general.alignment": 0}, "general.alignment is 0"),
    ],
)
def test_import_gguf_refuses_header(tmp_path, changes, message) -> None:
    fields, tensors = tiny_models.build_gguf_parts(MODELS["llama"])
    (tmp_path / "m.gguf").write_bytes(tiny_models.build_gguf(fields | changes, tensors))
    with pytest.raises(KvmnnError, match=message):
        import_model(tmp_path / "m.gguf", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_import_gguf_refuses_damaged_files(tmp_path) -> None:
    data = tiny_models.build_gguf(*tiny_models.build_gguf_parts(MODELS["llama"]))
    header_end = data.index(b"token_embd.weight")
    cuts = [*range(0, header_end, 97), *range(header_end, header_end + 2000, 101), len(data) // 2, len(data) - 1]
    path = tmp_path / "m.gguf"
    for cut in cuts:
        path.write_bytes(data[:cut])
        with pytest.raises(KvmnnError):
            import_model(path, tmp_path / "model")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("value", [0, 0xFFFFFFFF])
def test_import_gguf_survives_any_word_of_its_header(tmp_path, value) -> None:
    """Each eleventh 32-bit word of the header but those of token texts: an error of ours, or a model."""
    fields, tensors = tiny_models.build_gguf_parts(MODELS["llama"])
    tensors = {name: values for name, values in tensors.items() if not name.startswith(("blk.1", "blk.2", "blk.3"))}
    data = tiny_models.build_gguf(fields | {"llama.block_count": 1}, tensors)
    path = tmp_path / "m.gguf"
    header_end = data.index(b"output.weight") + 60
    num_refused = 0
    texts = range(data.index(b"<0x01>"), data.index(b"<0xFE>"))
    for offset in [offset for offset in range(4, header_end - 4, 44) if offset not in texts]:
        path.write_bytes(data[:offset] + struct.pack("<I", value) + data[offset + 4 :])
        try:
            import_model(path, tmp_path / "model", overwrite=True)
        except KvmnnError:
            num_refused += 1
    assert num_refused > 10


def test_import_gguf_refuses_tensors_outside_of_the_file(tmp_path) -> None:
    fields, tensors = tiny_models.build_gguf_parts(MODELS["llama"])
    blocks = {name: (values.shape, 0, values.astype("<f4").tobytes()) for name, values in tensors.items()}
    path = tmp_path / "m.gguf"
    for shape, type_number, message in [
        ((1 << 40, 32), 0, "the file has"),
        ((257, 33), 12, "no whole blocks of 256"),
        ((257, 32), 19, "element type"),
        ((257, 32), 999, "number 999"),
        ((0, 32), 0, "at least 1"),
    ]:
        path.write_bytes(
            tiny_models.build_gguf_of_blocks(fields, blocks | {"token_embd.weight": (shape, type_number, b"")})
        )
        with pytest.raises(KvmnnError, match=message):
            import_model(path, tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' cannot be imported"),
        ({"hidden_act": "relu"}, "the activation 'relu'"),
        ({"num_key_value_heads": 3}, "do not share 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"sliding_window": "all"}, "sliding_window is 'all'"),
        ({"rms_norm_eps": None, "num_hidden_layers": 5}, "has no tensor model.layers.4"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_type 'spiral' is unknown"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale"),
    ],
)
def test_import_checkpoint_refuses_configuration(tmp_path, changes, message) -> None:
    source = tmp_path / "checkpoint"
    tiny_models.write_checkpoint(source, MODELS["llama"])
    (source / "tokenizer.json").write_text("{}")
    (source / "config.json").write_text(json.dumps(MODELS["llama"].settings | changes))
    with pytest.raises(KvmnnError, match=message):
        import_model(source, tmp_path / "model")


def test_import_checkpoint_reads_bfloat16_and_refuses_integers(tmp_path, reference) -> None:
    source = tmp_path / "checkpoint"
    tiny_models.write_checkpoint(source, MODELS["llama"])
    (source / "tokenizer.json").write_text("{}")
    weights = tiny_models.build_weights(MODELS["llama"])
    words = {name: (values.view("<u4") >> 16).astype("<u2") for name, values in weights.items()}
    (source / "model.safetensors").write_bytes(tiny_models.build_safetensors(words, "BF16"))
    assert import_model(source, tmp_path / "model").tensor_types == {"bf16": len(words)}
    logits, _ = run_model(tmp_path / "model", reference["ids"])
    assert np.abs(logits[::STRIDE] - reference["llama.logits"]).mean() < 0.2
    (source / "model.safetensors").write_bytes(tiny_models.build_safetensors(words, "U16"))
    with pytest.raises(ModelError, match="of the element type U16: expected F32, F16 or BF16"):
        import_model(source, tmp_path / "other")


def test_import_checkpoint_names_what_is_missing(tmp_path) -> None:
    source = tmp_path / "checkpoint"
    source.mkdir()
    with pytest.raises(SourceError, match="has no config"):
        import_model(source, tmp_path / "model")
    tiny_models.write_checkpoint(source, MODELS["llama"])
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        import_model(source, tmp_path / "model")
    (source / "model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"has no \.safetensors file"):
        import_model(source, tmp_path / "model")


def test_import_checkpoint_refuses_shards_outside_of_its_folder(tmp_path) -> None:
    source = tmp_path / "checkpoint"
    tiny_models.write_checkpoint(source, MODELS["llama"])
    index = {"weight_map": {"model.embed_tokens.weight": "../other/model.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match="names files outside of its folder"):
        import_model(source, tmp_path / "model")


def test_import_model_replaces_only_imported_models(tmp_path) -> None:
    source, target = write_gguf(tmp_path / "m.gguf", "llama"), tmp_path / "model"
    target.mkdir()
    (target / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="a folder of something else"):
        import_model(source, target, overwrite=True)
    assert (target / "thesis.txt").read_text() == "years of work"
    import_model(source, tmp_path / "other")
    with pytest.raises(OutputError, match="exists already"):
        import_model(source, tmp_path / "other")
    import_model(source, tmp_path / "other", overwrite=True)
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"holds notes\.txt, which no import wrote"):
        import_model(source, tmp_path / "other", overwrite=True)
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"
    with pytest.raises(OptionError, match="dtype 'fp8': expected one of fp32, fp16, int8"):
        import_model(source, tmp_path / "third", dtype="fp8")
    (tmp_path / "text.gguf").write_text("hello world")
    with pytest.raises(SourceError, match="begins with b'hell': expected a GGUF file"):
        import_model(tmp_path / "text.gguf", tmp_path / "third")


def test_verbs_name_the_import_for_gguf_files_and_checkpoints(tmp_path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama")
    with pytest.raises(ModelError, match="kvmnn model import"):
        DecoderSession.open(path)
    tiny_models.write_checkpoint(tmp_path / "checkpoint", MODELS["llama"])
    with pytest.raises(SourceError, match="kvmnn model import"):
        DecoderSession.open(tmp_path / "checkpoint")


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_int8_model_multiplies_by_the_numbers_that_its_blocks_stand_for(tmp_path, name: str) -> None:
    """Logits are those of a float32 model of the rounded matrices, but for activations that are rounded to int8."""
    source = write_gguf(tmp_path / "m.gguf", name)
    result = import_model(source, tmp_path / "int8", dtype="int8")
    assert result.check is not None and result.check.tokens > 100
    assert abs(result.check.nll - result.check.reference_nll) < 0.05 and result.check.equal_best > 0.8
    assert "in fp32" in str(result) and result.dtype == "int8"
    import_model(source, tmp_path / "fp32")
    model = onnx.load(tmp_path / "fp32" / "model.onnx")
    for tensor in model.graph.initializer:
        if len(tensor.dims) == 2 and "weight" in tensor.name:
            rows = onnx.numpy_helper.to_array(tensor)
            numbers, scales = quantize_int8(rows)
            rounded = ((numbers.astype(np.float32) - 128) * scales[:, :, None]).reshape(len(rows), -1)
            assert (np.abs(rounded[:, : rows.shape[1]] - rows) <= scales.max() / 2 + 1e-7).all()
            tensor.CopyFrom(onnx.numpy_helper.from_array(rounded[:, : rows.shape[1]].copy(), tensor.name))
    (tmp_path / "rounded").mkdir()
    onnx.save(model, tmp_path / "rounded" / "model.onnx")
    ids = np.arange(3, 40)
    exact, found = (
        DecoderSession.open(tmp_path / folder, cache=False).run_step(
            ids, np.arange(37), session_past(tmp_path / folder)
        )
        for folder in ("rounded", "int8")
    )
    assert np.sqrt(np.square(found.logits - exact.logits).mean()) < 0.15 * np.sqrt(np.square(exact.logits).mean())


def session_past(folder):
    return DecoderSession.open(folder, cache=False).create_empty_past()


def test_session_shared_with_attention_gives_the_same_bits(tmp_path) -> None:
    import_model(write_gguf(tmp_path / "m.gguf", "llama"), tmp_path / "model")
    session = DecoderSession.open(tmp_path / "model")
    shared, own = session.share(attentions=True), DecoderSession.open(tmp_path / "model", attentions=True)
    assert shared is not None and shared.has_attentions and not session.has_attentions and shared.has_bias
    ids, positions = np.arange(3, 20), np.arange(17)
    steps = [each.run_step(ids, positions, each.create_empty_past()) for each in (session, shared, own)]
    assert steps[0].attentions is None
    for step in steps[1:]:
        np.testing.assert_array_equal(step.logits, steps[0].logits)
        np.testing.assert_array_equal(step.attentions, steps[2].attentions)
