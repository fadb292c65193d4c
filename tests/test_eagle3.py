"""Protects models/eagle3.py: training equals decoding, masks, losses, vocabulary, initialisation, neutral form.

Run: pytest tests/test_eagle3.py
"""

import importlib.util
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from draftsmith.models.chains import Plan
from draftsmith.models.draft import Batch, Captured, Draft, TargetSpec, TokenStats, family, load_draft, save_draft
from draftsmith.models.eagle3 import Eagle3, Eagle3Config
from draftsmith.models.layers import Rope
from draftsmith.models.sampling import Sampler

V, D, AUX = 97, 48, 3
SPEC = TargetSpec(
    name="tiny",
    revision=None,
    config_sha256="",
    tokenizer_sha256="",
    architecture="LlamaForCausalLM",
    model_type="llama",
    num_layers=6,
    hidden_size=D,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    vocab_size=V,
    max_positions=512,
    norm_eps=1e-6,
    activation="silu",
    rope={"rope_type": "default", "rope_theta": 1e4},
)
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle-3": {},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "normed residual": {"norm_before_residual": True, "norm_before_fc": True},
    "two layers": {"num_layers": 2, "norm_output": True},
    "qk norm and bias": {"qk_norm": True, "attention_bias": True, "num_layers": 2},
    "reduced": {"draft_vocab": 31},
    "frozen": {"head": "frozen"},
}


def draft_of(spec: TargetSpec = SPEC, dtype: torch.dtype = torch.float32, **config: Any) -> Eagle3:
    """A draft with weights wide enough that every part matters, and norms away from one."""
    draft = Eagle3(Eagle3Config(**config), spec)
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(V, D, generator=generator) * 0.3
    draft.bind(torch.randn(V, D, generator=generator, dtype=dtype), table.to(dtype))
    draft.initialise(TokenStats(torch.arange(V) % 13, torch.empty(0, 2), torch.empty(0)), generator)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.dim() == 1:
                parameter += torch.rand(len(parameter), generator=generator) - 0.5
            elif "lm_head" not in name:
                parameter *= 8
    return draft.to(dtype).eval()


def batch_of(lengths: tuple[int, ...] = (10, 14), prompt: int = 3, seed: int = 0, dtype=torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(
        input_ids=torch.randint(0, V, (bounds[-1],), generator=generator),
        loss_mask=positions >= prompt,
        positions=positions,
        bounds=tuple(bounds),
        features=torch.randn(bounds[-1], AUX * D, generator=generator, dtype=dtype),
        last_hidden=torch.randn(bounds[-1], D, generator=generator, dtype=dtype),
    )


def cut(batch: Batch, start: int, end: int) -> Batch:
    """One document of a pack on its own."""
    assert batch.features is not None
    assert batch.last_hidden is not None
    return replace(
        batch,
        input_ids=batch.input_ids[start:end],
        loss_mask=batch.loss_mask[start:end],
        positions=batch.positions[start:end],
        bounds=(0, end - start),
        features=batch.features[start:end],
        last_hidden=batch.last_hidden[start:end],
    )


def loss_of(draft: Eagle3, batch: Batch) -> Tensor:
    return draft(batch, draft.counts(batch))["loss"].sum


def step_logits(draft: Eagle3, batch: Batch, steps: int) -> list[Tensor]:
    """Training logits of step s for every row of the batch that has a label: [N, Vd]."""
    total = batch.bounds[-1]
    rows = torch.arange(total)
    ends = torch.tensor([end for start, end in batch.docs for _ in range(start, end)])
    num = (ends - rows - 2).clamp(0, steps)
    rows, num = rows[num > 0].numpy(), num[num > 0].numpy()
    plan = Plan.of(rows, num, batch.bounds, torch.device("cpu"))
    with torch.no_grad():
        return [draft.logits(h) for h in draft._unroll(batch, plan)]


@dataclass
class Forced(Sampler):
    """Draws the given columns, one call after the other: what teacher-forced decoding needs."""

    temperature: float = 1.0
    columns: list[Tensor] = field(default_factory=list)

    def draw(self, probs: Tensor) -> Tensor:
        return self.columns.pop(0)


def bench() -> Any:
    path = Path(__file__).parents[1] / "bench" / "train_step.py"
    spec = importlib.util.spec_from_file_location("train_step", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- training equals decoding ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", VARIANTS)
def test_training_logits_of_each_step_equal_step_by_step_decoding(name):
    draft, batch, steps = draft_of(**VARIANTS[name]), batch_of((9,)), 4
    assert batch.features is not None
    trained = step_logits(draft, batch, steps)
    ids = batch.input_ids if draft.draft_vocab is None else draft.draft_vocab[batch.input_ids % 31]
    batch = replace(batch, input_ids=ids)
    trained = step_logits(draft, batch, steps)
    for t in range(9 - 2):  # anchor t + 1, prefill of rows 0..t, then the true tokens one by one
        num = min(steps, 9 - 2 - t)
        columns = [draft._columns(ids[t + 2 + k : t + 3 + k]) for k in range(num)]
        captured = Captured(batch.features[None, : t + 1], None, torch.tensor([t + 1]))
        offered = draft.propose(draft.start(1, 9), ids[None, 1 : t + 2], captured, num, Forced(columns=columns))
        assert offered.probs is not None
        assert offered.ids[0].tolist() == ids[t + 2 : t + 2 + num].tolist()
        for s in range(num):
            torch.testing.assert_close(offered.probs[0, s], trained[s][t].softmax(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_slot_probs_equal_what_propose_computes(name):
    draft, batch, num = draft_of(**VARIANTS[name]), batch_of((9, 12)), 5
    sampler = Sampler(temperature=0.7, top_p=0.9)
    assert batch.features is not None
    anchors = torch.tensor([1, 4, 5, 8, 10, 19, 20])  # 8 and 20 end their documents, 19 leaves one label
    chunks = list(draft.slot_probs(batch, anchors, num, sampler))
    found = [torch.cat(parts) for parts in zip(*chunks, strict=True)]
    assert found[0].tolist() == anchors.tolist()
    warped = sampler.probs(draft.target_logits(batch.last_hidden))
    for i, a in enumerate(anchors.tolist()):
        start, end = next((s, e) for s, e in batch.docs if s <= a < e)
        live = min(num, end - 1 - a)
        for table, empty in zip(found[1:], (0, 0, -1, 0), strict=True):
            assert (table[i, live:] == empty).all()
        follows = batch.input_ids[a + 1 : a + 1 + live]
        columns = draft._columns(follows).tolist()
        if -1 in columns:  # a token that the draft cannot offer cannot be forced on it
            live = columns.index(-1) + 1
        if not live:
            continue
        forced = Forced(0.7, top_p=0.9, columns=[torch.tensor([max(c, 0)]) for c in columns])
        captured = Captured(batch.features[None, start:a], None, torch.tensor([a - start]))
        tokens = batch.input_ids[None, start + 1 : a + 1]
        offered = draft.propose(draft.start(1, 16), tokens, captured, live, forced)
        assert offered.probs is not None
        for s in range(live):
            q, p = offered.probs[0, s], warped[a + s]
            want = q[columns[s]] if columns[s] >= 0 else torch.tensor(0.0)
            torch.testing.assert_close(found[1][i, s], want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found[2][i, s], p[follows[s]], rtol=1e-4, atol=1e-5)
            best = q.argmax() if draft.draft_vocab is None else draft.draft_vocab[q.argmax()]
            assert found[3][i, s] == best
            overlap = torch.minimum(q, draft.kept_rows(p)).sum()
            torch.testing.assert_close(found[4][i, s], overlap, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("anchor", [0, 9, 21])
def test_an_anchor_without_features_before_it_is_refused_with_the_bounds(anchor):
    with pytest.raises(ValueError, match=rf"anchors \[{anchor}\] have no features .* \(0, 9, 21\)"):
        list(draft_of().slot_probs(batch_of((9, 12)), torch.tensor([3, anchor]), 2, Sampler()))


@pytest.mark.parametrize("name", VARIANTS)
def test_ragged_rows_of_a_batch_propose_what_they_propose_alone(name):
    draft, generator = draft_of(**VARIANTS[name]), torch.Generator().manual_seed(5)
    sampler = Sampler(temperature=1.0, draft_sampling=True)
    rounds = [[4, 7, 2], [3, 0, 1], [1, 5, 2], [0, 6, 0]]
    columns = torch.randint(0, 31, (len(rounds), 3, 3), generator=generator)  # what is drawn: round, slot, row

    def played(rows: list[int]) -> list[list[tuple[Tensor, Tensor]]]:
        state = draft.start(len(rows), 6)  # shorter than needed: it grows
        out: list[list[tuple[Tensor, Tensor]]] = []
        for r, lengths in enumerate(rounds):
            most = max(lengths[row] for row in rows)
            if not most:
                out.append([])
                continue
            g = torch.Generator().manual_seed(r)
            tokens, features = torch.randint(0, V, (3, 7), generator=g), torch.randn(3, 7, AUX * D, generator=g)
            new = torch.tensor([lengths[row] for row in rows])
            forced = Forced(sampler.temperature, columns=[columns[r, k, rows] for k in range(3)])
            captured = Captured(features[rows, :most], None, new)
            offered = draft.propose(state, tokens[rows, :most], captured, 3, forced)
            assert offered.probs is not None
            out.append([(offered.ids[i], offered.probs[i]) for i in range(len(rows))])
        return out

    together = played([0, 1, 2])
    for row in range(3):
        alone = played([row])
        for r, lengths in enumerate(rounds):
            if lengths[row]:
                assert together[r][row][0].tolist() == alone[r][0][0].tolist()
                torch.testing.assert_close(together[r][row][1], alone[r][0][1], rtol=1e-4, atol=1e-6)


def test_speculation_leaves_no_trace_in_the_cache():
    draft, batch = draft_of(num_layers=2), batch_of((9,))
    assert batch.features is not None
    offers = []
    for first in (1, 7):  # how much was speculated in the first round
        state = draft.start(1, 9)
        for start, stop, num in ((0, 4, first), (4, 6, 3)):
            captured = Captured(batch.features[None, start:stop], None, torch.tensor([stop - start]))
            tokens = batch.input_ids[None, start + 1 : stop + 1]
            offered = draft.propose(state, tokens, captured, num, Sampler(temperature=1.0, generator=torch.Generator()))
        assert state.lengths.tolist() == [6]
        offers.append(offered.probs[0, 0])
    torch.testing.assert_close(*offers)


def test_greedy_and_deterministic_drafts_offer_their_argmax_without_probabilities():
    draft, batch = draft_of(draft_vocab=31), batch_of((9,))
    assert batch.features is not None
    captured = Captured(batch.features[None, :4], None, torch.tensor([4]))
    offers = [
        draft.propose(draft.start(1, 9), batch.input_ids[None, 1:5], captured, 3, sampler)
        for sampler in (Sampler(), Sampler(temperature=1.0, draft_sampling=False))
    ]
    assert all(offered.probs is None and offered.num.tolist() == [3] for offered in offers)
    assert torch.equal(offers[0].ids, offers[1].ids)
    assert draft.draft_vocab is not None
    assert set(offers[0].ids[0].tolist()) <= set(draft.draft_vocab.tolist())


def test_a_draft_that_learnt_a_text_by_heart_proposes_it():
    """Training and decoding agree as a whole: features say nothing but the position, the text follows."""
    draft, batch = draft_of(fc_norm=True, norm_output=True, draft_vocab=90), batch_of((14,), prompt=1)
    ids = draft.draft_vocab[torch.arange(14) * 5]  # type: ignore[index]
    batch = replace(batch, input_ids=ids, last_hidden=draft.target_head[ids.roll(-1)] * 30)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for _ in range(60):
        loss = loss_of(draft, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert batch.features is not None
    captured = Captured(batch.features[None, :3], None, torch.tensor([3]))
    offered = draft.propose(draft.start(1, 14), ids[None, 1:4], captured, 3, Sampler())
    assert offered.ids[0].tolist() == ids[4:7].tolist()
    terms = draft(batch, draft.counts(batch))
    assert float(terms["match_0"].sum) == float(terms["match_0"].count) == 12


# -- loss ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (SPEC, {}),
        (SPEC, {"fc_norm": True, "norm_output": True, "num_layers": 2, "ttt_steps": 4}),
        (SPEC, {"norm_before_fc": True, "norm_before_residual": True, "position_decay": 0.5}),
        (replace(SPEC, model_type="qwen3"), {"head": "frozen"}),
        (replace(SPEC, logit_softcap=3.0, embedding_scale=7.0), {"head": "frozen"}),
        (replace(SPEC, logit_softcap=3.0, embedding_scale=7.0), {}),
    ],
)
def test_loss_and_gradients_equal_dense_masks_and_full_logits(spec, config):
    """In fp64, with a conversation of two turns, against the naive variant of bench/train_step.py."""
    draft, batch = draft_of(spec, torch.float64, **config), batch_of((10, 14, 5), dtype=torch.float64)
    batch.loss_mask[15:18] = False
    denominators = {name: count * 1.7 for name, count in draft.counts(batch).items()}
    ours = draft(batch, denominators)["loss"].sum
    naive = bench().naive_loss(draft, batch, denominators)
    torch.testing.assert_close(ours.double(), naive, rtol=1e-6, atol=0)
    parameters = dict(draft.named_parameters())
    mine = torch.autograd.grad(ours, list(parameters.values()))
    theirs = torch.autograd.grad(naive, list(parameters.values()))
    for name, a, b in zip(parameters, mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("config", [{"loss": {"kl": 1.0}}, {"loss": {"ce": 0.3, "lk": 0.7}, "draft_vocab": 31}])
def test_a_pack_of_documents_gives_what_the_documents_give_alone(config):
    draft, batch = draft_of(**config), batch_of((10, 14))
    total = draft.counts(batch)
    packed = draft(batch, total)
    alone = [draft(cut(batch, start, end), total) for start, end in batch.docs]
    for name, term in packed.items():
        torch.testing.assert_close(term.sum, sum(terms[name].sum for terms in alone), rtol=1e-5, atol=1e-5)
    for name, count in total.items():
        assert count == sum(draft.counts(cut(batch, start, end))[name] for start, end in batch.docs)
    for whole, one, two in zip(
        step_logits(draft, batch, 3), *(step_logits(draft, cut(batch, *d), 3) for d in batch.docs)
    ):
        torch.testing.assert_close(whole, torch.cat([one, two]), rtol=1e-5, atol=1e-5)
    shuffled = replace(
        batch, **{n: torch.cat([getattr(batch, n)[10:], getattr(batch, n)[:10]]) for n in
                  ("input_ids", "loss_mask", "positions", "features", "last_hidden")}, bounds=(0, 14, 24),
    )  # fmt: skip
    torch.testing.assert_close(loss_of(draft, shuffled), packed["loss"].sum)


def test_exactly_the_labels_that_the_runtime_asks_for_are_supervised():
    """Eight tokens, the answer in 4..6: drafts begin behind 4, so the labels are 5 and 6, their teachers at 4 and 5."""
    draft, batch = draft_of(ttt_steps=1), batch_of((8,))
    batch.loss_mask[:] = torch.tensor([0, 0, 0, 0, 1, 1, 1, 0])
    counts = draft.counts(batch)
    assert counts == {"step0": 2}
    plain = loss_of(draft, batch)
    moved = set()
    for position in range(8):
        assert batch.last_hidden is not None
        other = batch.last_hidden.clone()
        other[position] += 1
        if loss_of(draft, replace(batch, last_hidden=other)) != plain:
            moved.add(position)
    assert moved == {4, 5}


def test_counts_are_per_step_and_know_labels_outside_the_draft_vocabulary():
    batch = batch_of((10, 14))
    assert {k: int(v) for k, v in draft_of().counts(batch).items()} == {"step0": 16, "step1": 14, "step2": 12}
    draft = draft_of(draft_vocab=31, loss={"kl": 1.0, "ce": 1.0})
    counts = draft.counts(batch)
    kept = set(draft.draft_vocab.tolist())  # type: ignore[union-attr]
    for s in range(3):
        labels = [p for start, end in batch.docs for p in range(start + 5 - 1 + s, end)]
        assert int(counts[f"step{s}"]) == len(labels)
        assert int(counts[f"kept{s}"]) == sum(int(batch.input_ids[p]) in kept for p in labels)


def test_each_step_and_loss_is_divided_by_its_own_denominator():
    draft, batch = draft_of(draft_vocab=31, loss={"kl": 0.5, "ce": 2.0}, position_decay=0.5), batch_of((30, 20))
    counts = draft.counts(batch)
    assert all(count > 2 for count in counts.values())
    with torch.no_grad():
        both = draft(batch, counts)
        kl = draft_of(draft_vocab=31)(batch, counts)
    expected = sum(
        0.5**s * (0.5 * kl[f"loss_{s}"].sum / counts[f"step{s}"] + 2.0 * _ce_sum(draft, batch, s) / counts[f"kept{s}"])
        for s in range(3)
    )
    torch.testing.assert_close(both["loss"].sum, torch.as_tensor(expected), rtol=1e-5, atol=1e-5)


def _ce_sum(draft: Eagle3, batch: Batch, s: int) -> Tensor:
    """Sum of -log q(label) over supervised rows of step s whose label is kept, from the training logits."""
    logits = step_logits(draft, batch, 3)[s].log_softmax(-1)
    total, i = torch.zeros(()), 0
    for start, end in batch.docs:
        for t in range(start, end - 2 - s):
            column = int(draft._columns(batch.input_ids[t + 2 + s]))
            if t + 1 >= start + 3 and column >= 0:
                total = total - logits[i, column]
            i += 1
    return total


@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_reaches_every_trainable_tensor_and_no_target_tensor(name):
    draft, batch = draft_of(**VARIANTS[name]), batch_of()
    draft.embedding.requires_grad_(False)
    loss_of(draft, batch).backward()
    for parameter_name, parameter in draft.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().max() > 0, parameter_name
    assert draft.embedding.grad is None
    assert draft.target_head.grad is None
    held = {p.data_ptr() for p in draft.parameters()}
    assert not held & {draft.embedding.data_ptr(), draft.target_head.data_ptr()}


def test_the_target_stays_as_it_is_through_steps_with_weight_decay():
    draft, batch = draft_of(head="frozen"), batch_of()
    before = draft.embedding.clone(), draft.target_head.clone()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        loss_of(draft, batch).backward()
        optimizer.step()
    assert torch.equal(before[0], draft.embedding)
    assert torch.equal(before[1], draft.target_head)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("case", ["nothing supervised", "one supervised token", "no documents"])
def test_a_batch_with_nothing_to_learn_gives_a_finite_zero_that_reaches_every_tensor(name, case):
    draft, batch = draft_of(**VARIANTS[name]), batch_of()
    batch.loss_mask[:] = False
    if case == "one supervised token":  # an anchor without a label
        batch.loss_mask[5] = True
    if case == "no documents":
        batch = replace(cut(batch, 0, 0), bounds=(0,))
    terms = draft(batch, draft.counts(batch))
    assert set(terms) == set(draft(batch_of(), draft.counts(batch_of())))
    assert all(float(term.sum.detach()) == 0 for term in terms.values())
    terms["loss"].sum.backward()
    for parameter in draft.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() == 0


def test_a_batch_without_states_is_refused_by_what_is_missing():
    draft, batch = draft_of(), batch_of()
    with pytest.raises(ValueError, match=r"batch.features is None; EAGLE-3 reads the aux layers \[2, 3, 4\]"):
        loss_of(draft, replace(batch, features=None))
    with pytest.raises(ValueError, match=r"batch.last_hidden is None; the losses \{'kl': 1.0\} need"):
        loss_of(draft, replace(batch, last_hidden=None))
    assert torch.isfinite(loss_of(draft_of(loss={"ce": 1.0}), replace(batch, last_hidden=None)))


def test_feature_noise_follows_from_the_batch_seed_and_the_document_and_stops_in_evaluation():
    draft, batch = draft_of(feature_noise=0.3), replace(batch_of(), row_ids=("a", "b"), seed=5)
    quiet = loss_of(draft, batch)
    draft.train()
    noisy = loss_of(draft, batch)
    assert noisy != quiet
    assert noisy == loss_of(draft, batch)
    assert noisy != loss_of(draft, replace(batch, seed=6))
    total = draft.counts(batch)
    alone = [
        draft(replace(cut(batch, *bounds), row_ids=(name,)), total)["loss"].sum
        for bounds, name in zip(batch.docs, batch.row_ids, strict=True)
    ]
    torch.testing.assert_close(torch.stack(alone).sum(), noisy)


# -- precision -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("config", [{"fc_norm": True, "norm_output": True}, {"head": "frozen", "num_layers": 2}])
def test_bf16_autocast_over_fp32_weights_stays_close_and_leaves_fp32_gradients(config):
    draft, batch = draft_of(**config), batch_of((40, 30))
    exact = torch.autograd.grad(loss_of(draft, batch), list(draft.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(draft, batch)
    assert loss.dtype == torch.float32
    low = torch.autograd.grad(loss, list(draft.parameters()))
    for a, b in zip(exact, low, strict=True):
        assert b.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.99


def test_norm_weights_move_under_bf16_compute():
    draft, batch = Eagle3(Eagle3Config(fc_norm=True), SPEC), batch_of()
    source = draft_of()
    draft.bind(source.embedding, source.target_head)
    draft.initialise(None, torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-3)
    for _ in range(100):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(draft, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in draft.named_parameters():
        if parameter.dim() == 1:
            assert parameter.dtype == torch.float32
            assert (parameter == 1).float().mean() < 0.02, name


def test_a_draft_cast_to_bf16_keeps_its_frequencies_in_fp32_and_still_proposes():
    draft, batch = draft_of(draft_vocab=31), batch_of((9,))
    frequencies = draft.rope.inv_freq.clone()
    draft.to(torch.bfloat16)
    assert draft.rope.inv_freq.dtype == torch.float32
    assert torch.equal(draft.rope.inv_freq, frequencies)
    assert batch.features is not None
    captured = Captured(batch.features[None, :4], None, torch.tensor([4]))
    offered = draft.propose(draft.start(1, 9), batch.input_ids[None, 1:5], captured, 3, Sampler(temperature=1.0))
    assert offered.probs is not None
    assert offered.probs.dtype == torch.float32


# -- sizes, initialisation, files ------------------------------------------------------------------------------------
def test_initialise_takes_vocabulary_head_and_final_norm_from_the_target():
    config = Eagle3Config(draft_vocab=31, init_norm_scale=0.25, init_std=0.05)
    draft, gains = Eagle3(config, SPEC), torch.rand(D) + 1
    embedding, head = torch.randn(V, D), torch.randn(V, D)
    draft.bind(embedding, head, gains)
    counts = torch.zeros(V, dtype=torch.int64)
    counts[40:60] = 3
    draft.initialise(TokenStats(counts, torch.empty(0, 2), torch.empty(0)), torch.Generator().manual_seed(1))
    assert draft.draft_vocab is not None
    assert draft.draft_vocab.tolist() == [*range(11), *range(40, 60)]
    assert torch.equal(draft.lm_head.weight, head[draft.draft_vocab])
    torch.testing.assert_close(draft.norm.weight, gains * 0.25)
    assert (draft.stack[0].input_layernorm.weight == 1).all()
    assert draft.fc.weight.std().item() == pytest.approx(0.05, rel=0.05)
    again = Eagle3(config, SPEC)
    again.bind(embedding, head, gains)
    again.initialise(TokenStats(counts, torch.empty(0, 2), torch.empty(0)), torch.Generator().manual_seed(1))
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), again.parameters(), strict=True))


def test_a_random_head_and_missing_counts():
    draft = Eagle3(Eagle3Config(init_head="random"), SPEC)
    draft.bind(torch.randn(V, D), torch.randn(V, D))
    draft.initialise(None, torch.Generator())
    assert draft.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    reduced = Eagle3(Eagle3Config(draft_vocab=31), SPEC)
    reduced.bind(torch.randn(V, D), torch.randn(V, D))
    with pytest.raises(ValueError, match="draft.draft_vocab 31: .* needs token counts of the training rows, got none"):
        reduced.initialise(None, torch.Generator())


def test_sizes_follow_the_target_where_the_recipe_is_silent():
    draft = draft_of(replace(SPEC, head_dim=16))  # 48 / 4 would be 12
    attention = draft.stack[0].self_attn
    assert attention.q_proj.weight.shape == (64, 2 * D)
    assert attention.k_proj.weight.shape == (32, 2 * D)
    assert attention.o_proj.weight.shape == (D, 64)
    assert attention.q_norm is None
    assert draft_of(replace(SPEC, model_type="qwen3")).stack[0].self_attn.q_norm is not None
    layer = draft.neutral()[0]["layer"]
    assert layer["head_dim"] == 16
    assert layer["max_position_embeddings"] == 512
    assert draft.needs.aux_layers == (2, 3, 4)


def test_rope_scaling_of_the_target_survives_every_form_of_the_draft(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e6}
    spec = replace(SPEC, rope=yarn)
    draft = draft_of(spec)
    save_draft(draft, tmp_path / "draft")
    wanted = Rope(yarn, SPEC.head_dim, 512)
    copies = [draft, load_draft(tmp_path / "draft", spec), Eagle3.from_neutral(*draft.neutral(), SPEC)]
    for copy in copies:
        assert isinstance(copy, Eagle3)
        assert torch.equal(copy.rope.inv_freq, wanted.inv_freq)
        assert copy.rope.attention_scaling == pytest.approx(1.1386, abs=1e-4)
        assert copy.neutral()[0]["layer"]["rope_parameters"] == yarn


def test_a_target_with_tied_embeddings_leaves_the_draft_its_own_head(tmp_path):
    draft = Eagle3(Eagle3Config(draft_vocab=64), SPEC)
    tied = torch.randn(V, D)
    draft.bind(tied, tied)
    draft.initialise(TokenStats(torch.ones(V, dtype=torch.int64), torch.empty(0, 2), torch.empty(0)), torch.Generator())
    save_draft(draft, tmp_path / "draft")
    again = load_draft(tmp_path / "draft", SPEC)
    assert isinstance(again, Eagle3)
    assert again.lm_head.weight.shape == (64, D)
    assert torch.equal(again.lm_head.weight, draft.lm_head.weight)
    assert torch.equal(again.draft_vocab, draft.draft_vocab)  # type: ignore[arg-type]
    assert not any("embed" in name for name in again.state_dict())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_neutral_form_gives_back_the_same_draft(name):
    draft, batch = draft_of(**VARIANTS[name]), batch_of()
    config, tensors = draft.neutral()
    again = Eagle3.from_neutral(config, tensors, SPEC)
    again.bind(draft.embedding, draft.target_head)
    assert again.neutral()[0] == config
    assert loss_of(again, batch) == loss_of(draft, batch)
    assert ("draft_vocab" in tensors) == draft.reduced
    assert ("lm_head.weight" in tensors) == (draft.config.head == "trainable")
    foreign = {key: value for key, value in config.items() if key not in ("training", "ttt_steps")}
    assert Eagle3.from_neutral(foreign, tensors, SPEC).neutral()[1].keys() == tensors.keys()


def test_a_neutral_form_of_another_width_or_activation_is_refused():
    config, tensors = draft_of().neutral()
    for change in ({"hidden_size": 64}, {"hidden_act": "gelu"}):
        with pytest.raises(ValueError, match="hidden_act silu and the target's width 48, got"):
            Eagle3.from_neutral({**config, "layer": {**config["layer"], **change}}, tensors, SPEC)


def test_the_family_is_found_by_its_name():
    found = family("eagle3")
    assert found is Eagle3
    assert issubclass(found, Draft)
    assert found.Config(family="eagle3").ttt_steps == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"aux_layers": (4, 2)}, "ascending, distinct aux layer ids"),
        ({"loss": {"mse": 1.0}}, "mse is not a loss; known losses: ce, kl, tv, nla, lk"),
        ({"loss": {"kl": 0.0}}, "one of them > 0"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"head": "frozen", "draft_vocab": 31}, "use head: trainable or leave draft_vocab out"),
        ({"head": "frozen", "init_head": "random"}, "has no effect with head: frozen"),
        ({"lk_eta": 2.0}, "lk_eta has no effect without loss.lk"),
        ({"ttt_steps": 0}, "greater than or equal to 1"),
        ({"draft_size": 3}, "Extra inputs are not permitted"),
    ],
)
def test_contradictions_in_a_recipe_are_refused(config, message):
    with pytest.raises(ValidationError, match=message):
        Eagle3Config(**config)


def test_what_the_target_does_not_have_is_refused_with_what_it_has():
    with pytest.raises(ValueError, match=r"draft.aux_layers \[2, 6\]: tiny has 6 layers, so ids go from 0 .* to 5"):
        draft_of(aux_layers=(2, 6))
    with pytest.raises(ValueError, match="draft.draft_vocab 98 is more than the target's 97 tokens"):
        draft_of(draft_vocab=98)
