"""The list of open issues at the beginning of the second draft, and what became of each."""

from tests.conformance.statement import OpenIssue

OPEN_ISSUES: tuple[OpenIssue, ...] = (
    OpenIssue(
        "lock-time",
        "MB-7558",
        "Replicate the lock time.",
        "A mutation has the seconds that remain of the lock of its key, and a takeover hands the locks over. With "
        "`--replicate-locks`, lock and unlock are changes of their own, so that the holder can use a lock after a "
        "failover.",
    ),
    OpenIssue(
        "expirations",
        "MB-6077",
        "Tell deleted items from expired ones.",
        "Every UPR dialect has a message for each. `dcp` sends an expiration to consumers that ask for it.",
    ),
    OpenIssue(
        "vbucket-filter",
        "MB-5147",
        "Show in the statistics of a consumer which vbuckets it has.",
        "The groups `upr`, `dcp` and `tap` list each stream of each connection.",
    ),
    OpenIssue(
        "useful-name",
        "MB-5146",
        "Show a useful name of a consumer.",
        "Statistics and log lines have the name of the connection and the group id of a stream.",
    ),
    OpenIssue(
        "filters",
        "MB-2721",
        "Filter on keys and values.",
        "A consumer of `dcp` gives the node a prefix or pattern of keys, or a condition on a field of JSON values.",
    ),
    OpenIssue(
        "restart",
        "MB-8015",
        "Do not send everything again after a cluster restarts.",
        "Seqnos and failover logs are on disk: consumers resume where they were.",
    ),
    OpenIssue(
        "idle-backlog",
        "MB-3493",
        "A backlog counter grows on an idle system.",
        "Backlogs are differences of seqnos, counted when asked: they end at 0.",
    ),
    OpenIssue(
        "keys-only",
        "MB-3424",
        "Send keys without values.",
        "TAP has the flag *keys only*, `dcp` the open flag *no value*.",
    ),
    OpenIssue(
        "observe",
        "CBD-510",
        "Observe the replication of one mutation.",
        "The commands *observe*, *observe seqno* and *wait for a seqno* work on active copies and replicas.",
    ),
    OpenIssue(
        "dead-connections",
        "",
        "Detect dead connections.",
        "Every socket has TCP keepalive. `dcp` also has noops, and a peer that does not answer them is disconnected.",
    ),
    OpenIssue(
        "ownership",
        "",
        "Transfer the ownership of a vbucket.",
        "Takeovers in `upr`, the third draft, `dcp` and TAP; at every moment at most one copy is active.",
    ),
    OpenIssue(
        "all-seqnos",
        "",
        "Get all high seqnos of a server at once.",
        "The command *get all vbucket seqnos* (0x48).",
    ),
    OpenIssue(
        "bucket-flush",
        "",
        "A packet that flushes a bucket.",
        "Each stream gets a flush for its vbucket and ends; the vbucket begins a new failover log.",
    ),
    OpenIssue(
        "packet-parsing",
        "",
        "How to parse packets: protobufs, Thrift, Avro or by ourselves.",
        "By ourselves. Each message is declared once; codecs, explanations and these documents follow from that.",
    ),
    OpenIssue(
        "examples",
        "",
        "Add examples of the protocol.",
        "Each message has a page section with an example; every example that the texts print is tested.",
    ),
    OpenIssue(
        "error-opcodes",
        "",
        "Discuss the error opcodes.",
        "6 has a status and a sentence, 7 the offset of the byte that cannot be decoded.",
    ),
    OpenIssue(
        "rollback-debate",
        "",
        "Discuss two designs of rollback.",
        "The producer computes the seqno from its failover log, the consumer restores a state that it held at or below "
        "it. Clients choose: stop, undo from there, or read the vbucket again.",
    ),
    OpenIssue(
        "request-id",
        "",
        "Discuss whether request ids are needed.",
        "They are: only the request id tells the streams of one connection apart in the first two drafts.",
    ),
    OpenIssue(
        "lost-after-sending",
        "",
        "An item reaches another cluster and is lost at its source, which crashes before it is on disk.",
        "A stream can be limited to changes on disk. Otherwise the consumer gets a rollback and undoes the item.",
    ),
    OpenIssue(
        "compatibility",
        "",
        "Address backwards compatibility.",
        "One port serves every dialect, told apart by its first bytes; a listener can be pinned to one.",
    ),
    OpenIssue(
        "statistics",
        "",
        "Statistics that can be added up.",
        "Totals are sums over connections, and streams that ended still count.",
    ),
    OpenIssue(
        "security",
        "",
        "Security.",
        "Users with roles, SASL and TLS. The first two drafts have no login and are then served only on listeners that "
        "are marked as anonymous.",
    ),
    OpenIssue(
        "stop-streams",
        "",
        "A way to stop TAP streams.",
        "*Close stream* in `upr` and `dcp`; TAP clients are deregistered, and the node closes their connection.",
    ),
)
