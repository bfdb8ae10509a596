"""A small tree on the user's own model, compared with its paths: the proof that a route holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_treespec import _compat
from hf_treespec.attention import attention_for_trees, tree_masks
from hf_treespec.cache import PathCache, RowCache
from hf_treespec.engine import PathForward, Prompt, TargetForward
from hf_treespec.tree import TokenTree

__all__ = ["probe_masks", "probe_paths"]

_PROMPT = (4, 3, 1, 2, 3, 1)
# Root 2 with children 3 and 1; 3 begins a chain, 1 has children 4 and 3. The path of the last node skips the chain: a
# model that counts its distances in cache slots is far off even if its attention hardly depends on them.
_CHAIN = (3, 1, 4, 2) * 3
_TREE = TokenTree((2, *_CHAIN, 1, 4, 3), (*range(-1, len(_CHAIN)), 0, len(_CHAIN) + 1, len(_CHAIN) + 1))
_RIGHT_PATH = (2, 1, 3)
_WRONG_PATH = (2, 3, 3)
_RIGHT_NODES = (0, len(_CHAIN) + 1, len(_CHAIN) + 3)
# Read after the commit of the right path.
_NEXT = 2
# Error allowed, as a share of what one wrong ancestor changes.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-2}
_LOW_PRECISION_TOLERANCE = 0.2


@contextmanager
def _evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Dropout off for the probe, module by module as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def probe_masks(model: PreTrainedModel) -> tuple[str | None, bool]:
    """Compare a tree forward under a tree mask with a plain forward over one of the tree's paths.

    Returns:
        None if they agree, else the reason why the model cannot take a tree; and whether that is final: an exception
        may have come from the state of the machine.
    """
    attention = _compat.attention_implementation(model)
    with ExitStack() as stack:

        def tree_logits() -> Tensor:
            wanted = "auto" if attention in _compat.MASK_IMPLEMENTATIONS else "sdpa"
            stack.enter_context(attention_for_trees(model, wanted))
            stack.enter_context(tree_masks())
            return _tree_logits(model)

        excuse = "it does not build its masks or positions from the mask registry and position_ids"
        return _compare(model, tree_logits, lambda path: _path_logits(model, path), excuse)


def probe_paths(model: PreTrainedModel) -> tuple[str | None, bool]:
    """Compare a path batch, and a step after its commit, with plain forwards; see `probe_masks`.

    An encoder is not run: random states stand in for what it read, since its inputs may be of any kind.
    """
    encoder = _encoder_states(model)

    def plain(path: tuple[int, ...]) -> Tensor:
        inputs = _compat.prepare_inputs(model, _ids(model, (*_PROMPT, *path, _NEXT)), use_cache=False, **encoder)
        return model(**inputs, return_dict=True).logits[0, -2:].double()  # type: ignore[no-any-return]

    excuse = "it does not read the paths of a tree as batch rows alike"
    return _compare(model, lambda: _batch_logits(model, encoder), plain, excuse)


@torch.no_grad()
def _compare(
    model: PreTrainedModel, tree_logits: Callable[[], Tensor], plain: Callable[[tuple[int, ...]], Tensor], excuse: str
) -> tuple[str | None, bool]:
    if _compat.embedding_rows(model) <= max(_PROMPT + _TREE.tokens):
        return f"its vocabulary of {_compat.embedding_rows(model)} ids is too small for the probe", True
    try:
        with _evaluation(model):
            tree = tree_logits()
            right, wrong = (plain(path) for path in (_RIGHT_PATH, _WRONG_PATH))
    except torch.OutOfMemoryError:
        raise  # says nothing about the model
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, KeyError, IndexError) as error:
        return f"the probe forward raised {type(error).__name__}: {error}", False
    scale = float((right - wrong).abs().max())
    off = float((tree - right).abs().max())
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    allowed = _TOLERANCE.get(dtype, _LOW_PRECISION_TOLERANCE) * scale
    if not off <= allowed:
        return (
            f"in a probe its logits at a tree node are off by {off:.3g} from the node's own path, where {allowed:.3g} "
            f"is allowed ({scale:.3g} is what a wrong ancestor changes): {excuse}"
        ), True
    return None, True


def _ids(model: PreTrainedModel, tokens: tuple[int, ...]) -> Tensor:
    return torch.tensor([tokens], device=model.device)


def _tree_logits(model: PreTrainedModel) -> Tensor:
    prompt = _ids(model, _PROMPT)
    positions = torch.arange(len(_PROMPT), device=model.device)[None]
    cache = _compat.make_cache(model.config)
    _compat.model_forward(model, input_ids=prompt, cache=cache, position_ids=positions)
    rows = RowCache(cache, [len(_PROMPT)])
    forward = TargetForward(model, rows, positions[:, -1:], None, {"use_cache": True})
    with rows.transaction():
        logits = forward([_TREE], [1])
    return logits[0, -1].double()


def _path_logits(model: PreTrainedModel, path: tuple[int, ...]) -> Tensor:
    ids = _ids(model, _PROMPT + path)
    positions = torch.arange(ids.shape[1], device=model.device)[None]
    return _compat.model_forward(model, input_ids=ids, cache=None, position_ids=positions)[0, -1].double()


def _encoder_states(model: PreTrainedModel) -> dict[str, Any]:
    """What an encoder may have read, as arguments of the decoding forwards; nothing for a decoder alone."""
    if not _compat.is_encoder_decoder(model):
        return {}
    # A generator of its own: a probe must not move the random numbers of the process.
    shape = (1, 5, _compat.encoder_width(model))
    states = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    first = next(p for p in model.parameters() if p.is_floating_point())
    return {"encoder_outputs": BaseModelOutput(last_hidden_state=states.to(first.device, first.dtype))}


def _batch_logits(model: PreTrainedModel, encoder: dict[str, Any]) -> Tensor:
    """Logits `[2, V]`: at a tree node, and of the token after it once its path has been committed."""
    prompt = _ids(model, _PROMPT)
    cache = _compat.generation_cache(model)
    kwargs = {"use_cache": True, **encoder}
    inputs = _compat.prepare_inputs(model, prompt, **{_compat.cache_kwarg(model): cache}, **kwargs)
    model(**inputs, return_dict=True)
    rows = PathCache(cache, [len(_PROMPT)])
    last = torch.tensor([[len(_PROMPT) - 1]], device=model.device)
    forward = PathForward(model, rows, Prompt(None, last, [len(_PROMPT)], [list(_PROMPT)]), kwargs)
    with rows.transaction() as transaction:
        at_node = forward([_TREE], [1])[0, -1]
        transaction.commit([_RIGHT_NODES])
    with rows.transaction():
        after = forward([TokenTree.root_only(_NEXT)], [1 + len(_RIGHT_NODES)])[0, -1]
    return torch.stack([at_node, after]).double()
