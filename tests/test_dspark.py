"""Protects models/dspark.py: the Markov and confidence heads on DFlash's backbone. Run: pytest tests/test_dspark.py"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_drafts import (
    AUX,
    GEMMA,
    MASK,
    SPEC,
    D,
    Forced,
    V,
    anchors_of,
    batch_of,
    bench,
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

from draftsmith.eval.runtime import decode
from draftsmith.models.dflash import DFlash, DFlashConfig
from draftsmith.models.draft import Batch, Captured, TokenStats, family, load_draft, save_draft
from draftsmith.models.dspark import DSpark, DSparkConfig, bigram_tables
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import Target, TargetConfig

VARIANTS: dict[str, dict[str, Any]] = {
    "shifted": {"layout": "shifted"},
    "infill": {},
    "reduced": {"layout": "shifted", "head": "trainable", "draft_vocab": 31},
    "no confidence": {"layout": "shifted", "confidence": False},
}
SOFT = Sampler(temperature=1.0)


def of(name="shifted", spec=SPEC, dtype=torch.float32, **config):
    return draft_of(DSpark, spec, dtype, **(VARIANTS[name] | config))


def known_batch(draft, lengths=(12, 17), **options):
    batch = batch_of(lengths, **options)
    kept = draft.draft_vocab
    return batch if kept is None else replace(batch, input_ids=kept[batch.input_ids % len(kept)])


def bias_of(draft, token):
    """[Vd] what the Markov head adds behind `token`."""
    return draft.markov_head.markov_w2.weight @ draft.markov_head.markov_w1.weight[token]


# -- training equals decoding ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", [SPEC, GEMMA], ids=["plain", "gemma"])
@pytest.mark.parametrize("name", VARIANTS)
def test_teacher_forced_decoding_equals_training(name, spec):
    """Draws are forced to the true tokens: probabilities and confidences equal the training pass and slot_probs."""
    draft = of(name, spec)
    batch, num, done = known_batch(draft, (24,)), draft.max_proposal, 0
    cache, anchors = draft.start(1, 24), [3, 4, 6, 9, 13, 18]
    (slots,) = draft.slot_probs(batch, torch.tensor(anchors), num, SOFT)
    for i, a in enumerate(anchors):
        follows = batch.input_ids[None, a + 1 : a + 1 + num]
        captured = Captured(batch.features[None, done:a], None, torch.tensor([a - done]))
        offered = draft.propose(
            cache, batch.input_ids[None, done + 1 : a + 1], captured, num, Forced(columns=draft._columns(follows))
        )
        assert torch.equal(offered.ids, follows)
        with torch.no_grad():
            base = obvious_logits(draft, batch, a)
            for s in range(num):
                logits = base[s] + bias_of(draft, batch.input_ids[a + s])
                torch.testing.assert_close(offered.probs[0, s], logits.softmax(-1), rtol=1e-4, atol=1e-5)
        likely = offered.probs[0].gather(1, draft._columns(follows)[0][:, None])[:, 0]
        torch.testing.assert_close(slots.draft[i], likely, rtol=1e-4, atol=1e-5)
        done = a


def test_each_slot_follows_the_token_chosen_before_it():
    draft, batch = of(), batch_of((16,))
    offered = draft.propose(draft.start(1, 16), *prefill(batch, 6), 4, Sampler())
    assert offered.probs is None
    with torch.no_grad():
        base, previous = obvious_logits(draft, batch, 6), int(batch.input_ids[6])
        for s, token in enumerate(offered.ids[0].tolist()):
            assert token == (base[s] + bias_of(draft, previous)).argmax()
            previous = token


def test_ragged_rows_of_a_batch_propose_what_they_propose_alone():
    draft = of("reduced")
    batch = known_batch(draft, (16, 16, 16))
    new = [4, 9, 6]
    tokens, features = torch.zeros(3, 9, dtype=torch.int64), torch.full((3, 9, AUX * D), 3.0)
    for b, n in enumerate(new):
        doc = cut(batch, b)
        tokens[b, :n], features[b, :n] = doc.input_ids[1 : n + 1], doc.features[:n]
    together = draft.propose(draft.start(3, 16), tokens, Captured(features, None, torch.tensor(new)), 4, Sampler())
    for b, n in enumerate(new):
        alone = draft.propose(draft.start(1, 16), *prefill(cut(batch, b), n), 4, Sampler())
        assert torch.equal(together.ids[b], alone.ids[0])
        torch.testing.assert_close(together.confidence[b], alone.confidence[0], rtol=1e-4, atol=1e-5)


def test_confidence_is_the_heads_probability_given_the_token_in_front():
    draft, batch = of(), batch_of((16,))
    offered = draft.propose(draft.start(1, 16), *prefill(batch, 6), 4, Sampler())
    assert offered.confidence.shape == (1, 4)
    assert ((offered.confidence > 0) & (offered.confidence < 1)).all()
    changed = of()
    with torch.no_grad():
        changed.markov_head.markov_w1.weight[batch.input_ids[6]] += 1
        changed.markov_head.markov_w2.weight.zero_()
        draft.markov_head.markov_w2.weight.zero_()
    offers = [d.propose(d.start(1, 16), *prefill(batch, 6), 4, Sampler()) for d in (draft, changed)]
    assert torch.equal(offers[0].ids, offers[1].ids)
    different = (offers[0].confidence != offers[1].confidence)[0].tolist()
    assert different[0]
    assert not any(different[s] for s in range(1, 4) if offers[0].ids[0, s - 1] != batch.input_ids[6])
    assert of("no confidence").propose(draft.start(1, 16), *prefill(batch, 6), 4, Sampler()).confidence is None


# -- losses ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weights", ["falling", "dpace"])
@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("name", ["shifted", "infill", "reduced"])
def test_loss_and_gradients_equal_the_obvious_formulation(name, detached, weights):
    spec = SPEC if name == "reduced" else GEMMA  # the cap bends the base logits, before the Markov bias
    options = {"confidence_detached": detached, "position_weights": weights, "anchor_rate": 0.4}
    draft, batch = (
        of(name, spec, torch.float64, confidence_weight=0.7, **options),
        batch_of((12, 17), dtype=torch.float64),
    )
    draft.confidence_head.float()
    found, num = loss_of(draft, batch), draft.max_proposal
    plan = draft._plan(batch)
    states = {int(p): h for p, h in zip(plan.pairs, draft._hidden(batch, plan), strict=True)}
    total_ce = total = weight_sum = kept_sum = torch.zeros((), dtype=torch.float64)
    for n, a in enumerate(anchors_of(draft, batch)):
        end = next(e for _, e in batch.docs if a < e)
        base = obvious_logits(draft, batch, a)
        before = [int(batch.input_ids[a + s]) for s in range(min(num, end - 1 - a))]
        rows = [obvious_row_loss(draft, base[s] + bias_of(draft, u), batch, a + 1 + s) for s, u in enumerate(before)]
        chance = torch.stack([torch.exp(-ce.detach()) if kept else torch.zeros(()) for _, ce, _, kept in rows])
        reached = (0.5 * chance.double() + 0.5).cumprod(0)
        for s, (teacher_loss, ce, alpha, kept) in enumerate(rows):
            w = reached[s:].sum() if weights == "dpace" else torch.exp(torch.tensor(-s / 4.0).double())
            counted = 1.0 if weights == "dpace" else w
            into = torch.cat([states[n * num + s], draft.markov_head.markov_w1.weight[before[s]]])
            logit = draft.confidence_head.proj((into.detach() if detached else into).float())[0]
            bce = F.binary_cross_entropy_with_logits(logit, alpha.detach().float())
            total, weight_sum = total + w * (teacher_loss + 0.7 * bce), weight_sum + counted
            if kept:
                total_ce, kept_sum = total_ce + w * draft.mix.ce * ce, kept_sum + counted
    slow = total / weight_sum + total_ce / kept_sum
    torch.testing.assert_close(found, slow, rtol=1e-5, atol=1e-7)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    fast_gradients, slow_gradients = (torch.autograd.grad(x, parameters) for x in (found, slow))
    for a, b in zip(fast_gradients, slow_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cls", [DFlash, DSpark])
def test_the_naive_variant_of_the_benchmark_does_the_same_work(cls):
    draft, batch = draft_of(cls, layout="shifted"), batch_of((12, 17, 9))
    denominators = draft.counts(batch)
    found, naive = draft(batch, denominators)["loss"].sum, bench().naive_block_loss(draft, batch, denominators)
    torch.testing.assert_close(found, naive, rtol=1e-5, atol=1e-6)
    parameters = list(draft.parameters())
    for a, b in zip(*(torch.autograd.grad(x, parameters) for x in (found, naive)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_the_confidence_loss_changes_no_other_gradient_unless_it_is_asked_to():
    """H-TN-4: gradients of all other parameters are bit-equal with weight 0 and 1."""

    def gradients(**config):
        draft = of(**config)
        loss_of(draft, batch_of()).backward()
        return {n: p.grad for n, p in draft.named_parameters() if not n.startswith("confidence_head")}

    without = gradients(confidence_weight=0.0)
    assert all(torch.equal(without[n], g) for n, g in gradients(confidence_weight=1.0).items())
    reached = [
        n
        for n, g in gradients(confidence_weight=1.0, confidence_detached=False).items()
        if not torch.equal(without[n], g)
    ]
    assert {"fc.weight", "markov_head.markov_w1.weight", "norm.weight"} <= set(reached)
    assert "markov_head.markov_w2.weight" not in reached


@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_reaches_every_trainable_tensor(name):
    draft = of(name).train()
    loss_of(draft, batch_of()).backward()
    for parameter_name, parameter in draft.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


def test_a_pack_of_documents_gives_what_the_documents_give_alone():
    draft, batch = of("reduced"), batch_of((10, 14, 3, 20))
    whole = draft.counts(batch)
    together, apart = draft(batch, whole), [draft(cut(batch, i), whole) for i in range(4)]
    torch.testing.assert_close(together["loss"].sum, sum(t["loss"].sum for t in apart), rtol=1e-5, atol=1e-6)
    for name in together:
        if name != "loss":
            parts = [t[name] for t in apart if name in t]
            torch.testing.assert_close(together[name].sum, sum(p.sum for p in parts), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(together[name].count, sum(p.count for p in parts))
    assert {"confidence_loss_0", "overlap_3", "match_0", "loss_2"} <= set(together)


def test_a_batch_with_nothing_to_learn_gives_a_finite_zero_that_reaches_every_tensor():
    draft, batch = of("reduced"), batch_of()
    batch.loss_mask[:] = False
    terms = draft(batch, draft.counts(batch))
    assert terms["loss"].sum == 0
    terms["loss"].sum.backward()
    assert all(p.grad is not None and not p.grad.any() for p in draft.parameters())


def test_bf16_autocast_over_fp32_weights_stays_close_and_leaves_fp32_gradients():
    draft, batch = of(), batch_of()
    plain = loss_of(draft, batch)
    with torch.autocast("cpu", torch.bfloat16):
        low = loss_of(draft, batch)
    low.backward()
    assert low.dtype == torch.float32
    assert abs(low.item() - plain.item()) < 0.05 * abs(plain.item())
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in draft.parameters())


# -- starts ----------------------------------------------------------------------------------------------------------
def fresh(**config):
    draft = DSpark(DSparkConfig(layout="shifted", mask_token_id=MASK, aux_layers=(1, 2, 4), **config), SPEC)
    draft.bind(torch.randn(V, D), torch.randn(V, D))
    return draft


def test_a_zero_start_is_dflash_and_its_second_table_learns_at_once():
    draft, batch = fresh(block_len=4, num_layers=1, markov_rank=8, loss={"kl": 1.0}, confidence=False), batch_of()
    draft.initialise(None, torch.Generator().manual_seed(0))
    plain = DFlash(
        DFlashConfig(
            layout="shifted", mask_token_id=MASK, aux_layers=(1, 2, 4), block_len=4, num_layers=1, loss={"kl": 1.0}
        ),
        SPEC,
    )
    plain.bind(draft.embedding, draft.target_head)
    plain.load_state_dict({n: t for n, t in draft.state_dict().items() if not n.startswith("markov_head")})
    torch.testing.assert_close(loss_of(draft, batch), loss_of(plain, batch), rtol=0, atol=0)
    loss_of(draft, batch).backward()
    assert draft.markov_head.markov_w2.weight.grad.abs().sum() > 0
    rows = draft.markov_head.markov_w1.weight.norm(dim=1)
    assert rows.mean().item() == pytest.approx(1.0, abs=0.1)


def test_the_confidence_starts_undecided():
    draft, batch = fresh(block_len=4, num_layers=1, markov_rank=8), batch_of((16,))
    draft.initialise(None, torch.Generator().manual_seed(0))
    assert (draft.propose(draft.start(1, 16), *prefill(batch, 6), 4, Sampler()).confidence == 0.5).all()


def test_a_full_rank_bigram_start_is_half_of_the_log_ratios():
    counts = torch.tensor([5, 3, 0, 8, 4])
    pairs = torch.tensor([[0, 1], [0, 3], [1, 0], [2, 3], [3, 4], [4, 4]])
    seen = torch.tensor([2, 4, 5, 1, 3, 1])
    found = TokenStats(counts, pairs, seen)
    first, second = bigram_tables(found, None, 5, torch.Generator().manual_seed(0))
    p = counts / counts.sum()
    want = torch.zeros(5, 5)
    for (u, v), c in zip(pairs.tolist(), seen.tolist(), strict=True):
        want[u, v] = 0.5 * torch.log(1 + c / p[v])
    torch.testing.assert_close(first @ second.T, want, rtol=1e-4, atol=1e-5)
    # the softmax of twice the bias over p is the smoothed conditional distribution
    conditional = (p.log() + 2 * (first @ second.T)[0]).softmax(-1)
    smoothed = torch.tensor([0, 2, 0, 4, 0]) + p
    torch.testing.assert_close(conditional, smoothed / smoothed.sum(), rtol=1e-4, atol=1e-5)


def test_a_bigram_start_keeps_to_the_draft_vocabulary_and_to_the_rank():
    draft = fresh(head="trainable", draft_vocab=31, markov_rank=40, markov_start="bigrams", num_layers=1)
    draft.initialise(stats(), torch.Generator().manual_seed(0))
    first, second = draft.markov_head.markov_w1.weight, draft.markov_head.markov_w2.weight
    assert (first.shape, second.shape) == ((V, 40), (31, 40))
    assert torch.isfinite(first).all()
    assert not second[:, 31:].any()  # no more directions than columns
    bias = first @ second.T
    for u, v in stats().bigrams.tolist():
        column = (draft.draft_vocab == v).nonzero()[:, 0]
        if len(column):
            assert bias[u, column].item() > 0.3
    low = bigram_tables(stats(), draft.draft_vocab, 8, torch.Generator().manual_seed(0))
    again = bigram_tables(stats(), draft.draft_vocab, 8, torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(low, again, strict=True))
    full = torch.linalg.svdvals(bias)
    error = torch.linalg.matrix_norm(bias - low[0] @ low[1].T)
    assert error.item() == pytest.approx(full[8:].norm().item(), rel=0.01)  # the best that rank 8 can do
    with pytest.raises(ValueError, match="markov_start bigrams: needs the token counts.*got none"):
        fresh(markov_start="bigrams").initialise(None, torch.Generator())


# -- against a real target -------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def target():
    model = teach(target_model("llama", num_hidden_layers=4, initializer_range=0.05), steps=60)
    return Target(model, tokenizer(), TargetConfig(name="taught", dtype="float32", device="cpu"))


@pytest.mark.parametrize("layout", ["shifted", "infill"])
def test_a_draft_that_learnt_one_dialogue_reaches_the_largest_acceptance_length(target, layout):
    prompt = list(b"abc")
    config = DSparkConfig(layout=layout, block_len=6, num_layers=1, mask_token_id=263, markov_rank=16)
    draft = DSpark(config, target.spec)
    draft.bind(target.embedding, target.head)
    draft.initialise(None, torch.Generator().manual_seed(0))
    answer = target.generate([prompt], 40, Sampler(), ())[0]
    ids = torch.tensor(prompt + answer)
    ((features, last_hidden),) = target.capture([ids], draft.needs)
    mask, positions = torch.arange(len(ids)) >= 3, torch.arange(len(ids))
    batch = Batch(ids, mask, positions, (0, len(ids)), features, last_hidden, row_ids=("0",))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=4e-3)
    for step in range(90):
        loss_of(draft, replace(batch, seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    num = draft.max_proposal
    (found,) = decode(target, draft, [prompt], num, Sampler(), 40, ignore_eos=True)
    assert found.ids == answer
    assert {accepted for _, accepted in found.rounds_within_text[:-1]} == {num}
    offered = draft.propose(
        draft.start(1, 16), ids[None, 1:6], Captured(features[None, :5], None, torch.tensor([5])), num, Sampler()
    )
    terms = draft(batch, draft.counts(batch))
    overlap = terms["overlap_0"].sum / terms["overlap_0"].count
    assert offered.confidence[0, 0].item() == pytest.approx(overlap.item(), abs=0.25)  # it learnt where acceptance is


# -- settings, files -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", VARIANTS)
def test_files_and_the_neutral_form_give_back_the_same_draft(name, tmp_path):
    draft = of(name)
    save_draft(draft, tmp_path / "draft")
    about, tensors = draft.neutral()
    assert about["family"] == "dspark"
    assert {n for n in tensors if n.startswith("markov")} == {f"markov_head.markov_w{i}.weight" for i in (1, 2)}
    for twin in (load_draft(tmp_path / "draft", SPEC), DSpark.from_neutral(about, tensors, SPEC)):
        twin.bind(draft.embedding, draft.target_head)
        assert torch.equal(loss_of(draft, batch_of()), loss_of(twin.eval(), batch_of()))


def test_the_family_is_found_by_its_name_and_its_tables_are_no_maps():
    assert family("dspark") is DSpark
    tables = [n for n, p in of("reduced").named_parameters() if p.dim() == 2 and n.startswith(DSpark.table_params)]
    assert tables == [
        "lm_head.weight",
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"loss": {"ce": 1.0}}, "confidence learns the acceptance probability.*does not compute.*confidence: false"),
        (
            {"loss": {"kl": 1.0}, "head": "trainable", "draft_vocab": 31},
            "over the draft vocabulary only.*tv, nla or lk",
        ),
        ({"markov_rank": 0}, "greater than or equal to 1"),
        ({"family": "dflash"}, "dspark"),
    ],
)
def test_contradictions_in_a_recipe_are_refused(config, message):
    with pytest.raises(ValidationError, match=message):
        DSparkConfig(layout="shifted", **config)
    if "loss" in config:
        DSparkConfig(layout="shifted", confidence=False, **config)
