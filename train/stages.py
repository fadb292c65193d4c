"""The verbs of a recipe, in order, each done once: training, acceptance, proof, speed, export, release, report.

Everything of one run stands in runs/NAME/. The command line (train/cli.py) calls one method a verb; what the verbs
work with is made in train/material.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.data import server_capture
from draftsmith.data.batches import Ahead, BatchSource, DataConfig, target_mass, token_stats
from draftsmith.data.capture import checksum
from draftsmith.data.chat import (
    ChatConfig,
    Dropped,
    Row,
    Source,
    Tally,
    Template,
    drop_table,
    read_chats,
    show_row,
)
from draftsmith.eval import acceptance, certify, exact, hub, report, schedule, speed
from draftsmith.eval import plan as planning
from draftsmith.eval.acceptance import EvalConfig
from draftsmith.eval.card import ReleaseConfig
from draftsmith.eval.release import release
from draftsmith.eval.runtime import Schedule
from draftsmith.models import export, warm
from draftsmith.models.draft import Draft
from draftsmith.models.target import Target
from draftsmith.train.checkpoint import latest
from draftsmith.train.loop import TrainConfig, train
from draftsmith.train.material import Material, draft_in


class Stages(Material):
    """The verbs; every method does a stage if it is not done yet."""

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
                captures=data.source == "live",
                stderr=self.console.stderr,
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
                suffix += report.BEFORE_TRAINING
            self._write(f"acceptance-{found['method']}{suffix}.json", found)
            results[name] = found
            if advice:
                self.say(f"[yellow]at batch {config.batch_size}: {advice}[/yellow]")
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

    def target_command(self) -> str:
        """The command of the server that `data.capture.server` asks for states; loads no layers of the target."""
        if "data" not in self.recipe.sections or "draft" not in self.recipe.sections:
            raise ValueError("--target-only takes the layers from a recipe; give one instead of --target and --draft")
        data: DataConfig = self.recipe.data
        ends = self.recipe.target.model_copy(update={"ends_only": True, "device": "cpu"})
        self.__dict__["target"] = Target.load(ends)  # embedding, norm and head are all the layer ids need
        return server_capture.shell(
            server_capture.serve_command(self.target, self._untrained.needs, data.capture, data.max_len)
        )

    def serve(self, start: bool = False, target_only: bool = False) -> None:
        command = self.target_command() if target_only else self.serve_command()
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
        self._once("acceptance-runtime.json", draft, self.accept)
        certificate = self._once("certificate.json", draft, self.certify)
        fast = self._once("speed.json", draft, self.speed)
        self.export()
        self._note_surroundings(time.perf_counter() - start)
        self.report()
        self.say(f"[dim]all stages took {time.perf_counter() - start:.0f} s[/dim]")
        if not certificate["passed"]:
            raise RuntimeError(f"{self.out}/certificate.json: the certificate failed; do not ship this draft")
        return {
            "acceptance": report.acceptance_files(self.out),
            "certificate": certificate,
            "speed": fast,
            "run": str(self.out),
        }

    def _once(self, name: str, draft: str, stage: Callable[[], Any]) -> Any:
        """The stage's result; measured again when the draft, the settings or the file itself changed since."""
        settings = {"draft": draft, "eval": self.recipe.eval.model_dump(mode="json"), "prompts": self.prompts}
        marks = report.read_json(self.out / "measured.json") or {}
        path = self.out / name
        if path.is_file() and marks.get(name) == settings | {"sha256": file_sha256(path)}:
            self.say(f"{name} is done")
            return report.read_json(path)
        found = stage()
        self._write("measured.json", marks | {name: settings | {"sha256": file_sha256(path)}})
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
        counts = self.row_counts("train") or {}
        if counts.get("dropped"):
            tally = Tally(chats=counts["chats"], rows=counts["rows"])
            tally.reasons.update(counts["dropped"])
            self.say(drop_table(tally))

    def plan(self) -> dict[str, Any]:
        data: DataConfig = self.recipe.data
        config: TrainConfig = self.recipe.train
        draft = self._untrained
        counts = self.row_counts("train")
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
            kv_numbers=sum(2 * math.prod(self.target.kv_shape(k)) for k in draft.needs.target_kv_layers),
        )
        rate = planning.matmul_rate(self.target.device, self.target.dtype)
        measured = report.read_json(self.out / "acceptance-runtime.json")
        length = measured["acceptance_length"] if measured else None
        dtype = str(self.target.dtype).removeprefix("torch.")
        found = planning.plan(work, self.target.spec, draft, rate, dtype, length)
        title = f"plan of {self.recipe.name}" + (" (this recipe was not run by us yet)" if self.recipe.not_run else "")
        self.say(planning.plan_table(found, title))
        return found


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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
