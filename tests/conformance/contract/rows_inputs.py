"""Table 1.4: inputs, masks, positions, kinds of models, assistants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from conformance.contract import models
from conformance.contract.core import PLAIN, Row, Side
from conformance.contract.observe import everything, section, text
from letters import letters
from tiny import build, perturbed, prompt, stock


def masked(change: Callable[[torch.Tensor], Any], batch: int = 3) -> Callable[[Side], Any]:
    def call(side: Side) -> Any:
        ids, mask = prompt("llama", batch)
        change(mask)
        return side.generate(ids * mask, mask, helper="lookup" if batch > 1 and side.name == PLAIN else "perturbed")

    return call


def holes(mask: torch.Tensor) -> None:
    mask[1, 4:6] = 0


def unmasked(batch: int) -> Callable[[Side], Any]:
    """Padding is inferred from the pad ids."""
    return lambda side: side.generate(prompt("llama", batch)[0])


def square_mask(side: Side) -> Any:
    ids, _ = prompt("llama", 1)
    width = ids.shape[1]
    return side.generate(ids, torch.ones(1, 1, width, width).tril())


def offset_positions(side: Side) -> Any:
    ids, mask = prompt("gpt2", 1)
    return side.generate(ids, mask, family="gpt2", position_ids=(mask.cumsum(-1) - 1) + 7)


def last_positions(side: Side) -> Any:
    """GPT-2 up to the last of its 96 positions."""
    ids, mask = prompt("gpt2", 1, width=85)
    return side.generate(ids, mask, family="gpt2", max_new_tokens=12, helper="twin")


def own(make: Callable[[], Any], *, helper: str = "", **call: Any) -> Callable[[Side], Any]:
    def run(side: Side) -> Any:
        model = make()
        drafts = helper or perturbed(model, 0.02)
        return side.generate(*prompt("llama", 1), model=side.on(model), helper=drafts, **call)

    return run


def token_types(side: Side) -> Any:
    ids, mask = prompt("gpt2", 1)
    kinds = torch.arange(ids.shape[1])[None] % 5
    return side.generate(ids, mask, family="gpt2", token_type_ids=kinds)


def embeds(side: Side, *, with_ids: bool, helper: str = "perturbed") -> Any:
    ids, mask = prompt("llama", 1)
    # Not the embeddings of the ids, so that a call which reads the ids in their place is found out.
    table = stock("llama").get_input_embeddings()
    vectors = table(prompt("llama", 1, seed=5)[0]).detach()
    return side.generate(ids if with_ids else None, mask, inputs_embeds=vectors, helper=helper)


def speech(side: Side) -> Any:
    model = models.whisper()
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(1, 8, 40, generator=generator)
    return side.generate(
        model=side.on(model), helper="lookup", input_features=features,
        attention_mask=torch.ones(1, 40, dtype=torch.long), return_timestamps=False,
    )  # fmt: skip


def image(side: Side) -> Any:
    model = models.llava()
    ids, mask = prompt("llama", 1)
    ids[0, 2:6] = 96
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    helper = perturbed(stock("llama"))
    # A draft of text alone has not been trained on the id of images either.
    return side.generate(ids, mask, model=side.on(model), helper=helper, pixel_values=pixels, suppress_tokens=[96])


def image_kinds(side: Side) -> Any:
    kinds = torch.zeros(1, 11, dtype=torch.long)
    return side.generate(mm_token_type_ids=kinds)


def healed(side: Side) -> Any:
    tokenizer = letters(97)
    ids = torch.tensor([[5, 9, 12, 20, 7]])
    return side.generate(ids, torch.ones_like(ids), token_healing=True, tokenizer=tokenizer)


def flat_ids(side: Side) -> Any:
    return side.generate(prompt("llama", 1)[0][0])


def itself(side: Side) -> Any:
    model = side.model()
    return side.generate(model=model, helper=model)


def other_vocabulary(change: int) -> Callable[[Side], Any]:
    """The draft's table is longer or shorter; the common ids mean the same."""
    return lambda side: side.generate(helper=build("llama", vocab_size=97 + change))


def tokenizers(sizes: tuple[int, int]) -> Callable[[Side], Any]:
    def run(side: Side) -> Any:
        helper = build("llama", vocab_size=sizes[1])
        both = {} if side.name == PLAIN else {"tokenizer": letters(sizes[0]), "assistant_tokenizer": letters(sizes[1])}
        return side.generate(helper=helper, **both)

    return run


def adapted(where: str) -> Callable[[Side], Any]:
    def run(side: Side) -> Any:
        torch.manual_seed(5)
        base = side.on(build("llama"))
        settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        if where == "target":
            return side.generate(model=get_peft_model(base, settings), helper=perturbed(stock("llama")))
        helper = perturbed(stock("llama"))
        return side.generate(model=base, helper=get_peft_model(helper, settings))

    return run


def half_draft(side: Side) -> Any:
    return side.generate(helper=perturbed(stock("llama")).to(torch.bfloat16))


ROWS = section(
    "1.4",
    ("left padding, batch of 1", lambda side: masked(lambda mask: mask[:, :3].zero_(), 1)(side)),
    ("left padding, batch of 3: text, scores, logits, cache", everything(batch=3)),
    ("holes in the mask", masked(holes)),
    ("an all-ones mask, which reaches the loop as None", text()),
    ("no mask: inferred from pad ids", unmasked(3)),
    ("a 4D mask", square_mask),
    ("position_ids with an offset", offset_positions),
    ("learned positions up to the last one", last_positions),
    ("alibi (Bloom)", own(models.bloom, helper="lookup"), "its bias is counted by depth"),
    ("token_type_ids", token_types),
    ("mm_token_type_ids on a model that has none", image_kinds),
    Row("1.4", "inputs_embeds alone", lambda side: embeds(side, with_ids=False), also="0.3 loud"),
    ("inputs_embeds alone, prompt lookup", lambda side: embeds(side, with_ids=False, helper="lookup")),
    ("inputs_embeds and input_ids", lambda side: embeds(side, with_ids=True)),
    ("encoder-decoder: T5", own(models.t5, helper="lookup")),
    ("encoder-decoder: BART", own(models.bart, helper="lookup")),
    ("an encoder-decoder as assistant (T5)", own(models.t5)),
    ("encoder-decoder: Whisper", speech),
    ("multimodal prefill (Llava)", image),
    ("token_healing", healed),
    ("1D input_ids", flat_ids),
    ("the assistant is the target", itself),
    ("an assistant with a longer table (padded vocabulary)", other_vocabulary(7)),
    ("an assistant with a shorter table", other_vocabulary(-7)),
    ("assistant_tokenizer of the same vocabulary", tokenizers((97, 97)), "stock says that it is not needed"),
    ("an assistant of another tokenizer", tokenizers((97, 90))),
    ("a PEFT model as target", adapted("target")),
    ("a PEFT model as assistant", adapted("assistant")),
    ("an assistant of another dtype", half_draft),
)
