"""Our layers against FLA's torch layers on the same weights: outputs and every gradient, on the CPU.

FLA's layers run as they are; only the Triton kernels that they call are replaced: by FLA's own naive recurrences and
gates, and by plain torch for the convolution and the norms.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jlaqat.layers import GatedDeltaNet, KimiDeltaAttention
from jlaqat.testing import error_ratio
from jlaqat.weights import fla_state_dict, load_fla_state_dict

pytestmark = pytest.mark.usefixtures("compile_quickly")

torch = pytest.importorskip("torch")
with warnings.catch_warnings():  # FLA warns that there is no GPU
    warnings.simplefilter("ignore")
    fla_gdn = pytest.importorskip("fla.layers.gated_deltanet")
    fla_kda = pytest.importorskip("fla.layers.kda")
    from fla.modules import FusedRMSNormGated, RMSNorm, ShortConvolution
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda

D, T = 24, 70  # a whole chunk and a part of one
QUICK = {"xla_backend_optimization_level": 0}  # compiling is what these tests spend their time on
SIZES = {"hidden_size": D, "head_dim": 8, "num_heads": 2, "num_v_heads": 4, "expand_v": 1.5}


# ── FLA's kernels, in plain torch ──


def by_sequence(function, cu_seqlens, *arrays):
    """`function` on each packed sequence (or once on the batch), results joined over time."""
    if cu_seqlens is None:
        return function(*arrays)
    bounds = cu_seqlens.tolist()
    parts = [function(*(a[:, i:j] for a in arrays)) for i, j in zip(bounds[:-1], bounds[1:], strict=True) if j > i]
    return torch.cat(parts, dim=1)


def normalized(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def write_strength(beta, allow_neg_eigval):
    return beta.float().sigmoid() * (2.0 if allow_neg_eigval else 1.0)


def chunk_gated_delta_rule(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, cu_seqlens, **options):
    assert (
        options["use_qk_l2norm_in_kernel"] and options["use_gate_in_kernel"] and options["use_beta_sigmoid_in_kernel"]
    )
    g = -A_log.float().exp() * torch.nn.functional.softplus(g.float() + dt_bias)
    groups = v.shape[2] // q.shape[2]
    q, k = (normalized(x).repeat_interleave(groups, dim=2) for x in (q, k))

    def run(*args):
        return naive_recurrent_gated_delta_rule(*args)[0]

    return by_sequence(run, cu_seqlens, q, k, v, write_strength(beta, allow_neg_eigval), g), None


def chunk_kda(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, safe_gate, lower_bound, cu_seqlens, **options):
    assert (
        options["use_qk_l2norm_in_kernel"] and options["use_gate_in_kernel"] and options["use_beta_sigmoid_in_kernel"]
    )
    if lower_bound is None:
        g = naive_kda_gate(g, A_log, dt_bias)
    else:
        g = naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound)

    def run(*args):
        return naive_recurrent_kda(*args)[0]

    return by_sequence(
        run, cu_seqlens, normalized(q), normalized(k), v, g, write_strength(beta, allow_neg_eigval)
    ), None


def causal_conv1d(x, weight, bias, cu_seqlens=None, **options):
    assert options["activation"] == "silu"

    def run(x):
        padded = torch.nn.functional.pad(x.mT, (weight.shape[1] - 1, 0))
        return torch.nn.functional.silu(
            torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=x.shape[-1]).mT
        )

    return by_sequence(run, cu_seqlens, x), None


def conv_forward(self, x, cu_seqlens=None, **options):
    return causal_conv1d(x, self.weight[:, 0], self.bias, cu_seqlens, activation=self.activation)


def rms_norm(self, x, gate=None):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
    if gate is None:
        return y
    return y * (gate.sigmoid() if self.activation == "sigmoid" else torch.nn.functional.silu(gate))


@pytest.fixture(autouse=True)
def fla_on_cpu(monkeypatch):
    monkeypatch.setattr(fla_gdn, "chunk_gated_delta_rule", chunk_gated_delta_rule)
    monkeypatch.setattr(fla_gdn, "causal_conv1d", causal_conv1d)
    monkeypatch.setattr(fla_kda, "chunk_kda", chunk_kda)
    monkeypatch.setattr(ShortConvolution, "forward", conv_forward)
    monkeypatch.setattr(FusedRMSNormGated, "forward", rms_norm)
    monkeypatch.setattr(RMSNorm, "forward", rms_norm)


# ── the comparison ──


def make(kind, **options):
    """(our layer, FLA's), each with its own initial parameters."""
    torch.manual_seed(0)
    with warnings.catch_warnings():  # FLA warns where use_short_conv is False
        warnings.simplefilter("ignore")
        theirs = {"gdn": fla_gdn.GatedDeltaNet, "kda": fla_kda.KimiDeltaAttention}[kind](**SIZES | options)
    ours = {"gdn": GatedDeltaNet, "kda": KimiDeltaAttention}[kind](**SIZES | options, rngs=nnx.Rngs(1))
    return ours, theirs


def build(kind, **options):
    """(our layer, FLA's), with FLA's weights in both; norms and biases moved off their constant starts."""
    ours, theirs = make(kind, **options)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    load_fla_state_dict(ours, {name: p.detach().numpy() for name, p in theirs.named_parameters()})
    return ours, theirs


def compare(kind, *, mask=None, cu_seqlens=None, batch=2, **options):
    """Error ratios of our layer against FLA's: of the output, and of each gradient by name (the input's is "x")."""
    ours, theirs = build(kind, **options)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, T, D)).astype(np.float32)
    weights = rng.standard_normal((batch, T, D)).astype(np.float32)
    if mask is not None:
        weights *= mask[..., None]

    x_torch = torch.tensor(x, requires_grad=True)
    extra = {} if cu_seqlens is None else {"cu_seqlens": torch.tensor(cu_seqlens)}
    y_torch = theirs(x_torch, attention_mask=None if mask is None else torch.tensor(mask).long(), **extra)[0]
    (y_torch * torch.tensor(weights)).sum().backward()
    expected = {name: p.grad.numpy() for name, p in theirs.named_parameters()} | {"x": x_torch.grad.numpy()}

    graph, params, rest = nnx.split(ours, nnx.Param, ...)

    @functools.partial(jax.jit, compiler_options=QUICK)
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def loss_and_gradients(params, x):
        y = nnx.merge(graph, params, rest)(x, cu_seqlens=cu_seqlens, mask=mask)
        return jnp.sum(y * weights), y

    (_, y), (dparams, dx) = loss_and_gradients(params, x)
    actual = fla_state_dict(nnx.merge(graph, dparams, rest)) | {"x": np.asarray(dx)}
    assert actual.keys() == expected.keys()
    if mask is not None:
        assert not np.asarray(y)[~mask].any()
    return (
        error_ratio(np.asarray(y), y_torch.detach().numpy()),
        {name: error_ratio(actual[name], expected[name]) for name in expected},
    )


def check(errors):
    output, gradients = errors
    assert output <= 1e-5, output
    assert max(gradients.values()) <= 1e-4, gradients


def padding(*lengths_left_right):
    mask = np.zeros((len(lengths_left_right), T), bool)
    for row, (left, right) in enumerate(lengths_left_right):
        mask[row, left : T - right] = True
    mask[-1, 20:23] = False  # a hole
    return mask


def test_gdn_grouped_heads_and_padding_mask():
    check(compare("gdn", mask=padding((5, 0), (0, 3))))


@pytest.mark.slow
def test_gdn_negative_eigenvalues_without_convolution_and_gate():
    check(compare("gdn", allow_neg_eigval=True, use_short_conv=False, use_gate=False))


@pytest.mark.slow
def test_kda_grouped_heads():
    check(compare("kda"))


def test_kda_bounded_gate_negative_eigenvalues_and_convolution_bias():
    check(compare("kda", safe_gate=True, lower_bound=-5.0, allow_neg_eigval=True, conv_bias=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gdn", {}),
        ("gdn", {"num_v_heads": None, "expand_v": 2.0}),
        ("gdn", {"num_v_heads": 6, "expand_v": 1.0}),
        ("gdn", {"allow_neg_eigval": True}),
        ("gdn", {"use_short_conv": False}),
        ("gdn", {"use_gate": False}),
        ("gdn", {"conv_size": 2, "conv_bias": True}),
        ("gdn", {"output_gate_activation": "sigmoid", "norm_eps": 1e-3}),
        ("gdn", {"batch": 1, "cu_seqlens": np.array([0, 3, 3, 40, 70])}),
        ("kda", {"batch": 1, "cu_seqlens": np.array([0, 3, 3, 40, 70])}),
        ("kda", {"num_v_heads": None, "expand_v": 1.0}),
        ("kda", {"num_v_heads": 6, "expand_v": 2.0}),
        ("kda", {"allow_neg_eigval": True}),
        ("kda", {"use_short_conv": False}),
        ("kda", {"lower_bound": -2.0}),
        ("kda", {"safe_gate": True, "lower_bound": -5.0}),
        ("kda", {"mask": padding((5, 0), (0, 3))}),
    ],
)
def test_each_option(kind, options):
    check(compare(kind, **options))


@pytest.mark.parametrize(("kind", "options"), [("gdn", {}), ("kda", {"conv_bias": True})])
def test_state_dict_there_and_back(kind, options):
    ours, theirs = build(kind, **options)
    expected = {name: p.detach().numpy() for name, p in theirs.named_parameters()}
    actual = fla_state_dict(ours, prefix="attn.")
    assert set(actual) == {f"attn.{name}" for name in expected}
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[f"attn.{name}"], array)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_parameters_start_as_fla_draws_them(kind):
    """Spread and extremes of every parameter, ours against FLA's: the same ranges, uniform or log-uniform."""
    ours, theirs = make(kind)
    actual = fla_state_dict(ours)
    for name, parameter in theirs.named_parameters():
        a, b = actual[name], parameter.detach().numpy()
        assert a.shape == b.shape, name
        if "norm" in name:
            assert (a == 1).all() and (b == 1).all()
        elif a.size >= 32:
            assert abs(a.std() / b.std() - 1) < 0.25 and abs(np.abs(a).max() / np.abs(b).max() - 1) < 0.25, name
