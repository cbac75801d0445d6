"""What the tokens of a text draw of the attention of later ones, summed while a model reads it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class AttentionSums:
    """Sums of attention probabilities over the steps of one text.

    The first step may follow loaded tokens; attention between these is not counted.
    """

    def __init__(self, layers: int, kv_heads: int) -> None:
        self._sums = np.zeros((layers, kv_heads, 0))
        self._counts = np.zeros(0, np.int64)

    def add(self, attentions: Sequence[npt.NDArray[np.floating]], end: int) -> None:
        """Add a step that ends with token `end` - 1.

        Parameters
        ----------
        attentions
            Probabilities by layer, ``[query_head, token, key]``, whose last key is the last token; keys of a window
            are the last ones.
        end
            Tokens of the text up to the end of the step.
        """
        layers, kv_heads, num_before = self._sums.shape
        num_new = attentions[0].shape[1]
        self._sums = np.concatenate([self._sums, np.zeros((layers, kv_heads, end - num_before))], axis=2)
        self._counts = np.append(self._counts, np.zeros(end - num_before, np.int64))
        rows = np.arange(num_new)
        self._counts[: end - num_new] += num_new
        self._counts[end - num_new :] += rows[::-1]
        for sums, weights in zip(self._sums, attentions, strict=True):
            first = end - weights.shape[2]
            own = np.zeros(weights.shape[::2])
            own[:, end - num_new - first :] = weights[:, rows, rows + end - num_new - first]
            drawn = weights.sum(axis=1, dtype=np.float64) - own
            sums[:, first:] += drawn.reshape(kv_heads, -1, drawn.shape[1]).mean(axis=1)

    def compute_means(self) -> npt.NDArray[np.float32]:
        """Return what later tokens gave each token on average, ``[layer, kv_head, token]``; the last has 0."""
        return np.maximum(self._sums / np.maximum(self._counts, 1), 0).astype(np.float32)
