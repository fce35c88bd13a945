"""Which backend serves a call, said once through the logger "jlaqat"."""

from __future__ import annotations

import functools
import logging

import jax

from jlaqat import triton_backend
from jlaqat.checks import check_backend
from jlaqat.chunked import Inputs
from jlaqat.kernel_calls import target_capability
from jlaqat.spec import DeltaQuant

_logger = logging.getLogger("jlaqat")


def choose(backend: str, inputs: Inputs, quant: DeltaQuant, *, by_token: bool = False) -> str:
    """`backend`, with "auto" decided: "triton or xla" where the kernels serve the call on a GPU, else "xla".

    by_token: the call runs token by token, which the kernels do not.

    Raises ValueError for an unknown name, NotImplementedError where "triton" was asked for and cannot serve the call.
    """
    check_backend(backend)
    if backend not in ("auto", "triton"):
        return backend
    reason = "the kernels work in chunks, not token by token" if by_token else triton_backend.why_not(inputs, quant)
    if backend == "triton":
        if reason is None:
            return "triton"
        remedy = "" if "'xla'" in reason else " Use backend='xla' or 'auto'."
        raise NotImplementedError(f"backend='triton' cannot serve this call: {reason.rstrip('.')}.{remedy}")
    say_choice("delta_rule", backend, reason)
    return "triton or xla" if reason is None else "xla"


def say_choice(what: str, backend: str, reason: str | None) -> None:
    """Logs, once, what "auto" came to; reason: why not Triton."""
    if backend != "auto":
        return
    if reason is None:
        capability = target_capability()
        _say_once(logging.INFO, f"backend='auto' runs {what} on 'triton' (kernels for SM{capability})")
    elif jax.default_backend() == "gpu":
        _say_once(logging.WARNING, f"backend='auto' runs {what} on 'xla' (plain JAX), not on 'triton': {reason}")
    else:
        _say_once(logging.INFO, f"backend='auto' runs {what} on 'xla' (plain JAX)")


@functools.cache
def _say_once(level: int, message: str) -> None:
    _logger.log(level, message)
