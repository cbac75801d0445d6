"""Frames of effort "fast": zstd payloads by a writer of its own, which does only what pays in K and V (docs/format.md).

A lane without redundancy becomes raw blocks. Of the others, what earlier rows of the lane have at the same places is
copied from there, and the rest gets Huffman codes. Where samples show that bytes follow from those before them, which
those of K and V do not, predictors and libzstd are tried as well. `_fast_lane` does it to one lane.
"""

from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcpy

from cpython.bytes cimport PyBytes_AsString
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF

from kvmnn.frames._fast_lane cimport (
    TRIAL_MOST, UNKNOWN, Form, Lane, Look, Piece, Scratch, best_form, gather, lane_room, look_at, make_lane, make_room,
    raw_frame, raw_size, smaller
)
from kvmnn.frames._room cimport Track
from kvmnn.frames._stream_header cimport CODEC_ZSTD, HEADER, MODES, store_le32
from kvmnn.frames._streams cimport KVMNN_MODE_RAW, PAST_FROM, lanes
from kvmnn.frames._workspace cimport Workspace, acquire, release, shortened, unfinished_bytes

from ..errors import KvmnnError

cdef enum:
    LITTLE = 32              # so small a share of all lanes need not become smaller
    IN_PLACE_LEAST = 1 << 20 # bytes of an array whose payloads are made where they stay: room costs less than to copy them


cdef size_t stream_room(size_t words) noexcept nogil:
    return HEADER + lane_room(words)


cdef Form plain_form(Look look) noexcept nogil:
    """Without a predictor; libzstd has next to nothing to do where all bytes are alike, as low ones of converted words."""
    return Form(KVMNN_MODE_RAW, look.constant, 0, 1, 0)


cdef bint make_in_place(
    Workspace ws, Piece *piece, const Look *looks, Scratch scratch, uint8_t *spare, uint8_t *streams, Lane *found
) noexcept nogil:
    """The lanes of a piece that needs no predictors, their payloads where they are to stay. False: no memory."""
    cdef uint8_t *slots[2]
    cdef Form form
    cdef int lane
    for lane in range(piece.stride):
        form = plain_form(looks[lane])
        slots[0], slots[1] = streams + HEADER, spare
        if not make_lane(ws, piece, lane, &form, looks[lane].bits, scratch, slots, &found[lane]):
            return False
        if found[lane].made == spare:
            memcpy(streams + HEADER, spare, found[lane].size)
            found[lane].made = streams + HEADER
        streams += HEADER + found[lane].size
    return True


cdef bint make_lanes(
    Workspace ws, const uint8_t *src, size_t words, int stride, bint continued, const int *modes, uint8_t *streams,
    Lane *found
) noexcept nogil:
    """The lanes of a piece, each by a predictor of its bit set in `modes`; of none, nothing. False: no memory.

    `continued`: the word before is there as well, and predictors go on from it. `streams`: where they are to stay, one
    behind the other, with stream_room(words) bytes each, or NULL; what has raw blocks, or predictors, is not brought there.
    """
    cdef size_t room = lane_room(words), total = 0
    cdef uint8_t *out
    cdef uint8_t *slots[5]
    cdef Scratch scratch
    cdef Look[4] looks
    cdef Form[4] forms
    cdef Piece piece = Piece(src, words, stride, continued, look_at(src, words, stride, looks), False, UNKNOWN)
    cdef int lane
    cdef bint plain = not piece.follows
    for lane in range(stride):
        plain = plain and modes[lane] & 1 << KVMNN_MODE_RAW
    piece.gathered = plain
    if not plain:
        streams = NULL
    out = ws.buffer(1, <size_t>(stride + 1 if streams == NULL else 1) * room)
    if out == NULL or not make_room(ws, words, stride if piece.gathered else 1, &scratch):
        return False
    if piece.gathered:
        gather(&piece, scratch.lane)
    if streams != NULL:
        return make_in_place(ws, &piece, looks, scratch, out, streams, found)
    for lane in range(stride + 1):
        slots[lane] = out + <size_t>lane * room
    for lane in range(stride):
        forms[lane] = plain_form(looks[lane])
        if not modes[lane]:
            found[lane] = Lane(KVMNN_MODE_RAW, slots[lane], 0, NULL)
            continue
        if piece.follows or not modes[lane] & 1 << KVMNN_MODE_RAW:
            forms[lane] = best_form(ws, &piece, lane, modes[lane], looks[lane], scratch, slots + lane)
            if forms[lane].mode < 0:
                return False
        if not make_lane(ws, &piece, lane, &forms[lane], looks[lane].bits, scratch, slots + lane, &found[lane]):
            return False
        total += found[lane].size
    if piece.follows:
        for lane in range(stride):
            if forms[lane].libzstd and found[lane].size * LITTLE > total:
                smaller(ws, &piece, lane, modes[lane], &forms[lane], scratch, &found[lane], slots + stride)
    return True


cdef size_t frame_bytes(Workspace ws, const uint8_t *src, size_t words, int stride) noexcept nogil:
    """Of the frame of one piece under any predictors, but for runs that RLE makes smaller; 0: no memory."""
    cdef Lane[4] found
    cdef int[4] modes
    cdef size_t size = 4
    cdef int lane
    for lane in range(stride):
        modes[lane] = (1 << MODES) - 1
    if not make_lanes(ws, src, words, stride, False, modes, NULL, found):
        return 0
    for lane in range(stride):
        size += HEADER + found[lane].size
    return size


cdef Workspace lanes_made(
    const uint8_t *src, size_t words, int stride, bint continued, modes, uint8_t *streams, Lane *found
):
    """`make_lanes` in a workspace that the caller releases, once it has copied them."""
    cdef Workspace ws = acquire(True, False)
    cdef int[4] sets
    cdef bint ok
    for lane in range(stride):
        sets[lane] = modes[lane]
    with nogil:
        ok = make_lanes(ws, src, words, stride, continued, sets, streams, found)
    if not ok:
        release(ws)
        raise MemoryError("no memory for the streams of a frame")
    return ws


cdef void put_lane(
    const Lane *found, const uint8_t *src, size_t words, int stride, int lane, bint past, uint8_t *at
) noexcept nogil:
    """A payload that was made elsewhere, or is to be raw blocks; past the caches where that is for many bytes."""
    if found.made == NULL and found.bytes != NULL:
        raw_frame(found.bytes, words, 1, 0, past, at)
    elif found.made == NULL:
        raw_frame(src, words, stride, lane, past, at)
    elif past:
        lanes().copy_past(at, found.made, found.size)
    else:
        memcpy(at, found.made, found.size)


cdef void put_frame(const Lane *found, const uint8_t *src, size_t words, int stride, uint8_t *at) noexcept nogil:
    """Headers, and payloads that are not in their places yet."""
    cdef int lane
    store_le32(at, <uint32_t>words)
    at += 4
    for lane in range(stride):
        at[0], at[1] = found[lane].mode, CODEC_ZSTD
        store_le32(at + 2, <uint32_t>words)
        store_le32(at + 6, <uint32_t>found[lane].size)
        at += HEADER
        if found[lane].made != at:
            put_lane(&found[lane], src, words, stride, lane, False, at)
        at += found[lane].size


# -- for Python -------------------------------------------------------------------------------------------------------

def encode(const uint8_t[::1] data not None, int stride, modes) -> bytes:
    """The frame of one piece of whole words, at least one of them.

    `modes`: for each lane a bit set of predictors (1 raw, 2 delta_seq, 4 xor_seq), which has raw.
    """
    cdef size_t words = data.shape[0] // stride, size = 4, most = 4 + <size_t>stride * stream_room(words)
    cdef Lane[4] found
    cdef uint8_t *streams = NULL
    cdef uint8_t *at
    cdef int lane
    cdef PyObject *frame = NULL
    cdef Workspace ws
    if words * <size_t>stride >= IN_PLACE_LEAST:
        frame = unfinished_bytes(most)
        streams = <uint8_t *>PyBytes_AsString(<object>frame) + 4
    try:
        ws = lanes_made(&data[0], words, stride, False, modes, streams, found)
        try:
            for lane in range(stride):
                size += HEADER + found[lane].size
            if frame == NULL:
                frame = unfinished_bytes(size)
            at = <uint8_t *>PyBytes_AsString(<object>frame)
            with nogil:  # new pages cost as much as the copy
                put_frame(found, &data[0], words, stride, at)
        finally:
            release(ws)
        return shortened(&frame, size)
    finally:
        Py_XDECREF(frame)


def likely_modes(const uint8_t[::1] data not None, int stride, modes) -> tuple:
    """For each lane of whole words a bit set with the one predictor of all its pieces, and one with others that may turn
    out to be better; `modes` as for `encode`."""
    cdef size_t words = data.shape[0] // stride, most = min(words, <size_t>TRIAL_MOST)
    cdef Look[4] looks
    cdef Piece piece = Piece(&data[0], words, stride, False, True, False, UNKNOWN)
    cdef int lane, lane_modes
    cdef Form form
    cdef Scratch scratch
    cdef uint8_t *slots[2]
    cdef list found = [], rivals = []
    cdef Workspace ws = acquire(True, False)
    try:
        if not look_at(&data[0], words, stride, looks):
            return [1 << KVMNN_MODE_RAW] * stride, [0] * stride
        slots[0] = ws.buffer(1, 2 * lane_room(most))
        if slots[0] == NULL or not make_room(ws, most, 1, &scratch):
            raise MemoryError("no memory to try predictors")
        slots[1] = slots[0] + lane_room(most)
        for lane in range(stride):
            lane_modes = modes[lane]
            with nogil:
                form = best_form(ws, &piece, lane, lane_modes, looks[lane], scratch, slots)
            if form.mode < 0:
                raise MemoryError("no memory to try predictors")
            found.append(1 << form.mode)
            rivals.append(form.rivals)
        return found, rivals
    finally:
        release(ws)


def write_payloads(
    list tracks not None, Py_ssize_t piece, tuple most not None, const uint8_t[::1] data not None, int stride, size_t begin,
    size_t end, modes
) -> None:
    """A zstd payload for each lane of the words from `begin` to `end`, under the one predictor of its bit set, as a piece
    of its track that has room for as many bytes as `most` says: `raw_payload` without a predictor, `most_payload` under
    one. For an empty set, nothing.
    """
    cdef Lane[4] found
    cdef uint8_t *to
    cdef size_t room_for[4]
    cdef size_t words = end - begin
    cdef int lane
    cdef bint past = data.shape[0] >= PAST_FROM
    cdef const uint8_t *src
    cdef Track track
    cdef Workspace ws
    if not begin < end <= <size_t>data.shape[0] // stride or len(tracks) != stride or len(most) != stride:
        raise KvmnnError(
            f"words {begin} to {end} of {data.shape[0] // stride} on {len(tracks)} of {stride} tracks: not there"
        )
    src = &data[begin * stride]
    for lane in range(stride):
        room_for[lane] = most[lane]
        if modes[lane] and room_for[lane] < (raw_size(words) if modes[lane] == 1 << KVMNN_MODE_RAW else lane_room(words)):
            raise KvmnnError(f"{room_for[lane]} bytes for a payload of {words} words: too few")
    ws = lanes_made(src, words, stride, begin > 0, modes, NULL, found)
    try:
        for lane in range(stride):
            track = tracks[lane]
            to = track.room.at(track.place(piece), room_for[lane])
            with nogil:
                if found[lane].size > room_for[lane]:
                    found[lane].size, found[lane].made = raw_size(words), NULL
                if found[lane].size:
                    put_lane(&found[lane], src, words, stride, lane, past, to)
            track.done(piece, found[lane].size)
    finally:
        release(ws)


def most_payload(size_t words) -> int:
    """Bytes that no payload of a lane passes."""
    return lane_room(words)


def raw_payload(size_t words) -> int:
    """Bytes of a payload of raw blocks, which none passes that has no predictor."""
    return raw_size(words)
