"""Blocks of a parallel draft in training: where they start, what their slots see and predict, and how much each counts.

A block of L positions drafts from an anchor a in one pass. Slot 0 holds the token x[a], the other slots the mask token;
slot k stands at position a + k. Which token a slot predicts is the layout:

    layout     slot 0    slot 1    slot 2   ...   slot L-1      proposals K
    infill        -      x[a+1]    x[a+2]   ...   x[a+L-1]         L - 1
    shifted    x[a+1]    x[a+2]    x[a+3]   ...   x[a+L]           L

    anchors       positions with a supervised proposal; never the first token of a document, which has nothing before it
    supervised    proposal s = 0, 1, ... (for x[a+1+s]) iff the loss mask is 1 at x[a], ..., x[a+1+s], one document
    teacher       the last hidden state at a + s
    seen          context rows u < a of the document, and the own block: all of it, or up to the slot itself (causal).
                  Row a is hidden: when a server drafts from x[a], its state does not exist yet
    window W      the slot at position p sees positions after p - W only

Example, T=6, L=3, anchors 1 and 3 (c: context row, nk: slot k of block n):

                 c0 c1 c2 c3 c4 c5   00 01 02   10 11 12      infill    shifted
    00  x[1]      1                   1  1  1                    -        x[2]
    01  mask      1                   1  1  1                   x[2]      x[3]
    02  mask      1                   1  1  1                   x[3]      x[4]
    10  x[3]      1  1  1                        1  1  1         -        x[4]
    11  mask      1  1  1                        1  1  1        x[4]      x[5]
    12  mask      1  1  1                        1  1  1        x[5]       -

Everything but the weights is made on the host. Letters: T tokens, M context rows, N blocks, L slots, K proposals,
P supervised (block, proposal) pairs, U teacher rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftsmith.models.chains import supervised_steps
from draftsmith.models.draft import Batch, TargetSpec
from draftsmith.models.layers import BlockSpan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Layout = Literal["infill", "shifted"]

MASK_NAMES = re.compile(r"mask", re.IGNORECASE)
SPARE_NAMES = re.compile(r"reserved|unused|placeholder|extra_id|dummy", re.IGNORECASE)


def first_slot(layout: Layout) -> int:
    """The first slot that predicts a token."""
    return 1 if layout == "infill" else 0


# -- anchors ---------------------------------------------------------------------------------------------------------
def supervised_proposals(loss_mask: np.ndarray, bounds: Sequence[int], most: int) -> np.ndarray:
    """[T] supervised proposals, 0..most, of a block that starts at each position: the first n, and no later one."""
    after_features = supervised_steps(loss_mask, bounds, most)  # row a - 1 of a chain has the anchor a
    return np.concatenate([np.zeros(1, after_features.dtype), after_features])[: len(loss_mask)]


def draw_anchors(batch: Batch, num_supervised: np.ndarray, rate: float) -> np.ndarray:
    """[N] ascending packed positions: of each document the share `rate` of the positions that can start a block.

    num_supervised: [T], from supervised_proposals. At least one block of every document that can have one. The draw
    follows from (batch.seed, row id): it is the same in `counts` and in `forward`, in every packing and on every rank.
    """
    chosen = [np.zeros(0, dtype=np.int64)]
    for doc, (start, end) in enumerate(batch.docs):
        candidates = start + np.flatnonzero(num_supervised[start:end])
        if not len(candidates):
            continue
        num = max(1, round(rate * len(candidates)))
        name = batch.row_ids[doc] if batch.row_ids else doc
        digest = hashlib.sha256(f"anchors {batch.seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        order = torch.randperm(len(candidates), generator=generator).numpy()
        chosen.append(candidates[np.sort(order[:num])])
    return np.concatenate(chosen)


class Plan(NamedTuple):
    """Index plan of one pass over the blocks of a batch.

    context: [M] packed positions whose features are read: each document up to its last anchor. anchors: [N] packed.
    spans: what the blocks see of the context. pairs: [P] supervised pairs, numbered block * K + proposal, in the order
    of `before` [P], the packed position a + s in front of each label: its last hidden state is the teacher, its token
    the predecessor. teachers: [U] those positions without repeats; teacher_index: [P] on the host, the teacher of each.
    """

    context: Tensor
    anchors: Tensor
    spans: list[BlockSpan]
    pairs: Tensor
    before: Tensor
    teachers: Tensor
    teacher_index: Tensor

    @classmethod
    def of(
        cls,
        anchors: np.ndarray,
        num_pairs: np.ndarray,
        bounds: Sequence[int],
        num_proposals: int,
        device: torch.device,
    ) -> Plan:
        """Plan for N >= 1 ascending anchors, the first num_pairs[i] proposals of block i being compared."""
        starts = np.asarray(bounds[:-1], dtype=np.int64)
        doc = np.searchsorted(starts, anchors, side="right") - 1
        context, spans, size = [], [], 0
        for d in np.unique(doc):
            start, blocks = int(starts[d]), np.flatnonzero(doc == d)
            ends = anchors[blocks] - start
            context.append(np.arange(start, start + ends[-1]))
            spans.append(BlockSpan(size, int(blocks[0]), int(blocks[-1]) + 1, tuple((size + ends).tolist())))
            size += int(ends[-1])
        block, proposal = np.nonzero(np.arange(num_proposals) < num_pairs[:, None])
        before = anchors[block] + proposal
        order = np.argsort(before, kind="stable")
        teachers, teacher_index = np.unique(before[order], return_inverse=True)
        return cls(
            torch.from_numpy(np.concatenate(context)).to(device),
            torch.from_numpy(anchors).to(device),
            spans,
            torch.from_numpy((block * num_proposals + proposal)[order]).to(device),
            torch.from_numpy(before[order]).to(device),
            torch.from_numpy(teachers).to(device),
            torch.from_numpy(teacher_index),
        )


# -- position weights ------------------------------------------------------------------------------------------------
def falling_weights(proposal: Tensor, gamma: float) -> Tensor:
    """exp(-s / gamma) of proposals s = 0, 1, ...: early ones decide whether later ones are looked at (DFlash)."""
    return torch.exp(-proposal.float() / gamma)


def pace_weights(ce: Tensor, pairs: Tensor, num_blocks: int, num_proposals: int, smoothing: float = 0.5) -> Tensor:
    """D-PACE weights of pairs [P] with cross entropies ce [P]; no gradient.

    With c = exp(-ce), smoothed to (1 - smoothing) c + smoothing, the weight of proposal s is the sum over supervised
    r >= s of c_0 .. c_r: the derivative of the expected number of accepted tokens by log c_s (arXiv 2605.18810).
    """
    chance = (1 - smoothing) * torch.exp(-ce.detach()) + smoothing
    table = chance.new_zeros(num_blocks * num_proposals).scatter_(0, pairs, chance)  # 0 ends the product
    reached = table.view(num_blocks, num_proposals).cumprod(1)
    return reached.flip(1).cumsum(1).flip(1).flatten()[pairs]


# -- the mask token --------------------------------------------------------------------------------------------------
def choose_mask_token(tokenizer: PreTrainedTokenizerBase, target: TargetSpec) -> int:
    """A target id that stands for "unknown" in the slots of a block: its embedding exists and no text uses it.

    In this order: a special token named mask; the first id past the tokenizer's, where the target's vocabulary is
    padded (Qwen3: 151669, as published DFlash drafts use); a token named reserved or unused; the last special token
    that neither ends, starts or pads a text nor stands in the chat template. Otherwise refused, with candidates.
    """
    named = {token: i for token, i in tokenizer.get_vocab().items() if i < target.vocab_size}
    special = set(tokenizer.all_special_ids) | {
        i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    roles = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    taken = set(target.eos_ids) | {i for i in roles if i is not None}
    free = {token: i for token, i in sorted(named.items(), key=lambda item: item[1]) if i not in taken}
    template = str(tokenizer.chat_template or "")

    masks = [i for token, i in free.items() if i in special and MASK_NAMES.search(token)]
    past = max(tokenizer.get_vocab().values()) + 1
    spare = [i for token, i in free.items() if SPARE_NAMES.search(token) and _is_marked(token)]
    unspoken = [i for token, i in free.items() if i in special and token not in template]
    if masks:
        return masks[0]
    if past < target.vocab_size:
        return past
    if spare or unspoken:
        return (spare or unspoken[-1:])[0]
    rarest = list(free.items())[-5:]
    listed = ", ".join(f"{i} {token!r}" for token, i in rarest)
    raise ValueError(
        f"draft.mask_token_id: the tokenizer of {target.name} has no unused id among its {target.vocab_size} (no mask, "
        f"reserved or padding token); choose one that your texts never contain, for example from {listed}"
    )


def _is_marked(token: str) -> bool:
    """Written in brackets, as tokens that stand outside of the language are."""
    return token[:1] in "<[" and token[-1:] in ">]"
