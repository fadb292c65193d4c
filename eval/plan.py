"""What a recipe costs before anything is spent: disk, memory, time, and when the draft has paid for itself.

    features on disk = tokens * (aux layers + 1) * width * bytes        (+1: the last hidden state)
    training memory  = draft parameters * (4 weights + 4 gradients + 8 AdamW moments) bytes + frozen target tensors
    time of a stage  = floating-point work / (measured matmul rate of this device * the stage's usual efficiency)

The matmul rate is measured here in a fraction of a second; the efficiencies are what the quick start reached on one
core (SmolLM2-135M, AMD EPYC with AVX512-BF16, 2026-11-30; see docs/results.md), so expect a factor of two either way.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from draftsmith.models.draft import Draft, Needs, TargetSpec

# share of the matmul rate that a stage reaches
EFFICIENCY = {"regenerate": 0.25, "capture": 0.6, "train": 0.35}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
USUAL_ACCEPTANCE = 2.0  # a first draft's acceptance length, used for break-even until this run has measured its own


@dataclass(frozen=True)
class Work:
    """What the recipe asks for, in numbers. Counts marked `estimated` are guesses from the prompts and limits."""

    num_prompts: int
    answer_tokens: int  # supervised tokens to generate, all prompts together
    all_tokens: int  # prompt and answer tokens to capture
    estimated: bool
    regenerates: bool
    keeps_features: bool  # data.source: cache
    feature_dtype: str
    num_steps: int
    batch_tokens: int
    kv_numbers: int = 0  # keys and values of a token that the draft reads, as numbers


def target_parameters(spec: TargetSpec) -> int:
    """Parameters of the decoder layers and the head, from the sizes (dense layers; experts are not counted)."""
    attention = spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    return spec.num_layers * (attention + mlp) + spec.vocab_size * spec.hidden_size


def matmul_rate(device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16, seconds: float = 0.3) -> float:
    """Floating-point operations per second of a square matmul on this device, measured."""
    size = 1024 if torch.device(device).type == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)

    def wait() -> None:
        if a.is_cuda:
            torch.cuda.synchronize()

    a @ b
    wait()
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        a @ b
        wait()
        rounds += 1
    return rounds * 2 * size**3 / (time.perf_counter() - start)


def plan(
    work: Work,
    spec: TargetSpec,
    draft: Draft,
    rate: float,
    target_dtype: str = "bfloat16",
    acceptance: float | None = None,
) -> dict[str, Any]:
    """The plan as plain numbers: bytes, seconds, tokens. `draft` may live on the meta device. rate: FLOP/s."""
    needs: Needs = draft.needs
    states = len(needs.aux_layers) + (1 if needs.last_hidden else 0)
    draft_params = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    params = target_parameters(spec)
    per_token = (states * spec.hidden_size + work.kv_numbers) * DTYPE_BYTES[work.feature_dtype]
    steps_tokens = work.num_steps * work.batch_tokens
    flops = {
        "regenerate": 2 * params * work.answer_tokens if work.regenerates else 0,
        "capture": 2 * params * (work.all_tokens if work.keeps_features else steps_tokens),
        "train": 6 * draft_params * steps_tokens * draft.work_per_token,
    }
    seconds = {stage: amount / (rate * EFFICIENCY[stage]) for stage, amount in flops.items()}
    target_bytes = (params + spec.vocab_size * spec.hidden_size) * DTYPE_BYTES[target_dtype]
    frozen = 2 * spec.vocab_size * spec.hidden_size * 4 if work.keeps_features else target_bytes
    length = acceptance or USUAL_ACCEPTANCE
    plain = 2 * params / (rate * EFFICIENCY["regenerate"])
    saved = plain * (1 - 1 / length)
    return {
        "num_prompts": work.num_prompts,
        "answer_tokens": work.answer_tokens,
        "tokens_estimated": work.estimated,
        "feature_bytes_per_token": per_token,
        "disk_bytes": per_token * work.all_tokens if work.keeps_features else 0,
        "checkpoint_bytes": draft_params * (4 + 8),
        "target_parameters": params,
        "draft_parameters": draft_params,
        "target_memory_bytes": target_bytes,
        "training_memory_bytes": draft_params * 16 + frozen,
        "matmul_flops_per_second": rate,
        "seconds": seconds,
        "total_seconds": sum(seconds.values()),
        "acceptance_length": length,
        "acceptance_measured": acceptance is not None,
        "break_even_tokens": int(sum(seconds.values()) / saved),
    }


def human_bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def human_seconds(value: float) -> str:
    if value < 90:
        return f"{value:.0f} s"
    if value < 5400:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


def plan_table(result: Mapping[str, Any], title: str) -> Table:
    """The plan for people; every line says what it rests on."""
    table = Table(title=title, title_justify="left", show_header=False)
    guess = " (estimated)" if result["tokens_estimated"] else ""
    table.add_row("answers", f"{result['num_prompts']:,} prompts, {result['answer_tokens']:,} tokens{guess}")
    table.add_row(
        "features on disk",
        f"{human_bytes(result['disk_bytes'])} ({human_bytes(result['feature_bytes_per_token'])} a token)"
        if result["disk_bytes"]
        else "none (data.source: live)",
    )
    table.add_row("a checkpoint", human_bytes(result["checkpoint_bytes"]))
    table.add_row(
        "target in memory",
        f"{human_bytes(result['target_memory_bytes'])}, {result['target_parameters'] / 1e6:,.0f} M parameters",
    )
    table.add_row(
        "training in memory",
        f"{human_bytes(result['training_memory_bytes'])} + activations, {result['draft_parameters'] / 1e6:,.1f} M trained",
    )
    table.add_row("matmul rate here", f"{result['matmul_flops_per_second'] / 1e9:,.0f} GFLOP/s (measured now)")
    for stage, seconds in result["seconds"].items():
        table.add_row(f"time: {stage}", human_seconds(seconds) if seconds else "nothing to do")
    table.add_row("time: all", human_seconds(result["total_seconds"]))
    source = "measured in this run" if result["acceptance_measured"] else "a usual first draft"
    table.add_row(
        "break-even",
        f"after {result['break_even_tokens']:,} served tokens at acceptance length {result['acceptance_length']:.2f} ({source}; batch 1, same device)",
    )
    return table
