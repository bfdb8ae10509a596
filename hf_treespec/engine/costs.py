"""What is known of the costs of a call before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hf_treespec import _compat
from hf_treespec.control import CostKey, Costs, Measured, Setting, costs_of, find_measured, known_of
from hf_treespec.engine.request import Request
from hf_treespec.machine import hardware_of
from hf_treespec.routes import Route

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["draft_name", "known_costs", "setting_of", "take_measured", "way_of"]


def known_costs(request: Request, named: str, way: str, *, chooses: bool) -> Costs:
    """What `treespec calibrate` and earlier calls found out of the target, and of the same draft.

    Sizes that are chosen by what earlier draws made likely, or had timed, would hang on draws: the next call may
    repeat them, and under a rule of independent draws its law would be another. Such a call begins from a copy, which
    ends with it, of what is known without any call of its kind.

    Args:
        request: the call.
        named: the draft, see `draft_name`.
        way: how trees enter the target, see `way_of`.
        chooses: whether sizes are chosen, or costs asked for; else nothing is looked up, and nothing is kept.
    """
    if not chooses:
        return Costs()
    target = request.target
    rows, device = int(request.input_ids.shape[0]), target.device
    key = CostKey(
        batch=_rounded(rows),
        dtype=_dtype(target),
        device=str(device),
        attention=_compat.attention_implementation(target),
        route=way,
        threads=_threads(device),
        draft=named,
    )

    def begin(key: CostKey) -> Costs:
        costs = Costs()
        for curve in find_measured(lambda: setting_of(target, way, device)):
            if _rounded(curve.batch) == key.batch and curve.draft in ("", named):
                costs.assume(curve.context, target=curve.target, drafting=curve.drafting or {})
        return costs

    known = costs_of(target, key, begin)
    return known if request.rule is None else known.of_rounds()


def setting_of(target: PreTrainedModel, way: str, device: torch.device) -> Setting:
    """What the costs of a target hold for; to be asked within a call, as some change the attention.

    Args:
        target: the model.
        way: how trees enter it, see `way_of`.
        device: where it lies.
    """
    return Setting(
        model=_compat.class_name(target),
        config=_compat.config_hash(target),
        parameters=_count(target),
        dtype=_dtype(target),
        device=hardware_of(device),
        attention=_compat.attention_implementation(target),
        route=way,
        threads=_threads(device),
        torch=torch.__version__,
        transformers=_compat.transformers_version(),
    )


def way_of(route: Route, cache: Any, *, guided: bool) -> str:
    """How trees enter a target: the route, the cache that is read on it, and whether guidance reads all twice.

    Args:
        route: of the call.
        cache: of the target, after the prefill.
        guided: whether guidance is a second stream.
    """
    return f"{route.value}, {_compat.cache_name(cache)}{', guided' if guided else ''}"


def take_measured(target: PreTrainedModel, curves: Sequence[Measured]) -> None:
    """Have later calls of this very model begin from curves, too, in place of what earlier ones found.

    Args:
        target: the model.
        curves: of it, on this machine.
    """
    for key, costs in known_of(target).items():
        own = (key.dtype, hardware_of(torch.device(key.device)), key.attention, key.route, key.threads)
        costs.take(
            (curve.context, curve.target, curve.drafting or {})
            for curve in curves
            for of in (curve.setting,)
            if (of.dtype, of.device, of.attention, of.route, of.threads) == own
            and _rounded(curve.batch) == key.batch
            and curve.draft in ("", key.draft)
        )


def draft_name(name: str, request: Request) -> str:
    """What tells drafts of one name apart.

    Args:
        name: of the source.
        request: the call.
    """
    own = request.assistant_model if request.head is None else request.head
    if own is not None:
        return f"{name} {_compat.class_name(own)} {_count(own)}"
    return f"{name} without {','.join(map(str, request.skipped))}" if request.skipped else name


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _rounded(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


def _dtype(target: PreTrainedModel) -> str:
    return str(_compat.working_dtype(target)).removeprefix("torch.")


def _threads(device: torch.device) -> int:
    return torch.get_num_threads() if device.type == "cpu" else 0
