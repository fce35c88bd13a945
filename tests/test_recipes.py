"""Recipes and configs: composition, overrides, types, and errors that name the file, the key and what was meant."""

import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import pytest

from jlaqat import recipes
from jlaqat.quant_cfg import plan
from jlaqat.recipes import ConfigError, list_configs, load_config, load_recipe, to_dict
from jlaqat.rounding import fake_quantize
from jlaqat.spec import QuantSpec

ROOT = pathlib.Path(__file__).resolve().parents[1]
SITES = {
    f"layers.{i}.mixer.{gate}_{site}_quantizer": site
    for i in (0, 1)
    for gate in ("gdn", "kda")
    for site in ("state", "w")
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    kind: Literal["adamw", "muon"] = "adamw"

    def __post_init__(self):
        if self.lr < 0:
            raise ValueError(f"lr={self.lr} must not be negative.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    hidden_size: int
    pattern: tuple[str, ...] = ("gdn",)
    eps: float | None = None
    tie: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    model: Model
    optimizer: Optimizer = Optimizer()
    quant: tuple[dict[str, Any], ...] = ()
    steps: int = 10
    seeds: int | tuple[int, ...] = 0
    output: pathlib.Path | None = None
    labels: dict[str, int] = dataclasses.field(default_factory=dict)


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / "run.yaml"


# ── the packaged recipes ──


@pytest.mark.parametrize("name", [n.removeprefix("recipes/") for n in list_configs() if n.startswith("recipes/")])
def test_every_packaged_recipe_loads_and_its_head_teaches(name):
    settings = plan(load_recipe(name), SITES)
    enabled = {n for n, s in settings.items() if s.enabled}
    assert enabled, f"{name} enables nothing"
    if name.startswith(("gdn_", "kda_")):
        assert all(name[:4] in n for n in enabled)
    head = (ROOT / "configs/recipes" / f"{name}.yaml").read_text().splitlines()
    comments = "\n".join(line for line in head if line.startswith("#"))
    assert f'load_recipe("{name}")' in comments and "Emulates: " in comments and "Expect: " in comments


def test_the_rounding_errors_that_the_recipes_promise():
    """`rounding error near …` in a recipe's head is what its first quantizer does to Gaussian values."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, 64, 64)), jnp.float32)
    seen: dict[QuantSpec, float] = {}
    for name, path in list_configs().items():
        promised = re.search(r"rounding error near ([\d.]+\d)", path.read_text()) if "recipes/" in name else None
        if promised:
            settings = [(n, s.spec) for n, s in plan(load_recipe(path), SITES).items() if s.enabled and s.spec]
            spec = dataclasses.replace(settings[0][1], scale="dynamic")
            if spec.rounding == "nearest" and spec not in seen:
                error = fake_quantize(x, spec, site=SITES[settings[0][0]]) - x
                seen[spec] = float(jnp.sqrt((error**2).sum() / (x**2).sum()))
            assert spec not in seen or seen[spec] == pytest.approx(float(promised[1]), rel=0.1), name
    assert len(seen) >= 7


@pytest.mark.parametrize("gates", [("gdn",), ("kda",), ("gdn", "kda")])
def test_recipes_for_both_gates_fit_models_of_one(gates):
    sites = {n: s for n, s in SITES.items() if n.split(".")[-1][:3] in gates}
    assert sum(s.enabled for s in plan(load_recipe("state_w_fp8"), sites).values()) == len(sites)


def test_the_recipes_that_were_promised_exist():
    promised = {"gdn_state_fp8", "kda_state_fp8", "state_fp8", "state_int8", "w_fp8", "state_w_fp8"}
    promised |= {"study_nvfp4_token", "study_fp8_token"}
    assert {f"recipes/{name}" for name in promised} <= set(list_configs())


def test_recipe_says_what_its_yaml_says():
    spec = plan(load_recipe("gdn_state_fp8"), SITES)["layers.0.mixer.gdn_state_quantizer"].spec
    assert (spec.format, spec.granularity, spec.block_v, spec.scale, spec.cadence) == (
        "e4m3",
        "tile",
        64,
        "dynamic",
        64,
    )
    token = plan(load_recipe("study_nvfp4_token"), SITES)["layers.1.mixer.kda_state_quantizer"].spec
    assert (token.format, token.granularity, token.cadence) == ("nvfp4", "block", 1)


def test_a_recipes_bases_come_first_and_its_own_entries_win():
    entries = load_recipe("state_w_fp8")
    assert entries == load_recipe("state_fp8") + load_recipe("w_fp8")
    assert load_recipe(["state_fp8", {"quantizer_name": "*", "enable": False}])[-1]["enable"] is False


def test_recipe_overrides_reach_into_entries():
    (entry,) = load_recipe("gdn_state_fp8", ["quant.0.cfg.block_v=32", "quant.0.cfg.rounding=stochastic"])
    assert entry["cfg"]["block_v"] == 32 and entry["cfg"]["rounding"] == "stochastic"
    assert load_recipe("gdn_state_fp8")[0]["cfg"]["block_v"] == 64, "an override leaked into the next load"


def test_recipe_by_path_composes_with_packaged_ones(tmp_path):
    path = write(
        tmp_path,
        run="base: [mine, w_fp8]\n",
        mine="base: state_fp8\nquant:\n  - {quantizer_name: '*0*', enable: false}\n",
    )
    entries = load_recipe(path)
    assert entries == [*load_recipe("state_fp8"), {"quantizer_name": "*0*", "enable": False}, *load_recipe("w_fp8")]


# ── configs ──


def test_nested_dataclasses_with_composition_and_overrides(tmp_path):
    path = write(
        tmp_path,
        common="model: {hidden_size: 64, pattern: [gdn, kda]}\noptimizer: {lr: 1e-3}\nsteps: 5\n",
        run="base: common\nmodel: {eps: 1}\nquant: state_fp8\n",
    )
    run = load_config(Run, path, ["optimizer.betas=[0.9, 0.95]", "model.tie=true", "output=runs/a", "seeds=[1, 2]"])
    assert run.model == Model(hidden_size=64, pattern=("gdn", "kda"), eps=1.0, tie=True)
    assert isinstance(run.model.eps, float) and run.optimizer == Optimizer(lr=1e-3, betas=(0.9, 0.95))
    assert run.steps == 5 and run.output == pathlib.Path("runs/a") and run.seeds == (1, 2)
    assert list(run.quant) == load_recipe("state_fp8")
    assert load_config(Run, to_dict(run)) == run


def test_numbers_without_a_dot_are_numbers(tmp_path):
    assert (
        load_config(Run, write(tmp_path, run="model: {hidden_size: 8}\noptimizer: {lr: 3e-4}\n")).optimizer.lr == 3e-4
    )
    assert load_config(Optimizer, {}, ["lr=2E+1"]).lr == 20.0


def test_a_recipe_name_is_expanded_before_and_after_overrides():
    run = load_config(Run, {"model": {"hidden_size": 8}, "quant": "state_fp8"}, ["quant.0.cfg.block_v=32"])
    assert run.quant[0]["cfg"]["block_v"] == 32
    run = load_config(Run, {"model": {"hidden_size": 8}}, ["quant=[state_int8, w_fp8]", "quant.1.cfg.num_bits=e5m2"])
    assert run.quant[0]["cfg"]["narrow_range"] and run.quant[1]["cfg"]["num_bits"] == "e5m2"


def test_lists_are_replaced_in_configs(tmp_path):
    path = write(
        tmp_path,
        base="model: {hidden_size: 8, pattern: [gdn, gdn]}\nquant: w_fp8\n",
        run="base: base\nmodel: {pattern: [kda]}\nquant: state_fp8\n",
    )
    run = load_config(Run, path)
    assert run.model.pattern == ("kda",) and list(run.quant) == load_recipe("state_fp8")


def test_sources_are_independent_of_the_environment(tmp_path, monkeypatch):
    write(tmp_path, state_fp8="quant: []\n")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("state_fp8"), "a bare name picked up a file of the working directory"
    assert load_recipe("state_fp8.yaml") == [] and load_recipe("./state_fp8.yaml") == []


@pytest.mark.parametrize(
    ("tree", "overrides", "message"),
    [
        ({"model": {"hiden_size": 8}}, [], r"unknown key 'model\.hiden_size'; did you mean 'hidden_size'\?"),
        ({"modle": {}}, [], r"unknown key 'modle'; did you mean 'model'\?"),
        ({"model": {"hidden_size": 8.5}}, [], r"model\.hidden_size must be int, got 8\.5 \(float\)"),
        ({"model": {"hidden_size": True}}, [], r"model\.hidden_size must be int, got True \(bool\)"),
        ({"model": {"hidden_size": "8"}}, [], r"model\.hidden_size must be int, got '8' \(str\)"),
        ({"model": 3}, [], r"model must be keys and values for Model, got 3"),
        ({}, [], r"model must be given"),
        ({"model": {}}, [], r"model\.hidden_size must be given"),
        ({"model": {"hidden_size": 8, "pattern": "gdn"}}, [], r"model\.pattern must be a list, got 'gdn'"),
        ({"model": {"hidden_size": 8, "pattern": ["gdn", 3]}}, [], r"model\.pattern\.1 must be str, got 3"),
        ({"model": {"hidden_size": 8, "eps": "small"}}, [], r"model\.eps must be float or null, got 'small'"),
        ({"model": {"hidden_size": 8}, "optimizer": {"kind": "adam"}}, [], r"optimizer\.kind='adam' is not .*did you"),
        ({"model": {"hidden_size": 8}, "optimizer": {"betas": [0.9]}}, [], r"optimizer\.betas must have 2"),
        ({"model": {"hidden_size": 8}, "optimizer": {"lr": -1}}, [], r"optimizer: lr=-1\.0 must not be negative"),
        ({"model": {"hidden_size": 8}, "labels": {"a": "b"}}, [], r"labels\.a must be int, got 'b'"),
        ({"model": {"hidden_size": 8}, "quant": "state_fp9"}, [], r"no config 'state_fp9'.*did you mean 'state_fp8'"),
        ({"model": {"hidden_size": 8}}, ["steps"], r"override 'steps' is not of the form key=value"),
        ({"model": {"hidden_size": 8}}, ["model.hidden_size.x=1"], r"model\.hidden_size is 8, which has no key 'x'"),
        ({"model": {"hidden_size": 8}, "quant": "w_fp8"}, ["quant.1.cfg=1"], r"quant is a list; '1' is no index"),
        ({"model": {"hidden_size": 8}}, ["stepz=3"], r"unknown key 'stepz'; did you mean 'steps'\?"),
        ({"model": {"hidden_size": 8}}, ["steps=[1"], r"override 'steps=\[1': not valid YAML"),
    ],
)  # fmt: skip
def test_errors_name_the_path_and_the_remedy(tree, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(Run, tree, overrides)


def test_errors_of_files_name_the_file(tmp_path):
    path = write(tmp_path, run="model: {hidden_size: 8}\nmodel: {hidden_size: 9}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml.*line 2: key model is given twice"):
        load_config(Run, path)
    with pytest.raises(ConfigError, match=r"run\.yaml: expected keys and values at the top, got list"):
        load_config(Run, write(tmp_path, run="- 1\n"))
    with pytest.raises(ConfigError, match=r"include each other: run\.yaml → other\.yaml → run\.yaml"):
        load_config(Run, write(tmp_path, run="base: other\n", other="base: run\n"))
    with pytest.raises(ConfigError, match=r"no config 'missing'"):
        load_config(Run, write(tmp_path, run="base: missing\n"))
    with pytest.raises(ConfigError, match=r"unknown key 'quants'; did you mean 'quant'"):
        load_recipe(write(tmp_path, run="quants: []\n"))
    with pytest.raises(ConfigError, match=r"'quant' must be a list of entries, got None"):
        load_recipe(write(tmp_path, run="# nothing\n"))


def test_recipes_need_only_spec_and_work_outside_the_repository(tmp_path):
    """As in an installed wheel: a package folder with the linked configs copied in, run from elsewhere, without jax."""
    package = tmp_path / "site" / "jlaqat"
    package.mkdir(parents=True)
    for name in ("recipes.py", "spec.py"):
        shutil.copy(ROOT / "jlaqat" / name, package / name)
    (package / "__init__.py").touch()
    shutil.copytree(ROOT / "configs", package / "configs")
    code = (
        "import sys, jlaqat.recipes as r; print(r.CONFIG_DIR, len(r.load_recipe('state_w_fp8')), 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(package / "configs"), "2", "False"], done.stderr
    assert recipes.CONFIG_DIR.is_dir()
