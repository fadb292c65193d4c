"""The contract of a draft family: what the loop, the runtime and the exporter may ask of a draft.

One alignment rule holds everywhere. An anchor `a` is the last committed token: its own features do not exist yet.
A draft may use features at positions < a and tokens at positions <= a. It predicts x[a+1], x[a+2], ...

    position        0    1    2   ...  a-1    a
    features        f0   f1   f2  ...  f[a-1]  -        (target states, captured)
    tokens          x0   x1   x2  ...  x[a-1]  x[a]     (committed)

A pair (anchor, slot) is supervised iff the loss mask is 1 at the anchor and at every token up to the label, all within
one document. So the first draft of every answer is trained, and none crosses a turn or a document.

Shapes: B batch, T packed tokens, N new rows, D target width, A aux layers, K proposals, V target vocabulary,
Vd draft vocabulary.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith.models.sampling import Sampler

FORMAT = 1  # version of the draft folder
DRAFT_JSON, DRAFT_TENSORS = "draft.json", "draft.safetensors"


class DraftConfig(BaseModel):
    """What every family's `draft:` section has. A family adds its own fields, each with its unit and reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    family: str  # module name in models/: eagle3, dflash, dspark, mtp, gemma4_mtp


@dataclass(frozen=True)
class TargetSpec:
    """The sizes and conventions of a target that a draft has to follow; stored in every draft folder.

    `rope` is transformers' `rope_parameters` of the full-attention layers, with `rope_theta` always present.
    `embedding_scale` multiplies embedding rows (Gemma: sqrt(hidden_size)); `logit_softcap` is the final soft-cap.
    `text_config` is what the target's text config says beyond transformers' defaults, without names and paths: drafts
    that are built from the target's own layer classes (MTP) are made from it.
    """

    name: str
    revision: str | None
    config_sha256: str
    tokenizer_sha256: str
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    activation: str
    rope: Mapping[str, Any]
    attention_bias: bool = False
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    eos_ids: tuple[int, ...] = ()
    text_config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TargetSpec:
        return cls(**{**values, "eos_ids": tuple(values.get("eos_ids", ()))})


@dataclass(frozen=True)
class Needs:
    """What a draft wants from the target: aux layers (ascending), last hidden, KV of some layers (Gemma 4 MTP)."""

    aux_layers: tuple[int, ...] = ()
    last_hidden: bool = True
    target_kv_layers: tuple[int, ...] = ()


@dataclass
class Batch:
    """Packed documents for training: one token axis, documents kept apart by their bounds.

    input_ids, positions: [T] int64; positions restart at 0 in each document. loss_mask: [T] bool.
    bounds: ascending document limits on the host, `(0, 10, 24)` = two documents of 10 and 14 tokens.
    features: [T, A*D] or None; last_hidden: [T, D] (what goes into the target's head) or None.
    target_kv: {aux layer: (keys [Hkv, T, E], values [Hkv, T, E])} when `needs.target_kv_layers` asks for it.
    seed: a function of (train.seed, step). Random choices that `counts` and `forward` must make alike are drawn from it
    and the document's row id, so neither packing nor ranks nor a resume changes them.
    """

    input_ids: Tensor
    loss_mask: Tensor
    positions: Tensor
    bounds: tuple[int, ...]
    features: Tensor | None = None
    last_hidden: Tensor | None = None
    target_kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    row_ids: tuple[str, ...] = ()
    seed: int = 0

    @property
    def docs(self) -> list[tuple[int, int]]:
        """(start, end) of each document on the packed axis."""
        return list(zip(self.bounds[:-1], self.bounds[1:], strict=True))

    def to(self, device: torch.device | str) -> Batch:
        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, non_blocking=True)

        kv = {
            layer: (k.to(device, non_blocking=True), v.to(device, non_blocking=True))
            for layer, (k, v) in self.target_kv.items()
        }
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            loss_mask=self.loss_mask.to(device),
            positions=self.positions.to(device),
            features=move(self.features),
            last_hidden=move(self.last_hidden),
            target_kv=kv,
        )


class Term(NamedTuple):
    """One loss or metric as (sum, count), both 0-d tensors. The loop sums both over ranks, then divides once.

    The term named "loss" is special: its sum is already divided by the global denominators (its count is 1) and is
    what backward starts from. Summing it over micro-batches and ranks gives the loss of the step.
    """

    sum: Tensor
    count: Tensor  # type: ignore[assignment]  # tuple.count is not used


@dataclass
class Captured:
    """Target states of the rows that the last round committed, ragged by `lengths`.

    features: [B, N, A*D]; last_hidden: [B, N, D]; lengths: [B] int64, rows that are real (left-aligned).
    cache: a read-only handle on the target's cache, for drafts that attend to it (Gemma 4 MTP), else None.
    """

    features: Tensor | None
    last_hidden: Tensor | None
    lengths: Tensor
    cache: Any = None


@dataclass
class Proposal:
    """Tokens offered in one round.

    ids: [B, K] target ids. probs: [B, K, Vd], the distribution each id was drawn from; None = deterministic, verified
    as a point mass. vocab: [Vd] target ids of the columns of probs; None = the columns are target ids.
    confidence: [B, K] chance that a slot is accepted given that the slots before it were, or None.
    num: [B] int64, how many of the K slots are offered per row.
    """

    ids: Tensor
    probs: Tensor | None
    num: Tensor
    vocab: Tensor | None = None
    confidence: Tensor | None = None


class SlotProbs(NamedTuple):
    """Teacher-forced probabilities for exact evaluation, [n, K] each, for `anchors` [n] (packed positions).

    draft / target: probability of the token that really follows under the warped draft / target distribution;
    argmax: the draft's greedy target id; overlap: sum over tokens of min(draft, target).
    Slots past the end of the document have draft = target = overlap = 0 and argmax = -1.
    """

    anchors: Tensor
    draft: Tensor
    target: Tensor
    argmax: Tensor
    overlap: Tensor


class TokenStats(NamedTuple):
    """Counts over the supervised tokens of the training rows: what vocabularies and Markov tables start from.

    counts: [V] int64. bigrams: [M, 2] int64 distinct (previous, next) pairs; bigram_counts: [M] int64.
    target_mass: [V] float64, the target's probability of each token summed over supervised positions, or None.
    """

    counts: Tensor
    bigrams: Tensor
    bigram_counts: Tensor
    target_mass: Tensor | None = None

    @property
    def expected(self) -> Tensor:
        """[V] how often each token is to be expected: what was said plus what the target nearly said.

        A few hundred answers name few of the tokens that the next answers use. With the target's probabilities, 6,144
        tokens cover 95.1 % of held-out answers instead of 92.6 % (quick start, 360 answers of SmolLM2-135M, 2026-11-30).
        """
        return self.counts if self.target_mass is None else self.counts + self.target_mass


class Draft(nn.Module):
    """Base class of the families. Subclass it once per file in models/ and nothing else has to be registered."""

    Config: ClassVar[type[DraftConfig]]
    table_params: ClassVar[tuple[str, ...]] = ("lm_head",)
    """Prefixes of 2-D parameters that are vocabulary tables, not maps between states: Muon leaves them to AdamW."""

    needs: Needs
    max_proposal: int | None = None
    """Most tokens one round can propose; None = any number (recursive drafts)."""
    pretrained: bool = False
    """Whether initialise() gives a draft that works before any training (an MTP head that the target brings along)."""
    work_per_token: float = 1.0
    """Draft rows computed per training token: what `draftsmith plan` multiplies the cost of a row with."""

    def __init__(self, config: DraftConfig, target: TargetSpec):
        super().__init__()
        self.config = config
        self.target = target
        self._bound: tuple[Tensor, Tensor] | None = None
        self.target_norm: Tensor | None = None

    # -- the target's frozen tensors ---------------------------------------------------------------------------
    def bind(self, embedding: Tensor, head: Tensor, final_norm: Tensor | None = None) -> None:
        """Hold the target's embedding [V, D] and head [V, D] without registering them: never trained, never saved.

        final_norm: [D], the gains in front of the head, which a draft's own final norm may start from.
        """
        for name, tensor in (("embedding", embedding), ("head", head)):
            want = (self.target.vocab_size, self.target.hidden_size)
            if tuple(tensor.shape) != want:
                raise ValueError(f"{name} is {tuple(tensor.shape)}, this draft was made for a target with {want}")
        self._bound = (embedding.detach(), head.detach())
        self.target_norm = None if final_norm is None else final_norm.detach()

    @property
    def embedding(self) -> Tensor:
        assert self._bound is not None, "call draft.bind(target.embedding, target.head) first"
        return self._bound[0]

    @property
    def target_head(self) -> Tensor:
        assert self._bound is not None, "call draft.bind(target.embedding, target.head) first"
        return self._bound[1]

    def initialise(self, stats: TokenStats | None, generator: torch.Generator) -> None:
        """Fill the weights before the first step: draft vocabulary, head rows of the target, ... Called after bind."""
        raise NotImplementedError

    # -- training ----------------------------------------------------------------------------------------------
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """Every loss denominator of this batch (0-d tensors), known before forward. The loop sums them over the
        micro-batches and ranks of a step and hands the totals to forward."""
        raise NotImplementedError

    def forward(self, batch: Batch, denominators: dict[str, Tensor]) -> dict[str, Term]:
        """{"loss": Term, metric name: Term, ...}; see Term."""
        raise NotImplementedError

    # -- decoding ----------------------------------------------------------------------------------------------
    def start(self, batch_size: int, max_len: int) -> Any:
        """Fresh decoding state (the draft's own caches) for sequences of at most max_len tokens."""
        raise NotImplementedError

    def propose(self, state: Any, tokens: Tensor, captured: Captured, num: int, sampler: Sampler) -> Proposal:
        """Take in what the last round committed and offer `num` tokens.

        tokens: [B, N] int64, ragged by captured.lengths. Row i of `captured` is the target state at some position p,
        tokens[:, i] the committed token at p + 1. The first call brings the whole prompt: states 0..n-1 and tokens
        1..n, where token n is the first one the target produced. The last real token is the anchor.
        A row of length 0 takes no part in this round; its proposal is ignored.
        The draft drops its own speculative cache entries before it returns or at the next call; committed rows are
        always computed from real target states. `state` is updated in place.
        """
        raise NotImplementedError

    def slot_probs(self, batch: Batch, anchors: Tensor, num: int, sampler: Sampler) -> Iterator[SlotProbs]:
        """Teacher-forced slot probabilities at `anchors` [n] (packed positions), in chunks. See SlotProbs."""
        raise NotImplementedError

    # -- export ------------------------------------------------------------------------------------------------
    def neutral(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Config and tensors without any server's dialect: aux layers, absolute vocabulary. See models/export.py."""
        raise NotImplementedError

    @classmethod
    def from_target(cls, folder: Path, target: TargetSpec) -> Draft | None:
        """The draft that a target's own checkpoint holds, None when it holds none. folder: its files, or target.name."""
        return None

    @classmethod
    def from_neutral(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetSpec) -> Draft:
        """The inverse of neutral()."""
        raise NotImplementedError


def family(name: str) -> type[Draft]:
    """The Draft class of `draftsmith.models.<name>`; an unknown name is refused with the names that exist."""
    known = sorted(
        path.stem
        for path in Path(__file__).parent.glob("*.py")
        if re.search(r"^class \w+\((Draft|DFlash)\):", path.read_text(encoding="utf-8"), re.MULTILINE)
    )
    if name not in known:
        raise ValueError(f"draft.family: {name!r} is not a draft family; known families: {', '.join(known)}")
    module = importlib.import_module(f"draftsmith.models.{name}")
    found = [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, Draft) and c.__module__ == module.__name__
    ]
    assert len(found) == 1, f"{module.__name__} must define exactly one Draft, found {found}"
    return found[0]


def save_draft(
    draft: Draft,
    folder: Path,
    extra: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the draft folder: `draft.json` and `draft.safetensors` (trainable tensors and buffers, fp32 as trained).

    tensors: the state dict, where the draft itself does not stand whole in this process. Written under a temporary name, flushed and renamed, so a folder is complete or absent.
    """
    folder = Path(folder)
    temporary = folder.with_name(folder.name + ".tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    tensors = draft.state_dict() if tensors is None else tensors
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(tensors, temporary / DRAFT_TENSORS, metadata={"format": "pt"})
    about = {
        "format": FORMAT,
        "family": draft.config.family,
        "draft": draft.config.model_dump(mode="json"),
        "target": asdict(draft.target),
        **(extra or {}),
    }
    (temporary / DRAFT_JSON).write_text(json.dumps(about, indent=2))
    for path in temporary.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    if folder.exists():  # the same step saved again: replace it
        old = folder.with_name(folder.name + ".old")
        folder.rename(old)
        temporary.rename(folder)
        for path in old.iterdir():
            path.unlink()
        old.rmdir()
    else:
        temporary.rename(folder)


def load_draft(folder: Path, target: TargetSpec | None = None) -> Draft:
    """Read a draft folder written by save_draft. `target`, when given, must have the sizes the draft was made for."""
    folder = Path(folder)
    if not (folder / DRAFT_JSON).is_file():
        raise ValueError(f"{folder}: no {DRAFT_JSON} here; expected a draft folder such as runs/NAME/step-300/draft")
    about = json.loads((folder / DRAFT_JSON).read_text())
    if about.get("format") != FORMAT:
        raise ValueError(f"{folder}/{DRAFT_JSON}: format {about.get('format')!r}, this version reads format {FORMAT}")
    made_for = TargetSpec.from_dict(about["target"])
    if target is not None:
        check_same_target(made_for, target, str(folder))
    cls = family(about["family"])
    draft = cls(cls.Config(**about["draft"]), made_for)
    tensors = load_file(folder / DRAFT_TENSORS)
    problems = draft.load_state_dict(tensors, strict=False)
    if problems.missing_keys or problems.unexpected_keys:
        raise ValueError(
            f"{folder}/{DRAFT_TENSORS}: missing {problems.missing_keys}, not expected {problems.unexpected_keys}"
        )
    return draft


def check_same_target(made_for: TargetSpec, target: TargetSpec, where: str) -> None:
    """Refuse a target whose sizes differ from those the draft was made for; every differing field is named."""
    fields = ("num_layers", "hidden_size", "vocab_size")
    wrong = [f for f in fields if getattr(made_for, f) != getattr(target, f)]
    if wrong:
        rows = ", ".join(f"{f} {getattr(made_for, f)} (this target: {getattr(target, f)})" for f in wrong)
        raise ValueError(
            f"{where}: the draft was made for {made_for.name} with {rows}; give the target it was made for"
        )
