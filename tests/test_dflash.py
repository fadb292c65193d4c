"""Protects models/dflash.py: training equals decoding, masks, losses, anchors, the mask token, neutral form.

Run: pytest tests/test_dflash.py
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from block_drafts import (
    AUX,
    GEMMA,
    MASK,
    SPEC,
    D,
    V,
    anchors_of,
    batch_of,
    cut,
    draft_of,
    loss_of,
    obvious_logits,
    obvious_row_loss,
    prefill,
    stats,
)
from pydantic import ValidationError
from tiny import target_model, teach, tokenizer

from draftsmith.eval.exact import exact
from draftsmith.eval.runtime import decode, decode_plain
from draftsmith.models.blocks import Plan
from draftsmith.models.dflash import DFlash, DFlashConfig
from draftsmith.models.draft import Batch, Captured, family, load_draft, save_draft
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import Target, TargetConfig

VARIANTS: dict[str, dict[str, Any]] = {
    "infill": {},
    "shifted": {"layout": "shifted"},
    "one layer": {"num_layers": 1},
    "reduced": {"head": "trainable", "draft_vocab": 31},
    "trainable": {"head": "trainable", "layout": "shifted"},
    "window": {"sliding_window": 6},
    "mixed window": {"sliding_window": 5, "layer_types": ("full_attention", "sliding_attention")},
    "window, not causal": {"sliding_window": 5, "causal": False, "layout": "shifted"},
    "causal": {"causal": True, "layout": "shifted"},
    "llama layers": {"qk_norm": False},
}
SOFT = Sampler(temperature=1.0)


def of(name="infill", spec=SPEC, **config):
    return draft_of(DFlash, spec, **(VARIANTS[name] | config))


def known_batch(draft, lengths=(12, 17), **options):
    """A batch whose tokens the draft vocabulary holds."""
    batch = batch_of(lengths, **options)
    kept = draft.draft_vocab
    return batch if kept is None else replace(batch, input_ids=kept[batch.input_ids % len(kept)])


# -- training equals decoding ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", [SPEC, GEMMA], ids=["plain", "gemma"])
@pytest.mark.parametrize("name", VARIANTS)
def test_training_logits_equal_decoding_with_the_incremental_cache_and_the_obvious_formulation(name, spec):
    """One document token by token: prefill of three rows, then rounds that commit 1, 2, 3, ... rows."""
    draft = of(name, spec)
    batch = known_batch(draft, (24,))
    num, anchors = draft.max_proposal, [3, 4, 6, 9, 13, 18]
    states = {a: torch.zeros(num, V if draft.draft_vocab is None else 31) for a in anchors}
    plan = _plan_of(draft, batch, anchors)
    with torch.no_grad():
        for pair, logits in zip(plan.pairs.tolist(), draft.logits(draft._hidden(batch, plan)), strict=True):
            states[anchors[pair // num]][pair % num] = logits
    cache, done = draft.start(1, 24), 0
    for a in anchors:
        captured = Captured(batch.features[None, done:a], None, torch.tensor([a - done]))
        offered = draft.propose(cache, batch.input_ids[None, done + 1 : a + 1], captured, num, SOFT)
        torch.testing.assert_close(offered.probs[0], states[a].softmax(-1), rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            slow = obvious_logits(draft, batch, a)
        torch.testing.assert_close(states[a], slow, rtol=1e-4, atol=1e-4)
        done = a


def _plan_of(draft, batch, anchors):
    chosen = torch.tensor(anchors).numpy()
    full = torch.full((len(anchors),), draft.max_proposal).numpy()
    return Plan.of(chosen, full, batch.bounds, draft.max_proposal, torch.device("cpu"))


@pytest.mark.parametrize("name", ["infill", "shifted", "mixed window", "reduced"])
def test_ragged_rows_of_a_batch_propose_what_they_propose_alone(name):
    draft = of(name)
    batch = known_batch(draft, (16, 16, 16))
    docs = [cut(batch, i) for i in range(3)]
    commits = [[4, 1, 3, 0, 2], [2, 3, 1, 4, 1], [6, 2, 0, 0, 1]]
    together, alone, done = draft.start(3, 8), [draft.start(1, 32) for _ in docs], [0, 0, 0]
    for step in range(5):
        new = [commits[b][step] for b in range(3)]
        width = max(new)
        tokens, features = torch.zeros(3, width, dtype=torch.int64), torch.full((3, width, AUX * D), 7.0)
        for b, doc in enumerate(docs):
            tokens[b, : new[b]] = doc.input_ids[done[b] + 1 : done[b] + new[b] + 1]
            features[b, : new[b]] = doc.features[done[b] : done[b] + new[b]]
        offered = draft.propose(together, tokens, Captured(features, None, torch.tensor(new)), 2, SOFT)
        for b in range(3):
            if not new[b]:
                continue
            one = Captured(features[b : b + 1, : new[b]], None, torch.tensor(new[b : b + 1]))
            single = draft.propose(alone[b], tokens[b : b + 1, : new[b]], one, 2, SOFT)
            torch.testing.assert_close(offered.probs[b], single.probs[0], rtol=1e-5, atol=1e-6)
        done = [d + n for d, n in zip(done, new, strict=True)]


@pytest.mark.parametrize("name", ["infill", "shifted", "reduced"])
@pytest.mark.parametrize(
    "sampler", [SOFT, Sampler(), Sampler(temperature=0.7, top_k=5)], ids=["soft", "greedy", "top-k"]
)
def test_slot_probs_equal_what_propose_computes(name, sampler):
    draft = of(name)
    batch = known_batch(draft, (9, 12))
    asked = torch.tensor([4, 1, 7, 8, 10, 19, 20])
    (found,) = draft.slot_probs(batch, asked, 3, sampler)
    assert found.anchors.tolist() == sorted(asked.tolist())
    target = sampler.probs(batch.last_hidden @ draft.target_head.T)
    for i, a in enumerate(found.anchors.tolist()):
        doc = int(a >= 9)
        start, end = batch.docs[doc]
        tokens, captured = prefill(cut(batch, doc), a - start)
        offered = draft.propose(draft.start(1, 20), tokens, captured, 3, replace(sampler, temperature=1.0))
        logits = offered.probs[0].log() if sampler is SOFT else None
        for s in range(3):
            label = a + 1 + s
            if label >= end:
                assert (found.draft[i, s], found.target[i, s], found.overlap[i, s]) == (0, 0, 0)
                assert found.argmax[i, s] == -1
                continue
            token, p = int(batch.input_ids[label]), target[label - 1]
            assert found.target[i, s].item() == pytest.approx(p[token].item(), abs=1e-6)
            if logits is None:
                continue
            q = torch.zeros(V)
            q[torch.arange(V) if draft.draft_vocab is None else draft.draft_vocab] = offered.probs[0, s]
            assert found.draft[i, s].item() == pytest.approx(q[token].item(), abs=1e-5)
            assert found.overlap[i, s].item() == pytest.approx(torch.minimum(p, q).sum().item(), abs=1e-5)
            assert found.argmax[i, s] == q.argmax()


@pytest.mark.parametrize("anchor", [0, 9, 21])
def test_an_anchor_without_features_before_it_is_refused_with_the_bounds(anchor):
    draft = of()
    with pytest.raises(ValueError, match=rf"anchors \[{anchor}\].*\(0, 9, 21\)"):
        next(draft.slot_probs(batch_of((9, 12)), torch.tensor([anchor]), 2, SOFT))
    with pytest.raises(ValueError, match="slot_probs of 4 proposals: a block of this draft has 3"):
        next(draft.slot_probs(batch_of((9, 12)), torch.tensor([1]), 4, SOFT))


def test_a_block_leaves_no_trace_in_the_cache():
    draft, batch = of("shifted"), batch_of((16,))
    caches = draft.start(1, 16), draft.start(1, 16)
    tokens, captured = prefill(batch, 5)
    draft.propose(caches[0], tokens, captured, 4, SOFT)
    draft.propose(caches[1], tokens, captured, 1, SOFT)
    assert caches[0].lengths.tolist() == [5]
    after = Captured(batch.features[None, 5:7], None, torch.tensor([2]))
    offers = [draft.propose(cache, batch.input_ids[None, 6:8], after, 4, SOFT).probs for cache in caches]
    torch.testing.assert_close(*offers, rtol=0, atol=0)


def test_greedy_and_deterministic_drafts_offer_their_argmax_without_probabilities():
    draft, batch = of("reduced"), batch_of((16,))
    best = draft.propose(draft.start(1, 16), *prefill(batch, 5), 3, SOFT).probs.argmax(-1)
    for sampler in (Sampler(), Sampler(temperature=0.8, draft_sampling=False)):
        offered = draft.propose(draft.start(1, 16), *prefill(batch, 5), 3, sampler)
        assert offered.probs is None
        assert torch.equal(offered.ids, draft.draft_vocab[best])
    assert offered.num.tolist() == [3]
    assert offered.confidence is None


# -- what a block may see --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["infill", "shifted", "window"])
def test_the_gradient_by_features_is_zero_from_the_anchor_on_and_in_other_documents(name):
    draft, batch = of(name), batch_of((14, 16))
    batch.features.requires_grad_()
    anchors = [4, 6, 20, 25]
    num = draft.max_proposal
    plan = _plan_of(draft, batch, anchors)
    hidden = draft._hidden(batch, plan)
    for n, a in enumerate(anchors):
        mine = hidden[plan.pairs // num == n]
        (gradient,) = torch.autograd.grad(mine.square().sum(), batch.features, retain_graph=True)
        touched = set(gradient.abs().sum(1).nonzero()[:, 0].tolist())
        start = 0 if a < 14 else 14
        # slot 0 looks back furthest over a window of W, by W - 1 positions; an infill slot 0 still gives keys to others
        first = start if draft.config.sliding_window is None else max(start, a - draft.config.sliding_window + 1)
        assert touched == set(range(first, a))


def test_overlapping_blocks_do_not_see_each_other():
    draft, batch = of("shifted"), batch_of((20,))
    num = draft.max_proposal
    with torch.no_grad():
        plan = _plan_of(draft, batch, [5, 6, 7])
        together = draft._hidden(batch, plan)[torch.argsort(plan.pairs)].view(3, num, D)
        for n, a in enumerate((5, 6, 7)):
            torch.testing.assert_close(
                together[n], draft._hidden(batch, _plan_of(draft, batch, [a])), rtol=0, atol=1e-5
            )


def test_noise_behind_an_anchor_changes_no_logit():
    """H-AM-1: sequence of 32, block 8, anchors 8 and 11, noise at 11..15."""
    draft, batch = of(block_len=8), batch_of((32,))
    plan = _plan_of(draft, batch, [8, 11])
    noisy = batch.features.clone()
    noisy[11:16] = torch.randn(5, AUX * D) * 100
    with torch.no_grad():
        clean, changed = (draft._hidden(replace(batch, features=f), plan) for f in (batch.features, noisy))
    assert torch.equal(clean, changed)
    noisy[8] += 1
    with torch.no_grad():
        changed = draft._hidden(replace(batch, features=noisy), plan)
    first = plan.pairs < draft.max_proposal
    assert torch.equal(clean[first], changed[first])
    assert not torch.equal(clean[~first], changed[~first])


# -- losses ----------------------------------------------------------------------------------------------------------
MIXES = [{"ce": 1.0}, {"kl": 1.0}, {"tv": 1.0}, {"nla": 0.7}, {"lk": 1.0}, {"ce": 0.1, "tv": 1.8, "kl": 0.2}]
HEADS: list[dict[str, Any]] = [{}, {"head": "trainable"}, {"head": "trainable", "draft_vocab": 31}]


@pytest.mark.parametrize("weights", ["falling", "dpace"])
@pytest.mark.parametrize("head", HEADS, ids=["frozen", "trainable", "reduced"])
@pytest.mark.parametrize("loss", MIXES, ids=str)
def test_loss_and_gradients_equal_the_obvious_formulation(loss, head, weights):
    spec = GEMMA if not head else SPEC
    options = dict(layout="shifted", loss=loss, position_weights=weights, anchor_rate=0.4, **head)
    draft, batch = draft_of(DFlash, spec, torch.float64, **options), batch_of((12, 17), dtype=torch.float64)
    found = loss_of(draft, batch)
    total_ce = total = weight_sum = kept_sum = torch.zeros((), dtype=torch.float64)
    for a in anchors_of(draft, batch):
        logits = obvious_logits(draft, batch, a)
        end = next(e for _, e in batch.docs if a < e)
        rows = [obvious_row_loss(draft, logits[s], batch, a + 1 + s) for s in range(min(4, end - 1 - a))]
        chance = torch.stack([torch.exp(-ce.detach()) if kept else torch.zeros(()) for _, ce, _, kept in rows])
        reached = (0.5 * chance.double() + 0.5).cumprod(0)
        for s, (teacher_loss, ce, _, kept) in enumerate(rows):
            w = reached[s:].sum() if weights == "dpace" else torch.exp(torch.tensor(-s / 4.0).double())
            counted = 1.0 if weights == "dpace" else w
            total, weight_sum = total + w * teacher_loss, weight_sum + counted
            if kept:
                total_ce, kept_sum = total_ce + w * draft.mix.ce * ce, kept_sum + counted
    slow = total / weight_sum + total_ce / kept_sum
    torch.testing.assert_close(found, slow, rtol=2e-6, atol=1e-8)  # weights are fp32
    parameters = [p for p in draft.parameters() if p.requires_grad]
    fast_gradients, slow_gradients = (torch.autograd.grad(x, parameters) for x in (found, slow))
    for a, b in zip(fast_gradients, slow_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "config", [{}, {"head": "trainable", "draft_vocab": 31, "loss": {"ce": 0.3, "tv": 1.0}}], ids=str
)
def test_a_pack_of_documents_gives_what_the_documents_give_alone(config):
    draft, batch = of(**config), batch_of((10, 14, 3, 20))
    parts = [cut(batch, i) for i in range(4)]
    counts = [draft.counts(part) for part in parts]
    whole = draft.counts(batch)
    for name, count in whole.items():
        torch.testing.assert_close(count, sum(c[name] for c in counts))
    together = draft(batch, whole)
    apart = [draft(part, whole) for part in parts]
    torch.testing.assert_close(together["loss"].sum, sum(t["loss"].sum for t in apart), rtol=1e-5, atol=1e-6)
    for name in together:
        if name != "loss":
            torch.testing.assert_close(together[name].sum, sum(t[name].sum for t in apart), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(together[name].count, sum(t[name].count for t in apart))


def test_every_supervised_label_is_asked_for_by_the_runtime():
    """All anchors of a two-turn document: labels start at the second token of a turn and end with its last."""
    draft, batch = of("shifted", anchor_rate=1.0), batch_of((16,))
    batch.loss_mask[:] = False
    batch.loss_mask[3:7] = batch.loss_mask[10:15] = True
    plan = draft._plan(batch)
    num = draft.max_proposal
    anchors = plan.anchors.tolist()
    pairs = {(anchors[p // num], b + 1) for p, b in zip(plan.pairs.tolist(), plan.before.tolist(), strict=True)}
    turns = [range(3, 7), range(10, 15)]
    assert pairs == {(a, y) for turn in turns for a in turn for y in turn if a < y <= a + num}


def test_metrics_count_a_label_outside_of_the_draft_vocabulary_as_a_miss():
    """H-TV-4: one rule for all losses; only hard ce drops such rows."""
    draft, batch = of("reduced", loss={"ce": 1.0, "tv": 1.0}), batch_of((30,))
    batch = replace(
        batch, input_ids=torch.full((30,), int((~torch.isin(torch.arange(V), draft.draft_vocab)).nonzero()[0]))
    )
    terms = draft(batch, draft.counts(batch))
    assert draft.counts(batch)["kept"] == 0
    assert torch.isfinite(terms["loss"].sum)
    for s in range(3):
        assert terms[f"match_{s}"].sum == 0
        assert terms[f"match_{s}"].count > 0
        assert terms[f"overlap_{s}"].count == terms[f"match_{s}"].count


@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_reaches_every_trainable_tensor_and_no_target_tensor(name):
    draft, batch = of(name).train(), batch_of()
    loss_of(draft, batch).backward()
    for parameter_name, parameter in draft.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name
    assert draft.embedding.grad is None
    assert draft.target_head.grad is None


@pytest.mark.parametrize("position_weights", ["falling", "dpace"])
def test_a_batch_with_nothing_to_learn_gives_a_finite_zero_that_reaches_every_tensor(position_weights):
    draft = of("reduced", position_weights=position_weights, loss={"ce": 1.0, "kl": 1.0})
    for batch in (replace(batch_of(), loss_mask=torch.zeros(29, dtype=torch.bool)), batch_of((2, 1)), _empty()):
        counts = draft.counts(batch)
        assert set(counts) == {"weights", "kept"}
        terms = draft(batch, counts)
        assert terms["loss"].sum == 0
        terms["loss"].sum.backward()
        assert all(p.grad is not None and not p.grad.any() for p in draft.parameters())
        assert set(terms) == set(draft(batch_of(), draft.counts(batch_of())))


def _empty() -> Batch:
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(none, none.bool(), none, (0,), torch.zeros(0, AUX * D), torch.zeros(0, D))


def test_short_sequences_and_answers_at_the_very_end():
    """H-AM-3: block 8, lengths 3, 8, 9 and 20; the last answer tokens are labels, and nothing reads past the end."""
    for layout in ("infill", "shifted"):
        draft = of(layout=layout, block_len=8, anchor_rate=1.0)
        for length in (3, 8, 9, 20):
            batch = batch_of((length,), prompt=length - 3 if length > 3 else 1)
            plan = draft._plan(batch)
            labels = set((plan.before + 1).tolist())
            answer = range(length - 3 if length > 3 else 1, length)
            assert labels == set(answer[1:]), "every answer token but the first, which the target itself says"
            assert torch.isfinite(loss_of(draft, batch))


def test_a_batch_without_states_is_refused_by_what_is_missing():
    draft, batch = of(loss={"kl": 1.0}), batch_of()
    for name, words in (("features", r"aux layers \[1, 2, 4\]"), ("last_hidden", "target's distribution")):
        with pytest.raises(ValueError, match=f"batch.{name} is None.*{words}"):
            loss_of(draft, replace(batch, **{name: None}))


@pytest.mark.parametrize("config", [{}, {"head": "trainable", "loss": {"ce": 0.1, "tv": 1.8}}], ids=["ce", "tv"])
def test_bf16_autocast_over_fp32_weights_stays_close_and_leaves_fp32_gradients(config):
    draft, batch = draft_of(DFlash, **config), batch_of()
    plain = loss_of(draft, batch)
    with torch.autocast("cpu", torch.bfloat16):
        low = loss_of(draft, batch)
    low.backward()
    assert low.dtype == torch.float32
    assert abs(low.item() - plain.item()) < 0.05 * abs(plain.item())
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in draft.parameters())


# -- against a real target -------------------------------------------------------------------------------------------
PROMPT = list(b"abc")


@pytest.fixture(scope="module")
def target():
    model = teach(target_model("qwen3", num_hidden_layers=4, initializer_range=0.05), steps=60)
    return Target(model, tokenizer(), TargetConfig(name="taught", dtype="float32", device="cpu"))


def answer_batch(target, draft, prompts, length) -> Batch:
    """The target's own greedy answers with its states."""
    answers = target.generate(prompts, length, Sampler(), ())
    rows = [torch.tensor([*p, *a]) for p, a in zip(prompts, answers, strict=True)]
    states = target.capture(rows, draft.needs)
    bounds = [0]
    for row in rows:
        bounds.append(bounds[-1] + len(row))
    return Batch(
        torch.cat(rows),
        torch.cat([torch.arange(len(r)) >= len(p) for r, p in zip(rows, prompts, strict=True)]),
        torch.cat([torch.arange(len(r)) for r in rows]),
        tuple(bounds),
        torch.cat([f for f, _ in states]),
        torch.cat([h for _, h in states]),
        row_ids=tuple(map(str, range(len(rows)))),
    )


def trained(target, prompts, steps, length=40, cls=DFlash, seed=0, **config):
    draft = cls(cls.Config(mask_token_id=263, num_layers=2, **config), target.spec)
    draft.bind(target.embedding, target.head)
    draft.initialise(None, torch.Generator().manual_seed(seed))
    batch = answer_batch(target, draft, prompts, length)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=4e-3)
    for step in range(steps):
        batch.seed = step
        loss_of(draft.train(), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return draft.eval(), batch


@pytest.mark.parametrize(("layout", "block_len"), [("infill", 8), ("shifted", 7)])
def test_a_draft_that_learnt_one_dialogue_reaches_the_largest_acceptance_length(target, layout, block_len):
    draft, batch = trained(target, [PROMPT], 50, layout=layout, block_len=block_len)
    (found,) = decode(target, draft, [PROMPT], 7, Sampler(), 40, ignore_eos=True)
    assert found.ids == batch.input_ids[3:].tolist()
    assert [accepted for _, accepted in found.rounds_within_text[:-1]] == [7] * 4
    few = decode(target, draft, [PROMPT], 2, Sampler(), 40, ignore_eos=True)[0]
    assert few.ids == found.ids
    assert {accepted for _, accepted in few.rounds[:-1]} == {2}


def test_training_accuracy_and_the_runtime_agree(target):
    """H-TN-5: half-trained, so that acceptance, rejection and full acceptance all occur."""
    prompts = [[97 + a, 97 + a + 1] for a in (0, 3, 6, 9, 12, 15)]
    draft, batch = trained(target, prompts, 22, length=24, layout="infill", block_len=6)
    decoded = decode(target, draft, prompts, 5, Sampler(), 24, ignore_eos=True, batch_size=3)
    rounds = [r for d in decoded for r in d.rounds_within_text]
    measured = 1 + sum(a for _, a in rounds) / len(rounds)
    assert {0, 5} < {a for d in decoded for _, a in d.rounds}
    found = exact(draft, [batch], dict.fromkeys(batch.row_ids, "count"), 5, Sampler(), 24)
    assert found["acceptance_length"] == pytest.approx(measured, rel=1e-6)
    terms = draft(batch, draft.counts(batch))
    rates = [float(terms[f"match_{s}"].sum / terms[f"match_{s}"].count) for s in range(5)]
    survivors = [sum(a > s for _, a in rounds) / sum(p > s for p, _ in rounds) for s in range(2)]
    assert rates[0] == pytest.approx(survivors[0], abs=0.2)  # uniform anchors against visited ones


def test_a_mask_token_that_the_target_says_is_not_lost(target):
    """H-RL-2: the mask id is "f", which the target does say."""
    draft = DFlash(DFlashConfig(layout="infill", block_len=8, num_layers=1, mask_token_id=ord("f")), target.spec)
    draft.bind(target.embedding, target.head)
    draft.initialise(None, torch.Generator().manual_seed(0))
    (plain,) = decode_plain(target, [PROMPT], Sampler(), 40, ignore_eos=True)
    assert plain.ids.count(ord("f")) == 2
    batch = answer_batch(target, draft, [PROMPT], 40)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=4e-3)
    for step in range(41):
        if step in (0, 40):
            assert decode(target, draft, [PROMPT], 7, Sampler(), 40, ignore_eos=True)[0].ids == plain.ids
        loss_of(draft, replace(batch, seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    labels = batch.input_ids[draft._plan(batch).before + 1]
    assert (labels == ord("f")).any()


def test_sampled_decoding_draws_what_it_reports(target):
    draft, _ = trained(target, [PROMPT], 10, layout="shifted", block_len=5)
    sampler = Sampler(temperature=1.0, generator=torch.Generator().manual_seed(0))
    decoded = decode(target, draft, [PROMPT] * 4, 5, sampler, 24, ignore_eos=True, batch_size=2)
    assert {len(d.ids) for d in decoded} == {24}
    assert len({a for d in decoded for _, a in d.rounds}) > 1


# -- settings, files -------------------------------------------------------------------------------------------------
def test_initialise_takes_vocabulary_head_and_final_norm_from_the_target():
    draft = DFlash(
        DFlashConfig(layout="infill", mask_token_id=1, head="trainable", draft_vocab=31, init_norm_scale=0.5), SPEC
    )
    table, gains = torch.randn(V, D), torch.rand(D)
    draft.bind(torch.randn(V, D), table, gains)
    draft.initialise(stats(), torch.Generator().manual_seed(0))
    kept = stats().counts[draft.draft_vocab]
    assert kept.min() >= stats().counts.sort(descending=True).values[30]
    assert torch.equal(draft.lm_head.weight, table[draft.draft_vocab])
    assert torch.equal(draft.norm.weight, gains * 0.5)
    assert draft.fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert (draft.hidden_norm.weight == 1).all()
    with pytest.raises(ValueError, match="draft.draft_vocab 31.*got none"):
        draft.initialise(None, torch.Generator())


def test_sizes_follow_the_target_where_the_recipe_is_silent():
    draft = DFlash(DFlashConfig(layout="shifted", mask_token_id=1), replace(SPEC, num_layers=36))
    assert draft.needs.aux_layers == (2, 10, 18, 26, 34)  # outputs 1, 9, 17, 25, 33 of DFlash
    assert (len(draft.layers), draft.max_proposal) == (5, 16)
    assert draft.stack[0].self_attn.q_proj.weight.shape == (40, D)
    assert draft.stack[0].mlp.up_proj.weight.shape == (40, D)
    assert not hasattr(draft, "lm_head")


def test_published_gammas_go_with_published_block_lengths():
    gammas = {n: DFlashConfig(layout="infill", block_len=n).falling_gamma for n in (16, 10, 8, 7)}
    assert gammas == {16: 7, 10: 5, 8: 4, 7: 4}
    assert DFlashConfig(layout="infill", gamma=2.5).falling_gamma == 2.5


@pytest.mark.parametrize("name", VARIANTS)
def test_files_and_the_neutral_form_give_back_the_same_draft(name, tmp_path):
    draft = of(name)
    save_draft(draft, tmp_path / "draft")
    about, tensors = draft.neutral()
    assert about["layout"] == draft.config.layout
    for twin in (load_draft(tmp_path / "draft", SPEC), DFlash.from_neutral(about, tensors, SPEC)):
        twin.bind(draft.embedding, draft.target_head)
        assert twin.config.layer_attention == draft.config.layer_attention
        batch = batch_of()
        assert torch.equal(loss_of(draft, batch), loss_of(twin.eval(), batch))


def test_a_neutral_form_of_another_width_or_activation_is_refused():
    about, tensors = of().neutral()
    for key, value in (("hidden_size", 64), ("hidden_act", "gelu"), ("attention_bias", True)):
        with pytest.raises(ValueError, match=rf"dflash draft here has.*{D}, got .*{value}"):
            DFlash.from_neutral({**about, "layer": about["layer"] | {key: value}}, tensors, SPEC)


def test_the_family_is_found_by_its_name():
    assert family("dflash") is DFlash


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layout": None}, "layout"),
        ({"block_len": 1}, "greater than or equal to 2"),
        ({"draft_vocab": 31}, "head: frozen is the target's full head, draft_vocab: 31"),
        ({"init_head": "random"}, "no effect with head: frozen"),
        ({"lk_eta": 2.0}, "no effect without loss.lk"),
        ({"gamma": 2.0, "position_weights": "dpace"}, "no effect with position_weights: dpace"),
        ({"layer_types": ("full_attention",)}, "names 1 layers, num_layers is 5"),
        ({"layer_types": ("sliding_attention",) * 5}, "give sliding_window"),
        ({"layer_types": ("full_attention",) * 5, "sliding_window": 99}, "no effect when no layer_types entry"),
        ({"sliding_window": 16}, "16 must be larger than block_len 16"),
        ({"aux_layers": (3, 2)}, r"ascending, distinct aux layer ids.*\[3, 2\]"),
        ({"loss": {"mse": 1.0}}, "mse is not a loss; known losses: ce, kl, tv, nla, lk"),
        ({"loss": {"ce": 0.0}}, "one of them > 0"),
        ({"anchor_rate": 0.0}, "greater than 0"),
    ],
)
def test_contradictions_in_a_recipe_are_refused(config, message):
    values = {"layout": "infill"} | config
    with pytest.raises(ValidationError, match=message):
        DFlashConfig(**{k: v for k, v in values.items() if v is not None})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mask_token_id": None}, r"mask_token_id is not set.*of tiny .*choose_mask_token\(tokenizer, target\)"),
        ({"mask_token_id": V}, rf"mask_token_id {V}: tiny has ids 0..{V - 1}"),
        ({"mask_token_id": 5}, "mask_token_id 5 ends a text of tiny"),
        ({"aux_layers": (2, 6)}, r"aux_layers \[2, 6\]: tiny has 6 layers.*to 5"),
        ({"head": "trainable", "draft_vocab": V + 1}, f"draft_vocab {V + 1} is more than the target's {V} tokens"),
    ],
)
def test_what_the_target_does_not_have_is_refused_with_what_it_has(config, message):
    with pytest.raises(ValueError, match=message):
        DFlash(DFlashConfig(**({"layout": "infill", "mask_token_id": MASK} | config)), SPEC)
