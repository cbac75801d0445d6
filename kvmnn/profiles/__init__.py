"""Profiles of models: what their K and V look like, made once for a model (docs/format-profile.md)."""

from .geometry import LayerGeometry, build_rows
from .profile import Profile, ProfileInfo, TextOrigin
from .statistics import Statistics

__all__ = ["LayerGeometry", "Profile", "ProfileInfo", "Statistics", "TextOrigin", "build_rows"]
