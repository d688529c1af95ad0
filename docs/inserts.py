"""Generated parts of pages that are otherwise written by hand: each goes between two marks."""

from collections.abc import Mapping
from pathlib import Path


def filled(page: Path, inserts: Mapping[str, str]) -> str:
    """The text of a page with each generated part between its marks."""
    text = page.read_text()
    for name, part in inserts.items():
        begin, end = f"<!-- {name}: generated, run `make docs` -->\n", f"<!-- end of {name} -->\n"
        before, opened, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        assert opened + closed == begin + end, f"{page.name} has lost the marks of its generated part {name}"
        text = f"{before}{begin}\n{part}\n\n{end}{after}"
    return text
