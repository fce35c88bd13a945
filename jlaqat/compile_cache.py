"""Compiled kernels, kept on disk between processes.

jax-triton compiles every kernel again in each process, which takes seconds a kernel. `install` puts Triton's own cache
in between: the folder that its PyTorch users know (~/.triton/cache; TRITON_HOME says where .triton lies), with a key of
everything that the compiler sees: the kernel's IR, its options, the architecture, Triton and what of the environment
changes its output. TRITON_ALWAYS_COMPILE=1 leaves the cache unread, as elsewhere in Triton.

It also has Gluon kernels compiled as Triton compiles them. jax-triton 0.4.1 runs the passes for Triton's language on
them, which change layouts, add fences and barriers to the kernel's own, and move instructions.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
from typing import Any, NamedTuple

log = logging.getLogger("jlaqat")
FILE = "jax_triton.json"
_NOT_KEPT = ("ttgir", "llir")  # of a compilation, what only jax-triton's dumps read


class _Source(NamedTuple):
    """What Triton's key asks of a source."""

    text: str

    def hash(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def install() -> None:
    """From now on jax-triton takes kernels that were compiled before from the cache, and compiles those in Gluon with
    the passes for Gluon. A second call changes nothing."""
    from jax_triton import triton_lib

    compile_kernel = triton_lib.compile_ttir_inplace
    if hasattr(compile_kernel, "uncached"):
        return

    def cached(module: Any, backend: Any, options: Any, target: Any) -> Any:
        import triton

        is_gluon = _is_gluon(module)
        hash = _hash(module, backend, options, target, is_gluon)  # first: compiling changes the module
        read = not triton.knobs.compilation.always_compile and not os.environ.get("JAX_TRITON_DUMP_DIR")
        known = _read(hash) if read else None
        if known is not None:
            return triton_lib.CompilationResult(**known, **dict.fromkeys(_NOT_KEPT, ""))
        result = compile_kernel(module, _gluon_backend(backend) if is_gluon else backend, options, target)
        _write(hash, {x.name: getattr(result, x.name) for x in dataclasses.fields(result) if x.name not in _NOT_KEPT})
        return result

    cached.uncached = compile_kernel  # type: ignore[attr-defined]
    triton_lib.compile_ttir_inplace = cached


def _is_gluon(module: Any) -> bool:
    """Whether a module that is not compiled yet has layouts: a Triton kernel gets its warps with its layouts, later."""
    return module.get_int_attr("ttg.num-warps") is not None


def _gluon_backend(backend: Any) -> Any:
    """Triton's backend, which compiles Gluon where jax-triton asks it to compile Triton's language."""
    changed = copy.copy(backend)
    changed.make_ttir = lambda module, *rest: module
    changed.make_ttgir = backend.gluon_to_ttgir
    return changed


def _hash(module: Any, backend: Any, options: Any, target: Any, is_gluon: bool) -> str:
    """Of everything that decides what a kernel compiles to."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.runtime.cache import get_cache_key

    passes = " gluon" if is_gluon else ""
    source = _Source(f"jax-triton {importlib.metadata.version('jax-triton')}{passes} {target} {module}")
    key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()


def _read(hash: str) -> dict[str, Any] | None:
    """What was kept of a kernel; None where nothing was, or nothing that can be read."""
    from triton.runtime.cache import get_cache_manager

    try:
        path = get_cache_manager(hash).get_file(FILE)
        if path is None:
            return None
        with open(path) as f:
            return json.load(f)
    except (OSError, ValueError):
        return None


def _write(hash: str, fields: dict[str, Any]) -> None:
    """Keeps a kernel, in one step (a reader finds all of it or nothing)."""
    from triton.runtime.cache import get_cache_manager

    try:
        get_cache_manager(hash).put(json.dumps(fields), FILE, binary=False)
    except OSError as error:
        log.warning("A compiled kernel is not kept, since Triton's cache cannot be written: %s", error)
