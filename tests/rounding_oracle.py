"""`fake_quantize` again, in numpy: one group at a time, true divisions, ml_dtypes' conversions."""

import ml_dtypes
import numpy as np

from jlaqat.spec import FORMATS

TINY = np.float32(2**-126)
CODES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
ELEMENTS = {"nvfp4": "e2m1", "mxfp4": "e2m1", "mxfp8": "e4m3"}


def blocks_of(x, spec, site):
    """Slices of a [rows, columns] tensor that share a scale."""
    rows, columns = x.shape
    row_step, column_step = {
        "tile": (rows, spec.block_v),
        "value_row": (rows, 1),
        "key_row": (1, 32),
        "head": (rows, columns),
        "row": (1, columns),
        "block": (FORMATS[spec.format].block, 1) if site == "state" else (1, FORMATS[spec.format].block),
    }["row" if site == "w" and spec.granularity is None else spec.granularity or "tile"]
    for r in range(0, rows, row_step):
        for c in range(0, columns, column_step):
            yield slice(r, r + row_step), slice(c, c + column_step)


def flush(x):
    """Magnitudes below 2^-126 count as zero, as in XLA on the CPU."""
    return np.where(abs(x) < TINY, np.copysign(np.float32(0), x), x)


def numpy_scale(amax, spec, tensor_amax):
    if spec.format == "nvfp4":
        t = tensor_amax / np.float32(2688)
        t = np.float32(1) if t < TINY else t
        code = np.minimum(amax / (np.float32(6) * t), np.float32(448)).astype(CODES["e4m3"]).astype(np.float32)
        s = (np.float32(2**-9) if code == 0 else code) * t
    elif FORMATS[spec.format].block:
        s = np.float32(1) if amax == 0 else np.float32(2.0 ** np.ceil(np.log2(float(amax) / spec.max)))
    else:
        s = amax / np.float32(spec.max)
    return np.float32(1) if s < TINY else s


def numpy_fake_quantize(x, spec, site):
    if spec.granularity == "none":
        with np.errstate(over="ignore"):
            return x.astype(np.float16 if spec.format == "float16" else ml_dtypes.bfloat16).astype(np.float32)
    x = flush(x)
    result = np.empty_like(x)
    for index in np.ndindex(x.shape[:-2]):
        for block in blocks_of(x[index], spec, site):
            group = x[index][block]
            s = numpy_scale(abs(group).max(), spec, abs(x[index]).max())
            scaled = np.clip(group * (np.float32(1) / s), -spec.max, spec.max).astype(np.float32)
            fmt = ELEMENTS.get(spec.format, spec.format)
            result[index][block] = s * (
                scaled.astype(CODES[fmt]).astype(np.float32) if fmt in CODES else np.rint(scaled)
            )
    return flush(result)
