"""The card of a draft: what it was made of, and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_treespec.train.checkpoints import Progress

__all__ = ["write_card"]

_PLOT = "accepted-length.svg"
# Rows of the table at most.
_ROWS = 12


def write_card(folder: Path, facts: Mapping[str, Any], looks: Sequence[Progress]) -> None:
    """Write `README.md` and its plot.

    Args:
        folder: of the draft.
        facts: of the run, see `TrainResult.to_dict`.
        looks: of the training.
    """
    (folder / _PLOT).write_text(_plot(looks))
    measured = [
        f"| {one['temperature']:g} | {one['tokens_per_round']:.2f} | {one['prompts']} | "
        f"{'' if one['equal'] is None else '{equal} of {prompts}'.format(**one)} |"
        for one in facts["measured"]
    ]
    settings = facts["settings"]
    tree = f"{settings['max_nodes']} nodes, at most {settings['measured_tokens']} new tokens, batch 1"
    lines = [
        "---",
        f"base_model: {facts['target']}",
        "library_name: hf_treespec",
        "tags: [speculative-decoding]",
        "---",
        "",
        f"# A draft of kind {facts['kind']} for {facts['target']}",
        "",
        f"{facts['parameters']:,} weights ({facts['dtype']}), {facts['bytes'] / 1e6:.1f} MB. It proposes trees of "
        "tokens, of which the target keeps what it would have written itself: fewer forwards, and the same text.",
        "",
        "```python",
        *_usage(facts["kind"], facts["target"]),
        "```",
        "",
        "## Learnt from",
        "",
        f"{facts['tokens']:,} tokens that the target wrote itself in {facts['texts']:,} texts, at temperatures "
        f"{', '.join(f'{t:g}' for t in settings['texts']['temperatures'])}; {facts['tokens_trained']:,} with those of "
        f"each epoch counted, in {facts['seconds']:,.0f} seconds. {facts['held_out']} prompts were held out.",
        "",
        "## Figures on held-out prompts",
        "",
        f"Accepted length: tokens a round of a greedy chain of {settings['depths']} drafted ones, over all places of "
        f"the target's greedy texts. Untrained {facts['accepted_length']['untrained']:.2f}, trained "
        f"**{facts['accepted_length']['best']:.2f}**.",
        "",
        f"![accepted length against tokens trained]({_PLOT})",
        "",
        "| tokens trained | loss | accepted length | |",
        "|---|---|---|---|",
        *(
            f"| {look.tokens:,} | {'' if look.loss is None else f'{look.loss:.3f}'} | {look.accepted_length:.3f} | "
            f"{'best so far' if look.best else ''} |"
            for look in _some(looks)
        ),
        "",
        *(
            [
                f"Calls of `generate` with trees ({tree}): tokens a round, and greedy texts equal to plain decoding.",
                "",
                "| temperature | tokens a round | prompts | equal |",
                "|---|---|---|---|",
                *measured,
                "",
            ]
            if measured
            else []
        ),
        "## Settings",
        "",
        *(f"- {name}: {value}" for name, value in _flat(settings)),
        "",
        "Made with " + ", ".join(f"{name} {value}" for name, value in facts["made_with"].items() if value) + ".",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def _usage(kind: str, target: str) -> list[str]:
    """Lines of Python that draft with it."""
    head = kind != "model"
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f"from hf_treespec import TreeConfig, enable{', load_draft' if head else ''}",
        "",
        f'target = "{target}"',
        "tokenizer = AutoTokenizer.from_pretrained(target)",
        "model = enable(AutoModelForCausalLM.from_pretrained(target))",
        f'draft = {"load_draft" if head else "AutoModelForCausalLM.from_pretrained"}("this folder").to(model.device)',
        *(
            ["config = TreeConfig()"]
            if head
            else [
                "# Of its LM head only the ids that the target writes most often; TreeConfig() takes all.",
                'config = TreeConfig(draft_options={"model": {"vocabulary": "this folder/vocabulary.json"}})',
            ]
        ),
        'inputs = tokenizer("...", return_tensors="pt").to(model.device)',
        "out = model.generate(**inputs, assistant_model=draft, tree_config=config, max_new_tokens=256)",
        *([] if head else ["# Without tree_config it is assisted decoding of transformers."]),
    ]


def _some(looks: Sequence[Progress]) -> list[Progress]:
    """The first, the last, the best, and some between."""
    best = max(looks, key=lambda look: look.accepted_length)
    every = max(1, -(-len(looks) // _ROWS))
    return [look for place, look in enumerate(looks) if place % every == 0 or look in (best, looks[-1])]


def _flat(settings: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in settings.items():
        found += _flat(value, f"{above}{name}.") if isinstance(value, Mapping) else [(f"{above}{name}", value)]
    return found


# -- the plot --

_WIDE, _HIGH, _LEFT, _LOW, _AIR = 640, 360, 60, 50, 20


def _plot(looks: Sequence[Progress]) -> str:
    """Accepted length against tokens, as SVG."""
    most = max(1, looks[-1].tokens)
    lengths = [look.accepted_length for look in looks]
    top, low = max(*lengths, 1.1), 1.0
    across = [_LEFT + (_WIDE - _LEFT - _AIR) * look.tokens / most for look in looks]
    up = [_HIGH - _LOW - (_HIGH - _LOW - _AIR) * (length - low) / (top - low) for length in lengths]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, up, strict=True))
    ticks = []
    for part in range(5):
        x, y = _LEFT + (_WIDE - _LEFT - _AIR) * part / 4, _HIGH - _LOW - (_HIGH - _LOW - _AIR) * part / 4
        ticks += [
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDE - _AIR}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{low + (top - low) * part / 4:.2f}</text>',
            f'<text x="{x:.1f}" y="{_HIGH - _LOW + 18}" text-anchor="middle">{most * part / 4:,.0f}</text>',
        ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDE}" height="{_HIGH}" font-family="sans-serif" '
            'font-size="12">',
            f'<rect width="{_WIDE}" height="{_HIGH}" fill="white"/>',
            *ticks,
            f'<text x="{_WIDE / 2}" y="{_HIGH - 8}" text-anchor="middle">tokens trained</text>',
            f'<text x="16" y="{_HIGH / 2}" text-anchor="middle" transform="rotate(-90 16 {_HIGH / 2})">'
            "accepted length</text>",
            f'<polyline points="{points}" fill="none" stroke="#1f5fa8" stroke-width="2"/>',
            *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#1f5fa8"/>' for x, y in zip(across, up, strict=True)),
            "</svg>",
            "",
        ]
    )
