"""The environment check behind `draftsmith doctor`: facts of this machine, what is wrong with them, and the cure.

`look` collects raw facts, `judge` is a pure function of them, `doctor` prints the result. Nothing here starts training
or touches a setting.
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
BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")  # x86 and Arm, as /proc/cpuinfo spells them


@dataclass(frozen=True)
class Machine:
    """Raw facts. gpus: (name, architecture, GiB) of each that torch sees. numa_balancing: None where Linux has none."""

    versions: Mapping[str, str]
    hip: str | None = None
    cuda: str | None = None
    gpus: tuple[tuple[str, str, float], ...] = ()
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
    return Machine(
        versions=versions(),
        hip=torch.version.hip,
        cuda=torch.version.cuda,
        gpus=tuple(gpus),
        amd_driver=Path("/dev/kfd").exists(),
        nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        environment={name: os.environ[name] for name in VISIBLE if name in os.environ},
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
    if machine.hip and machine.numa_balancing is not None:
        on = machine.numa_balancing > 0
        cure = "pages move between sockets during transfers: echo 0 > /proc/sys/kernel/numa_balancing, as root"
        facts.append(Fact("NUMA balancing", "on" if on else "off", "warn" if on else "ok", cure if on else ""))
    if not machine.gpus:
        facts.append(_cpu(machine))
    facts.append(_enough("memory", machine.memory_gib, 4.0, "a 135M target needs about 2 GiB, larger ones more"))
    facts.append(_enough("free disk here", machine.disk_gib, 2.0, "features and checkpoints go to cache/ and runs/"))
    return facts


def doctor(as_json: bool = False, machine: Machine | None = None) -> int:
    """Print the table (or JSON); returns 1 when a fact fails, else 0."""
    facts = judge(machine or look())
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
    if machine.gpus:
        first = machine.gpus[0]
        return Fact("GPUs", f"{len(machine.gpus)} x {first[0]} ({first[1]}, {first[2]:.0f} GiB)")
    if (machine.hip and machine.amd_driver) or (machine.cuda and machine.nvidia_driver):
        cure = (
            "the driver and torch's build fit, but torch sees no GPU: look at the visible-device variables and rights"
        )
        return Fact("GPUs", "none", "warn", cure)
    return Fact("GPUs", "none")


def _visible_devices(machine: Machine) -> Fact:
    value = ", ".join(f"{name}={text}" for name, text in machine.environment.items()) or "all"
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
