"""CPU seconds and peak memory of one EAGLE-3 training step: this project against the obvious formulation.

    python bench/train_step.py [--dtype float32 bfloat16] [--head trainable] [--repeats 5] [--out bench/results/X.json]

Fixed work: hidden 256, intermediate 768, 4 query and 2 key heads of width 64, vocabulary 8192, 3 aux layers, 4 documents
of 512 tokens of which 64 are prompt, 3 unrolled steps, KL, clipping and fused AdamW. Figures are process CPU seconds,
the median over `repeats` after one warm-up step, each variant in a fresh process; memory is the growth of the peak
resident set from just before the first step. Collation is not included, index planning is.

The naive variant is the textbook: every row at every step, one dense mask over all keys, full logits of every step in
memory, gradients by autograd. Both give the same loss (tests/test_eagle3.py).
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.draft import Batch, TargetSpec
from draftsmith.models.eagle3 import Eagle3, Eagle3Config
from draftsmith.models.layers import Attention, rotate

HIDDEN, VOCAB, DOCS, DOC_LEN, PROMPT_LEN = 256, 8192, 4, 512, 64
VARIANTS = ("ours", "naive")


def make_draft(head: str, dtype: torch.dtype) -> Eagle3:
    spec = TargetSpec(
        name="bench",
        revision=None,
        config_sha256="",
        tokenizer_sha256="",
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        num_layers=12,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=VOCAB,
        max_positions=4096,
        norm_eps=1e-6,
        activation="silu",
        rope={"rope_type": "default", "rope_theta": 1e6},
    )
    draft = Eagle3(Eagle3Config(head=head, fc_norm=True, norm_output=True, ttt_steps=3), spec)
    generator = torch.Generator().manual_seed(0)
    embedding, target_head = (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.05 for _ in range(2))
    draft.bind(embedding.to(dtype), target_head.to(dtype))
    draft.initialise(None, generator)
    return draft


def make_batch(dtype: torch.dtype) -> Batch:
    generator = torch.Generator().manual_seed(1)
    total = DOCS * DOC_LEN
    position = torch.arange(total) % DOC_LEN
    return Batch(
        input_ids=torch.randint(0, VOCAB, (total,), generator=generator),
        loss_mask=position >= PROMPT_LEN,
        positions=position,
        bounds=tuple(range(0, total + 1, DOC_LEN)),
        features=torch.randn(total, 3 * HIDDEN, generator=generator).to(dtype),
        last_hidden=torch.randn(total, HIDDEN, generator=generator).to(dtype),
    )


def naive_loss(draft: Eagle3, batch: Batch, denominators: dict[str, Tensor]) -> Tensor:
    """The loss of draft(batch, denominators) for losses over the full vocabulary and kl alone, the obvious way."""
    assert batch.features is not None
    assert batch.last_hidden is not None
    total = len(batch.input_ids)
    dtype = draft.fc.weight.dtype
    row = torch.arange(total)
    doc = torch.bucketize(row, torch.tensor(batch.bounds[1:]), right=True)
    prefix = (row[:, None] >= row) & (doc[:, None] == doc)
    diagonal = torch.eye(total, dtype=torch.bool)

    def ahead(x: Tensor, by: int) -> Tensor:
        """x[t + by] at row t; what lies behind the end is never supervised."""
        return torch.cat([x[by:], torch.zeros_like(x[:by])])

    cap = draft.target.logit_softcap
    teacher = batch.last_hidden.to(dtype) @ draft.target_head.to(dtype).T
    teacher_log_probs = (teacher if cap is None else cap * torch.tanh(teacher / cap)).log_softmax(-1)
    state = draft.fuse(batch.features.to(dtype))
    supervised = ahead(batch.loss_mask, 1) & (ahead(doc, 1) == doc)
    past: list[list[tuple[Tensor, Tensor]]] = [[] for _ in draft.stack]
    loss = torch.zeros((), dtype=dtype)
    for s in range(draft.config.ttt_steps):
        embedded = draft.embed(ahead(batch.input_ids, 1 + s), dtype)
        rope = draft.rope(batch.positions + s, dtype)
        mask = torch.cat([prefix, *[diagonal] * s], 1)
        for i, layer in enumerate(draft.stack):
            normed, residual = layer.enter(state, draft.config.norm_before_residual)
            into = torch.cat([embedded, normed], -1) if i == 0 else normed
            attended = _dense_attention(layer.self_attn, into, rope, mask, past[i])
            state = layer.leave(residual, attended)
        into_head, state = draft.outputs(state)
        logits = draft.lm_head(into_head) if draft.config.head == "trainable" else into_head @ draft.target_head.T
        if draft.config.head == "frozen" and cap is not None:
            logits = cap * torch.tanh(logits / cap)
        wanted = ahead(teacher_log_probs, 1 + s)
        kl = F.kl_div(logits.log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)
        supervised = supervised & ahead(batch.loss_mask, 2 + s) & (ahead(doc, 2 + s) == doc) & (row + 2 + s < total)
        loss = loss + draft.config.position_decay**s * (kl * supervised).sum() / denominators[f"step{s}"]
    return loss


def _dense_attention(
    attention: Attention, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, past: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """All rows against all keys of all steps so far; past: (k, v) of the earlier steps, to which this one is added."""

    def heads(projected: Tensor, norm: Any) -> Tensor:
        x = projected.unflatten(-1, (-1, attention.head_dim))
        return x if norm is None else norm(x)

    q = rotate(heads(attention.q_proj(x), attention.q_norm), *rope)
    k = rotate(heads(attention.k_proj(x), attention.k_norm), *rope)
    past.append((k, heads(attention.v_proj(x), None)))
    keys, values = (torch.cat(parts).transpose(0, 1)[None] for parts in zip(*past, strict=True))
    q = q.transpose(0, 1)[None]
    attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask[None, None], enable_gqa=True)
    return attended[0].transpose(0, 1).flatten(1)


def measure(variant: str, dtype: str, head: str, repeats: int) -> dict[str, Any]:
    """One variant in this process: {"cpu_s", "peak_mib", "loss"}."""
    low = dtype == "bfloat16"
    kept = torch.bfloat16 if low else torch.float32
    draft, batch = make_draft(head, kept), make_batch(kept)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-4, fused=True)
    loss_of: Callable[[], Tensor] = {
        "ours": lambda: draft(batch, draft.counts(batch))["loss"].sum,
        "naive": lambda: naive_loss(draft, batch, draft.counts(batch)),
    }[variant]

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    before = _peak_mib()
    first = step()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        step()
        times.append(time.process_time() - begin)
    return {"cpu_s": statistics.median(times), "peak_mib": _peak_mib() - before, "loss": first}


def _peak_mib() -> float:
    """Peak resident set of this program. On Linux not by getrusage, which starts from the parent's size at exec."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        scale = 2**20 if platform.system() == "Darwin" else 2**10  # macOS counts bytes, others KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--head", choices=("trainable", "frozen"), default="frozen")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps per variant")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)  # a single variant, for the child process
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if asked.one:
        print(json.dumps(measure(asked.one, asked.dtype[0], asked.head, asked.repeats)))
        return

    rows: dict[str, dict[str, dict[str, Any]]] = {}
    shared = ["--head", asked.head, "--repeats", str(asked.repeats), "--threads", str(asked.threads)]
    for dtype in asked.dtype:
        rows[dtype] = {}
        for variant in VARIANTS:
            command = [sys.executable, __file__, "--one", variant, "--dtype", dtype, *shared]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows[dtype][variant] = json.loads(output.splitlines()[-1])
    print(
        f"EAGLE-3 training step, {asked.head} head, {asked.threads} thread(s), {_processor()}, torch {torch.__version__}"
    )
    print(f"{'dtype':<10}{'variant':<9}{'CPU s':>8}{'peak MiB':>10}{'loss':>10}{'times faster':>14}{'less memory':>13}")
    for dtype, found in rows.items():
        for variant, row in found.items():
            line = f"{dtype:<10}{variant:<9}{row['cpu_s']:>8.3f}{row['peak_mib']:>10.0f}{row['loss']:>10.4f}"
            if variant == "ours":
                naive = found["naive"]
                line += f"{naive['cpu_s'] / row['cpu_s']:>14.1f}{naive['peak_mib'] / max(row['peak_mib'], 1):>13.1f}"
            print(line)
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"head": asked.head, "threads": asked.threads, "processor": _processor(), "torch": torch.__version__}
        asked.out.write_text(json.dumps({**about, "results": rows}, indent=2) + "\n")


def _processor() -> str:
    """The processor's name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


if __name__ == "__main__":
    main()
