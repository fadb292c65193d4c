"""MTP tensors inside a target's own checkpoint: find them, read them, and put tuned ones back where they were.

    reading   index -> the shards that hold MTP tensors, and only those (a Hub model is not fetched whole)
    writing   shards with MTP tensors are written again under their own names, every other file is linked or copied,
              and every tensor that is not an MTP tensor is hashed before and after

transformers drops these tensors when it loads a target, so the target itself is never touched by any of this.
Block-quantised tensors (fp8 beside `<name>_scale_inv`) are read as fp32 and written back as bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.models import tiny
from draftsmith.models.gguf import cache_root

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
ADDED = "model-mtp.safetensors"  # the shard of a module that the target did not have
REPORT = "mtp-report.json"
SCALE = "_scale_inv"  # suffix of the scales of block-quantised fp8 weights
QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2)
UNQUANTISED = {"compressed-tensors": "ignore"}  # where a quantisation method lists what it leaves alone


@dataclass(frozen=True)
class Checkpoint:
    """A target's safetensors files. shards: {tensor name: file name}; fetch gives the local path of a file."""

    name: str
    shards: Mapping[str, str]
    fetch: Callable[[str], Path]

    @classmethod
    def open(cls, name: str, revision: str | None = None) -> Checkpoint:
        """name: local folder, Hub id, or tiny:KIND."""
        if name.startswith(tiny.PREFIX):
            return cls.open(str(tiny.make(name.removeprefix(tiny.PREFIX), cache_root() / "targets")))
        folder = Path(name).expanduser()
        if folder.is_dir():
            return cls(name, _shards(name, lambda file: folder / file), lambda file: folder / file)
        if name.startswith((".", "/", "~")) or name.count("/") != 1:
            raise ValueError(f"{name}: no such folder; MTP tensors are read from a folder or a Hub id")

        def fetch(file: str) -> Path:
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(name, file, revision=revision))

        return cls(name, _shards(name, fetch), fetch)

    def names(self, prefixes: Iterable[str]) -> list[str]:
        """Names of the tensors under the prefixes, in order."""
        wanted = tuple(prefixes)
        return sorted(name for name in self.shards if name.startswith(wanted))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors; block-quantised ones in fp32, without their scales."""
        found: dict[str, Tensor] = {}
        for file, members in _by_file(self.shards, names).items():
            with safe_open(self.fetch(file), "pt") as shard:
                found |= {name: shard.get_tensor(name) for name in members}
        scales = {name for name in found if name.endswith(SCALE)}
        return {name: _unquantised(name, found) for name in found.keys() - scales}

    def config(self) -> dict[str, Any]:
        return json.loads(self.fetch(CONFIG).read_text(encoding="utf-8"))


def _shards(name: str, fetch: Callable[[str], Path]) -> dict[str, str]:
    """{tensor name: file name} from the index, or from the only file."""
    missing: list[Exception] = []
    for file in (INDEX, SINGLE):
        try:
            path = fetch(file)
        except OSError as error:
            missing.append(error)
            continue
        if not path.is_file():
            continue
        if file == INDEX:
            return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        with safe_open(path, "pt") as shard:
            return dict.fromkeys(shard.keys(), SINGLE)
    why = f" ({str(missing[0]).splitlines()[0]})" if missing else ""
    raise ValueError(f"{name}: neither {INDEX} nor {SINGLE} is there{why}; MTP tensors are read from safetensors")


def _by_file(shards: Mapping[str, str], names: Iterable[str]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for name in names:
        files.setdefault(shards[name], []).append(name)
    return files


def _unquantised(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """A tensor as stored, or weight * scale of its block when it is block-quantised."""
    tensor = tensors[name]
    if tensor.dtype not in QUANTISED:
        return tensor
    if name + SCALE not in tensors:
        raise ValueError(f"{name}: {tensor.dtype} without {name}{SCALE}; only block-quantised fp8 is understood")
    scale = tensors[name + SCALE].float()
    block = [-(-size // num) for size, num in zip(tensor.shape, scale.shape, strict=True)]
    wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return tensor.float() * wide[: tensor.shape[0], : tensor.shape[1]]


# -- writing ---------------------------------------------------------------------------------------------------------
def stitch(source: Checkpoint, files: Iterable[str], tensors: Mapping[str, Tensor], changes: dict, out: Path) -> dict:
    """Write a copy of the checkpoint into the empty folder `out` with `tensors` in place of those of the same names.

    files: every file of the checkpoint. changes: keys of config.json (of its text part, where it has one) to set.
    A tensor that the checkpoint does not have goes into one shard of its own. Returns the report, which is also
    written: {"rewritten": [files], "linked": [files], "changed": {name: [hash before, hash after]}, "same": number}.
    """
    touched = _by_file(source.shards, tensors.keys() & source.shards.keys())
    added = {name: tensor for name, tensor in tensors.items() if name not in source.shards}
    report: dict[str, Any] = {"rewritten": sorted(touched), "linked": [], "changed": {}, "same": 0, "removed": []}
    shards = dict(source.shards)
    for file in sorted(files):
        if file in touched or file in (CONFIG, INDEX):
            continue
        link_or_copy(source.fetch(file), out / file)
        report["linked"].append(file)
    for file in touched:
        _rewrite(source.fetch(file), out / file, tensors, report)
    for name in report["removed"]:
        del shards[name]
    if added:
        save_file({name: _stored(t, None) for name, t in added.items()}, out / ADDED, metadata={"format": "pt"})
        shards |= dict.fromkeys(added, ADDED)
        report["changed"] |= {name: [None, sha256(_stored(t, None))] for name, t in added.items()}
    if added or INDEX in set(files):
        total = sum(path.stat().st_size for path in out.glob("*.safetensors"))
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shards.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config = _changed_config(source.config(), changes, report)
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _check(source, shards, tensors, out)
    return report


def _rewrite(old: Path, new: Path, tensors: Mapping[str, Tensor], report: dict[str, Any]) -> None:
    """One shard again: the given tensors in place of the old ones, all others as they were."""
    kept: dict[str, Tensor] = {}
    with safe_open(old, "pt") as shard:
        metadata = shard.metadata()
        for name in shard.keys():  # noqa: SIM118
            tensor = shard.get_tensor(name)
            if name in tensors:
                kept[name] = _stored(tensors[name], tensor.dtype)
                report["changed"][name] = [sha256(tensor), sha256(kept[name])]
            elif name.removesuffix(SCALE) in tensors and name.endswith(SCALE):
                report["removed"].append(name)  # the tensor is not quantised any more
            else:
                kept[name] = tensor
    save_file(kept, new, metadata=metadata or {"format": "pt"})


def _stored(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """As it goes into a shard: in the dtype that was there, bfloat16 where that was none or a quantised one."""
    dtype = torch.bfloat16 if dtype is None or dtype.itemsize < 2 else dtype
    stored = tensor.detach().cpu().to(dtype).contiguous()
    if not torch.isfinite(stored).all():
        raise ValueError(f"a tuned MTP tensor holds values that are not finite in {dtype}; it is not written")
    return stored


def _check(source: Checkpoint, shards: Mapping[str, str], tensors: Mapping[str, Tensor], out: Path) -> None:
    """Every tensor that was not replaced must have the hash it had, and every file of the index must hold its names."""
    same = 0
    for file, names in _by_file(shards, shards).items():
        if (out / file).is_symlink() or os.path.samefile(out / file, source.fetch(file)) if file != ADDED else False:
            same += len(names)
            continue
        old = source.fetch(file) if file != ADDED else out / file
        with safe_open(out / file, "pt") as new_shard, safe_open(old, "pt") as old_shard:
            for name in names:
                if name in tensors:
                    continue
                if sha256(new_shard.get_tensor(name)) != sha256(old_shard.get_tensor(name)):
                    raise RuntimeError(f"{out / file}: tensor {name} is not what {source.name} holds")
                same += 1
    report = json.loads((out / REPORT).read_text(encoding="utf-8")) | {"same": same}
    (out / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _changed_config(config: dict[str, Any], changes: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    outer = {key: value for key, value in changes.items() if key == "architectures"}
    inner = {key: value for key, value in changes.items() if key not in outer}
    config = {**config, **outer}
    if isinstance(text, dict):
        config["text_config"] = {**text, **inner}
    else:
        config |= inner
    quantisation = config.get("quantization_config")
    if report["removed"] and isinstance(quantisation, dict):
        key = UNQUANTISED.get(str(quantisation.get("quant_method")), "modules_to_not_convert")
        modules = {name.removesuffix(SCALE).removesuffix(".weight") for name in report["removed"]}
        alone = sorted({*(quantisation.get(key) or []), *modules})
        config["quantization_config"] = {**quantisation, key: alone}
    return config


def link_or_copy(old: Path, new: Path) -> None:
    """A hard link where the file system allows it, else a copy."""
    try:
        os.link(os.path.realpath(old), new)
    except OSError:
        shutil.copy2(old, new)


def sha256(tensor: Tensor) -> str:
    """Hash of a tensor's dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
