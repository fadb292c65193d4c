"""EAGLE-3: a small recursive draft that reads the target's states, trained on its own outputs (training-time test).

    row t             features f[t] of the target and token x[t+1]: together they stand for position t, anchor t+1
    fuse              g = fc([norm(f of aux layer 1); norm(f of aux layer 2); ...])
    step s = 0        y = layers(embedding x[t+1], g)                 -> logits for x[t+2]
    step s >= 1       y = layers(embedding x[t+1+s], y of step s-1)   -> logits for x[t+2+s], RoPE position t+s
    attention         step s of row t sees the step-0 keys of rows <= t of its document and its own steps 1..s

Total loss, S = ttt_steps, c = config.loss, z(s) = rows supervised at step s:

    L = sum over s < S of decay^s / |z(s)| * sum over t in z(s) of [c_kl kl + c_tv tv + c_nla nla + c_lk lk](t, s)
      + sum over s < S of decay^s / |k(s)| * sum over t in k(s) of c_ce ce(t, s)

    z(s) = {t : loss mask is 1 at x[t+1] .. x[t+2+s], one document}      k(s) = {t in z(s) : x[t+2+s] is kept}

|z(s)| and |k(s)| are global: the loop sums `counts` over micro-batches and ranks and hands them to forward, which
divides. The rows z(s) come from `supervised_steps`, the attention spans from `Plan` (both models/chains.py), the losses
from models/losses.py.
`propose` receives what the last round committed: rows `captured` [B, N] of target states, ragged by its lengths, and
`tokens` [B, N], each the token that follows its row; the last one is the anchor.
Decoding keeps one KV cache: real rows are committed, speculative rows are forgotten because the cache's lengths stay.
Aux layer ids count as in the target (0 = embedding, k = after k layers); only models/export.py shifts them for servers.
Saved are the weights below and draft_vocab; embedding and teacher head belong to the target.

Sources: arXiv 2503.01840; fc_norm and norm_output as in EAGLE-3.1 (vLLM blog, 2026-05-26).
Shapes: B batch, T tokens, D target width, A aux layers, H query heads, G key heads, E head width, K proposals,
V target vocabulary, Vd draft vocabulary, M context rows, N rows of a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from draftsmith.models import vocab
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
from draftsmith.models.layers import (
    MLP,
    Attention,
    ChainKeys,
    KVCache,
    RMSNorm,
    Rope,
    chain_attention,
    matmul_dtype,
)
from draftsmith.models.losses import Distilled, Mix, Teacher, distill
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import default_aux_layers

LOSSES = ("ce", "kl", "tv", "nla", "lk")


class Eagle3Config(DraftConfig):
    """The `draft:` section of an EAGLE-3 recipe. A size of None is the target's."""

    family: Literal["eagle3"] = "eagle3"
    aux_layers: tuple[int, ...] | None = None  # target states to read; None: (2, N//2, N-3), as servers assume
    draft_vocab: int | None = Field(None, ge=1)  # tokens that can be proposed; None: all of the target's
    num_layers: int = Field(1, ge=1)  # decoder layers; every published EAGLE-3 draft has one
    intermediate_size: int | None = Field(None, ge=1)
    num_heads: int | None = Field(None, ge=1)
    num_kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)
    norm_eps: float | None = Field(None, gt=0)
    rope: dict[str, Any] | None = None  # transformers' rope_parameters; another base than the target's loses acceptance
    max_positions: int | None = Field(None, ge=1)
    attention_bias: bool = False  # bias on q, k, v; published drafts have none
    qk_norm: bool | None = None  # norms on query and key heads; None: where the target is of the Qwen3 kind
    norm_before_residual: bool = False  # the residual starts from the normed state; servers must be told the same
    norm_before_fc: bool = False  # one norm over the concatenated features
    fc_norm: bool = False  # one norm per aux layer (EAGLE-3.1), instead of norm_before_fc
    norm_output: bool = False  # feed the normed state to the next step (EAGLE-3.1): no growth from step to step
    head: Literal["trainable", "frozen"] = "trainable"  # frozen: the target's own head over its full vocabulary
    init_head: Literal["target", "random"] = "target"  # start a trainable head from the target's rows
    init_norm_scale: float = Field(1.0, gt=0)  # the final norm starts at this times the target's: small first logits
    init_std: float = Field(0.02, gt=0)  # of the random matrices
    ttt_steps: int = Field(3, ge=1)  # steps unrolled in training; 3 costs half of the paper's 7 and serves K of 3 to 5
    position_decay: float = Field(0.8, gt=0, le=1)  # weight of step s is this to the power s, as in EAGLE's code
    loss: dict[str, float] = {"kl": 1.0}  # weights over ce, kl, tv, nla, lk; kl is EAGLE-3's own loss
    lk_eta: float | None = Field(None, gt=0)  # how fast lk goes over from kl to tv; 3 when lk is used
    feature_noise: float = Field(0.0, ge=0)  # uniform noise of +- this on the features in training (EAGLE-1: 0.1)

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
    def _no_contradictions(self) -> Eagle3Config:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc (one norm over all features) and fc_norm (one per aux layer) exclude each other: "
                "switch one of them off"
            )
        if self.head == "frozen" and self.draft_vocab is not None:
            raise ValueError(
                f"head: frozen is the target's full head, draft_vocab: {self.draft_vocab} is a reduced one: "
                "use head: trainable or leave draft_vocab out"
            )
        if self.head == "frozen" and self.init_head == "random":
            raise ValueError("init_head: random has no effect with head: frozen: leave it out")
        if self.lk_eta is not None and not self.loss.get("lk"):
            raise ValueError("lk_eta has no effect without loss.lk: leave it out or give lk a weight")
        return self

    @property
    def mix(self) -> Mix:
        return Mix(**self.loss, **({} if self.lk_eta is None else {"lk_eta": self.lk_eta}))


# -- network ---------------------------------------------------------------------------------------------------------
class Layer(nn.Module):
    """A decoder layer. The first reads a state beside an embedding (in_size 2D) and norms both."""

    def __init__(self, size: int, intermediate_size: int, attention: Attention, first: bool, eps: float):
        super().__init__()
        self.self_attn = attention
        self.mlp = MLP(size, intermediate_size)
        self.input_layernorm = RMSNorm(size, eps)
        if first:
            self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.first = first

    def enter(self, x: Tensor, norm_before_residual: bool) -> tuple[Tensor, Tensor]:
        """(normed state, residual)"""
        normed = self.hidden_norm(x) if self.first else self.input_layernorm(x)
        return normed, normed if self.first and norm_before_residual else x

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """attended: [..., H*E]"""
        y = residual + self.self_attn.o_proj(attended)
        return y + self.mlp(self.post_attention_layernorm(y))


class _Projection(NamedTuple):
    """A stacked projection for one training pass: weight [P, D] for states; `tokens` [M, P] is the embedding half of
    the first layer, done once per token because each step reads the same tokens one place further."""

    weight: Tensor
    bias: Tensor | None
    tokens: Tensor | None

    @classmethod
    def of(cls, parts: Sequence[nn.Linear], embedded: Tensor | None, dtype: torch.dtype) -> _Projection:
        weight = torch.cat([part.weight for part in parts]).to(dtype)
        bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts]).to(dtype)
        if embedded is None:
            return cls(weight, bias, None)
        size = embedded.shape[-1]
        return cls(weight[:, size:].contiguous(), None, F.linear(embedded, weight[:, :size].contiguous(), bias))

    def __call__(self, state: Tensor, token_rows: Tensor | None) -> Tensor:
        """[N, D] -> [N, P]; token_rows: the tokens beside the states, None = all in order."""
        projected = F.linear(state, self.weight, self.bias)
        if self.tokens is None:
            return projected
        return projected + (self.tokens if token_rows is None else self.tokens[token_rows])


class Eagle3(Draft):
    Config = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config, target: TargetSpec):
        super().__init__(config, target)
        size = target.hidden_size
        aux = default_aux_layers(target.num_layers) if config.aux_layers is None else config.aux_layers
        if aux[-1] >= target.num_layers:
            raise ValueError(
                f"draft.aux_layers {list(aux)}: {target.name} has {target.num_layers} layers, so ids go from 0 (the "
                f"embedding) to {target.num_layers - 1}; the state after the last layer is not a feature"
            )
        if config.draft_vocab is not None and config.draft_vocab > target.vocab_size:
            raise ValueError(
                f"draft.draft_vocab {config.draft_vocab} is more than the target's {target.vocab_size} tokens"
            )
        self.needs = Needs(aux_layers=tuple(aux), last_hidden=True)
        self.mix = config.mix
        self.work_per_token = float(config.ttt_steps)
        self.reduced = config.draft_vocab is not None and config.draft_vocab < target.vocab_size
        num_heads, self.num_kv_heads = config.num_heads or target.num_heads, config.num_kv_heads or target.num_kv_heads
        self.head_dim = config.head_dim or target.head_dim
        self.eps = config.norm_eps or target.norm_eps
        self.intermediate_size = config.intermediate_size or target.intermediate_size
        qk_norm = target.model_type.startswith("qwen3") if config.qk_norm is None else config.qk_norm
        self.rope_parameters = dict(config.rope or target.rope)
        self.max_positions = config.max_positions or target.max_positions
        self.rope = Rope(self.rope_parameters, self.head_dim, self.max_positions)

        self.fc = nn.Linear(len(aux) * size, size, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(len(aux) * size, self.eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, self.eps) for _ in aux)
        self.layers = nn.ModuleList()
        for i in range(config.num_layers):
            attention = Attention(
                2 * size if i == 0 else size,
                size,
                num_heads,
                self.num_kv_heads,
                self.head_dim,
                bias=config.attention_bias,
                qk_norm=qk_norm,
                eps=self.eps,
            )
            self.layers.append(Layer(size, self.intermediate_size, attention, i == 0, self.eps))
        self.norm = RMSNorm(size, self.eps)
        if config.head == "trainable":
            self.lm_head = nn.Linear(size, config.draft_vocab or target.vocab_size, bias=False)
        self.draft_vocab: Tensor | None
        kept = torch.arange(config.draft_vocab or 0) if self.reduced else None
        self.register_buffer("draft_vocab", kept)  # [Vd] ascending target ids, None = all

    def initialise(self, stats: TokenStats | None, generator: torch.Generator) -> None:
        config = self.config
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1:
                    noise = torch.randn(parameter.shape, generator=generator, device=generator.device)
                    parameter.copy_(noise * config.init_std)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
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
        """Features of the aux layers [..., A*D] -> the first recurrent state [..., D]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.needs.aux_layers), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Normed embeddings of target ids, as the first layer reads them."""
        rows = self.embedding[tokens].to(dtype)
        if self.target.embedding_scale != 1.0:
            rows = rows * self.target.embedding_scale
        return self.stack[0].input_layernorm(rows)

    def outputs(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """(what goes into the head, what goes into the next step) of the last layer's state."""
        normed = self.norm(y)
        return normed, normed if self.config.norm_output else y

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] after the final norm -> [..., Vd]"""
        if self.config.head == "trainable":
            return self.lm_head(hidden)
        logits = F.linear(hidden.to(self.target_head.dtype), self.target_head)
        return self._softcap(logits)

    def target_logits(self, last_hidden: Tensor) -> Tensor:
        """The target's logits over its full vocabulary [..., V]."""
        return self._softcap(F.linear(last_hidden.to(self.target_head.dtype), self.target_head))

    def _softcap(self, logits: Tensor) -> Tensor:
        cap = self.target.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    # -- training ----------------------------------------------------------------------------------------------
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """{"step0": |z(0)|, ...}; with a ce loss on a reduced vocabulary also {"kept0": |k(0)|, ...}."""
        num_steps = self._num_steps(batch)
        found = {f"step{s}": int((num_steps > s).sum()) for s in range(self.config.ttt_steps)}
        if self._counts_kept:
            kept = self._columns(batch.input_ids).cpu().numpy() >= 0
            for s in range(self.config.ttt_steps):
                found[f"kept{s}"] = int(kept[np.flatnonzero(num_steps > s) + 2 + s].sum())
        device = batch.input_ids.device
        return {name: torch.tensor(float(count), device=device) for name, count in found.items()}

    def forward(self, batch: Batch, denominators: dict[str, Tensor]) -> dict[str, Term]:
        """The loss, and metrics per step s: loss_<s>, match_<s>, and overlap_<s> or kept_overlap_<s>.

        match: the draft's best token is the one that follows. overlap: sum of min(p, q), the chance that a sampled
        proposal is accepted; kept_overlap: the same with p renormalised over the draft vocabulary, an upper limit,
        reported when the loss does not compute p over the full vocabulary. A label outside the draft vocabulary is a
        miss.
        """
        num_steps = self._num_steps(batch)
        rows = np.flatnonzero(num_steps)
        if not len(rows):
            return self._nothing_supervised(batch.input_ids.device)
        plan = Plan.of(rows, num_steps[rows], batch.bounds, batch.input_ids.device)
        noise = self._noise(batch) if self.training and self.config.feature_noise else None
        hidden = self._unroll(batch, plan, noise)
        weights, ce_scale = self._row_weights(plan, denominators)
        dtype = matmul_dtype(hidden[0])
        found = distill(
            torch.cat(hidden),
            torch.cat([step.teachers for step in plan.steps]),
            torch.cat([self._labels(batch, plan, s) for s in range(len(plan.steps))]),
            self.lm_head.weight if self.config.head == "trainable" else self.target_head.to(dtype),
            self._teacher(batch, plan, dtype),
            self.mix,
            weights=weights,
            ce_scale=ce_scale,
            softcap=self.target.logit_softcap if self.config.head == "frozen" else None,
        )
        return self._terms(found, [len(h) for h in hidden])

    def _num_steps(self, batch: Batch) -> np.ndarray:
        return supervised_steps(batch.loss_mask.cpu().numpy(), batch.bounds, self.config.ttt_steps)

    def _columns(self, ids: Tensor) -> Tensor:
        return vocab.columns(ids, self.draft_vocab)

    @property
    def _counts_kept(self) -> bool:
        return bool(self.mix.ce) and self.reduced

    def _labels(self, batch: Batch, plan: Plan, s: int) -> Tensor:
        """[N] draft columns of the tokens that step s predicts."""
        return self._columns(batch.input_ids[plan.context[plan.rows[plan.steps[s].rows]] + 2 + s])

    def _row_weights(self, plan: Plan, denominators: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """decay^s / |z(s)| for every row, and |z(s)| / |k(s)| for ce where labels can be outside the vocabulary."""
        weights, scales = [], []
        for s, step in enumerate(plan.steps):
            total = denominators[f"step{s}"].clamp_min(1).float()
            weights.append((self.config.position_decay**s / total).expand(len(step.rows)))
            if self._counts_kept:
                scales.append((total / denominators[f"kept{s}"].clamp_min(1)).expand(len(step.rows)))
        return torch.cat(weights), torch.cat(scales) if scales else None

    def _teacher(self, batch: Batch, plan: Plan, dtype: torch.dtype) -> Teacher | None:
        if not self.mix.needs_teacher:
            return None
        if batch.last_hidden is None:
            raise ValueError(f"batch.last_hidden is None; the losses {self.config.loss} need the target's distribution")
        full = self.target_head if self.reduced and self.mix.needs_acceptance else None
        head = self.kept_rows(self.target_head).to(dtype)
        return Teacher(batch.last_hidden[plan.teachers], head, full, self.target.logit_softcap)

    def _noise(self, batch: Batch) -> Tensor:
        """[T, A*D], uniform in +- feature_noise; a document's noise follows from the batch's seed and its row id."""
        assert batch.features is not None
        width, amount = batch.features.shape[1], self.config.feature_noise
        names = batch.row_ids or tuple(map(str, range(len(batch.docs))))
        parts = []
        for (start, end), name in zip(batch.docs, names, strict=True):
            digest = hashlib.sha256(f"noise {batch.seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            parts.append((torch.rand(end - start, width, generator=generator) * 2 - 1) * amount)
        return torch.cat(parts).to(batch.features.device)

    def _unroll(self, batch: Batch, plan: Plan, noise: Tensor | None = None) -> list[Tensor]:
        """Training-time test: what goes into the head, [N, D] for each step of the plan. noise: [T, A*D] or None."""
        if batch.features is None:
            raise ValueError(f"batch.features is None; EAGLE-3 reads the aux layers {list(self.needs.aux_layers)}")
        dtype = matmul_dtype(self.fc.weight)
        features = batch.features[plan.context].to(dtype)  # [M, A*D]
        if noise is not None:
            features = features + noise[plan.context].to(dtype)
        positions = batch.positions[plan.context]
        embedded = self.embed(batch.input_ids[plan.context + 1], dtype)
        projections = []  # (queries, keys and values) of each layer
        for i, layer in enumerate(self.stack):
            attention, beside = layer.self_attn, embedded if i == 0 else None
            key_value = [attention.k_proj, attention.v_proj]
            projections.append(
                (_Projection.of([attention.q_proj], beside, dtype), _Projection.of(key_value, beside, dtype))
            )

        state, hidden, seen = self.fuse(features), [], dict[int, ChainKeys]()
        for s, step in enumerate(plan.steps):
            at = plan.rows[step.rows]  # [N] context rows; their tokens and positions at this step are s further
            x = state if s == 0 else state[step.kept]
            rope = self.rope(positions if s == 0 else positions[at] + s, dtype)
            for i, (layer, (to_queries, to_keys)) in enumerate(zip(self.stack, projections, strict=True)):
                attention = layer.self_attn
                normed, residual = layer.enter(x, self.config.norm_before_residual)
                k, v = to_keys(normed, None if s == 0 else at + s).chunk(2, -1)
                k, v = attention.keys(k, rope), attention.values(v)
                seen[i] = ChainKeys(k, v) if s == 0 else seen[i].then(step.kept, k, v)
                spans, q_rope = step.spans, rope
                if s == 0 and i + 1 < len(self.layers):
                    q = to_queries(normed, None)
                    spans = plan.prefix
                elif s == 0:  # the other context rows only give keys
                    q, residual = to_queries(normed[at], at), residual[at]
                    q_rope = rope[0][at], rope[1][at]
                else:
                    q = to_queries(normed, at + s)
                attended = chain_attention(attention.queries(q, q_rope), *seen[i], spans)
                x = layer.leave(residual, attended.flatten(1))
            into_head, state = self.outputs(x)
            hidden.append(into_head)
        return hidden

    def _terms(self, found: Distilled, sizes: Sequence[int]) -> dict[str, Term]:
        """Terms of the steps; a step without rows counts zero, so that every batch has the same names."""
        one = found.loss.new_ones(())
        assert found.total is not None
        terms = {"loss": Term(found.total, one)}
        metrics = {"loss_": found.loss, "match_": found.match}
        if found.alpha is not None:
            metrics[self._overlap_name] = found.alpha
        for name, rows in metrics.items():
            sums = [part.detach().sum() for part in rows.split(list(sizes))]
            for s in range(self.config.ttt_steps):
                empty = s >= len(sizes)
                terms[f"{name}{s}"] = Term(one * 0 if empty else sums[s], one * (0 if empty else sizes[s]))
        return terms

    @property
    def _overlap_name(self) -> str:
        return "kept_overlap_" if self.reduced and not self.mix.needs_acceptance else "overlap_"

    def _nothing_supervised(self, device: torch.device) -> dict[str, Term]:
        """A loss of zero that still reaches every trainable tensor, so that no rank waits for a gradient."""
        loss = sum((p.flatten()[0] * 0.0 for p in self.parameters() if p.requires_grad), torch.zeros((), device=device))
        empty = torch.zeros(0, device=device)
        alpha = empty if self.mix.needs_teacher else None
        return self._terms(Distilled(loss, empty, empty, empty, alpha), [])

    # -- decoding ----------------------------------------------------------------------------------------------
    def start(self, batch_size: int, max_len: int) -> KVCache:
        weight = self.fc.weight
        return KVCache(
            len(self.layers), batch_size, max_len, self.num_kv_heads, self.head_dim, weight.dtype, weight.device
        )

    @torch.no_grad()
    def propose(self, state: KVCache, tokens: Tensor, captured: Captured, num: int, sampler: Sampler) -> Proposal:
        assert captured.features is not None, "EAGLE-3 reads features; the runtime asks for draft.needs"
        cache, new, most = state, captured.lengths, tokens.shape[1]
        cache.reserve(most + num)
        at = cache.lengths[:, None] + torch.arange(most, device=tokens.device)
        fused = self.fuse(captured.features.to(self.fc.weight.dtype))
        last = (new - 1).clamp_min(0)
        y = self._decode(cache, fused, tokens, at, cache.longest + most, last)
        cache.commit(new, most)
        ids, probs = [], []
        for k in range(num):
            hidden, fed_back = self.outputs(y)  # [B, 1, D]
            logits = self.logits(hidden)[:, 0]  # [B, Vd]
            if sampler.greedy or not sampler.draft_sampling:
                column = logits.argmax(-1)
            else:
                probs.append(sampler.probs(logits))
                column = sampler.draw(probs[-1])
            ids.append(column if self.draft_vocab is None else self.draft_vocab[column])
            if k + 1 < num:  # speculative: written behind the committed entries, never committed
                y = self._decode(cache, fed_back, ids[-1][:, None], (cache.lengths + k)[:, None], cache.longest + k + 1)
        offered = torch.full_like(new, num)
        return Proposal(torch.stack(ids, 1), torch.stack(probs, 1) if probs else None, offered, self.draft_vocab)

    def _decode(
        self, cache: KVCache, x: Tensor, tokens: Tensor, at: Tensor, limit: int, only: Tensor | None = None
    ) -> Tensor:
        """States x [B, N, D] beside tokens [B, N] through the layers, at positions `at` [B, N] < limit of the cache.

        only: [B], the one row of each sequence whose state is wanted. Returns the last layer's states, [B, N or 1, D].
        """
        embedded, rope = self.embed(tokens, x.dtype), self.rope(at, x.dtype)
        every = torch.arange(len(tokens), device=tokens.device)[:, None]
        for i, layer in enumerate(self.stack):
            attention = layer.self_attn
            normed, residual = layer.enter(x, self.config.norm_before_residual)
            into = torch.cat([embedded, normed], -1) if i == 0 else normed
            k, v = attention.keys(attention.k_proj(into), rope), attention.values(attention.v_proj(into))
            q_at, q_rope = at, rope
            if only is not None and i + 1 == len(self.layers):
                pick = every, only[:, None]
                into, residual, q_at = into[pick], residual[pick], at[pick]
                q_rope = rope[0][pick], rope[1][pick]
            q = attention.queries(attention.q_proj(into), q_rope)
            x = layer.leave(residual, cache.attend(i, q, k, v, at, q_at, limit))
        return x

    @torch.no_grad()
    def slot_probs(self, batch: Batch, anchors: Tensor, num: int, sampler: Sampler) -> Iterator[SlotProbs]:
        """Chains of `num` steps, which may be more than were trained, through the training pass. See SlotProbs.

        Anchors come back in ascending order. The first token of a document has no features before it: it is refused.
        """
        wanted = np.unique(anchors.cpu().numpy())
        starts, ends = np.asarray(batch.bounds[:-1]), np.asarray(batch.bounds[1:])
        doc = np.searchsorted(starts, wanted, side="right") - 1
        first = wanted[(wanted <= starts[doc]) | (wanted >= ends[-1])]
        if len(first):
            raise ValueError(
                f"anchors {first[:8].tolist()} have no features before them or lie outside the batch; documents have "
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
        assert batch.last_hidden is not None, "slot probabilities compare with the target: batch.last_hidden"
        plan = Plan.of(anchors[live] - 1, num_steps[live], batch.bounds, device)
        hidden = self._unroll(batch, plan)
        size = max(2**24 // self.target.vocab_size, 16)
        for begin in range(0, len(plan.teachers), size):
            block = plan.teachers[begin : begin + size]
            target_probs = sampler.probs(self.target_logits(batch.last_hidden[block]))  # [u, V]
            for s, step in enumerate(plan.steps):
                lo, hi = torch.searchsorted(step.teachers, torch.tensor([begin, begin + size])).tolist()
                if lo == hi:
                    continue
                p = target_probs[(step.teachers[lo:hi] - begin).to(device)]
                logits = self.logits(hidden[s][lo:hi])
                q = sampler.probs(logits)
                follows = batch.input_ids[plan.context[plan.rows[step.rows[lo:hi]]] + 2 + s][:, None]
                column = self._columns(follows)
                best = logits.argmax(-1)
                into = torch.from_numpy(live).to(device)[step.rows[lo:hi]], s
                draft[into] = torch.where(column >= 0, q.gather(1, column.clamp_min(0)), 0.0)[:, 0]
                target[into] = p.gather(1, follows)[:, 0]
                argmax[into] = best if self.draft_vocab is None else self.draft_vocab[best]
                overlap[into] = torch.minimum(q, p if self.draft_vocab is None else p[:, self.draft_vocab]).sum(-1)
        return found

    # -- export ------------------------------------------------------------------------------------------------
    def neutral(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See models/export.py for the form. `training` holds the settings that servers do not ask for."""
        config, attention = self.config, self.stack[0].self_attn
        about = {
            "family": "eagle3",
            "aux_layers": list(self.needs.aux_layers),
            "layer": {
                "model_type": "llama" if attention.q_norm is None else "qwen3",
                "hidden_size": self.target.hidden_size,
                "intermediate_size": self.intermediate_size,
                "num_attention_heads": attention.q_proj.out_features // self.head_dim,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "rms_norm_eps": self.eps,
                "hidden_act": "silu",
                "rope_parameters": self.rope_parameters,
                "attention_bias": config.attention_bias,
                "max_position_embeddings": self.max_positions,
                "vocab_size": self.target.vocab_size,
            },
            "num_layers": config.num_layers,
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "fc_norm": config.fc_norm,
            "norm_output": config.norm_output,
            "ttt_steps": config.ttt_steps,
            "training": config.model_dump(mode="json", include=set(TRAINING_KEYS)),
        }
        return about, {name: tensor.detach() for name, tensor in self.state_dict().items()}

    @classmethod
    def from_neutral(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetSpec) -> Eagle3:
        layer, training = config["layer"], dict(config.get("training", {}))
        if layer["hidden_act"] != "silu" or layer["hidden_size"] != target.hidden_size:
            raise ValueError(
                f"an EAGLE-3 draft here has hidden_act silu and the target's width {target.hidden_size}, "
                f"got {layer['hidden_act']} and {layer['hidden_size']}"
            )
        if "lm_head.weight" not in tensors:
            training |= {"head": "frozen", "init_head": "target"}
        ours = Eagle3Config(
            aux_layers=tuple(config["aux_layers"]),
            draft_vocab=len(tensors["draft_vocab"]) if "draft_vocab" in tensors else None,
            num_layers=config["num_layers"],
            intermediate_size=layer["intermediate_size"],
            num_heads=layer["num_attention_heads"],
            num_kv_heads=layer["num_key_value_heads"],
            head_dim=layer["head_dim"],
            norm_eps=layer["rms_norm_eps"],
            rope=layer["rope_parameters"],
            max_positions=layer["max_position_embeddings"],
            attention_bias=layer["attention_bias"],
            qk_norm=layer["model_type"] == "qwen3",
            norm_before_residual=config["norm_before_residual"],
            norm_before_fc=config["norm_before_fc"],
            fc_norm=config["fc_norm"],
            norm_output=config["norm_output"],
            ttt_steps=config.get("ttt_steps", 3),
            **training,
        )
        draft = cls(ours, target)
        draft.load_state_dict(tensors)
        return draft


TRAINING_KEYS = (
    "head",
    "init_head",
    "init_norm_scale",
    "init_std",
    "position_decay",
    "loss",
    "lk_eta",
    "feature_noise",
)
