"""JSON as it is, as it is not, and where readers differ (RFC 8259): atoms, and the places where they can stand."""

from __future__ import annotations

from collections.abc import Iterator

YES = [
    b"0", b"-0", b"1", b"-12", b"10", b"1e5", b"1E+5", b"1e-5", b"0.5", b"-0.0", b"123.456e78", b"0e1",
    b"1.0000000000001", b'""', b'"a"', rb'"\"\\\/\b\f\n\r\t"', rb'"A\u00e9\u0000"', rb'"\ud83d\ude00"',
    '"é😀\u2028\x7f\ufeff"'.encode(), b"true", b"false", b"null", b"[]", b"{}", b"[[],{}]", b" [ 1 , 2 ]\t",
    b'{"a":{"b":[null]}}', b'{"":0}', b"\r\n7\n",
]  # fmt: skip
NO = [
    b"+1", b"01", b"-01", b"1.", b".5", b"-", b"1e", b"1e+", b"0x1F", b"--1", b"1_000", b"1,000", b"1 2", b"- 1",
    b"1.e5", "\uff11".encode(), b"Inf", b"nan", b"0.1.2", b"1e1.5", b"1a", b"2.e3", b"-x", b"0e", b"9.e+", b"'a'",
    b'"', b'"a', b'"\\', b'"\\a"', b'"\\u12"', b'"\\u12x4"', b'"\\x41"', b'"\x1f"', b'"a\nb"', b'"\t"', b"a", b'"a"b',
    b"tru", b"TRUE", b"True", b"nul", b"nulll", b"undefined", b"true false", b"()", b"<a>", b"@", b"\\u0031", b"`1`",
    b"[", b"]", b"[1", b"[1,", b"[1,]", b"[,1]", b"[,]", b"[1,,2]", b"[1 2]", b"[1:2]", b"[1}", b"[]]", b"[1;2]",
    b"[\x0c]", b"{", b"}", b'{"a"', b'{"a":', b'{"a":1', b'{"a":1,}', b'{,"a":1}', b'{"a" 1}', b'{"a",1}', b"{1:2}",
    b"{a:1}", b"{'a':1}", b'{"a":1 "b":2}', b'{"a":1]', b'{"a":1}}', b'{"a"::1}', b'{"a":1;"b":2}', b"{null:1}",
    b'{"a":}', b"{:1}", b"// a\n1", b"/* a */ 1", b"1 // a", b"# a\n1", b"{} {}", b"[] []", b"\0",
    b"\xc2\xa01", b"\xe2\x81\xa01", b'"\xff"', b'"\xc0\xaf"', b'"\x80"', b'"\xe2\x82"', b'"\xf5\x80\x80\x80"',
    b"\xff", b"[\xe9]", b"", b" ", b"NaN", b"Infinity", b"-Infinity",
]  # fmt: skip
EITHER = [
    b"1\0",  # UTF-16
    b"1e400", b"-1e400", b"1e-400", b"9" * 400, b"-" + b"9" * 4000, b"9" * 5000,
    b"0." + b"1" * 5000, b"1e" + b"9" * 50, b"18446744073709551616", b"-9223372036854775809", b"4294967296",
    rb'"\ud800"', rb'"\udc00\ud800"', rb'"\ud800a"', b'"\xed\xa0\x80"', rb'{"\udead":"\udead"}',
    rb'"\ud800\ud800\udc00"', b'{"a":1,"a":2}', b'{"a":1,"a":1}', b'{"a":0,"\\u0061":1}', b"\xef\xbb\xbf1",
    b"\xef\xbb\xbf", "[1]".encode("utf-16"), "[1]".encode("utf-16-be"), "[1]".encode("utf-32"),
    b"[" * 500 + b"]" * 500, b'{"a":' * 500 + b"1" + b"}" * 500, b"[" * 100_000, b'[{"":' * 50_000,
    b'"' + b"a" * 100_000 + b'"',
]  # fmt: skip


def places() -> Iterator[tuple[str, bytes, bytes]]:
    """Verdict (yes, no, either), the atom, and a document that it makes."""
    for verdict, atoms in (("yes", YES), ("no", NO), ("either", EITHER)):
        for atom in atoms:
            yield verdict, atom, atom
            if not atom.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\0")):
                yield verdict, atom, b"[" + atom + b"]"
                yield verdict, atom, b'{"a": ' + atom + b"}"
