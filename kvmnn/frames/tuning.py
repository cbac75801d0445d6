"""Every threshold of the frame codec, with its reason.

Other modules read a threshold as ``tuning.NAME`` when they need it, so that a test can replace it. None of them affects
what a frame can be decoded by: they trade size for time.
"""

from __future__ import annotations

# -- threads ----------------------------------------------------------------------------------------------------------

MIN_PARALLEL_BYTES = 1 << 20
"""Frames of fewer raw bytes are encoded and decoded on one thread: starting the others takes longer than they save."""

# -- a second attempt with effort "exact" -----------------------------------------------------------------------------

EXACT_RETRY_MIN_RATIO = 10
"""Arrays with at least this ratio are also encoded with "exact": it is cheap there, and which predictor helps libzstd
with many repeats cannot be predicted from samples (172 of 960 such arrays were more than 5 % larger without this)."""

EXACT_RETRY_MAX_ZERO_FRACTION = 0.5
"""Arrays with a larger fraction of zeros are not encoded twice for their ratio: a mostly empty cache reaches the ratio
by its zeros, which every effort encodes equally well."""

SMALL_INPUT_BYTES = 2 << 10
"""Arrays of at most this size are also encoded with "exact": headers are a large part of such a frame, and the two
efforts differ in their headers."""

# -- effort "balanced" ------------------------------------------------------------------------------------------------

SEGMENT_LANE_BYTES = 4 << 20
"""Bytes of a lane in one segment of effort "balanced": twice as far as libzstd looks back at level 3, so that a cache
loses nothing at the start of a segment, and small enough that a segment stays in the processor's cache."""

PREDICTOR_TRIAL_ELEMENTS = 1 << 18
"""Elements from the middle of an array on which predictors are compared, if samples favor another predictor than raw:
a trial sees repeats, which the entropy of samples does not show."""

REPETITIVE_MIN_RATIO = 4
"""A lane with at least this ratio in the predictor trial is encoded with all its predictors: it is full of repeats, of
which a part shows another order of predictors than the whole, and libzstd is fast on them."""

# -- effort "fast" ----------------------------------------------------------------------------------------------------

FAST_SEGMENT_BYTES = 4 << 20
"""Raw bytes of one segment of effort "fast": segments are encoded on different threads, and the match finder sees
repeats only within a segment."""

NEGLIGIBLE_LANE_DIVISOR = 32
"""A lane with at most this part of all payload bytes is not tried with other predictors: the frame cannot become much
smaller by it."""

# -- long segments for repeats over long distances --------------------------------------------------------------------

SEGMENT_GROWTH = 8
"""Factor by which segments become longer if the data repeat over distances that a segment does not see."""

SEGMENT_GROWTH_MIN_RATIO = {2: 1.6, 4: 1.5}
"""Minimum ratio, by bytes per element, from which segments that repeat each other are encoded again as longer ones: a
second pass over less compressible data costs more time than its repeats save."""

MAX_SEGMENT_GROWTH = 64
"""Factor by which segments become longer in a third pass, if the second one reached `MAX_SEGMENT_GROWTH_MIN_RATIO`."""

MAX_SEGMENT_GROWTH_MIN_RATIO = 3
"""Minimum ratio from which segments that repeat each other are encoded again as the longest ones."""

SMALL_SEGMENT_BYTES = 16 << 10
"""Segments that become fewer payload bytes than this are encoded again as longer ones: what a segment loses at its
start, where it has nothing to refer to, is then a large part of its payload."""

SAMPLE_WINDOW_ELEMENTS = 32
"""Elements of one window of the sample that finds repeats over long distances. One in eight is used, by its content."""

SAMPLE_ELEMENTS_PER_SQRT = 40
"""Elements in all windows of this sample, as a multiple of the square root of the number of elements: if every element
occurs twice, about 70 duplicates are expected. The sample takes a hundredth of the time that 64 MiB take to encode."""

MIN_DUPLICATE_HASHES = 8
"""Duplicates in the sample that count as repeats: 6 % of all elements, which cost as much if they are missed."""

MIN_TRIAL_DUPLICATE_HASHES = 3
"""Duplicates in the sample from which longer segments are tried: a trial needs less evidence than a decision."""

MATCH_POSITION_STRIDE_ELEMENTS = 8
"""Elements: the match finder of effort "fast" looks at one position in eight, so it sees repeats only at multiples of
this distance. Data that repeat at other distances are left to libzstd (2 to 39 times as large otherwise)."""

ZERO_WINDOW_ELEMENTS = 64
"""Elements of one window of the sample that estimates the fraction of zeros: unused parts of a cache are contiguous."""

NUM_ZERO_WINDOWS = 64
"""Windows of this sample: an estimate in steps of 1.6 % is enough for `EXACT_RETRY_MAX_ZERO_FRACTION`."""

# -- run-length encoding ----------------------------------------------------------------------------------------------

RLE_TRIAL_MIN_RATIO = 4
"""A lane with at least this ratio is also tried as RLE: it may be full of runs, which no zstd frame stores in two bytes
each. Lanes of a cache that is in use never reach it."""

# -- effort "max" -----------------------------------------------------------------------------------------------------

HIGH_LEVEL_TRIAL_MAX_RATIO = 1.05
"""Predictors whose best size at a low level exceeds that of the best predictor by more than this factor are not tried
at high levels, which change their order only among close ones."""

MAX_LEVEL_22_LANE_BYTES = 16 << 20
"""Longer lanes are not tried at level 22, which takes more than a gigabyte of memory for them."""

HIGH_LEVEL_PROGRESS_WEIGHTS = {9: 5, 13: 25, 16: 80, 19: 130, 22: 130}
"""The high levels that are tried, and the progress that each counts for: about the tenths of a second that a lane of
8 MiB takes at that level."""

LOW_LEVELS_PROGRESS_FRACTION = 1 / 32
"""Fraction of the progress that all candidates at low levels count for, if high levels follow."""
