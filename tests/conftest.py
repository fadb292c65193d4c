"""What every test gets: no network, one thread, CPU, and `from tiny import ...`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch

torch.set_num_threads(1)  # more threads on a shared machine make tiny models many times slower


@pytest.fixture(autouse=True)
def _a_test_starts_like_a_process() -> None:
    """accelerate keeps one state per process and refuses another precision; tests of several files share a process."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
