"""Make profiles of models: read texts, collect statistics, and measure what errors in K and V cost."""

from .adaptation import ADAPTATION_PASSES, AdaptedEncoding, encode_adapted, make_adapted_codec
from .maker import ProfileMakeResult, ProfileOptions, make_profile, make_profile_from_caches

__all__ = [
    "ADAPTATION_PASSES",
    "AdaptedEncoding",
    "ProfileMakeResult",
    "ProfileOptions",
    "encode_adapted",
    "make_adapted_codec",
    "make_profile",
    "make_profile_from_caches",
]
