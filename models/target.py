"""The target: the frozen big model. Load it, capture its states, continue a cache, give its logits, generate.

Aux layer k is the residual stream after k decoder layers, transformers' `hidden_states[k]`:

    ids -> embedding -(0)-> layer 0 -(1)-> layer 1 -(2)-> ... -> layer N-1 -(N)-> final norm -> last hidden -> head

A hook in front of layer k sees state k. State N is only had after the norm (that is the last hidden), so it is refused
as a feature. Only the text model runs, never the head: callers ask `logits` for the rows they want.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Cache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draftsmith.models import tiny
from draftsmith.models.cache import HybridCache, PassCache, TargetCache
from draftsmith.models.draft import Draft, Needs, TargetSpec
from draftsmith.models.gguf import PACKAGE, cache_root, gguf_file, unpacked
from draftsmith.models.mtp_checkpoint import Checkpoint
from draftsmith.models.sampling import Sampler

PROVEN = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt2")
"""Text model types that tests compare with transformers. Others are compared once, when they are loaded."""

ROLLS_BACK = ("full_attention", "sliding_attention")
"""Layer types whose cache can be rolled back by forgetting columns."""

REPLAYS = "linear_attention"
"""Layer type whose running state is rolled back by replaying what stays, where the module is called REPLAYED."""
REPLAYED = "linear_attn"

FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")  # what cores call the norm in front of the head
BALANCED = "balanced"  # target.device: the layers spread over the GPUs of a node
PREFILL_TOKENS = 4096  # tokens of one prefill pass in generate: bounds activations, large enough to fill a device


class TargetConfig(BaseModel):
    """The recipe's `target:` section."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Hub id, local folder, path of a .gguf file, package:NAME/FILE.gguf (a file inside an installed package), or
    tiny:llama / tiny:qwen3 (made on the spot, for tests)."""
    revision: str | None = None
    """Hub branch, tag or commit; only for Hub ids."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """auto = as the checkpoint is stored (GGUF: bfloat16)."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """transformers' attention; eager for targets with soft-capped attention (Gemma 2)."""
    published_name: str | None = None
    """Public Hub id that exports name as their target when `name` is a local path."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template."""
    device: str = "auto"
    """auto = the current GPU if there is one, else the CPU; balanced = the layers spread over all GPUs of this node, for
    capturing from a target that one GPU does not hold."""
    ends_only: bool = False
    """Load embedding, final norm and head without the layers between: enough to train a draft from captured states on a
    device that the whole target does not fit."""


KeysValues = dict[int, tuple[Tensor, Tensor]]
"""{layer: (keys, values)} as they stand in the target's cache: after norms and RoPE."""


@dataclass
class TargetOutput:
    """features: [B, N, A*D] in ascending aux layers, or None; last_hidden: [B, N, D], what goes into the head.

    target_kv: [B, Hkv, N, E] each, of passes without a cache; with one, ask cache.keys_values.
    """

    features: Tensor | None
    last_hidden: Tensor
    target_kv: KeysValues = field(default_factory=dict)


class States(NamedTuple):
    """One row's states: features [T, A*D], last_hidden [T, D], target_kv [T, Hkv, E] each; None or empty if not asked."""

    features: Tensor | None
    last_hidden: Tensor | None
    target_kv: KeysValues


class Target:
    """A frozen causal language model with its tokenizer.

    model: the whole transformers model, without vision or audio towers. core: its text decoder, which gives last hidden.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: TargetConfig,
        folder: Path | None = None,
    ):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = config
        self.folder = folder  # where its files lie, None for Hub ids
        self.core, self.layers = find_core(model)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"target {config.name}: the head is {type(head).__name__}, only a linear head is understood"
            )
        self._head = head
        text = model.config.get_text_config()
        self.spec = target_spec(config, text, model, self.core, tokenizer)
        self.num_layers = self.spec.num_layers
        self.layer_kinds, self.window = layer_kinds(text)
        parameters = inspect.signature(self.core.forward).parameters
        self._cache_word = "cache" if "cache" in parameters else "past_key_values"  # renamed after transformers 5.19
        self._additive_masks = config.attention == "eager"
        self._positions_learned = learned_positions(text)
        wrapped = model.base_model is not self.core
        proven = self.spec.model_type in PROVEN and not (wrapped and self.spec.logit_softcap is not None)
        self._cache_proven = proven
        if not proven and not config.ends_only:
            self._compare_with_transformers()
        drop_towers(model, self.core, head)

    # -- loading -----------------------------------------------------------------------------------------------------
    @classmethod
    def load(cls, config: TargetConfig) -> Target:
        """Load model and tokenizer; ValueError says what is missing and what to do."""
        file = gguf_file(config.name)
        if config.name.startswith(tiny.PREFIX):
            source: Path | None = tiny.make(config.name.removeprefix(tiny.PREFIX), cache_root() / "targets")
        else:
            source = _local_folder(config.name) if file is None else unpacked(file)
        if source is not None and config.revision is not None:
            raise ValueError(f"target.revision: {config.revision!r} has no effect, {config.name} is local; remove it")
        where = {"pretrained_model_name_or_path": str(source or config.name), "revision": config.revision or "main"}
        device = _device(config.device, config.ends_only)
        model: Any = _load_ends(where, config, device) if config.ends_only else _load_model(where, config)
        if config.device == BALANCED:
            check_spread(config.name, getattr(model, "hf_device_map", {}))
        elif not config.ends_only:
            model = model.to(device)
        return cls(model, _load_tokenizer(where, config), config, source)

    # -- what drafts bind to --------------------------------------------------------------------------------------
    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._head.weight.dtype

    @property
    def embedding(self) -> Tensor:
        """[V, D], without the embedding scale."""
        return embedding_of(self.core).weight.to(self.device)  # elsewhere only where the target is spread

    @property
    def head(self) -> Tensor:
        """[V, D]; the same storage as `embedding` when the target ties them."""
        return self._head.weight

    @property
    def positions_learned(self) -> bool:
        """Whether positions are added to the embedding, so that state 0 is not the embedding alone."""
        return self._positions_learned

    @property
    def spread(self) -> bool:
        """Whether the layers stand on more than one device."""
        return len(set(getattr(self.model, "hf_device_map", {}).values())) > 1

    @torch.no_grad()
    def normed(self, states: Tensor) -> Tensor:
        """State N, after the last layer, [..., D] -> last hidden, what goes into the head."""
        norm = self._norm
        if norm is None:
            raise ValueError(
                f"{self.spec.name}: its core names no final norm ({', '.join(FINAL_NORMS)}), so states in front of it are "
                "of no use; capture in process"
            )
        return norm(states.to(self.dtype)).to(self.device)

    @property
    def _norm(self) -> nn.Module | None:
        return next((m for n in FINAL_NORMS if (m := getattr(self.core, n, None)) is not None), None)

    @property
    def final_norm(self) -> Tensor | None:
        """[D], the gains of the norm in front of the head; None when the core names none."""
        norm = self._norm
        if norm is None or isinstance(norm, nn.LayerNorm):
            return None if norm is None else norm.weight
        with torch.no_grad():  # a norm of ones is its gains, whether it multiplies by w or by 1 + w
            return norm(torch.ones(self.spec.hidden_size, dtype=self.dtype, device=self.device)).to(self.device)

    def bind(self, draft: Draft) -> None:
        """Lend the draft the frozen tensors it works with."""
        draft.bind(self.embedding, self.head, self.final_norm)

    def needs_ok(self, needs: Needs) -> None:
        """Refuse what this target cannot give, with the reason."""
        layers, last = needs.aux_layers, self.num_layers
        if list(layers) != sorted(set(layers)):
            raise ValueError(
                f"draft.aux_layers: {list(layers)} must be ascending and distinct, e.g. {sorted(set(layers))}"
            )
        for k in layers:
            if k == last:
                raise ValueError(
                    f"draft.aux_layers: {k} is the output of the last of {last} layers; transformers gives it only after "
                    f"the final norm while servers give it before, so it cannot be a feature; use 0..{last - 1}"
                )
            if not 0 <= k < last:
                raise ValueError(
                    f"draft.aux_layers: {k} does not exist in {self.spec.name} with {last} layers; use 0..{last - 1}"
                )
        if needs.target_kv_layers and self.spread:
            raise ValueError(
                f"target.device {BALANCED}: this draft reads keys and values of {self.spec.name}, which are only kept on one "
                f"device; capture where the target fits one"
            )
        for k in needs.target_kv_layers:
            self.kv_shape(k)
        if self._head.bias is not None:
            raise ValueError(f"{self.spec.name}: its head has a bias, which a draft's own head would lack")

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """(Hkv, E) of a layer's keys; refused where a layer writes none of its own."""
        attention = getattr(self.layers[layer], "self_attn", None) if 0 <= layer < self.num_layers else None
        keys = getattr(attention, "k_proj", None)
        if keys is None or REPLAYS in self.layer_kinds:
            raise ValueError(
                f"draft needs keys and values of target layer {layer}: {self.spec.name} has {self.num_layers} layers, and "
                f"this one writes none of its own; use one that does"
            )
        width = int(getattr(attention, "head_dim", self.spec.head_dim))
        return keys.out_features // width, width

    def logits(self, last_hidden: Tensor) -> Tensor:
        """The target's own head path, [..., D] -> [..., V], in the target's dtype: head, bias, soft-cap."""
        logits = self._head(last_hidden.to(self.dtype))
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    # -- one pass ------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        cache: TargetCache | None = None,
        needs: Needs = Needs(),  # noqa: B008  (frozen)
        lengths: Tensor | Sequence[int] | None = None,
    ) -> TargetOutput:
        """States of input_ids [B, N].

        Without a cache: right-padded rows at positions 0..N-1; padding never reaches a real token. With a cache: row b is
        appended behind cache.lengths[b], and `cache.advance` says afterwards how many tokens stay. lengths [B]: how
        many of the N tokens are real; states of the others mean nothing.
        """
        if self.config.ends_only:
            raise ValueError(
                f"target.ends_only: {self.spec.name} has no layers here, so it gives no states; capture them first and "
                f"decode without it"
            )
        if input_ids.device.type == "cpu":
            self.check_ids(input_ids)
        input_ids = input_ids.to(self.device)
        whole = None  # holds keys and values where no cache does
        if cache is None and needs.target_kv_layers:
            batch_size, num_new = input_ids.shape
            whole = PassCache(batch_size, num_new, self.num_layers, self.device, needs.target_kv_layers)
            positions = torch.arange(input_ids.shape[1], device=self.device).expand(input_ids.shape)
            arguments: dict[str, Any] = {
                self._cache_word: whole,
                "use_cache": True,
                "attention_mask": self._masks(whole, positions),
            }
        elif cache is None:
            arguments = {"use_cache": False}
        else:
            real = lengths.tolist() if isinstance(lengths, Tensor) else lengths
            cache.begin(input_ids.shape[1], real)
            positions = cache.lengths[:, None] + torch.arange(input_ids.shape[1], device=self.device)
            arguments = {
                self._cache_word: cache,
                "use_cache": True,
                "attention_mask": self._masks(cache, positions),
                # padding behind a nearly full row may lie past the last learned position
                "position_ids": positions.clamp(max=cache.max_len - 1),
            }
        with (
            torch.autocast(self.device.type, enabled=False),
            nullcontext() if cache is None else cache.recording(),
            self._captured(needs.aux_layers) as states,
        ):
            last_hidden = self.core(input_ids=input_ids, **arguments).last_hidden_state.to(self.device)
        features = torch.cat([states[k].to(self.device) for k in needs.aux_layers], -1) if needs.aux_layers else None
        if whole is None:
            return TargetOutput(features, last_hidden)
        whole.advance([input_ids.shape[1]] * len(input_ids))
        return TargetOutput(features, last_hidden, {k: whole.keys_values(k) for k in needs.target_kv_layers})

    @contextmanager
    def _captured(self, aux_layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """States by aux layer, filled by hooks that live only inside the `with` and hear only this thread."""
        states: dict[int, Tensor] = {}
        thread = threading.get_ident()

        def listen(k: int) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
                if threading.get_ident() == thread:
                    states[k] = args[0] if args else kwargs["hidden_states"]

            return hook

        handles = []
        try:
            for k in aux_layers:
                handles.append(self.layers[k].register_forward_pre_hook(listen(k), with_kwargs=True))
            yield states
        finally:
            for handle in handles:
                handle.remove()

    def _masks(self, cache: TargetCache, positions: Tensor) -> Any:
        """What the core takes as attention_mask for queries at positions [B, N]: a mask [B, 1, N, keys], or None where
        sdpa needs none, or one of these per layer type when the types differ.

        Key j is visible at position p iff j <= p, and j > p - window on sliding layers.
        """
        num_new, num_keys = positions.shape[1], cache.key_len
        # one new token sees every key; an empty cache is plain causal attention, which sdpa does by itself
        plain = not self._additive_masks and cache.uniform and (num_new == 1 or num_new == num_keys)
        wanted = set(self.layer_kinds)
        masks: dict[str, Tensor | None] = {}
        columns = torch.arange(num_keys, device=positions.device)
        for kind in wanted:
            if kind == REPLAYS:  # what is padded is not replayed, so it needs no mask
                masks[kind] = None
                continue
            short = kind == "full_attention" or num_keys <= self.window
            if plain and short:
                masks[kind] = None
                continue
            mask = columns <= positions[:, :, None]  # [B, N, keys]
            if not short:
                mask &= columns > positions[:, :, None] - self.window
            masks[kind] = self._as_attention_wants(mask[:, None])
        return masks if len(wanted) > 1 or REPLAYS in wanted else masks.popitem()[1]

    def _as_attention_wants(self, mask: Tensor) -> Tensor:
        """sdpa takes booleans; eager attention adds the mask to the scores."""
        if not self._additive_masks:
            return mask
        return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill(
            ~mask, torch.finfo(self.dtype).min
        )

    def new_cache(self, batch_size: int, max_len: int) -> TargetCache:
        """An empty cache for batch_size rows of at most max_len tokens; refused where rollback would not be exact."""
        if self.spread:
            raise ValueError(
                f"target.device {BALANCED}: {self.spec.name} stands on several devices, and only capture works so; let a "
                f"server answer (data.regenerate.server), and measure where the target fits one device"
            )
        mixers = self._mixers()
        foreign = sorted(set(self.layer_kinds) - {*ROLLS_BACK, REPLAYS})
        if foreign or (self.model._is_stateful and not mixers):
            raise ValueError(
                f"{self.spec.name}: {', '.join(foreign) or self.spec.model_type} layers keep a running state that rejected "
                f"tokens cannot be taken out of exactly; capture and training work, decoding here does not"
            )
        if self._positions_learned and max_len > self.spec.max_positions:
            raise ValueError(
                f"{self.spec.name}: {max_len} tokens per row asked for, it has {self.spec.max_positions} learned positions; "
                f"use shorter prompts or a smaller max_new_tokens"
            )
        if mixers:
            cache: TargetCache = HybridCache(batch_size, max_len, self.num_layers, self.device, mixers)
        else:
            cache = TargetCache(batch_size, max_len, self.num_layers, self.device)
        if not self._cache_proven:
            self._compare_cache_with_full_pass()
        return cache

    def _mixers(self) -> dict[int, nn.Module]:
        """{layer: its gated delta module}, for layers whose state this project can replay."""
        found = {}
        for i, (kind, layer) in enumerate(zip(self.layer_kinds, self.layers, strict=True)):
            if kind != REPLAYS:
                continue
            mixer = getattr(layer, REPLAYED, None)
            if mixer is None or not hasattr(Cache, "get_conv_state"):
                return {}
            found[i] = mixer
        return found

    # -- many rows -----------------------------------------------------------------------------------------------
    def capture(
        self, rows: Sequence[Tensor | Sequence[int]], needs: Needs, max_batch_tokens: int = 8192
    ) -> list[tuple[Tensor | None, Tensor | None]]:
        """(features [T, A*D], last hidden [T, D]) of every row, in the order given; see `states`."""
        return [(found.features, found.last_hidden) for found in self.states(rows, needs, max_batch_tokens)]

    def states(
        self, rows: Sequence[Tensor | Sequence[int]], needs: Needs, max_batch_tokens: int = 8192
    ) -> list[States]:
        """What `needs` asks for of every row, in the order given.

        Rows of like length run together, padded on the right, at most max_batch_tokens at a time (padding included).
        """
        self.needs_ok(needs)
        ids = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
        found = [States(None, None, {})] * len(ids)
        for group in length_groups([len(row) for row in ids], max_batch_tokens):
            batch = nn.utils.rnn.pad_sequence([ids[i] for i in group], batch_first=True)
            out = self.forward(batch, needs=needs)
            for row, i in enumerate(group):
                n = len(ids[i])
                features = None if out.features is None else out.features[row, :n].clone()
                last_hidden = out.last_hidden[row, :n].clone() if needs.last_hidden else None
                kv = {
                    layer: (k[row, :, :n].transpose(0, 1).clone(), v[row, :, :n].transpose(0, 1).clone())
                    for layer, (k, v) in out.target_kv.items()
                }
                found[i] = States(features, last_hidden, kv)
        return found

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampler: Sampler,
        stop_ids: Collection[int],
        batch_size: int = 64,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[int]]:
        """New tokens of every prompt, in the order given, the stop token included.

        Prompts of like length share a batch; rows that have ended leave it. progress is told how many tokens came.
        """
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {i} is empty; give at least one token")
        answers: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for start in range(0, len(order), batch_size):
            group = order[start : start + batch_size]
            self._generate_batch(prompts, group, answers, max_new_tokens, sampler, frozenset(stop_ids), progress)
        return answers

    def _generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        group: list[int],
        answers: list[list[int]],
        max_new_tokens: int,
        sampler: Sampler,
        stop_ids: frozenset[int],
        progress: Callable[[int], None] | None,
    ) -> None:
        alive = list(group)  # prompt number of each cache row
        cache = self.new_cache(len(group), max(len(prompts[i]) for i in group) + max_new_tokens)
        last_hidden = self.prefill([prompts[i] for i in group], cache)
        for _ in range(max_new_tokens):
            tokens = self.choose(last_hidden, sampler)
            new = tokens.tolist()
            for i, token in zip(alive, new, strict=True):
                answers[i].append(token)
            if progress is not None:
                progress(len(new))
            rows = rows_left([token not in stop_ids for token in new])
            if not rows:
                return
            if len(rows) < len(alive):
                alive = [alive[r] for r in rows]
                cache.keep(rows)
                tokens = tokens[torch.tensor(rows, device=tokens.device)]
            if len(answers[alive[0]]) < max_new_tokens:
                last_hidden = self.forward(tokens[:, None], cache).last_hidden[:, -1]
                cache.advance([1] * len(rows))

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], cache: TargetCache) -> Tensor:
        """Put prompts into an empty cache, a few columns at a time; returns the last hidden of each prompt's end [B, D]."""
        lengths = [len(prompt) for prompt in prompts]
        ids = nn.utils.rnn.pad_sequence([torch.as_tensor(p, dtype=torch.int64) for p in prompts], batch_first=True)
        width = max(1, PREFILL_TOKENS // len(prompts))
        ends = torch.empty(len(prompts), self.spec.hidden_size, dtype=self.dtype, device=self.device)
        for start in range(0, ids.shape[1], width):
            real = [min(max(n - start, 0), width) for n in lengths]
            out = self.forward(ids[:, start : start + width], cache, lengths=real)
            cache.advance(real)
            for row, n in enumerate(lengths):
                if start < n <= start + width:
                    ends[row] = out.last_hidden[row, n - 1 - start]
        return ends

    def choose(self, last_hidden: Tensor, sampler: Sampler) -> Tensor:
        """Next token of each state [B, D] -> [B]."""
        logits = self.logits(last_hidden)
        return logits.float().argmax(-1) if sampler.greedy else sampler.draw(sampler.probs(logits))

    # -- checks ----------------------------------------------------------------------------------------------------
    def check_ids(self, ids: Tensor | Sequence[int]) -> None:
        """Refuse token ids that have no embedding row; the error names token, id and number of rows."""
        ids = torch.as_tensor(ids)
        if ids.numel() == 0:
            return
        low, high = torch.aminmax(ids)
        rows = self.spec.vocab_size
        if int(low) < 0 or int(high) >= rows:
            bad = int(low) if int(low) < 0 else int(high)
            raise ValueError(self._no_row(bad))

    def check_tokenizer(self) -> None:
        """Refuse a tokenizer that can produce ids without an embedding row (tokens added, model not resized)."""
        beyond = sorted(i for i in self.tokenizer.get_vocab().values() if i >= self.spec.vocab_size)
        if beyond:
            more = f" ({len(beyond)} tokens in all)" if len(beyond) > 1 else ""
            raise ValueError(self._no_row(beyond[0]) + more)

    def _no_row(self, token_id: int) -> str:
        token = self.tokenizer.convert_ids_to_tokens(token_id) if token_id >= 0 else None
        return (
            f"target {self.spec.name}: token {token!r} has id {token_id}, but its embedding has {self.spec.vocab_size} rows; "
            f"use the tokenizer that belongs to the model, or resize the model (resize_token_embeddings) and save it"
        )

    def weights_sha256(self) -> str:
        """One hash over the names and bytes of all parameters and buffers."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()

    def _compare_with_transformers(self) -> None:
        """Refuse an architecture whose states or logits this generic route does not get right."""
        ids = self._probe_ids()
        with torch.no_grad():
            truth = self.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        if getattr(truth, "hidden_states", None) is None:
            raise ValueError(
                f"{self.spec.name}: {self.spec.model_type} models do not give hidden states in transformers"
            )
        out = self.forward(ids, needs=Needs(aux_layers=tuple(range(self.num_layers))))
        assert out.features is not None
        states = torch.cat([state.to(self.device) for state in truth.hidden_states[:-1]], -1)
        rows = self.embedding[ids] * self.spec.embedding_scale
        if not self._positions_learned and not torch.allclose(rows, truth.hidden_states[0], rtol=1e-2):
            raise ValueError(self._not_understood("embeddings", rows, truth.hidden_states[0]))
        if not torch.equal(out.features, states):
            raise ValueError(self._not_understood("hidden states", out.features, states))
        logits = self.logits(out.last_hidden)
        if not torch.allclose(logits, truth.logits.to(logits.dtype), rtol=1e-3, atol=1e-3):
            raise ValueError(self._not_understood("logits", logits, truth.logits))

    def _compare_cache_with_full_pass(self) -> None:
        """Refuse a cache for an architecture that does not give the same states with it, rollback included."""
        self._cache_proven = True
        ids = self._probe_ids()
        full = self.forward(ids).last_hidden
        cache = self.new_cache(1, ids.shape[1])
        self.forward(ids[:, :3], cache)
        cache.advance([3])
        self.forward(ids[:, :2], cache)  # rejected: nothing advances
        steps = self.forward(ids[:, 3:], cache).last_hidden
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1
        if not torch.allclose(steps, full[:, 3:], rtol=tolerance, atol=tolerance * float(full.abs().max())):
            self._cache_proven = False
            raise ValueError(self._not_understood("cached states", steps, full[:, 3:]))

    def _probe_ids(self) -> Tensor:
        return torch.arange(7, device=self.device)[None] % self.spec.vocab_size

    def _not_understood(self, what: str, ours: Tensor, theirs: Tensor) -> str:
        gap = float((ours - theirs).abs().max())
        return (
            f"{self.spec.name}: {what} of a {self.spec.model_type} model differ from transformers' own by up to {gap:.3g}; "
            f"this architecture is not understood (tested: {', '.join(PROVEN)})"
        )


# -- aux layers ------------------------------------------------------------------------------------------------------
def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's three layers (2, N//2, N-3) for N >= 7; for shallower targets distinct ids below N.

    N = 6: (2, 3, 4); 5: (1, 2, 4); 4: (1, 2, 3); 3: (0, 1, 2). With fewer than three layers there are fewer features, and the
    draft's input is as much narrower: 2: (0, 1); 1: (0,).
    """
    if num_layers < 1:
        raise ValueError(f"a target needs at least one layer, got {num_layers}")
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return {1: (0,), 2: (0, 1), 3: (0, 1, 2), 4: (1, 2, 3), 5: (1, 2, 4), 6: (2, 3, 4)}[num_layers]


def block_aux_layers(num_layers: int, num_aux: int = 5) -> tuple[int, ...]:
    """The layers block drafts read: outputs round(1 + i (N-4) / (m-1)) of DFlash, plus one to count as aux layers.

    One layer: N//2 + 1. Shallow targets, where the formula repeats itself, give fewer distinct ids below N.
    """
    if num_aux == 1:
        outputs = [num_layers // 2]
    else:
        outputs = [round(1 + i * (num_layers - 4) / (num_aux - 1)) for i in range(num_aux)]
    return tuple(sorted({min(max(j + 1, 0), num_layers - 1) for j in outputs}))


# -- taking a model apart --------------------------------------------------------------------------------------------
def find_core(model: PreTrainedModel) -> tuple[PreTrainedModel, nn.ModuleList]:
    """The text decoder and its layers: the model that owns the input embedding and a list of num_hidden_layers."""
    num_layers = model.config.get_text_config().num_hidden_layers
    embedding = model.get_input_embeddings()
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or module.get_input_embeddings() is not embedding:
            continue
        lists = [c for c in module.children() if isinstance(c, nn.ModuleList) and len(c) == num_layers]
        if len(lists) == 1 and module.get_output_embeddings() is None:
            return module, lists[0]
    raise ValueError(
        f"{type(model).__name__}: found no text decoder that owns the embedding and one list of {num_layers} layers; "
        f"this architecture is not understood (tested: {', '.join(PROVEN)})"
    )


def embedding_of(core: PreTrainedModel) -> nn.Embedding:
    embedding = core.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding), f"expected nn.Embedding, got {type(embedding).__name__}"
    return embedding


def drop_towers(model: PreTrainedModel, core: PreTrainedModel, head: nn.Module) -> None:
    """Remove what stands beside the text decoder and the head (vision and audio towers), to free its memory."""
    outer: nn.Module = model
    while outer is not core:
        inner = next(child for child in outer.children() if core in child.modules())
        for name, child in list(outer.named_children()):
            if child is not inner and head not in child.modules():
                setattr(outer, name, None)
        outer = inner


def layer_kinds(text: PreTrainedConfig) -> tuple[list[str], int]:
    """(attention type of every layer, window of the sliding ones or 0)."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * text.num_hidden_layers
    return list(kinds), int(window or 0)


def learned_positions(text: PreTrainedConfig) -> bool:
    return not getattr(text, "rope_parameters", None) and not hasattr(text, "rope_theta")


def target_spec(
    config: TargetConfig,
    text: PreTrainedConfig,
    model: PreTrainedModel,
    core: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> TargetSpec:
    """Sizes and conventions from the text part of the config; what no known name gives is refused.

    Where layers differ in their heads (Gemma 4), those of the full-attention layers stand for all.
    """
    like = full_attention_config(text)

    def read(*names: str) -> Any:
        for name in names:
            if getattr(like, name, None) is not None:
                return getattr(like, name)
        raise ValueError(f"target {config.name}: its config has none of {', '.join(names)}; not understood")

    def optional(name: str, otherwise: Any) -> Any:
        value = getattr(like, name, None)
        return otherwise if value is None else value

    num_heads, hidden_size = read("num_attention_heads"), read("hidden_size")
    return TargetSpec(
        name=config.name,
        revision=config.revision,
        config_sha256=config_sha256(text),
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        architecture=type(model).__name__,
        model_type=text.model_type,
        num_layers=read("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=optional("intermediate_size", optional("n_inner", 4 * hidden_size)),
        num_heads=num_heads,
        num_kv_heads=optional("num_key_value_heads", num_heads),
        head_dim=optional("head_dim", hidden_size // num_heads),
        vocab_size=embedding_of(core).weight.shape[0],
        max_positions=read("max_position_embeddings", "n_positions"),
        norm_eps=read("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
        activation=read("hidden_act", "hidden_activation", "activation_function"),
        rope=rope_of(text),
        attention_bias=bool(optional("attention_bias", False)),
        embedding_scale=embedding_scale(embedding_of(core)),
        logit_softcap=optional("final_logit_softcapping", None),
        eos_ids=eos_ids(model, text, tokenizer),
        text_config=plain_config(text),
    )


def full_attention_config(text: PreTrainedConfig) -> PreTrainedConfig:
    """The config as its full-attention layers see it: the config itself, unless its layers differ in their sizes."""
    if not getattr(text, "is_heterogeneous", False):
        return text
    kinds, _ = layer_kinds(text)
    return text.per_layer_config[kinds.index("full_attention")]


def rope_of(text: PreTrainedConfig) -> dict[str, Any]:
    """rope_parameters of the full-attention layers. Targets with learned positions have none: RoPE's usual base."""
    rope = getattr(text, "rope_parameters", None) or {}
    if "full_attention" in rope:  # one entry per layer type (Gemma 3)
        rope = rope["full_attention"]
    found = {key: value for key, value in rope.items() if value is not None}
    return {"rope_type": "default", "rope_theta": getattr(text, "rope_theta", 10000.0)} | found


def embedding_scale(embedding: nn.Module) -> float:
    """What the embedding module multiplies its rows by (Gemma: sqrt(hidden_size))."""
    scale = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", 1.0))
    return float(scale)


def eos_ids(model: PreTrainedModel, text: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends an answer: of the generation config (or else the config) and of the tokenizer."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    named = getattr(generation, "eos_token_id", None)
    for ids in (named if named is not None else text.eos_token_id, tokenizer.eos_token_id):
        found |= set(ids) if isinstance(ids, (list, tuple)) else {ids}
    return tuple(sorted(i for i in found if i is not None))


def config_sha256(text: PreTrainedConfig) -> str:
    """Hash of what the text config says about the computation."""
    return _sha256(plain_config(text))


def plain_config(text: PreTrainedConfig) -> dict[str, Any]:
    """What the text config says about the computation: no names, paths, versions or dtype."""
    about = {"architectures", "dtype", "torch_dtype", "transformers_version", "name_or_path", "use_cache"}
    values = {k: v for k, v in text.to_diff_dict().items() if k not in about and not k.startswith("_")}
    return values | {"model_type": text.model_type}


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of vocabulary, merges, rules, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: dict[str, Any] = {"vocab": tokenizer.get_vocab()}
    else:
        rules = json.loads(backend.to_str())
        rules |= {"truncation": None, "padding": None}  # state of the last call, not of the tokenizer
    specials = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _sha256({"rules": rules, "specials": specials, "template": tokenizer.chat_template})


def _sha256(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


# -- rows ------------------------------------------------------------------------------------------------------------
def length_groups(lengths: Sequence[int], max_batch_tokens: int) -> Iterator[list[int]]:
    """Row numbers in groups of like length, longest first, each group at most max_batch_tokens when padded."""
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    while order:
        size = max(1, max_batch_tokens // lengths[order[0]])
        yield order[:size]
        order = order[size:]


def rows_left(goes_on: Sequence[bool]) -> list[int]:
    """Rows that go on, as an order for TargetCache.keep: the last ones move into the gaps, all others stay put."""
    rows = [i for i, alive in enumerate(goes_on) if alive]
    num = len(rows)
    movers = iter(rows[::-1])
    return [i if goes_on[i] else next(movers) for i in range(num)]


# -- files -----------------------------------------------------------------------------------------------------------
def _local_folder(name: str) -> Path | None:
    """The folder that a target name means, or None for Hub ids. A path that does not exist is refused."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(
            f"target.name: no folder {path}; give a folder with config.json and *.safetensors, or a Hub id"
        )
    return None


def _load_model(where: dict[str, str], config: TargetConfig) -> PreTrainedModel:
    try:
        settings, trunk = _settings(where)
    except (OSError, ValueError) as error:
        raise _unreadable(config, error) from error
    if settings.is_encoder_decoder:
        raise ValueError(
            f"target {config.name}: {settings.model_type} is an encoder-decoder; only decoders are supported"
        )
    classes = [a for a in (AutoModelForCausalLM, AutoModelForImageTextToText) if type(settings) in a._model_mapping]
    if not classes:
        raise ValueError(f"target {config.name}: transformers has no text-generating class for {settings.model_type!r}")
    try:
        loaded: Any = classes[0].from_pretrained(
            **where,
            config=settings,
            dtype=config.dtype,
            attn_implementation=config.attention,
            device_map=BALANCED if config.device == BALANCED else None,
            output_loading_info=True,
            ignore_mismatched_sizes=trunk is not None,  # they are refused below, by name
        )
    except OSError as error:
        raise _unreadable(config, error) from error
    model, info = loaded
    if info["missing_keys"]:
        raise ValueError(f"target {config.name}: its files lack {sorted(info['missing_keys'])[:5]}; fetch them again")
    if trunk is not None:
        strange = {name for name in info["unexpected_keys"] if not name.startswith(trunk.ignored)}
        strange |= {str(found[0]) for found in info["mismatched_keys"]}
        if strange:
            raise ValueError(
                f"target {config.name}: a {trunk.model_type} trunk is read as a {trunk.read_as}, but "
                f"{', '.join(sorted(strange)[:5])} does not fit; this is another model than the one that was compared"
            )
    return model


def _load_ends(where: dict[str, str], config: TargetConfig, device: torch.device) -> PreTrainedModel:
    """The model with its layers on the meta device: only embedding, final norm and head are read from its shards."""
    try:
        settings, _ = _settings(where)
    except (OSError, ValueError) as error:
        raise _unreadable(config, error) from error
    name = where["pretrained_model_name_or_path"]
    files = Checkpoint.open(name, config.revision)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(settings, attn_implementation=config.attention)
    core, _ = find_core(model)
    ends = {"embed_tokens.weight": core.get_input_embeddings()}
    ends |= {f"{n}.weight": module for n in FINAL_NORMS if (module := getattr(core, n, None)) is not None}
    if not settings.get_text_config().tie_word_embeddings:
        ends["lm_head.weight"] = model.get_output_embeddings()
    for tail, module in ends.items():
        found = sorted((n for n in files.shards if f".{n}".endswith(f".{tail}")), key=len)
        if not found or module is None:
            raise ValueError(f"target.ends_only: {name} has no tensor {tail}; load the whole target")
        tensor = files.read(found[:1])[found[0]]  # the shortest name is the trunk's: modules and layers stand deeper
        dtype = tensor.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        module.weight = nn.Parameter(tensor.to(device, dtype), requires_grad=False)
    if "lm_head.weight" not in ends:
        model.get_output_embeddings().weight = core.get_input_embeddings().weight
    return model


class Trunk(NamedTuple):
    """A model type that transformers has no class for, whose trunk is that of another one. Its remote code is not run.

    ignored: prefixes of tensors that are not the trunk's.
    """

    model_type: str
    read_as: str
    ignored: tuple[str, ...]


TRUNKS = {"mimo": Trunk("mimo", "qwen2", ("model.mtp_layers.",))}


def _settings(where: dict[str, str]) -> tuple[PreTrainedConfig, Trunk | None]:
    """The config, and the table entry when it is read as another model type's."""
    raw, _ = PreTrainedConfig.get_config_dict(where["pretrained_model_name_or_path"], revision=where["revision"])
    trunk = TRUNKS.get(raw.get("model_type", ""))
    if trunk is None or trunk.model_type in CONFIG_MAPPING:
        return AutoConfig.from_pretrained(**where), None
    values = {key: value for key, value in raw.items() if key not in ("model_type", "auto_map", "architectures")}
    return AutoConfig.for_model(trunk.read_as, **values), trunk


def _load_tokenizer(where: dict[str, str], config: TargetConfig) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"target {config.name}: no tokenizer could be read from it: {_first_line(error)}\n"
            f"  save the model's tokenizer beside it (tokenizer.json, tokenizer_config.json)"
        ) from error
    if config.chat_template is not None:
        path = Path(config.chat_template)
        if not path.is_file():
            raise ValueError(f"target.chat_template: no file {path}; give the path of a Jinja template")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    return tokenizer


def _unreadable(config: TargetConfig, error: Exception) -> ValueError:
    at = "" if config.revision is None else f" at revision {config.revision!r}"
    return ValueError(
        f"target.name: {config.name!r}{at} could not be read: {_first_line(error)}\n"
        f"  give a Hub id (and be online once), a folder with config.json and *.safetensors, a .gguf file, or "
        f"{PACKAGE}NAME/FILE.gguf"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _device(name: str, ends_only: bool = False) -> torch.device:
    """The device a name means; for a target that is spread, the one its ends would stand on."""
    if name == BALANCED:
        if ends_only:
            raise ValueError(f"target.device {BALANCED} has no effect with target.ends_only; remove one of the two")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                f"target.device {BALANCED} spreads the target over all GPUs of the node, but {os.environ['WORLD_SIZE']} "
                "processes were started; run `draftsmith capture` without a launcher"
            )
    elif name != "auto":
        try:
            return torch.device(name)
        except RuntimeError as error:
            raise ValueError(
                f"target.device: {name!r} is no device; use auto, cpu, cuda:0 or {BALANCED}. Tensor parallel targets run "
                "in a server: data.capture.server"
            ) from error
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def check_spread(name: str, places: dict[str, Any]) -> None:
    """Refuse a device map that leaves a part of the target on the disk, or on the CPU beside GPUs."""
    off = sorted(part for part, place in places.items() if str(place) in ("cpu", "disk"))
    if off and (len(off) < len(places) or "disk" in places.values()):  # all on the CPU: there is no GPU
        raise ValueError(
            f"target.device {BALANCED}: {name} does not fit the GPUs of this node, {', '.join(off[:3])} would "
            f"stay on the CPU or the disk ({len(off)} of {len(places)} parts); capture from a server of more nodes "
            "(data.capture.server)"
        )
