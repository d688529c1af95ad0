# Chunks: taking, giving back and searching them.

cdef uint32_t chunk_for(Table self, uint32_t size, uint64_t seqno) except 0:
    """The number of the last chunk, or of a new one if the last has no room for this many bytes."""
    cdef Chunk *chunk
    cdef uint32_t wanted
    if self.order_count:
        chunk = &self.chunks[self.order[self.order_count - 1]]
        if chunk.used < PLACE_END and chunk.size - chunk.used >= size:
            if not chunk.used:
                chunk.first_seqno = seqno
            return self.order[self.order_count - 1]
    # A new chunk is a small part of what the vbucket holds: little stays empty, and large vbuckets get large chunks.
    # The part depends on the vbucket's number. Otherwise a thousand vbuckets that grow alike would all need their next
    # chunk at the same moment, more than are ready.
    wanted = PIECE_MIN
    while wanted < PIECE_MAX and <int64_t>wanted * (8 + self.vbucket % 8) <= self.memory_bytes:
        wanted *= 2
    return new_chunk(self, size, wanted, seqno)


cdef int more_chunks(Table self, uint32_t room) except -1:
    """Make room for this many chunks; the new room counts only when all three lists have it."""
    cdef void *moved = realloc(self.chunks, room * sizeof(Chunk))
    if moved == NULL:
        raise MemoryError
    self.chunks = <Chunk *>moved
    moved = realloc(self.order, room * sizeof(uint32_t))
    if moved == NULL:
        raise MemoryError
    self.order = <uint32_t *>moved
    moved = realloc(self.spare, room * sizeof(uint32_t))
    if moved == NULL:
        raise MemoryError
    self.spare = <uint32_t *>moved
    self.chunk_room = room
    return 0


cdef uint32_t new_chunk(Table self, uint32_t least, uint32_t size, uint64_t seqno) except 0:
    cdef uint32_t number
    cdef Chunk *chunk
    if self.spare_count:
        number = self.spare[self.spare_count - 1]
    else:
        number = self.chunk_count
        if number >= self.chunk_room:
            more_chunks(self, max(4, self.chunk_room * 2))
    chunk = &self.chunks[number]
    memset(chunk, 0, sizeof(Chunk))
    chunk.data = arena_take(least, &size)
    if chunk.data == NULL:
        raise MemoryError
    account_memory(self, size)
    if number == self.chunk_count:
        self.chunk_count += 1
    else:
        self.spare_count -= 1
    chunk.size = size
    chunk.first_seqno = seqno
    chunk.min_expiry = NEVER
    self.order[self.order_count] = number
    self.order_count += 1
    return number


cdef void drop_chunk(Table self, uint32_t i) noexcept:
    cdef uint32_t number = self.order[i]
    account_memory(self, -<int64_t>self.chunks[number].size)
    arena_give(self.chunks[number].data, self.chunks[number].size)
    self.chunks[number].data = NULL
    self.chunks[number].used = 0
    self.spare[self.spare_count] = number
    self.spare_count += 1
    self.order_count -= 1
    memmove(&self.order[i], &self.order[i + 1], (self.order_count - i) * sizeof(uint32_t))
    if self.persisted_chunk == number:
        self.persisted_chunk = 0
    if self.flushing_chunk == number:
        self.flushing_chunk = 0
    if self.read_chunk == number:
        self.read_chunk = 0


cdef void shrink_chunk(Table self, Chunk *chunk) noexcept:
    """Move the rest of a chunk to a smaller piece if it fits there."""
    cdef uint32_t size = chunk.used
    cdef char *moved
    if arena_size(chunk.used) >= chunk.size:
        return
    moved = arena_take(chunk.used, &size)
    if moved == NULL:
        return
    if size >= chunk.size:
        arena_give(moved, size)
        return
    memcpy(moved, chunk.data, chunk.used)
    arena_give(chunk.data, chunk.size)
    account_memory(self, <int64_t>size - <int64_t>chunk.size)
    chunk.data = moved
    chunk.size = size


cdef uint32_t seek_chunk(Table self, uint64_t after) noexcept:
    """The index in `order` of the first chunk that reaches beyond ``after``."""
    cdef uint32_t low = 0, high = self.order_count, middle
    while low < high:
        middle = (low + high) >> 1
        if self.chunks[self.order[middle]].last_seqno > after:
            high = middle
        else:
            low = middle + 1
    return low


cdef uint32_t seek_place(Table self, uint32_t i, uint64_t after) noexcept:
    """The place in that chunk of the first record beyond ``after``."""
    cdef uint32_t number = self.order[i], place = 0
    cdef Chunk *chunk = &self.chunks[number]
    if chunk.first_seqno > after:
        return 0
    if self.persisted_chunk == number and after >= self.persisted_seqno:
        place = self.persisted_place
    if self.read_chunk == number and after >= self.read_seqno and place < self.read_place:
        place = self.read_place
    while place < chunk.used and load_be64(chunk.data + place + R_SEQNO) <= after:
        place += record_size(chunk.data + place)
    return place


cdef size_t held_between(Table self, uint64_t after, uint64_t upto, size_t enough) noexcept:
    """An upper bound for the bytes of these records; counting stops when ``enough`` is reached."""
    cdef uint32_t i = seek_chunk(self, after)
    cdef size_t held = 0
    while i < self.order_count and held < enough and self.chunks[self.order[i]].first_seqno <= upto:
        held += self.chunks[self.order[i]].used
        i += 1
    return held


cdef inline void stop_reading(Table self, uint32_t number, const char *record, uint64_t last) noexcept:
    """Remember this record, the first after ``last``, for which there was no room: the next read begins with it."""
    self.read_chunk, self.read_place, self.read_seqno = number, <uint32_t>(record - self.chunks[number].data), last
