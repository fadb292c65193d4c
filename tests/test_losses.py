"""Protects models/losses.py: values and gradients of every loss against full logits and autograd in fp64.

Run: pytest tests/test_losses.py
"""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.models.losses import Mix, Teacher, distill
from draftsmith.models.vocab import columns

V, D, R, U, N = 53, 12, 5, 41, 97
MIXES = {
    "kl": Mix(kl=1),
    "ce": Mix(ce=1),
    "tv": Mix(tv=1),
    "nla": Mix(nla=1),
    "lk": Mix(lk=1, lk_eta=2.0),
    "half kl": Mix(kl=0.5),
    "ce and kl": Mix(ce=0.3, kl=0.7),
    "ce and tv": Mix(ce=0.1, tv=1.8),
    "all": Mix(ce=0.2, kl=0.3, tv=0.4, nla=0.1, lk=0.5),
}


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def slow_rows(mix: Mix, logits: Tensor, target_logits: Tensor, vocab: Tensor, labels: Tensor, ce_scale: Tensor):
    """(loss, alpha) per row from full logits: the definitions, and autograd for the gradient."""
    log_q = logits.log_softmax(-1)
    true = target_logits.softmax(-1)[:, vocab]
    kept = target_logits[:, vocab].log_softmax(-1)
    ce = torch.where(labels >= 0, -log_q.gather(1, labels.clamp_min(0)[:, None])[:, 0], 0.0) * ce_scale
    kl = (kept.exp() * (kept - log_q)).sum(-1)
    alpha = torch.minimum(log_q.exp(), true).sum(-1)
    w = torch.exp(-mix.lk_eta * alpha.detach())
    loss = mix.ce * ce + mix.kl * kl + mix.tv * (1 - alpha) - mix.nla * alpha.log()
    loss = loss + mix.lk * (w * kl + (1 - w) * (1 - alpha))
    return loss, alpha if mix.needs_acceptance else torch.minimum(log_q.exp(), kept.exp()).sum(-1)


def problem(vocab_size: int = V):
    """Hidden states, heads, rows with shared teachers in no order, labels of which some are not kept."""
    generator = torch.Generator().manual_seed(1)
    vocab = torch.randperm(V, generator=generator)[:vocab_size].sort().values
    index = torch.cat([torch.arange(3, 30), torch.arange(5, 20), torch.randint(0, U, (N - 42,), generator=generator)])
    labels = columns(torch.randint(0, V, (N,), generator=generator), vocab)
    target_head = random(V, D, scale=0.7)
    return random(N, D), random(vocab_size, D, seed=3), random(U, D), target_head, vocab, index, labels


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("vocab_size", [V, 19])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_a_trained_head_gets_the_gradient_of_the_obvious_loss(name, vocab_size, softcap):
    mix = MIXES[name]
    hidden, head, teacher, target_head, vocab, index, labels = problem(vocab_size)
    features, bias = random(N, R), random(vocab_size, R, scale=0.5)
    weights, ce_scale = torch.rand(N, dtype=torch.float64), torch.rand(N, dtype=torch.float64) + 0.5
    leaves = [t.requires_grad_() for t in (hidden, head, features, bias)]

    logits = capped(hidden @ head.T, softcap) + features @ bias.T
    target_logits = capped(teacher @ target_head.T, softcap)[index]
    slow, alpha = slow_rows(mix, logits, target_logits, vocab, labels, ce_scale)
    expected = torch.autograd.grad((weights * slow).sum(), leaves)

    full = target_head if vocab_size < V and mix.needs_acceptance else None
    found = distill(
        hidden,
        index,
        labels,
        head,
        Teacher(teacher, target_head[vocab], full, softcap),
        mix,
        weights=weights,
        ce_scale=ce_scale,
        bias_features=features,
        bias_weight=bias,
        softcap=softcap,
        elements=1,  # many chunks
    )
    assert found.total is not None
    gradients = torch.autograd.grad(found.total * 3, leaves)
    torch.testing.assert_close(found.loss, slow.detach(), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.total, (weights * slow).sum(), rtol=1e-9, atol=1e-10)
    for ours, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, 3 * wanted, rtol=1e-8, atol=1e-9)
    if found.alpha is not None:
        torch.testing.assert_close(found.alpha, alpha.detach(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["kl", "all"])
def test_a_frozen_head_gives_rows_that_any_later_weighting_can_use(name):
    hidden, head, teacher, target_head, vocab, index, labels = problem()
    hidden.requires_grad_()

    def weighted(loss: Tensor, ce: Tensor) -> Tensor:  # weights that depend on the rows, as D-PACE's do
        return (loss * torch.exp(-ce) * torch.arange(1, N + 1)).sum()

    logits, target_logits = hidden @ head.T, (teacher @ target_head.T)[index]
    slow, _ = slow_rows(MIXES[name], logits, target_logits, vocab, labels, torch.ones(N, dtype=torch.float64))
    ce = -logits.log_softmax(-1).gather(1, labels[:, None])[:, 0].detach()
    (expected,) = torch.autograd.grad(weighted(slow, ce), hidden)
    found = distill(hidden, index, labels, head, Teacher(teacher, target_head), MIXES[name])
    assert found.total is None
    torch.testing.assert_close(found.ce, ce)
    (gradient,) = torch.autograd.grad(weighted(found.loss, found.ce), hidden)
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-9)


def test_the_chunk_size_changes_nothing():
    hidden, head, teacher, target_head, vocab, index, labels = problem(19)
    made = []
    for elements in (1, 19 * 64 * 3, 2**20):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        found = distill(
            h, index, labels, w, Teacher(teacher, target_head[vocab], target_head), MIXES["all"],
            weights=torch.ones(N, dtype=torch.float64), elements=elements,
        )  # fmt: skip
        assert found.total is not None
        found.total.backward()
        made.append((found.loss, found.alpha, found.match, h.grad, w.grad))
    for other in made[1:]:
        for a, b in zip(made[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_teacher_outside_the_draft_vocabulary_is_a_miss_and_no_row_of_ce():
    """Vocabulary 8, kept {0, 1, 2}; position A has its best token kept, position B has not."""
    p = torch.tensor([[0.5, 0.3, 0.1, 0.1, 0, 0, 0, 0], [0.05, 0.05, 0.05, 0.8, 0.05, 0, 0, 0]]).clamp_min(1e-30)
    vocab, eye = torch.arange(3), torch.eye(8)
    labels = columns(p.argmax(-1), vocab)
    assert labels.tolist() == [0, -1]
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]], requires_grad=True)
    for name in ("ce", "tv"):
        found = distill(
            logits,
            torch.arange(2),
            labels,
            torch.eye(3),
            Teacher(p.log(), eye[:3], eye if name == "tv" else None),
            MIXES[name],
        )
        assert found.match.tolist() == [1, 0]
        assert found.ce[1] == torch.inf
        (gradient,) = torch.autograd.grad(found.loss.sum(), logits)
        if name == "ce":
            assert found.loss[1] == 0
            assert gradient[1].abs().max() == 0
            assert gradient[0].abs().min() > 0
        else:  # acceptance: the mass of token 3 can never be accepted, and the row is trained on what is left
            q = logits.detach().softmax(-1)
            torch.testing.assert_close(found.alpha, torch.minimum(q, p[:, :3]).sum(-1))
            assert found.alpha is not None
            assert found.alpha[1] <= 0.15 + 1e-6


@pytest.mark.parametrize("name", ["kl", "ce", "tv", "nla", "lk"])
@pytest.mark.parametrize("noise", [0.3, 0.1, 0.03])
def test_bf16_logits_keep_the_gradient_within_one_percent(name, noise):
    """H-TN-2. The head is the identity: the same bf16 logits go into both; p - q cancels as the noise gets small."""
    size, rows = 1024, 16
    generator = torch.Generator().manual_seed(0)
    target = (torch.randn(rows, size, generator=generator) * 2).bfloat16()
    logits = (target.float() + torch.randn(rows, size, generator=generator) * noise).bfloat16()
    labels, eye = target.argmax(-1), torch.eye(size)
    exact = logits.double().requires_grad_()
    slow, _ = slow_rows(
        MIXES[name], exact, target.double(), torch.arange(size), labels, torch.ones(rows, dtype=torch.float64)
    )
    (expected,) = torch.autograd.grad(slow.sum(), exact)
    hidden = logits.clone().requires_grad_()
    found = distill(hidden, torch.arange(rows), labels, eye, Teacher(target, eye), MIXES[name])
    (gradient,) = torch.autograd.grad(found.loss.sum(), hidden)
    assert ((gradient.double() - expected).norm() / expected.norm()).item() < 0.01


def test_under_autocast_a_trained_fp32_head_gets_an_fp32_gradient():
    hidden, head, teacher, target_head, vocab, index, labels = (
        t.float() if t.is_floating_point() else t for t in problem()
    )
    exact, fast = [], []
    for enabled, into in ((False, exact), (True, fast)):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = distill(h, index, labels, w, Teacher(teacher, target_head), MIXES["kl"], weights=torch.ones(N))
        assert found.total is not None
        assert found.total.dtype == torch.float32
        found.total.backward()
        assert h.grad is not None
        assert w.grad is not None
        assert h.grad.dtype == w.grad.dtype == torch.float32
        into += [h.grad, w.grad]
    for a, b in zip(exact, fast, strict=True):
        assert ((a - b).norm() / a.norm()).item() < 0.02


def test_missing_inputs_are_refused_by_name():
    hidden, head, teacher, target_head, _, index, labels = problem()
    with pytest.raises(ValueError, match="head is trained, so `weights` must be given"):
        distill(hidden, index, labels, head.requires_grad_(), Teacher(teacher, target_head), Mix(kl=1))
    with pytest.raises(ValueError, match="`teacher` must be given"):
        distill(hidden, index, labels, head.detach(), None, replace(Mix(), tv=1.0))


MEMORY = """
import sys, torch
from pathlib import Path
from draftsmith.models.losses import Mix, Teacher, distill


def peak_kib():  # of this program: the kernel's maxrss would count the parent's memory from before exec
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


torch.manual_seed(0)
V, Vd, D, N = 32000, 1000, 16, 1024
full = torch.randn(V, D); hidden = torch.randn(N, D, requires_grad=True); states = torch.randn(N, D)
kept = torch.arange(0, V, V // Vd)[:Vd]; labels = torch.zeros(N, dtype=torch.int64)
head = full[kept].clone()
before = peak_kib()
if sys.argv[1] == "chunks":
    found = distill(hidden, torch.arange(N), labels, head, Teacher(states, full[kept], full), Mix(kl=0.5, tv=0.5))
    loss = found.loss.sum()
else:
    true = (states @ full.T).softmax(-1)[:, kept]
    renormed = true / true.sum(-1, keepdim=True)
    q = (hidden @ head.T).log_softmax(-1)
    kl = (renormed * (renormed.log() - q)).sum(-1)
    loss = (0.5 * kl + 0.5 * (1 - torch.minimum(q.exp(), true).sum(-1))).sum()
loss.backward()
peak = peak_kib() - before
print(loss.item(), hidden.grad.norm().item(), peak)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from the kernel")
def test_chunks_need_far_less_memory_than_a_full_vocabulary_teacher():
    runs = [
        subprocess.run([sys.executable, "-c", MEMORY, way], capture_output=True, text=True, check=True).stdout.split()
        for way in ("chunks", "full")
    ]
    (loss, norm, peak), (full_loss, full_norm, full_peak) = ([float(x) for x in run] for run in runs)
    assert loss == pytest.approx(full_loss, rel=1e-5)
    assert norm == pytest.approx(full_norm, rel=1e-5)
    one_teacher = 1024 * 32000 * 4 / 1024  # KiB
    assert full_peak - peak > one_teacher / 2
