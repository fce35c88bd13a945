"""`jlaqat parity` on a GPU: within the bounds, and the same bits; FLA's chunk kernels within the bounds beside them."""

import json
import subprocess

import pytest

from jlaqat import cli, parity
from jlaqat.parity import ParityConfig, compare

# FLA tunes itself for minutes; one configuration a kernel does where nothing is timed.
WITHOUT_SEARCH = """
import runpy
from triton.runtime.autotuner import Autotuner

make = Autotuner.__init__

def make_with_one(self, fn, arg_names, configs, *rest, **more):
    make(self, fn, arg_names, configs[:1], *rest, **more)

Autotuner.__init__ = make_with_one
runpy.run_module("jlaqat.torch_bridge.parity", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def fla_does_not_search(monkeypatch):
    run = subprocess.run

    def without_search(command, **more):
        if command[1:3] != ["-m", "jlaqat.torch_bridge.parity"]:  # Triton asks ptxas for its version
            return run(command, **more)
        python, *module, folder, side = command
        if side == "fla":
            module = ["-c", WITHOUT_SEARCH]
        return run([python, *module, folder, side], **more)

    monkeypatch.setattr(parity.subprocess, "run", without_search)
    monkeypatch.setenv("FLA_CACHE_RESULTS", "0")


@pytest.mark.usefixtures("fla_does_not_search")
@pytest.mark.parametrize(("gate", "op"), [("gdn", "chunk_gated_delta_rule"), ("kda", "chunk_kda")])
def test_the_command_with_fla_beside(gate, op, tmp_path):
    """Exit status 0: JAX and PyTorch within the bounds, with equal bits. It says nothing of FLA, which is held too."""
    path = tmp_path / "parity.json"
    status = cli.main(f"parity --gate {gate} --shape 2x200x2g4x64 --json {path}".split())
    report = json.loads(path.read_text())
    assert status == 0 and report["passed"] and report["binding"] and report["config"]["dtype"] == "bfloat16"
    assert report["sides"] == {"jax": "triton", "bridge": "CUDA", "fla": op} and not report["missing"]
    bounds = {"o": 0.005, "final_state": 0.005, "dg": 0.02, "dbeta": 0.02}
    assert [row["name"] for row in report["rows"]] == list(parity.RESULTS)
    for row in report["rows"]:
        assert row["bound"] == bounds.get(row["name"], 0.008) and row["equal_bits"], row
        assert row["errors"].keys() == report["sides"].keys()
        assert all(error <= row["bound"] for error in row["errors"].values()), row


def test_rounded_and_packed():
    report = compare(ParityConfig(fla=False, gate="kda", quant="state_w_fp8", lengths=(0, 64, 5, 100)))
    assert report.sides["jax"] == "triton" and report.dtype == "bfloat16" and report.same_kernels
    assert report.passed, (report.rows, report.missing)
    assert all(row.equal_bits for row in report.rows)
