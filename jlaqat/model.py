"""A decoder of delta and attention layers: `ModelConfig`, `DecoderLM`, `count_params`.

    config = ModelConfig(vocab_size=256, hidden_size=256, num_layers=4, pattern=("gdn", "gdn", "gdn", "attention"))
    model = DecoderLM(config, rngs=nnx.Rngs(0))
    logits = model(tokens)                                             # [B, T] → [B, T, vocab_size]

Every layer is x + mixer(norm(x)), then x + mlp(norm(x)). The delta layers need no positions; attention rotates its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jlaqat.attention import Attention, KVCache
from jlaqat.blocks import RMSNorm, SequenceModule, SwiGLU, TokenLayout, linear
from jlaqat.layers import DeltaCache, GatedDeltaNet, KimiDeltaAttention
from jlaqat.quantizers import Quantizer
from jlaqat.spec import CHUNK_SIZE

Array = jax.Array
Mixer = GatedDeltaNet | KimiDeltaAttention | Attention
Cache = tuple[DeltaCache | KVCache, ...]
"""What a model remembers between tokens: one cache a layer, in order."""

LAYER_KINDS = ("gdn", "kda", "attention")
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder's shape and options. Frozen and hashable; every field has a plain type, so that YAML can give it.

    Raises ValueError for values that do not fit together, naming them and the remedy.
    """

    # Tokens in and out: a vocabulary. Vectors in and out (in-context regression): input_size and output_size instead.
    vocab_size: int | None = None
    input_size: int | None = None
    output_size: int | None = None
    # The embedding matrix is the output matrix too. Only with a vocabulary.
    tie_embeddings: bool = False

    hidden_size: int = 256
    num_layers: int = 4
    # Kinds of layers, repeated until num_layers: "gdn", "kda", "attention".
    pattern: tuple[str, ...] = ("gdn",)
    # Width of the SwiGLU; None means 8/3·hidden_size, rounded up to a multiple of 64.
    intermediate_size: int | None = None
    norm_eps: float = 1e-6

    # Delta layers, see GatedDeltaNet and KimiDeltaAttention.
    num_heads: int = 4
    num_v_heads: int | None = None
    head_dim: int = 64
    expand_v: float = 1.0
    use_gate: bool = True
    use_short_conv: bool = True
    conv_size: int = 4
    conv_bias: bool = False
    allow_neg_eigval: bool = False
    # "gdn" layers only.
    output_gate_activation: str = "silu"
    # "kda" layers only.
    safe_gate: bool = False
    lower_bound: float | None = None

    # "attention" layers only; None means num_heads, num_attention_heads and hidden_size/num_attention_heads.
    num_attention_heads: int | None = None
    num_kv_heads: int | None = None
    attention_head_dim: int | None = None
    rope_theta: float = 10000.0

    # Std of projections, convolutions and embeddings; None: projections as torch draws them, embeddings 0.02.
    initializer_range: float | None = None
    # Of the computation and of the parameters. A_log and dt_bias are always float32.
    dtype: str = "float32"
    param_dtype: str = "float32"

    # One traced copy of the pattern, scanned over its repetitions: the time to compile stops growing with depth.
    scan_layers: bool = False
    # Recompute a layer's activations in the backward pass instead of keeping them.
    remat: bool = False
    # Under a decode policy: decoded tokens between two states kept for the backward pass, 1 to keep all of them.
    checkpoint_every: int = CHUNK_SIZE
    # Of the delta rule, see `jlaqat.delta_rule`.
    backend: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", tuple(self.pattern))
        unknown = [kind for kind in self.pattern if kind not in LAYER_KINDS]
        if unknown or not self.pattern:
            raise ValueError(f"pattern={self.pattern!r} must name one or more of {', '.join(map(repr, LAYER_KINDS))}.")
        for field in ("dtype", "param_dtype"):
            if getattr(self, field) not in DTYPES:
                allowed = ", ".join(map(repr, DTYPES))
                raise ValueError(f"{field}={getattr(self, field)!r} is not supported; choose one of {allowed}.")
        continuous = (self.input_size is not None, self.output_size is not None)
        if (self.vocab_size is None) != all(continuous) or any(continuous) != all(continuous):
            raise ValueError(
                f"vocab_size={self.vocab_size}, input_size={self.input_size}, output_size={self.output_size}: give "
                f"vocab_size for tokens, or both input_size and output_size for vectors."
            )
        if self.tie_embeddings and self.vocab_size is None:
            raise ValueError("tie_embeddings=True needs a vocabulary: set vocab_size, or tie_embeddings=False.")
        if self.num_layers < 1:
            raise ValueError(f"num_layers={self.num_layers} must be at least 1.")
        if self.scan_layers and self.num_layers % len(self.pattern):
            raise ValueError(
                f"scan_layers=True repeats whole patterns, but num_layers={self.num_layers} is no multiple of the "
                f"pattern's {len(self.pattern)} layers; change num_layers or set scan_layers=False."
            )
        if (
            "attention" in self.layer_kinds
            and self.attention_head_dim is None
            and self.hidden_size % self.attention_heads
        ):
            raise ValueError(
                f"hidden_size={self.hidden_size} does not divide into {self.attention_heads} attention heads; set "
                f"num_attention_heads to a divisor, or attention_head_dim."
            )

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer: the pattern, repeated."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

    @property
    def attention_heads(self) -> int:
        return self.num_attention_heads or self.num_heads

    @property
    def num_outputs(self) -> int:
        return self.vocab_size or self.output_size or 0

    @property
    def mlp_size(self) -> int:
        return self.intermediate_size or -(-self.hidden_size * 8 // 3 // 64) * 64


def make_mixer(config: ModelConfig, kind: str, *, rngs: nnx.Rngs) -> Mixer:
    """The token mixer of a layer of `kind` as `config` describes it."""
    common: dict[str, Any] = {
        "initializer_range": config.initializer_range,
        "dtype": jnp.dtype(config.dtype),
        "param_dtype": jnp.dtype(config.param_dtype),
        "rngs": rngs,
    }
    if kind == "attention":
        return Attention(
            config.hidden_size,
            num_heads=config.attention_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.attention_head_dim or config.hidden_size // config.attention_heads,
            rope_theta=config.rope_theta,
            **common,
        )
    common |= {
        "expand_v": config.expand_v,
        "head_dim": config.head_dim,
        "num_heads": config.num_heads,
        "num_v_heads": config.num_v_heads,
        "use_gate": config.use_gate,
        "use_short_conv": config.use_short_conv,
        "conv_size": config.conv_size,
        "conv_bias": config.conv_bias,
        "allow_neg_eigval": config.allow_neg_eigval,
        "norm_eps": config.norm_eps,
        "checkpoint_every": config.checkpoint_every,
        "backend": config.backend,
    }
    if kind == "gdn":
        return GatedDeltaNet(config.hidden_size, output_gate_activation=config.output_gate_activation, **common)
    return KimiDeltaAttention(config.hidden_size, safe_gate=config.safe_gate, lower_bound=config.lower_bound, **common)


class DecoderLayer(nnx.Module):
    """x + mixer(mixer_norm(x)), then x + mlp(mlp_norm(x)). x [B, T, D]."""

    def __init__(self, config: ModelConfig, kind: str, *, rngs: nnx.Rngs):
        param_dtype = jnp.dtype(config.param_dtype)
        self.mixer_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, param_dtype=param_dtype)
        self.mixer = make_mixer(config, kind, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, param_dtype=param_dtype)
        self.mlp = SwiGLU(
            config.hidden_size,
            config.mlp_size,
            initializer_range=config.initializer_range,
            dtype=jnp.dtype(config.dtype),
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def __call__(self, x: Array, layout: TokenLayout) -> Array:
        x = x + self.mixer.mix(self.mixer_norm(x), layout)
        return x + self.mlp(self.mlp_norm(x))

    def extend(self, x: Array, cache: Any, layout: TokenLayout) -> tuple[Array, Any]:
        y, cache = self.mixer.extend(self.mixer_norm(x), cache, layout)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache


class DecoderLM(SequenceModule):
    """The decoder that `config` describes: `embed`, `layers.{i}` (mixer_norm, mixer, mlp_norm, mlp), `norm`, `lm_head`.

    The names are the same with `scan_layers` and without, so checkpoints, weights and quantizers fit both.

    Called on int tokens [B, T] (or float [B, T, input_size]) it gives float32 [B, T, vocab_size or output_size]; with
    cu_seqlens or mask as `SequenceModule.__call__` says, which lists errors; `decode` goes on token by token.

    On a mesh of explicit axes (`jax.set_mesh`) inputs, masks and caches may be cut along the batch; logits are cut as
    inputs are. Parameters must be whole where they are used: give those that are cut to `jax.sharding.reshard` inside
    the function that is differentiated, and their gradients come back cut.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        dtypes: dict[str, Any] = {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}
        options = dtypes | {"initializer_range": config.initializer_range}
        self.embed: nnx.Embed | nnx.Linear
        if config.vocab_size is not None:
            init = jax.nn.initializers.normal(config.initializer_range or 0.02)
            self.embed = nnx.Embed(config.vocab_size, config.hidden_size, embedding_init=init, rngs=rngs, **dtypes)
        else:
            self.embed = linear(config.input_size or 0, config.hidden_size, rngs=rngs, **options)
        self.layers = nnx.List([DecoderLayer(config, kind, rngs=rngs) for kind in config.layer_kinds])
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, param_dtype=dtypes["param_dtype"])
        if not config.tie_embeddings:
            self.lm_head = linear(config.hidden_size, config.num_outputs, rngs=rngs, **options)

    def init_cache(self, batch: int, max_length: int | None = None) -> Cache:
        """Empty caches for `batch` sequences. Where a layer is attention, max_length (prompt and new) is needed."""
        return tuple(layer.mixer.init_cache(batch, max_length) for layer in self.layers)

    def mix(self, inputs: Array, layout: TokenLayout) -> Array:
        x = self._embed(inputs)
        if self.config.scan_layers and not self._observing():
            x = self._scan_layers(x, layout)
        else:
            for layer in self.layers:
                x = self._apply_layer(layer, x, layout)
        return self._head(x)

    def extend(self, inputs: Array, cache: Cache, layout: TokenLayout) -> tuple[Array, Cache]:
        x = self._embed(inputs)
        caches = []
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x, layer_cache = layer.extend(x, layer_cache, layout)
            caches.append(layer_cache)
        return self._head(x), tuple(caches)

    def _embed(self, inputs: Array) -> Array:
        """[B, T, hidden_size]. On a mesh of explicit axes it is cut as the tokens are: a gather has to be told."""
        sharding = jax.typeof(inputs).sharding
        if isinstance(self.embed, nnx.Embed) and AxisType.Explicit in sharding.mesh.axis_types:
            return self.embed(inputs, out_sharding=NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, None)))
        return self.embed(inputs)

    def _apply_layer(self, layer: DecoderLayer, x: Array, layout: TokenLayout) -> Array:
        if not self.config.remat or self._observing():  # statistics are written into the module itself, forward only
            return layer(x, layout)
        graph, state = nnx.split(layer)
        return jax.checkpoint(lambda state, x: nnx.merge(graph, state)(x, layout))(state, x)

    def _scan_layers(self, x: Array, layout: TokenLayout) -> Array:
        """Scans over repetitions of the pattern; a repetition whose quantizers are set otherwise starts a new scan.

        The layers' arrays are stacked here and not in the module, so that names and settings stay single layers'.
        """
        period = len(self.config.pattern)
        units = [nnx.List(self.layers[i : i + period]) for i in range(0, len(self.layers), period)]
        for _, run in itertools.groupby(units, key=_settings):
            first, *others = run
            graph, state = nnx.split(first)
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), state, *map(nnx.state, others))

            def body(x: Array, state: nnx.State, graph: nnx.GraphDef = graph) -> tuple[Array, None]:
                for layer in nnx.merge(graph, state):
                    x = self._apply_layer(layer, x, layout)
                return x, None

            x, _ = jax.lax.scan(body, x, stacked)
        return x

    def _head(self, x: Array) -> Array:
        x = self.norm(x)
        if isinstance(self.embed, nnx.Embed) and self.config.tie_embeddings:
            return self.embed.attend(x).astype(jnp.float32)
        return self.lm_head(x).astype(jnp.float32)

    def _observing(self) -> bool:
        """Whether some quantizer gathers statistics, which go to variables of single layers."""
        return any(isinstance(module, Quantizer) and module.observing for _, module in nnx.iter_modules(self))

    def _check_input(self, inputs: Array) -> None:
        config = self.config
        if config.vocab_size is not None:
            if inputs.ndim != 2 or not jnp.issubdtype(inputs.dtype, jnp.integer):
                raise ValueError(
                    f"inputs are {inputs.dtype} {inputs.shape}; this model has a vocabulary and takes integer tokens "
                    f"[batch, tokens]."
                )
        elif inputs.ndim != 3 or inputs.shape[-1] != config.input_size:
            raise ValueError(
                f"inputs have shape {inputs.shape}; this model takes [B, T, input_size={config.input_size}]."
            )


def _settings(unit: nnx.Module) -> nnx.GraphDef:
    """What a unit's code is traced for: its structure, less where its quantizers' settings came from."""
    copy = nnx.merge(*nnx.split(unit))
    for _, quantizer in nnx.iter_modules(copy):
        if isinstance(quantizer, Quantizer):
            quantizer.source = quantizer.decode_source = None
    return nnx.graphdef(copy)


def count_params(module: nnx.Module, *, depth: int = 1) -> dict[str, int]:
    """Parameters of `module` by the first `depth` names of their path, and their "total".

    >>> count_params(model, depth=3)  # doctest: +SKIP
    {'embed.embedding': 65536, 'layers.0.mixer': 264708, 'layers.0.mlp': 540672, …, 'total': 3289104}
    """
    counts: dict[str, int] = {}
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        name = ".".join(map(str, path[:depth]))
        counts[name] = counts.get(name, 0) + int(variable.get_value().size)
    return counts | {"total": sum(counts.values())}
