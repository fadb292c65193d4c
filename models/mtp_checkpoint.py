"""MTP tensors inside a target's own checkpoint: find them, read them, and put tuned ones back where they were.

    reading   index -> the shards that hold MTP tensors, and only those (a Hub model is not fetched whole)
    writing   shards with MTP tensors are written again under their own names, other shards are hard links or copies,
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
CODE = (".bin", ".pt", ".pth", ".pkl", ".py")  # files that may hold code are not handed on
SCALE = "_scale_inv"  # suffix of the scales of block-quantised fp8 weights
QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2)
UNQUANTISED = {"compressed-tensors": "ignore"}  # where a quantisation method lists what it leaves alone


@dataclass(frozen=True)
class Checkpoint:
    """A target's safetensors files. shards: {tensor name: file name}; fetch gives the local path of a file."""

    name: str
    shards: Mapping[str, str]
    fetch: Callable[[str], Path]
    revision: str | None = None

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

        return cls(name, _shards(name, fetch), fetch, revision)

    def whole(self) -> Path:
        """A folder with every file of the checkpoint."""
        folder = self.fetch(CONFIG).parent
        if Path(self.name).expanduser().is_dir():
            return folder
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(self.name, revision=self.revision))

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
def write(
    source: Checkpoint, tensors: Mapping[str, Tensor], config: Mapping[str, Any], about: Mapping[str, Any], out: Path
) -> None:
    """Write a copy of the checkpoint into `out`, with `tensors` in place of those of the same names.

    A tensor that the checkpoint does not have goes into a shard of its own. config: keys of config.json to set, in its
    text part where it has one. about: kept in the report, {"changed": {name: [hash before, hash after]}, "rewritten":
    [shards], "linked": [shards], "removed": [scales of weights that are no longer quantised], "same": how many other
    tensors were hashed and are equal}. The folder is complete or absent; only an earlier one of ours is replaced.
    """
    if out.exists() and not (out / REPORT).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and has no {REPORT}; choose an empty place or an earlier export of an MTP head")
    folder = source.whole()
    if out.resolve() == folder.resolve():
        raise ValueError(f"{out} is the target's own folder; choose another place")
    temporary, old = out.with_name(out.name + ".tmp"), out.with_name(out.name + ".old")
    for left in (temporary, old):  # of a killed export
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir(parents=True)
    report = _stitch(source, folder, tensors, config, temporary)
    report["same"] = _compare(source, tensors, temporary)
    (temporary / REPORT).write_text(json.dumps({**about, **report}, indent=1) + "\n", encoding="utf-8")
    for path in temporary.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    if out.exists():
        out.rename(old)
    temporary.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _stitch(
    source: Checkpoint, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], out: Path
) -> dict[str, Any]:
    """Every file of the new checkpoint but the report, which is returned."""
    touched = _by_file(source.shards, [name for name in tensors if name in source.shards])
    report: dict[str, Any] = {"changed": {}, "rewritten": sorted(touched), "linked": [], "removed": []}
    for path in sorted(folder.iterdir()):
        if path.name in (CONFIG, INDEX, REPORT, *touched) or path.suffix in CODE or not path.is_file():
            continue
        if path.suffix == ".safetensors":
            _link(path, out / path.name)
            report["linked"].append(path.name)
        else:
            shutil.copy2(path, out / path.name)  # small, and may be edited in the export
    for file in touched:
        _rewrite(folder / file, out / file, tensors, report)
    shards = {name: file for name, file in source.shards.items() if name not in report["removed"]}
    added = {name: stored(tensor, None) for name, tensor in tensors.items() if name not in source.shards}
    if added:
        save_file(added, out / ADDED, metadata={"format": "pt"})
        shards |= dict.fromkeys(added, ADDED)
        report["changed"] |= {name: [None, sha256(tensor)] for name, tensor in added.items()}
    if added or (folder / INDEX).is_file():
        total = sum(path.stat().st_size for path in out.glob("*.safetensors"))
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shards.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    unquantised = {name.removesuffix(SCALE).removesuffix(".weight") for name in report["removed"]}
    changed = _changed_config(values, config, unquantised)
    (out / CONFIG).write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
    return report


def _rewrite(old: Path, new: Path, tensors: Mapping[str, Tensor], report: dict[str, Any]) -> None:
    """One shard again: the given tensors in place of the old ones, all others as they were."""
    kept: dict[str, Tensor] = {}
    with safe_open(old, "pt") as shard:
        metadata = shard.metadata() or {"format": "pt"}
        for name in shard.keys():  # noqa: SIM118
            tensor = shard.get_tensor(name)
            if name in tensors:
                kept[name] = stored(tensors[name], tensor.dtype)
                report["changed"][name] = [sha256(tensor), sha256(kept[name])]
            elif name.endswith(SCALE) and name.removesuffix(SCALE) in tensors:
                report["removed"].append(name)
            else:
                kept[name] = tensor
    save_file(kept, new, metadata=metadata)


def stored(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """As it goes into a shard: in the dtype that was there; bfloat16 where there was none or a quantised one."""
    dtype = torch.bfloat16 if dtype is None or dtype.itemsize < 2 else dtype
    found = tensor.detach().cpu().to(dtype).contiguous()
    if not torch.isfinite(found).all():
        raise ValueError(f"a tuned MTP tensor holds values that are not finite in {dtype}; it is not written")
    return found


def _compare(source: Checkpoint, tensors: Mapping[str, Tensor], out: Path) -> int:
    """Number of tensors that are not the module's: each must be where the index says, with the hash it had."""
    same = 0
    written = Checkpoint.open(str(out))
    for file, names in _by_file(written.shards, written.shards).items():
        with safe_open(out / file, "pt") as new:
            missing = sorted(set(names) - set(new.keys()))
            if missing:
                raise RuntimeError(f"{out / file}: the index names {missing[:3]}, which it does not hold")
            others = [name for name in names if name not in tensors]
            if not others:
                continue
            with safe_open(source.fetch(file), "pt") as old:
                for name in others:
                    if sha256(new.get_tensor(name)) != sha256(old.get_tensor(name)):
                        raise RuntimeError(f"{out / file}: tensor {name} is not what {source.name} holds")
                    same += 1
    return same


def _changed_config(values: dict[str, Any], changes: Mapping[str, Any], unquantised: set[str]) -> dict[str, Any]:
    outer = {key: value for key, value in changes.items() if key == "architectures"}
    inner = {key: value for key, value in changes.items() if key not in outer}
    values = values | outer
    if isinstance(values.get("text_config"), dict):
        values["text_config"] = values["text_config"] | inner
    else:
        values |= inner
    quantisation = values.get("quantization_config")
    if unquantised and isinstance(quantisation, dict):
        key = UNQUANTISED.get(str(quantisation.get("quant_method")), "modules_to_not_convert")
        alone = sorted({*(quantisation.get(key) or []), *unquantised})
        values["quantization_config"] = quantisation | {key: alone}
    return values


def _link(old: Path, new: Path) -> None:
    """A hard link where the file system allows it, else a copy."""
    try:
        os.link(os.path.realpath(old), new)
    except OSError:
        shutil.copy2(old, new)


def sha256(tensor: Tensor) -> str:
    """Hash of a tensor's dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
