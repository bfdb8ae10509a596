"""What a call may say: refusals before any forward, stock errors where stock raises, statistics on every exit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
)
from transformers import LlamaForCausalLM as Llama
from transformers.masking_utils import AttentionMaskInterface

from hf_treespec import (
    TreeConfig,
    TreeConfigError,
    TreeSpecWarning,
    UnsupportedCallError,
    _compat,
    enable,
    is_supported,
)

PROMPT = torch.tensor([[5, 6, 7, 5, 6]])
TREE = TreeConfig(fallback="off")


def llama(vocab_size: int = 31) -> Llama:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Llama(config).eval()


def mamba() -> MambaForCausalLM:
    return MambaForCausalLM(MambaConfig(vocab_size=31, hidden_size=8, state_size=2, num_hidden_layers=1))


@pytest.fixture
def model() -> Llama:
    return enable(llama())


def count_forwards(model: torch.nn.Module) -> list[int]:
    """Grows by the query length of every forward of the model."""
    widths: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return widths


def say(model: Any, **options: Any) -> Any:
    return model.generate(PROMPT, **{"max_new_tokens": 12, "do_sample": False, "tree_config": TREE, **options})


class Vocabulary:
    """As much of a tokenizer as is asked of one."""

    def __init__(self, **ids: int) -> None:
        self.ids = ids

    def get_vocab(self) -> dict[str, int]:
        return self.ids


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dict": (
        {"tree_config": {"max_nodes": 3}},
        TreeConfigError,
        r"tree_config=\{'max_nodes': 3\}: expected a TreeConf",
    ),
    "class": (
        {"tree_config": TreeConfig},
        TreeConfigError,
        "expected a TreeConfig, such as .*; for a dict use TreeConfig.from_dict",
    ),
    "word": ({"tree_config": "ngram"}, TreeConfigError, r"expected a TreeConfig, such as TreeConfig\(draft='ngram'\)"),
    "in a config": (
        {"tree_config": None, "generation_config": GenerationConfig(tree_config=TreeConfig())},
        UnsupportedCallError,
        r"tree_config in a GenerationConfig.*pass generate\(..., tree_config=...\)",
    ),
    "custom folder": (
        {"custom_generate": "here", "trust_remote_code": True},
        UnsupportedCallError,
        "custom_generate with tree_config",
    ),
    "narrow mask": (
        {"attention_mask": torch.ones(1, 3)},
        UnsupportedCallError,
        r"attention_mask is 3 wide: expected \d+ \(input_ids hold the whole text\)$",
    ),
    "custom": ({"custom_generate": lambda model, **_: None}, UnsupportedCallError, "custom_generate with tree_config"),
    "beams": ({"num_beams": 3}, UnsupportedCallError, "num_beams=3 with tree_config: .*use num_beams=1"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, UnsupportedCallError, "prompt_lookup_num_tokens=3 with tree_config"),
    "no draft": ({"tree_config": TreeConfig(draft="model")}, UnsupportedCallError, "without assistant_model"),
    "two drafts": (
        {"tree_config": TreeConfig(draft="ngram"), "assistant_model": llama()},
        UnsupportedCallError,
        r"TreeConfig\(draft='ngram'\) with an assistant_model",
    ),
    "bad draft": (
        {"assistant_model": mamba()},
        UnsupportedCallError,
        r"assistant_model is a MambaForCausalLM.*cannot draft trees",
    ),
    "no cache": ({"use_cache": False}, UnsupportedCallError, "use_cache=False with tree_config"),
    "ranks": ({"synced_gpus": True}, UnsupportedCallError, "synced_gpus=True with tree_config.*init_process_group"),
    "embeddings": (
        {"inputs_embeds": torch.zeros(1, 99, 16)},
        UnsupportedCallError,
        "wide and inputs_embeds hold 99 tokens",
    ),
    "offloaded": (
        {"cache_implementation": "offloaded"},
        UnsupportedCallError,
        "cache_implementation='offloaded' with tree_config",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_cannot_be_right_are_refused_before_any_forward(case: str, model: Llama) -> None:
    options, error, message = REFUSED[case]
    widths = count_forwards(model)
    with pytest.raises(error, match=message):
        say(model, **options)
    assert widths == [] and model.treespec_stats is None


def test_a_tree_config_in_the_models_own_generation_config_is_not_passed_over(model: Llama) -> None:
    model.generation_config.tree_config = TreeConfig()
    with pytest.raises(UnsupportedCallError, match="tree_config in a GenerationConfig"):
        say(model, tree_config=None)


def test_a_cache_that_cannot_take_a_tree_is_refused_under_either_name(model: Llama) -> None:
    cache = DynamicCache(config=model.config)
    cache.offloading = True  # to ask for it needs an accelerator
    widths = count_forwards(model)
    with pytest.raises(UnsupportedCallError, match="an offloaded cache moves its layers"):
        say(model, **{_compat.cache_kwarg(model): cache})
    assert widths == []


def test_outputs_that_plain_decoding_drops_are_no_reason_to_refuse(model: Llama) -> None:
    model.set_attn_implementation("eager")
    wanted = say(model, tree_config=None)
    assert torch.equal(say(model, output_hidden_states=True, output_attentions=True), wanted)


def test_sampling_needs_no_draft_model(model: Llama) -> None:
    options = {"do_sample": True, "max_new_tokens": 30}
    wanted = say(model, tree_config=TreeConfig(max_nodes=0, seed=5), **options)
    assert torch.equal(say(model, tree_config=TREE.replace(seed=5), **options), wanted)
    assert model.treespec_stats is not None and model.treespec_stats.drafted_nodes > 0
    assert not torch.equal(say(model, tree_config=TREE.replace(seed=6), **options), wanted)


def test_no_tree_config_is_none(model: Llama) -> None:
    wanted = llama().generate(PROMPT, max_new_tokens=12, do_sample=False)
    assert torch.equal(say(model, tree_config=None), wanted) and model.treespec_stats is None


@pytest.mark.parametrize("tree", [None, TREE])
def test_a_misspelt_argument_raises_as_in_stock(tree: TreeConfig | None, model: Llama) -> None:
    with pytest.raises(ValueError) as stock:
        llama().generate(PROMPT, max_new_token=5)
    options = {} if tree is None else {"tree_config": tree}
    with pytest.raises(ValueError, match=r"\['max_new_token'\]") as ours:
        model.generate(PROMPT, max_new_token=5, **options)
    assert str(ours.value) == str(stock.value) and type(ours.value) is ValueError


class Clean(Llama):
    """A stock check that a mode of its own would have to pass."""

    def _validate_generation_mode(self, mode: Any, config: Any, mode_kwargs: dict[str, Any]) -> None:
        super()._validate_generation_mode(mode, config, mode_kwargs)
        raise RuntimeError(f"{mode.value} {sorted(mode_kwargs)}")


@pytest.mark.parametrize(("sample", "mode"), [(False, "greedy_search"), (True, "sample")])
def test_the_checks_of_stock_run_for_the_plain_mode(sample: bool, mode: str) -> None:
    model = enable(Clean(llama().config))
    with pytest.raises(RuntimeError, match=rf"{mode} \['synced_gpus', 'tokenizer'\]"):
        say(model, do_sample=sample, assistant_model=llama(), tokenizer=Vocabulary(a=1))


def test_different_vocabulary_sizes_are_said_once(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat.warning, "_WARNED", set())
    draft = llama(vocab_size=40)
    with pytest.warns(TreeSpecWarning, match="vocabularies of 31 and 40 ids"):
        say(model, assistant_model=draft)
    same = Vocabulary(a=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TreeSpecWarning)
        say(model, assistant_model=draft)
        monkeypatch.setattr(_compat.warning, "_WARNED", set())
        say(model, assistant_model=draft, tokenizer=same, assistant_tokenizer=same)
        say(model, assistant_model=llama())


# -- exits --


class Fails(LogitsProcessor):
    """Raises when the text has grown to `length`."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= self.length:
            raise RuntimeError("a processor failed")
        return scores


def test_statistics_are_there_when_the_call_raises(model: Llama) -> None:
    failing = LogitsProcessorList([Fails(9)])
    with pytest.raises(RuntimeError, match="a processor failed"):
        say(model, logits_processor=failing, assistant_model=llama())
    stats = model.treespec_stats
    assert stats is not None and stats.prompt_tokens == 5
    assert stats.draft == "model" and stats.draft_forward_seconds > 0
    assert 0 < stats.prefill_seconds < stats.total_seconds


def test_statistics_are_of_the_last_call(model: Llama) -> None:
    say(model)
    first = model.treespec_stats
    assert first is not None and first.new_tokens == 12
    say(model, max_new_tokens=3)
    assert model.treespec_stats is not first
    assert model.treespec_stats.new_tokens == 3 and first.new_tokens == 12


def test_a_refused_call_has_no_statistics_of_an_earlier_one(model: Llama) -> None:
    say(model)
    with pytest.raises(UnsupportedCallError):
        say(model, use_cache=False)
    assert model.treespec_stats is None


@pytest.mark.parametrize("wrap", [torch.compile, lambda model: torch.nn.DataParallel(model)])
def test_a_wrapped_draft_is_looked_through(wrap: Any, model: Llama) -> None:
    draft = llama()
    say(model, assistant_model=wrap(draft))
    stats = model.treespec_stats
    assert stats is not None and stats.draft == "model"
    assert stats.acceptance_rate > 0.1 and stats.tokens_per_round > 2


def test_an_exception_gives_back_attention_and_masks(model: Llama) -> None:
    before = {name: AttentionMaskInterface()[name] for name in ("sdpa", "eager")}
    draft = llama()
    inside: list[Any] = []

    class Looks(Fails):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            inside.append([m.config._attn_implementation for m in (model, draft)])
            inside.append(AttentionMaskInterface()["eager"] is before["eager"])
            return super().__call__(input_ids, scores)

    with pytest.raises(RuntimeError, match="a processor failed"):
        say(
            model,
            tree_config=TREE.replace(attention="eager"),
            logits_processor=LogitsProcessorList([Looks(8)]),
            assistant_model=draft,
        )
    assert inside[:2] == [["eager", "eager"], False]
    assert [m.config._attn_implementation for m in (model, draft)] == ["sdpa", "sdpa"]
    assert all(AttentionMaskInterface()[name] is function for name, function in before.items())


def test_an_attention_that_takes_no_tree_mask_is_named_and_can_be_switched(model: Llama) -> None:
    wanted = say(model)
    model.set_attn_implementation("flex_attention")
    assert is_supported(model).ok
    widths = count_forwards(model)
    with pytest.raises(
        UnsupportedCallError, match=r"attn_implementation='flex_attention'.*TreeConfig\(attention='sdpa'"
    ):
        say(model)
    assert widths == []
    assert torch.equal(say(model, tree_config=TREE.replace(attention="sdpa")), wanted)
    assert model.config._attn_implementation == "flex_attention"
