"""The two behaviours of a runtime."""

from __future__ import annotations

from typing import Literal

Behaviour = Literal["sound", "engine"]
