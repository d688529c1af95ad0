"""Documents that are hard to store in a table."""

import json

_LARGE_BYTES = 20 << 20

ODD: dict[str, bytes] = {
    "empty": b"",
    "large": b'{"text": "%s"}' % (b"x" * (_LARGE_BYTES - len(b'{"text": ""}'))),
    "not JSON": b"\x00\xff" * 1000,
    "fields": json.dumps({f"field{number}": number for number in range(5000)}).encode(),
    "nulls": b'{"n": null, "a": {"b": null, "c": [null, {"d": null}]}}',
    "beyond 64 bits": b'{"n": 123456789012345678901234567890, "m": -9223372036854775809}',
    "twice": b'{"n": 1, "n": 2}',
    "deep": b"[" * 2000 + b"]" * 2000,
    "numbers": b'{"n": 1e400, "m": 1E-7, "o": -0.0}',
    "own names": b'{"_key": "mine", "_seqno": 7, "_vbucket": 99}',
    "cases": b'{"Name": 1, "name": 2, "NAME": 3}',
    "odd names": '{"a b": 1, "": 2, "x;y": 3, "\u00e9": 4, "\ud83d\ude00": 5}'.encode("utf-8", "surrogatepass"),
    "surrogate": b'{"text": "\\ud800"}',
    "scalar": b"17",
    "text": b'"only text"',
}
