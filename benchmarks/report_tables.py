"""The tables of docs/performance.md, each a function of the results."""

from __future__ import annotations

from kernel_rows import ALL_SHAPES, COMPARED, GATES, SWEEP, TARGET_SHAPES
from report_data import COLUMNS, DASH, NAMES, ROUNDED, Results, number, ratio, shown_shape, table

BOTH = "fwd+bwd"
DIRECTIONS = {"fwd": "forward", BOTH: "forward + backward"}
JLA, FLA, PLAIN = ("jla", "plain"), ("fla", "plain"), ("triton", "plain")
NOTHING = "Not measured yet."
ALONE = 4  # processes that may compile beside each other on 16 cores
DISTURBED = 1.03  # median over least
SHORT_MS = 0.005  # kernels below it are left out


def words(results: Results) -> dict[str, str]:
    """What the text names: machine, dates, versions, spread of the calls, ceilings."""
    versions: dict[str, set[str]] = {}
    for row in results.rows:
        for package, version in row.get("versions", {}).items():
            versions.setdefault(package, set()).add(version)
    dates = sorted({row["date"] for row in results.rows})
    spreads = sorted((row["ms_max"] - row["ms_min"]) / row["ms"] for row in results.rows if "ms" in row) or [0.0]
    ceilings = results.ceilings or {}
    return {
        "machine": ", ".join(sorted({row["machine"] for row in results.rows})) or "No machine yet",
        "dates": " to ".join(dict.fromkeys((dates or [DASH])[:: max(1, len(dates) - 1)])),
        "versions": ", ".join(f"{package} {'/'.join(sorted(found))}" for package, found in sorted(versions.items())),
        "spread": f"{100 * spreads[len(spreads) // 2]:.1f} %",
        "compilers": str(max((row["compiling"] for row in results.rows if "compiling" in row), default=0)),
        "copy": number(ceilings.get("copy_tb_per_s"), 2),
        "rate": number(ceilings.get("bf16_tflop_per_s"), 0),
    }


# ------------------------------------------------------------------ targets


def targets(results: Results) -> str:
    """Each target of the project, what was measured and whether it is met."""
    lines = [_target(results, *target) for target in _speed_targets()]
    lines += [_rounding_target(results, *target) for target in _rounding_targets()]
    lines += [_residual_target(results, gate) for gate in GATES]
    lines.append(_compile_target(results))
    return table(["target", "at most", "measured", "", "ms"], lines)


def _speed_targets():
    """(gate, shape, peer, limit, stretch)"""
    limits = {("gdn", TARGET_SHAPES[0]): 1.0, ("gdn", TARGET_SHAPES[1]): 1.6}
    limits |= {("kda", TARGET_SHAPES[0]): 0.8, ("kda", TARGET_SHAPES[1]): 1.0}
    for (gate, shape), limit in limits.items():
        yield gate, shape, JLA, limit, 1.2 if limit == 1.6 else None
    for gate, shape in limits:
        yield gate, shape, FLA, 0.7, 0.7 if shape == TARGET_SHAPES[1] else None


def _rounding_targets():
    return [(gate, shape, limit) for shape, limit in zip(TARGET_SHAPES, (1.1, 1.2)) for gate in GATES]


def _verdict(value: float | None, limit: float, stretch: float | None = None) -> str:
    if value is None:
        return "not measured"
    if stretch == limit:
        return "met" if value <= limit else "missed (a stretch)"
    if value > limit:
        return "**missed**"
    return "met, the stretch too" if stretch and value <= stretch else "met"


def _target(results: Results, gate: str, shape: str, peer: tuple[str, str], limit: float, stretch) -> list[str]:
    ours, theirs = (results.least(gate, BOTH, shape, *column) for column in (ROUNDED, peer))
    value = ratio(ours, theirs)
    name = {"jla": "jla's", "fla": "FLA's"}[peer[0]]
    most = f"{limit}×" + (f" ({stretch}× the stretch)" if stretch and stretch != limit else "")
    measured = DASH if value is None else f"{value:.2f}×"
    label = f"{NAMES[gate]} forward + backward, {shown_shape(shape)}, of {name}"
    return [label, most, measured, _verdict(value, limit, stretch), f"{number(ours)} / {number(theirs)}"]


def _rounding_target(results: Results, gate: str, shape: str, limit: float) -> list[str]:
    rounded, plain = (results.least(gate, BOTH, shape, *column) for column in (ROUNDED, PLAIN))
    value = ratio(rounded, plain)
    measured = DASH if value is None else f"{100 * (value - 1):+.0f} %"
    label = f"{NAMES[gate]}: what rounding adds to forward + backward, {shown_shape(shape)}"
    times = f"{number(rounded)} / {number(plain)}"
    return [label, f"+{100 * (limit - 1):.0f} %", measured, _verdict(value, limit), times]


def _residual_target(results: Results, gate: str) -> list[str]:
    row = results.row(gate, BOTH, TARGET_SHAPES[0], *ROUNDED) or {}
    value = row.get("memory", {}).get("residual_mb")
    label = f"{NAMES[gate]}: kept for the backward beyond inputs and outputs, {shown_shape(TARGET_SHAPES[0])}"
    return [label, "300 MB", DASH if value is None else f"{value:.0f} MB", _verdict(value, 300), DASH]


def _compile_target(results: Results) -> list[str]:
    if results.first_calls:
        slowest = max(row["seconds"] for row in results.first_calls if row["cache"] == "empty")
        label = "compiling and running a first jitted call, the slowest of ours in the table below"
        return [label, "30 s", f"{slowest:.0f} s", _verdict(slowest, 30), DASH]
    times = [row["compile_s"] for row in results.rows if row["backend"] == "triton" and "compile_s" in row]
    value = max(times, default=None)
    crowd = max((row["compiling"] for row in results.rows if "compiling" in row), default=0)
    verdict = "not measured alone" if crowd > ALONE and value and value > 30 else _verdict(value, 30)
    label = "compiling a first jitted call, the slowest of ours in the table below (upper bound)"
    return [label, "30 s", DASH if value is None else f"≤ {value:.0f} s", verdict, DASH]


# ------------------------------------------------------------------ times


def times(results: Results, gate: str, direction: str) -> str:
    lines = [
        [shown_shape(shape), *(_cell(results, gate, direction, shape, *column) for column in COLUMNS)]
        for shape in ALL_SHAPES
    ]
    return _table(["", *COLUMNS.values()], [line for line in lines if set(line[1:]) != {DASH}])


def _table(header: list[str], lines: list[list[str]]) -> str:
    return table(header, lines) if lines else NOTHING


def _cell(results: Results, gate: str, direction: str, shape: str, backend: str, quant: str) -> str:
    """The median, and the least in brackets where the two are apart."""
    if results.refused(gate, direction, shape, backend, quant):
        return "refused"
    median = results.ms(gate, direction, shape, backend, quant)
    least = results.least(gate, direction, shape, backend, quant)
    if median is None or least is None or median <= DISTURBED * least:
        return number(median)
    return f"{median:.3f} ({least:.3f})"


def over_tokens(results: Results) -> str:
    columns = [(backend, quant) for backend, quants in COMPARED.items() for quant in quants]
    header = ["T", *(f"{NAMES[gate]}: {COLUMNS[column]}" for gate in GATES for column in columns)]
    lines = [
        [shape.split("x")[1], *(_cell(results, gate, BOTH, shape, *column) for gate in GATES for column in columns)]
        for shape in SWEEP
    ]
    lines = [line for line in lines if set(line[1:]) != {DASH}]
    if len(lines) < 2:
        return NOTHING
    return "![Time against T](../benchmarks/results/performance_time.png)\n\n" + _table(header, lines)


def floor_distances(results: Results) -> str:
    compared = {ROUNDED: "ours, state + w FP8", PLAIN: "ours, plain", JLA: "jla", FLA: "FLA"}
    lines = []
    for gate, direction, shape in results.targets():
        floor = results.floors(gate, direction, shape)
        if floor is None:
            continue
        shares = (ratio(results.least(gate, direction, shape, *column), floor.ms) for column in compared)
        label = f"{NAMES[gate]} {DIRECTIONS[direction]}, {shown_shape(shape)}"
        lines.append([label, number(floor.memory_ms), number(floor.matrix_ms), *(_times(share) for share in shares)])
    return _table(["", "memory, ms", "matrix, ms", *compared.values()], lines)


def _times(value: float | None) -> str:
    return DASH if value is None else f"{value:.1f}×"


def memory(results: Results) -> str:
    """Forward + backward: device and queued time, peak and residual memory."""
    lines = []
    for gate in GATES:
        for shape in TARGET_SHAPES:
            for column, name in COLUMNS.items():
                row = results.row(gate, BOTH, shape, *column)
                if row is None or "ms" not in row:
                    continue
                peak, residual = row["memory"]["peak_mb"], row["memory"]["residual_mb"]
                cells = [number(row["ms"]), number(row["queued_ms"]), number(peak, 0), number(residual, 0)]
                lines.append([f"{NAMES[gate]}, {shown_shape(shape)}: {name}", *cells])
    return _table(["forward + backward", "device ms", "queued ms", "peak MB", "residual MB"], lines)


def compiling(results: Results) -> str:
    """Seconds of the calls that were the first of their process."""
    if results.first_calls:
        parts = ("lower_s", "compile_s", "run_s", "seconds")
        lines = [
            [f"{NAMES[r['gate']]}, {r['quant']}, {r['cache']} cache"] + [number(r[part], 1) for part in parts]
            for r in results.first_calls
        ]
        return table(["forward + backward, 8×4096×16", "trace, Triton", "XLA", "first run", "seconds"], lines)
    lines = [
        [f"{NAMES[r['gate']]} {DIRECTIONS[r['pass']]}, {shown_shape(r['shape'])}", COLUMNS[r["backend"], r["quant"]]]
        + [number(r["compile_s"], 0)]
        for r in results.rows
        if "compile_s" in r
    ]
    return table(["", "", "seconds"], sorted(lines), left=2) if lines else NOTHING


# ------------------------------------------------------------------ where the time goes


def kernels(results: Results) -> str:
    """Our kernels at the targets' shapes, forward + backward, by the profiler."""
    parts = []
    for gate in GATES:
        rows = {
            (shape, quant): results.row(gate, BOTH, shape, "triton", quant)
            for shape in TARGET_SHAPES
            for quant in ("plain", "state+w fp8")
        }
        found = {key: row["kernels"] for key, row in rows.items() if row is not None and "kernels" in row}
        if not found:
            continue
        names = sorted({n for kernels in found.values() for n in kernels}, key=lambda n: (-_most(found, n), n))
        names = [name for name in names if _most(found, name) >= SHORT_MS]
        lines = [
            [f"`{name.removesuffix('_kernel')}`", *(number(kernels.get(name)) for kernels in found.values())]
            for name in names
        ]
        header = [NAMES[gate], *(f"{shown_shape(shape)}, {COLUMNS['triton', quant][6:]}" for shape, quant in found)]
        parts.append(table(header, lines))
    return "\n\n".join(parts) or NOTHING


def _most(found: dict, name: str) -> float:
    return max(kernels.get(name, 0.0) for kernels in found.values())


def counters(results: Results) -> str:
    lines = []
    for row in results.counters:
        if (row["ms"] or 0) < SHORT_MS:
            continue
        waits = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in list(row["waits"].items())[:4])
        spills = (row["spill_loads"] or 0) + (row["spill_stores"] or 0)
        share = ratio(spills, row["instructions"])
        cells = [number(row["ms"]), f"{row['registers']:.0f}", _percent(share)]
        cells += [number(row["warps_a_scheduler"], 1), number(row["issued_a_cycle"], 2)]
        cells += [number(row["tensor_percent"], 0), number(row["dram_percent"], 0)]
        cells.append(number((row["read_mb"] or 0) + (row["written_mb"] or 0), 0))
        lines.append([f"{NAMES[row['gate']]}, {shown_shape(row['shape'])}: `{row['kernel']}`", *cells, waits])
    header = ["", "ms", "registers", "spills", "warps", "issued", "tensor %", "DRAM %", "MB moved", "waits for"]
    return _table(header, lines)


def _percent(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.1f} %"


# ------------------------------------------------------------------ training


def training_step(results: Results) -> str:
    lines = []
    for row in sorted(
        results.steps, key=lambda r: (r["model"], r["backend"] == "xla", r["quant"] != "plain", r["date"])
    ):
        label = f"{NAMES[row['model']]}: {COLUMNS[row['backend'], row['quant']]}"
        label += f", {row['batch']}×{row['tokens']}" + (", layers computed again" if row.get("remat") else "")
        if "error" in row:
            lines.append([label, row["error"][:80], *[DASH] * 3, row["date"], ""])
            continue
        cells = [f"{row['tokens_per_s']:,}", f"{row['tokens_per_s_min']:,}–{row['tokens_per_s_max']:,}"]
        cells += [f"{row['ms']:.1f}", f"{row['program_mb']:,}" if row["program_mb"] else DASH]
        lines.append([label, *cells, row["date"], row.get("note", "")])
    header = ["model, B×T", "tokens/s", "least–most", "ms a step", "program MB", "date", "note"]
    return _table(header, lines)


def training_curves(results: Results) -> str:
    lines = []
    for row in results.curves:
        last = row["last_loss"] if "last_loss" in row else sum(row["losses"][-20:]) / 20
        cells = [str(row["steps"]), number(last, 4), number(row["held_out"], 4), number(row.get("distance"), 4)]
        lines.append([f"{NAMES[row['gate']]}: {row['run']}", *cells, f"{row['machine']}, {row['date']}"])
    header = ["", "steps", "training loss at the end", "held-out loss", "distance from xla bf16", "machine"]
    plot = "![Loss curves](../benchmarks/results/train_curve_h200.png)\n\n"
    drawn = any("losses" in row for row in results.curves)
    return (plot if drawn else "") + _table(header, lines)
