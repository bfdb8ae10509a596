"""Models cut from a target, fresh heads, settings, and MLP heads of some ids."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from heads import eagle
from hf_treespec import TreeConfig, enable, load_draft, save_draft
from hf_treespec.draft import Borrowed, MLPHead
from hf_treespec.errors import TrainError, TreeConfigError
from hf_treespec.train import TrainSettings, cut_model, spaced_layers
from hf_treespec.train.batches import Batch
from hf_treespec.train.fresh import layer_config
from hf_treespec.train.kinds import new_draft, save
from hf_treespec.train.lessons import head_lesson
from hf_treespec.train.processes import patient_accelerator
from hf_treespec.train.target import frozen, lent
from learnable import FIRST, VOCAB, learnable
from seq2seq import stock as stock_pair
from tiny import FAMILIES, build, prompt, reference


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_are_the_whole_model(family: str) -> None:
    target = build(family)
    ids, mask = prompt(family, 3)
    count = target.config.num_hidden_layers
    with torch.no_grad():
        whole = cut_model(target, range(count))(ids, attention_mask=mask).logits
        assert torch.equal(whole, target(ids, attention_mask=mask).logits)
        first = cut_model(target, [0])
        assert first.config.num_hidden_layers == 1 and target.config.num_hidden_layers == count
        assert first(ids, attention_mask=mask).logits.shape == whole.shape
    if getattr(target.config, "layer_types", None):
        assert cut_model(target, [1]).config.layer_types == [target.config.layer_types[1]]


def test_a_cut_model_is_its_own_and_stays_tied(tmp_path: Path) -> None:
    target = enable(copy.deepcopy(learnable(0)))
    cut = cut_model(target, [0, 2])
    assert type(cut) is type(learnable(0)) and cut.lm_head.weight is cut.model.embed_tokens.weight
    assert torch.equal(cut.model.layers[1].mlp.up_proj.weight, target.model.layers[2].mlp.up_proj.weight)
    with torch.no_grad():
        cut.model.layers[1].mlp.up_proj.weight.zero_()
    assert target.model.layers[2].mlp.up_proj.weight.any()
    save(cut, tmp_path, target="x", ids=[5, 3], tokenizer=None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.num_hidden_layers == 2 and json.loads((tmp_path / "vocabulary.json").read_text()) == [5, 3]


def test_what_cannot_be_cut_is_refused() -> None:
    target = build("llama")
    for wrong in ([], [1, 0], [0, 0], [0, 2]):
        with pytest.raises(TrainError, match="layers="):
            cut_model(target, wrong)
    with pytest.raises(TrainError, match="more than one decoder"):
        cut_model(stock_pair("t5"), [0])
    quantized = copy.deepcopy(target)
    quantized.config.quantization_config = {"bits": 4}
    with pytest.raises(TrainError, match="quantized"):
        cut_model(quantized, [0])
    odd = copy.deepcopy(target)
    odd.config.num_hidden_layers = 7
    with pytest.raises(TrainError, match="num_hidden_layers of its config is 7, and it has 2 layers"):
        cut_model(odd, [0])


def test_layers_that_a_target_does_not_have_are_refused_by_their_range() -> None:
    target = build("llama")
    assert new_draft(target, range(9), TrainSettings(layers=(1,))).layers == (1,)
    for wrong in ((0,), (0, 1), (2,), (-1, 1)):
        with pytest.raises(TrainError, match=r"^layers=\(.*hidden states from 1 to 1, as Llama.* has 2 layers"):
            new_draft(target, range(9), TrainSettings(layers=wrong))
    for wrong in ((0, 2), (-1, 0)):
        with pytest.raises(TrainError, match=r"^layers=\(.*numbers of layers from 0 to 1"):
            new_draft(target, range(9), TrainSettings(kind="model", layers=wrong))
    with pytest.raises(TrainError, match="^kind='eagle3': .* has 1; train kind='medusa'"):
        new_draft(cut_model(target, [0]), range(9), TrainSettings())


def test_a_lent_target_learns_nothing_and_is_given_back() -> None:
    target = copy.deepcopy(learnable(0)).train()
    target.model.norm.weight.requires_grad_(False)
    target.model.layers[1].eval()
    modes = [module.training for module in target.modules()]
    flags = {name: weight.requires_grad for name, weight in target.named_parameters()}
    # It has neither embeddings nor an LM head of its own.
    head = eagle(48, VOCAB)
    lesson = head_lesson(head, Borrowed.of(target), 3, depths=2)
    tokens = torch.randint(FIRST, VOCAB, (2, 9))
    likely = torch.stack([tokens, tokens - 1], dim=-1)
    logp = torch.full(likely.shape, 0.5).log()
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), torch.randn(2, 9, 48), likely, logp)
    with pytest.raises(KeyError), lent(target), frozen(target):
        assert not any(module.training for module in target.modules())
        lesson(batch)[0].backward()
        raise KeyError
    assert head.fc.weight.grad is not None and head.fc.weight.grad.any()
    assert all(weight.grad is None for weight in target.parameters())
    assert modes == [module.training for module in target.modules()] and True in modes and False in modes
    assert flags == {name: weight.requires_grad for name, weight in target.named_parameters()}


def test_evenly_spaced() -> None:
    assert spaced_layers(1, 30) == (0,) and spaced_layers(5, 30) == (0, 7, 14, 22, 29)
    assert spaced_layers(4, 4) == (0, 1, 2, 3)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "mlp", "model"])
def test_an_untrained_draft_drafts_and_changes_no_text(kind: str, tmp_path: Path) -> None:
    target = build("llama")
    draft: Any = new_draft(target, range(40), TrainSettings(kind=kind, depths=3)).eval()
    again: Any = new_draft(target, range(40), TrainSettings(kind=kind, depths=3)).eval()
    assert all(torch.equal(one, other) for one, other in zip(draft.parameters(), again.parameters(), strict=True))
    save(draft, tmp_path, target="x", ids=range(40), tokenizer=None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path) if kind == "model" else load_draft(tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(draft.parameters(), loaded.parameters(), strict=True))
    ids, mask = prompt("llama", 3)
    for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
        expected = reference(build("llama"), ids, mask, seed=3, max_new_tokens=14, **sampling)
        config = TreeConfig(max_nodes=9, max_depth=3, fallback="off", seed=3)
        out = enable(target).generate(
            ids, attention_mask=mask, assistant_model=loaded, tree_config=config, max_new_tokens=14, **sampling
        )
        assert torch.equal(out, expected) and target.treespec_stats.drafted_nodes


def mlp(ids: torch.Tensor | None, tied: bool = True) -> MLPHead:
    return MLPHead(8, 20, inner_size=6, stages=3, tied=tied, scale_input=True, ids_V=ids)


@pytest.mark.parametrize("tied", [True, False])
def test_an_mlp_head_of_some_ids_says_of_them_what_a_whole_one_says(tied: bool) -> None:
    ids = torch.tensor([3, 4, 11, 19])
    some, whole = mlp(ids, tied).eval(), mlp(None, tied).eval()
    own = some.state_dict()
    with torch.no_grad():
        for name, weight in whole.named_parameters():
            if name.startswith("emb."):
                weight.copy_(own[name][4].expand_as(weight))
                weight[ids] = own[name][:4]
            elif name.startswith("head."):
                weight[ids] = own[name]
            else:
                weight.copy_(own[name])
    states, tokens = torch.randn(2, 3, 8), torch.randint(0, 20, (2, 5))
    torch.testing.assert_close(some(states, tokens), whole(states, tokens)[..., ids])


def test_the_layout_of_an_mlp_head_of_some_ids(tmp_path: Path) -> None:
    ids = torch.tensor([3, 4, 11, 19])
    head = mlp(ids)
    save_draft(head, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    # Readers of the public layout go by one of these, and know neither.
    assert config["model_type"] == "mlp_speculator_reduced" and config["architectures"] == ["ReducedMLPSpeculator"]
    loaded = load_draft(tmp_path)
    assert isinstance(loaded, MLPHead) and torch.equal(loaded.ids, ids) and loaded.draft_vocab == 4
    save_draft(loaded, tmp_path / "again")
    again = load_draft(tmp_path / "again")
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor) and torch.equal(again.state_dict()[name], tensor)
    with pytest.raises(TreeConfigError, match="reduced vocabulary cannot be written in the layout 'mlp_speculator'"):
        save_draft(head, tmp_path / "no", layout="mlp_speculator")
    with pytest.raises(TreeConfigError, match="over 20 of 20 ids cannot be written"):
        save_draft(mlp(None), tmp_path / "no", layout="mlp_speculator_reduced")
    (tmp_path / "config.json").write_text(json.dumps({**config, "draft_vocab_size": 5}))
    with pytest.raises(TreeConfigError, match="draft_vocab_size=5"):
        load_draft(tmp_path)


def with_config(**changes: Any) -> PreTrainedModel:
    target = build("llama")
    for name, value in changes.items():
        # Configs check values that are set; not all of them are of one kind.
        vars(target.config)[name] = value
    return target


def test_the_layer_of_an_eagle_head_fits_the_target() -> None:
    own = layer_config(build("qwen3"))
    assert (own.hidden_size, own.num_attention_heads, own.num_key_value_heads) == (32, 4, 2)
    assert own.rope_parameters["rope_theta"] == build("qwen3").config.rope_parameters["rope_theta"]
    # Heads of an odd size take no rotary positions.
    assert layer_config(with_config(num_attention_heads=32)).num_attention_heads == 1
    by_kind = {"full_attention": {"rope_type": "yarn", "rope_theta": 5.0, "factor": 2.0}, "sliding_attention": {}}
    assert layer_config(with_config(rope_parameters=by_kind)).rope_parameters["rope_theta"] == 5.0
    assert layer_config(with_config(intermediate_size=[3, 4])).intermediate_size == 128


def test_settings_that_cannot_work() -> None:
    wrong: list[dict[str, Any]] = [
        {"kind": "eagle"}, {"depths": 0}, {"vocabulary": 0}, {"decay": 0.0}, {"kind": "mlp", "layers": (1,)},
        {"kind": "medusa", "inner_size": 8}, {"tokens": 0}, {"measured": -1}, {"layers": ()},
        {"layers": (2, 1)}, {"layers": (1, 1)},
    ]  # fmt: skip
    for settings in wrong:
        with pytest.raises(TrainError, match=list(settings)[-1]):
            TrainSettings(**settings)
    assert TrainSettings(kind="model").loop_settings().learning_rate == 3e-4
    assert [TrainSettings().held_out_of(count) for count in (2, 100, 9000)] == [1, 10, 64]


def test_processes_wait_for_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr("accelerate.Accelerator", lambda **options: told.update(options))
    patient_accelerator(cpu=True)
    (handler,) = told["kwargs_handlers"]
    assert told["cpu"] and handler.timeout.days >= 7
