"""Tiny checkpoints of each MTP family whose acceptance is known in advance.

The target counts: after token v comes v + 1 (mod VOCAB), because its layers add nothing and its tables are harmonic.
Each token's embedding e(v) is a set of angles v * f, so that one rotation R turns every e(v) into e(v + 1), and a
module can be written down that is right for one reason only:

    embed    the projection keeps the half of the embedding: u = e(x[t+1])            -> every slot is right
    hidden   it keeps the half of the hidden state and turns it: u = R e(x[t])        -> right as long as the state
             it is fed with is one like the target's own, after the final norm

Every norm has gains of its own, of both signs, and the projection undoes exactly those that should act on it. So a
half in the wrong place, a state from before the norm, a missing 1 + w or a wrong norm makes every proposal wrong. What
remains are facts that show as acceptance. GLM feeds the first step with the state after the target's norm and the later
ones with the state before the module's; MiMo does it the other way round. So their `hidden` modules, which can undo only
one of the two, are right once a round. Families that zero the embedding at position 0 have nothing to go on there with
`embed`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as t
from safetensors.torch import load_file, save_file
from tiny import BOS, IM_END, PAD, tokenizer
from torch import Tensor

VOCAB, WIDTH, SIZES = 264, 64, {"max_position_embeddings": 512, "tie_word_embeddings": False}
KINDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "deepseek_v3", "mimo", "glm4_moe", "ernie4_5")
ZERO_FIRST = ("deepseek_v3", "mimo", "glm4_moe", "ernie4_5")  # the embedding beside position 0 is zero
SERVED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # DeepSeek keys that vLLM reads, transformers does not
RIGHT_ONCE = ("glm4_moe", "mimo")  # the later steps are fed on another side of a norm than the first
BEFORE_NORM = ("mimo",)  # the first step is fed with the target's state before its final norm
SILENT = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")

_BASE = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 96, "num_attention_heads": 4}
_BASE |= {"num_key_value_heads": 2, "bos_token_id": BOS, "eos_token_id": IM_END, "pad_token_id": PAD, **SIZES}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
_ROUTED |= {"first_k_dense_replace": 1, "topk_group": 1}
_MLA = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
# the sizes that vLLM's kernels on the CPU take
_BIG_MLA = {"kv_lora_rank": 512, "q_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


def _hybrid(big: bool) -> dict[str, Any]:
    width = 64 if big else 16
    return _BASE | {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
    }


def config(kind: str, big: bool = False) -> Any:
    """The config of the tiny target; big: the sizes that vLLM's CPU kernels need."""
    if kind == "qwen3_5":
        return t.Qwen3_5TextConfig(**_hybrid(big))
    if kind == "qwen3_5_moe":
        return t.Qwen3_5MoeTextConfig(**_hybrid(big), **_MOE)
    if kind == "qwen3_next":
        return t.Qwen3NextConfig(**_hybrid(big), **_MOE)
    base = _BASE | {"num_hidden_layers": 3}
    if kind == "deepseek_v3":
        sizes = base | {"num_key_value_heads": 4} | _ROUTED | (_BIG_MLA if big else _MLA)
        return t.DeepseekV3Config(**sizes, n_group=2)
    if kind == "glm4_moe":
        return t.Glm4MoeConfig(**base, head_dim=32, **_ROUTED, n_group=1)
    if kind == "ernie4_5":
        moe = {"moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
        return t.Ernie4_5_MoeConfig(**(base | _wide_heads(big)), **moe, moe_layer_start_index=1)
    assert kind == "mimo", kind
    return t.Qwen2Config(**(base | _wide_heads(big)))


def _wide_heads(big: bool) -> dict[str, int]:
    """Heads of 32, the smallest that vLLM's attention on the CPU takes, where there is no head_dim to set."""
    return {"num_attention_heads": 2, "num_key_value_heads": 1} if big else {}


def facts(kind: str, num_layers: int, index: int) -> tuple[dict[str, str], int, dict[str, Any]]:
    """(names of the module's parts in the checkpoint, trunk layer that the block is like, keys of config.json).

    Written down a second time on purpose: models/mtp.py has its own table.
    """
    if kind.startswith("qwen"):
        key = "num_nextn_predict_layers" if kind == "qwen3_next" else "mtp_num_hidden_layers"
        parts = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "proj": "mtp.fc"}
        return parts | {"norm": "mtp.norm", "block": "mtp.layers.0"}, 3, {key: 1}
    if kind in ("deepseek_v3", "glm4_moe"):
        stem = f"model.layers.{num_layers + index}"
        parts = {"enorm": f"{stem}.enorm", "hnorm": f"{stem}.hnorm", "proj": f"{stem}.eh_proj"}
        extra = SERVED if kind == "deepseek_v3" else {}
        keys = {"num_nextn_predict_layers": index + 1} | extra
        return parts | {"norm": f"{stem}.shared_head.norm", "block": stem}, 2, keys
    if kind == "mimo":
        stem = f"model.mtp_layers.{index}"
        parts = {"enorm": f"{stem}.token_layernorm", "hnorm": f"{stem}.hidden_layernorm"}
        parts |= {"proj": f"{stem}.input_proj", "norm": f"{stem}.final_layernorm", "block": stem}
        return parts, 0, {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": index + 1}
    parts = {"enorm": "model.mtp_emb_norm.0", "hnorm": "model.mtp_hidden_norm.0"}
    parts |= {"proj": "model.mtp_linear_proj.0", "block": "model.mtp_block.0"}
    return parts, 0, {"num_nextn_predict_layers": 1}


# -- the counting language -------------------------------------------------------------------------------------------
def embeddings() -> tuple[Tensor, Tensor]:
    """(e [VOCAB, WIDTH], R [WIDTH, WIDTH]) with R e(v) = e(v + 1)."""
    random = torch.Generator().manual_seed(5)
    half = WIDTH // 2
    steps = (torch.randperm(VOCAB // 2 - 1, generator=random)[:half] + 1) * (2 * torch.pi / VOCAB)
    angles = torch.arange(VOCAB)[:, None].double() * steps.double()
    turn = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for j, angle in enumerate(steps.double()):
        turn[j, j] = turn[half + j, half + j] = angle.cos()
        turn[j, half + j], turn[half + j, j] = -angle.sin(), angle.sin()
    return torch.cat([angles.cos(), angles.sin()], 1).float(), turn.float()


def gains(seed: int) -> Tensor:
    """[WIDTH], sizes from 0.5 to 1.5 of both signs."""
    random = torch.Generator().manual_seed(100 + seed)
    size = torch.empty(WIDTH).uniform_(0.5, 1.5, generator=random)
    return size * (torch.randint(0, 2, (WIDTH,), generator=random) * 2 - 1)


def make(kind: str, oracle: str, folder: Path, big: bool = False, num_modules: int = 1) -> Path:
    """Write the checkpoint in two shards, the module in the second one. Modules after the first are broken."""
    settings = config(kind, big)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = t.AutoModelForCausalLM.from_config(settings).float()
    e, _ = embeddings()
    final = gains(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(SILENT):
                parameter.zero_()
        model.get_input_embeddings().weight.copy_(e)
        model.get_output_embeddings().weight.copy_((e / final).roll(1, 0))
        model.model.norm.weight.copy_(stored(kind, final))
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    trunk = load_file(folder / "model.safetensors")
    module: dict[str, Tensor] = {}
    keys: dict[str, Any] = {}
    for index in range(num_modules):
        parts, like, keys = facts(kind, settings.num_hidden_layers, index)
        module |= _module(kind, oracle if index == 0 else "broken", parts, f"model.layers.{like}.", trunk)
        if kind in ("deepseek_v3", "glm4_moe"):  # copies that servers replace by the target's own
            module[f"{parts['block']}.embed_tokens.weight"] = torch.randn(VOCAB, WIDTH)
            module[f"{parts['block']}.shared_head.head.weight"] = torch.randn(VOCAB, WIDTH)
    write_shards(folder, trunk, module, keys)
    return folder


def stored(kind: str, gain: Tensor) -> Tensor:
    """Gains as the family's norms store them."""
    return gain - 1 if kind.startswith("qwen3") else gain


def _module(kind: str, oracle: str, parts: dict[str, str], like: str, trunk: dict[str, Tensor]) -> dict[str, Tensor]:
    e_gain, h_gain, final = gains(1), gains(2), gains(0)
    _, turn = embeddings()
    embed, hidden = torch.zeros(WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH)
    if oracle == "embed":
        embed = torch.diag(1 / e_gain)
    elif oracle == "hidden":
        hidden = turn @ torch.diag(1 / (h_gain if kind in BEFORE_NORM else final * h_gain))
    else:  # the state as it is: a token too early
        hidden = torch.diag(1 / (final * h_gain))
    if "norm" not in parts:  # what leaves the block goes into the head as it is
        embed, hidden = final[:, None] * embed, final[:, None] * hidden
    halves = [hidden, embed] if kind == "mimo" else [embed, hidden]
    found = {f"{parts['proj']}.weight": torch.cat(halves, 1)}
    found[f"{parts['enorm']}.weight"] = stored(kind, e_gain)
    found[f"{parts['hnorm']}.weight"] = stored(kind, h_gain)
    if "norm" in parts:
        found[f"{parts['norm']}.weight"] = stored(kind, final)
    block = {name.removeprefix(like): tensor for name, tensor in trunk.items() if name.startswith(like)}
    return found | {f"{parts['block']}.{name}": tensor.clone() for name, tensor in block.items()}


def write_shards(folder: Path, trunk: dict[str, Tensor], module: dict[str, Tensor], keys: dict[str, Any]) -> None:
    """model-00001: the trunk; model-00002: the module and one tensor of the trunk; and the index."""
    (folder / "model.safetensors").unlink()
    moved = "model.norm.weight"
    shards = {"model-00001-of-00002.safetensors": {k: v for k, v in trunk.items() if k != moved}}
    shards["model-00002-of-00002.safetensors"] = module | {moved: trunk[moved]}
    names = {}
    for file, tensors in shards.items():
        kept = {k: v.contiguous().clone() for k, v in tensors.items()}
        save_file(kept, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 0}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(settings, indent=1))


def prompts() -> list[list[int]]:
    """Prompts of several lengths, one of them a single token."""
    return [[7], [20, 21, 5, 90], list(range(100, 112)), [3, 250]]


def expected_rounds(kind: str, oracle: str, prompt: list[int], num_tokens: int, num: int) -> list[tuple[int, int]]:
    """(num_proposed, num_accepted) of every round of a greedy answer of num_tokens."""
    usual = num if oracle == "embed" or kind not in RIGHT_ONCE else 1
    rounds: list[tuple[int, int]] = []
    made = 1  # the first token comes from the prefill
    while made < num_tokens:
        blind = oracle == "embed" and kind in ZERO_FIRST and not rounds and len(prompt) == 1
        rounds.append((num, 0 if blind else usual))
        made += rounds[-1][1] + 1
    return rounds
