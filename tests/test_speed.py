"""Protects the speed verb: the arithmetic of the best K, and that everything is measured. Run: pytest tests/test_speed.py"""

import json

import pytest
from rich.console import Console
from scripted import Bigram
from tiny import save_target, target_model, tokenizer

from draftsmith.eval.acceptance import EvalConfig
from draftsmith.eval.speed import best_num, speed, speed_table
from draftsmith.models.target import Target, TargetConfig


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = save_target(target_model("llama", num_hidden_layers=3), tokenizer(), tmp_path_factory.mktemp("llama"))
    return Target.load(TargetConfig(name=folder, dtype="float32", device="cpu"))


def test_the_best_number_of_proposals_by_hand():
    """K=1: 1.5 * 20 / (2 + 22) = 1.25; K=2: 1.8 * 20 / (3 + 25) = 1.29; K=3: 1.9 * 20 / (4 + 40) = .86."""
    best = best_num([0.5, 0.3, 0.1], [20.0, 22.0, 25.0, 40.0], [2.0, 3.0, 4.0])
    assert best["num_speculative_tokens"] == 2
    assert best["speedups"] == pytest.approx([1.0, 1.25, 36 / 28, 38 / 44])
    assert best["speedup"] == best["speedups"][2]


def test_where_every_round_costs_more_than_it_gains_the_best_number_is_zero():
    best = best_num([0.4], [20.0, 40.0], [5.0])
    assert best["num_speculative_tokens"] == 0
    assert best["speedup"] == 1.0


def test_everything_is_measured_and_shown(target):
    draft = Bigram(target, 1.0)
    config = EvalConfig(
        num_speculative_tokens=3, speed_prompts=2, speed_tokens=12, speed_repeats=2, speed_batch_sizes=(1, 3)
    )
    told = []
    found = speed(target, draft, [[1, 2, 3], [4], [5, 6]], config, progress=told.append)
    assert told == ["wall clock", "batch 1", "batch 3"]
    assert {k: len(v) for k, v in found["pass_ms"].items()} == {"1": 4, "3": 4}
    assert {k: len(v) for k, v in found["draft_ms"].items()} == {"1": 3, "3": 3}
    assert all(ms > 0 for each in (*found["pass_ms"].values(), *found["draft_ms"].values()) for ms in each)
    assert set(found["tokens_per_second"]) == {"plain", "speculative"}
    assert found["speedup"] > 0
    assert "a plain step" in found["advice"]
    assert found["num_prompts"] == 2
    json.dumps(found)
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(speed_table(found))
    text = console.export_text()
    for word in ("pass of 4, ms", "best K", "wall clock at batch 1, K=3", "cpu, float32"):
        assert word in text


def test_given_survival_decides_the_best_number(target):
    draft = Bigram(target, 1.0)
    config = EvalConfig(
        num_speculative_tokens=2, speed_prompts=1, speed_tokens=4, speed_repeats=1, speed_batch_sizes=(1,)
    )
    found = speed(target, draft, [[1, 2, 3]], config, survival=[0.0, 0.0])
    wanted = found["pass_ms"]["1"][0] / (found["draft_ms"]["1"][1] + found["pass_ms"]["1"][2])
    assert found["best"]["1"]["speedups"][2] == pytest.approx(wanted)
    assert found["survival"] == [0.0, 0.0]
