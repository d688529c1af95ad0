"""Deletion vectors: bitmaps of deleted rows, in the format of the Delta protocol.

A vector is a *RoaringBitmapArray* in its portable form: a magic number, the number of 32-bit bitmaps, and each of them
with its key. Positions in our files have 32 bits, so we write one bitmap with the key 0.

The vectors of one commit share a file: a version byte, then for each vector its size, the bytes and their CRC-32 (both
numbers in big-endian order). The descriptor in the log has the offset of the size. Our files are in a folder whose name
starts with an underscore, so that a foreign VACUUM keeps them.
"""

import base64
import struct
import uuid
import zlib
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote, urlsplit

from pyroaring import BitMap

from upriver.errors import CorruptData, FilesLost
from upriver.tables.actions import DeletionVector
from upriver.tables.storage import TableStorage

#: The folder of vectors, sidecars and key lists.
HIDDEN: Final = "_upriver"
MAGIC: Final = 1681511377
_VERSION: Final = b"\x01"
_RFC1924: Final = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85: Final = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_UUID_CHARACTERS: Final = 20


def encode_bitmap(dead: BitMap) -> bytes:
    """A bitmap as the bytes of a vector."""
    return struct.pack("<IQI", MAGIC, 1, 0) + bytes(dead.serialize())


def decode_bitmap(data: bytes, name: str) -> BitMap:
    """The bitmap in the bytes of a vector."""
    if len(data) < 12 or struct.unpack_from("<I", data)[0] != MAGIC:
        raise CorruptData(name, "not a deletion vector in the portable format")
    (count,) = struct.unpack_from("<Q", data, 4)
    if not count:
        return BitMap()
    (key,) = struct.unpack_from("<I", data, 12)
    if count > 1 or key:
        raise CorruptData(name, "the deletion vector has positions beyond 32 bits")
    try:
        return BitMap.deserialize(data[16:])
    except ValueError as error:
        raise CorruptData(name, f"the deletion vector is damaged: {error}") from error


def write_vectors(storage: TableStorage, dead: Mapping[str, BitMap]) -> dict[str, DeletionVector]:
    """Write the vectors of a commit into one file; returns a descriptor for each. No vectors, no file."""
    if not dead:
        return {}
    name = uuid.uuid4()
    content = bytearray(_VERSION)
    found = {}
    for path, bitmap in dead.items():
        data = encode_bitmap(bitmap)
        found[path] = DeletionVector("u", HIDDEN + encode_z85(name.bytes), len(data), len(bitmap), len(content))
        content += struct.pack(">i", len(data)) + data + struct.pack(">I", zlib.crc32(data))
    storage.write(_vector_file(HIDDEN, name), bytes(content))
    return found


def read_vector(storage: TableStorage, vector: DeletionVector | None) -> BitMap:
    """The positions of deleted rows; empty without a vector."""
    if vector is None:
        return BitMap()
    if vector.storage_type == "i":
        return decode_bitmap(decode_z85(vector.path_or_inline)[: vector.size_bytes], "an inline deletion vector")
    path = vector_path(vector, storage)
    if path is None:
        raise CorruptData(vector.path_or_inline, "the deletion vector is outside of the table's directory")
    try:
        content = storage.read(path, vector.offset or 0, vector.size_bytes + 8)
    except FileNotFoundError:
        raise FilesLost(f"{storage.url}/{path}", "the deletion vector is missing") from None
    data = content[4:-4]
    if len(content) != vector.size_bytes + 8 or struct.pack(">I", zlib.crc32(data)) != content[-4:]:
        raise CorruptData(f"{storage.url}/{path}", f"the deletion vector at {vector.offset} is damaged")
    dead = decode_bitmap(data, path)
    if len(dead) != vector.cardinality:
        raise CorruptData(f"{storage.url}/{path}", f"the deletion vector at {vector.offset} is not the log's")
    return dead


def vector_path(vector: DeletionVector, storage: TableStorage) -> str | None:
    """The file of a vector, below the table's root; None if it is inline or elsewhere."""
    if vector.storage_type == "u":
        prefix = vector.path_or_inline[:-_UUID_CHARACTERS]
        name = uuid.UUID(bytes=decode_z85(vector.path_or_inline[-_UUID_CHARACTERS:]))
        return _vector_file(prefix, name)
    if vector.storage_type == "p":
        root = storage.url.rstrip("/") + "/"
        path = vector.path_or_inline
        if storage.local() is not None and path.startswith("file:"):
            path = unquote(urlsplit(path).path)
        return path[len(root) :] if path.startswith(root) else None
    return None


def _vector_file(prefix: str, name: uuid.UUID) -> str:
    return f"{prefix}/deletion_vector_{name}.bin" if prefix else f"deletion_vector_{name}.bin"


def encode_z85(data: bytes) -> str:
    """Z85 text; the bytes are padded with zeros to a multiple of four."""
    padded = data + bytes(-len(data) % 4)
    return base64.b85encode(padded).translate(bytes.maketrans(_RFC1924, _Z85)).decode()


def decode_z85(text: str) -> bytes:
    """The bytes of Z85 text."""
    return base64.b85decode(text.encode().translate(bytes.maketrans(_Z85, _RFC1924)))
