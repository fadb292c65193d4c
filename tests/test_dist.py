"""Protects the strategies: DDP, FSDP2, ZeRO-1 and ZeRO-2 give the numbers of one process, and resume each other's steps.

Run: make dist-test (it installs DeepSpeed; without it the ZeRO tests skip). One torchrun with two gloo processes on the
CPU runs every scenario of `two`, one with four resumes what two have saved; the tests look at what they left.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import block_drafts
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from toy import ToyDraft, ToySource, ToyTarget, config, eagle

from draftsmith.models.dflash import DFlash
from draftsmith.models.draft import Batch, Draft
from draftsmith.models.dspark import DSpark
from draftsmith.train import checkpoint, loop, strategy
from draftsmith.train.track import MetricsFile

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("dist"), pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[1]
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed: make dist-test")
ZERO = ("zero1", "zero2")
STRATEGIES = ("ddp", "fsdp2", *(ZERO if HAS_DEEPSPEED else ()))
every_strategy = pytest.mark.parametrize(
    "name", ["ddp", "fsdp2", *(pytest.param(zero, marks=needs_deepspeed) for zero in ZERO)]
)
FAMILIES = ("toy", "eagle3", "dflash", "dspark")
OPTIMIZERS = ("adamw", "muon")
STEPS, CUT = 6, 4  # steps of a run; where a run that is resumed was cut off

# fp32: sums over ranks are rounded in another order. Muon orthogonalises in bf16, which turns that into 1e-3 of a step;
# DeepSpeed's own Muon rounds the same iteration at other places: steps of the same size (1 %), turned by up to 18 % in
# directions that hardly occur in the gradient; the losses of these runs (3 to 14) then differ by up to 5e-3.
LOSS_TOLERANCE = {"adamw": 2e-5, "muon": 2e-3}
ZERO_MUON_TOLERANCE = 1e-2


class BlockSource(ToySource):
    """Documents for block drafts: `docs_per_step` of 9 to 17 tokens; a function of (step, index)."""

    def doc(self, step: int, index: int) -> dict[str, Any]:
        batch = block_drafts.batch_of((9 + (5 * step + 3 * index) % 9,), seed=100 * step + index)
        mask = batch.loss_mask & (index not in self.unsupervised)
        return {"batch": replace(batch, loss_mask=mask, row_ids=(f"row-{step}-{index}",), seed=step)}

    def pack(self, docs: list[dict[str, Any]]) -> Batch:
        none = block_drafts.batch_of((1,))
        parts = [doc["batch"] for doc in docs]
        bounds = [0]
        for part in parts:
            bounds.append(bounds[-1] + part.bounds[-1])

        def join(name: str) -> torch.Tensor:
            return torch.cat([getattr(none, name)[:0], *(getattr(part, name) for part in parts)])

        names = ("input_ids", "loss_mask", "positions", "features", "last_hidden")
        rows = tuple(row for part in parts for row in part.row_ids)
        seed = parts[0].seed if parts else 0
        return Batch(**{name: join(name) for name in names}, bounds=tuple(bounds), row_ids=rows, seed=seed)


class Broken(ToySource):
    """Fails after CUT steps, as a power cut does."""

    def step(self, step, rank, world):
        if step == CUT:
            raise RuntimeError("the power went out")
        return super().step(step, rank, world)


def draft_of(family: str) -> Draft:
    if family == "toy":
        return ToyDraft()
    if family == "eagle3":
        return eagle()
    cls = {"dflash": DFlash, "dspark": DSpark}[family]
    return block_drafts.draft_of(cls)


def source_of(family: str, docs_per_pack: int) -> ToySource:
    """Uneven: three or five documents a step, one or two of them without supervised tokens."""
    if family == "toy":
        return ToySource(docs_per_step=4, docs_per_pack=docs_per_pack, unsupervised=(1, 3))  # rank 1 of two: nothing
    if family == "eagle3":
        return ToySource(docs_per_step=3, docs_per_pack=docs_per_pack, num_aux=2)
    return BlockSource(docs_per_step=5, docs_per_pack=docs_per_pack, unsupervised=(2,))


def settings(optimizer: str, spread: str = "auto", **values: Any) -> loop.TrainConfig:
    clip = {"clip": None} if optimizer == "muon" else {"clip": 0.5}  # ZeRO cannot clip what Muon orthogonalises
    given = {"lr": 2e-3, "muon_lr": 2e-3, "steps": STEPS, "save_every": 1, "keep_last": None, **clip, **values}
    return config(optimizer=optimizer, strategy=spread, **given)


def two(out: Path) -> None:
    """Every scenario on this rank of two; what cannot be seen in the run folders goes to facts-RANK.json."""
    accelerator = loop.make_accelerator(config(), out)
    rank, facts = accelerator.process_index, {}

    def run(name: str, draft: Draft, source: ToySource, values: loop.TrainConfig, **more: Any) -> loop.TrainResult:
        return loop.train(draft, ToyTarget(), source, values, out / name, accelerator=accelerator, **more)

    spreads, real = [], strategy.spread

    def seen(*arguments: Any, **more: Any) -> strategy.Spread:
        spreads.append(real(*arguments, **more))
        return spreads[-1]

    loop.spread = seen
    for spread in STRATEGIES:
        for family in FAMILIES:
            for optimizer in OPTIMIZERS:
                draft = draft_of(family)
                frozen = [draft.embedding.clone(), draft.target_head.clone()]
                run(f"{spread}-{family}-{optimizer}", draft, source_of(family, 1), settings(optimizer, spread))
                on = spreads.pop()
                facts[f"{spread}-{family}-{optimizer}"] = {
                    "moved": sorted(on.optimizers.names),
                    "frozen": torch.equal(frozen[0], draft.embedding) and torch.equal(frozen[1], draft.target_head),
                    "state": state_elements(on),
                }
                del on
        values = {"steps": 4, "on_nonfinite": "skip"}
        poisoned = ToySource(docs_per_pack=1)
        poisoned.poison = "row-1-1"  # a document of rank 1
        run(f"{spread}-skip", ToyDraft(), poisoned, settings("adamw", spread, **values))
        try:
            run(f"{spread}-nan", ToyDraft(), poisoned, settings("adamw", spread, steps=4))
        except loop.NonFinite as error:
            facts[f"{spread}-nan"] = str(error)
        nothing = ToySource(docs_per_step=2, docs_per_pack=1, unsupervised=(0, 1))
        run(f"{spread}-nothing", ToyDraft(), nothing, settings("adamw", spread, steps=2, warmup_steps=0))
        lengths = iter((1.5, 1.25))
        evaluate = (lambda draft: {"acceptance_length": next(lengths), "sum": plain_sum(draft)}) if rank == 0 else None  # noqa: B023
        values = {"steps": 4, "eval_every": 2}
        best = run(f"{spread}-best", ToyDraft(), ToySource(), settings("adamw", spread, **values), evaluate=evaluate)
        facts[f"{spread}-best"] = str(best.best)
        for optimizer in OPTIMIZERS:  # cut off, resumed on as many ranks, and left for others to resume
            name = f"{spread}-cut-{optimizer}"
            try:
                run(name, ToyDraft(), Broken(), settings(optimizer, spread))
            except RuntimeError as error:
                facts[name] = str(error)
            if rank == 0:
                for number in (1, 4):
                    shutil.copytree(out / name, out / f"{name}-at-{number}")
            accelerator.wait_for_everyone()
            run(name, ToyDraft(seed=3), ToySource(), settings(optimizer, spread))
        spreads.clear()
    (out / f"facts-{rank}.json").write_text(json.dumps(facts))


def four(out: Path) -> None:
    """Goes on with what two ranks have saved; and trains once under each strategy."""
    accelerator = loop.make_accelerator(config(), out)
    for spread in STRATEGIES:
        for optimizer in OPTIMIZERS:
            run, values = out / f"{spread}-cut-{optimizer}-at-4", settings(optimizer, spread)
            loop.train(ToyDraft(seed=4), ToyTarget(), ToySource(), values, run, accelerator=accelerator)
            run = out / f"{spread}-four-{optimizer}"
            source = source_of("eagle3", 1)  # three documents: rank 3 never has one
            loop.train(eagle(), ToyTarget(), source, values, run, accelerator=accelerator)


def state_elements(on: strategy.Spread) -> int:
    """Elements of optimizer moments that this rank holds."""
    tensors = [
        value.to_local() if isinstance(value, DTensor) else value
        for part in on.optimizers.parts.values()
        for state in part.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    ]
    return sum(tensor.numel() for tensor in tensors)


def plain_sum(draft: Draft) -> float:
    """What only whole plain tensors give."""
    assert not any(isinstance(p, DTensor) for p in draft.parameters())
    return float(sum(p.double().sum() for p in draft.parameters()))


def torchrun(num: int, what: str, out: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num}", __file__]
    environment = {
        "TORCH_EXTENSIONS_DIR": str(ROOT / ".cache" / "torch-extensions"),
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # DeepSpeed compiles its Muon, minutes of work for matrices of 12 x 12
    }
    command += [what, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    torchrun(2, "two", folder)
    return folder


@pytest.fixture(scope="module")
def resumed(out) -> Path:
    torchrun(4, "four", out)
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The runs of one process, each step in one micro-batch."""
    folder = tmp_path_factory.mktemp("alone")
    for optimizer in OPTIMIZERS:
        for family in FAMILIES:
            run = folder / f"{family}-{optimizer}"
            loop.train(draft_of(family), ToyTarget(), source_of(family, 5), settings(optimizer), run)
        loop.train(ToyDraft(), ToyTarget(), ToySource(), settings(optimizer), folder / f"whole-{optimizer}")
    return folder


@pytest.fixture(scope="module")
def facts(out) -> list[dict[str, Any]]:
    return [json.loads((out / f"facts-{rank}.json").read_text()) for rank in (0, 1)]


def losses(run: Path) -> list[float]:
    return [entry["train/loss"] for entry in MetricsFile(run).read() if "train/loss" in entry]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"step-{step}/draft/draft.safetensors")


def farthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def tolerance(spread: str, optimizer: str) -> float:
    return ZERO_MUON_TOLERANCE if spread in ZERO and optimizer == "muon" else LOSS_TOLERANCE[optimizer]


# -- the numbers of one process ------------------------------------------------------------------------------------
@every_strategy
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_give_the_losses_of_one_process(out, alone, name, family, optimizer):
    """Uneven data, a document (of the toy: a rank, H-DR-1) without supervised tokens, and several micro-batches."""
    found, want = out / f"{name}-{family}-{optimizer}", alone / f"{family}-{optimizer}"
    assert losses(found) == pytest.approx(losses(want), abs=tolerance(name, optimizer))
    largest_step = 2e-3 * STEPS
    limit = {"adamw": 0.02, "muon": 0.5}[optimizer] * largest_step
    assert farthest(weights(found, STEPS), weights(want, STEPS)) < limit


@every_strategy
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_four_ranks_give_the_losses_of_one_process(resumed, alone, name, optimizer):
    found, want = losses(resumed / f"{name}-four-{optimizer}"), losses(alone / f"eagle3-{optimizer}")
    assert found == pytest.approx(want, abs=tolerance(name, optimizer))


@every_strategy
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_trainable_tensor_moves_in_one_step_and_nothing_else(out, facts, name, family, optimizer):
    """H-TN-6, and what accelerate loses of two optimizers under DeepSpeed."""
    draft = draft_of(family)
    trainable = sorted(n for n, p in draft.named_parameters() if p.requires_grad)
    after = weights(out / f"{name}-{family}-{optimizer}", 1)
    assert [n for n in trainable if torch.equal(after[n], draft.state_dict()[n])] == []
    for rank in facts:
        assert rank[f"{name}-{family}-{optimizer}"]["moved"] == trainable
        assert rank[f"{name}-{family}-{optimizer}"]["frozen"]


@every_strategy
def test_the_optimizer_state_of_a_rank_is_its_share(facts, name):
    """Without the target's frozen embedding and head: AdamW has two moments of each trainable element."""
    elements = 2 * sum(p.numel() for p in ToyDraft().parameters())
    held = [rank[f"{name}-toy-adamw"]["state"] for rank in facts]
    if name == "ddp":
        assert held == [elements, elements]
    else:
        assert elements <= sum(held) <= elements + 200  # ZeRO pads its flat tensors
        assert max(held) < 0.6 * elements


@pytest.mark.parametrize("zero", [pytest.param(zero, marks=needs_deepspeed) for zero in ZERO])
def test_deepspeeds_muon_makes_steps_of_the_size_of_torchs(out, alone, zero):
    for family in ("toy", "eagle3"):
        before = dict(draft_of(family).state_dict())
        ours, theirs = (weights(run, 1) for run in (alone / f"{family}-muon", out / f"{zero}-{family}-muon"))
        matrices = [n for n, t in before.items() if t.ndim == 2 and t.is_floating_point() and "lm_head" not in n]
        assert len(matrices) == {"toy": 2, "eagle3": 8}[family]
        for name in matrices:  # wide, tall and square ones
            want, got = ours[name] - before[name], theirs[name] - before[name]
            assert float(got.norm() / want.norm()) == pytest.approx(1, abs=0.02)
            assert float((got - want).norm() / want.norm()) < 0.25


@every_strategy
def test_a_step_without_supervised_tokens_changes_nothing(out, name):
    assert losses(out / f"{name}-nothing") == [0.0, 0.0]
    assert farthest(weights(out / f"{name}-nothing", 2), dict(ToyDraft().state_dict())) == 0


@every_strategy
def test_nan_on_one_rank_stops_or_is_left_out(out, facts, tmp_path, name):
    first, second = facts
    assert first[f"{name}-nan"] == second[f"{name}-nan"]
    assert "step 2: the loss or its gradient is NaN or Inf" in first[f"{name}-nan"]
    assert "row-1-1" in first[f"{name}-nan"]
    source = ToySource()
    source.poison = "row-1-1"
    loop.train(ToyDraft(), ToyTarget(), source, settings("adamw", steps=4, on_nonfinite="skip"), tmp_path)
    assert farthest(weights(out / f"{name}-skip", 4), weights(tmp_path, 4)) < 1e-4


@every_strategy
def test_rank_0_evaluates_a_whole_draft(out, facts, name):
    assert [rank[f"{name}-best"] for rank in facts] == [str(out / f"{name}-best/step-2/draft")] * 2
    [first, last] = [e for e in MetricsFile(out / f"{name}-best").read() if "accept/sum" in e]
    for entry in (first, last):
        saved = weights(out / f"{name}-best", entry["step"])
        assert entry["accept/sum"] == pytest.approx(sum(float(t.double().sum()) for t in saved.values()), abs=1e-9)


# -- resume --------------------------------------------------------------------------------------------------------
@every_strategy
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_of_two_ranks_resumes_on_two_bitwise(out, facts, name, optimizer):
    """H-DR-4: sharded state is read back, its step counts included."""
    assert facts[0][f"{name}-cut-{optimizer}"] == "the power went out"
    assert checkpoint.provenance(out / f"{name}-cut-{optimizer}")["resumed"][0]["step"] == CUT
    if name != "ddp":
        parts = sorted(p.name for p in (out / f"{name}-cut-{optimizer}/step-{CUT}/state").glob("optimizer*"))
        assert parts == ["optimizer-0-of-2.pt", "optimizer-1-of-2.pt"]


@every_strategy
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_of_two_ranks_resumes_on_any_number(resumed, alone, name, optimizer, ranks):
    run = resumed / f"{name}-cut-{optimizer}{f'-at-{ranks}' if ranks != 2 else ''}"
    if ranks == 1:  # a plain process: another number of ranks and another strategy
        loop.train(ToyDraft(seed=5), ToyTarget(), ToySource(), settings(optimizer), run)
    assert checkpoint.provenance(run)["resumed"][0]["step"] == CUT
    whole = alone / f"whole-{optimizer}"
    assert losses(run) == pytest.approx(losses(whole), abs=tolerance(name, optimizer))
    limit = 1e-5 if optimizer == "adamw" else 5e-3
    assert farthest(weights(run, STEPS), weights(whole, STEPS)) < limit


def test_a_missing_piece_is_named(out, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(out / "fsdp2-cut-adamw", run)
    for step in checkpoint.steps(run):
        state = step.folder / "state"
        record = json.loads((step.folder / "step.json").read_text())
        del record["files"]["state/optimizer-1-of-2.pt"]
        (step.folder / "step.json").write_text(json.dumps(record))
        (state / "optimizer-1-of-2.pt").unlink()
    with pytest.raises(ValueError, match=r"exp_avg of a tensor of shape .* ends at element \d+: a piece is missing"):
        checkpoint.restore(
            checkpoint.latest(run), ToyDraft(), loop.Optimizers(strategy.build(ToyDraft(), config()).parts)
        )


# -- kill -9 -------------------------------------------------------------------------------------------------------
NUM_KILLS = 20


def killed(out: Path) -> None:
    """Two forked ranks train with FSDP2 and are killed at a random moment, again and again; then they may finish."""
    generator, port = random.Random(0), 29_600 + os.getpid() % 2_000
    values = settings("adamw", "fsdp2", steps=4_000, keep_last=2)
    before = 0
    for kill in range(NUM_KILLS):
        children = [rank_process(rank, port + kill, values, out / "run") for rank in (0, 1)]
        started = time.monotonic()
        while first_step(out / "run") <= before and time.monotonic() - started < 60:
            time.sleep(0.01)
        time.sleep(generator.uniform(0.0, 0.4))
        for child in generator.sample(children, 2):
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        good = checkpoint.latest(out / "run")
        assert good is not None
        assert good.step > before, f"kill {kill}: step {good.step} after {before}"
        draft = ToyDraft(seed=9)
        state = checkpoint.restore(good, draft, strategy.build(draft, values))
        assert state["step"] == good.step
        assert all(torch.isfinite(t).all() for t in draft.state_dict().values())
        before = good.step
    (out / "last").write_text(str(before))


def first_step(run: Path) -> int:
    found = checkpoint.latest(run) if run.is_dir() else None
    return found.step if found else 0


def rank_process(rank: int, port: int, values: loop.TrainConfig, run: Path) -> int:
    child = os.fork()
    if child:
        return child
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        loop.train(ToyDraft(), ToyTarget(), ToySource(docs_per_pack=1), values, run)
    finally:
        os._exit(1)


def test_no_step_is_lost_by_20_kills_of_two_ranks_that_save_shards(tmp_path):
    command = [sys.executable, __file__, "killed", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    last = checkpoint.latest(tmp_path / "run")
    assert last.step == int((tmp_path / "last").read_text())
    assert len(checkpoint.provenance(tmp_path / "run")["resumed"]) == NUM_KILLS - 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"two": two, "four": four, "killed": killed}[sys.argv[1]](Path(sys.argv[2]))
