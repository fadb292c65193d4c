"""Speed: what a target pass over some rows costs, what a proposal costs, and the best number of proposals for each batch.

    speed-up(K) = (1 + survival[1] + .. + survival[K]) * pass(1) / (draft(K) + pass(K + 1))

pass(n): one target pass over n tokens per row, head included. draft(K): one `propose` of K tokens after one new row.
`wall_clock` compares the whole speculative loop with the same loop without a draft, at batch 1, in the order plain,
speculative, plain, speculative, ..., so that a machine that slows down meanwhile hurts both. All figures are medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from draftsmith.eval.acceptance import Counts, EvalConfig, ready
from draftsmith.eval.runtime import Decoded, decode, decode_plain, worth_it
from draftsmith.models.draft import Captured, Draft, Needs
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import Target

if TYPE_CHECKING:
    from rich.table import Table

NUM_TIMED = 5  # passes of each size; one more comes first and is not counted


def speed(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    config: EvalConfig,
    survival: Sequence[float] | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """The object of speed.json. draft: bound to the target.

    survival: measured per slot, e.g. of acceptance-runtime.json; None takes that of the wall-clock run, from few prompts.
    progress is told what is being measured.
    """
    ready(target, draft)
    tell = progress or (lambda _what: None)
    num = config.num_proposals(draft)
    tell("wall clock")
    clock, decoded = wall_clock(target, draft, prompts[: config.speed_prompts], num, config)
    if survival is None:
        counts = Counts.zero(num)
        for d in decoded:
            counts.add(Counts.of(d.rounds, len(d.ids), num))
        survival = counts.survival
    num = min(num, len(survival))
    context_len = min(
        int(median(len(p) for p in prompts)) + config.speed_tokens // 2,
        target.spec.max_positions - (NUM_TIMED + 2) * (num + 1),
    )
    pass_ms, draft_ms, best = {}, {}, {}
    for batch_size in config.speed_batch_sizes:
        tell(f"batch {batch_size}")
        key = str(batch_size)
        pass_ms[key] = pass_times(target, draft.needs, batch_size, num + 1, context_len)
        draft_ms[key] = draft_times(target, draft, batch_size, num, context_len)
        best[key] = best_num(survival, pass_ms[key], draft_ms[key])
    judged = worth_it(decoded)
    return {
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "num_threads": torch.get_num_threads(),
        "context_len": context_len,
        "num_speculative_tokens": num,
        "survival": list(survival),
        "pass_ms": pass_ms,
        "draft_ms": draft_ms,
        "best": best,
        **clock,
        "advice": judged[1] if judged else "",
    }


def wall_clock(
    target: Target, draft: Draft, prompts: Sequence[Sequence[int]], num: int, config: EvalConfig
) -> tuple[dict[str, Any], list[Decoded]]:
    """({"tokens_per_second": {"plain", "speculative"}, "speedup", ...}, answers of the last speculative run)."""
    speeds: dict[str, list[float]] = {"plain": [], "speculative": []}
    sampler, length, eos = config.sampler(), config.speed_tokens, config.ignore_eos
    decode_plain(target, prompts[:1], sampler, min(length, 8))  # warm up: allocations, lazily built tables
    decode(target, draft, prompts[:1], num, sampler, min(length, 8))
    for _ in range(config.speed_repeats):
        started = time.perf_counter()
        plain = decode_plain(target, prompts, sampler, length, ignore_eos=eos)
        middle = time.perf_counter()
        speculative = decode(target, draft, prompts, num, sampler, length, ignore_eos=eos)
        ended = time.perf_counter()
        speeds["plain"].append(sum(len(d.ids) for d in plain) / (middle - started))
        speeds["speculative"].append(sum(len(d.ids) for d in speculative) / (ended - middle))
    profiled = decode(target, draft, prompts[:1], num, sampler, length, ignore_eos=eos, profile=True)
    rounds = [r for d in speculative for r in d.rounds]
    found = {
        "num_prompts": len(prompts),
        "num_repeats": config.speed_repeats,
        "acceptance_length": 1 + sum(a for _, a in rounds) / max(1, len(rounds)),
        "tokens_per_second": {name: median(values) for name, values in speeds.items()},
        "speedup": median(b / a for a, b in zip(speeds["plain"], speeds["speculative"], strict=True)),
    }
    for d in speculative:
        d.timings.plain_step_s = profiled[0].timings.plain_step_s
    return found, speculative


@torch.no_grad()
def pass_times(target: Target, needs: Needs, batch_size: int, most: int, context_len: int) -> list[float]:
    """Milliseconds of one target pass over 1, 2, .., most tokens per row behind context_len tokens."""
    cache = target.new_cache(batch_size, context_len + most)
    ids = _any_ids(target, batch_size, context_len + most)
    target.forward(ids[:, :context_len], cache, needs)
    cache.advance([context_len] * batch_size)
    times: list[list[float]] = [[] for _ in range(most)]
    for _ in range(NUM_TIMED + 1):
        for n in range(1, most + 1):
            started = _now(target)
            out = target.forward(ids[:, context_len : context_len + n], cache, needs)
            target.logits(out.last_hidden).argmax(-1).tolist()
            times[n - 1].append(_now(target) - started)
    return [1e3 * median(each[1:]) for each in times]


@torch.no_grad()
def draft_times(target: Target, draft: Draft, batch_size: int, most: int, context_len: int) -> list[float]:
    """Milliseconds of one `propose` of 1, 2, .., most tokens, each after one newly committed row."""
    max_len = context_len + (NUM_TIMED + 1) * most + most + 1
    cache, state = target.new_cache(batch_size, max_len), draft.start(batch_size, max_len)
    ids = _any_ids(target, batch_size, context_len + 1)
    needs = Needs(draft.needs.aux_layers, True, draft.needs.target_kv_layers)
    out = target.forward(ids[:, :-1], cache, needs)
    tokens, new = ids[:, 1:], context_len
    times: list[list[float]] = [[] for _ in range(most)]
    for _ in range(NUM_TIMED + 1):
        for num in range(1, most + 1):
            cache.advance([new] * batch_size)
            lengths = torch.full((batch_size,), new, device=target.device)
            started = _now(target)
            draft.propose(state, tokens, Captured(out.features, out.last_hidden, lengths, cache), num, Sampler())
            times[num - 1].append(_now(target) - started)
            out = target.forward(tokens[:, -1:], cache, needs)
            tokens, new = target.logits(out.last_hidden).argmax(-1), 1
    return [1e3 * median(each[1:]) for each in times]


def best_num(survival: Sequence[float], pass_ms: Sequence[float], draft_ms: Sequence[float]) -> dict[str, Any]:
    """{"num_speculative_tokens": best K, 0 = do not speculate, "speedup": there, "speedups": for K = 0, 1, ..}."""
    speedups = [1.0]
    for num in range(1, min(len(survival), len(draft_ms), len(pass_ms) - 1) + 1):
        gained = 1 + sum(survival[:num])
        speedups.append(gained * pass_ms[0] / (draft_ms[num - 1] + pass_ms[num]))
    best = max(range(len(speedups)), key=lambda num: speedups[num])
    return {"num_speculative_tokens": best, "speedup": speedups[best], "speedups": speedups}


def speed_table(result: dict[str, Any]) -> Table:
    """Pass times and the best number of proposals per batch size; the wall clock stands in the caption."""
    from rich.table import Table

    num, tokens = result["num_speculative_tokens"], result["tokens_per_second"]
    caption = (
        f"wall clock at batch 1, K={num}: {tokens['speculative']:.1f} tok/s against {tokens['plain']:.1f} without the draft: "
        f"{result['speedup']:.2f}x ({result['num_prompts']} prompts, median of {result['num_repeats']}; acceptance length "
        f"{result['acceptance_length']:.2f})"
    )
    title = f"Speed: {result['device']}, {result['dtype']}, {result['num_threads']} threads, context {result['context_len']}"
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    heads = (
        "batch",
        "pass of 1, ms",
        f"pass of {num + 1}, ms",
        "ratio",
        f"draft of {num}, ms",
        "best K",
        "speed-up there",
    )
    for head in heads:
        table.add_column(head, justify="right")
    for key, passes in result["pass_ms"].items():
        best = result["best"][key]
        table.add_row(
            key,
            f"{passes[0]:.1f}",
            f"{passes[num]:.1f}",
            f"{passes[num] / passes[0]:.2f}",
            f"{result['draft_ms'][key][num - 1]:.1f}",
            str(best["num_speculative_tokens"]) if best["num_speculative_tokens"] else "0 (do not speculate)",
            f"{best['speedup']:.2f}x",
        )
    return table


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _any_ids(target: Target, batch_size: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.spec.vocab_size, (batch_size, length), generator=generator).to(target.device)


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
