"""Protects the speculative loop: output equals the target alone, whatever the draft says. Run: pytest tests/test_runtime.py

The drafts here are scripted: they know the target's greedy continuation and are right always, sometimes or never, so
that acceptance, rejection and full acceptance all occur. They also check what the runtime hands to `propose`.
"""

from dataclasses import replace

import pytest
import torch
from scripted import Scripted, slow_greedy
from tiny import save_target, target_model, tokenizer

from draftsmith.eval.runtime import Decoded, Timings, decode, decode_plain, worth_it
from draftsmith.models.draft import Draft, DraftConfig, Needs, Proposal
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import Target, TargetConfig

PROMPTS = [[5, 99, 100], [7], list(range(40, 57)), [258], [80, 81, 82, 83, 84]]


def load(tmp_path_factory, kind, **config):
    folder = save_target(target_model(kind), tokenizer(), tmp_path_factory.mktemp(kind))
    return Target.load(TargetConfig(name=folder, dtype="float32", device="cpu", **config))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load(tmp_path_factory, "llama")


@pytest.fixture(scope="module")
def texts(target):
    return [slow_greedy(target, p, 40) for p in PROMPTS]


def answers(decoded):
    return [d.ids for d in decoded]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_greedy_runtime_equals_target_alone(target, texts, right, batch_size):
    draft = Scripted(target, texts, right)
    decoded = decode(target, draft, PROMPTS, 4, Sampler(), 24, ignore_eos=True, batch_size=batch_size)
    assert answers(decoded) == [t[len(p) : len(p) + 24] for p, t in zip(PROMPTS, texts)]
    accepted = {a for d in decoded for _, a in d.rounds}
    assert accepted == {0.0: {0}, 0.6: {0, 1, 2, 3, 4}, 1.0: {4}}[right]
    assert {d.stop for d in decoded} == {"length"}


def test_rounds_add_up_to_the_text(target, texts):
    decoded = decode(target, Scripted(target, texts, 0.6), PROMPTS, 4, Sampler(), 23, ignore_eos=True, batch_size=3)
    for d in decoded:
        assert sum(a + 1 for _, a in d.rounds_within_text) == len(d.ids) - 1
        assert [a for _, a in d.rounds_within_text[:-1]] == [a for _, a in d.rounds[:-1]]
        assert d.rounds_within_text[:-3] == d.rounds[:-3]
        assert d.timings.draft_s > 0
        assert d.timings.verify_s > 0
        assert d.timings.prefill_s > 0


def test_rows_that_offer_fewer_slots_stay_exact(target, texts):
    draft = Scripted(target, texts, 0.8, fewer=True)
    decoded = decode(target, draft, PROMPTS, 4, Sampler(), 24, ignore_eos=True, batch_size=5)
    assert answers(decoded) == [t[len(p) : len(p) + 24] for p, t in zip(PROMPTS, texts)]
    assert {n for d in decoded for n, _ in d.rounds} == {0, 1, 2, 3, 4}
    assert all(a <= n for d in decoded for n, a in d.rounds)


def test_an_always_wrong_draft_gives_one_token_a_round_and_accepts_nothing(target, texts):
    (d,) = decode(target, Scripted(target, texts, 0.0), PROMPTS[:1], 4, Sampler(), 20, ignore_eos=True)
    assert d.rounds == [(4, 0)] * 19


def test_plain_decoding_is_the_same_loop_without_proposals(target, texts):
    decoded = decode_plain(target, PROMPTS, Sampler(), 24, ignore_eos=True, batch_size=5)
    assert answers(decoded) == [t[len(p) : len(p) + 24] for p, t in zip(PROMPTS, texts)]
    assert all(d.rounds == [(0, 0)] * 23 for d in decoded)


@pytest.mark.parametrize("place", [1, 2, 4, 8])
def test_end_of_text_inside_an_accepted_block_ends_the_answer(target, texts, place):
    prompt, text = PROMPTS[4], texts[4]
    answer = text[len(prompt) :]
    place = next(i for i in range(place, 40) if answer.index(answer[i - 1]) == i - 1)  # first time this token comes
    (d,) = decode(target, Scripted(target, texts), [prompt], 7, Sampler(), 30, stop_ids=[answer[place - 1]])
    assert d.ids == answer[:place]
    assert d.stop == "id"
    if place > 1:
        assert d.rounds[-1] == (7, 7)  # counted before the cut


def test_several_stop_ids_and_the_earliest_wins(target, texts):
    answer = texts[0][len(PROMPTS[0]) :]
    stops = [answer[9], answer[5]]
    first = min(answer.index(s) for s in stops)
    (d,) = decode(target, Scripted(target, texts), PROMPTS[:1], 7, Sampler(), 30, stop_ids=stops)
    assert d.ids == answer[: first + 1]


def test_the_targets_own_end_of_text_stops_unless_ignored(target, texts):
    answer = texts[0][len(PROMPTS[0]) :]
    spec, end = target.spec, answer.index(answer[3])
    target.spec = replace(spec, eos_ids=(answer[3],))
    try:
        stopped = decode(target, Scripted(target, texts), PROMPTS[:1], 5, Sampler(), 20)[0]
        going = decode(target, Scripted(target, texts), PROMPTS[:1], 5, Sampler(), 20, ignore_eos=True)[0]
    finally:
        target.spec = spec
    assert stopped.ids == answer[: end + 1]
    assert going.ids == answer[:20]


def test_a_stop_string_inside_a_block_cuts_the_text(target):
    prompt = [97, 98, 99]
    text = [97, 98, 99, *b"hello, STOP there and more text behind it, enough for the last round"]
    draft = Scripted(target, [text], check=False)
    obedient = Sampler()

    # a target that says exactly this text: only the rules are under test, so its head is scripted
    said = torch.tensor(text)
    original = target.logits, target.forward

    def forward(input_ids, cache=None, needs=None, lengths=None):
        out = original[1](input_ids, cache, Needs((1, 4)), lengths)
        places = cache.lengths[:, None] + torch.arange(input_ids.shape[1])
        out.last_hidden = said[(places + 1).clamp(max=len(text) - 1)]  # [B, N] the next token instead of states
        return out

    target.forward = forward
    target.logits = lambda ids: torch.nn.functional.one_hot(ids, 264).float()
    try:
        (d,) = decode(target, draft, [prompt], 6, obedient, 40, stop_strings=["zzz", "STOP"])
        plain = decode_plain(target, [prompt], obedient, 40, stop_strings=["STOP"])[0]
    finally:
        target.logits, target.forward = original
    assert bytes(d.ids) == b"hello, STOP"
    assert d.text == "hello, "
    assert d.stop == "string"
    assert (plain.ids, plain.text) == (d.ids, d.text)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9])
def test_the_length_limit_inside_a_block_is_exact(target, texts, limit):
    decoded = decode(target, Scripted(target, texts), PROMPTS, 7, Sampler(), limit, ignore_eos=True, batch_size=2)
    assert answers(decoded) == [t[len(p) : len(p) + limit] for p, t in zip(PROMPTS, texts)]


def test_rows_that_end_at_different_times_do_not_disturb_each_other(target, texts):
    stops = [texts[1][len(PROMPTS[1]) + 3], texts[2][len(PROMPTS[2]) + 9]]
    batched = decode(target, Scripted(target, texts, 0.7), PROMPTS, 3, Sampler(), 30, stop_ids=stops, batch_size=5)
    alone = [decode(target, Scripted(target, texts, 0.7), [p], 3, Sampler(), 30, stop_ids=stops)[0] for p in PROMPTS]
    assert answers(batched) == answers(alone)
    assert len({len(d.ids) for d in batched}) >= 3


@pytest.mark.parametrize("kind", ["swa", "gpt2", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("right", [0.0, 0.7])
def test_other_targets_past_their_sliding_window(tmp_path_factory, kind, right):
    target = load(tmp_path_factory, kind)
    prompts = [list(range(60, 60 + n)) for n in (5, 15, 16, 17, 40)]
    texts = [slow_greedy(target, p, 30) for p in prompts]
    draft = Scripted(target, texts, right)
    decoded = decode(target, draft, prompts, 4, Sampler(), 24, ignore_eos=True, batch_size=5)
    assert answers(decoded) == [t[len(p) : len(p) + 24] for p, t in zip(prompts, texts)]


def test_the_last_position_of_the_target_is_reached_and_not_passed(tmp_path_factory):
    target = load(tmp_path_factory, "gpt2")
    target.spec = replace(target.spec, max_positions=40)
    prompts = [list(range(60, 80)), list(range(60, 70))]
    texts = [slow_greedy(target, p, 40) for p in prompts]
    decoded = decode(target, Scripted(target, texts, 0.7), prompts, 6, Sampler(), 20, ignore_eos=True, batch_size=2)
    assert answers(decoded) == [t[len(p) : len(p) + 20] for p, t in zip(prompts, texts)]


# -- sampling --------------------------------------------------------------------------------------------------------


SAME_START = [[5, 99, 100], [5, 7], [5, *range(40, 57)], [5, 258], [5]]


class Fuzzy(Draft):
    """Samples from the target's own distribution blurred with noise; knows that every prompt starts with token 5."""

    def __init__(self, target, noise=1.0):
        super().__init__(DraftConfig(family="fuzzy"), target.spec)
        self.needs = Needs()
        self.model_target, self.noise = target, noise

    def start(self, batch_size, max_len):
        return [[] for _ in range(batch_size)]

    def propose(self, state, tokens, captured, num, sampler):
        batch_size = len(state)
        for b, known in enumerate(state):
            known += tokens[b, : int(captured.lengths[b])].tolist()
        rows = [[5, *k] for k in state]
        ids, probs = [], []
        noise = torch.randn(self.target.vocab_size, generator=torch.Generator().manual_seed(1)) * self.noise
        for _ in range(num):
            last = torch.stack([self.model_target.forward(torch.tensor([r])).last_hidden[0, -1] for r in rows])
            q = sampler.probs(self.model_target.logits(last) + noise)
            drawn = sampler.draw(q) if sampler.draft_sampling else q.argmax(-1)
            rows = [[*r, int(t)] for r, t in zip(rows, drawn)]
            ids.append(drawn)
            probs.append(q)
        soft = torch.stack(probs, 1) if sampler.draft_sampling else None
        return Proposal(torch.stack(ids, 1), soft, torch.full((batch_size,), num))


@pytest.mark.parametrize("draft_sampling", [True, False])
def test_sampled_answers_do_not_depend_on_the_batch(target, draft_sampling):
    def run(batch_size):
        sampler = Sampler(0.3, 20, 0.95, torch.Generator().manual_seed(5), draft_sampling)
        return decode(target, Fuzzy(target, 0.5), SAME_START, 3, sampler, 24, ignore_eos=True, batch_size=batch_size)

    single, batched = run(1), run(5)
    assert answers(single) == answers(batched)
    assert [d.rounds for d in single] == [d.rounds for d in batched]
    assert {a for d in single for _, a in d.rounds} == {0, 1, 2, 3}


def test_the_sampler_decides_and_the_seed_repeats(target):
    def run(seed):
        sampler = Sampler(1.0, generator=torch.Generator().manual_seed(seed))
        return answers(decode_plain(target, PROMPTS, sampler, 12, ignore_eos=True, batch_size=2))

    assert run(1) == run(1)
    assert run(1) != run(2)


# -- callbacks, refusals, advice -------------------------------------------------------------------------------------


def test_every_commit_is_announced_with_its_accepted_tokens(target, texts):
    told = {i: [] for i in range(len(PROMPTS))}
    draft = Scripted(target, texts, 0.6)
    decoded = decode(
        target, draft, PROMPTS, 4, Sampler(), 17, ignore_eos=True, batch_size=2,
        on_commit=lambda i, ids, accepted: told[i].append((ids, accepted)),
    )  # fmt: skip
    for i, d in enumerate(decoded):
        assert [t for ids, _ in told[i] for t in ids] == d.ids
        assert told[i][0] == (d.ids[:1], 0)
        assert [a for _, a in told[i][1:-1]] == [a for _, a in d.rounds[:-1]]


def test_a_given_first_token_is_taken_and_continued(target, texts):
    other = (texts[0][len(PROMPTS[0])] + 1) % 264
    (d,) = decode_plain(target, PROMPTS[:1], Sampler(), 6, ignore_eos=True, first_ids=[other])
    assert d.ids == slow_greedy(target, [*PROMPTS[0], other], 5)[len(PROMPTS[0]) :]


def test_bad_input_is_refused_before_any_work(target, texts):
    draft = Scripted(target, texts, max_proposal=3)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        decode(target, draft, [[1], []], 2, Sampler(), 4)
    with pytest.raises(ValueError, match=r"num_speculative_tokens is 4.*at most 3"):
        decode(target, draft, [[1]], 4, Sampler(), 4)
    with pytest.raises(ValueError, match="at least 1, got 0; without a draft use decode_plain"):
        decode(target, draft, [[1]], 0, Sampler(), 4)
    with pytest.raises(ValueError, match=r"prompt 0: token ids 1..264 are outside .* 0..263"):
        decode(target, draft, [[1, 264]], 2, Sampler(), 4)
    with pytest.raises(ValueError, match=r"prompt 0: 500 tokens \+ max_new_tokens 13 exceed the 512 positions"):
        decode(target, draft, [[1] * 500], 2, Sampler(), 13)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        decode_plain(target, [[1]], Sampler(), 0)
    with pytest.raises(TypeError, match="repetition_penalty"):
        decode(target, draft, [[1]], 2, Sampler(), 4, repetition_penalty=1.3)  # there is no such option


def test_a_target_that_cannot_roll_back_is_refused_with_its_reason(target, texts):
    kinds = target.layer_kinds
    target.layer_kinds = ["conv", *kinds[1:]]
    try:
        with pytest.raises(ValueError, match="conv.*running state"):
            decode(target, Scripted(target, texts), [[1]], 2, Sampler(), 4)
    finally:
        target.layer_kinds = kinds


def test_a_round_that_costs_more_than_it_gains_is_noticed():
    slow = Decoded(1, [1] * 7, [(3, 1), (3, 0), (3, 2)], timings=Timings(0.0, 0.03, 0.27, 0.04))
    speedup, sentence = worth_it([slow])
    assert speedup == pytest.approx(2 * 40 / 100)
    assert "a round takes 100.0 ms (draft 10.0, verify 90.0) for 2.00 tokens" in sentence
    assert "costs more than it gains" in sentence
    slow.timings.plain_step_s = 0.1
    assert worth_it([slow])[0] == pytest.approx(2.0)
    assert "costs more" not in worth_it([slow])[1]
    slow.timings.plain_step_s = 0.0
    assert worth_it([slow]) is None


def test_profiling_changes_nothing_in_the_text(target, texts):
    sampler = lambda: Sampler(1.0, generator=torch.Generator().manual_seed(5))  # noqa: E731
    plain = decode(target, Fuzzy(target), SAME_START, 3, sampler(), 10, ignore_eos=True, batch_size=2)
    profiled = decode(target, Fuzzy(target), SAME_START, 3, sampler(), 10, ignore_eos=True, batch_size=2, profile=True)
    assert answers(plain) == answers(profiled)
    assert worth_it(profiled) is not None
    assert worth_it(plain) is None
