"""Numerical self-tests of a machine, in seconds: does this device compute what training needs?

bf16 matrix products; scaled_dot_product_attention, forward and backward, with a boolean mask and with a value that is
not contiguous (both were wrong in some ROCm releases); the project's own attention in bf16; FlexAttention on the
project's masks, where it has a backend; a sum over ranks, when several were launched. Everything is compared with fp32
on the same numbers. `draftsmith doctor` prints the result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from draftsmith.models import layers
from draftsmith.train.preflight import Fact

LARGEST_ERROR = (
    0.04  # of bf16 against fp32, relative to the largest value: bf16 keeps 8 bits, a gradient sums several errors
)
BROKEN = "this torch build computes wrong numbers here: take another build or driver; training on it is lost time"
CURES = {
    "bf16 product": f"{BROKEN}; on ROCm TORCH_BLAS_PREFER_HIPBLASLT=0 tells whether hipBLASLt is at fault",
    "sdpa, boolean mask": f"{BROKEN}; draftsmith's training does not use it, decoding and targets do",
    "sdpa, strided value": f"{BROKEN}; draftsmith's training does not use it, decoding and targets do",
    "draft attention": BROKEN,
    "flex attention": "leave train.attention at matmul: FlexAttention gives other numbers, or fails, on this machine",
    "sum over ranks": "ranks do not reach each other: look at the network lines above, then run with NCCL_DEBUG=INFO",
}


def self_tests(device: torch.device | None = None) -> list[Fact]:
    """Every self-test on a device: this rank's GPU, or the CPU. A collective is tested when ranks were launched."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device is None:
        device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    facts = [
        _timed("bf16 product", lambda: product_error(device)),
        _timed("sdpa, boolean mask", lambda: sdpa_error(device)),
        _timed("sdpa, strided value", lambda: sdpa_error(device, strided=True)),
        _timed("draft attention", lambda: draft_attention_error(device)),
    ]
    if device.type == "cuda":
        facts.append(_timed("flex attention", lambda: flex_error(device)))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        facts.append(_timed("sum over ranks", lambda: sum_error(device)))
    return facts


def _timed(name: str, test: Callable[[], float]) -> Fact:
    """The fact of one test; an exception is a failure with its first line."""
    began = time.perf_counter()
    try:
        error = test()
    except Exception as problem:  # whatever a broken kernel raises is what we want to report
        return Fact(name, f"{type(problem).__name__}: {str(problem).splitlines()[0][:80]}", "fail", CURES[name])
    value = f"error {error:.1e} ({time.perf_counter() - began:.1f} s)"
    good = error < LARGEST_ERROR  # also False for NaN
    return Fact(name, value, "ok" if good else "fail", "" if good else CURES[name])


def product_error(device: torch.device) -> float:
    """Largest relative error of a bf16 product against fp32 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(384, 384, generator=generator).bfloat16() for _ in range(2))
    return relative_error([a.to(device) @ b.to(device)], [a.float() @ b.float()])


def sdpa_error(device: torch.device, strided: bool = False) -> float:
    """Of output and gradients, against an fp32 softmax on the CPU. Every query sees at least its own key."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 160, 4, 64, generator=generator).bfloat16() for _ in range(3))  # [B, N, H, E]
    mask = torch.rand(2, 160, 160, generator=generator) < 0.3
    mask |= torch.eye(160, dtype=torch.bool)
    if not strided:  # heads before tokens in memory; else as projections give them
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    weights = torch.randn(2, 160, 4, 64, generator=generator)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k).masked_fill(~mask[:, None], -torch.inf)
        return torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1), v)

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return layers.masked_attention(q, k, v, mask.to(device))

    q = q * 64**-0.5
    want = _with_gradients(plain, [x.float() for x in (q, k, v)], weights)
    got = _with_gradients(kernel, [_moved(x, device) for x in (q, k, v)], weights.to(device))
    return relative_error(got, want)


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """On the device with the same strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def draft_attention_error(device: torch.device) -> float:
    """Of layers.block_attention and chain_attention in bf16, with gradients, against fp32 on the CPU."""
    errors = []
    for attend, tensors, weights in attention_cases():
        want = _with_gradients(attend, [x.float() for x in tensors], weights)
        got = _with_gradients(attend, [x.to(device) for x in tensors], weights.to(device))
        errors.append(relative_error(got, want))
    return max(errors)


def flex_error(device: torch.device) -> float:
    """Of FlexAttention against the reference on the project's masks, both in bf16 on the device, with gradients."""
    errors = []
    for attend, tensors, weights in attention_cases():
        want = _with_gradients(attend, [x.to(device) for x in tensors], weights.to(device))
        with layers.attention("flex", fall_back=False):
            got = _with_gradients(attend, [x.to(device) for x in tensors], weights.to(device))
        errors.append(relative_error(got, want))
    return max(errors)


def attention_cases() -> Iterator[tuple[Callable[..., Tensor], list[Tensor], Tensor]]:
    """(function, bf16 tensors, weights of its output): two documents, grouped heads, blocks with and without a window,
    chains."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    spans = (layers.BlockSpan(0, 0, 3, (5, 40, 90)), layers.BlockSpan(100, 3, 5, (140, 199)))
    for causal, window in ((False, None), (True, 24)):

        def blocks(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, by: Any = (causal, window)) -> Tensor:
            return layers.block_attention(q, k, v, own_k, own_v, spans, causal=by[0], window=by[1])

        tensors = [draw(5, 6, 4, 32), draw(200, 2, 32), draw(200, 2, 32), draw(5, 7, 2, 32), draw(5, 7, 2, 32)]
        yield blocks, tensors, torch.randn(5, 6, 4, 32, generator=generator)

    rows = (layers.Span(0, 10, 0, 50), layers.Span(100, 120, 50, 90))

    def chains(q: Tensor, k: Tensor, v: Tensor, chain_k: Tensor, chain_v: Tensor) -> Tensor:
        return layers.chain_attention(q, k, v, chain_k, chain_v, rows)

    tensors = [draw(90, 4, 32), draw(200, 2, 32), draw(200, 2, 32), draw(90, 3, 2, 32), draw(90, 3, 2, 32)]
    yield chains, tensors, torch.randn(90, 4, 32, generator=generator)


def sum_error(device: torch.device) -> float:
    """Of the sum of rank numbers over all ranks."""
    with _group(device):
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        value = torch.full((1024,), float(rank + 1), device=device)
        torch.distributed.all_reduce(value)
        return float((value / (world * (world + 1) / 2) - 1).abs().max())


@contextmanager
def _group(device: torch.device) -> Iterator[None]:
    """The launched ranks, connected; their own group is taken down again."""
    if torch.distributed.is_initialized():
        yield
        return
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=2))
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _with_gradients(function: Callable[..., Tensor], tensors: list[Tensor], weights: Tensor) -> list[Tensor]:
    """[output, gradient of each tensor] of sum(output * weights)."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad((out.float() * weights).sum(), leaves)]


def relative_error(got: list[Tensor], want: list[Tensor]) -> float:
    """Largest difference over the largest value, of the worst tensor; NaN where anything is NaN."""
    errors = [(a.float().cpu() - b.float().cpu()).abs().max() / b.float().abs().max().cpu() for a, b in zip(got, want)]
    return float(torch.stack(errors).max())
