"""What the kernels for SM90 share. They are in Gluon: Triton with layouts, shared memory and its copies spelt out.

A chunk's tiles are copied to shared memory asynchronously and read there by the matrix units, so that only results live
in registers. What a thread writes to shared memory itself, asynchronous copies included, the matrix units see after
`fence_async_shared` and a barrier; the compiler places the barriers.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Triton 3.9 names two things otherwise than 3.7 does.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
commit_group = async_copy.commit_group
wait_group = async_copy.wait_group

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))  # operands of products: 16 bits an element, rows of 128 bytes
BYTES = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 1, [1, 0]))  # codes
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # one number a token


@gluon.jit
def view(smem, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same bytes as another tile."""
    if REINTERPRET_IS_PUBLIC:
        return smem.reinterpret(dtype, shape, layout)
    else:
        return smem._reinterpret(dtype, shape, layout)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def locate_chunk(p_chunks, i_c, T, NT, IS_PACKED: gl.constexpr):
    """As chunks.locate_chunk."""
    if IS_PACKED:
        i_n = gl.load(p_chunks + i_c * 3)
        row = gl.load(p_chunks + i_c * 3 + 1)
        n_stored = gl.load(p_chunks + i_c * 3 + 2) - row
        return row.to(gl.int64), gl.where(i_n >= 0, n_stored, 0), n_stored
    else:
        row = (i_c % NT) * 64
        n_rows = gl.minimum(gl.to_tensor(T) - row, 64)
        return (i_c // NT).to(gl.int64) * T + row, n_rows, n_rows


@gluon.jit
def locate_sequence(p_sequences, i_n, T, NT, IS_PACKED: gl.constexpr):
    """As chunks.locate_sequence."""
    if IS_PACKED:
        i_c = gl.load(p_sequences + i_n * 3)
        row = gl.load(p_sequences + i_n * 3 + 1)
        return i_c, row.to(gl.int64), gl.load(p_sequences + i_n * 3 + 2) - row
    else:
        return i_n * NT, i_n.to(gl.int64) * T, gl.to_tensor(T)  # one token would be a constant


# ------------------------------------------------------------------ memory to shared memory and back
#
# Loops over slabs, as many rows as the program's threads cover at once: a thread's addresses in a tile then differ by
# constants, which take no registers.


@constexpr_function
def slab_layout(columns, bits, warps):
    """How threads lie on a slab of so many columns: 16 bytes each, row after row. bits: of an element."""
    lanes = columns * bits // 128
    return gl.BlockedLayout([1, 128 // bits], [32 // lanes, lanes], [warps, 1], [1, 0])


@constexpr_function
def layout_of(smem, warps):
    """That of a tile's slabs."""
    return slab_layout(smem.shape[1], smem.dtype.primitive_bitwidth, warps)


@constexpr_function
def rows_of(layout):
    """Rows of a slab."""
    return layout.threads_per_warp[0] * layout.warps_per_cta[0]


@constexpr_function
def line_layout(warps):
    """How threads lie on one number a token, or a channel."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def offsets_of(smem, STRIDE: gl.constexpr):
    """(numbers of a slab's rows [rows], offsets of its elements in memory)."""
    layout: gl.constexpr = layout_of(smem, gl.num_warps())
    ROWS: gl.constexpr = rows_of(layout)
    o_t = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    o_d = gl.arange(0, smem.shape[1], layout=gl.SliceLayout(0, layout))
    return o_t, o_t[:, None] * STRIDE + o_d[None, :]


@gluon.jit
def fetch_rows(smem, p, row, n_rows, i_h, i_d, NH: gl.constexpr, D: gl.constexpr):
    """Starts copying columns i_d.. of head i_h, rows row.. of [rows, NH, D], into a tile; zero past n_rows."""
    layout: gl.constexpr = layout_of(smem, gl.num_warps())
    ROWS: gl.constexpr = rows_of(layout)
    o_t, offsets = offsets_of(smem, NH * D)
    p_rows = p + (row * NH + i_h) * D + i_d
    for i in gl.static_range(smem.shape[0] // ROWS):
        mask = (o_t < n_rows - i * ROWS)[:, None]
        async_load(smem.slice(i * ROWS, ROWS, 0), p_rows + offsets, mask=mask)
        p_rows += ROWS * NH * D


@gluon.jit
def store_rows(smem, p, row, n_rows, i_h, i_d, NH: gl.constexpr, D: gl.constexpr):
    """The reverse of `fetch_rows`."""
    layout: gl.constexpr = layout_of(smem, gl.num_warps())
    ROWS: gl.constexpr = rows_of(layout)
    o_t, offsets = offsets_of(smem, NH * D)
    p_rows = p + (row * NH + i_h) * D + i_d
    for i in gl.static_range(smem.shape[0] // ROWS):
        mask = (o_t < n_rows - i * ROWS)[:, None]
        gl.store(p_rows + offsets, smem.slice(i * ROWS, ROWS, 0).load(layout), mask=mask)
        p_rows += ROWS * NH * D


@gluon.jit
def blocks_of(smem):
    """Numbers of a slab's rows [rows, 1] and columns [1, 64], and the first of their blocks of 16 (chunks.py)."""
    layout: gl.constexpr = layout_of(smem, gl.num_warps())
    ROWS: gl.constexpr = rows_of(layout)
    gl.static_assert(ROWS % 16 == 0)
    o_t = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    o_d = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :]
    return o_t, o_d, o_t // 16 * 16, o_d // 16 * 16


@gluon.jit
def fetch_scores(smem, p, row, n_rows, i_h, NH: gl.constexpr, WIDTH: gl.constexpr):
    """Starts copying P, as chunks.load_scores loads it."""
    if WIDTH == 64:
        fetch_rows(smem, p, row, n_rows, i_h, 0, NH, 64)
    else:
        layout: gl.constexpr = layout_of(smem, gl.num_warps())
        ROWS: gl.constexpr = rows_of(layout)
        o_t, o_d, _, block_d = blocks_of(smem)
        offsets = o_t * (NH * WIDTH) + o_d
        p_rows = p + (row * NH + i_h) * WIDTH
        for i in gl.static_range(64 // ROWS):
            mask = (o_t < n_rows - i * ROWS) & (block_d <= o_t + i * ROWS)
            async_load(smem.slice(i * ROWS, ROWS, 0), p_rows + offsets, mask=mask)
            p_rows += ROWS * NH * WIDTH


@gluon.jit
def fetch_inverse(smem, p, row, n_rows, i_h, NH: gl.constexpr, WIDTH: gl.constexpr):
    """Starts copying X, as chunks.load_inverse loads it. Below the diagonal the next slab lies in the same rows of
    memory, ROWS columns further on: a thread's addresses differ by constants there too."""
    if WIDTH == 64:
        fetch_rows(smem, p, row, n_rows, i_h, 0, NH, 64)
    else:
        layout: gl.constexpr = layout_of(smem, gl.num_warps())
        ROWS: gl.constexpr = rows_of(layout)
        STRIDE: gl.constexpr = NH * WIDTH
        o_t, o_d, block_t, block_d = blocks_of(smem)
        diagonal = o_t * STRIDE + 64 + o_d % 16
        below = (block_d + o_t % 16) * STRIDE + block_t + o_d % 16
        p_rows = p + (row * NH + i_h) * WIDTH
        for i in gl.static_range(64 // ROWS):
            is_diagonal = block_d == block_t + i * ROWS
            offsets = gl.where(is_diagonal, diagonal + i * ROWS * STRIDE, below + i * ROWS)
            mask = (o_t < n_rows - i * ROWS) & (block_d <= o_t + i * ROWS)
            async_load(smem.slice(i * ROWS, ROWS, 0), p_rows + offsets, mask=mask)


@gluon.jit
def fetch_block(smem, p, STRIDE: gl.constexpr):
    """Starts copying rows STRIDE apart: a block of a state."""
    layout: gl.constexpr = layout_of(smem, gl.num_warps())
    ROWS: gl.constexpr = rows_of(layout)
    _, offsets = offsets_of(smem, STRIDE)
    for i in gl.static_range(smem.shape[0] // ROWS):
        async_load(smem.slice(i * ROWS, ROWS, 0), p + i * ROWS * STRIDE + offsets)


@gluon.jit
def load_vector(p, row, n_rows, i_hv, HV: gl.constexpr, layout: gl.constexpr):
    """[64] of a head's rows of [rows, HV], float32; zero past the end."""
    o = gl.arange(0, 64, layout=layout)
    return gl.load(p + row * HV + i_hv + o * HV, mask=o < n_rows, other=0.0).to(gl.float32)


# ------------------------------------------------------------------ codes


@gluon.jit
def decode(byte, FORMAT: gl.constexpr):
    """As rounding.decode, with the hardware's conversion."""
    if FORMAT == "int8":
        return byte.to(gl.int8, bitcast=True).to(gl.float32)
    else:
        gl.static_assert(FORMAT == "e4m3")
        return byte.to(gl.float8e4nv, bitcast=True).to(gl.float32)


# ------------------------------------------------------------------ what both scans read and write a chunk


@gluon.jit
def fetch_vector(smem, p, n_rows, STRIDE: gl.constexpr, REPEAT_LAST: gl.constexpr):
    """Starts copying [64] float32, one a token; past the end zero, or the last."""
    o = gl.arange(0, 64, layout=line_layout(gl.num_warps()))
    if REPEAT_LAST:
        async_load(smem, p + gl.minimum(o, n_rows - 1) * STRIDE, mask=o < n_rows * 64)
    else:
        async_load(smem, p + o * STRIDE, mask=o < n_rows)


@gluon.jit
def fetch_w(m_w, m_ws, p_w, p_w_scale, row, n_rows, i_hv, HV: gl.constexpr, FORMAT: gl.constexpr):
    """Starts copying w of a chunk, or its codes and their scales."""
    fetch_rows(m_w, p_w, row, n_rows, i_hv, 0, HV, 128)
    if FORMAT != "none":
        fetch_vector(m_ws, p_w_scale + row * HV + i_hv, n_rows, HV, False)


@gluon.jit
def fetch_gates(m_g, p_g, row, n_rows, i_hv, state, HV: gl.constexpr, IS_KDA: gl.constexpr):
    """Starts copying G of a chunk, or KDA's e^(G_L)."""
    K: gl.constexpr = 128
    if IS_KDA:
        o_k = gl.arange(0, K, layout=line_layout(gl.num_warps()))
        async_load(m_g, p_g + state * K + o_k, mask=o_k < n_rows * K)
    else:
        fetch_vector(m_g, p_g + row * HV + i_hv, n_rows, HV, True)


@gluon.jit
def last_of(smem):
    """The last of 64 numbers."""
    return gl.sum(smem.slice(63, 1, 0).load(line_layout(gl.num_warps())), axis=0)


@gluon.jit
def prepare_gates(m_g, m_end, m_begin, scale):
    """e^(G_L - G) and scale e^G of a chunk, once for all warps."""
    b_g = m_g.load(line_layout(gl.num_warps()))
    m_end.store(gl.exp(last_of(m_g) - b_g))
    m_begin.store(gl.exp(b_g) * scale)


@gluon.jit
def decode_w(m_from, m_to, m_scale, FORMAT: gl.constexpr, SCALED: gl.constexpr):
    """w's codes as values, times their rows' scales where SCALED."""
    layout: gl.constexpr = layout_of(m_to, gl.num_warps())
    ROWS: gl.constexpr = rows_of(layout)
    for i in gl.static_range(64 // ROWS):
        b = decode(m_from.slice(i * ROWS, ROWS, 0).load(layout), FORMAT)
        if SCALED:
            b = b * m_scale.slice(i * ROWS, ROWS, 0).load(gl.SliceLayout(1, layout))[:, None]
        m_to.slice(i * ROWS, ROWS, 0).store(b.to(m_to.dtype))


@gluon.jit
def store_state(smem, p, V: gl.constexpr):
    """A program's columns of a state."""
    layout: gl.constexpr = layout_of(smem, gl.num_warps())
    ROWS: gl.constexpr = rows_of(layout)
    _, offsets = offsets_of(smem, V)
    for i in gl.static_range(smem.shape[0] // ROWS):
        gl.store(p + i * ROWS * V + offsets, smem.slice(i * ROWS, ROWS, 0).load(layout))
