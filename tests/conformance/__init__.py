"""What the five protocol texts say, statement by statement, and tests over real sockets that show it.

The declarations (``upr``, ``upr_draft3``, ``short_drafts``, ``tap``) paraphrase each statement once. A test names the
statements that it shows: ``@pytest.mark.shows("upr:open-key")``. `docs/conformance.md` follows from both, and
``make check`` fails where a statement has no test.
"""

from tests.conformance.open_issues import OPEN_ISSUES
from tests.conformance.short_drafts import UPR_DRAFT1, UPR_DRAFT2
from tests.conformance.statement import Text
from tests.conformance.tap import TAP
from tests.conformance.upr import UPR
from tests.conformance.upr_draft3 import UPR_DRAFT3

__all__ = ["OPEN_ISSUES", "TEXTS"]

#: The newest text first.
TEXTS: tuple[Text, ...] = (UPR, UPR_DRAFT3, UPR_DRAFT2, UPR_DRAFT1, TAP)
