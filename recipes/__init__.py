"""Recipes: one YAML file per run, and how it is read.

    section models' defaults  <  the file  <  (--smoke) the caller's smoke values  <  the file's `smoke:`  <  section.key=value

The caller passes the section models, so this floor imports nothing of draftsmith. Every error names the file (with its
line) or the override, the key, what came and what is allowed.
"""

from __future__ import annotations

import copy
import difflib
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

if __name__ != "draftsmith.recipes":
    raise ImportError("This is a part of draftsmith: write `import draftsmith.recipes`, not `import recipes`.")

SectionModel = type[BaseModel]
Section = SectionModel | Callable[[dict[str, Any]], SectionModel]
"""A section's model, or a function from the section's raw values to its model (`draft` depends on `draft.family`)."""

Keys = tuple[str, ...]  # ("train", "lr") for train.lr
ANY = "NAME"  # in the list of known keys: a name that the user is free to choose
SMOKE = "smoke"
LAUNCH = "launch-"  # accelerate's launch files share the folder and are no recipes


class RecipeError(ValueError):
    """A recipe or an override that cannot be used. Several faults are reported at once, one per line."""


@dataclass(frozen=True)
class Recipe:
    """A recipe that has been read; each section is an attribute (`recipe.train.lr`), a frozen validated model.

    name: the file's stem. header: the comment block at the top of the file, without the # signs.
    """

    name: str
    path: Path
    header: str
    sections: Mapping[str, BaseModel]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["sections"][name]
        except KeyError:
            raise AttributeError(f"recipe has no section {name!r}") from None

    @property
    def not_run(self) -> bool:
        """True when the header admits that nobody has run this recipe; `plan` and model cards repeat it."""
        return re.search(r"\bnot\s+run\s+(by\s+us|yet)\b", self.header, re.IGNORECASE) is not None

    def resolved(self) -> dict[str, Any]:
        """Every section with every default filled in, as plain JSON values: what `runs/NAME/recipe.yaml` holds."""
        return {name: model.model_dump(mode="json") for name, model in self.sections.items()}


def read(
    path_or_name: str | Path,
    overrides: Sequence[str] = (),
    sections: Mapping[str, Section] = {},
    smoke: bool = False,
    smoke_values: Mapping[str, Any] = {},
) -> Recipe:
    """The recipe in a file, or the shipped one of that name, with overrides such as `train.lr=1e-3` applied.

    smoke: apply `smoke_values` (what the caller shortens in every recipe), then the file's own `smoke:` section; both
    may be nested or dotted (`train.num_steps: 3`). Raises RecipeError.
    """
    path = find(path_or_name)
    raw, sources = _load(path)
    own_smoke = raw.pop(SMOKE, None) or {}
    if not isinstance(own_smoke, dict):
        raise RecipeError(f"{_show(path)}: smoke must be a section of keys to change, got {_came(own_smoke)}")
    if smoke:
        _merge(raw, smoke_values, "--smoke", sources)
        _merge(raw, own_smoke, f"{_show(path)}: smoke", sources)
    models = _override_and_validate(raw, overrides, sections, _Sources(_show(path), sources))
    return Recipe(path.stem, path, _header(path.read_text(encoding="utf-8")), models)


def validate(
    values: Mapping[str, Any], overrides: Sequence[str], sections: Mapping[str, Section], where: str
) -> dict[str, BaseModel]:
    """Sections of values that stand in no file, with overrides; `where` names the values in errors."""
    return _override_and_validate(copy.deepcopy(dict(values)), overrides, sections, _Sources(where, {}))


def names() -> list[str]:
    """The shipped recipes' names."""
    files = resources.files(__name__).iterdir()
    return sorted(f.name[:-5] for f in files if f.name.endswith(".yaml") and not f.name.startswith(LAUNCH))


def find(path_or_name: str | Path) -> Path:
    """The recipe's file: the path itself when it is one, else the shipped recipe of that name (.yaml or not)."""
    path = Path(path_or_name)
    name = path.name.removesuffix(".yaml")
    if name.startswith(LAUNCH):
        raise RecipeError(f"{path_or_name}: a launch file, not a recipe; it goes to `accelerate launch --config_file`")
    if path.is_file():
        return path
    if path.parent == Path(".") and name in names():
        return Path(str(resources.files(__name__) / f"{name}.yaml"))
    near = difflib.get_close_matches(name, names(), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise RecipeError(f"{path_or_name}: no such recipe file, and the shipped recipes are {', '.join(names())}{hint}")


class _Absent:
    """Stands in a diff for a key that one side does not have."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


def diff(old: Mapping[str, Any], new: Mapping[str, Any], ignore: Collection[str] = ()) -> list[tuple[str, Any, Any]]:
    """What differs between two resolved recipes: (dotted key, old value, new value), in key order.

    ignore: dotted keys that may change, each with all that lies below it. A key that only one side has is ABSENT
    on the other.
    """

    def walk(a: Any, b: Any, keys: Keys) -> Iterator[tuple[str, Any, Any]]:
        key = ".".join(keys)
        if key in ignore:
            return
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            for name in sorted({*a, *b}):
                yield from walk(a.get(name, ABSENT), b.get(name, ABSENT), (*keys, name))
        elif _plain(a) != _plain(b):
            yield key, a, b

    return list(walk(old, new, ()))


def parse_override(text: str) -> tuple[Keys, Any]:
    """`train.lr=1e-3` -> (("train", "lr"), "1e-3"). Values are YAML, so `[1, 2]`, `null` and `true` work."""
    key, equals, value = text.partition("=")
    keys = tuple(key.strip().split("."))
    if not equals or not all(keys):
        raise RecipeError(f"override {text!r}: expected section.key=value, for example train.lr=1e-3")
    return keys, _yaml_value(value.strip(), text)


# -- the file ----------------------------------------------------------------------------------------------------------


def _load(path: Path) -> tuple[dict[str, Any], dict[Keys, str]]:
    """The file's values, and "file:line" of each key."""
    text = path.read_text(encoding="utf-8")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        lines: dict[Keys, str] = {}
        if node is not None:
            _note_lines(node, (), _show(path), lines)
        raw = {} if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}" if mark else ""
        raise RecipeError(f"{_show(path)}{where}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{_show(path)}: not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise RecipeError(f"{_show(path)}: a recipe is a mapping of sections, got {_came(raw)}")
    return raw, lines


def _note_lines(node: yaml.Node, keys: Keys, file: str, lines: dict[Keys, str]) -> None:
    """Fill `lines`; a key that is written twice in one mapping is an error (YAML would silently keep the last)."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key, where = (*keys, str(key_node.value)), f"{file}:{key_node.start_mark.line + 1}"
        if key in lines:
            raise RecipeError(f"{where}: {'.'.join(key)} is given twice, first at {lines[key]}; keep one of them")
        lines[key] = where
        _note_lines(value_node, key, file, lines)


def _header(text: str) -> str:
    lines = []
    for line in text.lstrip().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" ").rstrip())
    return "\n".join(lines).strip()


# -- merging -----------------------------------------------------------------------------------------------------------


def _merge(
    raw: dict[str, Any], values: Mapping[str, Any], source: str, sources: dict[Keys, str], above: Keys = ()
) -> None:
    """Put nested or dotted values over `raw`. A mapping joins the mapping that is there and replaces anything else."""
    for name, value in values.items():
        keys = (*above, *str(name).split("."))
        if isinstance(value, Mapping) and isinstance(_at(raw, keys), dict):
            _merge(raw, value, source, sources, keys)
        else:
            _assign(raw, keys, value, source, sources)


def _at(raw: Any, keys: Keys) -> Any:
    for name in keys:
        raw = raw.get(name) if isinstance(raw, dict) else None
    return raw


def _assign(raw: dict[str, Any], keys: Keys, value: Any, source: str, sources: dict[Keys, str]) -> None:
    place = raw
    for depth, name in enumerate(keys[:-1], 1):
        if place.get(name) is None:
            place[name] = {}
        if not isinstance(place[name], dict):
            above = ".".join(keys[:depth])
            raise RecipeError(f"{source}: {above} is {_came(place[name])} here, so {'.'.join(keys)} cannot be set")
        place = place[name]
    place[keys[-1]] = copy.deepcopy(value)
    for older in [k for k in sources if k[: len(keys)] == keys]:
        del sources[older]
    sources[keys] = source


def _yaml_value(text: str, override: str) -> Any:
    quoted = text[:1] in ("[", "{", '"', "'")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        if quoted:
            raise RecipeError(f"override {override!r}: the value is not valid YAML: {error}") from None
        return text
    # an unquoted text stays as it was typed: YAML would cut it at " #" and split it at ": "
    return text if isinstance(value, str | dict) and not quoted else value


# -- validation --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sources:
    """Where each key was set."""

    file: str
    by_key: dict[Keys, str]

    def of(self, keys: Keys) -> str:
        """The place that set the key, else the nearest key above it, else the file."""
        for end in range(len(keys), 0, -1):
            if keys[:end] in self.by_key:
                return self.by_key[keys[:end]]
        return self.file

    def overrides_below(self, keys: Keys) -> list[str]:
        return [s for k, s in self.by_key.items() if _under(k, keys) and s.startswith("override")]


def _override_and_validate(
    raw: dict[str, Any], overrides: Sequence[str], sections: Mapping[str, Section], sources: _Sources
) -> dict[str, BaseModel]:
    for text in overrides:
        keys, value = parse_override(text)
        _assign(raw, keys, value, f"override {text!r}", sources.by_key)
    return _validate(raw, sections, sources)


def _validate(raw: dict[str, Any], sections: Mapping[str, Section], sources: _Sources) -> dict[str, BaseModel]:
    models, faults = {}, []
    for name, section in sections.items():
        values = raw.get(name)
        values = {} if values is None else values
        if not isinstance(values, dict):
            faults.append(f"{sources.of((name,))}: {name} must be a section of keys, got {_came(values)}")
            continue
        try:
            models[name] = _model(name, section, values)
        except (ValueError, KeyError) as error:
            missing = isinstance(error, KeyError)
            said = f"{name}.{error.args[0]} is missing" if missing else f"{error}"
            said = said if said.startswith(name) else f"{name}: {said}"
            faults.append(f"{sources.of((name,) if missing else (name, 'family'))}: {said}")
    known = [(name, *keys) for name, model in models.items() for keys in key_paths(model)]
    for key in raw:
        if key not in sections:
            faults.append(_unknown((str(key),), list(sections), known, sources))
    found = {}
    for name, model in models.items():
        values = raw.get(name) or {}
        try:
            found[name] = model(**{str(k): v for k, v in values.items()})
            faults.extend(_booleans(values, found[name], (name,), sources))
        except ValidationError as error:
            faults.extend(_explain(error, name, values, model, known, sources))
    if faults:
        raise RecipeError("\n".join(dict.fromkeys(faults)))
    return found


def _model(name: str, section: Section, values: dict[str, Any]) -> SectionModel:
    model = section if isinstance(section, type) else section(values)
    for part in _submodels(model):
        assert part.model_config.get("extra") == "forbid", f"{name}: {part.__name__} would drop unknown keys"
    return model


def _explain(
    error: ValidationError,
    section: str,
    values: dict[str, Any],
    model: SectionModel,
    known: list[Keys],
    sources: _Sources,
) -> list[str]:
    """One line per key that pydantic refused."""
    wanted: dict[Keys, list[str]] = {}
    came: dict[Keys, Any] = {}
    rules: set[Keys] = set()  # sections that broke a rule over several of their keys
    faults = []
    for fault in error.errors():
        missing = fault["type"] == "missing"
        keys = (section, *_real_keys(fault["loc"], values, keep_last=missing))
        if fault["type"] == "extra_forbidden":
            siblings = sorted({k[len(keys) - 1] for k in known if _under(k, keys[:-1])})
            faults.append(_unknown(keys, siblings, known, sources))
            continue
        wanted.setdefault(keys, []).append(_wanted(fault))
        came[keys] = ABSENT if missing else fault["input"]
        if fault["type"] == "value_error" and isinstance(fault["input"], dict):
            rules.add(keys)
    for keys, wants in wanted.items():
        if any(_under(deeper, keys) for deeper in wanted):
            continue  # a list that lost its only, faulty item is said to be empty
        where, key, want = sources.of(keys), ".".join(keys), " or ".join(dict.fromkeys(wants))
        if came[keys] is ABSENT:
            faults.append(f"{where}: {key} is missing; write {key} in the recipe or add {key}=... to the command")
        elif keys in rules:
            faults.append(f"{'; '.join([where, *sources.overrides_below(keys)])}: {key}: {want}")
        else:
            faults.append(f"{where}: {key}: {want}, got {_came(came[keys])}")
    return faults


def _wanted(fault: Any) -> str:
    """What pydantic wanted, in the words of a person: `one of 'adamw', 'muon'`."""
    if fault["type"] in ("literal_error", "enum"):
        return f"must be one of {fault['ctx']['expected'].replace(' or ', ', ')}"
    if fault["type"] in ("value_error", "assertion_error"):
        return str(fault["ctx"]["error"])
    text = fault["msg"].replace("Input should be", "must be", 1)
    return text[:1].lower() + text[1:]


def _unknown(keys: Keys, siblings: list[str], known: list[Keys], sources: _Sources) -> str:
    """The line for a key that does not exist: the most likely right one, and what that section has."""
    key, above = ".".join(keys), ".".join(keys[:-1])
    near = _nearest(keys, siblings, known)
    hint = f"; did you mean {near}?" if near else ""
    return f"{sources.of(keys)}: {key} is not a key{hint} ({above or 'a recipe'} has {', '.join(siblings)})"


def _nearest(keys: Keys, siblings: list[str], known: list[Keys]) -> str | None:
    """Same word with other hyphens, same word in another place, similar word here, similar word anywhere."""
    word = keys[-1].replace("-", "_").lower()
    if word in siblings:
        return ".".join((*keys[:-1], word))
    by_word: dict[str, list[Keys]] = {}
    for path in known:
        by_word.setdefault(path[-1], []).append(path)
    if word not in by_word:
        here = difflib.get_close_matches(word, siblings, n=1)
        here = here or [name for name in siblings if min(len(name), len(word)) > 2 and (name in word or word in name)]
        if here:
            return ".".join((*keys[:-1], here[0]))
        anywhere = difflib.get_close_matches(word, by_word, n=1, cutoff=0.75)
        if not anywhere:
            return None
        word = anywhere[0]
    return " or ".join(".".join(path) for path in by_word[word][:3])


def _booleans(values: Any, model: Any, keys: Keys, sources: _Sources) -> Iterator[str]:
    """pydantic turns `true` into 1.0; a switch where a number belongs is a slip."""
    if isinstance(values, dict):
        for name, value in values.items():
            inner = model.get(name) if isinstance(model, Mapping) else getattr(model, str(name), None)
            yield from _booleans(value, inner, (*keys, str(name)), sources)
    elif isinstance(values, bool) and isinstance(model, int | float) and not isinstance(model, bool):
        yield f"{sources.of(keys)}: {'.'.join(keys)}: must be a number, got {_came(values)}"


# -- section models ----------------------------------------------------------------------------------------------------


def key_paths(model: SectionModel) -> Iterator[Keys]:
    """Every key that the model knows, nested ones included; ANY stands for a free name or a list index."""
    for name, field in model.model_fields.items():
        yield (name,)
        if _free_mapping(field.annotation):
            yield (name, ANY)
        for between, inner in _models_in(field.annotation):
            if inner is not model:
                yield from ((name, *between, *keys) for keys in key_paths(inner))


def _submodels(model: SectionModel) -> Iterator[SectionModel]:
    yield model
    for field in model.model_fields.values():
        for _, inner in _models_in(field.annotation):
            if inner is not model:
                yield from _submodels(inner)


def _models_in(annotation: Any) -> list[tuple[Keys, SectionModel]]:
    """Models named in an annotation, with the keys that lie between: `Chat | None`, `dict[str, Source]`, ..."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [((), annotation)]
    free = (ANY,) if typing.get_origin(annotation) in (list, tuple, dict) else ()
    return [((*free, *between), model) for part in typing.get_args(annotation) for between, model in _models_in(part)]


def _free_mapping(annotation: Any) -> bool:
    """True for `dict[str, float]` and the like, whose keys the user chooses and whose values are no sections."""
    is_dict = annotation is dict or typing.get_origin(annotation) is dict
    return (is_dict and not _models_in(annotation)) or any(map(_free_mapping, typing.get_args(annotation)))


def _real_keys(loc: tuple[int | str, ...], values: Any, keep_last: bool) -> Keys:
    """pydantic's location without the names of union members, which are no keys of the file."""
    keys: list[str] = []
    for depth, part in enumerate(loc):
        held = isinstance(values, dict) and part in values
        if held or (isinstance(values, list | tuple) and isinstance(part, int) and part < len(values)):
            values = values[part]
        elif not (keep_last and depth == len(loc) - 1):
            continue
        keys.append(str(part))
    return tuple(keys)


def _under(path: Keys, above: Keys) -> bool:
    return len(path) > len(above) and all(a in (b, ANY) for a, b in zip(path, above))


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _came(value: Any) -> str:
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({type(value).__name__})"


def _show(path: Path) -> str:
    """The path as a person would type it here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
