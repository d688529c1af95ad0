"""Tables that follow from declarations, between marks in a page that is written by hand."""


def with_table(text: str, page: str, name: str, table: str) -> str:
    """The page with this table between the marks of that name; ``page`` is for the error if there are none."""
    begin, end = f"<!-- {name} options: generated, run `make docs` -->\n", f"<!-- end of {name} options -->\n"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    assert found + closed == begin + end, f"{page} has lost the marks, or has no marks for the options of {name}"
    return f"{before}{begin}\n{table}\n{end}{after}"
