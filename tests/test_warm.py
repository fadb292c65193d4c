"""Protects models/warm.py and what is built on it: a start equals the draft it starts from, nothing is taken in part,
and before and after stand in one table. Run: pytest tests/test_warm.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import LAYOUTS, foreign, initialised, proposal, target_of
from pydantic import ValidationError
from tiny import MASK, randomise_norms

from draftsmith.models import export, warm
from draftsmith.models.draft import Draft, family, save_draft
from draftsmith.models.target import Target
from draftsmith.train import cli
from draftsmith.train.loop import TrainConfig

BLOCK = {"layout": "infill", "block_len": 4, "num_layers": 2, "aux_layers": (1, 2, 4), "mask_token_id": MASK}
KEYS: dict[str, dict[str, Any]] = {
    "eagle3": {"aux_layers": (1, 2, 4)},
    "dflash": BLOCK,
    "dspark": BLOCK | {"markov_rank": 8},
}
REDUCED = {"head": "trainable", "draft_vocab": 64}


def draft_of(target: Target, name: str, seed: int = 0, **keys: Any) -> Draft:
    cls = family(name)
    draft = initialised(cls(cls.Config(**(KEYS[name] | keys)), target.spec), target)
    if seed:
        randomise_norms(draft, seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in draft.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return draft.eval()


def assert_proposes_alike(one: Draft, other: Draft, target: Target) -> None:
    for want, got in zip(proposal(one, target), proposal(other, target), strict=True):
        assert torch.equal(want, got)


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("qwen3")


# -- what is taken ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("keys", [{}, REDUCED], ids=["full", "reduced"])
@pytest.mark.parametrize("name", KEYS)
def test_a_draft_of_the_same_family_starts_as_the_given_one(target: Target, name: str, keys: dict[str, Any]) -> None:
    if name == "eagle3":
        keys = {k: v for k, v in keys.items() if k == "draft_vocab"}
    given, draft = draft_of(target, name, 1, **keys), draft_of(target, name, **keys)
    if keys:
        assert given.draft_vocab is not None
        given.draft_vocab.copy_(torch.arange(0, 192, 3))  # the vocabulary comes with its rows
    assert warm.take(draft, given, "somewhere") == []
    assert_proposes_alike(given, draft, target)


@pytest.mark.parametrize("keys", [{}, REDUCED], ids=["full", "reduced"])
def test_dspark_with_a_zero_markov_head_starts_as_the_dflash_draft(target: Target, keys: dict[str, Any]) -> None:
    given, draft = draft_of(target, "dflash", 1, **keys), draft_of(target, "dspark", **keys)
    fresh = warm.take(draft, given, "somewhere")
    assert fresh == [f"{h}_head.{n}" for h, n in (
        ("confidence", "proj.bias"), ("confidence", "proj.weight"),
        ("markov", "markov_w1.weight"), ("markov", "markov_w2.weight"),
    )]  # fmt: skip
    assert_proposes_alike(given, draft, target)


def test_a_trainable_head_starts_from_the_targets_rows_when_the_given_draft_has_none(target: Target) -> None:
    given, draft = draft_of(target, "dflash", 1), draft_of(target, "dflash", head="trainable")
    assert warm.take(draft, given, "somewhere") == ["lm_head.weight"]
    assert_proposes_alike(given, draft, target)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", KEYS)
def test_exports_of_other_people_are_a_start(target: Target, tmp_path: Path, name: str, layout: str) -> None:
    given, draft = draft_of(target, name, 1), draft_of(target, name)
    out = foreign(tmp_path / "out", target, given, lambda c, t: None, layout)
    warm.take(draft, export.load(out, target.spec, target.embedding), str(out))
    assert_proposes_alike(given, draft, target)


def test_what_only_changes_training_may_differ(target: Target) -> None:
    given = draft_of(target, "dflash", 1)
    draft = draft_of(target, "dflash", block_len=6, loss={"kl": 1.0}, sliding_window=32, max_positions=64)
    assert warm.take(draft, given, "somewhere") == []
    assert torch.equal(draft.get_parameter("fc.weight"), given.get_parameter("fc.weight"))


# -- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "name", "keys", "message"),
    [
        ("dflash", "dflash", {"num_layers": 3}, r"num_layers 2 \(here 3\)"),
        ("dflash", "dflash", {"num_layers": 1}, r"num_layers 2 \(here 1\)"),
        ("dflash", "dflash", {"intermediate_size": 64}, r"layer\.intermediate_size 96 \(here 64\)"),
        ("dflash", "dflash", {"aux_layers": (1, 2, 3)}, r"aux_layers \[1, 2, 4\] \(here \[1, 2, 3\]\)"),
        ("dflash", "dspark", {"layout": "shifted"}, r"layout 'infill' \(here 'shifted'\)"),
        ("dflash", "dflash", {"mask_token_id": 262}, r"mask_token_id 263 \(here 262\)"),
        ("dflash", "dflash", {"rope": {"rope_type": "default", "rope_theta": 7.0}}, r"rope_parameters .*here .*7\.0"),
        ("dspark", "dspark", {"markov_rank": 4}, r"fit: markov_head\.markov_w1\.weight \(264, 8\) \(here \(264, 4\)\), markov"),
        ("dspark", "dspark", {"confidence": False}, r"fit: confidence_head\.proj\.weight \(1, 56\) \(here absent\)"),
        ("dspark", "dspark", REDUCED, r"fit: markov_head\.markov_w2\.weight \(264, 8\) \(here \(64, 8\)\)"),
        ("eagle3", "eagle3", {"fc_norm": True}, r"fc_norm False \(here True\)"),
        ("eagle3", "eagle3", {"draft_vocab": 64}, r"fit: lm_head\.weight \(264, 48\) \(here \(64, 48\)\)"),
        ("dspark", "dflash", {}, "a dspark draft; a dflash draft starts from dflash$"),
        ("eagle3", "dspark", {}, "an? eagle3 draft; a dspark draft starts from dspark or dflash$"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(
    target: Target, given: str, name: str, keys: dict[str, Any], message: str
) -> None:
    draft = draft_of(target, name, **keys)
    before = {n: t.clone() for n, t in draft.state_dict().items()}
    with pytest.raises(ValueError, match=message) as problem:
        warm.take(draft, draft_of(target, given, 1), "some/folder")
    assert "train.start_from some/folder" in str(problem.value)
    assert all(torch.equal(tensor, before[n]) for n, tensor in draft.state_dict().items())


def test_a_run_starts_in_one_way() -> None:
    with pytest.raises(ValidationError, match="extend_from a goes on with a run, start_from b begins one"):
        TrainConfig(steps=20, extend_from="a", start_from="b")


# -- the command line ------------------------------------------------------------------------------------------------
SHORT = ["eval.num_prompts=2", "eval.max_new_tokens=16", "train.warmup_steps=1", "train.save_every=null"]
FLASH = ["tiny-dflash", "train.steps=30", *SHORT]
SPARK = [
    "tiny-dspark",
    "draft.layout=infill",
    "draft.block_len=6",
    "draft.num_layers=2",
    "draft.markov_start=zero",
    *SHORT,
]


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a DFlash run and a DSpark run that started from it and took one step of nothing."""
    place = tmp_path_factory.mktemp("warm")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert call("train", *FLASH) == 0
        start = ["train.start_from=runs/tiny-dflash", "train.steps=2", "train.lr=1e-12"]
        assert call("train", *SPARK, *start) == 0
    return place


def test_a_dspark_run_starts_where_the_dflash_run_ended_and_is_compared_with_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(here)
    assert call("accept", *SPARK, "train.start_from=runs/tiny-dflash", "train.steps=2", "train.lr=1e-12") == 0
    said = capsys.readouterr().out
    rows = [line.split("│") for line in said[said.index("Drafts compared") :].splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row[1:3]] for row in rows] == [
        ["heldout", "tiny-dspark"], ["", "runs/tiny-dflash"],
    ]  # fmt: skip
    assert rows[0][3:] == rows[1][3:]
    found = json.loads((here / "runs/tiny-dspark/compare.json").read_text())["heldout"]
    after, before = found["tiny-dspark"], found["runs/tiny-dflash"]
    assert after["acceptance_length"] == before["acceptance_length"] > 1.2
    assert after["survival"] == before["survival"]
    assert after["draft_sha256"] != before["draft_sha256"]
    headline = json.loads((here / "runs/tiny-dspark/acceptance-runtime.json").read_text())
    assert headline == after
    assert "<svg" in (here / "runs/tiny-dspark/compare.svg").read_text()
    assert call("report", *SPARK) == 0
    page = (here / "runs/tiny-dspark/report.html").read_text()
    assert "drafts compared on heldout" in page
    assert f"runs/tiny-dflash: acceptance length {before['acceptance_length']:.2f}" in page


def test_several_drafts_are_compared_in_one_object(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(here)
    folders = ["runs/tiny-dspark/step-2/draft", "runs/tiny-dspark/step-2"]
    words = [word for folder in folders for word in ("--against", folder)]
    assert call("accept", *FLASH, *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["heldout", "against"]
    assert list(found["against"]) == folders
    lengths = {found["against"][folder]["heldout"]["acceptance_length"] for folder in folders}
    assert lengths == {found["heldout"]["acceptance_length"]}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--against", "nowhere"], ["nowhere", "draft.json"]),
        (["--against", "runs/tiny-dspark", "--server", "http://localhost:1"], ["--against", "without --server"]),
        (["--against", "other", "eval.num_speculative_tokens=null"], ["tiny-dflash 5, other 3", "num_speculative_tokens=3"]),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], parts: list[str]
) -> None:
    monkeypatch.chdir(here)
    if "other" in words and not Path("other").exists():
        spec = export.load_draft(Path("runs/tiny-dflash/step-30/draft")).target
        cls = family("dflash")
        save_draft(cls(cls.Config(layout="infill", block_len=4, num_layers=1, mask_token_id=263), spec), Path("other"))
    assert call("accept", *FLASH, *words) == 1
    said = capsys.readouterr().err
    for part in parts:
        assert part in said


def test_a_start_that_does_not_fit_ends_before_training(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(here)
    words = ["train.start_from=runs/tiny-dflash", "train.steps=2", "draft.num_layers=1", "--out", "runs/x"]
    assert call("train", *SPARK, *words) == 1
    said = capsys.readouterr().err
    for part in ("train.start_from runs/tiny-dflash", "num_layers 2 (here 1)"):
        assert part in said
    assert not (here / "runs/x/step-2").exists()
