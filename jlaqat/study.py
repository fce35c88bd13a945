"""Does training with rounding pay? Four arms on the same tokens, over seeds, formats and cadences; see docs/study.md.

    record = run_study(load_config(StudyConfig, "study/demo"), "runs/demo")

| arm     | weights                                              | scored with            |
|---------|------------------------------------------------------|------------------------|
| float32 | trained in float32                                   | no rounding            |
| ptq     | the same                                             | the setting's rounding |
| qat     | the same, then trained on with the rounding in place | the setting's rounding |
| control | the same, then trained on in float32, equal updates  | the setting's rounding |

The control separates what training with rounding adds from what more training adds. A seed has its weights and its
tokens; its arms share them (the record's hashes say so).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import platform
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import yaml
from flax import nnx

from jlaqat.checkpoint import Checkpointer
from jlaqat.data import loss_kind, make_dataset, provenance, source_hash, token_hash
from jlaqat.optim import make_optimizer
from jlaqat.recipes import to_dict
from jlaqat.study_arms import (
    ArmRecord,
    Score,
    Scorer,
    Values,
    stack_values,
    start_state,
    train_arm,
    unstack,
)
from jlaqat.study_config import ARMS as ARMS
from jlaqat.study_config import Setting as Setting
from jlaqat.study_config import StudyConfig as StudyConfig
from jlaqat.study_report import draw_plot
from jlaqat.train_step import TrainState, split_model

logger = logging.getLogger("jlaqat")

RECORD_VERSION = 1
Say = Callable[[str], None]


def run_study(config: StudyConfig, directory: str | Path, *, say: Say | None = None) -> dict[str, Any]:
    """Trains and scores every arm; writes study.json, study.png and checkpoints/ under `directory`; returns the record.

    The QAT models are saved with their quantizers, restored into models of other seeds and scored again; the record
    says whether the scores are the same to the last bit. `say` gets a line of progress now and then.

    An earlier study in `directory` is replaced. Raises ValueError if something else is there, FloatingPointError if a
    run does not stay finite.
    """
    directory = Path(directory)
    prepare_directory(directory, config)
    study = _Study(config, directory, say or (lambda line: logger.info("%s", line)))
    record = study.run()
    save_record(record, directory)
    return record


def save_record(record: dict[str, Any], directory: Path) -> None:
    """Writes study.json and study.png into `directory`, which `prepare_directory` made."""
    _write(directory / "study.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    draw_plot(record, directory / "study.png")


def load_record(path: str | Path) -> dict[str, Any]:
    """The record of a study from its directory or its study.json. Raises FileNotFoundError, ValueError."""
    path = Path(path)
    path = path / "study.json" if path.is_dir() else path
    record = json.loads(path.read_text(encoding="utf-8"))
    if record.get("record_version") != RECORD_VERSION:
        raise ValueError(
            f"{path} has record_version {record.get('record_version')}; this jlaqat reads {RECORD_VERSION}."
        )
    return record


class _Study:
    """One call of `run_study`: the models of every seed, what was trained, and the scores so far."""

    def __init__(self, config: StudyConfig, directory: Path, say: Say) -> None:
        self.config, self.directory, self.say = config, directory, say
        self.began = time.perf_counter()
        self.seeds = [config.seed + i for i in range(config.seeds)]
        self.loss = loss_kind(config.data)
        self.eval_batches = list(itertools.islice(iter(make_dataset(config.eval_data)), config.eval_batches))
        self.training: list[dict[str, Any]] = []
        self.scores: list[dict[str, Any]] = []
        self.seconds_scoring = 0.0

    def run(self) -> dict[str, Any]:
        config = self.config
        plain = [config.build(seed) for seed in self.seeds]
        base = _values(self._train("float32", None, plain, stack_values(plain)))
        control = _values(self._train("control", None, plain, base))
        scorer = self._scorer(plain[0])
        self._score("float32", None, scorer(base))
        self._score("control_float32", None, scorer(control))
        restores = []
        trained: dict[Setting, Values] = {}
        for setting in config.settings:
            models = [config.build(seed, setting.quant_cfg()) for seed in self.seeds]
            scorer = self._scorer(models[0])
            key = setting.trained_as
            if setting.trained:
                state = self._train("qat", setting, models, base)
                trained[key] = _values(state)
            fresh = stack_values(models)
            self._score("ptq", setting, scorer((base[0], *fresh[1:])))
            qat = self._score(
                "qat", setting, scorer((trained[key][0], *fresh[1:]) if not setting.trained else trained[key])
            )
            self._score("control", setting, scorer((control[0], *fresh[1:])))
            if setting.trained:
                restores.append(self._save_and_restore(setting, models, state, qat, scorer))
        return self._record(restores)

    # -------------------------------------------------------------- training and scoring

    def _train(self, arm: str, setting: Setting | None, models: Sequence[nnx.Module], values: Values) -> TrainState:
        """Trains one arm of every seed: "float32" from the start, the others on from there."""
        config, first = self.config, arm == "float32"
        steps = config.steps if first else config.finetune_steps
        optimizer = make_optimizer(config.optimizer if first else config.finetune_optimizer, steps)
        title = {"float32": "float32 training", "control": "control, float32 fine-tune"}.get(arm, "QAT")
        label = f"{title}, {setting.title}" if setting else title
        self.say(f"{label}: {steps} updates × {len(self.seeds)} seeds …")
        state, record = train_arm(
            start_state(values, optimizer, models),
            models[0],
            optimizer,
            [config.seed_data(i) for i in range(config.seeds)],
            loss=self.loss,
            skip=0 if first else config.steps,
            steps=steps,
            scan_steps=config.scan_steps,
            label=label,
        )
        self.say(
            f"  loss {record.losses[:, 0].mean():.3g} → {record.losses[:, -20:].mean():.3g} in "
            f"{record.seconds:.0f} s and {record.compile_seconds:.0f} s of compilation"
        )
        self.training.append(_training_entry(arm, setting, record))
        return state

    def _scorer(self, model: nnx.Module) -> Scorer:
        return Scorer(model, self.eval_batches, loss=self.loss, score=self.config.score_name)

    def _score(self, arm: str, setting: Setting | None, score: Score) -> Score:
        self.seconds_scoring += score.seconds
        self.scores.append(
            {
                "setting": setting.name if setting else None,
                "arm": arm,
                "scores": score.values,
                "mean": statistics.fmean(score.values),
                "std": statistics.stdev(score.values) if len(score.values) > 1 else None,
                "curve": [float(f"{x:.4g}") for x in score.curve.mean(axis=0)],
            }
        )
        return score

    # -------------------------------------------------------------- checkpoints

    def _save_and_restore(
        self, setting: Setting, models: Sequence[nnx.Module], state: TrainState, score: Score, scorer: Scorer
    ) -> dict[str, Any]:
        """Saves the QAT model of every seed, reads each into a model of another seed, and scores those."""
        restored = []
        folder = self.directory / "checkpoints" / setting.name
        for i, (seed, model) in enumerate(zip(self.seeds, models)):
            mine = unstack(state, i)
            nnx.update(model, mine.params, mine.quantizers, mine.other)
            with Checkpointer(folder / f"seed{seed}") as checkpointer:
                checkpointer.save(
                    self.config.finetune_steps,
                    model,
                    opt_state=mine.opt_state,
                    data_state={"next_index": self.config.steps + self.config.finetune_steps},
                    config=to_dict(self.config.checkpoint_config(i, setting)),
                    metrics={self.config.score_name: score.values[i]},
                )
                other = self.config.build(seed + 1000)
                checkpointer.restore(other, quantizers="checkpoint")
            if split_model(other)[0] != split_model(model)[0]:
                raise AssertionError(
                    f"{folder}/seed{seed}: the restored model's structure differs from the saved one's."
                )
            restored.append(other)
        again = scorer(stack_values(restored)).values
        return {
            "setting": setting.name,
            "checkpoints": [f"checkpoints/{setting.name}/seed{seed}" for seed in self.seeds],
            "scores": again,
            "equal": again == score.values,
        }

    # -------------------------------------------------------------- the record

    def _record(self, restores: list[dict[str, Any]]) -> dict[str, Any]:
        config = self.config
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
        return {
            "record_version": RECORD_VERSION,
            "score": {"name": config.score_name, "lower_is_better": config.score_name != "accuracy"},
            "settings": [_setting_entry(s) for s in config.settings],
            "seeds": self.seeds,
            "scores": self.scores,
            "recovery": [recovery(self.scores, s) for s in config.settings],
            "training": self.training,
            "restore": restores,
            "data": {
                **provenance(config.data),
                "source_sha256": source_hash(config.data),
                "eval_token_sha256": token_hash(self.eval_batches),
                "eval_tokens": int(sum((b["weights"] > 0).sum() for b in self.eval_batches)),
            },
            "model": {"parameters": _parameters(config)},
            "config": to_dict(config),
            "code_sha256": code_hash(),
            "versions": versions(),
            "machine": machine(),
            "seconds": time.perf_counter() - self.began,
            "seconds_scoring": self.seconds_scoring,
            "peak_memory_bytes": peak * (1 if sys.platform == "darwin" else 1024),
        }


def _values(state: TrainState) -> Values:
    return (state.params, state.quantizers, state.other)


def _setting_entry(setting: Setting) -> dict[str, Any]:
    return {"name": setting.name, "title": setting.title, **to_dict(setting)}


def _training_entry(arm: str, setting: Setting | None, record: ArmRecord) -> dict[str, Any]:
    every = max(1, record.updates // 50)
    return {
        "arm": arm,
        "setting": setting.name if setting else None,
        "updates": record.updates,
        "tokens": record.tokens,
        "token_sha256": record.token_sha256,
        "loss": [float(f"{x:.4g}") for x in record.losses.mean(axis=0)[::every]],
        "loss_every": every,
        "seconds": record.seconds,
        "compile_seconds": record.compile_seconds,
        "step_memory_bytes": record.step_bytes,
    }


def recovery(scores: list[dict[str, Any]], setting: Setting) -> dict[str, Any]:
    """Share of the loss by rounding that each arm wins back, from the means: (ptq − arm)/(ptq − float32).

    1: as good as float32 without rounding; 0: nothing; below 0: worse than no further training. None where rounding
    costs less than the seeds' spread: a share would be a ratio of noises, and float32 training alone moves more.
    """
    by_arm = {s["arm"]: s for s in scores if s["setting"] in (None, setting.name)}
    ptq, base = by_arm["ptq"], by_arm["float32"]
    cost = ptq["mean"] - base["mean"]
    # The same weights make both, so the cost's own spread is that of the differences.
    differences = [a - b for a, b in zip(ptq["scores"], base["scores"])]
    several = len(differences) > 1
    spread = statistics.stdev(differences) if several else 0.0
    clear = cost != 0 and abs(cost) > max(2 * spread, statistics.stdev(base["scores"]) if several else 0.0)
    return {
        "setting": setting.name,
        "cost": cost,
        "cost_std": spread,
        "qat": (ptq["mean"] - by_arm["qat"]["mean"]) / cost if clear else None,
        "control": (ptq["mean"] - by_arm["control"]["mean"]) / cost if clear else None,
    }


def _parameters(config: StudyConfig) -> int:
    shapes = nnx.eval_shape(lambda: config.build(0))
    return sum(x.size for x in jax.tree.leaves(nnx.state(shapes, nnx.Param)))


# ------------------------------------------------------------------ provenance


def code_hash() -> str:
    """SHA-256 over the package's own Python files, names and contents."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.glob("*.py")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that take part."""
    found = {"python": platform.python_version()}
    for name in ("jlaqat", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a bare checkout
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """Where this ran: system, processor, cores that this process may use, JAX's devices."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = jax.devices()
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": cores,
        "backend": devices[0].platform,
        "devices": [d.device_kind for d in devices],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


# ------------------------------------------------------------------ files


def prepare_directory(directory: Path, config: StudyConfig) -> None:
    """Makes `directory` this study's own: what an earlier study left is removed, anything else refused (ValueError)."""
    marker = directory / "study.yaml"
    if directory.exists():
        if not directory.is_dir() or (any(directory.iterdir()) and not marker.exists()):
            raise ValueError(
                f"{directory} holds something that is no study (no study.yaml); choose an empty or a new directory."
            )
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)
        for name in ("study.json", "study.png"):
            (directory / name).unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    _write(marker, yaml.safe_dump(to_dict(config), sort_keys=False))


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
