"""`typing.NamedTuple` whose classes take half of the time to define, for all modules of the package.

The standard one compiles the annotation of each field, which no code of the package asks for: a command of fifty such
classes waits some hundredths of a second for it. Type checkers see the standard one.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

__all__ = ["NamedTuple"]

if TYPE_CHECKING:
    from typing import NamedTuple
else:

    class _NamedTupleMeta(type):
        def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
            annotations = namespace["__annotations__"]  # strings: all modules postpone their evaluation
            defaults = [namespace[field] for field in annotations if field in namespace]
            defined = collections.namedtuple(name, annotations, defaults=defaults, module=namespace["__module__"])
            for key, value in namespace.items():
                if key not in annotations and key != "__module__":
                    setattr(defined, key, value)
            return defined

    NamedTuple = type.__new__(_NamedTupleMeta, "NamedTuple", (), {"__doc__": "Base of classes of named tuples."})
