"""What a recipe works with: the target, token rows, captured states, and the draft; each made once and found again.

    cache/rows-HASH/       the target's answers as token rows         shared by every recipe that asks for the same
    cache/features-HASH/   the target's states of those rows          likewise

A stage's folder is named after the hash of what determines its content, so a finished stage is found again and an
unfinished one goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftsmith import recipes
from draftsmith.data.batches import DataConfig
from draftsmith.data.capture import capture, describe, weights_fingerprint
from draftsmith.data.chat import (
    Row,
    Source,
    Tally,
    check_ids,
    check_supervised,
    drop_table,
    fingerprint,
    limit_row,
    read_chats,
    read_rows,
    rows_from_chats,
    write_rows,
)
from draftsmith.data.regenerate import LocalEngine, ServerEngine, regenerate
from draftsmith.data.shards import FeatureStore, finish_stage, stage_counts, stage_dir
from draftsmith.eval import plan as planning
from draftsmith.eval import report
from draftsmith.eval.acceptance import EvalConfig
from draftsmith.eval.card import ReleaseConfig
from draftsmith.models import export
from draftsmith.models.blocks import choose_mask_token
from draftsmith.models.draft import DRAFT_JSON, Draft, family
from draftsmith.models.target import Target, TargetConfig
from draftsmith.recipes import Recipe
from draftsmith.train.checkpoint import latest, read_best
from draftsmith.train.loop import TrainConfig

CACHE = Path("cache")
RUNS = Path("runs")
SMOKE: dict[str, dict[str, Any]] = {  # what --smoke shortens in every recipe, before the recipe's own `smoke:` section
    "eval": {
        "num_prompts": 4,
        "max_new_tokens": 16,
        "certify_prompts": 2,
        "certify_tokens": 12,
        "certify_contexts": 1,
        "certify_draws": 100,
        "speed_prompts": 1,
        "speed_tokens": 16,
        "speed_repeats": 1,
        "bar": None,
    },
    "train": {"steps": 6, "warmup_steps": 1, "eval_every": None, "save_every": None, "log_every": 1},
}


def draft_section(values: dict[str, Any]) -> type:
    """The model of the recipe's `draft:` section, which depends on `draft.family`."""
    return family(values["family"]).Config


SECTIONS: dict[str, recipes.Section] = {
    "target": TargetConfig,
    "draft": draft_section,
    "data": DataConfig,
    "eval": EvalConfig,
    "train": TrainConfig,
    "release": ReleaseConfig,
}


class Material:
    """One recipe (or one draft of one target) with its folders."""

    def __init__(
        self, recipe: Recipe, out: Path, prompts: str | None = None, draft: str | None = None, quiet: bool = False
    ):
        self.recipe = recipe
        self.out = out
        self.prompts = prompts
        self.given_draft = draft
        self.console = Console(stderr=quiet, highlight=False)
        if not self.console.is_terminal:
            self.console.width = 120
        self._rows: dict[str, list[Row]] = {}
        self._stores: dict[str, FeatureStore] = {}
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        if self.world > 1 and torch.cuda.is_available():  # before the target asks for the current device
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    @classmethod
    def from_recipe(
        cls,
        recipe: str,
        overrides: Sequence[str] = (),
        out: Path | None = None,
        *,
        smoke: bool = False,
        prompts: str | None = None,
        quiet: bool = False,
    ) -> Self:
        read = recipes.read(recipe, overrides, SECTIONS, smoke=smoke, smoke_values=SMOKE)
        name = read.name + ("-smoke" if smoke else "")
        return cls(read, out or RUNS / name, prompts, quiet=quiet)

    @classmethod
    def for_draft(
        cls,
        target: str,
        draft: str,
        prompts: str | None,
        overrides: Sequence[str],
        out: Path | None,
        quiet: bool = False,
    ) -> Self:
        """A draft that exists, without a recipe; overrides of `target.` and `eval.` keys work."""
        sections = recipes.validate(
            {"target": {"name": target}}, overrides, {"target": TargetConfig, "eval": EvalConfig}, "--target"
        )
        name = Path(draft).resolve().name
        return cls(Recipe(name, Path(draft), "", sections), out or RUNS / name, prompts, draft, quiet)

    # -- shared pieces ---------------------------------------------------------------------------------------------
    def say(self, text: Any) -> None:
        if self.rank == 0:
            self.console.print(text, soft_wrap=isinstance(text, str))
            self.console.file.flush()  # a log file shows each stage when it ends

    @cached_property
    def target(self) -> Target:
        with self._timed(f"target    {self.recipe.target.name}"):
            return Target.load(self.recipe.target)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.say(f"{what}  [dim]({time.perf_counter() - start:.1f} s)[/dim]")

    @contextmanager
    def _progress(self, title: str, total: float | None, unit: str) -> Iterator[Callable[[float], None]]:
        """A bar with rate and ETA where a person looks on; nothing elsewhere."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} " + unit),
        )
        shown = self.console.is_terminal and self.rank == 0 and total is not None
        with (
            Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console)
            if shown
            else nullcontext() as bar
        ):
            if bar is None:
                yield lambda amount: None
            else:
                task = bar.add_task(title, total=total)
                yield lambda amount: bar.advance(task, amount)

    def _one_process(self, verb: str) -> None:
        if self.world > 1:
            raise RuntimeError(
                f"`{verb}` runs on one process; start it without a launcher before training on {self.world} ranks"
            )

    # -- rows --------------------------------------------------------------------------------------------------------
    def _row_key(self, sources: Sequence[Source]) -> dict[str, Any]:
        data: DataConfig = self.recipe.data
        spec = self.target.spec
        return {
            "sources": [fingerprint(source) for source in sources],
            "chat": data.chat.model_dump(mode="json"),
            "regenerate": data.regenerate.key() if data.regenerate else None,
            "max_len": data.max_len,
            "min_supervised": data.min_supervised,
            "target": {
                "name": spec.name,
                "revision": spec.revision,
                "config": spec.config_sha256,
                "dtype": str(self.target.dtype),
            },
            "tokenizer": spec.tokenizer_sha256,
            "weights": None if self.target.config.ends_only else weights_fingerprint(self.target.model),
        }

    def _row_folder(self, name: str) -> Path:
        """Where the rows of a prompt set stand. A target without layers cannot tell its weights' fingerprint, so there
        the finished rows whose key differs in it alone are taken."""
        data: DataConfig = self.recipe.data
        key = self._row_key(data.train if name == "train" else (data.evaluation[name],))
        if self.target.config.ends_only:
            for path in sorted(CACHE.glob("rows-*/key.json")):
                if report.read_json(path) | {"weights": None} == key and stage_counts(path.parent) is not None:
                    return path.parent
        return stage_dir(CACHE, "rows", key)

    def row_counts(self, name: str) -> dict[str, Any] | None:
        """Counts of a prompt set's rows; None while they are not made."""
        return stage_counts(self._row_folder(name))

    def rows(self, name: str) -> list[Row]:
        """The token rows of a prompt set: "train", or a name of data.evaluation."""
        if name not in self._rows:
            self._rows[name] = self._make_rows(name)
        return self._rows[name]

    def _make_rows(self, name: str) -> list[Row]:
        data: DataConfig = self.recipe.data
        sources = data.train if name == "train" else (data.evaluation[name],)
        folder = self._row_folder(name)
        counts = stage_counts(folder)
        if counts is not None:
            self.say(
                f"rows      {name}: {folder} is done ({counts['rows']} rows, {counts['supervised']:,} supervised tokens)"
            )
            return read_rows(folder / "rows.jsonl")
        self._one_process("regenerate")
        start = time.perf_counter()
        chats = [chat for source in sources for chat in read_chats(source)]
        tally = Tally()
        if data.regenerate is None:
            found = rows_from_chats(
                chats,
                self.target.tokenizer,
                data.chat,
                tally,
                data.max_len,
                data.min_supervised,
                self.target.spec.vocab_size,
            )
            rows = list(found)
        else:
            rows = self._answers(name, chats, folder, tally)
        write_rows(folder / "rows.jsonl", rows)
        finish_stage(
            folder,
            {
                "chats": tally.chats,
                "rows": len(rows),
                "tokens": tally.tokens,
                "supervised": tally.supervised,
                "dropped": dict(tally.reasons),
            },
        )
        seconds = time.perf_counter() - start
        self.say(
            f"rows      {name}: {len(rows)} rows, {tally.supervised:,} supervised tokens -> {folder}  "
            f"[dim]({seconds:.1f} s, {tally.supervised / seconds:,.0f} tok/s)[/dim]"
        )
        if tally.reasons:
            self.say(drop_table(tally))
        return rows

    def _answers(self, name: str, chats: list[Any], folder: Path, tally: Tally) -> list[Row]:
        """Let the target answer; the exact ids are kept."""
        data: DataConfig = self.recipe.data
        config = data.regenerate
        assert config is not None
        if config.server is None:
            engine: Any = LocalEngine(self.target, config)
        else:
            engine = ServerEngine(config, self.recipe.target.name, self.target.spec.eos_ids)
        about = {"stage": folder.name}
        with self._progress(f"answers {name}", len(chats), "chats") as advance:
            path = regenerate(
                chats,
                engine,
                self.target.tokenizer,
                data.chat,
                config,
                folder / "answers",
                about,
                lambda n, _: advance(n),
            )
        tally.chats = len(chats)
        tally.reasons.update(report.read_json(folder / "answers" / "counts.json")["dropped"])
        rows = []
        for answered in read_rows(path):
            check_ids(answered, self.target.tokenizer, self.target.spec.vocab_size)
            row = limit_row(answered, data.max_len, data.min_supervised)
            if isinstance(row, Row):
                tally.add(row)
                rows.append(row)
            else:
                tally.reasons[row.reason] += 1
        check_supervised(tally)
        return rows

    def regenerate(self) -> None:
        for name in ("train", *self.recipe.data.evaluation):
            self.rows(name)

    # -- features ----------------------------------------------------------------------------------------------------
    def store(self, name: str, repair: bool = False) -> FeatureStore:
        """The captured states of a prompt set. repair: damaged shards are made anew instead of refused."""
        if name not in self._stores:
            self._stores[name] = self._make_store(name, repair)
        return self._stores[name]

    def _make_store(self, name: str, repair: bool) -> FeatureStore:
        rows = self.rows(name)
        config = self.recipe.data.capture
        needs = self._untrained.needs
        self.target.needs_ok(needs)
        header = describe(self.target, needs, config, rows)
        if self.target.config.ends_only:
            before = self._captured_before(name, header)
            if before is not None:
                return before
            if config.server is None:
                raise ValueError(
                    f"target.ends_only: no captured states of the {name} rows under {CACHE}/; run `draftsmith capture "
                    f"{self.recipe.name}` first, where the whole target fits, or with data.capture.server"
                )
        folder = stage_dir(CACHE, "features", header)
        if stage_counts(folder) is not None:
            try:
                store = FeatureStore.open(folder, header, config.verify)
                self.say(f"features  {name}: {folder} is done ({len(store)} rows)")
                return store
            except ValueError:
                if not repair:
                    raise
                self.say(f"features  {name}: {folder} is damaged; what does not match its manifest is made anew")
        start, tokens = time.perf_counter(), sum(len(row.input_ids) for row in rows)
        with self._progress(f"features {name}", tokens, "tokens") as advance:
            last = 0

            def told(done: int, total: int) -> None:
                nonlocal last
                advance(done - last)
                last = done

            found = capture(rows, self.target, needs, folder, config, self.rank, self.world, told)
            while found is None and self.world > 1:  # a rank that ended now would take the others with it
                time.sleep(0.5)
                found = capture(rows, self.target, needs, folder, config, self.rank, self.world)
        if found is None:
            raise RuntimeError(
                f"{folder}: this rank is done, others still write; run the same command again when they are"
            )
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        finish_stage(folder, {"rows": len(found), "tokens": tokens, "bytes": size})
        seconds = time.perf_counter() - start
        self.say(
            f"features  {name}: {tokens:,} tokens, {planning.human_bytes(size)} -> {folder}  "
            f"[dim]({seconds:.1f} s, {tokens / seconds:,.0f} tok/s)[/dim]"
        )
        return found

    def _captured_before(self, name: str, header: dict[str, Any]) -> FeatureStore | None:
        """Finished states of these rows, from the whole target or a server: their key differs in the weights' fingerprint
        alone, which a target without layers cannot tell."""
        for path in sorted(CACHE.glob("features-*/key.json")):
            key = report.read_json(path)
            if key["target"] | {"weights_fingerprint": None} != header["target"]:
                continue
            if key | {"target": None} == header | {"target": None} and stage_counts(path.parent) is not None:
                self.say(f"features  {name}: {path.parent} is done (captured before)")
                return FeatureStore.open(path.parent, key, self.recipe.data.capture.verify)
        return None

    def capture(self) -> None:
        if self.recipe.data.source == "live":
            raise ValueError("data.source is live: the target runs beside training and nothing is captured")
        for name in ("train", *self.recipe.data.evaluation):
            self.store(name, repair=True)

    # -- the draft ---------------------------------------------------------------------------------------------------
    @cached_property
    def _untrained(self) -> Draft:
        """The recipe's draft, bound to the target; its weights are not initialised yet."""
        config = self.recipe.draft
        if "mask_token_id" in type(config).model_fields and config.mask_token_id is None:
            mask = self._given_mask()
            if mask is None:
                mask = choose_mask_token(self.target.tokenizer, self.target.spec)
            self.say(f"draft     mask token {mask} {self.target.tokenizer.convert_ids_to_tokens(mask)!r}")
            config = config.model_copy(update={"mask_token_id": mask})
        draft = family(config.family)(config, self.target.spec)
        self.target.bind(draft)
        return draft

    def draft_folder(self) -> Path:
        """The draft that accept, export and the other verbs use: the given one, else the best step, else the last."""
        if self.given_draft is not None:
            return Path(self.given_draft)
        best, last = read_best(self.out), latest(self.out)
        if best is not None:
            return self.out / f"step-{best.step}" / "draft"
        if last is not None:
            return last.draft
        raise ValueError(f"{self.out}: no trained draft here; run `draftsmith train {self.recipe.name}` first")

    def _has_draft(self) -> bool:
        return self.given_draft is not None or read_best(self.out) is not None or latest(self.out) is not None

    @property
    def _as_it_came(self) -> bool:
        """Whether the draft is one that the target brings along (MTP) and that was not trained yet."""
        return not self._has_draft() and self._untrained.pretrained

    @cached_property
    def draft(self) -> Draft:
        if self._as_it_came:
            self.say("draft     the target's own, before any training")
            draft = family(self.recipe.draft.family)(self.recipe.draft, self.target.spec)
            self.target.bind(draft)
            draft.initialise(None, torch.Generator())
        else:
            draft = self._load(self.draft_folder())
        return draft.to(self.target.device, self.target.dtype).eval()  # as servers run it

    def _load(self, folder: Path) -> Draft:
        draft = export.load(folder, self.target.spec, self.target.embedding)
        made_for = draft.target
        if made_for.config_sha256 != self.target.spec.config_sha256:
            self.say(
                f"[yellow]{folder} was made for {made_for.name}; this target is {self.target.spec.name} with another "
                "config: expect low acceptance unless it is a fine-tune of the same model[/yellow]"
            )
        self.target.bind(draft)
        return draft

    @property
    def _start_from(self) -> str | None:
        return self.recipe.train.start_from if "train" in self.recipe.sections else None

    def _given_mask(self) -> int | None:
        """The mask token of the block draft that training starts from."""
        if self._start_from is None:
            return None
        return self._load(draft_in(Path(self._start_from))).config.model_dump().get("mask_token_id")


def draft_in(folder: Path) -> Path:
    """The draft that a folder stands for: of a run its best step, else its last; of a step its own; else the folder."""
    best, last = read_best(folder), latest(folder)
    if best is not None:
        return folder / f"step-{best.step}" / "draft"
    if last is not None:
        return last.draft
    return folder / "draft" if (folder / "draft" / DRAFT_JSON).is_file() else folder
