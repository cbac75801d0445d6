"""The lossless runtime: one object for all layers of a running cache."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from .._util.validation import validate_int
from ..arrays import LayerCache
from ..dtypes import Elements, KVPair, Positions, parse_dtype
from ..errors import KvmnnError
from ..packed.compaction import ReservePair
from ..policies.h2o import H2OPlanner
from .config import PROFILE_CODECS, Behaviour, RuntimeConfig
from .emulation import CallEvent, EmulatedRuntime
from .emulation.block_store import WorkerTiming
from .metrics import RuntimeMetrics
from .strict import StrictCallResult, StrictRuntime


class LosslessRuntime:
    """A cache of K and V for a running model that stores cold tokens as frames.

    Every call of a layer has two halves, between which the caller computes attention; `end_step` ends a step of all
    layers. The first step is a prefill::

        for layer in range(layers):
            keys, values = runtime.begin(layer, new_keys, new_values)
            ...  # attention over keys and values
            runtime.end(rows=attention)
        runtime.end_step()

    Parameters
    ----------
    config
        Options.
    layers, kv_heads, head_dim
        Geometry of the model.
    dtype
        ``"fp16"``, ``"bf16"`` or ``"fp32"``.
    behaviour
        ``"sound"``: nothing is ever lost; every cold token is stored once, and what attention reads equals a plain
        cache bit for bit, unless ``config.codec`` is ``"transform"``, which rounds what it stores. ``"engine"``: what
        the MNN fork does, its defects included (docs/runtime.md lists them).
    planner
        Makes the eviction plans; None for one from ``config.h2o``. Cadence ``"tokens"`` for ``"sound"``,
        ``"layer-calls"`` for ``"engine"``.
    timing
        Behaviour "engine" only: ``"eager"`` workers are done at once, ``"lazy"`` ones when somebody waits for them.
    on_invalid
        Behaviour "engine" only: ``"engine"`` accepts a wrong ``layer_nums`` and mixes up layers as the engine does.

    Raises
    ------
    KvmnnError
        For options that do not exist or do not fit the model.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        behaviour: Behaviour = "sound",
        planner: H2OPlanner | None = None,
        timing: WorkerTiming = "eager",
        on_invalid: str = "raise",
    ) -> None:
        if not isinstance(config, RuntimeConfig):
            raise TypeError(f"config must be a RuntimeConfig, not {type(config).__name__}")
        self._runtime: StrictRuntime | EmulatedRuntime
        if behaviour == "engine" and config.codec in PROFILE_CODECS:
            raise KvmnnError(f"codec {config.codec} is none of the engine's: expected behaviour 'sound'")
        if behaviour == "engine":
            self._runtime = EmulatedRuntime(
                config,
                layers=layers,
                kv_heads=kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                planner=planner,
                timing=timing,
                on_invalid=on_invalid,
            )
        elif behaviour == "sound":
            self._runtime = StrictRuntime(
                config, layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, planner=planner
            )
        else:
            raise KvmnnError(f"behaviour is {behaviour!r}: expected 'sound' or 'engine'")
        self.behaviour: Behaviour = behaviour
        self._geometry = layers, kv_heads, head_dim
        self._element_type = parse_dtype(dtype).numpy_dtype

    def __enter__(self) -> LosslessRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- one call of one layer -----------------------------------------------------------------------------------------

    def begin_call(self, layer: int, keys: Elements, values: Elements) -> KVPair:
        """Begin a call: evict by the layer's plan, append its new tokens, restore stored blocks.

        Parameters
        ----------
        layer
            Index of the layer.
        keys, values
            The new tokens, ``[kv_head, token, head_dim]``.

        Returns
        -------
        (keys, values)
            All tokens of the layer, ``[kv_head, token, head_dim]``, for reading only. They hold until the next call of
            the runtime: one array serves all layers.

        Raises
        ------
        RestoreError
            For stored rows that cannot be brought back. Nothing has changed then.
        KvmnnError
            For arrays of another shape, and for calls out of order.
        TypeError
            For arrays of another type.
        """
        if not self._is_valid_call(layer, keys, values):
            self._check_rows(layer, keys, values)
        pair = self._runtime.begin_call(layer, keys, values)
        assert pair is not None
        return pair

    def append_call(self, layer: int, keys: Elements, values: Elements) -> None:
        """Begin a call that needs no rows (behaviour "sound"): like `begin_call`, but restore nothing."""
        if not self._is_valid_call(layer, keys, values):
            self._check_rows(layer, keys, values)
        self._require_strict("append").begin_call(layer, keys, values, return_rows=False)

    def end_call(self, *, sums: Any = None, rows: Any = None) -> StrictCallResult | CallEvent:
        """End a call: score, plan, submit blocks that became cold, and collect finished ones.

        Parameters
        ----------
        sums, rows
            The attention of this call, as `H2OPlanner.end_call` takes it; needed for layers that evict.

        Returns
        -------
        SoundCall or CallEvent
            The event of the call; its class depends on the behaviour.
        """
        return self._runtime.end_call(sums=sums, rows=rows)

    def end_step(self) -> None:
        """End a step of all layers."""
        self._runtime.end_step()

    # -- requests ------------------------------------------------------------------------------------------------------

    def start_request(self, *, keep_cache: bool) -> None:
        """Start a request: the next step is a prefill, after the present tokens (`keep_cache`) or after none."""
        self._runtime.start_request(keep_cache=keep_cache)

    def reset(self) -> None:
        """Drop all tokens of all layers; the next step is a prefill."""
        self._runtime.reset()

    def erase(self, begin: int, end: int = 0) -> None:
        """Drop the tokens at text positions ``[begin, end)``; end 0 means all from `begin`.

        Sound: in every layer, at once; those after them keep their positions, unless the range reaches the end.
        Engine: at the next step, counted in the tokens of the last layer, and ignored where the range does not exist.

        Raises
        ------
        KvmnnError
            For positions below 0. Sound: for a range that does not exist.
        """
        self._runtime.erase(validate_int(begin, "begin", 0), validate_int(end, "end", 0))

    def evict(self, layer: int, kept_ranges: Sequence[ReservePair]) -> None:
        """Keep only the given tokens of a layer, now: an eviction by the caller (behaviour "sound").

        Parameters
        ----------
        layer
            Index of the layer.
        kept_ranges
            Pairs of index and count, ascending.

        Raises
        ------
        RestoreError
            For stored rows that cannot be brought back. Nothing has changed then.
        KvmnnError
            For tokens that are not there, and inside a step.
        """
        self._require_strict("evict").evict(layer, kept_ranges)

    # -- what there is -------------------------------------------------------------------------------------------------

    def get_live_rows(self, layer: int) -> KVPair:
        """Return K and V of a layer: restored copies ("sound"), or views of the rows with cleared ranges ("engine")."""
        return self._runtime.get_live_rows(self._check_layer(layer))

    def get_positions(self, layer: int) -> Positions:
        """Return the text positions of a layer's tokens, ``[token]``; the emulation counts on after a reset, as the
        engine does.
        """
        return self._runtime.get_positions(self._check_layer(layer))

    def read_layer(self, layer: int) -> LayerCache:
        """Return copies of K and V of a layer and the text positions of its tokens (behaviour "sound")."""
        return self._require_strict("read").read_layers([layer])[0]

    def read_layers(self, layers: Sequence[int]) -> list[LayerCache]:
        """Read several layers at once as `read_layer` does; the caller and the threads decode in parallel."""
        return self._require_strict("read_layers").read_layers(layers)

    def flush(self) -> None:
        """Encode everything cold and wait for it (behaviour "sound"), for example before a session is parked."""
        self._require_strict("flush").flush()

    def wait(self) -> None:
        """Wait for open encodings and store their results (behaviour "sound")."""
        self._require_strict("wait").wait()

    def close(self) -> None:
        """End the threads; the cache stays readable."""
        if isinstance(self._runtime, StrictRuntime):
            self._runtime.close()

    @property
    def resident_bytes(self) -> int:
        """Number of bytes of all current rows, frames and decoded copies (behaviour "sound")."""
        return self._require_strict("held_bytes").resident_bytes

    def collect_metrics(self) -> RuntimeMetrics:
        """Return the current figures."""
        return self._runtime.collect_metrics()

    def _check_layer(self, layer: int) -> int:
        return validate_int(layer, "layer", 0, self._geometry[0] - 1)

    def _require_strict(self, method: str) -> StrictRuntime:
        if not isinstance(self._runtime, StrictRuntime):
            raise KvmnnError(f"{method}: only with behaviour 'sound'")
        return self._runtime

    def _check_rows(self, layer: int, keys: Elements, values: Elements) -> None:
        """Raise an error for a layer that does not exist, and for new tokens of another shape or type."""
        _, heads, head_dim = self._geometry
        self._check_layer(layer)
        for name, array in (("keys", keys), ("values", values)):
            if not isinstance(array, np.ndarray):
                raise TypeError(f"{name} must be a numpy array, not {type(array).__name__}")
            if array.dtype != self._element_type:
                raise TypeError(f"{name} are {array.dtype}: expected {self._element_type}")
            if array.ndim != 3 or array.shape[::2] != (heads, head_dim) or array.shape != keys.shape:
                raise KvmnnError(
                    f"{name} have shape {list(array.shape)}: expected [{heads}, tokens, {head_dim}] for both"
                )

    def _is_valid_call(self, layer: int, keys: Elements, values: Elements) -> bool:
        """Check a call quickly; for an invalid one `_check_rows` finds the reason."""
        if type(keys) is not np.ndarray or type(values) is not np.ndarray or type(layer) is not int:
            return False
        layers, heads, head_dim = self._geometry
        if not (0 <= layer < layers and keys.dtype == values.dtype == self._element_type):
            return False
        shape = keys.shape
        return shape == values.shape and len(shape) == 3 and shape[0] == heads and shape[2] == head_dim
