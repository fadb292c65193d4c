"""The feature cache on disk: complete or absent, hashed, self-describing, refused when it is not what was asked for.

Run: pytest tests/test_shards.py
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from draftsmith.data import shards
from draftsmith.data.shards import FeatureStore, ShardWriter, StoredRow

AUX, WIDTH = (2, 17, 33), 5
HEADER = {
    "format": shards.FORMAT,
    "target": {
        "name": "org/qwen",
        "revision": "main",
        "config_sha256": "c" * 64,
        "dtype": "bfloat16",
        "hidden_size": 5,
    },
    "tokenizer_sha256": "t" * 64,
    "aux_layers": list(AUX),
    "last_hidden": True,
    "norm": shards.NORM,
    "dtype": "bfloat16",
    "codec": shards.CODEC,
    "shard_tokens": 20,
}


def stored(name: str, length: int, seed: int = 0) -> StoredRow:
    random = torch.Generator().manual_seed(seed)
    return StoredRow(
        torch.randint(0, 100, (length,), generator=random),
        torch.arange(length) >= length // 2,
        torch.randn(length, len(AUX) * WIDTH, generator=random).bfloat16(),
        torch.randn(length, WIDTH, generator=random).bfloat16(),
        name,
    )


ROWS = [stored("a", 3, 1), stored("b", 7, 2), stored("c", 1, 3), stored("d", 12, 4), stored("e", 6, 5)]
SHARDS = [ROWS[:2], ROWS[2:4], ROWS[4:]]


def write(folder: Path) -> Path:
    writer = ShardWriter(folder, HEADER, len(SHARDS))
    for index, rows in enumerate(SHARDS):
        writer.write(index, rows)
    assert writer.finish()
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def same(one: StoredRow, other: StoredRow) -> bool:
    return one.row_id == other.row_id and all(
        torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(one[:4], other[:4], strict=True)
    )


def flip_byte(path: Path, place: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def edit_manifest(folder: Path, **values) -> None:
    path = folder / shards.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# -- round trip --------------------------------------------------------------------------------------------------------
def test_rows_come_back_bit_for_bit_in_any_order(tmp_path):
    store = FeatureStore.open(write(tmp_path / "cache"), HEADER)
    assert len(store) == 5
    assert store.row_ids == ["a", "b", "c", "d", "e"]
    assert store.lengths == [3, 7, 1, 12, 6]
    for index in (4, 0, 2, 3, 1, 0):
        assert same(store.row(index), ROWS[index])
    assert store.read([3, 1])[0].row_id == "d"


def test_manifest_counts_rows_tokens_and_supervised_tokens(tmp_path):
    manifest = FeatureStore.open(write(tmp_path / "cache")).manifest
    assert manifest["num_rows"] == 5
    assert manifest["num_tokens"] == 29
    assert manifest["num_supervised"] == 2 + 4 + 1 + 6 + 3
    assert manifest["shards"][1]["rows"] == ["c", "d"]
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == [
        "manifest.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
        "shard-00002.safetensors",
    ]


@pytest.mark.parametrize(
    ("mask", "labels"),
    [
        ([], 0),
        ([1], 0),
        ([0, 1], 0),
        ([1, 1], 0),
        ([0, 1, 1], 1),
        ([1, 1, 1], 1),
        ([0, 1, 0, 1], 0),
        ([0, 1, 1, 0, 1, 1, 1], 3),
    ],
)
def test_a_label_needs_a_supervised_anchor_and_a_token_before_it(mask, labels):
    assert shards.num_labels(mask) == labels


def test_many_shards_are_read_through_few_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "OPEN_SHARDS", 1)
    store = FeatureStore.open(write(tmp_path / "cache"))
    for index in (0, 4, 2, 1, 3):
        assert same(store.row(index), ROWS[index])
    assert len(store._handles) == 1


def test_a_cache_without_aux_layers_or_without_last_hidden(tmp_path):
    for name, drop, header in (
        ("no-aux", {"features": None}, {"aux_layers": []}),
        ("no-last", {"last_hidden": None}, {"last_hidden": False}),
    ):
        writer = ShardWriter(tmp_path / name, HEADER | header, 1)
        writer.write(0, [row._replace(**drop) for row in ROWS])
        writer.finish()
        row = FeatureStore.open(tmp_path / name).row(3)
        assert [getattr(row, field) for field in drop] == [None]
        assert (row.features is None) != (row.last_hidden is None)


# -- mismatches name both values ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aux_layers": [2, 18, 33]}, r"aux layers \[2, 17, 33\] differ from the recipe's \[2, 18, 33\]; capture again or change draft.aux_layers"),
        ({"target": HEADER["target"] | {"name": "org/llama"}}, r'target "org/qwen" differs from the recipe\'s "org/llama"; .* change target.name'),
        ({"target": HEADER["target"] | {"revision": None}}, r'target revision "main" differs from the recipe\'s None'),
        ({"target": HEADER["target"] | {"config_sha256": "d" * 64}}, "target config hash cccccccccccc differs from the recipe's dddddddddddd"),
        ({"tokenizer_sha256": "u" * 64}, "tokenizer hash tttttttttttt differs from the recipe's uuuuuuuuuuuu"),
        ({"dtype": "float32"}, 'dtype "bfloat16" differs from the recipe\'s "float32"; .* change data.capture.dtype'),
        ({"last_hidden": False}, "True differs from the recipe's False"),
        ({"shard_tokens": 30}, "shard_tokens 20 differs from the recipe's 30; .* change data.capture.shard_tokens"),
    ],
)  # fmt: skip
def test_a_cache_made_otherwise_is_refused_with_both_values(tmp_path, change, message):
    folder = write(tmp_path / "cache")
    with pytest.raises(ValueError, match=message) as caught:
        FeatureStore.open(folder, HEADER | change)
    assert str(caught.value).startswith(str(folder))
    with pytest.raises(ValueError, match=message):  # and a capture does not go on in it
        ShardWriter(folder, HEADER | change, len(SHARDS))


@pytest.mark.parametrize(
    ("change", "words"), [({"format": 99}, "format 99"), ({"norm": "before"}, "norm"), ({"codec": "zip"}, "codec")]
)
def test_a_cache_of_another_format_is_refused(tmp_path, change, words):
    folder = write(tmp_path / "cache")
    edit_manifest(folder, **change)
    with pytest.raises(ValueError, match=words):
        FeatureStore.open(folder)


def test_an_unfinished_or_empty_folder_says_how_to_go_on(tmp_path):
    with pytest.raises(ValueError, match=r"no manifest.json here.*Run capture"):
        FeatureStore.open(tmp_path)
    writer = ShardWriter(tmp_path, HEADER, 3)
    writer.write(1, SHARDS[1])
    assert not writer.finish()
    with pytest.raises(ValueError, match=r"unfinished, 1 of 3 shards.*run the same capture command again"):
        FeatureStore.open(tmp_path)


# -- damage ------------------------------------------------------------------------------------------------------------
def test_a_flipped_byte_is_never_read_and_the_error_names_file_rows_and_cure(tmp_path):
    folder = write(tmp_path / "cache")
    flip_byte(folder / "shard-00001.safetensors")
    with pytest.raises(ValueError, match=r"shard-00001.safetensors.*hash.*2 rows, 'c' to 'd'.*Run capture again"):
        FeatureStore.open(folder)
    assert not ShardWriter(folder, HEADER, 3).has(1)
    assert ShardWriter(folder, HEADER, 3).has(0)


@pytest.mark.parametrize("verify", ["full", "size"])
def test_a_missing_or_cut_shard_is_refused_even_without_hashing(tmp_path, verify):
    folder = write(tmp_path / "cache")
    path = folder / "shard-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="shard-00002.safetensors: missing or damaged"):
        FeatureStore.open(folder, verify=verify)
    path.unlink()
    with pytest.raises(ValueError, match="shard-00002.safetensors: missing or damaged"):
        FeatureStore.open(folder, verify=verify)


def damaged_store(folder: Path, rows: list[StoredRow], **entry) -> FeatureStore:
    """A cache whose middle shard holds `rows` under a hash that fits."""
    writer = ShardWriter(folder, HEADER, 3)
    for index, shard in enumerate([SHARDS[0], rows, SHARDS[2]]):
        writer.write(index, shard)
    writer.own[1] |= entry
    writer.finish()
    return FeatureStore.open(folder)


@pytest.mark.parametrize(("value", "name"), [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")])
def test_a_bad_number_in_a_stored_row_is_named_by_file_row_position_and_layer(tmp_path, value, name):
    features = ROWS[3].features.clone()
    features[7, 1 * WIDTH + 2] = value
    store = damaged_store(tmp_path, [ROWS[2], ROWS[3]._replace(features=features)])
    assert same(store.row(2), ROWS[2])
    with pytest.raises(ValueError, match=f"shard-00001.safetensors: row 'd'.*position 7, aux layer 17 is {name}"):
        store.row(3)


def test_a_bad_number_in_the_last_hidden_is_named_too(tmp_path):
    last_hidden = ROWS[3].last_hidden.clone()
    last_hidden[0, 0] = float("nan")
    store = damaged_store(tmp_path, [ROWS[2], ROWS[3]._replace(last_hidden=last_hidden)])
    with pytest.raises(ValueError, match="row 'd'.*position 0, last hidden is nan"):
        store.row(3)


def test_finite_states_whose_sum_overflows_are_fine(tmp_path):
    huge = torch.full_like(ROWS[3].last_hidden, 3e38)
    store = damaged_store(tmp_path, [ROWS[2], ROWS[3]._replace(last_hidden=huge)])
    assert torch.equal(store.row(3).last_hidden, huge)


def test_a_row_whose_length_differs_from_its_ids_is_refused_naming_row_and_file(tmp_path):
    store = damaged_store(tmp_path, SHARDS[1], lengths=[2, 11])
    with pytest.raises(ValueError, match=r"shard-00001.safetensors: row 'c' ends at 1, manifest.json says 2"):
        store.row(2)


def test_states_that_are_fewer_than_the_ids_are_refused_naming_rows_and_file(tmp_path):
    store = damaged_store(tmp_path, [ROWS[2], ROWS[3]._replace(features=ROWS[3].features[:-1])])
    with pytest.raises(ValueError, match=r"shard-00001.safetensors: tensors .*\(12, 15\).* expected .*\(13, 15\)"):
        store.row(3)


# -- writing -----------------------------------------------------------------------------------------------------------
def test_a_full_disk_leaves_nothing_half_written_and_says_needed_and_free(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    writer = ShardWriter(folder, HEADER, 3)
    writer.write(0, SHARDS[0])
    before = content(folder)

    def no_room(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(OSError, match=r"shard-00001.safetensors: no space left: 9.. B needed, .* free. Make room"):
        writer.write(1, SHARDS[1])
    assert content(folder) == before
    monkeypatch.undo()

    again = ShardWriter(folder, HEADER, 3)
    assert [again.has(i) for i in range(3)] == [True, False, False]
    for index in (1, 2):
        again.write(index, SHARDS[index])
    assert again.finish()
    assert content(folder) == content(write(tmp_path / "other"))


def test_other_write_errors_and_ctrl_c_leave_nothing_half_written_either(tmp_path, monkeypatch):
    for error in (PermissionError(errno.EPERM, "not allowed"), KeyboardInterrupt()):

        def fail(*_, error=error) -> None:
            raise error

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(type(error)):
            shards.write_file(tmp_path / "x.json", b"{}")
        assert list(tmp_path.iterdir()) == []


def test_merging_depends_on_the_folder_alone_and_tolerates_a_second_merge(tmp_path):
    whole = content(write(tmp_path / "whole"))
    one, two = (ShardWriter(tmp_path / "two", HEADER, 3, rank) for rank in (0, 1))
    one.write(0, SHARDS[0])
    assert not one.finish()
    two.write(1, SHARDS[1])
    one.write(2, SHARDS[2])
    assert two.finish()  # rank 1 sees rank 0's shards
    assert one.finish()  # rank 0 comes late: the same manifest again
    assert content(tmp_path / "two") == whole


def test_two_versions_of_a_shard_are_settled_by_the_file(tmp_path):
    folder = write(tmp_path / "cache")
    other = [ROWS[2], stored("d", 12, seed=99)]
    flip_byte(folder / "shard-00001.safetensors")
    writer = ShardWriter(folder, HEADER, 3, rank=1)
    writer.write(1, other)  # captured again, on other hardware: another hash than manifest.json's
    assert writer.finish()
    assert same(FeatureStore.open(folder).row(3), other[1])


def test_an_unreadable_manifest_is_named(tmp_path):
    folder = write(tmp_path / "cache")
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="manifest.json: not JSON"):
        FeatureStore.open(folder)


# -- stages ------------------------------------------------------------------------------------------------------------
def test_a_stage_folder_is_named_by_its_key_and_keeps_it(tmp_path):
    key = {"target": {"name": "a", "revision": None}, "aux_layers": (1, 2), "lr": 0.1}
    folder = shards.stage_dir(tmp_path, "features", key)
    assert folder.name.startswith("features-")
    assert len(folder.name) == len("features-") + 12
    assert folder == shards.stage_dir(
        tmp_path, "features", dict(reversed(key.items()))
    )  # the order of keys is no matter
    assert json.loads((folder / "key.json").read_text())["aux_layers"] == [1, 2]
    assert shards.stage_dir(tmp_path, "features", key | {"lr": 0.2}) != folder
    assert shards.stage_dir(tmp_path, "rows", key).name == folder.name.replace("features", "rows")


def test_a_changed_key_file_is_refused(tmp_path):
    folder = shards.stage_dir(tmp_path, "rows", {"a": 1})
    (folder / "key.json").write_text('{"a": 2}')
    with pytest.raises(ValueError, match=r"key.json: does not belong to the folder's name"):
        shards.stage_dir(tmp_path, "rows", {"a": 1})


def test_a_finished_stage_has_its_counts(tmp_path):
    folder = shards.stage_dir(tmp_path, "rows", {"a": 1})
    assert shards.stage_counts(folder) is None
    shards.finish_stage(folder, {"rows": 7})
    assert shards.stage_counts(folder) == {"rows": 7}


def test_keys_that_json_cannot_hold_exactly_are_refused():
    with pytest.raises(ValueError, match="JSON"):
        shards.canonical({"x": float("nan")})
    with pytest.raises(TypeError):
        shards.canonical({"x": Path("a")})
