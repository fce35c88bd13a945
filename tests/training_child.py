"""One training run in a process of its own, for tests to kill or pair: python training_child.py DIRECTORY CONFIG.yaml

--cache DIR keeps compiled programs there, and --quick compiles without optimisations: both for a faster start.
--processes and --index make it one of several that meet at --port on the loopback interface.
"""

import argparse

import jax

from jlaqat.recipes import load_config
from jlaqat.training import TrainConfig, train


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("config")
    parser.add_argument("--cache")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--port", type=int)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--index", type=int, default=0)
    args = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", args.quick)
    if args.cache is not None:
        jax.config.update("jax_compilation_cache_dir", args.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if args.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.index)
    train(load_config(TrainConfig, args.config), directory=args.directory)


if __name__ == "__main__":
    main()
