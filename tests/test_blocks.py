"""Protects models/blocks.py and the block attention: who sees what, anchors, weights, the mask token.

Run: pytest tests/test_blocks.py
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from block_drafts import SPEC, batch_of, cut
from tiny import MASK, tokenizer
from transformers import PreTrainedTokenizerFast

from draftsmith.models.blocks import (
    Plan,
    choose_mask_token,
    draw_anchors,
    falling_weights,
    pace_weights,
    supervised_proposals,
)
from draftsmith.models.layers import BlockSpan, block_attention

CPU = torch.device("cpu")


def seen(anchors, bounds, length, first=0, **options):
    """[N, S] sets of what each slot really attends to: packed positions u, and (block, slot) pairs.

    Equal scores and one-hot values: the output of a query is its attention probabilities.
    """
    num, total = len(anchors), bounds[-1]
    plan = Plan.of(np.array(anchors), np.full(num, length - first), bounds, length - first, CPU)
    rows = len(plan.context)
    names = [*plan.context.tolist(), *[(n, k) for n in range(num) for k in range(length)]]
    width = len(names)
    one_hot = torch.eye(width)
    q = torch.zeros(num, length - first, 1, width)
    keys, block_keys = torch.zeros(rows, 1, width), torch.zeros(num, length, 1, width)
    values = one_hot[:rows, None], one_hot[rows:].view(num, length, 1, width)
    out = block_attention(q, keys, values[0], block_keys, values[1], plan.spans, **options)
    assert total >= rows
    return [[{names[i] for i in slot[0].nonzero()[:, 0].tolist()} for slot in block] for block in out]


def test_the_mask_of_the_documented_example():
    """T=6, L=3, anchors 1 and 3."""
    own = [{(n, k) for k in range(3)} for n in range(2)]
    assert seen([1, 3], (0, 6), 3) == [[{0} | own[0]] * 3, [{0, 1, 2} | own[1]] * 3]


def test_the_mask_with_causal_slots_and_a_window_is_the_servers_rule():
    """A slot at position p sees keys after p - W, and when causal none after p."""
    assert seen([5], (0, 9), 3, causal=True, window=4) == [
        [{2, 3, 4, (0, 0)}, {3, 4, (0, 0), (0, 1)}, {4, (0, 0), (0, 1), (0, 2)}]
    ]
    whole = {(0, 0), (0, 1), (0, 2)}
    assert seen([5], (0, 9), 3, window=4) == [[{2, 3, 4} | whole, {3, 4} | whole, {4} | whole]]
    assert seen([5], (0, 9), 3, first=1, causal=True) == [
        [{0, 1, 2, 3, 4, (0, 0), (0, 1)}, {0, 1, 2, 3, 4, (0, 0), (0, 1), (0, 2)}]
    ]


def test_blocks_of_a_pack_see_their_own_document_only():
    found = seen([2, 3, 8, 11], (0, 6, 12), 2)
    context = [[{u for u in slot if isinstance(u, int)} for slot in block] for block in found]
    assert context == [[{0, 1}] * 2, [{0, 1, 2}] * 2, [{6, 7}] * 2, [{6, 7, 8, 9, 10}] * 2]


@pytest.mark.parametrize(("layout", "num"), [("infill", 2), ("shifted", 3)])
def test_the_pairs_of_the_documented_example(layout, num):
    """Labels of both layouts; with answer x1..x5 the last shifted slot of anchor 3 would predict x6."""
    mask = np.arange(6) >= 1
    supervised = supervised_proposals(mask, (0, 6), num)
    plan = Plan.of(np.array([1, 3]), supervised[[1, 3]], (0, 6), num, CPU)
    pairs = sorted((p // num, p % num, b + 1) for p, b in zip(plan.pairs.tolist(), plan.before.tolist(), strict=True))
    want = [(0, 0, 2), (0, 1, 3), (1, 0, 4), (1, 1, 5)]
    assert pairs == (want if layout == "infill" else sorted([*want, (0, 2, 4)]))
    assert torch.equal(plan.teachers[plan.teacher_index], plan.before)
    assert plan.before.tolist() == sorted(plan.before.tolist())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 6, 9])
@pytest.mark.parametrize("num_slots", [3, 4])
def test_block_attention_equals_a_slow_loop_forward_and_backward(causal, window, num_slots, monkeypatch):
    monkeypatch.setattr("draftsmith.models.layers._chunk_size", lambda x: 2 * num_slots)  # several pieces a document
    g = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)

    q, k, v = random(7, num_slots, 6, 5), random(31, 3, 5), random(31, 3, 5)
    block_k, block_v = random(7, 4, 3, 5), random(7, 4, 3, 5)
    spans = [BlockSpan(0, 0, 3, (1, 4, 11)), BlockSpan(12, 3, 7, (15, 16, 22, 30))]
    slow = torch.zeros_like(q)
    for span in spans:
        for n in range(span.start, span.stop):
            end = span.ends[n - span.start]
            for s in range(num_slots):
                slot = s + 4 - num_slots
                rows = [u for u in range(span.first_key, end) if window is None or u > end + slot - window]
                own = [j for j in range(4) if not causal or j <= slot]
                keys = torch.cat([k[rows], block_k[n, own]]).repeat_interleave(2, 1)
                values = torch.cat([v[rows], block_v[n, own]]).repeat_interleave(2, 1)
                probs = (torch.einsum("he,khe->hk", q[n, s], keys) * 5**-0.5).softmax(-1)
                slow[n, s] = torch.einsum("hk,khe->he", probs, values)
    fast = block_attention(q, k, v, block_k, block_v, spans, causal=causal, window=window)
    torch.testing.assert_close(fast, slow)
    up = torch.randn(fast.shape, generator=g, dtype=torch.float64)
    leaves = (q, k, v, block_k, block_v)
    for a, b in zip(torch.autograd.grad(fast, leaves, up), torch.autograd.grad(slow, leaves, up), strict=True):
        torch.testing.assert_close(a, b)


def test_block_attention_in_bf16_is_close_to_fp64(generator):
    parts = [torch.randn(s, generator=generator).bfloat16() for s in [(5, 4, 4, 16), *[(40, 2, 16)] * 2]]
    parts += [torch.randn(5, 4, 2, 16, generator=generator).bfloat16() for _ in range(2)]
    spans = [BlockSpan(0, 0, 5, (3, 9, 10, 30, 40))]
    exact = block_attention(*[p.double() for p in parts], spans)
    low = block_attention(*parts, spans)
    assert low.dtype == torch.bfloat16
    assert (low.double() - exact).abs().max() < 0.03


# -- anchors ---------------------------------------------------------------------------------------------------------
def test_supervised_proposals_equal_the_definition(generator):
    bounds = (0, 1, 2, 9, 20, 33)
    mask = torch.rand(33, generator=generator) < 0.75
    for most in (1, 3, 8):
        found = supervised_proposals(mask.numpy(), bounds, most)
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            for a in range(start, end):
                n = 0
                while a > start and n < most and a + n + 1 < end and bool(mask[a : a + n + 2].all()):
                    n += 1
                assert found[a] == n, (most, a)


def test_an_empty_batch_has_no_proposals():
    assert len(supervised_proposals(np.zeros(0, bool), (0,), 4)) == 0


def test_anchors_are_drawn_in_proportion_to_what_each_document_can_start():
    batch = batch_of((24, 44, 4), prompt=3)
    num = supervised_proposals(batch.loss_mask.numpy(), batch.bounds, 4)
    anchors = draw_anchors(batch, num, 0.25)
    per_doc = [((anchors >= s) & (anchors < e)).sum() for s, e in batch.docs]
    assert per_doc == [5, 10, 0]  # a quarter of 20 and of 40; four tokens after a prompt of three start nothing
    assert (np.diff(anchors) > 0).all()
    assert (num[anchors] > 0).all()
    assert len(draw_anchors(batch, num, 1.0)) == (num > 0).sum()
    assert len(draw_anchors(batch, num, 1e-6)) == 2  # at least one of every document that can have one


def test_the_draw_follows_from_seed_and_row_and_from_nothing_else():
    batch = batch_of((24, 44))
    num = supervised_proposals(batch.loss_mask.numpy(), batch.bounds, 4)
    packed = draw_anchors(batch, num, 0.5)
    second = cut(batch, 1)
    alone = draw_anchors(second, supervised_proposals(second.loss_mask.numpy(), second.bounds, 4), 0.5)
    assert np.array_equal(packed[packed >= 24] - 24, alone)
    assert np.array_equal(packed, draw_anchors(batch, num, 0.5))
    draws = {tuple(draw_anchors(replace(batch, seed=s), num, 0.5)) for s in range(8)}
    assert len(draws) == 8
    assert {a for draw in draws for a in draw} == set(np.flatnonzero(num))  # every anchor comes up


# -- weights ---------------------------------------------------------------------------------------------------------
def test_falling_weights_are_the_published_ones():
    want = [1, 0.779, 0.607, 0.472, 0.368, 0.287, 0.223]
    assert falling_weights(torch.arange(7), 4.0).tolist() == pytest.approx(want, abs=1e-3)


def test_pace_weights_are_the_derivative_of_the_expected_number_of_accepted_tokens(generator):
    num_pairs, num = [3, 1, 4], 4
    pairs = torch.tensor([n * num + s for n, k in enumerate(num_pairs) for s in range(k)])
    log_chance = (-torch.rand(len(pairs), generator=generator, dtype=torch.float64)).requires_grad_()
    found = pace_weights(-log_chance, pairs, 3, num, smoothing=0.0)
    assert not found.requires_grad
    expected = sum(part.exp().cumprod(0).sum() for part in log_chance.split(num_pairs))
    torch.testing.assert_close(found, torch.autograd.grad(expected, log_chance)[0])


def test_pace_weights_by_hand_and_in_any_order_of_pairs():
    """c = (.6, .2) and (1,), smoothed by one half: s = (.8, .6), (1): weights .8 + .48, .48; 1."""
    ce = -torch.tensor([1.0, 0.2, 0.6]).log()
    assert pace_weights(ce, torch.tensor([2, 1, 0]), 2, 2).tolist() == pytest.approx([1.0, 0.48, 1.28])


# -- the mask token --------------------------------------------------------------------------------------------------
def test_a_token_named_mask_is_taken():
    assert choose_mask_token(tokenizer(), replace(SPEC, vocab_size=264)) == MASK


def test_the_first_id_past_the_tokenizer_is_taken_where_the_vocabulary_is_padded():
    assert choose_mask_token(tokenizer(n_special=7), replace(SPEC, vocab_size=300)) == 263


def with_tokens(*tokens, special=True):
    found = tokenizer(n_special=7)
    found.add_tokens(list(tokens), special_tokens=special)
    return found


def test_a_reserved_token_is_taken_before_other_special_ones():
    found = with_tokens("<|tool|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>")
    assert choose_mask_token(found, replace(SPEC, vocab_size=266)) == 264


def test_a_special_token_outside_of_the_chat_template_is_the_last_resort():
    found = with_tokens("<repo>", "<file>")
    chosen = choose_mask_token(found, replace(SPEC, vocab_size=265))
    assert found.convert_ids_to_tokens(chosen) == "<file>"


def test_words_are_not_reserved_tokens_because_of_their_letters():
    found = with_tokens("unused", "mask", "<file>", special=False)
    found.add_special_tokens({"additional_special_tokens": ["<x>"]}, replace_extra_special_tokens=False)
    chosen = choose_mask_token(found, replace(SPEC, vocab_size=267))
    assert found.convert_ids_to_tokens(chosen) == "<x>"


def test_end_and_padding_are_never_taken_and_the_refusal_names_candidates():
    found: PreTrainedTokenizerFast = tokenizer(n_special=5)
    spec = replace(SPEC, name="some/target", vocab_size=261, eos_ids=(258, 259))
    with pytest.raises(ValueError, match=r"draft\.mask_token_id.*some/target.*no unused id.*255 ") as error:
        choose_mask_token(found, spec)
    assert "260" not in str(error.value).split("for example")[1]  # <pad>
