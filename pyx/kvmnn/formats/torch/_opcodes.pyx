"""Validate the opcodes of pickles in one pass, without creating any value."""

from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memchr

from kvmnn.errors import CheckpointError

MAX_INT_BYTES = 255
"""Maximum bytes of an integer."""
MAX_PROTOCOL = 5

kinds[:] = [KIND_REFUSED] * 256
widths[:] = [0] * 256


def _fill_tables():
    for width, codes in (
        (0, b"(.012NQRabdeltsu})]\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94"),
        (1, b"Khq\x80"),
        (2, b"M"),
        (4, b"Jjr"),
        (8, b"G\x95"),
    ):
        for code in codes:
            kinds[code] = KIND_FIXED
            widths[code] = width
    for width, codes in ((1, b"UC\x8a\x8c"), (4, b"XTB\x8b"), (8, b"\x8d\x8e\x96")):
        for code in codes:
            kinds[code] = KIND_LENGTH_PREFIXED
            widths[code] = width
    kinds[<uint8_t>b"c"] = KIND_TWO_LINES


_fill_tables()


cdef uint64_t read_number(const uint8_t *p, Py_ssize_t width) noexcept nogil:
    """Return the little-endian number of `width` bytes at `p`."""
    cdef uint64_t value = 0
    cdef Py_ssize_t i
    for i in range(width):
        value |= <uint64_t>p[i] << (8 * i)
    return value


def scan(const uint8_t[::1] data not None, Py_ssize_t begin, Py_ssize_t max_opcodes):
    """Walk over one pickle without making anything of it.

    Parameters
    ----------
    data, begin
        Where the pickle lies; more may follow it.
    max_opcodes
        Most opcodes, and highest place in the memo.

    Returns
    -------
    Where the pickle ends, and the highest protocol it announces.

    Raises
    ------
    CheckpointError
        For an opcode that no checkpoint needs, an argument that does not fit, too many opcodes, or no end.
    """
    cdef Py_ssize_t position = begin, size = data.shape[0], count = 0, start
    cdef uint64_t length
    cdef uint8_t code, kind, width
    cdef int protocol = 0
    cdef const uint8_t *end
    while position < size:
        start = position
        code = data[position]
        kind = kinds[code]
        width = widths[code]
        position += 1
        count += 1
        if count > max_opcodes:
            raise CheckpointError(f"offset {start}: the pickle has more than {max_opcodes} opcodes")
        if kind == KIND_REFUSED:
            raise CheckpointError(f"offset {start}: opcode {format_opcode(code)} is not one that checkpoints need")
        if kind == KIND_TWO_LINES:
            for _ in range(2):
                end = <const uint8_t *>memchr(&data[position], b"\n", size - position) if position < size else NULL
                if end == NULL:
                    raise _make_truncated_error(start)
                position = end - &data[0] + 1
            continue
        if size - position < width:
            raise _make_truncated_error(start)
        if kind == KIND_LENGTH_PREFIXED:
            length = read_number(&data[position], width)
            position += width
            if length > <uint64_t>(size - position):
                raise _make_truncated_error(start)
            if length > MAX_INT_BYTES and code == 0x8B:
                raise CheckpointError(
                    f"offset {start}: an integer of {length} bytes: at most {MAX_INT_BYTES} are taken")
            position += <Py_ssize_t>length
            continue
        if (code == b"r" or code == b"j") and <Py_ssize_t>read_number(&data[position], 4) > max_opcodes:
            raise CheckpointError(
                f"offset {start}: memo place {read_number(&data[position], 4)} is above the limit of {max_opcodes}"
            )
        if code == 0x80:
            protocol = max(protocol, data[position])
            if data[position] > MAX_PROTOCOL:
                raise CheckpointError(
                    f"offset {start}: pickle protocol {data[position]}: expected at most {MAX_PROTOCOL}"
                )
        position += width
        if code == b".":
            return position, protocol
    raise CheckpointError(f"offset {size}: the pickle ends without its STOP")


def _make_truncated_error(start):
    return CheckpointError(f"offset {start}: the pickle ends within an opcode's argument")


def format_opcode(code):
    """Format an opcode for an error message: ``0x28 (MARK)``."""
    import pickletools

    opcode_info = pickletools.code2op.get(chr(code))
    return f"{code:#04x}" + (f" ({opcode_info.name})" if opcode_info else "")
