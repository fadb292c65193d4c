"""Temperature, top-k and top-p in one place: how logits become the distribution that tokens are drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Sampler:
    """temperature 0 = greedy. top_k 0 and top_p 1 = off. Order as in vLLM and transformers: temperature, top-k, top-p.

    generator: the only source of randomness. draft_sampling: whether drafts draw their proposals from their own
    distribution (True) or offer their argmax, which is verified as a point mass (False, vLLM's default).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    generator: torch.Generator | None = None
    draft_sampling: bool = True

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 = off), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1] (1 = off), got {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def probs(self, logits: Tensor) -> Tensor:
        """Warped distribution in fp32, [..., V]; greedy gives a point mass on the first largest logit."""
        logits = logits.float()
        if self.greedy:
            best = logits.argmax(-1, keepdim=True)
            return torch.zeros_like(logits).scatter_(-1, best, 1.0)
        logits = logits / self.temperature
        if self.top_k and self.top_k < logits.shape[-1]:
            smallest_kept = logits.topk(self.top_k, -1).values[..., -1:]
            logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
        probs = logits.softmax(-1)
        if self.top_p < 1.0:
            ordered, order = probs.sort(-1, descending=True)
            before = ordered.cumsum(-1) - ordered  # mass in front of each token: the first one is always kept
            ordered = ordered.masked_fill(before >= self.top_p, 0.0)
            probs = torch.zeros_like(probs).scatter_(-1, order, ordered)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs

    def draw(self, probs: Tensor) -> Tensor:
        """One id per row of probs [..., V] -> [...]; greedy takes the largest."""
        if self.greedy:
            return probs.argmax(-1)
        flat = torch.multinomial(probs.flatten(0, -2), 1, generator=self.generator)
        return flat.view(probs.shape[:-1])
