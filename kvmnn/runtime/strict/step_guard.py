"""Check the order of calls: every layer once in a step, `begin` before `end`, and after a failure only a reset."""

from __future__ import annotations

from ..._util.named_tuple import NamedTuple
from ..._util.text import pluralize
from ..._util.validation import validate_int
from ...errors import KvmnnError


class StrictCallResult(NamedTuple):
    """Result of one call of one layer; a NamedTuple, because a frozen dataclass would take longer to create than the
    call.

    Attributes
    ----------
    layer
        Number of the layer.
    tokens
        Tokens in the layer, the new ones included.
    evicted
        Tokens that were evicted before the new ones were added.
    planned
        Tokens that the planner means to evict at the layer's next call.
    submitted, finished
        Encoding jobs that this call submitted, and results of any layer that it collected.
    waiting
        Blocks of this layer that did not fit into the queue; the next call of the layer submits them again.
    """

    layer: int
    tokens: int
    evicted: int
    planned: int
    submitted: int
    finished: int
    waiting: int

    def to_dict(self) -> dict[str, int]:
        """Return the figures by name."""
        return self._asdict()  # no record, as it is a tuple

    def __str__(self) -> str:
        return (
            f"layer {self.layer}: {pluralize(self.tokens, 'token')}, {self.evicted:,} evicted, "
            f"{pluralize(self.submitted, 'block')} handed in, {self.waiting:,} waiting"
        )


class StepGuard:
    """Checks the sequence of calls."""

    def __init__(self, layers: int) -> None:
        self.is_decoding = False
        """False while a prompt is processed."""
        self.position = 0
        """True position of the next token."""
        self.token_step = 0
        """Decode steps so far, with the current one."""
        self._layers = layers
        self._called_layers: set[int] = set()
        self._num_new: int
        self._open_call: tuple[int, int] | None = None
        self._failure: str | None = None

    def check_healthy(self) -> None:
        """Raise an error if an earlier call failed half-way."""
        if self._failure is not None:
            raise KvmnnError(f"a call failed half-way ({self._failure}): expected reset()")

    def check_between_steps(self, operation: str) -> None:
        """Raise an error for `operation` inside a step."""
        self.check_healthy()
        if self._open_call is not None or self._called_layers:
            raise KvmnnError(f"{operation}: expected between two steps, after end_step()")

    def check_begin(self, layer: int, num_new: int) -> None:
        """Raise an error for a call out of order."""
        if self._failure is not None or self._open_call is not None or not 0 <= layer < self._layers:
            self._raise_begin_error(layer, num_new)
        if self._called_layers and (num_new != self._num_new or layer in self._called_layers):
            self._raise_begin_error(layer, num_new)

    def _raise_begin_error(self, layer: int, num_new: int) -> None:
        self.check_healthy()
        validate_int(layer, "layer", 0, self._layers - 1)
        if self._open_call is not None:
            raise KvmnnError(f"begin: the call of layer {self._open_call[0]} was not ended")
        if layer in self._called_layers:
            raise KvmnnError(f"layer {layer} was called twice in a step: expected end_step() between")
        raise KvmnnError(f"layer {layer} gets {num_new} tokens, the layers before it {self._num_new}")

    def record_begin(self, layer: int, num_new: int, num_evicted: int) -> None:
        """Record the beginning of a call."""
        if not self._called_layers and self.is_decoding:
            self.token_step += 1
        self._called_layers.add(layer)
        self._num_new = num_new
        self._open_call = layer, num_evicted

    def check_end(self) -> tuple[int, int]:
        """Return the layer of the open call, and the number of tokens that it lost."""
        if self._failure is not None or self._open_call is None:
            self.check_healthy()
            raise KvmnnError("end: no call was begun")
        return self._open_call

    def record_end(self) -> None:
        """Record the end of a call."""
        self._open_call = None

    def end_step(self) -> None:
        """End the step."""
        if self._failure is not None or self._open_call is not None or len(self._called_layers) < self._layers:
            self._raise_step_error()
        self._called_layers.clear()
        self.position += self._num_new
        self.is_decoding = True

    def _raise_step_error(self) -> None:
        self.check_healthy()
        if self._open_call is not None:
            raise KvmnnError(f"end_step: the call of layer {self._open_call[0]} was not ended")
        missing_layers = sorted(set(range(self._layers)) - self._called_layers)
        raise KvmnnError(f"end_step: layers {', '.join(map(str, missing_layers))} were not called in this step")

    def poison(self, error: BaseException) -> None:
        """Record a failure that left a layer half done: only a reset helps then."""
        self._failure = f"{type(error).__name__}: {error}"
