"""The order of calls: every layer once in a step, `begin` before `end`, nothing after a failure but a reset."""

from __future__ import annotations

from ...checks import whole
from ...errors import KvmnnError


class Steps:
    """Where the caller stands.

    Attributes
    ----------
    decode
        False while a prompt is processed.
    position
        True position of the next token.
    token_step
        Decode steps so far, the current one included.
    """

    def __init__(self, layers: int) -> None:
        self.decode = False
        self.position = 0
        self.token_step = 0
        self._layers = layers
        self._called: set[int] = set()
        self._add: int
        self._open: tuple[int, int] | None = None
        self._failure: str | None = None

    def check_sound(self) -> None:
        """Refuse to go on after a call that failed half-way."""
        if self._failure is not None:
            raise KvmnnError(f"a call failed half-way ({self._failure}): expected reset()")

    def check_between(self, what: str) -> None:
        """Refuse `what` inside a step."""
        self.check_sound()
        if self._open is not None or self._called:
            raise KvmnnError(f"{what}: expected between two steps, after sync()")

    def check_begin(self, layer: int, add: int) -> None:
        """Refuse a call out of order."""
        if self._failure is not None or self._open is not None or not 0 <= layer < self._layers:
            self._refuse(layer, add)
        if self._called and (add != self._add or layer in self._called):
            self._refuse(layer, add)

    def _refuse(self, layer: int, add: int) -> None:
        self.check_sound()
        whole(layer, "layer", 0, self._layers - 1)
        if self._open is not None:
            raise KvmnnError(f"begin: the call of layer {self._open[0]} was not ended")
        if layer in self._called:
            raise KvmnnError(f"layer {layer} was called twice in a step: expected sync() between")
        raise KvmnnError(f"layer {layer} gets {add} tokens, the layers before it {self._add}")

    def begun(self, layer: int, add: int, evicted: int) -> None:
        """Note a call."""
        if not self._called and self.decode:
            self.token_step += 1
        self._called.add(layer)
        self._add = add
        self._open = layer, evicted

    def check_end(self) -> tuple[int, int]:
        """The layer whose call is open, and the tokens that it lost."""
        if self._failure is not None or self._open is None:
            self.check_sound()
            raise KvmnnError("end: no call was begun")
        return self._open

    def ended(self) -> None:
        """Note the end of a call."""
        self._open = None

    def sync(self) -> None:
        """End the step."""
        if self._failure is not None or self._open is not None or len(self._called) < self._layers:
            self._refuse_sync()
        self._called.clear()
        self.position += self._add
        self.decode = True

    def _refuse_sync(self) -> None:
        self.check_sound()
        if self._open is not None:
            raise KvmnnError(f"sync: the call of layer {self._open[0]} was not ended")
        missing = sorted(set(range(self._layers)) - self._called)
        raise KvmnnError(f"sync: layers {', '.join(map(str, missing))} were not called in this step")

    def broken(self, error: BaseException) -> None:
        """Note what left a layer half done: only a reset helps then."""
        self._failure = f"{type(error).__name__}: {error}"
