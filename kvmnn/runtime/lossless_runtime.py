"""One object for all layers of a running cache."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from ..arrays import LayerCache
from ..checks import whole
from ..dtypes import KVPair, Positions, Words, by_name
from ..errors import KvmnnError
from ..h2o import Planner
from ..packed.reserve import Pair
from .behaviours import Behaviour
from .config import RuntimeConfig
from .engine import CallEvent, EngineRuntime
from .engine.tasks import Timing
from .metrics import RuntimeMetrics
from .sound import SoundCall, SoundRuntime


class LosslessRuntime:
    """Keeps K and V of a running model, the cold tokens as frames.

    Every call of a layer has two halves, between which the caller computes attention; `sync` ends a step of all
    layers. The first step is a prefill::

        for layer in range(layers):
            keys, values = runtime.begin(layer, new_keys, new_values)
            ...  # attention over keys and values
            runtime.end(rows=attention)
        runtime.sync()

    Parameters
    ----------
    config
        Options.
    layers, kv_heads, head_dim
        Of the model.
    dtype
        ``"fp16"``, ``"bf16"`` or ``"fp32"``.
    behaviour
        ``"sound"``: nothing is ever lost; every cold token is stored once, and what attention reads equals a plain
        cache bit for bit. ``"engine"``: what the MNN fork does, its defects included (docs/runtime.md lists them).
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
        planner: Planner | None = None,
        timing: Timing = "eager",
        on_invalid: str = "raise",
    ) -> None:
        if not isinstance(config, RuntimeConfig):
            raise TypeError(f"config must be a RuntimeConfig, not {type(config).__name__}")
        self._runtime: SoundRuntime | EngineRuntime
        if behaviour == "engine":
            self._runtime = EngineRuntime(
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
            self._runtime = SoundRuntime(
                config, layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, planner=planner
            )
        else:
            raise KvmnnError(f"behaviour is {behaviour!r}: expected 'sound' or 'engine'")
        self.behaviour: Behaviour = behaviour
        self._geometry = layers, kv_heads, head_dim
        self._words = by_name(dtype).numpy

    def __enter__(self) -> LosslessRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- one call of one layer -----------------------------------------------------------------------------------------

    def begin(self, layer: int, keys: Words, values: Words) -> KVPair:
        """First half of a call: carry out the layer's eviction plan, append its new tokens, restore what is stored.

        Parameters
        ----------
        layer
            Which, from 0.
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
        if not self._fits(layer, keys, values):
            self._check(layer, keys, values)
        found = self._runtime.begin(layer, keys, values)
        assert found is not None
        return found

    def append(self, layer: int, keys: Words, values: Words) -> None:
        """As `begin`, for a caller that needs no rows now (behaviour "sound"): nothing is restored."""
        if not self._fits(layer, keys, values):
            self._check(layer, keys, values)
        self._sound("append").begin(layer, keys, values, read=False)

    def end(self, *, sums: Any = None, rows: Any = None) -> SoundCall | CallEvent:
        """Second half of a call: score, plan, hand in the blocks that became cold, take in those that are done.

        Parameters
        ----------
        sums, rows
            The attention of this call, as `Planner.end` takes it; needed for layers that evict.

        Returns
        -------
        SoundCall or CallEvent
            What the call did, by the behaviour.
        """
        return self._runtime.end(sums=sums, rows=rows)

    def sync(self) -> None:
        """End a step of all layers."""
        self._runtime.sync()

    # -- requests ------------------------------------------------------------------------------------------------------

    def start_request(self, *, keep: bool) -> None:
        """A new request: the next step is a prefill, over the tokens there are (`keep`) or over none."""
        self._runtime.start_request(keep=keep)

    def reset(self) -> None:
        """Drop all tokens of all layers; the next step is a prefill."""
        self._runtime.reset()

    def erase(self, begin: int, end: int = 0) -> None:
        """Drop the tokens that stand at positions ``[begin, end)`` of the text; end 0 means all from `begin`.

        Sound: in every layer, at once; those after them keep their positions, unless the range reaches the end.
        Engine: at the next step, counted in the tokens of the last layer, and ignored where the range does not exist.

        Raises
        ------
        KvmnnError
            For positions below 0. Sound: for a range that does not exist.
        """
        self._runtime.erase(whole(begin, "begin", 0), whole(end, "end", 0))

    def evict(self, layer: int, kept: Sequence[Pair]) -> None:
        """Keep only these of a layer's tokens, now: an eviction that the caller decided on (behaviour "sound").

        Parameters
        ----------
        layer
            Which, from 0.
        kept
            Pairs of index and count, ascending.

        Raises
        ------
        RestoreError
            For stored rows that cannot be brought back. Nothing has changed then.
        KvmnnError
            For tokens that are not there, and inside a step.
        """
        self._sound("evict").evict(layer, kept)

    # -- what there is -------------------------------------------------------------------------------------------------

    def live(self, layer: int) -> KVPair:
        """K and V of a layer. Sound: restored copies. Engine: views of the rows as they are, zeros included."""
        return self._runtime.live(self._layer(layer))

    def positions(self, layer: int) -> Positions:
        """Where the tokens of a layer stand in the text, ``[token]``; the engine takes no account of resets."""
        return self._runtime.positions(self._layer(layer))

    def read(self, layer: int) -> LayerCache:
        """Copies of K and V of a layer and where its tokens stand (behaviour "sound")."""
        return self._sound("read").read([layer])[0]

    def read_layers(self, layers: Sequence[int]) -> list[LayerCache]:
        """As `read`, of several layers at once, which the caller and the threads decode side by side."""
        return self._sound("read_layers").read(layers)

    def flush(self) -> None:
        """Encode all that is cold and wait for it (behaviour "sound"), as before a session is parked."""
        self._sound("flush").flush()

    def wait(self) -> None:
        """Wait for open encodings and take them in (behaviour "sound")."""
        self._sound("wait").wait()

    def close(self) -> None:
        """End the threads; the cache stays readable."""
        if isinstance(self._runtime, SoundRuntime):
            self._runtime.close()

    @property
    def held_bytes(self) -> int:
        """Of all rows, frames and decoded copies that are there now (behaviour "sound")."""
        return self._sound("held_bytes").held_bytes

    def metrics(self) -> RuntimeMetrics:
        """Figures so far."""
        return self._runtime.metrics()

    def _layer(self, layer: int) -> int:
        return whole(layer, "layer", 0, self._geometry[0] - 1)

    def _sound(self, what: str) -> SoundRuntime:
        if not isinstance(self._runtime, SoundRuntime):
            raise KvmnnError(f"{what}: only with behaviour 'sound'")
        return self._runtime

    def _check(self, layer: int, keys: Words, values: Words) -> None:
        """Refuse a layer that there is not, and new tokens of another shape or type."""
        _, heads, head_dim = self._geometry
        self._layer(layer)
        for name, array in (("keys", keys), ("values", values)):
            if not isinstance(array, np.ndarray):
                raise TypeError(f"{name} must be a numpy array, not {type(array).__name__}")
            if array.dtype != self._words:
                raise TypeError(f"{name} are {array.dtype}: expected {self._words}")
            if array.ndim != 3 or array.shape[::2] != (heads, head_dim) or array.shape != keys.shape:
                raise KvmnnError(
                    f"{name} have shape {list(array.shape)}: expected [{heads}, tokens, {head_dim}] for both"
                )

    def _fits(self, layer: int, keys: Words, values: Words) -> bool:
        """Whether a call is as it should be, found with little work; where it is not, `_check` finds out why."""
        if type(keys) is not np.ndarray or type(values) is not np.ndarray or type(layer) is not int:
            return False
        layers, heads, head_dim = self._geometry
        if not (0 <= layer < layers and keys.dtype == values.dtype == self._words):
            return False
        shape = keys.shape
        return shape == values.shape and len(shape) == 3 and shape[0] == heads and shape[2] == head_dim
