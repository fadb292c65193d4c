"""The target's cache: rows of different lengths, rejected tokens, dropped rows, and nothing of it shows in the states."""

from __future__ import annotations

import pytest
import torch
from tiny import KINDS, target_model, tokenizer

from draftsmith.models.cache import TargetCache
from draftsmith.models.draft import Needs
from draftsmith.models.target import Target, TargetConfig

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
NEEDS = Needs(aux_layers=(0, 2, 5))


def make(kind: str, attention: str = "sdpa") -> Target:
    model = target_model(kind)
    model.set_attn_implementation(attention)
    return Target(model, tokenizer(), TargetConfig(name=kind, attention=attention))


def states(target: Target, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = target.forward(ids, needs=NEEDS)
    return out.features, out.last_hidden


def check_chunks_equal_full_pass(target: Target, prompt_lens: list[int], num_rounds: int = 12) -> None:
    """Prefill, then rounds of 1-5 tokens of which some are rejected; all accepted states equal a pass without cache."""
    random = torch.Generator().manual_seed(3)
    total, num = 64, len(prompt_lens)
    ids = torch.randint(0, 256, (num, total), generator=random)
    features, last_hidden = states(target, ids)
    cache = target.new_cache(num, total)
    width = max(prompt_lens)
    out = target.forward(ids[:, :width], cache, NEEDS, lengths=prompt_lens)
    cache.advance(prompt_lens)
    for row, n in enumerate(prompt_lens):
        torch.testing.assert_close(out.last_hidden[row, :n], last_hidden[row, :n], **CLOSE)
    rejected = 0
    for _ in range(num_rounds):
        real = torch.randint(0, 6, (num,), generator=random).tolist()
        real = [min(n, total - have) for n, have in zip(real, cache.host_lengths, strict=True)]
        accepted = [int(torch.randint(0, n + 1, (1,), generator=random)) for n in real]
        chunk = torch.randint(0, 256, (num, max(*real, 1)), generator=random)  # rejected tokens are not the row's own
        for row, (start, n) in enumerate(zip(cache.host_lengths, accepted, strict=True)):
            chunk[row, :n] = ids[row, start : start + n]
        out = target.forward(chunk, cache, NEEDS, lengths=real)
        for row, (start, n) in enumerate(zip(cache.host_lengths, accepted, strict=True)):
            torch.testing.assert_close(out.features[row, :n], features[row, start : start + n], **CLOSE)
            torch.testing.assert_close(out.last_hidden[row, :n], last_hidden[row, start : start + n], **CLOSE)
        rejected += sum(real) - sum(accepted)
        cache.advance(torch.tensor(accepted))
    assert rejected > 5
    assert cache.lengths.tolist() == cache.host_lengths
    assert max(cache.host_lengths) > width


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt_lens", [[7], [20, 3, 17]], ids=["one", "three"])
def test_chunks_with_rejected_tokens_equal_one_full_pass(kind: str, prompt_lens: list[int]) -> None:
    check_chunks_equal_full_pass(make(kind), prompt_lens)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "swa", "gpt2"])
def test_eager_attention_gets_additive_masks(kind: str) -> None:
    check_chunks_equal_full_pass(make(kind, "eager"), [20, 3, 17])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("prompt_len", [5, 15, 16, 17, 40])
def test_sliding_layers_past_their_window_survive_rollback(prompt_len: int, attention: str) -> None:
    check_chunks_equal_full_pass(make("swa", attention), [prompt_len])


def test_a_full_row_can_run_beside_one_with_room() -> None:
    target = make("gpt2")
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    full = target.forward(ids).last_hidden
    cache = target.new_cache(2, 12)
    target.forward(ids[:, :11], cache, lengths=[11, 6])
    cache.advance([11, 6])
    chunk = torch.zeros(2, 5, dtype=torch.int64)
    chunk[0, 0], chunk[1] = ids[0, 11], ids[1, 6:11]
    out = target.forward(chunk, cache, lengths=[1, 5]).last_hidden
    torch.testing.assert_close(out[0, 0], full[0, 11], **CLOSE)
    torch.testing.assert_close(out[1], full[1, 6:11], **CLOSE)
    cache.advance([1, 5])
    last = target.forward(ids[:, 11:], cache, lengths=[0, 1]).last_hidden  # row 0 is full and takes no part
    torch.testing.assert_close(last[1, 0], full[1, 11], **CLOSE)


def test_keep_moves_rows_and_drops_the_others() -> None:
    target = make("swa")
    ids = torch.randint(0, 256, (4, 30), generator=torch.Generator().manual_seed(0))
    full = target.forward(ids).last_hidden
    cache = target.new_cache(4, 30)
    lengths = [20, 5, 18, 9]
    target.forward(ids[:, :20], cache, lengths=lengths)
    cache.advance(lengths)
    cache.keep([3, 1])
    assert cache.host_lengths == [9, 5]
    assert cache.batch_size == 2
    out = target.forward(torch.stack([ids[3, 9:13], ids[1, 5:9]]), cache).last_hidden
    torch.testing.assert_close(out, torch.stack([full[3, 9:13], full[1, 5:9]]), **CLOSE)


def test_truncate_takes_tokens_back_and_refuses_to_grow() -> None:
    target = make("llama")
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    cache = target.new_cache(1, 12)
    target.forward(ids, cache)
    cache.advance([12])
    cache.truncate([4])
    out = target.forward(ids[:, 4:], cache).last_hidden
    torch.testing.assert_close(out, target.forward(ids).last_hidden[:, 4:], **CLOSE)
    with pytest.raises(AssertionError, match="grow"):
        cache.truncate([5])


def test_too_many_tokens_are_refused_before_anything_is_written() -> None:
    target = make("llama")
    cache = target.new_cache(1, 8)
    with pytest.raises(ValueError, match=r"holds 8 tokens per row, this pass needs 9.*larger max_len"):
        target.forward(torch.zeros(1, 9, dtype=torch.int64), cache)


def test_keys_and_values_can_be_read_per_layer() -> None:
    target = make("llama")
    cache = target.new_cache(2, 10)
    target.forward(torch.zeros(2, 6, dtype=torch.int64), cache, lengths=[6, 2])
    cache.advance([6, 2])
    keys, values = cache.keys_values(5)
    assert keys.shape == values.shape == (2, 2, 6, 12)


def test_it_answers_what_transformers_asks_of_a_cache() -> None:
    cache = TargetCache(3, 10, num_layers=2, device=torch.device("cpu"))
    cache.begin(4)
    assert (len(cache), cache.batch_size, cache.get_seq_length(), cache.get_query_offset()) == (2, 3, 0, 0)
    assert cache.get_mask_sizes(4, 0) == (4, 0)
    assert cache.get_max_length() == cache.get_max_cache_shape() == 10
    assert not cache.is_compileable
    assert not cache.is_initialized
    assert cache.is_sliding == [False, False]
