"""Building blocks of drafts: norms, RoPE, attention, MLP, draft KV caches. The only place that picks a kernel.

Shapes: N rows, T packed keys, B batch, H query heads, G key/value heads, E head width, S cache slots, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The type matrix products on x run in: autocast's where it is on, else x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


# -- norm, MLP -------------------------------------------------------------------------------------------------------
class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in x's dtype with fp32 statistics."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() and x.dtype == self.weight.dtype:  # decoding: one kernel, half the time per call
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """Closed-form backward: fewer passes and less kept than the composite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        d_weight = d_x = None
        if ctx.needs_input_grad[1]:
            d_weight = (d_out * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            d_normed = d_out * weight
            d_x = d_normed - normed * (d_normed * normed).mean(-1, keepdim=True)
            d_x = d_x.mul_(scale).to(x.dtype)
        return d_x, d_weight, None


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(_SwiGLU.apply(self.gate_proj(x), self.up_proj(x)))


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up; silu is computed again in backward instead of being kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate = torch.ops.aten.silu_backward(d_out * up, gate)
        return d_gate, F.silu(gate).mul_(d_out)


# -- RoPE ------------------------------------------------------------------------------------------------------------
class Rope:
    """Rotary positions of a target: frequencies and the factor on cos and sin, by transformers' own rules.

    rope: transformers' rope_parameters (any rope type), head_dim and max_positions as in the target's config. Types
    that change with the sequence length (dynamic, longrope) are taken at their setting for lengths within the
    original limit. Not a module: the frequencies are not weights and must stay fp32 whatever the draft is cast to.
    """

    def __init__(self, rope: Mapping[str, Any], head_dim: int, max_positions: int):
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if "rope_theta" not in rope:
            raise ValueError(f"rope parameters need rope_theta, got {sorted(rope)}")
        kind = rope.get("rope_type", "default")
        if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
            known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
            raise ValueError(f"rope_type {kind!r} is not known to this transformers; known: {known}")
        if kind == "default":
            rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
            self.inv_freq, self.attention_scaling = 1.0 / rope["rope_theta"] ** exponents, 1.0
        else:
            config = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=max_positions,
                rope_parameters=dict(rope),
            )
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
            self.inv_freq, self.attention_scaling = inv_freq.float(), float(scaling)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, [..., 1, R/2] for R rotated dimensions, broadcast over heads."""
        self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions[..., None, None].float() * self.inv_freq
        return (angles.cos() * self.attention_scaling).to(dtype), (angles.sin() * self.attention_scaling).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., H, E] with its first R dimensions turned, halves paired (transformers' rotate_half)."""
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    """A scaled rotation; its transpose turns back by the same angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(d_out, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    out = torch.empty_like(x)
    a, b = x[..., :half], x[..., half : 2 * half]
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out[..., half : 2 * half]).addcmul_(a, sin)
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


# -- attention -------------------------------------------------------------------------------------------------------
class Attention(nn.Module):
    """Projections, head norms and RoPE of grouped-query attention; which keys a query sees is the caller's matter.

    in_size: width of what q, k and v are projected from (EAGLE-3's first layer reads two states side by side).
    """

    def __init__(
        self,
        in_size: int,
        size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        qk_norm: bool,
        eps: float,
    ):
        super().__init__()
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads} must be a multiple of num_kv_heads {num_kv_heads}")
        self.head_dim = head_dim
        self.q_proj = nn.Linear(in_size, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(in_size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(in_size, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, size, bias=False)
        self.q_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps) if qk_norm else None

    def queries(self, projected: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[..., H*E] -> [..., H, E], normed and rotated."""
        q = projected.unflatten(-1, (-1, self.head_dim))
        return rotate(q if self.q_norm is None else self.q_norm(q), *rope)

    def keys(self, projected: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[..., G*E] -> [..., G, E], normed and rotated."""
        k = projected.unflatten(-1, (-1, self.head_dim))
        return rotate(k if self.k_norm is None else self.k_norm(k), *rope)

    def values(self, projected: Tensor) -> Tensor:
        """[..., G*E] -> [..., G, E]"""
        return projected.unflatten(-1, (-1, self.head_dim))


class Span(NamedTuple):
    """Consecutive queries [start, stop) of one document. The first of them stands at key `row` and sees the keys
    first_key..row; each next query sees one key more."""

    first_key: int
    row: int
    start: int
    stop: int


def chain_attention(
    q: Tensor, k: Tensor, v: Tensor, chain_k: Tensor | None, chain_v: Tensor | None, spans: Sequence[Span]
) -> Tensor:
    """Attention over a causal prefix and a chain of own keys, one softmax over both.

    q: [N, H, E]. k, v: [T, G, E], keys of the prefix. chain_k, chain_v: [N, s, G, E], the s keys that only query n
    sees, or None. Query n of a span sees the span's keys up to its own row. Returns [N, H, E].
    """
    if _flex_wanted(q):
        num, steps = len(q), 0 if chain_k is None else chain_k.shape[1]
        extra = [] if chain_k is None or chain_v is None else [(chain_k.flatten(0, 1), chain_v.flatten(0, 1))]
        first, last = (torch.empty(num, dtype=torch.int64) for _ in range(2))
        for span in spans:
            first[span.start : span.stop] = span.first_key
            last[span.start : span.stop] = torch.arange(span.row, span.row + span.stop - span.start) + 1
        own = torch.arange(num) * steps
        out = _flex(q, k, v, extra, _Seen(first, last, own, own + steps))
        if out is not None:
            return out
    return _ChainAttention.apply(q, k, v, chain_k, chain_v, tuple(spans))


class ChainKeys(NamedTuple):
    """What a layer's queries see in training: k, v [M, G, E] of step 0, the chain [N, s, G, E] of the later steps."""

    k: Tensor
    v: Tensor
    chain_k: Tensor | None = None
    chain_v: Tensor | None = None

    def then(self, kept: Tensor, k: Tensor, v: Tensor) -> ChainKeys:
        """One step more for the `kept` rows of the step before; k, v: [N, G, E]."""
        k, v = k[:, None], v[:, None]
        if self.chain_k is not None and self.chain_v is not None:
            k, v = torch.cat([self.chain_k[kept], k], 1), torch.cat([self.chain_v[kept], v], 1)
        return ChainKeys(self.k, self.v, k, v)


class _Piece(NamedTuple):
    """Queries [start, stop) against keys [first_key, last_key); the last stop - start keys are causal."""

    first_key: int
    last_key: int
    start: int
    stop: int


def _pieces(spans: Sequence[Span], size: int) -> Iterator[_Piece]:
    for first_key, row, span_start, span_stop in spans:
        for start in range(span_start, span_stop, size):
            stop = min(start + size, span_stop)
            yield _Piece(first_key, row + stop - span_start, start, stop)


class _ChainAttention(torch.autograd.Function):
    """Matrix products per document and query chunk, the chain merged by log-sum-exp, scores formed anew in backward.

    Let P = exp(score - lse) with the lse of the joint softmax and D = rowsum(dO * O) of its output. Then
    dV = P^T dO, dS = P * (dO V^T - D), dQ = dS K, dK = dS^T Q hold for prefix and chain keys alike, so the prefix
    needs no gradient of its own lse. Inside, heads lead: [G, N*rep, E] with rep = H / G queries per key head.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chain_k: Tensor | None,
        chain_v: Tensor | None,
        spans: tuple[Span, ...],
    ) -> Tensor:
        num, _, width = q.shape
        groups, rep = k.shape[1], q.shape[1] // k.shape[1]
        statistics = torch.promote_types(q.dtype, torch.float32)
        scale = width**-0.5
        queries = _heads_first(q * scale, groups)
        keys, values = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        out = torch.empty_like(queries)
        lse = queries.new_empty(groups, num * rep, dtype=statistics)
        for piece in _pieces(spans, _chunk_size(q)):
            rows, seen = slice(piece.start * rep, piece.stop * rep), slice(piece.first_key, piece.last_key)
            scores = _scores(queries[:, rows], keys[:, seen], rep)
            best = scores.amax(-1).to(statistics)
            probs = torch.softmax(scores, -1, dtype=statistics)
            lse[:, rows] = best - probs.amax(-1).log()
            out[:, rows] = torch.bmm(probs.to(q.dtype), values[:, seen])
        chain_probs = None
        if chain_k is not None and chain_v is not None:
            chain_scores = _dots(queries, chain_k, statistics)  # [G, N*rep, s]
            joint = torch.logsumexp(torch.cat([lse[..., None], chain_scores], -1), -1)
            chain_probs = (chain_scores - joint[..., None]).exp().to(q.dtype)
            out.mul_((lse - joint).exp()[..., None])
            lse = joint
            for j, value in enumerate(_per_step(chain_v)):
                _by_query(out, rep).addcmul_(_by_query(chain_probs[..., j : j + 1], rep), value)
        ctx.save_for_backward(queries, keys, values, chain_k, chain_v, out, lse, chain_probs)
        ctx.spans, ctx.scale, ctx.rep = spans, scale, rep
        return _rows_first(out, rep)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, chain_k, chain_v, out, lse, chain_probs = ctx.saved_tensors
        rep = ctx.rep
        d_out = _heads_first(d_out, len(keys))
        delta = (d_out * out).sum(-1, keepdim=True, dtype=lse.dtype)  # [G, N*rep, 1]
        d_q, d_k, d_v = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        for piece in _pieces(ctx.spans, _chunk_size(queries)):
            rows, seen = slice(piece.start * rep, piece.stop * rep), slice(piece.first_key, piece.last_key)
            scores = _scores(queries[:, rows], keys[:, seen], rep)
            probs = scores.to(lse.dtype).sub_(lse[:, rows, None]).exp_()
            d_probs = torch.bmm(d_out[:, rows], values[:, seen].transpose(1, 2)).to(lse.dtype)
            d_scores = d_probs.sub_(delta[:, rows]).mul_(probs).to(queries.dtype)
            d_v[:, seen] += torch.bmm(probs.to(queries.dtype).transpose(1, 2), d_out[:, rows])
            d_q[:, rows] = torch.bmm(d_scores, keys[:, seen])
            d_k[:, seen] += torch.bmm(d_scores.transpose(1, 2), queries[:, rows])
        d_chain_k = d_chain_v = None
        if chain_k is not None:
            d_chain_k, d_chain_v = torch.empty_like(chain_k), torch.empty_like(chain_v)
            for j, (key, value) in enumerate(zip(_per_step(chain_k), _per_step(chain_v), strict=True)):
                prob = _by_query(chain_probs[..., j : j + 1], rep)  # [G, N, rep, 1]
                d_score = prob * ((_by_query(d_out, rep) * value).sum(-1, keepdim=True) - _by_query(delta, rep))
                d_score = d_score.to(queries.dtype)
                _by_query(d_q, rep).addcmul_(d_score, key)
                d_chain_k[:, j] = (d_score * _by_query(queries, rep)).sum(2).transpose(0, 1)
                d_chain_v[:, j] = (prob * _by_query(d_out, rep)).sum(2).transpose(0, 1)
        d_q = _rows_first(d_q.mul_(ctx.scale), rep)
        return d_q, d_k.transpose(0, 1), d_v.transpose(0, 1), d_chain_k, d_chain_v, None


def _chunk_size(x: Tensor) -> int:
    """Queries per matrix product: scores that stay in a CPU's cache, or enough work for a GPU launch."""
    return 128 if x.device.type == "cpu" else 1024


def _scores(queries: Tensor, keys: Tensor, rep: int) -> Tensor:
    """[G, n*rep, L] for n queries that stand at the last n of the L keys; -inf for the keys after a query's own."""
    scores = torch.bmm(queries, keys.transpose(1, 2))
    num = queries.shape[1] // rep
    later = torch.ones(num, num, dtype=torch.bool, device=scores.device).triu_(1)[:, None]
    _by_query(scores, rep)[..., -num:].masked_fill_(later, -torch.inf)
    return scores


def _by_query(x: Tensor, rep: int) -> Tensor:
    """[G, N*rep, X] -> a view [G, N, rep, X]"""
    return x.unflatten(1, (-1, rep))


def _heads_first(x: Tensor, groups: int) -> Tensor:
    """[N, G*rep, E] -> [G, N*rep, E]"""
    return x.unflatten(1, (groups, -1)).transpose(0, 1).flatten(1, 2).contiguous()


def _rows_first(x: Tensor, rep: int) -> Tensor:
    """[G, N*rep, E] -> [N, G*rep, E]"""
    return _by_query(x, rep).transpose(0, 1).flatten(1, 2)


def _per_step(chain: Tensor) -> Iterator[Tensor]:
    """[N, s, G, E] -> s views [G, N, 1, E]"""
    for step in chain.unbind(1):
        yield step.transpose(0, 1)[:, :, None]


def _dots(queries: Tensor, chain_k: Tensor, dtype: torch.dtype) -> Tensor:
    """Scores of every query with its own chain keys: [G, N*rep, s]"""
    rep = queries.shape[1] // len(chain_k)
    scores = [(_by_query(queries, rep) * key).sum(-1, dtype=dtype) for key in _per_step(chain_k)]
    return torch.stack(scores, -1).flatten(1, 2)


class BlockSpan(NamedTuple):
    """Blocks [start, stop) of one document, anchors ascending: block start + i sees the context keys first_key up to
    ends[i], which stands at its anchor and is not seen."""

    first_key: int
    start: int
    stop: int
    ends: tuple[int, ...]


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    spans: Sequence[BlockSpan],
    *,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Attention of blocks over the context before their anchors and over themselves, one softmax over both.

    q: [N, S, H, E], the last S slots of N blocks. k, v: [M, G, E], keys of the context. block_k, block_v: [N, L, G, E].
    causal: a slot sees its block up to itself, else all of it. window: the slot at position p sees keys after
    p - window only; it must be larger than L, so that each slot sees the row before its anchor. Every block has context.
    Returns [N, S, H, E].
    """
    if _flex_wanted(q):
        num, slots, block_len = *q.shape[:2], block_k.shape[1]
        first = torch.tensor([span.first_key for span in spans for _ in span.ends])[:, None].expand(num, slots)
        last = torch.tensor([end for span in spans for end in span.ends])[:, None].expand(num, slots)
        slot = torch.arange(block_len - slots, block_len)
        if window is not None:
            first = torch.maximum(first, last + slot - window + 1)
        own = (torch.arange(num) * block_len)[:, None].expand(num, slots)
        own_last = own + (slot + 1 if causal else block_len)
        seen = _Seen(first.flatten(), last.flatten(), own.flatten(), own_last.flatten())
        extra = [(block_k.flatten(0, 1), block_v.flatten(0, 1))]
        out = _flex(q.flatten(0, 1), k, v, extra, seen)
        if out is not None:
            return out.unflatten(0, (num, slots))
    return _BlockAttention.apply(q, k, v, block_k, block_v, tuple(spans), causal, window)


class _BlockPiece(NamedTuple):
    """Blocks [start, stop) against keys [first_key, last_key); all of them see keys [first_key, shared) if there is no
    window."""

    first_key: int
    shared: int
    last_key: int
    start: int
    stop: int


def _block_pieces(spans: Sequence[BlockSpan], size: int, first_slot: int, window: int | None) -> Iterator[_BlockPiece]:
    """Neighbouring blocks share most of their context, so that few of their scores are computed to be hidden."""
    for span in spans:
        for start in range(span.start, span.stop, size):
            stop = min(start + size, span.stop)
            nearest, farthest = span.ends[start - span.start], span.ends[stop - 1 - span.start]
            first_key = span.first_key
            if window is not None:
                first_key = max(first_key, nearest + first_slot - window + 1)
            yield _BlockPiece(first_key, nearest, farthest, start, stop)


class _BlockAttention(torch.autograd.Function):
    """As _ChainAttention, with blocks of neighbouring anchors in place of consecutive queries.

    Heads lead inside: [G, N*S*rep, E], the rows of a block side by side.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_k: Tensor,
        block_v: Tensor,
        spans: tuple[BlockSpan, ...],
        causal: bool,
        window: int | None,
    ) -> Tensor:
        num, slots, _, width = q.shape
        groups, rep = k.shape[1], q.shape[2] // k.shape[1]
        statistics = torch.promote_types(q.dtype, torch.float32)
        first_slot = block_k.shape[1] - slots
        pieces = list(_block_pieces(spans, max(_chunk_size(q) // slots, 1), first_slot, window))
        ends = torch.tensor([end for span in spans for end in span.ends], device=q.device)
        slot = torch.arange(first_slot, first_slot + slots, device=q.device)
        queries = _heads_first((q * width**-0.5).flatten(0, 1), groups)
        keys, values = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        own_keys, own_values = (x.permute(2, 0, 1, 3).contiguous() for x in (block_k, block_v))  # [G, N, L, E]
        out = torch.empty_like(queries)
        lse = queries.new_empty(queries.shape[:2], dtype=statistics)
        for piece in pieces:
            rows, seen = _rows_of(piece, slots * rep), slice(piece.first_key, piece.last_key)
            scores = _context_scores(queries[:, rows], keys[:, seen], piece, ends, slot, window)
            best = scores.amax(-1).to(statistics)
            probs = torch.softmax(scores, -1, dtype=statistics)
            lse[:, rows] = best - probs.amax(-1).log()
            out[:, rows] = torch.bmm(probs.to(q.dtype), values[:, seen])
        own_scores = torch.matmul(_by_block(queries, num), own_keys.transpose(2, 3)).to(statistics)  # [G, N, S*rep, L]
        if causal:
            later = torch.arange(block_k.shape[1], device=q.device) > slot[:, None]
            own_scores.masked_fill_(later.repeat_interleave(rep, 0), -torch.inf)
        joint = torch.logaddexp(lse, own_scores.logsumexp(-1).flatten(1))
        own_probs = own_scores.sub_(_by_block(joint[..., None], num)).exp_().to(q.dtype)
        out.mul_((lse - joint).exp_()[..., None])
        _by_block(out, num).add_(torch.matmul(own_probs, own_values))
        ctx.save_for_backward(queries, keys, values, own_keys, own_values, out, joint, own_probs, ends, slot)
        ctx.pieces, ctx.window, ctx.rep = pieces, window, rep
        return _rows_first(out, rep).unflatten(0, (num, slots))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, own_keys, own_values, out, lse, own_probs, ends, slot = ctx.saved_tensors
        rep, dtype = ctx.rep, queries.dtype
        num, slots = d_out.shape[:2]
        d_out = _heads_first(d_out.flatten(0, 1), len(keys))
        delta = (d_out * out).sum(-1, keepdim=True, dtype=lse.dtype)  # [G, N*S*rep, 1]
        d_blocks = _by_block(d_out, num)
        d_own = torch.matmul(d_blocks, own_values.transpose(2, 3)).to(lse.dtype)
        d_own = d_own.sub_(_by_block(delta, num)).mul_(own_probs).to(dtype)
        d_own_k = torch.matmul(d_own.transpose(2, 3), _by_block(queries, num))
        d_own_v = torch.matmul(own_probs.transpose(2, 3), d_blocks)
        d_q = torch.matmul(d_own, own_keys).flatten(1, 2)
        d_k, d_v = torch.zeros_like(keys), torch.zeros_like(values)
        for piece in ctx.pieces:
            rows, seen = _rows_of(piece, slots * rep), slice(piece.first_key, piece.last_key)
            scores = _context_scores(queries[:, rows], keys[:, seen], piece, ends, slot, ctx.window)
            probs = scores.to(lse.dtype).sub_(lse[:, rows, None]).exp_()
            d_probs = torch.bmm(d_out[:, rows], values[:, seen].transpose(1, 2)).to(lse.dtype)
            d_scores = d_probs.sub_(delta[:, rows]).mul_(probs).to(dtype)
            d_v[:, seen] += torch.bmm(probs.to(dtype).transpose(1, 2), d_out[:, rows])
            d_q[:, rows] += torch.bmm(d_scores, keys[:, seen])
            d_k[:, seen] += torch.bmm(d_scores.transpose(1, 2), queries[:, rows])
        d_q = _rows_first(d_q.mul_(queries.shape[-1] ** -0.5), rep).unflatten(0, (num, slots))
        d_own_k, d_own_v = d_own_k.permute(1, 2, 0, 3), d_own_v.permute(1, 2, 0, 3)
        return d_q, d_k.transpose(0, 1), d_v.transpose(0, 1), d_own_k, d_own_v, None, None, None


def _rows_of(piece: _BlockPiece, rows_per_block: int) -> slice:
    return slice(piece.start * rows_per_block, piece.stop * rows_per_block)


def _by_block(x: Tensor, num: int) -> Tensor:
    """[G, N*R, X] -> a view [G, N, R, X]"""
    return x.unflatten(1, (num, -1))


def _context_scores(
    queries: Tensor, keys: Tensor, piece: _BlockPiece, ends: Tensor, slot: Tensor, window: int | None
) -> Tensor:
    """[G, n*S*rep, keys] of the blocks of a piece; -inf at and after a block's anchor, and before a slot's window.

    ends: [N], slot: [S].
    """
    scores = torch.bmm(queries, keys.transpose(1, 2))
    ends = ends[piece.start : piece.stop, None]  # [n, 1]
    first = piece.shared if window is None else piece.first_key
    at = torch.arange(first, piece.last_key, device=scores.device)
    hidden = (at >= ends)[:, None]  # [n, 1, keys]
    if window is not None:
        hidden = hidden | (at <= (ends + slot)[..., None] - window)  # [n, S, keys]
    by_slot = scores.unflatten(1, (len(ends), len(slot), -1))  # [G, n, S, rep, keys]
    by_slot[..., first - piece.first_key :].masked_fill_(hidden[:, :, None], -torch.inf)
    return scores


def prefix_attention(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], window: int | None = None) -> Tensor:
    """Attention over a causal prefix whose keys get no gradient (they are the target's), with scores as they come.

    q: [N, H, E]. k, v: [T, G, E]. Query n of a span sees the span's keys up to its own row, or the last `window` of
    these. Scores are not divided by the root of the width. Returns [N, H, E].
    """
    out = []
    for piece in _pieces(spans, _chunk_size(q)):
        num = piece.stop - piece.start
        first_row = piece.last_key - num  # where the first query stands
        first_key = piece.first_key if window is None else max(piece.first_key, first_row - window + 1)
        at = torch.arange(first_key, piece.last_key, device=q.device)
        rows = torch.arange(first_row, piece.last_key, device=q.device)[:, None]
        visible = at <= rows if window is None else (at <= rows) & (at > rows - window)
        seen = slice(first_key, piece.last_key)
        part = q[None, piece.start : piece.stop]
        out.append(masked_attention(part, k[None, seen], v[None, seen], visible[None])[0])
    return torch.cat(out)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q [B, N, H, E] over keys k, v [B, S, G, E] where visible [B, N, S]; scores as they come. Returns [B, N, H, E]."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2).to(q.dtype),
        v.transpose(1, 2).to(q.dtype),
        attn_mask=visible[:, None],
        scale=1.0,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


# -- the kernel of training ------------------------------------------------------------------------------------------
Kernel = Literal["matmul", "flex"]
_kernel: Kernel = "matmul"  # of chain_attention and block_attention in this process
_falls_back = True
_flex_is_proven = False  # flex gave the reference's numbers once in this process


@contextmanager
def attention(kernel: Kernel, fall_back: bool = True) -> Iterator[None]:
    """Inside, training attention uses `kernel`: matrix products per document (the reference), or FlexAttention with
    compiled block masks, on GPUs.

    FlexAttention is used once its output has been compared with the reference on the first call. Where it fails or
    differs, one line is printed and the reference goes on in its place; without fall_back that is an error.
    """
    global _kernel, _falls_back, _flex_is_proven
    before = (_kernel, _falls_back, _flex_is_proven)
    _kernel, _falls_back, _flex_is_proven = kernel, fall_back, False
    try:
        yield
    finally:
        _kernel, _falls_back, _flex_is_proven = before


class _Seen(NamedTuple):
    """What each query sees, [n] int64 each: context keys first..last-1, and own keys own_first..own_last-1."""

    first: Tensor
    last: Tensor
    own_first: Tensor
    own_last: Tensor


def _flex_wanted(q: Tensor) -> bool:
    return _kernel == "flex" and q.device.type == "cuda"  # elsewhere it has no backward


def _flex(q: Tensor, k: Tensor, v: Tensor, extra: Sequence[tuple[Tensor, Tensor]], seen: _Seen) -> Tensor | None:
    """_flex_attention, or None when it does not work here, which is said once."""
    global _kernel, _flex_is_proven
    try:
        out = _flex_attention(q, k, v, extra, seen, compiled=True)
        if not _flex_is_proven:
            with torch.no_grad():
                want = _dense_attention(q, k, v, extra, seen)
                error = float((out - want).abs().max() / want.abs().max())
            if not error < 0.02:  # bf16 keeps 8 bits; also when it is NaN
                raise ArithmeticError(f"it differs from the reference by {error:.1e}")
            _flex_is_proven = True
        return out
    except Exception as problem:  # a compiler may raise anything
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        if not _falls_back:
            raise RuntimeError(f"FlexAttention does not work here: {reason}") from problem
        _kernel = "matmul"
        print(f"attention: FlexAttention does not work here ({reason}); matrix products per document go on", flush=True)
        return None


def _flex_attention(
    q: Tensor, k: Tensor, v: Tensor, extra: Sequence[tuple[Tensor, Tensor]], seen: _Seen, compiled: bool
) -> Tensor:
    """q [n, H, E] over context k, v [M, G, E] and the `extra` own keys behind them, as `seen` says. Returns [n, H, E]."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    context = len(k)
    keys, values = (torch.cat([x, *own]) for x, own in ((k, [e[0] for e in extra]), (v, [e[1] for e in extra])))
    first, last, own_first, own_last = (x.to(q.device) for x in seen)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = key - context
        in_context = (key < context) & (key >= first[query]) & (key < last[query])
        return in_context | ((own >= 0) & (own >= own_first[query]) & (own < own_last[query]))

    mask = create_block_mask(visible, None, None, len(q), len(keys), device=q.device, _compile=compiled)
    attend = _compiled_flex() if compiled else flex_attention
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))  # [1, H, n, E]
    out = attend(q, keys, values, block_mask=mask, enable_gqa=q.shape[1] != keys.shape[1])
    return out[0].transpose(0, 1)


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)  # steps have many lengths


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, extra: Sequence[tuple[Tensor, Tensor]], seen: _Seen) -> Tensor:
    """What _flex_attention must give, with every score written out, in chunks of queries."""
    context = len(k)
    keys, values = (torch.cat([x, *own]) for x, own in ((k, [e[0] for e in extra]), (v, [e[1] for e in extra])))
    place = torch.arange(len(keys), device=q.device)
    own, out = place - context, []
    for start in range(0, len(q), 256):
        part = slice(start, start + 256)
        first, last, own_first, own_last = (x[part, None].to(q.device) for x in seen)
        visible = (place < context) & (place >= first) & (place < last)
        visible = visible | ((own >= 0) & (own >= own_first) & (own < own_last))
        scaled = q[None, part] * q.shape[-1] ** -0.5
        out.append(masked_attention(scaled, keys[None], values[None], visible[None])[0])
    return torch.cat(out)


# -- decoding --------------------------------------------------------------------------------------------------------
class KVCache:
    """Keys and values of a draft while decoding, one ragged row per sequence.

    `lengths` [B] counts the committed entries of each row. An entry beyond its row's length is speculative: a later
    call overwrites it before anything can see it, so dropping speculation is leaving `lengths` as it is.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        max_len: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = (num_layers, batch_size, max_len, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.longest = 0  # no row is longer; kept on the host, so that nothing waits for the device
        self._rows = torch.arange(batch_size, device=device)[:, None]

    def commit(self, num: Tensor, most: int) -> None:
        """The next num [B] <= most entries of each row, already written, are committed."""
        self.lengths = self.lengths + num
        self.longest += most

    def reserve(self, num: int) -> None:
        """Make room for `num` entries per row beyond the committed ones."""
        missing = self.longest + num - self.keys.shape[2]
        if missing > 0:
            grow = max(missing, self.keys.shape[2] // 2)
            self.keys = F.pad(self.keys, (0, 0, 0, 0, 0, grow))
            self.values = F.pad(self.values, (0, 0, 0, 0, 0, grow))

    def write(self, layer: int, k: Tensor, v: Tensor, at: Tensor) -> None:
        """Put k, v [B, N, G, E] at positions `at` [B, N]."""
        self.keys[layer][self._rows, at] = k.to(self.keys.dtype)
        self.values[layer][self._rows, at] = v.to(self.values.dtype)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at: Tensor,
        q_at: Tensor,
        limit: int,
        first: Tensor | None = None,
    ) -> Tensor:
        """Write k, v [B, N, G, E] at positions `at` [B, N]; queries q [B, M, H, E] see 0..q_at [B, M].

        limit: all positions are below it. first: [B, M], where a query sees nothing before. Returns [B, M, H*E].
        """
        self.write(layer, k, v, at)
        keys, values = self.keys[layer, :, :limit], self.values[layer, :, :limit]
        places = torch.arange(limit, device=q.device)
        visible = places <= q_at[..., None]  # [B, M, limit]
        if first is not None:
            visible &= places >= first[..., None]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=visible[:, None],
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2).flatten(2)
