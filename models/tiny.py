"""Tiny targets that are made on the spot: `target.name: tiny:llama`, `tiny:qwen3`, `tiny:gemma4`, or one with an MTP module.

They let recipes, smoke runs and tests go through every stage in seconds, without a download. A tiny target has learned
one game in chat form: the user says three letters, it goes on with the alphabet a..t in circles and ends its turn.

    <|im_start|>user\\nabc<|im_end|>\\n<|im_start|>assistant\\ndefghijklm...<|im_end|>\\n

After "e" it jumps seven letters ahead in one case of ten, so its distribution is not a point mass.
WITH_MTP are small models of the architectures that bring an MTP module along (models/mtp.py). Theirs has learned the
game one step ahead only, as such modules are pre-trained; so proposals after the first are poor until it is tuned.
The tokenizer maps a byte to its value ("a" = 97); special tokens follow from 256.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

PREFIX = "tiny:"
WITH_MTP = ("qwen3_5", "qwen3_next", "deepseek_v3", "mimo", "glm4_moe", "ernie4_5")
KINDS = ("llama", "qwen3", "gemma4", *WITH_MTP)
VERSION = 1  # part of the folder's name: a change of the game makes new targets
SPECIALS = ("<bos>", "<|im_start|>", "<|im_end|>", "<eos>", "<pad>", "<think>", "</think>", "<|mask|>")
BOS, IM_START, IM_END, EOS, PAD, THINK, END_THINK, MASK = range(256, 264)
VOCAB = 264
LETTERS = 20
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make(kind: str, cache: Path) -> Path:
    """The folder of the tiny target of that kind, made on the first call (about 10 s) and kept in `cache`."""
    if kind not in KINDS:
        raise ValueError(
            f"target.name: {PREFIX}{kind}: no such tiny target; there are {', '.join(PREFIX + k for k in KINDS)}"
        )
    folder = cache / f"tiny-{kind}-{VERSION}"
    if (folder / "config.json").is_file():
        return folder
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    model = teach(_untaught(kind))
    model.save_pretrained(temporary)
    tokenizer().save_pretrained(temporary)
    if kind in WITH_MTP:
        temporary = _with_module(temporary)
    try:
        temporary.rename(folder)
    except OSError:  # another process was faster; both made the same weights
        if not (folder / "config.json").is_file():
            raise
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer with a ChatML template: 256 bytes, then SPECIALS."""
    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    vocab |= {token: 256 + i for i, token in enumerate(SPECIALS)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    outer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<eos>", "<|mask|>"],
    )
    outer.chat_template = CHATML
    return outer


def teach(model: PreTrainedModel, steps: int = 150, lr: float = 3e-3) -> PreTrainedModel:
    """Train the model to play the game; seeded, a few seconds."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    with torch.enable_grad():
        for _ in range(steps):
            ids, labels = games(16, generator)
            loss = model(input_ids=ids, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def games(num: int, generator: torch.Generator, answer_len: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels) [num, T] of taught chats; only the answer is a label (-100 elsewhere)."""
    letters = [torch.randint(0, LETTERS, (num,), generator=generator)]
    while len(letters) < 3 + answer_len:
        jumps = (letters[-1] == 4) & (torch.rand(num, generator=generator) < 0.1)
        letters.append((letters[-1] + torch.where(jumps, 7, 1)) % LETTERS)
    said = torch.stack(letters, 1) + ord("a")

    def fixed(*parts: int | str) -> torch.Tensor:
        ids = [i for part in parts for i in ([part] if isinstance(part, int) else part.encode())]
        return torch.tensor(ids).expand(num, -1)

    question = torch.cat([fixed(IM_START, "user\n"), said[:, :3], fixed(IM_END, "\n", IM_START, "assistant\n")], 1)
    answer = torch.cat([said[:, 3:], fixed(IM_END)], 1)
    ids = torch.cat([question, answer], 1)
    labels = torch.cat([torch.full_like(question, -100), answer], 1)
    return ids, labels


def _with_module(folder: Path, steps: int = 4, lr: float = 3e-3) -> Path:
    """A copy of the tiny target with an MTP module that was trained one step ahead, in place of the given folder.

    Four steps are enough for a good first proposal and bad later ones, the profile of pre-trained modules.
    """
    from draftsmith.models import mtp_checkpoint  # it reads tiny targets itself
    from draftsmith.models.draft import Batch, family
    from draftsmith.models.target import Target, TargetConfig

    target = Target.load(TargetConfig(name=str(folder), dtype="float32", device="cpu"))
    settings: dict[str, Any] = {"init": "new", "ttt_steps": 1, "loss": {"ce": 1.0}}
    draft = family("mtp")(family("mtp").Config(family="mtp", **settings), target.spec)
    target.bind(draft)
    generator = torch.Generator().manual_seed(2)
    draft.initialise(None, generator)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(steps):
        ids, labels = games(16, generator)
        num, length = ids.shape
        batch = Batch(
            input_ids=ids.flatten(),
            loss_mask=(labels >= 0).flatten(),
            positions=torch.arange(length).repeat(num),
            bounds=tuple(range(0, num * length + 1, length)),
            last_hidden=target.forward(ids).last_hidden.flatten(0, 1),
        )
        with torch.enable_grad():
            loss = draft(batch, draft.counts(batch))["loss"].sum
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
    done = folder.with_name(folder.name + ".mtp")
    source = mtp_checkpoint.Checkpoint.open(str(folder))
    config, tensors = draft.neutral()
    mtp_checkpoint.write(source, tensors, config["target_keys"], {}, done)
    (done / mtp_checkpoint.REPORT).unlink()  # it is a target here, not an export
    shutil.rmtree(folder)
    return done


def _untaught(kind: str) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the smallest head that vLLM's CPU attention takes
        "max_position_embeddings": 512,
        "bos_token_id": BOS,
        "eos_token_id": IM_END,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(_config(kind, sizes))


def _config(kind: str, sizes: dict[str, Any]) -> transformers.PreTrainedConfig:
    t = transformers
    moe: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
    routed = moe | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_group": 1}
    delta: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    delta |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    if kind == "llama":
        return t.LlamaConfig(**sizes)
    if kind == "qwen3":
        return t.Qwen3Config(**sizes)
    if kind == "gemma4":
        own: dict[str, Any] = {
            "global_head_dim": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 16,
        }
        return t.Gemma4TextConfig(**sizes, **own, hidden_size_per_layer_input=0)
    if kind == "qwen3_5":
        return t.Qwen3_5TextConfig(**sizes, **delta)
    if kind == "qwen3_next":
        return t.Qwen3NextConfig(**sizes, **delta, **moe, num_experts=4, shared_expert_intermediate_size=64)
    if kind == "glm4_moe":
        return t.Glm4MoeConfig(**sizes, **routed, n_group=1)
    if kind == "deepseek_v3":
        latent: dict[str, Any] = {
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 32,
            "n_group": 2,
            "topk_method": "noaux_tc",  # this and the next are keys that servers read
            "scoring_func": "sigmoid",
        }
        own = {key: value for key, value in sizes.items() if key != "head_dim"} | {"num_key_value_heads": 4}
        return t.DeepseekV3Config(**own, **routed, **latent)
    own = {key: value for key, value in sizes.items() if key != "head_dim"}
    own |= {"num_attention_heads": 2, "num_key_value_heads": 1}  # heads of 32 without a key for it
    if kind == "ernie4_5":
        experts: dict[str, Any] = {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        }
        return t.Ernie4_5_MoeConfig(**own, **experts, moe_intermediate_size=64)
    assert kind == "mimo", kind
    return t.Qwen2Config(**own)


def _byte_symbols() -> list[str]:
    """The printable symbol that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, moved = [], 0
    for byte in range(256):
        symbols.append(chr(byte) if byte in printable else chr(256 + moved))
        moved += byte not in printable
    return symbols
