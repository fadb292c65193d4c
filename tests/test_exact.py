"""Protects exact acceptance: a hand-made example, the runtime's own counts, Monte Carlo. Run: pytest tests/test_exact.py"""

import pytest
import torch
from scripted import Bigram
from tiny import save_target, target_model, teach, tokenizer

from draftsmith.eval.acceptance import Counts
from draftsmith.eval.exact import answers, exact, expected_counts
from draftsmith.eval.runtime import decode
from draftsmith.models.draft import Batch, Needs
from draftsmith.models.eagle3 import Eagle3
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import Target, TargetConfig

PROMPTS = [list(b"abc"), list(b"q"), list(b"defgh"), list(b"lm"), list(b"rst")]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    model = teach(target_model("llama", initializer_range=0.05, num_hidden_layers=3), steps=40)
    folder = save_target(model, tokenizer(), tmp_path_factory.mktemp("taught"))
    return Target.load(TargetConfig(name=folder, dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def draft(target):
    """Half right."""
    return Bigram(target, 1.9)


def batch_of(target, prompts, texts, needs=Needs()):  # noqa: B008  (frozen)
    rows = [torch.tensor([*p, *t]) for p, t in zip(prompts, texts)]
    states = target.capture(rows, needs)
    mask = [torch.arange(len(r)) >= len(p) for r, p in zip(rows, prompts)]
    bounds = [0]
    for row in rows:
        bounds.append(bounds[-1] + len(row))
    return Batch(
        input_ids=torch.cat(rows),
        loss_mask=torch.cat(mask),
        positions=torch.cat([torch.arange(len(r)) for r in rows]),
        bounds=tuple(bounds),
        features=torch.cat([features for features, _ in states]) if needs.aux_layers else None,
        last_hidden=torch.cat([last for _, last in states]),
        row_ids=tuple(str(i) for i in range(len(rows))),
    )


def test_the_worked_example_by_hand():
    """K=2, three tokens after the first: r(0) = (.8, .5), r(1) = (.9, -): 1.62 rounds, 1.85 tokens a round."""
    chances = torch.tensor([[[0.8, 0.5], [0.9, 0.7], [0.3, 0.3]]], dtype=torch.float64)
    (counts,) = expected_counts(chances, torch.tensor([3]))
    assert counts.num_rounds == pytest.approx(1.62)
    assert counts.acceptance_length == pytest.approx(3 / 1.62)
    # visits: anchor 0 once, anchor 1 .2, anchor 2 .4 + .2 * .1 = .42; there no slot counts: the last token is the bonus
    assert counts.survivors == pytest.approx([0.8 + 0.2 * 0.9, 0.4])
    assert counts.tested == pytest.approx([1.2, 0.8])
    assert counts.num_proposed == pytest.approx(2 + 0.2)
    assert counts.num_tokens == 4


def test_padding_and_short_answers_change_nothing():
    g = torch.Generator().manual_seed(0)
    chances = torch.rand(3, 9, 4, generator=g, dtype=torch.float64)
    lengths = torch.tensor([9, 5, 0])
    together = expected_counts(chances, lengths)
    for i, n in enumerate(lengths.tolist()):
        (alone,) = expected_counts(chances[i : i + 1, :n], lengths[i : i + 1])
        assert alone.num_rounds == pytest.approx(together[i].num_rounds)
        assert alone.survivors == pytest.approx(together[i].survivors)
        assert alone.acceptance_length == pytest.approx(n / alone.num_rounds if n else 1)
    assert together[2].num_rounds == 0


def test_greedy_exact_equals_the_runtime_on_the_targets_own_answers(target, draft):
    decoded = decode(target, draft, PROMPTS, 4, Sampler(), 40, stop_ids=[ord("g")], batch_size=5)
    kinds = {str(i): "one" if i < 2 else "two" for i in range(len(PROMPTS))}
    found = exact(draft, [batch_of(target, PROMPTS, [d.ids for d in decoded])], kinds, 4, Sampler(), 40)
    want = Counts.zero(4)
    for d in decoded:
        want.add(Counts.of(d.rounds_within_text, len(d.ids), 4))
    assert found["method"] == "exact"
    assert found["num_rounds"] == want.num_rounds
    assert found["num_accepted"] == want.num_accepted
    assert found["num_proposed"] == want.num_proposed
    assert found["num_tokens"] == want.num_tokens
    assert found["survival"] == want.survival
    assert found["conditional"] == want.conditional
    assert found["acceptance_length"] == pytest.approx((want.num_tokens - 5) / want.num_rounds)
    assert {a for d in decoded for _, a in d.rounds} >= {0, 1, 4}
    assert {k: v["num_prompts"] for k, v in found["by_kind"].items()} == {"one": 2, "two": 3}
    assert sum(v["num_rounds"] for v in found["by_kind"].values()) == found["num_rounds"]


@pytest.mark.parametrize("mode", ["drawn", "reduced vocabulary", "top-k top-p", "deterministic"])
def test_sampled_exact_agrees_with_the_runtime_within_three_sigma(target, draft, mode):
    """Given the texts the runtime said, its rounds have the exact value as their mean."""
    warp = (8, 0.95) if mode == "top-k top-p" else (0, 1.0)
    sampler = Sampler(0.9, *warp, torch.Generator().manual_seed(1), mode != "deterministic")
    if mode == "reduced vocabulary":
        draft = Bigram(target, 1.9, torch.arange(97, 112))
    prompts = PROMPTS * 40
    decoded = decode(target, draft, prompts, 3, sampler, 16, ignore_eos=True, batch_size=100)
    batch = batch_of(target, prompts, [d.ids for d in decoded])
    kinds = {str(i): str(i) for i in range(len(prompts))}
    found = exact(draft, [batch], kinds, 3, sampler, 16)
    n = len(prompts)

    def agrees(measured, expected):
        gap = torch.tensor(measured, dtype=torch.float64) - torch.tensor(expected, dtype=torch.float64)
        assert abs(gap.mean()) <= 3 * gap.std() / n**0.5, (gap.mean(), gap.std())

    each = [found["by_kind"][str(i)] for i in range(n)]
    agrees([float(len(d.rounds)) for d in decoded], [e["num_rounds"] for e in each])
    for k in range(3):
        agrees(
            [float(sum(a > k for _, a in d.rounds_within_text)) for d in decoded],
            [e["survival"][k] * e["num_rounds"] for e in each],
        )
    assert 1.1 < found["acceptance_length"] < 3.5


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(4.0, top_k=30), Sampler(4.0, top_k=30, draft_sampling=False)])
def test_a_recursive_family_agrees_with_the_runtime_too(target, sampler):
    """At temperature 4 an untrained EAGLE-3 draft is accepted often enough to compare."""
    draft = Eagle3(Eagle3.Config(fc_norm=True, norm_output=True), target.spec)
    target.bind(draft)
    draft.initialise(None, torch.Generator().manual_seed(0))
    sampler.generator = torch.Generator().manual_seed(1)
    prompts = PROMPTS * 20
    decoded = decode(target, draft, prompts, 3, sampler, 12, ignore_eos=True, batch_size=50)
    batch = batch_of(target, prompts, [d.ids for d in decoded], draft.needs)
    found = exact(draft, [batch], {str(i): str(i) for i in range(len(prompts))}, 3, sampler, 12)
    rounds = [found["by_kind"][str(i)]["num_rounds"] for i in range(len(prompts))]
    gap = torch.tensor([len(d.rounds) - n for d, n in zip(decoded, rounds)], dtype=torch.float64)
    assert abs(gap.mean()) <= 3 * gap.std() / len(gap) ** 0.5
    if sampler.greedy or not sampler.draft_sampling:
        assert gap.abs().max() == 0
    else:
        assert found["acceptance_length"] > 1.2


def test_each_run_of_supervised_tokens_is_an_answer():
    mask = torch.tensor([0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1], dtype=torch.bool)
    ids = torch.arange(12)
    batch = Batch(ids, mask, torch.cat([torch.arange(8), torch.arange(4)]), (0, 8, 12), row_ids=("a", "b"))
    assert answers(batch, 99) == [(2, 3, "a"), (5, 7, "a"), (9, 9, "b"), (11, 11, "b")]
    assert answers(batch, 2) == [(2, 3, "a"), (5, 6, "a"), (9, 9, "b"), (11, 11, "b")]


def test_rows_that_the_sampler_cannot_have_said_are_refused(target, draft):
    texts = [[7, 8, 9, 7, 8, 9]] * 5
    batch, kinds = batch_of(target, PROMPTS, texts), {str(i): "x" for i in range(5)}
    with pytest.raises(ValueError, match=r"tokens have probability 0 .* not drawn by this sampler"):
        exact(draft, [batch], kinds, 3, Sampler(1.0, top_k=2), 16)


def test_nothing_to_evaluate_is_an_error(target, draft):
    with pytest.raises(ValueError, match="no row with supervised tokens"):
        exact(draft, [], {}, 3, Sampler(), 16)
    batch = batch_of(target, PROMPTS[:1], [[100, 101]])
    with pytest.raises(ValueError, match="row 0: no prompt kind given"):
        exact(draft, [batch], {"other": "x"}, 3, Sampler(), 16)
