"""What a draft is worth in calls of `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_treespec.config import TreeConfig
from hf_treespec.train.target import taking_trees

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["Measured", "measure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Calls on some prompts at one temperature.

    Attributes:
        temperature: 0 is greedy.
        prompts: how many.
        tokens_per_round: that a forward of the target brought after the prefill.
        equal: how many greedy texts are those of plain decoding; None when sampling.
    """

    temperature: float
    prompts: int
    tokens_per_round: float
    equal: int | None


def measure(
    model: PreTrainedModel,
    draft: nn.Module,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    accelerator: Accelerator,
    *,
    new_tokens: int,
    max_nodes: int,
) -> Measured:
    """Count rounds of whole trees.

    Args:
        model: the target; left as enabled as it was. It tells the statistics of the last call.
        draft: a head or a model, on the target's device.
        prompts: ids of each.
        temperature: of the calls, under the model's generation config but for `top_k` and `top_p`.
        accelerator: of all processes, which share the prompts.
        new_tokens: of each text, at most.
        max_nodes: of a tree.
    """
    greedy = temperature == 0
    sampling: dict[str, Any] = {} if greedy else {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    tree = TreeConfig(max_nodes=max_nodes, fallback="off", seed=0)
    call: dict[str, Any] = {"do_sample": not greedy, "max_new_tokens": new_tokens, "pad_token_id": 0, **sampling}
    counts = [0, 0, 0]
    mine = [
        torch.tensor([list(prompt)], device=model.device)
        for prompt in prompts[accelerator.process_index :: accelerator.num_processes]
    ]
    generating: Any = model
    plain = [generating.generate(ids, attention_mask=torch.ones_like(ids), **call) for ids in mine if greedy]
    with taking_trees(model) as treed:
        for place, ids in enumerate(mine):
            call["attention_mask"] = torch.ones_like(ids)
            text = treed.generate(ids, assistant_model=draft, tree_config=tree, **call)
            counts[0] += treed.treespec_stats.round_tokens
            counts[1] += treed.treespec_stats.row_rounds
            counts[2] += int(greedy and torch.equal(plain[place], text))
    told = torch.tensor([counts], device=accelerator.device)
    tokens, rounds, equal = accelerator.gather(told).sum(0).tolist()
    return Measured(
        temperature=temperature,
        prompts=len(prompts),
        tokens_per_round=tokens / max(1, rounds),
        equal=equal if greedy else None,
    )
