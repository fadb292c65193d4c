"""Capture: the cache does not depend on ranks, kills or batching, and nothing broken gets into it.

Run: pytest tests/test_capture.py
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from tiny import target_model, tokenizer

from draftsmith.data import capture as capture_module
from draftsmith.data.capture import CaptureConfig, capture, checksum, describe, plan_shards
from draftsmith.data.chat import Row
from draftsmith.data.shards import FeatureStore, ShardWriter
from draftsmith.models.draft import Needs
from draftsmith.models.target import Target, TargetConfig

NEEDS = Needs(aux_layers=(2, 3, 4))
CONFIG = CaptureConfig(shard_tokens=20)


def tiny_target(kind: str = "llama", seed: int = 0, **config) -> Target:
    return Target(target_model(kind, seed=seed, **config), tokenizer(), TargetConfig(name=f"tiny-{kind}"))


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def row(name: str, length: int) -> Row:
    random = torch.Generator().manual_seed(length)
    ids = torch.randint(97, 117, (length,), generator=random).tolist()
    return Row(name, "chat", ids, [int(i >= length // 3) for i in range(length)])


ROWS = [row(f"row-{i}", n) for i, n in enumerate([3, 17, 9, 17, 1, 30, 8, 5, 12])]
NUM_SHARDS = len(plan_shards([len(r.input_ids) for r in ROWS], 20))


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory) -> Path:
    """What an uninterrupted capture on one rank leaves."""
    folder = tmp_path_factory.mktemp("whole")
    capture(ROWS, target, NEEDS, folder, CONFIG)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class CountingTarget:
    """The target, counting the rows that went through it."""

    def __init__(self, target: Target):
        self.target, self.num_rows = target, 0

    def __getattr__(self, name):
        return getattr(self.target, name)

    def states(self, rows, *args, **kwargs):
        self.num_rows += len(rows)
        return self.target.states(rows, *args, **kwargs)


# -- what is captured --------------------------------------------------------------------------------------------------
def test_stored_states_are_those_of_each_row_alone_in_the_cache_dtype(target, whole):
    store = FeatureStore.open(whole)
    assert store.row_ids == [r.id for r in ROWS]
    for i, each in enumerate(ROWS):
        ids = torch.tensor([each.input_ids])
        truth = target.model(ids, output_hidden_states=True).hidden_states
        got = store.row(i)
        assert got.features.dtype == torch.bfloat16
        assert got.input_ids.tolist() == each.input_ids
        assert got.loss_mask.tolist() == [bool(x) for x in each.loss_mask]
        features = torch.cat([truth[k][0] for k in NEEDS.aux_layers], -1)
        torch.testing.assert_close(got.features, features.bfloat16(), rtol=0, atol=0)
        torch.testing.assert_close(got.last_hidden, truth[-1][0].bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("batch_tokens", [1, 35, 1000])
def test_batched_capture_keeps_order_and_states(target, tmp_path, batch_tokens):
    exact = CaptureConfig(dtype="float32", shard_tokens=1000)
    alone = capture(ROWS, target, NEEDS, tmp_path / "alone", exact)
    batched_config = exact.model_copy(update={"batch_tokens": batch_tokens})
    for again in ("first", "second"):
        batched = capture(ROWS, target, NEEDS, tmp_path / again, batched_config)
        assert batched.row_ids == alone.row_ids
        for i, each in enumerate(ROWS):
            assert batched.row(i).features.shape == (len(each.input_ids), 3 * 48)
            torch.testing.assert_close(batched.row(i).features, alone.row(i).features, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(batched.row(i).last_hidden, alone.row(i).last_hidden, rtol=1e-5, atol=1e-5)
    assert content(tmp_path / "first") == content(tmp_path / "second")


@pytest.mark.parametrize("kind", ["gpt2", "swa", "gemma3"])
def test_other_kinds_of_targets_are_captured_too(tmp_path, kind):
    target = tiny_target(kind)
    store = capture(ROWS, target, Needs(aux_layers=(1, 4)), tmp_path, CONFIG)
    truth = target.model(torch.tensor([ROWS[5].input_ids]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(store.row(5).features[:, 48:], truth[4][0].bfloat16(), rtol=0, atol=0)


def test_features_or_last_hidden_alone(target, tmp_path):
    only_last = capture(ROWS, target, Needs(), tmp_path / "last", CONFIG).row(1)
    assert only_last.features is None
    assert only_last.last_hidden.shape == (17, 48)
    only_features = capture(ROWS, target, Needs((3,), last_hidden=False), tmp_path / "aux", CONFIG).row(1)
    assert only_features.features.shape == (17, 48)
    assert only_features.last_hidden is None


def test_shards_are_cut_by_tokens_and_never_split_a_row():
    assert plan_shards([3, 17, 9, 17, 1, 30, 8, 5, 12], 20) == [
        range(0, 2), range(2, 3), range(3, 5), range(5, 6), range(6, 8), range(8, 9)
    ]  # fmt: skip
    assert plan_shards([50], 20) == [range(0, 1)]
    assert plan_shards([], 20) == []


# -- resuming ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("killed_at", range(NUM_SHARDS))
@pytest.mark.parametrize("where", ["before the shard", "between shard and manifest"])
def test_a_capture_killed_anywhere_goes_on_and_ends_byte_identical(
    target, whole, tmp_path, monkeypatch, killed_at, where
):
    class Killed(BaseException):
        pass

    place = os.replace
    name = f"shard-{killed_at:05d}" if where == "before the shard" else "manifest-rank0"
    seen = 0

    def replace(source, destination):
        nonlocal seen
        if Path(destination).name.startswith(name):
            seen += 1
            if where == "before the shard" or seen == killed_at + 1:
                raise Killed
        place(source, destination)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(Killed):
        capture(ROWS, target, NEEDS, tmp_path, CONFIG)
    monkeypatch.undo()
    counting = CountingTarget(target)
    capture(ROWS, counting, NEEDS, tmp_path, CONFIG)
    assert content(tmp_path) == content(whole)
    shards = plan_shards([len(r.input_ids) for r in ROWS], 20)
    assert counting.num_rows == sum(len(shard) for shard in shards[killed_at:])  # completed shards are kept


def test_a_capture_killed_while_merging_goes_on(target, whole, tmp_path, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", killed)  # manifest.json is written, rank manifests are not yet removed
    with pytest.raises(KeyboardInterrupt):
        capture(ROWS, target, NEEDS, tmp_path, CONFIG)
    monkeypatch.undo()
    counting = CountingTarget(target)
    capture(ROWS, counting, NEEDS, tmp_path, CONFIG)
    assert counting.num_rows == 0
    assert content(tmp_path) == content(whole)


CHILD = """
import os, sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch
torch.set_num_threads(1)
from test_capture import CONFIG, NEEDS, ROWS, tiny_target
from draftsmith.data.capture import capture

place = os.replace

def replace(source, destination):
    if Path(destination).name == "shard-00002.safetensors":
        print("writing", flush=True)
        time.sleep(60)
    place(source, destination)

os.replace = replace
capture(ROWS, tiny_target(), NEEDS, Path({folder!r}), CONFIG)
"""


def test_a_process_killed_while_it_writes_goes_on_and_ends_byte_identical(target, whole, tmp_path):
    folder = tmp_path / "cache"
    code = CHILD.format(tests=str(Path(__file__).parent), folder=str(folder))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    left = ["manifest-rank0.json", *(f"shard-0000{i}.safetensors" for i in range(2)), "shard-00002.safetensors.tmp"]
    assert sorted(content(folder)) == left
    counting = CountingTarget(target)
    capture(ROWS, counting, NEEDS, folder, CONFIG)
    shards = plan_shards([len(r.input_ids) for r in ROWS], 20)
    assert counting.num_rows == sum(len(shard) for shard in shards[2:])
    assert content(folder) == content(whole)


def test_a_finished_capture_does_nothing_when_run_again(target, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "cache")
    counting = CountingTarget(target)
    assert len(capture(ROWS, counting, NEEDS, tmp_path / "cache", CONFIG)) == len(ROWS)
    assert counting.num_rows == 0


def test_a_corrupt_shard_is_captured_again_and_only_that_one(target, whole, tmp_path):
    folder = tmp_path / "cache"
    shutil.copytree(whole, folder)
    path = folder / "shard-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 64
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"shard-00002.safetensors: missing or damaged.*Run capture again"):
        FeatureStore.open(folder)
    counting = CountingTarget(target)
    capture(ROWS, counting, NEEDS, folder, CONFIG)
    assert counting.num_rows == 2
    assert content(folder) == content(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"needs": Needs((2, 3, 5))}, r"aux layers \[2, 3, 4\] differ from the recipe's \[2, 3, 5\]"),
        ({"config": CaptureConfig(shard_tokens=20, dtype="float32")}, "dtype"),
        ({"config": CaptureConfig(shard_tokens=21)}, "shard_tokens 20 differs from the recipe's 21"),
        ({"rows": ROWS[:-1]}, "hash of the rows"),
        ({"target": "other"}, "target weights fingerprint"),
    ],
)
def test_resuming_under_changed_settings_is_refused(target, whole, tmp_path, change, message):
    shutil.copytree(whole, tmp_path / "cache")
    values = {"rows": ROWS, "target": target, "needs": NEEDS, "config": CONFIG} | change
    if values["target"] == "other":
        values["target"] = tiny_target(seed=1)  # the same name and config, other weights
    with pytest.raises(ValueError, match=message):
        capture(folder=tmp_path / "cache", **values)
    assert content(tmp_path / "cache") == content(whole)


# -- several ranks -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [2, 3, 9])
@pytest.mark.parametrize("last", [0, 1])
def test_ranks_together_write_what_one_rank_writes(target, whole, tmp_path, world, last):
    order = [r for r in range(world) if r != last] + [last]
    stores = [capture(ROWS, target, NEEDS, tmp_path, CONFIG, rank, world) for rank in order]
    assert len(stores[-1]) == len(ROWS)
    assert stores[0] is None  # the others were still at work
    assert content(tmp_path) == content(whole)


def test_a_capture_goes_on_with_another_number_of_ranks(target, whole, tmp_path):
    assert capture(ROWS, target, NEEDS, tmp_path, CONFIG, rank=1, world=2) is None  # rank 0 was killed
    counting = CountingTarget(target)
    capture(ROWS, counting, NEEDS, tmp_path, CONFIG)
    shards = plan_shards([len(r.input_ids) for r in ROWS], 20)
    assert counting.num_rows == sum(len(shard) for shard in shards[::2])
    assert content(tmp_path) == content(whole)


def test_progress_counts_the_tokens_of_this_rank_and_starts_where_it_went_on(target, tmp_path):
    seen = []
    capture(ROWS, target, NEEDS, tmp_path, CONFIG, progress=lambda *x: seen.append(x))
    assert seen == [(20, 102), (29, 102), (47, 102), (77, 102), (90, 102), (102, 102)]
    (tmp_path / "shard-00001.safetensors").unlink()
    seen.clear()
    capture(ROWS, target, NEEDS, tmp_path, CONFIG, progress=lambda *x: seen.append(x))
    assert seen == [(102, 102)]


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_states_are_refused_by_row_position_and_layer_and_not_written(target, tmp_path, monkeypatch, value):
    real = target.states

    def broken(rows, *args, **kwargs):
        found = real(rows, *args, **kwargs)
        if len(rows[0]) == 30:
            found[0].features[11, 2 * 48 + 5] = value
        return found

    monkeypatch.setattr(target, "states", broken)
    with pytest.raises(ValueError, match=rf"shard-00003.safetensors: row 'row-5'.*position 11, aux layer 4 is {value}"):
        capture(ROWS, target, NEEDS, tmp_path, CONFIG)
    assert not (tmp_path / "shard-00003.safetensors").exists()
    assert (tmp_path / "shard-00002.safetensors").exists()


def test_a_target_with_broken_weights_is_named_in_the_last_hidden(tmp_path):
    target = tiny_target()
    target.core.norm.weight[7] = float("nan")
    with pytest.raises(ValueError, match="row 'row-0'.*position 0, last hidden is nan"):
        capture(ROWS, target, NEEDS, tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Row("odd", "chat", [97, 98, 99], [0, 1]), "row 'odd': 3 token ids but 2 loss mask entries"),
        (Row("none", "chat", [], []), "row 'none': no tokens"),
        (Row("big", "chat", [97, 264], [0, 1]), "row 'big': token id 264, the target tiny-llama embeds 264 ids"),
        (Row("neg", "chat", [97, -1], [0, 1]), "row 'neg': token id -1"),
        (row("long", 513), "row 'long': 513 tokens, the target reads 512; lower data.max_len"),
    ],
)
def test_rows_that_the_target_cannot_read_are_refused_before_any_work(target, tmp_path, bad, message):
    counting = CountingTarget(target)
    with pytest.raises(ValueError, match=message):
        capture([*ROWS, bad], counting, NEEDS, tmp_path, CONFIG)
    assert counting.num_rows == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (Needs((2, 6)), "draft.aux_layers: 6 is the output of the last of 6 layers"),
        (Needs((2,), target_kv_layers=(0, 6)), r"keys and values of target layer 6.*6 layers.*use one that does"),
        (Needs((), last_hidden=False), "nothing to capture"),
    ],
)
def test_needs_that_a_cache_cannot_meet_are_refused(target, tmp_path, needs, message):
    with pytest.raises(ValueError, match=message):
        capture(ROWS, target, needs, tmp_path, CONFIG)


def test_no_rows_are_refused(target, tmp_path):
    with pytest.raises(ValueError, match="no rows to capture"):
        capture([], target, NEEDS, tmp_path, CONFIG)


def test_a_capture_that_cannot_fit_is_refused_before_any_work(target, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 3000, 3000))
    counting = CountingTarget(target)
    with pytest.raises(OSError, match=r"38\.\d KiB needed, 2\.9 KiB free") as caught:
        capture(ROWS, counting, NEEDS, tmp_path, CONFIG)
    assert caught.value.errno == errno.ENOSPC
    assert counting.num_rows == 0


def test_a_disk_that_fills_up_during_capture_keeps_the_finished_shards(target, whole, tmp_path, monkeypatch):
    write = ShardWriter.write

    def full_at_third(self, index, rows):
        if index == 2:
            monkeypatch.setattr(os, "fsync", no_room)
        write(self, index, rows)

    def no_room(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ShardWriter, "write", full_at_third)
    with pytest.raises(OSError, match=r"shard-00002.*no space left: 7\.\d KiB needed"):
        capture(ROWS, target, NEEDS, tmp_path, CONFIG)
    assert sorted(content(tmp_path)) == ["manifest-rank0.json", "shard-00000.safetensors", "shard-00001.safetensors"]
    monkeypatch.undo()
    capture(ROWS, target, NEEDS, tmp_path, CONFIG)
    assert content(tmp_path) == content(whole)


# -- keys --------------------------------------------------------------------------------------------------------------
def test_everything_that_changes_the_states_changes_the_description(target):
    base = describe(target, NEEDS, CONFIG, ROWS)
    assert base == describe(target, NEEDS, CONFIG, list(ROWS))
    assert base == describe(target, NEEDS, CaptureConfig(shard_tokens=20, verify="size"), ROWS)
    others = [
        describe(target, Needs((2, 3)), CONFIG, ROWS),
        describe(target, Needs((2, 3, 4), last_hidden=False), CONFIG, ROWS),
        describe(target, NEEDS, CaptureConfig(shard_tokens=20, dtype="float32"), ROWS),
        describe(target, NEEDS, CaptureConfig(shard_tokens=20, batch_tokens=99), ROWS),
        describe(target, NEEDS, CONFIG, ROWS[::-1]),
        describe(tiny_target(seed=1), NEEDS, CONFIG, ROWS),
        describe(tiny_target("qwen2"), NEEDS, CONFIG, ROWS),
    ]
    keys = [str(other) for other in [base, *others]]
    assert len(set(keys)) == len(keys)


def test_checksum_sees_ids_tokens_masks_and_order():
    a, b = Row("a", "k", [1, 2], [0, 1]), Row("b", "k", [3], [1])
    different = [[a, b], [b, a], [a], [Row("c", "k", [1, 2], [0, 1]), b], [Row("a", "k", [1, 3], [0, 1]), b]]
    different += [[Row("a", "k", [1, 2], [1, 1]), b], [Row("a", "k", [1], [0]), Row("b", "k", [2, 3], [1, 1])]]
    assert len({checksum(rows) for rows in different}) == len(different)
    assert checksum([a, b]) == checksum(iter([Row("a", "other", (1, 2), (0, 1), {"x": 1}), b]))


def test_token_bytes_are_what_a_shard_takes(target, whole):
    store = FeatureStore.open(whole)
    per_token = capture_module.token_bytes(NEEDS, 48, CONFIG)
    sizes = [entry["bytes"] for entry in store.manifest["shards"]]
    assert sum(sizes) == pytest.approx(per_token * 102, rel=0.1)
