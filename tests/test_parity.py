"""`jlaqat parity`: three sides and one reference on a tiny call, what it refuses, and when it fails.

The PyTorch sides run in processes of their own, one of them Triton's interpreter.
"""

import dataclasses
import importlib.util
import json

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from jlaqat import cli, parity
from jlaqat.parity import OPERANDS, ParityConfig, ParityError, compare
from jlaqat.parity_files import Case, as_bits, read_arrays, read_case, write_arrays, write_case
from jlaqat.parity_report import parse_shape
from jlaqat.spec import QuantSpec

pytestmark = pytest.mark.usefixtures("compile_quickly")
TINY = ParityConfig(lengths=(0, 3, 66), heads=1, value_heads=2, key_dim=16)
RESULTS = ["o", "final_state", *(f"d{name}" for name in OPERANDS)]


@pytest.mark.parametrize(
    ("gate", "lengths"),
    [("gdn", (0, 3, 9)), *(pytest.param(g, (0, 3, 66), marks=pytest.mark.slow) for g in ("gdn", "kda"))],
)
def test_packed_grouped_call_on_all_sides(gate, lengths):
    report = compare(dataclasses.replace(TINY, gate=gate, lengths=lengths))
    assert report.passed and not report.missing and report.binding and report.dtype == "float32"
    assert report.sides == {"jax": "xla", "bridge": "interpreter", "fla": "naive"}
    assert [row.name for row in report.rows] == RESULTS
    for row in report.rows:
        assert row.errors.keys() == {"jax", "bridge", "fla"}
        assert all(0 < error <= row.bound <= 1e-4 for error in row.errors.values()), row


@pytest.mark.slow
def test_rounded_call_by_the_command_line(tmp_path, capsys):
    path = tmp_path / "new" / "parity.json"
    command = f"parity --gate kda --shape 1x70x1x16 --quant state_w_fp8 --dtype float16 --json {path}"
    assert cli.main(command.split()) == 0
    printed = capsys.readouterr().out
    assert "dinitial_state" in printed and "FLA: does not round" in printed
    record = json.loads(path.read_text())
    assert record["passed"] and record["config"]["quant"] == "state_w_fp8"
    assert [row["bound"] for row in record["rows"]][:3] == [0.03, 0.03, 0.05]


def stand_in(change):
    """The PyTorch sides give the JAX side's results, changed."""

    def run(x, cotangents, cu_seqlens, quant, backend):
        found.update(real(x, cotangents, cu_seqlens, quant, backend))
        return dict(found)

    found: dict = {}
    real = parity._run_jax
    return run, lambda folder, side, on_gpu: {name: change(name, *bits) for name, bits in found.items()}


def scaled(name, bits, dtype):
    """dk 1 % too large: its bound is 1e-4."""
    return as_bits(bits.view(dtype) * np.float32(1.01 if name == "dk" else 1)) if dtype == "float32" else (bits, dtype)


def spoiled(name, bits, dtype):
    a = bits.view(dtype).copy()
    a.reshape(-1)[3] = np.nan if name == "final_state" else a.reshape(-1)[3]
    return as_bits(a)


@pytest.mark.parametrize(("change", "row"), [(scaled, "dk"), (spoiled, "final_state")])
def test_a_side_outside_the_bounds_fails(change, row, monkeypatch, capsys):
    run_jax, run_torch = stand_in(change)
    monkeypatch.setattr(parity, "_run_jax", run_jax)
    monkeypatch.setattr(parity, "_run_torch", run_torch)
    assert cli.main(["parity", "--shape", "1x9x1x16", "--no-fla"]) == 1
    out, err = capsys.readouterr()
    assert [line.split()[1] for line in out.splitlines() if "✗" in line] == [row]
    assert "FLA: not asked for" in out and "outside the bounds" in err


def test_a_side_that_does_not_run_fails_and_says_why(monkeypatch):
    monkeypatch.setattr(parity, "_run_torch", lambda folder, side, on_gpu: f"ValueError: no {side} today")
    report = compare(ParityConfig(tokens=9, heads=1, key_dim=16))
    assert not report.passed and report.missing == {
        "bridge": "ValueError: no bridge today",
        "fla": "ValueError: no fla today",
    }


def test_bits_must_be_equal_where_the_kernels_are_the_same():
    row = parity.Row(name="o", bound=1e-5, errors={"jax": 1e-7, "bridge": 1e-7}, equal_bits=False)
    report = parity.Report(rows=[row], sides={}, missing={}, binding=True, same_kernels=False, dtype="float32")
    assert report.passed
    assert not dataclasses.replace(report, same_kernels=True).passed
    loose = dataclasses.replace(row, errors={"jax": 0.5, "bridge": 0.5})
    assert dataclasses.replace(report, rows=[loose], binding=False).passed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate": "mamba"}, "gate='mamba' is unknown; choose 'gdn' or 'kda'"),
        ({"dtype": "float8"}, "dtype='float8' is unknown"),
        ({"dtype": "bfloat16"}, "needs a GPU.*Use 'float32' or 'float16'"),
        ({"quant": "state_fp8_static"}, "static scale .state.*state_w_fp8"),
        ({"quant": "state_int8_key_row"}, "do not round state with granularity='key_row'"),
        ({"quant": "kda_state_fp8"}, "no quantizer matches; nearest: 'gdn_state_quantizer'"),
        ({"lengths": (0, 0)}, "not all 0"),
        ({"heads": 2, "value_heads": 3}, "num_v_heads=3 is not a multiple|HV=3 heads"),
        ({"backend": "triton"}, "backend='triton' cannot serve this call: JAX runs on 'cpu'"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes, message, monkeypatch):
    monkeypatch.setattr(parity, "_run_torch", lambda *_: pytest.fail("work began"))
    kinds = (ParityError, ValueError, NotImplementedError)
    with pytest.raises(kinds, match=f"(?s){message}"):
        compare(ParityConfig(**{"tokens": 9, "heads": 1, "key_dim": 16} | changes))


def test_without_torch_it_names_the_extra(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torch" else find(name, *a))
    assert cli.main(["parity"]) == 2
    assert "pip install jlaqat[torch]" in capsys.readouterr().err


def test_shapes():
    assert parse_shape("2x128x4x64") == dict(batch=2, tokens=128, heads=4, key_dim=64)
    wanted = dict(batch=2, tokens=128, heads=4, value_heads=8, key_dim=64, value_dim=32)
    assert parse_shape("2x128x4g8x64x32") == wanted
    for wrong in ("2x128x4", "2x128x4xK", "2x128x4gx64x1x1", "", "2x-3x4x64"):
        with pytest.raises(ParityError, match="must be BxTxHxK"):
            parse_shape(wrong)


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        cli.main(["parity", "--help"])
    out = capsys.readouterr().out
    assert "$ jlaqat parity --gate kda --quant state_w_fp8" in out and "interpreter" in out


def test_files_keep_every_bit(tmp_path):
    import ml_dtypes

    arrays = {"q": np.arange(7).astype(ml_dtypes.bfloat16), "g": np.array([np.nan, -0.0], np.float32)}
    write_arrays(tmp_path / "x.npz", {name: as_bits(a) for name, a in arrays.items()})
    for name, (bits, dtype) in read_arrays(tmp_path / "x.npz").items():
        assert dtype == arrays[name].dtype.name and np.array_equal(bits, as_bits(arrays[name])[0])
    case = Case(gate="kda", state=QuantSpec.int8(block_v=32), w=QuantSpec.fp8())
    write_case(tmp_path, case)
    assert read_case(tmp_path) == case
