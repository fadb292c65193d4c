"""DFlash: a block of tokens from one pass; every layer reads the target's states as extra keys and values.

    context      c[u] = hidden_norm(fc(features[u])), u < a: keys and values of every layer, the same c for all of them
    block        [x[a], mask, ..., mask] at positions a .. a+L-1 through the layers
    attention    a slot sees the context before its anchor and its own block              (models/blocks.py: the mask)
    logits       head(norm(y)) of the slots that predict: L-1 in layout infill, L in layout shifted

Total loss, c = config.loss, z = supervised pairs of a drawn block n (anchor a) and a proposal s = 0, 1, ...: those whose
loss mask is 1 at x[a] .. x[a+1+s], one document:

    L = sum over z of w(n, s) [c_kl kl + c_tv tv + c_nla nla + c_lk lk](n, s) / W
      + sum over k of w(n, s) c_ce ce(n, s) / W_kept,                      k = {(n, s) in z : its label is kept}

    falling   w(n, s) = exp(-s / gamma),   W = sum of w over z,   W_kept = sum of w over k
    dpace     w(n, s) = d expected accepted tokens / d log q(label),   W = |z|,   W_kept = |k|

W and W_kept are global: the loop sums `counts` over micro-batches and ranks and hands them to forward, which divides.
Anchors are drawn in `draw_anchors`, pairs and spans come from `Plan` (both models/blocks.py), losses from
models/losses.py.
`propose` receives what the last round committed: rows `captured` [B, N] of target states, ragged by its lengths, and
`tokens` [B, N], each the token that follows its row; the last one is the anchor.
Decoding keeps the context's keys and values of committed rows in an append-only cache; the rows of a
block lie behind them and are overwritten by the next call. Each round runs the whole block, as it was trained, however
few proposals are asked for. Tokens are kept or dropped by place, never by value: the target may say the mask token.
Aux layer ids count as in the target (0 = embedding, k = after k layers); only models/export.py shifts them for servers.
Saved are the weights below and draft_vocab; embedding and teacher head belong to the target.

Sources: arXiv 2602.06036; the shifted layout as in DeepSpec (arXiv 2607.05147).
Shapes: B batch, T tokens, D target width, A aux layers, H query heads, G key heads, E head width, L block length,
K proposals, V target vocabulary, Vd draft vocabulary, M context rows, N blocks, S slots, P supervised pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from draftsmith.models import vocab
from draftsmith.models.blocks import (
    Layout,
    Plan,
    draw_anchors,
    falling_weights,
    first_slot,
    pace_weights,
    supervised_proposals,
)
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
from draftsmith.models.layers import MLP, Attention, KVCache, RMSNorm, Rope, block_attention, matmul_dtype
from draftsmith.models.losses import Distilled, Mix, Teacher, distill
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import block_aux_layers

LOSSES = ("ce", "kl", "tv", "nla", "lk")
LayerType = Literal["full_attention", "sliding_attention"]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class DFlashConfig(DraftConfig):
    """The `draft:` section of a DFlash recipe. A size of None is the target's."""

    family: Literal["dflash"] = "dflash"
    layout: Layout  # infill: slot k predicts x[a+k]; shifted: x[a+k+1]. Always written: drafts of one fail as the other
    block_len: int = Field(16, ge=2)  # positions of one pass, anchor included; published drafts use 16, 10 and 8
    mask_token_id: int | None = Field(None, ge=0)  # what stands in the open slots; None: chosen from the tokenizer
    aux_layers: tuple[int, ...] | None = None  # target states to read; None: five, evenly spread
    draft_vocab: int | None = Field(None, ge=1)  # tokens that can be proposed; None: all of the target's
    num_layers: int = Field(5, ge=1)  # decoder layers; published drafts have 5, for the largest targets 8
    intermediate_size: int | None = Field(None, ge=1)
    num_heads: int | None = Field(None, ge=1)
    num_kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)
    norm_eps: float | None = Field(None, gt=0)
    rope: dict[str, Any] | None = None  # transformers' rope_parameters; another base than the target's loses acceptance
    max_positions: int | None = Field(None, ge=1)
    qk_norm: bool = True  # norms on query and key heads; servers build Qwen3-style layers for any target
    sliding_window: int | None = Field(None, ge=1)  # positions a slot can look back over, itself included; None: all
    layer_types: tuple[LayerType, ...] | None = None  # which layers slide; None: all of them with a window, else none
    causal: bool | None = None  # slots see only earlier ones of their block; None: on sliding layers, as servers assume
    head: Literal["frozen", "trainable"] = "frozen"  # frozen: the target's own head over its full vocabulary
    init_head: Literal["target", "random"] = "target"  # start a trainable head from the target's rows
    init_norm_scale: float = Field(1.0, gt=0)  # the final norm starts at this times the target's: small first logits
    init_std: float = Field(0.02, gt=0)  # of the random matrices
    anchor_rate: float = Field(0.5, gt=0, le=1)  # share of the possible anchors that is drawn; neighbours learn alike
    position_weights: Literal["falling", "dpace"] = "falling"  # how proposals of a block count; module docstring
    gamma: float | None = Field(None, gt=0)  # of falling weights; None: 7 for blocks over 12, 5 over 8, else 4
    loss: dict[str, float] = {"ce": 1.0}  # weights over ce, kl, tv, nla, lk; ce is DFlash's own loss
    lk_eta: float | None = Field(None, gt=0)  # how fast lk goes over from kl to tv; 3 when lk is used

    @field_validator("aux_layers")
    @classmethod
    def _ascending(cls, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if layers is not None and (not layers or list(layers) != sorted(set(layers)) or layers[0] < 0):
            raise ValueError(f"must be ascending, distinct aux layer ids >= 0 (0 = embedding), got {list(layers)}")
        return layers

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
    def _no_contradictions(self) -> DFlashConfig:
        if self.head == "frozen" and self.draft_vocab is not None:
            raise ValueError(
                f"head: frozen is the target's full head, draft_vocab: {self.draft_vocab} is a reduced one: "
                "use head: trainable or leave draft_vocab out"
            )
        if self.head == "frozen" and self.init_head == "random":
            raise ValueError("init_head: random has no effect with head: frozen: leave it out")
        if self.lk_eta is not None and not self.loss.get("lk"):
            raise ValueError("lk_eta has no effect without loss.lk: leave it out or give lk a weight")
        if self.gamma is not None and self.position_weights == "dpace":
            raise ValueError("gamma has no effect with position_weights: dpace: leave it out")
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types names {len(self.layer_types)} layers, num_layers is {self.num_layers}")
        slides = "sliding_attention" in self.types
        if slides and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention: give sliding_window, in positions")
        if self.sliding_window is not None and not slides:
            raise ValueError(
                "sliding_window has no effect when no layer_types entry is sliding_attention: leave it out"
            )
        if self.sliding_window is not None and self.sliding_window <= self.block_len:
            raise ValueError(
                f"sliding_window {self.sliding_window} must be larger than block_len {self.block_len}: the last slot "
                "would see nothing before its block"
            )
        return self

    @property
    def mix(self) -> Mix:
        return Mix(**self.loss, **({} if self.lk_eta is None else {"lk_eta": self.lk_eta}))

    @property
    def num_proposals(self) -> int:
        return self.block_len - first_slot(self.layout)

    @property
    def falling_gamma(self) -> float:
        """The published pairs: 7 for blocks of 16, 5 for 10, 4 for 8 and 7."""
        if self.gamma is not None:
            return self.gamma
        return 7.0 if self.block_len > 12 else 5.0 if self.block_len > 8 else 4.0

    @property
    def types(self) -> tuple[LayerType, ...]:
        if self.layer_types is not None:
            return self.layer_types
        return ("full_attention" if self.sliding_window is None else "sliding_attention",) * self.num_layers

    @property
    def layer_attention(self) -> list[tuple[bool, int | None]]:
        """(causal, window) of each layer."""
        slides = [kind == "sliding_attention" for kind in self.types]
        return [(s if self.causal is None else self.causal, self.sliding_window if s else None) for s in slides]


# -- network ---------------------------------------------------------------------------------------------------------
class Layer(nn.Module):
    """A decoder layer. Its attention projects block states behind the input norm, and context states as they are."""

    def __init__(self, size: int, intermediate_size: int, attention: Attention, eps: float):
        super().__init__()
        self.self_attn = attention
        self.mlp = MLP(size, intermediate_size)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """attended: [..., H*E]"""
        y = residual + self.self_attn.o_proj(attended)
        return y + self.mlp(self.post_attention_layernorm(y))


class DFlash(Draft):
    Config: ClassVar[type[DFlashConfig]] = DFlashConfig
    config: DFlashConfig
    training_keys: ClassVar[tuple[str, ...]] = (
        "init_head",
        "init_norm_scale",
        "init_std",
        "anchor_rate",
        "position_weights",
        "gamma",
        "loss",
        "lk_eta",
    )

    def __init__(self, config: DFlashConfig, target: TargetSpec):
        super().__init__(config, target)
        size = target.hidden_size
        aux = block_aux_layers(target.num_layers) if config.aux_layers is None else config.aux_layers
        if aux[-1] >= target.num_layers:
            raise ValueError(
                f"draft.aux_layers {list(aux)}: {target.name} has {target.num_layers} layers, so ids go from 0 (the "
                f"embedding) to {target.num_layers - 1}; the state after the last layer is not a feature"
            )
        if config.draft_vocab is not None and config.draft_vocab > target.vocab_size:
            raise ValueError(
                f"draft.draft_vocab {config.draft_vocab} is more than the target's {target.vocab_size} tokens"
            )
        self.mask_token_id = _checked_mask(config.mask_token_id, target)
        self.needs = Needs(aux_layers=tuple(aux), last_hidden=True)
        self.mix = config.mix
        self.max_proposal = config.num_proposals
        self.work_per_token = config.anchor_rate * config.block_len
        self.reduced = config.draft_vocab is not None and config.draft_vocab < target.vocab_size
        num_heads, self.num_kv_heads = config.num_heads or target.num_heads, config.num_kv_heads or target.num_kv_heads
        self.head_dim = config.head_dim or target.head_dim
        self.eps = config.norm_eps or target.norm_eps
        self.intermediate_size = config.intermediate_size or target.intermediate_size
        self.rope_parameters = dict(config.rope or target.rope)
        self.max_positions = config.max_positions or target.max_positions
        self.rope = Rope(self.rope_parameters, self.head_dim, self.max_positions)

        self.fc = nn.Linear(len(aux) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, self.eps)
        self.layers = nn.ModuleList()
        for _ in range(config.num_layers):
            attention = Attention(
                size,
                size,
                num_heads,
                self.num_kv_heads,
                self.head_dim,
                bias=False,
                qk_norm=config.qk_norm,
                eps=self.eps,
            )
            self.layers.append(Layer(size, self.intermediate_size, attention, self.eps))
        self.norm = RMSNorm(size, self.eps)
        if config.head == "trainable":
            self.lm_head = nn.Linear(size, config.draft_vocab or target.vocab_size, bias=False)
        self.draft_vocab: Tensor | None
        kept = torch.arange(config.draft_vocab or 0) if self.reduced else None
        self.register_buffer("draft_vocab", kept)  # [Vd] ascending target ids, None = all

    def initialise(self, stats: TokenStats | None, generator: torch.Generator) -> None:
        config = self.config
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    noise = torch.randn(parameter.shape, generator=generator, device=generator.device)
                    parameter.copy_(noise * config.init_std)
                else:
                    parameter.fill_(1.0)
            gains = torch.ones(()) if self.target_norm is None else self.target_norm
            self.norm.weight.copy_(gains * config.init_norm_scale)
            if self.reduced:
                if stats is None:
                    raise ValueError(
                        f"draft.draft_vocab {config.draft_vocab}: choosing the draft vocabulary needs token counts of "
                        "the training rows, got none"
                    )
                assert self.draft_vocab is not None
                self.draft_vocab.copy_(vocab.choose(stats.expected, len(self.draft_vocab)))
            if config.head == "trainable" and config.init_head == "target":
                self.lm_head.weight.copy_(self.kept_rows(self.target_head))

    @property
    def stack(self) -> list[Layer]:
        return cast("list[Layer]", list(self.layers))

    def kept_rows(self, table: Tensor) -> Tensor:
        """Rows of a [V, ...] table that belong to the draft vocabulary."""
        return table if self.draft_vocab is None else table[self.draft_vocab]

    def fuse(self, features: Tensor) -> Tensor:
        """Features of the aux layers [..., A*D] -> context [..., D], which every layer reads."""
        return self.hidden_norm(self.fc(features))

    def context_keys(self, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each layer's (keys, values) [..., G, E] of the context [..., D] at positions [...]."""
        rope, attentions = self.rope(positions, context.dtype), [layer.self_attn for layer in self.stack]
        return [(a.keys(a.k_proj(context), rope), a.values(a.v_proj(context))) for a in attentions]

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings of target ids, as the target's own layers read them."""
        rows = self.embedding[tokens].to(dtype)
        return rows if self.target.embedding_scale == 1.0 else rows * self.target.embedding_scale

    def blocks(self, anchors: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """What goes into the head, [N, K, D], of blocks that start at tokens `anchors` [N] and `positions` [N].

        attend(i, q, k, v): attention of layer i, of queries [N, S, H, E] of the last S slots over the context and the
        blocks' own keys and values [N, L, G, E]; returns [N, S, H*E].
        """
        length, dtype = self.config.block_len, matmul_dtype(self.fc.weight)
        slots = torch.arange(length, device=positions.device)
        rope = self.rope(positions[:, None] + slots, dtype)
        x = self.embed(torch.cat([anchors, anchors.new_tensor([self.mask_token_id])]), dtype)  # [N + 1, D]
        for i, layer in enumerate(self.stack):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            q, k, v = attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed)
            if i == 0:  # all mask slots are one row until attention tells them apart by position
                x, q, k, v = (_spread(rows, length) for rows in (x, q, k, v))
            first = first_slot(self.config.layout) if i + 1 == len(self.layers) else 0
            q = attention.queries(q[:, first:], (rope[0][:, first:], rope[1][:, first:]))
            attended = attend(i, q, attention.keys(k, rope), attention.values(v))
            x = layer.leave(x[:, first:], attended)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] after the final norm -> [..., Vd]"""
        if self.config.head == "trainable":
            return self.lm_head(hidden)
        return self._softcap(F.linear(hidden.to(self.target_head.dtype), self.target_head))

    def slot_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits [..., Vd] of slots with states `hidden` [..., D]. previous: [...], the token in front of each; slots of
        DFlash do not know it."""
        return self.logits(hidden)

    def target_logits(self, last_hidden: Tensor) -> Tensor:
        """The target's logits over its full vocabulary [..., V]."""
        return self._softcap(F.linear(last_hidden.to(self.target_head.dtype), self.target_head))

    def _softcap(self, logits: Tensor) -> Tensor:
        cap = self.target.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    # -- training ----------------------------------------------------------------------------------------------
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """{"weights": W}; with a ce loss on a reduced vocabulary also {"kept": W_kept}."""
        plan = self._plan(batch)
        names = ["weights", "kept"] if self._counts_kept else ["weights"]
        if plan is None:
            return {name: torch.zeros((), device=batch.input_ids.device) for name in names}
        weights = self._known_weights(plan)
        found = {"weights": weights.sum()}
        if self._counts_kept:
            found["kept"] = weights[self._labels(batch, plan) >= 0].sum()
        return found

    def forward(self, batch: Batch, denominators: dict[str, Tensor]) -> dict[str, Term]:
        """The loss, and metrics per proposal s = 0, 1, ...: loss_<s>, match_<s>, and overlap_<s> or kept_overlap_<s>.

        match: the draft's best token is the one that follows. overlap: sum of min(p, q), the chance that a sampled
        proposal is accepted; kept_overlap: the same with p renormalised over the draft vocabulary, an upper limit,
        reported when the loss does not compute p over the full vocabulary. Neither is reported when the loss is ce
        alone. A label outside the draft vocabulary is a miss.
        """
        plan = self._plan(batch)
        if plan is None:
            return self._nothing_supervised(batch.input_ids.device)
        found, _ = self._distill(batch, plan, self._hidden(batch, plan), denominators)
        return self._terms(found, plan)

    def _plan(self, batch: Batch) -> Plan | None:
        """The blocks of this pass; None when nothing in the batch is supervised."""
        num = supervised_proposals(batch.loss_mask.cpu().numpy(), batch.bounds, self.config.num_proposals)
        anchors = draw_anchors(batch, num, self.config.anchor_rate)
        if not len(anchors):
            return None
        return Plan.of(anchors, num[anchors], batch.bounds, self.config.num_proposals, batch.input_ids.device)

    def _columns(self, ids: Tensor) -> Tensor:
        return vocab.columns(ids, self.draft_vocab)

    @property
    def _counts_kept(self) -> bool:
        return bool(self.mix.ce) and self.reduced

    def _labels(self, batch: Batch, plan: Plan) -> Tensor:
        """[P] draft columns of the tokens that the pairs predict."""
        return self._columns(batch.input_ids[plan.before + 1])

    def _known_weights(self, plan: Plan) -> Tensor:
        """[P] what a pair counts in the denominators."""
        if self.config.position_weights == "dpace":
            return torch.ones(len(plan.pairs), device=plan.pairs.device)
        return falling_weights(plan.pairs % self.config.num_proposals, self.config.falling_gamma)

    def _hidden(self, batch: Batch, plan: Plan) -> Tensor:
        """What goes into the head for each pair of the plan, [P, D]."""
        if batch.features is None:
            raise ValueError(f"batch.features is None; DFlash reads the aux layers {list(self.needs.aux_layers)}")
        features = batch.features[plan.context].to(matmul_dtype(self.fc.weight))
        context = self.context_keys(self.fuse(features), batch.positions[plan.context])

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            causal, window = self.config.layer_attention[i]
            return block_attention(q, *context[i], k, v, plan.spans, causal=causal, window=window).flatten(2)

        hidden = self.blocks(batch.input_ids[plan.anchors], batch.positions[plan.anchors], attend)
        return hidden.flatten(0, 1)[plan.pairs]

    def _distill(
        self,
        batch: Batch,
        plan: Plan,
        hidden: Tensor,
        denominators: dict[str, Tensor],
        bias_features: Tensor | None = None,
        bias_weight: Tensor | None = None,
    ) -> tuple[Distilled, Tensor]:
        """(losses of the pairs with their total, weight / W of each pair)."""
        dtype = matmul_dtype(hidden)
        frozen = self.config.head == "frozen"
        losses = partial(
            distill,
            hidden,
            plan.teacher_index,
            self._labels(batch, plan),
            self.target_head.to(dtype) if frozen else self.lm_head.weight,
            bias_features=bias_features,
            bias_weight=bias_weight,
            softcap=self.target.logit_softcap if frozen else None,
        )
        total = denominators["weights"].clamp_min(1e-6).float()
        scale = (total / denominators["kept"].clamp_min(1e-6)).expand(len(hidden)) if self._counts_kept else None

        weights: Tensor | None = None
        if self.config.position_weights == "falling":
            weights = self._known_weights(plan) / total
        elif not frozen or bias_weight is not None:  # their gradients are formed together with the loss
            with torch.no_grad():
                ce = losses(None, Mix(ce=1.0)).ce
            weights = self._pace_weights(ce, plan) / total
        found = losses(self._teacher(batch, plan, dtype), self.mix, weights=weights, ce_scale=scale)
        if weights is None:
            weights = self._pace_weights(found.ce, plan) / total
            found = found._replace(total=(weights * found.loss).sum())
        return found, weights

    def _pace_weights(self, ce: Tensor, plan: Plan) -> Tensor:
        return pace_weights(ce, plan.pairs, len(plan.anchors), self.config.num_proposals)

    def _teacher(self, batch: Batch, plan: Plan, dtype: torch.dtype) -> Teacher | None:
        if not self.mix.needs_teacher:
            return None
        if batch.last_hidden is None:
            raise ValueError(f"batch.last_hidden is None; the losses {self.config.loss} need the target's distribution")
        full = self.target_head if self.reduced and self.mix.needs_acceptance else None
        head = self.kept_rows(self.target_head).to(dtype)
        return Teacher(batch.last_hidden[plan.teachers], head, full, self.target.logit_softcap)

    def _terms(self, found: Distilled, plan: Plan | None, more: dict[str, Tensor] | None = None) -> dict[str, Term]:
        """Terms per proposal; one that no pair has counts zero. more: {name: [P]} of further metrics."""
        num = self.config.num_proposals
        one = found.loss.new_ones(())
        assert found.total is not None
        terms = {"loss": Term(found.total, one)}
        metrics = {"loss_": found.loss, "match_": found.match} | (more or {})
        if found.alpha is not None:
            metrics["kept_overlap_" if self.reduced and not self.mix.needs_acceptance else "overlap_"] = found.alpha
        for name, rows in metrics.items():
            sums, counts = rows.new_zeros(num), rows.new_zeros(num)
            if plan is not None:
                proposal = plan.pairs % num
                sums.index_add_(0, proposal, rows.detach())
                counts.index_add_(0, proposal, torch.ones_like(rows))
            terms |= {f"{name}{s}": Term(sums[s], counts[s]) for s in range(num)}
        return terms

    def _nothing_supervised(self, device: torch.device) -> dict[str, Term]:
        """A loss of zero that still reaches every trainable tensor, so that no rank waits for a gradient."""
        loss = sum((p.flatten()[0] * 0.0 for p in self.parameters() if p.requires_grad), torch.zeros((), device=device))
        empty = torch.zeros(0, device=device)
        return self._terms(Distilled(loss, empty, empty, empty, empty if self.mix.needs_teacher else None), None)

    # -- decoding ----------------------------------------------------------------------------------------------
    def start(self, batch_size: int, max_len: int) -> KVCache:
        weight, room = self.fc.weight, max_len + self.config.block_len
        return KVCache(
            len(self.layers), batch_size, room, self.num_kv_heads, self.head_dim, weight.dtype, weight.device
        )

    @torch.no_grad()
    def propose(self, state: KVCache, tokens: Tensor, captured: Captured, num: int, sampler: Sampler) -> Proposal:
        assert num <= self.config.num_proposals, f"a block of {self.config.num_proposals} proposals, asked for {num}"
        anchors = tokens.gather(1, (captured.lengths - 1).clamp_min(0)[:, None])[:, 0]
        hidden = self._decode(state, anchors, captured)[:, :num]
        return self._offer(hidden, anchors, sampler)

    def _decode(self, cache: KVCache, anchors: Tensor, captured: Captured) -> Tensor:
        """Append the committed rows to the context and run one block behind it: [B, K, D]."""
        assert captured.features is not None, "DFlash reads features; the runtime asks for draft.needs"
        most, length = captured.features.shape[1], self.config.block_len
        slots = torch.arange(max(most, length), device=anchors.device)
        cache.reserve(most + length)
        at = cache.lengths[:, None] + slots[:most]
        context = self.fuse(captured.features.to(self.fc.weight.dtype))
        for i, (k, v) in enumerate(self.context_keys(context, at)):
            cache.write(i, k, v, at)
        cache.commit(captured.lengths, most)

        at, limit = cache.lengths[:, None] + slots[:length], cache.longest + length  # the block, never committed

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            causal, window = self.config.layer_attention[i]
            q_at = at[:, length - q.shape[1] :]
            last = q_at if causal else at[:, -1:].expand_as(q_at)
            return cache.attend(i, q, k, v, at, last, limit, None if window is None else q_at - window + 1)

        return self.blocks(anchors, cache.lengths, attend)

    def _offer(self, hidden: Tensor, anchors: Tensor, sampler: Sampler) -> Proposal:
        """One token per slot, all at once. hidden: [B, K, D]; anchors: [B]."""
        logits = self.slot_logits(hidden, anchors)  # [B, K, Vd]
        probs = None
        if sampler.greedy or not sampler.draft_sampling:
            columns = logits.argmax(-1)
        else:
            probs = sampler.probs(logits)
            columns = sampler.draw(probs)
        ids = columns if self.draft_vocab is None else self.draft_vocab[columns]
        return Proposal(ids, probs, torch.full_like(anchors, ids.shape[1]), self.draft_vocab)

    @torch.no_grad()
    def slot_probs(self, batch: Batch, anchors: Tensor, num: int, sampler: Sampler) -> Iterator[SlotProbs]:
        """Blocks at `anchors` through the training pass, predecessors taken from the text. See SlotProbs.

        Anchors come back in ascending order. The first token of a document has no features before it: it is refused.
        """
        if num > self.config.num_proposals:
            raise ValueError(f"slot_probs of {num} proposals: a block of this draft has {self.config.num_proposals}")
        wanted = np.unique(anchors.cpu().numpy())
        starts, ends = np.asarray(batch.bounds[:-1]), np.asarray(batch.bounds[1:])
        doc = np.searchsorted(starts, wanted, side="right") - 1
        first = wanted[(wanted <= starts[doc]) | (wanted >= ends[-1])]
        if len(first):
            raise ValueError(
                f"anchors {first[:8].tolist()} have no features before them or lie outside the batch; documents have "
                f"the bounds {batch.bounds}, so anchors go from start + 1 to end - 1"
            )
        num_pairs = np.minimum(num, ends[doc] - 1 - wanted)
        for begin in range(0, len(wanted), 512):
            part = slice(begin, begin + 512)
            yield self._slot_probs(batch, wanted[part], num_pairs[part], num, sampler)

    def _slot_probs(
        self, batch: Batch, anchors: np.ndarray, num_pairs: np.ndarray, num: int, sampler: Sampler
    ) -> SlotProbs:
        device = batch.input_ids.device
        draft, target, overlap = (torch.zeros(len(anchors), num, device=device) for _ in range(3))
        argmax = torch.full((len(anchors), num), -1, dtype=torch.int64, device=device)
        found = SlotProbs(torch.from_numpy(anchors).to(device), draft, target, argmax, overlap)
        if not num_pairs.any():
            return found
        assert batch.last_hidden is not None, "slot probabilities compare with the target: batch.last_hidden"
        plan = Plan.of(anchors, num_pairs, batch.bounds, self.config.num_proposals, device)
        hidden = self._hidden(batch, plan)
        size = max(2**22 // self.target.vocab_size, 16)
        for begin in range(0, len(plan.teachers), size):
            lo, hi = torch.searchsorted(plan.teacher_index, torch.tensor([begin, begin + size])).tolist()
            p = sampler.probs(self.target_logits(batch.last_hidden[plan.teachers[begin : begin + size]]))  # [u, V]
            p = p[(plan.teacher_index[lo:hi] - begin).to(device)]
            before, pairs = plan.before[lo:hi], plan.pairs[lo:hi]
            logits = self.slot_logits(hidden[lo:hi], batch.input_ids[before])
            q = sampler.probs(logits)
            follows = batch.input_ids[before + 1][:, None]
            column = self._columns(follows)
            best = logits.argmax(-1)
            into = pairs // self.config.num_proposals, pairs % self.config.num_proposals
            draft[into] = torch.where(column >= 0, q.gather(1, column.clamp_min(0)), 0.0)[:, 0]
            target[into] = p.gather(1, follows)[:, 0]
            argmax[into] = best if self.draft_vocab is None else self.draft_vocab[best]
            overlap[into] = torch.minimum(q, self._kept_columns(p)).sum(-1)
        return found

    def _kept_columns(self, probs: Tensor) -> Tensor:
        return probs if self.draft_vocab is None else probs[:, self.draft_vocab]

    # -- export ------------------------------------------------------------------------------------------------
    def neutral(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See models/export.py for the form. `training` holds the settings that servers do not ask for."""
        config, attention = self.config, self.stack[0].self_attn
        about = {
            "family": config.family,
            "aux_layers": list(self.needs.aux_layers),
            "layer": {
                "model_type": "qwen3" if config.qk_norm else "llama",
                "hidden_size": self.target.hidden_size,
                "intermediate_size": self.intermediate_size,
                "num_attention_heads": attention.q_proj.out_features // self.head_dim,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "rms_norm_eps": self.eps,
                "hidden_act": "silu",
                "rope_parameters": self.rope_parameters,
                "attention_bias": False,
                "max_position_embeddings": self.max_positions,
                "vocab_size": self.target.vocab_size,
            },
            "num_layers": config.num_layers,
            "layout": config.layout,
            "block_len": config.block_len,
            "mask_token_id": self.mask_token_id,
            "sliding_window": config.sliding_window,
            "layer_types": list(config.types),
            "causal": [causal for causal, _ in config.layer_attention],
            "training": config.model_dump(mode="json", include=set(self.training_keys)),
        }
        return about, {name: tensor.detach() for name, tensor in self.state_dict().items()}

    @classmethod
    def from_neutral(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetSpec) -> DFlash:
        draft = cls(cls.Config(**cls._settings(config, tensors, target)), target)
        draft.load_state_dict(tensors)
        return draft

    @classmethod
    def _settings(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetSpec) -> dict[str, Any]:
        """The `draft:` section that a neutral config stands for."""
        layer, training = config["layer"], dict(config.get("training", {}))
        if layer["hidden_act"] != "silu" or layer["hidden_size"] != target.hidden_size or layer["attention_bias"]:
            raise ValueError(
                f"a {config['family']} draft here has hidden_act silu, no attention_bias and the target's width "
                f"{target.hidden_size}, got {layer['hidden_act']}, {layer['attention_bias']} and {layer['hidden_size']}"
            )
        training["head"] = "trainable" if "lm_head.weight" in tensors else "frozen"
        if training["head"] == "frozen":
            training["init_head"] = "target"
        causal = set(config["causal"])
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        if len(causal) > 1 and config["causal"] != slides:
            raise ValueError(f"causal {config['causal']} must be alike on all layers, or true on the sliding ones only")
        return training | {
            "family": config["family"],
            "layout": config["layout"],
            "block_len": config["block_len"],
            "mask_token_id": config["mask_token_id"],
            "aux_layers": tuple(config["aux_layers"]),
            "draft_vocab": len(tensors["draft_vocab"]) if "draft_vocab" in tensors else None,
            "num_layers": config["num_layers"],
            "intermediate_size": layer["intermediate_size"],
            "num_heads": layer["num_attention_heads"],
            "num_kv_heads": layer["num_key_value_heads"],
            "head_dim": layer["head_dim"],
            "norm_eps": layer["rms_norm_eps"],
            "rope": layer["rope_parameters"],
            "max_positions": layer["max_position_embeddings"],
            "qk_norm": layer["model_type"] == "qwen3",
            "sliding_window": config["sliding_window"],
            "layer_types": tuple(config["layer_types"]),
            "causal": None if len(causal) > 1 else causal.pop(),
        }


def _spread(rows: Tensor, length: int) -> Tensor:
    """[N + 1, X] -> [N, length, X]: the anchors' rows in slot 0, the last row in the others."""
    anchors, mask = rows[:-1, None], rows[-1:, None]
    return torch.cat([anchors, mask.expand(len(anchors), length - 1, -1)], 1)


def _checked_mask(mask_token_id: int | None, target: TargetSpec) -> int:
    if mask_token_id is None:
        raise ValueError(
            f"draft.mask_token_id is not set: blocks need a token of {target.name} that no text uses; "
            "models.blocks.choose_mask_token(tokenizer, target) finds one"
        )
    if mask_token_id >= target.vocab_size:
        raise ValueError(
            f"draft.mask_token_id {mask_token_id}: {target.name} has ids 0..{target.vocab_size - 1}; its embedding "
            "row is what stands in the open slots"
        )
    if mask_token_id in target.eos_ids:
        raise ValueError(
            f"draft.mask_token_id {mask_token_id} ends a text of {target.name}; "
            "choose a token that no text uses (models.blocks.choose_mask_token)"
        )
    return mask_token_id
