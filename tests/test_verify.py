"""Protects losslessness: whatever a draft proposes, the committed tokens follow the target. Run: pytest tests/test_verify.py

The law of the output is computed by exhaustive enumeration from the same pure functions that the runtime calls.
"""

from itertools import product

import pytest
import torch

from draftsmith.eval.verify import draw, greedy, num_leading, rejection, residual, slot_chances, verify
from draftsmith.models.draft import Proposal
from draftsmith.models.sampling import Sampler


def table(
    num_tokens: int, depth: int, seed: int, sharp: float = 1.5, sparse: bool = False
) -> dict[tuple, torch.Tensor]:
    """A random next-token distribution for every prefix of at most `depth` tokens, float64."""
    g = torch.Generator().manual_seed(seed)
    found = {}
    for length in range(depth + 1):
        for prefix in product(range(num_tokens), repeat=length):
            logits = sharp * torch.randn(num_tokens, generator=g, dtype=torch.float64)
            if sparse:  # what top-k leaves: some tokens are impossible
                logits[torch.randperm(num_tokens, generator=g)[: num_tokens // 2]] = float("-inf")
            found[prefix] = logits.softmax(0)
    return found


def target_law(target: dict, length: int, num_tokens: int) -> dict[tuple, float]:
    law = {}
    for text in product(range(num_tokens), repeat=length):
        chance = 1.0
        for i, token in enumerate(text):
            chance *= float(target[text[:i]][token])
        law[text] = chance
    return law


def speculative_law(target, draft, num: int, num_tokens: int, vocab=None, deterministic=False) -> dict[tuple, float]:
    """Law of the first num + 1 tokens: one round by the functions of verify.py, the rest of the text by the target."""
    law = dict.fromkeys(product(range(num_tokens), repeat=num + 1), 0.0)
    columns = list(range(num_tokens)) if vocab is None else vocab

    def finish(text: tuple, chance: float) -> None:
        if len(text) == num + 1:
            law[text] += chance
            return
        for token in range(num_tokens):
            finish((*text, token), chance * float(target[text][token]))

    for choice in product(range(len(columns)), repeat=num):
        ids = tuple(columns[c] for c in choice)
        proposed = 1.0
        for k in range(num):
            best = int(draft[ids[:k]].argmax())
            proposed *= float(best == choice[k]) if deterministic else float(draft[ids[:k]][choice[k]])
        if proposed == 0:
            continue
        proposal = Proposal(
            ids=torch.tensor([ids]),
            probs=None if deterministic else torch.stack([draft[ids[:k]] for k in range(num)])[None],
            num=torch.tensor([num]),
            vocab=None if vocab is None else torch.tensor(vocab),
        )
        target_probs = torch.stack([target[ids[:k]] for k in range(num + 1)])[None]
        p, q = slot_chances(target_probs, proposal)
        survive = proposed
        for k in range(num):
            accept = min(1.0, float(p[0, k] / q[0, k]))
            weights = residual(target_probs[:, k], proposal, torch.tensor([k]))[0]
            for token in range(num_tokens):
                finish((*ids[:k], token), survive * (1 - accept) * float(weights[token] / weights.sum()))
            survive *= accept
        for token in range(num_tokens):
            finish((*ids, token), survive * float(target_probs[0, num, token]))
    return law


@pytest.mark.parametrize(("num_tokens", "num"), [(2, 1), (3, 2), (3, 3), (4, 3), (6, 2)])
@pytest.mark.parametrize("kind", ["sampled", "deterministic", "reduced", "reduced deterministic", "sparse"])
def test_output_law_is_the_targets_by_exhaustive_enumeration(num_tokens, num, kind):
    target = table(num_tokens, num, seed=num_tokens, sparse=kind == "sparse")
    vocab = sorted({0, num_tokens - 1, num_tokens // 2})[: max(1, num_tokens - 1)] if "reduced" in kind else None
    width = num_tokens if vocab is None else len(vocab)
    g = torch.Generator().manual_seed(7)
    draft = {
        prefix: (1.5 * torch.randn(width, generator=g, dtype=torch.float64)).softmax(0)
        for length in range(num)
        for prefix in product(range(num_tokens), repeat=length)
    }
    law = speculative_law(target, draft, num, num_tokens, vocab, "deterministic" in kind)
    want = target_law(target, num + 1, num_tokens)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert max(abs(law[text] - want[text]) for text in want) < 1e-12


def test_a_draft_equal_to_the_target_is_always_accepted_and_the_residual_falls_back_to_the_target():
    probs = torch.tensor([[[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]])
    proposal = Proposal(ids=torch.tensor([[1]]), probs=probs[:, :1], num=torch.tensor([1]))
    verdict = rejection(probs, proposal, torch.tensor([[1 - 1e-12, 0.6]], dtype=torch.float64))
    assert verdict.num_accepted.tolist() == [1]
    assert verdict.token.tolist() == [1]
    assert torch.equal(residual(probs[:, 0], proposal, torch.tensor([0])), probs[:, 0])


@pytest.mark.parametrize("deterministic", [True, False])
def test_twenty_thousand_draws_follow_the_target(deterministic):
    """Accepting an argmax proposal by the ratio with the soft draft distribution would give [1, 0, 0] here."""
    target, soft = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    n = 20_000
    g = torch.Generator().manual_seed(0)
    uniforms = torch.rand(n, 2, generator=g, dtype=torch.float64)
    if deterministic:
        proposal = Proposal(torch.zeros(n, 1, dtype=torch.long), None, torch.ones(n, dtype=torch.long))
    else:
        ids = torch.multinomial(soft, n, replacement=True, generator=g)[:, None]
        proposal = Proposal(ids, soft.expand(n, 1, 3), torch.ones(n, dtype=torch.long))
    logits = target.log().expand(n, 2, 3)
    verdict = verify(logits, proposal, Sampler(temperature=1.0), uniforms)
    first = torch.where(verdict.num_accepted == 1, proposal.ids[:, 0], verdict.token)
    assert set(verdict.num_accepted.tolist()) == {0, 1}
    share = first.bincount(minlength=3) / n
    assert (share - target).abs().max() < 0.0104  # 3 standard errors
    # the token after an accepted proposal follows the target too
    after = verdict.token[verdict.num_accepted == 1].bincount(minlength=3) / (verdict.num_accepted == 1).sum()
    assert (after - target).abs().max() < 0.016


def test_matches_after_a_rejection_do_not_count():
    assert num_leading(torch.tensor([[True, False, True, True]]), torch.tensor([4])).tolist() == [1]


def test_greedy_accepts_the_leading_run_and_adds_the_targets_choice():
    target_ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    ids = torch.tensor([[5, 6, 7], [5, 0, 7], [0, 6, 7], [5, 6, 7]])
    verdict = greedy(target_ids, ids, torch.tensor([3, 3, 3, 1]))
    assert verdict.num_accepted.tolist() == [3, 1, 0, 1]
    assert verdict.token.tolist() == [8, 6, 5, 6]


def test_rows_with_fewer_offered_slots_get_the_plain_token_and_never_a_residual():
    """Row 0 offers nothing: its token comes from the unchanged target row, though the padded slot would be rejected."""
    target_probs = torch.tensor([[[0.9, 0.1], [0.5, 0.5]], [[0.9, 0.1], [0.5, 0.5]]])
    proposal = Proposal(torch.tensor([[0], [0]]), None, torch.tensor([0, 1]))
    uniforms = torch.tensor([[0.95, 0.5], [0.95, 0.5]], dtype=torch.float64)
    verdict = rejection(target_probs, proposal, uniforms)
    assert verdict.num_accepted.tolist() == [0, 0]
    assert verdict.token.tolist() == [0, 1]


def test_a_round_without_proposals_is_a_plain_step():
    empty = Proposal(torch.zeros(2, 0, dtype=torch.long), None, torch.zeros(2, dtype=torch.long))
    logits = torch.tensor([[[0.0, 3.0]], [[3.0, 0.0]]])
    assert verify(logits, empty, Sampler(), None).token.tolist() == [1, 0]
    uniforms = torch.tensor([[0.5], [0.5]], dtype=torch.float64)
    assert verify(logits, empty, Sampler(temperature=1.0), uniforms).token.tolist() == [1, 0]


def test_batched_verdicts_equal_single_ones():
    g = torch.Generator().manual_seed(3)
    vocab = torch.tensor([0, 2, 3, 6])
    target_probs = (2 * torch.randn(128, 4, 7, generator=g)).softmax(-1)
    probs = torch.randn(128, 3, 4, generator=g).softmax(-1)
    ids = vocab[torch.multinomial(probs.view(-1, 4), 1, generator=g).view(128, 3)]
    num = torch.randint(0, 4, (128,), generator=g)
    uniforms = torch.rand(128, 4, generator=g, dtype=torch.float64)
    batch = rejection(target_probs, Proposal(ids, probs, num, vocab), uniforms)
    for b in range(128):
        one = slice(b, b + 1)
        single = rejection(target_probs[one], Proposal(ids[one], probs[one], num[one], vocab), uniforms[one])
        assert (single.num_accepted.item(), single.token.item()) == (batch.num_accepted[b], batch.token[b])
    assert set(batch.num_accepted.tolist()) == {0, 1, 2, 3}


def test_drawing_never_returns_an_impossible_token():
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    for u in (0.0, 0.3 - 1e-9, 0.30001, 1 - 2**-53):
        assert draw(weights, torch.tensor([u], dtype=torch.float64)).item() in (1, 3)
    assert draw(weights, torch.tensor([0.0], dtype=torch.float64)).item() == 1
    assert draw(weights, torch.tensor([1 - 2**-53], dtype=torch.float64)).item() == 3
