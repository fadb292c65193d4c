"""DSpark: DFlash, whose slots also learn which token stands in front of them, and how likely they are to be accepted.

    backbone     one DFlash pass over the block                      -> states h_s and base logits U_s, all slots at once
    markov       logits_s = U_s + markov_w2 markov_w1[u_s]           u_s: the token in front, x[a+s] in training, the
                                                                     draft's own choice for slot s-1 in decoding
    confidence   conf_s = sigmoid(proj [h_s ; markov_w1[u_s]])       the chance that slot s is accepted, given that the
                                                                     slots before it were

The bias costs one product of rank r a slot, so a block is drafted in one pass and yet agrees with itself from token to
token. A zero markov_w2 is DFlash. Total loss, with DFlash's terms, weights w and W, and alpha = sum min(p, q):

    L = L of DFlash under the biased logits + c_conf * sum over z of w(n, s) BCE(conf(n, s), alpha(n, s)) / W

By default L of DFlash is 0.1 ce + 1.8 tv, which is 0.1 ce + 0.9 |p - q|_1. alpha is a constant here, and so are h and
markov_w1 in front of the confidence head unless confidence_detached is off: then the drafter changes with c_conf.
Only the vanilla Markov head exists: it is the one that servers run. The paper finds its gated and recurrent forms hardly better.

Sources: arXiv 2607.05147, deepseek-ai/DeepSpec. The bigram start is this project's: see `bigram_tables`.
Shapes: as in models/dflash.py; r rank of the Markov head.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from draftsmith.models import vocab
from draftsmith.models.dflash import DFlash, DFlashConfig
from draftsmith.models.draft import Batch, Proposal, TargetSpec, Term, TokenStats
from draftsmith.models.sampling import Sampler

BIGRAM_SHARE = 0.5  # of the bigrams' log-ratios that the Markov head starts with; better than all of them at rank 64
BIGRAM_PRIOR = 1.0  # observations that the unigram distribution is worth; best of 0.3 to 100 on held-out answers
EXTRA_DIRECTIONS = 16  # beyond the rank in the randomised SVD, which makes its leading directions exact


class DSparkConfig(DFlashConfig):
    """The `draft:` section of a DSpark recipe: DFlash's, with other defaults, and the two heads."""

    family: Literal["dspark"] = "dspark"  # type: ignore[assignment]
    block_len: int = Field(7, ge=2)  # positions of one pass, anchor included; the published drafts use 7
    loss: dict[str, float] = {"ce": 0.1, "tv": 1.8}  # published: 0.1 ce + 0.9 |p - q|_1, and |p - q|_1 = 2 tv
    markov_rank: int = Field(256, ge=1)  # r; 256 is published, 64 is enough for small vocabularies
    markov_start: Literal["zero", "bigrams"] = (
        "zero"  # zero: step 0 is DFlash; bigrams: log-ratios of the training rows
    )
    confidence: bool = True  # whether there is a confidence head
    confidence_weight: float = Field(1.0, ge=0)  # c_conf; 1 is published
    confidence_detached: bool = True  # the confidence loss moves its own head only; off as published

    @model_validator(mode="after")
    def _confidence_has_a_target(self) -> DSparkConfig:
        if not self.confidence:
            return self
        if not self.mix.needs_teacher:
            raise ValueError(
                f"confidence learns the acceptance probability, which loss {self.loss} does not compute: "
                "give kl, tv, nla or lk a weight, or set confidence: false"
            )
        if self.draft_vocab is not None and not self.mix.needs_acceptance:
            raise ValueError(
                f"confidence learns the acceptance probability, which loss {self.loss} computes over the draft "
                "vocabulary only: give tv, nla or lk a weight, or set confidence: false"
            )
        return self


# -- network ---------------------------------------------------------------------------------------------------------
class MarkovHead(nn.Module):
    """Low-rank bias on the logits from the token in front: markov_w1 [V, r] by target id, markov_w2 [Vd, r]."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """[...] target ids -> [..., r]"""
        return self.markov_w1(tokens)


class ConfidenceHead(nn.Module):
    """Logit of the acceptance probability, in fp32 whatever the states are."""

    def __init__(self, size: int):
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """hidden: [..., D], embedded: [..., r] -> [...]"""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.proj(torch.cat([hidden.float(), embedded.float()], -1))[..., 0]


class DSpark(DFlash):
    Config: ClassVar[type[DFlashConfig]] = DSparkConfig
    config: DSparkConfig
    table_params: ClassVar[tuple[str, ...]] = ("lm_head", "markov_head", "confidence_head")
    training_keys: ClassVar[tuple[str, ...]] = (
        *DFlash.training_keys,
        "markov_start",
        "confidence_weight",
        "confidence_detached",
    )

    def __init__(self, config: DSparkConfig, target: TargetSpec):
        super().__init__(config, target)
        self.markov_head = MarkovHead(target.vocab_size, config.draft_vocab or target.vocab_size, config.markov_rank)
        if config.confidence:
            self.confidence_head = ConfidenceHead(target.hidden_size + config.markov_rank)

    def initialise(self, stats: TokenStats | None, generator: torch.Generator) -> None:
        super().initialise(stats, generator)
        config, markov = self.config, self.markov_head
        with torch.no_grad():
            if config.confidence:
                self.confidence_head.proj.weight.zero_()
                self.confidence_head.proj.bias.zero_()
            if config.markov_start == "zero":
                shape = (
                    markov.markov_w1.weight.shape
                )  # rows of length about 1: markov_w2 moves the logits at its own rate
                noise = torch.randn(shape, generator=generator, device=generator.device)
                markov.markov_w1.weight.copy_(noise * config.markov_rank**-0.5)
                markov.markov_w2.weight.zero_()
            elif stats is None:
                raise ValueError("draft.markov_start bigrams: needs the token counts of the training rows, got none")
            else:
                first, second = bigram_tables(stats, self.draft_vocab, config.markov_rank, generator)
                markov.markov_w1.weight.copy_(first)
                markov.markov_w2.weight.copy_(second)

    def slot_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits [..., Vd] of slots with states `hidden` [..., D] behind the tokens `previous` [...]."""
        return self.logits(hidden) + self.markov_head.markov_w2(self.markov_head.embed(previous))

    # -- training ----------------------------------------------------------------------------------------------
    def forward(self, batch: Batch, denominators: dict[str, Tensor]) -> dict[str, Term]:
        """DFlash's terms, and with a confidence head also confidence_loss_<s>: its cross entropy per proposal."""
        plan = self._plan(batch)
        if plan is None:
            return self._nothing_supervised(batch.input_ids.device)
        hidden = self._hidden(batch, plan)
        embedded = self.markov_head.embed(batch.input_ids[plan.before])  # [P, r]
        found, weights = self._distill(batch, plan, hidden, denominators, embedded, self.markov_head.markov_w2.weight)
        if not self.config.confidence:
            return self._terms(found, plan)
        if self.config.confidence_detached:
            hidden, embedded = hidden.detach(), embedded.detach()
        assert found.alpha is not None
        assert found.total is not None
        loss = F.binary_cross_entropy_with_logits(
            self.confidence_head(hidden, embedded), found.alpha.float().clamp(0, 1), reduction="none"
        )
        total = found.total + self.config.confidence_weight * (weights * loss).sum()
        return self._terms(found._replace(total=total), plan, {"confidence_loss_": loss})

    # -- decoding ----------------------------------------------------------------------------------------------
    def _offer(self, hidden: Tensor, anchors: Tensor, sampler: Sampler) -> Proposal:
        """Token after token, each under the bias of the one before. hidden: [B, K, D]; anchors: [B]."""
        base, previous = self.logits(hidden), anchors  # [B, K, Vd]
        ids, probs, confidence = [], [], []
        for s in range(hidden.shape[1]):
            embedded = self.markov_head.embed(previous)
            logits = base[:, s] + self.markov_head.markov_w2(embedded)
            if self.config.confidence:
                confidence.append(torch.sigmoid(self.confidence_head(hidden[:, s], embedded)))
            if sampler.greedy or not sampler.draft_sampling:
                column = logits.argmax(-1)
            else:
                probs.append(sampler.probs(logits))
                column = sampler.draw(probs[-1])
            previous = column if self.draft_vocab is None else self.draft_vocab[column]
            ids.append(previous)
        return Proposal(
            torch.stack(ids, 1),
            torch.stack(probs, 1) if probs else None,
            torch.full_like(anchors, len(ids)),
            self.draft_vocab,
            torch.stack(confidence, 1) if confidence else None,
        )

    # -- export ------------------------------------------------------------------------------------------------
    def neutral(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """DFlash's form and the two heads. See models/export.py."""
        about, tensors = super().neutral()
        return about | {"markov_rank": self.config.markov_rank, "confidence": self.config.confidence}, tensors

    @classmethod
    def _settings(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetSpec) -> dict[str, Any]:
        heads = {"markov_rank": config["markov_rank"], "confidence": config["confidence"]}
        return super()._settings(config, tensors, target) | heads


def bigram_tables(
    stats: TokenStats, draft_vocab: Tensor | None, rank: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(markov_w1 [V, r], markov_w2 [Vd, r]) whose product is about BIGRAM_SHARE of the bigrams' log-ratios.

    With counts c(u, v), c(u) and the unigram distribution p, the bias that turns p into the smoothed conditional
    (c(u, v) + prior p(v)) / (c(u) + prior) is, up to a constant per u that no softmax sees,

        R[u, v] = log(1 + c(u, v) / (prior p(v)))

    which is 0 for pairs that were never seen. The tables are its leading singular vectors, each with the square root of
    its singular value: randomised subspace iteration on the sparse R (Halko et al. 2011). Fewer than r directions leave
    zeros behind.
    """
    counts = stats.counts if draft_vocab is None else stats.counts[draft_vocab]
    columns = vocab.columns(stats.bigrams[:, 1].contiguous(), draft_vocab)
    kept = columns >= 0
    first, columns, seen = stats.bigrams[kept, 0], columns[kept], stats.bigram_counts[kept].float()
    ratios = torch.log1p(seen * counts.sum() / (BIGRAM_PRIOR * counts[columns]))
    size = (len(stats.counts), len(counts))
    matrix = torch.sparse_coo_tensor(torch.stack([first, columns]), ratios, size, check_invariants=True)

    width = min(rank + EXTRA_DIRECTIONS, *size)
    basis = torch.randn(len(counts), width, generator=generator, device=generator.device)
    for _ in range(4):
        basis = torch.linalg.qr(matrix.t() @ (matrix @ basis)).Q
    left, values, right = torch.linalg.svd(matrix @ basis, full_matrices=False)
    scale = (BIGRAM_SHARE * values[:rank]).sqrt()
    missing = rank - len(scale)
    return F.pad(left[:, :rank] * scale, (0, missing)), F.pad(basis @ right[:rank].T * scale, (0, missing))
