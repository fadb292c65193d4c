"""Drafts for tests of the evaluation: they know the answer and are right as often as a test wants, or they can draw.

A freshly initialised draft is almost never accepted and so proves little.
"""

from __future__ import annotations

import torch

from draftsmith.models.draft import Draft, DraftConfig, Needs, Proposal, SlotProbs
from draftsmith.models.target import Target


def slow_greedy(target, prompt, num):
    """The obvious loop: a full pass without any cache for every token."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num):
            ids.append(int(target.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


class Scripted(Draft):
    """Knows full texts (prompt + greedy continuation); each slot is right with chance `right`."""

    def __init__(self, target, texts, right=1.0, seed=0, max_proposal=None, fewer=False, check=True):
        super().__init__(DraftConfig(family="scripted"), target.spec)
        self.needs = Needs(aux_layers=(1, 4), last_hidden=True)
        self.max_proposal = max_proposal
        self.model_target, self.texts, self.right, self.fewer, self.check = target, texts, right, fewer, check
        self.random = torch.Generator().manual_seed(seed)

    def start(self, batch_size, max_len):
        return [[] for _ in range(batch_size)]

    def propose(self, state, tokens, captured, num, sampler):
        ids = torch.zeros(len(state), num, dtype=torch.long)
        for b, known in enumerate(state):
            n = int(captured.lengths[b])
            if n == 0:
                continue
            known += tokens[b, :n].tolist()
            texts = [t for t in self.texts if t[1 : 1 + len(known)] == known]
            assert texts or not self.check, f"the runtime committed {known}, which the target does not say"
            text = texts[0] if texts else [0, *known]  # knows nothing of a text that has gone wrong
            if self.check:  # the captured rows are the target's own states of the committed text
                start = len(known) - n
                want = self.model_target.forward(torch.tensor([text[: len(known)]]), needs=self.needs)
                torch.testing.assert_close(captured.features[b, :n], want.features[0, start:], atol=2e-4, rtol=1e-3)
                torch.testing.assert_close(
                    captured.last_hidden[b, :n], want.last_hidden[0, start:], atol=2e-4, rtol=1e-3
                )
            follow = text[1 + len(known) : 1 + len(known) + num]
            ids[b, : len(follow)] = torch.tensor(follow)
        wrong = torch.rand(ids.shape, generator=self.random) >= self.right
        ids = torch.where(wrong, (ids + 1) % self.target.vocab_size, ids)
        offered = torch.full((len(state),), num)
        if self.fewer:
            offered = torch.randint(0, num + 1, (len(state),), generator=self.random)
        return Proposal(ids, None, offered)


class Bigram(Draft):
    """Proposes from a table of next-token logits: no state but the last token. vocab: kept target ids or None.

    The table is the target's own opinion without context, blurred.
    """

    def __init__(self, target: Target, blur: float, vocab: torch.Tensor | None = None):
        super().__init__(DraftConfig(family="bigram"), target.spec)
        self.needs = Needs()
        self.model_target, self.vocab = target, vocab
        size = target.spec.vocab_size
        self.columns = torch.arange(size) if vocab is None else vocab
        logits = target.logits(target.forward(torch.arange(size)[:, None]).last_hidden[:, 0]).float()
        noise = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
        self.table = torch.nn.Parameter(0.8 * logits + blur * noise, requires_grad=False)

    def next_probs(self, ids, sampler):
        return sampler.probs(self.table[ids][..., self.columns])

    def start(self, batch_size, max_len):
        return None

    def propose(self, state, tokens, captured, num, sampler):
        last = tokens[torch.arange(len(tokens)), captured.lengths - 1]
        ids, probs = [], []
        for _ in range(num):
            q = self.next_probs(last, sampler)
            column = sampler.draw(q) if sampler.draft_sampling else q.argmax(-1)
            last = self.columns[column]
            ids.append(last)
            probs.append(q)
        soft = None if sampler.greedy or not sampler.draft_sampling else torch.stack(probs, 1)
        return Proposal(torch.stack(ids, 1), soft, torch.full((len(tokens),), num), self.vocab)

    def slot_probs(self, batch, anchors, num, sampler):
        places = anchors[:, None] + torch.arange(num)
        ends = torch.tensor(batch.bounds[1:])
        end = ends[torch.searchsorted(ends, anchors, right=True)][:, None]
        inside = places + 1 < end
        safe = places.clamp(max=len(batch.input_ids) - 2)
        seen, label = batch.input_ids[safe], batch.input_ids[safe + 1]
        q = torch.zeros(*seen.shape, self.target.vocab_size)
        q[..., self.columns] = self.next_probs(seen, sampler)
        p = sampler.probs(self.model_target.logits(batch.last_hidden[safe]))
        take = lambda probs: probs.gather(-1, label[..., None]).squeeze(-1) * inside  # noqa: E731
        best = torch.where(inside, q.argmax(-1), -1)
        half = len(anchors) // 2  # two chunks
        for rows in (slice(0, half), slice(half, None)):
            yield SlotProbs(
                anchors[rows], take(q)[rows], take(p)[rows], best[rows], (torch.minimum(p, q).sum(-1) * inside)[rows]
            )
