"""From rows to one line per set and method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_treespec.cli.bootstrap import Interval, rate_ratio, ratio_of_totals
from hf_treespec.cli.rows import Row, tokens_per_round

__all__ = ["BASELINE", "DEFINITIONS", "Summary", "summarise", "table"]

BASELINE = "plain"

DEFINITIONS = {
    "new_tokens": "tokens of the output minus tokens of the prompt, for every method",
    "target_forwards": "calls of the target model, counted by one hook for every method, the first one included",
    "tokens_per_round": "(new_tokens - 1) / (target_forwards - 1), both summed over the calls; plain decoding gives "
    "1. The first forward of prompt_lookup and assisted already verifies a draft, and what it accepts counts for them",
    "ratio": "total seconds of plain / total seconds of the method, with a 95 % interval by a paired bootstrap over "
    "prompts (10,000 resamples)",
    "ratio_per_token": "the same for tokens a second: for texts of unequal length, as sampled ones are",
    "equal": "calls whose new tokens are those of the reference, out of compared: plain at temperature 0; above it, "
    "for trees, max_nodes=0 with the same seed",
    "draft_seconds": "as the method reports them; transformers' own methods do not",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One method on one set; `DEFINITIONS` says how each figure comes about. None: does not apply.

    Args:
        set: prompt set.
        method: name of the method.
        prompts: prompts measured.
        calls: rows, that is prompts times repeats.
        seconds: total.
        new_tokens: total.
        target_forwards: total.
        tokens_per_round: of the totals.
        tokens_per_second: of the totals.
        draft_seconds: total.
        ratio: speed-up over the baseline.
        ratio_per_token: speed-up over the baseline, per token.
        equal: calls with the text of the reference.
        compared: calls that were compared.
    """

    set: str
    method: str
    prompts: int
    calls: int
    seconds: float
    new_tokens: int
    target_forwards: int
    tokens_per_round: float | None
    tokens_per_second: float
    draft_seconds: float | None
    ratio: Interval | None
    ratio_per_token: Interval | None
    equal: int
    compared: int

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def summarise(rows: Iterable[Row]) -> list[Summary]:
    """One summary per set and method, in the order of their first rows."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.set, row.method), []).append(row)
    return [_summary(group, groups.get((name, BASELINE), [])) for (name, _), group in groups.items()]


def _summary(rows: Sequence[Row], baseline: Sequence[Row]) -> Summary:
    seconds, tokens = sum(row.seconds for row in rows), sum(row.new_tokens for row in rows)
    forwards = sum(row.target_forwards for row in rows)
    drafts = [row.draft_seconds for row in rows if row.draft_seconds is not None]
    checked = [row.text_equal for row in rows if row.text_equal is not None]
    ratio, ratio_per_token = _ratios(rows, baseline)
    # Each call has a first forward and a first token of its own.
    return Summary(
        set=rows[0].set,
        method=rows[0].method,
        prompts=len({row.prompt for row in rows}),
        calls=len(rows),
        seconds=seconds,
        new_tokens=tokens,
        target_forwards=forwards,
        tokens_per_round=tokens_per_round(tokens - len(rows) + 1, forwards - len(rows) + 1),
        tokens_per_second=tokens / seconds,
        draft_seconds=sum(drafts) if drafts else None,
        ratio=ratio,
        ratio_per_token=ratio_per_token,
        equal=sum(checked),
        compared=len(checked),
    )


def _ratios(rows: Sequence[Row], baseline: Sequence[Row]) -> tuple[Interval | None, Interval | None]:
    ours = {(row.prompt, row.repeat): row for row in rows}
    theirs = {(row.prompt, row.repeat): row for row in baseline}
    # A CSV may have been cut off: a call without its counterpart belongs in no paired figure.
    pairs = [(theirs[key], ours[key]) for key in ours if key in theirs]
    if not pairs or rows[0].method == BASELINE:
        return None, None
    # The prompt is what was drawn from the world, so its repeats are added up and resampled together.
    prompts = sorted({row.prompt for _, row in pairs})
    totals = {prompt: [0.0, 0.0, 0.0, 0.0] for prompt in prompts}
    for base, row in pairs:
        total = totals[row.prompt]
        for place, figure in enumerate((base.seconds, base.new_tokens, row.seconds, row.new_tokens)):
            total[place] += figure
    base_seconds, base_tokens, seconds, tokens = zip(*(totals[prompt] for prompt in prompts), strict=True)
    return ratio_of_totals(base_seconds, seconds), rate_ratio(base_seconds, base_tokens, seconds, tokens)


def table(summaries: Sequence[Summary], *, sampled: bool) -> str:
    """The summaries as text.

    Args:
        summaries: what to show.
        sampled: whether texts may differ in length, so that the speed-up is shown per token.
    """
    title = "speed-up a token" if sampled else "speed-up"
    header = ("set", "method", "prompts", "tokens", "tokens/round", "tokens/s", f"{title} [95 %]", "text equal")
    cells = [header, *(_line(summary, sampled) for summary in summaries)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(header))]
    # Names to the left, figures to the right.
    shown = (
        "  ".join(cell.ljust(width) if place < 2 else cell.rjust(width) for place, (cell, width) in enumerate(line))
        for line in (zip(line, widths, strict=True) for line in cells)
    )
    return "\n".join(line.rstrip() for line in shown)


def _line(summary: Summary, sampled: bool) -> tuple[str, ...]:
    ratio = summary.ratio_per_token if sampled else summary.ratio
    speed = "-"
    if ratio is not None:
        speed = f"{ratio.value:.2f}" if ratio.low is None else f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
    return (
        summary.set,
        summary.method,
        str(summary.prompts),
        str(summary.new_tokens),
        "-" if summary.tokens_per_round is None else f"{summary.tokens_per_round:.2f}",
        f"{summary.tokens_per_second:.1f}",
        speed,
        f"{summary.equal}/{summary.compared}" if summary.compared else "-",
    )
