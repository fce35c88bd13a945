"""GDN's chunk_backward for SM90, in Gluon: K = V = 128, 16-bit inputs. What it computes is told in chunk_backward.py.

Eight warps work on a chunk, four on each half of a product's columns, and two programs share a multiprocessor: 112 KB
of shared memory each, where one buffer serves several tiles in turn, and 128 registers a thread. Triton itself would
keep left operands in registers and give both groups of four warps the same columns.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from jlaqat.kernels.hopper_tiles import (
    BYTES,
    LINE,
    TILE,
    add,
    commit_group,
    decode,
    fetch_block,
    fetch_inverse,
    fetch_rows,
    layout_of,
    line_layout,
    load_vector,
    locate_chunk,
    rows_of,
    slab_layout,
    store_rows,
    view,
    wait_group,
)


@gluon.jit
def load_scales(p_h_scale, state, V: gl.constexpr, TILE_V: gl.constexpr, layout: gl.constexpr):
    """Scales of a state's columns, [1, V]."""
    TILES: gl.constexpr = (V + TILE_V - 1) // TILE_V
    o_v = gl.arange(0, V, layout=gl.SliceLayout(0, layout))
    return gl.load(p_h_scale + state * TILES + o_v // TILE_V)[None, :]


@gluon.jit
def decode_rows(m_from, m_to, b_scale, FORMAT: gl.constexpr):
    """Values of a state's codes."""
    layout: gl.constexpr = layout_of(m_to, gl.num_warps())
    ROWS: gl.constexpr = rows_of(layout)
    for i in gl.static_range(64 // ROWS):
        b = decode(m_from.slice(i * ROWS, ROWS, 0).load(layout), FORMAT) * b_scale
        m_to.slice(i * ROWS, ROWS, 0).store(b.to(m_to.dtype))


@gluon.jit
def sum_products(m_a, m_b):
    """Sums of the elementwise products of two blocks, a number a thread."""
    layout: gl.constexpr = layout_of(m_a, gl.num_warps())
    ROWS: gl.constexpr = rows_of(layout)
    b_sum = 0.0
    for i in gl.static_range(64 // ROWS):
        a = m_a.slice(i * ROWS, ROWS, 0).load(layout).to(gl.float32)
        b = a * m_b.slice(i * ROWS, ROWS, 0).load(layout).to(gl.float32)
        b_sum = b if i == 0 else b_sum + b
    return gl.sum(gl.reshape(b_sum, [ROWS, m_a.shape[1] // 8, 8]), axis=2)  # a thread's eight


@constexpr_function
def parts_layout(warps):
    """[64, groups of four warps]: sums of a product's rows over the columns that a group has."""
    groups = [[0, 1 << i] for i in range((warps // 4).bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0], *groups], [], [64, warps // 4])


@gluon.jit
def sum_parts(b):
    """Sums of rows over the columns of each group of warps [64, groups]: no warp waits for another."""
    GROUPS: gl.constexpr = gl.num_warps() // 4
    parts: gl.constexpr = parts_layout(gl.num_warps())
    return gl.convert_layout(gl.sum(b.reshape([64, GROUPS, b.shape[1] // GROUPS]), axis=2), parts, assert_trivial=True)


@gluon.jit
def sum_line(smem):
    """The sum of some numbers, in every warp by itself."""
    return gl.sum(smem.load(gl.BlockedLayout([2], [32], [gl.num_warps()], [0])), axis=0)


@gluon.jit
def add_both(a, b, c, d):
    return a + c, b + d


@gluon.jit
def store_zeros(p_dq, p_dk, p_dv, p_dbeta, p_dg, row, n_rows, i_hv, HV: gl.constexpr, layout: gl.constexpr):
    """The gradients of a chunk past the end of cu_seqlens."""
    DTYPE: gl.constexpr = p_dq.dtype.element_ty
    m_zero = gl.allocate_shared_memory(DTYPE, [64, 128], TILE, gl.zeros([64, 128], DTYPE, layout=layout))
    store_rows(m_zero, p_dq, row, n_rows, i_hv, 0, HV, 128)
    store_rows(m_zero, p_dk, row, n_rows, i_hv, 0, HV, 128)
    store_rows(m_zero, p_dv, row, n_rows, i_hv, 0, HV, 128)
    o_row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    b_zero = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, layout))
    gl.store(p_dbeta + row * HV + i_hv + o_row * HV, b_zero.to(p_dbeta.dtype.element_ty), mask=o_row < n_rows)
    gl.store(p_dg + row * HV + i_hv + o_row * HV, b_zero, mask=o_row < n_rows)


@gluon.jit
def opaque_zero(T, i: gl.constexpr):
    """0, in a way of its own for each i. A view at such an index is another view to the compiler, which else computes
    the descriptors of a tile once for all its products and, for want of registers, keeps them in memory."""
    return (gl.to_tensor(T) + i < 0).to(gl.int32)


@gluon.jit
def chunk_backward_kernel(
    p_q,  # the parameters are those of chunk_backward.py, and p_w
    p_k,
    p_v,
    p_gsum,
    p_beta,
    p_x,
    p_w,  # [B*T, HV, K] codes (uint8), where w is rounded
    p_w_scale,
    p_h,
    p_h_scale,
    p_dh,
    p_dv_new,
    p_do,
    p_chunks,
    p_dq,
    p_dk,
    p_dv,
    p_dbeta,
    p_dg,
    scale,
    T,
    NT,
    H: gl.constexpr,
    HV: gl.constexpr,
    IS_PACKED: gl.constexpr,
    STATE_FORMAT: gl.constexpr,
    TILE_V: gl.constexpr,
    W_FORMAT: gl.constexpr,
    X_WIDTH: gl.constexpr,
):
    K: gl.constexpr = 128
    V: gl.constexpr = 128
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = p_q.dtype.element_ty
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 512 // WARPS, 16])  # [64, 128]
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 256 // WARPS, 16])  # [64, 64]
    ROW: gl.constexpr = gl.SliceLayout(1, HALF)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, HALF, 2)
    LEFT_WIDE: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    SLAB: gl.constexpr = slab_layout(128, 16, WARPS)
    TOKENS: gl.constexpr = line_layout(WARPS)
    PAIRS: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])  # tokens, all of them in every warp
    PARTS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    CODES: gl.constexpr = gl.SwizzledSharedLayout(16, 2, 4, [1, 0])  # rows of 64 bytes, read two bytes a thread

    pid = gl.program_id(0)
    i_c = pid // HV
    i_hv = pid % HV
    i_h = i_hv // (HV // H)
    row, n_rows, n_stored = locate_chunk(p_chunks, i_c, T, NT, IS_PACKED)
    if n_stored <= 0:
        return
    if n_rows <= 0:
        store_zeros(p_dq, p_dk, p_dv, p_dbeta, p_dg, row, n_stored, i_hv, HV, SLAB)
        return
    state = i_c.to(gl.int64) * HV + i_hv
    p_state = p_h + state * (K * V)
    p_dstate = p_dh + state * (K * V)

    m_xq = gl.allocate_shared_memory(DTYPE, [2, 64, 64], TILE)  # X, then dv, then halves of k and q, of dk and dq
    m_k = gl.allocate_shared_memory(DTYPE, [2, 64, 64], TILE)  # k, then -w, then ve, then dP and dA
    m_d = gl.allocate_shared_memory(DTYPE, [2, 64, 64], TILE)  # codes of w, then w less its rounding, then v'
    m_v = gl.allocate_shared_memory(DTYPE, [1, 64, 128], TILE)  # v, then do
    m_y = gl.allocate_shared_memory(DTYPE, [1, 64, 128], TILE)  # dv', then y
    m_s = gl.allocate_shared_memory(DTYPE, [2, 64, 128], TILE)  # its codes, then S, then dS and S of half the channels
    m_g = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)  # G and beta
    m_dv = view(m_xq, DTYPE, [1, 64, 128], TILE)
    m_ve = view(m_k, DTYPE, [1, 64, 128], TILE)
    m_vn = view(m_d, DTYPE, [1, 64, 128], TILE)
    m_w = view(m_d, gl.uint8, [4, 64, 64], CODES)
    m_h = view(m_s, gl.uint8, [4, 64, 128], BYTES)  # the last two tiles of it

    fetch_inverse(m_xq.index(0), p_x, row, n_rows, i_hv, HV, X_WIDTH)
    fetch_rows(m_k.index(0), p_k, row, n_rows, i_h, 0, H, K)
    fetch_rows(m_k.index(1), p_k, row, n_rows, i_h, 64, H, K)
    if W_FORMAT != "none":
        fetch_rows(m_w.index(0), p_w, row, n_rows, i_hv, 0, HV, K)
        fetch_rows(m_w.index(1), p_w, row, n_rows, i_hv, 64, HV, K)
    commit_group()
    fetch_rows(m_v.index(0), p_v, row, n_rows, i_hv, 0, HV, V)
    fetch_rows(m_y.index(0), p_dv_new, row, n_rows, i_hv, 0, HV, V)
    commit_group()
    if STATE_FORMAT != "none":
        fetch_block(m_h.index(2), p_state, V)
        fetch_block(m_h.index(3), p_state + 64 * V, V)
    commit_group()
    if STATE_FORMAT != "none":
        b_scale = load_scales(p_h_scale, state, V, TILE_V, SLAB)
    if W_FORMAT != "none":
        b_ws = load_vector(p_w_scale, row, n_rows, i_hv, HV, ROW)
    o_token = gl.arange(0, 64, layout=TOKENS)  # rows past the end repeat the last G: no difference is ever positive
    m_g.index(0).store(gl.load(p_gsum + row * HV + i_hv + gl.minimum(o_token, n_rows - 1) * HV))
    m_g.index(1).store(load_vector(p_beta, row, n_rows, i_hv, HV, TOKENS))

    # -w = (X diag(-beta e^G)) k, and what its rounding took away.
    b_gc = m_g.index(0).load(gl.SliceLayout(0, LEFT))
    b_bc = m_g.index(1).load(gl.SliceLayout(0, LEFT))
    wait_group(2)
    fence_async_shared()
    b_zero = gl.zeros([64, 64], gl.float32, layout=HALF)
    b_x = (m_xq.index(0).load(LEFT).to(gl.float32) * (-gl.exp(b_gc) * b_bc)[None, :]).to(DTYPE)
    t_w0 = warpgroup_mma(b_x, m_k.index(0), b_zero, use_acc=False, is_async=True)
    t_w1 = warpgroup_mma(b_x, m_k.index(1), b_zero, use_acc=False, is_async=True)
    if W_FORMAT != "none":
        b_c0 = m_w.index(0).load(HALF)
        b_c1 = m_w.index(1).load(HALF)
        b_w0, b_w1, b_x = warpgroup_mma_wait(0, [t_w0, t_w1, b_x])
        m_d.index(0).store((-b_w0 - decode(b_c0, W_FORMAT) * b_ws[:, None]).to(DTYPE))
        m_d.index(1).store((-b_w1 - decode(b_c1, W_FORMAT) * b_ws[:, None]).to(DTYPE))
    else:
        b_w0, b_w1, b_x = warpgroup_mma_wait(0, [t_w0, t_w1, b_x])
    m_k.index(0).store(b_w0.to(DTYPE))
    m_k.index(1).store(b_w1.to(DTYPE))

    # y = X^T dv' and u = (X diag(beta)) v; dv = beta y.
    wait_group(1)
    fence_async_shared()
    b_zero_wide = gl.zeros([64, 128], gl.float32, layout=WIDE)
    b_bc = m_g.index(1).load(gl.SliceLayout(0, LEFT_WIDE))
    b_x = (m_xq.index(0).load(LEFT_WIDE).to(gl.float32) * b_bc[None, :]).to(DTYPE)
    m_xt = m_xq.index(opaque_zero(T, 0)).permute((1, 0))
    t_y = warpgroup_mma(m_xt, m_y.index(0), b_zero_wide, use_acc=False, is_async=True)
    t_u = warpgroup_mma(b_x, m_v.index(0), b_zero_wide, use_acc=False, is_async=True)
    b_beta = m_g.index(1).load(gl.SliceLayout(1, WIDE))
    b_y, b_u, b_x = warpgroup_mma_wait(0, [t_y, t_u, b_x])
    b_dbeta = gl.convert_layout(gl.sum(b_y * m_v.index(0).load(WIDE).to(gl.float32), axis=1), ROW)
    m_dv.index(0).store((b_y * b_beta[:, None]).to(DTYPE))
    m_y.index(0).store(b_y.to(DTYPE))
    fetch_rows(m_v.index(0), p_do, row, n_rows, i_hv, 0, HV, V)
    commit_group()

    # ve = u - w S and v' = ve + (w less its rounding) S.
    if STATE_FORMAT != "none":
        wait_group(1)
        decode_rows(m_h.index(2), m_s.index(0), b_scale, STATE_FORMAT)
        b_c = m_h.index(3).load(SLAB)  # all of it: S will lie where its codes are
        m_s.index(1).store((decode(b_c, STATE_FORMAT) * b_scale).to(DTYPE))
    else:
        fetch_block(m_s.index(0), p_state, V)
        fetch_block(m_s.index(1), p_state + 64 * V, V)
        commit_group()
        wait_group(0)
    fence_async_shared()
    t_u = warpgroup_mma(m_k.index(0), m_s.index(0), b_u, is_async=True)
    t_u = warpgroup_mma(m_k.index(1), m_s.index(1), t_u, is_async=True)
    if W_FORMAT != "none":
        z = opaque_zero(T, 1)
        t_r = warpgroup_mma(m_d.index(z), m_s.index(z), b_zero_wide, use_acc=False, is_async=True)
        t_r = warpgroup_mma(m_d.index(1 + z), m_s.index(1 + z), t_r, is_async=True)
        store_rows(m_dv.index(0), p_dv, row, n_rows, i_hv, 0, HV, V)
        b_u, b_r = warpgroup_mma_wait(0, [t_u, t_r])
        m_vn.index(0).store((b_u + b_r).to(DTYPE))
        m_ve.index(0).store(b_u.to(DTYPE))
        m_vt = m_ve.index(0).permute((1, 0))
    else:
        store_rows(m_dv.index(0), p_dv, row, n_rows, i_hv, 0, HV, V)
        b_u = warpgroup_mma_wait(0, [t_u])
        m_vn.index(0).store(b_u.to(DTYPE))
        m_vt = m_vn.index(0).permute((1, 0))
    # The second half of the channels comes first below: its S stays where it is.
    fetch_rows(m_xq.index(0), p_k, row, n_rows, i_h, 64, H, K)
    fetch_rows(m_xq.index(1), p_q, row, n_rows, i_h, 64, H, K)
    fetch_block(m_s.index(0), p_dstate + 64 * V, V)
    commit_group()

    # The gradients of the pairs: dA = -y ve^T and dP = do v'^T, decayed.
    COLUMN: gl.constexpr = gl.SliceLayout(0, HALF)
    o_row = gl.arange(0, 64, layout=ROW)
    o_column = gl.arange(0, 64, layout=COLUMN)
    b_g = m_g.index(0).load(ROW)
    b_gt = m_g.index(0).load(COLUMN)
    g_last = gl.sum(m_g.index(0).slice(63, 1, 0).load(TOKENS), axis=0)
    wait_group(1)
    fence_async_shared()
    t_a = warpgroup_mma(m_y.index(0), m_vt, b_zero, use_acc=False, is_async=True)
    t_p = warpgroup_mma(m_v.index(0), m_vn.index(0).permute((1, 0)), b_zero, use_acc=False, is_async=True)
    causal = o_row[:, None] >= o_column[None, :]
    b_e = gl.where(causal, gl.exp(gl.where(causal, b_g[:, None] - b_gt[None, :], 0.0)), 0.0)
    b_da, b_dp = warpgroup_mma_wait(0, [t_a, t_p])
    m_k.index(0).store((b_dp * b_e * scale).to(DTYPE))
    m_k.index(1).store(gl.where(o_row[:, None] > o_column[None, :], -b_da * b_e, 0.0).to(DTYPE))
    b_bc = m_g.index(1).load(gl.SliceLayout(0, LEFT))
    b_dab = (m_k.index(1).permute((1, 0)).load(LEFT).to(gl.float32) * b_bc[None, :]).to(DTYPE)  # (beta dA)^T

    b_beta = m_g.index(1).load(ROW)
    b_dg = gl.zeros([64], gl.float32, layout=ROW)
    b_last = gl.zeros([64, WARPS // 4], gl.float32, layout=parts_layout(WARPS))
    b_state = 0.0
    for i in gl.static_range(2):
        wait_group(0)
        fence_async_shared()
        z0 = opaque_zero(T, 2 + 4 * i)
        z1 = opaque_zero(T, 3 + 4 * i)
        m_st = m_s.index(1 + z0).permute((1, 0))
        t_q = warpgroup_mma(m_v.index(z0), m_st, b_zero, use_acc=False, is_async=True)
        m_st = m_s.index(1 + z1).permute((1, 0))
        t_z = warpgroup_mma(m_y.index(z1), m_st, b_zero, use_acc=False, is_async=True)
        m_dst = m_s.index(z1).permute((1, 0))
        t_k = warpgroup_mma(m_vn.index(z1), m_dst, b_zero, use_acc=False, is_async=True)
        b_state += sum_products(m_s.index(1), m_s.index(0))
        if i == 0 and STATE_FORMAT != "none":
            o_k = gl.arange(0, 64, layout=gl.SliceLayout(1, SLAB))
            o_v = gl.arange(0, V, layout=gl.SliceLayout(0, SLAB))
            b_c = gl.load(p_state + o_k[:, None] * V + o_v[None, :])
        b_dq, b_z, b_dk = warpgroup_mma_wait(0, [t_q, t_z, t_k])
        if i == 0:
            fetch_block(m_s.index(0), p_dstate, V)
            commit_group()
        b_k = m_xq.index(0).load(HALF).to(gl.float32)
        b_dq = b_dq * (gl.exp(b_g) * scale)[:, None]
        b_z = b_z * (-gl.exp(b_g))[:, None]
        b_dk = b_dk * gl.exp(g_last - b_g)[:, None]
        b_last += sum_parts(b_k * b_dk)
        z0 = opaque_zero(T, 4 + 4 * i)
        z1 = opaque_zero(T, 5 + 4 * i)
        t_q = warpgroup_mma(m_k.index(z0), m_xq.index(z0), b_dq, is_async=True)
        t_z = warpgroup_mma(m_k.index(1 + z0), m_xq.index(z0), b_z, is_async=True)
        t_k = warpgroup_mma(m_k.index(z1).permute((1, 0)), m_xq.index(1 + z1), b_dk, is_async=True)
        t_k = warpgroup_mma(b_dab, m_xq.index(z1), t_k, is_async=True)
        if i == 0 and STATE_FORMAT != "none":
            m_s.index(1).store((decode(b_c, STATE_FORMAT) * b_scale).to(DTYPE))
        b_dq, b_z, b_dk, b_dab = warpgroup_mma_wait(0, [t_q, t_z, t_k, b_dab])
        b_k = m_xq.index(opaque_zero(T, 10 + i)).load(HALF).to(gl.float32)  # again: 16 registers less meanwhile
        b_zk = b_z * b_k
        b_z = b_z * b_beta[:, None]
        b_qk = m_xq.index(1).load(HALF).to(gl.float32) * b_dq + b_k * (b_z - b_dk)
        b_zk, b_qk = gl.reduce((b_zk, b_qk), 1, add_both)  # both at once: warps wait for each other once
        b_dbeta += b_zk
        b_dg += b_qk
        m_xq.index(1).store(b_dq.to(DTYPE))
        m_xq.index(0).store((b_dk + b_z).to(DTYPE))
        store_rows(m_xq.index(1), p_dq, row, n_rows, i_hv, 64 - 64 * i, HV, K)
        store_rows(m_xq.index(0), p_dk, row, n_rows, i_hv, 64 - 64 * i, HV, K)
        if i == 0:
            fetch_rows(m_xq.index(0), p_k, row, n_rows, i_h, 0, H, K)
            fetch_rows(m_xq.index(1), p_q, row, n_rows, i_h, 0, H, K)
            if STATE_FORMAT == "none":
                fetch_block(m_s.index(1), p_state, V)
            commit_group()
    m_sums = view(m_s, gl.float32, [2, 64], LINE)
    m_last = view(m_v, gl.float32, [1, 64, WARPS // 4], PARTS)
    m_state = view(m_k, gl.float32, [2 * WARPS], LINE)
    m_sums.index(0).store(b_dbeta)
    m_sums.index(1).store(b_dg)
    m_last.index(0).store(b_last)
    m_state.store(gl.sum(b_state, axis=1))
    last = sum_line(view(m_v, gl.float32, [16 * WARPS], LINE)) + gl.exp(g_last) * sum_line(m_state)
    o_row = gl.arange(0, 64, layout=PAIRS)
    b_dg = m_sums.index(1).load(PAIRS) + gl.where(o_row == n_rows - 1, last, 0.0)
    b_dg = gl.associative_scan(b_dg, 0, add, reverse=True)
    b_dbeta = m_sums.index(0).load(PAIRS).to(p_dbeta.dtype.element_ty)
    gl.store(p_dbeta + row * HV + i_hv + o_row * HV, b_dbeta, mask=o_row < n_rows)
    gl.store(p_dg + row * HV + i_hv + o_row * HV, b_dg, mask=o_row < n_rows)
