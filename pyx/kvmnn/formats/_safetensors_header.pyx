"""Parse the header of a ``.safetensors`` file byte by byte, without creating an object per tensor.

Only the format itself is accepted: an object whose values are objects of dtype, shape and data_offsets, and
``__metadata__``, an object of strings. All else, valid JSON or not, is an error.
"""

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t
from libc.string cimport memcmp

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8

from json.decoder import scanstring

from kvmnn.arrays.naming import shorten_name
from kvmnn.errors import SourceError

MIN_ENTRY_BYTES = 47
"""Bytes of ``"":{"dtype":"","shape":[],"data_offsets":[0,0]}``: the minimum per tensor, which bounds their number."""
MAX_METADATA_BYTES = 16 << 20
"""Maximum bytes of ``__metadata__``."""
MAX_METADATA_ENTRIES = 1 << 16
MAX_NAME_BYTES = 1 << 20
"""Maximum bytes of an encoded name; the much lower limit of array names is checked elsewhere."""

cdef enum:
    MAX_RANK = 64
    MAX_DTYPES = 255
    MAX_DTYPE_BYTES = 64  # bytes of a dtype as it is written

    DTYPE = 1
    SHAPE = 2
    OFFSETS = 4


cdef class HeaderScanner:
    """The header, the current position, and the range (after its quote) of the last string that was skipped."""

    cdef bytes header
    cdef str label
    cdef const uint8_t *text
    cdef Py_ssize_t pos, size, begin, length
    cdef bint has_escape

    def __cinit__(self, bytes header not None, str label not None):
        self.header = header
        self.label = label
        self.text = <const uint8_t *>PyBytes_AsString(header)
        self.size = len(header)

    cdef object make_error(self, problem):
        return SourceError(f"{self.label}: the header is not valid JSON: offset {self.pos}: {problem}")

    cdef object make_tensor_error(self, name, problem):
        return SourceError(f"{self.label}: tensor {shorten_name(name)}: {problem}")

    cdef void skip_space(self) noexcept:
        """Skip white space."""
        cdef Py_ssize_t pos = self.pos
        while pos < self.size and self.text[pos] <= 0x20 and (
            self.text[pos] == b" " or self.text[pos] == b"\n" or self.text[pos] == b"\t" or self.text[pos] == b"\r"
        ):
            pos += 1
        self.pos = pos

    cdef bint accept(self, uint8_t char_code) noexcept:
        """Skip white space, and `char_code` if it follows; return whether it did."""
        self.skip_space()
        if self.pos == self.size or self.text[self.pos] != char_code:
            return False
        self.pos += 1
        return True

    cdef int expect(self, uint8_t char_code) except -1:
        if not self.accept(char_code):
            raise self.make_error(
                f"expected {chr(char_code)!r}" + ("" if self.pos < self.size else ", the header ends here"))
        return 0

    cdef int skip_string(self, Py_ssize_t max_bytes) except -1:
        """Skip a string of at most `max_bytes` bytes; `decode_string` checks its content."""
        cdef const uint8_t *text = self.text
        cdef Py_ssize_t pos, size = self.size
        self.expect(b'"')
        self.begin = pos = self.pos
        self.has_escape = False
        while pos < size and text[pos] != b'"' and text[pos] >= 0x20:
            if text[pos] == b"\\":
                self.has_escape = True
                pos += 1
            pos += 1
        self.pos = min(pos, size)
        if self.pos == size:
            raise self.make_error("a string without its end")
        if text[pos] != b'"':
            raise self.make_error("a control character in a string")
        self.length = pos - self.begin
        if self.length > max_bytes:
            self.pos = self.begin
            raise self.make_error(f"a string of {self.length} bytes is above the limit of {max_bytes}")
        self.pos = pos + 1
        return 0

    cdef str decode_string(self):
        """Return the last string that was skipped."""
        cdef str raw
        try:
            raw = PyUnicode_DecodeUTF8(<const char *>self.text + self.begin, self.length + self.has_escape, NULL)
            return scanstring(raw, 0, True)[0] if self.has_escape else raw
        except ValueError as error:
            self.pos = self.begin
            raise self.make_error(f"a string that is none: {str(error)[:100]}") from None

    cdef bint string_equals(self, const char *word, Py_ssize_t length):
        """Return whether the last string that was skipped equals `word` (ASCII)."""
        if self.has_escape:
            return self.decode_string() == PyBytes_FromStringAndSize(word, length).decode()
        return self.length == length and memcmp(self.text + self.begin, word, length) == 0

    cdef int64_t read_natural(self) noexcept:
        """Read a natural number below 2**63; -1 for anything else."""
        cdef const uint8_t *text = self.text
        cdef int64_t value = 0
        cdef Py_ssize_t start, pos, size = self.size
        cdef uint8_t digit
        self.skip_space()
        start = pos = self.pos
        while pos < size:
            digit = text[pos] - 48
            if digit > 9:
                break
            if value > INT64_MAX // 10 or (value == INT64_MAX // 10 and digit > INT64_MAX % 10):
                return -1
            value = 10 * value + digit
            pos += 1
        self.pos = pos
        return -1 if pos == start or (text[start] == b"0" and pos > start + 1) else value

    cdef Py_ssize_t read_naturals(self, int64_t *values) except? -2:
        """Read a list of natural numbers and return its length; -1 for anything but a list of at most `MAX_RANK`."""
        cdef Py_ssize_t count = 0
        cdef int64_t value
        if not self.accept(b"["):
            return -1
        if self.accept(b"]"):
            return 0
        while True:
            value = self.read_natural()
            if value < 0 or count == MAX_RANK:
                return -1
            values[count] = value
            count += 1
            if self.accept(b"]"):
                return count
            if not self.accept(b","):
                return -1

    cdef dict read_metadata(self):
        cdef Py_ssize_t start = self.pos
        cdef dict entries = {}
        message = f"{self.label}: __metadata__ is not an object of strings"
        if not self.accept(b"{"):
            raise SourceError(message)
        if self.accept(b"}"):
            return entries
        while True:
            self.skip_string(MAX_METADATA_BYTES)
            key = self.decode_string()
            if key in entries:
                raise self.make_error(f"the name {shorten_name(key)} appears twice")
            self.expect(b":")
            if not self.accept(b'"'):
                raise SourceError(message)
            self.pos -= 1
            self.skip_string(MAX_METADATA_BYTES)
            entries[key] = self.decode_string()
            if self.pos - start > MAX_METADATA_BYTES or len(entries) > MAX_METADATA_ENTRIES:
                raise SourceError(
                    f"{self.label}: __metadata__ is above the limit of {MAX_METADATA_BYTES} bytes "
                    f"and {MAX_METADATA_ENTRIES} entries"
                )
            if self.accept(b"}"):
                return entries
            self.expect(b",")


def scan(
    bytes header not None,
    str label not None,
    dict sizes not None,
    uint32_t[:, ::1] positions not None,
    uint8_t[::1] dtype_codes not None,
    int64_t[:, ::1] offsets_and_hashes not None,
):
    """Read a whole header, and write what its tensors are, in its order, into the columns of arrays.

    Parameters
    ----------
    header
        Its bytes, below 4 GiB.
    label
        Begins the messages.
    sizes
        Bytes of an element of each dtype that is known (str to int).
    positions
        ``[3, capacity]``: where the name begins and its bytes as written (for `read_strings_at`), where the shape
        begins (for `read_shape_at`).
    dtype_codes
        ``[capacity]``: the dtype, by its place in the list that is returned.
    offsets_and_hashes
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
    cdef HeaderScanner scanner = HeaderScanner(header, label)
    cdef Py_ssize_t count = 0, capacity = min(dtype_codes.shape[0], positions.shape[1], offsets_and_hashes.shape[1])
    cdef Py_ssize_t rank = 0, i, dtype_begin = 0, dtype_length = -1, name_begin, name_length
    cdef int keys_seen, key, dtype_code = 0
    cdef bint is_empty, is_too_large
    cdef int64_t[MAX_RANK] shape, offsets
    cdef int64_t[MAX_DTYPES] item_bytes
    cdef int64_t elements
    cdef uint32_t shape_position = 0
    cdef dict codes = {}
    metadata = None
    if not scanner.accept(b"{"):
        raise scanner.make_error("expected '{'") if scanner.pos == scanner.size else SourceError(
            f"{label}: the header is not a JSON object")
    if scanner.accept(b"}"):
        return _finish_scan(scanner, 0, [], {})
    while True:
        scanner.skip_string(MAX_NAME_BYTES)
        if scanner.string_equals(b"__metadata__", 12):
            if metadata is not None:
                raise scanner.make_error("the name '__metadata__' appears twice")
            scanner.expect(b":")
            metadata = scanner.read_metadata()
        else:
            name = scanner.decode_string()
            name_begin = scanner.begin
            name_length = scanner.length
            scanner.expect(b":")
            if not scanner.accept(b"{"):
                raise scanner.make_tensor_error(
                    name, f"is not an object of dtype, shape and data_offsets (offset {scanner.pos})")
            keys_seen = 0
            while True:
                scanner.skip_string(MAX_NAME_BYTES)
                if scanner.string_equals(b"dtype", 5):
                    key = DTYPE
                elif scanner.string_equals(b"shape", 5):
                    key = SHAPE
                elif scanner.string_equals(b"data_offsets", 12):
                    key = OFFSETS
                else:
                    raise scanner.make_tensor_error(
                        name, f"has {shorten_name(scanner.decode_string())}, which tensors do not have")
                if keys_seen & key:
                    raise scanner.make_tensor_error(name, f"{shorten_name(scanner.decode_string())} appears twice")
                keys_seen |= key
                scanner.expect(b":")
                if key == DTYPE:
                    if not scanner.accept(b'"'):
                        raise scanner.make_tensor_error(name, f"bad dtype or data_offsets (offset {scanner.pos})")
                    scanner.pos -= 1
                    scanner.skip_string(MAX_DTYPE_BYTES)
                    if scanner.length != dtype_length or memcmp(
                            scanner.text + scanner.begin, scanner.text + dtype_begin, dtype_length) != 0:
                        dtype_name = scanner.decode_string()
                        if dtype_name not in codes:
                            if len(codes) == MAX_DTYPES:
                                raise scanner.make_error(f"more than {MAX_DTYPES} dtypes")
                            item_bytes[len(codes)] = sizes.get(dtype_name, 0)
                            codes[dtype_name] = len(codes)
                        dtype_code = codes[dtype_name]
                        dtype_begin = scanner.begin
                        dtype_length = scanner.length
                elif key == SHAPE:
                    scanner.skip_space()
                    shape_position = <uint32_t>scanner.pos
                    rank = scanner.read_naturals(shape)
                    if rank < 0:
                        raise scanner.make_tensor_error(
                            name, f"shape is not a list of non-negative integers (offset {scanner.pos})")
                elif scanner.read_naturals(offsets) != 2 or offsets[1] < offsets[0]:
                    raise scanner.make_tensor_error(name, f"bad dtype or data_offsets (offset {scanner.pos})")
                if scanner.accept(b"}"):
                    break
                scanner.expect(b",")
            if keys_seen != DTYPE | SHAPE | OFFSETS:
                raise scanner.make_tensor_error(name, "lacks its dtype, shape or data_offsets")
            elements = item_bytes[dtype_code]
            if elements:
                is_empty = is_too_large = False
                for i in range(rank):
                    if shape[i] == 0:
                        is_empty = True
                    elif (elements | shape[i]) >> 31 and elements > INT64_MAX // shape[i]:
                        is_too_large = True
                    else:
                        elements *= shape[i]
                if (is_too_large and not is_empty) or (0 if is_empty else elements) != offsets[1] - offsets[0]:
                    raise scanner.make_tensor_error(
                        name, _describe_size_mismatch(_read_shape(scanner, shape_position), list(codes)[dtype_code],
                        item_bytes[dtype_code],
                                                                                  offsets[1] - offsets[0]))
            if count == capacity:
                raise scanner.make_error(f"more than {capacity} tensors")
            positions[0, count] = <uint32_t>name_begin
            positions[1, count] = <uint32_t>name_length
            positions[2, count] = shape_position
            dtype_codes[count] = <uint8_t>dtype_code
            offsets_and_hashes[0, count] = offsets[0]
            offsets_and_hashes[1, count] = offsets[1]
            offsets_and_hashes[2, count] = hash(name)
            count += 1
        if scanner.accept(b"}"):
            return _finish_scan(scanner, count, list(codes), metadata or {})
        scanner.expect(b",")


cdef _finish_scan(HeaderScanner scanner, count, kinds, metadata):
    scanner.skip_space()
    if scanner.pos != scanner.size:
        raise scanner.make_error("expected the end of the header")
    return count, kinds, metadata


def _describe_size_mismatch(shape, dtype, item_bytes, nbytes):
    expected_bytes = item_bytes
    for length in shape:
        expected_bytes *= length
    return f"shape {list(shape)} of {dtype} needs {expected_bytes} bytes, its data_offsets give {nbytes}"


cdef tuple _read_shape(HeaderScanner scanner, Py_ssize_t begin):
    cdef int64_t[MAX_RANK] shape
    cdef Py_ssize_t i, rank
    scanner.pos = begin
    rank = scanner.read_naturals(shape)
    return tuple([shape[i] for i in range(rank)])


def read_shape_at(bytes header not None, Py_ssize_t begin):
    """Return the shape that `scan` located in the same header."""
    return _read_shape(HeaderScanner(header, ""), begin)


def read_strings_at(bytes header not None, const uint32_t[:] begins not None, const uint32_t[:] lengths not None):
    """Return the strings that `scan` located in the same header, as a list."""
    cdef HeaderScanner scanner = HeaderScanner(header, "")
    cdef Py_ssize_t i
    cdef list strings = []
    for i in range(begins.shape[0]):
        scanner.pos = <Py_ssize_t>begins[i] - 1
        scanner.skip_string(lengths[i])
        strings.append(scanner.decode_string())
    return strings
