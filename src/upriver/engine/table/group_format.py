"""The layout of a group, the unit of commit: a directory of vbuckets, then the records of each."""

import struct
from typing import Final

from upriver.errors import CorruptData

#: The directory's entry of a vbucket: number, flags, bytes of records, high seqno.
GROUP_ENTRY: Final = struct.Struct("<HHIQ")
#: For a copy that receives: start and end of its snapshot, count of the consistent seqnos that follow as u64.
GROUP_BOUNDS: Final = struct.Struct("<QQI")
#: Number of entries, bytes of the directory.
GROUP_HEADER: Final = struct.Struct("<II")
#: The flag of an active copy: every seqno is consistent, so no bounds follow.
WROTE_ITSELF: Final = 1


def group_parts(number: int, group: bytes | memoryview) -> list[tuple[int, int, bytes | memoryview]]:
    """The parts of a stored group: for each vbucket its number, its high seqno and its records."""
    found: list[tuple[int, int, bytes | memoryview]] = []
    try:
        count, size = GROUP_HEADER.unpack_from(group, 0)
        offset, body = GROUP_HEADER.size, GROUP_HEADER.size + size
        for _ in range(count):
            vbucket, flags, length, high = GROUP_ENTRY.unpack_from(group, offset)
            offset += GROUP_ENTRY.size
            if not flags & WROTE_ITSELF:
                offset += GROUP_BOUNDS.size + 8 * GROUP_BOUNDS.unpack_from(group, offset)[2]
            found.append((vbucket, high, group[body : body + length]))
            body += length
    except struct.error:
        raise CorruptData("", f"group {number} cannot be read") from None
    if body > len(group):
        raise CorruptData("", f"group {number} ends too early")
    return found
