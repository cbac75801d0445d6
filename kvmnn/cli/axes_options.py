"""Options that say how plain arrays lie."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from . import help
from .printing import UsageError

if TYPE_CHECKING:
    from ..arrays.axes import AxisSpec

_AXES_DESCRIPTION = """\
What plain arrays, raw pages and batches do not say themselves. LETTERS has one for each axis, in the order
in which they lie: l layer, b batch, h kv_head, t token, d dimension, 2 K and V; without h they are the one tensor of
latent attention (MLA), which becomes K. Arrays become layer_<n>.key and .value,
[kv_head, token, dimension]; which is K or V of which layer is in their names where no axis says it."""

AXES_OPTION_NAMES = ("kv_axes", "kv_shape", "kv_batch", "kv_pages", "kv_half")


def add_axes(parser: Any) -> None:
    """``--axes``, ``--shape``, ``--batch``, ``--part`` and ``--pages``."""
    group = parser.add_argument_group("axes of arrays", _AXES_DESCRIPTION)
    group.add_argument(
        "--axes", dest="kv_axes", metavar="LETTERS", help="how arrays lie, e.g. lhtd, thd, 2lthd; td: MLA"
    )
    group.add_argument(
        "--shape",
        dest="kv_shape",
        type=parse_shape,
        metavar="N,N,...",
        help="take arrays as this shape; -1: what is left",
    )
    group.add_argument("--batch", dest="kv_batch", type=parse_index, metavar="N", help="which text of a batch, from 0")
    group.add_argument(
        "--part",
        dest="kv_half",
        choices=("decoder", "encoder"),
        help="which K and V of an encoder-decoder cache: those of the decoder's tokens or of the encoder's output",
    )
    group.add_argument(
        "--pages",
        dest="kv_pages",
        action="store_true",
        default=None,
        help="the inputs are pages of one text, in this order",
    )
    help.fold_group(parser, group, "--help-axes")


def build_axis_spec(arguments: argparse.Namespace, *, is_one_of_several: bool = False) -> AxisSpec:
    """What the arguments say."""
    from ..arrays.axes import AxisSpec

    axes, shape, batch, pages, half = (getattr(arguments, name, None) for name in AXES_OPTION_NAMES)
    if pages and not axes:
        raise UsageError("--pages: says that tokens go on from one input to the next, and needs --axes")
    if axes and getattr(arguments, "token_major", False):
        raise UsageError("--token-major and --axes both say how arrays lie: leave --token-major out")
    return AxisSpec(axes, shape, batch, skip_inapplicable=is_one_of_several, join_pages=bool(pages), half=half)


def parse_shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"(-1|[0-9]{1,15})(,(-1|[0-9]{1,15}))*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: expected lengths such as 2,32,-1,8,128")
    return tuple(map(int, text.split(",")))


def parse_index(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)
