"""Generate the documentation that follows from the source: ``python -m docs.generate [--check]``.

The pages of `docs/protocol/` follow from the declared messages, the errata from decoding the examples of the protocol
texts, `docs/cli.md` from the help texts, and the tables of options in `docs/node.md`, `docs/spark.md` and
`docs/pipelines.md` from the declared options. The stream states in `docs/streams.md` follow from the table that the
program runs. `docs/conformance.md` follows from the statements in `tests/conformance` and the tests that show them; a
statement without a test is an error. With ``--check`` nothing is written: stale pages are listed, and the exit code
is 1.
"""

import argparse
import sys
from pathlib import Path

from docs.cli_page import cli_page
from docs.conformance_page import conformance_page, faults
from docs.errata_page import errata_page
from docs.options_pages import options_pages
from docs.protocol_pages import index_page, protocol_page
from docs.streams_page import streams_page
from upriver.wire import DIALECTS

DOCS = Path(__file__).parent


def pages() -> dict[Path, str]:
    """Every generated page: where it belongs and what it says."""
    protocol = DOCS / "protocol"
    return {
        protocol / "README.md": index_page(),
        **{protocol / f"{name}.md": protocol_page(dialect) for name, dialect in DIALECTS.items()},
        protocol / "errata.md": errata_page(),
        DOCS / "cli.md": cli_page(),
        **options_pages(),
        DOCS / "streams.md": streams_page(),
        DOCS / "conformance.md": conformance_page(),
    }


def stale() -> dict[Path, str]:
    """The stale pages with their new text; a page of `docs/protocol` that nothing generates gets an empty one."""
    wanted = pages()
    found = {path: wanted.get(path, "") for path in sorted((DOCS / "protocol").glob("*.md")) if path not in wanted}
    return found | {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}


def write(found: dict[Path, str]) -> None:
    for path, text in found.items():
        path.parent.mkdir(exist_ok=True)
        if text:
            path.write_text(text)
        else:
            path.unlink()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description="Generate the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    check = parser.parse_args(arguments).check
    found = stale()
    if not check:
        write(found)
    for path in found:
        name = path.relative_to(DOCS.parent)
        print(
            f"{name} is stale: run `make docs`" if check else f"wrote {name}", file=sys.stderr if check else sys.stdout
        )
    wrong = faults()
    for fault in wrong:
        print(fault, file=sys.stderr)
    return 1 if wrong or (check and found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
