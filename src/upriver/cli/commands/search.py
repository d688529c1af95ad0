"""``upriver search``: search an index."""

import click

from upriver.cli.errors import InputError
from upriver.cli.json_lines import text_fields
from upriver.cli.output import on_terminal, show_json, shown
from upriver.cli.run_async import one_line_errors

NOTHING_FOUND = 1
#: Marks around the found words in a snippet; texts do not contain these characters.
_MARKS = ("\x02", "\x03")


@click.command()
@click.argument("index")
@click.argument("query")
@click.option(
    "-n", "--limit", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Maximum number of hits."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines, even on a terminal.")
def search(index: str, query: str, limit: int, as_json: bool) -> None:
    """Search an index that the pipeline index keeps.

    INDEX is the pipeline's --to: a file, or the URL of an index on a server. The best hits come first, each with its
    key and the found words in context; in a pipe they are JSON lines. The exit code is 1 if nothing was found.

    A document must contain all words. "Several words" must be adjacent, and word* matches a prefix. In a file, AND, OR
    and NOT work as well.

    \b
    Examples:
      upriver search index.db 'harbour light*'
      upriver search opensearch+http://127.0.0.1:9200/shop '"red shoes"' | jq -r .key
    """
    try:
        from upriver.pipelines.jobs import search_index
    except ImportError as error:
        raise InputError(f'{error.name} is missing: pip install "upriver[pipelines]"') from None
    with one_line_errors():
        hits = search_index(index, query, limit, _MARKS)
    for hit in hits:
        if as_json or not on_terminal():
            plain = hit.snippet.replace(_MARKS[0], "[").replace(_MARKS[1], "]")
            show_json({**text_fields("key", hit.key), "snippet": plain, "score": round(hit.score, 4)})
        else:
            click.echo(f"{click.style(shown(hit.key), bold=True)}\n  {_coloured(hit.snippet)}")
    if not hits:
        click.get_current_context().exit(NOTHING_FOUND)


def _coloured(snippet: str) -> str:
    """The snippet with the found words in colour and control characters escaped."""
    out = []
    for piece in snippet.split(_MARKS[0]):
        word, mark, rest = piece.rpartition(_MARKS[1])
        out.append(click.style(shown(word.encode()), fg="yellow", bold=True) if mark else "")
        out.append(shown(rest.encode()))
    return "".join(out)
