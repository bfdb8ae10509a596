"""Table 1.1: the call surface, modes, kinds of models, where they lie."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    StoppingCriteriaList,
)

from conformance.contract.core import PLAIN, TREE, Ignored, Row, Side
from conformance.contract.observe import Asked, Banning, Puts, section, text
from letters import letters
from tiny import build, perturbed, prompt, stock

TREE_OF_2 = TREE.replace(max_nodes=2, max_depth=2)
HOOKS = ("_extract_generation_mode_kwargs", "_validate_generation_mode", "_assisted_decoding", "_sample", "generate")


def literal_call(side: Side) -> Any:
    streamer = Puts()
    out = side.generate(
        batch=3,
        do_sample=True,
        num_return_sequences=2,
        streamer=streamer,
        tokenizer=letters(97),
        stop_strings=["zzz"],
    )
    return out, streamer.puts


def signatures(side: Side) -> Any:
    return {name: str(inspect.signature(getattr(type(side.model()), name))) for name in HOOKS}


def whole_signature(side: Side) -> Any:
    ids, mask = prompt("llama", 1)
    processor, criterion = Banning(), Asked(lambda ids: torch.zeros(len(ids), dtype=torch.bool))
    out = side.generate(
        inputs=ids,
        mask=mask,
        generation_config=GenerationConfig(max_new_tokens=14, pad_token_id=0),
        logits_processor=LogitsProcessorList([processor]),
        stopping_criteria=StoppingCriteriaList([criterion]),
        prefix_allowed_tokens_fn=lambda _, text: list(range(3, 90)),
        synced_gpus=False,
        streamer=None,
        negative_prompt_ids=torch.tensor([[5, 6]]),
        negative_prompt_attention_mask=torch.ones(1, 2, dtype=torch.long),
        guidance_scale=1.5,
        custom_generate=None,
        trust_remote_code=False,
    )
    return out, processor.lengths, len(criterion.asked)


def inference_mode(side: Side) -> Any:
    with torch.inference_mode():
        return side.generate().tolist()


def flag(**call: Any) -> Any:
    """A mode of its own: the assistant of the call is to have been run, or the call refused."""

    def mode(side: Side) -> Any:
        helper = perturbed(stock("llama"))
        drafted: list[int] = []
        helper.register_forward_hook(lambda *_: drafted.append(1))
        out = side.generate(helper=helper, **call)
        if side.name == "stock" and not drafted:
            raise Ignored("the assistant is never run")
        return out

    return mode


def supported_modes(side: Side) -> Any:
    model = side.on(build("llama"))
    model._supported_generation_modes = ["beam_search"]
    return side.generate(model=model)


def recurrent(side: Side) -> Any:
    torch.manual_seed(1)
    config = MambaConfig(
        vocab_size=97, hidden_size=8, state_size=2, num_hidden_layers=1, bos_token_id=1, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    model = side.on(MambaForCausalLM(config).eval())
    # It cannot draft for itself.
    return side.generate(*prompt("llama", 1), model=model, helper="lookup")


class ThroughSuper(LlamaForCausalLM):
    """Prepares something and hands on, as Whisper and many multimodal models do."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("suppress_tokens", [7, 8, 9])
        return super().generate(*args, **kwargs)


class LoopOfItsOwn(LlamaForCausalLM):
    """As csm or higgs_audio_v2."""

    def _sample(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return super()._sample(input_ids, **kwargs)


def subclass(cls: type) -> Any:
    def call(side: Side) -> Any:
        model = build("llama")
        model.__class__ = cls
        return side.generate(model=side.on(model))

    return call


def paged(side: Side) -> Any:
    """The request, not the text: continuous batching takes half a minute to start."""
    if side.name == PLAIN:
        return "continuous batching"
    helper = "lookup" if side.ours else "perturbed"
    return side.generate(prompt("llama", 1)[0], cache_implementation="paged", helper=helper)


def chunked(side: Side) -> Any:
    model = side.on(build("llama"))
    widths: list[int] = []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda _, args, __: widths.append(args[0].shape[1]))
    # Copies of the model would bring the hook along.
    out = side.generate(model=model, helper=perturbed(stock("llama")), prefill_chunk_size=4, config=TREE_OF_2)
    hook.remove()
    if max(widths) > 4:
        raise Ignored(f"a forward reads {max(widths)} tokens, chunks hold 4")
    return out


def training_mode(side: Side) -> Any:
    model = side.on(build("llama"))
    model.train()
    return side.generate(model=model), model.training, model.model.layers[0].training, torch.is_grad_enabled()


@contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def synced(side: Side) -> Any:
    with group_of_one():
        return side.generate(synced_gpus=True)


def offloaded_weights(side: Side) -> Any:
    model = side.on(build("llama"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return side.generate(model=model, helper=perturbed(stock("llama")))


def dispatched(side: Side) -> Any:
    model = build("llama")
    accelerate.dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, main_device="cpu", force_hooks=True)
    return side.generate(model=side.on(model), helper=perturbed(stock("llama")))


def experts(side: Side) -> Any:
    torch.manual_seed(1)
    config = MixtralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=128,
        initializer_range=0.6, bos_token_id=1, eos_token_id=None, pad_token_id=0, sliding_window=None,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    helper = perturbed(model)
    return side.generate(*prompt("llama", 1), model=side.on(model), helper=helper)


def custom_generate(side: Side) -> Any:
    def backwards(model: Any, input_ids: Tensor, **_: Any) -> Tensor:
        return input_ids.flip(1)

    return side.generate(custom_generate=backwards)


def tree_kwargs(side: Side) -> Any:
    return side.generate(tree_cfg=1)


ROWS = section(
    "1.1",
    Row(
        "1.1",
        "the literal call with streamer, tokenizer, batch of 3, two sequences each",
        literal_call,
        also="0.1",
        sampled=True,
    ),
    ("every named argument of generate() at once", whole_signature),
    ("signatures of generate() and of the hooked methods", signatures),
    ("under inference_mode", inference_mode),
    ("a misspelt argument", tree_kwargs),
    ("num_beams=3", flag(num_beams=3), "trees serve one sequence a row"),
    ("num_beams=3, do_sample=True", flag(num_beams=3, do_sample=True)),
    ("contrastive search (penalty_alpha, top_k)", text(penalty_alpha=0.6, top_k=4)),
    ("group beam search (num_beam_groups)", text(num_beams=4, num_beam_groups=2, diversity_penalty=0.5)),
    ("constrained beams (force_words_ids)", text(num_beams=2, force_words_ids=[[5]])),
    ("DoLa (dola_layers)", text(dola_layers="high")),
    ("cache_implementation='paged'", paged),
    Row("1.1", "custom_generate=callable", custom_generate, "the callable replaces the loop", also="0.2"),
    ("a model whose _supported_generation_modes lack the mode", supported_modes),
    ("a recurrent model (Mamba)", recurrent),
    ("batch of 3, left-padded", text(batch=3)),
    Row("1.1", "num_return_sequences=4", text(do_sample=True, num_return_sequences=4), sampled=True),
    ("a class that overrides generate() and calls super", subclass(ThroughSuper)),
    ("a class with a decoding loop of its own", subclass(LoopOfItsOwn), "the tree would bypass its loop"),
    ("prefill_chunk_size=4", chunked),
    ("a model in training mode", training_mode, "flags stay, no gradients"),
    ("synced_gpus=True in a process group", synced),
    ("accelerate cpu_offload", offloaded_weights),
    ("accelerate dispatch_model with hooks", dispatched),
    ("mixture of experts, switched for decoding", experts),
)
