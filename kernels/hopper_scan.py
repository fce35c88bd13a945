"""The scans over chunks for SM90, in Gluon: K = 128, 16-bit inputs. What they compute is told in chunk_state.py.

The forward one is that of an unrounded state. With a rounding between its products it took longer than chunk_state.py's
(docs/kernels.md).

They work on transposed states. S^T [V, K] is the result of one product and the left operand of the next, and so is
v'^T [V, 64]: both stay in registers, and nothing on the way from one state to the next goes through memory. The right
operands are the chunk's own tiles, copied to shared memory some chunks ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from jlaqat.kernels.hopper_tiles import (
    BYTES,
    LINE,
    TILE,
    commit_group,
    decode_w,
    fetch_gates,
    fetch_rows,
    fetch_scores,
    fetch_w,
    last_of,
    locate_sequence,
    prepare_gates,
    slab_layout,
    store_rows,
    store_state,
    wait_group,
)


@gluon.jit
def fetch_forward(
    tiles,
    pointers,
    place,
    i,
    HK: gl.constexpr,
    HV: gl.constexpr,
    V: gl.constexpr,
    IS_KDA: gl.constexpr,
    W_FORMAT: gl.constexpr,
    P_WIDTH: gl.constexpr,
):
    """Starts copying what chunk i of a sequence reads; nothing past its end."""
    m_k, m_u, m_q, m_p, m_g, m_w, m_ws = tiles
    p_k, p_u, p_q, p_p, p_g, p_w, p_w_scale = pointers
    row, n_total, state, i_h, i_hv, i_v = place
    s = i % m_k.shape[0]
    row += i * 64
    n_rows = n_total - i * 64
    fetch_w(m_w.index(s), m_ws.index(s), p_w, p_w_scale, row, n_rows, i_hv, HV, W_FORMAT)
    fetch_gates(m_g.index(s), p_g, row, n_rows, i_hv, state + i * HV, HV, IS_KDA)
    fetch_rows(m_u.index(s), p_u, row, n_rows, i_hv, i_v, HV, V)
    fetch_rows(m_k.index(s), p_k, row, n_rows, i_h, 0, HK, 128)
    fetch_rows(m_q.index(s), p_q, row, n_rows, i_h, 0, HK, 128)
    fetch_scores(m_p.index(s), p_p, row, n_rows, i_hv, HV, P_WIDTH)
    commit_group()


@gluon.jit
def chunk_state_forward_kernel(
    p_q,  # the parameters are those of chunk_state.py
    p_k,
    p_w,
    p_w_scale,
    p_u,
    p_p,
    p_g,
    p_initial,
    p_sequences,
    p_o,
    p_final,
    scale,
    T,
    NT,
    N,
    HK: gl.constexpr,
    HV: gl.constexpr,
    V: gl.constexpr,
    IS_KDA: gl.constexpr,
    IS_PACKED: gl.constexpr,
    HAS_INITIAL: gl.constexpr,
    W_FORMAT: gl.constexpr,
    P_WIDTH: gl.constexpr,
    STAGES: gl.constexpr,  # chunks in shared memory, the one worked on included
):
    K: gl.constexpr = 128
    BV: gl.constexpr = 64
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = p_q.dtype.element_ty
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 512 // WARPS, 16])  # S^T
    VALUE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 256 // WARPS, 16])  # v'^T
    LEFT_STATE: gl.constexpr = gl.DotOperandLayout(0, VALUE, 2)
    LEFT_VALUE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    TOKEN: gl.constexpr = gl.SliceLayout(0, VALUE)
    TILES: gl.constexpr = (V + BV - 1) // BV

    pid = gl.program_id(0)
    i_v = (pid % TILES) * BV
    i_hv = (pid // TILES) % HV
    i_n = pid // (TILES * HV)
    i_h = i_hv // (HV // HK)
    i_c, row, n_total = locate_sequence(p_sequences, i_n, T, NT, IS_PACKED)
    m_o = gl.allocate_shared_memory(DTYPE, [64, BV], TILE)  # o on its way out
    if i_n >= N:  # rows past cu_seqlens
        m_o.store(gl.zeros([64, BV], DTYPE, layout=slab_layout(BV, 16, WARPS)))
        for start in range(0, n_total, 64):
            store_rows(m_o, p_o, row + start, n_total - start, i_hv, i_v, HV, V)
        return

    m_k = gl.allocate_shared_memory(DTYPE, [STAGES, 64, K], TILE)
    m_u = gl.allocate_shared_memory(DTYPE, [STAGES, 64, BV], TILE)
    m_q = gl.allocate_shared_memory(DTYPE, [STAGES, 64, K], TILE)
    m_p = gl.allocate_shared_memory(DTYPE, [STAGES, 64, 64], TILE)
    m_g = gl.allocate_shared_memory(gl.float32, [STAGES, K if IS_KDA else 64], LINE)
    m_gates = gl.allocate_shared_memory(gl.float32, [4, 64], LINE)  # of an even chunk and of an odd one
    if W_FORMAT == "none":
        m_w = gl.allocate_shared_memory(DTYPE, [STAGES, 64, K], TILE)
        m_ws = m_gates  # unread
    else:
        m_w = gl.allocate_shared_memory(gl.uint8, [STAGES, 64, K], BYTES)
        m_ws = gl.allocate_shared_memory(gl.float32, [STAGES, 64], LINE)
        m_wd = gl.allocate_shared_memory(DTYPE, [64, K], TILE)
    n_chunks = (n_total + 63) // 64
    state = i_c.to(gl.int64) * HV + i_hv
    sequence = (i_n.to(gl.int64) * HV + i_hv) * (K * V)
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, STATE))
    o_v = gl.arange(0, BV, layout=gl.SliceLayout(1, STATE))
    o_state = o_k[None, :] * V + (i_v + o_v)[:, None]
    if HAS_INITIAL:
        b_s = gl.load(p_initial + sequence + o_state)
    else:
        b_s = gl.zeros([BV, K], gl.float32, layout=STATE)
    b_zero = gl.zeros([BV, 64], gl.float32, layout=VALUE)

    tiles = (m_k, m_u, m_q, m_p, m_g, m_w, m_ws)
    pointers = (p_k, p_u, p_q, p_p, p_g, p_w, p_w_scale)
    place = (row, n_total, state, i_h, i_hv, i_v)
    for i in gl.static_range(STAGES - 1):
        fetch_forward(tiles, pointers, place, i, HK, HV, V, IS_KDA, W_FORMAT, P_WIDTH)
    wait_group(STAGES - 2)
    if W_FORMAT != "none":
        decode_w(m_w.index(0), m_wd, m_ws.index(0), W_FORMAT, False)
    if not IS_KDA:
        prepare_gates(m_g.index(0), m_gates.index(0), m_gates.index(1), scale)
    fence_async_shared()

    for i in range(n_chunks):
        stage = i % STAGES
        parity = i % 2 * 2
        gl.barrier()  # between the fence of each warp and the products of all
        b_left = gl.convert_layout(b_s.to(DTYPE), LEFT_STATE)
        if W_FORMAT == "none":
            t_w = warpgroup_mma(b_left, m_w.index(stage).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        else:
            t_w = warpgroup_mma(b_left, m_wd.permute((1, 0)), b_zero, use_acc=False, is_async=True)
        t_q = warpgroup_mma(b_left, m_q.index(stage).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        # While they run: a later chunk is on its way, the output of the chunk before leaves.
        fetch_forward(tiles, pointers, place, i + STAGES - 1, HK, HV, V, IS_KDA, W_FORMAT, P_WIDTH)
        if i > 0:
            store_rows(m_o, p_o, row + (i - 1) * 64, 64, i_hv, i_v, HV, V)
        b_u = m_u.index(stage).permute((1, 0)).load(VALUE).to(gl.float32)
        b_w, b_left = warpgroup_mma_wait(1, [t_w, b_left])
        if W_FORMAT == "none":
            b_v = b_u - b_w
        else:
            b_v = b_u - b_w * m_ws.index(stage).load(TOKEN)[None, :]
        if IS_KDA:
            b_s = b_s * m_g.index(stage).load(gl.SliceLayout(0, STATE))[None, :]
            b_end = b_v.to(DTYPE)
        else:
            b_s = b_s * gl.exp(last_of(m_g.index(stage)))
            b_end = (b_v * m_gates.index(parity).load(TOKEN)[None, :]).to(DTYPE)
        b_end = gl.convert_layout(b_end, LEFT_VALUE)
        t_s = warpgroup_mma(b_end, m_k.index(stage), b_s, is_async=True)
        b_vl = gl.convert_layout(b_v.to(DTYPE), LEFT_STATE)
        t_p = warpgroup_mma(b_vl, m_p.index(stage).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        # While they run: the next chunk's w and gates.
        wait_group(STAGES - 2)
        following = (i + 1) % STAGES
        if W_FORMAT != "none":
            decode_w(m_w.index(following), m_wd, m_ws.index(following), W_FORMAT, False)
        if not IS_KDA:
            prepare_gates(m_g.index(following), m_gates.index(2 - parity), m_gates.index(3 - parity), scale)
        fence_async_shared()
        b_s, b_q, b_end = warpgroup_mma_wait(1, [t_s, t_q, b_end])
        b_p, b_vl = warpgroup_mma_wait(0, [t_p, b_vl])
        if not IS_KDA:
            b_q = b_q * m_gates.index(parity + 1).load(TOKEN)[None, :]
        m_o.permute((1, 0)).store((b_q + b_p).to(DTYPE))
    if n_chunks > 0:
        store_rows(m_o, p_o, row + (n_chunks - 1) * 64, n_total - (n_chunks - 1) * 64, i_hv, i_v, HV, V)
    wait_group(0)
    gl.store(p_final + sequence + o_state, b_s)


@gluon.jit
def fetch_backward(
    tiles,
    pointers,
    place,
    done,
    HK: gl.constexpr,
    HV: gl.constexpr,
    V: gl.constexpr,
    IS_KDA: gl.constexpr,
    W_FORMAT: gl.constexpr,
    P_WIDTH: gl.constexpr,
):
    """Starts copying what the chunk reads that has `done` after it in its sequence; nothing before its start."""
    m_k, m_p, m_do, m_q, m_g, m_w, m_ws = tiles
    p_k, p_p, p_do, p_q, p_g, p_w, p_w_scale = pointers
    row, n_total, n_chunks, state, i_h, i_hv, i_v = place
    i = n_chunks - 1 - done
    s = done % m_k.shape[0]
    row += i * 64
    n_rows = gl.where(i >= 0, n_total - i * 64, 0)
    fetch_rows(m_k.index(s), p_k, row, n_rows, i_h, 0, HK, 128)
    fetch_scores(m_p.index(s), p_p, row, n_rows, i_hv, HV, P_WIDTH)
    fetch_rows(m_do.index(s), p_do, row, n_rows, i_hv, i_v, HV, V)
    fetch_rows(m_q.index(s), p_q, row, n_rows, i_h, 0, HK, 128)
    fetch_w(m_w.index(s), m_ws.index(s), p_w, p_w_scale, row, n_rows, i_hv, HV, W_FORMAT)
    fetch_gates(m_g.index(s), p_g, row, n_rows, i_hv, state + i * HV, HV, IS_KDA)
    commit_group()


@gluon.jit
def chunk_state_backward_kernel(
    p_q,  # the parameters are those of chunk_state.py
    p_k,
    p_w,
    p_w_scale,
    p_p,
    p_g,
    p_do,
    p_dfinal,
    p_sequences,
    p_dh,
    p_dv_new,
    p_dinitial,
    scale,
    T,
    NT,
    HK: gl.constexpr,
    HV: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    IS_KDA: gl.constexpr,
    IS_PACKED: gl.constexpr,
    W_FORMAT: gl.constexpr,
    P_WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    K: gl.constexpr = 128
    WARPS: gl.constexpr = gl.num_warps()  # BV / 16
    DTYPE: gl.constexpr = p_q.dtype.element_ty
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 128, 16])  # dS^T [V, K]
    VALUE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])  # dv'^T [V, 64]
    LEFT_STATE: gl.constexpr = gl.DotOperandLayout(0, VALUE, 2)
    LEFT_VALUE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    TILES: gl.constexpr = (V + BV - 1) // BV

    pid = gl.program_id(0)
    i_v = (pid % TILES) * BV
    i_hv = (pid // TILES) % HV
    i_n = pid // (TILES * HV)
    i_h = i_hv // (HV // HK)
    i_c, row, n_total = locate_sequence(p_sequences, i_n, T, NT, IS_PACKED)
    n_chunks = (n_total + 63) // 64
    m_s = gl.allocate_shared_memory(DTYPE, [K, BV], TILE)  # dS on its way out
    m_v = gl.allocate_shared_memory(DTYPE, [64, BV], TILE)  # dv' on its way out
    m_k = gl.allocate_shared_memory(DTYPE, [STAGES, 64, K], TILE)
    m_q = gl.allocate_shared_memory(DTYPE, [STAGES, 64, K], TILE)
    m_p = gl.allocate_shared_memory(DTYPE, [STAGES, 64, 64], TILE)
    m_do = gl.allocate_shared_memory(DTYPE, [STAGES, 64, BV], TILE)
    m_g = gl.allocate_shared_memory(gl.float32, [STAGES, K if IS_KDA else 64], LINE)
    m_gates = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    if W_FORMAT == "none":
        m_w = gl.allocate_shared_memory(DTYPE, [STAGES, 64, K], TILE)
        m_ws = m_gates  # unread
    else:
        m_w = gl.allocate_shared_memory(gl.uint8, [STAGES, 64, K], BYTES)
        m_ws = gl.allocate_shared_memory(gl.float32, [STAGES, 64], LINE)
        m_wd = gl.allocate_shared_memory(DTYPE, [64, K], TILE)
    state = i_c.to(gl.int64) * HV + i_hv
    sequence = (i_n.to(gl.int64) * HV + i_hv) * (K * V)
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, STATE))
    o_v = gl.arange(0, BV, layout=gl.SliceLayout(1, STATE))
    o_state = o_k[None, :] * V + (i_v + o_v)[:, None]
    b_ds = gl.load(p_dfinal + sequence + o_state)
    b_zero = gl.zeros([BV, 64], gl.float32, layout=VALUE)

    tiles = (m_k, m_p, m_do, m_q, m_g, m_w, m_ws)
    pointers = (p_k, p_p, p_do, p_q, p_g, p_w, p_w_scale)
    place = (row, n_total, n_chunks, state, i_h, i_hv, i_v)
    for j in gl.static_range(STAGES - 1):
        fetch_backward(tiles, pointers, place, j, HK, HV, V, IS_KDA, W_FORMAT, P_WIDTH)
    wait_group(STAGES - 2)
    if W_FORMAT != "none":
        decode_w(m_w.index(0), m_wd, m_ws.index(0), W_FORMAT, True)
    if not IS_KDA:
        prepare_gates(m_g.index(0), m_gates.index(0), m_gates.index(1), scale)
    fence_async_shared()

    for done in range(n_chunks):
        i = n_chunks - 1 - done
        stage = done % STAGES
        gl.barrier()  # between the fence of each warp and the products of all
        b_h = b_ds.to(DTYPE)
        b_left = gl.convert_layout(b_h, LEFT_STATE)
        t_k = warpgroup_mma(b_left, m_k.index(stage).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_do = m_do.index(stage).permute((1, 0)).load(LEFT_STATE)
        t_p = warpgroup_mma(b_do, m_p.index(stage), b_zero, use_acc=False, is_async=True)
        b_doq = gl.convert_layout(b_do, LEFT_VALUE)
        if IS_KDA:
            b_ds = b_ds * m_g.index(stage).load(gl.SliceLayout(0, STATE))[None, :]
        else:
            b_ds = b_ds * gl.exp(last_of(m_g.index(stage)))
            b_begin = m_gates.index(1).load(gl.SliceLayout(0, LEFT_VALUE))
            b_doq = (b_doq.to(gl.float32) * b_begin[None, :]).to(DTYPE)
        t_d = warpgroup_mma(b_doq, m_q.index(stage), b_ds, is_async=True)
        # While they run: dS leaves, a later chunk is on its way.
        fetch_backward(tiles, pointers, place, done + STAGES - 1, HK, HV, V, IS_KDA, W_FORMAT, P_WIDTH)
        m_s.permute((1, 0)).store(b_h)
        store_state(m_s, p_dh + (state + i * HV) * (K * V) + i_v, V)
        b_k, b_p, b_left, b_do = warpgroup_mma_wait(1, [t_k, t_p, b_left, b_do])
        if not IS_KDA:
            b_k = b_k * m_gates.index(0).load(gl.SliceLayout(0, VALUE))[None, :]
        b_dv = (b_k + b_p).to(DTYPE)
        b_minus = gl.convert_layout(-b_dv, LEFT_VALUE)
        if W_FORMAT == "none":
            t_d = warpgroup_mma(b_minus, m_w.index(stage), t_d, is_async=True)
        else:
            t_d = warpgroup_mma(b_minus, m_wd, t_d, is_async=True)
        # While it runs: dv' leaves.
        m_v.permute((1, 0)).store(b_dv)
        store_rows(m_v, p_dv_new, row + i * 64, n_total - i * 64, i_hv, i_v, HV, V)
        wait_group(STAGES - 2)
        b_ds, b_doq, b_minus = warpgroup_mma_wait(0, [t_d, b_doq, b_minus])
        following = (done + 1) % STAGES
        if W_FORMAT != "none":
            decode_w(m_w.index(following), m_wd, m_ws.index(following), W_FORMAT, True)
        if not IS_KDA:
            prepare_gates(m_g.index(following), m_gates.index(0), m_gates.index(1), scale)
        fence_async_shared()
    wait_group(0)
    gl.store(p_dinitial + sequence + o_state, b_ds)
