"""Exports: what vLLM loads, written and read back. The only file that knows a server's dialect.

A family hands over `Draft.neutral()`: sizes and switches without any dialect, tensors under this project's own names.
One Dialect a family turns that into a served checkpoint and back; two layouts of config.json exist:

    plain         {"architectures", "model_type", <keys of the layers>, <keys of the method>, "draftsmith"}
    speculators   {"speculators_model_type", <keys of the method>, "speculators_config", "draftsmith",
                   "transformer_layer_config": {"model_type", <keys of the layers>}}          (no top-level model_type)

The neutral form of EAGLE-3:
    config   family; aux_layers (ascending); layer = {model_type: llama | qwen3 (with q_norm and k_norm), hidden_size,
             intermediate_size, num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps, hidden_act,
             rope_parameters (rope_theta included), attention_bias, max_position_embeddings, vocab_size}; num_layers;
             norm_before_residual, norm_before_fc, fc_norm, norm_output; ttt_steps. Any further key is kept as it is.
    tensors  fc.weight, layers.<i>.<as in transformers>.weight, norm.weight, input_norm.weight (norm_before_fc),
             fc_norm.<i>.weight (fc_norm), lm_head.weight (absent: the target's head serves),
             draft_vocab [Vd] int64, ascending target ids (absent: the full vocabulary)

The neutral form of block drafts (DFlash, DSpark):
    config   family; aux_layers; layer (as above); num_layers; layout (infill | shifted); block_len; mask_token_id;
             sliding_window; layer_types and causal, one entry a layer; DSpark also markov_rank and confidence
    tensors  fc.weight, hidden_norm.weight, layers.<i>.*, norm.weight, lm_head.weight, draft_vocab as above; DSpark also
             markov_head.markov_w1.weight, markov_head.markov_w2.weight, confidence_head.proj.{weight,bias}

What servers make of it (vLLM 0.32 and 0.33, read and run): an aux layer k is the residual stream after k decoder
layers, in this project, in transformers' hidden_states[k] and in vLLM alike, so EAGLE-3 ids are written as they are.
vLLM sorts the ids, says nothing about tensors that are missing, takes `d2t` as offsets (target id = draft id + d2t),
takes the target's embedding when the file has none, and defaults norm_before_residual differently in the two layouts.
Block drafts: the plain layout counts the layer whose output is read (aux id - 1), the speculators layout aux ids. vLLM
runs K + 1 slots (infill) or K slots (shifted) whatever block_size says, so K must be the block's own number of proposals.
A dflash draft is infill there; a shifted one is written as a dspark draft whose Markov head of rank 1 is zero, which
computes the same. sample_from_anchor, the layout of a dspark draft, is true in one config layout and false in the other
when it is left out: it is always written.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.models import mtp_checkpoint
from draftsmith.models.draft import (
    DRAFT_JSON,
    Batch,
    Captured,
    Draft,
    TargetSpec,
    check_same_target,
    family,
    load_draft,
)
from draftsmith.models.sampling import Sampler

if TYPE_CHECKING:
    from draftsmith.models.target import Target

Format = Literal["plain", "speculators"]
Config = dict[str, Any]
Tensors = dict[str, Tensor]
Shape = tuple[int, ...]

CONFIG, WEIGHTS, MARK = "config.json", "model.safetensors", "draftsmith"
WRITTEN_BY_US = frozenset(
    {CONFIG, WEIGHTS, "README.md", "provenance.json", "certificate.json", "calibration.json", "recipe.yaml"}
)
NO_PUBLIC_NAME = "unpublished/target"
IN_TARGET = "mtp"  # the family whose export is the target's own checkpoint
MISREAD = ("eagle-", "eagle3", "dflash", "dspark")  # in a target's path, they make vLLM take mtp for another method
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Architectures whose vLLM class hands out aux states (its SupportsEagle3 interface in 0.32 and 0.33).
_AUX_TARGETS = """
AfmoeForCausalLM ApertusForCausalLM Cohere2MoeForCausalLM DeepseekForCausalLM DeepseekV2ForCausalLM
DeepseekV3ForCausalLM DeepseekV32ForCausalLM DeepseekV4ForCausalLM Ernie4_5ForCausalLM Gemma4ForCausalLM
Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration GlmMoeDsaForCausalLM GptOssForCausalLM
GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSharedForCausalLM
IQuestCoderForCausalLM InternLM3ForCausalLM K2HorizonForCausalLM KimiK25ForConditionalGeneration
KimiLinearForCausalLM LagunaForCausalLM LLaMAForCausalLM Llama4ForCausalLM Llama4ForConditionalGeneration
LlamaForCausalLM LlavaForConditionalGeneration MiMoForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM
MiniCPM3ForCausalLM MiniCPMForCausalLM MiniMaxM2ForCausalLM Ministral3ForCausalLM Mistral3ForConditionalGeneration
MistralForCausalLM MistralLarge3ForCausalLM NemotronHForCausalLM NemotronHPuzzleForCausalLM Phi3ForCausalLM
PixtralForConditionalGeneration Plamo3ForCausalLM Qwen2ForCausalLM Qwen2_5_VLForConditionalGeneration
Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3OmniMoeForConditionalGeneration
Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Qwen3_5ForCausalLM
Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration SarvamMLAForCausalLM
Step1ForCausalLM TeleChat2ForCausalLM TeleChat3ForCausalLM
"""
AUX_TARGETS = frozenset(_AUX_TARGETS.split())


class Checkpoint(NamedTuple):
    """One draft as a server sees it, before it is nested into a layout.

    architecture: the plain layout's class; layer: what a transformers config of the layers holds, model_type included;
    method: keys of the drafting method, copied to the layers' level by vLLM's reader of either layout;
    layer_only: keys of the method which that reader copies in the plain layout alone, so that the speculators layout
    keeps them among the layers' keys.
    """

    architecture: str
    layer: Config
    method: Config
    layer_only: Config
    tensors: Tensors


class Dialect:
    """What one drafting method is called and how it is spelt in a served checkpoint."""

    method: str  # vLLM's name, which is also speculators' one
    keys: frozenset[str]  # neutral keys that the served config expresses; the others are kept under our own key

    def num_tokens(self, config: Config) -> int:
        """Proposals a round when nobody says otherwise: what the draft was trained for."""
        raise NotImplementedError

    def check(self, config: Config, tensors: Tensors, target: TargetSpec, layout: Format) -> list[str]:
        """Why vLLM cannot serve this draft; empty when it can."""
        raise NotImplementedError

    def notes(self, config: Config, num: int) -> list[str]:
        """What whoever serves `num` proposals a round should know."""
        return []

    def encode(self, config: Config, tensors: Tensors, target: TargetSpec, layout: Format) -> Checkpoint:
        raise NotImplementedError

    def decode(self, raw: Config, layout: Format, tensors: Tensors, target: TargetSpec) -> tuple[Config, Tensors]:
        """The neutral form of a checkpoint. raw: its config with the layers' keys at the top level."""
        raise NotImplementedError


# -- writing ---------------------------------------------------------------------------------------------------------
def write(
    draft: Draft,
    target: TargetSpec,
    out: Path,
    format: Format = "plain",
    dtype: str = "bfloat16",
    num_speculative_tokens: int | None = None,
    published_name: str | None = None,
    force: bool = False,
) -> None:
    """Write config.json and model.safetensors into `out`, read them back and compare them with the draft.

    dtype: of the floating-point tensors. num_speculative_tokens: the default number of proposals a round (else what
    the draft was trained for). published_name: the target's public Hub id; without it, and when target.name is not
    one, a placeholder is written, never a path. force: write even what vLLM is known not to serve.
    The folder is complete or absent; an earlier export at the same place is replaced, any other folder is refused.
    """
    out = Path(out)
    if format not in ("plain", "speculators"):
        raise ValueError(f"export format must be plain or speculators, got {format!r}")
    if dtype not in DTYPES:
        raise ValueError(f"export dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if draft.config.family == IN_TARGET:
        return write_into_target(draft, target, out, num_speculative_tokens)
    config, tensors = draft.neutral()
    dialect = dialect_for(config)
    config = _within_positions(config, target)
    num = dialect.num_tokens(config) if num_speculative_tokens is None else num_speculative_tokens
    _refuse_unserved(dialect.check(config, tensors, target, format), draft, num, force)
    for note in dialect.notes(config, num):
        warnings.warn(f"export: {note}", stacklevel=2)
    tensors = _cast(tensors, DTYPES[dtype])
    public = replace(target, **_public_name(target, published_name))
    checkpoint = dialect.encode(config, tensors, target, format)
    raw = _nest(checkpoint, dialect, config, public, num, dtype, format)

    refuse_foreign(out)
    temporary = out.with_name(out.name + ".tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    for path in temporary.iterdir():  # left by a killed export
        path.unlink()
    (temporary / CONFIG).write_text(json.dumps(raw, indent=2) + "\n")
    save_file(
        {k: t.contiguous() for k, t in checkpoint.tensors.items()}, temporary / WEIGHTS, metadata={"format": "pt"}
    )
    for path in temporary.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    _check_read_back(temporary, config, tensors, target)
    if (out / "README.md").is_file():  # a card that somebody may have edited; eval/release.py knows
        shutil.copyfile(out / "README.md", temporary / "README.md")
    replace_folder(temporary, out)


def write_into_target(draft: Draft, target: TargetSpec, out: Path, num_speculative_tokens: int | None) -> None:
    """Put a tuned MTP module back into a copy of the target's checkpoint, and read it back from there.

    There is no draft folder to serve: `out` is a whole target. Tensors keep the dtype that they had.
    """
    config, tensors = draft.neutral()
    training, num = config["training"], num_speculative_tokens or config["ttt_steps"]
    source = mtp_checkpoint.Checkpoint.open(training["checkpoint"] or target.name, target.revision)
    about = {"family": config["family"], "num_speculative_tokens": num, "training": training | {"checkpoint": None}}
    mtp_checkpoint.write(source, tensors, config["target_keys"], about, out)
    found = mtp_checkpoint.Checkpoint.open(str(out)).read(tensors)
    name = first_difference({n: mtp_checkpoint.stored(t, found[n].dtype) for n, t in tensors.items()}, found)
    if name is not None:
        raise RuntimeError(f"export: tensor {name} reads back differently from {out}")


def _nest(
    checkpoint: Checkpoint, dialect: Dialect, config: Config, target: TargetSpec, num: int, dtype: str, layout: Format
) -> Config:
    """config.json of a checkpoint in one of the two layouts."""
    precision = {"dtype": dtype, "torch_dtype": dtype}  # the new and the old name
    about = {
        "family": config["family"],
        "num_speculative_tokens": num,
        "target": asdict(target),
        "kept": {key: value for key, value in config.items() if key not in dialect.keys},
    }
    if layout == "plain":
        head = {"architectures": [checkpoint.architecture]}
        return head | checkpoint.layer | checkpoint.method | checkpoint.layer_only | precision | {MARK: about}
    proposal = {"proposal_type": "greedy", "speculative_tokens": num, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "speculators_model_type": dialect.method,
        "speculators_version": "0.5.0",
        "architectures": [f"{type(dialect).__name__.removesuffix('Dialect')}DraftModel"],
        **checkpoint.method,
        "transformer_layer_config": checkpoint.layer | checkpoint.layer_only | precision,
        "speculators_config": {
            "algorithm": dialect.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": [target.architecture]},
        },
        **precision,
        MARK: about,
    }


def _within_positions(config: Config, target: TargetSpec) -> Config:
    """The same config with a position limit of at least the target's: a shorter one sizes the server's RoPE table."""
    limit = max(config["layer"]["max_position_embeddings"], target.max_positions)
    return {**config, "layer": {**config["layer"], "max_position_embeddings": limit}}


def _refuse_unserved(reasons: list[str], draft: Draft, num: int, force: bool) -> None:
    if num < 1 or (draft.max_proposal is not None and num > draft.max_proposal):
        most = "" if draft.max_proposal is None else f" and at most {draft.max_proposal}, what one pass can propose"
        raise ValueError(f"export: num_speculative_tokens must be at least 1{most}, got {num}")
    if reasons and not force:
        raise ValueError(f"export: vLLM cannot serve this draft: {'; '.join(reasons)}. Use force to write it anyway")
    for reason in reasons:
        warnings.warn(f"export: written although vLLM cannot serve it: {reason}", stacklevel=3)


def refuse_without_aux(target: TargetSpec) -> list[str]:
    """The reason why vLLM takes no aux states from this target, in a list; empty when it does."""
    if target.architecture in AUX_TARGETS:
        return []
    return [
        f"its class for the target {target.architecture} hands out no aux states (vLLM 0.33); "
        "targets it can draft for are Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, GPT-OSS, Gemma 4, ..."
    ]


def _public_name(target: TargetSpec, published_name: str | None) -> Config:
    """Name and revision of the target that may be published: a Hub id, or a placeholder with a warning."""
    if published_name is not None:
        if not is_hub_id(published_name):
            raise ValueError(f"published_name must be a Hub id such as ORG/NAME, got {published_name!r}")
        return {"name": published_name, "revision": target.revision if published_name == target.name else None}
    if is_hub_id(target.name):
        return {}
    warnings.warn(
        f"the target {target.name!r} is not a public Hub id; the export says {NO_PUBLIC_NAME!r} instead of the path. "
        "Set target.published_name so that others can serve the draft",
        stacklevel=3,
    )
    return {"name": NO_PUBLIC_NAME, "revision": None}


def is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) is not None and not Path(name).exists()


def _cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Floating-point tensors in `dtype`, on the CPU; a value that does not fit it or is not finite is refused."""
    cast = {}
    for name, tensor in sorted(tensors.items()):
        tensor = tensor.detach().cpu()
        cast[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor.to(torch.int64)
        if not torch.isfinite(cast[name]).all():
            raise ValueError(f"export: {name} holds values that are not finite in {dtype}; train on or use float32")
    return cast


def _check_read_back(folder: Path, config: Config, tensors: Tensors, target: TargetSpec) -> None:
    """Read the written files as any reader would and compare every key and tensor with what went in."""
    found_config, found = read(folder, target)
    for key in sorted(config.keys() | found_config.keys()):
        if _plain(config.get(key)) != found_config.get(key):
            raise RuntimeError(f"export: {key} was {config.get(key)!r}, {folder} reads as {found_config.get(key)!r}")
    name = first_difference(tensors, found)
    if name is not None:
        raise RuntimeError(f"export: tensor {name} reads back differently from {folder}")


def _plain(value: Any) -> Any:
    """The value as JSON gives it back: lists for tuples, dicts for mappings."""
    return json.loads(json.dumps(value))


def first_difference(want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor that is missing on one side or differs in shape, dtype or a single value."""
    for name in sorted(want.keys() | got.keys()):
        if name not in want or name not in got:
            return name
        if want[name].dtype != got[name].dtype or not torch.equal(want[name], got[name]):
            return name
    return None


def refuse_foreign(out: Path) -> None:
    """Only an earlier export may be replaced; nothing that this project did not write is deleted."""
    if not out.exists() or (out / mtp_checkpoint.REPORT).is_file():  # a target of ours with a tuned MTP module
        return
    strangers = sorted(p.name for p in out.iterdir() if p.name not in WRITTEN_BY_US) if out.is_dir() else [out.name]
    ours = (out / CONFIG).is_file() and MARK in json.loads((out / CONFIG).read_text())
    if strangers or (any(out.iterdir()) and not ours):
        what = ", ".join(strangers) or f"a {CONFIG} of another program"
        raise ValueError(f"{out} exists and holds {what}; choose an empty place or an earlier export")


def replace_folder(temporary: Path, out: Path) -> None:
    """Put a finished folder of files in the place of `out`, which refuse_foreign has let pass."""
    old = out.with_name(f".{out.name}.replaced")  # a name that nobody else gives a backup
    _remove(old)  # left by a killed replacement
    if out.exists():
        out.rename(old)
    temporary.rename(out)
    _remove(old)


def _remove(folder: Path) -> None:
    if not folder.exists():
        return
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


# -- reading ---------------------------------------------------------------------------------------------------------
def load(folder: Path, target: TargetSpec | None = None, embedding: Tensor | None = None) -> Draft:
    """The draft in `folder`: our own draft folder, or a served checkpoint in either layout, ours or foreign.

    target: what the draft will work with; only exports of this project remember theirs and can do without it.
    embedding: the target's [V, D]. Foreign files often hold a copy of it, and with `embedding` the copy is compared.
    """
    folder = Path(folder)
    if (folder / DRAFT_JSON).is_file():
        return load_draft(folder, target)
    if target is not None and (inside := family(IN_TARGET).from_target(folder, target)) is not None:
        return inside
    config, tensors = read(folder, target, embedding)
    cls = family(config["family"])
    return cls.from_neutral(config, tensors, target if target is not None else _remembered(folder, read_json(folder)))


def read(folder: Path, target: TargetSpec | None = None, embedding: Tensor | None = None) -> tuple[Config, Tensors]:
    """The neutral form of a served checkpoint; tensors in the file's dtype."""
    folder = Path(folder)
    raw = read_json(folder)
    if target is None:
        target = _remembered(folder, raw)
    elif MARK in raw:
        check_same_target(TargetSpec.from_dict(raw[MARK]["target"]), target, str(folder))
    tensors = read_tensors(folder)
    layout, flat = flatten(raw, folder)
    dialect = dialect_of(_method(raw, folder))
    try:
        tensors = _without_embedding(tensors, target, embedding)
        config, tensors = dialect.decode(flat, layout, tensors, target)
    except ValueError as problem:
        raise ValueError(f"{folder}: {problem}") from problem
    return raw.get(MARK, {}).get("kept", {}) | config, tensors


def read_json(folder: Path) -> Config:
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder}: neither {DRAFT_JSON} (a draft folder) nor {CONFIG} (an export) is here")
    return json.loads((folder / CONFIG).read_text())


def _shards(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = [p.name for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth")]
        hint = f"; {', '.join(pickles)} may hold code: convert it to safetensors first" if pickles else ""
        raise ValueError(f"{folder}: no safetensors file here{hint}")
    return files


def tensor_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in _shards(folder):
        with safe_open(path, "pt") as file:
            names.update(file.keys())
    return names


def read_tensors(folder: Path) -> Tensors:
    """Every tensor of the folder's safetensors files, one or several shards."""
    tensors: Tensors = {}
    for path in _shards(folder):
        with safe_open(path, "pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def flatten(raw: Config, folder: Path) -> tuple[Format, Config]:
    """(layout, config with the layers' keys at the top level)."""
    if "speculators_model_type" not in raw or "model_type" in raw:
        return "plain", raw
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(f"{folder}/{CONFIG}: transformer_layer_config must be an object, got {layer!r}")
    return "speculators", {**layer, **{k: v for k, v in raw.items() if k != "transformer_layer_config"}}


def _remembered(folder: Path, raw: Config) -> TargetSpec:
    if MARK not in raw:
        raise ValueError(f"{folder}: not written by draftsmith, so the target's sizes are unknown; give the target")
    return TargetSpec.from_dict(raw[MARK]["target"])


def _method(raw: Config, folder: Path) -> str:
    """Which method serves a checkpoint: by its type, its architecture, or (EAGLE's own files) its tensor names."""
    kind = raw.get("speculators_model_type")
    if kind is not None:
        return str(kind)
    if raw.get("model_type") in ASSISTANTS:
        return "gemma4_mtp"
    architecture = " ".join(raw.get("architectures") or [])
    for name in DIALECTS:
        if re.search(rf"{name}(?!\d)", architecture.lower()):  # DFlash2 is another method
            return name
    if {"midlayer.input_layernorm.weight", "fc.weight"} <= tensor_names(folder):
        return "eagle3"
    raise ValueError(f"{folder}/{CONFIG}: architecture {architecture or 'absent'} is not one of {', '.join(DIALECTS)}")


def _without_embedding(tensors: Tensors, target: TargetSpec, embedding: Tensor | None) -> Tensors:
    """Drop a copy of the target's embedding; one that differs from it is refused, one not compared is told."""
    name = "embed_tokens.weight"
    if name not in tensors:
        return tensors
    own = tensors[name]
    want = (target.vocab_size, target.hidden_size)
    if tuple(own.shape) != want:
        raise ValueError(f"{name} is {tuple(own.shape)}, the target's embedding is {want}; not a draft for this target")
    if embedding is None:
        warnings.warn(f"{name} of the file was not compared with the target's embedding, which is used", stacklevel=4)
    elif not torch.equal(own, embedding.detach().cpu().to(own.dtype)):
        raise ValueError(f"{name} differs from the target's embedding; drafts with an own embedding are not supported")
    return {n: t for n, t in tensors.items() if n != name}


# -- serving ---------------------------------------------------------------------------------------------------------
def extraction_config(layer_ids: Sequence[int]) -> Config:
    """The --speculative-config of a vLLM server that hands out states; ids as aux layers, N = before the final norm."""
    layers = {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }


def serve_command(
    folder: Path, target: str | None = None, num_speculative_tokens: int | None = None, served_as: str | None = None
) -> str:
    """The exact `vllm serve` line for an export. target: Hub id or folder; else the name in the export.

    served_as: what the server loads the draft from, e.g. a Hub id; else the folder.
    """
    if (Path(folder) / mtp_checkpoint.REPORT).is_file():
        return _serve_target(Path(folder), num_speculative_tokens, served_as)
    raw = read_json(Path(folder))
    about = raw.get(MARK, {})
    proposals = raw.get("speculators_config", {}).get("proposal_methods", [{}])
    num = num_speculative_tokens or about.get("num_speculative_tokens") or proposals[0].get("speculative_tokens")
    name = target or about.get("target", {}).get("name") or _verifier(raw)
    if name in (None, NO_PUBLIC_NAME):
        raise ValueError(f"{folder}: the export names no public target; give the target to serve")
    if num is None:
        raise ValueError(f"{folder}: the export has no default number of proposals; give num_speculative_tokens")
    method = dialect_of(_method(raw, Path(folder))).method
    settings = {"method": method, "model": served_as or str(folder), "num_speculative_tokens": num}
    return f"vllm serve {shlex.quote(str(name))} --speculative-config {shlex.quote(json.dumps(settings))}"


def _serve_target(folder: Path, num: int | None, served_as: str | None) -> str:
    """The same for a target that holds its own MTP module."""
    name = served_as or str(folder)
    wrong = [word for word in MISREAD if word in name.lower()]
    if wrong:
        raise ValueError(
            f"{name}: vLLM takes a target whose path holds {wrong[0]!r} for another method than mtp; rename it"
        )
    about = json.loads((folder / mtp_checkpoint.REPORT).read_text())
    settings = {"method": "mtp", "num_speculative_tokens": num or about["num_speculative_tokens"]}
    return f"vllm serve {shlex.quote(name)} --speculative-config {shlex.quote(json.dumps(settings))}"


def _verifier(raw: Config) -> str | None:
    return raw.get("speculators_config", {}).get("verifier", {}).get("name_or_path")


# -- do training, runtime and export agree? --------------------------------------------------------------------------
@torch.no_grad()
def compare(
    draft: Draft, folder: Path, target: Target, prompt: Sequence[int], num: int | None = None, tolerance: float = 1e-4
) -> str | None:
    """What differs first when one prompt goes through training, runtime and the export in `folder`; None = nothing.

    Looked at in this order, so that the first finding is nearest to the cause: config keys, tensors, outputs of the
    draft's modules, probabilities slot by slot. Both drafts compute with the export's rounded weights, so `tolerance`
    (largest difference of a probability, and of module outputs relative to their size) covers summation order alone.
    """
    if draft.config.family == IN_TARGET:
        config, tensors = draft.neutral()
        usual, found = config["ttt_steps"], mtp_checkpoint.Checkpoint.open(str(folder)).read(tensors)
        rounded = {name: mtp_checkpoint.stored(tensor, found[name].dtype) for name, tensor in tensors.items()}
    else:
        config, tensors = draft.neutral()
        config = _within_positions(config, target.spec)
        found_config, found = read(folder, target.spec, target.embedding)
        for key in sorted(config.keys() | found_config.keys()):
            if _plain(config.get(key)) != found_config.get(key):
                return f"config: {key} is {config.get(key)!r} in training, {found_config.get(key)!r} in {folder}"
        usual = dialect_for(config).num_tokens(config)
        rounded = _cast(tensors, next(t.dtype for t in found.values() if t.is_floating_point()))
    name = first_difference(rounded, found)
    if name is not None:
        dtype = (found | rounded)[name].dtype
        return f"tensor {name} of the draft (as {dtype}) differs from {folder}"

    num = num or usual
    ours = type(draft).from_neutral(config, rounded, target.spec)
    theirs = load(folder, target.spec, target.embedding)
    for one in (ours, theirs):
        one.to(device=target.device, dtype=torch.float32).eval()
        gains = target.final_norm
        one.bind(target.embedding.float(), target.head.float(), None if gains is None else gains.float())
    decoded, reloaded = (_one_round(one, target, prompt, num) for one in (ours, theirs))
    for (name, a), (_, b) in zip(decoded.outputs, reloaded.outputs):
        if a.shape != b.shape or (a - b).abs().max() > tolerance * (1 + a.abs().max()):
            return f"runtime and export: the output of module {name} differs"
    for k in range(num):
        if not torch.allclose(decoded.probs[k], reloaded.probs[k], rtol=0, atol=tolerance):
            return f"runtime and export: the probabilities of slot {k + 1} differ"
    trained = _teacher_forced(ours, decoded, prompt)
    for k, (here, there) in enumerate(zip(decoded.chosen, trained, strict=True)):
        if abs(here - there) > tolerance:
            return f"training and runtime: slot {k + 1} gives its token {there:.6f} in training, {here:.6f} in decoding"
    return None


class _Round(NamedTuple):
    """One decoding round: the prompt's states, module outputs in the order they came, the anchor token, the proposals,
    their distributions [num, Vd] and the probability of each proposal in its own distribution."""

    captured: Captured
    outputs: list[tuple[str, Tensor]]
    anchor: int
    ids: list[int]
    probs: Tensor
    chosen: list[float]


def _one_round(draft: Draft, target: Target, prompt: Sequence[int], num: int) -> _Round:
    """The first round after the prompt at temperature 1, with a fixed seed."""
    ids = torch.tensor([list(prompt)], device=target.device)
    cache = target.new_cache(1, len(prompt)) if draft.needs.target_kv_layers else None
    states = target.forward(ids, cache, draft.needs)
    if cache is not None:
        cache.advance([len(prompt)])
    anchor = target.logits(states.last_hidden[:, -1]).argmax(-1)  # [1]
    features = None if states.features is None else states.features.float()
    captured = Captured(features, states.last_hidden.float(), torch.tensor([len(prompt)], device=target.device), cache)
    sampler = Sampler(temperature=1.0, generator=torch.Generator(target.device).manual_seed(0))
    outputs: list[tuple[str, Tensor]] = []

    def note(name: str) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                outputs.append((name, output.detach().float()))

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in draft.named_modules() if name]
    state = draft.start(1, len(prompt) + num + 2)
    offered = draft.propose(state, torch.cat([ids[:, 1:], anchor[:, None]], 1), captured, num, sampler)
    for hook in hooks:
        hook.remove()
    proposals = offered.ids[0]
    if offered.probs is None:  # deterministic: a point mass on each proposal
        probs = torch.nn.functional.one_hot(proposals, draft.target.vocab_size).float()
        columns = proposals
    else:
        probs = offered.probs[0].float()
        columns = proposals if offered.vocab is None else torch.searchsorted(offered.vocab, proposals)
    chosen = probs.gather(1, columns[:, None])[:, 0]
    return _Round(captured, outputs, int(anchor), proposals.tolist(), probs, chosen.tolist())


def _teacher_forced(draft: Draft, decoded: _Round, prompt: Sequence[int]) -> list[float]:
    """Probability of each proposal on the training path, where prompt, anchor and proposals are one document.

    States exist for the prompt alone, as in decoding; the later ones are zeros, which the draft must not look at.
    """
    ids = torch.tensor([*prompt, decoded.anchor, *decoded.ids], device=decoded.probs.device)
    later = len(ids) - len(prompt)

    def later_zeros(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x[0], (0, 0, 0, later))  # [..., n, D] -> [..., T, D]

    def states(x: Tensor | None) -> Tensor | None:
        return None if x is None else later_zeros(x)

    keys_values = {layer: decoded.captured.cache.keys_values(layer) for layer in draft.needs.target_kv_layers}
    batch = Batch(
        input_ids=ids,
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
        positions=torch.arange(len(ids), device=ids.device),
        bounds=(0, len(ids)),
        features=states(decoded.captured.features),
        last_hidden=states(decoded.captured.last_hidden),
        target_kv={layer: (later_zeros(k), later_zeros(v)) for layer, (k, v) in keys_values.items()},
    )
    anchors = torch.tensor([len(prompt)], device=ids.device)
    (slots,) = draft.slot_probs(batch, anchors, len(decoded.ids), Sampler(temperature=1.0))
    return slots.draft[0].tolist()


# -- parts that the methods share ------------------------------------------------------------------------
NOT_THE_DRAFTS = (  # maps between vocabularies, buffers, and what other trainers leave behind of the target
    *("t2d", "d2t", "rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight"),
)
LAYER_KEYS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "max_position_embeddings"),
)


def layer_keys(layer: Config, num_layers: int) -> Config:
    """The layers as a transformers config spells them; RoPE in the new and the old way, so that all readers agree."""
    rope = dict(layer["rope_parameters"])
    keys = {key: layer[key] for key in LAYER_KEYS}
    keys |= {"num_hidden_layers": num_layers, "tie_word_embeddings": False}  # the draft's head is never its embedding
    keys |= {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}
    if rope.get("rope_type", "default") != "default":
        keys["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if layer["model_type"] == "qwen3":
        keys |= {"use_sliding_window": False, "layer_types": ["full_attention"] * num_layers}
    return keys


def read_layer(raw: Config, target: TargetSpec) -> Config:
    """The neutral layer of a config, with what transformers takes for keys that an older file leaves out."""
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps")
    missing = [key for key in needed if key not in raw]
    if missing:
        raise ValueError(f"{CONFIG} lacks {', '.join(missing)}")
    heads = raw["num_attention_heads"]
    return {
        "model_type": raw.get("model_type", "llama"),
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "rms_norm_eps": raw["rms_norm_eps"],
        "hidden_act": raw.get("hidden_act", "silu"),
        "rope_parameters": read_rope(raw),
        "attention_bias": raw.get("attention_bias", False),
        "max_position_embeddings": raw.get("max_position_embeddings", target.max_positions),
        "vocab_size": raw.get("vocab_size", target.vocab_size),
    }


def layer_shapes(layer: Config, input_width: int) -> dict[str, Shape]:
    """Tensors of one layer whose query, key and value projections read `input_width` numbers."""
    width, inner, head_dim = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    rows = {"q_proj": layer["num_attention_heads"] * head_dim, "k_proj": layer["num_key_value_heads"] * head_dim}
    rows["v_proj"] = rows["k_proj"]
    shapes: dict[str, Shape] = {f"self_attn.{name}.weight": (num, input_width) for name, num in rows.items()}
    if layer["attention_bias"]:
        shapes |= {f"self_attn.{name}.bias": (num,) for name, num in rows.items()}
    if layer["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    shapes |= {"self_attn.o_proj.weight": (width, rows["q_proj"]), "mlp.down_proj.weight": (width, inner)}
    shapes |= {"mlp.gate_proj.weight": (inner, width), "mlp.up_proj.weight": (inner, width)}
    return shapes | {f"{norm}.weight": (width,) for norm in ("input_layernorm", "post_attention_layernorm")}


def read_rope(raw: Config) -> Config:
    """rope_parameters with rope_theta, from transformers 5's single entry or the older pair of entries."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    legacy = rope.pop("type", None)
    rope.setdefault("rope_type", legacy or "default")
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    return rope


def offsets(draft_vocab: Tensor, vocab_size: int) -> Tensors:
    """`d2t` [Vd] int64 = target id - draft id, and `t2d` [V] bool = whether a target id is kept."""
    kept = torch.zeros(vocab_size, dtype=torch.bool)
    kept[draft_vocab] = True
    return {"d2t": draft_vocab - torch.arange(len(draft_vocab)), "t2d": kept}


def absolute(tensors: Tensors, vocab_size: int) -> Tensor | None:
    """The draft vocabulary as ascending target ids, from `d2t`; None when the file has none."""
    if "d2t" not in tensors:
        return None
    ids = tensors["d2t"].to(torch.int64) + torch.arange(len(tensors["d2t"]))
    if ids.min() < 0 or ids.max() >= vocab_size or (ids.diff() <= 0).any():
        raise ValueError(f"d2t + draft id must be ascending target ids below {vocab_size}, got {ids[:8].tolist()} ...")
    if "t2d" in tensors and tensors["t2d"].nonzero().flatten().tolist() != ids.tolist():
        raise ValueError("d2t and t2d name different tokens")
    return ids


# -- EAGLE-3 ---------------------------------------------------------------------------------------------------------
class Eagle3Dialect(Dialect):
    method = "eagle3"
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    keys = frozenset({"family", "aux_layers", "layer", "num_layers", *switches})

    def num_tokens(self, config: Config) -> int:
        return int(config.get("ttt_steps", 3))

    def check(self, config: Config, tensors: Tensors, target: TargetSpec, layout: Format) -> list[str]:
        reasons = refuse_without_aux(target)
        layer = config["layer"]
        if layer["hidden_act"] != "silu":
            reasons.append(f"its EAGLE-3 layers know hidden_act silu only, this draft has {layer['hidden_act']}")
        if layer["hidden_size"] != target.hidden_size:
            reasons.append(
                f"the draft's width {layer['hidden_size']} is not the target's {target.hidden_size}, "
                "whose embedding rows it reads"
            )
        return reasons

    def encode(self, config: Config, tensors: Tensors, target: TargetSpec, layout: Format) -> Checkpoint:
        layer, num_layers, aux = config["layer"], config["num_layers"], list(config["aux_layers"])
        if aux != sorted(set(aux)):
            raise ValueError(f"aux_layers must be ascending and distinct (servers sort them), got {aux}")
        tensors = dict(tensors)
        kept = tensors.pop("draft_vocab", None)
        if kept is not None:
            tensors |= offsets(kept, target.vocab_size)
        tensors |= self._server_slots(config, tensors["norm.weight"].dtype)
        if layout == "plain" and num_layers == 1:  # EAGLE's own name of the only layer, which SGLang insists on
            tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): t for name, t in tensors.items()}
        method = {
            "draft_vocab_size": target.vocab_size if kept is None else len(kept),
            "target_hidden_size": target.hidden_size,
            **{name: bool(config[name]) for name in self.switches},
            "eagle_aux_hidden_state_layer_ids": aux,
        }
        extra: Config = {"num_aux_hidden_states": len(aux)}
        if layout == "plain":
            extra["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": aux}
        plain_names = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
        return Checkpoint(plain_names[layer["model_type"]], layer_keys(layer, num_layers), method, extra, tensors)

    def decode(self, raw: Config, layout: Format, tensors: Tensors, target: TargetSpec) -> tuple[Config, Tensors]:
        sliding = sorted({kind for kind in raw.get("layer_types") or [] if kind != "full_attention"})
        if sliding:
            raise ValueError(f"layer_types {sliding}: only full attention is supported here")
        eagle = raw.get("eagle_config") or {}
        ids = raw.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
        ids = ids or eagle.get("layer_ids") or (2, target.num_layers // 2, target.num_layers - 3)
        config: Config = {
            "family": "eagle3",
            "aux_layers": sorted(set(ids)),
            "layer": read_layer(raw, target),
            "num_layers": raw.get("num_hidden_layers", 1),
            "norm_before_residual": raw.get("norm_before_residual", layout == "speculators"),
            "norm_before_fc": eagle.get("norm_before_fc", raw.get("norm_before_fc", False)),
            "fc_norm": raw.get("fc_norm", False),
            "norm_output": raw.get("norm_output", False),
        }
        names = {name: re.sub(r"^midlayer\.", "layers.0.", name) for name in tensors}
        ours = {new: tensors[old] for old, new in names.items() if not new.endswith(NOT_THE_DRAFTS)}
        kept = absolute(tensors, target.vocab_size)
        if kept is not None and len(kept) < target.vocab_size:
            ours["draft_vocab"] = kept
        normed = config["layer"]["model_type"] == "qwen3" or any(name.endswith("q_norm.weight") for name in ours)
        config["layer"]["model_type"] = "qwen3" if normed else "llama"
        dtype = next((t.dtype for t in ours.values() if t.is_floating_point()), torch.float32)
        for name, slot in self._server_slots(config, dtype).items():
            if name in ours and torch.equal(ours[name], slot):
                del ours[name]
        num_rows = raw.get("draft_vocab_size") or target.vocab_size
        width = raw.get("target_hidden_size") or config["layer"]["hidden_size"]
        shapes = self.shapes(config, num_rows, width)
        if num_rows < target.vocab_size:
            check_tensors(ours, shapes | {"draft_vocab": (num_rows,)}, optional=())
        else:
            check_tensors(ours, shapes, optional=("lm_head.weight",))
        return config, ours

    @staticmethod
    def shapes(config: Config, num_rows: int, target_width: int) -> dict[str, Shape]:
        """What a file of this config must hold: {our tensor name: shape}; num_rows: of the draft's head."""
        layer = config["layer"]
        width, fused = layer["hidden_size"], len(config["aux_layers"]) * target_width
        shapes: dict[str, Shape] = {"fc.weight": (width, fused), "norm.weight": (width,)}
        shapes["lm_head.weight"] = (num_rows, width)
        if config["norm_before_fc"]:
            shapes["input_norm.weight"] = (fused,)
        if config["fc_norm"]:
            shapes |= {f"fc_norm.{i}.weight": (target_width,) for i in range(len(config["aux_layers"]))}
        for i in range(config["num_layers"]):
            parts = layer_shapes(layer, width if i else 2 * width)  # the first reads the embedding beside the state
            if i == 0:
                parts["hidden_norm.weight"] = (width,)
            shapes |= {f"layers.{i}.{name}": shape for name, shape in parts.items()}
        return shapes

    @staticmethod
    def _server_slots(config: Config, dtype: torch.dtype) -> Tensors:
        """Parameters of vLLM's class that have no part in the computation; filled so that none stays unset."""
        width = config["layer"]["hidden_size"]
        later = range(1, config["num_layers"])
        slots = {f"layers.{i}.hidden_norm.weight": torch.ones(width, dtype=dtype) for i in later}
        if config["layer"]["attention_bias"] and config["layer"]["model_type"] == "llama":
            every = range(config["num_layers"])
            slots |= {f"layers.{i}.self_attn.o_proj.bias": torch.zeros(width, dtype=dtype) for i in every}
        return slots


def check_tensors(tensors: Tensors, shapes: Mapping[str, Shape], optional: Collection[str]) -> None:
    """Name every tensor that is missing, unknown or of another shape."""
    missing = sorted(shapes.keys() - tensors.keys() - set(optional))
    unknown = sorted(tensors.keys() - shapes.keys() - set(optional))
    both = sorted(tensors.keys() & shapes.keys())
    wrong = [f"{n} {tuple(tensors[n].shape)} instead of {shapes[n]}" for n in both if tensors[n].shape != shapes[n]]
    found = {"missing": missing, "not known": unknown, "of another shape": wrong}
    if any(found.values()):
        raise ValueError(
            "tensors " + "; ".join(f"{what}: {', '.join(names)}" for what, names in found.items() if names)
        )


# -- DFlash and DSpark -----------------------------------------------------------------------------------------------
SLIDING = "sliding_attention"


class BlockDialect(Dialect):
    """What the two block methods share: the backbone. Its layers are Qwen3's, whatever the target is."""

    architecture: str
    keys = frozenset(
        [
            "family",
            "aux_layers",
            "layer",
            "num_layers",
            "layout",
            "block_len",
            "mask_token_id",
            "sliding_window",
            "layer_types",
            "causal",
            "markov_rank",
            "confidence",
        ]
    )

    def num_tokens(self, config: Config) -> int:
        return config["block_len"] - (config["layout"] == "infill")

    def check(self, config: Config, tensors: Tensors, target: TargetSpec, layout: Format) -> list[str]:
        reasons = refuse_without_aux(target)
        if config["layer"]["model_type"] != "qwen3":
            reasons.append(
                "its layers norm query and key heads, which this draft does not, and no gains make a norm vanish; "
                "train it with draft.qk_norm: true"
            )
        if target.embedding_scale != 1.0:
            reasons.append(
                f"its block drafts read embedding rows as they are, this target's layers read them times "
                f"{target.embedding_scale:g}"
            )
        return reasons

    def notes(self, config: Config, num: int) -> list[str]:
        notes = []
        if num != self.num_tokens(config) and not all(config["causal"]):
            notes.append(
                f"with {num} proposals a round instead of {self.num_tokens(config)} vLLM runs a shorter block than "
                f"the draft was trained for and measured with; serve num_speculative_tokens {self.num_tokens(config)}"
            )
        if len(set(config["layer_types"])) > 1:
            notes.append("sliding and full layers in one draft need vLLM's second runner: VLLM_USE_V2_MODEL_RUNNER=1")
        return notes

    def encode(self, config: Config, tensors: Tensors, target: TargetSpec, layout: Format) -> Checkpoint:
        tensors = dict(tensors)
        kept = tensors.pop("draft_vocab", None)
        if kept is not None:
            tensors |= offsets(kept, target.vocab_size)
        layer = layer_keys({**config["layer"], "model_type": "qwen3"}, config["num_layers"])
        if config["sliding_window"] is not None:
            layer |= {"use_sliding_window": True, "sliding_window": config["sliding_window"]}
            layer["layer_types"] = list(config["layer_types"])
        method = {
            "block_size": config["block_len"],
            "draft_vocab_size": target.vocab_size if kept is None else len(kept),
            "target_hidden_size": target.hidden_size,
        }
        return Checkpoint(self.architecture, layer, method, {}, tensors)

    def decode(self, raw: Config, layout: Format, tensors: Tensors, target: TargetSpec) -> tuple[Config, Tensors]:
        _refuse_unknown_blocks(raw)
        block = self._block_config(raw, layout)
        num_layers = raw.get("num_hidden_layers", 1)
        types, window = _attention(raw, block, num_layers)
        causal = raw.get("is_causal", block.get("causal"))
        written = [
            kind == SLIDING for kind in raw.get("layer_types") or [""] * num_layers
        ]  # use_swa changes nothing here
        mask = block.get("mask_token_id", raw.get("mask_token_id"))
        missing = [
            key for key, value in (("block_size", raw.get("block_size")), ("mask_token_id", mask)) if value is None
        ]
        if missing:
            raise ValueError(f"{CONFIG} lacks {', '.join(missing)}")
        config: Config = {
            "family": self.method,
            "aux_layers": sorted(set(self._aux_layers(raw, block, layout))),
            "layer": read_layer(raw, target),
            "num_layers": num_layers,
            "layout": self._layout(raw, block, layout),
            "block_len": raw["block_size"],
            "mask_token_id": mask,
            "sliding_window": window,
            "layer_types": types,
            "causal": written if causal is None else [bool(causal)] * num_layers,
        }
        ours = {name: tensor for name, tensor in tensors.items() if not name.endswith(NOT_THE_DRAFTS)}
        kept = absolute(tensors, target.vocab_size)
        if kept is not None and len(kept) < target.vocab_size:
            ours["draft_vocab"] = kept
        normed = any(name.endswith("q_norm.weight") for name in ours)
        config["layer"]["model_type"] = "qwen3" if normed else "llama"
        return config, ours

    def check_shapes(self, config: Config, tensors: Tensors, num_rows: int, target: TargetSpec) -> None:
        layer, width = config["layer"], config["layer"]["hidden_size"]
        shapes: dict[str, Shape] = {"fc.weight": (width, len(config["aux_layers"]) * target.hidden_size)}
        shapes |= {"hidden_norm.weight": (width,), "norm.weight": (width,), "lm_head.weight": (num_rows, width)}
        for i in range(config["num_layers"]):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(layer, width).items()}
        rank = config.get("markov_rank")
        if rank is not None:
            shapes["markov_head.markov_w1.weight"] = (target.vocab_size, rank)
            shapes["markov_head.markov_w2.weight"] = (num_rows, rank)
        if config.get("confidence"):
            shapes |= {"confidence_head.proj.weight": (1, width + rank), "confidence_head.proj.bias": (1,)}
        reduced = num_rows < target.vocab_size
        if reduced:
            shapes["draft_vocab"] = (num_rows,)
        check_tensors(tensors, shapes, optional=() if reduced else ("lm_head.weight",))

    def _block_config(self, raw: Config, layout: Format) -> Config:
        return raw.get("dflash_config") or {}

    def _layout(self, raw: Config, block: Config, layout: Format) -> str:
        raise NotImplementedError

    def _aux_layers(self, raw: Config, block: Config, layout: Format) -> list[int]:
        """The order in which vLLM looks for them."""
        ids = raw.get("aux_hidden_state_layer_ids") if layout == "speculators" else None
        ids = ids or raw.get("eagle_aux_hidden_state_layer_ids")
        if ids:
            return list(ids)
        outputs = block.get("target_layer_ids") or raw.get("dspark_target_layer_ids") or raw.get("target_layer_ids")
        if not outputs:
            raise ValueError(f"{CONFIG} names no target layers (target_layer_ids or aux_hidden_state_layer_ids)")
        return [k + 1 for k in outputs]


class DFlashDialect(BlockDialect):
    method = "dflash"
    architecture = "DFlashDraftModel"

    def check(self, config: Config, tensors: Tensors, target: TargetSpec, layout: Format) -> list[str]:
        reasons = super().check(config, tensors, target, layout)
        if layout == "speculators" and len(set(config["causal"])) > 1:
            reasons.append("the speculators layout has one causal switch for all layers; write the plain one")
        return reasons

    def encode(self, config: Config, tensors: Tensors, target: TargetSpec, layout: Format) -> Checkpoint:
        found, causal = super().encode(config, tensors, target, layout), set(config["causal"])
        mask = {"mask_token_id": config["mask_token_id"]}
        if layout == "speculators":
            method = mask | {"aux_hidden_state_layer_ids": list(config["aux_layers"]), "sample_from_anchor": False}
            method["sliding_window_non_causal"] = causal == {False}  # of every layer, in spite of its name
            return found._replace(method=found.method | method)
        block = mask | {"target_layer_ids": [k - 1 for k in config["aux_layers"]]}
        if len(causal) == 1:
            block["causal"] = causal.pop()
        return found._replace(method=found.method | {"dflash_config": block})

    def decode(self, raw: Config, layout: Format, tensors: Tensors, target: TargetSpec) -> tuple[Config, Tensors]:
        config, ours = super().decode(raw, layout, tensors, target)
        self.check_shapes(config, ours, raw.get("draft_vocab_size") or target.vocab_size, target)
        return config, ours

    def _block_config(self, raw: Config, layout: Format) -> Config:
        if layout == "plain":
            return raw.get("dflash_config") or {}
        return {"causal": not raw.get("sliding_window_non_causal", True)}  # vLLM makes its own dflash_config from these

    def _layout(self, raw: Config, block: Config, layout: Format) -> str:
        return "shifted" if block.get("sample_from_anchor", raw.get("sample_from_anchor", False)) else "infill"


class DSparkDialect(BlockDialect):
    """DSpark, and DFlash in the shifted layout: the same draft with a Markov head that adds nothing."""

    method = "dspark"
    architecture = "Qwen3DSparkModel"

    def check(self, config: Config, tensors: Tensors, target: TargetSpec, layout: Format) -> list[str]:
        reasons = super().check(config, tensors, target, layout)
        if config["family"] == "dspark" and target.logit_softcap is not None and "lm_head.weight" not in tensors:
            reasons.append(
                f"it adds the Markov bias to logits without the soft-cap {target.logit_softcap:g} of this target's head"
            )
        return reasons

    def notes(self, config: Config, num: int) -> list[str]:
        notes = super().notes(config, num)
        if config["family"] == "dflash":
            notes.append(
                "vLLM has no shifted dflash drafts: written as a dspark draft with a zero Markov head of rank 1"
            )
        return notes

    def encode(self, config: Config, tensors: Tensors, target: TargetSpec, layout: Format) -> Checkpoint:
        found = super().encode(config, tensors, target, layout)
        if config["family"] == "dflash":
            rows, dtype = found.method["draft_vocab_size"], tensors["norm.weight"].dtype
            config = {**config, "markov_rank": 1, "confidence": False}
            found.tensors["markov_head.markov_w1.weight"] = torch.zeros(target.vocab_size, 1, dtype=dtype)
            found.tensors["markov_head.markov_w2.weight"] = torch.zeros(rows, 1, dtype=dtype)
        aux = list(config["aux_layers"])
        layers = (
            {"aux_hidden_state_layer_ids": aux}
            if layout == "speculators"
            else {"target_layer_ids": [k - 1 for k in aux]}
        )
        method = layers | {
            "mask_token_id": config["mask_token_id"],
            "sample_from_anchor": config["layout"] == "shifted",
            "markov_rank": config["markov_rank"],
            "markov_head_type": "vanilla",
            "enable_confidence_head": config["confidence"],
            "confidence_head_with_markov": config["confidence"],
        }
        causal = set(config["causal"])
        usual = config["causal"] == [kind == SLIDING for kind in config["layer_types"]]
        extra = {} if usual else {"dflash_config": {"causal": causal.pop()}}
        return found._replace(method=found.method | method, layer_only=extra)

    def decode(self, raw: Config, layout: Format, tensors: Tensors, target: TargetSpec) -> tuple[Config, Tensors]:
        kind = raw.get("markov_head_type", "vanilla")
        if kind != "vanilla" or "markov_rank" not in raw:
            raise ValueError(
                f"markov_head_type {kind!r}, markov_rank {raw.get('markov_rank')}: only vanilla heads exist here"
            )
        config, ours = super().decode(raw, layout, tensors, target)
        weight, bias = "confidence_head.proj.weight", "confidence_head.proj.bias"
        config |= {
            "markov_rank": raw["markov_rank"],
            "confidence": bool(raw.get("enable_confidence_head")) and weight in ours,
        }
        if not config["confidence"]:  # a server drops a head that is not switched on
            ours = {name: tensor for name, tensor in ours.items() if name not in (weight, bias)}
        elif not raw.get("confidence_head_with_markov", False):  # it reads the state alone: no weight on the rest
            ours[weight] = torch.nn.functional.pad(ours[weight], (0, raw["markov_rank"]))
        self.check_shapes(config, ours, raw.get("draft_vocab_size") or target.vocab_size, target)
        if raw.get(MARK, {}).get("family") == "dflash":
            for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
                if ours.pop(name).any():
                    raise ValueError(f"{name} of a dflash draft must be zero")
            del config["markov_rank"], config["confidence"]
            config["family"] = "dflash"
        return config, ours

    def _layout(self, raw: Config, block: Config, layout: Format) -> str:
        return "shifted" if raw.get("sample_from_anchor", layout == "plain") else "infill"


def _attention(raw: Config, block: Config, num_layers: int) -> tuple[list[str], int | None]:
    """(kind of each layer, window): vLLM's rule, in which use_swa rules where no layer is said to slide."""
    types = list(raw.get("layer_types") or [])
    if SLIDING not in types:
        types = [SLIDING if block.get("use_swa") else "full_attention"] * num_layers
    if SLIDING not in types:
        return types, None
    window = block.get("swa_window_size", raw.get("sliding_window"))
    if window is None:
        raise ValueError(f"{CONFIG} has {SLIDING} and lacks sliding_window")
    return types, window


def _refuse_unknown_blocks(raw: Config) -> None:
    """Settings of other people's block drafts that change the computation and are not built here."""
    block = raw.get("dflash_config") or {}
    usual = {"is_neox_style": True, "logit_scale": 1.0, "use_aux_hidden_state": True, "attention_value_scale": None}
    usual |= {"attention_sink_bias": False, "add_swa_attention_sink_bias": False}
    for key, value in usual.items():
        found = block.get(key, raw.get(key, value))
        if found != value:
            raise ValueError(f"{key} {found!r}: block drafts here have {value!r}")


# -- Gemma 4 drafters ------------------------------------------------------------------------------------------------
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # model types
NOT_SIZES = frozenset(["transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path", MARK])


class Gemma4Dialect(Dialect):
    """transformers' gemma4_assistant, which vLLM reads too: a config within the config, and tensors as the neutral form
    names them."""

    method = "mtp"
    keys = frozenset({"family", "assistant", "layer"})

    def num_tokens(self, config: Config) -> int:
        return int(config.get("ttt_steps", 3))

    def check(self, config: Config, tensors: Tensors, target: TargetSpec, layout: Format) -> list[str]:
        reasons = []
        if layout != "plain":
            reasons.append("Gemma 4 drafters have no speculators layout; write the plain one")
        if config.get("training", {}).get("query_position") == "anchor":
            reasons.append("its queries stand at the state's position, this draft was trained for the anchor's")
        return reasons

    def encode(self, config: Config, tensors: Tensors, target: TargetSpec, layout: Format) -> Checkpoint:
        layer = {"model_type": config["assistant"]["model_type"], "text_config": config["layer"]}
        return Checkpoint("Gemma4AssistantForCausalLM", layer, config["assistant"], {}, dict(tensors))

    def decode(self, raw: Config, layout: Format, tensors: Tensors, target: TargetSpec) -> tuple[Config, Tensors]:
        about = {key: value for key, value in raw.items() if key not in NOT_SIZES}
        layer = {key: value for key, value in about.pop("text_config").items() if key not in NOT_SIZES}
        config: Config = {"family": "gemma4_mtp", "assistant": about, "layer": layer}
        ours = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}  # tied
        width, backbone = layer["hidden_size"], about["backbone_hidden_size"]
        wrong = [
            f"{name} {tuple(ours[name].shape)} instead of {shape}"
            for name, shape in {
                "pre_projection.weight": (width, 2 * backbone),
                "post_projection.weight": (backbone, width),
                "model.embed_tokens.weight": (target.vocab_size, width),
            }.items()
            if name not in ours or tuple(ours[name].shape) != shape
        ]
        if wrong:
            raise ValueError(f"tensors of another shape: {', '.join(wrong)}")
        return config, ours


# One entry a method that vLLM serves.
DIALECTS: dict[str, Dialect] = {
    "eagle3": Eagle3Dialect(),
    "dflash": DFlashDialect(),
    "dspark": DSparkDialect(),
    "gemma4_mtp": Gemma4Dialect(),
}


def dialect_for(config: Config) -> Dialect:
    """The dialect in which a neutral config is served."""
    shifted = config["family"] == "dflash" and config["layout"] == "shifted"
    return dialect_of("dspark" if shifted else config["family"])


def dialect_of(name: str) -> Dialect:
    if name not in DIALECTS:
        raise ValueError(f"{name!r} drafts have no served form here; known: {', '.join(DIALECTS)}")
    return DIALECTS[name]
