"""What counts as a step between two plans: a call of any layer, or a token of the same layer."""

from __future__ import annotations

from dataclasses import dataclass

from .layer_state import PlannerLayerState

CADENCES = ("layer-calls", "tokens")


@dataclass
class LayerCallCounter:
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

    def get_current_layer(self, num_layers: int) -> int:
        """The layer whose turn it is."""
        return self.cursor % num_layers

    def record_call(self, layers: list[PlannerLayerState], layer: int, decode: bool) -> int:
        """Count a call; returns the layer that it was."""
        if not decode:
            return 0
        self.cursor += 1
        self.global_step += 1
        self.token_step += layer == 0
        return layer

    def is_due(self, state: PlannerLayerState, interval: int) -> bool:
        """Whether enough calls have gone by."""
        return self.global_step - self.last_trigger >= interval

    def record_trigger(self, state: PlannerLayerState) -> None:
        """Note a trigger."""
        self.last_trigger = self.global_step

    def reset(self) -> None:
        """Start anew."""
        self.cursor = self.global_step = self.token_step = self.last_trigger = 0


@dataclass
class TokenCounter:
    """Decode steps of each layer by itself, kept in its `PlannerLayerState`."""

    def record_call(self, layers: list[PlannerLayerState], layer: int, decode: bool) -> int:
        """Count a call; returns the layer that it was."""
        layers[layer].num_steps += decode
        return layer

    def is_due(self, state: PlannerLayerState, interval: int) -> bool:
        """Whether the layer has made enough steps."""
        return state.num_steps - state.last_trigger_step >= interval

    def record_trigger(self, state: PlannerLayerState) -> None:
        """Note a trigger."""
        state.last_trigger_step = state.num_steps

    def reset(self) -> None:
        """Nothing: the clocks go with the layers' state."""
