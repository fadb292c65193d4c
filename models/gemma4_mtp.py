"""The Gemma 4 drafter (transformers' gemma4_assistant): queries only, on the target's own keys and values.

    row t        last hidden z[t] of the target and token x[t+1]: anchor t+1
    round 1      u = pre_projection([scaled embedding x[t+1]; z[t]])
                 o = norm(layers(u))      every layer's queries see the target's keys <= t, and write none
                 head (draft width) on o                                      -> logits for x[t+2]
    round k >= 2 the same with x[t+k] and post_projection(o) of round k-1     -> logits for x[t+1+k]

A sliding layer reads the keys of the target's last sliding layer that writes its own, within its window; a full layer
those of the last full one. All rounds of an anchor stand at one place and see the same keys. So there is no draft
cache, and nothing to roll back.

Total loss, K = ttt_steps, c = config.loss, z(k) = {t : loss mask is 1 at x[t+1] .. x[t+1+k], one document}:

    L = sum over k <= K of decay^(k-1) / |z(k)| * sum over t in z(k) of [c_ce ce + c_kl kl + ... + c_lk lk](t, k)

|z(k)| is global: the loop sums `counts` over micro-batches and ranks and hands them to forward, which divides. Rows and
attention spans of training come from models/chains.py.
`propose` receives what the last round committed: rows `captured` [B, N] of target states, ragged by its lengths, and
`tokens` [B, N], each the token that follows its row; the last one is the anchor.
Saved are the drafter's own weights. Trained are projections, layers and norms. The
head's table, the layers' scalars and the centroid tables stay as they are; a new drafter trains its table too. With
centroids, training scores all tokens, and decoding those of the best clusters alone.

Which token goes beside z[t], and where the query stands for RoPE, differs between the programs that run drafters.
tests/test_gemma4_mtp.py and tests/vllm/test_vllm_gemma4.py measure it: transformers and vLLM both take x[t+1], the
anchor. transformers' queries stand at the anchor, t+1, vLLM's at the state, t. vLLM is what a tuned drafter will meet.

Shapes: B batch, T tokens, D target width, d draft width, H query heads, G key heads, E head width, K proposals,
V vocabulary, C clusters, M context rows, N rows of a round, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from draftsmith.models import export
from draftsmith.models.chains import Plan, by_documents, supervised_steps
from draftsmith.models.draft import (
    Batch,
    Captured,
    Draft,
    DraftConfig,
    Needs,
    Proposal,
    SlotProbs,
    TargetSpec,
    Term,
    TokenStats,
)
from draftsmith.models.layers import RMSNorm, Rope, masked_attention, matmul_dtype, prefix_attention, rotate
from draftsmith.models.losses import Distilled, Mix, Teacher, distill
from draftsmith.models.mtp_checkpoint import Checkpoint
from draftsmith.models.sampling import Sampler

LOSSES = ("ce", "kl", "tv", "nla", "lk")
SLIDING, FULL = "sliding_attention", "full_attention"
TRAINING_KEYS = ("query_position", "ttt_steps", "position_decay", "loss", "lk_eta")

Attend = Callable[[Tensor], Tensor]
Turns = dict[str, tuple[Tensor, Tensor]]  # cos and sin of each layer type


class Gemma4MtpConfig(DraftConfig):
    """The `draft:` section of a recipe for a Gemma 4 drafter."""

    family: Literal["gemma4_mtp"] = "gemma4_mtp"
    init: Literal["checkpoint", "new"] = "checkpoint"  # a drafter that exists, or one for a target without
    checkpoint: str | None = None  # folder or Hub id of the drafter that training starts from
    assistant: dict[str, Any] | None = None  # its config.json; read from the checkpoint, or made from the sizes below
    hidden_size: int | None = Field(None, ge=2)  # of a new drafter; 1024, as the published ones of 26B and 31B
    intermediate_size: int | None = Field(None, ge=1)  # 8192 there
    num_layers: int | None = Field(None, ge=1)  # 4 there: sliding ones, and a full one at the end
    init_std: float = Field(0.02, gt=0)  # of the random matrices of a new drafter
    query_position: Literal["state", "anchor"] = "state"  # RoPE: t as in vLLM, or t + 1 as in transformers
    ttt_steps: int = Field(3, ge=1)  # rounds unrolled in training; servers run K of 2 to 8
    position_decay: float = Field(0.6, gt=0, le=1)  # weight of round k is this to the power k - 1, as in FastMTP
    loss: dict[str, float] = {"kl": 1.0}  # weights over ce, kl, tv, nla, lk
    lk_eta: float | None = Field(None, gt=0)  # how fast lk goes over from kl to tv; 3 when lk is used

    @field_validator("loss")
    @classmethod
    def _known_losses(cls, loss: dict[str, float]) -> dict[str, float]:
        unknown = sorted(set(loss) - set(LOSSES))
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is not a loss; known losses: {', '.join(LOSSES)}")
        if any(weight < 0 for weight in loss.values()) or not any(loss.values()):
            raise ValueError(f"weights must be >= 0 and one of them > 0, got {loss}")
        return loss

    @model_validator(mode="after")
    def _no_contradictions(self) -> Gemma4MtpConfig:
        sizes = [n for n in ("hidden_size", "intermediate_size", "num_layers") if getattr(self, n) is not None]
        if self.init == "checkpoint" and self.checkpoint is None and self.assistant is None:
            raise ValueError("checkpoint: give the drafter to start from (folder or Hub id), or set init: new")
        if self.init == "checkpoint" and sizes:
            raise ValueError(f"{', '.join(sizes)} has no effect with init: checkpoint: the file says its sizes")
        if self.init == "new" and self.checkpoint is not None:
            raise ValueError(f"checkpoint: {self.checkpoint} has no effect with init: new; leave one of them out")
        if self.lk_eta is not None and not self.loss.get("lk"):
            raise ValueError("lk_eta has no effect without loss.lk: leave it out or give lk a weight")
        return self

    @property
    def mix(self) -> Mix:
        return Mix(**self.loss, **({} if self.lk_eta is None else {"lk_eta": self.lk_eta}))


# -- sizes -----------------------------------------------------------------------------------------------------------
def target_text(target: TargetSpec) -> Any:
    """transformers' text config of a Gemma 4 target."""
    from transformers import AutoConfig

    if not target.model_type.startswith("gemma4"):
        raise ValueError(
            f"draft.family gemma4_mtp reads the keys and values of a Gemma 4 target, {target.name} is a "
            f"{target.model_type}; train an eagle3 or dflash draft for it"
        )
    values = {key: value for key, value in target.text_config.items() if key != "model_type"}
    return AutoConfig.for_model(target.model_type, **values)


def kv_layers(text: Any) -> dict[str, int]:
    """{layer type: the last target layer of that type which writes keys and values of its own}."""
    own = len(text.layer_types) - int(getattr(text, "num_kv_shared_layers", 0) or 0)
    return {kind: i for i, kind in enumerate(text.layer_types[:own])}


def new_assistant(config: Gemma4MtpConfig, target: TargetSpec) -> dict[str, Any]:
    """config.json of a new drafter: head sizes, RoPE and window are the target's, since it reads the target's keys."""
    text = target_text(target)
    num = config.num_layers or 4
    types = [SLIDING] * (num - 1) + [FULL]
    keys = [
        *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_activation", "max_position_embeddings"),
        *("rms_norm_eps", "rope_parameters", "sliding_window", "vocab_size", "attention_k_eq_v"),
        *("pad_token_id", "bos_token_id", "eos_token_id"),
    ]
    layers = kv_layers(text)
    per_layer = {}
    for i, kind in enumerate(types):
        of = text.per_layer_config[layers[kind]]
        per_layer[str(i)] = {"head_dim": of.head_dim, "num_key_value_heads": of.num_key_value_heads}
    about = {key: getattr(text.per_layer_config[layers[SLIDING]], key) for key in keys} | {
        "model_type": "gemma4_text",
        "hidden_size": config.hidden_size or 1024,
        "intermediate_size": config.intermediate_size or 8192,
        "num_hidden_layers": num,
        "num_kv_shared_layers": num,
        "layer_types": types,
        "per_layer_config": per_layer,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    }
    return {
        "model_type": export.ASSISTANTS[0],
        "text_config": about,
        "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
    }


def read_checkpoint(name: str, target: TargetSpec) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config.json without its incidentals, tensors) of a drafter's folder or Hub id."""
    config, tensors = export.read(Checkpoint.open(name).whole(), target)
    if config["family"] != "gemma4_mtp":
        raise ValueError(f"draft.checkpoint: {name} holds a {config['family']} draft, wanted a Gemma 4 drafter")
    return config["assistant"] | {"text_config": config["layer"]}, tensors


# -- network ---------------------------------------------------------------------------------------------------------
class Queries(nn.Module):
    """The half of attention that a drafter has."""

    def __init__(self, size: int, num_heads: int, head_dim: int, eps: float):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(size, num_heads * head_dim, bias=False)
        self.q_norm = RMSNorm(head_dim, eps)
        self.o_proj = nn.Linear(num_heads * head_dim, size, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(attend(rotate(self.q_norm(q), *turn)).flatten(-2))


class GeluMLP(nn.Module):
    """down(gelu(gate(x)) * up(x)), gelu in its tanh form."""

    def __init__(self, size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    """A Gemma 4 decoder layer: norms on both sides of attention and MLP, and a scalar on the whole."""

    layer_scalar: Tensor

    def __init__(self, size: int, intermediate_size: int, num_heads: int, head_dim: int, kind: str, eps: float):
        super().__init__()
        self.kind = kind
        self.self_attn = Queries(size, num_heads, head_dim, eps)
        self.mlp = GeluMLP(size, intermediate_size)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps)
        self.post_feedforward_layernorm = RMSNorm(size, eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x: [..., d]; attend: queries [..., H, E] -> [..., H, E]."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), turn, attend))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar.to(x.dtype)


class _Sight(NamedTuple):
    """What a round's queries see of one layer type. target_layer: whose keys; window: of sliding layers, else None."""

    target_layer: int
    window: int | None


class Gemma4Mtp(Draft):
    Config = Gemma4MtpConfig
    config: Gemma4MtpConfig

    def __init__(self, config: Gemma4MtpConfig, target: TargetSpec):
        if config.assistant is None:
            if config.init == "new":
                about = new_assistant(config, target)
            else:
                assert config.checkpoint is not None  # the config's validator has seen to it
                about, _ = read_checkpoint(config.checkpoint, target)
            config = config.model_copy(update={"assistant": about})
        super().__init__(config, target)
        assert config.assistant is not None
        self.assistant = config.assistant
        self.text = self._checked()
        text, size, eps = self.text, self.text.hidden_size, self.text.rms_norm_eps
        layers = kv_layers(target_text(target))
        self.sights = {
            kind: _Sight(layers[kind], text.sliding_window if kind == SLIDING else None)
            for kind in sorted(set(text.layer_types))
        }
        self.needs = Needs(
            aux_layers=(),
            last_hidden=True,
            target_kv_layers=tuple(sorted(sight.target_layer for sight in self.sights.values())),
        )
        self.pretrained = config.init == "checkpoint"
        self.mix = config.mix
        self.work_per_token = float(config.ttt_steps)
        self.ropes: dict[str, Rope] = {}
        self.layers = nn.ModuleList()
        for i, kind in enumerate(text.layer_types):
            head_dim = text.per_layer_config[i].head_dim
            self.ropes[kind] = Rope(text.rope_parameters[kind], head_dim, text.max_position_embeddings)
            self.layers.append(Layer(size, text.intermediate_size, text.num_attention_heads, head_dim, kind, eps))
        self.norm = RMSNorm(size, eps)
        self.pre_projection = nn.Linear(2 * target.hidden_size, size, bias=False)
        self.post_projection = nn.Linear(size, target.hidden_size, bias=False)
        self.lm_head = nn.Linear(size, text.vocab_size, bias=False)
        self.lm_head.requires_grad_(config.init == "new")
        self.post_projection.requires_grad_(config.ttt_steps > 1)  # it feeds the second round and later ones only
        self.top_clusters = int(self.assistant.get("centroid_intermediate_top_k", 32))
        clusters = int(self.assistant.get("num_centroids", 2048)) if self.assistant.get("use_ordered_embeddings") else 0
        self.centroids: Tensor | None
        self.token_ordering: Tensor | None
        self.register_buffer("centroids", torch.zeros(clusters, size) if clusters else None)  # [C, d]
        self.register_buffer("token_ordering", torch.arange(text.vocab_size) if clusters else None)  # [V], by cluster

    def _checked(self) -> Any:
        """transformers' text config of the drafter, once it is known to fit the target."""
        from transformers import AutoConfig

        about, target = self.assistant, self.target
        text = AutoConfig.for_model(**about).get_text_config()
        theirs = target_text(target)
        sources = kv_layers(theirs)
        where = self.config.checkpoint or "the drafter"
        wanted = {"backbone_hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        found = {"backbone_hidden_size": about["backbone_hidden_size"], "vocab_size": text.vocab_size}
        for i, kind in enumerate(text.layer_types):
            if kind not in sources:
                raise ValueError(f"{where}: layer {i} is a {kind} layer, {target.name} has no such keys and values")
            for key in ("head_dim", "num_key_value_heads"):
                found[f"{key} of layer {i}"] = getattr(text.per_layer_config[i], key)
                wanted[f"{key} of layer {i}"] = getattr(theirs.per_layer_config[sources[kind]], key)
        wrong = [f"{key} {found[key]} (the target's: {wanted[key]})" for key in wanted if found[key] != wanted[key]]
        if wrong:
            raise ValueError(f"{where} is a drafter for another target than {target.name}: {', '.join(wrong)}")
        if text.attention_bias or text.hidden_activation != "gelu_pytorch_tanh" or text.final_logit_softcapping:
            raise ValueError(
                f"{where}: attention_bias {text.attention_bias}, hidden_activation {text.hidden_activation}, "
                f"final_logit_softcapping {text.final_logit_softcapping}; drafters here have none, gelu_pytorch_tanh, none"
            )
        return text

    def initialise(self, stats: TokenStats | None, generator: torch.Generator) -> None:
        """Take the drafter out of its checkpoint, or make a new one whose table is the target's head in d dimensions."""
        if self.config.init == "checkpoint":
            if self.config.checkpoint is None:
                raise ValueError("draft.checkpoint: give the drafter to start from (folder or Hub id)")
            _, tensors = read_checkpoint(self.config.checkpoint, self.target)
            self.load_named(tensors, self.config.checkpoint)
            return
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    noise = torch.randn(parameter.shape, generator=generator, device=generator.device)
                    parameter.copy_(noise * self.config.init_std)
            head = self.target_head.float()
            _, directions = torch.linalg.eigh(head.T @ head)  # ascending
            strongest = directions[:, -self.text.hidden_size :]
            self.lm_head.weight[:, : strongest.shape[1]] = (head @ strongest).to(self.lm_head.weight)

    def load_named(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Fill every weight from tensors under the checkpoint's names; what is missing or unknown is named."""
        problems = self.load_state_dict(from_checkpoint(tensors), strict=False)
        if problems.missing_keys or problems.unexpected_keys:
            raise ValueError(
                f"{where}: the drafter lacks {problems.missing_keys}, not expected {problems.unexpected_keys}"
            )

    # -- shared by training and decoding -------------------------------------------------------------------------
    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        return self.embedding[tokens].to(dtype) * self.target.embedding_scale

    def turns(self, positions: Tensor, dtype: torch.dtype) -> Turns:
        """cos and sin for queries whose last state stands at `positions`."""
        at = positions + (self.config.query_position == "anchor")
        return {kind: rope(at, dtype) for kind, rope in self.ropes.items()}

    def round(
        self, tokens: Tensor, state: Tensor, turns: Turns, attend: Callable[[str, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(what goes into the head [..., d], what goes into the next round [..., D]).

        tokens: [...]; state: [..., D]. attend(layer type, queries) -> the same shape.
        """
        x = self.pre_projection(torch.cat([self.embed(tokens, state.dtype), state], -1))
        for layer in cast("list[Layer]", list(self.layers)):
            kind = layer.kind
            x = layer(x, turns[kind], lambda q, kind=kind: attend(kind, q))
        x = self.norm(x)
        return x, self.post_projection(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., d] -> [..., V]; with centroids -inf outside the best clusters."""
        if self.centroids is None or self.token_ordering is None:
            return self.lm_head(hidden)
        best = F.linear(hidden, self.centroids).topk(self.top_clusters, -1).indices  # [..., top]
        members = self.token_ordering.view(len(self.centroids), -1)[best].flatten(-2)  # [..., n]
        scores = torch.einsum("...d,...nd->...n", hidden, self.lm_head.weight[members])
        full = hidden.new_full((*hidden.shape[:-1], self.target.vocab_size), -torch.inf)
        return full.scatter(-1, members, scores)

    def target_logits(self, last_hidden: Tensor) -> Tensor:
        """The target's logits [..., V]."""
        logits = F.linear(last_hidden.to(self.target_head.dtype), self.target_head)
        cap = self.target.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    # -- training ----------------------------------------------------------------------------------------------
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """{"step0": |z(1)|, "step1": |z(2)|, ...}"""
        num_steps, device = self._num_steps(batch), batch.input_ids.device
        return {
            f"step{s}": torch.tensor(float((num_steps > s).sum()), device=device) for s in range(self.config.ttt_steps)
        }

    def forward(self, batch: Batch, denominators: dict[str, Tensor]) -> dict[str, Term]:
        """The loss, and metrics per 0-based round s: loss_<s>, match_<s> (the best token is the one that follows),
        overlap_<s> (sum of min(p, q), the chance that a sampled proposal is accepted)."""
        num_steps = self._num_steps(batch)
        rows = np.flatnonzero(num_steps)
        if not len(rows):
            return self._nothing_supervised(batch.input_ids.device)
        plan = Plan.of(rows, num_steps[rows], batch.bounds, batch.input_ids.device)
        hidden = self._unroll(batch, plan)
        weights = [
            (self.config.position_decay**s / denominators[f"step{s}"].clamp_min(1).float()).expand(len(h))
            for s, h in enumerate(hidden)
        ]
        dtype = matmul_dtype(hidden[0])
        teacher = None
        if self.mix.needs_teacher:
            assert batch.last_hidden is not None  # _unroll has read it
            head = self.target_head.to(dtype)
            teacher = Teacher(batch.last_hidden[plan.teachers], head, None, self.target.logit_softcap)
        found = distill(
            torch.cat(hidden),
            torch.cat([step.teachers for step in plan.steps]),
            torch.cat([self._labels(batch, plan, s) for s in range(len(plan.steps))]),
            self.lm_head.weight if self.lm_head.weight.requires_grad else self.lm_head.weight.to(dtype),
            teacher,
            self.mix,
            weights=torch.cat(weights),
        )
        if len(plan.steps) == 1:  # nothing reads the next state: it still reaches its projection, for other ranks' sake
            assert found.total is not None
            found = found._replace(total=found.total + self.post_projection.weight[0, 0] * 0.0)
        return self._terms(found, [len(h) for h in hidden])

    def _num_steps(self, batch: Batch) -> np.ndarray:
        return supervised_steps(batch.loss_mask.cpu().numpy(), batch.bounds, self.config.ttt_steps)

    def _labels(self, batch: Batch, plan: Plan, s: int) -> Tensor:
        """[N] tokens that 0-based round s predicts."""
        return batch.input_ids[plan.context[plan.rows[plan.steps[s].rows]] + 2 + s]

    def _unroll(self, batch: Batch, plan: Plan) -> list[Tensor]:
        """What goes into the head, [N, d] for each round of the plan."""
        missing = [layer for layer in self.needs.target_kv_layers if layer not in batch.target_kv]
        if batch.last_hidden is None or missing:
            raise ValueError(
                f"a Gemma 4 drafter reads last hidden and keys and values of target layers "
                f"{list(self.needs.target_kv_layers)}; the batch has layers {list(batch.target_kv)}"
            )
        dtype = matmul_dtype(self.pre_projection.weight)
        keys = {
            kind: tuple(x.transpose(0, 1)[plan.context].to(dtype) for x in batch.target_kv[sight.target_layer])
            for kind, sight in self.sights.items()
        }  # [M, G, E] each
        positions, hidden = batch.positions[plan.context], list[Tensor]()
        fed = batch.last_hidden[plan.context[plan.rows]].to(dtype)
        for s, step in enumerate(plan.steps):
            at = plan.rows[step.rows]  # [N] context rows
            tokens = batch.input_ids[plan.context[at] + 1 + s]

            def attend(kind: str, q: Tensor, spans: list = step.spans) -> Tensor:
                k, v = keys[kind]
                return prefix_attention(q, k, v, spans, self.sights[kind].window)

            out, fed = self.round(tokens, fed[step.kept], self.turns(positions[at], dtype), attend)
            hidden.append(out)
        return hidden

    def _terms(self, found: Distilled, sizes: Sequence[int]) -> dict[str, Term]:
        """Terms of the rounds; one without rows counts zero, so that every batch has the same names."""
        one = found.loss.new_ones(())
        assert found.total is not None
        terms = {"loss": Term(found.total, one)}
        metrics = {"loss_": found.loss, "match_": found.match}
        if found.alpha is not None:
            metrics["overlap_"] = found.alpha
        for name, rows in metrics.items():
            sums = [part.detach().sum() for part in rows.split(list(sizes))]
            for s in range(self.config.ttt_steps):
                empty = s >= len(sizes)
                terms[f"{name}{s}"] = Term(one * 0 if empty else sums[s], one * (0 if empty else sizes[s]))
        return terms

    def _nothing_supervised(self, device: torch.device) -> dict[str, Term]:
        """A loss of zero that still reaches every trainable tensor, so that no rank waits for a gradient."""
        loss = sum((p.flatten()[0] * 0.0 for p in self.parameters() if p.requires_grad), torch.zeros((), device=device))
        empty = torch.zeros(0, device=device)
        return self._terms(Distilled(loss, empty, empty, empty, empty if self.mix.needs_teacher else None), [])

    # -- decoding ----------------------------------------------------------------------------------------------
    def start(self, batch_size: int, max_len: int) -> None:
        """A drafter remembers nothing: all it knows stands in the target's cache."""

    @torch.no_grad()
    def propose(self, state: None, tokens: Tensor, captured: Captured, num: int, sampler: Sampler) -> Proposal:
        assert captured.last_hidden is not None, "a drafter reads last hidden states; the runtime asks for draft.needs"
        assert captured.cache is not None, "a drafter reads the target's cache; the runtime hands it over"
        dtype, lengths = self.pre_projection.weight.dtype, captured.cache.lengths
        last = torch.arange(len(tokens), device=tokens.device), (captured.lengths - 1).clamp_min(0)
        token, fed = tokens[last], captured.last_hidden[last].to(dtype)  # [B], [B, D]
        turns = self.turns((lengths - 1)[:, None], dtype)
        sights = {kind: self._look(captured.cache, sight) for kind, sight in self.sights.items()}

        def attend(kind: str, q: Tensor) -> Tensor:
            return masked_attention(q, *sights[kind])

        ids, probs = [], []
        fed = fed[:, None]
        for _ in range(num):
            out, fed = self.round(token[:, None], fed, turns, attend)
            logits = self.logits(out[:, 0])  # [B, V]
            if sampler.greedy or not sampler.draft_sampling:
                token = logits.argmax(-1)
            else:
                probs.append(sampler.probs(logits))
                token = sampler.draw(probs[-1])
            ids.append(token)
        offered = torch.full_like(captured.lengths, num)
        return Proposal(torch.stack(ids, 1), torch.stack(probs, 1) if probs else None, offered)

    @staticmethod
    def _look(cache: Any, sight: _Sight) -> tuple[Tensor, Tensor, Tensor]:
        """(keys [B, S, G, E], values, visible [B, 1, S]) of one query a row; columns that no row's window has are cut."""
        keys, values = (x.transpose(1, 2) for x in cache.keys_values(sight.target_layer))
        first = 0 if sight.window is None else max(min(cache.host_lengths) - sight.window, 0)
        at = torch.arange(first, keys.shape[1], device=keys.device)
        ends = cache.lengths[:, None]
        visible = at < ends if sight.window is None else (at < ends) & (at >= ends - sight.window)
        return keys[:, first:], values[:, first:], visible[:, None]

    @torch.no_grad()
    def slot_probs(self, batch: Batch, anchors: Tensor, num: int, sampler: Sampler) -> Iterator[SlotProbs]:
        """`num` rounds, which may be more than were trained, through the training pass. See SlotProbs.

        Anchors come back in ascending order. The first token of a document has no state before it: it is refused.
        """
        wanted = np.unique(anchors.cpu().numpy())
        starts, ends = np.asarray(batch.bounds[:-1]), np.asarray(batch.bounds[1:])
        doc = np.searchsorted(starts, wanted, side="right") - 1
        first = wanted[(wanted <= starts[doc]) | (wanted >= ends[-1])]
        if len(first):
            raise ValueError(
                f"anchors {first[:8].tolist()} have no states before them or lie outside the batch; documents have "
                f"the bounds {batch.bounds}, so anchors go from start + 1 to end - 1"
            )
        num_steps = np.minimum(num, ends[doc] - 1 - wanted)
        for part in by_documents(doc, 512):
            yield self._slot_probs(batch, wanted[part], num_steps[part], num, sampler)

    def _slot_probs(
        self, batch: Batch, anchors: np.ndarray, num_steps: np.ndarray, num: int, sampler: Sampler
    ) -> SlotProbs:
        device = batch.input_ids.device
        draft, target, overlap = (torch.zeros(len(anchors), num, device=device) for _ in range(3))
        argmax = torch.full((len(anchors), num), -1, dtype=torch.int64, device=device)
        found = SlotProbs(torch.from_numpy(anchors).to(device), draft, target, argmax, overlap)
        live = np.flatnonzero(num_steps)
        if not len(live):
            return found
        plan = Plan.of(anchors[live] - 1, num_steps[live], batch.bounds, device)
        hidden = self._unroll(batch, plan)
        assert batch.last_hidden is not None
        size = max(2**24 // self.target.vocab_size, 16)
        for s, step in enumerate(plan.steps):
            follows = self._labels(batch, plan, s)[:, None]
            teachers = batch.last_hidden[plan.teachers[step.teachers].to(device)]
            for begin in range(0, len(follows), size):
                part = slice(begin, begin + size)
                p = sampler.probs(self.target_logits(teachers[part]))
                logits = self.logits(hidden[s][part])
                q = sampler.probs(logits)
                into = torch.from_numpy(live).to(device)[step.rows[part]], s
                draft[into] = q.gather(1, follows[part])[:, 0]
                target[into] = p.gather(1, follows[part])[:, 0]
                argmax[into] = logits.argmax(-1)
                overlap[into] = torch.minimum(q, p).sum(-1)
        return found

    # -- export ------------------------------------------------------------------------------------------------
    def neutral(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config: family; assistant, a drafter's config.json without its text_config; layer, that text_config; ttt_steps;
        training. Tensors under the checkpoint's own names."""
        rest = {key: value for key, value in self.assistant.items() if key != "text_config"}
        about = {
            "family": "gemma4_mtp",
            "assistant": rest,
            "layer": self.assistant["text_config"],
            "ttt_steps": self.config.ttt_steps,
            "training": self.config.model_dump(mode="json", include=set(TRAINING_KEYS)),
        }
        return about, to_checkpoint(self.state_dict())

    @classmethod
    def from_neutral(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetSpec) -> Gemma4Mtp:
        assistant = config["assistant"] | {"text_config": config["layer"]}
        draft = cls(Gemma4MtpConfig(assistant=assistant, **config.get("training", {})), target)
        draft.load_named(tensors, "the drafter's file")
        return draft


# -- names of the checkpoint -----------------------------------------------------------------------------------------
NAMES = {
    "lm_head.weight": "model.embed_tokens.weight",
    "centroids": "masked_embedding.centroids.weight",
    "token_ordering": "masked_embedding.token_ordering",
}
BESIDE = ("pre_projection.", "post_projection.")  # all else stands under "model."


def to_checkpoint(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under the names that transformers and vLLM read; the head is tied to the table."""
    return {NAMES.get(n, n if n.startswith(BESIDE) else f"model.{n}"): t.detach() for n, t in tensors.items()}


def from_checkpoint(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of to_checkpoint."""
    ours = {theirs: name for name, theirs in NAMES.items()}
    return {ours.get(name, name.removeprefix("model.")): tensor for name, tensor in tensors.items()}
