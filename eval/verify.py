"""Verification: which proposed tokens the target accepts, and which token it adds.

One target pass over `anchor, d_1 .. d_K` gives K + 1 rows; row k is the target's distribution of the token after
d_1 .. d_k, so it judges proposal d_{k+1}, and row `num_accepted` gives the token that the target adds.

    rows        p_0         p_1         ...   p_K
    judges      d_1         d_2               -
    adds        if d_1 is rejected  ...       if all K are accepted (bonus)

Greedy: accept while d_k is the argmax. Sampling: accept d_k when u < p(d_k) / q(d_k), else draw from
max(p - q, 0) (Leviathan et al. 2023, appendix A.1; Chen et al. 2023). q is the distribution that d_k was really drawn
from: for a deterministic proposal the point mass on d_k, so that it is accepted with chance p(d_k).

Everything here is a pure function: randomness comes in as uniforms in [0, 1).
Shapes: B rows, K proposals, V target vocabulary, Vd draft vocabulary. Ragged by num [B].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.models.draft import Proposal
from draftsmith.models.sampling import Sampler


class Verdict(NamedTuple):
    """num_accepted [B]: accepted proposals, 0..num. token [B]: the one token the target adds to each row."""

    num_accepted: Tensor
    token: Tensor


def verify(logits: Tensor, proposal: Proposal, sampler: Sampler, uniforms: Tensor | None) -> Verdict:
    """Judge one round.

    logits: [B, K+1, V] of the target over anchor and proposal. uniforms: [B, K+1] float64 in [0, 1): one per accept
    test and the last for the token that the target adds; None is enough for a greedy sampler.
    """
    if sampler.greedy:
        return greedy(logits.argmax(-1), proposal.ids, proposal.num)
    assert uniforms is not None, "sampling needs uniforms [B, K+1]"
    return rejection(sampler.probs(logits), proposal, uniforms)


def greedy(target_ids: Tensor, ids: Tensor, num: Tensor) -> Verdict:
    """Accept the leading proposals that equal the target's choice; add the target's choice after them.

    target_ids: [B, K+1] argmax of every row. ids: [B, K]. num: [B], how many of the K are offered.
    """
    num_accepted = num_leading(target_ids[:, :-1] == ids, num)
    return Verdict(num_accepted, target_ids.gather(1, num_accepted[:, None]).squeeze(1))


def rejection(target_probs: Tensor, proposal: Proposal, uniforms: Tensor) -> Verdict:
    """Speculative rejection sampling; the committed tokens follow the target's distribution exactly.

    target_probs: [B, K+1, V], already warped by temperature, top-k and top-p. uniforms: [B, K+1], see verify.
    """
    ids, num = proposal.ids, proposal.num
    target, draft = slot_chances(target_probs, proposal)
    # u * q < p instead of u < p / q: no division, never accepts p = 0, always accepts p >= q > 0
    num_accepted = num_leading(uniforms[:, :-1] * draft < target, num)
    weights = target_probs.gather(1, num_accepted[:, None, None].expand(-1, 1, target_probs.shape[-1])).squeeze(1)
    if ids.shape[1]:
        rejected = num_accepted < num
        slot = num_accepted.clamp(max=ids.shape[1] - 1)
        weights = torch.where(rejected[:, None], residual(weights, proposal, slot), weights)
    return Verdict(num_accepted, draw(weights, uniforms[:, -1]))


def num_leading(matches: Tensor, num: Tensor) -> Tensor:
    """How many leading slots are True, [B]; slots at or past num[b] never count. matches: [B, K] bool."""
    slots = torch.arange(matches.shape[1], device=matches.device)
    return (matches & (slots < num[:, None])).long().cumprod(1).sum(1)


def slot_chances(target_probs: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """(p(d_k), q(d_k)) of every proposal, [B, K] each, float64. A deterministic proposal has q = 1."""
    ids = proposal.ids
    target = target_probs[:, :-1].gather(2, ids[..., None]).squeeze(2).double()
    if proposal.probs is None:
        return target, torch.ones_like(target)
    columns = ids if proposal.vocab is None else torch.searchsorted(proposal.vocab, ids)
    return target, proposal.probs.gather(2, columns[..., None]).squeeze(2).double()


def residual(target_probs: Tensor, proposal: Proposal, slot: Tensor) -> Tensor:
    """max(p - q, 0) of each row at its rejected slot, [B, V], not normalised.

    target_probs: [B, V], the target's distribution at `slot` [B] (0-based). Where nothing is left because p and q agree
    to rounding, p itself is returned.
    """
    rows = torch.arange(len(slot), device=slot.device)
    left = target_probs.clone()
    if proposal.probs is None:
        left[rows, proposal.ids[rows, slot]] = 0
    else:
        draft_probs = proposal.probs[rows, slot].to(left.dtype)
        if proposal.vocab is None:
            left -= draft_probs
        else:  # tokens outside the draft vocabulary have q = 0
            left.index_add_(1, proposal.vocab, -draft_probs)
        left.clamp_(min=0)
    return torch.where(left.sum(1, keepdim=True) > 0, left, target_probs)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index per row by inverting the cumulative sum in float64. weights: [..., V] >= 0; uniforms: [...] -> [...].

    An index of weight 0 is never drawn.
    """
    cumulative = weights.double().cumsum(-1)
    total = cumulative[..., -1:]
    found = torch.searchsorted(cumulative, uniforms[..., None].double() * total, right=True)
    last = torch.searchsorted(
        cumulative, total.contiguous()
    )  # first index that reaches the total: the last one of weight > 0
    return torch.minimum(found, last).squeeze(-1)
