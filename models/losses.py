"""Distillation losses: a draft's head and its losses in one pass over chunks, with closed-form gradients.

Per row, with target distribution p, draft distribution q, the token y that really follows, alpha = sum min(p, q):

    ce  = -log q(y)                 kl = sum p log(p / q)            tv = 1 - alpha
    nla = -log alpha                lk = w kl + (1 - w) tv,          w = exp(-eta alpha), a constant in the gradient

    loss = c_ce ce + c_kl kl + c_tv tv + c_nla nla + c_lk lk
    d loss / d logit_v = (k_ce + k_kl + k_tv s) q_v - k_kl p_v - k_tv q_v [q_v <= p_v] - k_ce [v = y]
         k_ce = c_ce,  k_kl = c_kl + c_lk w,  k_tv = c_tv + c_lk (1 - w) + c_nla / alpha,  s = sum q_v [q_v <= p_v]

On a reduced draft vocabulary kl takes p renormalised over the kept tokens; alpha (so tv, nla, lk) takes p as it is, so
the mass of tokens that the draft cannot offer counts as rejected. ce leaves out rows whose y is not kept.

Rows share teachers: row i is compared with teacher row teacher_index[i]. The work goes over chunks of teacher rows, so
that p is made once per teacher row and no [rows, vocabulary] tensor outlives a chunk; the gradients of the hidden
states and of a trained head are formed in the same pass (nothing is computed again in backward). Statistics are fp32
whatever the matrix products run in: p - q cancels when the draft is good.

Sources: total variation and acceptance, Leviathan et al. 2023 section 3; lk, arXiv 2602.23881.
Letters: N rows, U teacher rows, D width, Vd draft vocabulary, V target vocabulary, r rank of the bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.models.layers import matmul_dtype

SMALLEST_ALPHA = 1e-5  # nla is cut off here: where the supports hardly meet, 1 / alpha would drown every other row
CPU_ELEMENTS, GPU_ELEMENTS = 2**21, 2**27  # draft logits of one chunk: what a cache holds; enough work for a launch


@dataclass(frozen=True)
class Mix:
    """Weights of the losses in the module's equation."""

    ce: float = 0.0
    kl: float = 0.0
    tv: float = 0.0
    nla: float = 0.0
    lk: float = 0.0
    lk_eta: float = 3.0

    @property
    def needs_teacher(self) -> bool:
        return bool(self.kl or self.needs_acceptance)

    @property
    def needs_acceptance(self) -> bool:
        """Whether the gradient uses alpha, hence the target's distribution over its full vocabulary."""
        return bool(self.tv or self.nla or self.lk)


class Teacher(NamedTuple):
    """Where p comes from: softmax over [softcap](hidden @ head.T).

    hidden: [U, D], what goes into the target's head. head: [Vd, D], the target's rows of the draft vocabulary.
    full_head: [V, D], wanted when the draft vocabulary is reduced and the mix needs acceptance, else None.
    """

    hidden: Tensor
    head: Tensor
    full_head: Tensor | None = None
    softcap: float | None = None


class Distilled(NamedTuple):
    """What distill returns, [N] each, in the order of the rows.

    total: sum of weights * loss, with gradient; None without weights. loss: with gradient when there are no weights.
    ce: -log q(y), inf where y is not in the draft vocabulary. match: 1 where the draft's best token is y, else 0.
    alpha: sum min(p, q); with a full_head or a full vocabulary the chance that a sampled proposal is accepted, else
    against p renormalised over the draft vocabulary; None without a teacher. The last three carry no gradient.
    """

    total: Tensor | None
    loss: Tensor
    ce: Tensor
    match: Tensor
    alpha: Tensor | None


def distill(
    hidden: Tensor,
    teacher_index: Tensor,
    labels: Tensor,
    head: Tensor,
    teacher: Teacher | None,
    mix: Mix,
    *,
    weights: Tensor | None = None,
    ce_scale: Tensor | None = None,
    bias_features: Tensor | None = None,
    bias_weight: Tensor | None = None,
    softcap: float | None = None,
    elements: int | None = None,
) -> Distilled:
    """Losses of N >= 1 rows under the logits [softcap](hidden @ head.T) + bias_features @ bias_weight.T.

    hidden: [N, D]. teacher_index: [N] int64 on the host, the row of `teacher` each row is compared with.
    labels: [N] int64, the draft's column of y, -1 = y is not kept. head: [Vd, D].
    bias_features: [N, r] and bias_weight: [Vd, r], a low-rank Markov bias, or both None.
    weights: [N], fixed weights of the rows. Needed when head or bias_weight is trained, because their gradients are
    formed in the forward pass. Without weights any weighting of `loss` may follow in autograd.
    ce_scale: [N], a factor on ce alone, for denominators that count kept labels only.
    elements: draft logits held at a time (else CPU_ELEMENTS or GPU_ELEMENTS).
    Under autocast the matrix products run in the autocast type.
    """
    trained = [name for name, t in (("head", head), ("bias_weight", bias_weight)) if t is not None and t.requires_grad]
    if trained and weights is None and torch.is_grad_enabled():
        raise ValueError(f"distill: {' and '.join(trained)} is trained, so `weights` must be given")
    if mix.needs_teacher and teacher is None:
        raise ValueError(f"distill: {mix} compares with the target's distribution, so `teacher` must be given")
    assert (bias_features is None) == (bias_weight is None), "give both bias_features and bias_weight, or none"
    if teacher is None:
        teacher_index = torch.arange(len(hidden))
    if elements is None:
        elements = CPU_ELEMENTS if hidden.device.type == "cpu" else GPU_ELEMENTS
    chunks = _Chunks.of(teacher_index, len(head), elements)
    work = _Work(teacher, mix, labels, ce_scale, softcap, matmul_dtype(hidden), chunks)
    return Distilled(*_Distill.apply(hidden, head, bias_features, bias_weight, weights, work))


class _Chunk(NamedTuple):
    """Teacher rows [first, last) and the rows [start, stop), in processing order, that are compared with them.

    runs: (start, stop, teachers) of rows in the chunk; teachers is a slice of its teacher rows, or a host index.
    """

    first: int
    last: int
    start: int
    stop: int
    runs: list[tuple[int, int, slice | Tensor]]


class _Chunks(NamedTuple):
    """The order in which rows are processed ([N] int64 on the host; None = as given) and how it is cut."""

    order: Tensor | None
    chunks: list[_Chunk]

    @classmethod
    def of(cls, teacher_index: Tensor, vocab_size: int, elements: int) -> _Chunks:
        index = teacher_index.numpy()
        num_teachers = int(index.max()) + 1
        rows_per_teacher = max(len(index) / num_teachers, 1.0)
        size = max(int(elements / vocab_size / rows_per_teacher) // 32 * 32, 32)
        chunk_of_row = index // size
        order = np.argsort(chunk_of_row, kind="stable")
        index = index[order]
        starts = np.searchsorted(chunk_of_row[order], np.arange(-(-num_teachers // size) + 1))
        chunks = []
        for i, (start, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            if start < stop:
                first, last = i * size, min((i + 1) * size, num_teachers)
                chunks.append(_Chunk(first, last, start, stop, list(_runs(index[start:stop] - first))))
        in_order = bool((order[:-1] < order[1:]).all())
        return cls(None if in_order else torch.from_numpy(order), chunks)


def _runs(index: np.ndarray) -> Iterator[tuple[int, int, slice | Tensor]]:
    """Cut rows where their teachers stop being consecutive, so that p is sliced; many short runs: gather instead."""
    cuts = [0, *(np.flatnonzero(np.diff(index) != 1) + 1).tolist(), len(index)]
    if len(cuts) > 5 and len(index) / len(cuts) < 16:
        yield 0, len(index), torch.from_numpy(index)
        return
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        yield start, stop, slice(int(index[start]), int(index[start]) + stop - start)


class _Work(NamedTuple):
    """What distill hands to its autograd function beside the tensors that get gradients."""

    teacher: Teacher | None
    mix: Mix
    labels: Tensor
    ce_scale: Tensor | None
    softcap: float | None
    dtype: torch.dtype
    chunks: _Chunks


class _Probs(NamedTuple):
    """p of some teacher rows: [u, Vd] renormalised over the draft vocabulary, sum p log p [u], kept mass [u] or None."""

    probs: Tensor
    negative_entropy: Tensor
    kept: Tensor | None

    def at(self, rows: slice | Tensor) -> _Probs:
        if isinstance(rows, Tensor):
            rows = rows.to(self.probs.device)
        return _Probs(self.probs[rows], self.negative_entropy[rows], None if self.kept is None else self.kept[rows])


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias_features: Tensor | None,
        bias_weight: Tensor | None,
        weights: Tensor | None,
        work: _Work,
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor | None]:
        with torch.autocast(hidden.device.type, enabled=False):
            return _forward(ctx, hidden, head, bias_features, bias_weight, weights, work)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor | None, d_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        d_hidden, d_features, d_head, d_bias, weights = ctx.saved_tensors
        d_rows = (d_loss if weights is None else d_total * weights)[:, None]
        return (
            (d_hidden * d_rows).to(ctx.dtypes[0]),
            None if d_head is None else d_head * d_total,
            None if d_features is None else (d_features * d_rows).to(ctx.dtypes[1]),
            None if d_bias is None else d_bias * d_total,
            None,
            None,
        )


def _forward(
    ctx: Any,
    hidden: Tensor,
    head: Tensor,
    features: Tensor | None,
    bias_weight: Tensor | None,
    weights: Tensor | None,
    work: _Work,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor | None]:
    dtype, statistics = work.dtype, torch.promote_types(hidden.dtype, torch.float32)
    order = None if work.chunks.order is None else work.chunks.order.to(hidden.device)
    hidden_sorted = _take(hidden, order).to(dtype)
    features_sorted = None if features is None else _take(features, order).to(dtype)
    labels, scale = _take(work.labels, order), None if work.ce_scale is None else _take(work.ce_scale, order)
    row_weights = None if weights is None else _take(weights, order)
    table, bias_table = head.to(dtype), None if bias_weight is None else bias_weight.to(dtype)

    d_hidden = torch.empty_like(hidden_sorted)
    d_features = None if features_sorted is None else torch.empty_like(features_sorted)
    d_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
    d_bias = torch.zeros_like(bias_weight) if bias_weight is not None and ctx.needs_input_grad[3] else None
    loss, ce, match, alpha = (hidden.new_empty(len(hidden), dtype=statistics) for _ in range(4))

    for chunk in work.chunks.chunks:
        rows = slice(chunk.start, chunk.stop)
        teacher = None if work.teacher is None else _probs(work.teacher, chunk, work.mix, dtype, statistics)
        x = hidden_sorted[rows]
        logits = (x @ table.T).to(statistics)  # [n, Vd]
        slope = _softcap_(logits, work.softcap)
        if features_sorted is not None and bias_table is not None:
            _add_product_(logits, features_sorted[rows].T, bias_table.T)
        for start, stop, teachers in chunk.runs:
            part, run = logits[start:stop], slice(chunk.start + start, chunk.start + stop)
            loss[run], ce[run], match[run], alpha[run] = _losses_(
                part,
                None if teacher is None else teacher.at(teachers),
                labels[run],
                None if scale is None else scale[run],
                work.mix,
            )
        d_logits = logits.to(dtype)  # _losses_ has put the gradient there
        if d_features is not None and bias_table is not None:
            torch.mm(d_logits, bias_table, out=d_features[rows])
        if d_bias is not None and features_sorted is not None and row_weights is not None:
            _add_product_(d_bias, d_logits, (features_sorted[rows] * row_weights[rows, None]).to(dtype))
        if slope is not None:
            d_logits *= slope
        torch.mm(d_logits, table, out=d_hidden[rows])
        if d_head is not None and row_weights is not None:
            _add_product_(d_head, d_logits, (x * row_weights[rows, None]).to(dtype))

    loss, ce, match, alpha = (_put(t, order) for t in (loss, ce, match, alpha))
    total = None if weights is None else (weights * loss).sum()
    d_features = None if d_features is None else _put(d_features, order)
    ctx.save_for_backward(_put(d_hidden, order), d_features, d_head, d_bias, weights)
    ctx.dtypes = hidden.dtype, None if features is None else features.dtype
    ctx.mark_non_differentiable(ce, match, alpha, *(() if weights is None else (loss,)))
    return total, loss, ce, match, None if work.teacher is None else alpha


def _losses_(
    logits: Tensor,
    teacher: _Probs | None,
    labels: Tensor,
    ce_scale: Tensor | None,
    mix: Mix,
) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
    """(loss, ce, match, alpha) of rows [n, Vd]; `logits` is overwritten by the gradient of the loss."""
    kept = labels >= 0
    column = labels.clamp_min(0)[:, None]
    label_logit = logits.gather(1, column)[:, 0]
    cross = None if teacher is None else torch.linalg.vecdot(teacher.probs, logits)
    best = logits.amax(-1)
    probs, lse = _softmax_(logits)
    ce = (lse - label_logit).masked_fill(~kept, torch.inf)
    match = ((label_logit >= best) & kept).to(ce.dtype)

    loss = torch.zeros_like(ce)
    k_ce: Tensor | None = None
    if mix.ce:
        k_ce = kept.to(ce.dtype) * mix.ce * (1.0 if ce_scale is None else ce_scale.to(ce.dtype))
        loss += k_ce * ce.masked_fill(~kept, 0.0)
    alpha: Tensor | float = 0.0
    if teacher is None:
        assert k_ce is not None
        probs *= k_ce[:, None]
    else:
        assert cross is not None
        kl = teacher.negative_entropy - cross + lse
        true = teacher.probs if teacher.kept is None else teacher.probs * teacher.kept[:, None]
        alpha = torch.minimum(probs, true).sum(-1)
        w = torch.exp(-mix.lk_eta * alpha) if mix.lk else torch.zeros_like(alpha)
        k_kl = mix.kl + mix.lk * w
        loss += k_kl * kl
        if mix.needs_acceptance:
            floor = alpha.clamp_min(SMALLEST_ALPHA)
            k_tv = mix.tv + mix.lk * (1 - w)
            loss += k_tv * (1 - alpha) - mix.nla * floor.log()
            k_tv = k_tv + mix.nla / floor
            # q [q <= p]; torch.where takes ten times as long
            below = torch.le(probs, true, out=torch.empty_like(probs)).mul_(probs)
            factor = k_kl + k_tv * below.sum(-1) + (0.0 if k_ce is None else k_ce)
            probs *= factor[:, None]
            probs.addcmul_(below, k_tv[:, None], value=-1)
            probs.addcmul_(teacher.probs, k_kl[:, None], value=-1)
        elif k_ce is None:
            probs.sub_(teacher.probs)
            if mix.kl != 1:
                probs *= mix.kl
        else:
            probs *= (k_kl + k_ce)[:, None]
            probs.sub_(teacher.probs, alpha=mix.kl)
    if k_ce is not None:
        probs.scatter_add_(1, column, -k_ce[:, None])
    return loss, ce, match, alpha


def _probs(teacher: Teacher, chunk: _Chunk, mix: Mix, dtype: torch.dtype, statistics: torch.dtype) -> _Probs:
    """p of the chunk's teacher rows."""
    hidden = teacher.hidden[chunk.first : chunk.last].to(dtype)
    logits = (hidden @ teacher.head.to(dtype).T).to(statistics)
    _softcap_(logits, teacher.softcap)
    raw = logits.clone()
    probs, lse = _softmax_(logits)
    negative_entropy = torch.linalg.vecdot(probs, raw) - lse
    kept = None
    if mix.needs_acceptance and teacher.full_head is not None:
        kept = torch.exp(lse - _full_lse(hidden, teacher, statistics, logits.numel()))
    return _Probs(probs, negative_entropy, kept)


def _full_lse(hidden: Tensor, teacher: Teacher, statistics: torch.dtype, elements: int) -> Tensor:
    """log sum exp of the target's logits over its whole vocabulary [u], in blocks of about `elements` logits."""
    assert teacher.full_head is not None
    block = max(elements // len(hidden), 1024)
    total = hidden.new_full((len(hidden),), -torch.inf, dtype=statistics)
    for rows in teacher.full_head.split(block):
        logits = (hidden @ rows.to(hidden.dtype).T).to(statistics)
        _softcap_(logits, teacher.softcap)
        total = torch.logaddexp(total, _softmax_(logits)[1])
    return total


def _softmax_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(softmax, log sum exp) in place: the largest probability is exp(largest logit - lse), which spares a pass."""
    best = logits.amax(-1)
    probs = torch.softmax(logits, -1, out=logits)
    return probs, best - probs.amax(-1).log()


def _softcap_(logits: Tensor, softcap: float | None) -> Tensor | None:
    """Cap the logits in place: c tanh(logit / c); returns the slope at each logit, None without a cap."""
    if softcap is None:
        return None
    logits.div_(softcap).tanh_()
    slope = 1 - logits.square()
    logits.mul_(softcap)
    return slope


def _take(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x[order]


def _put(x: Tensor, order: Tensor | None) -> Tensor:
    """The inverse of _take."""
    if order is None:
        return x
    given = torch.empty_like(x)
    given[order] = x
    return given


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left.T @ right, without a temporary where the types allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    else:
        total += left.T @ right
