"""What counts as a step between two plans: a call of any layer, or a token of the same layer."""

from __future__ import annotations

from dataclasses import dataclass

from .layer_state import LayerState

CADENCES = ("layer-calls", "tokens")


@dataclass
class LayerCallClock:
    """The engine's clocks, shared by all layers.

    Attributes
    ----------
    cursor
        Decode calls of any layer; the layer is this number modulo their count.
    global_step
        The same number, for the interval.
    token_step
        Decode calls of layer 0.
    last_trigger
        `global_step` of the last trigger of any layer.
    """

    cursor: int = 0
    global_step: int = 0
    token_step: int = 0
    last_trigger: int = 0

    def layer(self, count: int) -> int:
        """The layer whose turn it is."""
        return self.cursor % count

    def tick(self, layers: list[LayerState], layer: int, decode: bool) -> int:
        """Count a call; returns the layer that it was."""
        if not decode:
            return 0
        self.cursor += 1
        self.global_step += 1
        self.token_step += layer == 0
        return layer

    def due(self, state: LayerState, interval: int) -> bool:
        """Whether enough calls have gone by."""
        return self.global_step - self.last_trigger >= interval

    def triggered(self, state: LayerState) -> None:
        """Note a trigger."""
        self.last_trigger = self.global_step

    def reset(self) -> None:
        """Start anew."""
        self.cursor = self.global_step = self.token_step = self.last_trigger = 0


@dataclass
class TokenClock:
    """Decode steps of each layer by itself, kept in its `LayerState`."""

    def tick(self, layers: list[LayerState], layer: int, decode: bool) -> int:
        """Count a call; returns the layer that it was."""
        layers[layer].steps += decode
        return layer

    def due(self, state: LayerState, interval: int) -> bool:
        """Whether the layer has made enough steps."""
        return state.steps - state.last_trigger >= interval

    def triggered(self, state: LayerState) -> None:
        """Note a trigger."""
        state.last_trigger = state.steps

    def reset(self) -> None:
        """Nothing: the clocks go with the layers' state."""
