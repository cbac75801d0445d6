"""Arrays of an input that may have a million of them: each is made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from .named_array import NamedArray

T = TypeVar("T")
_MANY = 4096


class Lazily(Sequence[T], Generic[T]):
    """A sequence whose items are made, each time anew, from numbers.

    Parameters
    ----------
    numbers
        int64, one for each item.
    make
        The item of a number.
    """

    def __init__(self, numbers: npt.NDArray[np.int64], make: Callable[[int], T]) -> None:
        self.numbers = numbers
        self.make = make

    def __len__(self) -> int:
        return self.numbers.size

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self.make(number) for number in self.numbers[index].tolist()]
        return self.make(int(self.numbers[index]))

    def __iter__(self) -> Iterator[T]:
        return (self.make(int(number)) for number in self.numbers)


class LazyArrays(Lazily[NamedArray]):
    """Arrays whose names and bytes are known without them.

    Parameters
    ----------
    numbers, make
        As above; the numbers ascend.
    names_of
        The names of some numbers.
    number_of
        The number of a name; None if there is none.
    nbytes
        Bytes of all arrays.
    elements
        Types of the codes that some of the arrays were made from, as `Source.elements`.
    """

    def __init__(
        self,
        numbers: npt.NDArray[np.int64],
        make: Callable[[int], NamedArray],
        names_of: Callable[[npt.NDArray[np.int64]], list[str]],
        number_of: Callable[[str], int | None],
        nbytes: int,
        elements: tuple[str, ...] = (),
    ) -> None:
        super().__init__(numbers, make)
        self.names_of = names_of
        self.number_of = number_of
        self.nbytes = nbytes
        self.elements = elements

    def names(self) -> Iterator[str]:
        """The names, in order."""
        for start in range(0, len(self), _MANY):
            yield from self.names_of(self.numbers[start : start + _MANY])

    def find(self, name: str) -> NamedArray | None:
        """The array of this name; None if there is none."""
        number = self.number_of(name)
        if number is None:
            return None
        place = int(np.searchsorted(self.numbers, number))
        return self[place] if place < len(self) and self.numbers[place] == number else None
