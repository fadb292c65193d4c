"""Protects what README.md and docs/ promise: every command, target, option, recipe, key and path in them exists.

Commands are parsed by the real command line, without being run. Run: pytest tests/test_readme.py
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from pydantic import BaseModel

from draftsmith import recipes
from draftsmith.train.cli import app
from draftsmith.train.material import SECTIONS

ROOT = Path(__file__).parents[1]
SHELL = {"bash", "sh", "shell", "console", "text", ""}
FOLDERS = ("recipes/", "models/", "data/", "eval/", "train/", "tests/", "docs/", "bench/", ".ci/")
OTHERS = {"cd", "git", "pip", "python", "python3", "export", "source", "vllm", "pytest", "torchrun", "wandb", "docker"}
LAUNCH_OPTIONS = {"--config_file": 1, "--num_processes": 1, "--num_machines": 1, "--machine_rank": 1, "--cpu": 0}
LAUNCH_OPTIONS |= {"--main_process_ip": 1, "--main_process_port": 1, "--mixed_precision": 1, "--multi_gpu": 0}
VERBS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
PLACEHOLDER = re.compile(r"[A-Z][A-Z_/.]*(-[A-Z]+)?(\.(jsonl|yaml))?|T|D")


class Block(NamedTuple):
    """A fenced block: its language, its first line's number in the file, its text."""

    language: str
    line: int
    text: str


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def blocks(text: str) -> Iterator[Block]:
    for found in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield Block(found[1], text[: found.start(2)].count("\n") + 1, found[2])


def prose(text: str) -> str:
    """The text outside fenced blocks, with its line numbers kept."""
    return re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)


def spans(text: str) -> Iterator[tuple[int, str]]:
    """(line, content) of `code` in the prose."""
    outside = prose(text)
    for found in re.finditer(r"`([^`\n]+)`", outside):
        yield outside[: found.start()].count("\n") + 1, found[1]


def commands(block: Block) -> Iterator[tuple[int, list[str]]]:
    """(line, words) of each command of a shell block; comments, prompts, output and `VAR=value` prefixes are left out."""
    lines = block.text.split("\n")
    console = any(line.startswith("$ ") for line in lines)  # then the other lines are output
    number = 0
    while number < len(lines):
        start, line = number, lines[number]
        while line.endswith("\\") and number + 1 < len(lines):
            number += 1
            line = line[:-1] + lines[number]
        number += 1
        if console and not line.startswith("$ "):
            continue
        for part in re.split(r"&&|;", re.sub(r"(^|\s)#.*", "", line.removeprefix("$ "))):
            words = split(part)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words = words[1:]
            if words:
                yield block.line + start, words


def split(command: str) -> list[str]:
    """Shell words. Alternatives keep their `|`; the brackets of optional parts and a trailing `...` are dropped."""
    command = re.sub(r"(?<=\s)\[(?=[-\w.]+)([^\]]*)\]", r"\1", command)
    return [word for word in shlex.split(command) if word != "..."]


# -- what a command may say --------------------------------------------------------------------------------------------


def fault_of(words: list[str]) -> str | None:
    """What is wrong with a command, or None."""
    match words[0]:
        case "draftsmith":
            return draftsmith_fault(words[1:])
        case "make":
            return make_fault(words[1:])
        case "accelerate":
            return launch_fault(words[1:])
        case "bash":
            return None if (ROOT / words[1]).is_file() else f"no file {words[1]}"
        case "sbatch":
            scripts = [word for word in words if word.endswith(".sh")]
            return None if scripts and (ROOT / scripts[0]).is_file() else f"no script in {words}"
        case word if word in OTHERS:
            return None
    return f"{words[0]} is not a command that this test knows"


def draftsmith_fault(words: list[str]) -> str | None:
    if not words or words[0].startswith("-"):
        return None if set(words) <= {"--help", "--version"} else f"no such option: {words}"
    for verb in words[0].split("|"):
        if verb not in VERBS:
            return f"draftsmith has no verb {verb}"
        if "--help" in words:
            continue
        try:
            context = VERBS[verb].make_context(verb, list(words[1:]))
        except Exception as error:  # typer may bring its own click, whose usage errors are another class
            if not hasattr(error, "format_message"):
                raise
            return f"draftsmith {verb}: {error.format_message()}"
        fault = recipe_fault(context.params)
        if fault:
            return f"draftsmith {verb}: {fault}"
    return None


def recipe_fault(params: dict[str, Any]) -> str | None:
    """A recipe that does not exist, or overrides that it refuses. Placeholders such as RECIPE are skipped."""
    recipe = params.get("recipe")
    overrides = [o for o in params.get("overrides") or [] if o not in ("section.key=value", "SECTION.KEY=VALUE")]
    if recipe is None or "=" in recipe:
        overrides, recipe = [*([recipe] if recipe else []), *overrides], None
    if recipe is not None and not PLACEHOLDER.fullmatch(recipe) and recipe != "my.yaml":
        inside = ROOT / recipe
        try:
            recipes.read(inside if inside.is_file() else recipe, overrides, SECTIONS)
        except recipes.RecipeError as error:
            return str(error)
        return None
    unknown = [o for o in overrides if not known_key(recipes.parse_override(o)[0])]
    return f"unknown keys {unknown}" if unknown else None


@cache
def make_targets() -> frozenset[str]:
    rules = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return frozenset(name for rule in rules for name in rule.split())


def make_fault(words: list[str]) -> str | None:
    variables = re.findall(r"^([A-Z]+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in (variables if equals else make_targets()):
            return f"make knows no {'variable' if equals else 'target'} {name}"
    return None


def launch_fault(words: list[str]) -> str | None:
    """accelerate launch [options] -m draftsmith.train[.cli] ARGUMENTS"""
    if words[:1] != ["launch"] or "-m" not in words:
        return None if words[:1] == ["config"] else "expected accelerate launch ... -m draftsmith.train"
    end = words.index("-m")
    options, module, rest = words[1:end], words[end + 1], words[end + 2 :]
    while options:
        name, equals, value = options.pop(0).partition("=")
        if name not in LAUNCH_OPTIONS:
            return f"{name} is not among the launch options that this test knows"
        if LAUNCH_OPTIONS[name] and not equals:
            value = options.pop(0)
        if name == "--config_file" and not (ROOT / value).is_file():
            return f"no launch file {value}"
    if module not in ("draftsmith.train", "draftsmith.train.cli"):
        return f"{module} is no program of draftsmith"
    return draftsmith_fault(rest if module.endswith("cli") else ["train", *rest])


# -- keys and paths ----------------------------------------------------------------------------------------------------


@cache
def known_keys() -> frozenset[recipes.Keys]:
    """Every key of every section; for `draft` those of all families."""
    from draftsmith.models import draft

    found: set[recipes.Keys] = set()
    for name, section in SECTIONS.items():
        models: list[type[BaseModel]] = [section] if isinstance(section, type) else []
        if name == "draft":
            stems = [path.stem for path in (ROOT / "models").glob("*.py")]
            models = [draft.family(stem).Config for stem in stems if is_family(stem)]
        found.add((name,))
        for model in models:
            found.update((name, *keys) for keys in recipes.key_paths(model))
    return frozenset(found)


def is_family(stem: str) -> bool:
    from draftsmith.models import draft

    try:
        return issubclass(draft.family(stem), draft.Draft)
    except ValueError:
        return False


def known_key(keys: recipes.Keys) -> bool:
    """True for a key of some section, and for whatever lies below a key that takes a free mapping."""
    return any(
        (len(path) == len(keys) or (path[-1] == recipes.ANY and len(path) < len(keys)))
        and all(p in (k, recipes.ANY) for p, k in zip(path, keys, strict=False))
        for path in known_keys()
    )


def keys_of(values: dict[str, Any], above: recipes.Keys = ()) -> Iterator[recipes.Keys]:
    """The keys of the leaves of nested or dotted mappings."""
    for name, value in values.items():
        keys = (*above, *str(name).split("."))
        if isinstance(value, dict) and value:
            yield from keys_of(value, keys)
        else:
            yield keys


def key_faults(text: str) -> Iterator[str]:
    """Recipe keys in the prose (`train.lr`, `data.source: live`) and in YAML blocks."""
    for line, span in spans(text):
        found = re.fullmatch(rf"((?:{'|'.join(SECTIONS)})(?:\.\w+)+)(\s*[=:]\s*.*)?", span)
        if found and not known_key(tuple(found[1].split("."))):
            yield f"{line}: no recipe key {found[1]}"
    for block in blocks(text):
        if block.language not in ("yaml", "yml"):
            continue
        values = yaml.safe_load(block.text)
        if not isinstance(values, dict) or not set(values) & set(SECTIONS):
            continue  # another kind of YAML file
        smoke = values.pop("smoke", None) or {}
        for keys in [*keys_of(values), *keys_of(smoke)]:
            if not known_key(keys):
                yield f"{block.line}: no recipe key {'.'.join(keys)}"


def path_faults(text: str) -> Iterator[str]:
    """Links, and paths in `code` or in shell blocks that start in one of our folders."""
    outside = prose(text)
    for found in re.finditer(r"\]\(([^)#\s]+)", outside):
        places = (ROOT / found[1], ROOT / "docs" / found[1])  # pages of docs/ link to each other by name
        if not re.match(r"\w+:", found[1]) and not any(place.exists() for place in places):
            yield f"{outside[: found.start()].count(chr(10)) + 1}: link to {found[1]}, which does not exist"
    mentioned = [(line, word) for line, span in spans(text) for word in span.split()]
    mentioned += [(line, w) for b in blocks(text) if b.language in SHELL for line, ws in commands(b) for w in ws]
    for line, word in mentioned:
        path = word.split("=")[-1].split("::")[0].rstrip(".,:;")
        if path.startswith(FOLDERS) and not re.search(r"[A-Z]{3,}|<|\*\*", path) and not list(ROOT.glob(path)):
            yield f"{line}: {path} does not exist"


def command_faults(text: str) -> Iterator[str]:
    for block in blocks(text):
        if block.language in SHELL and not (block.language in ("", "text") and "draftsmith" not in block.text):
            for line, words in commands(block):
                if block.language in ("", "text") and words[0] not in ("draftsmith", "make", "accelerate"):
                    continue  # a picture or some output
                fault = fault_of(words)
                if fault:
                    yield f"{line}: {' '.join(words)}: {fault}"
    for line, span in spans(text):
        if re.match(r"(draftsmith|make|accelerate launch) [\w-]", span) and "..." not in span:
            fault = fault_of(split(span)) if not bare_verb(span) else None
            if fault:
                yield f"{line}: {span}: {fault}"


def bare_verb(span: str) -> bool:
    """`draftsmith accept` in a sentence names the verb; it is no whole command."""
    words = span.split()
    return words[0] == "draftsmith" and len(words) == 2 and words[1] in VERBS


# -- the documents -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_every_command_in_the_documents_parses(document):
    assert list(command_faults(document.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_every_recipe_key_in_the_documents_exists(document):
    assert list(key_faults(document.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_every_path_in_the_documents_exists(document):
    assert list(path_faults(document.read_text(encoding="utf-8"))) == []


def test_the_first_screen_of_the_readme_shows_the_two_commands():
    screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:40])
    assert "make quickstart" in screen
    assert "make test" in screen


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_the_help_of_a_verb_teaches_with_an_example_that_parses(verb):
    text = VERBS[verb].help or ""
    examples = re.findall(r"(?:Example: |^\s*)((?:draftsmith|accelerate launch) .*)", text, re.MULTILINE)
    assert examples, f"draftsmith {verb} --help shows no example"
    assert [fault for example in examples if (fault := fault_of(split(example)))] == []


def test_the_header_of_a_shipped_recipe_holds_commands_that_parse():
    faults = []
    for name in recipes.names():
        header = recipes.read(name, [], SECTIONS).header
        # a command, then two spaces and what it is for
        lines = re.findall(r"^\s*((?:draftsmith|make|accelerate launch) \S.*?)(?:  |$)", header, re.MULTILINE)
        assert lines, f"recipes/{name}.yaml: the header shows no command"
        faults += [f"{name}: {line}: {fault}" for line in lines if (fault := fault_of(split(line)))]
    assert faults == []


# -- the checks catch what they are for ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("draftsmith trian quickstart", "no verb trian"),
        ("draftsmith train quickstart --loud", "No such option"),
        ("draftsmith train quickstrat", "no such recipe file"),
        ("draftsmith train quickstart train.lrr=1", "train.lrr is not a key"),
        ("draftsmith train RECIPE train.lrr=1", "unknown keys"),
        ("draftsmith --loud", "no such option"),
        ("make tset", "no target tset"),
        ("make test JOBZ=3", "no variable JOBZ"),
        ("accelerate launch -m draftsmith.training quickstart", "no program"),
        ("accelerate launch --config_file recipes/none.yaml -m draftsmith.train quickstart", "no launch file"),
        ("accelerate launch --nonsense -m draftsmith.train quickstart", "--nonsense"),
        ("accelerate launch -m draftsmith.train quickstart train.lrr=1", "train.lrr is not a key"),
        ("bash .ci/walk", "no file .ci/walk"),
        ("frobnicate x", "not a command that this test knows"),
    ],
)
def test_a_planted_wrong_command_is_found_with_its_line(command, said):
    faults = list(command_faults(f"# Title\n\n```bash\nmake test\n{command}\n```\n"))
    assert len(faults) == 1
    assert faults[0].startswith(f"5: {command}: ")
    assert said in faults[0]


def test_right_commands_pass():
    text = """
```console
$ cd draftsmith && make test JOBS=1   # a comment
anything that was printed
$ draftsmith train quickstart \\
    train.lr=1e-3 --smoke
```
```text
draftsmith accept|certify RECIPE [section.key=value] [--out DIR]
accelerate launch --num_processes 8 -m draftsmith.train RECIPE
accelerate launch -m draftsmith.train.cli capture quickstart
```
`draftsmith accept` says what `train.lr` did; see [models](models/draft.py), `recipes/*.yaml` and `runs/x/best.json`.
"""
    assert [*command_faults(text), *key_faults(text), *path_faults(text)] == []


def test_keys_below_a_free_mapping_pass_and_below_a_section_do_not():
    assert known_key(("data", "chat", "template_kwargs", "enable_thinking"))
    assert known_key(("data", "evaluation", "heldout", "path"))
    assert known_key(("data", "evaluation"))
    assert not known_key(("data", "chat", "sytem"))
    assert not known_key(("data", "evaluation", "heldout", "paht"))
    assert not known_key(("train", "lr", "x"))
    assert not known_key(("train", "lrr"))


def test_planted_wrong_keys_and_paths_are_found_with_their_lines():
    text = (
        "`train.lrr`, `models/none.py`\n[x](docs/none.md)\n"
        "```yaml\ntrain:\n  lrr: 1\n```\n```bash\npytest tests/test_none.py\n```\n"
    )
    assert list(key_faults(text)) == ["1: no recipe key train.lrr", "4: no recipe key train.lrr"]
    assert sorted(path_faults(text)) == [
        "1: models/none.py does not exist",
        "2: link to docs/none.md, which does not exist",
        "8: tests/test_none.py does not exist",
    ]
