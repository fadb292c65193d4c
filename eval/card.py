"""The model card of a draft: front matter for the Hub, and what a user of the draft has to know.

Everything comes from the recipe, the run's files and the draft; nothing is measured and nothing is guessed here: what is
not known is left out. `seal` closes a generated card with its own hash, by which a later release knows whether somebody
edited it since.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, model_validator

from draftsmith.eval.report import proof_lines, read_json
from draftsmith.models import export
from draftsmith.models.draft import Draft, TargetSpec
from draftsmith.recipes import Recipe

CARD, PROVENANCE, RECIPE = "README.md", "provenance.json", "recipe.yaml"
PLACEHOLDER = "ORG/NAME"  # stands in a card for the repository that it was not pushed to yet
METHODS = {
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "mtp": "Multi-token-prediction",
    "gemma4_mtp": "Gemma 4 multi-token-prediction",
}


class ReleaseConfig(BaseModel):
    """The recipe's `release:` section: what a card must say and nobody but the author can know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    license: str | None = None
    """Licence id as the Hub writes it (apache-2.0, mit, other, ...); never guessed: it follows from target and data."""
    license_name: str | None = None
    """Name of a licence that is `other`."""
    license_link: str | None = None
    """Where the text of a licence that is `other` stands."""
    language: tuple[str, ...] = ()
    """Language codes of the training data (en, de, ...); empty = the card says nothing."""
    tags: tuple[str, ...] = ()
    """Tags of the card beside those of the method."""
    format: Literal["plain", "speculators"] = "plain"
    """Layout of config.json: plain is what --speculative-config takes; speculators names its target itself."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the exported tensors; servers run drafts in the target's precision."""

    @model_validator(mode="after")
    def _other_licences_are_named(self) -> ReleaseConfig:
        named = self.license_name is not None and self.license_link is not None
        if self.license == "other" and not named:
            raise ValueError("license: other needs license_name and license_link, so that readers know which one it is")
        if self.license != "other" and (self.license_name or self.license_link):
            raise ValueError("license_name and license_link belong to license: other; remove them or set it")
        return self


@dataclass(frozen=True)
class Evidence:
    """What the run has proven, by the names of its files; and who the draft is."""

    target: str
    num: int
    draft_sha256: str
    acceptance: dict[str, dict[str, Any]]
    certificate: dict[str, Any]


def model_card(
    folder: Path,
    run: Path,
    draft: Draft,
    target: TargetSpec,
    recipe: Recipe,
    config: ReleaseConfig,
    evidence: Evidence,
    repo_id: str | None,
) -> str:
    """README.md: front matter for the Hub, then what a user of the draft has to know. folder: the export."""
    import jinja2

    family = draft.config.family
    serve = export.serve_command(folder, evidence.target, served_as=repo_id or PLACEHOLDER)
    title = (repo_id or f"{evidence.target}-{family}").rpartition("/")[2]
    known = read_json(run / PROVENANCE) or {}
    source = (Path(__file__).parent / "card.md.j2").read_text(encoding="utf-8")
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined).from_string(
        source
    )
    body = template.render(
        title=title,
        kind=METHODS.get(family, family),
        target=evidence.target,
        mode=mode(recipe),
        serve=serve,
        serve_note=_serve_note(evidence.num, config.format, repo_id),
        tables=[_table(stem, found) for stem, found in evidence.acceptance.items()],
        measured=list(_measured_lines(evidence, recipe)),
        data=list(_data_lines(recipe)),
        training=list(_training_lines(draft, recipe, known)),
        commands=_commands(recipe, evidence.target),
        draft_sha256=evidence.draft_sha256,
        dtype=config.dtype,
        proof=proof_lines(evidence.certificate),
        limits=list(_limit_lines(evidence, recipe, draft, target)),
    )
    body = re.sub(r"\n{3,}", "\n\n", body).strip() + "\n"
    head = yaml.safe_dump(front_matter(recipe, config, family, evidence.target), sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n{body}"


def front_matter(recipe: Recipe, config: ReleaseConfig, family: str, target: str) -> dict[str, Any]:
    """The card's metadata; what is not known is left out. The Hub has no relation for drafts, so none is named."""
    tags = ["speculative-decoding", "draft-model", "vllm", family.replace("_", "-"), "draftsmith"]
    if config.format == "speculators":
        tags.append("speculators")
    head: dict[str, Any] = {"license": config.license}
    if config.license == "other":
        head |= {"license_name": config.license_name, "license_link": config.license_link}
    head |= {
        "library_name": "speculators" if config.format == "speculators" else "vllm",
        "base_model": [target],
        "pipeline_tag": "text-generation",
        "tags": [*tags, *(tag for tag in config.tags if tag not in tags)],
    }
    if config.language:
        head["language"] = list(config.language)
    if datasets := _hub_datasets(recipe):
        head["datasets"] = datasets
    return head


def _hub_datasets(recipe: Recipe) -> list[str]:
    """Hub ids of the training data, in order; local files and shipped prompts have none."""
    paths = [source.path for source in recipe.data.train]
    return list(dict.fromkeys(path for path in paths if "/" in path and export.is_hub_id(path) and not _is_file(path)))


def _is_file(path: str) -> bool:
    return Path(path).suffix in (".jsonl", ".json", ".parquet")


def mode(recipe: Recipe) -> str:
    """Which of the target's modes the draft was made for, from the arguments of its chat template."""
    arguments: dict[str, Any] = recipe.data.chat.template_kwargs
    thinking = next((bool(arguments[name]) for name in ("enable_thinking", "thinking") if name in arguments), None)
    shown = ", ".join(f"{name}={value!r}" for name, value in sorted(arguments.items()))
    if thinking is None:
        return f"in the chat template's default mode{f' with {shown}' if shown else ''}"
    return f"made for answers with thinking {'on' if thinking else 'off'} (chat template: {shown})"


def _serve_note(num: int, layout: str, repo_id: str | None) -> str:
    note = f"K = {num} proposed tokens a round (`num_speculative_tokens`) is what was measured below."
    if layout == "speculators":
        note += f" The config names the target, so `vllm serve {repo_id or PLACEHOLDER}` alone starts both."
    return note


def _table(stem: str, found: Mapping[str, Any]) -> dict[str, Any]:
    method = found["method"]
    prompt_set = stem.removeprefix(f"acceptance-{method}").lstrip("-") or "held-out prompts"
    how = "greedy" if found["temperature"] == 0 else _sampling(found)
    note = f"{_METHOD_WORDS[method]}; K = {found['num_speculative_tokens']}, {how}, at most {found['max_new_tokens']} new tokens"
    slots = [f"slot {k}" for k in range(1, len(found["survival"]) + 1)]
    rows = [
        [
            kind,
            f"{part['num_prompts']}",
            f"{part['num_rounds']:.0f}",
            f"{part['acceptance_length']:.2f}",
            *(f"{s:.2f} ({c:.2f})" for s, c in zip(part["survival"], part["conditional"], strict=True)),
        ]
        for kind, part in (("all", found), *sorted(found["by_kind"].items()))
    ]
    return {
        "title": f"{prompt_set}: acceptance length {found['acceptance_length']:.2f}",
        "note": note,
        "rule": ["---", *["---:"] * (3 + len(slots))],
        "head": ["prompt kind", "prompts", "rounds", "acceptance length", *slots],
        "rows": rows,
    }


_METHOD_WORDS = {
    "runtime": "decoded with the target in draftsmith's runtime",
    "exact": "expected value on the target's own answers, without decoding",
    "served": "counters of a vLLM server",
}


def measured_target(name: str) -> str:
    """What may be told of the target that was really used: the name of a GGUF file, but not that of a folder."""
    if name.endswith(".gguf"):
        return f"`{last_part(name)}`"
    return "a local copy" if Path(name).exists() or Path(name).is_absolute() else f"`{name}`"


def _sampling(values: Mapping[str, Any]) -> str:
    parts = [f"temperature {values['temperature']:g}"]
    parts += [f"top_k {values['top_k']}"] if values.get("top_k") else []
    parts += [f"top_p {values['top_p']:g}"] if values.get("top_p", 1.0) < 1 else []
    return ", ".join(parts)


def _measured_lines(evidence: Evidence, recipe: Recipe) -> Iterator[str]:
    found = evidence.acceptance["acceptance-runtime"]
    yield (
        f"Method: {found['num_prompts']} prompts, {found['num_tokens']} new tokens, {found['num_rounds']:.0f} rounds, "
        f"{found['num_proposed']:.0f} proposals, {found['num_accepted']:.0f} accepted; accepted proposals are counted before "
        f"a stop rule cuts the text, as vLLM counts."
    )
    yield f"Measured with {measured_target(recipe.target.name)} as the target, {mode(recipe)}; first answer of each chat."
    bar = recipe.eval.bar
    yield (
        f"The release demanded an acceptance length of {bar:g}." if bar else "No minimum was demanded for the release."
    )


def _data_lines(recipe: Recipe) -> Iterator[str]:
    data = recipe.data
    for source in data.train:
        parts = [_source_words(source.path)]
        parts += [f"split {source.split}"] if source.split else []
        parts += [f"revision {source.revision}"] if source.revision else []
        parts += [f"the first {source.limit} chats"] if source.limit else []
        yield f"Prompts: {', '.join(parts)}."
    made = data.regenerate
    if made is None:
        yield "Answers: those in the data; they were not made by the target."
    else:
        how = "greedy" if made.temperature == 0 else _sampling(made.model_dump())
        by = "by a server" if made.server else "in process"
        yield f"Answers: the target's own, regenerated {by}, {how}, at most {made.max_new_tokens} tokens each."
    for name, source in data.evaluation.items():
        yield f"Held out for measurements as `{name}`: {_source_words(source.path)}."
    yield f"Rows of at most {data.max_len} tokens; the loss covers what the assistant said, end of turn included."


def _source_words(path: str) -> str:
    if path.startswith("shipped:"):
        return f"`{path.removeprefix('shipped:')}`, which draftsmith ships"
    if not _is_file(path) and "/" in path and export.is_hub_id(path):
        return f"[{path}](https://huggingface.co/datasets/{path})"
    return f"a local file (`{last_part(path)}`) that is not published here"


def _training_lines(draft: Draft, recipe: Recipe, known: Mapping[str, Any]) -> Iterator[str]:
    trained = sum(p.numel() for p in draft.parameters())
    train = recipe.train
    yield f"{METHODS.get(draft.config.family, draft.config.family)}, {trained:,} trained parameters; recipe `{recipe.name}`."
    yield f"{train.steps} optimizer steps of {train.batch_tokens:,} tokens, {train.optimizer}, precision {train.precision}."
    if known.get("hardware"):
        seconds = known.get("last_run_seconds")
        yield f"Hardware: {known['hardware']}{f'; all stages together {seconds:.0f} s' if seconds else ''}."
    else:
        yield "Hardware: not recorded."
    if versions := known.get("versions"):
        yield "Versions: " + ", ".join(f"{name} {number}" for name, number in sorted(versions.items())) + "."


def _commands(recipe: Recipe, target: str) -> list[str]:
    """The stages, one a line, from the recipe that lies beside the card."""
    data = recipe.data
    verbs = ["regenerate"] if data.regenerate else []
    verbs += ["capture"] if data.source == "cache" else []
    lines = [f"draftsmith {verb} {RECIPE}" for verb in (*verbs, "train", "accept", "certify", "release")]
    if data.regenerate and data.regenerate.server:
        return [f"vllm serve {target}  # answers the prompts; give its address as data.regenerate.server", *lines]
    return lines


def _limit_lines(evidence: Evidence, recipe: Recipe, draft: Draft, target: TargetSpec) -> Iterator[str]:
    name = recipe.target.name
    if name.endswith(".gguf"):
        yield (
            f"The target that answered, was captured and verified here is {measured_target(name)}, a quantised copy. That is "
            f"another model than {evidence.target}: with {evidence.target} itself nothing was measured."
        )
    elif name != evidence.target:
        yield (
            f"The target here was {measured_target(name)}, published as {evidence.target}; if the two differ, acceptance does, "
            f"too. Its config has sha256 {target.config_sha256[:16]}."
        )
    if recipe.not_run:
        yield f"The header of the recipe `{recipe.name}` says that its settings were not run by those who wrote it."
    yield (
        "Acceptance depends on prompts, language, sampling and mode; the tables hold for the prompts described above and "
        "say nothing about other ones. Speed depends on hardware, batch size and K."
    )
    if "acceptance-served" not in evidence.acceptance:
        yield "Measured in draftsmith's runtime; no server was measured."
    if not any(found["temperature"] > 0 for found in evidence.acceptance.values()):
        yield "Measured greedily; sampled answers accept fewer proposals."
    yield f"Contexts of more than {recipe.data.max_len} tokens did not occur in training."
    if getattr(draft.config, "draft_vocab", None):
        yield f"The draft proposes from {draft.config.draft_vocab:,} of {target.vocab_size:,} tokens."  # type: ignore[attr-defined]


def last_part(path: str) -> str:
    """The name behind the last slash: what may be told of a local path."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1].lstrip("~")


# -- a card that was edited ------------------------------------------------------------------------------------------------


def seal(card: str) -> str:
    """The card with its own hash as the last line, by which `is_generated` knows it again."""
    return f"{card}\n<!-- draftsmith {_digest(card)} -->\n"


def is_generated(card: str) -> bool:
    """Whether the card is just as `seal` left it."""
    body, _, mark = card.rpartition("\n<!-- draftsmith ")
    return mark == f"{_digest(body)} -->\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
