"""What is known of the costs of a call before it begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_treespec import _compat
from hf_treespec.control import CostKey, Costs, Setting, costs_of, find_measured
from hf_treespec.engine.request import Request
from hf_treespec.machine import hardware_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["draft_name", "known_costs", "setting_of"]


def known_costs(request: Request, named: str) -> Costs:
    """What `treespec calibrate` and earlier calls found out of the target, and of the same draft.

    Args:
        request: the call.
        named: the draft, see `draft_name`.
    """
    target, device = request.target, request.input_ids.device
    rows, kv_cache = int(request.input_ids.shape[0]), request.tree_config.kv_cache
    key = CostKey(
        batch=_rounded(rows),
        dtype=_dtype(target),
        device=str(device),
        attention=_compat.attention_implementation(target),
        route=_way(request.route.value, kv_cache),
        threads=_threads(device),
        draft=named,
    )

    def begin(key: CostKey) -> Costs:
        costs = Costs()
        for curve in find_measured(setting_of(target, request.route.value, device, kv_cache)):
            if _rounded(curve.batch) == key.batch and curve.draft in ("", named):
                costs.assume(curve.context, target=curve.target, drafting=curve.drafting or {})
        return costs

    return costs_of(target, key, begin)


def setting_of(target: PreTrainedModel, route: str, device: torch.device, kv_cache: str = "auto") -> Setting:
    """What the costs of a target hold for.

    Args:
        target: the model.
        route: how trees enter it.
        device: where it lies.
        kv_cache: `TreeConfig.kv_cache`.
    """
    return Setting(
        model=_compat.class_name(target),
        config=_compat.config_hash(target),
        parameters=_count(target),
        dtype=_dtype(target),
        device=hardware_of(device),
        attention=_compat.attention_implementation(target),
        route=_way(route, kv_cache),
        threads=_threads(device),
        torch=torch.__version__,
        transformers=_compat.transformers_version(),
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


def _way(route: str, kv_cache: str) -> str:
    """The route, and the cache that is read on it where a call asks for one of the library's own."""
    return route if kv_cache == "auto" else f"{route}, {kv_cache} cache"


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _rounded(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


def _dtype(target: PreTrainedModel) -> str:
    return str(_compat.working_dtype(target)).removeprefix("torch.")


def _threads(device: torch.device) -> int:
    return torch.get_num_threads() if device.type == "cpu" else 0
