"""Arrays of an input that may have a million of them: each is made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from .named_array import LazyArray

T = TypeVar("T")
_NAMES_PER_BATCH = 4096


class LazySequence(Sequence[T], Generic[T]):
    """A sequence whose items are made, each time anew, from numbers.

    Parameters
    ----------
    item_ids
        int64, one for each item.
    make_item
        The item of a number.
    """

    def __init__(self, item_ids: npt.NDArray[np.int64], make_item: Callable[[int], T]) -> None:
        self.item_ids = item_ids
        self.make_item = make_item

    def __len__(self) -> int:
        return self.item_ids.size

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self.make_item(item_id) for item_id in self.item_ids[index].tolist()]
        return self.make_item(int(self.item_ids[index]))

    def __iter__(self) -> Iterator[T]:
        return (self.make_item(int(item_id)) for item_id in self.item_ids)


class LazyArrayList(LazySequence[LazyArray]):
    """Arrays whose names and bytes are known without them.

    Parameters
    ----------
    item_ids, make_item
        As above; the numbers ascend.
    names_for_ids
        The names of some numbers.
    id_for_name
        The number of a name; None if there is none.
    nbytes
        Bytes of all arrays.
    elements
        Types of the codes that some of the arrays were made from, as `Source.elements`.
    """

    def __init__(
        self,
        item_ids: npt.NDArray[np.int64],
        make_item: Callable[[int], LazyArray],
        names_for_ids: Callable[[npt.NDArray[np.int64]], list[str]],
        id_for_name: Callable[[str], int | None],
        nbytes: int,
        elements: tuple[str, ...] = (),
    ) -> None:
        super().__init__(item_ids, make_item)
        self.names_for_ids = names_for_ids
        self.id_for_name = id_for_name
        self.nbytes = nbytes
        self.elements = elements

    def iter_names(self) -> Iterator[str]:
        """The names, in order."""
        for start in range(0, len(self), _NAMES_PER_BATCH):
            yield from self.names_for_ids(self.item_ids[start : start + _NAMES_PER_BATCH])

    def find(self, name: str) -> LazyArray | None:
        """The array of this name; None if there is none."""
        item_id = self.id_for_name(name)
        if item_id is None:
            return None
        index = int(np.searchsorted(self.item_ids, item_id))
        return self[index] if index < len(self) and self.item_ids[index] == item_id else None
