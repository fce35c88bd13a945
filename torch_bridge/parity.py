"""The PyTorch side of `jlaqat parity`: `python -m jlaqat.torch_bridge.parity FOLDER bridge|fla`, in its own process.

Reads FOLDER/inputs.npz (see `jlaqat.parity_files`), runs the bridge or FLA with gradients, writes FOLDER/bridge.npz or
fla.npz. On a CPU the bridge needs TRITON_INTERPRET=1 and FLA its naive references. A failure is one line in the file
FOLDER/bridge.error, so that a peer that refuses a call is reported instead of ending the run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from jlaqat.parity_files import OPERANDS, Case, read_arrays, read_case, write_arrays
from jlaqat.spec import DeltaQuant


def tensors(folder: Path, name: str, device: str) -> dict[str, torch.Tensor]:
    """Bits as NumPy knows them, and the dtype's name: NumPy has no bfloat16."""
    return {
        key: torch.from_numpy(bits).view(getattr(torch, dtype)).to(device)
        for key, (bits, dtype) in read_arrays(folder / f"{name}.npz").items()
    }


def bridge(x: dict[str, torch.Tensor], case: Case, cu_seqlens: torch.Tensor | None):
    from jlaqat.torch_bridge.autograd import chunk_delta_rule

    return chunk_delta_rule(**x, cu_seqlens=cu_seqlens, quant=DeltaQuant(state=case.state, w=case.w))


def fla(x: dict[str, torch.Tensor], case: Case, cu_seqlens: torch.Tensor | None):
    """FLA's kernels on a GPU, its naive references, sequence by sequence, elsewhere."""
    if x["q"].device.type == "cuda":
        if case.gate == "kda":
            from fla.ops.kda import chunk_kda as run
        else:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule as run
        cu = None if cu_seqlens is None else cu_seqlens.long()
        return run(**x, output_final_state=True, cu_seqlens=cu)
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.kda.naive import naive_recurrent_kda

    naive = naive_recurrent_kda if case.gate == "kda" else naive_recurrent_gated_delta_rule
    if case.gate == "gdn":  # which knows no grouped heads
        group = x["v"].shape[2] // x["q"].shape[2]
        x = x | {name: x[name].repeat_interleave(group, 2) for name in ("q", "k")}
    state = x["initial_state"]
    rows = {name: a for name, a in x.items() if name != "initial_state"}
    if cu_seqlens is None:
        o, final_state = naive(**rows, initial_state=state, output_final_state=True)
        return o.to(x["v"].dtype), final_state
    outputs, finals = [], []
    bounds = cu_seqlens.tolist()
    for n, (start, end) in enumerate(zip(bounds, bounds[1:])):
        if start == end:
            finals.append(state[n : n + 1])
            continue
        part = {name: a[:, start:end] for name, a in rows.items()}
        o, final_state = naive(**part, initial_state=state[n : n + 1], output_final_state=True)
        outputs.append(o.to(x["v"].dtype))
        finals.append(final_state)
    outputs.append(torch.zeros_like(x["v"][:, bounds[-1] :]))
    return torch.cat(outputs, 1), torch.cat(finals)


def run(folder: Path, which: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = read_case(folder)
    given = tensors(folder, "inputs", device)
    do, dfinal = given.pop("do"), given.pop("dfinal")
    cu_seqlens = given.pop("cu_seqlens", None)
    leaves = {name: given[name].requires_grad_() for name in OPERANDS}
    began = time.perf_counter()
    o, final_state = {"bridge": bridge, "fla": fla}[which](leaves, case, cu_seqlens)
    gradients = torch.autograd.grad([o, final_state], list(leaves.values()), [do, dfinal.to(final_state.dtype)])
    found = {"o": o, "final_state": final_state}
    found |= {f"d{name}": d for name, d in zip(leaves, gradients, strict=True)}
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    arrays = {
        name: (a.detach().contiguous().cpu().view(bits[a.element_size()]).numpy(), str(a.dtype).removeprefix("torch."))
        for name, a in found.items()
    }
    write_arrays(folder / f"{which}.npz", arrays)
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"{which} on {where}: {time.perf_counter() - began:.1f} s, kernels compiled or interpreted included")


def main() -> int:
    folder, which = Path(sys.argv[1]), sys.argv[2]
    try:
        run(folder, which)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        # CUDA says what is wrong at first and Triton at last.
        said = " … ".join(line[:300] for line in dict.fromkeys((lines[0], lines[-1])))
        (folder / f"{which}.error").write_text(f"{type(error).__name__}: {said}")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
