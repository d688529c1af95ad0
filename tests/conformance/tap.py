"""What the TAP text says."""

from tests.conformance.statement import Statement, Text

_PRINTED = "The printed request is served."
_META = (
    "The node always sends the revision of the item there, 8 bytes; the printed packet has an empty section and is "
    "accepted as it is."
)
_CHECKPOINT = "The id takes 8 bytes of engine-private data; the text prints a length of 4 for them."

TAP = Text(
    "tap",
    "TAP",
    {
        "Overview": (
            Statement("observe", "A program outside of the server can follow the changes of its data."),
            Statement(
                "internal",
                "TAP is an internal interface that can cost a server much memory and disk.",
                "It is served to any client with the role *stream*; windows and positions bound what a client costs.",
            ),
            Statement(
                "bucket-type",
                "Only one type of bucket has TAP.",
                "A node has one type of bucket, and TAP with it.",
            ),
        ),
        "Use cases": (
            Statement("use-replication", "A client can ask for all existing data and for changes as they happen."),
            Statement("use-replay", "The data of each item is complete: another node that replays it is a replica."),
            Statement("use-observation", "A stream of future changes alone shows what changes."),
            Statement("use-invalidation", "A stream of future changes invalidates the items of a cache."),
            Statement("use-indexing", "A stream keeps a full-text index up to date."),
            Statement("use-transition", "A stream of a vbucket can end with a transfer of its ownership."),
        ),
        "Protocol": (
            Statement("begins-with-command", "A session begins with a command that says what the client wants."),
            Statement("server-commands", "The server then sends commands until the connection ends."),
            Statement("connect-opcode", "The command has the opcode 0x40."),
            Statement("connect-name", "Its key may be a name with which a client can reconnect and resume."),
            Statement("connect-printed", "The printed base message starts a stream for a client named node1."),
        ),
        "Options": (
            Statement("flags-extras", "Options are 32 bits of flags in the extras."),
            Statement("flags-omitted", "Without extras all flags are 0."),
            Statement("values-order", "The values of options follow in the order of the flags, the lowest first."),
            Statement("values-optional", "Options with and without values can be combined in every way."),
            Statement("mix", "Options can be combined; the printed example has four."),
        ),
        "Backfill (0x01)": (
            Statement("backfill-value", "The value is 64 bits."),
            Statement("backfill-date", "It is the oldest time, since the epoch, from which changes are wanted."),
            Statement("backfill-future", "A time in the future asks for new changes only."),
            Statement("backfill-printed", "The printed request with -1 gets new changes only."),
        ),
        "Dump (0x02)": (
            Statement("dump-value", "It has no value."),
            Statement("dump-existing", "Only existing items are sent."),
            Statement("dump-disconnects", "The server disconnects after the last of them."),
            Statement("dump-printed", _PRINTED),
        ),
        "List of vbuckets (0x04)": (
            Statement("list-value", "The value is a number of vbuckets and then the vbuckets, 16 bits each."),
            Statement("list-only", "Only these vbuckets are sent."),
            Statement("list-printed", _PRINTED),
        ),
        "Takeover (0x08)": (
            Statement("takeover-value", "It has no value."),
            Statement("takeover-list", "It is used together with a list of vbuckets."),
            Statement("takeover-ownership", "The ownership is transferred at the end of the dump."),
            Statement("takeover-printed", _PRINTED),
        ),
        "Acknowledgements (0x10)": (
            Statement("ack-value", "It has no value."),
            Statement("ack-meaning", "The client answers each message that asks for an acknowledgement."),
            Statement("ack-printed", _PRINTED),
        ),
        "Keys only (0x20)": (
            Statement("keys-value", "It has no value."),
            Statement("keys-preference", "The client prefers messages without values; the server may ignore that."),
            Statement("keys-printed", _PRINTED),
        ),
        "Registered client (0x80)": (
            Statement("registered-value", "It has no value."),
            Statement("registered-stays", "The server remembers the client until it is deregistered."),
            Statement("registered-deregister", "Only a command of the memcached protocol deregisters it."),
            Statement(
                "registered-memory",
                "A registered client that does not read keeps closed checkpoints in memory until it runs out.",
                "Its position is stored and pins nothing: a client that is too far behind starts over.",
            ),
            Statement("registered-printed", _PRINTED),
        ),
        "Commands of the server": (
            Statement("response-commands", "They resemble ordinary commands."),
            Statement("response-private", "Each has a section of engine-specific data."),
            Statement("response-private-any", "What is in the section is up to the engine: its length is not fixed."),
            Statement("response-ttl", "Each has a time to live that stops replication loops."),
        ),
        "Mutation (0x41)": (
            Statement("mutation-all", "Every mutation comes as this message."),
            Statement("mutation-layout", "Item flags and expiry follow the common fields."),
            Statement("mutation-printed", "The printed packet stores *mykey*."),
            Statement("mutation-meta", "Metadata is between the item expiry and the key.", _META),
        ),
        "Delete (0x42)": (
            Statement("delete-private", "It may have an engine-specific section."),
            Statement("delete-printed", "The printed packet deletes *mykey*."),
            Statement("delete-meta", "Metadata is before the key.", _META),
        ),
        "Flush (0x43)": (
            Statement("flush-private", "It may have an engine-specific section."),
            Statement("flush-replicates", "It passes a flush_all on."),
            Statement("flush-printed", "The printed packet empties a copy."),
            Statement(
                "flush-all",
                "It deletes all data of the receiver.",
                "Not what the sender must not write. A flush from one of our nodes lists the vbuckets that were active "
                "there, and empties only those: the receiver owns others, and may have new writes in them.",
            ),
        ),
        "Opaque (0x44)": (
            Statement("opaque-control", "It has control data for the receiver, as engine-private data."),
            Statement(
                "opaque-printed",
                "The printed packet, for vbucket 1023 with four bytes of 0xff, is accepted.",
                "Its control is unknown: it is acknowledged if it asks for that, logged once and ignored.",
            ),
            Statement("opaque-auto-nack", "0 tells a client that asked for acknowledgements that they are supported."),
            Statement("opaque-initial", "1 begins a backfill."),
            Statement(
                "opaque-initial-behind",
                "A backfill takes place when the newest checkpoint of the receiver is behind the oldest of the sender.",
            ),
            Statement("opaque-initial-snapshot", "A backfill has all of the data, on disk and in memory."),
            Statement("opaque-checkpoints", "2 tells that the sender has checkpoints."),
            Statement("opaque-open-checkpoint", "3 marks the begin of the open checkpoint."),
            Statement("opaque-open-registered", "3 is sent to registered clients only."),
            Statement("opaque-either", "4, 5 and 6 may come from either side."),
            Statement("opaque-start", "4: the receiver stops to write to disk and keeps data in memory."),
            Statement("opaque-stop", "5: the receiver writes to disk again."),
            Statement("opaque-revert", "6: the receiver drops everything that came since 4."),
            Statement("opaque-revert-all", "6 also drops what did not come over this connection."),
            Statement("opaque-close", "7: the sender has sent everything and closes the connection."),
            Statement("opaque-close-backfill", "8 ends a backfill."),
            Statement("opaque-tests-only", "Online updates are for tests, not for production."),
        ),
        "Set vbucket (0x45)": (
            Statement("state-sets", "It sets the state of the consumer's vbucket, as a part of a takeover."),
            Statement("state-layout", "The state is 4 bytes of engine-private data."),
            Statement("state-printed", "The printed packet makes vbucket 56 pending and is acknowledged."),
        ),
        "Checkpoint start (0x46) and end (0x47)": (
            Statement("checkpoint-start", "A start tells the consumer that a checkpoint begins."),
            Statement(
                "checkpoint-start-printed", "The printed start, of checkpoint 255, is acknowledged.", _CHECKPOINT
            ),
            Statement("checkpoint-end", "An end tells the consumer that a checkpoint ends."),
            Statement("checkpoint-end-printed", "The printed end, of checkpoint 250, is acknowledged.", _CHECKPOINT),
        ),
    },
)
