"""The run folder: checkpoints that are complete or absent, exact resume, and what may not change in a started run.

    runs/NAME/
        recipe.yaml          the resolved recipe; a started run refuses to go on under another one
        provenance.json      run id, versions, git revision, data hashes, command, resumptions
        metrics.jsonl        one line per logged step (track.py)
        best.json            step, value and method of the best evaluation
        step-N/draft/        the draft after N updates (models/draft.py)
        step-N/state/        what exact resume needs besides: loop.pt, and optimizer.pt; or, where ranks hold parts of
                             the optimizer state, optimizer-RANK-of-RANKS.pt: pieces of each tensor's state, which any
                             number of ranks, and any strategy, reads back
        step-N/step.json     written last: the files of the step and their sizes

A step is written under `.step-N.<run id>.tmp`, flushed and renamed. A step counts when every file its step.json lists
is there with its size. Only files listed in a step.json of this run's id are ever deleted.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import random
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.models.draft import DRAFT_TENSORS, Draft, save_draft
from draftsmith.train.optim import Optimizers, Piece

RECIPE, PROVENANCE, BEST, STEP, LOCK = "recipe.yaml", "provenance.json", "best.json", "step.json", ".lock"
OPTIMIZER, LOOP = "state/optimizer.pt", "state/loop.pt"
OPTIMIZER_PART = "state/optimizer-{rank}-of-{world}.pt"
PACKAGES = ("draftsmith", "torch", "transformers", "accelerate", "safetensors", "datasets", "deepspeed")

# what may change between the sittings of a run: nothing here moves a weight while all numbers are finite
FREE_KEYS = (
    "eval",
    "release",
    "train.log_every",
    "train.eval_every",
    "train.save_every",
    "train.keep_last",
    "train.tracker",
    "train.attention",
    "train.ranks",
    "train.strategy",
    "train.on_nonfinite",
)


# -- one step ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Checkpoint:
    """A complete step of a run."""

    folder: Path
    step: int

    @property
    def draft(self) -> Path:
        return self.folder / "draft"


class Ranks(Protocol):
    """The ranks that write a step together."""

    rank: int
    world: int

    def gather(self, value: str | None) -> list[str | None]:
        """Every rank's value, on every rank."""
        ...


class Alone:
    """The only process."""

    rank, world = 0, 1

    def gather(self, value: str | None) -> list[str | None]:
        return [value]


def save(
    run: Path,
    step: int,
    draft: Draft,
    optimizers: Optimizers,
    loop: Mapping[str, Any],
    *,
    weights: Mapping[str, Tensor] | None = None,
    ranks: Ranks | None = None,
) -> Checkpoint:
    """Write step-N: everything that is saved is listed here. `loop` is what the loop itself carries (see loop.py).

    weights: the draft's state dict where it does not stand whole here. ranks: all of them call this; each writes its
    part of a sharded optimizer state, rank 0 everything else. Raises OSError on every rank, with the last good step
    untouched, when the disk is full or the folder is not ours to replace.
    """
    ranks = ranks or Alone()
    run_id = provenance(run)["run_id"]
    final = run / f"step-{step}"
    temporary = run / f".step-{step}.{run_id}.tmp"
    main = ranks.rank == 0

    def begin() -> None:
        if final.exists() and _record(final).get("run_id") != run_id:
            raise _Taken(f"exists and was not written by this run (id {run_id}); move it away, or use --out")
        _clear(temporary)
        (temporary / "state").mkdir(parents=True)

    def write_part() -> None:
        part = OPTIMIZER_PART.format(rank=ranks.rank, world=ranks.world) if optimizers.sharded else OPTIMIZER
        if main or optimizers.sharded:
            torch.save(optimizers.state_dict(), temporary / part)
            _flush_file(temporary / part)

    def finish() -> None:
        save_draft(draft, temporary / "draft", {"step": step, "run_id": run_id}, weights)
        torch.save({"step": step, **loop}, temporary / LOOP)
        files = {str(path.relative_to(temporary)): path.stat().st_size for path in _files(temporary)}
        _write_json(temporary / STEP, {"step": step, "run_id": run_id, "files": files})
        _flush(temporary)
        if final.exists():  # the same step again, after a resume from an earlier one
            _delete_step(final, run_id)
            if final.exists():
                raise _Taken("holds files that this run did not write; move them away and start again")
        os.rename(temporary, final)
        _flush_folder(run)

    for work, mine in ((begin, main), (write_part, True), (finish, main)):
        problem: str | None = None
        try:
            if mine:
                work()
        except _Taken as error:
            problem = str(error)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            good = latest(run)
            kept = f"the last good step, {good.folder.name}, is untouched" if good else "no step was complete before"
            problem = f"saving failed ({error}); {kept}. Free some disk space and start again"
        problems = [text for text in ranks.gather(problem) if text is not None]
        if problems:
            if main:
                _clear(temporary)
            raise OSError(f"{final}: {problems[0]}")
    return Checkpoint(final, step)


class _Taken(OSError):
    """The place of a step holds what this run did not write."""


def restore(checkpoint: Checkpoint, draft: Draft, optimizers: Optimizers) -> dict[str, Any]:
    """Put a step's weights and optimizer state back, in place; returns what the loop itself carries."""
    restore_weights(checkpoint, draft)
    return restore_state(checkpoint, optimizers)


def restore_state(checkpoint: Checkpoint, optimizers: Optimizers) -> dict[str, Any]:
    """Put a step's optimizer state back, in place; returns what the loop itself carries.

    The state may have been written by any number of ranks, under any strategy; every rank reads what it needs of it.
    """
    files = sorted((checkpoint.folder / OPTIMIZER).parent.glob("optimizer*.pt"))
    pieces: dict[str, dict[str, list[Piece]]] = {}
    for path in files:
        for kind, states in torch.load(path, weights_only=True, map_location="cpu", mmap=True).items():
            of_kind = pieces.setdefault(kind, {})
            for name, piece in states.items():
                of_kind.setdefault(name, []).append(piece)
    try:
        optimizers.load_state_dict(pieces)
    except ValueError as error:
        raise ValueError(f"{checkpoint.folder / 'state'}: {error}") from error
    return torch.load(checkpoint.folder / LOOP, weights_only=True, map_location="cpu")


def restore_weights(checkpoint: Checkpoint, draft: Draft) -> None:
    """Put a step's weights and buffers back, in place."""
    problems = draft.load_state_dict(load_file(checkpoint.draft / DRAFT_TENSORS), strict=False)
    if problems.missing_keys or problems.unexpected_keys:
        raise ValueError(
            f"{checkpoint.draft}: this draft has no {problems.unexpected_keys} and misses {problems.missing_keys}; "
            "go on with the draft section the run was started with"
        )


def steps(run: Path) -> list[Checkpoint]:
    """The complete steps of a run, ascending."""
    found = []
    for path in run.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match and _complete(path):
            found.append(Checkpoint(path, int(match[1])))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def latest(run: Path) -> Checkpoint | None:
    """The last complete step of a run folder, or None."""
    complete = steps(run)
    return complete[-1] if complete else None


def find(path: Path) -> Checkpoint:
    """The step that `path` names: a step folder itself, or the last step of a run folder."""
    if (path / STEP).is_file() and _complete(path):
        return Checkpoint(path, _record(path)["step"])
    found = latest(path) if path.is_dir() else None
    if found is None:
        raise ValueError(f"{path}: no complete step here; expected a run folder, or a step such as runs/NAME/step-300")
    return found


def keep_last(run: Path, num: int | None) -> None:
    """Delete all but the last `num` steps and the best one; None keeps all. Only files this run wrote are deleted."""
    if num is None:
        return
    run_id, best = provenance(run)["run_id"], read_best(run)
    for checkpoint in steps(run)[:-num]:
        if best is None or checkpoint.step != best.step:
            _delete_step(checkpoint.folder, run_id)


# -- the best step -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Best:
    """The best evaluated step. `settings` are those of the evaluation: values under other settings do not compare."""

    step: int
    value: float
    method: str
    settings: dict[str, Any]

    def beaten_by(self, other: Best) -> bool:
        comparable = (self.method, self.settings) == (other.method, other.settings)
        return not comparable or other.value > self.value


def read_best(run: Path) -> Best | None:
    path = run / BEST
    return Best(**json.loads(path.read_text())) if path.is_file() else None


def offer_best(run: Path, candidate: Best) -> bool:
    """Make `candidate` the run's best if it is; the first of equal values stays."""
    best = read_best(run)
    if best is not None and not best.beaten_by(candidate):
        return False
    write_json(run / BEST, asdict(candidate))
    return True


# -- start and resume ----------------------------------------------------------------------------------------------
def check_unchanged(run: Path, recipe: Mapping[str, Any], data: Mapping[str, str]) -> None:
    """Refuse to go on with a started run under another recipe or other data; every changed key is named.

    A run is started once it has a complete step. Keys of FREE_KEYS (and what is below them) may change.
    """
    if latest(run) is None or not (run / RECIPE).is_file():
        return
    old = flatten(yaml.safe_load((run / RECIPE).read_text()))
    new = flatten(_plain(recipe))
    lines = [
        f"{key}: {old.get(key)!r} in {run}, {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not any(key == free or key.startswith(free + ".") for free in FREE_KEYS)
    ]
    before = provenance(run).get("data", {})
    lines += [
        f"data {name}: {before[name]!r} in {run}, {data[name]!r} now"
        for name in sorted(before.keys() & data.keys())
        if before[name] != data[name]
    ]
    if lines:
        more = f" train.extend_from={run}" if any(line.startswith("train.steps:") for line in lines) else ""
        hint = ", with more steps from where this run stands" if more else ""
        raise ValueError(
            f"{run} was started with other settings:\n  " + "\n  ".join(lines) + "\n"
            f"Set them back to go on with this run, or start another one{hint}: --out {run}-2{more}"
        )


def open_run(run: Path, recipe: Mapping[str, Any], data: Mapping[str, str]) -> str:
    """Write recipe.yaml and provenance.json, clear what a killed save left; returns the run's id.

    A run that is already started keeps its id and its recipe's fixed keys; the sitting is added to `resumed`.
    """
    run.mkdir(parents=True, exist_ok=True)
    check_unchanged(run, recipe, data)
    now = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "command": sys.argv, "versions": versions()}
    started = latest(run)
    fresh: dict[str, Any] = {"run_id": uuid.uuid4().hex[:12]}
    known = provenance(run) if (run / PROVENANCE).is_file() else fresh
    if started is None:
        known = {"run_id": known["run_id"], **now, "git": git_revision(), "data": dict(data), "resumed": []}
    else:
        known["resumed"].append({"step": started.step, **now, "git": git_revision()})
    write_json(run / PROVENANCE, known)
    write_text(run / RECIPE, yaml.safe_dump(_plain(recipe), sort_keys=False))
    for left in run.glob(f".step-*.{known['run_id']}.tmp"):
        _clear(left)
    return known["run_id"]


@contextmanager
def only_one(run: Path) -> Iterator[None]:
    """Hold the run folder against a second process; the system drops the lock when this one dies."""
    run.mkdir(parents=True, exist_ok=True)
    with open(run / LOCK, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ValueError(
                f"{run} is being trained by another process (id {holder}); wait for it, or choose another --out"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def provenance(run: Path) -> dict[str, Any]:
    return json.loads((run / PROVENANCE).read_text())


def versions() -> dict[str, str]:
    """Version of every package that can change a number here; the torch build included."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    hip, cuda = torch.version.hip, torch.version.cuda
    found["torch_build"] = f"hip {hip}" if hip else f"cuda {cuda}" if cuda else "cpu"
    return found


def git_revision() -> str | None:
    """Commit of the checkout this code runs from, `+changes` when files differ from it; None when installed."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(here.parent), *arguments], capture_output=True, text=True)

    try:
        if git("ls-files", "--error-unmatch", here.name).returncode:  # a site-packages inside someone's repository
            return None
        revision = git("rev-parse", "HEAD").stdout.strip()
        changed = git("status", "--porcelain", "--untracked-files=no").stdout.strip()
    except FileNotFoundError:  # no git on this machine
        return None
    return revision + ("+changes" if changed else "")


# -- random states -------------------------------------------------------------------------------------------------
def random_state(device: torch.device, generators: Mapping[str, torch.Generator]) -> dict[str, Any]:
    """Every sequence a rank draws from: python, torch on the CPU and the device, and named generators."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    states["generators"] = {name: generator.get_state() for name, generator in generators.items()}
    return states


def set_random_state(
    states: Mapping[str, Any], device: torch.device, generators: Mapping[str, torch.Generator]
) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    for name, generator in generators.items():
        generator.set_state(states["generators"][name])


# -- files ---------------------------------------------------------------------------------------------------------
def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"lr": 1}} -> {"train.lr": 1}; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def write_text(path: Path, text: str) -> None:
    """Replace a file in one move."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _plain(value: Any) -> Any:
    """Only what YAML and JSON know: tuples become lists, paths text; so saved and current recipes compare."""
    return json.loads(json.dumps(value, default=str))


def _record(folder: Path) -> dict[str, Any]:
    path = folder / STEP
    return json.loads(path.read_text()) if path.is_file() else {}


def _complete(folder: Path) -> bool:
    files = _record(folder).get("files", {})
    return bool(files) and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in files.items()
    )


def _files(folder: Path) -> Sequence[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _delete_step(folder: Path, run_id: str) -> None:
    """Unlink the files a step lists, its step.json last, and the folders that are empty then."""
    record = _record(folder)
    if record.get("run_id") != run_id:
        return
    for name in record["files"]:
        (folder / name).unlink(missing_ok=True)
    (folder / STEP).unlink()
    _remove_empty(folder)


def _clear(folder: Path) -> None:
    """Remove a temporary folder of ours with all that is in it."""
    for path in _files(folder):
        path.unlink()
    _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.is_dir():
            _remove_empty(path)
    if not any(folder.iterdir()):
        folder.rmdir()


def _flush(folder: Path) -> None:
    """Make files and their names reach the disk."""
    for path in _files(folder):
        _flush_file(path)
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        _flush_folder(path)


def _flush_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
