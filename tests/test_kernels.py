"""Protects the choice of an attention kernel: FlexAttention gives the reference's numbers or is not used, and says so.

Run: pytest tests/test_kernels.py. Without a GPU the mask is compared in FlexAttention's uncompiled forward (it has no
backward on CPUs); with one (marker gpu) compiled, with gradients and losses.
"""

from __future__ import annotations

import block_drafts
import pytest
import torch
from toy import ToyDraft, ToySource, config, eagle

from draftsmith.models import layers
from draftsmith.models.dflash import DFlash
from draftsmith.models.dspark import DSpark
from draftsmith.train import loop, selftest

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CASES = ["blocks", "causal blocks in a window", "chains"]


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(layers, "_flex_wanted", lambda q: layers._kernel == "flex")


def case(name: str):
    attend, tensors, weights = list(selftest.attention_cases())[CASES.index(name)]
    return attend, [x.float() for x in tensors], weights


@pytest.mark.parametrize("name", CASES)
def test_the_mask_is_that_of_the_reference(on_cpu, monkeypatch, name):
    attend, tensors, _ = case(name)
    want = attend(*tensors)
    real = layers._flex_attention
    monkeypatch.setattr(layers, "_flex_attention", lambda *a, compiled: real(*a, compiled=False))
    with torch.no_grad(), layers.attention("flex", fall_back=False):
        assert torch.allclose(attend(*tensors), want, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_what_flex_is_compared_with_is_the_reference_in_gradients_too(on_cpu, monkeypatch, name):
    attend, tensors, weights = case(name)
    want = selftest._with_gradients(attend, tensors, weights)
    monkeypatch.setattr(layers, "_flex_attention", lambda *a, compiled: layers._dense_attention(*a))
    with layers.attention("flex", fall_back=False):
        got = selftest._with_gradients(attend, tensors, weights)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            lambda *a, compiled: (_ for _ in ()).throw(NotImplementedError("NoValidChoicesError\nmore")),
            "NoValidChoices",
        ),
        (lambda *a, compiled: layers._dense_attention(*a) * 1.5, r"differs from the reference by 5.0e-01"),
        (lambda *a, compiled: layers._dense_attention(*a) * torch.nan, "differs from the reference by nan"),
    ],
)
def test_a_kernel_that_fails_or_differs_is_replaced_with_one_line(on_cpu, monkeypatch, capsys, fault, words):
    attend, tensors, _ = case("blocks")
    want = attend(*tensors)
    monkeypatch.setattr(layers, "_flex_attention", fault)
    with layers.attention("flex"):
        assert torch.equal(attend(*tensors), want)
        assert torch.equal(attend(*tensors), want)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert said.startswith("attention: FlexAttention does not work here (")
    assert words in said
    with layers.attention("flex", fall_back=False), pytest.raises(RuntimeError, match="does not work here: .*"):
        attend(*tensors)


def test_without_a_gpu_the_reference_is_used_and_training_refuses_flex(tmp_path):
    attend, tensors, _ = case("chains")
    if not torch.cuda.is_available():
        with layers.attention("flex", fall_back=False):
            attend(*tensors)
        with pytest.raises(ValueError, match="train.attention flex has no backward on cpu: .* set it to matmul"):
            loop.train(ToyDraft(), None, ToySource(), config(attention="flex"), tmp_path)
    assert layers._kernel == "matmul"


class TestOnAGpu:
    pytestmark = gpu

    def test_compiled_flex_gives_outputs_and_gradients_of_the_reference(self):
        assert selftest.flex_error(torch.device("cuda")) < selftest.LARGEST_ERROR

    @pytest.mark.parametrize("family", ["eagle3", "dflash", "dspark"])
    def test_losses_and_gradients_of_a_family_are_equal(self, family):
        if family == "eagle3":
            draft, batch = eagle(), ToySource(num_aux=2).step(0, 0, 1)[0]
        else:
            draft = block_drafts.draft_of({"dflash": DFlash, "dspark": DSpark}[family])
            batch = block_drafts.batch_of()
        draft, batch = draft.cuda(), batch.to("cuda")
        draft.bind(draft.embedding.cuda(), draft.target_head.cuda())
        found = []
        for kernel in ("matmul", "flex"):
            draft.zero_grad()
            with layers.attention(kernel, fall_back=False):
                loss = draft(batch, draft.counts(batch))["loss"].sum
                loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in draft.parameters() if p.grad is not None)])
        assert selftest.relative_error(found[1], found[0]) < 1e-3
