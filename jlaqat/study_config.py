"""`StudyConfig`: what a study trains, on what, and with which roundings; docs/study.md lists the fields."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from flax import nnx

from jlaqat.data import FILE_TASKS, DataConfig, check_model_sizes, loss_kind
from jlaqat.decode_policy import PRESETS
from jlaqat.model import DecoderLM, ModelConfig
from jlaqat.optim import OptimizerConfig, make_schedule
from jlaqat.quant_cfg import plan
from jlaqat.quantizers import quantize
from jlaqat.recipes import load_recipe
from jlaqat.spec import CHUNK_SIZE
from jlaqat.study_head import DeltaHead, HeadConfig
from jlaqat.train_config import EvalConfig, TrainConfig

ARMS = ("float32", "ptq", "qat", "control")

# How quant_cfg spells each format of a state; see docs/quantizers.md.
STATE_CFG: dict[str, dict[str, Any]] = {
    "e4m3": {"num_bits": "e4m3"},
    "e5m2": {"num_bits": "e5m2"},
    "int8": {"num_bits": "int8", "narrow_range": True},
    "int4": {"num_bits": "int4", "narrow_range": True},
    "nvfp4": {"num_bits": "e2m1", "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": [4, 3]}},
    "mxfp8": {"num_bits": "e4m3", "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": [8, 0]}},
    "mxfp4": {"num_bits": "e2m1", "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": [8, 0]}},
    "bfloat16": {"num_bits": "bfloat16"},
    "float16": {"num_bits": "float16"},
}
FORMAT_TITLES = {"e4m3": "FP8", "e5m2": "FP8 E5M2"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to round the states, and the cadence that its QAT arm was trained at."""

    format: str
    rounding: str
    cadence: int
    trained_cadence: int
    # Under a decode policy that adds what a rounding lost before the next.
    error_feedback: bool = False
    # A preset of `DecodePolicy`, which then says all of the above.
    policy: str | None = None

    @property
    def trained(self) -> bool:
        """Whether this very setting has a QAT run, rather than the scores of one at another cadence."""
        return self.cadence == self.trained_cadence

    @property
    def trained_as(self) -> Setting:
        """The setting whose QAT run this one is scored with."""
        return dataclasses.replace(self, cadence=self.trained_cadence)

    @property
    def name(self) -> str:
        """For directories and records: nvfp4-1, e4m3-stochastic-64, int8-feedback-1, policy-serving."""
        if self.policy is not None:
            return f"policy-{self.policy}"
        words = ["stochastic"] if self.rounding == "stochastic" else []
        words += ["feedback"] if self.error_feedback else []
        return "-".join([self.format, *words, str(self.cadence)])

    @property
    def title(self) -> str:
        if self.policy is not None:
            return f"decode policy {self.policy}"
        words = [FORMAT_TITLES.get(self.format, self.format.upper())]
        words += ["stochastic"] if self.rounding == "stochastic" else []
        words += ["error feedback"] if self.error_feedback else []
        return " ".join([*words, "every token" if self.cadence == 1 else f"every {self.cadence} tokens"])

    def quant_cfg(self) -> list[dict[str, Any]]:
        """The entries that set every state quantizer of a model, for `jlaqat.quantize`."""
        if self.policy is not None:
            return load_recipe(f"decode_{self.policy}")
        cfg = {**STATE_CFG[self.format], "rounding": self.rounding}
        entry = {"quantizer_name": "*[gk]d[na]_state_quantizer", "cfg": cfg}
        if not self.error_feedback:
            cfg["cadence"] = self.cadence
            return [entry]
        when = {"mode": "token"} if self.cadence == 1 else {"mode": "replay", "window": self.cadence}
        return [entry, {"module_name": "*", "cfg": {**when, "error_feedback": True}}]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadRun:
    """What `jlaqat eval` needs to score a checkpoint of a `DeltaHead`: as much of a TrainConfig as applies."""

    head: HeadConfig
    data: DataConfig
    evaluation: EvalConfig = EvalConfig()
    loss: str | None = None

    @property
    def loss_name(self) -> str:
        return self.loss or loss_kind(self.data)

    @property
    def eval_data(self) -> DataConfig:
        return self.evaluation.data or dataclasses.replace(self.data, split="eval")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Four arms for each seed and each of formats × roundings × cadences × error_feedback, and each of policies.

    Raises ValueError naming field and remedy.
    """

    data: DataConfig
    # What is trained, one of the two: a decoder, or a single bare head.
    model: ModelConfig | None = None
    head: HeadConfig | None = None
    # Training in float32, from random weights.
    steps: int = 1000
    optimizer: OptimizerConfig = OptimizerConfig()
    # Training on from there: QAT with the rounding, control without; a fresh optimizer, the same tokens.
    finetune_steps: int = 300
    finetune_optimizer: OptimizerConfig = OptimizerConfig()
    # Runs; run i has weights and tokens of seed `seed` + i.
    seeds: int = 3
    seed: int = 0

    # Formats of the state, by the names of `jlaqat.spec.FORMATS`.
    formats: tuple[str, ...] = ("nvfp4", "e4m3")
    # "nearest", "stochastic" or both.
    roundings: tuple[str, ...] = ("nearest",)
    # Tokens between two roundings, 1, 16 or 64: each gets a QAT run of its own …
    cadences: tuple[int, ...] = (1,)
    # … and each of these is only scored, with the arms trained for cadences[0].
    score_cadences: tuple[int, ...] = ()
    # Without error feedback, with it (by a decode policy), or both.
    error_feedback: tuple[bool, ...] = (False,)
    # Presets of `DecodePolicy` besides, each with a QAT run of its own. They and error feedback need data.prefix.
    policies: tuple[str, ...] = ()

    # Held-out data, the same for every seed and arm: eval_batches batches of eval_batch_size.
    eval_batches: int = 4
    eval_batch_size: int = 64
    # Share of the sequence, at its end, that is scored (synthetic tasks).
    score_tail: float = 1.0
    # Steps per jitted call, where they divide evenly.
    scan_steps: int = 50

    def __post_init__(self) -> None:
        for field in ("formats", "roundings", "cadences", "score_cadences", "error_feedback", "policies"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        for field in ("steps", "finetune_steps", "seeds", "eval_batches", "eval_batch_size", "scan_steps"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1.")
        for field, allowed in (
            ("formats", tuple(STATE_CFG)),
            ("roundings", ("nearest", "stochastic")),
            ("cadences", (1, 16, CHUNK_SIZE)),
            ("score_cadences", (1, 16, CHUNK_SIZE)),
            ("error_feedback", (False, True)),
            ("policies", tuple(PRESETS)),
        ):
            given = getattr(self, field)
            if (
                (not given and field not in ("score_cadences", "policies"))
                or len(set(given)) != len(given)
                or not set(given) <= set(allowed)
            ):
                raise ValueError(
                    f"{field}={list(given)} must name one or more of {', '.join(map(repr, allowed))}, once."
                )
        if not 0.0 < self.score_tail <= 1.0:
            raise ValueError(f"score_tail={self.score_tail} is out of range; give a share above 0, at most 1.")
        if self.score_tail != 1.0 and self.data.task in FILE_TASKS:
            raise ValueError(
                f"score_tail={self.score_tail} applies to synthetic tasks; set it to 1 for {self.data.task!r}."
            )
        if (self.policies or True in self.error_feedback) and self.data.prefix is None:
            raise ValueError(
                "policies and error_feedback decode token by token; set data.prefix, the tokens before decoding starts "
                "(0 decodes every token)."
            )
        for setting in self.settings:
            plan(setting.quant_cfg(), {"mixer.gdn_state_quantizer": "state"})  # raises where fields do not go together
        if (self.model is None) == (self.head is None):
            given = "neither is" if self.model is None else "both are"
            raise ValueError(
                f"model and head: {given} given; give one, a decoder (model) or a single bare head (head)."
            )
        if self.model is not None and not {"gdn", "kda"} & set(self.model.layer_kinds):
            raise ValueError(
                f"model.pattern={self.model.pattern} has no gdn or kda layer, so no state to round; add one."
            )
        check_model_sizes(
            self.data,
            vocab_size=getattr(self.architecture, "vocab_size", None),
            input_size=self.architecture.input_size,
            output_size=self.architecture.output_size,
        )
        make_schedule(self.optimizer, self.steps)
        make_schedule(self.finetune_optimizer, self.finetune_steps)

    @property
    def architecture(self) -> ModelConfig | HeadConfig:
        """The one of `model` and `head` that is given."""
        given = self.model if self.head is None else self.head
        assert given is not None  # __post_init__ refused the rest
        return given

    @property
    def settings(self) -> list[Setting]:
        """Every setting, in the order of the table."""
        cadences = dict.fromkeys((*self.cadences, *self.score_cadences))  # one that is trained for is not scored twice
        settings = []
        for f, r, c, feedback in itertools.product(self.formats, self.roundings, cadences, self.error_feedback):
            trained = c if c in self.cadences else self.cadences[0]
            settings.append(Setting(format=f, rounding=r, cadence=c, trained_cadence=trained, error_feedback=feedback))
        for name in self.policies:
            policy, every = PRESETS[name].policy, PRESETS[name].policy.window or 1
            assert policy.state is not None  # every preset has a format
            spec = policy.state
            settings.append(
                Setting(format=spec.format, rounding=spec.rounding, cadence=every, trained_cadence=every, policy=name)
            )
        return settings

    @property
    def eval_data(self) -> DataConfig:
        return dataclasses.replace(self.data, split="eval", batch_size=self.eval_batch_size, tail=self.score_tail)

    @property
    def score_name(self) -> str:
        """ "mse" and "loss" (lower is better) or "accuracy" (higher is better)."""
        if loss_kind(self.data) == "squared_error":
            return "mse"
        return "loss" if self.data.task in FILE_TASKS else "accuracy"

    def seed_data(self, index: int) -> DataConfig:
        """Training data of run `index`."""
        return dataclasses.replace(self.data, seed=self.data.seed + self.seed + index)

    def build(self, seed: int, quant_cfg: Sequence[Any] = ()) -> DecoderLM | DeltaHead:
        """The model with the weights of `seed`, quantizers set by `quant_cfg`."""
        config, rngs = self.architecture, nnx.Rngs(seed)
        model = DeltaHead(config, rngs=rngs) if isinstance(config, HeadConfig) else DecoderLM(config, rngs=rngs)
        return quantize(model, quant_cfg)

    def checkpoint_config(self, index: int, setting: Setting) -> HeadRun | TrainConfig:
        """What is saved with the QAT model of run `index`, for `jlaqat eval`."""
        evaluation = EvalConfig(batches=self.eval_batches, data=self.eval_data)
        config = self.architecture
        if isinstance(config, HeadConfig):
            return HeadRun(head=config, data=self.seed_data(index), evaluation=evaluation)
        return TrainConfig(
            model=config,
            data=self.seed_data(index),
            optimizer=self.finetune_optimizer,
            quant=setting.quant_cfg(),
            steps=self.finetune_steps,
            seed=self.seed + index,
            evaluation=evaluation,
        )
