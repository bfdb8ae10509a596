"""The two units of work of `distribution.py`: a text and what it says, and many short texts of one prompt.

A unit depends on the settings and on its own seed alone, so that any process may do it.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from drafts import is_made, make_draft
from expected import SettingsError
from generation_fields import shaping
from hf_treespec import enable
from hf_treespec.train import weights_mark
from mutants import mutant
from promptsource import Prompt
from settings import Arm, Settings, unit_seed
from textlaws import cell_of, cells, laws_of_text, together, witness
from versions import versions

__all__ = ["Bench", "flaw"]

_NULL_TOLERANCE = 2e-3
_TOLD: dict[str, type] = {"kind": str, "arm": str, "prompt": int, "digest": str}
_FOUND: dict[str, dict[str, type]] = {
    "text": {"n": int, "used": int, "impossible": int, "edge": int},
    "joint": {"counts": dict, "law": dict},
}


def flaw(record: Mapping[str, Any]) -> str:
    """What keeps a line of a shard from being a unit, in words; "" if nothing does."""
    needed = {**_TOLD, **_FOUND.get(str(record.get("kind")), {})}
    for name, kind in needed.items():
        if type(record.get(name)) is not kind:
            return f"unit {record.get('key')!r} has {name}={record.get(name)!r}, expected {kind.__name__}"
    if record["kind"] not in _FOUND:
        return f"unit {record.get('key')!r} has kind={record['kind']!r}, expected one of {', '.join(_FOUND)}"
    return ""


class Bench:
    """The models, and everything that a unit needs.

    Args:
        settings: of the run.
        target: the model to judge; it is enabled, and a shallow copy of it that is not gives plain decoding.

    Raises:
        SettingsError: if the model's own generation config asks for what the settings do not say.
    """

    def __init__(self, settings: Settings, target: Any) -> None:
        if shaped := shaping(target.generation_config):
            raise SettingsError(
                f"model: its generation_config sets {', '.join(shaped)}, so that plain decoding follows another law "
                "than these settings say: set to None there, and save the model"
            )
        self.settings = settings
        self.readable: int = target.get_input_embeddings().weight.shape[0]
        self._mark = weights_mark(target)
        self.stock = copy.copy(target)
        self.target = enable(target)
        self._drafts: dict[str, Any] = {}
        config = target.generation_config
        ends = config.eos_token_id
        self._ends = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
        self._pad = config.pad_token_id if config.pad_token_id is not None else next(iter(self._ends), 0)
        self._laws: dict[tuple[Any, ...], dict[str, float]] = {}

    def draft(self, spec: str) -> Any:
        """The assistant of that name, made once."""
        if spec not in self._drafts:
            self._drafts[spec] = make_draft(spec, self.target, self.settings.seed)
        return self._drafts[spec]

    def made_with(self) -> dict[str, Any]:
        """Versions and weights: records that were made with others are those of another run."""
        marks = {f"draft {spec}": weights_mark(self.draft(spec)) for spec in self.settings.drafts if not is_made(spec)}
        return {"versions": versions(), "weights": {"model": self._mark, **marks}}

    def check_null(self, arm: Arm, prompt: Prompt) -> None:
        """See that plain decoding samples from the law that texts are judged by.

        Raises:
            SettingsError: if the model's own generation config shapes it further.
        """
        out = self._generate(self._stock(arm), prompt, 4, 1, seed=0, scores=True)
        new = len(out.scores)
        law, _ = laws_of_text(self.target, out.sequences[0].tolist(), len(prompt.ids), arm.sampling)
        for step in range(new):
            off = (out.scores[step][0].cpu().double().softmax(-1) - law[step].exp()).abs().sum() / 2
            if off > _NULL_TOLERANCE:
                raise SettingsError(
                    f"plain decoding with {dict(arm.sampling)} samples from another law than these settings say "
                    f"(total variation {float(off):.3g} at token {step}): "
                    "the model's generation_config adds processors"
                )

    def text(self, arm: Arm, prompt: Prompt) -> dict[str, Any]:
        """All texts of a prompt, in one call, judged."""
        seed = unit_seed(self.settings.seed, arm.name, prompt.digest)
        start = time.perf_counter()
        out = self._generate(arm, prompt, self.settings.new_tokens, self.settings.repeats, seed=seed)
        seconds = time.perf_counter() - start
        record: dict[str, Any] = {}
        draft = self.draft(arm.draft)
        for row, ids in enumerate(out.sequences.tolist()):
            first = len(prompt.ids)
            # Behind its end a row holds padding.
            last = next((n for n in range(first, len(ids)) if ids[n] in self._ends), len(ids) - 1)
            ids = ids[: last + 1]
            target, bare = laws_of_text(self.target, ids, first, arm.sampling)
            drafted = None if draft is None else laws_of_text(draft, ids, first, arm.sampling)[0]
            found = witness(target, bare, drafted, ids[first:], unit_seed(seed, "places", row), arm.sampling)
            record = together(record, found) if record else found
        stats = self.target.treespec_stats
        record["stats"] = {
            "row_rounds": stats.row_rounds,
            "accepted": stats.accepted_tokens,
            "expected": round(stats.expected_accepted, 6),
            "drafted": stats.drafted_nodes,
            "trees": next(iter(stats.drafted_by_depth), 0),
        }
        return {**record, "seconds": round(seconds, 3)}

    def joint(self, arm: Arm, prompt: Prompt) -> dict[str, Any]:
        """Counts of the first tokens of many texts, and their exact law."""
        of = self.settings.of_joint
        place = (prompt.index, *arm.sampling.values())
        if place not in self._laws:
            self._laws[place] = cells(
                self.target, prompt.ids, of("tokens"), of("branches"), arm.sampling, self._ends
            )  # fmt: skip
        law = self._laws[place]
        counts: Counter[str] = Counter()
        for chunk, done in enumerate(range(0, of("samples"), of("rows"))):
            rows = min(of("rows"), of("samples") - done)
            seed = unit_seed(self.settings.seed, arm.name, prompt.digest, "joint", chunk)
            out = self._generate(arm, prompt, of("tokens"), rows, seed=seed)
            counts.update(cell_of(text, law) for text in out.sequences[:, len(prompt.ids) :].tolist())
        return {"counts": dict(sorted(counts.items())), "law": law}

    def _stock(self, arm: Arm) -> Arm:
        return Arm(rule="stock", draft="none", sampling=arm.sampling)

    def _generate(self, arm: Arm, prompt: Prompt, new: int, rows: int, *, seed: int, scores: bool = False) -> Any:
        ids = torch.tensor([prompt.ids], device=self.target.device)
        call: dict[str, Any] = {
            "attention_mask": torch.ones_like(ids), "do_sample": True, "max_new_tokens": new,
            "pad_token_id": self._pad, "num_return_sequences": rows, "return_dict_in_generate": True,
            "output_scores": scores,
            **arm.sampling, "top_k": int(arm.sampling["top_k"]),
        }  # fmt: skip
        if not arm.sampling["min_p"]:
            del call["min_p"]
        if arm.rule == "stock":
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                return self.stock.generate(ids, **call)
        draft = self.draft(arm.draft)
        if draft is not None:
            call["assistant_model"] = draft
        with mutant(arm.mutant) if arm.mutant else nullcontext():
            return self.target.generate(ids, tree_config=self.settings.tree_config(arm, seed), **call)
