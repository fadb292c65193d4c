"""Protects models/layers.py: norms, MLP, RoPE, chain attention and draft KV caches against plain references.

Run: pytest tests/test_layers.py
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftsmith.models.layers import MLP, KVCache, RMSNorm, Rope, Span, chain_attention, rotate

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e6}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "yarn": YARN,
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 5e5,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 128,
        "rope_theta": 1e4,
    },
    "partial": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5, "rope_theta": 1e4},
}


# -- norm and MLP ----------------------------------------------------------------------------------------------------
def test_rms_norm_equals_torch_forward_and_backward():
    x = torch.randn(7, 3, 12, dtype=torch.float64, requires_grad=True)
    norm = RMSNorm(12, 1e-5).double()
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    upstream = torch.randn(7, 3, 12, dtype=torch.float64)
    ours = torch.autograd.grad(norm(x), [x, norm.weight], upstream)
    theirs = torch.autograd.grad(F.rms_norm(x, (12,), norm.weight, 1e-5), [x, norm.weight], upstream)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (12,), norm.weight, 1e-5))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_rms_norm_of_bf16_uses_fp32_statistics_and_fp32_weights():
    x = (torch.randn(5, 4096) * 30).bfloat16()
    norm = RMSNorm(4096, 1e-6)
    out = norm(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, F.rms_norm(x.float(), (4096,), norm.weight, 1e-6).bfloat16())
    out.sum().backward()
    assert norm.weight.grad is not None
    assert norm.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_the_same_with_and_without_gradients(dtype):
    norm = RMSNorm(576, 1e-5).to(dtype)
    x = (torch.randn(3, 5, 576) * 20).to(dtype)
    with torch.no_grad():
        quick = norm(x)
    torch.testing.assert_close(quick, norm(x).detach())


def test_the_mlp_equals_swiglu_forward_and_backward():
    mlp = MLP(12, 20).double()
    x = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    slow = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    leaves = [x, *mlp.parameters()]
    torch.testing.assert_close(mlp(x), slow)
    for a, b in zip(torch.autograd.grad(mlp(x).sum(), leaves), torch.autograd.grad(slow.sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


# -- RoPE ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ROPES)
def test_rope_equals_transformers(name):
    rope, width = ROPES[name], 16
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=width, max_position_embeddings=512, rope_parameters=dict(rope)
    )
    theirs = LlamaRotaryEmbedding(config)
    ours = Rope(rope, width, 512)
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq)
    assert ours.attention_scaling == theirs.attention_scaling
    positions = torch.tensor([0, 1, 5, 99])  # within every original limit: no type changes there
    x = torch.randn(4, 3, width)
    cos, sin = ours(positions, x.dtype)
    turned = rotate(x, cos, sin)
    cos_full, sin_full = theirs(x[None], positions[None])
    part = cos_full.shape[-1]
    expected, _ = apply_rotary_pos_emb(x[None, ..., :part], x[None, ..., :part], cos_full, sin_full, unsqueeze_dim=2)
    torch.testing.assert_close(turned[..., :part], expected[0])
    assert torch.equal(turned[..., part:], x[..., part:])


def test_yarn_keeps_its_attention_factor():
    assert Rope(YARN, 12, 512).attention_scaling == pytest.approx(1.1386, abs=1e-4)


def test_the_gradient_of_a_rotation_is_exact():
    x = torch.randn(3, 2, 10, dtype=torch.float64, requires_grad=True)
    cos, sin = Rope(ROPES["partial"] | {"partial_rotary_factor": 0.6}, 10, 64)(torch.tensor([0, 3, 7]), torch.float64)
    assert torch.autograd.gradcheck(lambda y: rotate(y, cos, sin), x)


def test_an_unknown_rope_type_and_a_missing_base_are_refused():
    with pytest.raises(ValueError, match=r"rope_type 'spiral' .*known: default, .*yarn"):
        Rope({"rope_type": "spiral", "rope_theta": 1e4}, 8, 64)
    with pytest.raises(ValueError, match="need rope_theta"):
        Rope({"rope_type": "default"}, 8, 64)


# -- chain attention -------------------------------------------------------------------------------------------------
def dense_mask(num: int, num_chain: int, docs: list[tuple[int, int]]) -> Tensor:
    """[T, (1 + s) T]: causal within the document at step 0, the own row alone at later steps (algorithms of EAGLE-3)."""
    row = torch.arange(num)
    doc = torch.zeros(num, dtype=torch.int64)
    for i, (start, stop) in enumerate(docs):
        doc[start:stop] = i
    prefix = (row[:, None] >= row) & (doc[:, None] == doc)
    return torch.cat([prefix, *[torch.eye(num, dtype=torch.bool)] * num_chain], 1)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, chain_k, chain_v, docs) -> Tensor:
    num, rep = len(q), q.shape[1] // k.shape[1]
    keys = [k] if chain_k is None else [k, *chain_k.unbind(1)]
    values = [v] if chain_v is None else [v, *chain_v.unbind(1)]
    all_k, all_v = (torch.cat(x).repeat_interleave(rep, 1).transpose(0, 1) for x in (keys, values))
    scores = q.transpose(0, 1) @ all_k.transpose(1, 2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~dense_mask(num, len(keys) - 1, docs), -torch.inf)
    return (scores.softmax(-1) @ all_v).transpose(0, 1)


def inputs(num: int, num_chain: int, dtype=torch.float64, heads=4, groups=2, width=6):
    torch.manual_seed(num + num_chain)
    q = torch.randn(num, heads, width, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(num, groups, width, dtype=dtype, requires_grad=True) for _ in range(2))
    chain = [torch.randn(num, num_chain, groups, width, dtype=dtype, requires_grad=True) for _ in range(2)]
    return (q, k, v, *(chain if num_chain else (None, None)))


def test_the_reference_mask_is_the_published_one():
    """Four rows at step 2: prefix, then the diagonal of step 1, then the diagonal of step 2."""
    mask = dense_mask(4, 2, [(0, 4)]).int().tolist()
    assert mask[0] == [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]
    assert mask[2] == [1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("num_chain", [0, 1, 3])
@pytest.mark.parametrize("docs", [[(0, 4)], [(0, 37), (37, 38), (38, 300)]])
def test_chain_attention_equals_a_dense_mask_forward_and_backward(docs, num_chain):
    tensors = inputs(docs[-1][1], num_chain)
    leaves = [t for t in tensors if t is not None]
    ours = chain_attention(*tensors, [Span(a, a, a, b) for a, b in docs])
    dense = dense_attention(*tensors, docs)
    torch.testing.assert_close(ours, dense)
    upstream = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, leaves, upstream), torch.autograd.grad(dense, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_queries_of_some_rows_equal_those_rows_of_the_full_result():
    docs = [(0, 37), (37, 38), (38, 90)]
    q, k, v, chain_k, chain_v = inputs(90, 2)
    rows = torch.cat([torch.arange(10, 37), torch.arange(45, 47), torch.arange(60, 90)])
    spans = [Span(0, 10, 0, 27), Span(38, 45, 27, 29), Span(38, 60, 29, 59)]
    some = chain_attention(q[rows], k, v, chain_k[rows], chain_v[rows], spans)
    torch.testing.assert_close(some, dense_attention(q, k, v, chain_k, chain_v, docs)[rows])


def test_chain_attention_in_bf16_is_close_to_fp64():
    docs = [(0, 200)]
    exact = inputs(200, 2)
    low = tuple(t.detach().bfloat16().requires_grad_() for t in exact)
    span = [Span(0, 0, 0, 200)]
    upstream = torch.randn(200, 4, 6, dtype=torch.float64)
    wanted = torch.autograd.grad(dense_attention(*exact, docs), exact, upstream)
    ours = torch.autograd.grad(chain_attention(*low, span), low, upstream.bfloat16())
    for a, b in zip(ours, wanted, strict=True):
        assert ((a.double() - b).norm() / b.norm()).item() < 0.015


# -- KV cache --------------------------------------------------------------------------------------------------------
def test_a_ragged_cache_equals_causal_attention_and_forgets_what_was_not_committed():
    torch.manual_seed(0)
    heads, groups, width, lengths = 4, 2, 6, [5, 3]
    q, k, v = (torch.randn(2, 7, n, width) for n in (heads, groups, groups))
    cache = KVCache(1, 2, 4, groups, width, torch.float32, torch.device("cpu"))  # too small at first
    cache.reserve(5)
    at = torch.arange(5).expand(2, 5)
    first = cache.attend(0, q[:, :5], k[:, :5], v[:, :5], at, at, limit=5)
    cache.commit(torch.tensor(lengths), 5)
    cache.reserve(4)
    for _ in range(2):  # speculation, dropped by not committing it
        guess = torch.randn(2, 1, groups, width)
        at = cache.lengths[:, None]
        cache.attend(0, q[:, :1], guess, guess, at, at, limit=6)
    at = cache.lengths[:, None] + torch.arange(2)
    more = [torch.stack([x[b, n : n + 2] for b, n in enumerate(lengths)]) for x in (q, k, v)]
    second = cache.attend(0, *more, at, at, limit=7)
    for b, n in enumerate(lengths):
        full = F.scaled_dot_product_attention(
            *(x[b : b + 1, : n + 2].transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        torch.testing.assert_close(first[b, :n], full[:n].flatten(1))
        torch.testing.assert_close(second[b], full[n:].flatten(1))
