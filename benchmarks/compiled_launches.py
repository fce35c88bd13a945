# ruff: noqa: E402 (XLA reads its flags when JAX is imported)
"""Which kernels XLA's optimised GPU program launches for a gradient through a scan over layers; no GPU needed.

    pip install --no-deps --target /tmp/pjrt jax-cuda13-pjrt==0.11.2                   # 390 MB, XLA for CUDA
    JAX_PLATFORMS=cpu python benchmarks/compiled_launches.py --pjrt /tmp/pjrt [--gates gdn,kda]

Lowering shows what was asked for; what runs is decided later (XLA's fusion of a launch with the stacking of its
results once launched intra_chunk_forward twice). tests/gpu/test_triton_backend.py counts the same on a GPU.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path

TOOLS = Path(importlib.util.find_spec("triton").origin).parent / "backends" / "nvidia"  # ptxas and libdevice
os.environ["XLA_FLAGS"] = (
    f"--xla_gpu_cuda_data_dir={TOOLS} --xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')}"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib import xla_client
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jlaqat
from jlaqat.spec import DeltaQuant, QuantSpec

# What XLA asks of a device when it compiles: an H100's numbers.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3350000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 80000000000
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100"
"""
FP8 = DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8())


def absent_gpu(folder: Path):
    """A device to compile for, from the plugin under `folder`; the handlers that its programs call are registered."""
    import jax_cuda13_plugin.cuda_plugin_extension as extension

    library = folder / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"
    if not library.is_file():
        raise SystemExit(f"{library} is missing: pip install --no-deps --target {folder} jax-cuda13-pjrt")
    plugin = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    xla_client.initialize_pjrt_plugin("cuda")
    on_type = functools.partial(extension.register_custom_type, plugin)
    on_call = functools.partial(extension.register_custom_call_target, plugin)
    xla_client.register_custom_type_handler("CUDA", on_type)
    xla_client.register_custom_call_handler("CUDA", on_call)
    for name, kind in extension.ffi_types().items():
        xla_client.register_custom_type(name, kind, platform="CUDA")
    for name, handler in extension.ffi_handlers().items():
        xla_client.register_custom_call_target(name, handler, platform="CUDA", api_version=1)
    import jax_triton  # noqa: F401, registers its own handler

    described = xla_client._xla.get_default_c_api_topology("cuda", "H100", {"target_config": H100, "topology": "1x1x1"})
    return topologies.TopologyDescription(described._make_compile_only_devices()).devices[0]


def launches(device, gate: str, wrap: Callable) -> list[str]:
    """Where the compiled gradient of three layers in a scan launches kernels, a line each."""
    whole = NamedSharding(Mesh(np.array([device]), ("x",)), P())
    rows, heads, dim = (2, 70), 2, 64
    shapes = {name: (*rows, heads, dim) for name in ("q", "k", "v")} | {"beta": (*rows, heads)}
    shapes["g"] = (*rows, heads, dim) if gate == "kda" else (*rows, heads)
    x = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32 if name == "g" else jnp.bfloat16, sharding=whole)
        for name, shape in shapes.items()
    }
    layer = wrap(lambda x: jlaqat.delta_rule(**x, quant=FP8, backend="triton")[0])

    def loss(x):
        v, _ = jax.lax.scan(lambda v, _: (layer(x | {"v": v}), None), x["v"], length=3)
        return jnp.sum(v.astype(jnp.float32) ** 2)

    placed = {name: whole for name in x}
    compiled = jax.jit(jax.grad(loss), in_shardings=(placed,), out_shardings=placed).lower(x).compile()
    found = re.findall(r'"triton_kernel_call_ffi".*?op_name="([^"]*)"', compiled.as_text())
    return [re.sub(r"/(eval_jaxpr|while|body|triton_kernel_call)\b", "", name) for name in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pjrt", type=Path, required=True, help="where jax-cuda13-pjrt was installed")
    parser.add_argument("--gates", default="gdn,kda")
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, triton {importlib.metadata.version('triton')}")
    device = absent_gpu(arguments.pjrt)
    with jlaqat.compile_for(90):
        for gate in arguments.gates.split(","):
            for name, wrap in (("plain", lambda f: f), ("checkpointed", jax.checkpoint)):
                found = launches(device, gate, wrap)
                print(f"\n{gate}, layers {name}: {len(found)} launches", *found, sep="\n  ")


if __name__ == "__main__":
    main()
