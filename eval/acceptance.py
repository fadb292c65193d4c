"""Acceptance: how many proposals the target accepts, per prompt kind and slot; measured here or at a server.

    acceptance length = 1 + num_accepted / num_rounds      pooled over rounds, bonus included
    survival[k]       = rounds with accepted >= k / num_rounds              so acceptance length = 1 + sum(survival)
    conditional[k]    = rounds with accepted >= k / rounds in which slot k was verified and accepted >= k - 1

Three methods give the same object: "runtime" (eval/runtime.py), "exact" (eval/exact.py), "served" (counters of vLLM).
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftsmith.data.chat import Row
from draftsmith.eval.runtime import Decoded, Schedule, decode, worth_it
from draftsmith.models.draft import Draft, check_same_target
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import Target

if TYPE_CHECKING:
    from rich.table import Table

USUAL_PROPOSALS = 5  # for drafts that can propose any number: the quick start's best K at batch 1


class EvalConfig(BaseModel):
    """The recipe's `eval:` section: how acceptance, the certificate and speed are measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_speculative_tokens: int | None = Field(default=None, ge=1)
    """Proposals per round (K); None = all that the draft can give, or 5 where it can give any number."""
    temperature: float = Field(default=0.0, ge=0)
    """0 = greedy."""
    top_k: int = Field(default=0, ge=0)
    """Tokens kept before drawing; 0 = off. Only with temperature > 0."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass kept before drawing; 1 = off. Only with temperature > 0."""
    draft_sampling: bool = True
    """Drafts draw their proposals (False: they offer their argmax, vLLM's default). Only with temperature > 0."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Tokens per answer."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Held-out prompts, the first so many; None = all."""
    batch_size: int = Field(default=8, ge=1)
    """Prompts decoded together; acceptance does not depend on it beyond rounding."""
    ignore_eos: bool = False
    """Go on behind the end of text, as comparisons with servers do."""
    seed: int = 0
    """Of everything that is drawn."""
    bar: float | None = Field(default=None, ge=1)
    """Acceptance length that `release` demands; None = no gate."""

    schedule: Literal["none", "threshold", "hardware"] = "none"
    """How much of a proposal is verified, by the draft's confidence (eval/schedule.py). none: all of it, as servers do.
    threshold: up to the first slot below confidence_threshold. hardware: what measured pass times (speed.json) pay for."""
    confidence_threshold: float | None = Field(default=None, gt=0, lt=1)
    """Chance of acceptance below which a slot and those behind it are not verified; wanted by schedule: threshold."""
    calibrate_prompts: int = Field(default=50, ge=1)
    """Held-out prompts decoded for the calibration of the confidences; fewer rounds make bins too thin."""

    certify_prompts: int = Field(default=10, ge=1)
    """Prompts whose greedy answers are compared token for token with the target alone."""
    certify_tokens: int = Field(default=64, ge=2)
    """Tokens compared per prompt."""
    certify_contexts: int = Field(default=2, ge=1)
    """Fixed contexts of the sampled part."""
    certify_context_len: int = Field(default=8, ge=1)
    """Tokens of such a context, the last ones of a prompt: short, because each draw reads it again."""
    certify_draws: int = Field(default=256, ge=100)
    """Draws per context; 256 see a probability of 0.5 that is wrong by 0.13 (four standard errors)."""

    speed_prompts: int = Field(default=4, ge=1)
    """Prompts of the wall-clock comparison, decoded one at a time."""
    speed_tokens: int = Field(default=64, ge=2)
    """New tokens per prompt there."""
    speed_repeats: int = Field(default=3, ge=1)
    """Rounds of plain, speculative, plain, speculative, ...; medians are reported."""
    speed_batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    """Batch sizes of the table of pass times."""

    @model_validator(mode="after")
    def _no_idle_options(self) -> EvalConfig:
        idle = [
            name for name, off in (("top_k", 0), ("top_p", 1.0), ("draft_sampling", True)) if getattr(self, name) != off
        ]
        if self.temperature == 0 and idle:
            raise ValueError(f"{', '.join(idle)}: no effect at temperature 0 (greedy); remove it or set temperature")
        if (self.schedule == "threshold") != (self.confidence_threshold is not None):
            raise ValueError(
                f"schedule: {self.schedule} and confidence_threshold: {self.confidence_threshold} do not belong together; "
                f"the threshold is what schedule: threshold needs, and nothing else uses it"
            )
        return self

    def sampler(self) -> Sampler:
        """A fresh sampler, seeded: two measurements draw the same."""
        generator = torch.Generator().manual_seed(self.seed)
        return Sampler(self.temperature, self.top_k, self.top_p, generator, self.draft_sampling)

    def num_proposals(self, draft: Draft) -> int:
        """K for this draft."""
        return self.num_speculative_tokens or draft.max_proposal or USUAL_PROPOSALS


def prompts_of(rows: Sequence[Row], limit: int | None = None) -> tuple[list[list[int]], list[str]]:
    """(prompts, kinds): what stands in front of the first answer of each row."""
    prompts, kinds = [], []
    for row in rows[:limit]:
        if 1 not in row.loss_mask:
            raise ValueError(f"row {row.id}: has no answer, so nobody can say where its prompt ends; leave it out")
        prompts.append(list(row.input_ids[: list(row.loss_mask).index(1)]))
        kinds.append(row.kind)
    return prompts, kinds


# -- counts and the object -------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """Pooled counts of rounds; floats, because the exact method counts expectations.

    survivors[k-1]: rounds with accepted >= k. tested[k-1]: rounds in which slot k was verified and accepted >= k - 1.
    """

    survivors: list[float]
    tested: list[float]
    num_prompts: int = 0
    num_rounds: float = 0
    num_proposed: float = 0
    num_tokens: int = 0

    @classmethod
    def zero(cls, num: int) -> Counts:
        return cls([0] * num, [0] * num)

    @classmethod
    def of(cls, rounds: Iterable[tuple[int, int]], num_tokens: int, num: int) -> Counts:
        """Counts of one answer. rounds: (num_proposed, num_accepted); num: the most a round can propose."""
        counts = cls.zero(num)
        counts.num_prompts, counts.num_tokens = 1, num_tokens
        for proposed, accepted in rounds:
            assert 0 <= accepted <= proposed <= num, f"round ({proposed}, {accepted}) with K={num}"
            counts.num_rounds += 1
            counts.num_proposed += proposed
            for k in range(min(accepted + 1, proposed)):
                counts.tested[k] += 1
                counts.survivors[k] += k < accepted
        return counts

    def add(self, other: Counts) -> None:
        self.survivors = [a + b for a, b in zip(self.survivors, other.survivors, strict=True)]
        self.tested = [a + b for a, b in zip(self.tested, other.tested, strict=True)]
        self.num_prompts += other.num_prompts
        self.num_rounds += other.num_rounds
        self.num_proposed += other.num_proposed
        self.num_tokens += other.num_tokens

    @property
    def num_accepted(self) -> float:
        return sum(self.survivors)

    @property
    def acceptance_length(self) -> float:
        return 1 + _share(self.num_accepted, self.num_rounds)

    @property
    def survival(self) -> list[float]:
        return [_share(n, self.num_rounds) for n in self.survivors]

    @property
    def conditional(self) -> list[float]:
        return [_share(n, of) for n, of in zip(self.survivors, self.tested, strict=True)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def acceptance_object(
    method: str, by_kind: Mapping[str, Counts], num: int, sampler: Sampler, max_new_tokens: int
) -> dict[str, Any]:
    """The content of acceptance-<method>.json: all prompts pooled, and under "by_kind" the same keys per kind."""
    total = Counts.zero(num)
    for counts in by_kind.values():
        total.add(counts)

    def part(counts: Counts) -> dict[str, Any]:
        return {
            "method": method,
            "num_prompts": counts.num_prompts,
            "num_rounds": counts.num_rounds,
            "num_speculative_tokens": num,
            "num_proposed": counts.num_proposed,
            "num_accepted": counts.num_accepted,
            "num_tokens": counts.num_tokens,
            "temperature": sampler.temperature,
            "top_k": sampler.top_k,
            "top_p": sampler.top_p,
            "max_new_tokens": max_new_tokens,
            "acceptance_length": counts.acceptance_length,
            "survival": counts.survival,
            "conditional": counts.conditional,
        }

    return {**part(total), "by_kind": {kind: part(counts) for kind, counts in sorted(by_kind.items())}}


def pool(parts: Iterable[tuple[str, Counts]], num: int) -> dict[str, Counts]:
    """Counts summed per kind."""
    by_kind: dict[str, Counts] = {}
    for kind, counts in parts:
        by_kind.setdefault(kind, Counts.zero(num)).add(counts)
    return by_kind


# -- runtime ---------------------------------------------------------------------------------------------------------


def accept(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    kinds: Sequence[str],
    config: EvalConfig,
    progress: Callable[[int], None] | None = None,
    schedule: Schedule | None = None,
) -> tuple[dict[str, Any], str | None]:
    """Decode the prompts speculatively: (the object of acceptance-runtime.json, what a round costs and gains here).

    draft: bound to the target. progress is told how many tokens came. schedule: see eval/schedule.py; the object then
    says which one, since a round that verifies less also accepts less.
    """
    ready(target, draft)
    num = config.num_proposals(draft)
    decoded = decode(
        target,
        draft,
        prompts,
        num,
        config.sampler(),
        config.max_new_tokens,
        ignore_eos=config.ignore_eos,
        batch_size=config.batch_size,
        on_commit=None if progress is None else lambda _index, ids, _accepted: progress(len(ids)),
        profile=True,
        schedule=schedule,
    )
    judged = worth_it(decoded[: config.batch_size])  # the profiled batch
    found = summarise(decoded, kinds, num, config.sampler(), config.max_new_tokens)
    if schedule is not None:
        found["schedule"] = config.schedule
    return found, judged and judged[1]


def summarise(
    decoded: Sequence[Decoded], kinds: Sequence[str], num: int, sampler: Sampler, max_new_tokens: int
) -> dict[str, Any]:
    """The object of acceptance-runtime.json. num_accepted counts before any stop rule cuts the text, as vLLM counts."""
    parts = ((kind, Counts.of(d.rounds, len(d.ids), num)) for kind, d in zip(kinds, decoded, strict=True))
    return acceptance_object("runtime", pool(parts, num), num, sampler, max_new_tokens)


def ready(target: Target, draft: Draft) -> None:
    """Refuse a draft that was made for another target, or that asks for what this one cannot give."""
    check_same_target(draft.target, target.spec, f"{draft.config.family} draft")
    target.needs_ok(draft.needs)


# -- tables ----------------------------------------------------------------------------------------------------------


def acceptance_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """One table for one or several drafts: {name: acceptance object}. Slots show survival (conditional rate)."""
    from rich.table import Table

    first = next(iter(results.values()))
    how = "greedy" if first["temperature"] == 0 else f"temperature {first['temperature']}"
    caption = f"{how}, at most {first['max_new_tokens']} new tokens; slots: survival (conditional rate)"
    table = Table(title="Acceptance", caption=caption, title_justify="left", caption_justify="left")
    num_slots = max(len(r["survival"]) for r in results.values())
    for name in ("draft", "method", "kind"):
        table.add_column(name)
    for name in ("prompts", "K", "rounds", "acceptance length", *(f"slot {k}" for k in range(1, num_slots + 1))):
        table.add_column(name, justify="right")
    for name, result in results.items():
        for kind, part in (("all", result), *result["by_kind"].items()):
            slots = [f"{s:.2f} ({c:.2f})" for s, c in zip(part["survival"], part["conditional"], strict=True)]
            table.add_row(
                name if kind == "all" else "",
                part["method"] if kind == "all" else "",
                kind,
                str(part["num_prompts"]),
                str(part["num_speculative_tokens"]),
                f"{part['num_rounds']:.0f}",
                f"{part['acceptance_length']:.2f}",
                *slots,
                style="bold" if kind == "all" else None,
            )
        table.add_section()
    return table


def comparison_table(compared: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """Several drafts of one target, whole prompt sets only. compared: {prompt set: {draft: acceptance object}}."""
    from rich.table import Table

    first = next(iter(next(iter(compared.values())).values()))
    how = "greedy" if first["temperature"] == 0 else f"temperature {first['temperature']}"
    caption = (
        f"{how}, at most {first['max_new_tokens']} new tokens, K={first['num_speculative_tokens']}; slots: survival"
    )
    table = Table(title="Drafts compared", caption=caption, title_justify="left", caption_justify="left")
    table.add_column("prompts")
    table.add_column("draft", overflow="fold")
    for name in ("rounds", "acceptance length", *(f"slot {k}" for k in range(1, len(first["survival"]) + 1))):
        table.add_column(name, justify="right")
    for prompts, found in compared.items():
        for i, (draft, result) in enumerate(found.items()):
            slots = [f"{survival:.2f}" for survival in result["survival"]]
            length = f"{result['acceptance_length']:.2f}"
            table.add_row("" if i else prompts, draft, f"{result['num_rounds']:.0f}", length, *slots)
        table.add_section()
    return table


# -- served ----------------------------------------------------------------------------------------------------------


class ServerCounters(NamedTuple):
    """vLLM's cumulative counters. tokens: all generated tokens, None if the server does not tell."""

    num_rounds: float
    num_proposed: float
    num_accepted: float
    per_slot: tuple[float, ...]
    tokens: float | None


def served(
    url: str,
    prompts: Sequence[Sequence[int]],
    kinds: Sequence[str],
    config: EvalConfig,
    model: str | None = None,
    api_key: str | None = None,
    concurrency: int = 8,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Acceptance of a running vLLM server, from its counters before and after each kind's prompts.

    url: the server's address, with or without /v1. The prompts are sent as token ids, so nothing is re-tokenised.
    model: served name; None = the only one. The server must have no other users meanwhile; that is checked.
    """
    server = _Server(url, api_key)
    model = model or server.model()
    groups: dict[str, list[Sequence[int]]] = {}
    for prompt, kind in zip(prompts, kinds, strict=True):
        groups.setdefault(kind, []).append(prompt)
    by_kind = {}
    for kind, group in groups.items():
        before = server.counters(model)
        with ThreadPoolExecutor(concurrency) as threads:
            lengths = []
            for num_tokens in threads.map(lambda prompt: server.complete(model, prompt, config), group):
                lengths.append(num_tokens)
                if progress is not None:
                    progress(num_tokens)
        after = server.settled_counters(model, before, sum(lengths))
        by_kind[kind] = _served_counts(before, after, len(group), sum(lengths))
    num = config.num_speculative_tokens or max((len(c.survivors) for c in by_kind.values()), default=0)
    for counts in by_kind.values():
        if len(counts.survivors) > num:
            raise ValueError(
                f"{url}: the server proposes {len(counts.survivors)} tokens a round, eval.num_speculative_tokens is "
                f"{num}; make them equal, acceptance lengths compare only at one K"
            )
        counts.survivors += [0] * (num - len(counts.survivors))
        counts.tested += [0] * (num - len(counts.tested))
    return acceptance_object("served", by_kind, num, config.sampler(), config.max_new_tokens)


def _served_counts(before: ServerCounters, after: ServerCounters, num_prompts: int, num_tokens: int) -> Counts:
    num_rounds = after.num_rounds - before.num_rounds
    start = before.per_slot or (0.0,) * len(after.per_slot)
    survivors = [b - a for a, b in zip(start, after.per_slot, strict=True)]
    return Counts(
        survivors=survivors,
        tested=[num_rounds, *survivors[:-1]] if survivors else [],
        num_prompts=num_prompts,
        num_rounds=num_rounds,
        num_proposed=after.num_proposed - before.num_proposed,
        num_tokens=num_tokens,
    )


@dataclass
class _Server:
    """The few calls of an OpenAI-compatible vLLM server that are needed here."""

    url: str
    api_key: str | None = None
    timeout_s: float = 600.0
    root: str = field(init=False)

    def __post_init__(self) -> None:
        if not re.match(r"https?://", self.url):
            raise ValueError(f"--server {self.url}: give an address such as http://localhost:8000")
        self.root = self.url.rstrip("/").removesuffix("/v1")

    def model(self) -> str:
        names = [entry["id"] for entry in json.loads(self._call("/v1/models"))["data"]]
        if not names:
            raise ValueError(f"{self.url}: the server lists no model")
        return names[0]

    def complete(self, model: str, prompt: Sequence[int], config: EvalConfig) -> int:
        """Number of tokens the server generated for the prompt."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "ignore_eos": config.ignore_eos,
        }
        if config.temperature > 0:
            body |= {"top_p": config.top_p, "seed": config.seed} | ({"top_k": config.top_k} if config.top_k else {})
        return int(json.loads(self._call("/v1/completions", body))["usage"]["completion_tokens"])

    def counters(self, model: str) -> ServerCounters:
        text = self._call("/metrics")
        found = read_counters(text, model)
        if found is None:
            raise ValueError(
                f"{self.root}/metrics has no vllm:spec_decode_num_drafts: this server does not speculate; start it with "
                f"--speculative-config (`draftsmith serve` prints the command)"
            )
        return found

    def settled_counters(
        self, model: str, before: ServerCounters, num_tokens: int, patience_s: float = 5.0
    ) -> ServerCounters:
        """Counters once they hold all num_tokens of our requests; an answer may arrive before its last count."""
        deadline = time.monotonic() + patience_s
        while True:
            after = self.counters(model)
            if after.tokens is None or before.tokens is None:
                return after
            seen = after.tokens - before.tokens
            if seen > num_tokens:
                raise ValueError(
                    f"{self.url}: the server generated {seen:.0f} tokens while we asked for {num_tokens}: somebody else "
                    f"uses it, so its counters do not tell our acceptance; measure on a server of your own"
                )
            if seen == num_tokens:
                return after
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{self.url}: after {patience_s:.0f} s its counters hold {seen:.0f} of our {num_tokens} tokens; was the "
                    f"server restarted, or are its statistics switched off (--disable-log-stats)?"
                )
            time.sleep(0.05)

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.root + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            raise ValueError(f"{self.root}{path}: HTTP {error.code}: {error.read().decode()[:300]}") from error
        except (urllib.error.URLError, TimeoutError) as error:
            raise ValueError(f"{self.root}{path}: no answer ({error}); is the server up at {self.url}?") from error


def read_counters(text: str, model: str) -> ServerCounters | None:
    """Speculation counters of `model` in a Prometheus exposition, summed over engines; None if there are none."""
    sums: dict[str, float] = {}
    slots: dict[int, float] = {}
    for name, labels, value in samples(text):
        if labels.get("model_name", model) != model:
            continue
        name = name.removeprefix("vllm:").removesuffix("_total")
        if name == "spec_decode_num_accepted_tokens_per_pos":
            slot = int(labels["position"])
            slots[slot] = slots.get(slot, 0.0) + value
        else:
            sums[name] = sums.get(name, 0.0) + value
    if "spec_decode_num_drafts" not in sums:
        return None
    return ServerCounters(
        num_rounds=sums["spec_decode_num_drafts"],
        num_proposed=sums["spec_decode_num_draft_tokens"],
        num_accepted=sums["spec_decode_num_accepted_tokens"],
        per_slot=tuple(slots.get(k, 0.0) for k in range(max(slots, default=-1) + 1)),
        tokens=sums.get("generation_tokens"),
    )


_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of every sample line of a Prometheus text exposition."""
    for line in text.splitlines():
        if line.startswith("#") or not (found := _SAMPLE.match(line.strip())):
            continue
        name, labels, value = found.groups()
        pairs = {k: re.sub(r'\\[\\"n]', lambda m: _ESCAPES[m[0]], v) for k, v in _LABEL.findall(labels or "")}
        yield name, pairs, float(value)
