"""A trained draft head in half precision, with its card: what `make demo` loads.

    python evals/ship_draft.py RUN --out evals/demo_draft

RUN is the folder of `treespec train --out`. The weights are those of its best look, which are kept in float32; the
draft beside them has the target's type.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch

from hf_treespec import TreeSpecError, load_draft, save_draft

TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
# float16 has three more bits for the weights than bfloat16, and none of them comes near its bounds.
_TYPE = torch.float16


def best_weights(run: Path) -> Path:
    """The checkpoint of the best look.

    Raises:
        FileNotFoundError: if there is none.
    """
    found = sorted(run.glob("checkpoints/best-*.pt"), key=lambda path: int(path.stem.partition("-")[2]))
    if not found:
        raise FileNotFoundError(f"{run}: no checkpoints/best-*.pt; expected the folder of a finished `treespec train`")
    return found[-1]


def ship(run: Path, out: Path, target: str = TARGET) -> None:
    """Write the head and its card.

    Args:
        run: folder of a finished run of a head.
        out: folder, which is made anew.
        target: name that the card and the head's config call the target by.

    Raises:
        FileNotFoundError: if the run is not finished.
        ValueError: if a weight cannot be told in half precision, the card does not say which target it is for, or
            `out` lies in the run's folder or around it.
    """
    if out.resolve().is_relative_to(run.resolve()) or run.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"--out {out}: is made anew, and would take {run} with it; pass a folder beside the run")
    weights = best_weights(run)
    card = (run / "draft" / "README.md").read_text()
    named = next((line for line in card.splitlines() if line.startswith("base_model: ")), "").partition(": ")[2]
    if not named:
        raise ValueError(f"{run / 'draft' / 'README.md'}: no line 'base_model: ...'; expected the card of the run")
    head = load_draft(run / "draft")
    named_type = str(_TYPE).removeprefix("torch.")
    was = str(next(head.parameters()).dtype).removeprefix("torch.")
    head = head.float()
    head.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    head = head.to(_TYPE)
    if broken := [name for name, weight in head.named_parameters() if not weight.isfinite().all()]:
        raise ValueError(f"{', '.join(broken)}: beyond the range of {_TYPE}")
    shutil.rmtree(out, ignore_errors=True)
    save_draft(head, out, target=target)
    # It is written with the config that it was read with.
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "torch_dtype": named_type}, indent=2) + "\n")
    card = card.replace(named, target).replace(f"weights ({was})", f"weights ({named_type})")
    (out / "README.md").write_text(card)
    for plot in (run / "draft").glob("*.svg"):
        shutil.copy(plot, out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default=TARGET)
    arguments = parser.parse_args()
    try:
        ship(arguments.run, arguments.out, arguments.target)
    except (OSError, ValueError, TreeSpecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in arguments.out.glob("*.safetensors"))
    print(f"{arguments.out}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
