"""One training run in a process of its own, for tests to kill: python training_child.py DIRECTORY CONFIG.yaml [CACHE].

CACHE is a folder for compiled programs, to start faster; without it the process compiles as a user's would, with all
optimisations.
"""

import sys

import jax

from jlaqat.recipes import load_config
from jlaqat.training import TrainConfig, train


def main(directory: str, config: str, cache: str | None = None) -> None:
    if cache is not None:
        jax.config.update("jax_disable_most_optimizations", True)
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    train(load_config(TrainConfig, config), directory=directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
