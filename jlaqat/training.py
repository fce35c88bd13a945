"""The training loop: `train(config, directory=...)` runs a `TrainConfig` to its end, or goes on where a run stopped.

Under `directory`: `checkpoints/<step>/`, `metrics.jsonl`, `tensorboard/`, `config.yaml`, and `teacher/` if distilling.
A run killed at any moment and started again gives the same bits as one that was never killed: every update is a
function of the last checkpoint (weights, optimizer, quantizers, place in the data, RNG) and the config. SIGTERM saves
before it stops. The step itself, for loops of your own, is `jlaqat.train_step`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml
from flax import nnx

from jlaqat.checkpoint import Checkpointer
from jlaqat.data import make_dataset
from jlaqat.diagnosis import NonFiniteError as NonFiniteError
from jlaqat.diagnosis import explain_non_finite
from jlaqat.evaluation import eval_batches, evaluate_batches, make_eval_step, make_quantizer_report
from jlaqat.export import export_stripped, load_weights
from jlaqat.model import DecoderLM
from jlaqat.optim import make_optimizer, make_schedule
from jlaqat.preemption import Preempted as Preempted
from jlaqat.preemption import StopSignal
from jlaqat.quantizers import calibrate, find_quantizers, quantize, strip_quantizers
from jlaqat.recipes import load_recipe, to_dict
from jlaqat.sharding import make_mesh, put_batch, state_shardings
from jlaqat.train_config import TrainConfig as TrainConfig
from jlaqat.train_log import TrainLog
from jlaqat.train_step import (
    Batch,
    Metrics,
    TrainState,
    create_train_state,
    forward,
    make_train_step,
    split_model,
    update_model,
)

logger = logging.getLogger("jlaqat")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to.

    model: the trained model, quantizers included. step: updates applied. metrics: of the last step. evaluation: of the
    last evaluation, {} without one. checkpoint: directory of the last step.
    """

    model: nnx.Module
    step: int
    metrics: Mapping[str, float]
    evaluation: Mapping[str, float]
    checkpoint: Path


def train(config: TrainConfig, *, directory: str | Path, resume: bool = True) -> TrainResult:
    """Trains by `config` and leaves checkpoints and logs under `directory`.

    resume: go on from the latest checkpoint there, if there is one; False refuses a directory that has any.
    In a multi-process run (`jax.distributed.initialize`) every process calls this with the same arguments, on a file
    system that they share.

    Raises NonFiniteError when a loss or gradient is not finite (the last good checkpoint stays), Preempted when SIGTERM
    came: the step at hand was finished and saved, and the same call goes on from there (`StopSignal` says when the
    signal is heard). CheckpointMismatchError when the checkpoint was made by another model, ValueError for a config
    that cannot work.
    """
    directory = Path(directory).absolute()
    keep_best = config.checkpoint.keep_best
    checkpointer = Checkpointer(
        directory / "checkpoints",
        max_to_keep=config.checkpoint.max_to_keep,
        keep_best=keep_best,
        best_metric="eval_loss" if keep_best else None,
        asynchronous=config.checkpoint.asynchronous,
    )
    with StopSignal() as stop, checkpointer:
        latest = checkpointer.latest_step()
        if latest is not None and not resume:
            raise ValueError(
                f"{directory} has checkpoints up to step {latest} and resume=False; resume, or change directory."
            )
        if latest is not None and latest > config.steps:
            raise ValueError(
                f"{directory} is at step {latest} already and steps={config.steps}; raise steps, or change directory."
            )
        return _Run(config, directory, checkpointer, stop).run()


def build_model(config: TrainConfig) -> DecoderLM:
    """The model of a run as it starts: random weights from the seed, quantizers set by the recipe."""
    model = DecoderLM(config.model, rngs=nnx.Rngs(config.seed))
    return quantize(model, load_recipe(config.quant)) if config.quant else model


class _Run:
    """One call of `train`: the model and its state, where they live, and what is due when."""

    def __init__(self, config: TrainConfig, directory: Path, checkpointer: Checkpointer, stop: StopSignal) -> None:
        self.config, self.directory, self.checkpointer, self.stop = config, directory, checkpointer, stop
        self.mesh = make_mesh(config.sharding)
        self.optimizer = make_optimizer(config.optimizer, config.steps)
        self.schedule = make_schedule(config.optimizer, config.steps)
        self.batches = iter(self._dataset())
        self.metrics: dict[str, float] = {}
        self.evaluation: dict[str, float] = {}

    def _dataset(self) -> Any:
        return make_dataset(self.config.data, process_index=jax.process_index(), process_count=jax.process_count())

    # -------------------------------------------------------------- starting

    def start(self) -> TrainState:
        """The state to go on from, the latest checkpoint's or a fresh one; `self.model` gets its structure."""
        self.model, shapes = self._initial_model()
        step = self.checkpointer.latest_step()
        if step is None:
            if self.config.init_from is not None:
                load_weights(self.model, self.config.init_from)
            self._calibrate()
            params = split_model(self.model)[1]
            shardings = jax.tree.map(lambda x: x.sharding, shapes.opt_state)
            opt_state = jax.jit(self.optimizer.init, out_shardings=shardings)(params)
        else:
            restored = self.checkpointer.restore(self.model, opt_state=shapes.opt_state)
            logger.info("going on from step %d of %s; %s", step, self.directory, restored.quantizers)
            self._say_changes(restored.config or {})
            self._calibrate()  # a run without rounding that goes on with static scales
            self.batches.set_state(restored.data_state)
            opt_state = restored.opt_state
            self.metrics = {k: v for k, v in restored.metrics.items() if not k.startswith("eval_")}
            self.evaluation = {k[5:]: v for k, v in restored.metrics.items() if k.startswith("eval_")}
        _, params, quantizers, other = split_model(self.model)
        state = TrainState(jnp.asarray(step or 0, jnp.int32), params, opt_state, quantizers, other, jnp.ones((), bool))
        self.shardings = state_shardings(state, self.config.sharding, self.mesh)
        state = jax.device_put(state, self.shardings)  # scales and counters may come from one device
        # Copies: the step donates its state, and the teacher is made from the model.
        return jax.jit(lambda s: jax.tree.map(jnp.copy, s), out_shardings=self.shardings)(state)

    def _initial_model(self) -> tuple[DecoderLM, TrainState]:
        """The model at step 0, each array made where it will live, and the shapes and shardings of its train state."""

        def init() -> TrainState:
            return create_train_state(build_model(self.config), self.optimizer)

        shapes = jax.eval_shape(init)
        shardings = state_shardings(shapes, self.config.sharding, self.mesh)
        wanted = (shardings.params, shardings.quantizers, shardings.other)
        values = jax.jit(lambda: split_model(build_model(self.config))[1:], out_shardings=wanted)()
        graphdef = split_model(nnx.eval_shape(lambda: build_model(self.config)))[0]
        placed = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes.opt_state, shardings.opt_state
        )
        return nnx.merge(graphdef, *values), shapes._replace(opt_state=placed)

    def _calibrate(self) -> None:
        """Finds static scales that no checkpoint gave, on the beginning of the training data."""
        missing = [n for n, q in find_quantizers(self.model).items() if q.enabled and q.static and q.amax is None]
        if missing:
            settings = self.config.calibration
            data = eval_batches(self.config.data, settings.batches, self.mesh)
            calibrate(self.model, forward, data, method=settings.method)
            logger.info("calibrated %d static quantizers on %d batches.", len(missing), settings.batches)

    def _teacher(self) -> DecoderLM | None:
        """The unquantized teacher of QAD. The weights of step 0 are kept on disk, where a resumed run finds them."""
        distillation = self.config.distillation
        if distillation is None:
            return None
        source: str | Path = distillation.teacher
        if source == "initial":
            source = self.directory / "teacher"
            if not source.exists():
                if self.checkpointer.latest_step() is not None:
                    raise FileNotFoundError(
                        f"{source} is gone, and with it the weights at step 0 that this run distils from."
                    )
                export_stripped(self.model, source)
        teacher = strip_quantizers(nnx.clone(self.model))
        load_weights(teacher, source)
        return teacher

    def _say_changes(self, saved: Mapping[str, Any]) -> None:
        before, now = _flat(saved), _flat(to_dict(self.config))
        changed = [f"{k}: {before.get(k)!r} → {now.get(k)!r}" for k in {**before, **now} if before.get(k) != now.get(k)]
        if changed:
            logger.warning("the config differs from the checkpoint's: %s", "; ".join(changed))

    # -------------------------------------------------------------- running

    def run(self) -> TrainResult:
        config = self.config
        state = self.start()
        first = int(state.step)
        if jax.process_index() == 0:
            _write_atomically(self.directory / "config.yaml", yaml.safe_dump(to_dict(config), sort_keys=False))
        teacher = self._teacher()
        update_model(self.model, state)  # lets go of the arrays that the model was made with
        step_fn = make_train_step(
            self.model,
            self.optimizer,
            loss=config.loss_name,
            accumulation=config.accumulation,
            teacher=teacher,
            distillation=config.distillation,
            state_shardings=self.shardings,
        )
        self.eval_step = make_eval_step(self.model, loss=config.loss_name)
        self.report = make_quantizer_report(self.model) if config.logging.quantizers_every else None
        logs = TrainLog(
            self.directory,
            total=config.steps,
            start=first,
            jsonl=config.logging.jsonl,
            tensorboard=config.logging.tensorboard,
            progress=config.logging.progress,
            active=jax.process_index() == 0,
        )
        with logs as self.log:
            state = self._loop(step_fn, state, first)
        update_model(self.model, state)
        path = self.checkpointer.step_directory(config.steps)
        return TrainResult(
            model=self.model, step=config.steps, metrics=self.metrics, evaluation=self.evaluation, checkpoint=path
        )

    def _loop(self, step_fn: Any, state: TrainState, first: int) -> TrainState:
        config = self.config
        speed = _Speed()
        unchecked: tuple[int, Batch, Metrics] | None = None
        if self.stop.asks(first):
            raise Preempted(first, self.checkpointer.step_directory(first) if first else None)
        for step in range(first + 1, config.steps + 1):
            batch = put_batch(next(self.batches), self.mesh, config.accumulation)
            state, metrics = step_fn(state, batch)
            speed.add(batch)
            # The step before is looked at only now, while this one runs: a bad one stopped all updates by itself.
            self._check(unchecked, state)
            unchecked = (step, batch, metrics)
            last = step == config.steps
            stopping = not last and self.stop.asks(step)
            if not (last or stopping or any(step % every == 0 for every in self._intervals())):
                continue
            self._check(unchecked, state)
            unchecked = None
            self._record(step, state, batch, metrics, speed, last=last)
            self.log.advance(step, f"loss {self.metrics['loss']:.4f}")
            if last or stopping or _due(step, config.checkpoint.every):
                self._save(step, state)
            if stopping:
                raise Preempted(step, self.checkpointer.step_directory(step))
        return state

    def _intervals(self) -> list[int]:
        config = self.config
        every = (
            config.logging.every,
            config.logging.quantizers_every,
            config.evaluation.every,
            config.checkpoint.every,
        )
        return [n for n in every if n]

    def _check(self, unchecked: tuple[int, Batch, Metrics] | None, state: TrainState) -> None:
        """Raises NonFiniteError if the step came out not finite; `state` is still the last good one then."""
        if unchecked is None or bool(unchecked[2]["finite"]):
            return
        step, batch, metrics = unchecked
        self.checkpointer.wait()
        saved = self.checkpointer.latest_step()
        error = explain_non_finite(update_model(self.model, state), batch, metrics, step=step, checkpoint=saved)
        self.log.write("non_finite", step, {"message": str(error)})
        raise error

    def _record(
        self, step: int, state: TrainState, batch: Batch, metrics: Metrics, speed: _Speed, *, last: bool
    ) -> None:
        """Logs whatever is due at this step."""
        config = self.config
        values = (state.params, state.quantizers, state.other)
        scalars = {name: float(value) for name, value in metrics.items() if name not in ("finite", "grad_finite")}
        self.metrics = {**scalars, "learning_rate": float(self.schedule(step - 1))}
        if last or _due(step, config.logging.every):
            self.log.write("train", step, {**self.metrics, **speed.measure()})
        if self.report is not None and _due(step, config.logging.quantizers_every):
            report = jax.device_get(self.report(values, batch))
            self.log.write("quantizers", step, {n: {k: float(v) for k, v in m.items()} for n, m in report.items()})
        if config.evaluation.batches and (last or _due(step, config.evaluation.every)):
            batches = eval_batches(config.eval_data, config.evaluation.batches, self.mesh)
            self.evaluation = evaluate_batches(self.eval_step, values, batches)
            self.evaluated_at = step
            self.log.write("eval", step, self.evaluation)
            speed.restart()

    def _save(self, step: int, state: TrainState) -> None:
        metrics = {"loss": self.metrics["loss"]}
        if getattr(self, "evaluated_at", None) == step:
            metrics |= {f"eval_{name}": value for name, value in self.evaluation.items()}
        self.checkpointer.save(
            step,
            update_model(self.model, state),
            opt_state=state.opt_state,
            data_state=self.batches.get_state(),
            config=to_dict(self.config),
            metrics=metrics,
        )


class _Speed:
    """Tokens a second since the last measurement; the first step, which compiles, is left out."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._tokens = 0

    def add(self, batch: Batch) -> None:
        if self._started is None:
            self.restart()
        else:
            self._tokens += batch["inputs"].shape[0] * batch["inputs"].shape[1]

    def restart(self) -> None:
        self._started, self._tokens = time.monotonic(), 0

    def measure(self) -> dict[str, float]:
        if not self._tokens or self._started is None:
            return {}
        rate = self._tokens / max(time.monotonic() - self._started, 1e-9)
        self.restart()
        return {"tokens_per_second": rate}


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, Mapping):
        return {k: v for key, value in tree.items() for k, v in _flat(value, f"{prefix}{key}.").items()}
    return {prefix[:-1]: tree}


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
