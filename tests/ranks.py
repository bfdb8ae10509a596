"""One of several processes whose models gather something from all of them in every forward, as ZeRO-3 and FSDP do.

Run as `python tests/ranks.py RANK WORLD FOLDER`. Writes what each case of CASES gave to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import PreTrainedModel

from hf_treespec import TreeConfig, UnsupportedCallError, enable
from tiny import build, perturbed, prompt, reference

OFF = TreeConfig(max_nodes=12, max_depth=5, max_children=3, fallback="off", seed=3)
RECYCLE = OFF.replace(draft=("ngram", "recycle"))
T1: dict[str, Any] = {"do_sample": True, "top_k": 0}
EOS = [5, 6, 7, 9, 14, 23, 31, 40, 52]
# Per case the arguments of both ranks. They share the models, and nothing else.
CASES: dict[str, list[dict[str, Any]]] = {
    "ngram": [{"new": 5}, {"new": 21, "batch": 3}],
    "ngram_sampled": [{"new": 18, "batch": 3, **T1}, {"new": 4, **T1}],
    "recycle": [{"new": 6, "config": RECYCLE}, {"new": 17, "batch": 3, "config": RECYCLE}],
    "model": [{"new": 3, "draft": "other"}, {"new": 20, "draft": "other"}],
    "model_sampled": [{"new": 14, "batch": 3, "draft": "other", **T1}, {"new": 9, "draft": "other", **T1}],
    "own_draft": [{"new": 9, "draft": "same"}, {"new": 17, "batch": 3, "draft": "same"}],
    "other_trees": [
        {"new": 12, "draft": "other", "config": OFF.replace(max_depth=1)},
        {"new": 12, "draft": "other", "config": OFF.replace(max_depth=9, growth="static")},
    ],
    "no_trees": [{"new": 8, "draft": "other", "config": OFF.replace(max_nodes=0)}, {"new": 8, "draft": "other"}],
    "fallback": [
        {"new": 30, "draft": "other", "config": OFF.replace(fallback="auto")},
        {"new": 24, "draft": "other", "config": OFF.replace(fallback="auto")},
    ],
    # Rows that end early are filled up for the returned cache, by forwards of their own.
    "filled": [
        {"new": 16, "batch": 3, "draft": "other", "eos_token_id": EOS, "return_dict_in_generate": True},
        {"new": 7, "draft": "other", "return_dict_in_generate": True},
    ],
    "prompts": [{"new": 6, "width": 5, "prefill_chunk_size": 2}, {"new": 6, "width": 11, "prefill_chunk_size": 2}],
}


def gathering(model: PreTrainedModel, code: int, gathered: list[int]) -> PreTrainedModel:
    """Make the first layer of the model check that all ranks are running the same model."""
    world = distributed.get_world_size()

    def gather(*_: Any) -> None:
        total = torch.tensor(code)
        distributed.all_reduce(total)
        if int(total) != code * world:
            raise RuntimeError(f"ranks run different models: the codes add up to {int(total)}")
        gathered.append(code)

    model.model.layers[0].register_forward_pre_hook(gather)
    return model


# Calls that the second rank gets wrong.
WRONG: dict[str, dict[str, Any]] = {
    "mask": {"attention_mask": torch.ones(1, 25, dtype=torch.long)},
    "guidance": {"guidance_scale": 1.5, "negative_prompt_ids": torch.ones(2, 4, dtype=torch.long)},
    "embeddings": {"inputs_embeds": torch.zeros(1, 3, 4, 5)},
}


def refusals(target: PreTrainedModel, rank: int) -> dict[str, str]:
    """What each rank is told when the call of one is refused; a rank that goes on alone runs into the time limit."""
    told = {}
    for name, wrong in WRONG.items():
        ids, mask = prompt("llama", 1, seed=rank)
        try:
            call = {"attention_mask": mask, **(wrong if rank else {})}
            target.generate(ids, tree_config=OFF, synced_gpus=True, max_new_tokens=6, **call)
            told[name] = "nothing"
        except UnsupportedCallError as error:
            told[name] = str(error)
    return told


def main(rank: int, world: int, folder: Path) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    plain, gathered = build("llama"), []
    target = enable(gathering(build("llama"), 1, gathered))
    draft = gathering(perturbed(plain), 10, gathered)
    results: dict[str, Any] = {}
    for name, ranks in CASES.items():
        call = {"do_sample": False, **ranks[rank]}
        new, batch, width = call.pop("new"), call.pop("batch", 1), call.pop("width", 11)
        config, assistant = call.pop("config", OFF), call.pop("draft", None)
        ids, mask = prompt("llama", batch, seed=rank, width=width)
        call["max_new_tokens"] = new
        expected = reference(plain, ids, mask, seed=3, **call)
        gathered.clear()
        if assistant is not None:
            call["assistant_model"] = draft if assistant == "other" else target
        actual = target.generate(ids, attention_mask=mask, tree_config=config, synced_gpus=True, **call)
        results[name] = {
            "expected": getattr(expected, "sequences", expected).tolist(),
            "actual": getattr(actual, "sequences", actual).tolist(),
            "gathered": list(gathered),
            "rounds": target.treespec_stats.rounds,
            "drafted": target.treespec_stats.drafted_nodes,
            "hooks": len(target._forward_pre_hooks) + len(draft._forward_pre_hooks),
        }
    results["refusals"] = refusals(target, rank)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
