"""MTP: the multi-token-prediction module that a target brings along, read, measured, tuned and given back.

    row t        last hidden z[t] of the target and token x[t+1]: together they stand for position t, anchor t+1
    step 1       u = proj([embed_norm(embedding x[t+1]); hidden_norm(z[t])])      (some families: the other way round)
                 y = block(u)         one decoder layer of the target's own class, with keys and values of its own
                 target's head on norm(y)                                         -> logits for x[t+2]
    step k >= 2  the same with x[t+k] and norm(y) of step k-1 (some families: y) -> logits for x[t+1+k], position t+k-1
    attention    step k of row t sees the step-1 keys of rows <= t of its document and its own steps 2..k

Total loss, K = ttt_steps, c = config.loss, z(k) = {t : loss mask is 1 at x[t+1] .. x[t+1+k], one document}:

    L = sum over k <= K of decay^(k-1) / |z(k)| * sum over t in z(k) of [c_ce ce + c_kl kl + ... + c_lk lk](t, k)

|z(k)| is global: the loop sums `counts` over micro-batches and ranks and hands them to forward, which divides. Rows and
attention spans of training come from models/chains.py.
`propose` receives what the last round committed: rows `captured` [B, N] of target states, ragged by its lengths, and
`tokens` [B, N], each the token that follows its row; the last one is the anchor.
Saved are the module's weights; export puts them back under the checkpoint's own names. The target is frozen; only its last hidden is
needed, so a module can be trained from captured states on a machine that could never hold the target.

What differs between families stands in STYLES, as vLLM 0.32 computes it: that is what a tuned module will meet. Every
fact is proven by tests/test_mtp.py with checkpoints whose acceptance is known in advance, and in vLLM by
tests/vllm/test_vllm_mtp.py. Several modules are used as a server does: `modules: first` takes module 0 at every step
(vLLM's V1 runner), `modules: each` takes module k at step k, always at position t (its V2 runner).

Sources: DeepSeek-V3 report (arXiv 2412.19437, section 2.2); FastMTP (arXiv 2509.18362) for the recursion and decay.
Shapes: B batch, T tokens, D width, H query heads, G key heads, E head width, K proposals, V target vocabulary,
M context rows, N rows of a step, S slots of a cache.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from draftsmith.models.chains import Plan, by_documents, supervised_steps
from draftsmith.models.draft import (
    Batch,
    Captured,
    Draft,
    DraftConfig,
    Needs,
    Proposal,
    SlotProbs,
    TargetSpec,
    Term,
    TokenStats,
)
from draftsmith.models.layers import Span, chain_attention, matmul_dtype
from draftsmith.models.losses import Distilled, Mix, Teacher, distill
from draftsmith.models.mtp_checkpoint import REPORT, Checkpoint
from draftsmith.models.sampling import Sampler

LOSSES = ("ce", "kl", "tv", "nla", "lk")
ATTENTION = "draftsmith_mtp"  # the name under which our attention is known to transformers' layers


class MtpConfig(DraftConfig):
    """The `draft:` section of an MTP recipe."""

    family: Literal["mtp"] = "mtp"
    init: Literal["checkpoint", "new"] = "checkpoint"  # the module that the files hold, or one for a target without
    checkpoint: str | None = None  # folder or Hub id whose MTP tensors are read; None: the target's own
    modules: Literal["first", "each"] = "first"  # of several: the first at every step, or module k at step k
    init_std: float = Field(0.02, gt=0)  # of the random matrices of a new module
    ttt_steps: int = Field(3, ge=1)  # steps unrolled in training, FastMTP's K; servers run K of 1 to 5
    position_decay: float = Field(0.6, gt=0, le=1)  # weight of step k is this to the power k - 1, as in FastMTP
    loss: dict[str, float] = {"kl": 1.0}  # weights over ce, kl, tv, nla, lk; FastMTP itself takes ce
    lk_eta: float | None = Field(None, gt=0)  # how fast lk goes over from kl to tv; 3 when lk is used

    @field_validator("loss")
    @classmethod
    def _known_losses(cls, loss: dict[str, float]) -> dict[str, float]:
        unknown = sorted(set(loss) - set(LOSSES))
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is not a loss; known losses: {', '.join(LOSSES)}")
        if any(weight < 0 for weight in loss.values()) or not any(loss.values()):
            raise ValueError(f"weights must be >= 0 and one of them > 0, got {loss}")
        return loss

    @model_validator(mode="after")
    def _no_contradictions(self) -> MtpConfig:
        if self.init == "new" and self.checkpoint is not None:
            raise ValueError(f"checkpoint: {self.checkpoint} has no effect with init: new; leave one of them out")
        if self.lk_eta is not None and not self.loss.get("lk"):
            raise ValueError("lk_eta has no effect without loss.lk: leave it out or give lk a weight")
        return self

    @property
    def mix(self) -> Mix:
        return Mix(**self.loss, **({} if self.lk_eta is None else {"lk_eta": self.lk_eta}))


# -- families --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Style:
    """Facts of one family. names: where each part of module {i} stands in the checkpoint, {n} = num_layers + i.

    hidden_first: [hidden; embedding] goes into the projection, else [embedding; hidden].
    zero_first: the embedding beside position 0 is zero. before_norm: the first step is fed with the target's state
    before its final norm. normed: the later steps are fed with the module's state after its own norm. block_type: model
    type whose decoder layer the block is, None = the target's own.
    count: key of the target's config that says how many modules there are. layer: changes to the target's config that
    make its layers of the block's kind. copies: tensors of the module that are the target's own and are not read.
    architecture: the class name by which servers know that the module is there.
    """

    names: Mapping[str, str]
    count: str = "num_nextn_predict_layers"
    hidden_first: bool = False
    zero_first: bool = True
    before_norm: bool = False
    normed: bool = True
    block_type: str | None = None
    layer: Mapping[str, Any] = field(default_factory=dict)
    copies: tuple[str, ...] = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")
    most: int | None = None
    architecture: str | None = None

    @property
    def prefixes(self) -> tuple[str, ...]:
        return tuple(self.names.values())


_QWEN = Style(
    names={
        "embed_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden",
        "proj": "mtp.fc",
        "norm": "mtp.norm",
        "block": "mtp.layers.{i}",
    },
    zero_first=False,
    layer={"layer_types": "full_attention"},
    most=1,  # the norms and the projection have no index
)
_DEEPSEEK = Style(
    names={
        "embed_norm": "model.layers.{n}.enorm",
        "hidden_norm": "model.layers.{n}.hnorm",
        "proj": "model.layers.{n}.eh_proj",
        "norm": "model.layers.{n}.shared_head.norm",
        "block": "model.layers.{n}",
    },
    layer={"first_k_dense_replace": 0},
)
_GLM = Style(names=_DEEPSEEK.names, layer=_DEEPSEEK.layer, normed=False)
_MIMO = Style(
    names={
        "embed_norm": "model.mtp_layers.{i}.token_layernorm",
        "hidden_norm": "model.mtp_layers.{i}.hidden_layernorm",
        "proj": "model.mtp_layers.{i}.input_proj",
        "norm": "model.mtp_layers.{i}.final_layernorm",
        "block": "model.mtp_layers.{i}",
    },
    hidden_first=True,
    before_norm=True,
    layer={"layer_types": "full_attention"},
    architecture="MiMoForCausalLM",
)
_ERNIE = Style(  # no norm in front of the head; RoPE turns halves, though the trunk's turns neighbours
    names={
        "embed_norm": "model.mtp_emb_norm.{i}",
        "hidden_norm": "model.mtp_hidden_norm.{i}",
        "proj": "model.mtp_linear_proj.{i}",
        "block": "model.mtp_block.{i}",
    },
    block_type="llama",
    most=1,
)
STYLES: dict[str, Style] = {  # by the text config's model_type
    "qwen3_5_text": Style(**{**vars(_QWEN), "count": "mtp_num_hidden_layers"}),
    "qwen3_5_moe_text": Style(**{**vars(_QWEN), "count": "mtp_num_hidden_layers"}),
    "qwen3_next": Style(
        **{**vars(_QWEN), "layer": {"layer_types": "full_attention", "mlp_only_layers": [], "decoder_sparse_step": 1}}
    ),
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _GLM,
    "qwen2": _MIMO,  # MiMo's trunk is a Qwen2 (models/target.py)
    "ernie4_5_moe": _ERNIE,
}


def style_of(target: TargetSpec) -> Style:
    if target.model_type not in STYLES:
        raise ValueError(
            f"draft.family mtp: no server reads MTP tensors for a {target.model_type} target ({target.name}); known: "
            f"{', '.join(STYLES)}. Train an eagle3 or dflash draft for it"
        )
    return STYLES[target.model_type]


def num_modules(target: TargetSpec) -> int:
    """How many modules the target's config announces; 1 when it says nothing."""
    return int(target.text_config.get(style_of(target).count) or 1)


# -- network ---------------------------------------------------------------------------------------------------------
class Module(nn.Module):
    """Two norms, a projection, one decoder layer of the target's class, and (Ernie: not) a norm for the head."""

    norm: nn.Module | None

    def __init__(self, core: Any, index: int, style: Style, size: int, eps: float):
        super().__init__()
        norm = type(core.norm)
        self.embed_norm: nn.Module = norm(size, eps=eps)
        self.hidden_norm: nn.Module = norm(size, eps=eps)
        self.proj = nn.Linear(2 * size, size, bias=False)
        self.block: nn.Module = core.layers[index]
        self.norm = norm(size, eps=eps) if "norm" in style.names else None
        self.style = style
        words = inspect.signature(self.block.forward).parameters
        self._cache_word = "cache" if "cache" in words else "past_key_values"  # renamed after transformers 5.19

    def forward(
        self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], positions: Tensor, cache: Any, seen: Any
    ) -> tuple[Tensor, Tensor]:
        """(what goes into the head, what goes into the next step), [B, N, D] each, like embedded and hidden.

        seen: what the block's attention takes as its mask: a bool tensor [B, 1, N, S], or Seen in training.
        """
        if self.style.zero_first:
            embedded = torch.where(positions[..., None] == 0, 0.0, embedded)
        halves = [self.embed_norm(embedded), self.hidden_norm(hidden)]
        u = self.proj(torch.cat(halves[::-1] if self.style.hidden_first else halves, -1))
        y = self.block(
            u, attention_mask=seen, position_ids=positions, position_embeddings=rope, **{self._cache_word: cache}
        )
        normed = y if self.norm is None else self.norm(y)
        return normed, normed if self.style.normed else y


class Seen(NamedTuple):
    """What the queries of one training step see. spans: of the prefix, whose keys are the first `context`.

    chain: for each later step up to this one, the places [N] of the queries' own keys behind the prefix.
    """

    context: int
    spans: list[Span]
    chain: list[Tensor]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, N, E], key and value [B, G, S, E] -> [B, N, H, E]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not isinstance(attention_mask, Seen):
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return out, None
    dtype, width, value_width = matmul_dtype(query), query.shape[-1], value.shape[-1]
    if scaling is not None:
        query = query * (scaling * width**0.5)  # chain_attention divides by the root of the width
    value = F.pad(value, (0, width - value_width))  # MLA: narrower than the keys
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))  # rows first
    prefix, chain = slice(attention_mask.context), None
    if attention_mask.chain:
        chain = torch.stack(attention_mask.chain, 1)  # [N, s]
    own_k, own_v = (None, None) if chain is None else (k[chain], v[chain])
    out = chain_attention(q, k[prefix], v[prefix], own_k, own_v, attention_mask.spans)
    return out[None, ..., :value_width], None


class _Keys:
    """The cache of a training pass: every call appends rows, and the attention sees all of them."""

    def __init__(self) -> None:
        self.held: tuple[Tensor, Tensor] | None = None

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.held is not None:
            k, v = torch.cat([self.held[0], k], 2), torch.cat([self.held[1], v], 2)
        self.held = k, v
        return k, v


class Rows:
    """Keys and values of the modules while decoding, one ragged row per sequence.

    `lengths` [B] counts committed entries; entries behind them are speculative and are overwritten before anything can
    see them. A pass says with `at` [B, N] where its rows stand; all positions are below `limit`. history: states and
    tokens of all rows, for `modules: each`, whose later modules see tokens that are committed rounds later.
    """

    def __init__(self, num_modules: int, batch_size: int, max_len: int, device: torch.device):
        self.held: list[tuple[Tensor, Tensor] | None] = [None] * num_modules
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.longest = 0  # no row is longer; kept on the host, so that nothing waits for the device
        self.room = max_len
        self.at, self.limit = torch.zeros(batch_size, 0, dtype=torch.int64, device=device), 0
        self.history: tuple[Tensor, Tensor] | None = None
        self.every = torch.arange(batch_size, device=device)[:, None]

    def place(self, at: Tensor, limit: int) -> Tensor:
        """Announce a pass over rows at `at`; returns its mask [B, 1, N, limit]."""
        self.at, self.limit = at, limit
        return (torch.arange(limit, device=at.device) <= at[..., None])[:, None]

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """[B, G, N, E] at the announced places; returns everything below the limit."""
        held = self.held[layer_idx]
        if held is None:
            held = k.new_zeros(*k.shape[:2], self.room, k.shape[3]), v.new_zeros(*v.shape[:2], self.room, v.shape[3])
        if held[0].shape[2] < self.limit:
            grow = max(self.limit - held[0].shape[2], held[0].shape[2] // 2)
            held = F.pad(held[0], (0, 0, 0, grow)), F.pad(held[1], (0, 0, 0, grow))
        for buffer, new in zip(held, (k, v), strict=True):
            buffer[self.every, :, self.at] = new.transpose(1, 2).to(buffer.dtype)
        self.held[layer_idx] = held
        return held[0][:, :, : self.limit], held[1][:, :, : self.limit]

    def commit(self, num: Tensor, most: int) -> None:
        """The next num [B] <= most entries of each row, already written, are committed."""
        self.lengths = self.lengths + num
        self.longest += most


LAYER_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps"),
    *("rope_parameters", "max_position_embeddings"),
)  # what a dense layer needs to know, whatever its class


def _core(target: TargetSpec, style: Style, num: int) -> Any:
    """transformers' decoder of the target's own kind with `num` layers of the kind that MTP blocks are."""
    from transformers import AutoConfig, AutoModel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if not target.text_config:
        raise ValueError(f"{target.name}: its sizes were stored without its config; load the target and make them anew")
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
    values = dict(target.text_config) | dict(style.layer)
    if isinstance(values.get("layer_types"), str):
        values["layer_types"] = [values["layer_types"]] * num
    values |= {"num_hidden_layers": num, "vocab_size": 2, "pad_token_id": None}
    values |= {"bos_token_id": None, "eos_token_id": None}
    values.pop("model_type", None)
    config = AutoConfig.for_model(target.model_type, **values)
    if style.block_type is not None:
        sizes = {key: getattr(config, key) for key in LAYER_SIZES} | {"head_dim": target.head_dim}
        config = AutoConfig.for_model(style.block_type, **values | sizes)
    with torch.random.fork_rng(devices=[]):
        core = AutoModel.from_config(config, attn_implementation="sdpa")
    core.config._attn_implementation = ATTENTION
    return core


class Mtp(Draft):
    Config = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig, target: TargetSpec):
        super().__init__(config, target)
        self.style = style_of(target)
        have = num_modules(target)
        if self.style.most is not None and have > self.style.most:
            raise ValueError(f"{target.name}: {have} MTP modules; a {target.model_type} target has {self.style.most}")
        num = have if config.modules == "each" else 1
        if config.modules == "each":
            self.max_proposal = num
            if config.ttt_steps > num:
                raise ValueError(
                    f"draft.ttt_steps {config.ttt_steps}: with modules: each a step is a module, and {target.name} has "
                    f"{num}; lower ttt_steps or take modules: first"
                )
        self.needs = Needs(aux_layers=(), last_hidden=True)
        self.pretrained = config.init == "checkpoint"
        self.mix = config.mix
        self.work_per_token = float(config.ttt_steps)
        core = _core(target, self.style, num)
        self._rope = [core.rotary_emb]  # in a list: frequencies are no weights and stay fp32 whatever we are cast to
        self.mtp = nn.ModuleList(Module(core, i, self.style, target.hidden_size, target.norm_eps) for i in range(num))

    def initialise(self, stats: TokenStats | None, generator: torch.Generator) -> None:
        """Take the module out of the checkpoint, or make a new one."""
        if self.config.init == "checkpoint":
            self.load_checkpoint(Checkpoint.open(self.config.checkpoint or self.target.name, self.target.revision))
            return
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    noise = torch.randn(parameter.shape, generator=generator, device=generator.device)
                    parameter.copy_(noise * self.config.init_std)
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
            for step in range(len(self.mtp)):
                norm = self.module(step).norm
                if norm is not None and self.target_norm is not None:
                    self._set_gains(norm, self.target_norm)

    @staticmethod
    def _set_gains(norm: Any, gains: Tensor) -> None:
        """Gains as the norm stores them: w, or w - 1 in families that multiply by 1 + w."""
        norm.weight.zero_()
        offset = norm(torch.ones_like(norm.weight))  # 0 for w, 1 for 1 + w
        norm.weight.copy_(gains.to(norm.weight.device) - offset.round())

    # -- the checkpoint's names ----------------------------------------------------------------------------------
    def load_checkpoint(self, source: Checkpoint) -> None:
        """Fill every weight from the MTP tensors of a checkpoint; what is missing or unknown is named."""
        prefixes = [
            p + "." for i in range(len(self.mtp)) for p in checkpoint_names(self.style, self.target, i).values()
        ]
        names = source.names(prefixes)
        if not names:
            raise ValueError(
                f"{source.name}: no MTP tensors under {', '.join(sorted(prefixes))}; set draft.init: new to train a "
                f"module for it, or draft.checkpoint to where they are"
            )
        self.load_named(source.read(names), source.name)

    def load_named(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Fill every weight from tensors under the checkpoint's names."""
        ours = from_checkpoint(tensors, self.style, self.target, len(self.mtp))
        problems = self.load_state_dict(ours, strict=False)
        if problems.missing_keys or problems.unexpected_keys:
            raise ValueError(
                f"{where}: the MTP module lacks {problems.missing_keys}, not expected {problems.unexpected_keys}"
            )

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The weights under the checkpoint's own names, experts one by one."""
        return to_checkpoint(self.state_dict(), self.style, self.target)

    # -- shared by training and decoding -------------------------------------------------------------------------
    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        rows = self.embedding[tokens].to(dtype)
        return rows if self.target.embedding_scale == 1.0 else rows * self.target.embedding_scale

    def states(self, last_hidden: Tensor) -> Tensor:
        """What the first step is fed with, from the target's last hidden [..., D].

        Where that is the state before the final norm, dividing by the norm's gains gives it up to its length, and the
        norm that reads it takes the length away. So captured last hidden states are enough for every family.
        """
        states = last_hidden.to(self._dtype)
        if not self.style.before_norm:
            return states
        if self.target_norm is None:
            raise ValueError(
                f"{self.target.model_type}: the MTP module reads states before the final norm; bind its gains"
            )
        gains = self.target_norm.to(states.device, torch.float32)
        return (states.float() / gains.masked_fill(gains == 0, torch.inf)).to(states.dtype)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin as the target's layers take them, for positions [B, N]."""
        with torch.autocast(positions.device.type, enabled=False):
            return self._rope[0](torch.empty(0, dtype=dtype, device=positions.device), positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's head, [..., D] -> [..., V]; takes its own last hidden and ours alike."""
        logits = F.linear(hidden.to(self.target_head.dtype), self.target_head)
        cap = self.target.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def module(self, step: int) -> Module:
        """The module of a step, 0-based."""
        found = self.mtp[step if self.config.modules == "each" else 0]
        assert isinstance(found, Module)
        return found

    @property
    def _dtype(self) -> torch.dtype:
        return self.module(0).proj.weight.dtype

    # -- training ----------------------------------------------------------------------------------------------
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """{"step0": |z(1)|, "step1": |z(2)|, ...}"""
        num_steps = self._num_steps(batch)
        device = batch.input_ids.device
        return {
            f"step{s}": torch.tensor(float((num_steps > s).sum()), device=device) for s in range(self.config.ttt_steps)
        }

    def forward(self, batch: Batch, denominators: dict[str, Tensor]) -> dict[str, Term]:
        """The loss, and metrics per 0-based step s: loss_<s>, match_<s> (the best token is the one that follows),
        overlap_<s> (sum of min(p, q), the chance that a sampled proposal is accepted)."""
        num_steps = self._num_steps(batch)
        rows = np.flatnonzero(num_steps)
        if not len(rows):
            return self._nothing_supervised(batch.input_ids.device)
        plan = Plan.of(rows, num_steps[rows], batch.bounds, batch.input_ids.device)
        hidden = self._unroll(batch, plan)
        weights = [
            (self.config.position_decay**s / denominators[f"step{s}"].clamp_min(1).float()).expand(len(h))
            for s, h in enumerate(hidden)
        ]
        dtype = matmul_dtype(hidden[0])
        teacher = None
        if self.mix.needs_teacher:
            assert batch.last_hidden is not None  # _unroll has read it
            head = self.target_head.to(dtype)
            teacher = Teacher(batch.last_hidden[plan.teachers], head, None, self.target.logit_softcap)
        found = distill(
            torch.cat(hidden),
            torch.cat([step.teachers for step in plan.steps]),
            torch.cat([self._labels(batch, plan, s) for s in range(len(plan.steps))]),
            self.target_head.to(dtype),
            teacher,
            self.mix,
            weights=torch.cat(weights),
            softcap=self.target.logit_softcap,
        )
        return self._terms(found, [len(h) for h in hidden])

    def _num_steps(self, batch: Batch) -> np.ndarray:
        return supervised_steps(batch.loss_mask.cpu().numpy(), batch.bounds, self.config.ttt_steps)

    def _labels(self, batch: Batch, plan: Plan, s: int) -> Tensor:
        """[N] tokens that 0-based step s predicts."""
        return batch.input_ids[plan.context[plan.rows[plan.steps[s].rows]] + 2 + s]

    def _unroll(self, batch: Batch, plan: Plan) -> list[Tensor]:
        """What goes into the head, [N, D] for each step of the plan."""
        if batch.last_hidden is None:
            raise ValueError("batch.last_hidden is None; an MTP module reads the target's last hidden state")
        dtype = matmul_dtype(self.module(0).proj.weight)
        context, positions = plan.context, batch.positions[plan.context]
        every = Seen(len(context), plan.prefix, [])
        each = self.config.modules == "each"
        hidden: list[Tensor] = []
        state = self.states(batch.last_hidden[context]).to(dtype)
        cache, chain, behind = _Keys(), list[Tensor](), len(context)
        for s, step in enumerate(plan.steps):
            wanted = plan.rows[step.rows]  # [N] context rows of this step
            if s == 0 or each:  # all rows, because they are seen; tokens past a document's end reach no wanted row
                tokens = batch.input_ids[(context + 1 + s).clamp_max(len(batch.input_ids) - 1)]
                x, at, seen = state, positions, every
                cache = _Keys()
            else:
                tokens, at = batch.input_ids[context[wanted] + 1 + s], positions[wanted] + s
                x = state[wanted] if s == 1 else state[step.kept]
                own = torch.arange(behind, behind + len(wanted), device=wanted.device)
                chain, behind = [*(places[step.kept] for places in chain), own], behind + len(wanted)
                seen = Seen(len(context), step.spans, chain)
            embedded = self.embed(tokens, dtype)
            out, fed = self.module(s)(embedded[None], x[None], self.rope(at[None], dtype), at[None], cache, seen)
            state = fed[0]
            hidden.append(out[0][wanted] if len(out[0]) == len(context) and (s == 0 or each) else out[0])
        return hidden

    def _terms(self, found: Distilled, sizes: Sequence[int]) -> dict[str, Term]:
        """Terms of the steps; a step without rows counts zero, so that every batch has the same names."""
        one = found.loss.new_ones(())
        assert found.total is not None
        terms = {"loss": Term(found.total, one)}
        metrics = {"loss_": found.loss, "match_": found.match}
        if found.alpha is not None:
            metrics["overlap_"] = found.alpha
        for name, rows in metrics.items():
            sums = [part.detach().sum() for part in rows.split(list(sizes))]
            for s in range(self.config.ttt_steps):
                empty = s >= len(sizes)
                terms[f"{name}{s}"] = Term(one * 0 if empty else sums[s], one * (0 if empty else sizes[s]))
        return terms

    def _nothing_supervised(self, device: torch.device) -> dict[str, Term]:
        """A loss of zero that still reaches every trainable tensor, so that no rank waits for a gradient."""
        loss = sum((p.flatten()[0] * 0.0 for p in self.parameters() if p.requires_grad), torch.zeros((), device=device))
        empty = torch.zeros(0, device=device)
        return self._terms(Distilled(loss, empty, empty, empty, empty if self.mix.needs_teacher else None), [])

    # -- decoding ----------------------------------------------------------------------------------------------
    def start(self, batch_size: int, max_len: int) -> Rows:
        return Rows(len(self.mtp), batch_size, max_len, self.module(0).proj.weight.device)

    @torch.no_grad()
    def propose(self, state: Rows, tokens: Tensor, captured: Captured, num: int, sampler: Sampler) -> Proposal:
        assert captured.last_hidden is not None, "MTP reads last hidden states; the runtime asks for draft.needs"
        ids: list[Tensor] = []
        probs: list[Tensor] = []

        def choose(hidden: Tensor) -> Tensor:
            """The next proposal [B] of states [B, D], noted."""
            logits = self.logits(hidden)
            if sampler.greedy or not sampler.draft_sampling:
                ids.append(logits.argmax(-1))
            else:
                probs.append(sampler.probs(logits))
                ids.append(sampler.draw(probs[-1]))
            return ids[-1]

        states = self.states(captured.last_hidden)
        if self.config.modules == "each":
            self._propose_each(state, tokens, states, captured.lengths, num, choose)
        else:
            self._propose_first(state, tokens, states, captured.lengths, num, choose)
        offered = torch.full_like(captured.lengths, num)
        return Proposal(torch.stack(ids, 1), torch.stack(probs, 1) if probs else None, offered)

    def _propose_first(self, state: Rows, tokens: Tensor, hidden: Tensor, new: Tensor, num: int, choose: Any) -> None:
        """One module at every step: committed rows from real states, then a chain of its own rows."""
        most = tokens.shape[1]
        at = state.lengths[:, None] + torch.arange(most, device=tokens.device)
        out, fed = self._pass(0, state, tokens, hidden, at, state.longest + most)
        state.commit(new, most)
        last = state.every, (new - 1).clamp_min(0)[:, None]
        out, fed = out[last], fed[last]  # [B, 1, D]
        for k in range(num):
            token = choose(out[:, 0])
            if k + 1 < num:  # speculative: written behind the committed entries, never committed
                at = (state.lengths + k)[:, None]
                out, fed = self._pass(0, state, token[:, None], fed, at, state.longest + k + 1)

    def _propose_each(self, state: Rows, tokens: Tensor, hidden: Tensor, new: Tensor, num: int, choose: Any) -> None:
        """Module k at step k, at the rows' own positions. Row p of module k reads token p + 1 + k, which is committed
        only k tokens later, so the last rows of every module are done again each round."""
        batch_size, most = tokens.shape
        again = len(self.mtp) - 1
        at = state.lengths[:, None] + torch.arange(most, device=tokens.device)
        old_states, old_tokens = self._history(state, hidden, state.longest + most + num)
        old_states[state.every, at], old_tokens[state.every, at] = hidden, tokens
        first = (state.lengths - again).clamp_min(0)
        last = state.lengths + new - 1
        state.commit(new, most)
        rows = first[:, None] + torch.arange(most + again, device=tokens.device)
        fed, limit = old_states[state.every, rows], int(rows.max()) + 1
        pick = state.every[:, 0], (last - first).clamp_min(0)
        for k in range(num):
            out, fed = self._pass(k, state, old_tokens[state.every, rows + k], fed, rows, limit)
            old_tokens[pick[0], last.clamp_min(0) + 1 + k] = choose(out[pick])

    def _history(self, state: Rows, hidden: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Buffers of all rows' states [B, S, D] and tokens [B, S], with room for `size` rows and re-read ones."""
        size += 2 * len(self.mtp)
        if state.history is None:
            shape = hidden.shape[0], max(size, state.room)
            state.history = hidden.new_zeros(*shape, hidden.shape[2]), state.lengths.new_zeros(shape)
        if state.history[0].shape[1] < size:
            grow = max(size - state.history[0].shape[1], state.history[0].shape[1] // 2)
            state.history = F.pad(state.history[0], (0, 0, 0, grow)), F.pad(state.history[1], (0, grow))
        return state.history

    def _pass(
        self, k: int, state: Rows, tokens: Tensor, hidden: Tensor, at: Tensor, limit: int
    ) -> tuple[Tensor, Tensor]:
        """Step k over rows at `at` [B, N] < limit: (what goes into the head, what is fed back), [B, N, D] each."""
        seen = state.place(at, limit)
        embedded = self.embed(tokens, hidden.dtype)
        return self.module(k)(embedded, hidden, self.rope(at, hidden.dtype), at, state, seen)

    @torch.no_grad()
    def slot_probs(self, batch: Batch, anchors: Tensor, num: int, sampler: Sampler) -> Iterator[SlotProbs]:
        """Chains of `num` steps, which may be more than were trained, through the training pass. See SlotProbs.

        Anchors come back in ascending order. The first token of a document has no state before it: it is refused.
        """
        wanted = np.unique(anchors.cpu().numpy())
        starts, ends = np.asarray(batch.bounds[:-1]), np.asarray(batch.bounds[1:])
        doc = np.searchsorted(starts, wanted, side="right") - 1
        first = wanted[(wanted <= starts[doc]) | (wanted >= ends[-1])]
        if len(first):
            raise ValueError(
                f"anchors {first[:8].tolist()} have no states before them or lie outside the batch; documents have "
                f"the bounds {batch.bounds}, so anchors go from start + 1 to end - 1"
            )
        num_steps = np.minimum(num, ends[doc] - 1 - wanted)
        for part in by_documents(doc, 512):
            yield self._slot_probs(batch, wanted[part], num_steps[part], num, sampler)

    def _slot_probs(
        self, batch: Batch, anchors: np.ndarray, num_steps: np.ndarray, num: int, sampler: Sampler
    ) -> SlotProbs:
        device = batch.input_ids.device
        draft, target, overlap = (torch.zeros(len(anchors), num, device=device) for _ in range(3))
        argmax = torch.full((len(anchors), num), -1, dtype=torch.int64, device=device)
        found = SlotProbs(torch.from_numpy(anchors).to(device), draft, target, argmax, overlap)
        live = np.flatnonzero(num_steps)
        if not len(live):
            return found
        plan = Plan.of(anchors[live] - 1, num_steps[live], batch.bounds, device)
        hidden = self._unroll(batch, plan)
        assert batch.last_hidden is not None
        size = max(2**24 // self.target.vocab_size, 16)
        for s, step in enumerate(plan.steps):
            follows = self._labels(batch, plan, s)[:, None]
            teachers = batch.last_hidden[plan.teachers[step.teachers].to(device)]
            for begin in range(0, len(follows), size):
                part = slice(begin, begin + size)
                p = sampler.probs(self.logits(teachers[part]))
                logits = self.logits(hidden[s][part])
                q = sampler.probs(logits)
                into = torch.from_numpy(live).to(device)[step.rows[part]], s
                draft[into] = q.gather(1, follows[part])[:, 0]
                target[into] = p.gather(1, follows[part])[:, 0]
                argmax[into] = logits.argmax(-1)
                overlap[into] = torch.minimum(q, p).sum(-1)
        return found

    # -- export ------------------------------------------------------------------------------------------------
    def neutral(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config: family, ttt_steps, training, and target_keys, what the target's config must say so that servers find
        the module; tensors under the checkpoint's own names. There is no format of its own: models/export.py puts them
        back into the target's checkpoint."""
        config = self.config.model_dump(mode="json")
        keys: dict[str, Any] = {}
        if self.config.init == "new":
            keys = {self.style.count: len(self.mtp)}
            keys |= {"architectures": [self.style.architecture]} if self.style.architecture else {}
        about = {"family": "mtp", "ttt_steps": config["ttt_steps"], "training": config, "target_keys": keys}
        return about, self.checkpoint_tensors()

    @classmethod
    def from_neutral(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetSpec) -> Mtp:
        draft = cls(MtpConfig(**config["training"]), target)
        draft.load_named(tensors, target.name)
        return draft

    @classmethod
    def from_target(cls, folder: Path, target: TargetSpec) -> Mtp | None:
        """The module in an export of ours, or in a target as it came."""
        itself = str(folder) == target.name
        if target.model_type not in STYLES or not (itself or (folder / "config.json").is_file()):
            return None
        style = style_of(target)
        source = Checkpoint.open(str(folder), target.revision if itself else None)
        if not source.names(name + "." for name in checkpoint_names(style, target, 0).values()):
            return None
        report = folder / REPORT
        training = json.loads(report.read_text(encoding="utf-8"))["training"] if report.is_file() else {}
        draft = cls(MtpConfig(**{**training, "init": "checkpoint", "checkpoint": str(folder)}), target)
        draft.load_checkpoint(source)
        return draft


# -- names of the checkpoint -----------------------------------------------------------------------------------------
def checkpoint_names(style: Style, target: TargetSpec, index: int) -> dict[str, str]:
    """{part of a module: its prefix in the checkpoint} for module `index`."""
    return {part: name.format(i=index, n=target.num_layers + index) for part, name in style.names.items()}


EXPERT = re.compile(r"(.*\bmlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def from_checkpoint(tensors: Mapping[str, Tensor], style: Style, target: TargetSpec, num: int) -> dict[str, Tensor]:
    """Our names for tensors under the checkpoint's names; experts stored one by one are stacked, as transformers does.

    A name that no part owns keeps its name, so that whoever loads the result sees that it is not expected.
    """
    prefixes = {
        prefix + ".": f"mtp.{i}.{part}."
        for i in range(num)
        for part, prefix in checkpoint_names(style, target, i).items()
    }
    longest_first = sorted(prefixes, key=len, reverse=True)
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        prefix = next((p for p in longest_first if name.startswith(p)), None)
        ours = name if prefix is None else prefixes[prefix] + name.removeprefix(prefix)
        if ours.endswith(style.copies):
            continue
        expert = EXPERT.fullmatch(ours)
        if expert is None:
            found[ours] = tensor
        else:
            experts.setdefault(expert[1], {}).setdefault(int(expert[2]), {})[expert[3]] = tensor
    for stem, members in experts.items():
        rows = [members[e] for e in sorted(members)]
        found[f"{stem}.gate_up_proj"] = torch.stack([torch.cat([row["gate"], row["up"]]) for row in rows])
        found[f"{stem}.down_proj"] = torch.stack([row["down"] for row in rows])
    return found


def to_checkpoint(tensors: Mapping[str, Tensor], style: Style, target: TargetSpec) -> dict[str, Tensor]:
    """The inverse of from_checkpoint, experts one by one."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        _, index, part, rest = name.split(".", 3)
        theirs = f"{checkpoint_names(style, target, int(index))[part]}.{rest}"
        if theirs.endswith("mlp.experts.gate_up_proj"):
            stem = theirs.removesuffix(".gate_up_proj")
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found |= {f"{stem}.{e}.gate_proj.weight": gate, f"{stem}.{e}.up_proj.weight": up}
        elif theirs.endswith("mlp.experts.down_proj"):
            stem = theirs.removesuffix(".down_proj")
            found |= {f"{stem}.{e}.down_proj.weight": down for e, down in enumerate(tensor)}
        else:
            found[theirs] = tensor
    return found
