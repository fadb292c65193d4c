"""Exact expected acceptance without decoding, from teacher-forced probabilities on answers of the target.

Given that the target says the text x, proposal k at anchor a is accepted with chance

    r[a, k] = min(1, q(x[a+k]) / p(x[a+k]))     drawn proposals: P(accept and token = x) = min(p, q)(x), P(token = x) = p(x)
    r[a, k] = 1 if argmax q = x[a+k] else 0     greedy, and deterministic proposals at any temperature

so P(accepted >= k | x) is the running product, and how often an anchor is visited follows by dynamic programming:

    visits[first] = 1,   visits[a + k + 1] += visits[a] * P(accepted = k | x)
    expected rounds = sum of visits;   rounds with accepted >= k = sum over a of visits[a] * r[a, 1] * .. * r[a, k]

This is exact in expectation over the draft's and the acceptance's randomness, and unbiased over texts if the rows were
drawn by the same sampler from this target. Anchors are weighted by their visits: a plain mean over anchors is not the
acceptance length.

At the end of a row the text is not known any further. So slots count only while a token of the row follows them: with
n tokens left after the anchor, at most n - 1 proposals, the n-th token being the bonus. Then accepted + 1 summed over
rounds is exactly the number of tokens after the first, and acceptance length = tokens / rounds. The runtime's
`Decoded.rounds_within_text` counts the same way; acceptance-runtime.json does not cut, and so is a little higher.

Shapes: S answers, L longest answer, K proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.eval.acceptance import Counts, acceptance_object, pool
from draftsmith.eval.runtime import check_num
from draftsmith.models.draft import Batch, Draft
from draftsmith.models.sampling import Sampler


class Answer(NamedTuple):
    """One answer on the packed axis: its first and last token, and the row it belongs to."""

    first: int
    last: int
    row_id: str


@torch.no_grad()
def exact(
    draft: Draft,
    batches: Iterable[Batch],
    kinds: Mapping[str, str],
    num: int,
    sampler: Sampler,
    max_new_tokens: int,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """The object of acceptance-exact.json.

    batches: rows with target states, e.g. `BatchSource(...).every_row()`; every run of supervised tokens is an answer,
    cut at max_new_tokens. kinds: {row id: prompt kind}. draft: bound to the target. num_prompts counts answers.
    progress is told how many tokens were looked at.
    """
    check_num(draft, num)
    device = next((p.device for p in draft.parameters()), None)
    parts: list[tuple[str, Counts]] = []
    for batch in batches:
        found = answers(batch, max_new_tokens)
        for answer, counts in zip(
            found, batch_counts(draft, batch if device is None else batch.to(device), found, num, sampler)
        ):
            if answer.row_id not in kinds:
                raise ValueError(f"row {answer.row_id}: no prompt kind given; kinds name {sorted(kinds)[:3]} ...")
            parts.append((kinds[answer.row_id], counts))
        if progress is not None:
            progress(sum(a.last - a.first + 1 for a in found))
    if not parts:
        raise ValueError("exact evaluation got no row with supervised tokens; give held-out answers of the target")
    return acceptance_object("exact", pool(parts, num), num, sampler, max_new_tokens)


def answers(batch: Batch, max_new_tokens: int) -> list[Answer]:
    """Runs of supervised tokens, cut at max_new_tokens. A token at position 0 has no prompt and starts no answer."""
    mask = batch.loss_mask.tolist()
    found = []
    for doc, (start, end) in enumerate(batch.docs):
        row_id = batch.row_ids[doc] if batch.row_ids else ""
        position = start + 1
        while position < end:
            if not mask[position]:
                position += 1
                continue
            first = position
            while position < end and mask[position]:
                position += 1
            found.append(Answer(first, min(position, first + max_new_tokens) - 1, row_id))
    return found


def batch_counts(draft: Draft, batch: Batch, found: list[Answer], num: int, sampler: Sampler) -> list[Counts]:
    """Expected counts of every answer of a batch."""
    places = [range(a.first, a.last) for a in found]  # the last token is no anchor: nothing follows it
    anchors = torch.tensor([a for place in places for a in place], dtype=torch.int64, device=batch.input_ids.device)
    chances = accept_chances(draft, batch, anchors, num, sampler).split([len(place) for place in places])
    if not found:
        return []
    lengths = torch.tensor([len(place) for place in places])
    padded = torch.nn.utils.rnn.pad_sequence(list(chances), batch_first=True)  # [S, L, K]
    return expected_counts(padded, lengths)


def accept_chances(draft: Draft, batch: Batch, anchors: Tensor, num: int, sampler: Sampler) -> Tensor:
    """r [n, K] float64 on the host, for anchors [n]; 0 past the end of the document."""
    chances = torch.zeros(len(anchors), num, dtype=torch.float64)
    if not len(anchors):
        return chances
    ends = torch.tensor(batch.bounds[1:], device=anchors.device)
    done = 0
    for slots in draft.slot_probs(batch, anchors, num, sampler):
        rows = slice(done, done + len(slots.anchors))
        assert torch.equal(slots.anchors, anchors[rows]), "slot_probs must yield its anchors in the order given"
        done = rows.stop
        end = ends[torch.searchsorted(ends, slots.anchors, right=True)]
        places = slots.anchors[:, None] + torch.arange(1, num + 1, device=anchors.device)  # [n, K]
        inside = places < end[:, None]
        if sampler.greedy or not sampler.draft_sampling:
            right = slots.argmax == batch.input_ids[places.clamp(max=len(batch.input_ids) - 1)]
            ratio = right.double()
        else:
            ratio = _ratio(slots.draft.double(), slots.target.double(), inside)
        chances[rows] = (ratio * inside).cpu()
    assert done == len(anchors), f"slot_probs answered {done} of {len(anchors)} anchors"
    return chances


def _ratio(draft: Tensor, target: Tensor, inside: Tensor) -> Tensor:
    """min(1, q / p). A text that the warped target cannot say was not drawn by this sampler.

    Rounding may move a token across the edge of top-k or top-p, so up to one token in a hundred may have p = 0.
    """
    first = inside[:, 0]
    impossible = int((target[:, 0][first] == 0).sum())
    if impossible * 100 > int(first.sum()):
        raise ValueError(
            f"{impossible} of {int(first.sum())} tokens have probability 0 under this temperature / top_k / top_p: the rows "
            f"were not drawn by this sampler; evaluate with the settings the answers were generated with"
        )
    return (draft / target.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1)


def expected_counts(chances: Tensor, lengths: Tensor) -> list[Counts]:
    """Counts of each answer from r.

    chances: [S, L, K] float64, r of the anchors of each answer in order (its last token is no anchor).
    lengths: [S], anchors per answer = tokens after the first.
    """
    num_answers, longest, num = chances.shape
    left = lengths[:, None] - torch.arange(longest)  # [S, L] tokens that follow each anchor
    tested = torch.arange(1, num + 1) < left[..., None]  # a token must follow the slot
    survival = (chances * tested).cumprod(-1)  # [S, L, K] P(accepted >= k)
    before = torch.cat([torch.ones(num_answers, longest, 1, dtype=torch.float64), survival], -1)  # k = 0..K
    exactly = before - torch.cat([survival, torch.zeros(num_answers, longest, 1, dtype=torch.float64)], -1)
    visits = torch.zeros(num_answers, longest + num + 1, dtype=torch.float64)
    if longest:
        visits[:, 0] = 1
    for a in range(longest):
        visits[:, a + 1 : a + num + 2] += visits[:, a : a + 1] * exactly[:, a]
    visits = visits[:, :longest] * (left > 0)
    weight = visits[..., None]
    survivors = (weight * survival).sum(1).tolist()
    reached = (weight * before[..., :-1] * tested).sum(1).tolist()
    offered = (weight * tested).sum((1, 2)).tolist()
    rounds = visits.sum(1).tolist()
    return [Counts(survivors[i], reached[i], 1, rounds[i], offered[i], int(lengths[i]) + 1) for i in range(num_answers)]
