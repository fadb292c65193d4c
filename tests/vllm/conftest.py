"""The way from the tests to a real vLLM, which lives in a virtual environment of its own (`make vllm-test`).

The tests write targets, drafts and expected numbers with draftsmith; check.py runs them under vLLM without draftsmith.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHECK = Path(__file__).with_name("check.py")
ROOT = CHECK.parents[2]
PYTHON = Path(os.environ.get("DRAFTSMITH_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))

sys.path.insert(0, str(CHECK.parent))  # `from served import ...`

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of vLLM's environment."""
    if not PYTHON.is_file():
        pytest.skip(f"no vLLM environment at {PYTHON}; `make vllm-test` makes it")
    return str(PYTHON)


@pytest.fixture(scope="session")
def vllm(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Results]:
    """run(cases, v2=False) -> {case name: what check.py reports}; see check.py for all three."""

    def run(cases: list[dict[str, Any]], v2: bool = False) -> Results:
        folder = tmp_path_factory.mktemp("check")
        (folder / "cases.json").write_text(json.dumps(cases))
        command = [vllm_python, "-P", str(CHECK), str(folder / "cases.json"), str(folder / "results.json")]
        command += ["--v2"] if v2 else []
        done = subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=1500)
        assert done.returncode == 0, f"check.py failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return {result["name"]: result for result in json.loads((folder / "results.json").read_text())}

    return run
