"""Tiny block drafts and batches for test_dflash.py and test_dspark.py, and the obvious formulation they must equal."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.blocks import draw_anchors, supervised_proposals
from draftsmith.models.dflash import DFlash
from draftsmith.models.draft import Batch, Captured, TargetSpec, TokenStats
from draftsmith.models.layers import rotate
from draftsmith.models.sampling import Sampler

V, D, AUX, MASK = 97, 48, 3, 96
SPEC = TargetSpec(
    name="tiny",
    revision=None,
    config_sha256="",
    tokenizer_sha256="",
    architecture="LlamaForCausalLM",
    model_type="llama",
    num_layers=6,
    hidden_size=D,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    vocab_size=V,
    max_positions=512,
    norm_eps=1e-6,
    activation="silu",
    rope={"rope_type": "default", "rope_theta": 1e4},
    eos_ids=(5,),
)
GEMMA = replace(SPEC, embedding_scale=6.9, logit_softcap=3.0)


def stats() -> TokenStats:
    pairs = torch.tensor([[a, (3 * a + 1) % V] for a in range(V)] + [[a, (a + 7) % V] for a in range(0, V, 2)])
    return TokenStats(torch.arange(V) % 13 + 1, pairs, torch.arange(len(pairs)) % 5 + 1)


def draft_of(cls: type[DFlash], spec: TargetSpec = SPEC, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A draft with weights wide enough that every part matters, and norms away from one."""
    values = {"mask_token_id": MASK, "layout": "infill", "block_len": 4, "num_layers": 2, "aux_layers": (1, 2, 4)}
    if cls.__name__ == "DSpark":
        values["markov_rank"] = 8
    draft = cls(cls.Config(**(values | config)), spec)
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(V, D, generator=generator) * 0.3
    draft.bind(torch.randn(V, D, generator=generator, dtype=dtype), table.to(dtype))
    draft.initialise(stats(), generator)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.dim() == 1:
                parameter += torch.rand(len(parameter), generator=generator) - 0.5
            elif "markov" in name or "confidence" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
            elif "lm_head" not in name:
                parameter *= 8
    return draft.to(dtype).eval()


def batch_of(lengths: tuple[int, ...] = (12, 17), prompt: int = 3, seed: int = 0, dtype=torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(
        input_ids=torch.randint(0, V, (bounds[-1],), generator=generator),
        loss_mask=positions >= prompt,
        positions=positions,
        bounds=tuple(bounds),
        features=torch.randn(bounds[-1], AUX * D, generator=generator, dtype=dtype),
        last_hidden=torch.randn(bounds[-1], D, generator=generator, dtype=dtype),
        row_ids=tuple(f"row {i}" for i in range(len(lengths))),
    )


def cut(batch: Batch, doc: int) -> Batch:
    """One document of a pack on its own."""
    start, end = batch.docs[doc]
    assert batch.features is not None
    assert batch.last_hidden is not None
    return replace(
        batch,
        input_ids=batch.input_ids[start:end],
        loss_mask=batch.loss_mask[start:end],
        positions=batch.positions[start:end],
        bounds=(0, end - start),
        features=batch.features[start:end],
        last_hidden=batch.last_hidden[start:end],
        row_ids=batch.row_ids[doc : doc + 1],
    )


def loss_of(draft: DFlash, batch: Batch) -> Tensor:
    return draft(batch, draft.counts(batch))["loss"].sum


def anchors_of(draft: DFlash, batch: Batch) -> list[int]:
    """The anchors that forward draws."""
    num = supervised_proposals(batch.loss_mask.numpy(), batch.bounds, draft.config.num_proposals)
    return draw_anchors(batch, num, draft.config.anchor_rate).tolist()


@dataclass
class Forced(Sampler):
    """Draws the given columns [B, K] (all slots at once, or slot by slot): what teacher-forced decoding needs."""

    temperature: float = 1.0
    columns: Tensor = field(default_factory=lambda: torch.empty(0))
    drawn: int = 0

    def draw(self, probs: Tensor) -> Tensor:
        if probs.dim() == 3:
            return self.columns
        self.drawn += 1
        return self.columns[:, self.drawn - 1]


def prefill(batch: Batch, anchor: int) -> tuple[Tensor, Captured]:
    """What the runtime hands over at first when `anchor` is the first new token of a document on its own."""
    assert batch.features is not None
    captured = Captured(batch.features[None, :anchor], None, torch.tensor([anchor]))
    return batch.input_ids[None, 1 : anchor + 1], captured


def obvious_logits(draft: DFlash, batch: Batch, anchor: int) -> Tensor:
    """Base logits [K, Vd] of the block at `anchor` by dense attention, one document, one block, no shared code but the
    projections: keys are [context rows before the anchor; the block], the mask is written out from the definition."""
    config, start = draft.config, max(s for s, _ in batch.docs if s <= anchor)
    assert batch.features is not None
    length, rows = config.block_len, torch.arange(start, anchor)
    context = draft.hidden_norm(draft.fc(batch.features[rows]))
    tokens = torch.full((length,), draft.mask_token_id)
    tokens[0] = batch.input_ids[anchor]
    x = draft.embedding[tokens] * draft.target.embedding_scale
    at = torch.cat([batch.positions[rows], batch.positions[anchor] + torch.arange(length)])
    rope = draft.rope(at, x.dtype)
    first = 1 if config.layout == "infill" else 0
    for (causal, window), layer in zip(config.layer_attention, draft.stack, strict=True):
        attention, normed = layer.self_attn, layer.input_layernorm(x)

        def heads(y: Tensor, norm: Any) -> Tensor:
            y = y.unflatten(-1, (-1, draft.head_dim))
            return y if norm is None else norm(y)

        into = torch.cat([context, normed])
        q = rotate(heads(attention.q_proj(normed), attention.q_norm), rope[0][len(rows) :], rope[1][len(rows) :])
        k = rotate(heads(attention.k_proj(into), attention.k_norm), *rope)
        v = heads(attention.v_proj(into), None)
        rep = q.shape[1] // k.shape[1]
        p, key = at[len(rows) :, None], at[None]
        hidden = torch.zeros(length, len(at), dtype=torch.bool)
        if causal:
            hidden |= key > p
        if window is not None:
            hidden |= key <= p - window
        scores = torch.einsum("qhe,khe->hqk", q, k.repeat_interleave(rep, 1)) * draft.head_dim**-0.5
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khe->qhe", probs, v.repeat_interleave(rep, 1)).flatten(1)
        x = x + attention.o_proj(attended)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    hidden_states = draft.norm(x)[first:]
    cap = draft.target.logit_softcap
    if config.head == "trainable":
        return draft.lm_head(hidden_states)
    logits = hidden_states @ draft.target_head.T
    return logits if cap is None else cap * torch.tanh(logits / cap)


def obvious_row_loss(draft: DFlash, logits: Tensor, batch: Batch, label_at: int) -> tuple[Tensor, Tensor, Tensor, bool]:
    """(teacher losses, ce, alpha, whether the label is kept) of one pair with full logits [Vd]."""
    mix, vocab = draft.mix, draft.draft_vocab
    cap = draft.target.logit_softcap
    assert batch.last_hidden is not None
    target = draft.target_head @ batch.last_hidden[label_at - 1]
    p = (target if cap is None else cap * torch.tanh(target / cap)).softmax(-1)
    kept = p if vocab is None else p[vocab]
    renormalised, log_q = kept / kept.sum(), logits.log_softmax(-1)
    alpha = torch.minimum(log_q.exp(), kept).sum()
    kl = (renormalised * (renormalised.log() - log_q)).sum()
    lk = torch.exp(-mix.lk_eta * alpha.detach())
    label = int(batch.input_ids[label_at])
    columns = list(range(V)) if vocab is None else vocab.tolist()
    known = label in columns
    ce = F.nll_loss(log_q[None], torch.tensor([columns.index(label)])) if known else torch.zeros(())
    loss = mix.kl * kl + mix.tv * (1 - alpha) - mix.nla * alpha.log()
    return loss + mix.lk * (lk * kl + (1 - lk) * (1 - alpha)), ce, alpha, known


def bench() -> Any:
    """The module bench/train_step.py."""
    path = Path(__file__).parents[1] / "bench" / "train_step.py"
    spec = importlib.util.spec_from_file_location("train_step", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
