"""A draft and a source small enough to check the loop with: two matrices, a norm, a table; documents made from a seed.

The toy keeps the whole training contract of models/draft.py: counts before forward, a "loss" already divided, metrics
as (sum, count), and a loss without gradient for a micro-batch in which nothing is supervised.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.models.draft import Batch, Draft, DraftConfig, Needs, TargetSpec, Term, TokenStats
from draftsmith.models.eagle3 import Eagle3, Eagle3Config
from draftsmith.train.loop import TrainConfig

D, V = 12, 23  # width and vocabulary: odd, so that swapped axes show


def spec() -> TargetSpec:
    return TargetSpec(
        name="toy-target",
        revision=None,
        config_sha256="c",
        tokenizer_sha256="t",
        architecture="Toy",
        model_type="toy",
        num_layers=6,
        hidden_size=D,
        intermediate_size=20,
        num_heads=2,
        num_kv_heads=1,
        head_dim=6,
        vocab_size=V,
        max_positions=64,
        norm_eps=1e-6,
        activation="silu",
        rope={"rope_theta": 10000.0},
    )


class ToyTarget:
    """A target as far as the loop looks at one."""

    def __init__(self) -> None:
        self.model = nn.ModuleDict({"embed": nn.Embedding(V, D), "head": nn.Linear(D, V, bias=False)})
        for i, parameter in enumerate(self.model.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(i))
        self.model.requires_grad_(False)


class ToyDraft(Draft):
    """logits[t] = head(norm(fc(features[t-1]) + embedding[x[t]])) for x[t+1]; cross entropy over supervised labels."""

    class Config(DraftConfig):
        family: str = "toy"

    table_params: ClassVar[tuple[str, ...]] = ("lm_head",)
    needs = Needs((2,))

    def __init__(self, seed: int = 0):
        super().__init__(self.Config(), spec())
        self.fc = nn.Linear(D, D)
        self.mix = nn.Linear(D, D, bias=False)
        self.norm = nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, V, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in (self.fc.weight, self.fc.bias, self.mix.weight, self.lm_head.weight):
            nn.init.normal_(parameter, std=0.3, generator=generator)
        target = ToyTarget().model
        self.bind(target["embed"].weight, target["head"].weight)
        self.noise = False  # whether forward draws from torch's global sequence
        self.seen: list[str] = []

    def supervised(self, batch: Batch) -> Tensor:
        """[T-1] bool: x[t] and x[t+1] supervised, in one document, with features of t-1."""
        mask = batch.loss_mask[:-1] & batch.loss_mask[1:]
        return mask & (batch.positions[:-1] > 0) & (batch.positions[1:] > 0)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"tokens": self.supervised(batch).sum()}

    def forward(self, batch: Batch, denominators: dict[str, Tensor]) -> dict[str, Term]:
        self.seen.extend(batch.row_ids)
        rows = self.supervised(batch).nonzero().squeeze(1)
        if not len(rows):
            zero = torch.zeros(())
            return {"loss": Term(zero, torch.ones(()))}
        x = batch.features[rows - 1]
        if self.noise:
            x = x + 0.1 * torch.randn(x.shape)
        hidden = self.norm(self.mix(torch.tanh(self.fc(x))) + self.embedding[batch.input_ids[rows]])
        logits = self.lm_head(hidden).float()
        labels = batch.input_ids[rows + 1]
        losses = F.cross_entropy(logits, labels, reduction="none")
        hits = (logits.argmax(-1) == labels).sum()
        return {
            "loss": Term(losses.sum() / denominators["tokens"], torch.ones(())),
            "accuracy": Term(hits, torch.tensor(len(rows))),
        }


class ToySource:
    """Documents of a few tokens, `docs_per_step` a step, dealt to ranks in turn and packed `docs_per_pack` at a time.

    The documents of a step depend on (seed, step) alone. unsupervised: indices within a step whose mask is all 0.
    """

    def __init__(
        self,
        docs_per_step: int = 4,
        docs_per_pack: int = 4,
        seed: int = 0,
        unsupervised: tuple = (),
        num_aux: int = 1,
    ):
        self.docs_per_step, self.docs_per_pack, self.num_aux = docs_per_step, docs_per_pack, num_aux
        self.seed, self.unsupervised = seed, unsupervised
        self.poison: str | None = None  # row id whose features are NaN

    def doc(self, step: int, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1000 * self.seed + 100 * step + index)
        length = int(torch.randint(5, 10, (), generator=generator))
        ids = (torch.arange(length) * 3 + int(torch.randint(V, (), generator=generator))) % V
        features = F.one_hot(ids, V).float() @ torch.randn(V, D, generator=torch.Generator().manual_seed(1))
        mask = torch.arange(length) >= (length if index in self.unsupervised else 2)
        name = f"row-{step}-{index}"
        return {"ids": ids, "mask": mask, "features": features * (torch.nan if name == self.poison else 1), "id": name}

    def step(self, step: int, rank: int, world: int) -> list[Batch]:
        docs = [self.doc(step, index) for index in range(self.docs_per_step)]
        most = -(-len(docs[::world]) // self.docs_per_pack)  # rank 0 has the most; others add empty packs
        mine = docs[rank::world]
        return [self.pack(mine[i * self.docs_per_pack :][: self.docs_per_pack]) for i in range(most)]

    def pack(self, docs: list[dict[str, Any]]) -> Batch:
        bounds = [0]
        for doc in docs:
            bounds.append(bounds[-1] + len(doc["ids"]))
        states = torch.cat([torch.zeros(0, D), *(doc["features"] for doc in docs)])
        return Batch(
            input_ids=torch.cat([torch.zeros(0, dtype=torch.int64), *(doc["ids"] for doc in docs)]),
            loss_mask=torch.cat([torch.zeros(0, dtype=torch.bool), *(doc["mask"] for doc in docs)]),
            positions=torch.cat([torch.arange(0), *(torch.arange(len(doc["ids"])) for doc in docs)]),
            bounds=tuple(bounds),
            features=torch.cat([states.roll(i, 1) for i in range(self.num_aux)], 1),
            last_hidden=states,
            row_ids=tuple(doc["id"] for doc in docs),
        )


def eagle(**values: Any) -> Eagle3:
    """A small EAGLE-3 draft for ToySource(num_aux=2): bound and initialised as a caller of the loop does it."""
    settings = {"aux_layers": (2, 4), "draft_vocab": 17, "ttt_steps": 2, "loss": {"kl": 0.5, "ce": 0.5}}
    draft = Eagle3(Eagle3Config(**{**settings, **values}), spec())
    target = ToyTarget().model
    draft.bind(target["embed"].weight, target["head"].weight)
    stats = TokenStats(torch.arange(V), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    draft.initialise(stats, torch.Generator().manual_seed(0))
    return draft


def config(**values: Any) -> TrainConfig:
    """A run of 8 steps that logs each step and warns about nothing."""
    defaults = {"steps": 8, "lr": 1e-2, "muon_lr": 1e-2, "warmup_steps": 2, "log_every": 1, "tracker": "none"}
    return TrainConfig(**{**defaults, **values})
