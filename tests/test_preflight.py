"""Protects train/preflight.py: each fault of a machine is seen, explained and cured. Run: pytest tests/test_preflight.py"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from draftsmith.models import layers
from draftsmith.train import loop, preflight, selftest
from draftsmith.train.preflight import Machine, judge, look

VERSIONS = {"torch": "2.13.0+rocm7.2", "transformers": "5.24.0", "accelerate": "1.15.0", "safetensors": "0.8.0"}
GOOD = Machine(
    versions=VERSIONS,
    hip="7.2",
    gpus=(("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 192.0),) * 8,
    built_for=("gfx90a", "gfx942"),
    mec_firmware=177,
    interfaces=("eth0", "lo"),
    rdma=("rdma0", "rdma1"),
    environment=preflight.ROCM_NODE,
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
        ({"gpus": (("MI300X", "gfx942", 192.0), ("MI325X", "gfx942", 256.0))}, "GPUs", "warn", "they differ: MI300X"),
        ({"built_for": ("gfx950",)}, "GPUs", "fail", "built for gfx950: take one that names gfx942"),
        ({"mec_firmware": 160}, "MEC firmware", "warn", "HSA_NO_SCRATCH_RECLAIM=1"),
        ({"environment": {}}, "ROCm variables", "warn", "NCCL_MIN_NCHANNELS=112 (it is unset)"),
        (
            {"environment": {**preflight.ROCM_NODE, "RCCL_MSCCL_ENABLE": "1"}},
            "ROCm variables",
            "warn",
            "set by hand: RCCL_MSCCL_ENABLE=0 (it is 1)",
        ),
        (
            {"gpus": (("MI355X", "gfx950", 288.0),), "built_for": ("gfx950",)},
            "RCCL_WARP_SPEED_AUTO",
            "warn",
            "came out as NaN",
        ),
        ({"environment": {"PYTORCH_TUNABLEOP_ENABLED": "1"}}, "TunableOp", "warn", "PYTORCH_TUNABLEOP_TUNING=0"),
        (
            {"environment": {"NCCL_SOCKET_IFNAME": "ib0"}},
            "NCCL_SOCKET_IFNAME",
            "fail",
            "no interface ib0 here; there are eth0, lo",
        ),
        ({"environment": {"NCCL_IB_HCA": "rdma0:1,mlx5_0:1"}}, "NCCL_IB_HCA", "fail", "no RDMA device mlx5_0"),
        ({"environment": {"DRAFTSMITH_FABRIC": "wifi"}}, "DRAFTSMITH_FABRIC", "fail", "expected one of roce, ainic"),
        ({"environment": {"DRAFTSMITH_FABRIC": "ainic"}}, "ainic variables", "warn", "NCCL_IB_TC=104 (it is unset)"),
        (
            {"environment": {"DRAFTSMITH_FABRIC": "roce"}, "rdma": ()},
            "RDMA devices",
            "warn",
            "--device=/dev/infiniband",
        ),
        ({"nodes": 2}, "fabric", "warn", "DRAFTSMITH_FABRIC=roce"),
        ({"nodes": 2}, "NCCL_SOCKET_IFNAME", "warn", "docker0"),
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


def test_fp8_speaks_the_dialect_of_the_gpu():
    assert "gfx942: e4m3fnuz" in {fact.value for fact in judge(GOOD)}
    newer = replace(GOOD, gpus=(("MI355X", "gfx950", 288.0),), built_for=("gfx950",))
    assert "gfx950: e4m3fn (OCP)" in {fact.value for fact in judge(newer)}


def test_variables_as_recommended_have_nothing_to_cure():
    old = replace(GOOD, mec_firmware=160, environment={**GOOD.environment, "HSA_NO_SCRATCH_RECLAIM": "1"})
    assert status(old)["MEC firmware"] == ("ok", "")
    for fabric, table in preflight.FABRICS.items():
        variables = {name: value or "1" for name, value in table.items()}
        names = {"NCCL_SOCKET_IFNAME": "eth", "NCCL_IB_HCA": "=rdma0:1,rdma1", "DRAFTSMITH_FABRIC": fabric}
        node = replace(GOOD, nodes=2, environment={**GOOD.environment, **variables, **names})
        assert all(found == ("ok", "") for found in status(node).values())
    assert "NCCL_SOCKET_IFNAME" not in status(replace(GOOD, environment={"NCCL_SOCKET_IFNAME": "^docker0,lo"}))


# -- self-tests ----------------------------------------------------------------------------------------------------
def test_this_device_passes_the_self_tests():
    facts = selftest.self_tests(torch.device("cpu"))
    assert [fact.name for fact in facts] == [
        "bf16 product",
        "sdpa, boolean mask",
        "sdpa, strided value",
        "draft attention",
    ]
    assert all(fact.status == "ok" for fact in facts), facts


@pytest.mark.parametrize(
    ("name", "test"),
    [
        ("masked_attention", "sdpa, boolean mask"),
        ("masked_attention", "sdpa, strided value"),
        ("block_attention", "draft attention"),
        ("chain_attention", "draft attention"),
    ],
)
def test_wrong_numbers_fail_their_self_test(monkeypatch, name, test):
    real = getattr(layers, name)

    def wrong_in_bf16(q, *rest, **more):
        return real(q, *rest, **more) * (1.2 if q.dtype == torch.bfloat16 else 1.0)

    monkeypatch.setattr(layers, name, wrong_in_bf16)
    found = {fact.name: fact for fact in selftest.self_tests(torch.device("cpu"))}
    assert found[test].status == "fail"
    assert found[test].cure == selftest.CURES[test]


def test_a_self_test_that_raises_is_a_failure_with_its_first_line(monkeypatch):
    def broken(device):
        raise RuntimeError("HIP error: invalid device ordinal\nmore")

    monkeypatch.setattr(selftest, "product_error", broken)
    [fact] = [fact for fact in selftest.self_tests(torch.device("cpu")) if fact.name == "bf16 product"]
    assert (fact.status, fact.value) == ("fail", "RuntimeError: HIP error: invalid device ordinal")
    assert not float("nan") < selftest.LARGEST_ERROR  # NaN fails, too


def test_the_exit_code_is_1_only_when_something_fails(capsys):
    assert preflight.doctor(machine=replace(GOOD, numa_balancing=1), tests=False) == 0
    assert "NUMA balancing" in capsys.readouterr().out
    broken = replace(GOOD, versions={**VERSIONS, "torch": "2.0"})
    assert preflight.doctor(as_json=True, machine=broken, tests=False) == 1
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
