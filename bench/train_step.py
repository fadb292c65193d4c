"""CPU seconds and peak memory of one training step of each family: this project against the obvious formulation.

    python bench/train_step.py [--case eagle3 dflash-64] [--dtype float32 bfloat16] [--repeats 5] [--out results.json]

Fixed work: hidden 256, intermediate 768, 4 query and 2 key heads of width 64, vocabulary 8192, 3 aux layers, 4 documents
of 512 tokens of which 64 are prompt, frozen head, clipping and fused AdamW.

    eagle3        3 unrolled steps, KL
    dflash-64     64 blocks of 8 in layout infill, 2 layers, cross entropy with falling weights
    dflash-256    256 such blocks
    dspark-64     64 blocks of 8 in layout shifted, 2 layers, Markov rank 64, 0.1 ce + 1.8 tv, confidence head

Figures are process CPU seconds, the median over `repeats` after one warm-up step, each variant in a fresh process;
memory is the growth of the peak resident set from just before the first step. Collation is not included, index planning
is.

The naive variant is the textbook: every row and slot, one dense mask over all keys, full logits in memory, gradients by
autograd. Both give the same loss (tests/test_eagle3.py, tests/test_dspark.py).
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
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.blocks import first_slot
from draftsmith.models.dflash import DFlash, DFlashConfig
from draftsmith.models.draft import Batch, Draft, TargetSpec
from draftsmith.models.dspark import DSpark, DSparkConfig
from draftsmith.models.eagle3 import Eagle3, Eagle3Config
from draftsmith.models.layers import Attention, rotate

HIDDEN, VOCAB, DOCS, DOC_LEN, PROMPT_LEN = 256, 8192, 4, 512, 64
CASES = ("eagle3", "dflash-64", "dflash-256", "dspark-64")
VARIANTS = ("ours", "naive")


def make_draft(case: str, dtype: torch.dtype) -> Draft:
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
    family, _, num_blocks = case.partition("-")
    draft: Draft
    if family == "eagle3":
        draft = Eagle3(Eagle3Config(head="frozen", fc_norm=True, norm_output=True, ttt_steps=3), spec)
    else:
        num_candidates = DOCS * (DOC_LEN - PROMPT_LEN - 1)
        blocks: dict[str, Any] = {
            "block_len": 8,
            "num_layers": 2,
            "aux_layers": (2, 6, 9),
            "mask_token_id": VOCAB - 1,
            "anchor_rate": int(num_blocks) / num_candidates,
        }
        if family == "dflash":
            draft = DFlash(DFlashConfig(layout="infill", **blocks), spec)
        else:
            draft = DSpark(DSparkConfig(layout="shifted", markov_rank=64, **blocks), spec)
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


def naive_block_loss(draft: DFlash, batch: Batch, denominators: dict[str, Tensor]) -> Tensor:
    """The loss of draft(batch, denominators) for a frozen head over the full vocabulary, falling weights, ce and tv, and
    full attention, the obvious way: all slots of the drawn blocks."""
    assert batch.features is not None
    assert batch.last_hidden is not None
    plan = draft._plan(batch)  # which blocks are drawn; nothing else of it is used
    assert plan is not None
    anchors, length, first = plan.anchors, draft.config.block_len, first_slot(draft.config.layout)
    total, num, dtype = len(batch.input_ids), len(anchors), draft.fc.weight.dtype
    row, slot = torch.arange(total), torch.arange(length)
    doc = torch.bucketize(row, torch.tensor(batch.bounds[1:]), right=True)
    block = torch.arange(num).repeat_interleave(length)
    before = (row < anchors[block, None]) & (doc == doc[anchors[block], None])
    mask = torch.cat([before, block[:, None] == block], 1)  # [N*L, T + N*L]

    context = draft.fuse(batch.features.to(dtype))
    tokens = torch.full((num, length), draft.mask_token_id)
    tokens[:, 0] = batch.input_ids[anchors]
    state = draft.embed(tokens.flatten(), dtype)
    at = (batch.positions[anchors, None] + slot).flatten()
    context_keys = draft.context_keys(context, batch.positions)
    rope = draft.rope(at, dtype)
    for layer, keys in zip(draft.stack, context_keys, strict=True):
        attended = _dense_attention(layer.self_attn, layer.input_layernorm(state), rope, mask, [keys])
        state = layer.leave(state, attended)
    hidden = draft.norm(state).view(num, length, -1)[:, first:]

    label_at = anchors[:, None] + 1 + torch.arange(length - first)  # [N, K]
    real = (label_at < total) & (doc[label_at.clamp_max(total - 1)] == doc[anchors, None])
    label_at = torch.where(real, label_at, total - 1)
    supervised = (real & batch.loss_mask[label_at]).cumprod(1).bool()
    weights = supervised * torch.exp(-torch.arange(length - first) / draft.config.falling_gamma)
    weights = weights / denominators["weights"]
    previous = batch.input_ids[label_at - 1]
    log_probs = draft.slot_logits(hidden, previous).log_softmax(-1)  # [N, K, V]
    loss = -draft.mix.ce * log_probs.gather(-1, batch.input_ids[label_at][..., None])[..., 0]
    if draft.mix.tv:
        target = (batch.last_hidden.to(dtype) @ draft.target_head.to(dtype).T).softmax(-1)[label_at - 1]
        distance = (log_probs.exp() - target).abs().sum(-1) / 2
        loss = loss + draft.mix.tv * distance
    if isinstance(draft, DSpark):
        logits = draft.confidence_head(hidden.detach(), draft.markov_head.embed(previous).detach())
        accepted = (1 - distance).detach().to(logits.dtype)
        loss = loss + F.binary_cross_entropy_with_logits(logits, accepted, reduction="none")
    return (weights * loss).sum()


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


def measure(case: str, variant: str, dtype: str, repeats: int) -> dict[str, Any]:
    """One variant in this process: {"cpu_s", "peak_mib", "loss"}."""
    low = dtype == "bfloat16"
    kept = torch.bfloat16 if low else torch.float32
    draft, batch = make_draft(case, kept), make_batch(kept)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-4, fused=True)

    def loss_of() -> Tensor:
        if variant == "ours":
            return draft(batch, draft.counts(batch))["loss"].sum
        if isinstance(draft, Eagle3):
            return naive_loss(draft, batch, draft.counts(batch))
        assert isinstance(draft, DFlash)
        return naive_block_loss(draft, batch, draft.counts(batch))

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
    parser.add_argument("--case", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5, help="timed steps per variant")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)  # a single variant, for the child process
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if asked.one:
        print(json.dumps(measure(asked.case[0], asked.one, asked.dtype[0], asked.repeats)))
        return

    print(f"training step, {asked.threads} thread(s), {_processor()}, torch {torch.__version__}")
    columns = f"{'CPU s':>8}{'peak MiB':>10}{'loss':>10}{'times faster':>14}{'less memory':>13}"
    print(f"{'case':<12}{'dtype':<10}{'variant':<9}{columns}")
    results: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    shared = ["--repeats", str(asked.repeats), "--threads", str(asked.threads)]
    for case in asked.case:
        for dtype in asked.dtype:
            found = results.setdefault(case, {})[dtype] = {}
            for variant in reversed(VARIANTS):
                command = [sys.executable, __file__, "--one", variant, "--case", case, "--dtype", dtype, *shared]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                row = found[variant] = json.loads(output.splitlines()[-1])
                line = f"{case:<12}{dtype:<10}{variant:<9}"
                line += f"{row['cpu_s']:>8.3f}{row['peak_mib']:>10.0f}{row['loss']:>10.4f}"
                if variant == "ours":
                    naive = found["naive"]
                    line += (
                        f"{naive['cpu_s'] / row['cpu_s']:>14.1f}{naive['peak_mib'] / max(row['peak_mib'], 1):>13.1f}"
                    )
                print(line, flush=True)
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"threads": asked.threads, "processor": _processor(), "torch": torch.__version__}
        asked.out.write_text(json.dumps({**about, "results": results}, indent=2) + "\n")


def _processor() -> str:
    """The processor's name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


if __name__ == "__main__":
    main()
