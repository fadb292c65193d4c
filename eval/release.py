"""Release: only a draft that is proven and meets its bar is exported, described and, when asked, pushed.

    gate     acceptance (runtime, of these tensors, at the K that is served) against the recipe's bar; the certificate of
             these tensors, passed; finite weights; the target has a public name; a licence was given
    export   models/export.py into a staging folder, loaded again and compared
    describe README.md (the model card), provenance.json, certificate.json, recipe.yaml, calibration.json if there is one
    inspect  no secret, no absolute path, no user or host name in anything that would be published
    swap     the staging folder takes the place of runs/NAME/export: complete or as before

Everything that is missing is said at once. Pushing (eval/hub.py) is a step of its own; without it all this is the dry
run. A card that somebody edited is kept: the last line of a generated one holds its hash.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from draftsmith.eval import hub
from draftsmith.eval.card import (
    CARD,
    PROVENANCE,
    RECIPE,
    Evidence,
    ReleaseConfig,
    is_generated,
    last_part,
    measured_target,
    model_card,
    seal,
)
from draftsmith.eval.certify import tensors_sha256
from draftsmith.eval.report import BEFORE_TRAINING, acceptance_files, proof_lines, read_json
from draftsmith.eval.schedule import CALIBRATION
from draftsmith.models import export
from draftsmith.models.draft import Draft, TargetSpec
from draftsmith.recipes import Recipe

CERTIFICATE = "certificate.json"


class NotReady(ValueError):
    """A draft that may not be released yet; says everything that is missing."""


@dataclass(frozen=True)
class Released:
    """A finished export. files: name and bytes of what a push uploads. notes: what the author should know about it."""

    folder: Path
    files: dict[str, int]
    card: str
    base_model: str
    notes: tuple[str, ...] = ()


def release(
    run: Path,
    draft: Draft,
    target: TargetSpec,
    recipe: Recipe,
    *,
    draft_folder: Path | None = None,
    license: str | None = None,
    repo_id: str | None = None,
    overwrite_card: bool = False,
) -> Released:
    """Gate, export and describe the draft of a run into run/export; see hub.push for the upload.

    draft: the one that accept and certify worked with. draft_folder: where it was read from (its calibration is there).
    license: overrides the recipe's. repo_id: where it will be pushed to; None leaves a placeholder in the card.
    overwrite_card: replace a README.md that was edited by hand.
    """
    config: ReleaseConfig = recipe.release
    if license is not None:
        config = ReleaseConfig(**{**config.model_dump(), "license": license})
    if repo_id is not None:
        hub.check_repo_id(repo_id)
    out, staging = run / "export", run / "release.tmp"
    export.refuse_foreign(out)
    evidence = gate(run, draft, target, recipe, config)
    try:
        _clear(staging)
        export.write(
            draft,
            target,
            staging,
            format=config.format,
            dtype=config.dtype,
            num_speculative_tokens=evidence.num,
            published_name=evidence.target,
        )
        export_sha256 = read_back(staging, draft, target, config.dtype)
        _write_json(staging / CERTIFICATE, public(evidence.certificate | {"target": evidence.target}))
        _write_calibration(staging, draft_folder, evidence.draft_sha256, export_sha256)
        (staging / RECIPE).write_text(recipe_text(recipe, config, evidence.target), encoding="utf-8")
        _write_json(staging / PROVENANCE, provenance(run, draft, target, recipe, config, evidence, export_sha256))
        card = seal(model_card(staging, run, draft, target, recipe, config, evidence, repo_id))
        notes: tuple[str, ...] = ()
        if not overwrite_card and (edited := edited_card(out)) is not None:
            card, notes = edited, tuple(_notes_on_kept(edited, out, evidence))
        (staging / CARD).write_text(card, encoding="utf-8")
        hub.refuse_private(staging, allowed=[evidence.target, *([repo_id] if repo_id else [])])
        export.replace_folder(staging, out)
    finally:
        _clear(staging)
    sizes = {path.name: path.stat().st_size for path in hub.files(out)}
    return Released(out, sizes, card, evidence.target, notes)


def edited_card(folder: Path) -> str | None:
    """The README.md of a folder, if it is not as it was generated; None when it is, or there is none."""
    path = folder / CARD
    text = path.read_text(encoding="utf-8") if path.is_file() else None
    return None if text is None or is_generated(text) else text


def _notes_on_kept(card: str, out: Path, evidence: Evidence) -> Iterator[str]:
    yield f"{out / CARD} was edited by hand and is kept as it is; --overwrite-card writes it anew"
    if evidence.draft_sha256[:16] not in card:
        yield (
            f"that {CARD} does not name the tensors of this draft (sha256 {evidence.draft_sha256[:16]}...): its numbers may "
            f"be those of another draft"
        )


# -- gate ----------------------------------------------------------------------------------------------------------------


def gate(run: Path, draft: Draft, target: TargetSpec, recipe: Recipe, config: ReleaseConfig) -> Evidence:
    """What stands in the run's files, when all of it holds; else NotReady with every shortfall."""
    sha256 = tensors_sha256(draft)
    num = recipe.eval.num_proposals(draft)
    acceptance = acceptance_files(run)
    certificate = read_json(run / CERTIFICATE)
    name = public_name(target, recipe.target.published_name)
    faults = [
        *_public_faults(target, name),
        *_license_faults(config),
        *_weight_faults(draft),
        *_acceptance_faults(run, acceptance.get("acceptance-runtime"), recipe, num, sha256),
        *_certificate_faults(run, certificate, target, sha256),
    ]
    if faults:
        raise NotReady(f"{run}: not ready for a release:\n" + "\n".join(f"  - {fault}" for fault in faults))
    fresh = {
        stem: found
        for stem, found in acceptance.items()
        if (found.get("draft_sha256") == sha256 or stem.endswith(BEFORE_TRAINING)) and not found.get("schedule")
    }
    assert name is not None
    return Evidence(name, num, sha256, fresh, certificate)


def public_name(target: TargetSpec, published_name: str | None) -> str | None:
    """The Hub id that the target goes by in public, None when there is none."""
    name = published_name or target.name
    return name if export.is_hub_id(name) else None


def _public_faults(target: TargetSpec, name: str | None) -> Iterator[str]:
    if name is None:
        yield (
            f"the target {_short(target.name)!r} has no public name, so nobody else could serve the draft; set "
            f"target.published_name to its Hub id"
        )


def _license_faults(config: ReleaseConfig) -> Iterator[str]:
    if config.license is None:
        yield (
            "no licence was given, and none is invented: it follows from those of the target and of the data; give "
            "--license ID (apache-2.0, mit, ...) or set release.license"
        )
    elif not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", config.license):
        yield f"licence {config.license!r} is not an id of the Hub; those are lower case, such as apache-2.0 or mit"


def _weight_faults(draft: Draft) -> Iterator[str]:
    for name, tensor in draft.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            yield f"{name}: {bad} of {tensor.numel()} values are NaN or infinite; release an earlier step"


def _acceptance_faults(
    run: Path, found: Mapping[str, Any] | None, recipe: Recipe, num: int, sha256: str
) -> Iterator[str]:
    where, bar = run / "acceptance-runtime.json", recipe.eval.bar
    verb = "accept" if recipe.eval.schedule == "none" else "accept` with `eval.schedule=none"
    if found is None:
        yield f"{where} is missing: run `draftsmith {verb}` first"
        return
    length, measured = found["acceptance_length"], found["num_speculative_tokens"]
    if bar is not None and not length >= bar:
        yield (
            f"acceptance length {length:.3f} is {bar - length:.3f} below the recipe's bar of {bar:g} (K={measured}, "
            f"{where}); train on, or lower eval.bar"
        )
    if measured != num:
        yield f"{where} was measured with K={measured}, the export would serve K={num}; run `draftsmith {verb}` again"
    yield from _unscheduled(where, found)
    yield from _stale(where, found.get("draft_sha256"), sha256, verb)


def _unscheduled(where: Path, found: Mapping[str, Any]) -> Iterator[str]:
    if found.get("schedule"):
        yield (
            f"{where} was made with eval.schedule {found['schedule']}, servers verify every proposal; make it again with "
            f"eval.schedule=none"
        )


def _certificate_faults(run: Path, found: Mapping[str, Any] | None, target: TargetSpec, sha256: str) -> Iterator[str]:
    where = run / CERTIFICATE
    if found is None:
        yield f"{where} is missing: nothing proves that this draft is lossless; run `draftsmith certify` first"
        return
    if not found.get("passed"):
        yield f"{where} failed: {' '.join(proof_lines(found))}"
    name = target.name if target.revision is None else f"{target.name}@{target.revision}"
    if found.get("target") != name:
        yield f"{where} was made with the target {_short(str(found.get('target')))}, this one is {_short(name)}"
    yield from _unscheduled(where, found)
    yield from _stale(where, found.get("draft_sha256"), sha256, "certify")


def _stale(where: Path, found: str | None, sha256: str, verb: str) -> Iterator[str]:
    if found != sha256:
        of = "does not say for which tensors" if found is None else f"was made for other tensors ({found[:12]})"
        yield f"{where} {of}, this draft's are {sha256[:12]}; run `draftsmith {verb}` again"


def read_back(folder: Path, draft: Draft, target: TargetSpec, dtype: str) -> str:
    """Load the export as any user would and compare every tensor with the draft's; returns the loaded draft's hash."""
    loaded = export.load(folder, target)
    want, got = (_rounded(one.neutral()[1], export.DTYPES[dtype]) for one in (draft, loaded))
    name = export.first_difference(want, got)
    if name is not None:
        raise NotReady(f"{folder}: tensor {name} of the export reads back differently from the draft's")
    return tensors_sha256(loaded)


def _rounded(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: t.detach().cpu().to(dtype) if t.is_floating_point() else t.cpu() for n, t in tensors.items()}


# -- provenance ------------------------------------------------------------------------------------------------------------


def provenance(
    run: Path,
    draft: Draft,
    target: TargetSpec,
    recipe: Recipe,
    config: ReleaseConfig,
    evidence: Evidence,
    export_sha256: str,
) -> dict[str, Any]:
    """Where the export comes from: code, data, target and measurements, without paths and names of this machine."""
    known = read_json(run / PROVENANCE) or {}
    names = ("run_id", "time", "command", "versions", "git", "data", "resumed", "hardware", "last_run_seconds")
    return public(
        {
            "draftsmith": version("draftsmith"),
            "released": datetime.now(UTC).isoformat(timespec="seconds"),
            "family": draft.config.family,
            "recipe": recipe.name,
            "target": {
                "name": evidence.target,
                "measured_with": measured_target(recipe.target.name).strip("`"),
                "revision": target.revision,
                "config_sha256": target.config_sha256,
                "tokenizer_sha256": target.tokenizer_sha256,
            },
            "draft_sha256": evidence.draft_sha256,
            "export": {
                "format": config.format,
                "dtype": config.dtype,
                "num_speculative_tokens": evidence.num,
                "tensors_sha256": export_sha256,
            },
            "acceptance_length": {stem: found["acceptance_length"] for stem, found in evidence.acceptance.items()},
            "bar": recipe.eval.bar,
            "run": {name: known[name] for name in names if name in known},
        }
    )


def recipe_text(recipe: Recipe, config: ReleaseConfig, target: str) -> str:
    """The resolved recipe as YAML, ready to be read again, with the target's public name for a private path."""
    resolved = recipe.resolved() | {"release": config.model_dump(mode="json")}
    if Path(resolved["target"]["name"]).exists():
        resolved["target"] |= {"name": target, "published_name": None}
    return yaml.safe_dump(public(resolved), sort_keys=False, allow_unicode=True)


_LOCAL_PATH = re.compile(r"(?<![\w./:~-])(?:~/|[A-Za-z]:\\|/)[^\s'\",;]+")
_ADDRESS = re.compile(r"(https?://)(?:[\w.-]+:\d+|\d+(?:\.\d+){3}|[\w-]+(?=[/\s'\"]|$))")  # a port, a number, no domain


def public(value: Any) -> Any:
    """The same values with absolute paths cut to their last part and servers' names taken out."""
    if isinstance(value, Mapping):
        return {public(str(key)): public(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [public(part) for part in value]
    if isinstance(value, str):
        value = _ADDRESS.sub(r"\1SERVER", value)
        return _LOCAL_PATH.sub(lambda found: last_part(found[0]), value)
    return value


def _short(name: str) -> str:
    return name if len(name) <= 80 else "..." + name[-77:]


# -- files ---------------------------------------------------------------------------------------------------------------


def _write_calibration(folder: Path, draft_folder: Path | None, draft_sha256: str, export_sha256: str) -> None:
    """Copy the draft's calibration, if it has one for these tensors; the exported tensors' hash is noted in it."""
    found = None if draft_folder is None else read_json(draft_folder / CALIBRATION)
    if found is not None and found.get("draft_sha256") == draft_sha256:
        _write_json(folder / CALIBRATION, found | {"export_sha256": export_sha256})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _clear(folder: Path) -> None:
    """Remove a staging folder and what export.write left beside it; they are ours by name."""
    for place in (folder, folder.with_name(folder.name + ".tmp")):
        if place.is_dir():
            for path in place.iterdir():
                path.unlink()
            place.rmdir()
