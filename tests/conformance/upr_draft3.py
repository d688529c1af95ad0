"""What the third draft says."""

from tests.conformance.statement import Statement, Text

_LENGTHS = "Its lengths count the bytes that follow; the printed ones do not."
_DELETED_AT = (
    f"{_LENGTHS} The item expiration, drawn as 0, is the second of the deletion: copies keep tombstones by it."
)

UPR_DRAFT3 = Text(
    "upr_draft3",
    "Third draft of UPR",
    {
        "Terminology": (
            Statement("consumer", "A consumer asks for data and does something with it."),
            Statement("producer", "A producer supplies the data that was asked for."),
            Statement("stream", "A stream is the series of messages that one request brings about."),
            Statement("snapshot", "A snapshot is a series in which no key occurs twice."),
        ),
        "Header": (
            Statement("request-header", "Requests have the printed 24-byte header of memcached."),
            Statement("response-header", "Responses have the printed header, with a status for the vbucket."),
            Statement("magic", "Magic 0x80 is a request, 0x81 a response."),
            Statement("opcode-stream", "0x50 requests a stream."),
            Statement("opcode-log", "0x51 requests the failover log."),
            Statement("opcode-start", "0x52 starts a stream."),
            Statement("opcode-end", "0x53 ends a stream."),
            Statement("opcode-snapshot-start", "0x54 starts a snapshot."),
            Statement("opcode-snapshot-end", "0x55 ends a snapshot."),
            Statement("opcode-mutation", "0x56 is a mutation."),
            Statement("opcode-deletion", "0x57 is a deletion."),
            Statement("opcode-expiration", "0x58 is an expiration."),
            Statement("opcode-flush", "0x59 deletes everything of a vbucket."),
            Statement("opcode-state", "0x5a changes the state of a vbucket."),
            Statement("key-length", "The key length is 0 where there is no key."),
            Statement("extra-length", "The extra length counts what precedes key and value."),
            Statement("vbucket", "A request names its vbucket, 0 if it has none."),
            Statement("status", "The status of a response is 0 for success, otherwise an error."),
            Statement("total-body", "The total body counts the bytes behind the header."),
            Statement("opaque", "The opaque is the request id: it names the request that data belongs to."),
            Statement("cas", "The CAS is that of the key, 0 in messages without one."),
        ),
        "Request and response": (
            Statement("request-answered", "Each request is answered with success or an error."),
            Statement(
                "request-types",
                "Stream requests have type 1, failover log requests type 2.",
                "The opcode says which it is. Byte 5, where two diagrams print a type, is the data type and ignored.",
            ),
            Statement("error-ok", "Error code 0 is success."),
            Statement("error-not-mine", "Error code 7: the vbucket is not there."),
            Statement("error-rollback", "Error code 0x23: the consumer must roll back first."),
        ),
        "Starting a stream": (
            Statement("stream-each", "Each stream has a request of its own."),
            Statement("stream-printed", "The printed request asks for a stream of vbucket 12."),
            Statement("stream-vbucket", "The request names the vbucket."),
            Statement("stream-flags", "Flags modify what the stream sends."),
            Statement("stream-start", "The start is the last seqno that the consumer has; it is not sent again."),
            Statement("stream-end-seqno", "The stream is closed when the end seqno has been sent."),
            Statement(
                "stream-uuid", "The uuid of a vbucket changes after an unclean shutdown and with each activation."
            ),
            Statement("stream-high", "The high seqno is the one at which the uuid was generated."),
            Statement("stream-group", "The key is a group id, the name of the stream."),
            Statement("ok-printed", "The printed response, a header alone, accepts the request."),
            Statement(
                "not-mine-printed",
                "The printed response, a header alone, refuses a vbucket that is not there.",
                "With status 7, as the text's list of errors says; the printed status is 1.",
            ),
            Statement("rollback-printed", "The printed rollback response has the seqno behind the header.", _LENGTHS),
            Statement("rollback-meaning", "A consumer that is ahead removes its newer changes, found by that seqno."),
        ),
        "Failover log": (
            Statement("log-printed", "The printed request asks for the log of vbucket 12."),
            Statement("log-zero", "A log may have no pairs at all."),
            Statement("log-pairs", "The response has pairs of a vbucket uuid and a high seqno."),
            Statement("log-answer-printed", "The pairs are 16 bytes each, as printed.", _LENGTHS),
            Statement(
                "log-count",
                "A log has 1 to 1024 pairs; their number is the length divided by 16.",
                "The node sends its newest 25 branches. Clients accept 1024.",
            ),
        ),
        "Streams": (
            Statement("streams-meaning", "A stream request brings a sequence of data of a vbucket."),
            Statement("start-first", "The first packet of a stream is the stream start, as printed."),
            Statement("snapshots-framed", "Data comes in snapshots, each between a start and an end message."),
            Statement("snapshot-unique", "The keys of a snapshot are different."),
            Statement("snapshot-start-printed", "The printed snapshot start comes off the socket byte for byte."),
            Statement("snapshot-end-printed", "The printed snapshot end comes off the socket byte for byte."),
            Statement("changes", "Mutations, deletions and expirations follow the stream start."),
            Statement(
                "mutation-printed",
                "The printed mutation comes off the socket.",
                "Its extras are 28 bytes, as its fields need; the printed length is 36.",
            ),
            Statement("deletion-printed", "The printed deletion comes off the socket.", _DELETED_AT),
            Statement("expiration-printed", "The printed expiration comes off the socket.", _DELETED_AT),
            Statement("flush-printed", "The printed flush comes off the socket byte for byte."),
            Statement("end-told", "A consumer is told when a stream has finished or failed."),
            Statement("end-ok", "Flag 0 of the stream end: it has finished. Printed.", _LENGTHS),
            Statement("end-state", "Flag 1 of the stream end: the state has changed. Printed.", _LENGTHS),
        ),
        "Set vbucket state": (
            Statement("state-takeover", "It passes the ownership of a vbucket from node to node during a takeover."),
            Statement("state-codes", "1 is active, 2 pending, 3 replica, 4 dead."),
            Statement(
                "state-printed",
                "The printed packet makes the consumer's vbucket active.",
                "With the magic of a request, which it is, and a length for its byte; 0x81 is accepted too.",
            ),
        ),
    },
)
