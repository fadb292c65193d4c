"""Protects train/loop.py on one process: resumed = uninterrupted, packing changes nothing, faults stop without damage.
Run: pytest tests/test_loop.py (several ranks: tests/test_dist_ddp.py)"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from safetensors.torch import load_file
from toy import ToyDraft, ToySource, ToyTarget, config, eagle

from draftsmith.train import checkpoint, loop
from draftsmith.train.loop import NonFinite, train
from draftsmith.train.track import MetricsFile


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    """accelerate keeps its state per process; each test starts without one."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


def metrics(run: Path) -> list[dict]:
    """What is logged, without times: they differ between equal runs."""
    return [{k: v for k, v in e.items() if not k.startswith("time/")} for e in MetricsFile(run).read()]


def losses(run: Path) -> list[float]:
    return [entry["train/loss"] for entry in metrics(run) if "train/loss" in entry]


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"step-{step}" / "draft" / "draft.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-5) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], atol=tolerance, rtol=0) for n in a)


class Interrupted(ToySource):
    """Sends this process a signal, or fails, when step `at` is fetched."""

    def __init__(self, at: int, number: int | None = None, **values):
        super().__init__(**values)
        self.at, self.number = at, number

    def step(self, step, rank, world):
        if step == self.at:
            if self.number is None:
                raise RuntimeError("the power went out")
            os.kill(os.getpid(), self.number)
        return super().step(step, rank, world)


# -- resume --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, optimizer, precision):
    """H-DR-2, H-DR-3: weights, optimizer, order, rates, random draws, and means of a window cut in two."""
    values = {"steps": 12, "save_every": 5, "log_every": 3, "optimizer": optimizer, "precision": precision}
    whole, cut = ToyDraft(), ToyDraft()
    whole.noise = cut.noise = True  # draws from torch's sequence in every forward
    train(whole, ToyTarget(), ToySource(), config(**values), tmp_path / "whole")
    with pytest.raises(RuntimeError, match="power"):
        train(cut, ToyTarget(), Interrupted(8), config(**values), tmp_path / "cut")
    torch.manual_seed(99)  # another process would stand elsewhere
    again = ToyDraft(seed=3)
    again.noise = True
    result = train(again, ToyTarget(), ToySource(), config(**values), tmp_path / "cut")
    assert result.step == 12
    assert again.seen == whole.seen[5 * 4 :]  # the documents of steps 6..12
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert equal(tensors(tmp_path / "cut", 12), tensors(tmp_path / "whole", 12))
    a, b = (torch.load(tmp_path / run / "step-12/state/optimizer.pt", weights_only=True) for run in ("cut", "whole"))
    for part, states in a.items():
        assert all(equal(states[name], b[part][name]) for name in states)
    assert all(t.dtype == torch.float32 for part in a.values() for s in part.values() for t in s.values())


def test_the_rate_goes_on_after_a_resume(tmp_path):
    """H-DR-3: warm-up does not run again."""
    values = config(steps=20, warmup_steps=5, save_every=4)
    with pytest.raises(RuntimeError):
        train(ToyDraft(), None, Interrupted(10), values, tmp_path / "run")
    train(ToyDraft(), None, ToySource(), values, tmp_path / "run")
    rates = [entry["train/lr"] for entry in metrics(tmp_path / "run")]
    want = [0.2, 0.4, 0.6, 0.8, 1.0] + [1 - k / 15 for k in range(15)]
    assert rates == pytest.approx([1e-2 * factor for factor in want])


def test_a_finished_run_does_nothing_again(tmp_path, capsys):
    first = train(
        ToyDraft(), None, ToySource(), config(), tmp_path / "run", evaluate=lambda _: {"acceptance_length": 2}
    )
    before = metrics(tmp_path / "run")
    draft = ToyDraft(seed=4)
    second = train(draft, None, ToySource(), config(), tmp_path / "run", evaluate=pytest.fail)
    assert second == first
    assert equal(dict(draft.state_dict()), tensors(tmp_path / "run", 8))
    assert checkpoint.provenance(tmp_path / "run")["resumed"] == []
    assert metrics(tmp_path / "run") == before
    assert "all 8 steps are done" in capsys.readouterr().out


def test_more_steps_go_on_in_a_new_run_with_extend_from(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    train(ToyDraft(), None, ToySource(), config(steps=4, schedule="constant"), old)
    with pytest.raises(ValueError, match=rf"train.steps: 4 in .*, 8 now(.|\n)*train.extend_from={old}"):
        train(ToyDraft(), None, ToySource(), config(steps=8, schedule="constant"), old)
    longer = config(steps=8, schedule="constant", extend_from=str(old), eval_every=4)
    evaluated: list[int] = []

    def evaluate(_):
        evaluated.append(len(metrics(new)))
        return {"acceptance_length": 1.5}

    result = train(ToyDraft(seed=4), None, ToySource(), longer, new, evaluate=evaluate)
    assert evaluated == [4]  # after step 8: the step that the run starts from is not its own
    assert result.best == new / "step-8/draft"
    train(ToyDraft(), None, ToySource(), config(steps=8, schedule="constant"), tmp_path / "whole")
    assert equal(tensors(new, 8), tensors(tmp_path / "whole", 8))
    assert [entry["step"] for entry in metrics(new)] == [5, 6, 7, 8, 8]
    assert checkpoint.latest(old).step == 4
    with pytest.raises(ValueError, match=r"step-4 has 4 steps, train.steps is 4: ask for more"):
        train(ToyDraft(), None, ToySource(), config(steps=4, extend_from=str(old)), tmp_path / "short")


def test_steps_without_a_checkpoint_start_over(tmp_path):
    with pytest.raises(RuntimeError):
        train(ToyDraft(), None, Interrupted(2), config(save_every=5), tmp_path / "run")
    train(ToyDraft(), None, ToySource(), config(save_every=5, lr=2e-2), tmp_path / "run")  # nothing to protect yet
    assert [entry["step"] for entry in metrics(tmp_path / "run")] == list(range(1, 9))


# -- what a step is ------------------------------------------------------------------------------------------------
def test_packing_and_accumulation_change_nothing(tmp_path):
    for docs_per_pack in (1, 2, 3, 4):
        source = ToySource(docs_per_pack=docs_per_pack, unsupervised=(1,))
        train(ToyDraft(), None, source, config(), tmp_path / str(docs_per_pack))
    for other in ("1", "2", "3"):
        assert losses(tmp_path / other) == pytest.approx(losses(tmp_path / "4"), abs=1e-6)
        assert close(tensors(tmp_path / other, 8), tensors(tmp_path / "4", 8))
    by_hand = ToyDraft().requires_grad_(False)
    (batch,) = ToySource(unsupervised=(1,)).step(0, 0, 1)
    assert losses(tmp_path / "1")[0] == pytest.approx(
        float(by_hand(batch, by_hand.counts(batch))["loss"].sum), abs=1e-6
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_eagle3_moves_everywhere_and_packing_changes_nothing(tmp_path, optimizer):
    values = config(steps=6, optimizer=optimizer)
    before = {name: p.detach().clone() for name, p in eagle().named_parameters()}
    for docs_per_pack in (4, 1):
        draft, source = eagle(), ToySource(docs_per_pack=docs_per_pack, num_aux=2, unsupervised=(2,))
        train(draft, ToyTarget(), source, values, tmp_path / str(docs_per_pack))
        assert all(not torch.equal(p, before[name]) for name, p in draft.named_parameters())
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "4"), abs=1e-4)
    one, four = tensors(tmp_path / "1", 6), tensors(tmp_path / "4", 6)
    # Muon orthogonalises in bf16, which turns rounding of the sums into 1e-3 of a step
    assert close(one, four, 1e-3 if optimizer == "muon" else 1e-5)
    assert losses(tmp_path / "4")[-1] < losses(tmp_path / "4")[0]


def test_a_resumed_eagle3_run_is_bitwise_the_uninterrupted_one(tmp_path):
    values = config(save_every=3, optimizer="muon", precision="bf16")
    with pytest.raises(RuntimeError, match="power"):
        train(eagle(), ToyTarget(), Interrupted(5, num_aux=2), values, tmp_path / "cut")
    for run in ("cut", "whole"):
        train(eagle(), ToyTarget(), ToySource(num_aux=2), values, tmp_path / run)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert equal(tensors(tmp_path / "cut", 8), tensors(tmp_path / "whole", 8))


def test_a_step_equals_plain_torch(tmp_path):
    """The loop against a loop of six lines."""
    values = config(steps=5, clip=0.5, weight_decay=0.1)
    train(ToyDraft(), None, ToySource(docs_per_pack=2), values, tmp_path / "run")
    plain = ToyDraft()
    matrices = [p for p in plain.parameters() if p.ndim == 2]
    rest = [p for p in plain.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.0, betas=values.betas)
    for step in range(5):
        (batch,) = ToySource().step(step, 0, 1)
        plain(batch, plain.counts(batch))["loss"].sum.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = 1e-2 * ((step + 1) / 2 if step < 2 else 1 - (step - 2) / 3)
        adamw.step()
        adamw.zero_grad()
    assert close(tensors(tmp_path / "run", 5), dict(plain.state_dict()), 1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_step_moves_every_trainable_tensor_and_leaves_the_target(tmp_path, optimizer):
    """H-TN-6."""
    draft, target = ToyDraft(), ToyTarget()
    before = {name: p.detach().clone() for name, p in draft.named_parameters()}
    frozen = {name: p.clone() for name, p in target.model.state_dict().items()}
    train(draft, target, ToySource(), config(steps=1, warmup_steps=0, optimizer=optimizer, weight_decay=0.1), tmp_path)
    assert all(not torch.equal(p, before[name]) for name, p in draft.named_parameters())
    assert equal(frozen, target.model.state_dict())


def test_a_step_without_supervised_tokens_is_harmless_and_counted(tmp_path):
    """H-TN-3."""
    source = ToySource(docs_per_step=1, unsupervised=(0,))
    train(ToyDraft(), None, source, config(steps=2, warmup_steps=0), tmp_path / "nothing")
    assert losses(tmp_path / "nothing") == [0.0, 0.0]
    assert equal(tensors(tmp_path / "nothing", 2), dict(ToyDraft().state_dict()))
    mixed = ToySource(docs_per_step=4, docs_per_pack=1, unsupervised=(2,))
    train(ToyDraft(), None, mixed, config(steps=2, warmup_steps=0, log_every=2), tmp_path / "mixed")
    assert metrics(tmp_path / "mixed")[0]["train/idle_batches"] == 2
    assert all(torch.isfinite(t).all() for t in tensors(tmp_path / "mixed", 2).values())


def test_a_window_is_the_mean_of_its_steps(tmp_path):
    train(ToyDraft(), None, ToySource(docs_per_pack=1), config(log_every=1), tmp_path / "each")
    train(ToyDraft(), None, ToySource(docs_per_pack=1), config(log_every=4), tmp_path / "four")
    each = metrics(tmp_path / "each")
    for first, entry in zip((0, 4), metrics(tmp_path / "four"), strict=True):
        part = each[first : first + 4]
        assert entry["step"] == first + 4
        assert entry["train/loss"] == pytest.approx(sum(e["train/loss"] for e in part) / 4)
        assert entry["train/supervised_tokens"] == sum(e["train/supervised_tokens"] for e in part)
        assert entry["train/lr"] == part[-1]["train/lr"]


def test_bf16_runs_the_forward_in_bf16_and_keeps_fp32_weights(tmp_path):
    draft, seen = ToyDraft(), []
    draft.fc.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    train(draft, None, ToySource(), config(steps=2, warmup_steps=0, precision="bf16"), tmp_path)
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in draft.parameters()} == {torch.float32}
    (batch,) = ToySource().step(0, 0, 1)
    draft(batch, draft.counts(batch))
    assert seen[-1] == torch.float32  # the draft is handed back without accelerate's autocast


# -- evaluation ----------------------------------------------------------------------------------------------------
def test_the_best_step_is_by_measured_acceptance_and_survives_keep_last(tmp_path):
    values = iter([1.5, 1.9, 1.7, 1.6])
    seen_training = []

    def evaluate(draft):
        seen_training.append(draft.training)
        torch.rand(5)
        random.random()
        return {"acceptance_length": next(values), "method": "exact", "by_kind": {"math": 2.0}, "num_rounds": 7}

    settings = config(steps=8, eval_every=2, save_every=None, keep_last=1)
    draft = ToyDraft()
    draft.noise = True
    result = train(draft, None, ToySource(), settings, tmp_path / "run", evaluate=evaluate, recipe={"eval": {"num": 3}})
    assert result.best == tmp_path / "run/step-4/draft"
    assert result.draft == result.best
    assert result.acceptance_length == 1.9
    best = json.loads((tmp_path / "run/best.json").read_text())
    assert best == {"step": 4, "value": 1.9, "method": "exact", "settings": {"num": 3}}
    assert [c.step for c in checkpoint.steps(tmp_path / "run")] == [4, 8]
    accepted = [e for e in metrics(tmp_path / "run") if loop.ACCEPTANCE in e]
    assert [(e["step"], e[loop.ACCEPTANCE], e["accept/num_rounds"]) for e in accepted] == [
        (2, 1.5, 7),
        (4, 1.9, 7),
        (6, 1.7, 7),
        (8, 1.6, 7),
    ]
    assert seen_training == [False] * 4
    alone = ToyDraft()
    alone.noise = True
    train(alone, None, ToySource(), settings, tmp_path / "alone")
    assert equal(tensors(tmp_path / "run", 8), tensors(tmp_path / "alone", 8))  # evaluating draws nothing from training


def test_an_evaluation_that_was_lost_is_done_on_resume(tmp_path):
    def dies(_):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        train(ToyDraft(), None, ToySource(), config(eval_every=4), tmp_path / "run", evaluate=dies)
    assert checkpoint.latest(tmp_path / "run").step == 4
    result = train(
        ToyDraft(),
        None,
        ToySource(),
        config(eval_every=4),
        tmp_path / "run",
        evaluate=lambda _: {"acceptance_length": 1.5},
    )
    assert [e["step"] for e in metrics(tmp_path / "run") if loop.ACCEPTANCE in e] == [4, 8]
    assert result.best == tmp_path / "run/step-4/draft"


def test_an_evaluation_without_a_finite_length_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must return a finite 'acceptance_length', got nan \(keys"):
        train(ToyDraft(), None, ToySource(), config(), tmp_path, evaluate=lambda _: {"acceptance_length": float("nan")})


# -- faults --------------------------------------------------------------------------------------------------------
def test_nan_stops_with_step_and_rows_and_saves_nothing(tmp_path):
    source = ToySource(docs_per_pack=2)
    source.poison = "row-4-3"
    with pytest.raises(NonFinite) as error:
        train(ToyDraft(), None, source, config(save_every=1), tmp_path / "run")
    text = str(error.value)
    assert "step 5: the loss or its gradient is NaN or Inf" in text
    assert "rows of that step: row-4-2, row-4-3." in text  # the micro-batch at fault, not the other one
    assert f"the last good step is {tmp_path / 'run' / 'step-4'}" in text
    assert "train.on_nonfinite=skip" in text
    assert checkpoint.latest(tmp_path / "run").step == 4
    assert all(torch.isfinite(t).all() for t in tensors(tmp_path / "run", 4).values())
    # the cure that the message names works on the same run
    train(ToyDraft(), None, source, config(save_every=1, on_nonfinite="skip"), tmp_path / "run")
    assert all(torch.isfinite(t).all() for t in tensors(tmp_path / "run", 8).values())


def test_a_skipped_step_changes_nothing(tmp_path, capsys):
    source = ToySource()
    source.poison = "row-1-0"
    train(ToyDraft(), None, source, config(steps=2, warmup_steps=0, on_nonfinite="skip"), tmp_path / "skip")
    train(ToyDraft(), None, ToySource(), config(steps=1, warmup_steps=0), tmp_path / "one")
    assert equal(tensors(tmp_path / "skip", 2), tensors(tmp_path / "one", 1))
    assert "step 2/2  left out: loss or gradient is not finite" in capsys.readouterr().out


def test_nan_seen_late_names_the_first_bad_step(tmp_path, monkeypatch):
    source = ToySource()
    source.poison = "row-2-1"
    real = loop.check_finite

    def only_at_log(first_bad, done, *rest):
        if done % 4 == 0:
            real(first_bad, done, *rest)

    monkeypatch.setattr(loop, "check_finite", only_at_log)
    with pytest.raises(NonFinite, match=r"step 3: .*rows of that step: row-2-0, row-2-1, row-2-2, row-2-3"):
        train(ToyDraft(), None, source, config(log_every=4), tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_the_same_command_goes_on(tmp_path, number, capfd):
    handler = signal.getsignal(number)
    values = config(steps=10)
    result = train(ToyDraft(), None, Interrupted(3, number), values, tmp_path / "run")
    assert result.interrupted
    assert result.step == 4
    assert signal.getsignal(number) is handler
    out, err = capfd.readouterr()
    name = signal.Signals(number).name
    assert f"{name}: finishing this step and saving; once more to end at once" in err
    assert f"{name}: saved {tmp_path}/run/step-4 (4 of 10 steps). The same command goes on from there." in out
    assert not train(ToyDraft(), None, ToySource(), values, tmp_path / "run").interrupted
    train(ToyDraft(), None, ToySource(), values, tmp_path / "whole")
    assert equal(tensors(tmp_path / "run", 10), tensors(tmp_path / "whole", 10))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_a_signal_during_an_evaluation_breaks_it_off_and_it_is_done_again(tmp_path):
    def interrupted(_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        return pytest.fail("the evaluation went on")

    values = config(eval_every=8)
    result = train(ToyDraft(), None, ToySource(), values, tmp_path, evaluate=interrupted)
    assert result.interrupted
    assert result.step == 8
    assert result.best is None
    result = train(ToyDraft(), None, ToySource(), values, tmp_path, evaluate=lambda _: {"acceptance_length": 1.25})
    assert result.acceptance_length == 1.25


SECOND = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
from toy import ToyDraft, ToySource, config
from draftsmith.train import loop
loop.SECOND_SIGNAL_AFTER = 0.1
class Slow(ToySource):
    def step(self, step, rank, world):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # what a launcher passes on: not a second wish
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)
        return super().step(step, rank, world)
loop.train(ToyDraft(), None, Slow(), config(save_every=1), {run!r})
"""


def test_a_second_signal_ends_at_once(tmp_path):
    script = SECOND.format(tests=str(Path(__file__).parent), run=str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGTERM
    assert checkpoint.latest(tmp_path / "run").step == 2


# -- refusals before any work --------------------------------------------------------------------------------------
def test_a_changed_key_of_a_started_run_is_refused(tmp_path):
    run = tmp_path / "run"
    train(ToyDraft(), None, ToySource(), config(), run)
    with pytest.raises(ValueError, match=rf"train.lr: 0.01 in {run}, 0.5 now(.|\n)*--out {run}-2"):
        train(ToyDraft(), None, ToySource(), config(lr=0.5), run)
    train(ToyDraft(), None, ToySource(), config(log_every=2, save_every=1, eval_every=2, keep_last=None), run)


def test_a_trainable_target_is_refused(tmp_path):
    target = ToyTarget()
    target.model["embed"].weight.requires_grad_(True)
    with pytest.raises(
        ValueError, match="target parameter embed.weight requires a gradient; the target is never trained"
    ):
        train(ToyDraft(), target, ToySource(), config(), tmp_path)


def test_a_draft_that_shares_memory_with_the_target_is_refused(tmp_path):
    draft, target = ToyDraft(), ToyTarget()
    draft.lm_head.weight = torch.nn.Parameter(target.model["head"].weight.data)
    with pytest.raises(
        ValueError, match="draft parameter lm_head.weight shares its memory with the target's head.weight"
    ):
        train(draft, target, ToySource(), config(), tmp_path)


def test_16_bit_weights_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"draft parameter fc.weight is torch.bfloat16; weights are trained in torch.float32"
    ):
        train(ToyDraft().bfloat16(), None, ToySource(), config(), tmp_path)


@pytest.mark.parametrize(
    ("environment", "values", "message"),
    [
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            {},
            r"fsdp2 spreads a run over ranks, but one process started; start several .*train.strategy=auto",
        ),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, "zero2 spreads a run over ranks"),
        ({}, {"ranks": 2}, "train.ranks is 2, but 1 started; on CPUs use `torchrun --nproc_per_node 2"),
    ],
)
def test_a_launch_that_cannot_be_active_is_refused(tmp_path, monkeypatch, environment, values, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        train(ToyDraft(), None, ToySource(), config(**values), tmp_path)


def test_ranks_that_accelerate_did_not_connect_are_refused(tmp_path, monkeypatch):
    accelerator = loop.make_accelerator(config(), tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 ranks were launched, but accelerate connected 1 \(distributed_type NO"):
        train(ToyDraft(), None, ToySource(), config(), tmp_path, accelerator=accelerator)


def test_an_accelerator_of_another_precision_is_refused(tmp_path):
    accelerator = loop.make_accelerator(config(), tmp_path)
    with pytest.raises(
        ValueError, match=r"train.precision bf16 needs mixed_precision 'bf16', accelerate has 'no' active"
    ):
        train(ToyDraft(), None, ToySource(), config(precision="bf16"), tmp_path, accelerator=accelerator)


def test_a_launcher_that_divides_for_accumulation_is_undone(tmp_path, monkeypatch):
    train(ToyDraft(), None, ToySource(docs_per_pack=1), config(steps=3), tmp_path / "plain")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = loop.make_accelerator(config(), tmp_path)
    assert accelerator.gradient_accumulation_steps == 4
    train(ToyDraft(), None, ToySource(docs_per_pack=1), config(steps=3), tmp_path / "env", accelerator=accelerator)
    assert close(tensors(tmp_path / "plain", 3), tensors(tmp_path / "env", 3), 1e-6)


def test_tracking_gets_what_metrics_get(tmp_path):
    from accelerate.tracking import GeneralTracker

    class Memory(GeneralTracker):
        name, requires_logging_directory = "memory", False

        def __init__(self):
            super().__init__(_blank=True)
            self.seen, self.finished = [], False

        tracker = property(lambda self: self)

        def log(self, values, step, **_):
            self.seen.append((step, dict(values)))

        def finish(self):
            self.finished = True

    accelerator, memory = loop.make_accelerator(config(), tmp_path), Memory()
    accelerator.trackers = [memory]
    found = {"acceptance_length": 1.5, "method": "exact"}
    train(ToyDraft(), None, ToySource(), config(steps=3), tmp_path, accelerator=accelerator, evaluate=lambda _: found)
    assert [step for step, _ in memory.seen] == [1, 2, 3, 3]
    assert memory.seen[-1] == (3, {loop.ACCEPTANCE: 1.5})
    assert set(memory.seen[0][1]) >= {"train/loss", "train/lr", "train/grad_norm", "time/tok_s"}
    assert memory.finished
