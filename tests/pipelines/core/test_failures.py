"""Why a query has ended: read from errors, and from what Spark writes about them."""

import pytest

from upriver.errors import (
    ClusterMapError,
    ConnectionLost,
    DataLoss,
    LoginImpossible,
    NoSuchVbucket,
    OptionError,
    QueryRolledBack,
    RowsRefused,
    StreamRefused,
    TemporaryFailure,
    Unreachable,
)
from upriver.pipelines.core.directory import LoggedBatch
from upriver.pipelines.core.failures import Trouble, is_temporary, trouble
from upriver.spark.offsets import Offset, VbucketOffset

READING = """[STREAM_FAILED] Query failed: Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times
  File "/x/upriver/spark/range_reader.py", line 96, in read
    raise self._failure
upriver.errors.StreamRefused: vbucket 12: no owner (changes 10 to 20, asked for 60 s)

	at org.apache.spark.api.python.BasePythonRunner
"""
WRITING = """PythonException
  File "/x/upriver/spark/row_writer.py", line 71, in write
upriver.errors.RowsRefused: 1 rows were refused, for example b'k': vbucket 3: Too large (status 0x03). Set errorsAs
"""


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (Unreachable("a:1", "no answer"), True),
        (ConnectionLost("a:1", "gone"), True),
        (TemporaryFailure(), True),
        (StreamRefused(3, "no"), True),
        (ConnectionRefusedError("no"), True),
        (DataLoss(3, "no node has it any more"), True),
        (DataLoss(3, "its history was replaced: uuid 0x5"), False),
        (LoginImpossible("a:1", "no way"), False),
        (ClusterMapError("no node of a:1 returned a cluster map"), True),
        (NoSuchVbucket("vbucket 16 does not exist; the bucket has vbuckets 0 to 15"), False),
        (RowsRefused(1, ["b'k': Locked (status 0x09)"]), True),
        (RowsRefused(1, ["b'k': Too large (status 0x03)"]), False),
        (OptionError("to", "", "name it"), False),
        (QueryRolledBack(1, 2, "x", 3, "y"), False),
        (ZeroDivisionError(), False),
    ],
)
def test_only_what_may_pass_is_tried_again(error: Exception, passes: bool) -> None:
    assert is_temporary(error) is passes
    assert trouble(error, applying=True).is_temporary is passes
    text = f"lots of words\nupriver.errors.{type(error).__name__}: {error}\n\tat java.lang"
    if type(error).__module__ == "upriver.errors":
        assert trouble(text, applying=False).is_temporary is passes


def test_sparks_text_tells_the_stage_and_the_vbucket() -> None:
    found = trouble(READING, applying=True)
    assert (found.stage, found.vbucket, found.is_temporary) == ("read", 12, True)
    assert found.why.startswith("vbucket 12: no owner")
    found = trouble(WRITING, applying=True)
    assert (found.stage, found.vbucket, found.is_temporary) == ("write", 3, False)
    assert trouble("something\nValueError: no such thing\n", applying=False) == Trouble(
        "plan", "ValueError: no such thing", False, None
    )
    assert trouble(ZeroDivisionError("by zero"), applying=True).stage == "apply"


def test_the_place_is_told_as_exactly_as_it_is_known() -> None:
    start = Offset([VbucketOffset.consistent_at(n, 0x5, 10) for n in range(3)])
    end = Offset(
        [
            VbucketOffset(0, 0x5, 20, 10, 0, 10),
            VbucketOffset(1, 0x5, 30, 10, 0, 10),
            VbucketOffset.consistent_at(2, 0x5, 10),
        ]
    )
    batch = LoggedBatch(7, start, end, is_done=False)
    of_one, of_all = Trouble("read", "why", True, 1), Trouble("apply", "why", False)
    assert of_one.where(batch) == "batch 7, vbucket 1 (changes 10 to 30)"
    assert of_one._replace(vbucket=2).where(batch) == "batch 7, vbucket 2 (after change 10)"
    assert of_all.where(batch) == "batch 7, 2 vbuckets, first vbucket 0 (changes 10 to 20)"
    assert of_all.where(batch._replace(is_done=True)) == "after batch 7, which ended at vbucket 1 change 30 and others"
    assert of_all.where(None) == "before the first batch"
    assert of_one.where(None) == "vbucket 1, before the first batch"


def test_what_troubles_spark_itself_may_pass() -> None:
    late = "org.apache.spark.SparkException: Python worker failed to connect back."
    shared = "Job aborted due to stage failure: Task serialization failed: java.lang.IllegalStateException"
    twice = "Multiple streaming queries are concurrently using file:/x/spark/offsets"
    for text in ("[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log.", twice, late, shared):
        assert trouble(text, applying=False).is_temporary
    refused = f"{late}\nupriver.errors.AccessDenied: vbucket 3: No access (status 0x24)"
    assert not trouble(refused, applying=False).is_temporary  # our own word weighs more
