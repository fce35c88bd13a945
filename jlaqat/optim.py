"""Optimizers and learning-rate schedules from a frozen config: Optax underneath, weight decay by parameter name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import optax

from jlaqat.naming import matches, path_parts

OPTIMIZERS = ("adamw", "adam", "lion", "sgd")
SCHEDULES = ("cosine", "linear", "wsd", "constant")

# Norm scales, biases and the decay parameters of the gates: pulling these towards zero changes what the layer is.
NO_DECAY = ("*norm*", "*bias*", "*A_log*", "*scale*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What updates the parameters, and how fast.

    Fields (all keyword-only):
      name: "adamw", "adam", "lion" or "sgd".
      learning_rate: the peak, reached after `warmup_steps`.
      schedule: "cosine" (to `final_fraction` at the last step), "linear" (the same, straight), "wsd" (warm-up, stable,
        then linear decay over the last `decay_steps`), "constant" (after the warm-up).
      warmup_steps: steps of linear warm-up from 0.
      decay_steps: length of the decay of "wsd"; 0 means a tenth of the run.
      final_fraction: the learning rate at the last step as a fraction of the peak.
      b1, b2, eps: moments and epsilon of Adam and Lion; `b1` is the momentum of SGD.
      weight_decay: decoupled weight decay ("adamw", "lion"); others refuse it.
      no_decay: globs of parameter names without weight decay. Vectors and scalars never decay.
      clip_norm: gradients are scaled down to this global norm; None leaves them.

    Raises ValueError naming the field, the value and what is allowed.
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    schedule: str = "cosine"
    warmup_steps: int = 0
    decay_steps: int = 0
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = NO_DECAY
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        for field, allowed in (("name", OPTIMIZERS), ("schedule", SCHEDULES)):
            if getattr(self, field) not in allowed:
                listed = ", ".join(map(repr, allowed))
                raise ValueError(f"optimizer.{field}={getattr(self, field)!r} is unknown; choose one of {listed}.")
        if self.weight_decay and self.name not in ("adamw", "lion"):
            raise ValueError(
                f"optimizer.weight_decay={self.weight_decay} does not apply to {self.name!r}; "
                "use 'adamw' or 'lion', or set it to 0."
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"optimizer.clip_norm={self.clip_norm} must be positive; use null (None) for no clipping.")
        for field in ("warmup_steps", "decay_steps", "learning_rate", "weight_decay"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"optimizer.{field}={getattr(self, field)} must be finite and not negative.")


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by update count, from 0, for a run of `steps` updates. Raises ValueError where they do not fit."""
    decay = config.decay_steps or max(1, steps // 10)
    needed = config.warmup_steps + (decay if config.schedule == "wsd" else 0)
    if needed > steps:
        raise ValueError(
            f"the schedule needs {needed} steps (warmup_steps={config.warmup_steps}"
            + (f", decay_steps={decay}" if config.schedule == "wsd" else "")
            + f") and the run has {steps}; shorten them or train longer."
        )
    peak, last = config.learning_rate, config.learning_rate * config.final_fraction
    after = max(1, steps - config.warmup_steps)
    if config.schedule == "cosine":
        body = optax.cosine_decay_schedule(peak, after, alpha=config.final_fraction)
    elif config.schedule == "linear":
        body = optax.linear_schedule(peak, last, after)
    elif config.schedule == "wsd":
        body = optax.linear_schedule(peak, last, decay, transition_begin=after - decay)
    else:
        body = optax.constant_schedule(peak)
    if not config.warmup_steps:
        return body
    # The first update already moves: warm-up counts from 1/warmup_steps, not from 0.
    warmup = optax.linear_schedule(peak / config.warmup_steps, peak, max(1, config.warmup_steps - 1))
    return optax.join_schedules([warmup, body], [config.warmup_steps])


def decay_mask(params: Any, no_decay: tuple[str, ...]) -> Any:
    """True where weight decay applies: arrays of two axes and more whose dotted name no glob of `no_decay` covers."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim >= 2 and not matches(".".join(path_parts(path)), no_decay), params
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The Optax chain of `config` for a run of `steps` updates: clipping, then the optimizer with its schedule.

    Raises ValueError where the schedule does not fit into so many steps.
    """
    schedule = make_schedule(config, steps)

    def mask(params: Any) -> Any:
        return decay_mask(params, config.no_decay)

    if config.name == "adamw":
        core = optax.adamw(
            schedule,
            config.b1,
            config.b2,
            config.eps,
            weight_decay=config.weight_decay,
            mask=mask if config.weight_decay else None,
        )
    elif config.name == "adam":
        core = optax.adam(schedule, config.b1, config.b2, config.eps)
    elif config.name == "lion":
        core = optax.lion(
            schedule, config.b1, config.b2, weight_decay=config.weight_decay, mask=mask if config.weight_decay else None
        )
    else:
        core = optax.sgd(schedule, momentum=config.b1 or None)
    clip = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    return optax.chain(*clip, core)
