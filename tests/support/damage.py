"""Valid files with a few bytes or values changed, as a disk, an editor or another program would."""

from __future__ import annotations

import re
from random import Random

VALUE = re.compile(rb'"[^"\n]*"|-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|true|false|null|\[\]|\{\}')
HOSTILE = (
    *(b"null", b"-1", b"0", b"true", b'""', b"[]", b"{}", b"[[]]", b'{"a": 1}', b"1.5", b"1e20", b"1e400", b"NaN"),
    *(b'"\\u0000"', b'"\\u001b[31m"', b'"\\ud800"', b"9" * 30, b"9" * 5000, b"[" * 3000, b"!!timestamp ", b"!!int "),
    *(b"&a [*a]", b"-9223372036854775809", b'"' + b"x" * 500 + b'"', b"\xff", b"\x00"),
    *(b"2147483647", b"2147483648", b"9223372036854775807", b"1" + b"0" * 20),
)
LARGE = [number.to_bytes(size, "little") for number, size in ((2**31 - 1, 4), (2**31, 4), (2**63 - 1, 8), (10**20, 9))]


def damaged_bytes(data: bytes, seed: int) -> bytes:
    """Flips, truncates or splices bytes."""
    random, out = Random(seed), bytearray(data)
    for _ in range(random.choice((1, 1, 1, 3, 10))):
        at, length = random.randrange(len(out)), random.choice((1, 2, 4, 8, 64))
        match random.choice(("flip", "flip", "extreme", "large", "truncate", "splice", "insert", "remove")):
            case "flip":
                out[at] ^= 1 << random.randrange(8)
            case "extreme":
                out[at : at + length] = random.choice((b"\x00", b"\xff", b"\x7f")) * length
            case "large":
                number = random.choice(LARGE)
                out[at - at % 4 : at - at % 4 + len(number)] = number
            case "truncate":
                del out[max(at, 1) :]
            case "splice":
                start = random.randrange(len(out))
                out[at : at + length] = out[start : start + length]
            case "insert":
                out[at:at] = random.randbytes(length)
            case "remove" if len(out) > length:
                del out[at : at + length]
    return bytes(out)


def damaged_values(text: bytes, seed: int) -> bytes:
    """Replaces one to three values of JSON or YAML by values of other types and sizes."""
    random, out = Random(seed), text
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if found := [*VALUE.finditer(out)]:
            start, end = random.choice(found).span()
            out = out[:start] + random.choice(HOSTILE) + out[end:]
    return out
