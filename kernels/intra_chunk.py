"""GDN inside one chunk: A, its inverse X, P, w and u. One program holds one chunk of one value head.

Names and steps are those of the contract (docs/kernels.md): G the in-chunk gate sum, A_ij = beta_i k_i.k_j E_ij below
the diagonal, X = (I + A)^-1, P_ij = scale q_i.k_j E_ij, w = X(beta e^G k) rounded, u = X(beta v). A rounded w is kept
as one byte an element and one scale a row. The inverse, w and u serve KDA too.
"""

import triton
import triton.language as tl

from jlaqat.kernels.chunks import (
    join_bytes,
    load_inverse,
    load_rows,
    load_scalars,
    locate_chunk,
    store_inverse,
    store_rows,
    store_scalars,
    store_scores,
    to_float32,
)
from jlaqat.kernels.gates import bound_decay, decay_matrix
from jlaqat.kernels.rounding import INTERPRETED, decode, encode_rows, fake_quantize_rows

# Versions of Triton whose layouts test_a_thread_holds_pairs_of_columns has seen; others choose columns one by one.
PAIRS_OF_COLUMNS = tl.constexpr(triton.__version__.startswith(("3.7.", "3.9.")) and not INTERPRETED.value)


@triton.jit
def merge_dot(b_x, b_y, MERGE_PRECISION: tl.constexpr):
    """A product of the inverse; float16 keeps as many bits of an operand as TF32 does."""
    if MERGE_PRECISION == "float16":
        return tl.dot(b_x.to(tl.float16), b_y.to(tl.float16))
    else:
        return tl.dot(b_x, b_y, input_precision=MERGE_PRECISION)


@triton.jit
def keep_corner(b_x, m_corner, MERGE_PRECISION: tl.constexpr):
    """b_x where m_corner, else zero; for float16 rounded to it already. m_corner is alike in columns 2j and 2j + 1.

    A thread holds such columns of a product side by side: both are chosen as one word. The compiler would round first,
    choose them one by one and join them again.
    """
    if MERGE_PRECISION == "float16" and PAIRS_OF_COLUMNS:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred keep;
            setp.ne.b32 keep, $3, 0;
            cvt.rn.f16x2.f32 $0, $2, $1;
            selp.b32 $0, $0, 0, keep;
            }""",
            "=r,f,f,r,r",
            [b_x, m_corner.to(tl.int32)],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return tl.where(m_corner, b_x, 0.0)


@triton.jit
def leaf_inverses(b_a):
    """The inverses of the four diagonal blocks of I + b_a, 16 rows each, by float32 substitution; zero elsewhere."""
    o_block = tl.arange(0, 4)
    o_row = tl.arange(0, 16)
    diagonal = o_block[:, None, None, None] == o_block[None, None, :, None]
    b_x = -tl.sum(tl.where(diagonal, tl.reshape(b_a, [4, 16, 4, 16]), 0.0), axis=2)  # [4, 16, 16]
    for i in range(2, 16):
        is_row = (o_row == i)[None, :, None]
        b_row = tl.sum(tl.where(is_row, b_x, 0.0), axis=1)
        b_row += tl.sum(b_row[:, :, None] * b_x, axis=1)
        b_x = tl.where(is_row, b_row[:, None, :], b_x)
    b_x += tl.where(o_row[:, None] == o_row[None, :], 1.0, 0.0)[None, :, :]
    return tl.reshape(tl.where(diagonal, b_x[:, :, None, :], 0.0), [64, 64])


@triton.jit
def unit_lower_inverse(b_a, MERGE_PRECISION: tl.constexpr):
    """(I + b_a)^-1 for a strictly lower [64, 64]: inverses of diagonal blocks, joined two by two.

    [[D0, 0], [L, D1]]^-1 has -D1 L D0 in its corner, D0 and D1 being inverses: nothing but products of inverses and of
    A's own blocks, no power of A, which would blow up where keys are alike. All corners of a level take two products.
    16-bit inputs join from single rows on, since a product is faster than a row of substitution and loses no more than
    the joins of 16-row blocks do; float32, whose products cost three times as much, starts from 16-row leaves.
    """
    o_t = tl.arange(0, 64)
    FIRST: tl.constexpr = 1 if MERGE_PRECISION == "float16" or MERGE_PRECISION == "tf32" else 4
    if FIRST == 1:
        b_x = tl.where(o_t[:, None] == o_t[None, :], 1.0, 0.0)
        b_x -= tl.where((o_t[:, None] >> 1) == (o_t[None, :] >> 1), b_a, 0.0)
    else:
        b_x = leaf_inverses(b_a)
    for half in tl.static_range(FIRST, 6):
        o_block = o_t >> half
        m_even = ((o_block & 1) == 0)[None, :]
        corner = (o_block[:, None] == (o_block | 1)[None, :]) & m_even
        b_l = keep_corner(merge_dot(b_x, b_a, MERGE_PRECISION), corner, MERGE_PRECISION)
        b_joined = b_x - merge_dot(b_l, b_x, MERGE_PRECISION)
        # Odd blocks of columns stay as they are; from eight columns on a thread knows them when it is compiled.
        b_x = tl.where(m_even, b_joined, b_x) if half >= 3 else b_joined
    return b_x


@triton.jit
def form_w(b_x, b_kg, b_beta, W_FORMAT: tl.constexpr, HARDWARE_FP8: tl.constexpr, PRECISION: tl.constexpr):
    """w = X(beta e^G k), rounded; b_kg is e^G k in float32. In X's dtype."""
    b_w = tl.dot(b_x, (b_kg * b_beta[:, None]).to(b_x.dtype), input_precision=PRECISION)
    if W_FORMAT != "none":
        b_w = fake_quantize_rows(b_w, W_FORMAT, HARDWARE_FP8)
    return b_w.to(b_x.dtype)


@triton.jit
def form_u(b_x, b_v, b_beta, PRECISION: tl.constexpr):
    return tl.dot(b_x, (b_v * b_beta[:, None]).to(b_x.dtype), input_precision=PRECISION)


@triton.jit
def store_w(
    p_w,
    p_w_scale,
    b_x,
    b_kg,
    b_beta,
    row,
    n_rows,
    i_hv,
    HV: tl.constexpr,
    K: tl.constexpr,
    W_FORMAT: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Forms w, b_kg being e^G k in float32, and stores it: its codes and scales where it is rounded."""
    if W_FORMAT == "none":
        b_w = form_w(b_x, b_kg, b_beta, W_FORMAT, HARDWARE_FP8, PRECISION)
        store_rows(p_w, b_w, row, n_rows, i_hv, 0, HV, K)
    else:
        b_w = tl.dot(b_x, (b_kg * b_beta[:, None]).to(b_x.dtype), input_precision=PRECISION)
        b_code, b_scale = encode_rows(b_w, W_FORMAT, HARDWARE_FP8)
        if (K // 2) * 2 == K:
            p_pair = p_w.to(tl.pointer_type(tl.uint16))
            store_rows(p_pair, join_bytes(b_code), row, n_rows, i_hv, 0, HV, K // 2)
        else:
            store_rows(p_w, b_code, row, n_rows, i_hv, 0, HV, K)
        store_scalars(p_w_scale, b_scale, row, n_rows, i_hv, HV)


@triton.jit
def intra_chunk_forward_kernel(
    p_q,  # [B*T, H, K]
    p_k,  # [B*T, H, K]
    p_v,  # [B*T, HV, V]
    p_g,  # [B*T, HV] float32
    p_beta,  # [B*T, HV]
    p_chunks,  # [SLOTS, 3]
    p_gsum,  # out: [B*T, HV] float32, G
    p_x,  # out, SAVE_X: [B*T, HV, 64]
    p_p,  # out: [B*T, HV, P_WIDTH]; with more than 64 columns it takes X in (chunks.py)
    p_w,  # out: [B*T, HV, K], values, or codes (uint8) where w is rounded
    p_w_scale,  # out: [B*T, HV] float32, where w is rounded
    p_u,  # out: [B*T, HV, V]
    scale,
    T,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IS_PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
    SAVE_X: tl.constexpr,
    P_WIDTH: tl.constexpr,
    W_FORMAT: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    MERGE_PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    row, n_rows, _ = locate_chunk(p_chunks, i_c, T, NT, BT, IS_PACKED, WHOLE)
    if n_rows <= 0:
        return
    o_t = tl.arange(0, BT)
    b_beta = load_scalars(p_beta, row, n_rows, i_hv, HV, BT)
    b_k = load_rows(p_k, row, n_rows, i_h, 0, H, K, BT, BK)
    b_q = load_rows(p_q, row, n_rows, i_h, 0, H, K, BT, BK)
    b_gsum = tl.cumsum(bound_decay(load_scalars(p_g, row, n_rows, i_hv, HV, BT)), axis=0)
    store_scalars(p_gsum, b_gsum, row, n_rows, i_hv, HV)
    b_e = decay_matrix(b_gsum)
    b_p = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * (b_e * scale)
    b_a = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION) * b_e * b_beta[:, None]
    b_a = tl.where(o_t[:, None] > o_t[None, :], b_a, 0.0)
    store_scores(p_p, b_p, row, n_rows, i_hv, HV, P_WIDTH)
    b_x = unit_lower_inverse(b_a, MERGE_PRECISION).to(p_k.dtype.element_ty)
    if P_WIDTH > BT:
        store_inverse(p_p, b_x, row, n_rows, i_hv, HV, P_WIDTH)
    elif SAVE_X:
        store_inverse(p_x, b_x, row, n_rows, i_hv, HV, BT)
    b_k = load_rows(p_k, row, n_rows, i_h, 0, H, K, BT, BK)  # again: holding it through the inverse costs registers
    b_kg = to_float32(b_k) * tl.exp(b_gsum)[:, None]
    store_w(p_w, p_w_scale, b_x, b_kg, b_beta, row, n_rows, i_hv, HV, K, W_FORMAT, HARDWARE_FP8, PRECISION)
    for i_v in range(0, V, BV):
        b_v = load_rows(p_v, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        store_rows(p_u, form_u(b_x, b_v, b_beta, PRECISION), row, n_rows, i_hv, i_v, HV, V)


@triton.jit
def wy_recompute_kernel(
    p_k,
    p_v,
    p_gsum,
    p_beta,
    p_x,  # [B*T, HV, X_WIDTH]
    p_chunks,
    p_w,  # out: as in the forward
    p_w_scale,  # out
    p_u,  # out, WITH_U: [B*T, HV, V]
    T,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IS_PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
    WITH_U: tl.constexpr,
    X_WIDTH: tl.constexpr,
    W_FORMAT: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The backward's own w and u, bit for bit the forward's, where they were not saved."""
    pid = tl.program_id(0)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    row, n_rows, _ = locate_chunk(p_chunks, i_c, T, NT, BT, IS_PACKED, WHOLE)
    if n_rows <= 0:
        return
    b_k = load_rows(p_k, row, n_rows, i_h, 0, H, K, BT, BK)
    b_beta = load_scalars(p_beta, row, n_rows, i_hv, HV, BT)
    b_x = load_inverse(p_x, row, n_rows, i_hv, HV, X_WIDTH, BT)
    b_kg = to_float32(b_k) * tl.exp(load_scalars(p_gsum, row, n_rows, i_hv, HV, BT))[:, None]
    store_w(p_w, p_w_scale, b_x, b_kg, b_beta, row, n_rows, i_hv, HV, K, W_FORMAT, HARDWARE_FP8, PRECISION)
    if WITH_U:
        for i_v in range(0, V, BV):
            b_v = load_rows(p_v, row, n_rows, i_hv, i_v, HV, V, BT, BV)
            store_rows(p_u, form_u(b_x, b_v, b_beta, PRECISION), row, n_rows, i_hv, i_v, HV, V)


@triton.jit
def decode_w_kernel(
    p_w,  # [B*T, HV, K] uint8
    p_w_scale,  # [B*T, HV] float32
    p_y,  # out: [B*T, HV, K]
    ROWS,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    W_FORMAT: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
):
    """Values of a rounded w for the reverse scan; ROWS counts rows and heads."""
    row = tl.program_id(0).to(tl.int64) * BT
    n_rows = tl.minimum(ROWS - row, BT).to(tl.int32)
    b_w = decode(load_rows(p_w, row, n_rows, 0, 0, 1, K, BT, BK), W_FORMAT, HARDWARE_FP8)
    store_rows(p_y, b_w * load_scalars(p_w_scale, row, n_rows, 0, 1, BT)[:, None], row, n_rows, 0, 0, 1, K)
