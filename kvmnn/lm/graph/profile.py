"""The time of attention in onnxruntime's profile of a session."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ...optional import package
from .attention import attention_nodes
from .graph_file import one_line
from .interface import DecoderInterface
from .onnx_sessions import CPU, EVENTS, OPTIMIZED
from .unmerging import unmerge

_MOST_BYTES = 256 << 20  # of a profile: some 500 bytes for each node of each step
_SUFFIX = "_kernel_time"


@dataclass(frozen=True)
class AttentionTime:
    """Means over steps, in seconds.

    Attributes
    ----------
    seconds
        Attention of all layers in a step: scores, scale and mask, softmax, values. onnxruntime measures each operator
        in whole microseconds.
    model_seconds
        The whole step inside onnxruntime, with the profile.
    """

    seconds: float
    model_seconds: float


class Profile:
    """A session's profile while it grows.

    Its files are open or read from now on, so their folder can be removed at once where the system allows that.

    Parameters
    ----------
    runtime
        An ``onnxruntime.InferenceSession`` that was started with a profile.
    interface
        Of its decoder.

    Attributes
    ----------
    nodes : frozenset of str
        Names of the operators that are attention.

    Raises
    ------
    ModelError
        Where the attention of some layer is not found in the graph that runs.
    """

    def __init__(self, runtime: Any, interface: DecoderInterface) -> None:
        self._runtime, self._label = runtime, interface.label
        folder = Path(runtime.get_session_options().profile_file_prefix).parent
        self.nodes = self._attention(folder / OPTIMIZED, interface)
        files = list(folder.glob(f"{EVENTS}*"))
        if len(files) != 1:
            raise self._unknown("onnxruntime writes no profile")
        self._file = open(files[0], "rb")  # noqa: SIM115  # read when the steps are done

    def close(self) -> None:
        """Let go of the file; onnxruntime keeps none either."""
        with suppress(Exception):  # it ended before
            self._runtime.end_profiling()
        self._file.close()

    def attention_time(self, steps: int) -> AttentionTime:
        """The time of attention in the last `steps` runs; the profile ends.

        Raises
        ------
        ModelError
            Where the profile does not show the attention of every one of them.
        """
        self._runtime.end_profiling()
        data = self._file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise self._unknown(f"onnxruntime's profile is larger than {_MOST_BYTES >> 20} MiB")
        try:
            return self._read(json.loads(data), steps)
        except (KeyError, TypeError, ValueError) as error:
            raise self._unknown(f"onnxruntime's profile cannot be read ({one_line(error)})") from error

    def _attention(self, path: Path, interface: DecoderInterface) -> frozenset[str]:
        try:
            model = package("onnx").load(str(path), load_external_data=False)
        except Exception as error:  # protobuf's own class, by version
            raise self._unknown(f"the graph that onnxruntime makes cannot be read ({one_line(error)})") from error
        if interface.branch is not None:
            unmerge(model, interface.branch)
        layers = attention_nodes(model, [value for _, value in interface.past])
        if not layers:
            raise self._unknown("it is not found in the graph that onnxruntime makes of this model")
        names = [node.name for nodes in layers for node in nodes]
        if not all(names) or len(set(names)) < len(names):
            raise self._unknown("its operators have no names of their own")
        return frozenset(names)

    def _read(self, events: Any, steps: int) -> AttentionTime:
        runs = [event for event in events if event["name"] == "model_run"][-steps:]
        if len(runs) < steps:
            raise self._unknown("onnxruntime's profile lacks some steps")
        begun = runs[0]["ts"]
        spent, seen = 0, Counter[str]()
        for event in events:
            name = event["name"].removesuffix(_SUFFIX)
            if event["cat"] == "Node" and event["name"] != name and event["ts"] >= begun and name in self.nodes:
                if event["args"]["provider"] not in CPU:
                    raise self._unknown(f"{event['args']['provider']} runs it beside the clock")
                spent += event["dur"]
                seen[name] += 1
        if set(seen) != self.nodes or set(seen.values()) != {steps}:
            raise self._unknown("onnxruntime's profile does not show all of it")
        return AttentionTime(spent / steps / 1e6, sum(run["dur"] for run in runs) / steps / 1e6)

    def _unknown(self, reason: str) -> ModelError:
        return ModelError(f"{self._label}: the time of attention is not known: {reason}")
