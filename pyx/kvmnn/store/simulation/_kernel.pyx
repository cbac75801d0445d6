"""Replay of a trace in a store without contents: millions of blocks, each a few integers.

kvmnn.store.simulation.simulator has checked everything. A *key* is the number of a block and all blocks before it; a
*unit* is what a store writes at once and evicts at once.
"""

from bisect import bisect_left, insort

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc



cdef enum:
    LRU = 0
    BENEFIT = 1
    BELADY = 2
    NO_UNIT = -1
    DELETED = -1
    COMPACTION_MIN_ENTRIES = 4096
    MIN_CAPACITY = 1024

POLICY_NUMBERS = {"lru": LRU, "benefit": BENEFIT, "belady": BELADY}

cdef struct Unit:
    int64_t parent
    int64_t key_begin
    int64_t priority
    int64_t last_use      # tick of it; 0 where the policy does not look at it
    int64_t children      # DELETED: it was evicted or superseded
    int64_t num_uses
    int32_t num_keys
    int32_t first_block
    int32_t tokens
    char is_queued        # the heap has an entry with its priority

cdef struct Leaf:
    int64_t priority
    int64_t last_use
    int64_t unit


def number_prefixes(const uint32_t[::1] symbols not None, const int64_t[::1] ends not None):
    """Return the number of each symbol with all symbols before it in its request, in the order of first appearance."""
    cdef Py_ssize_t total = symbols.shape[0], index = 0, request
    cdef uint64_t parent, entry, slot, mask = MIN_CAPACITY - 1
    cdef uint64_t num_entries = 0
    numbers = np.empty(total, np.int64)
    cdef int64_t[::1] out = numbers
    cdef uint64_t *entries = <uint64_t *>calloc(mask + 1, sizeof(uint64_t))
    cdef uint32_t *values = <uint32_t *>malloc((mask + 1) * sizeof(uint32_t))
    try:
        if entries == NULL or values == NULL:
            raise MemoryError()
        if total >= 0xFFFFFFFF:
            raise OverflowError("a trace has at most 2**32 - 2 blocks")
        for request in range(ends.shape[0]):
            parent = 0
            while index < ends[request]:
                # numbers start at 1 here, and an entry of 0 is a free slot
                entry = ((parent << 32) | symbols[index]) + 1
                slot = mix(entry) & mask
                while entries[slot] != 0 and entries[slot] != entry:
                    slot = (slot + 1) & mask
                if entries[slot] == 0:
                    num_entries += 1
                    entries[slot] = entry
                    values[slot] = <uint32_t>num_entries
                    parent = num_entries
                    if 3 * num_entries > 2 * mask:
                        mask = grow(&entries, &values, mask)
                else:
                    parent = values[slot]
                out[index] = <int64_t>parent - 1
                index += 1
    finally:
        free(entries)
        free(values)
    return numbers


cdef inline uint64_t mix(uint64_t value) noexcept nogil:
    """Return a hash whose low bits depend on all bits (the finaliser of MurmurHash3)."""
    value ^= value >> 33
    value *= <uint64_t>0xFF51AFD7ED558CCDULL
    value ^= value >> 33
    value *= <uint64_t>0xC4CEB9FE1A85EC53ULL
    return value ^ (value >> 33)


cdef uint64_t grow(uint64_t **entries, uint32_t **values, uint64_t mask) except 0:
    """Double a hash table; return the new mask."""
    cdef uint64_t new_mask = 2 * mask + 1, old_slot, slot
    cdef uint64_t *new_entries = <uint64_t *>calloc(new_mask + 1, sizeof(uint64_t))
    cdef uint32_t *new_values = <uint32_t *>malloc((new_mask + 1) * sizeof(uint32_t))
    if new_entries == NULL or new_values == NULL:
        free(new_entries)
        free(new_values)
        raise MemoryError()
    for old_slot in range(mask + 1):
        if entries[0][old_slot] != 0:
            slot = mix(entries[0][old_slot]) & new_mask
            while new_entries[slot] != 0:
                slot = (slot + 1) & new_mask
            new_entries[slot] = entries[0][old_slot]
            new_values[slot] = values[0][old_slot]
    free(entries[0])
    free(values[0])
    entries[0], values[0] = new_entries, new_values
    return new_mask


def find_next_uses(const int64_t[::1] keys not None, const int64_t[::1] begins not None, Py_ssize_t num_keys):
    """Return for each key the next request with the same one; the number of requests if there is none."""
    cdef Py_ssize_t num_requests = begins.shape[0] - 1, request, index
    next_uses = np.empty(keys.shape[0], np.int64)
    cdef int64_t[::1] out = next_uses
    cdef int64_t[::1] next_by_key = np.full(num_keys, num_requests, np.int64)
    for request in range(num_requests - 1, -1, -1):
        for index in range(begins[request + 1] - 1, begins[request] - 1, -1):
            out[index] = next_by_key[keys[index]]
            next_by_key[keys[index]] = request
    return next_uses


cdef class SimulatedStore:
    """One store. `max_bytes` is -1 for no limit, `unit_bytes` has the bytes of a unit by its tokens."""

    cdef const int64_t[::1] keys, begins, tokens, unit_bytes, unit_benefits, next_uses
    cdef list chunks
    cdef dict branches
    cdef int64_t *owners
    cdef Unit *units
    cdef Leaf *leaves
    cdef int64_t num_units, units_capacity, num_leaves, leaves_capacity, compaction_size
    cdef int64_t max_bytes, unit_blocks, block_tokens, symbol_tokens, tick, clock
    cdef readonly int64_t total_bytes, put_bytes, evicted_bytes, evicted_units
    cdef int policy
    cdef bint has_chunks

    def __cinit__(
        self,
        const int64_t[::1] keys not None,
        const int64_t[::1] begins not None,
        const int64_t[::1] tokens not None,
        list chunks not None,
        const int64_t[::1] next_uses not None,
        const int64_t[::1] unit_bytes not None,
        const int64_t[::1] unit_benefits not None,
        *,
        int64_t num_keys,
        int64_t block_tokens,
        int64_t symbol_tokens,
        int64_t unit_blocks,
        int64_t max_bytes,
        int policy,
    ):
        cdef int64_t key
        self.keys, self.begins, self.tokens, self.next_uses = keys, begins, tokens, next_uses
        self.unit_bytes, self.unit_benefits = unit_bytes, unit_benefits
        self.chunks, self.branches, self.has_chunks = chunks, {}, bool(chunks)
        self.block_tokens, self.symbol_tokens, self.unit_blocks = block_tokens, symbol_tokens, unit_blocks
        self.max_bytes, self.policy = max_bytes, policy
        self.compaction_size = COMPACTION_MIN_ENTRIES
        self.owners = <int64_t *>malloc(max(num_keys, 1) * sizeof(int64_t))
        self.units_capacity = self.leaves_capacity = MIN_CAPACITY
        self.units = <Unit *>malloc(MIN_CAPACITY * sizeof(Unit))
        self.leaves = <Leaf *>malloc(MIN_CAPACITY * sizeof(Leaf))
        if self.owners == NULL or self.units == NULL or self.leaves == NULL:
            raise MemoryError()
        for key in range(num_keys):
            self.owners[key] = NO_UNIT

    def __dealloc__(self):
        free(self.owners)
        free(self.units)
        free(self.leaves)

    def run(self):
        """Run all requests; return the tokens that were found for each."""
        cdef Py_ssize_t num_requests = self.begins.shape[0] - 1, request
        cdef int64_t begin, end, scan_end, index, num_tokens, num_matched, hit, unit, owner, partial_unit
        cdef int64_t num_used, max_used = 0
        hits = np.zeros(num_requests, np.int64)
        cdef int64_t[::1] out = hits
        for request in range(num_requests):
            max_used = max(max_used, self.begins[request + 1] - self.begins[request])
        cdef int64_t[::1] used_units = np.empty(max_used + 1, np.int64)
        for request in range(num_requests):
            begin, end, num_tokens = self.begins[request], self.begins[request + 1], self.tokens[request]
            # a partial block has a key; where no part of it can match it is a block as any other
            scan_end = begin + num_tokens // self.block_tokens if self.has_chunks else end
            num_used, unit, index = 0, NO_UNIT, begin
            while index < scan_end:
                owner = self.owners[self.keys[index]]
                if owner < 0:
                    break
                if owner != unit:
                    used_units[num_used] = unit = owner
                    num_used += 1
                index += 1
            num_matched = index - begin
            hit = min(num_matched * self.block_tokens, num_tokens)
            if self.has_chunks and hit < num_tokens:
                partial_tokens, partial_unit = self.match_partially(begin, num_matched, unit)
                if partial_tokens:
                    hit = min(hit + <int64_t>partial_tokens, num_tokens)
                    if partial_unit != unit:
                        used_units[num_used] = partial_unit
                        num_used += 1
            out[request] = hit
            if num_used:
                self.touch(&used_units[0], num_used, begin, end)
            if hit < num_tokens:  # what a put reuses was used a moment ago, and what it adds is newer
                self.put(begin, end, num_matched, num_tokens)
        return hits

    cdef tuple match_partially(self, int64_t begin, int64_t num_matched, int64_t unit):
        """Return how many tokens of the first block that is not stored match a unit, and that unit."""
        cdef int64_t index, best_unit = NO_UNIT
        cdef Py_ssize_t best_symbols = 0, num_symbols, place
        cdef bytes chunk = self.chunks[self.keys[begin + num_matched]]
        cdef bytes stored_chunk
        cdef list candidates = []
        if unit >= 0:
            index = self.units[unit].key_begin + num_matched - self.units[unit].first_block
            if index < self.units[unit].key_begin + self.units[unit].num_keys:
                candidates.append((self.chunks[self.keys[index]], unit))
        branches = self.branches.get(self.keys[begin + num_matched - 1] if num_matched else NO_UNIT)
        if branches:
            place = bisect_left(branches, (chunk, 0))
            candidates += branches[place : place + 1]
            if place:
                candidates.append(branches[place - 1])
        for stored_chunk, stored_unit in candidates:
            num_symbols = count_common_symbols(stored_chunk, chunk)
            if num_symbols > best_symbols:
                best_symbols, best_unit = num_symbols, stored_unit
        return best_symbols * self.symbol_tokens, best_unit

    cdef int touch(self, const int64_t *used_units, int64_t count, int64_t begin, int64_t end) except -1:
        """Record one use of those units that are stored."""
        cdef int64_t position, priority, number, last_use = 0
        cdef Unit *unit
        self.tick += 1
        if self.policy == BENEFIT:
            last_use = self.tick
        for position in range(count):
            number = used_units[position]
            unit = &self.units[number]
            if unit.children == DELETED:
                continue
            if self.policy == LRU:
                priority = self.tick
            elif self.policy == BENEFIT:
                unit.num_uses += 1
                priority = self.clock + unit.num_uses * self.unit_benefits[unit.tokens]
            else:
                priority = self.find_next_use(unit, begin, end)
            if priority != unit.priority or last_use != unit.last_use:
                unit.priority, unit.last_use, unit.is_queued = priority, last_use, False
                if not unit.children:
                    self.push(number)
        return 0

    cdef int64_t find_next_use(self, const Unit *unit, int64_t begin, int64_t end) noexcept nogil:
        """Return minus the next request after this one that uses the first block of a unit."""
        cdef int64_t index = begin + unit.first_block
        if index < end and self.keys[index] == self.keys[unit.key_begin]:
            return -self.next_uses[index]
        return unit.priority

    cdef int put(self, int64_t begin, int64_t end, int64_t num_matched, int64_t num_tokens) except -1:
        """Add units for the blocks of a request that are not stored; its keys are those from `begin` to `end`."""
        cdef int64_t num_keys = end - begin, first_block = num_matched, end_block, index, number, owned_end
        cdef int64_t num_whole = num_tokens // self.block_tokens if self.has_chunks else num_keys
        cdef int64_t parent = self.owners[self.keys[begin + num_matched - 1]] if num_matched else NO_UNIT
        cdef int64_t nbytes, unit_tokens, needed_bytes = self.sum_chain_bytes(parent)
        cdef Unit *unit
        self.tick += 1
        if parent >= 0:
            self.units[parent].children += 1
        while first_block < num_keys:
            end_block = first_block + self.unit_blocks
            if end_block >= num_whole:
                end_block = num_keys
            unit_tokens = min(end_block * self.block_tokens, num_tokens) - first_block * self.block_tokens
            nbytes = self.unit_bytes[unit_tokens]
            needed_bytes += nbytes
            if 0 <= self.max_bytes < needed_bytes:  # even if all that can go went
                break
            number = self.num_units
            unit = self.append_unit()
            unit.parent, unit.children = parent, 1
            unit.key_begin, unit.num_keys = begin + first_block, <int32_t>(end_block - first_block)
            unit.first_block, unit.num_uses, unit.is_queued = <int32_t>first_block, 1, False
            unit.tokens, unit.last_use = <int32_t>unit_tokens, 0
            owned_end = begin + min(end_block, num_whole)
            for index in range(unit.key_begin, owned_end):
                self.owners[self.keys[index]] = number
            if self.policy == LRU:
                unit.priority = self.tick
            elif self.policy == BENEFIT:
                unit.priority, unit.last_use = self.clock + self.unit_benefits[unit.tokens], self.tick
            else:
                unit.priority = -self.next_uses[unit.key_begin]
            self.total_bytes += nbytes
            self.put_bytes += nbytes
            if self.has_chunks:
                self.add_branch(number)
            parent, first_block = number, end_block
        if parent >= 0:  # the last unit of the text
            self.units[parent].children -= 1
            if self.policy == BELADY:  # the yardstick may refuse a text; a store evicts its own units last
                self.push(parent)
        if self.max_bytes >= 0 and self.total_bytes > self.max_bytes:
            self.evict()
        if parent >= 0:
            self.push(parent)
        return 0

    cdef int64_t sum_chain_bytes(self, int64_t number) noexcept nogil:
        """Return the bytes of a unit and of all units before it."""
        cdef int64_t nbytes = 0
        while number >= 0:
            nbytes += self.unit_bytes[self.units[number].tokens]
            number = self.units[number].parent
        return nbytes

    cdef Unit *append_unit(self) except NULL:
        """Return a new unit at the end of the array, which may move."""
        if self.num_units == self.units_capacity:
            units = <Unit *>realloc(self.units, 2 * self.units_capacity * sizeof(Unit))
            if units == NULL:
                raise MemoryError()
            self.units, self.units_capacity = units, 2 * self.units_capacity
        self.num_units += 1
        return &self.units[self.num_units - 1]

    cdef int add_branch(self, int64_t number) except -1:
        """Record a unit after a block; remove the partial block that it continues."""
        cdef int64_t tail_unit = NO_UNIT
        cdef bytes chunk, tail_chunk = b""
        chunk = self.chunks[self.keys[self.units[number].key_begin]]
        branches = self.branches.setdefault(self.get_parent_key(number), [])
        place = bisect_left(branches, (chunk, 0))
        if place:
            tail_chunk, tail_unit = branches[place - 1]
        insort(branches, (chunk, number))
        if tail_unit >= 0 and not self.units[tail_unit].children and chunk.startswith(tail_chunk):
            # a partial block at the end has no owner
            if self.units[tail_unit].num_keys == 1 and self.owners[self.keys[self.units[tail_unit].key_begin]] < 0:
                self.delete(tail_unit)
        return 0

    cdef int64_t get_parent_key(self, int64_t number) noexcept nogil:
        cdef const Unit *unit = &self.units[number]
        return self.keys[unit.key_begin - 1] if unit.first_block else NO_UNIT

    cdef int64_t delete(self, int64_t number) except -2:
        """Remove a unit; return the unit before it if that is a leaf now."""
        cdef Unit *unit = &self.units[number]
        cdef int64_t index
        for index in range(unit.key_begin, unit.key_begin + unit.num_keys):
            if self.owners[self.keys[index]] == number:
                self.owners[self.keys[index]] = NO_UNIT
        unit.children = DELETED
        self.total_bytes -= self.unit_bytes[unit.tokens]
        if self.has_chunks:
            parent_key = self.get_parent_key(number)
            branches = self.branches[parent_key]
            del branches[bisect_left(branches, (self.chunks[self.keys[unit.key_begin]], number))]
            if not branches:
                del self.branches[parent_key]
        if unit.parent < 0:
            return NO_UNIT
        self.units[unit.parent].children -= 1
        return NO_UNIT if self.units[unit.parent].children else unit.parent

    cdef int evict(self) except -1:
        """Evict the leaves with the lowest priorities, of equal ones the least recently used and of these the last one,
        until the store is within its limit.
        """
        cdef int64_t parent
        cdef Leaf leaf
        while self.total_bytes > self.max_bytes and self.num_leaves:
            leaf = self.pop()
            unit = &self.units[leaf.unit]
            if unit.priority != leaf.priority or unit.last_use != leaf.last_use:
                continue
            unit.is_queued = False
            if unit.children:  # an entry of the time before anything followed it
                continue
            if self.policy == BENEFIT:  # what is put later must beat what was evicted
                self.clock = max(self.clock, leaf.priority)
            self.evicted_units += 1
            self.evicted_bytes += self.unit_bytes[unit.tokens]
            parent = self.delete(leaf.unit)
            if parent >= 0:
                self.push(parent)
        return 0

    cdef int push(self, int64_t number) except -1:
        """Add a unit to the heap if nothing follows it."""
        cdef int64_t place, parent
        cdef Leaf leaf
        cdef Unit *unit = &self.units[number]
        if unit.children or unit.is_queued:
            return 0
        if self.num_leaves >= self.compaction_size:
            self.compact()
        if self.num_leaves == self.leaves_capacity:
            leaves = <Leaf *>realloc(self.leaves, 2 * self.leaves_capacity * sizeof(Leaf))
            if leaves == NULL:
                raise MemoryError()
            self.leaves, self.leaves_capacity = leaves, 2 * self.leaves_capacity
        unit.is_queued = True
        leaf.priority, leaf.last_use, leaf.unit = unit.priority, unit.last_use, number
        place = self.num_leaves
        self.num_leaves += 1
        while place:
            parent = (place - 1) >> 1
            if not is_before(leaf, self.leaves[parent]):
                break
            self.leaves[place] = self.leaves[parent]
            place = parent
        self.leaves[place] = leaf
        return 0

    cdef Leaf pop(self) noexcept nogil:
        cdef Leaf first = self.leaves[0]
        self.num_leaves -= 1
        if self.num_leaves:
            self.sift_down(0, self.leaves[self.num_leaves])
        return first

    cdef void sift_down(self, int64_t place, Leaf leaf) noexcept nogil:
        """Put an entry at a place of the heap or below."""
        cdef int64_t child
        while True:
            child = 2 * place + 1
            if child >= self.num_leaves:
                break
            if child + 1 < self.num_leaves and is_before(self.leaves[child + 1], self.leaves[child]):
                child += 1
            if not is_before(self.leaves[child], leaf):
                break
            self.leaves[place] = self.leaves[child]
            place = child
        self.leaves[place] = leaf

    cdef void compact(self) noexcept nogil:
        """Drop the entries of the heap that are out of date."""
        cdef int64_t place, count = 0
        cdef Unit *unit
        for place in range(self.num_leaves):
            unit = &self.units[self.leaves[place].unit]
            if unit.priority != self.leaves[place].priority or unit.last_use != self.leaves[place].last_use:
                continue
            if unit.children:
                unit.is_queued = False
                continue
            self.leaves[count] = self.leaves[place]
            count += 1
        self.num_leaves = count
        for place in range(count // 2 - 1, -1, -1):
            self.sift_down(place, self.leaves[place])
        self.compaction_size = COMPACTION_MIN_ENTRIES + 2 * count


cdef inline bint is_before(Leaf first, Leaf second) noexcept nogil:
    if first.priority != second.priority:
        return first.priority < second.priority
    if first.last_use != second.last_use:
        return first.last_use < second.last_use
    return first.unit > second.unit


cdef Py_ssize_t count_common_symbols(bytes first, bytes second):
    """Return the length of the common prefix of two lists of 32-bit symbols."""
    cdef const unsigned char *left = first
    cdef const unsigned char *right = second
    cdef Py_ssize_t index = 0, size = min(len(first), len(second))
    while index < size and left[index] == right[index]:
        index += 1
    return index // 4
