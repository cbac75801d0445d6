"""Make profiles of models: read texts, collect statistics, and measure what errors in K and V cost."""

from .maker import ProfileMakeResult, ProfileOptions, make_profile, make_profile_from_caches

__all__ = ["ProfileMakeResult", "ProfileOptions", "make_profile", "make_profile_from_caches"]
