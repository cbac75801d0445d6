"""What `json_schemas` cannot read from the code: the results of each verb, and documents that functions compute.

Keys of `OVERRIDES` are classes, attributes (``module.Class.attribute``) and functions that convert a field. Values are
schemas, or for classes functions that change the derived one.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
_TYPES = {"int": "integer", "num": "number", "str": "string", "bool": "boolean", "obj": "object", "list": "array"}


def parse_type(text: str) -> Schema:
    """Parse a short type: ``int``, ``num?`` (or null), ``[str]`` (a list), ``{num}`` (an object), ``any``."""
    if text.startswith("["):
        return {"type": "array", "items": parse_type(text[1:-1])}
    if text.startswith("{"):
        return {"type": "object", "additionalProperties": parse_type(text[1:-1])}
    if text == "any":
        return {}
    name = _TYPES[text.removesuffix("?")]
    return {"type": [name, "null"]} if text.endswith("?") else {"type": name}


def build_object(text: str, /, **nested: Schema) -> Schema:
    """Build the schema of an object from ``key:type`` words; ``key~`` may be absent, type ``*`` is one of `nested`."""
    properties: Schema = {}
    required = []
    for word in text.split():
        key, _, type_text = word.partition(":")
        name = key.removesuffix("~")
        properties[name] = nested.pop(name) if type_text == "*" else parse_type(type_text)
        if not key.endswith("~"):
            required.append(name)
    properties |= nested
    required += list(nested)
    return {"type": "object", "properties": properties, "required": required}


def or_null(schema: Schema) -> Schema:
    """Permit null as well."""
    return {"anyOf": [schema, {"type": "null"}]}


def list_of(schema: Schema) -> Schema:
    """Build the schema of a list."""
    return {"type": "array", "items": schema}


def refer(name: str) -> Schema:
    """Refer to the schema of a class."""
    return {"$class": name}


RUNS: Schema = {
    "description": "Runs of positions, (begin, size).",
    "type": "array",
    "items": {"type": "array", "prefixItems": [{"type": "integer"}] * 2, "minItems": 2, "maxItems": 2},
}
LAYOUT_LAYER = build_object(
    "layer:int tokens:int capacity:int positions:* text_positions~:* kind~:str kv_heads~:int head_dim~:int group~:int "
    "next_position~:int?",
    positions=RUNS,
    text_positions=RUNS,
)
CACHE = or_null(
    {
        "description": "The document of a packed cache (docs/manifest.md), with its sizes.",
        **build_object(
            "schema:str schema_version:int kind:str name:str kv_heads:int head_dim:int dtype:str lP:int hP:int "
            "flash_block:int int8~:str lP8~:int hP8~:int token_ids:* model:str? next_position~:int loss~:str layers:* "
            "states~:[obj] live_bytes:int file_bytes:int",
            token_ids=or_null(build_object("count:int sha256:str")),
            layers=list_of({"type": "object", "required": ["layer", "tokens", "capacity", "positions"]}),
        ),
    }
)
ARRAY = build_object("name:str dtype:str shape:[int] array_dtype:str?")
RESTORED_ARRAYS = list_of(build_object("name:str dtype:str shape:[int] array_dtype:str? file:str?"))
LISTED_ARRAYS = list_of(build_object("name:str dtype:str shape:[int] array_dtype:str? order:str raw_bytes:int"))
PACKED_FILE_PAIR = build_object("layer:int key:str value:str key_bytes:int value_bytes:int kind:str group:int")
PACKED_HEAD = build_object("input:str kind:str name:str file_bytes:int problems:[str]")
COMPLETENESS_PAIR = build_object("completeness~:obj")
SIZES = (
    "raw_bytes:int simulated_bytes:int simulated_ratio:num? limit_bytes~:num limit_ratio~:num? byte_entropy_bytes~:num "
    "byte_entropy_ratio~:num? stored_bytes~:int stored_ratio~:num? stored_frames~:int verified~:bool "
)
LANES = {"type": "object", "additionalProperties": build_object(SIZES + "modes:{int}")}
PART_SIZES = build_object(SIZES + "framing_bytes:int lanes:*", lanes=LANES)
LAYER_SIZES = build_object(SIZES + "tokens:int k:* v:*", k=PART_SIZES, v=PART_SIZES)
FP32_SIZES = build_object(SIZES + "layers~:int k:* v:*", k=PART_SIZES, v=PART_SIZES)
BREAKDOWN = build_object(
    "meaning:{str} found_layers:int overall:* layers:* fp32~:*",
    overall=build_object(SIZES + "layers:int least_tokens:int most_tokens:int k:* v:*", k=PART_SIZES, v=PART_SIZES),
    layers={"type": "object", "additionalProperties": LAYER_SIZES},
    fp32=build_object(
        "meaning:str overall:* layers:*",
        overall=FP32_SIZES,
        layers={"type": "object", "additionalProperties": FP32_SIZES},
    ),
)
DENSE_SIZES = "raw_bytes:int exact_bytes:int exact_ratio:num? dense_bytes:int dense_ratio:num? "
DENSE_PART = build_object(DENSE_SIZES)
DENSE_LAYER = DENSE_SIZES + "k~:* v~:*"
POLICY_OPTIONS = {"type": "object", "description": "Options by their names."}
CASE_ROW = {"type": "object", "required": ["case", "overall_pass"]}


def _allow_null_ratios(schema: Schema) -> None:
    """Permit null for ratios of a runtime that stored nothing."""
    for key in ("lossless_ratio", "total_ratio"):
        schema["properties"][key] = {"type": ["number", "null"]}


def _reduce_project_keys(schema: Schema) -> None:
    """Require only what every project's row has."""
    schema["required"] = ["evaluation", "label"]


def _add_single_cache(schema: Schema) -> None:
    """Permit the document of a single cache in place of a list."""
    prefixes = dict(schema)
    items = prefixes["properties"]["prefixes"]["items"]
    schema.clear()
    schema["anyOf"] = [*items["anyOf"], prefixes]


_BUNDLE = "kvmnn.bundle"
_PACKED_INSPECTION = "kvmnn.formats.mnn.inspection"
OVERRIDES: dict[str, Any] = {
    "kvmnn.analysis.dense_measurement.DenseMeasureResult._overall_document": build_object(
        DENSE_LAYER + " layers:int", k=DENSE_PART, v=DENSE_PART
    ),
    "kvmnn.analysis.dense_measurement.DenseMeasureResult._layer_documents": {
        "type": "object",
        "additionalProperties": build_object(DENSE_LAYER, k=DENSE_PART, v=DENSE_PART),
    },
    "kvmnn.analysis.measurement.SizeReport": BREAKDOWN,
    "kvmnn.analysis.measurement.MeasureResult._reference_document": {
        "description": "The document of the reference's tool, with its key names.",
        **build_object(
            "schema_version:int dump_dir:any stage:str scope:str front_n:int layer_start:int layer_end:int "
            "layer_ids:[int] selected_layers:[int] selected_entries:int selected_dumps:int entry_mode:str "
            "online_chunk_seq:int online_framing_bytes:int aggregate_by_stage:bool aggregate_groups:int "
            "online_chunks:int codec:str codec_mode:str bitshuffle:bool adaptive_block_seq:int zstd_level:int "
            "k_raw_bytes:int k_compressed_bytes:int v_raw_bytes:int v_compressed_bytes:int k_chunk_meta_bytes:int "
            "v_chunk_meta_bytes:int raw_bytes:int compressed_bytes:int k_lossless_ratio:num? v_lossless_ratio:num? "
            "lossless_ratio:num? weighted_lossless_ratio:num? k_hi_predictors:[str] k_lo_predictors:[str] "
            "v_hi_predictors:[str] v_lo_predictors:[str] k_hi_mode_counts:{int} k_lo_mode_counts:{int} "
            "v_hi_mode_counts:{int} v_lo_mode_counts:{int} scanned_entries:int converted_fp32_entries:int "
            "skipped_entries:int skip_reasons:{int}"
        ),
    },
    "kvmnn.analysis.selection.CodedInputInfo.dequantised": build_object("types:[str] input_bytes:int? room_bytes~:int"),
    "kvmnn.arrays.cast.CastStats": build_object(
        "from:str to:str words:int changed:int overflowed:int largest_error:num?"
    ),
    "kvmnn.arrays.compare.Mismatch.index": parse_type("[int]"),
    "kvmnn.arrays.completeness._list_runs": list_of(
        build_object("layers:[int] kind:str window:int? shared_with:int? included:bool location:str?")
    ),
    "kvmnn.arrays.completeness.build_pair_document": COMPLETENESS_PAIR,
    "kvmnn.arrays.engine_cache.EngineCacheInfo.details": {"type": "object"},
    "kvmnn.bench.benchmark.ArrayBenchReport._result_documents": list_of({"type": "object", "required": ["codec"]}),
    "kvmnn.bundle.encoder.EncodeResult._file_document": build_object(
        "name:str format:str bytes:int stored_bytes:int room_bytes:int"
    ),
    "kvmnn.bundle.encoder.EncodeResult._packed_files_document": build_object(
        "files:int bytes:int rebuilt:bool left_out:any room_bytes:int room_stored_bytes:int"
    ),
    "kvmnn.bundle.inspection.BareSequenceInfo._frame_documents": list_of(
        {"type": "object", "required": ["offset", "streams"]}  # of a frame, after its offset
    ),
    "kvmnn.bundle.inspection.ArrayFramesInfo._frame_documents": list_of(
        build_object(
            "file:str offset:int bytes:int raw_bytes:int sha256:str? streams:* stored~:str axes~:str rope~:str "
            "dense~:*",
            streams=list_of(refer("kvmnn.frames.inspection.StreamInfo")),
            dense=refer("kvmnn.dense.inspection.DenseInfo"),
        )
    ),
    "kvmnn.compressor.forward.cache_file.CompressFileResult.document": build_object(
        "label:str kvmnn_version:str weights:* cache:str layers:[int] axes:str precision:str engine:str plan:* "
        "note:str? tokens:int new_len:int token_ratio:num next_position:int? raw_bytes:int stored_bytes:int",
        weights=build_object("file:str sha256:str"),
        plan=refer("kvmnn.compressor.forward.plan.CompressionPlan"),
    ),
    "kvmnn.compressor.inspect._ContentsInfo.metadata": {"type": "string"},
    "kvmnn.compressor.inspect._ContentsInfo._metadata_document": build_object("bytes:int entries~:{str} head~:str"),
    "kvmnn.compressor.verify.RejectionReport.findings": list_of(
        build_object("reason:str level:str offset:int text:str")
    ),
    "kvmnn.compressor.verify.WeightsVerifyResult._finding_documents": list_of(
        build_object("reason:str level:str text:str")
    ),
    "kvmnn.compressor.verify.WeightsVerifyResult.file.size": parse_type("int"),
    "kvmnn.compressor.verify.WeightsVerifyResult.file.header": refer("kvmnn.compressor.kvcm.WeightFileHeader"),
    "kvmnn.formats.inspection._build_array_documents": LISTED_ARRAYS,
    "kvmnn.formats.layer_streams.reader.RestoreLayersResult._array_documents": RESTORED_ARRAYS,
    "kvmnn.formats.mnn.inspection.PackedInspectionReport": _add_single_cache,
    f"{_PACKED_INSPECTION}.ResolvedCacheInfo._files_document": PACKED_HEAD,
    f"{_PACKED_INSPECTION}.ResolvedCacheInfo.layers": list_of(
        build_object(
            "layer:int key_file:str value_file:str key_bytes:int value_bytes:int live_bytes:int padded_bytes:int"
        )
    ),
    f"{_PACKED_INSPECTION}.ResolvedCacheInfo.states": list_of(PACKED_FILE_PAIR),
    f"{_PACKED_INSPECTION}.UnresolvedCacheInfo._files_document": PACKED_HEAD,
    f"{_PACKED_INSPECTION}.UnresolvedCacheInfo._file_documents": list_of(PACKED_FILE_PAIR),
    f"{_PACKED_INSPECTION}.UnresolvedCacheInfo._match_documents": list_of(
        build_object("backends:[str] layout:str capacities:[int]")
    ),
    "kvmnn.formats.mnn.prefix_restorer._build_array_documents": list_of(ARRAY),
    "kvmnn.formats.mnn.unpacker._build_array_documents": list_of(build_object("name:str dtype:str shape:[int]")),
    "kvmnn.formats.restorer.RestoreResult._array_documents": RESTORED_ARRAYS,
    "kvmnn.gates.demo.DemoResult": {
        "description": "The fork's llm_demo_report.json, with kvmnn's verdict and the gates; null: not measured.",
        "additionalProperties": {"description": "Percentiles of latencies.", "type": ["number", "null"]},
        **build_object(
            "overall_pass:bool verdict:str failure:str case:str mode:str strict:bool run_order:str "
            "baseline_decode_tps_avg:num? candidate_decode_tps_avg:num? decode_drop_ratio:num? "
            "decode_drop_target:num? decode_gate_enabled:bool? decode_pass:bool? baseline_keep_ratio_avg:num? "
            "baseline_lossy_ratio_avg:num? baseline_lossless_ratio_avg:num? baseline_runtime_total_ratio_avg:num? "
            "candidate_keep_ratio_avg:num? candidate_lossy_ratio_avg:num? candidate_lossless_ratio_avg:num? "
            "candidate_runtime_total_ratio_avg:num? require_runtime_decomp:bool? runtime_decomp_best_us:num? "
            "runtime_decomp_pass:bool? require_decode_cache_hit:bool? decode_cache_hit_best:num? "
            "decode_cache_hit_pass:bool? require_decode_baseline:bool? require_bucket_decode_pass:bool? "
            "bucket_decode_pass:bool? bucket_decode_failures:[str] bucket_report:* baseline_overall_pass:bool? "
            "candidate_overall_pass:bool? gates:* failures:[str]",
            bucket_report={
                "type": "object",
                "additionalProperties": build_object(
                    "baseline_runs:int candidate_runs:int baseline_decode_tps_avg:num candidate_decode_tps_avg:num "
                    "decode_drop_ratio:num decode_gate_enabled:bool decode_pass:bool baseline_lossy_ratio_avg:num "
                    "candidate_lossy_ratio_avg:num baseline_runtime_total_ratio_avg:num "
                    "candidate_runtime_total_ratio_avg:num"
                ),
            },
            gates=list_of(refer("kvmnn.gates.verdict.GateResult")),
        ),
    },
    "kvmnn.gates.suite.history.GateHistory.cases": {
        "type": "object",
        "additionalProperties": build_object("rounds:int passed:int reasons:{int}"),
    },
    "kvmnn.gates.suite.history.GateHistory.rounds": list_of({"type": "object", "required": ["cases"]}),
    "kvmnn.gates.suite.results.SuiteResult._case_documents": list_of(CASE_ROW),
    "kvmnn.gates.summary.RoundSummary.rows": list_of(CASE_ROW),
    "kvmnn.lm.generation.GenerateResult.policy": refer("kvmnn.policies.registry.LabelledPolicy"),
    "kvmnn.lm.kv_dump.KVDumpResult.origin": build_object(
        "kvmnn:str label:str model:str text:* policy:* format:str dtype:str rounded:*",
        text=build_object("name:str sha256:str"),
        policy=refer("kvmnn.policies.registry.LabelledPolicy"),
        rounded=build_object("from:str words:int changed:int largest_error:num?"),
    ),
    "kvmnn.packed.cache_info.build_cache_document": CACHE,
    "kvmnn.policies.h2o.plan._build_config_document": build_object(
        "block_tokens:int sink_tokens:int recent_tokens:int target_mode:str keep_ratio:num ema_alpha:num "
        "bytes_per_token:int?"
    ),
    "kvmnn.policies.h2o.plan.LayerPlan.plan.keep.size": parse_type("int"),
    "kvmnn.policies.h2o.plan.LayerPlan.plan_entry": build_object("layer:int remove:int pairs:*", pairs=RUNS),
    "kvmnn.policies.plan._build_policy_document": build_object("label:str policy:str options:obj"),
    "kvmnn.policies.plan.PolicyLayerPlan.plan_entry": build_object(
        "layer:int remove:int pairs~:* heads~:*", pairs=RUNS, heads=list_of(RUNS)
    ),
    "kvmnn.policies.registry.LabelledPolicy.options": POLICY_OPTIONS,
    "kvmnn.policies.registry.LabelledPolicy.policy.name": parse_type("str"),
    "kvmnn.profiles.geometry._describe_rope": or_null(build_object("label:str dims:int pairing:str turns:[str]")),
    "kvmnn.reports.page.report.Report._case_documents": {
        "type": "object",
        "additionalProperties": build_object("verdict:str misses:[str]"),
    },
    "kvmnn.reports.records.ProjectStats": _reduce_project_keys,
    "kvmnn.runtime.metrics.RuntimeMetrics": _allow_null_ratios,
}

NOTES = {"notes": {"description": "What was inferred or left out.", "type": "array", "items": {"type": "string"}}}

_STORE = "kvmnn.store.results"
_WEIGHTS = ("kvmnn.compressor.inspect.WeightFileInfo", "kvmnn.compressor.inspect.CheckpointInfo")
_MNN = "kvmnn.formats.mnn"
DOCUMENTS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "encode": (
        "encode",
        (
            "kvmnn.bundle.encoder.EncodeResult",
            "kvmnn.formats.zarr.writer.EncodeStoreResult",
            "kvmnn.formats.layer_streams.writer.EncodeLayersResult",
            "kvmnn.formats.frames.TranscodeResult transcode",
        ),
        "",
    ),
    "decode": (
        "decode",
        (
            "kvmnn.formats.restorer.RestoreResult",
            f"{_MNN}.prefix_restorer.RestorePrefixResult",
            "kvmnn.formats.layer_streams.reader.RestoreLayersResult",
        ),
        "",
    ),
    "inspect": (
        "inspect",
        (
            "kvmnn.bundle.inspection.BundleInfo",
            "kvmnn.bundle.inspection.BareFrameInfo",
            "kvmnn.bundle.inspection.BareSequenceInfo",
            "kvmnn.formats.inspection.ArraysInfo",
            f"{_MNN}.inspection.PackedInspectionReport",
            "kvmnn.formats.layer_streams.reader.LayerStreamsInfo",
            "kvmnn.formats.zarr.inspection.ZarrStoreInfo",
            *_WEIGHTS,
        ),
        "inputs",
    ),
    "verify": (
        "verify",
        (
            "kvmnn.bundle.verification.VerifyResult",
            "kvmnn.formats.layer_streams.reader.LayerStreamsInfo",
            "kvmnn.formats.zarr.restorer.VerifyStoreResult",
        ),
        "",
    ),
    "diff": ("diff", ("kvmnn.arrays.compare.DiffReport", "kvmnn.arrays.compare.ToleranceReport"), ""),
    "bench": ("bench", ("kvmnn.bench.benchmark.BenchReport",), ""),
    "measure": (
        "measure",
        (
            "kvmnn.analysis.measurement.MeasureResult",
            "kvmnn.analysis.dense_measurement.DenseMeasureResult",
            "kvmnn.formats.layer_streams.writer.MeasureLayersResult",
            "kvmnn.analysis.entropy.EntropyReport",
            "kvmnn.analysis.fp16_conversion.Fp16ConvertResult",
        ),
        "",
    ),
    "store put": ("store put", (f"{_STORE}.PutResult",), "store"),
    "store match": ("store match", (f"{_STORE}.MatchResult",), "store"),
    "store get": ("store get", ("kvmnn.store.adapters.GetResult",), "store"),
    "store ls": ("store ls", (f"{_STORE}.StoreListing",), "store"),
    "store stat": ("store stat", (f"{_STORE}.StoreStats", f"{_STORE}.StoreEntry"), "store"),
    "store verify": ("store verify", (f"{_STORE}.StoreVerifyResult",), "store"),
    "store gc": ("store gc", (f"{_STORE}.CleanupResult",), "store"),
    "store rm": ("store rm", (f"{_STORE}.CleanupResult",), "store"),
    "store pin": ("store pin", (f"{_STORE}.PinResult",), "store"),
    "store unpin": ("store unpin", (f"{_STORE}.PinResult",), "store"),
    "store export": ("store export", (f"{_STORE}.StoreExportResult",), "store"),
    "store import": ("store import", (f"{_STORE}.PutResult",), "store"),
    "store simulate": ("store simulate", ("kvmnn.store.simulation.report.SimulationReport",), "store"),
    "plan": ("plan", ("kvmnn.policies.h2o.plan.LayerPlans", "kvmnn.policies.plan.CachePlan"), ""),
    "mnn unpack": ("unpack", (f"{_MNN}.unpacker.UnpackResult",), ""),
    "mnn pack": ("pack", (f"{_MNN}.prefix_writer.PackResult",), ""),
    "mnn repack": ("repack", (f"{_MNN}.prefix_writer.PackResult",), ""),
    "mnn compact": ("compact", (f"{_MNN}.compaction.CompactResult",), ""),
    "mnn replay": ("replay", ("kvmnn.runtime.replay.ReplayResult",), ""),
    "model import": ("model import", ("kvmnn.lm.importer.import_result.ImportResult",), ""),
    "model list": ("model list", ("kvmnn.lm.importer.catalog.CatalogList",), ""),
    "model pull": ("model pull", ("kvmnn.lm.importer.import_result.ImportResult",), ""),
    "profile make": ("profile make", ("kvmnn.calibration.maker.ProfileMakeResult",), ""),
    "profile inspect": ("profile inspect", ("kvmnn.profiles.inspection.ProfileInspection",), ""),
    "profile verify": ("profile verify", ("kvmnn.profiles.inspection.ProfileVerifyResult",), ""),
    "eval": ("eval", ("kvmnn.evaluation.result.EvaluationResult",), ""),
    "generate": ("generate", ("kvmnn.lm.generation.GenerateResult",), ""),
    "dump-kv": ("dump-kv", ("kvmnn.lm.kv_dump.KVDumpResult",), ""),
    "gate run": ("gate run", ("kvmnn.gates.suite.results.SuiteResult",), ""),
    "gate search": ("gate search", ("kvmnn.gates.suite.search.SearchResult",), ""),
    "gate parse": ("gate parse", ("kvmnn.gates.logs.ParsedLogs",), ""),
    "gate check": ("gate check", ("kvmnn.gates.checker.CaseResult",), ""),
    "gate demo": ("gate demo", ("kvmnn.gates.demo.DemoResult",), ""),
    "gate summary": ("gate summary", ("kvmnn.gates.summary.RoundSummary",), ""),
    "gate history": ("gate history", ("kvmnn.gates.suite.history.GateHistory",), ""),
    "report": ("report", ("kvmnn.reports.page.report.Report", "kvmnn.evaluation.result.PlotResult plot"), ""),
    "compressor convert": ("convert", ("kvmnn.compressor.convert.ConvertResult",), ""),
    "compressor verify": (
        "verify",
        ("kvmnn.compressor.verify.WeightsVerifyResult", "kvmnn.compressor.verify.RejectionReport"),
        "",
    ),
    "compressor inspect": ("inspect", _WEIGHTS, "inputs"),
    "compressor export": (
        "export",
        ("kvmnn.compressor.export.WeightsExportResult", "kvmnn.compressor.forward.onnx_graph.OnnxExportResult"),
        "",
    ),
    "compressor run": ("compress-kv", ("kvmnn.compressor.forward.cache_file.CompressFileResult",), ""),
}
"""By command: the ``verb`` of its document, the classes of its results (with a verb of their own), and the form:
``inputs`` for a list of them, ``store`` for documents of failures."""

EXTRA_KEYS: dict[str, Schema] = {verb: NOTES for verb in DOCUMENTS if verb.startswith("store ")}
