"""Makes docs/performance.md, and its plots, from the JSON of the benchmarks.

    python3 benchmarks/report.py            # writes docs/performance.md and benchmarks/results/performance_*.png
    python3 benchmarks/report.py --check    # exit status 1 if docs/performance.md is not what the JSON gives

Reads benchmarks/results/{performance,first_call,ceilings,counters,qat_step,train_curve}_h200.json and the words around
the tables, benchmarks/performance.template.md. The same files give the same page.
"""

from __future__ import annotations

import argparse
import string
import sys
from pathlib import Path

import report_tables as tables
from kernel_rows import GATES
from report_data import Results

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
FOLDER = ROOT / "benchmarks" / "results"
MISSED = ROOT / "benchmarks" / "performance_missed.md"
TEMPLATE = ROOT / "benchmarks" / "performance.template.md"


def page(results: Results) -> str:
    """The whole page."""
    parts = {f"times_{gate}_fwd": tables.times(results, gate, "fwd") for gate in GATES}
    parts |= {f"times_{gate}_both": tables.times(results, gate, "fwd+bwd") for gate in GATES}
    for part in (
        tables.targets,
        tables.over_tokens,
        tables.floor_distances,
        tables.memory,
        tables.compiling,
        tables.kernels,
        tables.counters,
        tables.training_step,
        tables.training_curves,
    ):
        parts[part.__name__] = part(results)
    parts["missed"] = MISSED.read_text().strip()
    return string.Template(TEMPLATE.read_text()).substitute(parts | tables.words(results))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    args = parser.parse_args()
    results = Results(FOLDER)
    text = page(results)
    if args.check:
        same = PAGE.exists() and PAGE.read_text() == text
        print("docs/performance.md is what the JSON gives" if same else "stale: run python3 benchmarks/report.py")
        return 0 if same else 1
    PAGE.write_text(text)
    import report_plots  # needs matplotlib

    report_plots.draw(results, FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
