"""Protects models/vocab.py: which tokens a draft may offer. Run: pytest tests/test_vocab.py"""

import pytest
import torch

from draftsmith.models.vocab import choose, columns, coverage


def test_a_vocabulary_larger_than_the_tokens_seen_is_filled_by_ascending_id():
    counts = torch.zeros(264, dtype=torch.int64)
    seen = torch.arange(97, 122)
    counts[seen] = torch.arange(1, 26)
    vocab = choose(counts, 64)
    assert vocab.dtype == torch.int64
    assert vocab.tolist() == sorted({*seen.tolist(), *range(39)})  # 25 seen, then 0, 1, 2, ...
    assert torch.equal(vocab, choose(counts, 64))


def test_the_most_frequent_tokens_are_kept_and_ties_go_to_the_smaller_id():
    assert choose(torch.tensor([5, 9, 5, 0, 7, 5]), 4).tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize("size", [0, 7])
def test_an_impossible_size_is_refused_with_the_allowed_range(size):
    with pytest.raises(ValueError, match=rf"draft.draft_vocab is {size}, the target has 6 tokens: give 1..6"):
        choose(torch.ones(6), size)


def test_columns_and_ids_are_inverse_and_absent_tokens_are_minus_one():
    vocab = torch.tensor([2, 3, 7])
    assert columns(torch.tensor([[0, 2, 3], [4, 7, 9]]), vocab).tolist() == [[-1, 0, 1], [-1, 2, -1]]
    assert columns(vocab, None) is vocab


def test_coverage_is_the_share_of_counted_tokens():
    assert coverage(torch.tensor([1, 0, 2, 5]), torch.tensor([1, 3])) == 5 / 8
    assert coverage(torch.zeros(4), torch.tensor([0])) == 0
