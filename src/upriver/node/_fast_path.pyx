# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The compiled loop for the most frequent requests: runs of plain gets, sets and deletes, with and without meta, and
of touches and counts.

It answers a request only if the request is complete, its vbucket is active, its key is not locked, it has neither a CAS
nor a data type that was not agreed on, the item is not expired, the value need not be read from disk, and there is room
for a write. At any other request it stops and leaves that to the session, which handles every case. Each rule is thus
written once, in the commands; this loop is only a faster way through the plain cases.

Most of a request's time is spent waiting for memory: the vbucket's table, the slot of the key, the chunk and the record
each hold the address of the next. So the loop prefetches these for several requests, step by step, before it answers
the first of them: they wait together.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memset

from upriver.engine.table._table cimport Chunk, Ledger, Table, Version, absolute, chunk_at, record_at

cdef extern from "_record.h" nogil:
    uint16_t load_be16(const char *)
    uint32_t load_be32(const char *)
    uint64_t load_be64(const char *)
    void store_be16(char *, uint16_t)
    void store_be32(char *, uint32_t)
    void store_be64(char *, uint64_t)
    uint64_t hash_key(const char *, size_t, uint64_t)
    void prefetch(const void *)
    void prefetch_write(const void *)
    enum:
        R_MARKS, R_OPCODE, R_BODY_LENGTH, R_CAS, R_REV_SEQNO, R_FLAGS, R_EXPIRY, R_EXTRAS, R_DATATYPE
        MARK_EVICTED, MARK_REFERENCED, OPCODE_MUTATION

cdef enum:
    HEADER = 24
    KEY_BYTES_MAX = 250
    VALUE_BYTES_MAX = 1024 * 1024
    MUTATION_EXTRAS = 31
    SNAPPY = 0x02
    # The uuid of the vbucket and the seqno, in the answer to a write.
    TOKEN = 16
    # A buffer for answers that has grown beyond this is freed after use.
    ROOM_KEPT = 256 * 1024
    # The opcodes that this loop answers.
    GET = 0x00
    SET = 0x01
    DELETE = 0x04
    INCREMENT = 0x05
    DECREMENT = 0x06
    GETQ = 0x09
    GETK = 0x0C
    GETKQ = 0x0D
    SETQ = 0x11
    DELETEQ = 0x14
    INCREMENTQ = 0x15
    DECREMENTQ = 0x16
    TOUCH = 0x1C
    SET_WITH_META = 0xA2
    SETQ_WITH_META = 0xA3
    DELETE_WITH_META = 0xA8
    DELETEQ_WITH_META = 0xA9
    # The extras of a touch and of its answer, and of a count (delta, initial number and expiration).
    TOUCH_EXTRAS = 4
    FLAGS = 4
    COUNT_EXTRAS = 20
    NUMBER = 8
    # A number of at most this many digits has room to grow. A touch writes its value again: long ones are left out.
    DIGITS_MAX = 19
    TOUCHED_BYTES_MAX = 1024
    # Meta: flags, expiration, revision, CAS and perhaps options. Requests with other options are left to the session.
    META_EXTRAS = 24
    META_OPTIONS_EXTRAS = 28
    SKIP_CONFLICT_RESOLUTION = 0x01
    FORCE_ACCEPT = 0x02
    DELETE_IS_EXPIRATION = 0x10
    # As upriver.model.Event numbers them.
    MUTATION = 1
    DELETION = 2
    EXPIRATION = 3
    STATUS_KEY_ENOENT = 0x01
    STATUS_KEY_EEXISTS = 0x02
    # The number of requests prefetched together, and how much of a table and of a record.
    AHEAD = 16
    LINE = 64
    TABLE_BYTES = 512
    RECORD_BYTES = 256

# The same texts as the commands send.
cdef bytes NOT_FOUND = b"Not found"
cdef bytes OURS_WINS = b"our version wins"


# The prefetch state of one request.
cdef struct Asked:
    PyObject *table
    const char *key
    size_t key_length
    uint64_t hashed
    uint64_t slot
    bint writes
    # For a write: the chunk of the next record.
    Chunk *last


cdef inline bint is_write(uint8_t opcode) noexcept:
    return (
        opcode == SET or opcode == SETQ or opcode == DELETE or opcode == DELETEQ or opcode == SET_WITH_META
        or opcode == SETQ_WITH_META or opcode == DELETE_WITH_META or opcode == DELETEQ_WITH_META
        or opcode == TOUCH or is_count(opcode)
    )


cdef inline bint is_count(uint8_t opcode) noexcept:
    return opcode == INCREMENT or opcode == DECREMENT or opcode == INCREMENTQ or opcode == DECREMENTQ


cdef bint read_meta(const char *request, bint deletes, Version *theirs, uint32_t *options) noexcept:
    """Read the version of a request with meta; return False to leave it to the session."""
    cdef const char *extras = request + HEADER
    cdef uint8_t length = request[4]
    if length != META_EXTRAS and length != META_OPTIONS_EXTRAS:
        return False
    options[0] = load_be32(extras + META_EXTRAS) if length == META_OPTIONS_EXTRAS else 0
    if options[0] & ~<uint32_t> (SKIP_CONFLICT_RESOLUTION | FORCE_ACCEPT | DELETE_IS_EXPIRATION):
        return False
    memset(theirs, 0, sizeof(Version))
    theirs.key, theirs.key_size = extras + length, load_be16(request + 2)
    theirs.expiry = load_be32(extras + 4)
    theirs.rev_seqno, theirs.cas = load_be64(extras + 8), load_be64(extras + 16)
    if deletes:  # a tombstone has no flags and no value
        theirs.event = EXPIRATION if options[0] & DELETE_IS_EXPIRATION else DELETION
    else:
        theirs.event, theirs.flags, theirs.datatype = MUTATION, load_be32(extras), <uint8_t> request[5]
        theirs.value = theirs.key + theirs.key_size
        theirs.value_size = load_be32(request + 8) - length - theirs.key_size
    return theirs.rev_seqno != 0 and theirs.cas != 0


cdef int order(uint64_t theirs, uint64_t ours) noexcept:
    return (theirs > ours) - (theirs < ours)


cdef bint wins(const Version *theirs, const char *record) noexcept:
    """Conflict resolution as in upriver.engine.keyvalue.Rank; ours wins if all is equal. A record of the same CAS must
    have its value in memory."""
    cdef bint live = <uint8_t> record[R_OPCODE] == OPCODE_MUTATION, stores = theirs.event == MUTATION
    cdef uint32_t size = 0
    cdef const char *value = NULL
    cdef int found = order(theirs.rev_seqno, load_be64(record + R_REV_SEQNO))
    if not found:
        found = order(theirs.cas, load_be64(record + R_CAS))
    if not found:  # the time of a deletion does not count
        found = order(theirs.expiry if stores else 0, load_be32(record + R_EXPIRY) if live else 0)
    if not found:
        found = order(theirs.flags, load_be32(record + R_FLAGS) if live else 0)
    if not found:
        found = order(not stores, not live)
    if not found and live:
        found = order(theirs.datatype, <uint8_t> record[R_DATATYPE])
        size = load_be32(record + R_BODY_LENGTH) - MUTATION_EXTRAS - theirs.key_size
        value = record + R_EXTRAS + MUTATION_EXTRAS + theirs.key_size
    if not found and live:
        found = memcmp(theirs.value, value, min(theirs.value_size, size))
    if not found:
        found = order(theirs.value_size, size)
    return found > 0


cdef void again(Version *version, const char *record, const char *key, uint32_t key_size) noexcept:
    """Fill a version with the item of a record, to store it again."""
    memset(version, 0, sizeof(Version))
    version.event, version.datatype = MUTATION, <uint8_t> record[R_DATATYPE]
    version.flags, version.expiry = load_be32(record + R_FLAGS), load_be32(record + R_EXPIRY)
    version.key, version.key_size = key, key_size
    version.value = record + R_EXTRAS + MUTATION_EXTRAS + key_size
    version.value_size = load_be32(record + R_BODY_LENGTH) - MUTATION_EXTRAS - key_size


cdef bint read_number(const char *digits, uint32_t size, uint64_t *number) noexcept:
    """Read a decimal number; return False if it is not one, or too long."""
    cdef uint32_t i
    number[0] = 0
    for i in range(size):
        if i == DIGITS_MAX or not c"0" <= digits[i] <= c"9":
            return False
        number[0] = 10 * number[0] + (digits[i] - c"0")
    return size > 0


cdef uint32_t write_number(char *digits, uint64_t number) noexcept:
    """Write the decimal digits of a number; return their count."""
    cdef char reversed[24]
    cdef uint32_t size = 0, i
    while number or not size:
        reversed[size] = <char> (c"0" + number % 10)
        number //= 10
        size += 1
    for i in range(size):
        digits[i] = reversed[size - 1 - i]
    return size


cdef class FastPath:
    """Answers from the tables of one bucket. ``tables`` is the bucket's own list, indexed by vbucket, and
    ``operations`` its counter of the rarer operations."""

    cdef list tables
    cdef Ledger ledger
    cdef object operations
    cdef char *out
    cdef size_t used, room
    # For the current run: what the client may do and has agreed on, and the time once it was read.
    cdef bint may_read, may_write, tokens
    cdef uint8_t datatypes
    cdef double now
    # Counted in the run, and not yet added to ``operations``.
    cdef Py_ssize_t sets_with_meta, deletes_with_meta, touches, increments, decrements
    #: A run is under way. A change may wake a callback that sends a request, which then takes the slow path.
    cdef bint busy

    def __cinit__(self, list tables not None, Ledger ledger not None, operations not None):
        self.tables = tables
        self.ledger = ledger
        self.operations = operations

    def __dealloc__(self):
        free(self.out)

    @property
    def room_bytes(self):
        """The size of the buffer kept for answers between calls."""
        return self.room

    def serve(self, data, Py_ssize_t start, Py_ssize_t end, bint may_read, bint may_write, uint8_t datatypes,
              bint tokens, size_t body_bytes_max, size_t answer_bytes_max):
        """Answer requests from ``start`` to ``end``; return the offset of the first unanswered one, and the answers.
        The client has agreed on ``datatypes``, and on mutation ``tokens`` in the answers to writes."""
        cdef Py_buffer view
        cdef Py_ssize_t at
        if self.busy:
            return start, b""
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        self.busy = True
        try:
            if not 0 <= start <= end <= view.len:
                raise ValueError("outside of the data")
            self.may_read, self.may_write = may_read, may_write
            self.datatypes, self.tokens = datatypes, tokens
            self.now = -1
            at = self.answer_run(<const char *> view.buf, end, start, body_bytes_max, answer_bytes_max)
            return at, PyBytes_FromStringAndSize(self.out, self.used)
        finally:
            self.busy = False
            PyBuffer_Release(&view)
            self.tell("set_with_meta", &self.sets_with_meta)
            self.tell("delete_with_meta", &self.deletes_with_meta)
            self.tell("touch", &self.touches)
            self.tell("increment", &self.increments)
            self.tell("decrement", &self.decrements)
            if self.room > ROOM_KEPT:
                free(self.out)
                self.out, self.room = NULL, 0

    cdef Py_ssize_t answer_run(self, const char *base, Py_ssize_t length, Py_ssize_t at, size_t body_bytes_max,
                               size_t answer_bytes_max) except -1:
        cdef const char *request
        cdef uint32_t body
        cdef uint16_t vbucket
        cdef uint8_t opcode
        cdef Table table
        cdef Py_ssize_t fetched = at
        self.used = 0
        while length - at >= HEADER and self.used < answer_bytes_max:
            if at >= fetched:
                fetched = self.fetch(base, length, at)
            request = base + at
            opcode = <uint8_t> request[1]
            body = load_be32(request + 8)
            if <uint8_t> request[0] != 0x80 or <size_t> (length - at - HEADER) < body:
                break
            if body > body_bytes_max:
                break
            vbucket = load_be16(request + 6)
            if vbucket >= PyList_GET_SIZE(self.tables) or PyList_GET_ITEM(self.tables, vbucket) == <PyObject *> None:
                break
            table = <Table> PyList_GET_ITEM(self.tables, vbucket)
            if not table.active or <uint8_t> request[5] & ~self.datatypes:
                break
            if is_write(opcode):
                if not self.may_write or not self.write(table, request, body, opcode):
                    break
            elif opcode == GET or opcode == GETQ or opcode == GETK or opcode == GETKQ:
                if not self.may_read or not self.get(table, request, body, opcode):
                    break
            else:
                break
            at += HEADER + body
        return at

    cdef Py_ssize_t fetch(self, const char *base, Py_ssize_t length, Py_ssize_t at) noexcept:
        """Prefetch the memory that the next requests need; return where these end. It stops where the loop would stop.

        It changes nothing: a prefetch in vain costs a little time.
        """
        cdef Asked asked[AHEAD]
        cdef Asked *each
        cdef Table table
        cdef const char *request
        cdef char *record
        cdef uint32_t body, extras, key_length
        cdef uint16_t vbucket
        cdef int count = 0, i, line
        while count < AHEAD and length - at >= HEADER:
            request = base + at
            body, extras, key_length = load_be32(request + 8), <uint8_t> request[4], load_be16(request + 2)
            vbucket = load_be16(request + 6)
            if <size_t> (length - at - HEADER) < body or extras + key_length > body:
                break
            if not 0 < key_length <= KEY_BYTES_MAX:  # the loop stops here
                break
            if vbucket >= PyList_GET_SIZE(self.tables) or PyList_GET_ITEM(self.tables, vbucket) == <PyObject *> None:
                break
            at += HEADER + body
            each = &asked[count]
            each.table = PyList_GET_ITEM(self.tables, vbucket)
            each.key, each.key_length = request + HEADER + extras, key_length
            each.writes = is_write(<uint8_t> request[1])
            line = 0
            while line < TABLE_BYTES:
                prefetch(<const char *> each.table + line)
                line += LINE
            count += 1
        for i in range(count):
            each = &asked[i]
            table = <Table> each.table
            each.hashed = hash_key(each.key, each.key_length, self.ledger.seed)
            prefetch(&table.slots[each.hashed & table.mask])
            each.last = NULL
            if each.writes and table.order_count:
                prefetch(&table.order[table.order_count - 1])
        for i in range(count):
            each = &asked[i]
            table = <Table> each.table
            each.slot = table.slots[each.hashed & table.mask]
            if each.slot:
                prefetch(chunk_at(table, each.slot))
            if each.writes and table.order_count:
                each.last = &table.chunks[table.order[table.order_count - 1]]
                prefetch(each.last)
        for i in range(count):
            each = &asked[i]
            if each.slot:
                record = record_at(<Table> each.table, each.slot)
                line = 0
                while line < RECORD_BYTES:
                    prefetch(record + line)
                    line += LINE
            if each.last != NULL:
                record = each.last.data + each.last.used
                line = 0
                while line < RECORD_BYTES:
                    prefetch_write(record + line)
                    line += LINE
        return at

    cdef char *reserve(self, size_t size) except NULL:
        """Make room for this many more bytes of answers."""
        cdef char *moved
        cdef size_t room
        if self.used + size > self.room:
            room = max(2 * self.room, self.used + size + 4096)
            moved = <char *> realloc(self.out, room)
            if moved == NULL:
                raise MemoryError
            self.out, self.room = moved, room
        return self.out + self.used

    cdef char *begin(self, const char *request, uint8_t extras, uint16_t key_length, uint32_t value_length) except NULL:
        """Write the header of a successful answer and make room for its body; the caller fills in CAS and body."""
        cdef uint32_t body = extras + key_length + value_length
        cdef char *answer = self.reserve(HEADER + body)
        memset(answer, 0, HEADER)
        answer[0] = <char> 0x81
        answer[1] = request[1]
        store_be16(answer + 2, key_length)
        answer[4] = <char> extras
        store_be32(answer + 8, body)
        memcpy(answer + 12, request + 12, 4)
        self.used += HEADER + body
        return answer

    cdef double time(self) except? -1:
        """The time of this run, read once."""
        if self.now < 0:
            self.now = self.ledger.clock()
        return self.now

    cdef bint locked(self, Table table, const char *key, size_t key_length) except -1:
        """Whether the key has a lock. It may have expired: the session decides."""
        return bool(table.locks) and PyBytes_FromStringAndSize(key, key_length) in table.locks

    cdef bint get(self, Table table, const char *request, uint32_t body, uint8_t opcode) except -1:
        cdef uint16_t key_length = load_be16(request + 2)
        cdef const char *key = request + HEADER
        cdef const char *value
        cdef uint32_t value_length, sent_key, expiry
        cdef uint64_t where
        cdef char *record
        cdef char *answer
        if request[4] or key_length != body or not 0 < key_length <= KEY_BYTES_MAX:
            return False
        record = table.lookup(key, key_length, hash_key(key, key_length, self.ledger.seed), &where)
        if record == NULL or <uint8_t> record[R_OPCODE] != OPCODE_MUTATION:
            if opcode == GETK:  # its refusal repeats the key, which is rare
                return False
            self.ledger.gets += 1
            self.ledger.get_misses += 1
            if opcode == GET:
                self.refuse(request, STATUS_KEY_ENOENT, NOT_FOUND)
            return True
        expiry = load_be32(record + R_EXPIRY)
        if record[R_MARKS] & MARK_EVICTED or expiry and expiry <= self.time() or self.locked(table, key, key_length):
            return False
        if record[R_DATATYPE] & ~self.datatypes & SNAPPY:  # the session inflates it
            return False
        self.ledger.gets += 1
        record[R_MARKS] |= MARK_REFERENCED
        value_length = load_be32(record + R_BODY_LENGTH) - MUTATION_EXTRAS - key_length
        value = record + R_EXTRAS + MUTATION_EXTRAS + key_length
        sent_key = key_length if opcode == GETK or opcode == GETKQ else 0
        answer = self.begin(request, 4, sent_key, value_length)
        answer[5] = record[R_DATATYPE] & self.datatypes
        memcpy(answer + 16, record + R_CAS, 8)
        memcpy(answer + HEADER, record + R_FLAGS, 4)
        memcpy(answer + HEADER + 4, key, sent_key)
        memcpy(answer + HEADER + 4 + sent_key, value, value_length)
        return True

    cdef int refuse(self, const char *request, uint8_t status, bytes text) except -1:
        cdef char *answer = self.begin(request, 0, 0, len(text))
        answer[7] = status
        memcpy(answer + HEADER, <const char *> text, len(text))
        return 0

    cdef bint write(self, Table table, const char *request, uint32_t body, uint8_t opcode) except -1:
        cdef uint16_t key_length = load_be16(request + 2)
        cdef uint32_t extras = <uint8_t> request[4]
        cdef Ledger ledger = self.ledger
        if not 0 < key_length <= KEY_BYTES_MAX or body < extras + key_length:
            return False
        if load_be32(request + 16) or load_be32(request + 20):  # a CAS
            return False
        # The session sends refusals. While no limit is reached there is room for one more write.
        if ledger.refusal or 0 < ledger.queue_bytes_max <= ledger.pending_bytes:
            return False
        if 0 < ledger.quota_bytes <= ledger.memory_bytes or body > VALUE_BYTES_MAX:
            return False
        if self.locked(table, request + HEADER + extras, key_length):
            return False
        self.reserve(HEADER + TOKEN)  # first, because a write must be answered
        if opcode == SET or opcode == SETQ:
            return self.set(table, request, body, opcode == SETQ)
        if opcode == TOUCH:
            return self.touch(table, request, body)
        if is_count(opcode):
            return self.count(table, request, body, opcode)
        if opcode == DELETE or opcode == DELETEQ:
            return self.delete(table, request, body, opcode == DELETEQ)
        return self.write_with_meta(table, request, opcode)

    cdef bint set(self, Table table, const char *request, uint32_t body, bint quiet) except -1:
        cdef uint16_t key_length = load_be16(request + 2)
        cdef const char *key = request + HEADER + 8
        cdef uint64_t cas, seqno
        if request[4] != 8:
            return False
        cas = table.set_raw(
            key, key_length, key + key_length, body - 8 - key_length,
            load_be32(request + HEADER), load_be32(request + HEADER + 4), <uint8_t> request[5], self.time(), &seqno,
        )
        if not quiet:
            self.written(table, request, cas, seqno)
        return True

    cdef bint delete(self, Table table, const char *request, uint32_t body, bint quiet) except -1:
        cdef uint16_t key_length = load_be16(request + 2)
        cdef const char *key = request + HEADER
        cdef uint64_t where
        cdef const char *record
        cdef Version version
        if request[4] or key_length != body:
            return False
        record = table.lookup(key, key_length, hash_key(key, key_length, self.ledger.seed), &where)
        if record == NULL or <uint8_t> record[R_OPCODE] != OPCODE_MUTATION:
            self.ledger.deletes += 1
            self.refuse(request, STATUS_KEY_ENOENT, NOT_FOUND)
            return True
        if 0 < load_be32(record + R_EXPIRY) <= self.time():
            return False
        self.ledger.deletes += 1
        memset(&version, 0, sizeof(Version))
        version.event = DELETION
        version.key, version.key_size = key, key_length
        table.store_raw(&version, self.time())
        if not quiet:
            # Memcached's tools expect no CAS.
            self.written(table, request, version.cas if self.tokens else 0, version.seqno)
        return True

    cdef const char *living(self, Table table, const char *key, size_t key_length) except? NULL:
        """The record of an item that exists with its value in memory; NULL to leave the request to the session."""
        cdef uint64_t where
        cdef const char *record = table.lookup(key, key_length, hash_key(key, key_length, self.ledger.seed), &where)
        if record == NULL or <uint8_t> record[R_OPCODE] != OPCODE_MUTATION or record[R_MARKS] & MARK_EVICTED:
            return NULL
        return NULL if 0 < load_be32(record + R_EXPIRY) <= self.time() else record

    cdef bint touch(self, Table table, const char *request, uint32_t body) except -1:
        cdef uint16_t key_length = load_be16(request + 2)
        cdef const char *key = request + HEADER + TOUCH_EXTRAS
        cdef const char *record
        cdef char *value
        cdef char *answer
        cdef Version version
        if request[4] != TOUCH_EXTRAS or body != TOUCH_EXTRAS + key_length:
            return False
        record = self.living(table, key, key_length)
        if record == NULL:
            return False
        again(&version, record, key, key_length)
        if version.value_size > TOUCHED_BYTES_MAX:
            return False
        version.expiry = absolute(load_be32(request + HEADER), self.time())
        # The value must not be read from the place that is written: copy it behind the answer.
        value = self.reserve(HEADER + FLAGS + version.value_size) + HEADER + FLAGS
        memcpy(value, version.value, version.value_size)
        version.value = value
        self.touches += 1
        table.store_raw(&version, self.time())
        answer = self.begin(request, FLAGS, 0, 0)  # the answer to a touch has no token
        store_be64(answer + 16, version.cas)
        store_be32(answer + HEADER, version.flags)
        return True

    cdef bint count(self, Table table, const char *request, uint32_t body, uint8_t opcode) except -1:
        cdef uint16_t key_length = load_be16(request + 2)
        cdef const char *key = request + HEADER + COUNT_EXTRAS
        cdef const char *record
        cdef bint down = opcode == DECREMENT or opcode == DECREMENTQ
        cdef uint64_t number, delta = load_be64(request + HEADER)
        cdef char digits[24]
        cdef uint32_t size
        cdef Version version
        if request[4] != COUNT_EXTRAS or body != COUNT_EXTRAS + key_length:
            return False
        record = self.living(table, key, key_length)
        if record == NULL:
            return False
        again(&version, record, key, key_length)
        if not read_number(version.value, version.value_size, &number):
            return False
        number = number + delta if not down else number - delta if number > delta else 0
        size = write_number(digits, number)
        while size < version.value_size:  # as long as it was, as in memcached
            digits[size] = c" "
            size += 1
        version.value, version.value_size = digits, size
        if down:
            self.decrements += 1
        else:
            self.increments += 1
        self.reserve(HEADER + TOKEN + NUMBER)
        table.store_raw(&version, self.time())
        if opcode == INCREMENT or opcode == DECREMENT:
            self.written(table, request, version.cas, version.seqno, NUMBER)
            store_be64(self.out + self.used - NUMBER, number)
        return True

    cdef bint write_with_meta(self, Table table, const char *request, uint8_t opcode) except -1:
        cdef bint deletes = opcode == DELETE_WITH_META or opcode == DELETEQ_WITH_META
        cdef uint64_t where
        cdef uint32_t options
        cdef const char *record
        cdef Version theirs
        if not read_meta(request, deletes, &theirs, &options):
            return False
        record = table.lookup(
            theirs.key, theirs.key_size, hash_key(theirs.key, theirs.key_size, self.ledger.seed), &where
        )
        if record != NULL and <uint8_t> record[R_OPCODE] == OPCODE_MUTATION:
            if 0 < load_be32(record + R_EXPIRY) <= self.time():
                return False
            if record[R_MARKS] & MARK_EVICTED and load_be64(record + R_CAS) == theirs.cas:
                return False  # the value is on disk and may have to decide
        if deletes:
            self.deletes_with_meta += 1
        else:
            self.sets_with_meta += 1
        if record != NULL and not options & SKIP_CONFLICT_RESOLUTION and not wins(&theirs, record):
            self.refuse(request, STATUS_KEY_EEXISTS, OURS_WINS)
            return True
        table.store_raw(&theirs, self.time())
        if opcode == SET_WITH_META or opcode == DELETE_WITH_META:
            self.written(table, request, theirs.cas, theirs.seqno)
        return True

    cdef int tell(self, str operation, Py_ssize_t *count) except -1:
        """Add a count to the bucket's operations."""
        if count[0]:
            self.operations[operation] += count[0]
            count[0] = 0
        return 0

    cdef int written(
        self, Table table, const char *request, uint64_t cas, uint64_t seqno, uint32_t value_length=0
    ) except -1:
        """Answer a write; the caller fills in a value."""
        cdef char *answer = self.begin(request, TOKEN if self.tokens else 0, 0, value_length)
        store_be64(answer + 16, cas)
        if self.tokens:
            store_be64(answer + HEADER, table.vbucket_uuid)
            store_be64(answer + HEADER + 8, seqno)
        return 0
