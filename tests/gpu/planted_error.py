"""A kernel with an error, on purpose: sanitize.py sees whether memcheck finds it."""

import triton
import triton.language as tl


@triton.jit
def write_past_the_end_kernel(
    p_x,  # [n] float32
    n,
):
    offsets = n + tl.arange(0, 1024)
    tl.store(p_x + offsets, 1.0)
