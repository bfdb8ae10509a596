"""Multi-token prediction modules of the target as a draft: the text of plain decoding, whatever they guess."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, InklingTextConfig, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import heads
import multitoken
import tiny
from calls import BUSHES, GREEDY, SAMPLED
from hf_treespec import TreeConfig, UnsupportedCallError, disable, enable
from hf_treespec.api import mtp as api_mtp
from hf_treespec.draft.heads import mtp_levels
from hf_treespec.tree import TreeBuilder
from tiny import WIDTH, assert_same_text, cache_argument, new_cache

batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
kinds = pytest.mark.parametrize("kind", multitoken.KINDS)
NEW = 12
INKLING: dict[str, Any] = {
    "vocab_size": 71,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_mtp_layers": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
}
# Wide enough that random modules are right now and then, and sometimes twice in a row.
WIDE = TreeConfig(max_nodes=48, max_depth=4, max_children=16, growth="static", fallback="off", seed=3)
DEEP = WIDE.replace(draft_options={"mtp": {"depth": 4}})


def prompt(batch: int, width: int = WIDTH) -> dict[str, Tensor]:
    ids = torch.randint(3, multitoken.VOCAB, (batch, width), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :4] = 0
        mask[2, :1] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "pad_token_id": 0}


# -- the text --


@kinds
@batches
@samplings
def test_any_modules_equal_no_tree(kind: str, batch: int, sampling: dict[str, Any]) -> None:
    stock, model = multitoken.stock(kind), multitoken.treed(kind)
    modules = multitoken.random_modules(model)
    call = {**prompt(batch), "max_new_tokens": NEW, **sampling}
    expected = model.generate(tree_config=WIDE.replace(max_nodes=0), **call)
    if not sampling["do_sample"]:
        assert_same_text(stock.generate(**call), expected)
    for config in (WIDE, DEEP):
        assert_same_text(expected, model.generate(assistant_model=modules, tree_config=config, **call))
        stats = model.treespec_stats
        assert stats.draft == "mtp" and stats.drafted_nodes > NEW and stats.draft_forward_seconds > 0
        assert stats.accepted_tokens > 0
        levels = len(modules.layers) if config is WIDE else 4
        assert all(stats.drafted_by_depth[:levels]) and not any(stats.drafted_by_depth[levels:])


@pytest.mark.parametrize("growth", ["best_first", "dynamic"])
def test_ends_caches_and_the_fallback(growth: str) -> None:
    """Rows that end early, a cache that goes on, and rounds without trees in between."""
    model = multitoken.treed("glm4_moe")
    modules = multitoken.random_modules(model)
    config = WIDE.replace(growth=growth, max_children=12, fallback="auto")
    call = {**prompt(3), "max_new_tokens": NEW, "do_sample": True, "eos_token_id": [5, 6, 7, 9, 14, 23]}
    plain = model.generate(**call, tree_config=config.replace(max_nodes=0))
    assert_same_text(plain, model.generate(**call, assistant_model=modules, tree_config=config))
    first, more = prompt(3), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ids, mask = first["input_ids"], first["attention_mask"]
    config, cache = config.replace(fallback="off"), new_cache(model)
    more["assistant_model"] = modules
    text = model.generate(ids, attention_mask=mask, tree_config=config, **cache_argument(cache), **more)
    whole = torch.cat([mask, mask.new_ones(3, 8)], 1)
    again = model.generate(text, attention_mask=whole, tree_config=config, **cache_argument(cache), **more)
    del more["assistant_model"]
    plain = model.generate(text, attention_mask=whole, tree_config=config.replace(max_nodes=0), **more)
    assert_same_text(plain, again, width=text.shape[1])


@pytest.mark.parametrize("rule", ["coupled", "traversal"])
def test_a_row_that_ends_early_in_a_batch_in_step(rule: str) -> None:
    """It goes on through padding of which it had no tree."""
    model = multitoken.treed("glm4_moe")
    modules = multitoken.random_modules(model)
    config = WIDE.replace(draft="model", max_nodes=8, verification=rule)
    call = {**prompt(3), "max_new_tokens": 2 * NEW, "do_sample": True}

    def text(**more: Any) -> Tensor:
        more = {"assistant_model": modules, "tree_config": config, **more}
        return model.generate(**call, **more, **cache_argument(new_cache(model)))[:, WIDTH:]

    # Of row 0 early, and of no other.
    whole = text()
    call["eos_token_id"] = next(int(token) for token in whole[0, 1:6] if not (whole[1:] == token).any())
    tree = text()
    assert not tree[0, 6:].any() and tree[1:].all()
    assert model.treespec_stats.accepted_tokens > 0
    if rule == "coupled":
        assert torch.equal(text(tree_config=WIDE.replace(max_nodes=0), assistant_model=None), tree)


def test_prompts_of_one_token_and_without_ids() -> None:
    model = multitoken.treed("glm4_moe")
    modules = multitoken.random_modules(model)
    for width in (1, 2, 3):
        call = {**prompt(1, width), "max_new_tokens": NEW, "do_sample": False}
        plain = multitoken.stock("glm4_moe").generate(**call)
        assert_same_text(plain, model.generate(**call, assistant_model=modules, tree_config=WIDE), width=width)
        assert all(model.treespec_stats.drafted_by_depth[:3])
    call = {**prompt(3), "max_new_tokens": NEW, "do_sample": False}
    embeds = model.get_input_embeddings()(call.pop("input_ids")).detach()
    plain = multitoken.stock("glm4_moe").generate(inputs_embeds=embeds, **call)
    tree = model.generate(inputs_embeds=embeds, **call, assistant_model=modules, tree_config=WIDE)
    assert_same_text(plain, tree, width=0)


@pytest.mark.parametrize("rule", ["hybrid", "rrs", "block", "traversal"])
def test_independent_rules(rule: str) -> None:
    model = multitoken.treed("glm4_moe")
    modules = multitoken.random_modules(model)
    config = DEEP.replace(verification=rule, max_nodes=12, max_children=4)
    call = {**prompt(3), "do_sample": True, "max_new_tokens": NEW, "tree_config": config}
    one, two = (model.generate(**call, assistant_model=modules) for _ in range(2))
    assert one.shape == (3, WIDTH + NEW) and torch.equal(one, two)
    assert model.treespec_stats.drafted_nodes > 0


@pytest.mark.parametrize("draft", [("model", "ngram"), ("mtp", "ngram")])
def test_beside_sources_of_the_text(draft: tuple[str, ...]) -> None:
    """One tree of modules and n-grams; the modules are told of the rounds in which they are not asked."""
    model = multitoken.treed("glm4_moe")
    modules = multitoken.random_modules(model)
    for sampling, fallback in ((GREEDY, "off"), (SAMPLED, "auto")):
        config = WIDE.replace(draft=draft, fallback=fallback, growth="best_first")
        call = {**prompt(3), "max_new_tokens": NEW, **sampling}
        plain = model.generate(**call, tree_config=config.replace(max_nodes=0, draft="auto"))
        assert_same_text(plain, model.generate(**call, assistant_model=modules, tree_config=config))
        assert model.treespec_stats.drafted_by_source["mtp"] > 0


def test_another_attention_than_the_target_has() -> None:
    model = enable(multitoken.build("glm4_moe", attention="eager"))
    modules = multitoken.random_modules(model)
    call = {**prompt(3), "max_new_tokens": NEW, "do_sample": False}
    plain = multitoken.stock("glm4_moe").generate(**call)
    tree = model.generate(**call, assistant_model=modules, tree_config=WIDE.replace(attention="sdpa"))
    assert_same_text(plain, tree)
    assert modules.config._attn_implementation == model.config._attn_implementation == "eager"


# -- what is read --


class Forced:
    """Lets stock modules draft one path, and keeps what they say."""

    def __init__(self, path: Sequence[int]) -> None:
        self.path = list(path)
        self.said: list[Tensor] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.said.append(scores[0].clone())
        forced = torch.full_like(scores, -1e9)
        forced[:, self.path[len(self.said) - 1] if len(self.said) <= len(self.path) else 0] = 0
        return forced


def of_stock(modules: MtpModel, hidden: Tensor, text: Sequence[int], path: Sequence[int]) -> list[Tensor]:
    """Logits of all modules of transformers behind a text, where they draft this path."""
    forced = Forced(path)
    ids = torch.tensor([list(text)])
    places = torch.arange(1, len(text))[None]
    with torch.no_grad():
        modules(
            input_ids=ids[:, 1:],
            last_hidden_states=hidden,
            attention_mask=torch.ones_like(places),
            position_ids=places,
            mtp_cache=MtpCache(config=modules.config),
            logits_processor=LogitsProcessorList([forced]),
            full_input_ids=ids,
        )
    return forced.said


def hidden_states(model: PreTrainedModel, text: Sequence[int]) -> Tensor:
    with torch.no_grad():
        out = model(torch.tensor([list(text)]), output_hidden_states=True)
    return out.hidden_states[-1]


class Said:
    """What modules said of nodes: text, path below the root, logits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes: list[tuple[list[int], list[int], Tensor]] = []
        plain = mtp_levels.ModulePass.candidates

        def spy(
            one: mtp_levels.ModulePass, row: int, builder: TreeBuilder, nodes: Sequence[int], logits_RV: Tensor
        ) -> list[Any]:
            for node, logits in zip(nodes, logits_RV, strict=True):
                path = []
                while node:
                    path.insert(0, builder.tokens[node])
                    node = builder.parents[node]
                self.nodes.append((list(one._rows[row].tokens), path, logits.clone()))
            return plain(one, row, builder, nodes, logits_RV)

        monkeypatch.setattr(mtp_levels.ModulePass, "candidates", spy)


@kinds
@batches
def test_every_node_is_what_transformers_makes_of_its_path(
    kind: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After many rounds, with rejections and with accepted paths, and for all branches of a tree."""
    target = multitoken.build(kind).double()
    plain = copy.deepcopy(target)
    modules = multitoken.random_modules(target)
    model = enable(target)
    said = Said(monkeypatch)
    config = WIDE.replace(max_nodes=30, max_children=8)
    model.generate(**prompt(batch), assistant_model=modules, tree_config=config, max_new_tokens=NEW, do_sample=True)
    stats = model.treespec_stats
    assert stats.accepted_tokens > 1 and stats.rounds > 3
    levels = set()
    for text, path, logits in said.nodes:
        wanted = of_stock(modules, hidden_states(plain, text[:-1]), text, path)
        assert float((wanted[len(path)] - logits).abs().max()) < 1e-4
        levels.add(len(path))
    assert levels == set(range(len(modules.layers)))
    assert len({len(text) for text, _, _ in said.nodes}) > 3


def test_behind_the_last_module_it_reads_what_it_made_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_treespec.draft import MtpHead

    target = multitoken.build("deepseek_v3").double()
    plain = copy.deepcopy(target)
    modules = multitoken.random_modules(target)
    head, model = MtpHead(modules), enable(target)
    said = Said(monkeypatch)
    config = DEEP.replace(max_nodes=20, max_children=6, growth="best_first")
    model.generate(**prompt(1), assistant_model=modules, tree_config=config, max_new_tokens=NEW, do_sample=True)
    last = head.count - 1
    checked = 0
    for text, path, logits in said.nodes:
        if len(path) <= last:
            continue
        whole = [*text, *path]
        states, cache = hidden_states(plain, text[:-1]), api_mtp._compat.make_mtp_cache(modules.config)
        with torch.no_grad():
            for number in range(head.count):
                places = torch.arange(number + 1, len(text) + number)[None]
                ids = torch.tensor([whole])[:, number + 1 : len(text) + number]
                states = head.read(number, ids, states, positions=places, mask=None, cache=cache)
            for place in range(len(text) + last, len(whole)):
                ids = torch.tensor([[whole[place]]])
                places = torch.tensor([[place]])
                states = head.read(last, ids, states[:, -1:], positions=places, mask=None, cache=cache)
            assert float((head.logits(states[0, -1]) - logits).abs().max()) < 1e-4
        checked += 1
    assert checked > 10


# -- oracles --


@pytest.mark.parametrize(("modules", "depth"), [(3, None), (1, None), (1, 6), (2, 6)])
@batches
@samplings
def test_perfect_modules_are_accepted_whole(
    modules: int, depth: int | None, batch: int, sampling: dict[str, Any]
) -> None:
    model, made = multitoken.periodic(modules)
    enable(model)
    levels = depth or modules
    cycle = heads.CYCLE
    ids = torch.tensor([list(cycle) + list(cycle[:3])] * batch)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :4] = 0
        mask[2, :1] = 0
    config = TreeConfig(max_nodes=12, max_depth=6, max_children=2, fallback="off", seed=3)
    config = config.replace(draft_options={"mtp": {"depth": depth}} if depth else {})
    new = 1 + 4 * (levels + 1)
    call = {"input_ids": ids * mask, "attention_mask": mask, "max_new_tokens": new, **sampling}
    text = model.generate(**call, assistant_model=made, tree_config=config)
    whole = torch.tensor((list(cycle) * 9)[3 + len(cycle) :][:new])
    assert torch.equal(text[:, ids.shape[1] :], whole.expand(batch, -1))
    stats = model.treespec_stats
    # The first token is the prefill's; a round of a whole path brings one more than there are levels.
    assert stats.rounds == 4
    assert stats.accepted_by_depth[levels - 1] == batch * 4


# -- from a checkpoint --


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp")
    model = multitoken.build("glm4_moe")
    multitoken.save(model, multitoken.random_modules(model), folder)
    return folder


def loaded(folder: Path, **options: Any) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    # As published models of this kind name theirs, by the numbers of their sizes.
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[2-4]\..*"]
    return model


@samplings
def test_use_mtp_reads_them_from_the_checkpoint(checkpoint: Path, sampling: dict[str, Any]) -> None:
    model = enable(loaded(checkpoint))
    original = multitoken.random_modules(multitoken.build("glm4_moe"))
    call = {**prompt(1), "max_new_tokens": NEW, **sampling}
    plain = model.generate(**call, tree_config=WIDE.replace(max_nodes=0))
    for more in ({"use_mtp": True, "tree_config": WIDE}, {"tree_config": WIDE.replace(draft="mtp")}):
        assert_same_text(plain, model.generate(**call, **more))
        assert model.treespec_stats.draft == "mtp" and model.treespec_stats.accepted_tokens > 0
    if not sampling["do_sample"]:
        assert_same_text(loaded(checkpoint).generate(**call, use_mtp=True), plain)
    made = api_mtp.mtp_modules(model)
    assert made is api_mtp.mtp_modules(model)
    assert made.embed_tokens is model.get_input_embeddings()
    for name, tensor in original.layers.state_dict().items():
        assert torch.equal(made.layers.state_dict()[name], tensor), name
    assert not made.layers.training
    joined = WIDE.replace(draft=("mtp", "ngram"))
    assert_same_text(plain, model.generate(**call, use_mtp=True, tree_config=joined))
    assert model.treespec_stats.drafted_by_source["mtp"] > 0


def test_modules_follow_their_model_and_go_with_it(checkpoint: Path) -> None:
    model = enable(loaded(checkpoint))
    made = api_mtp.mtp_modules(model)
    made.layers.train()
    # They read what it gives in any type.
    model.bfloat16()
    assert api_mtp.mtp_modules(model) is made and made.layers[0].eh_proj.weight.dtype is torch.float32
    assert not made.layers.training
    model.generate(**prompt(1), max_new_tokens=6, do_sample=False, tree_config=WIDE, use_mtp=True)
    assert model.treespec_stats.draft == "mtp"
    ended = weakref.ref(made)
    del made
    disable(model)
    gc.collect()
    assert ended() is None
    ended = weakref.ref(api_mtp.mtp_modules(model))
    del model
    gc.collect()
    assert ended() is None


def _kept(model: PreTrainedModel, name: str) -> bool:
    """Whether transformers leaves this weight in float32 when it loads the model in bfloat16."""
    return any(part in name for part in model._keep_in_fp32_modules_strict)


@pytest.mark.parametrize("cast", ["loaded", "later"])
def test_modules_have_the_type_of_their_model(checkpoint: Path, cast: str) -> None:
    """But for what is kept in float32."""
    model = enable(loaded(checkpoint, **({"dtype": torch.bfloat16} if cast == "loaded" else {})))
    if cast == "later":
        model.bfloat16()
    made = api_mtp.mtp_modules(model)
    gate = made.layers[0].mtp_block.mlp.gate
    # What is kept differs by version: since 5.24 the weight of the gate, not only its correction.
    kept = {name for name in gate.state_dict() if _kept(model, f"gate.{name}")}
    assert "e_score_correction_bias" in kept
    for name, tensor in gate.state_dict().items():
        assert (name, tensor.dtype) == (name, torch.float32 if name in kept else torch.bfloat16)
    others = {tensor.dtype for name, tensor in made.layers.state_dict().items() if ".gate." not in name}
    assert others == {torch.bfloat16}
    model.generate(**prompt(1), max_new_tokens=6, do_sample=False, tree_config=WIDE, use_mtp=True)
    assert model.treespec_stats.drafted_nodes > 0
    assert gate.e_score_correction_bias.dtype is torch.float32


@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_of_one_byte_are_no_type_for_modules(checkpoint: Path, when: str) -> None:
    model = loaded(checkpoint)
    made = None if when == "before" else api_mtp.mtp_modules(model)
    for weight in model.get_decoder().layers[-1].parameters():
        weight.data = weight.data.to(torch.float8_e4m3fn)
    again = api_mtp.mtp_modules(model)
    assert made in (None, again)
    assert {weight.dtype for weight in again.layers.parameters()} == {torch.float32}


def test_a_table_with_a_norm_is_copied_once() -> None:
    model = AutoModelForCausalLM.from_config(InklingTextConfig(**INKLING)).eval()
    modules = MtpModel(model, 1)
    api_mtp._compat.follow_model(modules, model)
    table = modules.embed_tokens
    assert table.weight is model.get_input_embeddings().weight
    api_mtp._compat.follow_model(modules, model)
    assert modules.embed_tokens is table
    model.resize_token_embeddings(80)
    api_mtp._compat.follow_model(modules, model)
    assert modules.embed_tokens.weight is model.get_input_embeddings().weight
    assert modules.shared_head is model.lm_head


# -- refusals --


def refused(model: PreTrainedModel, match: str, **call: Any) -> None:
    ran: list[Any] = []
    handle = model.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(UnsupportedCallError, match=match):
        model.generate(**{**prompt(1), "tree_config": BUSHES, "max_new_tokens": 4, **call})
    handle.remove()
    assert not ran


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    plain, model = tiny.treed("llama"), multitoken.treed("glm4_moe")
    modules = multitoken.random_modules(model)
    refused(plain, "names no num_mtp_layers", use_mtp=True)
    refused(plain, "names no num_mtp_layers", tree_config=BUSHES.replace(draft="mtp"))
    refused(model, "config.name_or_path is empty", use_mtp=True)
    refused(model, "both say what drafts", use_mtp=True, tree_config=BUSHES.replace(draft="ngram"))
    refused(model, "both say what drafts", use_mtp=True, assistant_model=tiny.treed("llama"))
    refused(model, "both say what drafts", use_mtp=True, assistant_model=heads.random_head("medusa", model))
    refused(model, "draft='ngram'", assistant_model=modules, tree_config=BUSHES.replace(draft="ngram"))
    refused(model, "synced_gpus=True", assistant_model=modules, synced_gpus=True)
    joint = BUSHES.replace(draft=("mtp", "ngram"), verification="rrs")
    refused(model, "nodes of a joint tree", assistant_model=modules, tree_config=joint, do_sample=True)
    refused(plain, "hidden states of 32 values|vocabulary of 71", assistant_model=modules)
    without = multitoken.build("glm4_moe")
    without.save_pretrained(tmp_path)
    refused(enable(loaded(tmp_path)), "cannot be loaded: RuntimeError: .*missing", use_mtp=True)


def test_states_that_only_go_forward_are_refused() -> None:
    model = enable(AutoModelForCausalLM.from_config(InklingTextConfig(**INKLING)).eval())
    refused(model, "only go forward", use_mtp=True)
    refused(model, "only go forward", assistant_model=MtpModel(model, 1))
