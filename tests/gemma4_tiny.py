"""A tiny Gemma 4 target and drafters for it whose acceptance is known in advance, and random ones whose layers matter.

The target counts: after token v comes v + 1 (mod VOCAB), because its layers add nothing. Each token's embedding is a set
of angles, so that one rotation R turns every e(v) into e(v + 1). A drafter of the target's width whose layers add
nothing either is then right for one reason only:

    anchor   it keeps the half of the embedding and its head says "the token after this one": right in every slot if it
             is fed with the anchor x[t+1], and never right if it is fed with x[t], a token too early
    state    it keeps the half of the state and turns it once: right if the state is the target's last hidden, and if
             post_projection hands on what leaves the drafter's norm
    early    the head is a token ahead: right in every slot if it is fed with x[t] (as Automodel trains drafters), and
             never if it is fed with the anchor
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import transformers as t
from tiny import BOS, IM_END, PAD, randomise_norms, tokenizer
from torch import Tensor

from draftsmith.eval.runtime import decode_plain
from draftsmith.models.draft import Batch, Needs
from draftsmith.models.gemma4_mtp import Gemma4Mtp, Gemma4MtpConfig
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import Target

VOCAB, WIDTH, WINDOW, LAYERS = 264, 64, 16, 4
ORACLES = ("anchor", "state", "early")
SILENT = ("o_proj.weight", "down_proj.weight", "per_layer_projection.weight")


def text_config(**more: Any) -> t.Gemma4TextConfig:
    """The target: sliding and full layers in turn, the last two without keys of their own."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS + 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the smallest that vLLM's attention on the CPU takes
        "global_head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2 + 1),
        "sliding_window": WINDOW,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "bos_token_id": BOS,
        "eos_token_id": IM_END,
        "pad_token_id": PAD,
    }
    return t.Gemma4TextConfig(**(sizes | more))


def assistant_config(target: t.Gemma4TextConfig, width: int = WIDTH, **more: Any) -> t.Gemma4AssistantConfig:
    """A drafter of two sliding layers and a full one."""
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    keys = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")
    keys += ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
    about = {key: getattr(target.per_layer_config[0], key) for key in keys} | {
        "model_type": "gemma4_text",
        "global_head_dim": target.per_layer_config[1].head_dim,
        "hidden_size": width,
        "intermediate_size": 48,
        "num_hidden_layers": len(types),
        "num_kv_shared_layers": len(types),
        "layer_types": types,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }
    return t.Gemma4AssistantConfig(text_config=about, backbone_hidden_size=target.hidden_size, **more)


def embeddings() -> tuple[Tensor, Tensor]:
    """(e [VOCAB, WIDTH], R [WIDTH, WIDTH]) with R e(v) = e(v + 1 mod VOCAB)."""
    steps = torch.arange(1, WIDTH // 2 + 1) * 2 * torch.pi / VOCAB
    angles = torch.arange(VOCAB)[:, None] * steps
    turn = torch.zeros(WIDTH, WIDTH)
    for i, step in enumerate(steps.tolist()):
        a, b = torch.cos(torch.tensor(step)), torch.sin(torch.tensor(step))
        turn[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor([[a, -b], [b, a]])
    return torch.stack([angles.cos(), angles.sin()], -1).flatten(1), turn


def build(cls: type, config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return randomise_norms(cls(config).float(), seed).eval()


@torch.no_grad()
def counting_target() -> t.Gemma4ForCausalLM:
    model = build(t.Gemma4ForCausalLM, text_config(), 0)
    table, _ = embeddings()
    for name, parameter in model.named_parameters():
        if name.endswith(SILENT):
            parameter.zero_()
    model.get_input_embeddings().weight.copy_(table)
    gains = model.model.norm.weight
    model.lm_head.weight.copy_(table.roll(1, 0) / gains)  # row v + 1 holds e(v)
    return model


@torch.no_grad()
def oracle(kind: str) -> t.Gemma4AssistantForCausalLM:
    """A drafter for counting_target; see the module's words."""
    target = counting_target()
    model = build(t.Gemma4AssistantForCausalLM, assistant_config(target.config), 1)
    table, turn = embeddings()
    for name, parameter in model.named_parameters():
        if name.endswith(SILENT):
            parameter.zero_()
    gains, last = model.model.norm.weight, target.model.norm.weight
    nothing = torch.zeros(WIDTH, WIDTH)
    rows = {"anchor": table.roll(1, 0), "state": table.roll(1, 0), "early": table.roll(2, 0)}[kind]
    model.model.embed_tokens.weight.copy_(rows / gains)
    model.lm_head.weight = model.model.embed_tokens.weight
    if kind == "state":  # z[t] is e(x[t]) times the gains, so one turn makes it e(x[t+1])
        model.pre_projection.weight.copy_(torch.cat([nothing, turn / last], 1))
        model.post_projection.weight.copy_(last[:, None] * torch.eye(WIDTH) / gains)
    else:
        model.pre_projection.weight.copy_(torch.cat([torch.eye(WIDTH), nothing], 1))
        model.post_projection.weight.copy_(torch.eye(WIDTH))
    return model


def random_target(**more: Any) -> t.Gemma4ForCausalLM:
    return build(t.Gemma4ForCausalLM, text_config(**more), 2)


def random_assistant(target: t.Gemma4ForCausalLM, width: int = 32, **more: Any) -> t.Gemma4AssistantForCausalLM:
    """Narrower than the target; layer scalars are drawn, too. With ordered embeddings, 8 clusters of 33 tokens."""
    model = build(t.Gemma4AssistantForCausalLM, assistant_config(target.config, width, **more), 3)
    random = torch.Generator().manual_seed(4)
    for layer in model.model.layers:
        layer.layer_scalar.uniform_(0.6, 1.4, generator=random)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB, generator=random))
    return model


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def prompts() -> list[list[int]]:
    """Prompts of several lengths, one a single token, one longer than the window."""
    return [[7], [20, 21, 5, 90], list(range(100, 124)), [3, 250]]


def some_rows(lengths: tuple[int, ...] = (9, 30, 7)) -> list[list[int]]:
    """Random documents; the second is longer than the window."""
    return [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


def pack(target: Target, needs: Needs, rows: list[list[int]], mask: list[list[int]] | None = None) -> Batch:
    """The rows side by side with the target's states."""
    states = target.states(rows, needs)
    supervised = [[1] * len(row) for row in rows] if mask is None else mask
    return Batch(
        input_ids=torch.tensor([token for row in rows for token in row]),
        loss_mask=torch.tensor([m for row in supervised for m in row], dtype=torch.bool),
        positions=torch.cat([torch.arange(len(row)) for row in rows]),
        bounds=(0, *accumulate(map(len, rows))),
        last_hidden=torch.cat([found.last_hidden for found in states if found.last_hidden is not None]),
        target_kv={
            layer: (
                torch.cat([found.target_kv[layer][0] for found in states]).transpose(0, 1),
                torch.cat([found.target_kv[layer][1] for found in states]).transpose(0, 1),
            )
            for layer in needs.target_kv_layers
        },
    )


def tune(target: Target, folder: Path, steps: int, num: int = 3, **config: Any) -> Gemma4Mtp:
    """A random drafter from `folder`, trained on the target's answers to random prompts until it is half right."""
    draft = Gemma4Mtp(Gemma4MtpConfig(checkpoint=str(folder), ttt_steps=num, loss={"ce": 1.0}, **config), target.spec)
    target.bind(draft)
    draft.initialise(None, torch.Generator().manual_seed(0))
    starts = starts_of(6)
    answers = decode_plain(target, starts, Sampler(0.0), 40, ignore_eos=True, batch_size=len(starts))
    rows = [[*start, *one.ids] for start, one in zip(starts, answers, strict=True)]
    batch = pack(target, draft.needs, rows)
    draft.lm_head.requires_grad_(True)  # a random table would say little
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)
    for _ in range(steps):
        loss = draft(batch, draft.counts(batch))["loss"].sum
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    draft.lm_head.requires_grad_(False)
    return draft.eval()


def starts_of(num: int) -> list[list[int]]:
    """Random prompts of 1 to 22 tokens."""
    random = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (n,), generator=random).tolist() for n in (1, 3, 22, 6, 9, 12)[:num]]
