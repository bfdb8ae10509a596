"""`TreeConfig(kv_cache=...)` and a `TreeCache` that is passed in: text and cache are those of plain decoding over it.

The reference is a stock model that is given a `TreeCache` of the same storage. In float64, so that no rounding of a
sum moves a state across the edge between two codes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    StoppingCriteria,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicCache, StaticCache

from hf_treespec import TreeCache, TreeConfig, UnsupportedCallError, _compat, enable
from hf_treespec.cache import CacheTransaction
from hf_treespec.engine import check_cache_of
from hf_treespec.routes import Route
from sources import MAKERS, Source, drafting
from tiny import (
    FAMILIES,
    WIDTH,
    assert_same_text,
    build,
    cache_argument,
    first_block,
    margins,
    perturbed,
    prompt,
    real_texts,
    reference,
    shared,
    stock,
    treed,
    vocabulary,
)

SEED = 4
NEW = 20
CONFIG = TreeConfig(max_nodes=16, max_depth=6, max_children=3, seed=SEED, fallback="off")
ENDS = [5, 6, 7, 9, 14, 23, 31, 40, 52]
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 20}
GREEDY: dict[str, Any] = {"do_sample": False}
EIGHT = ("int8", "fp8")

batches = pytest.mark.parametrize("batch", [1, 3])


def wide(family: str) -> PreTrainedModel:
    # Eager attention, the only one of Gemma 2, takes its softmax in float32, where padding of float64 becomes NaN.
    return build(family) if family == "gemma2" else build(family).double()


stock64, treed64 = shared(wide)


def plain(family: str, ids: Tensor, mask: Tensor, cache: Any, **call: Any) -> Any:
    """Stock generate() over a cache."""
    call = {"max_new_tokens": NEW, "return_dict_in_generate": True, **call}
    return reference(stock64(family), ids, mask, seed=SEED, **call, **cache_argument(cache))


def trees(
    family: str, ids: Tensor, mask: Tensor, truth: Tensor, maker: str, *, config: TreeConfig = CONFIG, **call: Any
) -> tuple[Any, Source]:
    """The call with trees that partly know the text, and their source."""
    texts = real_texts(truth, mask)
    with drafting(Source(MAKERS[maker], seed=6, vocab=vocabulary(family), truth=texts)) as source:
        call = {"max_new_tokens": NEW, "return_dict_in_generate": True, "tree_config": config, **call}
        return treed64(family).generate(ids, attention_mask=mask, **call), source


def assert_same(expected: TreeCache, actual: Any, mask: Tensor) -> None:
    """Same kind, lengths and codes wherever there is text; nothing behind it."""
    assert type(actual) is TreeCache and (actual.storage, actual.buffers) == (expected.storage, expected.buffers)
    for one, two in zip(expected.layers, actual.layers, strict=True):
        assert two.lengths == one.lengths and two.sliding_window == one.sliding_window
        text = torch.cat([mask, mask.new_ones(len(mask), max(0, one.physical - mask.shape[1]))], 1)
        text = text[:, : one.physical].bool()
        for name, slots in two.slots.items():
            for part, tensor in slots.parts.items():
                right = one.slots[name].parts[part][:, :, : one.physical].double().transpose(1, 2)[text]
                found = tensor[:, :, : one.physical].double().transpose(1, 2)[text]
                if slots.dtype == torch.float64:
                    assert (found - right).abs().max() <= (1e-9 if two.storage == "dense" else 0)
                elif two.storage == "dense":
                    assert (found - right).abs().max() < 1e-4
                else:
                    # A state on the edge between two codes may fall to either side.
                    assert (found != right).double().mean() < 1e-3
                assert not tensor[:, :, one.physical :].double().any()
    assert not any(callable(value) for layer in actual.layers for value in vars(layer).values())


# --- the text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["dense", *EIGHT])
@pytest.mark.parametrize(
    ("family", "maker"), [("llama", "random_tree"), *((family, "half_right") for family in FAMILIES)]
)
@pytest.mark.parametrize(("batch", "sampling"), [(1, GREEDY), (3, SAMPLED)], ids=["greedy", "sampled_rows"])
def test_tree_equals_no_tree(family: str, batch: int, sampling: dict[str, Any], storage: str, maker: str) -> None:
    compare(family, batch, sampling, storage, maker)


@pytest.mark.parametrize("storage", ["dense", *EIGHT])
@pytest.mark.parametrize(("batch", "sampling"), [(1, SAMPLED), (3, GREEDY)], ids=["sampled", "greedy_rows"])
def test_tree_equals_no_tree_the_other_way(batch: int, sampling: dict[str, Any], storage: str) -> None:
    compare("mistral", batch, sampling, storage, "half_right")


def compare(family: str, batch: int, sampling: dict[str, Any], storage: str, maker: str) -> None:
    """Hold a tree and no tree against plain decoding over a cache of the same storage."""
    ids, mask = prompt(family, batch, seed=5)
    call = {"eos_token_id": ENDS, **sampling}
    cache = TreeCache(stock64(family).config, storage=storage)
    expected = plain(family, ids, mask, cache, **call)
    config = CONFIG.replace(kv_cache=storage)
    actual, _ = trees(family, ids, mask, expected.sequences, maker, config=config, **call)
    assert torch.equal(actual.sequences, expected.sequences)
    assert_same(cache, _compat.cache_from_outputs(actual), mask)
    assert treed64(family).treespec_stats.rounds < NEW - 1 or maker == "random_tree"
    none, _ = trees(family, ids, mask, expected.sequences, maker, config=config.replace(max_nodes=0), **call)
    assert torch.equal(none.sequences, expected.sequences)
    assert_same(cache, _compat.cache_from_outputs(none), mask)


def test_dense_storage_is_plain_decoding() -> None:
    for family in FAMILIES:
        ids, mask = prompt(family, 3, seed=5)
        expected = plain(family, ids, mask, DynamicCache(config=stock64(family).config), output_logits=True)
        config = CONFIG.replace(kv_cache="dense")
        actual, source = trees(
            family, ids, mask, expected.sequences, "half_right", config=config, output_logits=True, do_sample=False
        )
        assert torch.equal(actual.sequences, expected.sequences)
        assert max((a - b).abs().max() for a, b in zip(expected.logits, actual.logits, strict=True)) < (
            1e-4 if family == "gemma2" else 1e-9
        )
        # Rows ran apart, each behind its own end, and no slot of a row that had stayed behind was moved.
        assert any(len({len(path) for path in paths}) > 1 for paths in source.paths)


@pytest.mark.parametrize("storage", EIGHT)
def test_the_tree_is_read_rounded(storage: str) -> None:
    """Else the tests above would pass with trees that attend to exact states, where these make no difference."""
    ids, mask = prompt("llama", 1, seed=5)
    call = {"output_logits": True, "do_sample": False}
    exact = plain("llama", ids, mask, DynamicCache(config=stock64("llama").config), **call)
    rounded = plain("llama", ids, mask, TreeCache(stock64("llama").config, storage=storage), **call)
    config = CONFIG.replace(kv_cache=storage)
    actual, source = trees("llama", ids, mask, rounded.sequences, "chain", config=config, **call)
    assert max(len(paths[0]) for paths in source.paths) > 3
    far = max(float((one - two).abs().max()) for one, two in zip(exact.logits, rounded.logits, strict=True))
    near = max(float((one - two).abs().max()) for one, two in zip(actual.logits, rounded.logits, strict=True))
    assert near < 1e-9 < 1e-3 < far


@pytest.mark.parametrize("storage", EIGHT)
@batches
def test_copies_of_all_layers_give_the_text_of_the_shared_buffer(storage: str, batch: int) -> None:
    ids, mask = prompt("gemma2", batch, seed=5)
    caches = [TreeCache(stock64("gemma2").config, storage=storage, buffers=b) for b in ("shared", "per_layer")]
    expected = plain("gemma2", ids, mask, caches[0], do_sample=False)
    actual, _ = trees(
        "gemma2", ids, mask, expected.sequences, "half_right", do_sample=False, **cache_argument(caches[1])
    )
    assert torch.equal(actual.sequences, expected.sequences)
    for one, two in zip(caches[0].layers, caches[1].layers, strict=True):
        # Padding is not compared: which of equals it is hangs on the number of rows read together.
        real = torch.cat([mask, mask.new_ones(batch, one.physical - WIDTH)], 1).bool()
        assert torch.equal(one.keys.transpose(1, 2)[real], two.keys.transpose(1, 2)[real])


@pytest.mark.parametrize("storage", EIGHT)
def test_float32_parts_from_plain_only_where_two_tokens_are_close(storage: str) -> None:
    ids, mask = prompt("llama", 3, seed=5)
    cache = TreeCache(stock("llama").config, storage=storage)
    expected = reference(stock("llama"), ids, mask, max_new_tokens=NEW, **cache_argument(cache))
    actual = treed("llama").generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, assistant_model=perturbed(stock("llama")),
        tree_config=CONFIG.replace(kv_cache=storage),
    )  # fmt: skip
    margin = margins(treed("llama"), ids, mask, max_new_tokens=NEW, do_sample=False)
    assert_same_text(expected, actual, margin)


MORE: dict[str, Any] = {
    # Keys and values of different sizes, and sinks with windows in every other layer.
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=61, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_group=2, topk_group=1,
            num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=16, qk_rope_head_dim=8,
            qk_nope_head_dim=8, v_head_dim=12, max_position_embeddings=128, initializer_range=0.4, eos_token_id=None,
        )
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=7,
            max_position_embeddings=128, initializer_range=0.4, eos_token_id=None, pad_token_id=0,
            attn_implementation="eager",
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("storage", ["dense", *EIGHT])
def test_other_attentions(name: str, storage: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = MORE[name]().eval()
    ids, mask = prompt("qwen3", 3, seed=5)
    cache = TreeCache(model.config, storage=storage)
    expected = reference(model, ids, mask, max_new_tokens=NEW, **cache_argument(cache))
    source = Source(MAKERS["half_right"], seed=6, vocab=61, truth=real_texts(expected, mask))
    config = CONFIG.replace(kv_cache=storage)
    with drafting(source):
        actual = enable(model).generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, tree_config=config
        )
    assert torch.equal(actual, expected)
    assert max(len(path) for paths in source.paths for path in paths) > 2


# --- drafts that read the target's cache, and states of its steps --------------------------------------------------


@pytest.mark.parametrize("storage", ["dense", "int8"])
@batches
def test_first_layers_draft_behind_the_targets_cache(
    storage: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart: list[bool] = []
    commit = CacheTransaction.commit

    def spy(self: CacheTransaction, slots: Any) -> None:
        commit(self, slots)
        apart.append(len(set(self._rows.lengths)) > 1)

    monkeypatch.setattr(CacheTransaction, "commit", spy)
    ids, mask = prompt("mistral", batch, seed=5)
    expected = plain("mistral", ids, mask, TreeCache(stock64("mistral").config, storage=storage), do_sample=False)
    config = CONFIG.replace(kv_cache=storage, draft="early_exit", draft_options={"early_exit": {"layer": 1}})
    actual = treed64("mistral").generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, tree_config=config
    )
    assert torch.equal(actual, expected.sequences)
    assert treed64("mistral").treespec_stats.accepted_tokens > 0
    assert any(apart) == (batch > 1)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_attentions_and_hidden_states(family: str) -> None:
    models = [build(family, attention="eager") for _ in range(2)]
    ids, mask = prompt(family, 3, seed=5)
    call = {"max_new_tokens": 9, "return_dict_in_generate": True, "output_attentions": True, "do_sample": False}
    call["output_hidden_states"] = True
    expected = models[0].generate(ids, attention_mask=mask, **call)
    source = Source(MAKERS["half_right"], seed=6, vocab=vocabulary(family), truth=real_texts(expected.sequences, mask))
    with drafting(source):
        config = CONFIG.replace(kv_cache="dense")
        actual = enable(models[1]).generate(ids, attention_mask=mask, tree_config=config, **call)
    assert torch.equal(actual.sequences, expected.sequences)
    assert max(len(path) for paths in source.paths for path in paths) > 2
    for name in ("attentions", "hidden_states"):
        for one, two in zip(getattr(expected, name), getattr(actual, name), strict=True):
            for right, found in zip(one, two, strict=True):
                assert right.shape == found.shape
                assert (right - found).abs().max() < 1e-5 * max(1.0, float(right.abs().max()))


# --- a cache that is passed in -------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["dense", *EIGHT])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@batches
@pytest.mark.parametrize("whole", [True, False], ids=["whole_text", "new_tokens"])
def test_chat_goes_on(family: str, storage: str, batch: int, whole: bool, tmp_path: Any) -> None:
    ids, mask = prompt(family, batch, seed=5, width=8)
    caches = [TreeCache(stock64(family).config, storage=storage) for _ in range(2)]
    for turn in range(3):
        past = caches[0].get_seq_length()
        passed = ids if whole else ids[:, past:]
        expected = plain(family, passed, mask, caches[0], max_new_tokens=7, **SAMPLED)
        text = expected.sequences if whole else torch.cat([ids[:, :past], expected.sequences], 1)
        given = caches[1]
        actual, _ = trees(
            family, passed, mask, text, "half_right", max_new_tokens=7, **SAMPLED, **cache_argument(given)
        )
        assert torch.equal(actual.sequences, expected.sequences)
        assert _compat.cache_from_outputs(actual) is given
        assert given.get_seq_length() == text.shape[1] - 1
        assert_same(caches[0], given, mask)
        # From a file it goes on all the same.
        caches[1] = TreeCache.load(given.save(tmp_path / f"{turn}.safetensors"))
        says = torch.randint(3, 60, (batch, 3), generator=torch.Generator().manual_seed(turn))
        ids = torch.cat([text, says], 1)
        mask = torch.cat([mask, mask.new_ones(batch, ids.shape[1] - mask.shape[1])], 1)


def test_a_chat_moves_from_and_to_a_dynamic_cache() -> None:
    ids, mask = prompt("gemma2", 3, seed=5)
    dynamic = DynamicCache(config=stock64("gemma2").config)
    first = plain("gemma2", ids, mask, dynamic, do_sample=False)
    long = torch.cat([mask, mask.new_ones(3, NEW)], 1)
    tree = TreeCache.from_cache(dynamic)
    expected = plain("gemma2", first.sequences, long, dynamic, do_sample=False).sequences
    actual, _ = trees("gemma2", first.sequences, long, expected, "half_right", do_sample=False, **cache_argument(tree))
    assert torch.equal(actual.sequences, expected)
    longer = torch.cat([long, long.new_ones(3, NEW)], 1)
    back = tree.to_dynamic()
    texts = [plain("gemma2", expected, longer, cache, do_sample=False).sequences for cache in (dynamic, back)]
    assert torch.equal(*texts)


class Burst(Exception):
    """Nothing else may come out of the call."""


class Fuse(StoppingCriteria):
    """Raises at its call number `at`."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        self.at -= 1
        if self.at < 0:
            raise Burst
        return torch.zeros(1, dtype=torch.bool)


@pytest.mark.parametrize("storage", ["dense", "int8"])
@pytest.mark.parametrize(("where", "at"), [("criterion", 5), ("forward", 0), ("forward", 2)])
@pytest.mark.parametrize("read", [0, 6])
def test_exception_leaves_a_prefix_to_go_on_from(storage: str, where: str, at: int, read: int) -> None:
    ids, mask = prompt("gemma2", 1, seed=5)
    right, cache = (TreeCache(stock64("gemma2").config, storage=storage) for _ in range(2))
    for started in (right, cache) if read else ():
        plain("gemma2", ids[:, :read], mask[:, :read], started, max_new_tokens=1, do_sample=False)
    text = plain("gemma2", ids, mask, right, do_sample=False).sequences
    fuse = Fuse(at)

    def burn(*_: Any) -> None:
        if where == "forward":
            fuse()

    hook = first_block(treed64("gemma2")).register_forward_pre_hook(burn)
    more = {"stopping_criteria": [fuse]} if where == "criterion" else {}
    try:
        with pytest.raises(Burst):
            trees("gemma2", ids, mask, text, "half_right", do_sample=False, **more, **cache_argument(cache))
    finally:
        hook.remove()
    length = cache.get_seq_length()
    assert length == read if (where, at) == ("forward", 0) else WIDTH <= length < text.shape[1]
    for layer in cache.layers:
        assert layer.get_seq_length() == length
        for slots in layer.slots.values():
            assert not any(part[:, :, length:].double().any() for part in slots.parts.values()) or where == "forward"
    known = text[:, : max(WIDTH, length + 1)]
    rest = text.shape[1] - known.shape[1]
    actual, _ = trees(
        "gemma2", known, torch.ones_like(known), text, "half_right", max_new_tokens=rest, do_sample=False,
        **cache_argument(cache),
    )  # fmt: skip
    assert torch.equal(actual.sequences, text)
    for layer, other in zip(cache.layers, right.layers, strict=True):
        assert (layer.keys - other.keys).abs().max() < (1e-4 if storage == "dense" else 0.1)


# --- refusals ------------------------------------------------------------------------------------------------------


def refused(model: Any, message: str, **call: Any) -> None:
    forwards: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        with pytest.raises(UnsupportedCallError, match=f"(?s){message}"):
            model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, **call)
    finally:
        hook.remove()
    assert not forwards


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda config: DynamicCache(config=config), "DynamicCache"),
        (lambda config: StaticCache(config=config, max_cache_len=40), "StaticCache"),
        (lambda config: TreeCache(config, storage="int8"), "TreeCache"),
    ],
)
def test_a_cache_beside_kv_cache_is_refused(make: Any, name: str) -> None:
    cache = make(stock("llama").config)
    message = rf"kv_cache='int8'\) with a {name} passed in.*TreeCache\(model.config, storage='int8'\)"
    refused(treed("llama"), message, tree_config=CONFIG.replace(kv_cache="int8"), **cache_argument(cache))
    assert int(cache.get_seq_length()) == 0


@pytest.mark.parametrize("kind", ["static", "quantized"])
def test_another_implementation_beside_kv_cache_is_refused(kind: str) -> None:
    message = f"kv_cache='dense'.*cache_implementation='{kind}'.*leave one out"
    refused(treed("llama"), message, tree_config=CONFIG.replace(kv_cache="dense"), cache_implementation=kind)


def test_models_that_read_path_by_path_are_refused() -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    model = enable(T5ForConditionalGeneration(config).eval())
    model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, tree_config=CONFIG)
    refused(model, "kv_cache='dense'.*T5.*path by path", tree_config=CONFIG.replace(kv_cache="dense"))


def test_a_cache_of_ours_for_a_model_that_reads_path_by_path_is_refused() -> None:
    cache = TreeCache(stock("llama").config)
    with pytest.raises(UnsupportedCallError, match="TreeCache with layers that are written in place.*path by path"):
        check_cache_of(stock("llama"), cache, Route.PATHS)


@pytest.mark.parametrize("storage", ["dense", *EIGHT])
def test_what_is_wrong_with_every_storage_is_found_with_each(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared and own buffers agree in it: the comparison of 8 bits alone does not see it."""
    write = TreeCache.update

    def wrong(self: Any, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        shown = write(self, keys, values, layer, *args, **kwargs)
        return (shown[0], shown[1].flip(-1)) if isinstance(self, TreeCache) else shown

    monkeypatch.setattr(TreeCache, "update", wrong)
    model = enable(build("llama").double())
    with pytest.raises(UnsupportedCallError, match="logits differ from those over a dynamic cache"):
        model.generate(
            torch.tensor([[3, 4, 5]]), max_new_tokens=6, tree_config=CONFIG.replace(kv_cache=storage, draft="ngram")
        )


@pytest.mark.parametrize("storage", ["dense", "int8"])
def test_a_model_whose_second_layer_reads_the_states_of_the_first(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[Any] = []

    def sharing(original: Any) -> Any:
        def update(self: Any, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
            shown = original(self, keys, values, layer, *args, **kwargs)
            if layer == 0:
                first[:] = shown
            return tuple(first)

        return update

    monkeypatch.setattr(_compat.Cache, "update", sharing(_compat.Cache.update))
    model = enable(build("llama").double())
    ids = torch.tensor([[3, 4, 5]])
    config = CONFIG.replace(kv_cache=storage, draft="ngram")
    if storage == "dense":
        plainly = model.generate(ids, do_sample=False, max_new_tokens=6)
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=6, tree_config=config), plainly)
        return
    with pytest.raises(UnsupportedCallError, match=r"(?s)reads keys and values of a layer after.*kv_cache='dense'"):
        model.generate(ids, max_new_tokens=6, tree_config=config)
