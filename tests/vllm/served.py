"""What the vLLM tests share: tiny targets on disk, drafts trained in seconds, expected numbers from our own runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tiny import alphabet_rows, save_target, target_model, teach, tokenizer

from draftsmith.eval.runtime import decode, decode_plain
from draftsmith.models import export
from draftsmith.models.draft import Batch, Draft, TokenStats
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import Target, TargetConfig

NUM, MAX_TOKENS, VOCAB = 3, 40, 264
# heads of 32: the smallest that vLLM's attention on the CPU takes
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 32}
GREEDY = Sampler(temperature=0.0)


def case(name: str, target: str | Path, draft: str | Path | None, num: int = NUM, **more: Any) -> dict[str, Any]:
    """One case for check.py; more: prompts, max_tokens, dtype, max_model_len, method."""
    about = {"method": "eagle3", "num_speculative_tokens": num, "max_tokens": MAX_TOKENS}
    place = None if draft is None else str(draft)
    return {"name": name, "target": str(target), "draft": place, **about, **more}


def make_target(kind: str, folder: Path, change: Callable[[Any], Any] = teach, **config: Any) -> Target:
    """A tiny target on disk, loaded the way users load theirs."""
    name = save_target(change(target_model(kind, **{**SIZES, **config})), tokenizer(), folder)
    return Target.load(TargetConfig(name=name, dtype="float32", published_name="org/tiny"))


def prompts() -> list[list[int]]:
    """Alphabets that the targets have learned, and bytes that they have not."""
    random = torch.Generator().manual_seed(7)
    known = [alphabet_rows(1, n, random)[0].tolist() for n in (4, 9)]
    strange = [torch.randint(0, VOCAB, (n,), generator=random).tolist() for n in (3, 5, 7, 9, 12, 16, 20)]
    return [*known, *strange]


def answers(target: Target, starts: Sequence[Sequence[int]], num: int) -> list[list[int]]:
    """Prompt and greedy answer as one row each."""
    found = decode_plain(target, starts, GREEDY, num, ignore_eos=True, batch_size=len(starts))
    return [[*start, *one.ids] for start, one in zip(starts, found, strict=True)]


def train(draft: Draft, target: Target, rows: list[list[int]], steps: int, lr: float = 1e-3) -> Draft:
    """Plain AdamW on all rows at once."""
    draft.bind(target.embedding, target.head)
    ids = torch.tensor([t for row in rows for t in row])
    states = target.capture(rows, draft.needs)
    limits = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).tolist()
    batch = Batch(
        input_ids=ids,
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
        positions=torch.cat([torch.arange(len(row)) for row in rows]),
        bounds=tuple(limits),
        features=torch.cat([features for features, _ in states]),
        last_hidden=torch.cat([last for _, last in states]),
    )
    pairs, pair_counts = torch.stack([ids[:-1], ids[1:]], 1).unique(dim=0, return_counts=True)
    stats = TokenStats(torch.bincount(ids, minlength=VOCAB), pairs, pair_counts)
    draft.initialise(stats, torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    for _ in range(steps):
        loss = draft(batch, draft.counts(batch))["loss"].sum
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.eval()


class Expected(NamedTuple):
    """What our side says about one case. rounds: per prompt [[num_proposed, num_accepted], ...]."""

    case: dict[str, Any]
    ids: list[list[int]]
    rounds: list[list[list[int]]]


def expect(
    name: str,
    target: Target,
    draft: Draft,
    out: Path,
    layout: str,
    starts: list[list[int]],
    num: int = NUM,
    max_tokens: int = MAX_TOKENS,
) -> Expected:
    """Export the draft, load it again and decode with what was loaded. Speculators exports are rounded to bfloat16."""
    dtype = "float32" if layout == "plain" else "bfloat16"
    export.write(draft, target.spec, out, layout, dtype, num, "org/tiny")
    reloaded = export.load(out, target.spec, target.embedding)
    reloaded.bind(target.embedding, target.head)
    decoded = decode(target, reloaded, starts, num, GREEDY, max_tokens, ignore_eos=True, batch_size=len(starts))
    one = case(name, target.config.name, out, num, prompts=starts, max_tokens=max_tokens)
    return Expected(one, [d.ids for d in decoded], [[list(r) for r in d.rounds] for d in decoded])
