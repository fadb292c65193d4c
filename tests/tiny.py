"""Tiny targets and a byte tokenizer for tests, so that nothing is downloaded and every case takes milliseconds.

The tokenizer maps a byte to its value ("a" = 97); special tokens follow from 256. Targets have 264 rows, width 48 and
6 layers unless a test asks for something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPECIALS = ("<bos>", "<|im_start|>", "<|im_end|>", "<eos>", "<pad>", "<think>", "</think>", "<|mask|>")
BOS, IM_START, IM_END, EOS, PAD, THINK, END_THINK, MASK = range(256, 264)

_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

PLAIN = (  # ChatML without generation marks
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + _PROMPT
)
GEN = (  # ChatML whose assistant turns are marked for return_assistant_tokens_mask
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}" + _PROMPT
)
EMPTYTHINK = (  # an empty think block in front of every plain answer and in the generation prompt
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and '<think>' not in m.content %}{{ '<think></think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think></think>' }}{% endif %}"
)

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3", "gpt2", "swa", "mm")


def tokenizer(template: str | None = PLAIN, n_special: int = 8, bos_first: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer: ids 0..255 are bytes, 256.. the first n_special of SPECIALS. bos_first: adds <bos>."""
    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    vocab |= {token: 256 + i for i, token in enumerate(SPECIALS[:n_special])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if bos_first:
        inner.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
        )
    inner.add_tokens([t for t in ("<think>", "</think>") if t in vocab])  # one id each, yet shown in decoded text
    extra = [t for t in ("<|im_start|>", "<eos>", "<|mask|>") if t in vocab]
    outer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=extra,
    )
    if template is not None:
        outer.chat_template = template
    return outer


def target_model(kind: str = "llama", seed: int = 0, random_norms: bool = True, **config: Any) -> PreTrainedModel:
    """A randomly initialised causal model of one of KINDS, in eval mode, fp32.

    Its weights are drawn five times wider than usual, so that layers matter and greedy choices are clear. random_norms
    draws the gains of every norm from [0.5, 1.5]: gains of one would hide a norm that is missing or applied twice.
    """
    base = {
        "vocab_size": 264,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "bos_token_id": BOS,
        "eos_token_id": IM_END,
        "pad_token_id": PAD,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(kind, base, config).eval()
    if random_norms:
        randomise_norms(model, seed)
    return model


def _build(kind: str, base: dict[str, Any], config: dict[str, Any]) -> PreTrainedModel:
    t = transformers
    base = base | config
    wide_heads = {"head_dim": 16} | base  # 4 heads of 16 on a width of 48: head_dim is not hidden_size / num_heads
    window = {"sliding_window": 16, "use_sliding_window": True}
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**base))
    if kind == "qwen2":
        return t.Qwen2ForCausalLM(t.Qwen2Config(**base))
    if kind == "qwen3":
        return t.Qwen3ForCausalLM(t.Qwen3Config(**wide_heads))
    if kind == "swa":  # layers 3.. slide over 16 tokens
        return t.Qwen3ForCausalLM(t.Qwen3Config(**({"max_window_layers": 3} | window | wide_heads)))
    if kind == "qwen3_moe":
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**(moe | wide_heads)))
    if kind == "gemma3":  # logits soft-capped, which the multimodal wrapper of transformers does not do
        capped = {"final_logit_softcapping": 3.0} | wide_heads
        return t.Gemma3ForCausalLM(t.Gemma3TextConfig(**_gemma_text(capped)))
    if kind == "mm":
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision |= {"image_size": 28, "patch_size": 14}
        whole = t.Gemma3Config(text_config=_gemma_text(wide_heads), vision_config=vision, mm_tokens_per_image=4)
        return t.Gemma3ForConditionalGeneration(whole)
    if kind == "gpt2":
        sizes = {"n_embd": "hidden_size", "n_inner": "intermediate_size", "n_layer": "num_hidden_layers"}
        sizes |= {"n_head": "num_attention_heads", "n_positions": "max_position_embeddings"}
        same = ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")
        values = {name: base[key] for name, key in sizes.items()} | {name: base[name] for name in same}
        return t.GPT2LMHeadModel(t.GPT2Config(**values))
    raise ValueError(f"unknown kind {kind!r}; kinds: {', '.join(KINDS)}")


def _gemma_text(base: dict[str, Any]) -> dict[str, Any]:
    """Gemma 3 text settings: window 16 on five of six layers, query scale of its own."""
    return {"sliding_window": 16, "query_pre_attn_scalar": 16} | base


def randomise_norms(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Draw the gains of every norm from [0.5, 1.5] and, where there is one, its bias from [-0.1, 0.1]."""
    random = torch.Generator().manual_seed(1000 + seed)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if "Norm" not in type(module).__name__ or weight is None:
            continue
        adds_one = type(module).__name__.startswith("Gemma3RMSNorm")  # Gemma multiplies by 1 + weight
        with torch.no_grad():
            weight.uniform_(0.5, 1.5, generator=random).sub_(1.0 if adds_one else 0.0)
            if getattr(module, "bias", None) is not None:
                module.bias.uniform_(-0.1, 0.1, generator=random)
    return model


def save_target(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> str:
    """Write both in Hub layout; returns the folder as text, ready for a recipe's `target.name`."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def teach(model: PreTrainedModel, steps: int = 60, lr: float = 3e-3) -> PreTrainedModel:
    """Train the model to say the alphabet a..t in circles; after "e" it jumps seven letters ahead in one case of ten.

    Takes a few seconds. Afterwards greedy decoding goes on with "abc" -> "defghijklmnopqrstabc...".
    """
    random = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with torch.enable_grad():
        for _ in range(steps):
            ids = alphabet_rows(16, 24, random)
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def alphabet_rows(num_rows: int, length: int, random: torch.Generator) -> torch.Tensor:
    """[num_rows, length] token ids of the language that `teach` teaches."""
    letters = [torch.randint(0, 20, (num_rows,), generator=random)]
    while len(letters) < length:
        last = letters[-1]
        jumps = (last == 4) & (torch.rand(num_rows, generator=random) < 0.1)
        letters.append((last + torch.where(jumps, 7, 1)) % 20)
    return torch.stack(letters, 1) + ord("a")


def _byte_symbols() -> list[str]:
    """The printable symbol that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, moved = [], 0
    for byte in range(256):
        symbols.append(chr(byte) if byte in printable else chr(256 + moved))
        moved += byte not in printable
    return symbols
