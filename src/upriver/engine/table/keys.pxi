# Listing keys: all, the smallest ones, a random one.

cdef object list_live_keys(Table self):
    cdef double now = self.ledger.clock()
    cdef uint64_t i
    cdef char *record
    cdef list keys = []
    for i in range(slot_count(self)):
        record = record_in(self, i)
        if record != NULL and is_live(record, now):
            keys.append(key_of(record))
    return keys


cdef object list_smallest_keys(Table self, bytes start, size_t limit):
    cdef double now = self.ledger.clock()
    cdef size_t room = min(limit, <size_t>self.items), count
    cdef list keys = [None] * room  # the collector may run here: make the list before anything is picked
    count = pick_smallest(self, PyBytes_AS_STRING(start), PyBytes_GET_SIZE(start), room, now)
    room = count
    while count:
        keys[count - 1] = key_of(picked[0])
        count -= 1
        sift_down(0, count, picked[count])
    del keys[room:]
    return keys


cdef object choose_key(Table self):
    cdef double now = self.ledger.clock()
    cdef uint64_t count = slot_count(self), i, live = 0
    cdef char *record
    cdef char *chosen = NULL
    if not self.items:
        return None
    # Taking the next record behind an empty slot would favour records behind many empty slots.
    for i in range(RANDOM_TRIES):
        record = record_in(self, random.randrange(count))
        if record != NULL and is_live(record, now):
            return key_of(record)
    for i in range(count):  # few slots lead to live items: look at all slots
        record = record_in(self, i)
        if record != NULL and is_live(record, now):
            live += 1
            if random.randrange(live) == 0:
                chosen = record
    return None if chosen == NULL else key_of(chosen)


cdef inline int compare_keys(const char *one, size_t one_size, const char *other, size_t other_size) noexcept:
    cdef int order = memcmp(one, other, min(one_size, other_size))
    return order if order else (one_size > other_size) - (one_size < other_size)


cdef inline bint is_before(const char *one, const char *other) noexcept:
    """Whether the key of the first record comes before that of the other."""
    return compare_keys(
        record_key(one), load_be16(one + R_KEY_LENGTH), record_key(other), load_be16(other + R_KEY_LENGTH)
    ) < 0


cdef void sift_down(size_t place, size_t count, const char *record) noexcept:
    """Put the record into the binary heap of the picked ones, the largest key first, from the hole at ``place``."""
    cdef size_t child
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and is_before(picked[child], picked[child + 1]):
            child += 1
        if not is_before(record, picked[child]):
            break
        picked[place] = picked[child]
        place = child
    picked[place] = record


cdef size_t pick_smallest(Table self, const char *start, size_t size, size_t limit, double now) except? 9999:
    """Pick the live records with the smallest keys from ``start`` on, as a binary heap; returns their number."""
    cdef size_t count = 0, place
    cdef uint32_t i, offset
    cdef Chunk *chunk
    cdef const char *record
    cdef const char *following
    if not limit:
        return 0
    for i in range(self.order_count):
        chunk = &self.chunks[self.order[i]]
        following = self.chunks[self.order[i + 1]].data if i + 1 < self.order_count else chunk.data
        offset = 0
        while offset < chunk.used:
            record = chunk.data + offset
            fetch_ahead(record, chunk.data + chunk.used, following)
            offset += record_size(record)
            if load64(record) or not is_live(record, now):
                continue
            if compare_keys(record_key(record), load_be16(record + R_KEY_LENGTH), start, size) < 0:
                continue
            if count == limit:
                if is_before(record, picked[0]):
                    sift_down(0, count, record)
                continue
            pick(count, record)
            place = count
            count += 1
            while place and is_before(picked[(place - 1) >> 1], record):
                picked[place] = picked[(place - 1) >> 1]
                place = (place - 1) >> 1
            picked[place] = record
    return count
