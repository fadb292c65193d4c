"""Protects the floors: recipes (0) < models (1) < data (2) < eval (3) < train (4); nothing imports upwards.

Also: families do not know each other, and each kind of knowledge has one home (attention kernels, process groups,
vLLM's names). Every rule is tried on a planted violation. Run: pytest tests/test_floors.py
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = {"recipes": 0, "models": 1, "data": 2, "eval": 3, "train": 4}
BACKBONES = {("dspark", "dflash")}  # (family, the one other family it may build on)
KERNELS = {"scaled_dot_product_attention", "flex_attention"}
VLLM_NAMES = {
    "eagle_aux_hidden_state_layer_ids",
    "d2t",
    "speculators_model_type",
    "use_aux_hidden_state",
}


class Import(NamedTuple):
    line: int
    package: str  # "models"
    module: str | None  # "dflash", or None for the package itself


def files(root: Path) -> list[tuple[str, Path]]:
    """(package, file) of all our modules."""
    found = [(package, path) for package in FLOORS for path in sorted((root / package).glob("*.py"))]
    assert found, f"no modules below {root}"
    return found


def imports(path: Path) -> Iterator[Import]:
    """Every import of draftsmith in a file, wherever in the file it stands, and by importlib too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = ("draftsmith." if node.level == 2 else f"draftsmith.{path.parent.name}." if node.level else "") + (
                node.module or ""
            )
            names = [f"{module.rstrip('.')}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if re.fullmatch(r"draftsmith(\.\w+)+", node.value) else []
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "draftsmith" and len(parts) > 1 and parts[1] in FLOORS:
                yield Import(node.lineno, parts[1], parts[2] if len(parts) > 2 else None)


def place(path: Path, line: int) -> str:
    return f"{path.parent.name}/{path.name}:{line}"


def upward_imports(root: Path) -> list[str]:
    return [
        f"{place(path, found.line)}: {package} (floor {FLOORS[package]}) imports draftsmith.{found.package} "
        f"(floor {FLOORS[found.package]})"
        for package, path in files(root)
        for found in imports(path)
        if FLOORS[found.package] > FLOORS[package]
    ]


def families(root: Path) -> set[str]:
    """Files of models/ that define a draft family, recognised by their base class."""
    found = set()
    for path in (root / "models").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and {ast.unparse(base).split(".")[-1] for base in node.bases} & {
                "Draft",
                "DFlash",
            }:
                found.add(path.stem)
    return found


def family_imports(root: Path) -> list[str]:
    """A family that imports another family, or a shared part of models/ that imports a family."""
    known = families(root)
    return [
        f"{place(path, found.line)}: imports the family {found.module}"
        for package, path in files(root)
        if package == "models"
        for found in imports(path)
        if found.package == "models"
        and found.module in known - {path.stem}
        and (path.stem, found.module) not in BACKBONES
    ]


def words(path: Path, strings: bool) -> Iterator[tuple[int, str]]:
    """(line, word) of every name, attribute, imported name and keyword; `strings`: string constants, not docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]:
                yield node.lineno, name
                yield from ((node.lineno, part) for part in name.split(".") if part != name)
        elif isinstance(node, ast.keyword):
            yield node.value.lineno, node.arg or ""
        elif strings and isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value


def out_of_place(root: Path, wanted: set[str], home: str, strings: bool = True) -> list[str]:
    """Words used outside their home, which is a file ("models/layers.py") or a folder ("train")."""
    return [
        f"{place(path, line)}: {word} belongs in {home}"
        for package, path in files(root)
        if home not in (package, f"{package}/{path.name}")
        for line, word in words(path, strings)
        if word in wanted
    ]


def process_groups(root: Path) -> list[str]:
    return out_of_place(root, {"accelerate", "torch.distributed", "distributed"}, "train", strings=False)


# -- our own code ----------------------------------------------------------------------------------------------------


def test_nothing_imports_upwards():
    assert upward_imports(ROOT) == []


def test_families_import_shared_parts_only():
    assert family_imports(ROOT) == []


def test_only_layers_picks_an_attention_kernel():
    assert out_of_place(ROOT, KERNELS, "models/layers.py") == []


def test_only_train_talks_to_process_groups():
    assert process_groups(ROOT) == []


def test_only_export_knows_the_names_that_vllm_reads():
    assert out_of_place(ROOT, VLLM_NAMES, "models/export.py") == []


def test_packages_are_flat():
    nested = [str(path.relative_to(ROOT)) for package in FLOORS for path in (ROOT / package).glob("*/**/*.py")]
    assert nested == []


@pytest.mark.parametrize("package", FLOORS)
def test_a_package_refuses_its_bare_folder_name(package, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.delitem(importlib.sys.modules, package, raising=False)  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match=f"write `import draftsmith.{package}`, not `import {package}`"):
        importlib.import_module(package)


# -- the rules catch what they are for ---------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path):
    """A small copy of the layout, to plant one violation in."""
    for package in FLOORS:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "models/draft.py").write_text("class Draft: ...\n")
    (tmp_path / "models/eagle3.py").write_text("from draftsmith.models.draft import Draft\nclass Eagle3(Draft): ...\n")
    (tmp_path / "models/dflash.py").write_text("from draftsmith.models.draft import Draft\nclass DFlash(Draft): ...\n")
    (tmp_path / "models/dspark.py").write_text(
        "from draftsmith.models.dflash import DFlash\nclass DSpark(DFlash): ...\n"
    )

    def plant(file: str, text: str) -> Path:
        (tmp_path / file).write_text(text)
        return tmp_path

    return plant


def test_the_small_copy_is_clean(tree):
    root = tree("data/chat.py", '"""Not vLLM\'s d2t."""\nfrom draftsmith.models import draft\n')
    assert families(root) == {"eagle3", "dflash", "dspark"}
    assert upward_imports(root) == family_imports(root) == process_groups(root) == []
    assert out_of_place(root, KERNELS | VLLM_NAMES, "models/export.py") == []


@pytest.mark.parametrize(
    "line",
    [
        "import draftsmith.train.loop",
        "from draftsmith import train",
        "from draftsmith.train import loop",
        "from draftsmith.train.loop import train",
        "from ..train import loop",
        "import importlib; importlib.import_module('draftsmith.train.loop')",
        "def late():\n    import draftsmith.train",
    ],
)
def test_a_planted_upward_import_is_named_with_file_and_line(tree, line):
    number = 3 + line.count("\n")
    root = tree("models/target.py", f"import torch\n\n{line}\n")
    assert upward_imports(root) == [f"models/target.py:{number}: models (floor 1) imports draftsmith.train (floor 4)"]


def test_a_planted_import_of_another_family_is_named(tree):
    root = tree("models/mtp.py", "from draftsmith.models.draft import Draft\nfrom draftsmith.models import eagle3\n")
    assert family_imports(root) == ["models/mtp.py:2: imports the family eagle3"]
    root = tree("models/eagle3.py", "import draftsmith.models.dflash\nclass Eagle3(Draft): ...\n")
    assert "models/eagle3.py:1: imports the family dflash" in family_imports(root)


@pytest.mark.parametrize(
    "line",
    [
        "import torch.nn.functional as F; F.scaled_dot_product_attention(q, k, v)",
        "from torch.nn.functional import scaled_dot_product_attention",
        "from torch.nn.attention.flex_attention import flex_attention",
    ],
)
def test_a_planted_kernel_is_named(tree, line):
    found = out_of_place(tree("models/eagle3.py", line), KERNELS, "models/layers.py")
    assert found
    assert found[0].startswith("models/eagle3.py:1: ")
    assert out_of_place(tree("models/eagle3.py", ""), KERNELS, "models/layers.py") == []


@pytest.mark.parametrize(
    "line", ["import torch.distributed as dist", "from accelerate import Accelerator", "torch.distributed.barrier()"]
)
def test_a_planted_process_group_is_named(tree, line):
    assert process_groups(tree("eval/runtime.py", line))[0].startswith("eval/runtime.py:1: ")
    tree("eval/runtime.py", "")
    assert process_groups(tree("train/preflight.py", line)) == []


def test_a_planted_name_of_vllm_is_named(tree):
    root = tree("eval/serve.py", '"""Words."""\nconfig = {"eagle_aux_hidden_state_layer_ids": [1]}\n')
    assert out_of_place(root, VLLM_NAMES, "models/export.py") == [
        "eval/serve.py:2: eagle_aux_hidden_state_layer_ids belongs in models/export.py"
    ]
