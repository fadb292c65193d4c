"""Protects what a run says about its time and its devices. Run: pytest tests/test_gauges.py"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest
import torch
from toy import ToyDraft, ToySource, config, eagle

from draftsmith.train import gauges
from draftsmith.train.loop import train
from draftsmith.train.track import MetricsFile

CPU = torch.device("cpu")
PHASES = [f"time/{phase}_ms" for phase in ("data", "wait", "forward", "backward", "optimizer")]


def rank(**seconds: float) -> dict[str, float]:
    return {**dict.fromkeys(gauges.PHASES, 0.0), **seconds}


def test_the_phases_of_a_step_add_up_to_it(tmp_path):
    train(ToyDraft(), None, ToySource(docs_per_pack=1), config(steps=4, log_every=4, save_every=1), tmp_path)
    [entry] = MetricsFile(tmp_path).read()
    parts = sum(entry[name] for name in PHASES)
    assert 0 < parts <= entry["time/step_ms"] * 1.01  # saving belongs to no phase
    assert entry["time/peak_memory_gib"] > 0.05
    assert not any(name.startswith("time/rank") for name in entry)
    assert "time/capture_ms" not in entry


def test_a_source_that_runs_the_target_is_capture(tmp_path):
    train(ToyDraft(), None, ToySource(), config(steps=2, warmup_steps=0), tmp_path, captures=True)
    assert all("time/capture_ms" in entry and "time/data_ms" not in entry for entry in MetricsFile(tmp_path).read())


def test_a_stalled_loader_is_said_once(tmp_path, capsys):
    class Slow(ToySource):
        def step(self, step, rank, world):
            time.sleep(0.03)
            return super().step(step, rank, world)

    train(ToyDraft(), None, Slow(), config(steps=20, log_every=10), tmp_path)
    said = capsys.readouterr().out
    assert said.count("warning: the loader holds training up: ") == 1
    assert "put cache/ on a local disk" in said


def test_a_slow_rank_is_named_with_its_factor():
    usual = [rank(data=0.1, forward=0.9, backward=2.0) for _ in range(7)]
    slow = rank(data=0.1, forward=1.9, backward=2.0)
    found = gauges.warnings([*usual[:3], slow, *usual[3:]], steps=10, seconds=4.0)
    assert list(found) == ["rank 3"]
    assert found["rank 3"].startswith("rank 3 is slow: 2.0 times the usual time for data and forward")
    assert gauges.warnings(usual, steps=10, seconds=4.0) == {}
    assert gauges.warnings([*usual, slow], steps=2, seconds=4.0) == {}  # chance
    assert (
        gauges.warnings([rank(forward=1e-3), rank(forward=9e-3)], steps=10, seconds=4.0) == {}
    )  # nothing worth a line
    assert list(gauges.warnings([rank(data=1.5)], steps=10, seconds=4.0)) == ["loader"]
    assert gauges.warnings([rank(capture=3.9)], steps=10, seconds=4.0) == {}  # the target is meant to work


def test_the_split_names_every_rank():
    found = gauges.split([rank(data=0.2, forward=1.0), rank(data=0.4, forward=2.0)], steps=10)
    assert found == pytest.approx(
        {
            "time/data_ms": 30,
            "time/forward_ms": 150,
            "time/rank0/data_ms": 20,
            "time/rank0/forward_ms": 100,
            "time/rank1/data_ms": 40,
            "time/rank1/forward_ms": 200,
        }
    )


def test_utilisation_counts_the_trained_matrices():
    draft = ToyDraft()  # fc and mix of 12 x 12, lm_head of 23 x 12
    assert gauges.flops_per_token(draft) == 6 * (2 * 144 + 276) * draft.work_per_token
    assert gauges.flops_per_token(eagle()) > 0
    assert gauges.peak_flops("AMD Instinct MI300X OAM") == 1307.4e12
    assert gauges.peak_flops("NVIDIA H200") == 989.4e12
    assert gauges.peak_flops("a toaster") is None
    assert gauges.device_peak(CPU) is None


# -- amdsmi --------------------------------------------------------------------------------------------------------
def fake_amdsmi(**values):
    """The package with the answers of GPU 5; an exception is raised."""

    def told(name):
        def ask(handle):
            assert handle == "gpu 5"
            if isinstance(values[name], Exception):
                raise values[name]
            return values[name]

        return ask

    return SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: [f"gpu {i}" for i in range(8)],
        amdsmi_get_power_info=told("power"),
        amdsmi_get_gpu_vram_usage=told("vram"),
    )


@pytest.mark.parametrize(
    ("power", "vram", "want"),
    [
        ({"current_socket_power": 512, "average_socket_power": "N/A"}, {"vram_used": 65536}, (512.0, 64.0)),
        ({"current_socket_power": "N/A", "average_socket_power": 400}, {"vram_used": "N/A"}, (400.0, None)),
        (RuntimeError("not supported"), {"vram_used": 1024, "vram_total": 196592}, (None, 1.0)),
    ],
)
def test_amd_values_are_megabytes_and_may_be_missing(monkeypatch, power, vram, want):
    monkeypatch.setitem(sys.modules, "amdsmi", fake_amdsmi(power=power, vram=vram))
    found = gauges.AmdGauge(5).read()
    assert (found.get("power_w"), found.get("used_memory_gib")) == want


def test_without_amdsmi_nothing_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)  # import fails
    assert gauges.AmdGauge(0).read() == {}


def test_a_device_is_found_among_those_that_hip_hides(monkeypatch):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,5,6")
    assert gauges.visible_index(torch.device("cuda", 1)) == 5
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    assert gauges.visible_index(torch.device("cuda", 1)) == 1


def test_memory_is_the_worst_ranks_and_power_the_sum():
    found = gauges.worst([{"peak_memory_gib": 3.0, "power_w": 500.0}, {"peak_memory_gib": 5.0, "power_w": 450.0}])
    assert found == {"time/peak_memory_gib": 5.0, "time/power_w": 950.0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_time_is_taken_from_its_queue():
    clock, a = gauges.Clock(torch.device("cuda", 0)), torch.randn(4096, 4096, device="cuda")
    clock.start()
    for _ in range(50):
        a = a @ a / 64
    clock.lap("forward")
    assert clock.read()["forward"] > 1e-3
