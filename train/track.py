"""What a run tells: metrics.jsonl always, a tracker through accelerate's own, one line per log step, a progress bar.

Names: train/... (losses, metrics, rates), accept/... (evaluation), time/... (ms, tokens per second).
"""

from __future__ import annotations

import importlib.util
import json
import netrc
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from draftsmith.train.checkpoint import flatten, write_text

Tracker = Literal["auto", "wandb", "tensorboard", "trackio", "none"]
METRICS = "metrics.jsonl"


class MetricsFile:
    """metrics.jsonl: one JSON object per line with its "step"; every line is flushed as it is written."""

    def __init__(self, run: Path):
        self.path = run / METRICS

    def append(self, step: int, values: Mapping[str, float | None]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All complete lines; the half line of a killed process is left out."""
        if not self.path.is_file():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]

    def has(self, step: int, key: str) -> bool:
        """Whether `key` was logged at `step`."""
        return any(entry["step"] == step and key in entry for entry in self.read())

    def truncate(self, step: int) -> None:
        """Drop what was logged after `step`, so that the steps done again after a resume stand here once."""
        kept = [line for line in self.read() if line["step"] <= step]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))


# -- trackers ------------------------------------------------------------------------------------------------------
def choose(tracker: Tracker) -> tuple[str | None, str | None]:
    """(accelerate's name of the tracker or None, a line for the user or None). A missing package is an error."""
    if tracker == "auto":
        if _installed("wandb"):
            return "wandb", None
        return None, "wandb is not installed: metrics go to metrics.jsonl alone"
    if tracker == "none":
        return None, None
    needed = ("tensorboard", "tensorboardX") if tracker == "tensorboard" else (tracker,)
    if not any(_installed(package) for package in needed):
        raise ValueError(
            f"train.tracker is {tracker!r}, but the package {needed[0]!r} is not installed: "
            f"pip install {needed[0]}, or set train.tracker=none (metrics.jsonl is always written)"
        )
    return tracker, None


def start_tracker(
    accelerator: Accelerator, name: str | None, run: Path, run_id: str, recipe: Mapping[str, Any]
) -> None:
    """Start accelerate's tracker of that name with its files in the run folder; wandb goes offline without a key."""
    if name is None:
        return
    options: dict[str, dict[str, Any]] = {
        "wandb": {"dir": str(run), "name": run.name, "id": run_id, "resume": "allow", "mode": wandb_mode()},
        "tensorboard": {},
        "trackio": {"name": run.name},
    }
    values = {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in flatten(recipe).items()
    }
    project = "tensorboard" if name == "tensorboard" else "draftsmith"  # tensorboard: the folder below the run's
    accelerator.init_trackers(project, config=values, init_kwargs={name: options[name]})


def wandb_mode() -> str:
    """WANDB_MODE when it is set, else online when this machine has a key, else offline."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    return "online" if os.environ.get("WANDB_API_KEY") or _wandb_login() else "offline"


def _wandb_login() -> bool:
    """Whether `wandb login` has left a key here."""
    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (FileNotFoundError, netrc.NetrcParseError):
        return False


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


# -- the terminal --------------------------------------------------------------------------------------------------
FIRST, LAST = "train/loss", ("train/lr", "train/muon_lr", "train/grad_norm", "time/tok_s", "time/step_ms")
LEFT_OUT = ("train/supervised_tokens",)  # in metrics.jsonl only
FORMATS = {"time/tok_s": "{:,.0f} tok/s", "time/step_ms": "{:,.0f} ms", "train/idle_batches": "{:.0f}"}


def line(step: int, steps: int, values: Mapping[str, float | None]) -> str:
    """One log line in fixed order: step, loss, the family's metrics in its order, rates, gradient norm, speed.

    Metrics of one name and several slots, match_0, match_1, ..., share one place: match 0.41/0.22; those of the loss
    stand behind it in brackets.
    """
    start = [f"step {step:>{len(str(steps))}}/{steps}", *_shown(FIRST, values.get(FIRST))]
    parts: list[str] = []
    slots: dict[str, list[str]] = {}
    for key, value in values.items():
        if not key.startswith("train/") or key in (FIRST, *LAST, *LEFT_OUT):
            continue
        match = re.fullmatch(r"train/(.+)_(\d+)", key)
        if match:
            slots.setdefault(match[1], []).append("-" if value is None else f"{value:.2f}")
        else:
            parts += _shown(key, value)
    if "loss" in slots:
        start.append(f"({'/'.join(slots.pop('loss'))})")
    parts += [f"{name} {'/'.join(each)}" for name, each in slots.items()]
    for key in LAST:
        parts += _shown(key, values.get(key))
    return "  ".join(start + parts)


def _shown(key: str, value: float | None) -> list[str]:
    """A number with its name before it, or its unit behind it; nothing for None."""
    if value is None:
        return []
    text = FORMATS.get(key, "{:.2e}" if key.endswith("lr") else "{:.4f}").format(value)
    return [text if key.startswith("time/") else f"{key.removeprefix('train/')} {text}"]


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.2f} steps/s" if task.speed else "", style="progress.data.speed")


class View:
    """A progress bar with rate and time left where the output is a terminal, plain lines elsewhere, nothing on the
    other ranks."""

    def __init__(self, start: int, steps: int, main: bool, console: Console | None = None, stderr: bool = False):
        self.console = console or Console(stderr=stderr, highlight=False, soft_wrap=True, quiet=not main)
        self.bar: Progress | None = None
        if main and self.console.is_terminal:
            columns = (TextColumn("train"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.task = self.bar.add_task("train", total=steps, completed=start)

    def __enter__(self) -> View:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def advance(self) -> None:
        if self.bar:
            self.bar.advance(self.task)
