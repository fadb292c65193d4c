"""Protects train/preflight.py: each fault of a machine is seen, explained and cured. Run: pytest tests/test_preflight.py"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from draftsmith.train import loop, preflight
from draftsmith.train.preflight import Machine, judge, look

VERSIONS = {"torch": "2.13.0+rocm7.2", "transformers": "5.24.0", "accelerate": "1.15.0", "safetensors": "0.8.0"}
GOOD = Machine(
    versions=VERSIONS,
    hip="7.2",
    gpus=(("AMD Instinct MI300X", "gfx942", 192.0),) * 8,
    amd_driver=True,
    numa_balancing=0,
    cores=96,
    memory_gib=1500.0,
    disk_gib=900.0,
    cpu_flags=frozenset({"avx512_bf16"}),
)


def status(machine: Machine) -> dict[str, tuple[str, str]]:
    return {fact.name: (fact.status, fact.cure) for fact in judge(machine)}


def test_a_good_node_has_nothing_to_cure():
    assert all(found == ("ok", "") for found in status(GOOD).values())
    assert {"torch build", "GPUs", "visible devices", "NUMA balancing", "memory"} <= status(GOOD).keys()


@pytest.mark.parametrize(
    ("change", "name", "level", "words"),
    [
        ({"versions": {**VERSIONS, "torch": "2.8.1"}}, "torch", "fail", "2.9 or newer is needed"),
        ({"versions": {k: v for k, v in VERSIONS.items() if k != "accelerate"}}, "accelerate", "fail", "pip install"),
        ({"hip": None, "cuda": "12.8", "gpus": ()}, "torch build", "warn", "not built for it"),
        ({"gpus": ()}, "GPUs", "warn", "torch sees no GPU"),
        ({"numa_balancing": 1}, "NUMA balancing", "warn", "echo 0 >"),
        ({"memory_gib": 3.0}, "memory", "warn", "less than 4 GiB"),
        ({"disk_gib": 0.5}, "free disk here", "warn", "less than 2 GiB"),
        ({"gpus": (), "cpu_flags": frozenset()}, "CPU", "warn", "no bf16 instructions"),
        (
            {"environment": {"ROCR_VISIBLE_DEVICES": "4", "HIP_VISIBLE_DEVICES": "0"}},
            "visible devices",
            "fail",
            "ROCR_VISIBLE_DEVICES=4 and HIP_VISIBLE_DEVICES=0 differ",
        ),
        (
            {"environment": {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0"}},
            "visible devices",
            "fail",
            "set both to the same list",
        ),
    ],
)
def test_each_fault_is_named_with_its_cure(change, name, level, words):
    found = status(replace(GOOD, **change))
    assert found[name][0] == level
    assert words in found[name][1]


def test_equal_lists_and_lists_without_hip_are_no_conflict():
    same = {"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}
    assert preflight.visible_devices_conflict(same, hip=True) is None
    on_cuda = {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}
    assert preflight.visible_devices_conflict(on_cuda, hip=False) is None


def test_the_exit_code_is_1_only_when_something_fails(capsys):
    assert preflight.doctor(machine=replace(GOOD, numa_balancing=1)) == 0
    assert "NUMA balancing" in capsys.readouterr().out
    broken = replace(GOOD, versions={**VERSIONS, "torch": "2.0"})
    assert preflight.doctor(as_json=True, machine=broken) == 1
    found = {fact["name"]: fact for fact in json.loads(capsys.readouterr().out)}
    assert found["torch"] == {
        "name": "torch",
        "value": "2.0",
        "status": "fail",
        "cure": "2.9 or newer is needed: pip install -U torch",
    }


def test_this_machine_can_be_looked_at():
    machine = look()
    assert machine.cores >= 1
    assert machine.disk_gib > 0
    assert machine.versions["torch"]
    assert {fact.name for fact in judge(machine)} >= {"torch", "torch build", "GPUs", "memory"}


def test_training_refuses_conflicting_device_lists(monkeypatch):
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "4")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    with pytest.raises(ValueError, match="unset ROCR_VISIBLE_DEVICES and keep HIP_VISIBLE_DEVICES"):
        loop.check_launch()
