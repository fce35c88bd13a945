"""Where a chunk's rows lie, for batches and for packed sequences, and masked loads and stores of row blocks, P and X.

Packed sequences restart their chunks, so how many chunks there are is known on the device only. `chunk_index_kernel`
fills a table with ceil(T / 64) + N slots, enough for any cu_seqlens. Rows past the end of cu_seqlens are chunks of no
sequence: they are read by nobody, and outputs there are zero.
"""

import triton
import triton.language as tl

CHUNK_FIELDS = tl.constexpr(3)  # sequence (-1: none), first row, end row
SEQUENCE_FIELDS = tl.constexpr(3)  # first slot, first row, end row


@triton.jit
def chunk_index_kernel(
    p_cu_seqlens,  # [N + 1] int32
    p_chunks,  # [SLOTS, 3] int32: sequence or -1, first row, end row (equal where the slot is free)
    p_sequences,  # [N + 1, 3] int32: first slot, first row, end row; the last one is the tail past cu_seqlens[N]
    T,
    N,
    SLOTS,
    BT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a slot, then one a sequence; each counts the chunks before it."""
    pid = tl.program_id(0)
    i_sequence = pid - SLOTS
    before = 0  # sequences that end at or before this slot
    first_slot = 0  # slots they take
    earlier = 0  # running number of slots
    for start in range(0, N + 1, BLOCK):
        o_n = start + tl.arange(0, BLOCK)
        begin = tl.load(p_cu_seqlens + o_n, mask=o_n <= N, other=0)
        end = tl.load(p_cu_seqlens + o_n + 1, mask=o_n < N, other=0)
        end = tl.where(o_n == N, T, end)
        count = tl.where(o_n <= N, (end - begin + BT - 1) // BT, 0)
        until = earlier + tl.cumsum(count, axis=0)
        if pid < SLOTS:
            mine = (until <= pid) & (o_n <= N)
        else:
            mine = o_n < i_sequence
        before += tl.sum(mine.to(tl.int32), axis=0)
        first_slot += tl.sum(tl.where(mine, count, 0), axis=0)
        earlier += tl.sum(count, axis=0)
    if pid < SLOTS:
        begin = tl.load(p_cu_seqlens + tl.minimum(before, N))
        end = tl.load(p_cu_seqlens + tl.minimum(before + 1, N))
        end = tl.where(before >= N, T, end)
        row = tl.minimum(begin + (pid - first_slot) * BT, end)
        row = tl.where(before > N, T, row)
        tl.store(p_chunks + pid * 3, tl.where(before >= N, -1, before))
        tl.store(p_chunks + pid * 3 + 1, row)
        tl.store(p_chunks + pid * 3 + 2, tl.minimum(row + BT, end))
    else:
        begin = tl.load(p_cu_seqlens + i_sequence)
        end = tl.load(p_cu_seqlens + tl.minimum(i_sequence + 1, N))
        tl.store(p_sequences + i_sequence * 3, first_slot)
        tl.store(p_sequences + i_sequence * 3 + 1, begin)
        tl.store(p_sequences + i_sequence * 3 + 2, tl.where(i_sequence == N, T, end))


@triton.jit
def locate_chunk(p_chunks, i_c, T, NT, BT: tl.constexpr, IS_PACKED: tl.constexpr, WHOLE: tl.constexpr = False):
    """(first row as int64, rows that hold tokens, rows whose outputs exist) of chunk i_c; WHOLE: BT rows, every one."""
    if IS_PACKED:
        i_n = tl.load(p_chunks + i_c * 3)
        row = tl.load(p_chunks + i_c * 3 + 1)
        n_stored = tl.load(p_chunks + i_c * 3 + 2) - row
        n_rows = tl.where(i_n >= 0, n_stored, 0)
        return row.to(tl.int64), n_rows, n_stored
    else:
        row = (i_c % NT) * BT
        n_rows = BT if WHOLE else tl.minimum(T - row, BT)
        return (i_c // NT).to(tl.int64) * T + row, n_rows, n_rows


@triton.jit
def locate_sequence(p_sequences, i_n, T, NT, IS_PACKED: tl.constexpr):
    """(first chunk, first row as int64, number of rows) of sequence i_n."""
    if IS_PACKED:
        i_c = tl.load(p_sequences + i_n * 3)
        row = tl.load(p_sequences + i_n * 3 + 1)
        return i_c, row.to(tl.int64), tl.load(p_sequences + i_n * 3 + 2) - row
    else:
        return i_n * NT, i_n.to(tl.int64) * T, T


@triton.jit
def row_offsets(i_d, D: tl.constexpr, STRIDE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Offsets [BT, BD] of columns i_d.. of BT rows, STRIDE elements apart.

    A row's bits are multiplied apart, so that a thread's addresses differ by constants. Of a row as a whole, which the
    compiler does not take apart, it would hold every address, two registers each, and move them all on in a loop.
    """
    o_t = tl.arange(0, BT)
    o_row = (o_t & 7) * STRIDE + (o_t & 8) * STRIDE + (o_t & -16) * STRIDE
    return o_row[:, None] + (i_d + tl.arange(0, BD))[None, :]


@triton.jit
def row_mask(n_rows, i_d, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    m_t = tl.arange(0, BT)[:, None] < n_rows
    if (D // BD) * BD == D:  # written without %, which the interpreter lacks for constants
        return tl.broadcast_to(m_t, [BT, BD])
    else:
        return m_t & ((i_d + tl.arange(0, BD))[None, :] < D)


@triton.jit
def load_rows(p, row, n_rows, i_h, i_d, NH: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Block [BT, BD] of rows row.. and columns i_d.. of head i_h from [rows, NH, D]; zero outside."""
    p_rows = p + (row * NH + i_h) * D
    m = row_mask(n_rows, i_d, D, BT, BD)
    return tl.load(p_rows + row_offsets(i_d, D, NH * D, BT, BD), mask=m, other=0.0)


@triton.jit
def store_rows(p, b, row, n_rows, i_h, i_d, NH: tl.constexpr, D: tl.constexpr):
    """The reverse of `load_rows`; converts to p's dtype."""
    BT: tl.constexpr = b.shape[0]
    BD: tl.constexpr = b.shape[1]
    p_rows = p + (row * NH + i_h) * D
    m = row_mask(n_rows, i_d, D, BT, BD)
    tl.store(p_rows + row_offsets(i_d, D, NH * D, BT, BD), b.to(p.dtype.element_ty), mask=m)


@triton.jit
def to_float32(b):
    """b in float32; of two bfloat16 in a word the upper one takes an instruction by its bits, by conversion two."""
    if b.dtype == tl.bfloat16:
        return (b.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return b.to(tl.float32)


@triton.jit
def join_bytes(b):
    """[R, C] bytes -> [R, C / 2] 16-bit words of two columns, as memory holds them.

    Results of matrix units give a thread pairs of columns, and a pair is moved to another layout in a quarter of the
    instructions that two bytes take.
    """
    low, high = tl.split(tl.reshape(b, [b.shape[0], b.shape[1] // 2, 2]))
    return low.to(tl.uint16) | (high.to(tl.uint16) << 8)


# ------------------------------------------------------------------ P, and the inverse X where P is zero
#
# Both are lower triangular. An array of WIDTH = 64 columns holds one of them, one of 80 both, by blocks of 16 x 16: P's
# stay where they are; X's block (i, j) below the diagonal takes the place of P's zero block (j, i), as it is; X's
# diagonal blocks take the columns from 64 on. That is 10 KB a chunk and head in 16 bits, where two arrays take 16. A
# row of a block is 32 bytes then, as much as memory moves at once. Rows of X lie in rows no later: rows that exist.

SIDE = tl.constexpr(16)  # of a block


@triton.jit
def lower_mask(n_rows, BT: tl.constexpr):
    """[BT, BT]: rows that exist, of blocks below the diagonal or on it."""
    o_t = tl.arange(0, BT)
    return (o_t[:, None] < n_rows) & ((o_t // SIDE * SIDE)[None, :] <= o_t[:, None])


@triton.jit
def inverse_offsets(STRIDE: tl.constexpr, BT: tl.constexpr):
    """Offsets [BT, BT] of X beside P, rows STRIDE apart; above the diagonal they mean nothing."""
    o_t = tl.arange(0, BT)
    o_block = o_t // SIDE * SIDE
    o_side = o_t % SIDE
    diagonal = o_t[:, None] * STRIDE + BT + o_side[None, :]
    below = (o_block[None, :] + o_side[:, None]) * STRIDE + o_block[:, None] + o_side[None, :]
    return tl.where(o_block[:, None] == o_block[None, :], diagonal, below)


@triton.jit
def load_scores(p_p, row, n_rows, i_h, NH: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr):
    """P [BT, BT] of head i_h, rows row.. of [rows, NH, WIDTH]; zero outside, and above the diagonal."""
    if WIDTH == BT:
        return load_rows(p_p, row, n_rows, i_h, 0, NH, BT, BT, BT)
    else:
        p_rows = p_p + (row * NH + i_h) * WIDTH
        o = row_offsets(0, BT, NH * WIDTH, BT, BT)
        return tl.load(p_rows + o, mask=lower_mask(n_rows, BT), other=0.0)


@triton.jit
def store_scores(p_p, b_p, row, n_rows, i_h, NH: tl.constexpr, WIDTH: tl.constexpr):
    """The reverse of `load_scores`."""
    BT: tl.constexpr = b_p.shape[0]
    if WIDTH == BT:
        store_rows(p_p, b_p, row, n_rows, i_h, 0, NH, BT)
    else:
        p_rows = p_p + (row * NH + i_h) * WIDTH
        o = row_offsets(0, BT, NH * WIDTH, BT, BT)
        tl.store(p_rows + o, b_p.to(p_p.dtype.element_ty), mask=lower_mask(n_rows, BT))


@triton.jit
def load_inverse(p_x, row, n_rows, i_h, NH: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr):
    """X [BT, BT] likewise."""
    if WIDTH == BT:
        return load_rows(p_x, row, n_rows, i_h, 0, NH, BT, BT, BT)
    else:
        p_rows = p_x + (row * NH + i_h) * WIDTH
        o = inverse_offsets(NH * WIDTH, BT)
        return tl.load(p_rows + o, mask=lower_mask(n_rows, BT), other=0.0)


@triton.jit
def store_inverse(p_x, b_x, row, n_rows, i_h, NH: tl.constexpr, WIDTH: tl.constexpr):
    """The reverse of `load_inverse`."""
    BT: tl.constexpr = b_x.shape[0]
    if WIDTH == BT:
        store_rows(p_x, b_x, row, n_rows, i_h, 0, NH, BT)
    else:
        p_rows = p_x + (row * NH + i_h) * WIDTH
        o = inverse_offsets(NH * WIDTH, BT)
        tl.store(p_rows + o, b_x.to(p_x.dtype.element_ty), mask=lower_mask(n_rows, BT))


@triton.jit
def load_scalars(p, row, n_rows, i_h, NH: tl.constexpr, BT: tl.constexpr):
    """[BT] float32 of rows row.. of head i_h from [rows, NH]; zero outside."""
    o_t = tl.arange(0, BT)
    return tl.load(p + row * NH + i_h + o_t * NH, mask=o_t < n_rows, other=0.0).to(tl.float32)


@triton.jit
def load_gate_sums(p_gsum, row, n_rows, i_h, NH: tl.constexpr, BT: tl.constexpr):
    """GDN's (G [BT], G of the last row). Rows past the end repeat the last, so that no difference is ever positive."""
    o_t = tl.arange(0, BT)
    p = p_gsum + row * NH + i_h
    last = tl.load(p + (n_rows - 1) * NH)
    return tl.where(o_t < n_rows, tl.load(p + o_t * NH, mask=o_t < n_rows, other=0.0), last), last


@triton.jit
def store_scalars(p, b, row, n_rows, i_h, NH: tl.constexpr):
    o_t = tl.arange(0, b.shape[0])
    tl.store(p + row * NH + i_h + o_t * NH, b.to(p.dtype.element_ty), mask=o_t < n_rows)


@triton.jit
def state_offsets(i_k, i_v, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Offsets [BK, BV] into one state [K, V]."""
    return (i_k + tl.arange(0, BK))[:, None] * V + (i_v + tl.arange(0, BV))[None, :]


@triton.jit
def state_mask(i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    return ((i_k + tl.arange(0, BK))[:, None] < K) & ((i_v + tl.arange(0, BV))[None, :] < V)
