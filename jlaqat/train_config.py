"""`TrainConfig`: a whole training run as one frozen dataclass, from YAML or Python; docs/training.md has a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jlaqat.calibration import check_method
from jlaqat.data import DataConfig, check_model_sizes, loss_kind
from jlaqat.model import ModelConfig
from jlaqat.optim import OptimizerConfig, make_schedule
from jlaqat.sharding import ShardingConfig
from jlaqat.train_step import LOSSES, DistillationConfig


def _at_least(config: Any, section: str, **bounds: int) -> None:
    for field, low in bounds.items():
        if getattr(config, field) < low:
            raise ValueError(f"{section}{field}={getattr(config, field)} must be at least {low}.")


def _entries(quant: Any) -> tuple[Any, ...]:
    if quant is None:
        return ()
    if isinstance(quant, str):
        return (quant,)
    if not isinstance(quant, Sequence):
        raise ValueError(
            f"quant={quant!r} must be a recipe's name, or a list of names and of entries {{quantizer_name, cfg}}; "
            '[] or "none" for no rounding.'
        )
    return tuple(quant)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """When and on what to evaluate during training."""

    # Steps between evaluations; 0: only after the last step.
    every: int = 0
    # Batches of one evaluation, always the same ones; 0 switches evaluation off.
    batches: int = 8
    # None: the training data with split "eval". A whole DataConfig of its own: nothing is taken over from `data`.
    data: DataConfig | None = None

    def __post_init__(self) -> None:
        _at_least(self, "evaluation.", every=0, batches=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written while training, under the run's directory."""

    # Steps between records of loss, learning rate, gradient norm and speed; the last step is always recorded.
    every: int = 10
    # Steps between records of each quantizer's rounding error and saturation (a forward pass more); 0: never.
    quantizers_every: int = 100
    jsonl: bool = True
    tensorboard: bool = True
    # A progress bar, when standard error is a terminal.
    progress: bool = True

    def __post_init__(self) -> None:
        _at_least(self, "logging.", every=1, quantizers_every=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and which steps stay."""

    # Steps between checkpoints; 0: only after the last step.
    every: int = 1000
    # Latest steps that stay; null keeps all.
    max_to_keep: int | None = 3
    # Steps that stay for their evaluation loss, beside the latest.
    keep_best: int = 0
    # Write in the background while training goes on; a kill can then lose one checkpoint more.
    asynchronous: bool = False

    def __post_init__(self) -> None:
        _at_least(self, "checkpoint.", every=0, keep_best=0)
        if self.max_to_keep is not None:
            _at_least(self, "checkpoint.", max_to_keep=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """How static scales are found before the first step. Read only where the recipe has static scales."""

    # Batches of the training data, from its beginning.
    batches: int = 8
    # "max", "percentile" or "mse", see `jlaqat.calibrate`.
    method: str = "max"

    def __post_init__(self) -> None:
        _at_least(self, "calibration.", batches=1)
        check_method(self.method)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run: QAT where `quant` enables quantizers, QAD where `distillation` is given too, plain otherwise.

    Raises ValueError for values that do not fit together, naming them and the remedy.
    """

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    # Recipe names or quant_cfg entries, in order; (), None and "none" train without rounding.
    quant: Any = ()
    distillation: DistillationConfig | None = None
    calibration: CalibrationConfig = CalibrationConfig()
    # Weights to start from: a run's directory, a checkpoint directory, an export, a .safetensors file. None: random.
    init_from: str | None = None

    # Updates in the whole run.
    steps: int = 1000
    # Of the initial weights; data and stochastic rounding have seeds of their own.
    seed: int = 0
    # Micro-batches a step: data.batch_size is what they hold together.
    accumulation: int = 1
    # None: what the data ask for (see `jlaqat.data.loss_kind`).
    loss: str | None = None

    evaluation: EvalConfig = EvalConfig()
    logging: LogConfig = LogConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sharding: ShardingConfig = ShardingConfig()

    def __post_init__(self) -> None:
        object.__setattr__(self, "quant", _entries(self.quant))
        _at_least(self, "", steps=1, accumulation=1)
        if self.loss is not None and self.loss not in LOSSES:
            raise ValueError(
                f"loss={self.loss!r} is unknown; choose one of {', '.join(map(repr, LOSSES))}, or leave it out."
            )
        if self.data.batch_size % self.accumulation:
            raise ValueError(
                f"data.batch_size={self.data.batch_size} does not divide into accumulation={self.accumulation} "
                "micro-batches; change one of them."
            )
        if self.checkpoint.keep_best and not self.evaluation.batches:
            raise ValueError(
                "checkpoint.keep_best ranks by evaluation loss, but evaluation.batches=0; evaluate, or set keep_best=0."
            )
        make_schedule(self.optimizer, self.steps)  # raises where the schedule does not fit the run
        sizes = {name: getattr(self.model, name) for name in ("vocab_size", "input_size", "output_size")}
        check_model_sizes(self.data, **sizes)
        if self.evaluation.data is not None:
            check_model_sizes(self.evaluation.data, **sizes, section="evaluation.data")

    @property
    def loss_name(self) -> str:
        return self.loss or loss_kind(self.data)

    @property
    def eval_data(self) -> DataConfig:
        """The data of evaluations."""
        return self.evaluation.data or dataclasses.replace(self.data, split="eval")
