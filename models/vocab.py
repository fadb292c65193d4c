"""The draft vocabulary: which target tokens a draft can offer. Absolute target ids, ascending, [Vd] int64.

A smaller vocabulary makes the draft's head cheaper; a token outside of it can never be proposed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def choose(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent tokens as ascending ids; equal counts (and unseen tokens) go by ascending id.

    counts: [V], how often each target token is to be expected (models.draft.TokenStats.expected).
    """
    vocab_size = len(counts)
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"draft.draft_vocab is {size}, the target has {vocab_size} tokens: give 1..{vocab_size}, "
            "or leave it out for the full vocabulary"
        )
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def columns(ids: Tensor, draft_vocab: Tensor | None) -> Tensor:
    """The draft's column of each target id, -1 where the draft vocabulary lacks it. draft_vocab None = all tokens."""
    if draft_vocab is None:
        return ids
    column = torch.searchsorted(draft_vocab, ids).clamp_max(len(draft_vocab) - 1)
    return torch.where(draft_vocab[column] == ids, column, -1)


def coverage(counts: Tensor, draft_vocab: Tensor) -> float:
    """Share of the counted tokens that the draft vocabulary holds, 0..1."""
    return float(counts[draft_vocab].sum() / counts.sum().clamp_min(1))
