"""Each chunked kernel, as tuned for SM90, spills no more than was recorded for it."""

import json
import pathlib
import re
import sys

import pytest

pytest.importorskip("triton")

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from spills import BUDGETS, CASES, name_of, stacks, version

CONSTRAINTS = pathlib.Path(__file__).parents[1] / "constraints.txt"
RECORDED = json.loads(BUDGETS.read_text())
# What may be recorded at all, by gate. KDA's fine levels are functions with frames of their own, rarely called.
MOST = {"gdn": 512, "kda": 1024}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_no_kernel_spills_more_than_recorded(case):
    if version() not in RECORDED:
        pytest.skip(f"nothing is recorded for Triton {version()}: run python tests/spills.py")
    budget, found = RECORDED[version()][name_of(case)], stacks(case)
    assert found.keys() == budget.keys()
    assert {name: (found[name], budget[name]) for name in found if not 0 <= found[name] <= budget[name]} == {}


def test_recorded_are_all_cases_within_the_limits():
    installed = re.search(r"^triton==(\d+\.\d+)", CONSTRAINTS.read_text(), re.MULTILINE)  # by `make test`
    assert installed and installed[1] in RECORDED
    for cases in RECORDED.values():
        assert list(cases) == [name_of(case) for case in CASES]
        for name, budget in cases.items():
            assert all(0 <= stack <= MOST[name[:3]] for stack in budget.values()), (name, budget)
