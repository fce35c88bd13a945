"""What `jlaqat summary` prints: parameters by part, the size of a sequence's state, and the quantizer table."""

from __future__ import annotations

import math

import jax
from flax import nnx
from rich.console import Console
from rich.table import Table

from jlaqat.data import DataConfig, loss_kind
from jlaqat.model import ModelConfig
from jlaqat.naming import named_leaves
from jlaqat.quantizers import find_quantizers, summary
from jlaqat.study_head import HeadConfig


def parameter_counts(model: nnx.Module) -> dict[str, int]:
    """Parameters by part: embed, layers.0.mixer, layers.0.mlp, …, lm_head; `model` may be abstract."""
    counts: dict[str, int] = {}
    for name, leaf in named_leaves(nnx.state(model, nnx.Param)).items():
        words = name.split(".")
        part = ".".join(words[:3] if words[0] == "layers" else words[:1])
        counts[part] = counts.get(part, 0) + math.prod(leaf.shape)
    return counts


def state_elements(model: nnx.Module) -> int:
    """Elements of the recurrent states of one sequence, over all layers."""
    states = [q for q in find_quantizers(model).values() if q.site == "state"]
    return sum(q.num_heads * q.key_dim * q.value_dim for q in states)


def describe(model: nnx.Module, config: ModelConfig | HeadConfig, data: DataConfig, *, title: str) -> None:
    """Prints the summary of a model, which may be abstract."""
    console = Console()
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    table.add_column("kind")
    table.add_column("parameters", justify="right")
    counts = parameter_counts(model)
    for part, count in counts.items():
        words = part.split(".")
        mixer = isinstance(config, ModelConfig) and words[0] == "layers" and words[2] == "mixer"
        table.add_row(part, config.layer_kinds[int(words[1])] if mixer else "", f"{count:,}")  # type: ignore[union-attr]
    table.add_row("total", "", f"{sum(counts.values()):,}", style="bold")
    console.print(table)
    elements = state_elements(model)
    console.print(
        f"states: {elements:,} elements a sequence, {4 * elements / 2**20:.2f} MiB in float32, "
        f"{elements / 2**20:.2f} MiB in 8 bits (scales aside); backend {config.backend!r} on {jax.default_backend()}"
    )
    console.print(f"data: {data.task}, {data.batch_size} × {data.seq_len} tokens a batch, loss {loss_kind(data)}")
    print(summary(model))
