"""What an eval run is to do: read from YAML, changed by flags, and hashed so that a resumed run is the same run."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

import expected
from expected import SettingsError
from hf_treespec import TreeConfig, TreeConfigError
from mutants import COUPLED, MUTANTS, RULES

__all__ = ["FREE", "Arm", "Settings", "unit_seed"]

SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_PENALTY = 1.3
# What may differ between a run and the one that goes on with it.
FREE = ("family", "prompts.limit")
_DTYPES = ("float32", "float64", "bfloat16", "float16")
# Ends of what the warpers of transformers take.
_RANGES = {
    # Below, logits that are divided by it are no numbers any more.
    "temperature": (1e-6, math.inf, "[)"),
    "top_p": (0.0, 1.0, "[]"),
    "min_p": (0.0, 1.0, "[]"),
    "repetition_penalty": (1e-6, 1e6, "[]"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way of making texts that are judged on their own.

    Args:
        rule: a verification rule, or "stock": plain `generate` of transformers.
        draft: as `drafts.make_draft` reads it.
        sampling: all of `SAMPLING`.
        mutant: bug to run with, or "".
    """

    rule: str
    draft: str
    sampling: Mapping[str, float]
    mutant: str = ""

    @property
    def name(self) -> str:
        """Readable and unique."""
        changed = [f"{key}={self.sampling[key]:g}" for key, usual in SAMPLING.items() if self.sampling[key] != usual]
        return " ".join([*([self.mutant] if self.mutant else []), self.rule, self.draft, *changed])

    @property
    def lossless(self) -> bool:
        """Whether the arm claims to follow the target's law."""
        known = self.rule in (COUPLED, "stock") or RULES[self.rule].lossless
        return known and not self.mutant


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A run.

    Args:
        model: "smollm2", or a folder or name for `from_pretrained`.
        dtype: of the target; float32 unless rounding itself is to be judged.
        drafts: drafts to try, see `drafts.make_draft`.
        prompts: see `promptsource.PromptSource`.
        rules: rules to try, or "all".
        sampling: list of changes to `SAMPLING`.
        tree: fields of `TreeConfig`.
        new_tokens: of a text, at most.
        repeats: texts of a prompt, generated as one batch.
        joint: exact laws of the first tokens: prompts, samples of each, tokens, branches of each token; 0 prompts
            leaves it out.
        seed: of everything.
        family: chance that a run without any bias fails.
        inject: bug to run with.
    """

    model: str = "smollm2"
    dtype: str = "float32"
    drafts: tuple[str, ...] = ("ngram",)
    prompts: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[str, ...] = ("all",)
    sampling: tuple[Mapping[str, float], ...] = ({},)
    tree: Mapping[str, Any] = field(default_factory=dict)
    new_tokens: int = 64
    repeats: int = 1
    joint: Mapping[str, int] = field(default_factory=dict)
    seed: int = 1
    family: float = 1e-3
    inject: str = ""

    def __post_init__(self) -> None:
        expected.text("model", self.model)
        expected.text("dtype", self.dtype, among=_DTYPES)
        expected.texts("drafts", self.drafts)
        expected.texts("rules", self.rules)
        rules = (COUPLED, *RULES)
        for rule in self.rules:
            if rule not in (*rules, "all", "lossless"):
                raise SettingsError(f"rules: {rule!r}: expected 'all', 'lossless' or one of {', '.join(rules)}")
        if not self.sampling:
            raise SettingsError("sampling: expected a list of at least one mapping; {} changes nothing")
        for one in self.sampling:
            expected.mapping("sampling", one, SAMPLING)
            for name, value in one.items():
                if name == "top_k":
                    expected.whole(f"sampling: {name}", value, 0)
                else:
                    low, high, ends = _RANGES[name]
                    expected.number(f"sampling: {name}", value, low, high, ends=ends)
        if not isinstance(self.prompts, Mapping):
            raise SettingsError(f"prompts: {self.prompts!r}: expected a mapping such as {{path: prompts.jsonl}}")
        _check_tree(self.tree)
        if self.inject != "":
            expected.text("inject", self.inject, among=MUTANTS)
        expected.mapping("joint", self.joint, JOINT)
        for name, value in self.joint.items():
            expected.whole(f"joint: {name}", value, 0 if name == "prompts" else 1)
        expected.whole("new_tokens", self.new_tokens, 1)
        expected.whole("repeats", self.repeats, 1)
        expected.whole("seed", self.seed, 0, (1 << 63) - 1)
        expected.number("family", self.family, 0, 1, ends="()")

    @classmethod
    def read(cls, path: Path | None, changes: Mapping[str, Any]) -> Settings:
        """From a file, with changes that count more than it.

        Raises:
            SettingsError: for a file that cannot be read, and for unknown or bad fields.
        """
        data: Any = {}
        if path is not None:
            try:
                data = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                raise SettingsError(f"{path}: {error}") from error
        if not isinstance(data, dict):
            raise SettingsError(f"{path}: expected a mapping of settings")
        # A name with nothing behind it is left at its default.
        data = {key: value for key, value in [*data.items(), *changes.items()] if value is not None}
        if unknown := sorted(str(key) for key in set(data) - {f.name for f in fields(cls)}):
            raise SettingsError(f"{', '.join(unknown)}: no such setting")
        for name in ("drafts", "rules", "sampling"):
            if name in data:
                data[name] = expected.several(name, data[name])
        return cls(**data)

    def arms(self) -> list[Arm]:
        """Everything to judge, each once.

        Raises:
            SettingsError: if two of them differ in digits that their names leave out.
        """
        if self.inject:
            found = MUTANTS[self.inject]
            rules: list[str] = [found.rule]
        else:
            rules = []
            for rule in self.rules:
                every = [COUPLED, *(r for r in RULES if rule == "all" or RULES[r].lossless)]
                rules += every if rule in ("all", "lossless") else [rule]
        arms: dict[str, Arm] = {}
        for draft, one, rule in itertools.product(self.drafts, self.sampling, dict.fromkeys(rules)):
            shaped = {**SAMPLING, **one}
            if self.inject and MUTANTS[self.inject].penalty and shaped["repetition_penalty"] == 1.0:
                shaped["repetition_penalty"] = _PENALTY
            arm = Arm(rule=rule, draft=draft, sampling=shaped, mutant=self.inject)
            if arms.setdefault(arm.name, arm) != arm:
                raise SettingsError(f"sampling: two settings are both named {arm.name!r}: round them to six digits")
        return list(arms.values())

    def stock_arms(self) -> list[Arm]:
        """Plain decoding under every sampling, for comparison."""
        shaped = {tuple(arm.sampling.items()) for arm in self.arms()}
        return [Arm(rule="stock", draft="none", sampling=dict(items)) for items in sorted(shaped)]

    def tree_config(self, arm: Arm, seed: int) -> TreeConfig:
        """The config of one call."""
        fields_of = {"fallback": "off", **self.tree, "verification": arm.rule, "seed": seed}
        return TreeConfig.from_dict(fields_of)

    def of_joint(self, name: str) -> int:
        """A field of `joint`, or its default."""
        return int({**JOINT, **self.joint}[name])

    def fingerprint(self, prompts: str, made_with: Mapping[str, Any]) -> str:
        """Changes with whatever changes a record of the run.

        The family matters to the verdict alone, and with a larger limit a run goes on.

        Args:
            prompts: tells sets of prompts apart.
            made_with: versions and weights.
        """
        unlimited = {name: value for name, value in self.prompts.items() if name != "limit"}
        told = {**asdict(replace(self, family=0.5, prompts=unlimited)), "prompts_hash": prompts, **made_with}
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=list).encode()).hexdigest()[:16]


def _check_tree(tree: object) -> None:
    # The rule is that of the arm, the seed that of the unit.
    expected.mapping("tree", tree, [f.name for f in fields(TreeConfig) if f.name not in ("verification", "seed")])
    assert isinstance(tree, Mapping)
    try:
        config = TreeConfig.from_dict(tree)
    except TreeConfigError as error:
        raise SettingsError(f"tree: {error}") from error
    if config.max_nodes == 0:
        raise SettingsError("tree: max_nodes: 0: expected at least 1: without nodes there is no rule to test")


JOINT = {"prompts": 0, "samples": 400, "tokens": 3, "branches": 4, "rows": 50}


def unit_seed(*parts: object) -> int:
    """A seed in [0, 2**63) from anything that has a stable repr."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
