"""The program that judges large documents."""

import io
import pickle

from upriver.engine.filters.json_match import SIZES, answer_all, matches


def test_questions_are_answered_in_their_order() -> None:
    asked = [
        (b'{"a": {"b": 7}}', (("a", "b"), 7, False)),
        (b'{"a": {"b": 8}}', (("a", "b"), 7, False)),
        (b'{"a": [1, 7]}', (("a",), 7, True)),
        (b"not JSON", (("a",), 7, True)),
        (b"[" * 100_000, (("a",), 7, True)),
    ]
    pieces = [(pickle.dumps(question), document) for document, question in asked]
    sent = b"".join(SIZES.pack(len(each), len(document)) + each + document for each, document in pieces)
    answers = io.BytesIO()
    answer_all(io.BytesIO(sent + b"cut"), answers)
    assert list(answers.getvalue()) == [1, 0, 1, 0, 1]
    assert [matches(document, *question) for document, question in asked] == [True, False, True, False, True]
