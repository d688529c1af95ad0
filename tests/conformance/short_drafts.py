"""What the first and the second draft say: their texts agree up to the messages of a stream."""

from tests.conformance.statement import Statement, Text

_NO_LENGTH = (
    "The text gives no length of the key, so that key and value cannot be told apart: Upriver puts it into the last "
    "two reserved bytes of the header."
)
_DELETED_AT = "The item expiration, drawn as 0, is the second of the deletion: copies keep tombstones by it."

_SHARED: dict[str, tuple[Statement, ...]] = {
    "Terminology": (
        Statement("consumer", "A consumer asks for data and does something with it."),
        Statement("producer", "A producer supplies the data that was asked for."),
        Statement("stream", "A stream is the series of messages that one request brings about."),
    ),
    "Header": (
        Statement("header-layout", "12 bytes: opcode, three reserved, request id, length."),
        Statement("header-reserved", "The reserved bytes are 0.", _NO_LENGTH),
        Statement("header-request-id", "The request id is 32 bits and names the request that data belongs to."),
        Statement("header-length", "The length counts the bytes behind the header."),
        Statement("opcode-request", "Opcode 1 is a request of the consumer."),
        Statement("opcode-response", "Opcode 2 is the producer's response."),
        Statement("opcode-begin", "Opcode 3 begins a stream."),
        Statement("opcode-message", "Opcode 4 is one message of a stream."),
        Statement("opcode-close", "Opcode 5 ends a stream."),
        Statement(
            "opcode-request-error",
            "Opcode 6 is a request error; the text leaves it at the name.",
            "Its body is a status and a sentence, so that a client learns why it was refused.",
        ),
        Statement(
            "opcode-decode-error",
            "Opcode 7 is a decode error; the text leaves it at the name.",
            "Its body is the offset of the byte and a sentence, and the connection is closed.",
        ),
    ),
    "Request and response": (
        Statement("request-answered", "Each request is answered with success or an error."),
        Statement("type-stream", "Request type 1 asks for a stream."),
        Statement("type-log", "Request type 2 asks for the failover log."),
        Statement("response-ok", "Response type 1 is success."),
        Statement("response-not-mine", "Response type 2: the vbucket is not there."),
        Statement("response-rollback", "Response type 3: the consumer must roll back first."),
    ),
    "Starting a stream": (
        Statement("stream-each", "Each stream has a request of its own."),
        Statement(
            "stream-printed",
            "The printed request asks for a stream of vbucket 12.",
            "With a length that counts all of its bytes; the printed one does not.",
        ),
        Statement("stream-vbucket", "The request names the vbucket."),
        Statement("stream-start", "The start is the last seqno that the consumer has; it is not sent again."),
        Statement("stream-end-seqno", "The stream is closed when the end seqno has been sent."),
        Statement("stream-uuid", "The request has a vbucket uuid and its high seqno, which the text leaves open."),
        Statement("stream-group", "The rest of the request is a group id, which the text leaves open."),
        Statement("ok-printed", "The printed response accepts the request."),
        Statement("not-mine-printed", "The printed response refuses a vbucket that is not there."),
        Statement("rollback-printed", "The printed rollback response has the seqno behind its type."),
        Statement("rollback-meaning", "A consumer that is ahead removes its newer changes, found by that seqno."),
    ),
    "Failover log": (
        Statement(
            "log-printed",
            "The printed request has a type and nothing else.",
            "It names no vbucket and means that of the last stream request. Upriver also accepts a vbucket behind "
            "the type.",
        ),
        Statement("log-zero", "A log may have no pairs at all."),
        Statement("log-pairs", "The response has pairs of a vbucket uuid and a high seqno."),
        Statement("log-answer-printed", "The pairs follow the type of the response, 16 bytes each, as printed."),
    ),
}

UPR_DRAFT1 = Text(
    "upr_draft1",
    "First draft of UPR",
    _SHARED
    | {
        "Streams (unfinished in the text)": (
            Statement(
                "messages-unfinished",
                "The text marks its stream messages as work in progress.",
                "They are framed as in the second draft; the two printed packets are placeholders and are refused.",
            ),
            Statement(
                "message-types", "Types: 1 snapshot start, 2 snapshot end, 3 mutation, 4 deletion, 5 expiration."
            ),
            Statement(
                "mutation-fields", "A mutation has CAS, by seqno, rev seqno, flags, expiration, lock time, key, value."
            ),
            Statement("deletion-fields", "A deletion has the same fields without lock time and value.", _DELETED_AT),
        ),
    },
)

UPR_DRAFT2 = Text(
    "upr_draft2",
    "Second draft of UPR",
    _SHARED
    | {
        "Snapshot": (Statement("snapshot", "A snapshot is a series in which no key occurs twice."),),
        "Streams": (
            Statement("streams-meaning", "A stream request brings a sequence of data of a vbucket."),
            Statement(
                "type-numbers",
                "Types: 1 snapshot start, 2 snapshot end, 3 mutation, 4 deletion, 5 expiration, 6 flush.",
            ),
            Statement("start-first", "The first packet of a stream is the stream start, as printed."),
            Statement("snapshots-framed", "Data comes in snapshots, each between a start and an end message."),
            Statement("snapshot-start-printed", "The printed snapshot start comes off the socket byte for byte."),
            Statement("snapshot-end-printed", "The printed snapshot end comes off the socket byte for byte."),
            Statement("changes", "Mutations, deletions and expirations follow the stream start."),
            Statement("mutation-printed", "The printed mutation comes off the socket.", _NO_LENGTH),
            Statement(
                "deletion-printed",
                "The printed deletion comes off the socket.",
                f"Its length counts all of its bytes; the printed one does not. {_DELETED_AT}",
            ),
            Statement(
                "expiration-printed",
                "The printed expiration comes off the socket.",
                f"Its length counts all of its bytes; the printed one does not. {_DELETED_AT}",
            ),
            Statement("flush", "A flush is a message of type 6."),
        ),
    },
)
