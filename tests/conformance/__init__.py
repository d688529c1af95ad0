"""What the five protocol texts say, statement by statement, and tests over real sockets that show it.

The declarations (``upr``, ``upr_draft1`` … ``tap``, ``open_issues``) paraphrase each statement once. A test names the
statements that it shows: ``@pytest.mark.shows("upr:open-key")``. `docs/conformance.md` follows from both, and
``make check`` fails where a statement has no test.
"""

from tests.conformance.statement import Text
from tests.conformance.upr import UPR

#: The newest text first.
TEXTS: tuple[Text, ...] = (UPR,)
