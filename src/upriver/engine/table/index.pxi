# The index from keys to records: open addressing. When it grows, slots move to the larger index little by little.

cdef inline uint64_t slot_of(uint32_t number, uint32_t place) noexcept:
    return (<uint64_t>number << 20) | (place >> 3)


cdef inline char *lookup_bytes(Table self, bytes key) noexcept:
    cdef uint64_t where
    cdef const char *start = PyBytes_AS_STRING(key)
    cdef size_t size = PyBytes_GET_SIZE(key)
    return self.lookup(start, size, hash_key(start, size, self.ledger.seed), &where)


cdef inline void fetch_chunks(Table self) noexcept:
    """Prefetch the list of chunks of a small vbucket, while its slot is still on its way from memory."""
    cdef const char *chunks = <const char *>self.chunks
    cdef size_t offset, size = min(self.chunk_count * sizeof(Chunk), <size_t>512)
    for offset in range(0, size, 64):
        prefetch(chunks + offset)


cdef inline void fetch_for_write(Table self, bytes key) noexcept:
    """Prefetch the cache lines that a write will need, so that they are there when the checks are done."""
    cdef uint64_t hashed = hash_key(PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), self.ledger.seed)
    cdef Chunk *chunk
    cdef const char *end
    prefetch(&self.slots[hashed & self.mask])
    fetch_chunks(self)
    if self.order_count:
        chunk = &self.chunks[self.order[self.order_count - 1]]
        end = chunk.data + chunk.used
        prefetch_write(end)
        prefetch_write(end + 64)
        prefetch_write(end + 128)
        prefetch_write(end + 192)


cdef inline uint64_t hash_record(Table self, const char *record) noexcept:
    return hash_key(record_key(record), load_be16(record + R_KEY_LENGTH), self.ledger.seed)


cdef int reserve_slot(Table self) except -1:
    """Make room for one more key: at most three quarters of the slots are taken.

    A larger index is filled little by little, so that no write waits for all of it: every 64th write moves 1,024 slots
    of the old one, and a lookup that finds its key there moves that slot. The old index is empty long before the new
    one is full.
    """
    cdef uint64_t room = self.mask + 1
    cdef uint64_t *new
    if self.old_slots != NULL:
        self.waited += 1
        if self.waited >= 64:
            self.waited = 0
            move_slots(self, 1024)
    if self.slots_used * 4 < room * 3:
        return 0
    new = <uint64_t *>zeroed_take(room * 2 * sizeof(uint64_t))
    if new == NULL:
        raise MemoryError
    if self.old_slots != NULL:
        move_slots(self, self.old_mask + 1)
    self.old_slots, self.old_mask, self.old_place, self.waited = self.slots, self.mask, 0, 0
    self.slots, self.mask = new, room * 2 - 1
    account_memory(self, <int64_t>(room * 2 * sizeof(uint64_t)))
    if room <= 1024:
        move_slots(self, room)
    return 0


cdef void move_slots(Table self, uint64_t count) noexcept:
    """Move this many slots of the old index to the new one; MOVED stays behind, so that lookups go on past it."""
    cdef uint64_t i = self.old_place, end = min(self.old_place + count, self.old_mask + 1), ahead, hashed, j
    cdef uint64_t *old = self.old_slots
    while i < end:
        ahead = old[(i + 16) & self.old_mask]
        if ahead > MOVED:
            prefetch(record_at(self, ahead) + R_EXTRAS)
        if old[i] > MOVED:
            hashed = hash_record(self, record_at(self, old[i]))
            j = hashed & self.mask
            while self.slots[j]:
                j = (j + 1) & self.mask
            self.slots[j] = old[i]
            old[i] = MOVED
        i += 1
    self.old_place = i
    if i > self.old_mask:
        drop_old_slots(self)


cdef void drop_old_slots(Table self) noexcept:
    if self.old_slots != NULL:
        zeroed_give(<char *>self.old_slots, (self.old_mask + 1) * sizeof(uint64_t))
        account_memory(self, -<int64_t>((self.old_mask + 1) * sizeof(uint64_t)))
        self.old_slots = NULL


cdef char *fetch_old(Table self, const char *key, size_t size, uint64_t hashed, uint64_t to) noexcept:
    """The record of a key that is still in the old index; its slot moves to the new one."""
    cdef uint64_t place = hashed & self.old_mask, slot
    cdef char *record
    while True:
        slot = self.old_slots[place]
        if not slot:
            return NULL
        if slot != MOVED and not ((slot ^ hashed) & TAG_MASK):
            record = record_at(self, slot)
            if load_be16(record + R_KEY_LENGTH) == size and not memcmp(record_key(record), key, size):
                self.slots[to] = slot
                self.old_slots[place] = MOVED
                return record
        place = (place + 1) & self.old_mask


cdef inline uint64_t slot_count(Table self) noexcept:
    return self.mask + 1 + (0 if self.old_slots == NULL else self.old_mask + 1)


cdef inline char *record_in(Table self, uint64_t place) noexcept:
    """The record of a slot; the slots of the old index follow those of the new one. NULL if the slot is empty."""
    cdef uint64_t slot = self.slots[place] if place <= self.mask else self.old_slots[place - self.mask - 1]
    return NULL if slot <= MOVED else record_at(self, slot)


cdef int remember(Table self, char *record, uint32_t number, uint32_t place) except -1:
    """Enter the record as the newest of its key."""
    cdef uint64_t where, hashed = hash_record(self, record)
    reserve_slot(self)
    if self.lookup(record_key(record), load_be16(record + R_KEY_LENGTH), hashed, &where) == NULL:
        self.slots_used += 1
    self.slots[where] = (hashed & TAG_MASK) | slot_of(number, place)
    return 0


cdef void forget(Table self, const char *record) noexcept:
    """Remove the record's key from the index; the slots behind it move up."""
    cdef uint64_t hole, next, home
    if self.lookup(record_key(record), load_be16(record + R_KEY_LENGTH), hash_record(self, record), &hole) == NULL:
        return
    next = hole
    while True:
        next = (next + 1) & self.mask
        if not self.slots[next]:
            break
        home = hash_record(self, record_at(self, self.slots[next])) & self.mask
        # A slot may fill the hole unless its home lies between the hole and its present place.
        if ((next - home) & self.mask) >= ((next - hole) & self.mask):
            self.slots[hole] = self.slots[next]
            hole = next
    self.slots[hole] = 0
    self.slots_used -= 1


cdef inline void move_slot(Table self, const char *record, uint64_t slot) noexcept:
    """Point the key of a record that is about to move to ``slot``."""
    cdef uint64_t where, hashed = hash_record(self, record)
    self.lookup(record_key(record), load_be16(record + R_KEY_LENGTH), hashed, &where)
    self.slots[where] = (hashed & TAG_MASK) | slot
