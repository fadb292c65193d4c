"""Protects train/checkpoint.py: steps complete or absent, what is kept and what is never deleted, what may not change.
Run: pytest tests/test_checkpoint.py"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy import ToyDraft, config

from draftsmith.train import checkpoint
from draftsmith.train.checkpoint import Best, keep_last, latest, offer_best, open_run, read_best, restore, save, steps
from draftsmith.train.optim import build

RECIPE = {"target": {"name": "toy"}, "draft": {"family": "toy"}, "train": {"lr": 1e-5, "steps": 8, "log_every": 1}}


@pytest.fixture
def run(tmp_path) -> Path:
    open_run(tmp_path / "run", RECIPE, {"rows": "abc"})
    return tmp_path / "run"


def save_steps(run: Path, *numbers: int, seed: int = 0) -> None:
    draft = ToyDraft(seed)
    for number in numbers:
        save(run, number, draft, build(draft, config()), {"random": []})


def test_what_is_saved_is_read_back(run):
    draft = ToyDraft()
    optimizers = build(draft, config(optimizer="muon"))
    for p in draft.parameters():
        p.grad = torch.randn_like(p)
    optimizers.step()
    generator = torch.Generator().manual_seed(3)
    states = checkpoint.random_state(torch.device("cpu"), {"mine": generator})
    drawn = (random.random(), torch.rand(2), torch.rand(2, generator=generator))
    saved = save(run, 7, draft, optimizers, {"random": [states], "window": {"loss": [1.5, 2.0]}})

    other = ToyDraft(seed=9)
    again = build(other, config(optimizer="muon"))
    carried = restore(saved, other, again)
    assert carried["step"] == 7
    assert carried["window"] == {"loss": [1.5, 2.0]}
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), other.parameters(), strict=True))
    assert torch.equal(
        again.state_dict()["muon"]["fc.weight"]["momentum_buffer"],
        optimizers.state_dict()["muon"]["fc.weight"]["momentum_buffer"],
    )
    checkpoint.set_random_state(carried["random"][0], torch.device("cpu"), {"mine": generator})
    repeated = (random.random(), torch.rand(2), torch.rand(2, generator=generator))
    assert drawn[0] == repeated[0]
    assert torch.equal(drawn[1], repeated[1])
    assert torch.equal(drawn[2], repeated[2])


def test_no_pickle_is_needed_to_read_a_step(run):
    save_steps(run, 1)
    for path in (run / "step-1").rglob("*.pt"):
        torch.load(path, weights_only=True)
    assert {p.suffix for p in (run / "step-1").rglob("*") if p.is_file()} == {".pt", ".json", ".safetensors"}


def test_an_incomplete_step_is_not_a_step(run):
    save_steps(run, 1, 2, 3)
    (run / "step-3" / "state" / "optimizer.pt").write_bytes(b"half")
    (run / "step-4").mkdir()
    (run / "step-x").mkdir()
    assert [c.step for c in steps(run)] == [1, 2]
    assert latest(run).folder == run / "step-2"
    assert latest(run / "nowhere") is None


def test_keep_last_keeps_the_last_and_the_best(run):
    save_steps(run, 1, 2, 3, 4, 5)
    offer_best(run, Best(2, 1.9, "runtime", {}))
    keep_last(run, None)
    assert [c.step for c in steps(run)] == [1, 2, 3, 4, 5]
    keep_last(run, 2)
    assert [c.step for c in steps(run)] == [2, 4, 5]
    assert not (run / "step-1").exists()


def test_nothing_the_run_did_not_write_is_deleted(run, tmp_path):
    other = tmp_path / "other"
    open_run(other, RECIPE, {})
    save_steps(other, 2)
    save_steps(run, 1, 3, 4)
    (run / "step-1" / "notes.txt").write_text("mine")
    (run / "step-1" / "draft" / "mine.txt").write_text("mine")
    (other / "step-2").rename(run / "step-2")  # another run's step
    (run / "step-0").mkdir()
    (run / "step-0" / "mine.txt").write_text("mine")
    (run / ".step-9.other.tmp").mkdir()
    keep_last(run, 1)
    left = sorted(str(p.relative_to(run)) for p in run.rglob("*") if p.is_file() and "step-4" not in str(p))
    assert [p for p in left if p.startswith("step-")] == [
        "step-0/mine.txt",
        "step-1/draft/mine.txt",
        "step-1/notes.txt",
        "step-2/draft/draft.json",
        "step-2/draft/draft.safetensors",
        "step-2/state/loop.pt",
        "step-2/state/optimizer.pt",
        "step-2/step.json",
    ]
    assert (run / ".step-9.other.tmp").exists()
    with pytest.raises(OSError, match=r"step-0: exists and was not written by this run.*--out"):
        save_steps(run, 0)


def test_best_is_the_highest_value_and_the_first_of_equals(run):
    assert read_best(run) is None
    assert offer_best(run, Best(10, 1.5, "runtime", {"num": 5}))
    assert not offer_best(run, Best(20, 1.5, "runtime", {"num": 5}))
    assert not offer_best(run, Best(30, 1.4, "runtime", {"num": 5}))
    assert offer_best(run, Best(40, 1.6, "runtime", {"num": 5}))
    assert read_best(run) == Best(40, 1.6, "runtime", {"num": 5})
    assert offer_best(run, Best(50, 1.2, "runtime", {"num": 3}))  # measured otherwise: does not compare
    assert json.loads((run / "best.json").read_text())["step"] == 50


def test_a_full_disk_leaves_the_last_step_and_says_so(run, monkeypatch):
    save_steps(run, 1)

    def full(*_):
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        OSError, match=r"step-2: saving failed \(PytorchStreamWriter.*last good step, step-1, is untouched"
    ):
        save_steps(run, 2)
    monkeypatch.undo()
    assert [p.name for p in run.iterdir() if "step" in p.name] == ["step-1"]
    assert latest(run).step == 1


def test_a_started_run_refuses_another_recipe_and_names_every_key(run):
    changed = {**RECIPE, "train": {**RECIPE["train"], "lr": 3e-4, "log_every": 5, "lr_overrides": {"fc": 0.1}}}
    open_run(run, changed, {"rows": "abc"})  # not started yet: nothing to protect
    open_run(run, RECIPE, {"rows": "abc"})
    save_steps(run, 1)
    with pytest.raises(ValueError, match="was started with other settings") as error:
        open_run(run, changed, {"rows": "xyz"})
    text = str(error.value)
    assert f"train.lr: 1e-05 in {run}, 0.0003 now" in text
    assert f"train.lr_overrides.fc: None in {run}, 0.1 now" in text
    assert f"data rows: 'abc' in {run}, 'xyz' now" in text
    assert f"--out {run}-2" in text
    assert "log_every" not in text
    assert "extend_from" not in text


def test_frequencies_tracking_and_evaluation_may_change(run):
    save_steps(run, 1)
    values = {"log_every": 3, "save_every": 4, "eval_every": 5, "keep_last": 1, "tracker": "none", "ranks": 2}
    open_run(run, {**RECIPE, "eval": {"num_prompts": 3}, "train": {**RECIPE["train"], **values}}, {"rows": "abc"})


def test_longer_training_points_to_extend_from(run):
    save_steps(run, 1)
    with pytest.raises(ValueError, match=rf"train.steps: 8 in .*, 16 now(.|\n)*--out {run}-2 train.extend_from={run}"):
        open_run(run, {**RECIPE, "train": {**RECIPE["train"], "steps": 16}}, {"rows": "abc"})


def test_provenance_says_what_ran_and_keeps_its_id_over_sittings(run):
    first = checkpoint.provenance(run)
    save_steps(run, 4)
    open_run(run, RECIPE, {"rows": "abc"})
    second = checkpoint.provenance(run)
    assert second["run_id"] == first["run_id"]
    assert [sitting["step"] for sitting in second["resumed"]] == [4]
    assert set(first["versions"]) >= {"python", "torch", "transformers", "accelerate", "draftsmith", "torch_build"}
    assert first["data"] == {"rows": "abc"}
    assert first["git"] is None or re.fullmatch(r"[0-9a-f]{40}(\+changes)?", first["git"])
    assert first["command"] == sys.argv


def test_a_run_folder_is_held_by_one_process(tmp_path):
    refused = pytest.raises(ValueError, match=rf"is being trained by another process \(id {os.getpid()}\).*--out")
    with checkpoint.only_one(tmp_path / "run"), refused, checkpoint.only_one(tmp_path / "run"):
        pass
    with checkpoint.only_one(tmp_path / "run"):
        pass


def test_find_takes_a_run_or_a_step_and_refuses_the_rest(run):
    save_steps(run, 3, 6)
    assert checkpoint.find(run).step == 6
    assert checkpoint.find(run / "step-3").step == 3
    with pytest.raises(ValueError, match="no complete step here; expected a run folder, or a step such as"):
        checkpoint.find(run / "step-4")


KILLS = """
import os, random, signal, sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch
from toy import ToyDraft, config
from draftsmith.train.checkpoint import keep_last, latest, open_run, restore, save
from draftsmith.train.optim import build

torch.set_num_threads(1)
run, chance, before = Path({run!r}), random.Random(0), 0
for kill in range(12):
    open_run(run, {{}}, {{}})
    assert not list(run.glob(".step-*")), "what a kill left is cleared at the next start"
    child = os.fork()
    if child == 0:
        draft = ToyDraft()
        optimizers = build(draft, config())
        for step in range(before + 1, 100000):
            save(run, step, draft, optimizers, {{"random": []}})
            keep_last(run, 2)
    while latest(run) is None:
        time.sleep(0.01)
    time.sleep(chance.uniform(0.0, 0.08))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found, draft = latest(run), ToyDraft(seed=5)
    assert found.step >= before, (found, before)
    assert restore(found, draft, build(draft, config()))["step"] == found.step
    assert torch.equal(draft.fc.weight, ToyDraft().fc.weight)
    before = found.step
print("usable after every kill, last step", before)
"""


def test_a_kill_at_any_moment_of_saving_leaves_a_usable_step(tmp_path):
    script = KILLS.format(tests=str(Path(__file__).parent), run=str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "usable after every kill" in done.stdout
