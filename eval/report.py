"""The report of a run: one HTML page with tables and figures, and the same table for the terminal.

Everything is read from the files of the run folder; nothing is measured here. The page is self-contained.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

BEFORE_TRAINING = "-before-training"  # what ends the stem of a draft that the target brought along (MTP), as it came
ACCEPTANCE = ("acceptance-runtime", "acceptance-exact", "acceptance-served")
COLOURS = ("#3558d4", "#c2410c", "#12805c", "#8b5cf6", "#b45309", "#0e7490", "#be185d")


def read_json(path: Path) -> Any:
    """The JSON of a file, or None when there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def read_metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def acceptance_files(run: Path) -> dict[str, dict[str, Any]]:
    """{file stem: object} of every acceptance file of the run, in a fixed order: heldout before other prompt sets."""
    found = {}
    for stem in ACCEPTANCE:
        for path in sorted(run.glob(f"{stem}*.json"), key=lambda p: (len(p.stem), p.stem)):
            found[path.stem] = read_json(path)
    return found


def acceptance_rows(result: Mapping[str, Any]) -> Iterable[list[str]]:
    """[kind, rounds, acceptance length, survival 1..K] for all prompts, then per kind."""
    for kind, part in (("all", result), *sorted(result.get("by_kind", {}).items())):
        survival = [f"{s:.2f}" for s in part["survival"]]
        yield [
            kind,
            f"{part['num_prompts']}",
            f"{part['num_rounds']:.0f}",
            f"{part['acceptance_length']:.2f}",
            *survival,
        ]


def acceptance_head(result: Mapping[str, Any]) -> list[str]:
    return [
        "kind",
        "prompts",
        "rounds",
        "acceptance length",
        *(f"slot {k}" for k in range(1, len(result["survival"]) + 1)),
    ]


def describe(result: Mapping[str, Any]) -> str:
    """One line: how the numbers were measured."""
    temperature = result.get("temperature", 0)
    how = "greedy" if temperature == 0 else f"temperature {temperature}"
    return (
        f"method {result['method']}, K={result['num_speculative_tokens']}, {how}, "
        f"at most {result.get('max_new_tokens', '?')} new tokens"
    )


def proof_lines(certificate: Mapping[str, Any] | None) -> list[str]:
    """What the certificate says, one sentence a part; ties are named, never hidden."""
    if not certificate:
        return []
    lines = []
    for part in certificate["greedy"]:
        what = f"{part['dtype']}: {part['num_prompts']} prompts, {part['num_tokens']} tokens compared with the target alone"
        if part["num_mismatches"] == 0 and part["num_ties"] == 0:
            lines.append(f"{what}: token for token the same.")
        else:
            lines.append(
                f"{what}: {part['num_ties']} prompts part at a tie of the target's two best tokens (rounding of that "
                f"precision), {part['num_mismatches']} at anything else."
            )
    sampled = certificate.get("sampled")
    if sampled:
        lines.append(
            f"sampled output: {sampled['num_draws']} draws against exact probabilities, p = {sampled['p_value']:.3g}."
        )
    lines.append("Passed." if certificate["passed"] else "FAILED.")
    return lines


def terminal_table(run: Path) -> Table:
    """The headline table: one row per prompt set and method."""
    files = acceptance_files(run)
    slots = max((len(r["survival"]) for r in files.values()), default=0)
    table = Table(title=f"{run.name}: acceptance", title_justify="left")
    for name in ("prompts", "method", "K", "acceptance length", *(f"slot {k}" for k in range(1, slots + 1))):
        table.add_column(name, justify="left" if name in ("prompts", "method") else "right")
    for stem, result in files.items():
        method = result["method"]
        prompt_set = stem.removeprefix(f"acceptance-{method}").lstrip("-") or "heldout"
        cells = [f"{s:.2f}" for s in result["survival"]]
        table.add_row(
            prompt_set, method, str(result["num_speculative_tokens"]), f"{result['acceptance_length']:.2f}", *cells
        )
    return table


def write_report(run: Path, *, serve: str = "", recipe_text: str = "") -> Path:
    """Write report.html into the run folder from what is there; returns its path."""
    import jinja2

    files = acceptance_files(run)
    certificate = read_json(run / "certificate.json")
    speed, compared = read_json(run / "speed.json"), read_json(run / "compare.json")
    provenance = read_json(run / "provenance.json") or {}
    source = (Path(__file__).parent / "report.html.j2").read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True).from_string(source)
    html = page.render(
        title=f"Draft report: {run.name}",
        subtitle=_subtitle(provenance),
        cards=_cards(files, certificate, speed),
        tables=[
            {
                "title": stem,
                "note": describe(result),
                "head": acceptance_head(result),
                "rows": list(acceptance_rows(result)),
            }
            for stem, result in files.items()
        ]
        + [
            {
                "title": f"drafts compared on {name}",
                "note": describe(next(iter(found.values()))),
                "head": ["draft", *acceptance_head(next(iter(found.values())))[2:]],
                "rows": [[draft, *next(iter(acceptance_rows(result)))[2:]] for draft, result in found.items()],
            }
            for name, found in (compared or {}).items()
        ],
        figures=[
            svg
            for svg in (
                _survival_figure(files),
                _svg(comparison_figure(compared)) if compared else "",
                _training_figure(read_metrics(run)),
                _speed_figure(speed),
            )
            if svg
        ],
        proof=proof_lines(certificate),
        serve=serve,
        provenance=json.dumps(provenance, indent=2),
        recipe=recipe_text,
    )
    path = run / "report.html"
    temporary = path.with_suffix(".html.tmp")
    temporary.write_text(html, encoding="utf-8")
    temporary.replace(path)
    return path


def _subtitle(provenance: Mapping[str, Any]) -> str:
    parts = [str(provenance[k]) for k in ("target", "family", "date", "hardware") if provenance.get(k)]
    return " · ".join(parts)


def _cards(files: Mapping[str, Any], certificate: Any, speed: Any) -> list[dict[str, str]]:
    cards = []
    for stem, result in files.items():
        label = f"{stem.removeprefix('acceptance-')}: acceptance length at K={result['num_speculative_tokens']}"
        cards.append({"value": f"{result['acceptance_length']:.2f}", "label": label, "tone": ""})
    if speed and speed.get("speedup"):
        cards.append(
            {"value": f"{speed['speedup']:.2f}x", "label": "against the same loop without a draft, batch 1", "tone": ""}
        )
    if certificate:
        passed = certificate["passed"]
        cards.append(
            {"value": "proven" if passed else "FAILED", "label": "losslessness", "tone": "good" if passed else "bad"}
        )
    return cards


def _figure(width: float = 5.4, height: float = 3.4) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    return figure, axes


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _survival_figure(files: Mapping[str, Any]) -> str:
    if not files:
        return ""
    result = next(iter(files.values()))
    figure, axes = _figure()
    kinds = sorted(result.get("by_kind", {}).items())
    for colour, (kind, part) in zip(COLOURS, kinds, strict=False):
        axes.plot(range(1, len(part["survival"]) + 1), part["survival"], "o-", color=colour, label=kind, markersize=4)
    axes.plot(range(1, len(result["survival"]) + 1), result["survival"], "k--", label="all", linewidth=2)
    axes.set(title="Survival by slot", xlabel="slot", ylabel="share of rounds", ylim=(0, 1))
    axes.set_xticks(range(1, len(result["survival"]) + 1))
    axes.legend(frameon=False, fontsize=8)
    return _svg(figure)


def comparison_figure(compared: Mapping[str, Mapping[str, Any]]) -> Any:
    """Survival by slot of several drafts, a panel for each prompt set. compared: {prompt set: {draft: acceptance}}."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4.4 * len(compared), 3.4), layout="constrained")
    for axes, (name, found) in zip(figure.subplots(1, len(compared), squeeze=False)[0], compared.items(), strict=True):
        for i, (draft, result) in enumerate(found.items()):
            label = f"{draft}: acceptance length {result['acceptance_length']:.2f}"
            slots = range(1, len(result["survival"]) + 1)
            axes.plot(slots, result["survival"], "o-", color=COLOURS[i % len(COLOURS)], label=label, markersize=4)
            axes.set_xticks(slots)
        axes.set(title=name, xlabel="slot", ylabel="share of rounds", ylim=(0, 1))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    return figure


def _training_figure(metrics: list[dict[str, Any]]) -> str:
    loss = [(m["step"], m["train/loss"]) for m in metrics if "train/loss" in m]
    accepted = [(m["step"], m["accept/acceptance_length"]) for m in metrics if "accept/acceptance_length" in m]
    if not loss:
        return ""
    figure, axes = _figure()
    axes.plot(*zip(*loss, strict=True), color=COLOURS[0], label="loss")
    axes.set(title="Training", xlabel="step", ylabel="loss")
    if accepted:
        right = axes.twinx()
        right.plot(*zip(*accepted, strict=True), "o-", color=COLOURS[1], label="acceptance length")
        right.set_ylabel("acceptance length", color=COLOURS[1])
        right.spines[["top"]].set_visible(False)
    return _svg(figure)


def _speed_figure(speed: Any) -> str:
    if not speed or not speed.get("tokens_per_second"):
        return ""
    figure, axes = _figure()
    names, values = zip(*speed["tokens_per_second"].items(), strict=True)
    bars = axes.bar(names, values, color=[COLOURS[i % len(COLOURS)] for i in range(len(names))], width=0.6)
    axes.bar_label(bars, fmt="%.1f")
    axes.set(title="Decoding speed, batch 1", ylabel="tokens/s")
    return _svg(figure)
