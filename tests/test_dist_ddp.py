"""Protects training on two ranks: the same losses and weights as on one, no hang, one gradient reduction a step.

Run: pytest tests/test_dist_ddp.py. One torchrun (two gloo processes on the CPU) runs every scenario of `worker` below;
the tests look at what it left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from safetensors.torch import load_file
from toy import ToyDraft, ToySource, ToyTarget, config, eagle

from draftsmith.models.draft import Draft
from draftsmith.train import checkpoint, loop
from draftsmith.train.track import MetricsFile

SCENARIOS: dict[str, dict[str, Any]] = {  # settings of the run, and of its source
    "adamw": {"run": {}, "source": {"docs_per_pack": 1}},
    "muon": {"run": {"optimizer": "muon", "clip": 0.5}, "source": {}},
    "idle_rank": {"run": {"steps": 6}, "source": {"unsupervised": (1, 3), "docs_per_pack": 1}},
    "eagle3": {"run": {"steps": 6}, "source": {"num_aux": 2, "docs_per_step": 3, "docs_per_pack": 1}},
    "resumed": {"run": {"save_every": 3, "log_every": 4}, "source": {}},
    "signal": {"run": {}, "source": {}},
    "evaluated": {"run": {"eval_every": 4}, "source": {}},
}


class Signalled(ToySource):
    def step(self, step, rank, world):
        if step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(step, rank, world)


class Broken(ToySource):
    def step(self, step, rank, world):
        if step == 5:
            raise RuntimeError("the power went out")
        return super().step(step, rank, world)


def worker(out: Path) -> None:
    """Every scenario on this rank; what cannot be seen in the run folders goes to facts-RANK.json."""
    accelerator = loop.make_accelerator(config(), out)
    rank, facts = accelerator.process_index, {}

    def run(name: str, draft: Draft, source: ToySource, **more: Any) -> loop.TrainResult:
        return loop.train(
            draft, ToyTarget(), source, config(**SCENARIOS[name]["run"]), out / name, accelerator=accelerator, **more
        )

    def weights(draft: Draft) -> list[float]:
        return [float(p.detach().double().sum()) for p in draft.parameters()]

    reductions, prepare = [], accelerator.prepare_model

    def counting(model):  # DDP calls its hook once per gradient bucket that it reduces; the toy fits into one
        wrapped = prepare(model)

        def hook(_, bucket):
            reductions.append(1)
            future = torch.distributed.all_reduce(bucket.buffer() / 2, async_op=True).get_future()
            return future.then(lambda done: done.value()[0])

        wrapped.register_comm_hook(None, hook)
        return wrapped

    for name in ("adamw", "muon", "idle_rank", "eagle3"):
        accelerator.prepare_model = counting if name == "adamw" else prepare
        draft = eagle() if name == "eagle3" else ToyDraft(seed=rank)  # unequal ranks: DDP takes rank 0's weights
        result = run(name, draft, ToySource(**SCENARIOS[name]["source"]))
        facts[name] = {"steps": result.step, "weights": weights(draft)}
    facts["reductions"] = len(reductions)

    accelerator.prepare_model = prepare
    noisy = [ToyDraft() for _ in range(2)]
    for draft in noisy:
        draft.noise = True  # every rank draws from its own sequence
    try:
        run("resumed", noisy[0], Broken())
    except RuntimeError as error:
        facts["broken"] = str(error)
    torch.manual_seed(17)
    facts["resumed"] = {"steps": run("resumed", noisy[1], ToySource()).step, "weights": weights(noisy[1])}
    whole = ToyDraft()
    whole.noise = True
    loop.train(whole, None, ToySource(), config(**SCENARIOS["resumed"]["run"]), out / "whole", accelerator=accelerator)
    facts["whole"] = {"weights": weights(whole)}

    result = run("signal", ToyDraft(), Signalled())
    facts["signal"] = {"steps": result.step, "interrupted": result.interrupted}

    evaluate = (lambda _: {"acceptance_length": 1.5}) if rank == 0 else None
    facts["evaluated"] = {"best": str(run("evaluated", ToyDraft(), ToySource(), evaluate=evaluate).best)}

    poisoned = ToySource()
    poisoned.poison = "row-2-1"  # a document of rank 1
    try:
        loop.train(ToyDraft(), None, poisoned, config(save_every=1), out / "nan", accelerator=accelerator)
    except loop.NonFinite as error:
        facts["nan"] = str(error)
    (out / f"facts-{rank}.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        __file__,
        str(folder),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return folder


def facts(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = (json.loads((out / f"facts-{rank}.json").read_text()) for rank in (0, 1))
    return first, second


def losses(run: Path) -> list[float]:
    return [entry["train/loss"] for entry in MetricsFile(run).read() if "train/loss" in entry]


def draft_tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"step-{step}/draft/draft.safetensors")


@pytest.mark.parametrize("name", ["adamw", "muon", "idle_rank", "eagle3"])
def test_two_ranks_give_the_losses_and_weights_of_one(out, tmp_path, name):
    source = ToySource(**{**SCENARIOS[name]["source"], "docs_per_pack": 4})
    settings = config(**SCENARIOS[name]["run"])
    loop.train(eagle() if name == "eagle3" else ToyDraft(), ToyTarget(), source, settings, tmp_path)
    assert losses(out / name) == pytest.approx(losses(tmp_path), abs=1e-5)
    one, two = draft_tensors(tmp_path, settings.steps), draft_tensors(out / name, settings.steps)
    # Muon orthogonalises in bf16, which turns rounding of the sums into 1e-3 of a step
    tolerance = 1e-3 if name == "muon" else 1e-5
    assert all(torch.allclose(one[key], two[key], atol=tolerance, rtol=0) for key in one)
    supervised = [[e["train/supervised_tokens"] for e in MetricsFile(run).read()] for run in (tmp_path, out / name)]
    assert supervised[0] == supervised[1]


def test_ranks_take_the_same_steps_and_hold_the_same_weights(out):
    """H-DR-1: rank 1 of idle_rank never has a supervised token."""
    first, second = facts(out)
    for name in ("adamw", "muon", "idle_rank", "eagle3", "resumed"):
        assert first[name] == second[name]
    assert first["idle_rank"]["steps"] == 6


def test_gradients_are_reduced_once_per_step(out):
    """H-PM-2: two micro-batches per rank and step, 8 steps."""
    assert [found["reductions"] for found in facts(out)] == [8, 8]


def test_a_run_on_two_ranks_resumes_bitwise(out):
    first, _ = facts(out)
    assert first["broken"] == "the power went out"
    assert first["resumed"]["weights"] == first["whole"]["weights"]
    assert losses(out / "resumed") == losses(out / "whole")
    a, b = draft_tensors(out / "resumed", 8), draft_tensors(out / "whole", 8)
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_signal_to_one_rank_stops_both_after_the_same_step_and_one_process_goes_on(out, tmp_path):
    first, second = facts(out)
    assert first["signal"] == second["signal"] == {"steps": 4, "interrupted": True}
    assert checkpoint.latest(out / "signal").step == 4
    loop.train(ToyDraft(), ToyTarget(), ToySource(), config(), out / "signal")  # saved on two ranks, resumed on one
    loop.train(ToyDraft(), ToyTarget(), ToySource(), config(), tmp_path / "whole")
    assert losses(out / "signal") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


def test_rank_0_alone_evaluates(out):
    first, second = facts(out)
    assert first["evaluated"] == second["evaluated"] == {"best": str(out / "evaluated/step-4/draft")}
    assert [e["step"] for e in MetricsFile(out / "evaluated").read() if loop.ACCEPTANCE in e] == [4, 8]


def test_nan_on_one_rank_stops_both_and_names_the_row(out):
    first, second = facts(out)
    assert first["nan"] == second["nan"]
    assert "step 3: the loss or its gradient is NaN or Inf" in first["nan"]
    assert "row-2-1" in first["nan"]
    assert checkpoint.latest(out / "nan").step == 2


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
