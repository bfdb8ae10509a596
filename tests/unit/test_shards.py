"""Results of killed, resumed and shared runs: every unit once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hf_treespec.train import BrokenRunError, OtherRunError, ShardWriter, claim, read_shards
from kernel_scripts import child_environment


def write(folder, rank: int, *keys: str) -> None:
    with ShardWriter(folder, rank) as out:
        for key in keys:
            out.write({"key": key, "value": key * 2})


def test_what_is_written_is_read_in_the_order_of_the_keys(tmp_path) -> None:
    write(tmp_path, 1, "d", "b")
    write(tmp_path, 0, "c")
    write(tmp_path, 0, "a")
    assert list(read_shards(tmp_path)) == ["a", "b", "c", "d"]
    assert read_shards(tmp_path)["d"] == {"key": "d", "value": "dd"}
    assert read_shards(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("cut", range(1, 25))
def test_a_line_that_a_kill_has_cut_is_dropped(tmp_path, cut: int) -> None:
    write(tmp_path, 0, "a", "b")
    path = tmp_path / "shard-0000.jsonl"
    whole = path.read_bytes()
    assert len(whole.splitlines()[1]) == 27
    path.write_bytes(whole[:-cut])
    assert list(read_shards(tmp_path)) == ["a"]
    # Who goes on writes behind the last whole line.
    write(tmp_path, 0, "c")
    assert list(read_shards(tmp_path)) == ["a", "c"]
    assert path.read_bytes().count(b"\n") == 2


def test_a_unit_counts_once(tmp_path) -> None:
    write(tmp_path, 0, "a", "b")
    write(tmp_path, 5, "b", "c")
    assert len(read_shards(tmp_path)) == 3
    with ShardWriter(tmp_path, 1) as out:
        # As long as it took, it is the same.
        out.write({"key": "a", "value": "aa", "seconds": 3.0})
    assert len(read_shards(tmp_path)) == 3
    with ShardWriter(tmp_path, 1) as out:
        out.write({"key": "a", "value": "another"})
    with pytest.raises(ValueError, match="'a' has been done twice, differently"):
        read_shards(tmp_path)


def test_a_broken_line_inside_is_an_error(tmp_path) -> None:
    (tmp_path / "shard-0000.jsonl").write_text('{"key": "a"}\n{"key": \n{"key": "b"}\n')
    with pytest.raises(ValueError, match="line 2 is broken"):
        read_shards(tmp_path)


def test_a_record_that_lacks_something_is_an_error(tmp_path) -> None:
    write(tmp_path, 0, "a", "b")
    assert list(read_shards(tmp_path, lambda record: "")) == ["a", "b"]
    with pytest.raises(BrokenRunError, match=r"shard-0000.jsonl: line 2 is broken: no b here; pass --fresh"):
        read_shards(tmp_path, lambda record: "no b here" if record["key"] == "b" else "")


def test_a_folder_belongs_to_one_run(tmp_path) -> None:
    folder = tmp_path / "out"
    claim(folder, "one", {"seed": 1}, fresh=False)
    write(folder, 0, "a")
    claim(folder, "one", {"seed": 1}, fresh=False)
    with pytest.raises(OtherRunError, match="other settings"):
        claim(folder, "two", {"seed": 2}, fresh=False)
    assert list(read_shards(folder)) == ["a"]
    claim(folder, "two", {"seed": 2}, fresh=True)
    assert read_shards(folder) == {}
    told = {"seed": 2, "tree": {"max_nodes": 5}, "rules": ("all",), "prompts": {"limit": 3}}
    claim(folder, "three", told, fresh=True)
    other = {"seed": 2, "tree": {"max_nodes": 6, "growth": "static"}, "rules": ["coupled"], "prompts": {"limit": 9}}
    said = (
        r"other settings: tree.max_nodes was 5 there and is 6 now; tree.growth was not set there and is "
        r'"static" now; rules was \["all"\] there and is \["coupled"\] now; pass --fresh'
    )
    with pytest.raises(OtherRunError, match=said):
        claim(folder, "four", other, fresh=False, free=("prompts.limit",))
    with pytest.raises(OtherRunError, match="other prompts: what their file holds has changed; pass --fresh"):
        claim(folder, "four", {**told, "prompts": {"limit": 9}}, fresh=False, free=("prompts.limit",))
    (folder / "run.json").write_text('{"fingerprint": "five"}')
    with pytest.raises(OtherRunError, match="other settings or prompts; pass --fresh"):
        claim(folder, "four", told, fresh=False)
    write(folder, 0, "a")
    (folder / "run.json").unlink()
    write(folder, 0, "a")
    with pytest.raises(OtherRunError, match="unknown run"):
        claim(folder, "two", {}, fresh=False)


def test_a_shard_that_is_open_is_nobody_elses(tmp_path) -> None:
    with ShardWriter(tmp_path, 0) as out:
        out.write({"key": "a", "value": "aa"})
        with open(tmp_path / "shard-0000.jsonl", "ab") as half:
            half.write(b'{"key": "b", ')
        with pytest.raises(OtherRunError, match=r"shard-0000.jsonl is being written by another run"):
            ShardWriter(tmp_path, 0)
        assert (tmp_path / "shard-0000.jsonl").read_bytes().endswith(b'{"key": "b", ')
        with pytest.raises(OtherRunError, match=r"shard-0000.jsonl is being written by another run"):
            claim(tmp_path, "two", {}, fresh=True)
        write(tmp_path, 1, "c")
    assert list(read_shards(tmp_path)) == ["a", "c"]
    write(tmp_path, 0, "d")
    assert list(read_shards(tmp_path)) == ["a", "c", "d"]


HOLDS = """
import sys
import time
from pathlib import Path
from hf_treespec.train.shards import ShardWriter
writer = ShardWriter(Path(sys.argv[1]), 0)
print("open", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_locked(tmp_path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=child_environment()
    ) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "open\n"
            with pytest.raises(OtherRunError):
                ShardWriter(tmp_path, 0)
        finally:
            child.kill()
    write(tmp_path, 0, "a")
    assert list(read_shards(tmp_path)) == ["a"]
