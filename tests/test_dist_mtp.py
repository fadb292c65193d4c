"""Protects the route for trunks that no training rank can hold: capture last hidden states once, train from them.

Run: pytest tests/test_dist_mtp.py. Two gloo processes on the CPU train the module of `tiny-mtp-mimo` from captured states
with a target of which only embedding, final norm and head are loaded, and get the weights of one process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.models.target import Target, TargetConfig
from draftsmith.train import cli
from draftsmith.train.stages import Stages

RECIPE = "tiny-mtp-mimo"
SHORT = ["train.steps=6", "train.save_every=6", "train.warmup_steps=1"]
ENDS = "target.ends_only=true"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and states are there; two ranks have trained from them."""
    place = tmp_path_factory.mktemp("route")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        with pytest.raises(SystemExit) as ended:
            cli.main(["capture", RECIPE])
        assert not ended.value.code
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "draftsmith.train", RECIPE, *SHORT, ENDS, "--out", "runs/two"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return place


def test_two_ranks_without_the_trunk_train_the_module_of_one_process_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", RECIPE, *SHORT, "--out", "runs/one"])
    assert not ended.value.code
    one, two = (load_file(folder / f"runs/{name}/step-6/draft/draft.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


def test_a_target_of_ends_holds_no_layer_and_gives_no_states() -> None:
    ends = Target.load(TargetConfig(name="tiny:mimo", dtype="float32", ends_only=True))
    whole = Target.load(TargetConfig(name="tiny:mimo", dtype="float32"))
    assert all(parameter.is_meta for parameter in ends.layers.parameters())
    assert torch.equal(ends.embedding, whole.embedding)
    assert torch.equal(ends.head, whole.head)
    assert ends.final_norm is not None
    assert whole.final_norm is not None
    assert torch.equal(ends.final_norm, whole.final_norm)
    assert ends.spec == whole.spec
    with pytest.raises(ValueError, match="has no layers here, so it gives no states; capture them first"):
        ends.forward(torch.tensor([[1, 2]]))


def test_without_captured_states_the_cure_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "cache", tmp_path / "cache", ignore=shutil.ignore_patterns("features-*"))
    stages = Stages.from_recipe(RECIPE, [ENDS])
    with pytest.raises(ValueError, match="run `draftsmith capture tiny-mtp-mimo` first, where the whole target fits"):
        stages.store("train")
