"""Where we say something else over TAP than the recorded servers did, and why we want to."""

from tests.support.recorded_differences import Difference

GOODBYE = "The text says that the sending node signals with it that it is finished and closes its connection."
TWICE = (
    "Those servers send a backfill and then the same changes again from memory; "
    "no change is sent twice without a reconnect."
)

DIFFERENCES = (
    Difference(
        "tap_01_dump",
        "t",
        37,
        (
            "+ delete rev 2 ttl 255 b",
            "+ mutation rev 1 ttl 255 flags 0 expires c=3",
            "+ mutation rev 2 ttl 255 flags 1020304 a=1bis",
            "+ close_backfill",
        ),
        "A dump is complete, also with what is not on disk yet.",
    ),
    Difference("tap_01_dump", "t", 0, ("+ close_tap_stream",), GOODBYE),
    Difference("tap_01_dump", "t2", 0, ("+ close_tap_stream",), GOODBYE),
    Difference("tap_01_dump", "t3", 0, ("+ close_tap_stream",), GOODBYE),
    Difference(
        "tap_01_dump",
        "t4",
        38,
        ("+ initial_vbucket_stream", "+ close_backfill"),
        "A client that copies an empty vbucket learns that it is empty, and drops what it has of it.",
    ),
    Difference("tap_01_dump", "t4", 0, ("+ close_tap_stream",), GOODBYE),
    Difference("tap_01_dump", "t5", 0, ("+ close_tap_stream",), GOODBYE),
    Difference(
        "tap_02_backfill_live",
        "t",
        39,
        (
            "+ delete rev 2 ttl 255 b",
            "+ mutation rev 1 ttl 255 flags 0 expires c=3",
            "+ mutation rev 2 ttl 255 flags 1020304 a=1bis",
            "- delete rev 2 ttl 255 b",
            "- mutation rev 1 ttl 255 flags 0 expires c=3",
            "- mutation rev 2 ttl 255 flags 1020304 a=1bis",
            "+ mutation rev 6 ttl 255 flags 0 z=1",
        ),
        "What was not on disk yet was not part of that server's backfill; of ours it is. And each of three quick "
        "writes was sent before the next came; that server was slower and left the first out.",
    ),
    Difference("tap_04_list_vbuckets", "t1", 0, ("+ close_tap_stream",), GOODBYE),
    Difference("tap_04_list_vbuckets", "t2", 0, ("+ close_tap_stream",), GOODBYE),
    Difference(
        "tap_04_list_vbuckets",
        "t0",
        41,
        ("+ mutation rev 1 ttl 255 flags 0 k41-0=v", "+ mutation rev 1 ttl 255 flags 0 k41-1=v", "+ close_backfill"),
        "The recording was cut after 40 packets, before this vbucket's turn came.",
    ),
    Difference(
        "tap_04_list_vbuckets",
        "t0",
        42,
        ("+ mutation rev 1 ttl 255 flags 0 k42-0=v", "+ mutation rev 1 ttl 255 flags 0 k42-1=v", "+ close_backfill"),
        "The same: cut before its turn.",
    ),
    Difference("tap_04_list_vbuckets", "t0", 0, ("+ close_tap_stream",), GOODBYE),
    Difference("tap_04_list_vbuckets", "t0", None, ("+ closed",), "The same: cut before the end."),
    Difference(
        "tap_06_ack",
        "t",
        44,
        (
            '- delete rev 1 ttl 255 b with {"j":2}',
            "+ delete rev 2 ttl 255 b",
            "- delete rev 2 ttl 255 b",
            "- mutation rev 1 ttl 255 flags 0 expires c=3",
            "- mutation rev 2 ttl 255 flags 1020304 a=1bis",
        ),
        TWICE + " A deletion has no value, and none of the past.",
    ),
    Difference("tap_06_ack", "u", 0, ("+ close_tap_stream, answer",), GOODBYE),
    Difference(
        "tap_06_ack",
        "v",
        44,
        (
            "+ delete rev 2 ttl 255 b",
            "+ mutation rev 1 ttl 255 flags 0 expires c=3",
            "+ mutation rev 2 ttl 255 flags 1020304 a=1bis",
            "+ mutation rev 3 ttl 255 flags 0 n=new",
        ),
        "That server waits for the answer to each control message; ours waits where the window is full, "
        "and before it says that everything was taken.",
    ),
    Difference(
        "tap_08_nack",
        "t",
        46,
        (
            "- mutation rev 1 ttl 255 flags 0 k00=v",
            "- mutation rev 1 ttl 255 flags 0 k01=v",
            "- mutation rev 1 ttl 255 flags 0 k02=v",
            "- mutation rev 1 ttl 255 flags 0 k03=v",
            "- mutation rev 1 ttl 255 flags 0 k04=v",
            "- mutation rev 1 ttl 255 flags 0 k05=v",
            "- mutation rev 1 ttl 255 flags 0 live1=v",
            "- mutation rev 1 ttl 255 flags 0 live2=v",
        ),
        TWICE + " And a vbucket that the consumer does not own is not sent any more at all.",
    ),
    Difference("tap_11_takeover", "t", 0, ("+ close_tap_stream, answer",), GOODBYE),
    Difference(
        "tap_11_takeover",
        "t",
        49,
        (
            "- delete rev 2 ttl 255 b",
            "- mutation rev 1 ttl 255 flags 0 expires c=3",
            "- mutation rev 2 ttl 255 flags 1020304 a=1bis",
        ),
        TWICE,
    ),
    Difference(
        "tap_11_takeover",
        "u",
        50,
        (
            "- delete rev 2 ttl 255 b",
            "- mutation rev 1 ttl 255 flags 0 expires c=3",
            "- mutation rev 2 ttl 255 flags 1020304 a=1bis",
        ),
        TWICE,
    ),
    Difference("tap_11_takeover", "u", 0, ("+ close_tap_stream",), GOODBYE),
    Difference(
        "tap_14_consumer",
        "ctl",
        54,
        (
            "- 0x00 success, v1 flags 11000000",
            "+ 0x00 success, v1 flags 11",
            "- 0xa0 success, rev 7 flags 11000000 deleted 0",
            "+ 0xa0 success, rev 7 flags 11 deleted 0",
        ),
        "Item flags are in network order on the wire; that server took them in the order of its machine.",
    ),
)
