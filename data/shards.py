"""The feature cache on disk: shards of many rows, a manifest that describes and proves them, folders keyed by content.

    cache/features-3f2a91c0b7de/
        key.json                  what determines the content; the folder's name carries its hash
        manifest-rank0.json       while a capture runs, one a rank: what is captured, and the shards that are complete
        manifest.json             written when every shard is there; the reader needs it
        shard-00000.safetensors   features [S, A*D], last_hidden [S, D], input_ids, loss_mask [S], bounds [rows + 1];
                              keys.<layer> and values.<layer> [S, Hkv, E] for drafts that read the target's cache
        done.json                 the stage is finished, with its counts

Every file is written under a temporary name, flushed and renamed, so it is complete or absent; a shard counts only
once a manifest holds its hash. So a killed capture loses the shard it was working on and nothing else.

Shapes: T tokens of a row, S tokens of a shard, D target width, A aux layers.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

FORMAT = 1  # version of the feature cache
MANIFEST, KEY, DONE = "manifest.json", "key.json", "done.json"
NORM = "after final norm"  # last_hidden is what goes into the target's head
CODEC = "raw"  # tensors are stored as they are
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
OPEN_SHARDS = 64  # memory-mapped shards a reader keeps open

Verify = Literal["full", "size"]

# what a mismatch is called, and what in the recipe to change: manifest key -> (words, recipe key)
FIELDS = {
    "format": ("format", None),
    "target.name": ("target", "target.name"),
    "target.revision": ("target revision", "target.revision"),
    "target.config_sha256": ("target config hash", "target"),
    "target.weights_fingerprint": ("target weights fingerprint", "target"),
    "target.dtype": ("target dtype", "target.dtype"),
    "target.hidden_size": ("target width", "target"),
    "tokenizer_sha256": ("tokenizer hash", "target"),
    "aux_layers": ("aux layers", "draft.aux_layers"),
    "last_hidden": ("'has last hidden'", "draft"),
    "target_kv": ("[layer, heads, width] of keys and values", "draft"),
    "norm": ("norm convention", None),
    "dtype": ("dtype", "data.capture.dtype"),
    "codec": ("codec", None),
    "rows_sha256": ("hash of the rows", "data"),
    "shard_tokens": ("shard_tokens", "data.capture.shard_tokens"),
    "batch_tokens": ("batch_tokens", "data.capture.batch_tokens"),
}


class StoredRow(NamedTuple):
    """One row with its target states.

    input_ids: [T] int64; loss_mask: [T] bool; features: [T, A*D] or None without aux layers; last_hidden: [T, D] or
    None. States have the cache's dtype. target_kv: {layer: (keys [T, Hkv, E], values [T, Hkv, E])}, empty unless asked.
    """

    input_ids: Tensor
    loss_mask: Tensor
    features: Tensor | None
    last_hidden: Tensor | None
    row_id: str
    target_kv: Mapping[int, tuple[Tensor, Tensor]] = {}


# -- stages: folders named by what determines their content ---------------------------------------------------------
def canonical(value: Any) -> str:
    """JSON text that is the same for the same value: keys sorted, no spaces, ASCII, tuples as lists, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def stage_dir(cache_root: Path, stage: str, key: Mapping[str, Any]) -> Path:
    """The folder `<cache_root>/<stage>-<12 hex digits of the key's hash>`, made if needed, with `key.json` in it."""
    text = canonical(dict(key))
    folder = Path(cache_root) / f"{stage}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / KEY
    if not path.exists():
        # ranks may come here together: each writes the same bytes under a name of its own
        write_file(path, (json.dumps(json.loads(text), indent=2) + "\n").encode(), f".{os.getpid()}.tmp")
    elif canonical(read_json(path)) != text:
        raise ValueError(f"{path}: does not belong to the folder's name; it was changed by hand. Move {folder} away")
    return folder


def finish_stage(folder: Path, counts: Mapping[str, Any]) -> None:
    """Mark a stage as finished: `done.json` with its counts."""
    write_file(Path(folder) / DONE, (json.dumps(dict(counts), indent=2) + "\n").encode())


def stage_counts(folder: Path) -> dict[str, Any] | None:
    """The counts of a finished stage, None while it is unfinished."""
    path = Path(folder) / DONE
    return read_json(path) if path.exists() else None


# -- files that are complete or absent ------------------------------------------------------------------------------
def write_file(path: Path, data: bytes, suffix: str = ".tmp") -> None:
    """Put `data` at `path`, all of it or nothing. A full disk is an OSError that says what was needed and what is free.

    suffix: of the temporary name; processes that may write the same path need different ones.
    """
    partial = path.with_name(path.name + suffix)
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path, len(data)) from error
        raise
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def disk_full(path: Path, needed: int) -> OSError:
    """The error for a disk without room for `needed` bytes at `path`."""
    free = shutil.disk_usage(path.parent).free
    return OSError(
        errno.ENOSPC,
        f"{path}: no space left: {size_text(needed)} needed, {size_text(free)} free. "
        "Make room and run the same command again: finished shards are kept",
    )


def size_text(num_bytes: int) -> str:
    """1536 -> '1.5 KiB'."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); it was changed by hand. Move the file away") from error


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- manifests ------------------------------------------------------------------------------------------------------
def check_manifest(folder: Path, manifest: Mapping[str, Any], expect: Mapping[str, Any]) -> None:
    """Refuse a cache that was not made as `expect` says; the error names the field and both values.

    expect: the keys of a manifest that matter, nested as there (see capture.describe).
    """
    for name, want in flat(expect):
        have: Any = manifest
        for part in name.split("."):
            have = have.get(part) if isinstance(have, Mapping) else None
        have, want = json.loads(canonical(have)), json.loads(canonical(want))
        if have != want:
            words, key = FIELDS.get(name, (name, None))
            differ = "differ" if words.endswith("layers") else "differs"
            mend = f"capture again or change {key}" if key else "capture again with this version"
            raise ValueError(f"{folder}: {words} {show(have)} {differ} from the recipe's {show(want)}; {mend}")


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested mappings as ('target.name', value) pairs."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def show(value: Any) -> str:
    """A value for an error message; long hashes by their first digits."""
    if isinstance(value, str) and len(value) == 64:
        return value[:12]
    return json.dumps(value) if isinstance(value, str) else str(value)


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def matches(folder: Path, entry: Mapping[str, Any], verify: Verify) -> bool:
    """Whether the shard's file is there and is what its manifest entry says."""
    path = folder / entry["file"]
    if not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    return verify == "size" or sha256(path) == entry["sha256"]


def manifests(folder: Path) -> list[dict[str, Any]]:
    """Every manifest in the folder: those of ranks first, then the final one.

    The order matters: whoever merges writes the final one before it removes those of the ranks.
    """
    found = []
    for path in [*sorted(folder.glob("manifest-rank*.json")), folder / MANIFEST]:
        try:
            found.append(read_json(path))
        except FileNotFoundError:
            continue  # merged by another rank in the meantime, or not there yet
    return found


def merge(folder: Path, own: Sequence[dict[str, Any]] = (), suffix: str = ".tmp") -> bool:
    """Write `manifest.json` if the manifests in the folder (and `own` entries) cover every shard; whether they do.

    A function of the folder's content alone: any rank may call it, in any order, also twice.
    """
    found = manifests(folder)
    if not found:
        return False
    header = {k: v for k, v in found[0].items() if k not in ("shards", "num_rows", "num_tokens", "num_supervised")}
    known: dict[int, list[dict[str, Any]]] = {}
    for entry in [*own, *(e for m in found for e in m["shards"])]:
        options = known.setdefault(entry["index"], [])
        if entry not in options:
            options.append(entry)
    shards = []
    for index in range(header["num_shards"]):
        options = known.get(index, [])
        if len(options) > 1:  # captured twice with different results, on other hardware: the file decides
            options = [e for e in options if matches(folder, e, "full")]
        if not options:
            return False
        shards.append(options[0])
    whole = {
        **header,
        "num_rows": sum(len(e["rows"]) for e in shards),
        "num_tokens": sum(sum(e["lengths"]) for e in shards),
        "num_supervised": sum(e["num_supervised"] for e in shards),
        "shards": shards,
    }
    write_file(folder / MANIFEST, manifest_bytes(whole), suffix)
    for path in folder.glob("manifest-rank*"):
        path.unlink(missing_ok=True)
    return True


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """One line a field and one line a shard: readable, and cheap to rewrite."""
    lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in manifest.items() if k != "shards"]
    shards = ",\n".join(f"    {json.dumps(entry)}" for entry in manifest["shards"])
    lines.append(f'  "shards": [\n{shards}\n  ]')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


# -- writing --------------------------------------------------------------------------------------------------------
class ShardWriter:
    """Adds shards to a feature cache, for one rank. Opening it on a folder made under other settings is an error."""

    def __init__(self, folder: Path, header: Mapping[str, Any], num_shards: int, rank: int = 0):
        self.folder, self.rank = Path(folder), rank
        self.folder.mkdir(parents=True, exist_ok=True)
        self.header = {**header, "num_shards": num_shards}
        self.path = self.folder / f"manifest-rank{rank}.json"
        found = manifests(self.folder)
        for manifest in found:
            check_manifest(self.folder, manifest, self.header)
        self.known = [entry for manifest in found for entry in manifest["shards"]]
        self.own = read_json(self.path)["shards"] if self.path.exists() else []

    def has(self, index: int, verify: Verify = "full") -> bool:
        """Whether shard `index` is complete and undamaged."""
        return any(e["index"] == index and matches(self.folder, e, verify) for e in self.known)

    def write(self, index: int, rows: Sequence[StoredRow]) -> None:
        """Write shard `index` and then the manifest that makes it count."""
        data = shard_bytes(rows)
        masks = [row.loss_mask for row in rows]
        entry = {
            "index": index,
            "file": shard_name(index),
            "sha256": hashlib.sha256(data).hexdigest(),
            "bytes": len(data),
            "num_supervised": int(sum(mask.sum() for mask in masks)),
            "rows": [row.row_id for row in rows],
            "lengths": [len(row.input_ids) for row in rows],
            "labels": [num_labels(mask) for mask in masks],
        }
        write_file(self.folder / shard_name(index), data)
        self.own = sorted([*(e for e in self.own if e["index"] != index), entry], key=lambda e: e["index"])
        write_file(self.path, manifest_bytes({**self.header, "shards": self.own}))

    def finish(self) -> bool:
        """Merge the manifests of all ranks; False while another rank still has shards to write."""
        if not self.own and (self.folder / MANIFEST).exists() and not any(self.folder.glob("manifest-rank*")):
            return True
        if self.own:
            write_file(self.path, manifest_bytes({**self.header, "shards": self.own}))
        return merge(self.folder, self.own, f".{self.rank}.tmp")


def shard_bytes(rows: Sequence[StoredRow]) -> bytes:
    """A shard's content; the same rows give the same bytes."""
    tensors = {
        "input_ids": torch.cat([row.input_ids for row in rows]).to(torch.int32),
        "loss_mask": torch.cat([row.loss_mask for row in rows]),
        "bounds": torch.tensor([0, *accumulate(len(row.input_ids) for row in rows)]),
    }
    for name in ("features", "last_hidden"):
        states = [getattr(row, name) for row in rows]
        if states[0] is not None:
            tensors[name] = torch.cat(states)
    for layer in rows[0].target_kv:
        for part, name in enumerate(kv_names(layer)):
            tensors[name] = torch.cat([row.target_kv[layer][part] for row in rows])
    return save(tensors)


def kv_names(layer: int) -> tuple[str, str]:
    """Names of a target layer's keys and values in a shard."""
    return f"keys.{layer}", f"values.{layer}"


def num_labels(loss_mask: Tensor | Sequence[int]) -> int:
    """How many tokens of a row can be a draft's first proposal: masked-in tokens whose anchor is masked in too.

    The anchor is the token before the label, and needs features of at least one token before itself.
    """
    mask = torch.as_tensor(loss_mask).bool()
    return int((mask[1:-1] & mask[2:]).sum())


# -- reading --------------------------------------------------------------------------------------------------------
class FeatureStore:
    """Read access to a complete feature cache: `len(store)` rows in capture order, `store.row(i)`.

    Shards are memory-mapped; only the bytes of the rows asked for are read.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder, self.manifest = folder, manifest
        shards = manifest["shards"]
        self.row_ids: list[str] = [row for shard in shards for row in shard["rows"]]
        self.lengths: list[int] = [n for shard in shards for n in shard["lengths"]]
        self.labels: list[int] = [n for shard in shards for n in shard["labels"]]
        self._first_row = [0, *accumulate(len(shard["rows"]) for shard in shards)]
        self._handles: dict[int, tuple[Any, list[int]]] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: Path, expect: Mapping[str, Any] | None = None, verify: Verify = "full") -> FeatureStore:
        """Open a finished cache.

        expect: what the manifest must say (capture.describe); a difference is an error with both values.
        verify: "full" hashes every shard once, now; "size" only compares sizes (large caches on trusted disks).
        """
        folder = Path(folder)
        path = folder / MANIFEST
        if not path.exists():
            raise ValueError(unfinished(folder))
        manifest = read_json(path)
        check_manifest(folder, manifest, {"format": FORMAT, "norm": NORM, "codec": CODEC, **(expect or {})})
        for entry in manifest["shards"]:
            if not matches(folder, entry, verify):
                raise ValueError(
                    f"{folder / entry['file']}: missing or damaged: it does not match its "
                    f"{'hash' if verify == 'full' else 'size'} in {MANIFEST} ({len(entry['rows'])} rows, "
                    f"{entry['rows'][0]!r} to {entry['rows'][-1]!r}). Run capture again: it makes only such shards anew"
                )
        return cls(folder, manifest)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return tuple(self.manifest["aux_layers"])

    @property
    def hidden_size(self) -> int:
        return self.manifest["target"]["hidden_size"]

    @property
    def has_last_hidden(self) -> bool:
        return self.manifest["last_hidden"]

    @property
    def kv_shapes(self) -> dict[int, tuple[int, int]]:
        """{target layer: (Hkv, E)} of the keys and values in the cache."""
        return {layer: (heads, width) for layer, heads, width in self.manifest.get("target_kv", [])}

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.manifest["dtype"]]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def read(self, indices: Sequence[int]) -> list[StoredRow]:
        return [self.row(index) for index in indices]

    def row(self, index: int) -> StoredRow:
        """Row `index`; states that are not finite are refused by row, position and layer."""
        shard = bisect_right(self._first_row, index) - 1
        handle, bounds = self._open(shard)
        place = index - self._first_row[shard]
        start, end = bounds[place], bounds[place + 1]
        row = StoredRow(
            handle.get_slice("input_ids")[start:end].long(),
            handle.get_slice("loss_mask")[start:end].bool(),
            handle.get_slice("features")[start:end] if self.aux_layers else None,
            handle.get_slice("last_hidden")[start:end] if self.has_last_hidden else None,
            self.row_ids[index],
            {k: tuple(handle.get_slice(name)[start:end] for name in kv_names(k)) for k in self.kv_shapes},
        )
        check_states(row, self.aux_layers, self.hidden_size, str(self.folder / shard_name(shard)))
        return row

    def _open(self, shard: int) -> tuple[Any, list[int]]:
        with self._lock:
            if shard not in self._handles:
                if len(self._handles) >= OPEN_SHARDS:
                    self._handles.pop(next(iter(self._handles)))
                self._handles[shard] = self._map(shard)
            return self._handles[shard]

    def _map(self, shard: int) -> tuple[Any, list[int]]:
        """The memory-mapped shard and its bounds, once its tensors have the shapes that the manifest says."""
        entry = self.manifest["shards"][shard]
        path = self.folder / entry["file"]
        try:
            handle = safe_open(path, framework="pt")
            shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
            bounds = handle.get_tensor("bounds").tolist()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: cannot be read ({error}). Run capture again") from error
        want = [0, *accumulate(entry["lengths"])]
        for row, (have, said) in zip(entry["rows"], zip(bounds[1:], want[1:], strict=False), strict=False):
            if have != said:
                raise ValueError(f"{path}: row {row!r} ends at {have}, {MANIFEST} says {said}. Run capture again")
        total, width = want[-1], self.hidden_size
        expected: dict[str, tuple[int, ...]] = {"input_ids": (total,), "loss_mask": (total,), "bounds": (len(want),)}
        if self.aux_layers:
            expected["features"] = (total, len(self.aux_layers) * width)
        if self.has_last_hidden:
            expected["last_hidden"] = (total, width)
        for layer, shape in self.kv_shapes.items():
            expected |= dict.fromkeys(kv_names(layer), (total, *shape))
        if shapes != expected:
            raise ValueError(
                f"{path}: tensors {shapes}, expected {expected} for rows {entry['rows'][0]!r} to "
                f"{entry['rows'][-1]!r}. Run capture again"
            )
        return handle, bounds


def unfinished(folder: Path) -> str:
    """Why a folder without manifest.json cannot be read."""
    found = manifests(folder)
    if not found:
        return f"{folder}: no {MANIFEST} here; expected a feature cache. Run capture first"
    captured = len({entry["index"] for manifest in found for entry in manifest["shards"]})
    return (
        f"{folder}: capture is unfinished, {captured} of {found[0]['num_shards']} shards are there; "
        "run the same capture command again, it goes on from here"
    )


def check_states(row: StoredRow, aux_layers: Sequence[int], hidden_size: int, where: str) -> None:
    """Refuse a row whose states are not one per token, or are NaN or Inf; the error names row, position and layer."""
    num_tokens = len(row.input_ids)
    for name, states in (("features", row.features), ("last hidden", row.last_hidden)):
        if states is None:
            continue
        if len(states) != num_tokens:
            raise ValueError(f"{where}: row {row.row_id!r} has {num_tokens} tokens but {len(states)} {name}")
        if bool(states.sum(dtype=torch.float32).isfinite()):
            continue
        bad = (~states.isfinite()).nonzero()
        if len(bad):  # a sum of finite values may overflow
            position, column = bad[0].tolist()
            layer = f"aux layer {aux_layers[column // hidden_size]}" if name == "features" else name
            raise ValueError(
                f"{where}: row {row.row_id!r}: the target's state at position {position}, {layer} is "
                f"{states[position, column].item()}, not a number to train on; leave the row out or run the target "
                "in another dtype (target.dtype)"
            )
    for kv_layer, pair in row.target_kv.items():
        for part, states in zip(kv_names(kv_layer), pair, strict=True):
            if len(states) != num_tokens or not bool(states.isfinite().all()):
                raise ValueError(
                    f"{where}: row {row.row_id!r}: {part} must be {num_tokens} rows of finite numbers, got "
                    f"{len(states)}; leave the row out or run the target in another dtype (target.dtype)"
                )
