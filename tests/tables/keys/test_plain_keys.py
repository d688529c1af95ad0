"""The plain twin alone, as a machine without a C compiler has it; ``test_keys`` compares both."""

import subprocess
import sys

from upriver.tables.keys import plain_keys

WITHOUT = """
import sys
sys.modules["upriver.tables.keys._keys"] = None
import numpy as np, pyarrow as pa
from upriver.tables.keys import entries
assert entries.CODEC == "plain"
found = entries.hash_keys(bytes(16), np.zeros(2, np.uint16), pa.array([b"a", b"b"]))
print(entries.sort_entries(found).tolist())
"""


def test_the_plain_twin_takes_over_without_a_compiler() -> None:
    printed = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True).stdout
    hashes = [plain_keys.sip_hash(bytes(16), 0, key) for key in (b"a", b"b")]
    expected = [
        [int.from_bytes(each[:6], "little"), int.from_bytes(each[6:10], "little") << 32 | number]
        for number, each in enumerate(hashes)
    ]
    assert printed.strip() == str(sorted(expected))
