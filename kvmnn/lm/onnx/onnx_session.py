"""onnxruntime sessions with kvmnn's settings."""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..._util.dataclass import dataclass
from ..._util.packages import import_optional
from ...errors import KvmnnError, ModelError
from .model_files import format_error

CPU_PROVIDERS = ("CPUExecutionProvider",)
OPTIMIZED_GRAPH_NAME, EVENTS_PREFIX = "optimized.onnx", "events"  # of a profiled session; the latter begins a name
_SILENT_LOG_LEVEL = 4  # onnxruntime prints errors that it raises as well; ours name the model
_WEIGHTS_FOLDER_OPTION = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True)
class SessionSettings:
    """Settings of onnxruntime for a graph."""

    #: Threads of one operator; 0 leaves the number to onnxruntime.
    threads: int = 1
    #: Execution providers, the preferred one first.
    providers: Sequence[str] = CPU_PROVIDERS
    #: A folder in which every session puts a folder of its own, with its graph as onnxruntime runs it
    #: (``optimized.onnx``) and, once profiling ends, the times of all nodes; None for no profile.
    profile: Path | None = None

    def check(self) -> None:
        """Raise an error for settings that the installed onnxruntime does not support."""
        available = import_optional("onnxruntime").get_available_providers()
        if isinstance(self.providers, str) or not self.providers:
            raise KvmnnError(f"providers: expected a list of names, found {self.providers!r}")
        for provider in self.providers:
            if provider not in available:
                raise KvmnnError(f"onnxruntime has no provider {provider}; installed here: {', '.join(available)}")
        if self.threads < 0:
            raise KvmnnError(f"threads: expected 0 (all) or more, found {self.threads}")


def create_session(source: Path | bytes, folder: Path, settings: SessionSettings, label: str) -> Any:
    """Create an ``onnxruntime.InferenceSession``."""
    runtime = import_optional("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = _SILENT_LOG_LEVEL
    options.intra_op_num_threads = settings.threads
    options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    # Idle threads would burn a third of all CPU time between the small operators of a step.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if settings.profile is not None:
        profile_folder = Path(tempfile.mkdtemp(dir=settings.profile))
        options.enable_profiling = True
        options.profile_file_prefix = str(profile_folder / EVENTS_PREFIX)
        options.optimized_model_filepath = str(profile_folder / OPTIMIZED_GRAPH_NAME)
    if isinstance(source, bytes):
        options.add_session_config_entry(_WEIGHTS_FOLDER_OPTION, str(folder.absolute()))
    model = source if isinstance(source, bytes) else str(source)
    try:
        return runtime.InferenceSession(model, options, providers=list(settings.providers))
    except Exception as error:  # onnxruntime's errors share no class
        raise ModelError(_explain_failure(error, label)) from error
    finally:
        trim_heap()


def trim_heap() -> None:
    """Return freed memory to the system, because glibc keeps that of parsed graphs and closed sessions."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _explain_failure(error: Exception, label: str) -> str:
    """Explain why onnxruntime refused a graph, for instance because it is too new."""
    text = format_error(error, 2000)
    opset = re.search(r"Opset (\d+) is under development.*till opset (\d+)", text)
    if opset:
        return (
            f"{label}: made with opset {opset[1]}; the installed onnxruntime takes up to {opset[2]}; "
            f"export with --opset {opset[2]} or upgrade onnxruntime"
        )
    ir_version = re.search(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)", text)
    if ir_version:
        return (
            f"{label}: written in ONNX IR version {ir_version[1]}; the installed onnxruntime takes up to "
            f"{ir_version[2]}; upgrade it, or export with an older onnx"
        )
    return f"{label}: onnxruntime does not take this graph: {format_error(error, 300)}"
