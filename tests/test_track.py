"""Protects train/track.py: metrics without gaps or doubles, trackers chosen before work, one fixed log line.
Run: pytest tests/test_track.py"""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from draftsmith.train import track
from draftsmith.train.track import MetricsFile, View, choose, line, wandb_mode


def test_metrics_are_cut_at_the_resumed_step_and_a_half_line_is_dropped(tmp_path):
    metrics = MetricsFile(tmp_path)
    assert metrics.read() == []
    for step in (1, 2, 3):
        metrics.append(step, {"train/loss": 0.5 * step, "train/accuracy": None})
    metrics.append(2, {"accept/acceptance_length": 1.5})
    with open(metrics.path, "a") as file:
        file.write('{"step": 4, "train/lo')
    metrics.truncate(2)
    metrics.append(3, {"train/loss": 9.0})
    lines = [json.loads(text) for text in metrics.path.read_text().splitlines()]
    assert [entry["step"] for entry in lines] == [1, 2, 2, 3]
    assert lines[-1]["train/loss"] == 9.0
    assert lines[0]["train/accuracy"] is None
    assert metrics.has(2, "accept/acceptance_length")
    assert not metrics.has(3, "accept/acceptance_length")


def test_auto_takes_wandb_when_it_is_there_and_says_so_when_not(monkeypatch):
    monkeypatch.setattr(track, "_installed", lambda package: package == "wandb")
    assert choose("auto") == ("wandb", None)
    monkeypatch.setattr(track, "_installed", lambda package: False)
    assert choose("auto") == (None, "wandb is not installed: metrics go to metrics.jsonl alone")
    assert choose("none") == (None, None)


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused(name, monkeypatch):
    monkeypatch.setattr(track, "_installed", lambda package: False)
    with pytest.raises(ValueError, match=rf"train.tracker is '{name}', but the package '{name}' is not installed: pip"):
        choose(name)


def test_wandb_is_offline_without_a_key(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert wandb_mode() == "offline"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert wandb_mode() == "online"
    (tmp_path / ".netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode() == "disabled"


def test_the_log_line_has_a_fixed_order_and_units():
    values = {
        "time/step_ms": 812.4,
        "train/lr": 1e-3,
        "train/accuracy": 0.25,
        "train/supervised_tokens": 1234.0,
        "train/loss": 2.5,
        "train/loss_0": 1.5,
        "train/loss_1": 1.0,
        "train/match_0": 0.412,
        "train/match_1": None,
        "train/match_2": 0.1,
        "train/nothing_counted": None,
        "train/grad_norm": 0.5,
        "time/tok_s": 12345.6,
        "time/data_ms": 3.0,
    }
    assert line(7, 300, values) == (
        "step   7/300  loss 2.5000  (1.50/1.00)  accuracy 0.2500  match 0.41/-/0.10  lr 1.00e-03  grad_norm 0.5000  "
        "12,346 tok/s  812 ms"
    )


def test_plain_lines_without_a_terminal_a_bar_on_one_and_nothing_elsewhere():
    plain, terminal = io.StringIO(), io.StringIO()
    with View(0, 3, main=True, console=Console(file=plain, width=200)) as view:
        view.say("step [1/3]")  # brackets are text, not markup
        view.advance()
    assert plain.getvalue() == "step [1/3]\n"
    with View(0, 3, main=True, console=Console(file=terminal, force_terminal=True, width=100)) as view:
        view.say("step 1/3")
        view.advance()
    assert "train" in terminal.getvalue()
    assert "1/3" in terminal.getvalue()
    with View(0, 3, main=False) as view:
        assert view.bar is None
        assert view.console.quiet
