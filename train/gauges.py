"""Where the time of a step goes on each rank, how well the device is used, and what is said when a rank or the loader
holds the others up.

    time/{data,capture,wait,forward,backward,optimizer}_ms   means over steps and ranks; time/rankR/..._ms of each rank
    time/mfu                 matrix products of the trained weights / what the device can do at most: a lower limit
    time/peak_memory_gib     most that torch (on a CPU: the process) has held, the worst rank
    time/power_w, time/used_memory_gib                       AMD GPUs with amdsmi: power, memory of all programs

data: the loader; with data.source live it runs the target and is called capture. wait: until the slowest rank is
there, too. Times of a GPU are taken by events in its queue, so nothing waits for it; data and wait are the host's.
"""

from __future__ import annotations

import importlib
import os
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from draftsmith.models.draft import Draft

ON_DEVICE = ("forward", "backward", "optimizer")
PHASES = ("data", "capture", "wait", *ON_DEVICE)
PEAK_TFLOPS = {  # dense bf16, from the vendors' data sheets
    "MI300X": 1307.4,
    "MI325X": 1307.4,
    "MI350X": 2300.0,
    "MI355X": 2516.6,
    "H100": 989.4,
    "H200": 989.4,
    "A100": 312.0,
}
STALLED = 0.3  # share of a step that the loader may take before it is said
LEAST_STEPS = 10  # shorter windows are judged by chance
SLOW = 1.5  # own work of a rank over the median of the ranks, before it is said


class Clock:
    """Seconds per phase on this rank. `lap(phase)`: what was done since the last lap was that phase."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.start()

    def start(self) -> None:
        """Forget what was done since the last lap: it is no part of a step."""
        self._last = time.perf_counter()
        self._last_event = self._event()

    def lap(self, phase: str) -> None:
        now, event = time.perf_counter(), self._event()
        if event is not None and phase in ON_DEVICE:
            self._events.append((phase, self._last_event, event))
        else:
            self.seconds[phase] += now - self._last
        self._last, self._last_event = now, event

    def read(self) -> dict[str, float]:
        """Seconds per phase so far; on a GPU this waits for the last lap."""
        if self._events:
            self._events[-1][2].synchronize()
            for phase, began, ended in self._events:
                self.seconds[phase] += began.elapsed_time(ended) / 1000
            self._events = []
        return dict(self.seconds)

    def _event(self) -> Any:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def split(by_rank: Sequence[Mapping[str, float]], steps: int) -> dict[str, float | None]:
    """The seconds per phase of every rank as values to log, in ms per step; phases that never occurred left out."""
    out: dict[str, float | None] = {}
    used = [phase for phase in PHASES if any(rank[phase] for rank in by_rank)]
    for phase in used:
        out[f"time/{phase}_ms"] = 1000 * statistics.mean(rank[phase] for rank in by_rank) / steps
    if len(by_rank) > 1:
        for number, rank in enumerate(by_rank):
            out |= {f"time/rank{number}/{phase}_ms": 1000 * rank[phase] / steps for phase in used}
    return out


def warnings(by_rank: Sequence[Mapping[str, float]], steps: int, seconds: float) -> dict[str, str]:
    """{what is slow: a line about it}, for a window of so many steps and seconds."""
    found: dict[str, str] = {}
    if steps < LEAST_STEPS:
        return found
    data = max(rank["data"] for rank in by_rank)
    if data > STALLED * seconds:
        found["loader"] = (
            f"the loader holds training up: {data / seconds:.0%} of the time goes to reading batches; put cache/ on a "
            "local disk, or look for other work on these cores"
        )
    work = [rank["data"] + rank["capture"] + rank["forward"] for rank in by_rank]
    usual, slowest = statistics.median_low(work), max(work)
    if slowest > SLOW * usual and slowest - usual > 0.05 * seconds:
        number = work.index(slowest)
        found[f"rank {number}"] = (
            f"rank {number} is slow: {slowest / usual:.1f} times the usual time for data and forward; look at its "
            "device's clock, temperature and other programs (draftsmith doctor on its node)"
        )
    return found


# -- use of the device ---------------------------------------------------------------------------------------------
def flops_per_token(draft: Draft) -> float:
    """Of forward and backward of the trained matrices: 6 per weight and row. Attention and the target's head are not
    counted, so a utilisation made from it is a lower limit."""
    weights = sum(
        parameter.numel()
        for name, parameter in draft.named_parameters()
        if parameter.requires_grad
        and parameter.ndim == 2
        and (name.startswith("lm_head") or not name.startswith(draft.table_params))
    )
    return 6.0 * weights * draft.work_per_token


def peak_flops(device_name: str) -> float | None:
    """What a device can do at most in bf16 per second; None when it is not in the table."""
    found = [tflops for name, tflops in PEAK_TFLOPS.items() if name in device_name]
    return 1e12 * found[0] if found else None


def device_peak(device: torch.device) -> float | None:
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


class Gauges:
    """Memory and power of this rank's device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.amd = AmdGauge(visible_index(device)) if device.type == "cuda" and torch.version.hip else None

    def read(self) -> dict[str, float]:
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, else in KiB
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"peak_memory_gib": peak / 2**30, **(self.amd.read() if self.amd else {})}


def visible_index(device: torch.device) -> int:
    """The place of a torch device among all GPUs of the machine."""
    index = device.index or 0
    listed = os.environ.get("HIP_VISIBLE_DEVICES", "").split(",")
    return int(listed[index]) if index < len(listed) and listed[index].strip().isdigit() else index


class AmdGauge:
    """Power and used memory of one AMD GPU through the package amdsmi; nothing where it is missing or refuses."""

    def __init__(self, index: int):
        self.smi: Any = None
        try:
            smi = importlib.import_module("amdsmi")
            smi.amdsmi_init()
            self.handle = smi.amdsmi_get_processor_handles()[index]
            self.smi = smi
        except Exception:  # not installed, another version than the driver's, no such GPU: amdsmi raises many types
            return

    def read(self) -> dict[str, float]:
        if self.smi is None:
            return {}
        wanted = {
            "power_w": (self.smi.amdsmi_get_power_info, ("current_socket_power", "average_socket_power"), 1.0),
            "used_memory_gib": (self.smi.amdsmi_get_gpu_vram_usage, ("vram_used",), 1 / 1024),  # amdsmi counts MB
        }
        found = {}
        for name, (ask, keys, unit) in wanted.items():
            try:
                told = ask(self.handle)
            except Exception:  # a value that this GPU does not give
                continue
            values = [told[key] for key in keys if isinstance(told.get(key), int | float)]  # else "N/A"
            if values:
                found[name] = values[0] * unit
        return found


def worst(by_rank: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """The gauges of all ranks as values to log: the highest memory, the sum of power."""
    out: dict[str, float | None] = {}
    for name in ("peak_memory_gib", "used_memory_gib", "power_w"):
        values = [rank[name] for rank in by_rank if name in rank]
        if values:
            out[f"time/{name}"] = sum(values) if name == "power_w" else max(values)
    return out
