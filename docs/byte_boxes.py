"""Boxes for fields, four bytes to a row, as the texts draw the layout of a message."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from upriver.wire.explain import SCALE, rule

_CELL = 16

#: A label and how many bytes it takes.
Box = tuple[str, int]


def draw(boxes: Sequence[Box]) -> str:
    """The diagram, with the total below it."""
    owners = [number for number, (_, size) in enumerate(boxes) for _ in range(size)]
    rows = [owners[at : at + 4] for at in range(0, len(owners), 4)]
    named_at = {owner: _best_row(owner, label, rows) for owner, (label, _) in enumerate(boxes)}
    lines = [*SCALE, rule(4)]
    for number, row in enumerate(rows):
        labels = {owner: boxes[owner][0] for owner in row if named_at[owner] == number}
        begins = number == 0 or set(row) != set(rows[number - 1][-1:])
        lines.append((f"{4 * number:4}|" if begins else "    |") + "".join(_segments(row, labels)))
        goes_on = len(set(row)) == 1 and rows[number + 1 : number + 2] == [row]
        if not goes_on:  # a field that fills the next row too stays open
            lines.append(rule(len(row)))
    return "\n".join((*lines, f"    Total {len(owners)} byte{'' if len(owners) == 1 else 's'}"))


def _best_row(owner: int, label: str, rows: Sequence[Sequence[int]]) -> int:
    """The first row where the field has room for its name, or the one where it has most."""
    room = {number: _CELL * row.count(owner) - 1 for number, row in enumerate(rows) if owner in row}
    return next((number for number, width in room.items() if width > len(label)), max(room, key=lambda at: room[at]))


def _segments(row: Sequence[int], labels: Mapping[int, str]) -> Iterator[str]:
    for owner, run in groupby(row):
        width = _CELL * len(list(run)) - 1
        label = f" {labels[owner]}" if owner in labels else ""
        yield f"{label[:width]:{width}}|"
