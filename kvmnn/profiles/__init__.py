"""Profiles of models: what their K and V look like, made once for a model (docs/format-profile.md)."""

from .geometry import LayerGeometry, build_rows
from .inspection import ProfileInspection, ProfileVerifyResult, inspect_profile, verify_profile
from .profile import Profile, ProfileInfo, TextOrigin
from .statistics import Statistics

__all__ = [
    "LayerGeometry",
    "Profile",
    "ProfileInfo",
    "ProfileInspection",
    "ProfileVerifyResult",
    "Statistics",
    "TextOrigin",
    "build_rows",
    "inspect_profile",
    "verify_profile",
]
