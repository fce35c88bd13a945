"""The command line: `jlaqat train | eval | study | study-merge | summary | parity`. Commands load a config and run it.

A user's mistake (a wrong key, a missing file, a shape that cannot work) ends with one line on standard error and exit
status 2; a run that fails on its way (a loss that is not finite) with status 1; a training run that SIGTERM stopped
with 75, "try again later"; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import tyro

# Modules that need JAX are imported inside the commands: `--help` and a mistyped option answer at once.

Overrides = tyro.conf.Positional[tuple[str, ...]]


@dataclasses.dataclass(kw_only=True)
class Train:
    """Train a model by a config; run the same command again to go on where it stopped.

    Examples:
    $ jlaqat train --config train/stdlib_hybrid_fp8 --directory runs/stdlib
    $ jlaqat train --config train/stdlib_hybrid_fp8 --directory runs/int8 quant=state_int8 steps=500
    $ jlaqat train --config my_run.yaml --directory runs/mine optimizer.learning_rate=1e-3 model.num_layers=8

    Under the directory: checkpoints/, metrics.jsonl, tensorboard/, config.yaml. docs/training.md lists the keys.

    SIGTERM (a scheduler that wants the machine back) finishes the step, saves it and ends with exit status 75; a second
    one stops at once. Other exit statuses: 0 done, 1 a loss that is not finite, 2 a mistake in config or arguments.
    """

    config: str
    """A packaged config's name (such as train/stdlib_hybrid_fp8) or the path of a YAML file."""
    directory: Path
    """Where the run lives. One that has checkpoints goes on from the latest."""
    resume: bool = True
    """With --no-resume, a directory that has checkpoints is refused."""
    overrides: Overrides = ()
    """Changes to the config: key=value with dotted keys, such as data.batch_size=8 quant=state_int8."""

    def run(self) -> None:
        from jlaqat.recipes import load_config
        from jlaqat.training import Preempted, TrainConfig, train

        config = load_config(TrainConfig, _packaged(self.config, "train"), self.overrides)
        try:
            result = train(config, directory=self.directory, resume=self.resume)
        except Preempted as stopped:
            raise RunStopped(str(stopped)) from None
        scores = ", ".join(f"{name} {value:.4g}" for name, value in result.evaluation.items() if name != "weight")
        print(f"step {result.step}: train loss {result.metrics['loss']:.4f}; held-out {scores or 'not evaluated'}")
        print(f"checkpoint: {result.checkpoint}")


@dataclasses.dataclass(kw_only=True)
class Eval:
    """Score a checkpoint on its held-out data, with its quantizers or with others.

    Examples:
    $ jlaqat eval --checkpoint runs/stdlib
    $ jlaqat eval --checkpoint runs/stdlib --quant none
    $ jlaqat eval --checkpoint runs/stdlib --quant state_int8 data.seq_len=512
    $ jlaqat eval --checkpoint runs/demo/checkpoints/nvfp4-1/seed0

    Prints the scores as one line of JSON. Nothing is written.
    """

    checkpoint: Path
    """A run's directory, a directory of checkpoints, or that of one step (as `jlaqat train` prints it)."""
    step: int | None = None
    """Which step; the latest unless given."""
    quant: str = "saved"
    """"saved": the checkpoint's quantizers; "none": no rounding; otherwise a recipe's name or path."""
    batches: int | None = None
    """Batches to score; as many as the run's own evaluations unless given."""
    overrides: Overrides = ()
    """Changes to the saved config: key=value. Keys under `data` change the held-out data."""

    def run(self) -> None:
        from flax import nnx

        from jlaqat.checkpoint import Checkpointer, find_checkpoints
        from jlaqat.evaluation import evaluate
        from jlaqat.model import DecoderLM
        from jlaqat.quantizers import quantize
        from jlaqat.recipes import ConfigError, load_config, load_recipe
        from jlaqat.study_config import HeadRun
        from jlaqat.study_head import DeltaHead
        from jlaqat.training import TrainConfig

        folder, step = find_checkpoints(self.checkpoint, self.step)
        with Checkpointer(folder, read_only=True) as checkpointer:
            saved = checkpointer.config(step)
            if saved is None:
                raise ConfigError(f"{checkpointer.directory} holds no config; save with Checkpointer.save(config=...).")
            config: TrainConfig | HeadRun
            if "head" in saved:  # a study's bare head
                config = load_config(HeadRun, _eval_tree(saved), self.overrides)
                model: nnx.Module = DeltaHead(config.head, rngs=nnx.Rngs(0))
            else:
                config = load_config(TrainConfig, _eval_tree(saved), self.overrides)
                model = DecoderLM(config.model, rngs=nnx.Rngs(0))
            if self.quant not in ("saved", "none"):
                quantize(model, load_recipe(self.quant))
            mode = "checkpoint" if self.quant == "saved" else "model"
            restored = checkpointer.restore(model, step=step, quantizers=mode)
        batches = self.batches if self.batches is not None else config.evaluation.batches or 8
        scores = evaluate(model, config.eval_data, batches=batches, loss=config.loss_name)
        print(json.dumps({"step": restored.step, "quant": self.quant, "batches": batches, **scores}))


@dataclasses.dataclass(kw_only=True)
class Study:
    """Four arms on the same tokens: float32, rounded after training (PTQ), trained with rounding (QAT), and a control.

    Examples:
    $ jlaqat study --config study/demo --directory runs/demo
    $ jlaqat study --config study/demo --directory runs/int8 formats=[int8,int4] seeds=5
    $ jlaqat study --config study/recall --directory runs/recall cadences=[1,16]

    Prints a table and writes study.json, study.png and the QAT models' checkpoints. docs/study.md says how to read it.
    """

    config: str
    """A packaged config's name (study/demo, or demo for short) or the path of a YAML file."""
    directory: Path
    """Where the study lives; an earlier study there is replaced."""
    overrides: Overrides = ()
    """Changes to the config: key=value with dotted keys, such as seeds=5 data.seq_len=256."""

    def run(self) -> None:
        from jlaqat.recipes import load_config
        from jlaqat.study import StudyConfig, run_study
        from jlaqat.study_report import print_report

        config = load_config(StudyConfig, _packaged(self.config, "study"), self.overrides)
        record = run_study(config, self.directory, say=lambda line: print(line, flush=True))
        print_report(record, self.directory)
        unequal = [r["setting"] for r in record["restore"] if not r["equal"]]
        if unequal:
            raise RunFailed(f"restored checkpoints score differently: {', '.join(unequal)}.")


@dataclasses.dataclass(kw_only=True)
class StudyMerge:
    """One study from several that ran its settings in parts: by format, rounding, cadence, error feedback or policy.

    Examples:
    $ jlaqat study-merge runs/int8 runs/nvfp4 --directory runs/both
    $ jlaqat study-merge runs/parts/e4m3 runs/parts/int8 runs/parts/nvfp4 --directory runs/recall
    $ jlaqat study-merge runs/token/study.json runs/replay/study.json --directory runs/cadences

    Each part is a `jlaqat study` of the same config, such as `--directory runs/int8 formats=[int8]`. Refuses
    parts that differ in anything else: config, code, versions, seeds, tokens, or one bit of the scores of their float32
    models. Prints the table of the whole and writes its study.json and study.png.
    """

    parts: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of studies, or their study.json."""
    directory: Path
    """Where the merged study goes; an earlier study there is replaced."""
    other_versions: bool = False
    """Take parts that ran under other versions of packages, as long as their float32 models score the same."""

    def run(self) -> None:
        from jlaqat.study_merge import merge_studies
        from jlaqat.study_report import print_report

        print_report(merge_studies(self.parts, self.directory, other_versions=self.other_versions))


@dataclasses.dataclass(kw_only=True)
class Summary:
    """What a config would build, without building it: sizes, and every quantizer with its setting and its source.

    Examples:
    $ jlaqat summary --config train/stdlib_hybrid_fp8
    $ jlaqat summary --config train/stdlib_hybrid_fp8 quant=state_w_fp8 model.num_layers=12
    $ jlaqat summary --config study/demo formats=[int8]
    """

    config: str
    """A packaged config's name or the path of a YAML file, of a training run or of a study."""
    overrides: Overrides = ()
    """Changes to the config: key=value with dotted keys."""

    def run(self) -> None:
        from flax import nnx

        from jlaqat.cli_summary import describe
        from jlaqat.recipes import load_config
        from jlaqat.study_config import StudyConfig
        from jlaqat.training import TrainConfig, build_model

        name = _packaged(self.config, "train", "study")
        if _is_study(name):
            study = load_config(StudyConfig, name, self.overrides)
            for setting in study.settings:
                entries = setting.quant_cfg()
                model = nnx.eval_shape(lambda e=entries: study.build(0, e))
                describe(model, study.architecture, study.data, title=setting.title)
        else:
            config = load_config(TrainConfig, name, self.overrides)
            model = nnx.eval_shape(lambda: build_model(config))
            describe(model, config.model, config.data, title=self.config)


@dataclasses.dataclass(kw_only=True)
class Parity:
    """The same call in JAX, through the PyTorch bridge and in FLA, each held against a float64 reference.

    Examples:
    $ jlaqat parity
    $ jlaqat parity --gate kda --quant state_w_fp8 --shape 2x128x2x64
    $ jlaqat parity --lengths 0 64 5 70 --dtype float16 --json runs/parity.json
    $ jlaqat parity --shape 8x4096x16x128 --quant state_int8            # on a GPU

    All sides get the same bits, cotangents included. The table has a row for o, the final state and every gradient:
    each side's error ratio RMS(x − ref)/RMS(ref), the contract's bound, and on a GPU whether JAX and PyTorch agree bit
    for bit. Exit status 0 if JAX and PyTorch keep to the bounds and to equal bits, else 1; FLA is only shown.

    On a GPU: the Triton kernels from JAX and from PyTorch, and FLA's kernels. On a CPU: the xla backend, the kernels in
    Triton's interpreter (slow: keep to a few thousand elements) and FLA's naive references. Needs jlaqat[torch].
    """

    gate: Literal["gdn", "kda"] = "gdn"
    """"gdn": one decay a head; "kda": one a key channel."""
    shape: str = "1x128x2x32"
    """BxTxHxK or BxTxHxKxV; H as 4g8 for 8 value heads over 4 key heads."""
    lengths: tuple[int, ...] = ()
    """Lengths of packed sequences (0 is one), instead of B and T."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Of q, k and v; bfloat16 on a GPU and float32 on a CPU unless given."""
    quant: str = "none"
    """"none", or a recipe's name or path with dynamic scales that the kernels serve, such as state_w_fp8."""
    seed: int = 0
    """Of the inputs and cotangents."""
    max_beta: float = 1.0
    """Write strengths are drawn from (0, max_beta); 2 for negative eigenvalues."""
    backend: Literal["auto", "triton", "xla"] = "auto"
    """Of the JAX side."""
    fla: bool = True
    """With --no-fla, FLA is left out. It is anyway where something is rounded."""
    json: Path | None = None
    """Write the table, the settings and the versions here too."""

    def run(self) -> None:
        # Torch works on the same GPU, in other processes: JAX must leave it memory (docs/parity.md).
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        from jlaqat.parity import ParityConfig, compare
        from jlaqat.parity_report import parse_shape, print_report, write_json

        settings: dict[str, Any] = dataclasses.asdict(self)
        del settings["json"], settings["shape"]
        config = ParityConfig(**settings | parse_shape(self.shape))
        report = compare(config)
        print_report(report, f"{self.gate} {self.lengths or self.shape}, {report.dtype}, quant {self.quant}")
        if self.json is not None:
            write_json(self.json, report, config)
        if not report.passed:
            raise RunFailed("JAX or PyTorch is outside the bounds, differs in bits, or did not run; see the table.")


class RunFailed(RuntimeError):
    """A run that came to a wrong end; exit status 1."""


class RunStopped(Exception):
    """A run that was asked to stop and can go on; exit status 75."""


def _packaged(config: str, *folders: str) -> str:
    """The packaged config that a bare name means to a command: "demo" is study/demo to `jlaqat study`."""
    known = _run_configs()
    return next((f"{folder}/{config}" for folder in folders if f"{folder}/{config}" in known), config)


def _is_study(config: str) -> bool:
    """Whether a config file is a study's: it has one of the keys that training runs lack."""
    from jlaqat.recipes import read_config

    return bool({"finetune_steps", "formats", "cadences", "seeds"} & set(read_config(config)))


def _eval_tree(saved: dict[str, Any]) -> dict[str, Any]:
    """The saved config with its evaluation data as `data`, so that overrides of `data` reach what is scored."""
    held_out = (saved.get("evaluation") or {}).get("data") or {**saved["data"], "split": "eval"}
    return {**saved, "data": held_out, "evaluation": {**(saved.get("evaluation") or {}), "data": None}}


# ------------------------------------------------------------------ entry

COMMANDS: dict[str, type[Train | Eval | Study | StudyMerge | Summary | Parity]] = {
    "summary": Summary,
    "train": Train,
    "eval": Eval,
    "study": Study,
    "study-merge": StudyMerge,
    "parity": Parity,
}

HELP = """usage: jlaqat {summary,train,eval,study,study-merge,parity} ...

Quantization-aware training of Gated DeltaNet and Kimi Delta Attention models.

  jlaqat summary --config C                  what a config would build: sizes, quantizers; builds nothing
  jlaqat train   --config C --directory D    train, or go on where the run in D stopped
  jlaqat eval    --checkpoint D              score a checkpoint, with its quantizers or with others
  jlaqat study   --config C --directory D    float32, PTQ, QAT and control on the same tokens: table, plot, JSON
  jlaqat study-merge D… --directory E        one study from several that ran parts of it
  jlaqat parity                              the same call in JAX, PyTorch and FLA against float64: a table

C is a YAML file, or the name of a packaged config: {configs}.
Any key of it can be changed at the end of the line: steps=500 quant=state_int8 model.num_layers=8.
`jlaqat COMMAND --help` lists a command's options, with examples; `jlaqat --version`. Documentation: docs/.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line `arguments` (sys.argv by default); returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(HELP.replace("{configs}", ", ".join(_run_configs())), end="")
        return 0 if given else 2
    name, *rest = given
    if name == "--version":
        print(f"jlaqat {metadata.version('jlaqat')}")
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        print(f"jlaqat: error: no command {name!r}; there are {', '.join(COMMANDS)}{hint}", file=sys.stderr)
        return 2
    return _run(tyro.cli(COMMANDS[name], prog=f"jlaqat {name}", description=_description(name), args=rest))


def _description(name: str) -> str:
    """The command's docstring: left to itself, tyro shows its first paragraph, without the examples."""
    return inspect.getdoc(COMMANDS[name]) or ""


def _run_configs() -> list[str]:
    """Names of the packaged configs of runs and studies, without JAX or YAML."""
    root = Path(__file__).parent / "configs"
    names = [p.relative_to(root).with_suffix("").as_posix() for p in sorted(root.rglob("*.yaml"))]
    return [name for name in names if not name.startswith("recipes/")]


def _run(command: Train | Eval | Study | StudyMerge | Summary | Parity) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("jlaqat").setLevel(logging.INFO)
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of metadata that it does not need
    try:
        command.run()
    except KeyboardInterrupt:
        print("jlaqat: stopped; `jlaqat train` goes on from the last checkpoint.", file=sys.stderr)
        return 130
    except RunStopped as stopped:
        print(f"jlaqat: stopped: {stopped}", file=sys.stderr)
        return os.EX_TEMPFAIL
    except (RunFailed, FloatingPointError) as error:
        print(f"jlaqat: failed: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError, NotImplementedError, RuntimeError) as error:
        if not _is_ours(error):
            raise
        print(f"jlaqat: error: {error}", file=sys.stderr)
        return 2
    return 0


def _is_ours(error: Exception) -> bool:
    """Whether this package raised the error itself, to say something to the user; others' errors are bugs here."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(last).resolve().is_relative_to(Path(__file__).resolve().parent)


if __name__ == "__main__":
    sys.exit(main())
