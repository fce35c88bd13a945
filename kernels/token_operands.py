"""Where a program of decoding works, which tokens its sequence has, and the operands of one token."""

import triton
import triton.language as tl


@triton.jit
def locate_program(H: tl.constexpr, HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """(first column, value head, sequence as int64, head of q and k) of a program: columns of a state come first."""
    pid = tl.program_id(0)
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    i_hv = (pid // PROGRAMS_V) % HV
    return (pid % PROGRAMS_V) * BV, i_hv, (pid // (PROGRAMS_V * HV)).to(tl.int64), i_hv // (HV // H)


@triton.jit
def rows_of(p_first, p_count, i_n, T, PER_ROW, RAGGED: tl.constexpr):
    """(the row of operands [B, T, ...] that sequence i_n lies in, its first token there, how many tokens it has).

    RAGGED: PER_ROW sequences share a row; otherwise each has one to itself.
    """
    if RAGGED:
        # A sequence without tokens may start past the end; what is loaded for it is not used.
        return i_n // PER_ROW, tl.minimum(tl.load(p_first + i_n), T - 1), tl.load(p_count + i_n)
    else:
        return i_n, 0, T


@triton.jit
def load_token(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    row,  # int64, the token's row in [rows, heads, ...]
    i_h,
    i_hv,
    o_k,
    o_v,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    IS_KDA: tl.constexpr,
):
    """(q, k, v, g, beta) of a token as they lie in memory. Loaded one token ahead: memory takes longer than a token."""
    b_q = tl.load(p_q + (row * H + i_h) * K + o_k, mask=o_k < K, other=0.0)
    b_k = tl.load(p_k + (row * H + i_h) * K + o_k, mask=o_k < K, other=0.0)
    b_v = tl.load(p_v + (row * HV + i_hv) * V + o_v, mask=o_v < V, other=0.0)
    beta = tl.load(p_beta + row * HV + i_hv)
    if IS_KDA:
        b_g = tl.load(p_g + (row * HV + i_hv) * K + o_k, mask=o_k < K, other=0.0)
    else:
        b_g = tl.load(p_g + row * HV + i_hv)
    return b_q, b_k, b_v, b_g, beta
