"""What was taken from one input."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .named_array import NamedArray

if TYPE_CHECKING:
    from ..packed.cache_info import CacheInfo


@dataclass
class Source:
    """What was taken from one input.

    Parameters
    ----------
    arrays
        In the input's order.
    metadata
        What else the input carried.
    skipped
        One line for each array that was left out.
    notes
        One line for each thing that was inferred rather than read or said.
    cache
        What packed files hold, where the input is such files.
    token_major
        Whether the arrays are ``[token, kv_head, head_dim]``.
    lossy
        Whether the words are not the input's own but made from what an engine had rounded.
    """

    arrays: list[NamedArray]
    metadata: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cache: CacheInfo | None = None
    token_major: bool = False
    lossy: bool = False
