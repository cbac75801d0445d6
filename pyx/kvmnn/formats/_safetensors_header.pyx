"""The header of a ``.safetensors`` file, read byte by byte: of its tensors nothing is made but numbers.

What is taken is just what the format has: an object whose values are objects of dtype, shape and data_offsets, and
``__metadata__``, an object of strings. All else, valid JSON or not, is an error.
"""

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t
from libc.string cimport memcmp

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8

from json.decoder import scanstring

from kvmnn.arrays.valid_names import shorten_name
from kvmnn.errors import SourceError

SHORTEST_ENTRY = 47
"""Bytes of ``"":{"dtype":"","shape":[],"data_offsets":[0,0]}``: no header has more tensors than its bytes by this."""
MAX_METADATA = 16 << 20
"""Bytes of all of ``__metadata__``."""
MAX_METADATA_ENTRIES = 1 << 16
MAX_NAME = 1 << 20
"""Bytes of a name as it is written; far fewer are an array's, which others check."""

cdef enum:
    MAX_RANK = 64
    MAX_KINDS = 255
    MAX_KIND = 64         # bytes of a dtype as it is written

    DTYPE = 1
    SHAPE = 2
    OFFSETS = 4


cdef class Text:
    """The header, a place in it, and the string that was passed last: where it begins behind its quote, its bytes."""

    cdef bytes whole
    cdef str where
    cdef const uint8_t *text
    cdef Py_ssize_t at, size, begin, length
    cdef bint escaped

    def __cinit__(self, bytes whole not None, str where not None):
        self.whole = whole
        self.where = where
        self.text = <const uint8_t *>PyBytes_AsString(whole)
        self.size = len(whole)

    cdef object wrong(self, what):
        return SourceError(f"{self.where}: the header is not valid JSON: offset {self.at}: {what}")

    cdef object wrong_tensor(self, name, what):
        return SourceError(f"{self.where}: tensor {shorten_name(name)}: {what}")

    cdef void space(self) noexcept:
        """Pass white space."""
        cdef Py_ssize_t at = self.at
        while at < self.size and self.text[at] <= 0x20 and (
            self.text[at] == b" " or self.text[at] == b"\n" or self.text[at] == b"\t" or self.text[at] == b"\r"
        ):
            at += 1
        self.at = at

    cdef bint follows(self, uint8_t sign) noexcept:
        """Pass white space, and the sign if it follows."""
        self.space()
        if self.at == self.size or self.text[self.at] != sign:
            return False
        self.at += 1
        return True

    cdef int expect(self, uint8_t sign) except -1:
        if not self.follows(sign):
            raise self.wrong(f"expected {chr(sign)!r}" + ("" if self.at < self.size else ", the header ends here"))
        return 0

    cdef int string(self, Py_ssize_t most) except -1:
        """Pass a string of at most `most` bytes; what it says is checked by `decoded`."""
        cdef const uint8_t *text = self.text
        cdef Py_ssize_t at, size = self.size
        self.expect(b'"')
        self.begin = at = self.at
        self.escaped = False
        while at < size and text[at] != b'"' and text[at] >= 0x20:
            if text[at] == b"\\":
                self.escaped = True
                at += 1
            at += 1
        self.at = min(at, size)
        if self.at == size:
            raise self.wrong("a string without its end")
        if text[at] != b'"':
            raise self.wrong("a control character in a string")
        self.length = at - self.begin
        if self.length > most:
            self.at = self.begin
            raise self.wrong(f"a string of {self.length} bytes is above the limit of {most}")
        self.at = at + 1
        return 0

    cdef str decoded(self):
        """The string that was passed last."""
        cdef str raw
        try:
            raw = PyUnicode_DecodeUTF8(<const char *>self.text + self.begin, self.length + self.escaped, NULL)
            return scanstring(raw, 0, True)[0] if self.escaped else raw
        except ValueError as error:
            self.at = self.begin
            raise self.wrong(f"a string that is none: {str(error)[:100]}") from None

    cdef bint says(self, const char *word, Py_ssize_t length):
        """Whether the string that was passed last is this one (ASCII)."""
        if self.escaped:
            return self.decoded() == PyBytes_FromStringAndSize(word, length).decode()
        return self.length == length and memcmp(self.text + self.begin, word, length) == 0

    cdef int64_t natural(self) noexcept:
        """Pass a number; -1 for what is no natural number below 2**63."""
        cdef const uint8_t *text = self.text
        cdef int64_t value = 0
        cdef Py_ssize_t start, at, size = self.size
        cdef uint8_t digit
        self.space()
        start = at = self.at
        while at < size:
            digit = text[at] - 48
            if digit > 9:
                break
            if value > INT64_MAX // 10 or (value == INT64_MAX // 10 and digit > INT64_MAX % 10):
                return -1
            value = 10 * value + digit
            at += 1
        self.at = at
        return -1 if at == start or (text[start] == b"0" and at > start + 1) else value

    cdef Py_ssize_t naturals(self, int64_t *values) except? -2:
        """Pass a list of natural numbers: how many there are, -1 for what is no such list of at most `MAX_RANK`."""
        cdef Py_ssize_t count = 0
        cdef int64_t value
        if not self.follows(b"["):
            return -1
        if self.follows(b"]"):
            return 0
        while True:
            value = self.natural()
            if value < 0 or count == MAX_RANK:
                return -1
            values[count] = value
            count += 1
            if self.follows(b"]"):
                return count
            if not self.follows(b","):
                return -1

    cdef dict metadata(self):
        cdef Py_ssize_t start = self.at
        cdef dict found = {}
        wrong = f"{self.where}: __metadata__ is not an object of strings"
        if not self.follows(b"{"):
            raise SourceError(wrong)
        if self.follows(b"}"):
            return found
        while True:
            self.string(MAX_METADATA)
            key = self.decoded()
            if key in found:
                raise self.wrong(f"the name {shorten_name(key)} appears twice")
            self.expect(b":")
            if not self.follows(b'"'):
                raise SourceError(wrong)
            self.at -= 1
            self.string(MAX_METADATA)
            found[key] = self.decoded()
            if self.at - start > MAX_METADATA or len(found) > MAX_METADATA_ENTRIES:
                raise SourceError(
                    f"{self.where}: __metadata__ is above the limit of {MAX_METADATA} bytes "
                    f"and {MAX_METADATA_ENTRIES} entries"
                )
            if self.follows(b"}"):
                return found
            self.expect(b",")


def scan(
    bytes header not None,
    str where not None,
    dict sizes not None,
    uint32_t[:, ::1] places not None,
    uint8_t[::1] kinds not None,
    int64_t[:, ::1] numbers not None,
):
    """Read a whole header, and write what its tensors are, in its order, into the columns of arrays.

    Parameters
    ----------
    header
        Its bytes, below 4 GiB.
    where
        Begins the messages.
    sizes
        Bytes of an element of each dtype that is known (str to int).
    places
        ``[3, capacity]``: where the name begins and its bytes as written (for `strings_at`), where the shape begins
        (for `shape_at`).
    kinds
        ``[capacity]``: the dtype, by its place in the list that is returned.
    numbers
        ``[3, capacity]``: both data_offsets, and the hash of the name.

    Returns
    -------
    How many tensors there are; all dtypes; the metadata.

    Raises
    ------
    SourceError
        For what is no such header, and for a shape whose bytes are not those between the offsets. Names that appear
        twice are not looked for.
    """
    cdef Text t = Text(header, where)
    cdef Py_ssize_t count = 0, capacity = min(kinds.shape[0], places.shape[1], numbers.shape[1])
    cdef Py_ssize_t rank = 0, i, kind_begin = 0, kind_length = -1, name_begin, name_length
    cdef int seen, key, kind = 0
    cdef bint empty, too_many
    cdef int64_t[MAX_RANK] shape, offsets
    cdef int64_t[MAX_KINDS] item_bytes
    cdef int64_t elements
    cdef uint32_t shape_at = 0
    cdef dict codes = {}
    metadata = None
    if not t.follows(b"{"):
        raise t.wrong("expected '{'") if t.at == t.size else SourceError(f"{where}: the header is not a JSON object")
    if t.follows(b"}"):
        return _ended(t, 0, [], {})
    while True:
        t.string(MAX_NAME)
        if t.says(b"__metadata__", 12):
            if metadata is not None:
                raise t.wrong("the name '__metadata__' appears twice")
            t.expect(b":")
            metadata = t.metadata()
        else:
            name = t.decoded()
            name_begin = t.begin
            name_length = t.length
            t.expect(b":")
            if not t.follows(b"{"):
                raise t.wrong_tensor(name, f"is not an object of dtype, shape and data_offsets (offset {t.at})")
            seen = 0
            while True:
                t.string(MAX_NAME)
                if t.says(b"dtype", 5):
                    key = DTYPE
                elif t.says(b"shape", 5):
                    key = SHAPE
                elif t.says(b"data_offsets", 12):
                    key = OFFSETS
                else:
                    raise t.wrong_tensor(name, f"has {shorten_name(t.decoded())}, which tensors do not have")
                if seen & key:
                    raise t.wrong_tensor(name, f"{shorten_name(t.decoded())} appears twice")
                seen |= key
                t.expect(b":")
                if key == DTYPE:
                    if not t.follows(b'"'):
                        raise t.wrong_tensor(name, f"bad dtype or data_offsets (offset {t.at})")
                    t.at -= 1
                    t.string(MAX_KIND)
                    if t.length != kind_length or memcmp(t.text + t.begin, t.text + kind_begin, kind_length) != 0:
                        found = t.decoded()
                        if found not in codes:
                            if len(codes) == MAX_KINDS:
                                raise t.wrong(f"more than {MAX_KINDS} dtypes")
                            item_bytes[len(codes)] = sizes.get(found, 0)
                            codes[found] = len(codes)
                        kind = codes[found]
                        kind_begin = t.begin
                        kind_length = t.length
                elif key == SHAPE:
                    t.space()
                    shape_at = <uint32_t>t.at
                    rank = t.naturals(shape)
                    if rank < 0:
                        raise t.wrong_tensor(name, f"shape is not a list of non-negative integers (offset {t.at})")
                elif t.naturals(offsets) != 2 or offsets[1] < offsets[0]:
                    raise t.wrong_tensor(name, f"bad dtype or data_offsets (offset {t.at})")
                if t.follows(b"}"):
                    break
                t.expect(b",")
            if seen != DTYPE | SHAPE | OFFSETS:
                raise t.wrong_tensor(name, "lacks its dtype, shape or data_offsets")
            elements = item_bytes[kind]
            if elements:
                empty = too_many = False
                for i in range(rank):
                    if shape[i] == 0:
                        empty = True
                    elif (elements | shape[i]) >> 31 and elements > INT64_MAX // shape[i]:
                        too_many = True
                    else:
                        elements *= shape[i]
                if (too_many and not empty) or (0 if empty else elements) != offsets[1] - offsets[0]:
                    raise t.wrong_tensor(name, _differs(shape_at_(t, shape_at), list(codes)[kind], item_bytes[kind],
                                                        offsets[1] - offsets[0]))
            if count == capacity:
                raise t.wrong(f"more than {capacity} tensors")
            places[0, count] = <uint32_t>name_begin
            places[1, count] = <uint32_t>name_length
            places[2, count] = shape_at
            kinds[count] = <uint8_t>kind
            numbers[0, count] = offsets[0]
            numbers[1, count] = offsets[1]
            numbers[2, count] = hash(name)
            count += 1
        if t.follows(b"}"):
            return _ended(t, count, list(codes), metadata or {})
        t.expect(b",")


cdef _ended(Text t, count, kinds, metadata):
    t.space()
    if t.at != t.size:
        raise t.wrong("expected the end of the header")
    return count, kinds, metadata


def _differs(shape, kind, size, nbytes):
    needed = size
    for length in shape:
        needed *= length
    return f"shape {list(shape)} of {kind} needs {needed} bytes, its data_offsets give {nbytes}"


cdef tuple shape_at_(Text t, Py_ssize_t begin):
    cdef int64_t[MAX_RANK] shape
    cdef Py_ssize_t i, rank
    t.at = begin
    rank = t.naturals(shape)
    return tuple([shape[i] for i in range(rank)])


def shape_at(bytes header not None, Py_ssize_t begin):
    """The shape that `scan` found at a place of the same header."""
    return shape_at_(Text(header, ""), begin)


def strings_at(bytes header not None, const uint32_t[:] begins not None, const uint32_t[:] lengths not None):
    """The strings that `scan` found at places of the same header, as a list."""
    cdef Text t = Text(header, "")
    cdef Py_ssize_t i
    cdef list found = []
    for i in range(begins.shape[0]):
        t.at = <Py_ssize_t>begins[i] - 1
        t.string(lengths[i])
        found.append(t.decoded())
    return found
