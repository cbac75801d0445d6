"""Array types of the linear predictor's inputs, shared by `model` and `lower_rows`."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Regressors: TypeAlias = npt.NDArray[np.int16]
"""``[token, place]``: standardised rows, 256 to a deviation."""
BlockRows: TypeAlias = tuple[Regressors, npt.NDArray[np.int32] | None]
"""Regressors, and which row each token has: -1 for none; None for each its own."""
