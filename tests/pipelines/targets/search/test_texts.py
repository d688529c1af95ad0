"""What of a document is searched."""

import pytest

from upriver.pipelines.targets.search.texts import TEXT_MAX, document_of, text_of


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b'{"a": "red shoes", "n": 7, "ok": true, "deep": [{"b": "more"}, null, 1.5]}', "red shoes 7 more 1.5"),
        ('["grün"]'.encode(), "grün"),
        (b"plain text", "plain text"),
        (b"{broken", "{broken"),
        (b"\xff\xfe", ""),
        (b"", ""),
        (b'{"half": "\\ud800"}', "?"),
        (b"[" * 100_000, "[" * 100_000),
    ],
)
def test_the_words_of_a_value(value: bytes, text: str) -> None:
    assert text_of(value) == text


def test_long_texts_are_cut() -> None:
    assert len(text_of(b"x" * (TEXT_MAX + 5))) == TEXT_MAX


def test_documents_are_objects() -> None:
    assert document_of(b'{"a": 1}') == {"a": 1}
    assert document_of(b"[1]") is None
    assert document_of(b"\xff") is None
