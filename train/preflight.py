"""The environment check behind `draftsmith doctor`: facts of this machine, what is wrong with them, and the cure.

`look` collects raw facts, `judge` is a pure function of them, `doctor` prints the result together with the numerical
self-tests of selftest.py. Nothing here starts training or touches a setting. The tables of ROCm variables are those of
recipes/launch-rocm-env.sh, which says the reason of each.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from packaging.version import Version
from rich.console import Console
from rich.table import Table

from draftsmith.train.checkpoint import versions

Status = Literal["ok", "warn", "fail"]
LEAST = {"torch": "2.9", "transformers": "5.8", "accelerate": "1.10", "safetensors": "0.5"}  # as in pyproject.toml
VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
ROCM_NODE: dict[str, str | None] = {  # one node of 8 GPUs
    "GPU_MAX_HW_QUEUES": "2",
    "HSA_ENABLE_SDMA": "1",
    "NCCL_MIN_NCHANNELS": "112",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    "RCCL_MSCCL_ENABLE": "0",
    "RCCL_MSCCLPP_ENABLE": "0",
    "TORCH_BLAS_PREFER_HIPBLASLT": "1",
}
ROCM_NODES: dict[str, str | None] = {
    "NCCL_IB_ROCE_VERSION_NUM": "2",
    "NCCL_CROSS_NIC": "0",
    "NCCL_P2P_NET_CHUNKSIZE": "524288",
}
FABRICS: dict[str, dict[str, str | None]] = {  # what DRAFTSMITH_FABRIC may be; None: any value, but it must be set
    "roce": {**ROCM_NODES, "NCCL_IB_GID_INDEX": None, "NCCL_PXN_DISABLE": "1"},
    "ainic": {
        **ROCM_NODES,
        "NCCL_IB_GID_INDEX": "1",
        "NCCL_IB_TC": "104",
        "NCCL_IB_FIFO_TC": "192",
        "NCCL_IB_SL": "0",
        "NCCL_IB_QPS_PER_CONNECTION": "1",
        "NCCL_PXN_DISABLE": "0",
        "NCCL_DMABUF_ENABLE": "0",
        "NCCL_GDR_FLUSH_DISABLE": "1",
        "NCCL_IGNORE_CPU_AFFINITY": "1",
        "NCCL_IB_USE_INLINE": "1",
        "NCCL_MAX_P2P_CHANNELS": "56",
        "RCCL_GDR_FLUSH_GPU_MEM_NO_RELAXED_ORDERING": "0",
    },
}
PREFIXES = ("NCCL_", "RCCL_", "HSA_", "GPU_MAX_", "TORCH_NCCL_", "TORCH_BLAS_", "PYTORCH_", "GLOO_", "DRAFTSMITH_")
LEAST_FIRMWARE = 177  # MEC firmware from which scratch memory is taken back without a stall
FP8 = {"gfx942": "e4m3fnuz", "gfx950": "e4m3fn (OCP)"}
BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")  # x86 and Arm, as /proc/cpuinfo spells them


@dataclass(frozen=True)
class Machine:
    """Raw facts. gpus: (name, architecture, GiB) of each that torch sees. numa_balancing: None where Linux has none.

    built_for: architectures that this torch was compiled for. mec_firmware: of the first AMD GPU, None where the driver
    does not tell. interfaces, rdma: names of network interfaces and of RDMA devices. nodes: of a launched run.
    """

    versions: Mapping[str, str]
    hip: str | None = None
    cuda: str | None = None
    gpus: tuple[tuple[str, str, float], ...] = ()
    built_for: tuple[str, ...] = ()
    mec_firmware: int | None = None
    interfaces: tuple[str, ...] = ()
    rdma: tuple[str, ...] = ()
    nodes: int = 1
    amd_driver: bool = False
    nvidia_driver: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    numa_balancing: int | None = None
    cores: int = 1
    threads: int = 1
    memory_gib: float = 0.0
    disk_gib: float = 0.0
    cpu_flags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Fact:
    """One line of the table. cure: cause and what to do, empty when the fact is ok."""

    name: str
    value: str
    status: Status = "ok"
    cure: str = ""


def look() -> Machine:
    """The facts of the machine this process runs on."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = "sm_{}{}".format(*torch.cuda.get_device_capability(index))
        architecture = properties.gcnArchName if torch.version.hip else capability
        gpus.append((properties.name, architecture, properties.total_memory / 2**30))
    numa = Path("/proc/sys/kernel/numa_balancing")
    world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return Machine(
        versions=versions(),
        hip=torch.version.hip,
        cuda=torch.version.cuda,
        gpus=tuple(gpus),
        built_for=tuple(torch.cuda.get_arch_list()),
        mec_firmware=_mec_firmware(),
        interfaces=_names("/sys/class/net"),
        rdma=_names("/sys/class/infiniband"),
        nodes=max(1, world // local),
        amd_driver=Path("/dev/kfd").exists(),
        nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        environment={k: v for k, v in os.environ.items() if k in VISIBLE or k.startswith(PREFIXES)},
        numa_balancing=int(numa.read_text()) if numa.is_file() else None,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_gib=_memory_gib(),
        disk_gib=shutil.disk_usage(Path.cwd()).free / 2**30,
        cpu_flags=_cpu_flags(),
    )


def judge(machine: Machine) -> list[Fact]:
    """Every fact with its status; a pure function, so that each fault can be tried without the hardware."""
    facts = [_package(name, machine.versions.get(name)) for name in LEAST]
    facts += [_build(machine), _gpus(machine), _visible_devices(machine)]
    if machine.hip:
        facts += _rocm(machine)
    facts += _network(machine)
    if not machine.gpus:
        facts.append(_cpu(machine))
    facts.append(_enough("memory", machine.memory_gib, 4.0, "a 135M target needs about 2 GiB, larger ones more"))
    facts.append(_enough("free disk here", machine.disk_gib, 2.0, "features and checkpoints go to cache/ and runs/"))
    return facts


def doctor(as_json: bool = False, machine: Machine | None = None, tests: bool = True) -> int:
    """Print the table (or JSON), on rank 0; returns 1 when a fact fails, else 0. tests: run the self-tests, too."""
    facts = judge(machine or look())
    if tests:
        from draftsmith.train.selftest import self_tests

        facts += self_tests()
    if int(os.environ.get("RANK", "0")) == 0:
        if as_json:
            print(json.dumps([asdict(fact) for fact in facts], indent=2))
        else:
            Console().print(table(facts))
    return int(any(fact.status == "fail" for fact in facts))


def table(facts: list[Fact]) -> Table:
    shown = Table("", "", "", "cause and cure", title="this machine", title_justify="left")
    styles = {"ok": "green", "warn": "yellow", "fail": "red"}
    for fact in facts:
        shown.add_row(fact.name, fact.value, f"[{styles[fact.status]}]{fact.status}[/]", fact.cure)
    return shown


def visible_devices_conflict(environment: Mapping[str, str], hip: bool) -> str | None:
    """What is wrong with the variables that hide GPUs, with the cure, or None.

    ROCR_VISIBLE_DEVICES filters first and HIP_VISIBLE_DEVICES numbers what is left, so two different lists hide more
    than either says. HIP reads CUDA_VISIBLE_DEVICES as well.
    """
    hip_list, rocr, cuda = (environment.get(name) for name in VISIBLE)
    if hip_list is not None and rocr is not None and hip_list != rocr:
        return (
            f"ROCR_VISIBLE_DEVICES={rocr} and HIP_VISIBLE_DEVICES={hip_list} differ, and HIP numbers what ROCR left: "
            "unset ROCR_VISIBLE_DEVICES and keep HIP_VISIBLE_DEVICES"
        )
    if hip and hip_list is not None and cuda is not None and hip_list != cuda:
        return (
            f"HIP_VISIBLE_DEVICES={hip_list} and CUDA_VISIBLE_DEVICES={cuda} differ: set both to the same list, or "
            "HIP_VISIBLE_DEVICES alone"
        )
    return None


# -- single facts --------------------------------------------------------------------------------------------------
def _package(name: str, found: str | None) -> Fact:
    least = LEAST[name]
    if found is None:
        return Fact(name, "missing", "fail", f"pip install '{name}>={least}'")
    old = Version(found) < Version(least)
    return Fact(
        name, found, "fail" if old else "ok", f"{least} or newer is needed: pip install -U {name}" if old else ""
    )


def _build(machine: Machine) -> Fact:
    value = f"HIP {machine.hip}" if machine.hip else f"CUDA {machine.cuda}" if machine.cuda else "CPU"
    if machine.amd_driver and not machine.hip and not machine.nvidia_driver:
        cure = (
            "an AMD driver is here, but this torch was not built for it (a plain pip install replaces a ROCm build): "
            "install torch from AMD's or PyTorch's ROCm index again; harmless if this machine is to train on its CPU"
        )
        return Fact("torch build", value, "warn", cure)
    return Fact("torch build", value)


def _gpus(machine: Machine) -> Fact:
    if not machine.gpus:
        if (machine.hip and machine.amd_driver) or (machine.cuda and machine.nvidia_driver):
            cure = (
                "the driver and torch's build fit, but torch sees no GPU: look at the visible-device variables and "
                "rights (groups video and render, --device=/dev/kfd --device=/dev/dri in a container)"
            )
            return Fact("GPUs", "none", "warn", cure)
        return Fact("GPUs", "none")
    first = machine.gpus[0]
    value = f"{len(machine.gpus)} x {first[0]} ({first[1]}, {first[2]:.0f} GiB)"
    kinds = sorted({f"{name} ({architecture}, {gib:.0f} GiB)" for name, architecture, gib in machine.gpus})
    if len(kinds) > 1:
        return Fact("GPUs", value, "warn", f"they differ: {', '.join(kinds)}; the slowest sets the pace of every step")
    architecture = first[1].partition(":")[0]  # gfx942:sramecc+:xnack-
    built_for = {name.partition(":")[0] for name in machine.built_for}
    if machine.hip and built_for and architecture not in built_for:
        cure = f"this torch (or image) was built for {', '.join(sorted(built_for))}: take one that names {architecture}"
        return Fact("GPUs", value, "fail", cure)
    return Fact("GPUs", value)


def _rocm(machine: Machine) -> list[Fact]:
    """What matters on AMD GPUs alone."""
    facts, environment = [], machine.environment
    if machine.numa_balancing is not None:
        on = machine.numa_balancing > 0
        cure = "pages move between sockets during transfers: echo 0 > /proc/sys/kernel/numa_balancing, as root"
        facts.append(Fact("NUMA balancing", "on" if on else "off", "warn" if on else "ok", cure if on else ""))
    firmware, reclaim = machine.mec_firmware, environment.get("HSA_NO_SCRATCH_RECLAIM")
    if firmware is not None:
        old = firmware < LEAST_FIRMWARE and reclaim != "1"
        cure = f"below {LEAST_FIRMWARE} the GPU stalls while it takes scratch memory back: HSA_NO_SCRATCH_RECLAIM=1"
        facts.append(Fact("MEC firmware", str(firmware), "warn" if old else "ok", cure if old else ""))
    architectures = {gpu[1].partition(":")[0] for gpu in machine.gpus}
    for architecture in sorted(architectures & FP8.keys()):
        facts.append(Fact("fp8", f"{architecture}: {FP8[architecture]}"))
    if "gfx950" in architectures and environment.get("RCCL_WARP_SPEED_AUTO") != "0":
        value = environment.get("RCCL_WARP_SPEED_AUTO", "unset")
        cure = "on gfx950 sums over ranks came out as NaN: export RCCL_WARP_SPEED_AUTO=0"
        facts.append(Fact("RCCL_WARP_SPEED_AUTO", value, "warn", cure))
    if environment.get("PYTORCH_TUNABLEOP_ENABLED") == "1" and environment.get("PYTORCH_TUNABLEOP_TUNING") != "0":
        cure = "steps have many lengths, so tuning never ends: tune once, then PYTORCH_TUNABLEOP_TUNING=0"
        facts.append(Fact("TunableOp", "tuning", "warn", cure))
    if len(machine.gpus) > 1:
        facts.append(_variables("ROCm variables", ROCM_NODE, environment))
    return facts


def _network(machine: Machine) -> list[Fact]:
    """What ranks of several nodes need, and what names a device that is not here."""
    facts, environment = [], machine.environment
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = environment.get(name, "")
        if wanted and not wanted.startswith("^") and machine.interfaces:
            names = [part.lstrip("=") for part in wanted.split(",")]
            missing = [part for part in names if not any(found.startswith(part) for found in machine.interfaces)]
            cure = (
                f"no interface {', '.join(missing)} here; there are {', '.join(machine.interfaces)}" if missing else ""
            )
            facts.append(Fact(name, wanted, "fail" if missing else "ok", cure))
    hca = environment.get("NCCL_IB_HCA", "")
    if hca and not hca.startswith("^"):
        names = [part.lstrip("=").partition(":")[0] for part in hca.split(",")]
        missing = [part for part in names if not any(found.startswith(part) for found in machine.rdma)]
        cure = f"no RDMA device {', '.join(missing)}; there are {', '.join(machine.rdma) or 'none'}" if missing else ""
        facts.append(Fact("NCCL_IB_HCA", hca, "fail" if missing else "ok", cure))
    fabric = environment.get("DRAFTSMITH_FABRIC")
    if fabric is not None and fabric not in FABRICS:
        facts.append(Fact("DRAFTSMITH_FABRIC", fabric, "fail", f"expected one of {', '.join(FABRICS)}"))
    elif fabric is not None:
        facts.append(_variables(f"{fabric} variables", FABRICS[fabric], environment))
        if not machine.rdma:
            cure = "no RDMA device is seen, so nodes would talk over TCP: --device=/dev/infiniband, or the driver"
            facts.append(Fact("RDMA devices", "none", "warn", cure))
    elif machine.hip and machine.nodes > 1:
        cure = "export DRAFTSMITH_FABRIC=roce (or ainic) and source recipes/launch-rocm-env.sh on every node"
        facts.append(Fact("fabric", f"{machine.nodes} nodes, not said", "warn", cure))
    if machine.nodes > 1 and "NCCL_SOCKET_IFNAME" not in environment:
        cure = "ranks may look for each other on docker0: NCCL_SOCKET_IFNAME=the interface that all nodes reach"
        facts.append(Fact("NCCL_SOCKET_IFNAME", "unset", "warn", cure))
    return facts


def _variables(name: str, wanted: Mapping[str, str | None], environment: Mapping[str, str]) -> Fact:
    """Compare an environment with a table."""
    other = [
        f"{key}={value if value is not None else '(any value)'} (it is {environment.get(key, 'unset')})"
        for key, value in wanted.items()
        if (key not in environment if value is None else environment.get(key) != value)
    ]
    if not other:
        return Fact(name, f"all {len(wanted)} as recommended")
    cure = f"source recipes/launch-rocm-env.sh, or set by hand: {', '.join(other)}"
    return Fact(name, f"{len(other)} of {len(wanted)} differ", "warn", cure)


def _visible_devices(machine: Machine) -> Fact:
    lists = {name: machine.environment[name] for name in VISIBLE if name in machine.environment}
    value = ", ".join(f"{name}={text}" for name, text in lists.items()) or "all"
    problem = visible_devices_conflict(machine.environment, hip=machine.hip is not None)
    return Fact("visible devices", value, "fail" if problem else "ok", problem or "")


def _cpu(machine: Machine) -> Fact:
    value = f"{machine.cores} cores, {machine.threads} threads"
    if machine.cpu_flags.isdisjoint(BF16_FLAGS):
        cure = (
            "no bf16 instructions: verification in fp32 costs about twice as much per row, so a draft gains little here"
        )
        return Fact("CPU", f"{value}, no bf16", "warn", cure)
    return Fact("CPU", f"{value}, bf16")


def _enough(name: str, gib: float, least: float, why: str) -> Fact:
    low = gib < least
    return Fact(name, f"{gib:.1f} GiB", "warn" if low else "ok", f"less than {least:.0f} GiB: {why}" if low else "")


def _names(folder: str) -> tuple[str, ...]:
    path = Path(folder)
    return tuple(sorted(entry.name for entry in path.iterdir())) if path.is_dir() else ()


def _mec_firmware() -> int | None:
    """Of the first AMD GPU; the driver gives it as 0x000000b1."""
    for path in sorted(Path("/sys/class/drm").glob("card*/device/fw_version/mec_fw_version")):
        try:
            return int(path.read_text().strip(), 16) & 0xFFFF
        except (OSError, ValueError):  # no right to read it, or another form
            continue
    return None


def _memory_gib() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError):  # not told on this system
        return 0.0


def _cpu_flags() -> frozenset[str]:
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return frozenset()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    flags = [line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features"))]
    return frozenset(flags[0].split()) if flags else frozenset()
