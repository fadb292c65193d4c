"""The stages of a recipe, in order, each done once: rows, features, training, acceptance, proof, speed, export, report.

    cache/rows-HASH/       the target's answers as token rows         shared by every recipe that asks for the same
    cache/features-HASH/   the target's states of those rows          likewise
    runs/NAME/             everything of one run

A stage's folder is named after the hash of what determines its content, so a finished stage is found again and an
unfinished one goes on. The command line (train/cli.py) calls one method a verb.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftsmith import recipes
from draftsmith.data.batches import Ahead, BatchSource, DataConfig, target_mass, token_stats
from draftsmith.data.capture import capture, checksum, describe
from draftsmith.data.chat import (
    ChatConfig,
    Dropped,
    Row,
    Source,
    Tally,
    Template,
    check_ids,
    check_supervised,
    drop_table,
    fingerprint,
    limit_row,
    read_chats,
    read_rows,
    rows_from_chats,
    show_row,
    write_rows,
)
from draftsmith.data.regenerate import LocalEngine, ServerEngine, regenerate
from draftsmith.data.shards import FeatureStore, finish_stage, stage_counts, stage_dir
from draftsmith.eval import acceptance, certify, exact, hub, report, schedule, speed
from draftsmith.eval import plan as planning
from draftsmith.eval.acceptance import EvalConfig
from draftsmith.eval.card import ReleaseConfig
from draftsmith.eval.release import release
from draftsmith.eval.runtime import Schedule
from draftsmith.models import export, warm
from draftsmith.models.blocks import choose_mask_token
from draftsmith.models.draft import DRAFT_JSON, Draft, family
from draftsmith.models.target import Target, TargetConfig
from draftsmith.recipes import Recipe
from draftsmith.train.checkpoint import latest, read_best
from draftsmith.train.loop import TrainConfig, train

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


class Stages:
    """One recipe (or one draft of one target) and its folders; every method does a stage if it is not done yet."""

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
    ) -> Stages:
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
    ) -> Stages:
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
        }

    def rows(self, name: str) -> list[Row]:
        """The token rows of a prompt set: "train", or a name of data.evaluation."""
        if name not in self._rows:
            self._rows[name] = self._make_rows(name)
        return self._rows[name]

    def _make_rows(self, name: str) -> list[Row]:
        data: DataConfig = self.recipe.data
        sources = data.train if name == "train" else (data.evaluation[name],)
        folder = stage_dir(CACHE, "rows", self._row_key(sources))
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
    def store(self, name: str) -> FeatureStore:
        """The captured states of a prompt set."""
        if name not in self._stores:
            self._stores[name] = self._make_store(name)
        return self._stores[name]

    def _make_store(self, name: str) -> FeatureStore:
        rows = self.rows(name)
        config = self.recipe.data.capture
        needs = self._untrained.needs
        self.target.needs_ok(needs)
        header = describe(self.target, needs, config, rows)
        if self.target.config.ends_only:
            return self._captured_before(name, header)
        folder = stage_dir(CACHE, "features", header)
        if stage_counts(folder) is not None:
            store = FeatureStore.open(folder, header, config.verify)
            self.say(f"features  {name}: {folder} is done ({len(store)} rows)")
            return store
        start, tokens = time.perf_counter(), sum(len(row.input_ids) for row in rows)
        with self._progress(f"features {name}", tokens, "tokens") as advance:
            last = 0

            def told(done: int, total: int) -> None:
                nonlocal last
                advance(done - last)
                last = done

            found = capture(rows, self.target, needs, folder, config, self.rank, self.world, told)
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

    def _captured_before(self, name: str, header: dict[str, Any]) -> FeatureStore:
        """States of these rows that the whole target gave: their key differs in the weights' fingerprint alone, which
        a target without layers cannot tell."""
        for path in sorted(CACHE.glob("features-*/key.json")):
            key = report.read_json(path)
            if key["target"] | {"weights_fingerprint": None} != header["target"]:
                continue
            if key | {"target": None} == header | {"target": None} and stage_counts(path.parent) is not None:
                self.say(f"features  {name}: {path.parent}, captured from the whole target")
                return FeatureStore.open(path.parent, key, self.recipe.data.capture.verify)
        raise ValueError(
            f"target.ends_only: no captured states of the {name} rows under {CACHE}/; run `draftsmith capture "
            f"{self.recipe.name}` first, where the whole target fits"
        )

    def capture(self) -> None:
        if self.recipe.data.source == "live":
            raise ValueError("data.source is live: the target runs beside training and nothing is captured")
        for name in ("train", *self.recipe.data.evaluation):
            self.store(name)

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

    # -- training ----------------------------------------------------------------------------------------------------
    def train(self) -> None:
        config: TrainConfig = self.recipe.train
        data: DataConfig = self.recipe.data
        rows = self.rows("train")
        states: Any = self.store("train") if data.source == "cache" else rows
        draft = self._untrained
        source = BatchSource(
            states, self.target, draft.needs, config.seed, config.batch_tokens, config.pack_tokens, data.capture
        )
        held_out = {name: self.rows(name) for name in data.evaluation}
        stats = token_stats(rows, self.target.spec.vocab_size)
        reduced = getattr(self.recipe.draft, "draft_vocab", None) is not None
        if reduced and draft.needs.last_hidden and latest(self.out) is None:
            stats = stats._replace(target_mass=target_mass(source, self.target))
        draft.initialise(stats, torch.Generator().manual_seed(config.seed))
        if self._start_from is not None and latest(self.out) is None:
            fresh = warm.take(draft, self._load(draft_in(Path(self._start_from))), self._start_from)
            self.say(f"start     {self._start_from}" + (f"; fresh: {', '.join(fresh)}" if fresh else ""))
        draft.to(self.target.device)
        evaluate = self._evaluation(held_out)
        self.__dict__.pop("draft", None)
        with Ahead(source) as ahead:
            train(
                draft,
                self.target,
                ahead,
                config,
                self.out,
                evaluate=evaluate,
                recipe=self.recipe.resolved(),
                data={"train": checksum(rows), **{name: checksum(found) for name, found in held_out.items()}},
            )
        del self.__dict__["_untrained"]

    def _evaluation(self, held_out: Mapping[str, list[Row]]) -> Callable[[Draft], dict[str, Any]] | None:
        """Acceptance of a draft in training: exact, on the first evaluation set; None when there is none."""
        if not held_out or self.rank > 0:
            return None
        name, rows = next(iter(held_out.items()))
        config: EvalConfig = self.recipe.eval
        kinds = {row.id: row.kind for row in rows}
        states: Any = self.store(name) if self.recipe.data.source == "cache" else rows
        batches = BatchSource(states, self.target, self._untrained.needs, 0, 8192, 8192, self.recipe.data.capture)

        def evaluate(draft: Draft) -> dict[str, Any]:
            num, sampler = config.num_proposals(draft), config.sampler()
            found = exact.exact(draft, batches.every_row(), kinds, num, sampler, config.max_new_tokens)
            return {"acceptance_length": found["acceptance_length"], "method": "exact"}

        return evaluate

    # -- proof -------------------------------------------------------------------------------------------------------
    def _prompt_sets(self) -> dict[str, tuple[list[list[int]], list[str]]]:
        """{name: (prompts, kinds)} to decode: --prompts, else the recipe's evaluation sets, else the shipped ones."""
        config: EvalConfig = self.recipe.eval
        if self.prompts is None and "data" in self.recipe.sections and self.recipe.data.evaluation:
            return {
                name: acceptance.prompts_of(self.rows(name), config.num_prompts) for name in self.recipe.data.evaluation
            }
        chat = self.recipe.data.chat if "data" in self.recipe.sections else ChatConfig()
        template = Template(self.target.tokenizer, chat)
        prompts, kinds = [], []
        for item in read_chats(Source(path=self.prompts or "shipped:prompts_heldout")):
            if isinstance(item, Dropped):
                continue
            messages = template.messages(item)
            while messages and messages[-1]["role"] == "assistant":
                messages = messages[:-1]
            prompts.append(template.encode(template.text(messages, item.tools, prompt=True)))
            kinds.append(item.kind)
        if not prompts:
            raise ValueError(f"{self.prompts}: no prompt in it could be used")
        return {"prompts": (prompts[: config.num_prompts], kinds[: config.num_prompts])}

    def accept(self, server: str | None = None, against: Sequence[str] = ()) -> dict[str, Any]:
        """Acceptance of every evaluation set; the first is the headline and goes to acceptance-METHOD.json, or to
        acceptance-METHOD-before-training.json while the draft is one that the target brings along.

        against: folders of further drafts, measured on the same prompts; a draft that started from another one is
        compared with it. All of them go into one table, compare.json and compare.svg.
        """
        config: EvalConfig = self.recipe.eval
        others = self._others(against, server)
        if not against and server is None and self._start_from is not None and config.schedule == "none":
            try:
                others = self._others([self._start_from], server)
            except ValueError as problem:  # nobody asked for it
                self.say(f"[yellow]not compared with where training started: {problem}[/yellow]")
        compared: dict[str, dict[str, Any]] = {}
        results: dict[str, Any] = {}
        for index, (name, (prompts, kinds)) in enumerate(self._prompt_sets().items()):
            if server is not None:
                found = acceptance.served(server, prompts, kinds, config)
                advice = None
            else:
                with self._progress(f"accept {name}", len(prompts) * config.max_new_tokens, "tokens") as advance:
                    found, advice = acceptance.accept(
                        self.target, self.draft, prompts, kinds, config, advance, self._schedule()
                    )
            if server is None or self._has_draft():
                found["draft_sha256"] = certify.tensors_sha256(self.draft)
            suffix = "" if index == 0 else f"-{name}"
            if "schedule" in found:  # verifies and accepts less: never the headline
                suffix = f"-{name}-{found['schedule']}"
            if server is None and self._as_it_came:
                suffix += "-before-training"
            self._write(f"acceptance-{found['method']}{suffix}.json", found)
            results[name] = found
            if advice:
                self.say(f"[yellow]{advice}[/yellow]")
            if others:
                compared[name] = {self.recipe.name: found}
            for label, draft in others.items():
                with self._progress(f"accept {label}", len(prompts) * config.max_new_tokens, "tokens") as advance:
                    compared[name][label], _ = acceptance.accept(self.target, draft, prompts, kinds, config, advance)
                compared[name][label]["draft_sha256"] = certify.tensors_sha256(draft)
        self.say(acceptance.acceptance_table(results))
        if not others:
            return results
        self.say(acceptance.comparison_table(compared))
        self._write("compare.json", compared)
        report.comparison_figure(compared).savefig(self.out / "compare.svg", metadata={"Date": None})
        self.say(f"compared  {self.out / 'compare.json'}; figure {self.out / 'compare.svg'}")
        return results | {"against": {label: {s: compared[s][label] for s in compared} for label in others}}

    def _others(self, folders: Sequence[str], server: str | None) -> dict[str, Draft]:
        """The drafts to compare with, as servers run them, by the folders they were asked for."""
        config: EvalConfig = self.recipe.eval
        if folders and (server is not None or config.schedule != "none"):
            raise ValueError("--against compares drafts in this runtime, without --server and with eval.schedule=none")
        others: dict[str, Draft] = {}
        for folder in folders:
            draft = self._load(draft_in(Path(folder)))
            others[folder] = draft.to(self.target.device, self.target.dtype).eval()
        nums = {name: config.num_proposals(draft) for name, draft in ({self.recipe.name: self.draft} | others).items()}
        if folders and len(set(nums.values())) > 1:
            listed = ", ".join(f"{name} {num}" for name, num in nums.items())
            raise ValueError(
                f"--against: these drafts propose different numbers of tokens a round ({listed}), and acceptance lengths "
                f"compare only at one; set eval.num_speculative_tokens={min(nums.values())}"
            )
        return others

    def certify(self) -> dict[str, Any]:
        config: EvalConfig = self.recipe.eval
        prompts, _ = next(iter(self._prompt_sets().values()))

        with self._timed("certificate"):
            found = certify.certify(self.target, self.draft, prompts, config, schedule=self._schedule())
        self._write("certificate.json", found)
        for line in report.proof_lines(found):
            self.say(f"  {line}")
        return found

    def speed(self) -> dict[str, Any]:
        config: EvalConfig = self.recipe.eval
        prompts, _ = next(iter(self._prompt_sets().values()))
        with self._timed("speed"):
            found = speed.speed(self.target, self.draft, prompts, config, self._survival())
        self._write("speed.json", found)
        self.say(speed.speed_table(found))
        return found

    def calibrate(self) -> dict[str, Any]:
        """Calibrate the draft's confidences on held-out prompts; the result is stored with the draft."""
        config: EvalConfig = self.recipe.eval
        prompts, _ = next(iter(self._prompt_sets().values()))
        prompts, num = prompts[: config.calibrate_prompts], config.num_proposals(self.draft)
        with self._progress("calibrate", len(prompts) * config.max_new_tokens, "tokens") as advance:
            found = schedule.calibrate_draft(
                self.target,
                self.draft,
                prompts,
                num,
                config.sampler(),
                config.max_new_tokens,
                config.batch_size,
                advance,
            )
        path = schedule.write_calibration(self.draft_folder(), found, certify.tensors_sha256(self.draft))
        self.out.mkdir(parents=True, exist_ok=True)
        schedule.reliability_figure(found).savefig(self.out / "calibration.svg", metadata={"Date": None})
        self.say(schedule.calibration_table(found))
        if found["num_rounds"] < schedule.FEW_ROUNDS:
            self.say(
                f"[yellow]{found['num_rounds']} rounds are too few to trust these temperatures; give more prompts "
                f"(eval.calibrate_prompts, at least {schedule.FEW_ROUNDS} rounds)[/yellow]"
            )
        self.say(f"calibrated {path}; figure {self.out / 'calibration.svg'}")
        return found

    def _schedule(self) -> Schedule | None:
        """What eval.schedule asks for, from the draft's calibration and the measured pass times."""
        config: EvalConfig = self.recipe.eval
        if config.schedule == "none":
            return None
        calibration = schedule.read_calibration(self.draft_folder(), certify.tensors_sha256(self.draft))
        if calibration is None:
            self.say("[yellow]the draft has no calibration.json; its confidences are taken as they are[/yellow]")
        return schedule.schedule_of(config, calibration, report.read_json(self.out / "speed.json"))

    def _has_draft(self) -> bool:
        return self.given_draft is not None or read_best(self.out) is not None or latest(self.out) is not None

    def _survival(self) -> list[float] | None:
        found = report.read_json(self.out / "acceptance-runtime.json")
        return found["survival"] if found else None

    def _write(self, name: str, value: Any) -> None:
        if self.rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            temporary = self.out / f"{name}.tmp"
            temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
            temporary.replace(self.out / name)

    # -- use ---------------------------------------------------------------------------------------------------------
    def generate(self, prompt: str, num: int | None, temperature: float, max_new_tokens: int, raw: bool) -> None:
        from rich.text import Text

        from draftsmith.eval.runtime import decode
        from draftsmith.models.sampling import Sampler

        tokenizer = self.target.tokenizer
        if raw:
            ids = tokenizer(prompt)["input_ids"]
        else:
            template = Template(tokenizer, ChatConfig())
            ids = template.encode(template.text([{"role": "user", "content": prompt}], None, prompt=True))
        sampler = Sampler(temperature, generator=torch.Generator().manual_seed(0))
        num = num or self.recipe.eval.num_proposals(self.draft)
        shown = ""
        seen: list[int] = []

        def stream(_: int, tokens: list[int], num_accepted: int) -> None:
            nonlocal shown
            for i, token in enumerate(tokens):
                seen.append(token)
                text = str(tokenizer.decode(seen, skip_special_tokens=True))
                if text.endswith("\ufffd"):  # a character is not complete yet
                    continue
                self.console.print(Text(text[len(shown) :], style="green" if i < num_accepted else ""), end="")
                shown = text

        start = time.perf_counter()
        [found] = decode(
            self.target,
            self.draft,
            [ids],
            num,
            sampler,
            max_new_tokens,
            stop_ids=self.target.spec.eos_ids,
            on_commit=stream,
        )
        seconds = time.perf_counter() - start
        rounds = len(found.rounds)
        accepted = sum(a for _, a in found.rounds)
        length = 1 + accepted / rounds if rounds else 1.0
        self.console.print(
            f"\n[dim]{len(found.ids)} tokens in {seconds:.1f} s ({len(found.ids) / seconds:.1f} tok/s); {rounds} rounds, "
            f"acceptance length {length:.2f}; green = proposed by the draft and accepted[/dim]"
        )

    def export(self, layout: export.Format = "plain", force: bool = False) -> Path:
        draft, spec = self.draft, self.target.spec
        out = self.out / "export"
        num = self.recipe.eval.num_proposals(draft)
        published = self.recipe.target.published_name
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            export.write(
                draft,
                spec,
                out,
                format=layout,
                num_speculative_tokens=num,
                published_name=published,
                force=force,
            )
        for warning in noted:
            self.say(f"[yellow]{warning.message}[/yellow]")
        prompt = next(iter(self._prompt_sets().values()))[0][0]
        difference = export.compare(draft, out, self.target, prompt, num)
        if difference is not None:
            raise RuntimeError(f"{out}: training, runtime and export disagree: {difference}; do not serve it")
        self.say(f"export    {out}, read back and equal; serve it with\n  {self.serve_command()}")
        return out

    def _release_config(self) -> ReleaseConfig:
        return self.recipe.release if "release" in self.recipe.sections else ReleaseConfig()

    def release(
        self,
        push: str | None = None,
        private: bool = False,
        revision: str | None = None,
        create_pr: bool = False,
        license: str | None = None,
        overwrite_card: bool = False,
    ) -> dict[str, Any]:
        """Gate, export and card; with `push` also the upload, else the dry run."""
        self._one_process("release")
        if push is None and (private or revision is not None or create_pr):
            raise ValueError("--private, --revision and --pr have no effect without --push ORG/NAME")
        found = release(
            self.out,
            self.draft,
            self.target.spec,
            self.recipe,
            draft_folder=self.draft_folder(),
            license=license,
            repo_id=push,
            overwrite_card=overwrite_card,
        )
        result = {
            "folder": str(found.folder),
            "base_model": found.base_model,
            "files": found.files,
            "card": found.card,
            "notes": list(found.notes),
            "pushed": None,
        }
        self.console.print(found.card, markup=False, soft_wrap=True)
        for name, size in found.files.items():
            self.say(f"  {planning.human_bytes(size):>10}  {found.folder / name}")
        for note in found.notes:
            self.say(f"[yellow]{note}[/yellow]")
        if push is None:
            self.say("dry run: nothing was sent; add --push ORG/NAME to upload these files")
            return result
        length = report.read_json(self.out / "acceptance-runtime.json")["acceptance_length"]
        pushed = hub.push(
            found.folder,
            push,
            message=f"{self.recipe.name}: acceptance length {length:.2f}",
            base_model=found.base_model,
            private=private or None,
            revision=revision,
            create_pr=create_pr,
        )
        self.say(f"pushed    {pushed.pull_request or pushed.url} (commit {pushed.commit[:12]})")
        return result | {"pushed": pushed._asdict()}

    def serve_command(self) -> str:
        """The command for the very target that was measured: its local files where it has some, else its Hub id."""
        return export.serve_command(self.out / "export", str(self.target.folder or self.recipe.target.name))

    def serve(self, start: bool = False) -> None:
        command = self.serve_command()
        if not start:
            print(command)
            return
        sys.exit(subprocess.call(command, shell=True))

    def report(self) -> Path:
        recipe_file = self.out / "recipe.yaml"
        text = recipe_file.read_text(encoding="utf-8") if recipe_file.is_file() else ""
        serve = self.serve_command() if (self.out / "export").is_dir() else ""
        path = report.write_report(self.out, serve=serve, recipe_text=text)
        self.say(report.terminal_table(self.out))
        self.say(f"report    {path}")
        return path

    def run(self) -> dict[str, Any]:
        """Every stage that is not done yet."""
        self._one_process("run")
        start = time.perf_counter()
        if self.recipe.not_run:
            self.say(f"[yellow]{self.recipe.name}: this recipe was not run by us yet[/yellow]")
        if self._as_it_came:
            self.accept()
        self.train()
        draft = str(self.draft_folder())
        results = self._once("acceptance-runtime.json", draft, self.accept)
        certificate = self._once("certificate.json", draft, self.certify)
        fast = self._once("speed.json", draft, self.speed)
        self.export()
        self._note_surroundings(time.perf_counter() - start)
        self.report()
        self.say(f"[dim]all stages took {time.perf_counter() - start:.0f} s[/dim]")
        if not certificate["passed"]:
            raise RuntimeError(f"{self.out}/certificate.json: the certificate failed; do not ship this draft")
        return {"acceptance": results, "certificate": certificate, "speed": fast, "run": str(self.out)}

    def _once(self, name: str, draft: str, stage: Callable[[], Any]) -> Any:
        """The stage's result; measured again only when the draft or the settings changed."""
        key = {"draft": draft, "eval": self.recipe.eval.model_dump(mode="json")}
        marks = report.read_json(self.out / "measured.json") or {}
        if marks.get(name) == key and (self.out / name).is_file():
            self.say(f"{name} is done")
            return report.read_json(self.out / name)
        found = stage()
        self._write("measured.json", marks | {name: key})
        return found

    def _note_surroundings(self, seconds: float) -> None:
        path = self.out / "provenance.json"
        known = report.read_json(path) or {}
        known |= {
            "target": self.recipe.target.name,
            "family": self.recipe.draft.family,
            "hardware": f"{hardware()}, {torch.get_num_threads()} threads",
            "last_run_seconds": round(seconds, 1),
        }
        self._write("provenance.json", known)

    # -- looking -----------------------------------------------------------------------------------------------------
    def inspect(self, index: int) -> None:
        rows = self.rows("train")
        if not 0 <= index < len(rows):
            raise ValueError(f"--row {index}: there are rows 0..{len(rows) - 1}")
        row = rows[index]
        self.say(show_row(row, self.target.tokenizer))
        self.say(
            f"[dim]row {index} of {len(rows)}: id {row.id}, kind {row.kind}, {len(row.input_ids)} tokens, {row.num_supervised} supervised[/dim]"
        )
        key = self._row_key(self.recipe.data.train)
        counts = stage_counts(stage_dir(CACHE, "rows", key)) or {}
        if counts.get("dropped"):
            tally = Tally(chats=counts["chats"], rows=counts["rows"])
            tally.reasons.update(counts["dropped"])
            self.say(drop_table(tally))

    def plan(self) -> dict[str, Any]:
        data: DataConfig = self.recipe.data
        config: TrainConfig = self.recipe.train
        draft = self._untrained
        counts = stage_counts(stage_dir(CACHE, "rows", self._row_key(data.train)))
        if counts is not None:
            num_prompts, answer_tokens, all_tokens = counts["rows"], counts["supervised"], counts["tokens"]
        else:
            num_prompts = sum(1 for source in data.train for _ in read_chats(source))
            longest = data.regenerate.max_new_tokens if data.regenerate else data.max_len // 2
            answer_tokens = int(0.75 * longest * num_prompts)
            all_tokens = answer_tokens + 60 * num_prompts
        work = planning.Work(
            num_prompts=num_prompts,
            answer_tokens=answer_tokens,
            all_tokens=all_tokens,
            estimated=counts is None,
            regenerates=data.regenerate is not None,
            keeps_features=data.source == "cache",
            feature_dtype=data.capture.dtype,
            num_steps=config.steps,
            batch_tokens=config.batch_tokens,
        )
        rate = planning.matmul_rate(self.target.device, self.target.dtype)
        measured = report.read_json(self.out / "acceptance-runtime.json")
        length = measured["acceptance_length"] if measured else None
        dtype = str(self.target.dtype).removeprefix("torch.")
        found = planning.plan(work, self.target.spec, draft, rate, dtype, length)
        title = f"plan of {self.recipe.name}" + (" (this recipe was not run by us yet)" if self.recipe.not_run else "")
        self.say(planning.plan_table(found, title))
        return found


def draft_in(folder: Path) -> Path:
    """The draft that a folder stands for: of a run its best step, else its last; of a step its own; else the folder."""
    best, last = read_best(folder), latest(folder)
    if best is not None:
        return folder / f"step-{best.step}" / "draft"
    if last is not None:
        return last.draft
    return folder / "draft" if (folder / "draft" / DRAFT_JSON).is_file() else folder


def hardware() -> str:
    """The processor or GPU, in the words of its maker."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
