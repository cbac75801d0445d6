"""Profiles of models: what their K and V look like, made once for a model (docs/format-profile.md)."""

from typing import TYPE_CHECKING

from .._util.packages import make_lazy_getattr

if TYPE_CHECKING:
    from .geometry import LayerGeometry, build_rows
    from .inspection import (
        ProfileInspection,
        ProfileVerifyResult,
        TableSize,
        inspect_profile,
        measure_tables,
        verify_profile,
    )
    from .profile import Profile, ProfileInfo, TextOrigin, describe_few_tokens, hash_profile
    from .statistics import Statistics
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        {
            "geometry": "LayerGeometry build_rows",
            "inspection": (
                "ProfileInspection ProfileVerifyResult TableSize inspect_profile measure_tables verify_profile"
            ),
            "profile": "Profile ProfileInfo TextOrigin describe_few_tokens hash_profile",
            "statistics": "Statistics",
        },
    )

__all__ = [
    "LayerGeometry",
    "Profile",
    "ProfileInfo",
    "ProfileInspection",
    "ProfileVerifyResult",
    "Statistics",
    "TableSize",
    "TextOrigin",
    "build_rows",
    "describe_few_tokens",
    "hash_profile",
    "inspect_profile",
    "measure_tables",
    "verify_profile",
]
