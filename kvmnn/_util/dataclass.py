"""Dataclasses that take a tenth of the time to define, for all modules of the package.

The standard decorator compiles up to seven functions of text for each class: half a millisecond, for which a command of
ninety such classes waits before it begins. Here one is compiled, ``__init__``, when it is first needed, as most classes
of a command get no instance; the others are closures. Type checkers see the standard decorator.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from .patterns import declare_pattern

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(
        cls: type | None = None, /, *, frozen: bool = False, eq: bool = True, kw_only: bool = False
    ) -> type | Callable[[type], type]:
        """Do what `dataclasses.dataclass` does, for frozen classes without inherited fields faster.

        Parameters
        ----------
        cls, frozen, eq, kw_only
            As there; its other options are not offered.
        """

        def decorate(cls: type) -> type:
            if not frozen or _needs_standard(cls):
                return dataclasses.dataclass(cls, frozen=frozen, eq=eq, kw_only=kw_only)
            return _define_frozen(cls, eq, kw_only)

        return decorate if cls is None else decorate(cls)


_MARKED = declare_pattern("ClassVar|KW_ONLY|InitVar")
_FACTORY = type("_Factory", (), {"__repr__": lambda self: "<factory>"})()
"""Default value in signatures of arguments whose values a factory makes."""


def _needs_standard(cls: type) -> bool:
    return (
        cls.__doc__ is None
        or any(hasattr(base, "__dataclass_fields__") for base in cls.__mro__[1:])
        or not {"__setattr__", "__delattr__", "__init__", "__slots__"}.isdisjoint(vars(cls))
        or any("InitVar" in str(kind) for kind in vars(cls).get("__annotations__", {}).values())
    )


def _define_frozen(cls: Any, eq: bool, kw_only: bool) -> type:
    own_hash = vars(cls).get("__hash__", dataclasses.MISSING)
    has_own_hash = own_hash is not dataclasses.MISSING and not (own_hash is None and "__eq__" in vars(cls))
    annotations = vars(cls).get("__annotations__", {})
    # The decorator searches each annotation that is a string for three names: those without them are objects meanwhile.
    cls.__annotations__ = {name: kind if _MARKED.search(str(kind)) else object for name, kind in annotations.items()}
    cls = dataclasses.dataclass(cls, init=False, repr=False, eq=False, kw_only=kw_only)
    cls.__annotations__ = annotations
    cls.__dataclass_params__.init = cls.__dataclass_params__.repr = cls.__dataclass_params__.frozen = True
    cls.__dataclass_params__.eq = eq
    fields = dataclasses.fields(cls)
    for field in fields:
        field.type = annotations[field.name]
    cls.__init__ = _LazyInit(cls, fields)
    if "__repr__" not in vars(cls):
        cls.__repr__ = _make_repr(tuple(field.name for field in fields if field.repr))
    if eq:
        is_equal, compute_hash = _make_comparison(fields)
        if "__eq__" not in vars(cls):
            cls.__eq__ = is_equal
        if not has_own_hash:
            cls.__hash__ = compute_hash
    names = frozenset(field.name for field in fields)

    def refuse_assignment(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def refuse_deletion(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    cls.__setattr__, cls.__delattr__ = refuse_assignment, refuse_deletion
    defined: type = cls
    return defined


class _LazyInit:
    """``__init__`` of a class until something asks for it: an instance, or a signature."""

    def __init__(self, owner: Any, fields: tuple[Any, ...]) -> None:
        self._owner, self._fields = owner, fields

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        compiled = _compile_init(self._owner, self._fields)
        self._owner.__init__ = compiled
        return compiled.__get__(instance, owner)


def _compile_init(cls: Any, fields: tuple[Any, ...]) -> Callable[..., None]:
    arguments, statements, has_star = ["self"], ["set_ = _object.__setattr__"], False
    namespace: dict[str, Any] = {"factory_": _FACTORY, "_object": object}
    for number, field in enumerate(sorted(fields, key=lambda field: bool(field.kw_only))):
        value = field.name
        if field.default_factory is not dataclasses.MISSING:
            namespace[f"make{number}_"] = field.default_factory
            value = f"make{number}_()" + (f" if {value} is factory_ else {value}" if field.init else "")
        elif not field.init:
            continue
        statements.append(f"set_(self, {field.name!r}, {value})")
        if not field.init:
            continue
        if field.kw_only and not has_star:
            arguments.append("*")
            has_star = True
        if field.default is not dataclasses.MISSING:
            namespace[f"default{number}_"] = field.default
            arguments.append(f"{field.name}=default{number}_")
        else:
            arguments.append(field.name + ("=factory_" if field.default_factory is not dataclasses.MISSING else ""))
    statements += ["self.__post_init__()"] if hasattr(cls, "__post_init__") else []
    exec(f"def __init__({', '.join(arguments)}):\n " + "\n ".join(statements), namespace)
    init: Any = namespace["__init__"]
    init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    init.__annotations__ = {field.name: field.type for field in fields if field.init} | {"return": None}
    compiled: Callable[..., None] = init
    return compiled


def _make_repr(names: tuple[str, ...]) -> Callable[[Any], str]:
    @reprlib.recursive_repr()
    def __repr__(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return __repr__


def _make_comparison(fields: tuple[Any, ...]) -> tuple[Callable[[Any, object], Any], Callable[[Any], int]]:
    get_compared = _make_getter([field.name for field in fields if field.compare])
    get_hashed = _make_getter([field.name for field in fields if (field.compare if field.hash is None else field.hash)])

    def __eq__(self: Any, other: object) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return get_compared(self) == get_compared(other)

    def __hash__(self: Any) -> int:
        return hash(get_hashed(self))

    return __eq__, __hash__


def _make_getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) < 2:
        return lambda self: tuple(getattr(self, name) for name in names)
    return attrgetter(*names)
