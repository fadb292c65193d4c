"""Confidence-scheduled verification: how much of a proposal is worth a row of the target's pass, and calibration.

A draft's confidence c_k is the chance that slot k is accepted given that the slots before it were. So

    survival_k = c_1 * .. * c_k                            chance that slot k is accepted
    threshold    offer the slots before the first one with c_k < t
    hardware     offer slots while that raises   Theta = expected tokens of a round / seconds of a round
                 expected tokens = sum over rows of 1 + survival_1 + .. + survival_len

What keeps sampling lossless: c_k may depend on the anchor and the proposals d_1 .. d_{k-1}, never on d_k, and whether
slot k is offered may depend on c_1 .. c_k (and on other rows), never on what lies behind. Therefore both hardware rules
stop at the first addition that does not raise Theta. A search for the global maximum would look at c_{k+1}, which is
computed from the drawn d_k, to decide about d_k itself: some tokens would be verified more often than others, and the
output would no longer follow the target (DSpark paper, appendix A; tests/test_schedule.py counts it out).

Two rules, because batches are verified in two shapes:

    prefix_lengths   ragged: rows of different lengths flattened into one pass, cost by the total number of rows (DSpark)
    column_lengths   rectangular, as eval/runtime.py and eager servers run it: one width for the batch, cost by width
    At batch size 1 they are the same.

Calibration (sequential temperature scaling, DSpark paper): slot after slot, the T_k that makes the running product of
sigmoid(logit(c_i) / T_i) agree best, by expected calibration error, with how often the first k slots are accepted.

Shapes: n rounds, B rows, K proposals.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftsmith.eval.runtime import Decoded, Schedule, decode
from draftsmith.models.draft import Draft
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import Target

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from draftsmith.eval.acceptance import EvalConfig

CALIBRATION = "calibration.json"
NUM_BINS = 20  # equal widths over 0..1, as in DeepSpec's reliability report
FEW_ROUNDS = 500  # below, a bin holds so few rounds that chance moves a slot's calibration error by several percent
TEMPERATURES = 2.0 ** torch.linspace(-4, 4, 129, dtype=torch.float64)  # 1/16 .. 16 in steps of 4.4 %; 1 is one of them


# -- what a pass costs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CostTable:
    """Measured seconds of a target pass by its number of rows, straight lines between the measurements.

    rows: ascending. Past the last one the last slope goes on. More rows never cost less: noise is levelled upwards.
    overhead_s: seconds of a round outside the pass (draft, drawing), which are spent whatever is verified.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.seconds):
            raise ValueError(f"a cost table needs one time per row count, got {len(self.rows)} and {len(self.seconds)}")
        if list(self.rows) != sorted(set(self.rows)) or self.rows[0] < 1 or min(self.seconds) <= 0:
            raise ValueError(f"a cost table needs ascending row counts and positive seconds, got {self}")
        object.__setattr__(self, "seconds", tuple(accumulate(self.seconds, max)))

    @classmethod
    def of_rates(cls, steps_per_second: Mapping[int, float]) -> CostTable:
        """From {rows: passes per second}, the form in which servers are profiled."""
        rows = sorted(steps_per_second)
        return cls(tuple(rows), tuple(1 / steps_per_second[n] for n in rows))

    @classmethod
    def of_speed(cls, speed: Mapping[str, Any], batch_size: int) -> CostTable:
        """From speed.json, in rows per sequence at one batch size: what column_lengths wants. See eval/speed.py."""
        passes, key = speed["pass_ms"], str(batch_size)
        if key not in passes:
            raise ValueError(
                f"speed.json has pass times for batch sizes {', '.join(passes)}, eval.batch_size is {batch_size}; set it "
                f"to one of them, or add {batch_size} to eval.speed_batch_sizes and run `draftsmith speed` again"
            )
        draft_s = 1e-3 * speed["draft_ms"][key][-1]  # the whole proposal is drafted before anything is cut
        return cls(tuple(range(1, len(passes[key]) + 1)), tuple(1e-3 * ms for ms in passes[key]), draft_s)

    @classmethod
    def of_speed_totals(cls, speed: Mapping[str, Any]) -> CostTable:
        """From speed.json, in rows of the whole batch: what prefix_lengths wants. Equal totals: the fastest counts."""
        totals: dict[int, float] = {}
        for key, times in speed["pass_ms"].items():
            for n, ms in enumerate(times, 1):
                rows = int(key) * n
                totals[rows] = min(totals.get(rows, float("inf")), 1e-3 * ms)
        return cls(tuple(sorted(totals)), tuple(totals[n] for n in sorted(totals)))

    def round_s(self, num_rows: int) -> float:
        """Seconds of a round whose target pass has num_rows rows."""
        return self.overhead_s + self.pass_s(num_rows)

    def pass_s(self, num_rows: int) -> float:
        rows, seconds = self.rows, self.seconds
        if num_rows <= rows[0] or len(rows) == 1:
            return seconds[0]
        right = next((i for i, n in enumerate(rows) if n >= num_rows), len(rows) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (rows[right] - rows[left])
        return seconds[left] + slope * (num_rows - rows[left])


# -- rules ---------------------------------------------------------------------------------------------------------------


def threshold_lengths(confidence: Tensor, most: Sequence[int], threshold: float) -> list[int]:
    """Slots before the first one whose confidence is below the threshold. confidence: [B, K]; most: [B]."""
    lengths = (confidence >= threshold).long().cumprod(1).sum(1).tolist()
    return [min(n, limit) for n, limit in zip(lengths, most, strict=True)]


def prefix_lengths(confidence: Tensor, most: Sequence[int], cost: CostTable) -> list[int]:
    """How many slots of each row to verify in a ragged pass of sum(1 + length) rows; cost is by that total.

    confidence: [B, K]; most: [B], slots that a row has. The candidates, largest survival first (ties: smaller slot,
    then smaller row), are added until one does not raise Theta. A candidate's survival is looked at only when the slot
    before it is in, so nothing here depends on a token that is not offered yet.
    """
    survival = confidence.double().cumprod(1).tolist()
    lengths = [0] * len(survival)
    open_ = [(-row[0], 0, b) for b, row in enumerate(survival) if most[b]]
    heapq.heapify(open_)
    tokens, num_rows = float(len(lengths)), len(lengths)
    rate = tokens / cost.round_s(num_rows)
    while open_:
        gain, slot, b = heapq.heappop(open_)
        better = (tokens - gain) / cost.round_s(num_rows + 1)
        if better <= rate:
            break
        tokens, num_rows, rate = tokens - gain, num_rows + 1, better
        lengths[b] = slot + 1
        if slot + 1 < most[b]:
            heapq.heappush(open_, (-survival[b][slot + 1], slot + 1, b))
    return lengths


def column_lengths(confidence: Tensor, most: Sequence[int], cost: CostTable) -> list[int]:
    """How many slots of each row to verify in a rectangular pass; cost is by rows per sequence at this batch size.

    confidence: [B, K]; most: [B], slots that a row has. Whole columns are added, left to right, until one does not
    raise Theta; inside the width every slot is free and therefore offered.
    """
    survival = confidence.double().cumprod(1)
    has = torch.arange(survival.shape[1]) < torch.tensor(list(most))[:, None]
    gains = (survival * has).sum(0).tolist()
    tokens, width = float(len(survival)), 0
    rate = tokens / cost.round_s(1)
    for gain in gains[: max(most, default=0)]:
        better = (tokens + gain) / cost.round_s(width + 2)
        if better <= rate:
            break
        tokens, width, rate = tokens + gain, width + 1, better
    return [min(width, limit) for limit in most]


def threshold_schedule(threshold: float, temperatures: Sequence[float] | None = None) -> Schedule:
    """The static threshold as the runtime's `schedule`. temperatures: of a calibration, or None."""
    if not 0 < threshold < 1:
        raise ValueError(f"confidence threshold must be between 0 and 1, got {threshold}")
    return lambda confidence, most: threshold_lengths(calibrated(confidence, temperatures), most, threshold)


def hardware_schedule(
    cost: CostTable,
    temperatures: Sequence[float] | None = None,
    rule: Callable[[Tensor, Sequence[int], CostTable], list[int]] = column_lengths,
) -> Schedule:
    """The hardware-aware rule as the runtime's `schedule`. cost: in the unit of the rule, see there."""
    return lambda confidence, most: rule(calibrated(confidence, temperatures), most, cost)


def schedule_of(
    config: EvalConfig, calibration: Mapping[str, Any] | None, speed: Mapping[str, Any] | None
) -> Schedule | None:
    """The schedule that the recipe's `eval:` section asks for; None = verify every proposal in full.

    calibration: of the draft, or None to take its confidences as they are. speed: the object of speed.json.
    """
    temperatures = None if calibration is None else calibration["temperatures"]
    if config.schedule == "threshold":
        assert config.confidence_threshold is not None
        return threshold_schedule(config.confidence_threshold, temperatures)
    if config.schedule == "hardware":
        if speed is None:
            raise ValueError(
                "eval.schedule: hardware needs measured pass times (speed.json); run `draftsmith speed` first"
            )
        return hardware_schedule(CostTable.of_speed(speed, config.batch_size), temperatures)
    return None


# -- calibration -----------------------------------------------------------------------------------------------------------


def calibrated(confidence: Tensor, temperatures: Sequence[float] | None) -> Tensor:
    """sigmoid(logit(c_k) / T_k), [B, K] float64. Still a function of c_k alone, so a schedule stays lossless."""
    if temperatures is None:
        return confidence.double()
    num = confidence.shape[-1]
    if num > len(temperatures):
        raise ValueError(
            f"the calibration has {len(temperatures)} slots, the draft proposes {num}; calibrate again with this number "
            f"of proposals"
        )
    return _scaled(confidence, torch.tensor(list(temperatures[:num]), dtype=torch.float64))


def _scaled(confidence: Tensor, temperature: Tensor) -> Tensor:
    return torch.sigmoid(torch.logit(confidence.double(), eps=1e-9) / temperature)


def calibrate(confidence: Tensor, survived: Tensor, weights: Tensor | None = None) -> dict[str, Any]:
    """Temperatures and reliability before and after.

    confidence: [n, K], raw. survived: [n, K], 1 where the first k slots were all accepted, else 0; or the chance of
    that, as the running product of `exact.accept_chances` gives it. NaN where slot k was not verified.
    weights: [n], how often each row counts (the visits of exact evaluation); None = once.
    """
    confidence, survived = confidence.double().cpu(), survived.double().cpu()
    if confidence.ndim != 2 or confidence.shape != survived.shape or not len(confidence):
        raise ValueError(
            f"calibration needs confidences [n, K] and outcomes of the same shape, n > 0, got {tuple(confidence.shape)} "
            f"and {tuple(survived.shape)}"
        )
    if not bool(((confidence >= 0) & (confidence <= 1)).all()):
        raise ValueError("confidences must be chances between 0 and 1; does the draft return logits or NaN?")
    counts = torch.ones(len(confidence), dtype=torch.float64) if weights is None else weights.double().cpu()
    before = torch.ones(len(confidence), dtype=torch.float64)
    chosen = []
    for k in range(confidence.shape[1]):
        seen = ~survived[:, k].isnan()
        tried = before * _scaled(confidence[:, k], TEMPERATURES[:, None])  # [G, n]
        errors = calibration_error(tried[:, seen], survived[seen, k], counts[seen])
        # of equally good ones the one that changes least
        best = min(
            range(len(TEMPERATURES)), key=lambda i: (round(float(errors[i]), 12), abs(i - len(TEMPERATURES) // 2))
        )
        chosen.append(float(TEMPERATURES[best]))
        before = tried[best]
    return {
        "method": "sequential temperature scaling",
        "temperatures": chosen,
        "num_rounds": len(confidence),
        "num_bins": NUM_BINS,
        "before": reliability(confidence.cumprod(1), survived, counts),
        "after": reliability(calibrated(confidence, chosen).cumprod(1), survived, counts),
    }


def reliability(survival: Tensor, survived: Tensor, weights: Tensor) -> list[dict[str, Any]]:
    """One object a slot: how the predicted survival [n, K] agrees with what happened.

    ece: expected calibration error. auroc: chance that an accepted prefix was predicted above a refused one (ties
    count half), None when all or none were accepted. brier: mean squared error. bins: [predicted, observed, share] of
    each bin that is not empty. predicted, observed: means over all rounds.
    """
    survival, survived, weights = survival.double(), survived.double(), weights.double()
    found = []
    for k in range(survival.shape[1]):
        seen = ~survived[:, k].isnan()
        chance, event, weight = survival[seen, k], survived[seen, k], weights[seen]
        total = float(weight.sum()) or 1.0
        sums = _binned(chance[None], event, weight)[:, 0]  # [3, bins]
        filled = sums[2] > 0
        bins = torch.stack(
            [sums[0][filled] / sums[2][filled], sums[1][filled] / sums[2][filled], sums[2][filled] / total]
        )
        squared = event * (1 - chance) ** 2 + (1 - event) * chance**2  # right for chances of an event, too
        found.append(
            {
                "slot": k + 1,
                "num_rounds": int(seen.sum()),
                "predicted": float((weight * chance).sum()) / total,
                "observed": float((weight * event).sum()) / total,
                "ece": float(calibration_error(chance[None], event, weight)[0]),
                "auroc": auroc(chance, event, weight),
                "brier": float((weight * squared).sum()) / total,
                "bins": bins.T.tolist(),
            }
        )
    return found


def calibration_error(chance: Tensor, event: Tensor, weights: Tensor) -> Tensor:
    """Expected calibration error, [G]: mean over bins of |mean chance - mean event|, by share of the rounds.

    chance: [G, n], G predictions of the same events [n].
    """
    sums = _binned(chance, event, weights)
    return (sums[0] - sums[1]).abs().sum(-1) / weights.sum().clamp(min=torch.finfo(torch.float64).tiny)


def _binned(chance: Tensor, event: Tensor, weights: Tensor) -> Tensor:
    """[3, G, bins]: sums of chance, event and 1, weighted, over NUM_BINS bins of equal width. chance: [G, n]."""
    place = (chance * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    zeros = torch.zeros(len(chance), NUM_BINS, dtype=torch.float64)
    parts = (chance * weights, (event * weights).expand_as(chance), weights.expand_as(chance))
    return torch.stack([zeros.scatter_add(1, place, part) for part in parts])


def auroc(chance: Tensor, event: Tensor, weights: Tensor) -> float | None:
    """Area under the ROC curve of predictions [n] for events [n] (0..1), ties counting half; None without both kinds."""
    event, weights = event.double(), weights.double()
    _, group = chance.unique(sorted=True, return_inverse=True)
    positive = torch.zeros(int(group.max()) + 1 if len(group) else 0, dtype=torch.float64)
    negative = positive.scatter_add(0, group, weights * (1 - event))
    positive = positive.scatter_add(0, group, weights * event)
    pairs = float(positive.sum() * negative.sum())
    if pairs == 0:
        return None
    below = negative.cumsum(0) - negative
    return float((positive * (below + negative / 2)).sum()) / pairs


def rollouts(decoded: Sequence[Decoded]) -> tuple[Tensor, Tensor]:
    """(confidence, survived), [n, K] each, from answers that were decoded without a schedule. See calibrate.

    A schedule would verify just the slots it trusts, and what it trusts wrongly low would never be seen.
    """
    rounds = [(c, a) for d in decoded for c, (_, a) in zip(d.confidences, d.rounds) if c]
    if not rounds:
        raise ValueError("these answers carry no confidences: the draft has no confidence head, or offered nothing")
    num = max(len(c) for c, _ in rounds)
    confidence = torch.zeros(len(rounds), num, dtype=torch.float64)
    survived = torch.full((len(rounds), num), float("nan"), dtype=torch.float64)
    for i, (chances, accepted) in enumerate(rounds):
        confidence[i, : len(chances)] = torch.tensor(chances, dtype=torch.float64)
        survived[i, : len(chances)] = (torch.arange(len(chances)) < accepted).double()
    return confidence, survived


def calibrate_draft(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    num: int,
    sampler: Sampler,
    max_new_tokens: int,
    batch_size: int = 8,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """The object of calibration.json, from rollouts on held-out prompts; see write_calibration. draft: bound to target.

    Acceptance depends on how tokens are drawn, so the sampler's settings are part of the object.
    """

    def tell(_index: int, ids: list[int], _accepted: int) -> None:
        if progress is not None:
            progress(len(ids))

    decoded = decode(target, draft, prompts, num, sampler, max_new_tokens, batch_size=batch_size, on_commit=tell)
    try:
        found = calibrate(*rollouts(decoded))
    except ValueError as problem:
        raise ValueError(f"{draft.config.family} draft: {problem}") from problem
    settings = {name: getattr(sampler, name) for name in ("temperature", "top_k", "top_p", "draft_sampling")}
    return {**found, "num_prompts": len(prompts), **settings}


def write_calibration(folder: Path, calibration: Mapping[str, Any], draft_sha256: str) -> Path:
    """Store it with the draft whose tensors have this hash (certify.tensors_sha256)."""
    path = Path(folder) / CALIBRATION
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps({**calibration, "draft_sha256": draft_sha256}, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path


def read_calibration(folder: Path, draft_sha256: str) -> dict[str, Any] | None:
    """The calibration stored with a draft, None when there is none; one of other tensors is refused."""
    path = Path(folder) / CALIBRATION
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    known = [found[name] for name in ("draft_sha256", "export_sha256") if name in found]
    if draft_sha256 not in known:
        raise ValueError(
            f"{path} was made for tensors {' / '.join(k[:12] for k in known)}, this draft's are {draft_sha256[:12]}; "
            f"calibrate again or remove the file"
        )
    return found


# -- table and plot ------------------------------------------------------------------------------------------------------------


def calibration_table(calibration: Mapping[str, Any]) -> Table:
    """Per slot: temperature, and how well survival is predicted before and after."""
    from rich.table import Table

    caption = f"{calibration['num_rounds']} rounds of {calibration.get('num_prompts', '?')} prompts; survival of the first k slots"
    table = Table(title="Calibration", caption=caption, title_justify="left", caption_justify="left")
    for head in (
        "slot",
        "temperature",
        "accepted",
        "ECE before",
        "after",
        "Brier before",
        "after",
        "AUROC before",
        "after",
    ):
        table.add_column(head, justify="right")
    for k, (a, b) in enumerate(zip(calibration["before"], calibration["after"], strict=True)):
        rates = ["-" if slot["auroc"] is None else f"{slot['auroc']:.3f}" for slot in (a, b)]
        table.add_row(
            str(k + 1),
            f"{calibration['temperatures'][k]:.2f}",
            f"{a['observed']:.3f}",
            *(f"{100 * slot['ece']:.1f} %" for slot in (a, b)),
            *(f"{slot['brier']:.3f}" for slot in (a, b)),
            *rates,
        )
    return table


def reliability_figure(calibration: Mapping[str, Any]) -> Figure:
    """Predicted against observed survival, one panel a slot, before and after calibration."""
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    num = len(calibration["before"])
    columns = min(num, 4)
    lines = -(-num // columns)
    figure = Figure(figsize=(2.6 * columns + 0.6, 2.6 * lines + 0.4), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for k, axes in enumerate(panels.flat):
        if k >= num:
            axes.set_axis_off()
            continue
        axes.plot((0, 1), (0, 1), color="0.7", linewidth=1)
        for name, colour in (("before", "#c2410c"), ("after", "#3558d4")):
            slot = calibration[name][k]
            predicted, observed, share = zip(*slot["bins"], strict=True) if slot["bins"] else ((), (), ())
            axes.plot(predicted, observed, "-", color=colour, alpha=0.5, linewidth=1)
            axes.scatter(predicted, observed, [12 + 120 * s for s in share], color=colour, alpha=0.8, linewidths=0,
                         label=f"{name}: ECE {100 * slot['ece']:.1f} %")  # fmt: skip
        axes.set_title(f"slot {k + 1}, T = {calibration['temperatures'][k]:.2f}", fontsize=9)
        axes.legend(framealpha=0.8, edgecolor="none", fontsize=7, loc="lower right")
        axes.xaxis.set_tick_params(labelbottom=k >= num - columns)
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    figure.supxlabel("predicted survival", fontsize=9)
    figure.supylabel("accepted", fontsize=9)
    return figure
