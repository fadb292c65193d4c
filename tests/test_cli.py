"""Protects the command line: every verb's example runs, faults name their place, and exit codes mean what they say.

The examples run in the order of a user's day, in one folder, on the tiny taught target. Run: pytest tests/test_cli.py
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from draftsmith import recipes
from draftsmith.train import cli

VERBS = [command.callback.__name__ for command in cli.app.registered_commands]


def example(verb: str) -> list[str]:
    """The words of the example in a verb's help, without `draftsmith`."""
    [command] = [c.callback for c in cli.app.registered_commands if c.callback.__name__ == verb]
    found = re.search(r"Example: draftsmith (.+)", command.__doc__ or "")
    assert found, f"{verb}: no example in its help"
    return shlex.split(found[1])


def call(*words: str) -> int:
    AcceleratorState._reset_state()  # a process trains once; these tests train several recipes in one
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder in which the tiny recipe has run through every stage."""
    place = tmp_path_factory.mktemp("cli")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert call(*example("run")) == 0
        assert call("train", "tiny-dspark") == 0  # what `calibrate` needs
    return place


@pytest.fixture
def here(folder, monkeypatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("verb", [v for v in VERBS if v != "run"])
def test_the_example_of_every_verb_runs(verb, here, capsys):
    assert call(*example(verb)) == 0
    assert capsys.readouterr().out.strip()


def test_a_run_leaves_everything_a_user_needs(here):
    run = here / "runs/tiny-eagle3"
    for name in ("recipe.yaml", "provenance.json", "best.json", "metrics.jsonl", "certificate.json", "report.html"):
        assert (run / name).is_file(), name
    accepted = json.loads((run / "acceptance-runtime.json").read_text())
    assert accepted["acceptance_length"] > 3.0  # of at most 4; the game is nearly deterministic
    assert json.loads((run / "certificate.json").read_text())["passed"]
    assert (run / "export/config.json").is_file()
    page = (run / "report.html").read_text()
    assert page.count("<svg") == 3
    assert f"{accepted['acceptance_length']:.2f}" in page


def test_a_second_run_does_nothing_again(here, capsys):
    before = {p: p.stat().st_mtime_ns for p in (here / "cache").rglob("*") if p.is_file()}
    weights = here / "runs/tiny-eagle3/step-60/draft/draft.safetensors"
    trained = weights.stat().st_mtime_ns
    assert call("run", "tiny-eagle3") == 0
    said = capsys.readouterr().out
    assert "all 60 steps are done" in said
    assert "certificate.json is done" in said
    assert weights.stat().st_mtime_ns == trained
    assert {p: p.stat().st_mtime_ns for p in (here / "cache").rglob("*") if p.is_file()} == before


def test_a_changed_key_of_a_started_run_names_key_values_and_out(here, capsys):
    assert call("train", "tiny-eagle3", "train.lr=1e-4") == 1
    said = capsys.readouterr().err
    for part in ("train.lr", "0.003", "0.0001", "--out"):
        assert part in said


def test_json_is_the_object_and_nothing_else(here, capsys):
    assert call("certify", "tiny-eagle3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    assert call("run", "tiny-eagle3", "--smoke", "--json", "--out", "runs/json", "eval.bar=1") == 0  # it also trains
    assert "acceptance" in json.loads(capsys.readouterr().out)


def test_capture_makes_a_damaged_shard_of_a_finished_cache_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call("capture", "tiny-eagle3") == 0
    shards = {path: path.read_bytes() for path in tmp_path.glob("cache/features-*/shard-*")}
    damaged = next(iter(shards))
    damaged.write_bytes(shards[damaged][:-1])
    capsys.readouterr()
    assert call("train", "tiny-eagle3") == 1
    assert "Run capture again" in capsys.readouterr().err
    assert call("capture", "tiny-eagle3") == 0
    assert {path: path.read_bytes() for path in shards} == shards


def test_an_export_can_be_measured_without_a_recipe(here, capsys):
    words = ["accept", "--target", "tiny:llama", "--draft", "runs/tiny-eagle3/export", "--prompts"]
    assert call(*words, "shipped:prompts_tiny_heldout", "eval.num_speculative_tokens=3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompts"]["acceptance_length"] > 3.0


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train", "tiny-eagle3", "train.warmup=1"], ["train.warmup", "did you mean train.warmup_steps"]),
        (["train", "no-such-recipe"], ["no-such-recipe", "tiny-eagle3"]),
        (["train", "tiny-eagle3", "draft.family=eagle4"], ["eagle4", "eagle3"]),
        (["accept"], ["--target", "--draft"]),
        (["accept", "tiny-eagle3", "--target", "T", "--draft", "D"], ["either", "--target"]),
        (["no-such-verb"], ["no-such-verb"]),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_is_right(words, parts, here, capsys):
    assert call(*words) == 2
    said = capsys.readouterr().err
    for part in parts:
        assert part in said


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train", "tiny-eagle3", "target.name=./nowhere", "--out", "runs/x"], ["target.name", "nowhere"]),
        (["train", "tiny-eagle3", "data.train=missing.jsonl", "--out", "runs/x"], ["missing.jsonl"]),
        (
            ["train", "tiny-eagle3", "draft.aux_layers=[1,2,4]", "--out", "runs/x"],
            ["draft.aux_layers", "4 layers", "0 (the embedding) to 3"],
        ),
        (["export", "tiny-eagle3", "--out", "runs/empty"], ["runs/empty", "draftsmith train"]),
        (["inspect", "tiny-eagle3", "--row", "99"], ["99", "0..15"]),
    ],
)
def test_failures_exit_with_1_and_name_the_fault(words, parts, here, capsys):
    assert call(*words) == 1
    said = capsys.readouterr().err
    for part in parts:
        assert part in said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", [n for n in recipes.names() if not n.startswith("quickstart")])
def test_every_recipe_trains_in_its_short_form(name, tmp_path, monkeypatch, capsys):
    """The quick starts need the 135M target: test_wheel.py runs one."""
    monkeypatch.chdir(tmp_path)
    assert call("train", name, "--smoke") == 0, capsys.readouterr().err
    [step] = (tmp_path / f"runs/{name}-smoke").glob("step-*")
    assert (step / "draft/draft.json").is_file()
