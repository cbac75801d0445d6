"""The time of attention in onnxruntime's profile of a session."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..._util.dataclass import dataclass
from ..._util.packages import import_optional
from ...errors import ModelError
from .attention import find_attention_nodes
from .graph_rewrite import split_merged_decoder
from .interface import DecoderInterface
from .model_files import format_error
from .onnx_session import CPU_PROVIDERS, EVENTS_PREFIX, OPTIMIZED_GRAPH_NAME

_MAX_PROFILE_BYTES = 256 << 20  # of a profile: some 500 bytes for each node of each step
_KERNEL_TIME_SUFFIX = "_kernel_time"


@dataclass(frozen=True)
class AttentionTimeStats:
    """Attention time in seconds, means over steps."""

    #: Attention of all layers in a step: scores, scale and mask, softmax, values. onnxruntime measures each operator in
    #: whole microseconds.
    seconds: float
    #: The whole step inside onnxruntime, with the profile.
    model_seconds: float


class SessionProfile:
    """The profile that onnxruntime writes while a session runs."""

    def __init__(self, runtime: Any, interface: DecoderInterface) -> None:
        self._runtime, self._label = runtime, interface.label
        # The files are read or opened here, so that their folder can be removed at once where the system allows it.
        folder = Path(runtime.get_session_options().profile_file_prefix).parent
        #: Names of the operators that are attention.
        self.nodes = self._find_attention_nodes(folder / OPTIMIZED_GRAPH_NAME, interface)
        files = list(folder.glob(f"{EVENTS_PREFIX}*"))
        if len(files) != 1:
            raise self._build_error("onnxruntime writes no profile")
        self._file = open(files[0], "rb")  # noqa: SIM115  # read when the steps are done

    def close(self) -> None:
        """Close the file."""
        with suppress(Exception):  # it ended before
            self._runtime.end_profiling()
        self._file.close()

    def read_attention_time(self, num_steps: int) -> AttentionTimeStats:
        """Return the time of attention in the last `num_steps` runs, and end profiling."""
        self._runtime.end_profiling()
        data = self._file.read(_MAX_PROFILE_BYTES + 1)
        if len(data) > _MAX_PROFILE_BYTES:
            raise self._build_error(f"onnxruntime's profile is larger than {_MAX_PROFILE_BYTES >> 20} MiB")
        try:
            return self._parse_events(json.loads(data), num_steps)
        except (KeyError, TypeError, ValueError) as error:
            raise self._build_error(f"onnxruntime's profile cannot be read ({format_error(error)})") from error

    def _find_attention_nodes(self, path: Path, interface: DecoderInterface) -> frozenset[str]:
        try:
            model = import_optional("onnx").load(str(path), load_external_data=False)
        except Exception as error:  # protobuf's own class, by version
            raise self._build_error(
                f"the graph that onnxruntime makes cannot be read ({format_error(error)})"
            ) from error
        if interface.branch_input is not None:
            split_merged_decoder(model, interface.branch_input)
        layers = find_attention_nodes(model, [value for _, value in interface.past_inputs])
        if not layers:
            raise self._build_error("it is not found in the graph that onnxruntime makes of this model")
        names = [node.name for nodes in layers for node in nodes]
        if not all(names) or len(set(names)) < len(names):
            raise self._build_error("its operators have no names of their own")
        return frozenset(names)

    def _parse_events(self, events: Any, num_steps: int) -> AttentionTimeStats:
        runs = [event for event in events if event["name"] == "model_run"][-num_steps:]
        if len(runs) < num_steps:
            raise self._build_error("onnxruntime's profile lacks some steps")
        start_timestamp = runs[0]["ts"]
        total_us, event_counts = 0, Counter[str]()
        for event in events:
            name = event["name"].removesuffix(_KERNEL_TIME_SUFFIX)
            if (
                event["cat"] == "Node"
                and event["name"] != name
                and event["ts"] >= start_timestamp
                and name in self.nodes
            ):
                if event["args"]["provider"] not in CPU_PROVIDERS:
                    raise self._build_error(f"{event['args']['provider']} runs it next to the clock")
                total_us += event["dur"]
                event_counts[name] += 1
        if set(event_counts) != self.nodes or set(event_counts.values()) != {num_steps}:
            raise self._build_error("onnxruntime's profile does not show all of it")
        return AttentionTimeStats(total_us / num_steps / 1e6, sum(run["dur"] for run in runs) / num_steps / 1e6)

    def _build_error(self, reason: str) -> ModelError:
        return ModelError(f"{self._label}: the time of attention is not known: {reason}")
