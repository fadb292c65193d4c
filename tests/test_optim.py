"""Protects train/optim.py: who moves which tensor, the schedule as a pure function, state by name. Run: pytest tests/test_optim.py"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from toy import ToyDraft, ToySource, config

from draftsmith.train.optim import build, lr_factor


def one_update(draft: ToyDraft, optimizers, steps: int = 1) -> None:
    for step in range(steps):
        (batch,) = ToySource().step(step, 0, 1)
        draft(batch, draft.counts(batch))["loss"].sum.backward()
        optimizers.step()
        optimizers.zero_grad()


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_the_schedule_equals_numbers_made_by_hand(schedule):
    values = [lr_factor(s, config(steps=10, warmup_steps=4, schedule=schedule)) for s in range(10)]
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    fall = {
        "linear": [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6],
        "cosine": [0.5 + 0.5 * math.cos(math.pi * k / 6) for k in range(6)],
        "constant": [1.0] * 6,
    }
    assert values[4:] == pytest.approx(fall[schedule])


def test_the_schedule_ends_at_the_smallest_ratio_and_starts_at_full_height_without_warm_up():
    settings = config(steps=1000, warmup_steps=0, min_lr_ratio=0.1)
    assert lr_factor(0, settings) == 1.0
    assert lr_factor(999, settings) == pytest.approx(0.1, abs=1e-3)
    assert lr_factor(5000, settings) == pytest.approx(0.1)  # past the end nothing turns negative


def test_the_usual_warm_up_is_a_tenth_of_the_run_and_at_most_ten_steps():
    assert [config(steps=n, warmup_steps=None).warmup for n in (1, 9, 50, 300)] == [0, 0, 5, 10]
    assert lr_factor(0, config(steps=50, warmup_steps=None)) == 0.2


def test_muon_moves_matrices_and_adamw_norms_biases_and_tables():
    parts = build(ToyDraft(), config(optimizer="muon")).parts
    names = {kind: {n for g in part.param_groups for n in g["names"]} for kind, part in parts.items()}
    assert names == {
        "muon": {"fc.weight", "mix.weight"},
        "adamw": {"fc.bias", "norm.weight", "norm.bias", "lm_head.weight"},
    }
    assert isinstance(parts["muon"], torch.optim.Muon)
    assert all(group["adjust_lr_fn"] == "match_rms_adamw" for group in parts["muon"].param_groups)
    assert all(group["fused"] for group in parts["adamw"].param_groups)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_trainable_tensor_moves_after_one_step_and_no_other(optimizer):
    draft = ToyDraft()
    draft.mix.weight.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in draft.named_parameters()}
    embedding, head = draft.embedding.clone(), draft.target_head.clone()
    optimizers = build(draft, config(optimizer=optimizer, weight_decay=0.1))
    optimizers.set_lr(1.0)
    one_update(draft, optimizers)
    moved = {name for name, p in draft.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(before) - {"mix.weight"}
    assert "mix.weight" not in optimizers.names
    assert torch.equal(embedding, draft.embedding)
    assert torch.equal(head, draft.target_head)


def test_overrides_take_the_longest_prefix_and_follow_the_schedule():
    settings = config(optimizer="muon", lr_overrides={"fc": 0.5, "fc.bias": 0.25, "norm": 0.0})
    optimizers = build(ToyDraft(), settings)
    optimizers.set_lr(0.5)
    rates = {name: group["lr"] for group in optimizers.groups() for name in group["names"]}
    assert rates == {
        "fc.weight": 0.25,
        "fc.bias": 0.125,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "mix.weight": 0.5 * settings.muon_lr,
        "lm_head.weight": 0.5 * settings.lr,
    }


def test_an_override_that_moves_nothing_is_refused_with_the_nearest_name():
    with pytest.raises(
        ValueError, match=r"train.lr_overrides: no trainable tensor starts with 'lm_hed'.*'lm_head.weight'"
    ):
        build(ToyDraft(), config(lr_overrides={"lm_hed": 0.1}))


def test_weight_decay_is_for_matrices_only():
    decay = {n: g["weight_decay"] for g in build(ToyDraft(), config(weight_decay=0.1)).groups() for n in g["names"]}
    assert {name for name, value in decay.items() if value == 0.1} == {"fc.weight", "mix.weight", "lm_head.weight"}


def saved(optimizers):
    """State as it is read back: the pieces of each tensor, here one."""
    return {k: {name: [state] for name, state in states.items()} for k, states in optimizers.state_dict().items()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_saved_state_continues_bitwise_and_rates_come_from_the_config(optimizer):
    draft = ToyDraft()
    optimizers = build(draft, config(optimizer=optimizer))
    one_update(draft, optimizers, steps=3)

    other = ToyDraft(seed=5)
    other.load_state_dict(draft.state_dict())
    resumed = build(other, config(optimizer=optimizer))
    resumed.load_state_dict(copy.deepcopy(saved(optimizers)))  # as through a file
    for which, d in ((optimizers, draft), (resumed, other)):
        which.set_lr(0.5)
        one_update(d, which, steps=2)
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), other.parameters(), strict=True))
    assert all(
        t.dtype == torch.float32 for part in resumed.state_dict().values() for s in part.values() for t in s.values()
    )

    slower = build(ToyDraft(), config(optimizer=optimizer, lr=1e-5, muon_lr=1e-5))
    slower.load_state_dict(saved(optimizers))
    assert {group["highest_lr"] for group in slower.groups()} == {1e-5}
    slower.set_lr(1.0)
    assert {group["lr"] for group in slower.groups()} == {1e-5}


def test_state_of_another_optimizer_is_refused():
    muon = build(ToyDraft(), config(optimizer="muon"))
    with pytest.raises(
        ValueError, match=r"of \['adamw', 'muon'\], this run uses \['adamw'\]: use the same train.optimizer"
    ):
        build(ToyDraft(), config()).load_state_dict(saved(muon))


def test_norm_weights_move_under_bf16_autocast_because_they_are_fp32():
    """H-TN-1: a bf16 weight at 1.0 would not move in 100 steps of 1e-3."""
    draft = ToyDraft()
    optimizers = build(draft, config(steps=100, lr=1e-3))
    for step in range(30):
        (batch,) = ToySource().step(step, 0, 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = draft(batch, draft.counts(batch))["loss"].sum
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
    assert draft.norm.weight.dtype == torch.float32
    assert (draft.norm.weight == 1.0).sum() == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 5, "warmup_steps": 5}, "warmup_steps 5 must be below steps 5"),
        ({"schedule": "constant", "min_lr_ratio": 0.1}, "min_lr_ratio 0.1 has no effect with schedule constant"),
        ({"betas": (0.9, 1.0)}, r"betas \[0.9, 1.0\] must both be in \[0, 1\)"),
        ({"lr_overrides": {"fc": -1.0}}, r"lr_overrides {'fc': -1.0} must be finite and >= 0"),
        ({"lr": 0}, "greater than 0"),
        ({"learning_rate": 1}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_cannot_work_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        config(**values)


def test_a_draft_without_matrices_cannot_use_muon_and_one_without_parameters_nothing():
    draft = ToyDraft()
    draft.fc, draft.mix = nn.Identity(), nn.Identity()
    with pytest.raises(ValueError, match="train.optimizer muon moves no tensor of ToyDraft: use adamw"):
        build(draft, config(optimizer="muon"))
    draft.requires_grad_(False)
    with pytest.raises(ValueError, match="ToyDraft has no trainable tensor"):
        build(draft, config())
