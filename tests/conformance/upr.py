"""What the UPR transport specification says."""

from tests.conformance.statement import Statement, Text

_NO_REPLY = "The consumer does not answer it."

UPR = Text(
    "upr",
    "UPR transport specification",
    {
        "Terminology": (
            Statement("consumer", "A consumer asks for data and does something with it."),
            Statement("producer", "A producer supplies the data that was asked for."),
            Statement("stream", "A stream is the series of messages that one request brings about."),
            Statement("snapshot", "A snapshot is a series in which no key occurs twice."),
        ),
        "Messages": (
            Statement("transport", "Packets are those of the memcached binary protocol, with opcodes of their own."),
            Statement("full-duplex", "Both sides may send at any time; ordinary connections only answer."),
            Statement("commands-come-back", "After a stream was requested the server sends commands to the client."),
            Statement("more-streams", "A client may start further streams while others run."),
        ),
        "Open connection (0x50)": (
            Statement("open-both", "It makes a channel to a producer and to a consumer."),
            Statement("open-extras", "The request has extras."),
            Statement("open-key", "The request has a key."),
            Statement("open-value", "The request has no value."),
            Statement("open-layout", "The extras are a sequence number and flags, 4 bytes each."),
            Statement("open-type", "Bit 1 of the flags asks for a producer, without it for a consumer."),
            Statement("open-printed", "The printed request opens a consumer connection."),
            Statement("open-answer", "The printed response confirms it: no body, the opaque of the request."),
        ),
        "Add stream (0x51)": (
            Statement("add-starts-request", "It makes a consumer send a stream request."),
            Statement("add-extras", "The request has extras."),
            Statement("add-key", "The request has no key."),
            Statement("add-value", "The request has no value."),
            Statement("add-takeover", "Flag 1 asks for a takeover."),
            Statement("add-printed", "The printed request, a takeover of vbucket 5, is understood."),
            Statement("add-answered-late", "The consumer answers when the stream is established, not before."),
            Statement("add-answer", "The response has 4 bytes of extras and the opaque of the request, as printed."),
            Statement("add-opaque", "The extras of the response are the opaque that messages of the vbucket have."),
            Statement(
                "add-vbucket",
                "The extras of the response name the vbucket.",
                "The printed response has only the opaque there, and a response has no room for a vbucket elsewhere; "
                "the opaque of the request says which vbucket is meant.",
            ),
        ),
        "Close stream (0x52)": (
            Statement("close-both", "A mover closes the stream of a vbucket at either side."),
            Statement("close-extras", "The request has no extras."),
            Statement("close-key", "The request has no key."),
            Statement("close-value", "The request has no value."),
            Statement("close-printed", "The printed request closes the stream of vbucket 5."),
            Statement(
                "close-consumer", "A consumer leaves the stream at once and tells the producer at its next message."
            ),
            Statement("close-producer", "A producer sends nothing more for the vbucket."),
            Statement("close-late-answers", "A producer may still get responses that belong to the stream."),
        ),
        "Failover log request (0x54)": (
            Statement("log-ids", "It returns all pairs of vbucket uuid and seqno from which a client may continue."),
            Statement("log-highest", "A client that knows none of them starts with the one of the highest seqno."),
            Statement("log-extras", "The request has no extras."),
            Statement("log-key", "The request has no key."),
            Statement("log-value", "The request has no value."),
            Statement("log-answer-extras", "The response has no extras."),
            Statement("log-answer-key", "The response has no key."),
            Statement("log-answer-value", "A successful response has a value."),
            Statement("log-printed", "The printed request asks for the log of vbucket 0."),
            Statement("log-layout", "Each entry of the response is a uuid and a seqno, 8 bytes each, as printed."),
            Statement("log-not-mine", "A vbucket that the server does not have is refused as not my vbucket."),
        ),
        "Stream request (0x53)": (
            Statement("request-role", "A consumer sends it to a producer."),
            Statement("request-each", "Each stream has a request of its own."),
            Statement("request-opaque", "All commands of a stream have the opaque of its request."),
            Statement("request-extras", "The request has extras."),
            Statement("request-key", "The request has no key."),
            Statement("request-value", "The request has no value."),
            Statement("request-layout", "The 40 bytes: flags, reserved, start, end, vbucket uuid, high seqno."),
            Statement("request-flags", "Flags modify what the stream sends: flag 1 is a takeover."),
            Statement("request-start", "The start is the last seqno that the consumer has; it is not sent again."),
            Statement("request-end", "The stream is closed when the end seqno has been sent."),
            Statement("request-uuid-crash", "A vbucket gets a new uuid after an unclean shutdown."),
            Statement("request-uuid-active", "A vbucket gets a new uuid when it becomes active."),
            Statement("request-high", "The high seqno belongs to the uuid: the seqno when it was generated."),
            Statement("request-zero", "Uuid 0 and start 0 ask for everything, without a failover log."),
            Statement(
                "request-answer-extras",
                "The response has no extras.",
                "The printed rollback response has 8 bytes of them. Upriver sends that response as printed, every "
                "other one without extras, and accepts a rollback seqno in either place.",
            ),
            Statement("request-answer-key", "The response has no key."),
            Statement("request-answer-value", "The response may have a value."),
            Statement("request-answer-log", "A successful response has the failover log."),
            Statement("request-answer-rollback", "A rollback response has the seqno to roll back to."),
            Statement(
                "request-printed-rollback", "The printed request that cannot be continued is answered with a rollback."
            ),
            Statement("request-printed-retry", "The printed second request, from the seqno of the rollback, succeeds."),
            Statement("request-enoent", "An uuid that the producer does not know is refused with key enoent."),
            Statement("request-enoent-zero", "The consumer then rolls back to 0."),
            Statement(
                "request-eexists", "A second stream for a vbucket on one connection is refused with key eexists."
            ),
            Statement("request-not-mine", "A vbucket that is not there is refused with not my vbucket."),
            Statement("request-erange-high", "A start beyond the high seqno of the vbucket is refused with erange."),
            Statement(
                "request-erange-order",
                "A start that is not less than the end is refused with erange.",
                "A greater one is. An equal one is accepted and the stream ends at once, as deployed servers do it: a "
                "consumer that has everything up to its end needs no special case.",
            ),
            Statement("request-rollback", "A consumer that must discard changes first is answered with a rollback."),
            Statement("request-disconnect", "A connection that is invalid, or a consumer's, is closed."),
        ),
        "Stream end (0x55)": (
            Statement("end-meaning", "Nothing more follows on the stream."),
            Statement("end-extras", "It has extras."),
            Statement("end-key", "It has no key."),
            Statement("end-value", "It has no value."),
            Statement("end-no-reply", _NO_REPLY),
            Statement("end-printed", "The extras are 4 bytes of flags, as printed."),
            Statement("end-ok", "Flag 0: the stream has finished."),
            Statement("end-state", "Flag 1: the vbucket has changed its state."),
        ),
        "Snapshot marker (0x56)": (
            Statement("marker-meaning", "It announces a new snapshot."),
            Statement("marker-unique", "The commands of a snapshot have different keys."),
            Statement("marker-extras", "It has no extras."),
            Statement("marker-key", "It has no key."),
            Statement("marker-value", "It has no value."),
            Statement("marker-no-reply", _NO_REPLY),
            Statement("marker-printed", "It is a header without a body, as printed."),
        ),
        "Mutation (0x57)": (
            Statement("mutation-meaning", "It gives a key a value."),
            Statement("mutation-extras", "It has extras."),
            Statement("mutation-key", "It has a key."),
            Statement("mutation-value", "It may have a value."),
            Statement(
                "mutation-layout", "The 30 bytes: by seqno, rev seqno, flags, expiration, lock time, metadata size."
            ),
            Statement("mutation-no-reply", _NO_REPLY),
            Statement("mutation-printed", "The printed packet comes off the socket byte for byte."),
        ),
        "Deletion (0x58)": (
            Statement("deletion-meaning", "It deletes a key."),
            Statement("deletion-extras", "It has extras."),
            Statement("deletion-key", "It has a key."),
            Statement("deletion-value", "It has no value."),
            Statement("deletion-layout", "The 18 bytes: by seqno, rev seqno, metadata size."),
            Statement("deletion-no-reply", _NO_REPLY),
            Statement(
                "deletion-printed",
                "The printed packet comes off the socket.",
                "All but its CAS of 0: a deletion has the CAS of its tombstone, which conflict resolution needs.",
            ),
        ),
        "Expiration (0x59)": (
            Statement("expiration-meaning", "It tells that a key has expired, and not that a client deleted it."),
            Statement("expiration-extras", "It has extras."),
            Statement("expiration-key", "It has a key."),
            Statement("expiration-value", "It has no value."),
            Statement("expiration-layout", "The 18 bytes are those of a deletion."),
            Statement("expiration-no-reply", _NO_REPLY),
            Statement(
                "expiration-printed",
                "The printed packet comes off the socket.",
                "All but its CAS of 0, as for a deletion, and its revision of 1: to expire is a second "
                "change of the key.",
            ),
        ),
        "Flush (0x5a)": (
            Statement("flush-meaning", "The consumer deletes everything that it has of the vbucket."),
            Statement("flush-extras", "It has no extras."),
            Statement("flush-key", "It has no key."),
            Statement("flush-value", "It has no value."),
            Statement("flush-no-reply", _NO_REPLY),
            Statement("flush-printed", "It is a header without a body, as printed."),
        ),
        "Set vbucket state (0x5b)": (
            Statement("state-takeover", "It passes the ownership of a vbucket from node to node during a takeover."),
            Statement("state-extras", "It has extras."),
            Statement("state-key", "It has no key."),
            Statement("state-value", "It has no value."),
            Statement("state-layout", "The extras are one byte, the state."),
            Statement("state-active", "State 1 makes the consumer's vbucket active."),
            Statement("state-pending", "State 2 makes the consumer's vbucket pending."),
            Statement("state-replica", "State 3 makes the consumer's vbucket a replica."),
            Statement("state-dead", "State 4 makes the consumer's vbucket dead."),
            Statement("state-printed", "The printed packet, dead for vbucket 0, is understood."),
            Statement("state-only-takeover", "It belongs to takeovers: on another stream it changes nothing."),
            Statement(
                "state-no-reply",
                _NO_REPLY,
                "The consumer answers when the state is on its disk and the producer waits for that: a takeover is "
                "not safe without it. Deployed servers do the same.",
            ),
        ),
    },
)
