"""Checks an LMDB file before LMDB opens it.

LMDB trusts its file: a damaged branch page makes it read anywhere, a damaged list of free pages makes it overwrite
stored data, and where it notices damage it may abort the process. So the trees of the last commit are walked once:

- each page has its own number and kind; its entries fill it without gaps, in ascending order, within the bounds that
  the branch above states; the trees have the pages and entries that they claim;
- each page up to the last one is used once by the trees, or listed once as free. So no page number can change without
  a collision with another page;
- each commit of ours stores its transaction number in its tree, where it must equal the number in its meta page, for
  both meta pages. Otherwise one wrong bit in the older meta page makes LMDB prefer the older commit.

Values are mostly in overflow pages, of which only the header is checked; they have checksums of their own. So the time
is proportional to the number of tree pages, not to the size of the file.

If LMDB cannot write a meta page, it puts the previous number back, but over the trees of the new commit. Such a commit
is complete on disk except for its meta page. A damaged number may look the same. In both cases the right thing is to
complete the meta page: see ``complete``.
"""

import mmap
import os
import struct
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from operator import gt
from pathlib import Path
from typing import Final

#: The entry of the main tree with the transaction number of its commit.
COMMIT_KEY: Final = b"commit"
COMMIT_NUMBER: Final = struct.Struct("<Q")

_MAGIC: Final = 0xBEEFC0DE
_HEADER: Final = struct.Struct("<QHHHH")  # page number, padding, flags, lower, upper
_META: Final = struct.Struct("<IIQQ48s48sQQ")  # magic, version, address, map size, free, main, last page, transaction
_META_END: Final = struct.Struct("<QQ")  # last page, transaction
_TREE: Final = struct.Struct("<IHHQQQQQ")  # padding, flags, depth, branches, leaves, overflow pages, entries, root
_NODE: Final = struct.Struct("<HHHH")  # two halves of a size or page number, flags, size of the key
_NUMBER: Final = struct.Struct("<Q")
_COUNT: Final = struct.Struct("<I")
_BRANCH, _LEAF, _OVERFLOW, _METAPAGE = 0x01, 0x02, 0x04, 0x08
_BIG, _SUBTREE = 0x01, 0x02
_INTEGER_KEYS: Final = 0x08
_NO_PAGE: Final = 2**64 - 1
_DEPTH_MAX: Final = 32
_PAGE_BYTES_MAX: Final = 65536
_META_PAGES: Final = 2
_FREE: Final = "the free pages"
_MAIN: Final = "the tables"


class Damaged(Exception):
    """A page is damaged: which one, and how."""


class Unfinished(Damaged):
    """The last commit lacks only its meta page."""

    def __init__(self, commit: "MetaPage") -> None:
        super().__init__(f"the meta page of commit {commit.transaction} was not completed")
        self.commit = commit


@dataclass(frozen=True, slots=True)
class MetaPage:
    """The meta page of a commit: its last page and its two trees."""

    place: int
    transaction: int
    page_bytes: int
    room: int
    last: int
    free: bytes
    main: bytes

    @property
    def root(self) -> int:
        """The root of the main tree."""
        return int(_TREE.unpack(self.main)[-1])


@dataclass(frozen=True, slots=True)
class Contents:
    """What a commit holds."""

    tables: frozenset[bytes]
    #: The transaction number in its tree; None for a commit of an older version.
    number: int | None
    #: The pages that this commit no longer uses, but the one before did.
    released: frozenset[int]


def meta_pages(file: Path) -> list[MetaPage]:
    """Both meta pages, the one of the last commit first; [] for an empty file."""
    with file.open("rb") as opened:
        start = opened.read(2 * _PAGE_BYTES_MAX)
    if not start:
        return []
    first = _meta_page(start, 0, 0)
    second = _meta_page(start, first.page_bytes, 1)
    if second.page_bytes != first.page_bytes:
        raise Damaged("the two LMDB meta pages claim different page sizes")
    return sorted((first, second), key=lambda page: page.transaction, reverse=True)


def _meta_page(start: bytes, place: int, number: int) -> MetaPage:
    if place + _HEADER.size + _META.size > len(start):
        raise Damaged(f"the LMDB meta page {number} is missing")
    kind = _HEADER.unpack_from(start, place)[2]
    magic, version, _, room, free, main, last, transaction = _META.unpack_from(start, place + _HEADER.size)
    if kind != _METAPAGE or magic != _MAGIC or version != 1:
        raise Damaged(f"the LMDB meta page {number} is not valid")
    page_bytes = _TREE.unpack(free)[0]
    if not 512 <= page_bytes <= _PAGE_BYTES_MAX or page_bytes & (page_bytes - 1):
        raise Damaged(f"an LMDB meta page claims pages of {page_bytes} bytes")  # LMDB would believe it
    # A new file has two meta pages of transaction 0; later ones alternate.
    if transaction and transaction % 2 != number:
        raise Damaged(f"the LMDB meta page {number} cannot be that of commit {transaction}")
    return MetaPage(place, transaction, page_bytes, room, last, free, main)


def check_file(file: Path) -> Contents:
    """Check the last commit, and that it is the last one; raise ``Damaged`` otherwise. An empty file passes."""
    metas = meta_pages(file)
    if not metas:
        return Contents(frozenset(), None, frozenset())
    newest, older = metas
    if newest.transaction and newest.transaction != older.transaction + 1:
        raise Damaged(f"the LMDB meta pages claim the commits {older.transaction} and {newest.transaction}")
    with _mapped(file) as pages:
        before = _number(pages, older)
        if before is not None and before == newest.transaction + 1:
            raise Unfinished(replace(older, transaction=before))
        contents = _Walk(pages, newest).check()
        _compare(newest, contents.number)
        _compare(older, before)
        if contents.number is None and before is not None:
            raise Damaged(f"the tree of commit {newest.transaction} lacks its number")
        if older.root != _NO_PAGE and older.root not in contents.released:
            raise Damaged(f"the commit {newest.transaction} does not follow the commit {older.transaction}")
    return contents


def _compare(meta: MetaPage, number: int | None) -> None:
    if number is not None and number != meta.transaction:
        raise Damaged(f"an LMDB meta page claims commit {meta.transaction}, but its tree is that of commit {number}")


def check_commit(file: Path, meta: MetaPage) -> Contents:
    """Check one commit of a file.

    A writer reuses the pages of a commit as soon as newer commits have replaced them. For a file in use, name a commit
    that a read transaction of LMDB keeps.
    """
    with _mapped(file) as pages:
        contents = _Walk(pages, meta).check()
    _compare(meta, contents.number)
    return contents


def complete(file: Path, commit: MetaPage) -> None:
    """Write the meta page of an unfinished commit, if everything else of it is there.

    LMDB syncs all other pages of a commit before the meta page. Its writer was told that the commit failed, and that it
    may take effect nevertheless.
    """
    with _mapped(file) as pages:
        walk = _Walk(pages, replace(commit, last=commit.room // commit.page_bytes - 1))
        contents = walk.check(exact=False)
    _compare(commit, contents.number)
    end = commit.place + _HEADER.size + _META.size
    with file.open("r+b") as opened:
        os.pwrite(opened.fileno(), _META_END.pack(walk.highest, commit.transaction), end - _META_END.size)
        os.fsync(opened.fileno())


def _mapped(file: Path) -> mmap.mmap:
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


def _number(pages: mmap.mmap, meta: MetaPage) -> int | None:
    """The transaction number in the main tree of a commit."""
    return None if meta.root == _NO_PAGE else _Walk(pages, meta).check_main().number


@dataclass(slots=True)
class _Entry:
    """An entry of a leaf page."""

    key: bytes
    flags: int
    size: int
    place: int


class _Walk:
    """One check of a commit."""

    def __init__(self, pages: mmap.mmap, meta: MetaPage) -> None:
        self._pages = pages
        self._meta = meta
        # The file may end before the last page: pages allocated and freed in one transaction are never written.
        self._page_bytes, self._last = meta.page_bytes, meta.last
        if (meta.last + 1) * meta.page_bytes > meta.room:
            raise Damaged(f"an LMDB meta page claims {meta.last + 1} pages, but only {meta.room} bytes are reserved")
        #: 1 for each page that is used or free.
        self._seen = bytearray(meta.last + 1)
        self._seen[:_META_PAGES] = b"\1" * _META_PAGES
        self._count = _META_PAGES
        self.highest = _META_PAGES - 1
        #: The counts of the current tree: branches, leaves and overflow pages.
        self._kinds = [0, 0, 0]

    def check(self, *, exact: bool = True) -> Contents:
        """Check all trees and the list of free pages; ``exact`` unless the last page is unknown."""
        listed = list(self._entries(_FREE, self._meta.free, _INTEGER_KEYS))
        subtrees: dict[bytes, bytes] = {}
        contents = self.check_main(subtrees)
        for key, tree in subtrees.items():
            for _ in self._entries(f"the table {key.decode(errors='replace')!r}", tree, 0):
                pass
        released = self._check_free(listed)
        # LMDB's own compact copy refuses a file with lost pages too.
        known = self._last if exact else self.highest
        if self._count != known + 1 or self.highest != known:
            raise Damaged(f"of {known + 1} pages, {self._count} are used or free")
        return replace(contents, released=released)

    def check_main(self, subtrees: dict[bytes, bytes] | None = None) -> Contents:
        """Check only the main tree, and collect the trees in it."""
        found: dict[bytes, bytes] = {} if subtrees is None else subtrees
        number = None
        for entry in self._entries(_MAIN, self._meta.main, 0, may_nest=True):
            data = self._pages[entry.place : entry.place + entry.size]
            if entry.flags & _SUBTREE:
                if entry.size != _TREE.size:
                    raise Damaged(f"{_MAIN}: a table without a root")
                found[entry.key] = data
            elif entry.key == COMMIT_KEY and not entry.flags and entry.size == COMMIT_NUMBER.size:
                (number,) = COMMIT_NUMBER.unpack(data)
        return Contents(frozenset(found), number, frozenset())

    # Free pages.

    def _check_free(self, listed: list[_Entry]) -> frozenset[int]:
        """Check that listed pages are unused and listed once; returns those that the last commit released."""
        released: array[int] = array("Q")
        for entry in listed:
            (transaction,) = _NUMBER.unpack(entry.key)
            if not 0 < transaction <= self._meta.transaction:  # LMDB starts its search for free pages after 0
                raise Damaged(f"{_FREE}: a list of commit {transaction}, which did not happen")
            numbers = self._page_numbers(entry)
            if not numbers:
                continue
            if numbers[0] > self._last or numbers[-1] < _META_PAGES or not all(map(gt, numbers, numbers[1:])):
                raise Damaged(f"{_FREE}: the list of commit {transaction} is not in order")
            if any(map(self._seen.__getitem__, numbers)):
                used = next(number for number in numbers if self._seen[number])
                raise Damaged(f"{_FREE}: page {used} is used or listed twice")
            deque(map(self._seen.__setitem__, numbers, repeat(1)), maxlen=0)
            self._count += len(numbers)
            self.highest = max(self.highest, numbers[0])
            if transaction == self._meta.transaction:
                released = numbers
        return frozenset(released)

    def _page_numbers(self, entry: _Entry) -> "array[int]":
        """The numbers in a list of free pages. It begins with their count, and may be longer than that."""
        place = entry.place
        if entry.flags & _BIG:
            place = _NUMBER.unpack_from(self._pages, place)[0] * self._page_bytes + _HEADER.size
        if entry.size < _NUMBER.size or entry.size % _NUMBER.size:
            raise Damaged(f"{_FREE}: a list of {entry.size} bytes")
        (count,) = _NUMBER.unpack_from(self._pages, place)
        if (count + 1) * _NUMBER.size > entry.size:
            raise Damaged(f"{_FREE}: a list of {entry.size} bytes claims {count} pages")
        numbers = array("Q")
        numbers.frombytes(self._pages[place + _NUMBER.size : place + (count + 1) * _NUMBER.size])
        return numbers

    # Trees.

    def _entries(self, name: str, tree: bytes, flags: int, *, may_nest: bool = False) -> Iterator[_Entry]:
        """The entries of a tree in order; every page of it is checked."""
        padding, found_flags, depth, *kinds, entries, root = _TREE.unpack(tree)
        if found_flags != flags or padding != (self._page_bytes if name == _FREE else 0):
            raise Damaged(f"{name}: the tree has unknown properties")
        counted, self._kinds = 0, [0, 0, 0]
        if root == _NO_PAGE:
            if depth:
                raise Damaged(f"{name}: the root is missing")
        elif not 1 <= depth <= _DEPTH_MAX:
            raise Damaged(f"{name}: {depth} levels")
        else:
            allowed = (0, _BIG, _SUBTREE) if may_nest else (0, _BIG)
            for entry in self._descend(name, root, depth, None, None):
                if entry.flags not in allowed:
                    raise Damaged(f"{name}: an entry of an unknown kind")
                if entry.flags & _BIG:
                    self._check_overflow(name, entry)
                counted += 1
                yield entry
        if counted != entries or self._kinds != kinds:
            raise Damaged(f"{name}: {counted} entries in {self._kinds} pages instead of {entries} in {kinds}")

    def _descend(self, name: str, number: int, level: int, low: bytes | None, high: bytes | None) -> Iterator[_Entry]:
        """The entries below a page whose keys lie from ``low`` up to, but excluding, ``high``."""
        nodes = self._nodes(name, number, _LEAF if level == 1 else _BRANCH)
        self._kinds[1 if level == 1 else 0] += 1
        keys = [self._pages[place - key_bytes : place] for _, _, key_bytes, place in nodes]
        self._check_order(name, number, keys, low, high, skip_first=level > 1)
        if level == 1:
            for (size, flags, _, place), key in zip(nodes, keys, strict=True):
                yield _Entry(key, flags, size, place)
            return
        bounds = [low, *keys[1:], high]
        for (half, upper, _, _), (child_low, child_high) in zip(nodes, pairwise(bounds), strict=True):
            yield from self._descend(name, half | upper << 32, level - 1, child_low, child_high)

    def _check_order(
        self, name: str, number: int, keys: list[bytes], low: bytes | None, high: bytes | None, *, skip_first: bool
    ) -> None:
        ordered = keys[1:] if skip_first else keys  # LMDB ignores the first key of a branch page
        if name == _FREE:
            if any(len(key) != _NUMBER.size for key in ordered):
                raise Damaged(f"{name}: page {number} has a key of another size")
            # These keys are little-endian numbers.
            ordered = [key[::-1] for key in ordered]
            low, high = low and low[::-1], high and high[::-1]
        inside = not ordered or ((low is None or ordered[0] >= low) and (high is None or ordered[-1] < high))
        if not inside or not all(map(gt, ordered[1:], ordered)):
            raise Damaged(f"{name}: page {number} has its keys in the wrong order")

    def _nodes(self, name: str, number: int, kind: int) -> list[tuple[int, int, int, int]]:
        """The entries of a page: size or lower half of a page number, flags, size of the key, offset of the data."""
        start = self._page(name, number)
        _, _, flags, lower, upper = _HEADER.unpack_from(self._pages, start)
        if flags != kind or lower % 2 or not _HEADER.size < lower <= upper <= self._page_bytes:
            raise Damaged(f"{name}: page {number} has the wrong kind")
        pointers = struct.unpack_from(f"<{(lower - _HEADER.size) // 2}H", self._pages, start + _HEADER.size)
        if min(pointers) < upper or max(pointers) + _NODE.size > self._page_bytes:
            raise Damaged(f"{name}: page {number} has an entry that starts outside of it")
        nodes, ends = [], []
        for pointer in pointers:
            low, high, flags, key_bytes = _NODE.unpack_from(self._pages, start + pointer)
            size, taken = low | high << 16, _NODE.size + key_bytes
            if kind == _LEAF:
                taken += _NUMBER.size if flags & _BIG else size
            ends.append(pointer + taken + taken % 2)
            nodes.append((size, flags, key_bytes, start + pointer + _NODE.size + key_bytes))
        # Entries fill the page from its end, without gaps.
        if sorted([*pointers, self._page_bytes]) != sorted([upper, *ends]):
            raise Damaged(f"{name}: page {number} has an entry that ends outside of its place")
        return nodes

    def _check_overflow(self, name: str, entry: _Entry) -> None:
        (number,) = _NUMBER.unpack_from(self._pages, entry.place)
        start = self._page(name, number)
        flags = _HEADER.unpack_from(self._pages, start)[2]
        (count,) = _COUNT.unpack_from(self._pages, start + _HEADER.size - _COUNT.size)
        if flags != _OVERFLOW or count * self._page_bytes < _HEADER.size + entry.size:
            raise Damaged(f"{name}: page {number} is not an overflow page of the right size")
        self._use(name, number + 1, count - 1)
        self._kinds[2] += count

    def _page(self, name: str, number: int) -> int:
        """The offset of a page; each page is visited once."""
        self._use(name, number, 1)
        start = number * self._page_bytes
        if _NUMBER.unpack_from(self._pages, start)[0] != number:
            raise Damaged(f"{name}: page {number} has the wrong number")
        return start

    def _use(self, name: str, number: int, count: int) -> None:
        end = number + count
        if end > self._last + 1:
            raise Damaged(f"{name}: page {number} reaches beyond the last page")
        if end * self._page_bytes > len(self._pages):
            raise Damaged(f"{name}: the file ends before the end of page {end - 1}")
        if number < _META_PAGES:
            raise Damaged(f"{name}: page {number} is a meta page")
        if self._seen.find(1, number, end) >= 0:
            raise Damaged(f"{name}: page {number} is used twice")
        self._seen[number:end] = b"\1" * count
        self._count += count
        self.highest = max(self.highest, end - 1)
