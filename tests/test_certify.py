"""Protects the certificate: it passes for a right runtime and fails for planted faults. Run: pytest tests/test_certify.py"""

import json
from collections import Counter

import pytest
import torch
from scripted import Bigram, Scripted, slow_greedy
from tiny import save_target, target_model, teach, tokenizer

from draftsmith.eval import runtime
from draftsmith.eval import verify as verify_module
from draftsmith.eval.acceptance import EvalConfig
from draftsmith.eval.certify import (
    certify,
    chi_square_p,
    failures,
    first_divergence,
    greedy_part,
    holm,
    is_tie,
    next_logits,
    tensors_sha256,
)
from draftsmith.models.cache import TargetCache
from draftsmith.models.target import Target, TargetConfig

PROMPTS = [list(b"abc"), list(b"qrsta"), list(b"defgh"), list(b"lm"), list(b"rst")]
CONFIG = EvalConfig(
    num_speculative_tokens=3, certify_prompts=5, certify_tokens=24, certify_draws=600, ignore_eos=True, batch_size=5
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = teach(target_model("llama", initializer_range=0.05, num_hidden_layers=3), steps=25)
    return save_target(model, tokenizer(), tmp_path_factory.mktemp("taught"))


@pytest.fixture(scope="module")
def target(folder):
    return Target.load(TargetConfig(name=folder, dtype="float32", device="cpu"))


@pytest.fixture
def draft(target):
    found = Bigram(target, 1.2)
    found.bind(target.embedding, target.head)
    return found


def test_a_right_runtime_is_certified(target, draft):
    found = certify(target, draft, PROMPTS, CONFIG)
    assert list(found) == ["greedy", "sampled", "target", "draft_sha256", "passed"]
    (part,) = found["greedy"]
    assert part == {"dtype": "float32", "num_prompts": 5, "num_tokens": 5 * 24, "num_mismatches": 0, "num_ties": 0}
    assert list(found["sampled"]) == ["num_draws", "p_value"]
    assert found["sampled"]["num_draws"] == 1200
    assert found["sampled"]["p_value"] > 1e-3
    assert found["target"] == target.spec.name
    assert found["passed"] is True
    assert failures(found) == []
    json.dumps(found)


def test_a_half_precision_target_is_certified_with_a_float32_copy(folder, target):
    served = Target.load(TargetConfig(name=folder, dtype="bfloat16", device="cpu"))
    draft = Bigram(served, 1.2)
    draft.bind(served.embedding, served.head)
    draft.table.data = draft.table.data.bfloat16()
    before = draft.table.data.clone()
    found = certify(served, draft, PROMPTS, CONFIG, load_fp32=lambda: target)
    assert [part["dtype"] for part in found["greedy"]] == ["float32", "bfloat16"]
    assert found["greedy"][0]["num_mismatches"] == 0
    assert found["passed"] is True
    assert draft.embedding.dtype == torch.bfloat16
    assert torch.equal(draft.table.data, before)
    again = certify(served, draft, PROMPTS, CONFIG)  # loads the copy by the target's own config
    assert again == found


# -- planted faults --------------------------------------------------------------------------------------------------


def accepts_one_too_many(logits, proposal, sampler, uniforms):
    accepted, token = verify_module.verify(logits, proposal, sampler, uniforms)
    return verify_module.Verdict(torch.minimum(accepted + 1, proposal.num), token)


def bonus_of_the_wrong_row(logits, proposal, sampler, uniforms):
    return verify_module.verify(torch.cat([logits[:, :-1], logits[:, :1]], 1), proposal, sampler, uniforms)


@pytest.mark.parametrize("fault", [accepts_one_too_many, bonus_of_the_wrong_row])
def test_a_wrong_verdict_fails_both_parts(target, draft, monkeypatch, fault):
    monkeypatch.setattr(runtime, "verify", fault)
    found = certify(target, draft, PROMPTS, CONFIG)
    assert found["greedy"][0]["num_mismatches"] > 0
    assert found["sampled"]["p_value"] < 1e-3
    assert found["passed"] is False
    assert [line.split(",")[0].split(":")[0] for line in failures(found)] == ["greedy", "sampled"]


def test_a_residual_without_subtraction_fails_the_sampled_part_alone(target, draft, monkeypatch):
    monkeypatch.setattr(verify_module, "residual", lambda target_probs, proposal, slot: target_probs)
    found = certify(target, draft, PROMPTS, CONFIG)
    assert found["greedy"][0]["num_mismatches"] == 0
    assert found["sampled"]["p_value"] < 1e-3
    assert found["passed"] is False
    assert "sampled: the drawn tokens do not follow the target" in failures(found)[0]


def test_argmax_proposals_that_report_soft_probabilities_fail(target, draft):
    class Liar(Bigram):
        def propose(self, state, tokens, captured, num, sampler):
            last = tokens[torch.arange(len(tokens)), captured.lengths - 1]
            ids, probs = [], []
            for _ in range(num):
                probs.append(self.next_probs(last, sampler))
                last = probs[-1].argmax(-1)
                ids.append(last)
            offered = torch.full((len(tokens),), num)
            return runtime.Proposal(torch.stack(ids, 1), torch.stack(probs, 1), offered)

    liar = Liar(target, 0.0)
    liar.bind(target.embedding, target.head)
    found = certify(target, liar, PROMPTS, CONFIG)
    assert found["sampled"]["p_value"] < 1e-3
    assert found["passed"] is False


def test_a_cache_that_loses_an_accepted_token_fails(tmp_path, monkeypatch):
    folder = save_target(target_model("llama"), tokenizer(), tmp_path)
    target = Target.load(TargetConfig(name=folder, dtype="float32", device="cpu"))
    draft = Scripted(target, [slow_greedy(target, p, 30) for p in PROMPTS], right=0.6, check=False)
    right = TargetCache.advance
    assert greedy_part(target, draft, PROMPTS, 3, CONFIG)[1] == []
    monkeypatch.setattr(TargetCache, "advance", lambda self, num: right(self, [n - (n == 2) for n in list(num)]))
    part, divergences = greedy_part(target, draft, PROMPTS, 3, CONFIG)
    assert len(divergences) > 0
    assert part["num_tokens"] < 5 * 24


def test_a_divergence_in_half_precision_that_is_no_tie_fails(folder, target, monkeypatch):
    served = Target.load(TargetConfig(name=folder, dtype="bfloat16", device="cpu"))
    draft = Bigram(served, 1.2)
    draft.bind(served.embedding, served.head)

    def wrong_in_half_precision(logits, proposal, sampler, uniforms):
        judge = accepts_one_too_many if logits.dtype == torch.bfloat16 else verify_module.verify
        return judge(logits, proposal, sampler, uniforms)

    monkeypatch.setattr(runtime, "verify", wrong_in_half_precision)
    found = certify(served, draft, PROMPTS, CONFIG, load_fp32=lambda: target)
    assert [part["num_mismatches"] > 0 for part in found["greedy"]] == [False, True]
    assert found["passed"] is False


# -- parts -----------------------------------------------------------------------------------------------------------


def test_a_tie_is_the_two_best_tokens_close_together(target):
    best = next_logits(target, [PROMPTS[0]])[0].topk(3)
    first, second, third = best.indices.tolist()
    gap = float(best.values[0] - best.values[1])
    original = target.logits
    try:
        for wanted, tie in ((0.1, True), (0.2, False)):
            shift = torch.zeros(264)
            shift[second] = gap - wanted
            target.logits = lambda h, shift=shift: original(h) + shift
            assert is_tie(target, PROMPTS[0], first, second) is tie
            assert is_tie(target, PROMPTS[0], second, first) is tie
        target.logits = lambda h: original(h) + torch.zeros(264).index_fill(0, torch.tensor([second]), gap - 0.1)
        assert not is_tie(target, PROMPTS[0], first, third)
        assert not is_tie(target, PROMPTS[0], first, None)
    finally:
        target.logits = original


def test_answers_that_end_at_different_places_diverge_there():
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 5, 3]) == 1
    assert first_divergence([1, 2, 3], [1, 2]) == 2


def test_chi_square_agrees_with_tabulated_values():
    """3.841 and 5.991 are the 5 % points of 1 and 2 degrees of freedom."""
    assert chi_square_p(Counter(a=50, b=50), {"a": 0.5, "b": 0.5}, 100) == pytest.approx(1.0)
    off = (3.841 * 25) ** 0.5
    seen = {"a": 50 + off, "b": 50 - off}
    assert chi_square_p(seen, {"a": 0.5, "b": 0.5}, 100) == pytest.approx(0.05, abs=1e-4)
    off = (5.991 * 50) ** 0.5
    seen = {"a": 100 + off, "b": 100 - off, "c": 100}
    assert chi_square_p(seen, dict.fromkeys("abc", 1 / 3), 300) == pytest.approx(0.05, abs=1e-4)


def test_rare_bins_are_pooled_and_impossible_draws_fail():
    probs = {"a": 0.6, "b": 0.38, "c": 0.01, "d": 0.006}  # c, d and the unnamed .004 share a bin, too small: b joins
    assert chi_square_p(Counter(a=60, b=38, c=2), probs, 100) == pytest.approx(1.0)
    assert chi_square_p(Counter(a=60, b=39, x=1), {"a": 0.6, "b": 0.4}, 100) == 0.0
    assert chi_square_p(Counter(a=100), {"a": 1.0}, 100) == 1.0


def test_holm_multiplies_the_smallest_by_the_number_of_tests():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_the_draft_hash_follows_every_tensor(draft):
    before = tensors_sha256(draft)
    assert before == tensors_sha256(draft)
    draft.table.data[3, 4] += 1
    assert tensors_sha256(draft) != before


def test_a_certificate_needs_prompts(target, draft):
    with pytest.raises(ValueError, match="needs prompts, got none"):
        certify(target, draft, [], CONFIG)
