"""Checks the pages of an LMDB file before LMDB opens it.

LMDB trusts its file: a damaged branch page makes it read anywhere, and where it notices damage it aborts the process.
So each page of the last commit's trees is checked once: its number and kind, that its entries lie inside it, that no
page is used twice, and that the trees hold as many entries as they claim. Values are mostly in overflow pages, of which
only the header is checked; they have checksums of their own.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MAGIC: Final = 0xBEEFC0DE
_HEADER: Final = struct.Struct("<QHHHH")  # page number, padding, flags, lower, upper
_META: Final = struct.Struct("<IIQQ48s48sQQ")  # magic, version, address, map size, free, main, last page, transaction
_TREE: Final = struct.Struct("<IHHQQQQQ")  # padding, flags, depth, branches, leaves, overflow pages, entries, root
_NODE: Final = struct.Struct("<HHHH")  # two halves of a size or page number, flags, size of the key
_NUMBER: Final = struct.Struct("<Q")
_COUNT: Final = struct.Struct("<I")
_BRANCH, _LEAF, _OVERFLOW, _DIRTY = 0x01, 0x02, 0x04, 0x10
_BIG, _SUBTREE = 0x01, 0x02
_NO_PAGE: Final = 2**64 - 1
_DEPTH_MAX: Final = 32
_PAGE_BYTES_MAX: Final = 65536


class Damaged(Exception):
    """A page is damaged: which one, and how."""


@dataclass(frozen=True, slots=True)
class MetaPage:
    """The meta page of a commit: its last page and its two trees."""

    transaction: int
    page_bytes: int
    room: int
    last: int
    free: bytes
    main: bytes


def meta_pages(file: Path) -> list[MetaPage]:
    """The meta pages of the last two commits, newest first; ``Damaged`` if none is valid, [] for an empty file."""
    with file.open("rb") as opened:
        start = opened.read(2 * _PAGE_BYTES_MAX)
    if not start:
        return []
    # The page size is in the padding of the first tree, in either meta page.
    first = _head(start, 0)
    second = _head(start, first.page_bytes if first is not None else mmap.PAGESIZE)
    found = [head for head in (first, second) if head is not None]
    if not found:
        raise Damaged("neither LMDB meta page is valid")
    return sorted(found, key=lambda head: head.transaction, reverse=True)


def _head(start: bytes, place: int) -> MetaPage | None:
    if place + _HEADER.size + _META.size > len(start):
        return None
    magic, version, _, room, free, main, last, transaction = _META.unpack_from(start, place + _HEADER.size)
    if magic != _MAGIC or version != 1:
        return None
    page_bytes = _TREE.unpack(free)[0]
    if not 512 <= page_bytes <= _PAGE_BYTES_MAX or page_bytes & (page_bytes - 1):
        raise Damaged(f"an LMDB meta page claims pages of {page_bytes} bytes")  # LMDB would believe it
    return MetaPage(transaction, page_bytes, room, last, free, main)


def check_pages(file: Path, head: MetaPage | None = None) -> None:
    """Raise ``Damaged`` if the trees of a commit, by default the last one, are damaged; an empty file passes.

    A writer reuses the pages of a commit as soon as newer commits have replaced them. For a file in use, name a commit
    that a read transaction of LMDB keeps.
    """
    with file.open("rb") as opened:
        size = file.stat().st_size
        if size == 0:
            return
        with mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ) as pages:
            _Walk(pages, head or meta_pages(file)[0]).check()


class _Walk:
    """One check of a file."""

    def __init__(self, pages: mmap.mmap, head: MetaPage) -> None:
        self._pages = pages
        self._seen: set[int] = set()
        # The file may end before the last page: pages allocated and freed in one transaction are never written.
        self._page_bytes, self._last, self._free, self._main = head.page_bytes, head.last, head.free, head.main
        if (head.last + 1) * head.page_bytes > head.room:
            raise Damaged(f"an LMDB meta page claims {head.last + 1} pages, but only {head.room} bytes are reserved")

    def check(self) -> None:
        trees = [("the free pages", self._free), ("the tables", self._main)]
        while trees:
            name, tree = trees.pop()
            trees += self._check_tree(name, tree)

    def _check_tree(self, name: str, tree: bytes) -> list[tuple[str, bytes]]:
        """Check one tree and return the trees in its leaves."""
        _, _, depth, _, _, _, entries, root = _TREE.unpack(tree)
        if root == _NO_PAGE:
            if entries:
                raise Damaged(f"{name}: the root is missing")
            return []
        if not 1 <= depth <= _DEPTH_MAX:
            raise Damaged(f"{name}: {depth} levels")
        found: list[tuple[str, bytes]] = []
        todo, counted = [(root, depth)], 0
        while todo:
            number, level = todo.pop()
            nodes = self._nodes(name, number, _LEAF if level == 1 else _BRANCH)
            if level > 1:
                todo += [(low | high << 16 | flags << 32, level - 1) for low, high, flags, _, _ in nodes]
                continue
            counted += len(nodes)
            for low, high, flags, key_bytes, place in nodes:
                found += self._check_leaf(name, low | high << 16, flags, key_bytes, place)
        if counted != entries:
            raise Damaged(f"{name}: {counted} entries instead of {entries}")
        return found

    def _nodes(self, name: str, number: int, kind: int) -> list[tuple[int, int, int, int, int]]:
        """The entries of a page: their four fields, and the offset of each in the file."""
        start = self._page(name, number)
        _, _, flags, lower, upper = _HEADER.unpack_from(self._pages, start)
        if flags & ~_DIRTY != kind or lower % 2 or not _HEADER.size < lower <= upper <= self._page_bytes:
            raise Damaged(f"{name}: page {number} has the wrong kind")
        pointers = struct.unpack_from(f"<{(lower - _HEADER.size) // 2}H", self._pages, start + _HEADER.size)
        if min(pointers) < upper or max(pointers) + _NODE.size > self._page_bytes:
            raise Damaged(f"{name}: page {number} has an entry that starts outside of it")
        nodes = []
        for pointer in pointers:
            low, high, flags, key_bytes = _NODE.unpack_from(self._pages, start + pointer)
            size = key_bytes
            if kind == _LEAF:
                size += _NUMBER.size if flags & _BIG else low | high << 16
            if pointer + _NODE.size + size > self._page_bytes:
                raise Damaged(f"{name}: page {number} has an entry that ends outside of it")
            nodes.append((low, high, flags, key_bytes, start + pointer))
        return nodes

    def _check_leaf(self, name: str, size: int, flags: int, key_bytes: int, place: int) -> list[tuple[str, bytes]]:
        data = place + _NODE.size + key_bytes
        if flags & _SUBTREE:
            if size != _TREE.size:
                raise Damaged(f"{name}: a table without a root")
            key = self._pages[place + _NODE.size : data]
            return [(f"the table {key.decode(errors='replace')!r}", self._pages[data : data + size])]
        if flags & _BIG:
            (number,) = _NUMBER.unpack_from(self._pages, data)
            start = self._page(name, number)
            flags = _HEADER.unpack_from(self._pages, start)[2]
            (count,) = _COUNT.unpack_from(self._pages, start + _HEADER.size - _COUNT.size)
            if flags & ~_DIRTY != _OVERFLOW or count * self._page_bytes < _HEADER.size + size:
                raise Damaged(f"{name}: page {number} is not an overflow page of the right size")
            self._check_end(name, number, count)
        return []

    def _page(self, name: str, number: int) -> int:
        """The offset of a page; each page is visited once."""
        start = number * self._page_bytes
        if number < 2:
            raise Damaged(f"{name}: page {number} is a meta page")
        self._check_end(name, number, 1)
        if number in self._seen:
            raise Damaged(f"{name}: page {number} is used twice")
        self._seen.add(number)
        if _NUMBER.unpack_from(self._pages, start)[0] != number:
            raise Damaged(f"{name}: page {number} has the wrong number")
        return start

    def _check_end(self, name: str, number: int, count: int) -> None:
        if number + count > self._last + 1:
            raise Damaged(f"{name}: page {number} reaches beyond the last page")
        if (number + count) * self._page_bytes > len(self._pages):
            raise Damaged(f"{name}: the file ends before the end of page {number}")
