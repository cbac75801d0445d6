"""All thresholds of the dense codec's Python code with their reasons; the compiled ones are in `dense.h`.

Other modules read a threshold as ``tuning.NAME`` when they need it, so that a test can replace it. None of them affects
decoding: they trade size for time.
"""

from __future__ import annotations

# -- references -------------------------------------------------------------------------------------------------------

SUFFIX_TOKENS = 8
"""Preceding tokens that are compared to find the earlier row most like a row: K and V depend on what precedes a token,
and the nearest tokens matter most."""

# -- streams with and without a rotation ------------------------------------------------------------------------------

ROPE_TRIAL_MAX_BYTES = 128 << 10
"""Arrays of at most this size are encoded with and without their rotation: its parameters are up to 3 % of such a
stream."""

CLEAR_ROTATION_GAIN = 1.05
"""Larger arrays are encoded twice only if the rotation predicts fewer than this many times the elements. Below it, K of
three models became up to 0.5 % larger with the rotation; above it, never."""

# -- the search for a rotation ----------------------------------------------------------------------------------------

ROTATED_FRACTIONS = (1.0, 0.75, 0.5, 0.4, 0.25)
"""Fractions of a head that models rotate: all (Llama, Qwen), three quarters (Phi-4-mini), half (GLM), 0.4 (Phi-2), a
quarter (GPT-NeoX)."""

SHAPE_THETAS = (1e4, 1e5, 1e6, 8e6)
"""Thetas with which the rotated fraction and the pairing are determined: the right ones show even with a theta that is
off by a few times."""

THETAS = (1e3, 1e4, 5e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 8e6, 1e7)
"""Thetas of models in use, tried for the rotated fraction and the pairing that fit best."""

LLAMA3_THETA = 5e5
"""The theta of the models with `LLAMA3_FACTORS`."""

LLAMA3_FACTORS = (8.0, 32.0)
"""Factors of the llama3 scaling that are tried: those of Llama 3.1 and 3.2."""

SAMPLE_ROW_ELEMENTS = 128
"""Elements of a sampled row at most, but at least one head: heads of a layer are rotated alike."""

SHORT_RUN_ROWS, RUN_ROWS, SPAN_ROWS = 64, 128, 1024
"""Rows of a sample: two runs, at the start and the end of a span of at most `SPAN_ROWS`, because rows far apart show
which theta is right. Short runs suffice for a first choice."""

NUM_FINALISTS = 3
"""Candidates that are rated on the whole span if the runs do not decide between them."""

MAX_SEARCHES = 2
"""Arrays of one call that are searched for a rotation before the others are taken as not rotated: V comes next to K."""

ABANDON_RATIO = 0.95
"""The search ends if the best first choice predicts fewer than this many times the elements that no rotation does."""

MIN_GAIN, MIN_SIGMAS = 1.02, 4.0
"""A rotation is better if it predicts so many times as many elements, and more by so many standard deviations: counts
vary as their square root."""

# -- descriptions of frequencies --------------------------------------------------------------------------------------

MAX_DESCRIBED_DIMS = 1024
"""Frequencies of more dims are not compared with those of a theta to describe them: no model rotates as many."""

MAX_THETA_ERROR = 1e-3
"""Relative error within which frequencies are described by a theta: exporters write them with few digits."""
