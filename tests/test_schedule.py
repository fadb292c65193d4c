"""Protects confidence-scheduled verification: lossless rules, honest calibration. Run: pytest tests/test_schedule.py

Losslessness is counted out over all draws, on vocabularies of 2 and 3 tokens; the obvious wrong rule (a search for the
global maximum) is counted out beside it and must be biased, so the count can see the fault.
"""

import itertools
import json
import random

import pytest
import torch
from matplotlib.figure import Figure
from scripted import Bigram, Scripted, slow_greedy
from tiny import save_target, target_model, tokenizer

from draftsmith.eval import schedule as scheduling
from draftsmith.eval.acceptance import EvalConfig, accept
from draftsmith.eval.certify import certify, pair_p_values
from draftsmith.eval.runtime import Decoded, decode
from draftsmith.eval.schedule import (
    TEMPERATURES,
    CostTable,
    auroc,
    calibrate,
    calibrate_draft,
    calibrated,
    column_lengths,
    hardware_schedule,
    prefix_lengths,
    read_calibration,
    reliability,
    reliability_figure,
    rollouts,
    schedule_of,
    threshold_lengths,
    threshold_schedule,
    write_calibration,
)
from draftsmith.models.draft import Captured, TokenStats
from draftsmith.models.dspark import DSpark
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import Target, TargetConfig

WORKED = CostTable.of_rates({2: 10, 3: 9.5, 4: 9, 5: 8, 6: 7})
COUNTER = CostTable.of_rates({1: 1, 2: 0.5, 3: 0.45})


def chances(survival):
    """Confidences whose running products are the given survivals."""
    rows = [[a / b if b else 0.0 for a, b in zip(row, [1.0, *row])] for row in survival]
    return torch.tensor(rows, dtype=torch.float64)


# -- rules -----------------------------------------------------------------------------------------------------------


def test_the_worked_step_gives_two_and_one():
    assert prefix_lengths(chances([(0.9, 0.6), (0.5, 0.4)]), [2, 2], WORKED) == [2, 1]


def test_the_rates_of_the_worked_step():
    def theta(tokens, rows):
        return tokens / WORKED.round_s(rows)

    assert [theta(2, 2), theta(2.9, 3), theta(3.5, 4), theta(4.0, 5), theta(4.4, 6)] == pytest.approx(
        [20, 27.55, 31.5, 32.0, 30.8]
    )


def theta(survival, lengths, cost):
    tokens = sum(1 + sum(row[:n]) for row, n in zip(survival, lengths))
    return tokens / cost.round_s(sum(1 + n for n in lengths))


def global_lengths(confidence, cost):
    """The rule that must not be used: the best of all lengths, whatever they depend on."""
    survival = confidence.double().cumprod(1).tolist()
    choices = itertools.product(range(confidence.shape[1] + 1), repeat=len(survival))
    return list(max(choices, key=lambda lengths: theta(survival, lengths, cost)))


def test_early_stop_finds_the_global_maximum_where_the_rate_has_one_peak():
    rng, peaked = random.Random(0), 0
    for _ in range(400):
        rows, slots = rng.randint(1, 4), rng.randint(1, 3)
        confidence = torch.tensor([[rng.random() for _ in range(slots)] for _ in range(rows)], dtype=torch.float64)
        sizes = range(rows, rows * (1 + slots) + 1)
        seconds = list(itertools.accumulate(rng.choice([0.0, 0.02, 0.1, 0.4]) * rng.random() for _ in sizes))
        cost = CostTable(tuple(sizes), tuple(1 + s for s in seconds))
        survival = confidence.cumprod(1).tolist()
        order = sorted((-a, j, r) for r, row in enumerate(survival) for j, a in enumerate(row))
        tokens = itertools.accumulate((-gain for gain, _, _ in order), initial=rows)
        rates = [t / cost.round_s(rows + i) for i, t in enumerate(tokens)]
        top = rates.index(max(rates))
        if sorted(rates[: top + 1]) != rates[: top + 1] or sorted(rates[top:], reverse=True) != rates[top:]:
            continue
        if len(set(rates)) < len(rates):
            continue
        peaked += 1
        found = theta(survival, prefix_lengths(confidence, [slots] * rows, cost), cost)
        assert found == pytest.approx(theta(survival, global_lengths(confidence, cost), cost))
    assert peaked > 100


def test_rows_are_limited_by_what_they_have():
    free = CostTable((1, 99), (1.0, 1.0 + 1e-9))
    confidence = torch.full((3, 4), 0.9)
    for rule in (prefix_lengths, column_lengths):
        assert rule(confidence, [0, 2, 4], free) == [0, 2, 4]
    assert threshold_lengths(confidence, [0, 2, 4], 0.5) == [0, 2, 4]


def test_the_threshold_cuts_before_the_first_slot_below_it():
    confidence = torch.tensor([[0.9, 0.3, 0.9], [0.5, 0.5, 0.49], [0.2, 0.9, 0.9]])
    assert threshold_lengths(confidence, [3, 3, 3], 0.5) == [1, 2, 0]


def test_both_hardware_rules_are_the_same_for_one_row():
    rng = random.Random(1)
    seen = set()
    for _ in range(200):
        confidence = torch.tensor([[rng.random() ** 0.3 for _ in range(4)]], dtype=torch.float64)
        cost = CostTable((1, 2, 3, 4, 5), tuple(itertools.accumulate(0.2 + rng.random() for _ in range(5))))
        assert prefix_lengths(confidence, [4], cost) == column_lengths(confidence, [4], cost)
        seen.update(column_lengths(confidence, [4], cost))
    assert len(seen) >= 4


def test_a_rectangular_pass_offers_every_slot_of_its_width():
    cost = CostTable((1, 2, 3), (1.0, 1.5, 2.0))  # a column must bring more than half a token per row and pass
    sure, unsure = (0.95, 0.1), (0.3, 0.1)
    assert column_lengths(chances([sure, sure, unsure]), [2, 2, 2], cost) == [1, 1, 1]
    assert column_lengths(chances([sure, unsure, unsure]), [2, 2, 2], cost) == [1, 1, 1]
    assert column_lengths(chances([unsure, unsure, unsure]), [2, 2, 2], cost) == [0, 0, 0]


def test_what_a_round_costs_anyway_makes_longer_proposals_worth_it():
    lengths = [
        prefix_lengths(chances([(0.5, 0.25, 0.12)]), [3], CostTable((1, 4), (1.0, 2.8), overhead))
        for overhead in (0, 2.5, 9)
    ]
    assert lengths == [[0], [2], [3]]


# -- lossless ----------------------------------------------------------------------------------------------------------


def first_token_law(target_probs, draft_probs, confidences, lengths_of):
    """P(first committed token), counted over every draw of two proposals.

    target_probs, draft_probs: [V]. confidences(d1) -> [[c_1, c_2]]. The first token depends on slot 1 alone: accepted
    with min(1, p/q), else drawn from the residual; not verified, it is drawn from p.
    """
    size = len(target_probs)
    residual = [max(p - q, 0.0) for p, q in zip(target_probs, draft_probs)]
    law = [0.0] * size
    for d1, d2 in itertools.product(range(size), repeat=2):
        chance = draft_probs[d1] * draft_probs[d2]
        if lengths_of(confidences(d1)) == 0:
            for token in range(size):
                law[token] += chance * target_probs[token]
            continue
        accept_chance = min(1.0, target_probs[d1] / draft_probs[d1])
        law[d1] += chance * accept_chance
        for token in range(size):
            if sum(residual):
                law[token] += chance * (1 - accept_chance) * residual[token] / sum(residual)
    return law


def test_the_published_counter_example_biases_the_global_rule_and_not_the_early_stop():
    def confidences(d1):
        return chances([(0.8, 0.72 if d1 == 0 else 0.0)])

    assert global_lengths(confidences(0), COUNTER) == [2]
    assert global_lengths(confidences(1), COUNTER) == [0]
    p, q = (0.7, 0.3), (0.5, 0.5)
    biased = first_token_law(p, q, confidences, lambda c: global_lengths(c, COUNTER)[0])
    exact = first_token_law(p, q, confidences, lambda c: prefix_lengths(c, [2], COUNTER)[0])
    assert biased == pytest.approx([0.85, 0.15])
    assert exact == pytest.approx([0.7, 0.3])


@pytest.mark.parametrize("rule", [prefix_lengths, column_lengths])
def test_every_rule_keeps_the_law_of_both_tokens_of_two_rows(rule):
    """V = 3, two rows of two slots, all draws: the joint law of the first tokens of both rows is the product of laws."""
    rng = random.Random(2)
    varied = 0
    for _ in range(6):
        laws = [[_law(rng, 3) for _ in range(2)] for _ in range(2)]  # [row] -> (p, q)
        steps = [1.0, *(0.4 * rng.random() for _ in range(5))]
        cost = CostTable((1, 2, 3, 4, 5, 6), tuple(itertools.accumulate(steps)))
        first = [sum(min(a, b) for a, b in zip(p, q)) for p, q in laws]
        second = [[rng.random() for _ in range(3)] for _ in range(2)]  # depends on d_1, as a Markov head's does
        joint = torch.zeros(3, 3, dtype=torch.float64)
        seen = set()
        for draws in itertools.product(range(3), repeat=2):
            confidence = torch.tensor([[first[r], second[r][draws[r]]] for r in range(2)], dtype=torch.float64)
            lengths = rule(confidence, [2, 2], cost)
            seen.add(tuple(lengths))
            chance = laws[0][1][draws[0]] * laws[1][1][draws[1]]
            parts = [_given(laws[r], draws[r], lengths[r]) for r in range(2)]
            joint += chance * torch.outer(*parts)
        want = torch.outer(*(torch.tensor(p, dtype=torch.float64) for p, _ in laws))
        torch.testing.assert_close(joint, want, atol=1e-12, rtol=0)
        varied += len(seen) > 1
    assert varied


def _law(rng, size):
    weights = [0.05 + rng.random() for _ in range(size)]
    return [w / sum(weights) for w in weights]


def _given(law, drawn, length):
    """The law of a row's first token, [V], given its first proposal and how many slots are verified."""
    p, q = (torch.tensor(x, dtype=torch.float64) for x in law)
    if length == 0:
        return p
    accepted = min(1.0, float(p[drawn] / q[drawn]))
    residual = (p - q).clamp(min=0)
    return accepted * torch.eye(len(p), dtype=torch.float64)[drawn] + (1 - accepted) * residual / residual.sum()


# -- costs -------------------------------------------------------------------------------------------------------------


def test_costs_between_and_behind_the_measurements():
    cost = CostTable((1, 2, 4), (1.0, 0.9, 2.0), overhead_s=0.5)
    assert cost.seconds == (1.0, 1.0, 2.0)  # noise never makes more rows cheaper
    assert [cost.round_s(n) for n in (1, 2, 3, 4, 6)] == pytest.approx([1.5, 1.5, 2.0, 2.5, 3.5])


@pytest.mark.parametrize(("rows", "seconds"), [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 1.0)), ((1,), (0.0,))])
def test_a_table_that_measures_nothing_is_refused(rows, seconds):
    with pytest.raises(ValueError, match="a cost table needs"):
        CostTable(rows, seconds)


SPEED = {"pass_ms": {"1": [10.0, 11.0, 12.0], "2": [11.5, 14.0, 19.0]}, "draft_ms": {"1": [1.0, 2.0], "2": [1.5, 3.0]}}


def test_costs_from_a_speed_file():
    wide = CostTable.of_speed(SPEED, 2)
    assert (wide.rows, wide.seconds, wide.overhead_s) == ((1, 2, 3), pytest.approx((0.0115, 0.014, 0.019)), 0.003)
    flat = CostTable.of_speed_totals(SPEED)
    assert (flat.rows, flat.seconds) == ((1, 2, 3, 4, 6), pytest.approx((0.01, 0.011, 0.012, 0.014, 0.019)))
    with pytest.raises(
        ValueError, match=r"batch sizes 1, 2, eval.batch_size is 3; .*speed_batch_sizes.*draftsmith speed"
    ):
        CostTable.of_speed(SPEED, 3)


# -- the recipe's keys -------------------------------------------------------------------------------------------------


def test_the_recipe_chooses_the_schedule():
    assert schedule_of(EvalConfig(), None, None) is None
    cut = schedule_of(EvalConfig(schedule="threshold", confidence_threshold=0.5), {"temperatures": [1.0, 1e3]}, None)
    assert cut(torch.tensor([[0.6, 0.2]]), [2]) == [1]  # 0.2 at temperature 1000 is 0.4986
    assert cut(torch.tensor([[0.6, 0.6]]), [2]) == [2]
    with pytest.raises(ValueError, match=r"schedule: hardware needs .*draftsmith speed"):
        schedule_of(EvalConfig(schedule="hardware"), None, None)
    assert schedule_of(EvalConfig(schedule="hardware", batch_size=2), None, SPEED)(torch.ones(2, 2), [2, 2]) == [2, 2]


@pytest.mark.parametrize(
    "values",
    [{"schedule": "threshold"}, {"confidence_threshold": 0.5}, {"schedule": "hardware", "confidence_threshold": 0.5}],
)
def test_a_threshold_without_its_schedule_is_refused_and_the_other_way_round(values):
    with pytest.raises(ValueError, match="do not belong together"):
        EvalConfig(**values)


# -- calibration -------------------------------------------------------------------------------------------------------


def miscalibrated(num_rounds=20000, sharpness=(2.5, 0.5, 1.6)):
    """Confidences whose true logits were multiplied by `sharpness`, and outcomes drawn from the true ones."""
    g = torch.Generator().manual_seed(0)
    logits = 1.0 + 1.2 * torch.randn(num_rounds, len(sharpness), generator=g, dtype=torch.float64)
    accepted = torch.rand(logits.shape, generator=g, dtype=torch.float64) < torch.sigmoid(logits)
    return torch.sigmoid(logits * torch.tensor(sharpness)), accepted.long().cumprod(1)


def test_sequential_scaling_finds_the_temperatures_and_repairs_the_survival():
    confidence, survived = miscalibrated()
    found = calibrate(confidence, survived)
    assert found["temperatures"] == pytest.approx([2.5, 0.5, 1.6], rel=0.15)
    for before, after in zip(found["before"], found["after"]):
        assert before["ece"] > 0.03
        assert after["ece"] < 0.012
        assert after["brier"] < before["brier"]
        assert after["predicted"] == pytest.approx(after["observed"], abs=0.01)
    assert found["before"][0]["auroc"] == pytest.approx(found["after"][0]["auroc"])  # one slot: the order stays


def test_well_calibrated_confidences_are_left_almost_alone():
    found = calibrate(*miscalibrated(sharpness=(1.0, 1.0)))
    assert found["temperatures"] == pytest.approx([1.0, 1.0], rel=0.1)


def test_equally_good_temperatures_leave_the_confidence_as_it_is():
    assert calibrate(torch.full((8, 2), 0.5), torch.ones(8, 2))["temperatures"] == [1.0, 1.0]
    assert 1.0 in TEMPERATURES.tolist()


def test_chances_of_an_event_count_like_the_events_they_stand_for():
    """One round of chance 3/4 equals three accepted and one refused round; so exact evaluation calibrates too."""
    confidence = torch.tensor([[0.6, 0.5], [0.9, 0.8]])
    soft = calibrate(confidence, torch.tensor([[0.75, 0.25], [1.0, 0.5]]), torch.tensor([4.0, 4.0]))
    events = torch.tensor([[1, 1], [1, 0], [1, 0], [0, 0], [1, 1], [1, 1], [1, 0], [1, 0]])
    hard = calibrate(confidence.repeat_interleave(4, 0), events)
    assert soft["temperatures"] == hard["temperatures"]
    for name in ("before", "after"):
        for a, b in zip(soft[name], hard[name]):
            assert {k: a[k] for k in ("ece", "auroc", "brier", "observed")} == pytest.approx(
                {k: b[k] for k in ("ece", "auroc", "brier", "observed")}
            )


def test_figures_by_hand():
    (slot,) = reliability(
        torch.tensor([[0.9], [0.8], [0.3], [0.2]]).double(), torch.tensor([[1.0], [0], [1], [0]]), torch.ones(4)
    )
    assert slot["auroc"] == pytest.approx(3 / 4)  # pairs: .9 > .8, .9 > .2, .3 > .2 right, .3 > .8 wrong
    assert slot["brier"] == pytest.approx((0.01 + 0.64 + 0.49 + 0.04) / 4)
    assert slot["ece"] == pytest.approx((0.1 + 0.8 + 0.7 + 0.2) / 4)
    assert [b[2] for b in slot["bins"]] == [0.25] * 4
    assert auroc(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]), torch.ones(2)) == 0.5
    assert auroc(torch.tensor([0.5, 0.7]), torch.tensor([1.0, 1.0]), torch.ones(2)) is None


def test_slots_that_were_not_verified_are_left_out():
    confidence, survived = miscalibrated(2000, (2.0, 1.0))
    survived = survived.double()
    whole = calibrate(confidence[:1500], survived[:1500])
    survived[1500:] = float("nan")
    cut = calibrate(confidence, survived)
    assert cut["temperatures"] == whole["temperatures"]
    assert cut["after"][0]["num_rounds"] == 1500
    assert cut["after"][0]["ece"] == pytest.approx(whole["after"][0]["ece"])


@pytest.mark.parametrize(
    ("confidence", "survived", "message"),
    [
        (torch.zeros(0, 2), torch.zeros(0, 2), r"n > 0, got \(0, 2\)"),
        (torch.zeros(3, 2), torch.zeros(3, 1), r"got \(3, 2\) and \(3, 1\)"),
        (torch.full((3, 2), 1.5), torch.zeros(3, 2), "between 0 and 1; does the draft return logits"),
        (torch.full((3, 2), float("nan")), torch.zeros(3, 2), "between 0 and 1"),
    ],
)
def test_outcomes_that_cannot_calibrate_are_refused(confidence, survived, message):
    with pytest.raises(ValueError, match=message):
        calibrate(confidence, survived)


def test_a_calibration_is_applied_slot_by_slot():
    out = calibrated(torch.tensor([[0.5, 0.9], [0.0, 1.0]]), [2.0, 3.0, 4.0])
    assert out[0].tolist() == pytest.approx([0.5, 1 / (1 + (1 / 9) ** (1 / 3))])
    assert 0 <= out[1, 0] < 1e-3
    assert 0.999 < out[1, 1] <= 1
    with pytest.raises(ValueError, match="has 1 slots, the draft proposes 2; calibrate again"):
        calibrated(torch.rand(1, 2), [2.0])


def test_a_calibration_belongs_to_the_tensors_it_was_made_for(tmp_path):
    found = calibrate(*miscalibrated(500))
    assert read_calibration(tmp_path, "a" * 64) is None
    write_calibration(tmp_path, found, "a" * 64)
    assert read_calibration(tmp_path, "a" * 64)["temperatures"] == found["temperatures"]
    with pytest.raises(
        ValueError, match="made for tensors aaaaaaaaaaaa, this draft's are bbbbbbbbbbbb; calibrate again"
    ):
        read_calibration(tmp_path, "b" * 64)
    assert json.loads((tmp_path / "calibration.json").read_text())["draft_sha256"] == "a" * 64


def test_the_figure_has_one_panel_a_slot():
    figure = reliability_figure(calibrate(*miscalibrated(500, (1.0,) * 5)))
    assert isinstance(figure, Figure)
    shown = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title().split(",")[0] for axes in shown] == [f"slot {k}" for k in range(1, 6)]
    assert all("ECE" in text.get_text() for axes in shown for text in axes.get_legend().get_texts())
    figure.canvas.draw()


# -- in the runtime ----------------------------------------------------------------------------------------------------

PROMPTS = [[5, 99, 100], [7], list(range(40, 57)), [258], [80, 81, 82, 83, 84]]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = save_target(target_model("llama"), tokenizer(), tmp_path_factory.mktemp("llama"))
    return Target.load(TargetConfig(name=folder, dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def texts(target):
    return [slow_greedy(target, p, 40) for p in PROMPTS]


class Confident(Scripted):
    """Right in some slots; its confidence is any number."""

    def propose(self, state, tokens, captured, num, sampler):
        proposal = super().propose(state, tokens, captured, num, sampler)
        mood = 4.0 ** float(torch.randint(-3, 2, (), generator=self.random))  # of the whole batch: widths vary, too
        proposal.confidence = torch.rand(proposal.ids.shape, generator=self.random) ** mood
        return proposal


class ConfidentBigram(Bigram):
    """Draws; the confidence of a slot depends on the token before it, as a Markov head's does."""

    def propose(self, state, tokens, captured, num, sampler):
        proposal = super().propose(state, tokens, captured, num, sampler)
        anchor = tokens[torch.arange(len(tokens)), captured.lengths - 1]
        before = torch.cat([anchor[:, None], proposal.ids[:, :-1]], 1)
        proposal.confidence = 0.05 + 0.9 * ((before * 7919) % 101) / 100
        return proposal


STEEP = CostTable((1, 2, 3, 4, 5), (1.0, 1.5, 2.0, 2.5, 3.0))
SCHEDULES = {
    "threshold": threshold_schedule(0.4),
    "columns": hardware_schedule(STEEP),
    "prefix": hardware_schedule(CostTable((1, 25), (1.0, 13.0)), rule=prefix_lengths),
    "calibrated": hardware_schedule(STEEP, [2.0, 1.5, 1.2, 1.0]),
}


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_greedy_output_is_exact_under_every_schedule(target, texts, name, batch_size):
    draft = Confident(target, texts, 0.8)
    decoded = decode(
        target, draft, PROMPTS, 4, Sampler(), 24, ignore_eos=True, batch_size=batch_size, schedule=SCHEDULES[name]
    )
    assert [d.ids for d in decoded] == [t[len(p) : len(p) + 24] for p, t in zip(PROMPTS, texts)]
    offered = {n for d in decoded for n, _ in d.rounds}
    assert len(offered) >= 3
    assert any(a > 0 for d in decoded for _, a in d.rounds)
    assert all(len(c) == n for d in decoded for c, (n, _) in zip(d.confidences, d.rounds, strict=True))


@pytest.mark.parametrize("name", SCHEDULES)
def test_sampled_output_follows_the_target_under_every_schedule(target, name):
    draft = ConfidentBigram(target, 0.3)
    context, draws, sampler = [5, 99, 100], 1500, Sampler(1.0, generator=torch.Generator().manual_seed(3))
    decoded = decode(
        target, draft, [context] * draws, 3, sampler, 3, ignore_eos=True, batch_size=250, first_ids=[65] * draws,
        schedule=SCHEDULES[name],
    )  # fmt: skip
    assert min(pair_p_values(target, [*context, 65], sampler, [tuple(d.ids[1:3]) for d in decoded])) > 1e-3


def test_the_sampled_schedules_vary_and_accept(target):
    draft = ConfidentBigram(target, 0.3)
    sampler = Sampler(0.8, generator=torch.Generator().manual_seed(3))
    decoded = decode(
        target, draft, PROMPTS, 4, sampler, 30, ignore_eos=True, batch_size=5, schedule=SCHEDULES["threshold"]
    )
    rounds = [r for d in decoded for r in d.rounds]
    assert {n for n, _ in rounds} >= {0, 1, 2}
    assert any(a for _, a in rounds)


def test_a_rule_that_looks_at_the_drawn_token_is_seen_by_the_sampled_test(target):
    """The check above must be able to fail: here slot 1 is verified only when its own token pleases."""
    draft = ConfidentBigram(target, 0.3)
    context, draws, sampler = [5, 99, 100], 1500, Sampler(1.0, generator=torch.Generator().manual_seed(3))
    decoded = decode(
        target, draft, [context] * draws, 3, sampler, 3, ignore_eos=True, batch_size=250, first_ids=[65] * draws,
        schedule=peeking,
    )  # fmt: skip
    assert min(pair_p_values(target, [*context, 65], sampler, [tuple(d.ids[1:3]) for d in decoded])) < 1e-3


def test_fewer_rows_are_verified_when_every_row_is_cut(target, texts):
    widths = []
    forward = target.forward

    def counted(ids, *rest):
        widths.append(ids.shape[1])
        return forward(ids, *rest)

    target.forward = counted
    try:
        decode(target, Confident(target, texts, 1.0, check=False), PROMPTS, 4, Sampler(), 12, ignore_eos=True,
               batch_size=5, schedule=lambda _, most: [min(n, 1) for n in most])  # fmt: skip
    finally:
        target.forward = forward
    assert set(widths[1:]) == {2}


def test_a_draft_without_confidence_cannot_be_scheduled(target, texts):
    with pytest.raises(ValueError, match="scripted draft tells no confidence.*eval.schedule to none"):
        decode(target, Scripted(target, texts), PROMPTS, 4, Sampler(), 8, schedule=SCHEDULES["threshold"])
    with pytest.raises(ValueError, match="scripted draft: these answers carry no confidences"):
        calibrate_draft(target, Scripted(target, texts), PROMPTS, 4, Sampler(), 8)


def test_rollouts_pair_confidences_with_what_was_accepted():
    one = Decoded(1, rounds=[(2, 1), (2, 2), (1, 0)], confidences=[[0.5, 0.25], [0.75, 1.0], [0.125]])
    confidence, survived = rollouts([one])
    assert confidence.tolist() == [[0.5, 0.25], [0.75, 1.0], [0.125, 0.0]]
    assert survived[:2].tolist() == [[1, 0], [1, 1]]
    assert survived[2, 0] == 0
    assert survived[2, 1].isnan()


def test_a_draft_is_calibrated_from_its_own_rollouts(target):
    draft = ConfidentBigram(target, 0.3)
    sampler = Sampler(0.8, generator=torch.Generator().manual_seed(3))
    told = []
    found = calibrate_draft(target, draft, PROMPTS, 3, sampler, 40, progress=told.append)
    assert len(found["temperatures"]) == 3
    assert found["num_prompts"] == 5
    assert (found["temperature"], found["draft_sampling"]) == (0.8, True)
    assert found["after"][0]["ece"] <= found["before"][0]["ece"]
    assert sum(told) == 5 * 40
    json.dumps(found, allow_nan=False)


def test_acceptance_says_under_which_schedule_it_was_measured(target, texts):
    config = EvalConfig(
        num_speculative_tokens=4, max_new_tokens=12, ignore_eos=True, schedule="threshold", confidence_threshold=0.4
    )
    draft = Confident(target, texts, 0.8)
    kinds = ["chat"] * len(PROMPTS)
    cut, _ = accept(target, draft, PROMPTS, kinds, config, schedule=schedule_of(config, None, None))
    full, _ = accept(target, draft, PROMPTS, kinds, config)
    assert cut["schedule"] == "threshold"
    assert "schedule" not in full
    assert cut["num_proposed"] < full["num_proposed"]
    assert cut["num_tokens"] == full["num_tokens"]


def test_a_certificate_can_be_made_for_a_schedule(target):
    config = EvalConfig(
        num_speculative_tokens=2, schedule="threshold", confidence_threshold=0.4, certify_prompts=2, certify_tokens=8,
        certify_contexts=1, certify_draws=200,
    )  # fmt: skip
    draft = ConfidentBigram(target, 0.3)
    found = certify(target, draft, PROMPTS, config, schedule=schedule_of(config, None, None))
    assert found["passed"]
    assert found["schedule"] == "threshold"
    assert "schedule" not in certify(target, draft, PROMPTS, config)


def peeking(confidence, most):
    """Looks at c_2, which knows the drawn d_1, to decide about d_1."""
    return [n if row[min(1, len(row) - 1)] > 0.5 else 0 for n, row in zip(most, confidence.tolist())]


def test_the_certificate_fails_for_a_rule_that_peeks(target):
    config = EvalConfig(
        num_speculative_tokens=2, schedule="hardware", certify_prompts=1, certify_tokens=4, certify_contexts=1,
        certify_draws=1500,
    )  # fmt: skip
    draft = ConfidentBigram(target, 0.3)
    found = certify(target, draft, [[5, 99, 100]], config, schedule=peeking)
    assert not found["passed"]
    assert found["sampled"]["p_value"] < 1e-3
    assert found["greedy"][0]["num_mismatches"] == 0  # greedy output does not depend on what is verified


@pytest.fixture(scope="module")
def dspark(target):
    config = DSpark.Config(family="dspark", mask_token_id=263, layout="shifted", block_len=4, num_layers=1,
                           aux_layers=(1, 4), markov_rank=8)  # fmt: skip
    draft = DSpark(config, target.spec)
    target.bind(draft)
    pairs = torch.tensor([[a, (a + 1) % 264] for a in range(264)])
    stats = TokenStats(torch.arange(264) % 50 + 1, pairs, torch.ones(264, dtype=torch.int64))
    draft.initialise(stats, torch.Generator().manual_seed(0))
    with torch.no_grad():
        draft.confidence_head.proj.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
        draft.confidence_head.proj.bias.fill_(3.0)
    return draft.eval()


def test_a_dspark_confidence_depends_on_the_tokens_before_its_slot_alone(target, dspark):
    """Draw many proposals behind one prompt: equal prefixes have equal confidences, different ones mostly not."""
    prompt, seen = [5, 99, 100], {}
    sampler = Sampler(1.0, generator=torch.Generator().manual_seed(0))
    out = target.forward(torch.tensor([prompt]), needs=dspark.needs)
    captured = Captured(out.features, out.last_hidden, torch.tensor([3]))
    with torch.no_grad():
        for _ in range(40):
            told = dspark.propose(dspark.start(1, 16), torch.tensor([[99, 100, 65]]), captured, 4, sampler)
            for k in range(4):
                prefix = tuple(told.ids[0, :k].tolist())
                seen.setdefault(prefix, set()).add(round(float(told.confidence[0, k]), 5))
    assert all(len(values) == 1 for values in seen.values())
    assert len({v for prefix, values in seen.items() if len(prefix) == 1 for v in values}) > 10


@pytest.mark.parametrize(
    "schedule", [threshold_schedule(0.5), hardware_schedule(CostTable((1, 2, 3, 4, 5), (1, 1.1, 1.3, 1.45, 1.55)))]
)
def test_dspark_output_stays_the_targets(target, texts, dspark, schedule):
    decoded = decode(target, dspark, PROMPTS, 4, Sampler(), 24, ignore_eos=True, batch_size=2, schedule=schedule)
    assert [d.ids for d in decoded] == [t[len(p) : len(p) + 24] for p, t in zip(PROMPTS, texts)]
    assert len({n for d in decoded for n, _ in d.rounds}) >= 3


def test_dspark_is_calibrated_slot_by_slot(target, dspark):
    sampler = Sampler(1.0, generator=torch.Generator().manual_seed(0))
    found = calibrate_draft(target, dspark, PROMPTS, 4, sampler, 24)
    assert len(found["temperatures"]) == 4


def test_importing_the_module_loads_no_pyplot():
    assert not hasattr(scheduling, "plt")
