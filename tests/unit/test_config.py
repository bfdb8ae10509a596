"""`TreeConfig`: refusals that name field and value, files, and what a config is as a value."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hf_treespec import TreeConfig, TreeConfigError, TreeSpecError, TreeSpecWarning
from hf_treespec.tree import TreeLimits

CHOICES: dict[str, tuple[str, ...]] = {
    "draft": ("auto", "model", "mtp", "ngram", "suffix", "recycle", "lookahead", "early_exit", "layer_skip"),
    "growth": ("static", "best_first", "dynamic"),
    "verification": (
        "coupled",
        "naive",
        "rrs",
        "rrs-joint",
        "rrsw",
        "traversal",
        "block",
        "hybrid",
        "hybrid-joint",
        "kseq",
        "typical-lossy",
    ),  # fmt: skip
    "kv_cache": ("auto", "dense", "int8", "fp8"),
    "attention": ("auto", "sdpa", "eager", "treespec"),
    "fallback": ("auto", "off"),
    "on_stateful_processor": ("in_step", "error"),
}
RANGES = {
    "max_nodes": (0, 4096), "max_depth": (1, 512), "max_children": (1, 512), "random_children": (0, 2),
    "seed": (0, 2**63 - 1),
}  # fmt: skip
OTHER = TreeConfig(
    draft="ngram", max_nodes=7, max_depth=3, max_children=2, growth="dynamic", attention="eager", seed=2**63 - 1,
    fallback="off", on_stateful_processor="error", verification="hybrid-joint", random_children=2,
    draft_options={
        "early_exit": {"layer": 3}, "layer_skip": {"skip": [1, 4]}, "recycle": {"candidates": 12, "keep": False},
        "suffix": {"index": "corpus.tsx"}, "model": {"vocabulary": [7, 3, 11], "vocabulary_size": 2},
    },
)  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in CHOICES.items() for value in values])
def test_every_choice_is_taken(name: str, value: str) -> None:
    assert getattr(TreeConfig(**{name: value}), name) == value


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", ["", "AUTO", None, 1, ["auto"]])
def test_a_wrong_choice_is_named_with_the_right_ones(name: str, value: Any) -> None:
    with pytest.raises(TreeConfigError) as caught:
        TreeConfig(**{name: value})
    assert f"TreeConfig({name}={value!r})" in str(caught.value)
    assert all(repr(choice) in str(caught.value) for choice in CHOICES[name])


@pytest.mark.parametrize("name", RANGES)
def test_both_ends_of_a_range_are_taken_and_nothing_beyond(name: str) -> None:
    low, high = RANGES[name]
    for value in (low, high):
        assert getattr(TreeConfig(**{name: value}), name) == value
    for value in (low - 1, high + 1, True, 4.0, "4", [4]):
        with pytest.raises(TreeConfigError, match=re.escape(f"TreeConfig({name}={value!r}): expected")):
            TreeConfig(**{name: value})


@pytest.mark.parametrize("name", ["max_nodes", "max_depth", "max_children"])
def test_sizes_cannot_be_left_open(name: str) -> None:
    low, high = RANGES[name]
    with pytest.raises(TreeConfigError, match=rf"{name}=None\): expected an integer in \[{low}, {high}\]"):
        TreeConfig(**{name: None})


def test_errors_are_value_errors_of_ours() -> None:
    with pytest.raises(ValueError) as caught:
        TreeConfig(seed=-1)
    assert isinstance(caught.value, TreeSpecError)


def test_limits_are_the_three_sizes() -> None:
    assert OTHER.limits == TreeLimits(max_nodes=7, max_depth=3, max_children=2)


# -- values --


def test_configs_are_frozen_hashable_values() -> None:
    same = dataclasses.replace(OTHER)
    assert same == OTHER and hash(same) == hash(OTHER) and same is not OTHER
    for name in (field.name for field in dataclasses.fields(TreeConfig)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(OTHER, name, getattr(OTHER, name))
        default = getattr(TreeConfig(), name)
        if getattr(OTHER, name) != default:
            changed = dataclasses.replace(OTHER, **{name: default})
            assert changed != OTHER and hash(changed) != hash(OTHER)
    with pytest.raises((AttributeError, TypeError)):
        OTHER.new_field = 1  # type: ignore[attr-defined]
    assert copy.deepcopy(OTHER) == pickle.loads(pickle.dumps(OTHER)) == OTHER


# -- sources --


@pytest.mark.parametrize("value", [("ngram", "recycle"), ["ngram", "recycle"]])
def test_several_sources_are_a_tuple(value: Any) -> None:
    config = TreeConfig(draft=value)
    assert config.draft == config.sources == ("ngram", "recycle")
    assert TreeConfig(draft=value[:1]).draft == "ngram" and TreeConfig(draft="suffix").sources == ("suffix",)
    assert TreeConfig().sources == TreeConfig(draft="model").sources == ()


@pytest.mark.parametrize(
    "value",
    [("ngram", "ngram"), ("model", "mtp"), ("early_exit", "layer_skip"), (), [], ("auto",), ("ngram", 3),
     ("ngram", ["x"]), {"ngram"}, 3],
)  # fmt: skip
def test_sources_that_cannot_draft_together_are_named(value: Any) -> None:
    with pytest.raises(TreeConfigError) as caught:
        TreeConfig(draft=value)
    assert f"TreeConfig(draft={value!r}): expected one of 'auto'" in str(caught.value)
    joinable = "'model', 'mtp', 'early_exit', 'layer_skip', 'ngram', 'suffix', 'recycle', 'lookahead'"
    assert f"or a tuple of different ones of {joinable}, one of the first four" in str(caught.value)


def test_defaults_may_be_named() -> None:
    """A config that is written out with all its defaults is one that can be read."""
    options = {source: TreeConfig().options_of(source) for source in ("model", "mtp", "suffix", "early_exit")}
    assert [list(one.values()) for one in options.values()] == [[None, None], [None], [None], [None]]
    config = TreeConfig(draft_options=options)
    assert TreeConfig.from_dict(json.loads(config.to_json_string())) == config
    # Where None is no default it is refused.
    with pytest.raises(TreeConfigError, match=r"ngram\['max_match'\]=None"):
        TreeConfig(draft_options={"ngram": {"max_match": None}})


def test_options_of_another_config_are_not_read_anew() -> None:
    config = TreeConfig(draft_options={"model": {"vocabulary": range(2000)}})
    assert config.replace(seed=3).draft_options is config.draft_options


def test_options_of_one_field_are_read_anew_in_another() -> None:
    other = TreeConfig(draft_options={"model": {"vocabulary": range(20)}})
    with pytest.raises(TreeConfigError, match="depth_options=.*'model'"):
        TreeConfig(depth_options=other.draft_options)
    again = pickle.loads(pickle.dumps(other))
    assert again.replace(seed=3).draft_options is again.draft_options


def test_options_do_not_change() -> None:
    """Neither by the dicts that were given, nor by what the config gives out: a frozen value is one to the bottom."""
    ids, given = [5, 9], {"recycle": {"candidates": 12}}
    config = TreeConfig(draft_options={**given, "model": {"vocabulary": ids}})
    before = hash(config)
    ids.append(3)
    given["recycle"]["candidates"] = 13
    given["ngram"] = {"max_match": 3}
    out = config.to_dict()
    out["draft_options"]["recycle"]["candidates"] = 14
    config.options_of("recycle")["candidates"] = 15
    kept: Any = config.draft_options
    for change in (
        lambda: kept.update(ngram={}), lambda: kept["recycle"].update(candidates=3), lambda: kept.pop("recycle"),
        lambda: kept.clear(), lambda: kept.setdefault("ngram", {}), lambda: kept.popitem(),
        lambda: kept.__setitem__("ngram", {}), lambda: kept["recycle"].__delitem__("candidates"),
        lambda: kept.__ior__({"ngram": {}}),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"do not change: use config.replace"):
            change()
    assert config.draft_options == {"recycle": {"candidates": 12}, "model": {"vocabulary": (5, 9)}}
    assert hash(config) == before
    for copied in (copy.copy(kept), copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert copied == kept
        with pytest.raises(TypeError):
            copied.clear()
    # Other configs go out from it.
    assert config.replace(draft_options={**kept, "ngram": {"max_match": 3}}).options_of("ngram") == {"max_match": 3}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([7, 3, 9], (7, 3, 9)), (range(2, 5), (2, 3, 4)), (torch.tensor([7, 3]), (7, 3)), (Path("a") / "b", "a/b"),
        (Counter({4: 2, 9: 5, 1: 2}), (9, 1, 4)), ({"4": 2.5, "9": 5}, (9, 4)), (None, None),
    ],
)  # fmt: skip
def test_ids_are_named_in_many_ways(given: Any, kept: Any) -> None:
    config = TreeConfig(draft_options={"model": {"vocabulary": given}})
    assert config.options_of("model") == {"vocabulary": kept, "vocabulary_size": None}
    assert TreeConfig.from_dict(json.loads(config.to_json_string())) == config


def test_options_have_defaults_and_are_copied() -> None:
    given = {"recycle": {"candidates": 12}, "suffix": {"index": Path("a") / "b"}}
    config = TreeConfig(draft_options=given)
    given["recycle"]["candidates"] = 13
    assert config.options_of("recycle") == {"candidates": 12, "keep": True}
    assert config.options_of("suffix") == {"index": str(Path("a") / "b")}
    assert config.options_of("ngram") == {"max_match": 8}
    assert config.options_of("lookahead") == {"window": 3, "ngram": 3, "candidates": 8}
    assert TreeConfig().draft_options == {} and TreeConfig().options_of("suffix") == {"index": None}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "draft_options=3): expected a mapping of source to options"),
        ({"draft": {}}, "source 'draft': expected one of 'model', 'mtp', 'ngram', 'suffix', 'recycle'"),
        ({"sufix": {}}, "'layer_skip'; did you mean 'suffix'?"),
        ({"ngram": {"max_macht": 3}}, "expected one of 'max_match'; did you mean 'max_match'?"),
        ({"model": {"vocabulary": ""}}, "model['vocabulary']='': expected the path of a .json file, or different"),
        ({"model": {"vocabulary": []}}, "model['vocabulary']=[]: expected the path"),
        ({"model": {"vocabulary": 9}}, "model['vocabulary']=9: expected the path"),
        ({"model": {"vocabulary": [3, 3]}}, "model['vocabulary']=[3, 3]: expected the path"),
        ({"model": {"vocabulary": [3, -1]}}, "model['vocabulary']=[3, -1]: expected the path"),
        ({"model": {"vocabulary": [3.0]}}, "model['vocabulary']=[3.0]: expected the path"),
        ({"model": {"vocabulary": [True]}}, "model['vocabulary']=[True]: expected the path"),
        ({"model": {"vocabulary": {"a": 3}}}, "model['vocabulary']={'a': 3}: expected the path"),
        ({"model": {"vocabulary": {3: "b"}}}, "model['vocabulary']={3: 'b'}: expected the path"),
        ({"model": {"vocabulary": {3.5: 1}}}, "model['vocabulary']={3.5: 1}: expected the path"),
        ({"model": {"vocabulary": {"3": 1, 3: 2}}}, "model['vocabulary']={'3': 1, 3: 2}: expected the path"),
        ({"model": {"vocabulary": torch.ones(2, 2)}}, "model['vocabulary']=tensor("),
        (
            {"model": {"vocabulary": [3], "vocabulary_size": 0}},
            "model['vocabulary_size']=0: expected an integer in [1",
        ),
        ({"model": {"vocabulary_size": 8}}, "model['vocabulary_size']=8: most frequent ones of which ids?"),
        ({3: {}}, "source 3: expected one of"),
        ({"ngram": 3}, "ngram=3: expected a mapping of options"),
        ({"ngram": {"match": 3}}, "ngram['match']: no such option; expected one of 'max_match'"),
        ({"ngram": {"max_match": 0}}, "ngram['max_match']=0: expected an integer in [1, 64]"),
        ({"recycle": {"candidates": True}}, "recycle['candidates']=True: expected an integer in [1, 64]"),
        ({"recycle": {"keep": 1}}, "recycle['keep']=1: expected True or False"),
        ({"suffix": {"index": ""}}, "suffix['index']='': expected the path of a file, or None"),
        ({"lookahead": {"window": 0}}, "lookahead['window']=0: expected an integer in [1, 64]"),
        ({"lookahead": {"ngram": 1}}, "lookahead['ngram']=1: expected an integer in [2, 16]"),
        ({"lookahead": {"ngram": 2.0}}, "lookahead['ngram']=2.0: expected an integer in [2, 16]"),
        ({"lookahead": {"candidates": 257}}, "lookahead['candidates']=257: expected an integer in [1, 256]"),
        ({"lookahead": {"level": 3}}, "no such option; expected one of 'window', 'ngram', 'candidates'"),
        ({"early_exit": {"layer": 0}}, "early_exit['layer']=0: expected an integer in [1, 4096]"),
        ({"layer_skip": {"skip": []}}, "layer_skip['skip']=[]: expected a list of different layer numbers"),
        ({"layer_skip": {"skip": 3}}, "layer_skip['skip']=3: expected a list of different layer numbers"),
        ({"layer_skip": {"skip": [1, 1]}}, "layer_skip['skip']=[1, 1]: expected a list of different"),
        ({"layer_skip": {"skip": [-1]}}, "layer_skip['skip']=[-1]: expected a list of different"),
        ({"layer_skip": {"skip": [True]}}, "layer_skip['skip']=[True]: expected a list of different"),
        ({"layer_skip": {"skip": "16-22"}}, "layer_skip['skip']='16-22': expected a list of different"),
        ({"suffix": {"index": 3}}, "suffix['index']=3: expected the path of a file, or None"),
    ],
)
def test_wrong_options_are_named(value: Any, message: str) -> None:
    with pytest.raises(TreeConfigError) as caught:
        TreeConfig(draft_options=value)
    assert "TreeConfig(draft_options=" in str(caught.value) and message in str(caught.value)


def test_fields_go_by_name_only() -> None:
    with pytest.raises(TypeError):
        TreeConfig("ngram")  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"TreeConfig\(max_node=3\): no such field.*; did you mean 'max_nodes'\?$"):
        TreeConfig(max_node=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"TreeConfig\(beam=3\): no such field; expected one of draft, .*options$"):
        TreeConfig(beam=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="did you mean 'fallback'"):
        OTHER.replace(fall_back="off")
    assert [*inspect.signature(TreeConfig).parameters] == [field.name for field in dataclasses.fields(TreeConfig)]


def test_replace_makes_a_validated_copy() -> None:
    assert OTHER.replace(max_nodes=9) == dataclasses.replace(OTHER, max_nodes=9)
    assert OTHER.max_nodes == 7
    with pytest.raises(TreeConfigError, match="max_nodes=-1"):
        OTHER.replace(max_nodes=-1)


# -- dicts --

CONFIGS = st.builds(
    TreeConfig,
    **{name: st.sampled_from(values) for name, values in CHOICES.items() if name != "draft"},
    draft=st.sampled_from([*CHOICES["draft"], ("ngram", "recycle"), ("recycle", "suffix", "ngram"), ("mtp", "ngram")]),
    **{name: st.integers(*ends) for name, ends in RANGES.items() if name != "seed"},
    seed=st.none() | st.integers(*RANGES["seed"]),
    draft_options=st.fixed_dictionaries(
        {},
        optional={
            "model": st.fixed_dictionaries({}, optional={"vocabulary": st.just("ids.json") | st.just([5, 3])}),
            "layer_skip": st.fixed_dictionaries({}, optional={"skip": st.just([3, 5])}),
            "mtp": st.fixed_dictionaries({}, optional={"depth": st.integers(1, 512)}),
            "ngram": st.fixed_dictionaries({}, optional={"max_match": st.integers(1, 64)}),
            "suffix": st.fixed_dictionaries({}, optional={"index": st.none() | st.just("corpus.tsx")}),
            "recycle": st.fixed_dictionaries({}, optional={"candidates": st.integers(1, 64), "keep": st.booleans()}),
            "lookahead": st.fixed_dictionaries(
                {}, optional={"window": st.integers(1, 64), "ngram": st.integers(2, 16)}
            ),
        },
    ),
)


@given(CONFIGS)
def test_dict_json_and_yaml_round_trip(config: TreeConfig) -> None:
    data = config.to_dict()
    whole = {"schema_version": 1, **dataclasses.asdict(config)}
    assert data == {**whole, "draft_options": json.loads(json.dumps(whole["draft_options"]))}
    assert TreeConfig.from_dict(data) == config
    assert TreeConfig.from_dict(json.loads(config.to_json_string())) == config
    assert TreeConfig.from_dict(yaml.safe_load(config.to_yaml_string())) == config


def test_missing_keys_take_the_defaults() -> None:
    assert TreeConfig.from_dict({}) == TreeConfig()
    assert TreeConfig.from_dict({"max_nodes": 3}) == TreeConfig(max_nodes=3)


def test_unknown_keys_are_dropped_with_one_warning_that_names_them() -> None:
    with pytest.warns(TreeSpecWarning, match="unknown keys dropped: 7, zeta$") as caught:
        config = TreeConfig.from_dict({"zeta": 1, "max_nodes": 3, 7: 2})  # type: ignore[dict-item]
    assert config == TreeConfig(max_nodes=3) and len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TreeConfig.from_dict(OTHER.to_dict())


@pytest.mark.parametrize("version", [2, 0, "1", None, True, 1.0])
def test_another_schema_is_refused(version: Any) -> None:
    with pytest.raises(TreeConfigError, match=re.escape(f"schema_version={version!r}: this release reads 1 to 1")):
        TreeConfig.from_dict({"schema_version": version})


@pytest.mark.parametrize("data", [None, [], "max_nodes: 3", 5])
def test_what_is_no_mapping_is_refused(data: Any) -> None:
    with pytest.raises(TreeConfigError, match=f"expected a mapping of TreeConfig fields, got {type(data).__name__}"):
        TreeConfig.from_dict(data)


def test_a_bare_off_in_yaml_is_off() -> None:
    assert TreeConfig.from_dict(yaml.safe_load("fallback: off")) == TreeConfig(fallback="off")
    for data in ({"fallback": True}, {"fallback": 0}, {"draft": False}):
        with pytest.raises(TreeConfigError):
            TreeConfig.from_dict(data)


def test_values_of_a_dict_are_validated() -> None:
    with pytest.raises(TreeConfigError, match=r"max_nodes='3'"):
        TreeConfig.from_dict({"max_nodes": "3"})


# -- files --


@pytest.mark.parametrize("name", ["trees.json", "trees.yaml", "trees.yml"])
def test_a_file_is_written_in_the_format_of_its_suffix(name: str, tmp_path: Path) -> None:
    path = OTHER.save_pretrained(tmp_path / "new" / name)
    assert path == tmp_path / "new" / name
    text = path.read_text()
    assert text.startswith("{\n") == (path.suffix == ".json")
    parsed = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    assert list(parsed) == ["schema_version", *(field.name for field in dataclasses.fields(TreeConfig))]
    assert TreeConfig.from_pretrained(path) == TreeConfig.from_pretrained(str(path)) == OTHER


@pytest.mark.parametrize("name", ["model", "model-v1.5"])
def test_a_folder_gets_and_gives_tree_config_json(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    assert OTHER.save_pretrained(str(folder)) == folder / "tree_config.json"
    assert TreeConfig.from_pretrained(folder) == OTHER
    assert json.loads((folder / "tree_config.json").read_text()) == OTHER.to_dict()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere.json: no such file"):
        TreeConfig.from_pretrained(tmp_path / "nowhere.json")
    with pytest.raises(FileNotFoundError, match="tree_config.json: no such file"):
        TreeConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json: cannot be parsed"),
        ("a.yaml", "a: [", "a.yaml: cannot be parsed"),
        ("a.yaml", "", "got NoneType"),
        ("a.json", "[1]", "got list"),
        ("a.toml", "max_nodes = 3", r"a.toml: expected a name ending in one of .json, .yaml, .yml"),
        ("a.yaml", "max_nodes: many", "max_nodes='many'"),
        ("a.json", "\xff", "a.json: cannot be parsed"),
    ],
)
def test_a_file_that_holds_no_config_is_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TreeConfigError, match=message):
        TreeConfig.from_pretrained(path)


def test_shipped_trees_load_without_a_warning() -> None:
    folder = Path(__file__).resolve().parents[2] / "configs" / "trees"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configs = {path.stem: TreeConfig.from_pretrained(path) for path in sorted(folder.glob("*.yaml"))}
    assert {
        name: (c.draft, c.max_nodes, c.max_depth, c.max_children, c.growth, c.fallback) for name, c in configs.items()
    } == {
        "chain": ("auto", 5, 5, 1, "static", "off"),
        "draft_model": ("model", 24, 4, 8, "dynamic", "auto"),
        "ngram": ("ngram", 32, 12, 4, "best_first", "auto"),
    }
