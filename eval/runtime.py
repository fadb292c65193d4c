"""The speculative runtime: prefill, then rounds of propose, verify, commit. It knows no family by name.

    prefill   target over the prompt; the target chooses the first new token (the first anchor)
    propose   the draft takes in what the last round committed and offers up to K tokens
    verify    one target pass over anchor + proposal; eval/verify.py says how many stay and which token is added
    commit    the target's cache advances by accepted + 1 columns; the rest of the pass is forgotten

`decode_plain` is the same loop without a draft: the honest baseline for speed and the reference of the certificate.

Every row has its own random generator, so what a row draws does not depend on the rows it shares a batch with, except
through the rounding of batched matrix products. Logits processors (repetition penalty and the like) do not exist here:
they would have to see every accepted prefix inside a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from draftsmith.eval.verify import draw, verify
from draftsmith.models.cache import TargetCache
from draftsmith.models.draft import Captured, Draft, Needs, Proposal
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import Target

NUM_PROFILED = 3  # plain one-token passes that a profiled run times in its first batch
OnCommit = Callable[[int, list[int], int], None]
Schedule = Callable[[Tensor, Sequence[int]], list[int]]
"""(confidence [B, K], slots each row has [B]) of the open rows -> slots to verify per row; see eval/schedule.py.

To keep sampling lossless, whether slot k is in may depend on confidences up to slot k only.
"""


@dataclass
class Timings:
    """Seconds of one answer; rows of a batch share the time of a pass equally. prefill: prompt and first token.

    plain_step: one target pass over one token per row, measured inside this run (0 = not profiled).
    """

    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    plain_step_s: float = 0.0


@dataclass
class Decoded:
    """One answer. ids: new tokens, the stop token included. text: without special tokens, cut before a stop string.

    rounds: (num_proposed, num_accepted) of each round. num_accepted counts accepted proposals before any stop rule
    cuts the text. The first token comes from the prefill and belongs to no round.
    confidences: of each round, the draft's own confidence of the verified slots; empty when it tells none.
    stop: "id" (end of text or a stop id), "string" or "length".
    """

    prompt_len: int
    ids: list[int] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    confidences: list[list[float]] = field(default_factory=list)
    stop: str = ""
    text: str = ""
    timings: Timings = field(default_factory=Timings)

    @property
    def rounds_within_text(self) -> list[tuple[int, int]]:
        """rounds, cut to the proposals that are followed by a token of the text.

        Then the sum of num_accepted + 1 is exactly the number of tokens after the first; exact.py counts like this.
        """
        found, left = [], len(self.ids) - 1  # tokens behind the anchor
        for proposed, accepted in self.rounds:
            found.append((min(proposed, left - 1), min(accepted, left - 1)))
            left -= accepted + 1
        return found


@dataclass
class RowSampler(Sampler):
    """A sampler that draws for row b from generators[b]; see models/sampling.py for the rest."""

    generators: Sequence[torch.Generator] = ()

    def uniforms(self, num: int) -> Tensor:
        """[B, num] float64 in [0, 1), on the host."""
        return torch.stack([torch.rand(num, generator=g, dtype=torch.float64) for g in self.generators])

    def draw(self, probs: Tensor) -> Tensor:
        """One id per distribution: probs [B, ..., V] -> [B, ...]."""
        if self.greedy:
            return probs.argmax(-1)
        shape = probs.shape[:-1]
        assert shape[0] == len(self.generators), f"draw needs one row per sequence, got {tuple(probs.shape)}"
        return draw(probs, self.uniforms(shape[1:].numel()).view(shape).to(probs.device))


def decode(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    num: int,
    sampler: Sampler,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    stop_strings: Sequence[str] = (),
    ignore_eos: bool = False,
    batch_size: int = 1,
    *,
    first_ids: Sequence[int] | None = None,
    on_commit: OnCommit | None = None,
    profile: bool = False,
    schedule: Schedule | None = None,
) -> list[Decoded]:
    """Answers to the prompts by speculative decoding; `draft` is bound to `target`.

    num: proposals per round (K). stop_ids stop in addition to the target's own end-of-text ids, which ignore_eos turns
    off. max_new_tokens: limit per answer; it may fall inside a block, which is then cut.
    first_ids: the first new token of each answer, where it shall be given instead of chosen (fixed contexts).
    on_commit(index, ids, num_accepted) is called after every commit: new ids of prompt `index` that stay in the text;
    the first num_accepted of them are accepted proposals, the rest is the token the target added.
    profile: also time plain one-token passes, so that `worth_it` can judge the run.
    schedule: verify a prefix of each proposal, chosen from the draft's confidences; the output is as exact without.
    """
    check_num(draft, num)
    rules = _Rules(target, max_new_tokens, stop_ids, stop_strings, ignore_eos)
    return _decode(target, draft, prompts, num, sampler, rules, batch_size, first_ids, on_commit, profile, schedule)


def decode_plain(
    target: Target,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    stop_strings: Sequence[str] = (),
    ignore_eos: bool = False,
    batch_size: int = 1,
    *,
    first_ids: Sequence[int] | None = None,
    on_commit: OnCommit | None = None,
) -> list[Decoded]:
    """Answers of the target alone, by the same loop: every round is (0, 0) and adds one token. See `decode`."""
    rules = _Rules(target, max_new_tokens, stop_ids, stop_strings, ignore_eos)
    return _decode(target, None, prompts, 0, sampler, rules, batch_size, first_ids, on_commit, False)


def check_num(draft: Draft, num: int) -> None:
    """Refuse a number of proposals per round that this draft cannot give."""
    if draft.max_proposal is not None and num > draft.max_proposal:
        raise ValueError(
            f"num_speculative_tokens is {num}, this {draft.config.family} draft proposes at most {draft.max_proposal} "
            f"tokens a round; lower eval.num_speculative_tokens"
        )
    if num < 1:
        raise ValueError(f"num_speculative_tokens must be at least 1, got {num}; without a draft use decode_plain")


def worth_it(decoded: Sequence[Decoded]) -> tuple[float, str] | None:
    """(speed-up over plain decoding, a sentence) from a profiled run; None if it was not profiled or has no rounds.

    A round earns 1 + accepted tokens and costs draft + verify; the same tokens one by one cost that many plain steps.
    """
    steps = [d.timings.plain_step_s for d in decoded if d.timings.plain_step_s]
    num_rounds = sum(len(d.rounds) for d in decoded)
    if not steps or not num_rounds:
        return None
    gained = 1 + sum(accepted for d in decoded for _, accepted in d.rounds) / num_rounds
    draft_ms = 1e3 * sum(d.timings.draft_s for d in decoded) / num_rounds
    verify_ms = 1e3 * sum(d.timings.verify_s for d in decoded) / num_rounds
    plain_ms = 1e3 * sum(steps) / len(steps)
    speedup = gained * plain_ms / (draft_ms + verify_ms)
    sentence = (
        f"a round takes {draft_ms + verify_ms:.1f} ms (draft {draft_ms:.1f}, verify {verify_ms:.1f}) for {gained:.2f} "
        f"tokens, a plain step {plain_ms:.1f} ms for one: {speedup:.2f}x"
    )
    if speedup < 1:
        sentence += "; a round costs more than it gains here: propose fewer tokens or decode without the draft"
    return speedup, sentence


# -- the loop --------------------------------------------------------------------------------------------------------


class _Rules:
    """When an answer ends, checked token by token, so that a stop inside an accepted block is not passed over."""

    def __init__(
        self,
        target: Target,
        max_new_tokens: int,
        stop_ids: Collection[int],
        stop_strings: Sequence[str],
        ignore_eos: bool,
    ):
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        if "" in stop_strings:
            raise ValueError("stop_strings: an empty string stops nothing; remove it")
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset(stop_ids) | frozenset(() if ignore_eos else target.spec.eos_ids)
        self.stop_strings = tuple(stop_strings)
        self.tokenizer = target.tokenizer

    def cut(self, ids: list[int], new: list[int]) -> tuple[list[int], str]:
        """(the part of `new` that stays behind `ids`, "id" | "string" | "length" | "" = goes on)."""
        stop, room = "", self.max_new_tokens - len(ids)
        if len(new) >= room:
            new, stop = new[:room], "length"
        for i, token in enumerate(new):
            if token in self.stop_ids:
                new, stop = new[: i + 1], "id"
                break
        if self.stop_strings and self._holds_stop(ids + new):
            end = next(i for i in range(1, len(new) + 1) if self._holds_stop(ids + new[:i]))
            new, stop = new[:end], "string"
        return new, stop

    def _holds_stop(self, ids: list[int]) -> bool:
        text = self.text(ids)
        return any(s in text for s in self.stop_strings)

    def text(self, ids: list[int], stop: str = "") -> str:
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        if stop == "string":
            text = text[: min(text.find(s) for s in self.stop_strings if s in text)]
        return text


@dataclass
class _Row:
    """One answer in the making. last: what the last round committed, for the draft and as the next anchor."""

    index: int
    prompt: list[int]
    decoded: Decoded
    last: list[int] = field(default_factory=list)

    @property
    def open(self) -> bool:
        return not self.decoded.stop


@torch.no_grad()
def _decode(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[Sequence[int]],
    num: int,
    sampler: Sampler,
    rules: _Rules,
    batch_size: int,
    first_ids: Sequence[int] | None,
    on_commit: OnCommit | None,
    profile: bool,
    schedule: Schedule | None = None,
) -> list[Decoded]:
    _check_prompts(target, prompts, rules.max_new_tokens)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    seed = 0 if sampler.greedy else int(torch.randint(2**31, (), generator=sampler.generator))
    rows = [_Row(i, list(prompt), Decoded(len(prompt))) for i, prompt in enumerate(prompts)]
    for start in range(0, len(rows), batch_size):
        group = rows[start : start + batch_size]
        first = None if first_ids is None else list(first_ids[start : start + batch_size])
        _Loop(target, draft, num, _row_sampler(sampler, seed, group), rules, on_commit, schedule).run(
            group, first, profile and start == 0
        )
    return [row.decoded for row in rows]


class _Loop:
    """One batch from prefill to the end of its last row. Finished rows stay in the batch and take no part."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        num: int,
        sampler: RowSampler,
        rules: _Rules,
        on_commit: OnCommit | None,
        schedule: Schedule | None = None,
    ):
        self.target, self.draft, self.num, self.sampler = target, draft, num, sampler
        self.rules, self.on_commit, self.schedule = rules, on_commit, schedule
        wanted = Needs() if draft is None else draft.needs
        self.needs = Needs(wanted.aux_layers, True, wanted.target_kv_layers)  # the runtime itself needs the last hidden

    def run(self, rows: list[_Row], first: list[int] | None, profile: bool) -> None:
        longest = max(len(row.prompt) for row in rows) + self.rules.max_new_tokens + self.num
        max_len = min(longest, self.target.spec.max_positions)
        cache = self.target.new_cache(len(rows), max_len)
        state = None if self.draft is None else self.draft.start(len(rows), max_len)
        captured, tokens = self._prefill(rows, cache, first)
        num_rounds, steps = 0, []
        while any(row.open for row in rows):
            if profile and 1 <= num_rounds <= NUM_PROFILED:  # the first pass pays for allocations
                steps.append(self._plain_step(rows, cache))
            started, timings = self._now(), [row.decoded.timings for row in rows if row.open]
            proposal, offered = self._propose(state, rows, tokens, captured, cache)
            drafted = self._now()
            captured, tokens = self._verify_and_commit(rows, cache, proposal, offered)
            verified = self._now()
            for shared in timings:
                shared.draft_s += (drafted - started) / len(timings)
                shared.verify_s += (verified - drafted) / len(timings)
            num_rounds += 1
        for row in rows:
            row.decoded.text = self.rules.text(row.decoded.ids, row.decoded.stop)
            row.decoded.timings.plain_step_s = sorted(steps)[len(steps) // 2] / len(rows) if steps else 0.0

    # -- phases ----------------------------------------------------------------------------------------------------
    def _prefill(self, rows: list[_Row], cache: TargetCache, first: list[int] | None) -> tuple[Captured, Tensor]:
        """The target reads the prompts and chooses each row's first token."""
        started = self._now()
        lengths = [len(row.prompt) for row in rows]
        out = self.target.forward(self._padded([row.prompt for row in rows]), cache, self.needs, lengths)
        cache.advance(lengths)
        if first is None:
            ends = self._counts(lengths) - 1
            logits = self.target.logits(out.last_hidden[torch.arange(len(rows), device=ends.device), ends])
            first = verify(logits[:, None], self._nothing(len(rows)), self.sampler, self._uniforms(1)).token.tolist()
        tokens = [row.prompt[1:] + [token] for row, token in zip(rows, first, strict=True)]
        for row, token in zip(rows, first, strict=True):
            self._commit(row, [token], 0)
        elapsed = self._now() - started
        for row in rows:
            row.decoded.timings.prefill_s = elapsed / len(rows)
        return self._captured(rows, out, lengths, cache), self._padded(tokens)

    def _propose(
        self, state: object, rows: list[_Row], tokens: Tensor, captured: Captured, cache: TargetCache
    ) -> tuple[Proposal, list[int]]:
        """The draft's proposal and, on the host, how many of its slots each row really offers."""
        if self.draft is None:
            return self._nothing(len(rows)), [0] * len(rows)
        # the last proposal of a row may not pass the target's last position
        rooms = [self.target.spec.max_positions - 1 - length for length in cache.host_lengths]
        most = min(self.num, max(room for room, row in zip(rooms, rows, strict=True) if row.open))
        proposal = self.draft.propose(state, tokens, captured, most, self.sampler)
        offered = [
            min(n, room) if row.open else 0 for n, room, row in zip(proposal.num.tolist(), rooms, rows, strict=True)
        ]
        if proposal.confidence is not None:
            self._schedule(rows, proposal.confidence.cpu(), offered)
        elif self.schedule is not None:
            raise ValueError(
                f"this {self.draft.config.family} draft tells no confidence, which a schedule of the verification needs; "
                f"set eval.schedule to none, or train a draft with a confidence head"
            )
        return _narrowed(proposal, max(offered)), offered

    def _schedule(self, rows: list[_Row], confidence: Tensor, offered: list[int]) -> None:
        """Lower `offered` as the schedule says, and note the confidences of what is left."""
        part = [b for b, row in enumerate(rows) if row.open]
        if self.schedule is not None:
            chosen = self.schedule(confidence[part], [offered[b] for b in part])
            for b, length in zip(part, chosen, strict=True):
                assert 0 <= length <= offered[b], f"the schedule asks for {length} of {offered[b]} slots"
                offered[b] = length
        for b in part:
            rows[b].decoded.confidences.append(confidence[b, : offered[b]].tolist())

    def _verify_and_commit(
        self, rows: list[_Row], cache: TargetCache, proposal: Proposal, offered: list[int]
    ) -> tuple[Captured, Tensor]:
        anchors = self._padded([row.last[-1:] for row in rows])
        ids = torch.cat([anchors, proposal.ids], 1)  # [B, 1 + K]
        width = proposal.ids.shape[1]
        ragged = any(n < width for n in offered)
        lengths = [n + 1 for n in offered] if ragged else None
        if ragged:
            proposal.num = self._counts(offered)
        out = self.target.forward(ids, cache, self.needs, lengths)
        verdict = verify(self.target.logits(out.last_hidden), proposal, self.sampler, self._uniforms(width + 1))
        told = torch.cat([verdict.num_accepted[:, None], verdict.token[:, None], proposal.ids], 1).tolist()
        advance = [0] * len(rows)
        for b, (row, (accepted, token, *proposed)) in enumerate(zip(rows, told, strict=True)):
            if row.open:
                row.decoded.rounds.append((offered[b], accepted))
                advance[b] = accepted + 1
                self._commit(row, [*proposed[:accepted], token], accepted)
        cache.advance(advance)
        return self._captured(rows, out, advance, cache), self._padded([row.last for row in rows], max(advance))

    def _commit(self, row: _Row, new: list[int], num_accepted: int) -> None:
        row.last = new
        kept, row.decoded.stop = self.rules.cut(row.decoded.ids, new)
        row.decoded.ids += kept
        if self.on_commit is not None:
            self.on_commit(row.index, kept, min(num_accepted, len(kept)))

    def _plain_step(self, rows: list[_Row], cache: TargetCache) -> float:
        """Seconds of one target pass over one token per row. The cache does not advance, so nothing changes."""
        started = self._now()
        out = self.target.forward(self._padded([row.last[-1:] for row in rows]), cache, self.needs, None)
        half = torch.full((len(rows), 1), 0.5, dtype=torch.float64, device=self.target.device)  # spends no randomness
        verify(self.target.logits(out.last_hidden), self._nothing(len(rows)), self.sampler, half).token.tolist()
        return self._now() - started

    # -- small parts -----------------------------------------------------------------------------------------------
    def _captured(self, rows: list[_Row], out, lengths: list[int], cache: TargetCache) -> Captured:
        """Target states of the committed rows only; finished rows count 0."""
        width = max(lengths)
        features = None if out.features is None else out.features[:, :width]
        counts = [n if row.open else 0 for n, row in zip(lengths, rows, strict=True)]
        return Captured(features, out.last_hidden[:, :width], self._counts(counts), cache)

    def _nothing(self, batch_size: int) -> Proposal:
        empty = torch.zeros(batch_size, 0, dtype=torch.int64, device=self.target.device)
        return Proposal(empty, None, torch.zeros(batch_size, dtype=torch.int64, device=self.target.device))

    def _uniforms(self, num: int) -> Tensor | None:
        """[B, num]. Every round spends K + 1 per row, so that a narrower pass does not shift what comes after."""
        if self.sampler.greedy:
            return None
        return self.sampler.uniforms(self.num + 1)[:, -num:].to(self.target.device)

    def _padded(self, rows: Sequence[list[int]], width: int | None = None) -> Tensor:
        """[B, width] int64, left-aligned, 0 behind the end of a row."""
        width = max(len(ids) for ids in rows) if width is None else width
        host = [ids[:width] + [0] * (width - len(ids)) for ids in rows]
        return torch.tensor(host, dtype=torch.int64, device=self.target.device)

    def _counts(self, counts: list[int]) -> Tensor:
        return torch.tensor(counts, dtype=torch.int64, device=self.target.device)

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


def _narrowed(proposal: Proposal, width: int) -> Proposal:
    """The first `width` slots: columns that no row offers would only cost the target rows."""
    if width == proposal.ids.shape[1]:
        return proposal
    probs = None if proposal.probs is None else proposal.probs[:, :width]
    return Proposal(proposal.ids[:, :width], probs, proposal.num.clamp(max=width), proposal.vocab)


def _row_sampler(sampler: Sampler, seed: int, rows: list[_Row]) -> RowSampler:
    values = {f.name: getattr(sampler, f.name) for f in fields(Sampler)}
    if sampler.greedy:
        return RowSampler(**values)
    # spread over 32 bits: the CPU generator reads no more of its seed
    seeds = [(seed + 0x9E3779B1 * (row.index + 1)) % 2**32 for row in rows]
    return RowSampler(**values, generators=[torch.Generator().manual_seed(s) for s in seeds])


def _check_prompts(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    spec = target.spec
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty: the target needs at least one token to go on from")
        if not 0 <= min(prompt) <= max(prompt) < spec.vocab_size:
            raise ValueError(
                f"prompt {i}: token ids {min(prompt)}..{max(prompt)} are outside the target's vocabulary "
                f"0..{spec.vocab_size - 1}; it was made with another tokenizer"
            )
        if len(prompt) + max_new_tokens > spec.max_positions:
            raise ValueError(
                f"prompt {i}: {len(prompt)} tokens + max_new_tokens {max_new_tokens} exceed the "
                f"{spec.max_positions} positions of {spec.name}; lower max_new_tokens or leave this prompt out"
            )
