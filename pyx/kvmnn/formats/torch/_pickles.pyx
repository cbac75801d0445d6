"""Pickles read as data: nothing that a pickle names is ever imported, called or given attributes.

`scan` (_opcodes.pyx) checks the opcodes of one pickle before anything is made of it. `load` then runs a stack machine
whose values are None, bool, int, float, str, tuples, lists, dicts, and what the caller's own constructors return.
Values that no checkpoint is read for (bytes, sets, keys other than strings and small numbers) become `OpaqueValue`,
which costs nothing and never compares equal to anything, so that neither hashing nor comparing can be made expensive.
"""

from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memchr, memcpy

from kvmnn.formats.torch._opcodes cimport KIND_LENGTH_PREFIXED, KIND_TWO_LINES, kinds, read_number, widths

from kvmnn.errors import CheckpointError

from ._opcodes import format_opcode, scan

MAX_STRING_BYTES = 1 << 16
"""Maximum bytes of a string that is kept; longer ones become `OpaqueValue`."""
MAX_INT_KEY = 1 << 16
"""Limit of integer dict keys that are kept: enough for layer numbers, and too few for hash collisions."""


class OpaqueValue:
    """A value whose content is not needed."""

    __slots__ = ()


class AllowedGlobal:
    """A name in a pickle, and the inert function that stands for it.

    Parameters
    ----------
    name
        ``module.name``.
    constructor
        Called with the arguments where the pickle calls the name; None where it must not.
    """

    __slots__ = ("constructor", "name")

    def __init__(self, name, constructor=None):
        self.name = name
        self.constructor = constructor


def load(
    const uint8_t[::1] data not None, Py_ssize_t begin, Py_ssize_t end, resolve, resolve_persistent, set_state=None
):
    """Run one pickle that `scan` has passed.

    Parameters
    ----------
    data, begin, end
        Where it lies, as `scan` found it.
    resolve
        ``resolve(module, name)`` returns the `AllowedGlobal` for a name, or raises.
    resolve_persistent
        ``resolve_persistent(id)`` returns the value for a persistent id, or raises.
    set_state
        ``set_state(value, state)`` says whether a value made by a constructor takes this state, and gives it.

    Raises
    ------
    CheckpointError
        For a pickle that is damaged or does what a checkpoint does not.
    """
    return _PickleMachine(resolve, resolve_persistent, set_state).run(data, begin, end)


cdef class _PickleMachine:
    cdef list stack, marks
    cdef dict memo
    cdef Py_ssize_t stack_floor  # values below belong to an outer mark
    cdef object resolve, resolve_persistent, set_state
    cdef Py_ssize_t start

    def __init__(self, resolve, resolve_persistent, set_state):
        self.stack = []
        self.marks = []
        self.memo = {}
        self.stack_floor = 0
        self.resolve = resolve
        self.resolve_persistent = resolve_persistent
        self.set_state = set_state
        self.start = 0

    cdef object run(self, const uint8_t[::1] data, Py_ssize_t begin, Py_ssize_t end):
        cdef Py_ssize_t position = begin, length, middle
        cdef const uint8_t *argument
        cdef const uint8_t *base = &data[0]
        cdef uint8_t code
        while position < end:
            self.start = position
            code = base[position]
            position += 1
            argument = base + position
            if kinds[code] == KIND_TWO_LINES:
                middle = <const uint8_t *>memchr(argument, b"\n", end - position) - base
                length = <const uint8_t *>memchr(base + middle + 1, b"\n", end - middle - 1) - base
                self.stack.append(
                    self.resolve(self.decode_text(argument, middle - position),
                    self.decode_text(base + middle + 1, length - middle - 1))
                )
                position = length + 1
                continue
            if kinds[code] == KIND_LENGTH_PREFIXED:
                length = <Py_ssize_t>read_number(argument, widths[code])
                self.push_length_prefixed(code, argument + widths[code], length)
                position += widths[code] + length
                continue
            position += widths[code]
            if code == b".":
                return self.pop()
            self.run_opcode(code, argument)
        raise self.make_error("the pickle ends without its STOP")

    cdef int push_length_prefixed(self, uint8_t code, const uint8_t *argument, Py_ssize_t length) except -1:
        """Push the value of an opcode for strings, bytes or long integers."""
        if code == 0x8A or code == 0x8B:
            self.stack.append(int.from_bytes((<const char *>argument)[:length], "little", signed=True))
        elif code == b"X" or code == 0x8C or code == 0x8D or code == b"U" or code == b"T":
            self.stack.append(self.decode_text(argument, length) if length <= MAX_STRING_BYTES else OpaqueValue())
        else:
            self.stack.append(OpaqueValue())
        return 0

    cdef int run_opcode(self, uint8_t code, const uint8_t *argument) except -1:
        """Run any other opcode, the commonest first."""
        cdef double real
        cdef uint64_t bits
        if code == b"q":
            self.memo[argument[0]] = self.top()
        elif code == b"h":
            self.push_memo(argument[0])
        elif code == b"r":
            self.memo[<uint32_t>read_number(argument, 4)] = self.top()
        elif code == b"j":
            self.push_memo(<uint32_t>read_number(argument, 4))
        elif code == b"K":
            self.stack.append(argument[0])
        elif code == b"M":
            self.stack.append(<uint16_t>read_number(argument, 2))
        elif code == b"J":
            self.stack.append(<int32_t><uint32_t>read_number(argument, 4))
        elif code == b"(":
            self.marks.append(self.stack_floor)
            self.stack_floor = len(self.stack)
        elif code == b"t":
            self.stack.append(tuple(self.pop_mark()))
        elif code == 0x85:
            self.stack.append((self.pop(),))
        elif code == 0x86:
            second = self.pop()
            self.stack.append((self.pop(), second))
        elif code == 0x87:
            third = self.pop()
            second = self.pop()
            self.stack.append((self.pop(), second, third))
        elif code == b")":
            self.stack.append(())
        elif code == b"N":
            self.stack.append(None)
        elif code == 0x88:
            self.stack.append(True)
        elif code == 0x89:
            self.stack.append(False)
        elif code == b"R" or code == 0x81:
            self.call(self.pop())
        elif code == b"Q":
            self.stack.append(self.resolve_persistent(self.pop()))
        elif code == b"}":
            self.stack.append({})
        elif code == b"]":
            self.stack.append([])
        elif code == b"u":
            self.set_items(self.pop_mark())
        elif code == b"s":
            value = self.pop()
            self.set_items([self.pop(), value])
        elif code == b"e":
            self.extend(self.pop_mark())
        elif code == b"a":
            self.extend([self.pop()])
        elif code == b"d":
            items = self.pop_mark()
            self.stack.append({})
            self.set_items(items)
        elif code == b"l":
            self.stack.append(self.pop_mark())
        elif code == b"b":
            state = self.pop()
            if isinstance(self.top(), (dict, OpaqueValue)):
                return 0
            if self.set_state is None or not self.set_state(self.top(), state):
                raise self.make_error(f"sets the state of {_describe_type(self.top())}, which no checkpoint does")
        elif code == b"G":
            bits = 0
            for i in range(8):
                bits = bits << 8 | argument[i]
            memcpy(&real, &bits, 8)
            self.stack.append(real)
        elif code == 0x94:
            self.memo[len(self.memo)] = self.top()
        elif code == 0x93:
            name = self.pop()
            module = self.pop()
            if not (isinstance(name, str) and isinstance(module, str)):
                raise self.make_error("a global whose name is not a string")
            self.stack.append(self.resolve(module, name))
        elif code == 0x92:
            self.pop()
            self.call(self.pop())
        elif code == 0x8F:
            self.stack.append(OpaqueValue())
        elif code == 0x90:
            self.pop_mark()
            if not isinstance(self.top(), OpaqueValue):
                raise self.make_error(f"adds items to {_describe_type(self.top())}, expected a set")
        elif code == 0x91:
            self.pop_mark()
            self.stack.append(OpaqueValue())
        elif code == b"0":
            if len(self.stack) == self.stack_floor and self.marks:
                self.pop_mark()
            else:
                self.pop()
        elif code == b"1":
            self.pop_mark()
        elif code == b"2":
            self.stack.append(self.top())
        elif code != 0x80 and code != 0x95:
            raise self.make_error(f"opcode {format_opcode(code)} is not implemented")
        return 0

    cdef int call(self, object arguments) except -1:
        function = self.pop()
        if not isinstance(function, AllowedGlobal):
            raise self.make_error(f"calls {_describe_type(function)}, which no checkpoint does")
        if function.constructor is None or not isinstance(arguments, tuple):
            raise self.make_error(f"calls {function.name}, which no checkpoint does")
        self.stack.append(function.constructor(arguments))
        return 0

    cdef int set_items(self, list items) except -1:
        cdef Py_ssize_t i
        target = self.top()
        if isinstance(target, OpaqueValue):
            return 0
        if not isinstance(target, dict):
            raise self.make_error(f"sets items of {_describe_type(target)}, expected a dict")
        if len(items) % 2:
            raise self.make_error("a dict key without a value")
        for i in range(0, len(items), 2):
            key = items[i]
            if not isinstance(key, str) and not (type(key) is int and 0 <= key < MAX_INT_KEY):
                key = OpaqueValue()
            (<dict>target)[key] = items[i + 1]
        return 0

    cdef int extend(self, list items) except -1:
        target = self.top()
        if isinstance(target, list):
            (<list>target).extend(items)
        elif not isinstance(target, OpaqueValue):
            raise self.make_error(f"appends to {_describe_type(target)}, expected a list")
        return 0

    cdef int push_memo(self, object index) except -1:
        try:
            self.stack.append(self.memo[index])
        except KeyError:
            raise self.make_error(f"memo place {index} is empty") from None
        return 0

    cdef object top(self):
        if len(self.stack) <= self.stack_floor:
            raise self.make_error("the stack is empty")
        return self.stack[len(self.stack) - 1]

    cdef object pop(self):
        if len(self.stack) <= self.stack_floor:
            raise self.make_error("the stack is empty")
        return self.stack.pop()

    cdef list pop_mark(self):
        if not self.marks:
            raise self.make_error("there is no mark on the stack")
        cdef list items = self.stack[self.stack_floor :]
        del self.stack[self.stack_floor :]
        self.stack_floor = self.marks.pop()
        return items

    cdef object decode_text(self, const uint8_t *p, Py_ssize_t length):
        try:
            return PyUnicode_DecodeUTF8(<const char *>p, length, "surrogatepass")
        except UnicodeDecodeError:
            raise self.make_error("a string that is not UTF-8") from None

    cdef object make_error(self, str text):
        return CheckpointError(f"offset {self.start}: the pickle is damaged or no checkpoint: {text}")


def _describe_type(value):
    return value.name if isinstance(value, AllowedGlobal) else type(value).__name__
