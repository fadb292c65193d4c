"""The losslessness certificate: speculation does not change what the target says.

Greedy     The speculative loop against the same loop without a draft, token for token up to the first divergence of a
           prompt. In float32 any divergence is a mismatch. In the serving precision the number of rows of a pass
           changes its rounding, with or without a draft, so a divergence is forgiven, and reported, if it is a tie: the
           two tokens are the target's two best in float32 behind the same prefix, less than 0.15 logits apart.
Sampled    In fixed contexts the law of the first two tokens that a round commits, against the target's warped
           probabilities, by chi-square tests with Holm's correction; p < 1e-3 fails. The seed is fixed.

           first token    bins = tokens
           both tokens    bins = pairs whose first token is common enough to enumerate its successors
           Bins expected fewer than 5 times are pooled.

Whatever fails, `passed` is false, and `failures(certificate)` says why in sentences.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.acceptance import EvalConfig, ready
from draftsmith.eval.runtime import Schedule, decode, decode_plain
from draftsmith.models.draft import Draft
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import Target

TIE_GAP = 0.15  # float32 logits; bf16 ties seen on a 135M target: 0.003 to 0.086
FAILS_BELOW = 1e-3  # smallest Holm-corrected p value
MIN_EXPECTED = 5.0  # draws per bin, below which chi-square is no good approximation
DRAW_BATCH = 128  # draws decoded together
Divergence = tuple[list[int], int | None, int | None]
"""(context, next token of the target alone, next token of the speculative loop); None = that answer had ended."""


def certify(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    config: EvalConfig,
    load_fp32: Callable[[], Target] | None = None,
    progress: Callable[[int], None] | None = None,
    schedule: Schedule | None = None,
) -> dict[str, Any]:
    """The object of certificate.json. draft: bound to `target`, as it is again afterwards.

    load_fp32: makes the float32 copy of a target that serves in another precision; None loads it by the target's own
    config. The sampled part runs at config.temperature, or at 1 where that is 0. progress is told how many tokens came.
    schedule: the one that decoding will use (eval/schedule.py); the certificate then holds for it and says so.
    """
    ready(target, draft)
    if not prompts:
        raise ValueError("a certificate needs prompts, got none")
    sha256 = tensors_sha256(draft)
    num = config.num_proposals(draft)
    chosen = prompts[: config.certify_prompts]
    parts: list[dict[str, Any]] = []
    divergences: list[Divergence] = []
    if target.dtype != torch.float32:
        part, divergences = greedy_part(target, draft, chosen, num, config, progress, schedule)
        parts.append(part)
    exact_target = target if target.dtype == torch.float32 else (load_fp32 or (lambda: _reload(target)))()
    for context, plain, speculative in divergences:
        tie = is_tie(exact_target, context, plain, speculative)
        parts[0]["num_ties" if tie else "num_mismatches"] += 1
    with bound_to(draft, exact_target, target):
        part, divergences = greedy_part(exact_target, draft, chosen, num, config, progress, schedule)
        part["num_mismatches"] = len(divergences)
        sampled = sampled_part(exact_target, draft, prompts, num, config, progress, schedule)
    name = target.spec.name if target.spec.revision is None else f"{target.spec.name}@{target.spec.revision}"
    found: dict[str, Any] = {"greedy": [part, *parts], "sampled": sampled, "target": name, "draft_sha256": sha256}
    if schedule is not None:
        found["schedule"] = config.schedule
    return {**found, "passed": not failures(found)}


def failures(certificate: dict[str, Any]) -> list[str]:
    """One sentence for everything that did not hold; empty = passed."""
    found = []
    for part in certificate["greedy"]:
        if part["num_mismatches"]:
            found.append(
                f"greedy, {part['dtype']}: {part['num_mismatches']} of {part['num_prompts']} answers differ from the target "
                f"alone, and not by a tie: acceptance, rollback or the order of rows is wrong"
            )
    p_value = certificate["sampled"]["p_value"]
    if p_value < FAILS_BELOW:
        found.append(
            f"sampled: the drawn tokens do not follow the target (p = {p_value:.2g} < {FAILS_BELOW}): the accept test, the "
            f"residual or the draft's reported probabilities are wrong"
        )
    return found


def tensors_sha256(draft: Draft) -> str:
    """Hash of names, types, shapes and bytes of all tensors of the draft."""
    digest = hashlib.sha256()
    for name, tensor in sorted(draft.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def bound_to(draft: Draft, target: Target, before: Target) -> Iterator[None]:
    """The draft in float32 and bound to `target`, meanwhile; then as it was, bound to `before`.

    Widening a half-precision tensor and narrowing it again gives the same tensor.
    """
    dtypes = {name: p.dtype for name, p in draft.named_parameters()}
    if before is not target:
        target.bind(draft.float())
    try:
        yield
    finally:
        if before is not target:
            for name, parameter in draft.named_parameters():
                parameter.data = parameter.data.to(dtypes[name])
            before.bind(draft)


def _reload(target: Target) -> Target:
    return Target.load(target.config.model_copy(update={"dtype": "float32"}))


# -- greedy ----------------------------------------------------------------------------------------------------------


def greedy_part(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    num: int,
    config: EvalConfig,
    progress: Callable[[int], None] | None = None,
    schedule: Schedule | None = None,
) -> tuple[dict[str, Any], list[Divergence]]:
    """({"dtype", "num_prompts", "num_tokens", 0 mismatches, 0 ties}, first divergences).

    num_tokens counts the positions that were compared, the diverging one included.
    """

    def tell(_index: int, ids: list[int], _accepted: int) -> None:
        if progress is not None:
            progress(len(ids))

    size, length = config.batch_size, config.certify_tokens
    plain = decode_plain(target, prompts, Sampler(), length, batch_size=size, on_commit=tell)
    speculative = decode(
        target, draft, prompts, num, Sampler(), length, batch_size=size, on_commit=tell, schedule=schedule
    )
    compared, divergences = 0, []
    for prompt, a, b in zip(prompts, plain, speculative, strict=True):
        place = first_divergence(a.ids, b.ids)
        if place is None:
            compared += len(a.ids)
            continue
        compared += place + 1
        tokens = [ids[place] if place < len(ids) else None for ids in (a.ids, b.ids)]
        divergences.append(([*prompt, *a.ids[:place]], tokens[0], tokens[1]))
    part = {
        "dtype": str(target.dtype).removeprefix("torch."),
        "num_prompts": len(prompts),
        "num_tokens": compared,
        "num_mismatches": 0,
        "num_ties": 0,
    }
    return part, divergences


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """First index at which two answers differ, the end of the shorter one included; None if they are equal."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def is_tie(target: Target, context: Sequence[int], a: int | None, b: int | None) -> bool:
    """Whether tokens a and b are the float32 target's two best behind the context, less than TIE_GAP logits apart."""
    logits = next_logits(target, [list(context)])[0]
    best = logits.topk(2)
    return set(best.indices.tolist()) == {a, b} and float(best.values[0] - best.values[1]) < TIE_GAP


def next_logits(target: Target, contexts: Sequence[list[int]]) -> Tensor:
    """[n, V] float32 logits behind each of n contexts of one length."""
    ids = torch.tensor(contexts, dtype=torch.int64, device=target.device)
    return target.logits(target.forward(ids).last_hidden[:, -1]).float()


# -- sampled ---------------------------------------------------------------------------------------------------------


def sampled_part(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    num: int,
    config: EvalConfig,
    progress: Callable[[int], None] | None = None,
    schedule: Schedule | None = None,
) -> dict[str, Any]:
    """{"num_draws": per context times contexts, "p_value": the smallest after Holm's correction}.

    Two tokens need at most two proposals a round. Every second context is drawn with one, so that its second token is
    often a bonus token.
    """
    sampler = replace(config.sampler(), temperature=config.temperature or 1.0)
    p_values = []
    contexts = [list(p[-config.certify_context_len :]) for p in spread(prompts, config.certify_contexts)]
    for i, context in enumerate(contexts):
        anchor = int(next_logits(target, [context])[0].argmax())
        decoded = decode(
            target,
            draft,
            [context] * config.certify_draws,
            min(num, 2 - i % 2),
            sampler,
            3,
            ignore_eos=True,
            batch_size=DRAW_BATCH,
            first_ids=[anchor] * config.certify_draws,
            schedule=schedule,
        )
        pairs = [(d.ids[1], d.ids[2]) for d in decoded]
        p_values += pair_p_values(target, [*context, anchor], sampler, pairs)
        if progress is not None:
            progress(2 * len(pairs))
    return {"num_draws": config.certify_draws * len(contexts), "p_value": min(holm(p_values))}


def spread(items: Sequence[Any], num: int) -> list[Any]:
    """At most num items, evenly over the list: neighbours are often of one kind."""
    num = min(num, len(items))
    return [items[i * len(items) // num] for i in range(num)]


def pair_p_values(
    target: Target, context: list[int], sampler: Sampler, pairs: Sequence[tuple[int, int]]
) -> list[float]:
    """p values of the first token and of both tokens behind the context, against the target's warped distribution."""
    draws = len(pairs)
    first = warped(target, context, sampler)
    singles = {(i,): float(first[i]) for i in _common(first, draws)}
    doubles: dict[tuple[int, ...], float] = {}
    for (token,), chance in singles.items():
        second = warped(target, [*context, token], sampler)
        doubles |= {(token, i): chance * float(second[i]) for i in _common(chance * second, draws)}
        # the other successors of this token share a bin
        doubles[(token, -1)] = chance - sum(p for pair, p in doubles.items() if pair[0] == token)
    seen = Counter(pair if pair in doubles else (pair[0], -1) for pair in pairs)
    return [
        chi_square_p(Counter((a,) for a, _ in pairs), singles, draws),
        chi_square_p(seen, doubles, draws),
    ]


def warped(target: Target, context: list[int], sampler: Sampler) -> Tensor:
    """The target's warped distribution behind the context, [V] float64, on the host."""
    probs = sampler.probs(next_logits(target, [context]))[0].double().cpu()
    return probs / probs.sum()


def _common(probs: Tensor, draws: int) -> list[int]:
    """Indices expected at least MIN_EXPECTED times."""
    return (probs * draws >= MIN_EXPECTED).nonzero().squeeze(1).tolist()


def chi_square_p(seen: Counter[Any], probs: dict[Any, float], draws: int) -> float:
    """Chance of a chi-square at least this large if the draws follow probs (Pearson's test).

    probs: chances of the named bins; what they leave is one more bin. Bins expected fewer than MIN_EXPECTED times join
    the remaining one, which takes in the rarest named bin while it is still too small itself. A draw that has no chance
    at all gives 0.
    """
    named = {bin_: p for bin_, p in probs.items() if p * draws >= MIN_EXPECTED}
    rest = max(0.0, 1.0 - sum(named.values()))
    while named and rest > 1e-9 and rest * draws < MIN_EXPECTED:
        rest += named.pop(min(named, key=lambda bin_: named[bin_]))
    observed = [seen[bin_] for bin_ in named]
    expected = [p * draws for p in named.values()]
    others = draws - sum(observed)
    if rest > 1e-9:
        observed.append(others)
        expected.append(rest * draws)
    elif others:
        return 0.0
    if len(expected) < 2:
        return 1.0
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(expected) - 1
    tail = torch.special.gammaincc(
        torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)
    )
    assert math.isfinite(float(tail))
    return float(tail)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: p values adjusted for the number of tests, in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
