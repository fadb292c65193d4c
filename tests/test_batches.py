"""Batches: the same numbers from cache and live target, documents kept apart, an order that is a function of the step.

Run: pytest tests/test_batches.py
"""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import target_model, tokenizer

from draftsmith.data.batches import (
    Ahead,
    BatchSource,
    DataConfig,
    Prefetch,
    cut,
    fill_bins,
    permutation,
    target_mass,
    token_stats,
)
from draftsmith.data.capture import CaptureConfig, capture
from draftsmith.data.chat import Row
from draftsmith.data.shards import FeatureStore
from draftsmith.models.draft import Needs
from draftsmith.models.target import Target, TargetConfig

NEEDS = Needs(aux_layers=(2, 3, 4))


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(target_model("llama"), tokenizer(), TargetConfig(name="tiny"))


def row(name: str, length: int) -> Row:
    random = torch.Generator().manual_seed(length)
    ids = torch.randint(97, 117, (length,), generator=random).tolist()
    return Row(name, "chat", ids, [int(i >= length // 3) for i in range(length)])


ROWS = [row(f"row-{i}", 5 + (i * 7) % 31) for i in range(40)]
SILENT = Row("silent", "chat", [97] * 9, [0] * 9)
ONE_WORD = Row("one-word", "chat", [97] * 9, [0] * 8 + [1])


@pytest.fixture(scope="module")
def stores(target, tmp_path_factory) -> dict[str, FeatureStore]:
    folder = tmp_path_factory.mktemp("cache")
    return {
        dtype: capture(ROWS, target, NEEDS, folder / dtype, CaptureConfig(dtype=dtype, shard_tokens=100))
        for dtype in ("bfloat16", "float32")
    }


@pytest.fixture(scope="module")
def store(stores) -> FeatureStore:
    return stores["bfloat16"]


def test_a_data_section_takes_one_source_or_several():
    one = DataConfig(train="shipped:prompts_train", evaluation={"heldout": {"path": "held.jsonl", "limit": 3}})
    assert [each.path for each in one.train] == ["shipped:prompts_train"]
    assert one.evaluation["heldout"].limit == 3
    several = DataConfig.model_validate({"train": ["a.jsonl", {"path": "b.jsonl", "kind": "code"}]})
    assert [each.path for each in several.train] == ["a.jsonl", "b.jsonl"]
    assert (several.source, several.capture.dtype, several.regenerate) == ("cache", "bfloat16", None)
    for wrong in ({"train": []}, {"train": "a", "sauce": "live"}, {"train": "a", "source": "disk"}):
        with pytest.raises(ValueError):
            DataConfig.model_validate(wrong)


def source(data, target=None, batch_tokens=80, pack_tokens=40, seed=0, **others) -> BatchSource:
    return BatchSource(data, target, NEEDS, seed, batch_tokens, pack_tokens, **others)


def ids_of(batches) -> list[str]:
    return [name for batch in batches for name in batch.row_ids]


# -- cache = live ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cache_and_live_target_give_the_same_batches_bit_for_bit(target, stores, dtype):
    cached = source(stores[dtype])
    live = source(ROWS, target, config=CaptureConfig(dtype=dtype))
    assert cached.steps_per_epoch == live.steps_per_epoch > 3
    for step in range(cached.steps_per_epoch + 2):
        for world, rank in ((1, 0), (3, 1)):
            batches = list(zip(cached.step(step, rank, world), live.step(step, rank, world), strict=True))
            assert batches
            for one, other in batches:
                assert one.bounds == other.bounds
                assert one.row_ids == other.row_ids
                for name in ("input_ids", "loss_mask", "positions", "features", "last_hidden"):
                    a, b = getattr(one, name), getattr(other, name)
                    assert a.dtype == b.dtype
                    assert torch.equal(a, b), f"step {step}: {name}"
                assert one.features.dtype == getattr(torch, dtype)


def test_a_live_batch_can_be_trained_on(target):
    batch = source(ROWS, target, config=CaptureConfig(dtype="float32")).step(0)[0]
    weight = torch.ones(144, requires_grad=True)
    (batch.features * weight).sum().backward()
    assert weight.grad is not None
    assert not batch.features.requires_grad


# -- packing -----------------------------------------------------------------------------------------------------------
def test_packed_documents_are_the_documents_alone_side_by_side(store):
    packed = source(store, batch_tokens=10**6, pack_tokens=10**6).step(0)
    assert len(packed) == 1
    batch = packed[0]
    assert sorted(batch.row_ids) == sorted(store.row_ids)
    assert batch.bounds[-1] == len(batch.input_ids) == sum(store.lengths)
    for name, (start, end) in zip(batch.row_ids, batch.docs, strict=True):
        alone = store.row(store.row_ids.index(name))
        assert batch.positions[start:end].tolist() == list(range(end - start))  # positions restart
        for field in ("input_ids", "loss_mask", "features", "last_hidden"):
            assert torch.equal(getattr(batch, field)[start:end], getattr(alone, field))
    assert (batch.input_ids.dtype, batch.loss_mask.dtype, batch.positions.dtype) == (
        torch.int64,
        torch.bool,
        torch.int64,
    )


def test_a_tiny_pack_budget_gives_every_document_a_micro_batch_of_its_own_and_no_idle_ones(store):
    alone = source(store, batch_tokens=10**6, pack_tokens=1).step(0)
    assert all(len(batch.docs) == 1 for batch in alone)
    assert sorted(ids_of(alone)) == sorted(store.row_ids)


def test_budgets_hold_unless_a_document_is_longer(store):
    batches = source(store, batch_tokens=30, pack_tokens=12)
    for step in range(batches.steps_per_epoch):
        documents = batches.documents(step)
        assert documents
        assert sum(store.lengths[i] for i in documents) <= 30 or len(documents) == 1
        for batch in batches.step(step):
            assert len(batch.input_ids) <= 12 or len(batch.docs) == 1
    assert any(store.lengths[i] > 30 for i in range(len(store)))  # steps of their own occur


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    pack_tokens=st.integers(1, 80),
    world=st.integers(1, 5),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_micro_batches_hold_each_document_once_within_the_budget_and_are_a_multiple_of_the_ranks(
    lengths, pack_tokens, world
):
    bins = fill_bins(lengths, pack_tokens, world)
    assert len(bins) % world == 0
    assert sorted(place for each in bins for place in each) == list(range(len(lengths)))
    for each in bins:
        assert each == sorted(each)
        assert len(each) <= 1 or sum(lengths[place] for place in each) <= pack_tokens
    if any(not each for each in bins):
        assert len(bins) - len(lengths) < world  # idle only where there are fewer documents than ranks


@given(lengths=st.lists(st.integers(1, 50), max_size=30), budget=st.integers(1, 80))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_steps_take_documents_while_they_fit(lengths, budget):
    limits = cut(lengths, budget)
    assert limits[0] == 0
    assert limits[-1] == len(lengths)
    for a, b in zip(limits[:-1], limits[1:], strict=True):
        assert b > a
        assert sum(lengths[a:b]) <= budget or b == a + 1
        assert b == len(lengths) or sum(lengths[a : b + 1]) > budget  # the next one would not have fitted


def test_ranks_share_a_step_evenly():
    bins = fill_bins([30, 10, 10, 10, 30, 10], 1000, 2)
    assert [sum([30, 10, 10, 10, 30, 10][i] for i in each) for each in bins] == [50, 50]


# -- order -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_together_hold_the_same_documents_for_every_world_size(store, world):
    alone, batches = source(store), source(store)
    for step in range(alone.steps_per_epoch + 3):
        shares = [batches.step(step, rank, world) for rank in range(world)]
        assert len({len(share) for share in shares}) == 1  # the same number of micro-batches on every rank
        together = [name for share in shares for name in ids_of(share)]
        assert sorted(together) == sorted(ids_of(alone.step(step)))


def test_a_rank_without_documents_gets_an_empty_batch_of_the_right_shape(target, stores):
    for data, owner in ((stores["bfloat16"], None), (ROWS, target)):
        shares = [source(data, owner, batch_tokens=1).step(0, rank, 3) for rank in range(3)]
        assert [len(ids_of(share)) for share in shares] == [1, 0, 0]
        (empty,) = shares[2]
        assert empty.bounds == (0,)
        assert empty.docs == []
        assert empty.row_ids == ()
        (full,) = shares[0]
        for name in ("input_ids", "loss_mask", "positions", "features", "last_hidden"):
            a, b = getattr(empty, name), getattr(full, name)
            assert (a.dtype, a.shape[1:], len(a)) == (b.dtype, b.shape[1:], 0)


def test_order_is_a_function_of_seed_and_step_alone(store):
    forward = source(store)
    seen = [ids_of(forward.step(step)) for step in range(40)]
    for step in (39, 3, 17):
        assert ids_of(source(store).step(step)) == seen[step]  # asked for out of order, in a fresh object
    assert [ids_of(source(store, seed=1).step(step)) for step in range(10)] != seen[:10]


def test_resuming_in_the_middle_of_the_second_epoch_goes_on_with_the_same_rows(store):
    uninterrupted = source(store, batch_tokens=1)  # 40 rows, one a step
    assert uninterrupted.steps_per_epoch == 40
    assert uninterrupted.num_steps(2) == 80
    ids = [ids_of(uninterrupted.step(step)) for step in range(80)]
    resumed = source(store, batch_tokens=1)
    with Ahead(resumed) as steps:
        assert [ids_of(steps.step(step)) for step in range(30, 80)] == ids[30:]
    assert sorted(sum(ids[:40], [])) == sorted(sum(ids[40:], [])) == sorted(store.row_ids)
    assert ids[:40] != ids[40:]
    assert [uninterrupted.epoch_of(step) for step in (0, 39, 40, 79, 80)] == [0, 0, 1, 1, 2]


def test_every_epoch_holds_every_row_once_and_no_step_crosses_epochs(store):
    batches = source(store)
    first = 0
    for epoch in range(3):
        after = batches.num_steps(epoch + 1)
        assert {batches.epoch_of(step) for step in range(first, after)} == {epoch}
        rows = [name for step in range(first, after) for name in ids_of(batches.step(step))]
        assert sorted(rows) == sorted(store.row_ids)
        first = after
    assert batches.num_steps(0.5) == round(batches.steps_per_epoch / 2)
    assert batches.num_steps(0) == 1
    assert batches.num_steps(1.5) > batches.num_steps(1)


def test_permutations_differ_by_seed_and_epoch():
    orders = {tuple(permutation(20, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert permutation(6, 0, 0) == [4, 5, 2, 0, 1, 3]  # a change would change what resumed runs see


def test_every_row_gives_stored_order_for_evaluation(store):
    batches = list(source(store, pack_tokens=50).every_row())
    assert ids_of(batches) == store.row_ids
    assert all(len(batch.input_ids) <= 50 for batch in batches)


# -- rows that teach nothing -------------------------------------------------------------------------------------------
def test_rows_without_a_trainable_token_are_left_out_and_counted(target, tmp_path):
    rows = [SILENT, *ROWS[:5], ONE_WORD]
    cached = capture(rows, target, NEEDS, tmp_path, CaptureConfig())
    for batches in (source(cached), source(rows, target)):
        assert (batches.num_rows, batches.num_dropped) == (5, 2)
        assert batches.num_tokens == sum(len(r.input_ids) for r in ROWS[:5])
        names = [n for step in range(batches.steps_per_epoch) for n in ids_of(batches.step(step))]
        assert sorted(names) == sorted(r.id for r in ROWS[:5])


def test_nothing_to_train_on_is_an_error_that_counts_the_samples(target):
    with pytest.raises(ValueError, match=r"0 trainable tokens in 3 samples: .*draftsmith inspect"):
        source([SILENT, ONE_WORD, SILENT], target)


def test_a_cache_that_lacks_what_the_draft_needs_is_refused(store):
    with pytest.raises(ValueError, match=r"aux layers \[2, 3, 4\] in the cache, the draft needs \[1\]; capture again"):
        BatchSource(store, None, Needs((1,)), 0, 10, 10)
    with pytest.raises(ValueError, match="last hidden True in the cache, the draft needs False"):
        BatchSource(store, None, Needs((2, 3, 4), last_hidden=False), 0, 10, 10)
    with pytest.raises(ValueError, match=r"keys and values of layers \[\] in the cache, the draft needs \[3\]"):
        BatchSource(store, None, Needs((2, 3, 4), target_kv_layers=(3,)), 0, 10, 10)
    with pytest.raises(ValueError, match="need a target"):
        BatchSource(ROWS, None, NEEDS, 0, 10, 10)


# -- prefetching -------------------------------------------------------------------------------------------------------
def test_steps_loaded_ahead_equal_direct_ones_in_and_out_of_order(target, store):
    for batches in (source(store), source(ROWS, target)):
        with Ahead(batches) as steps:
            for step, rank in ((2, 0), (3, 0), (4, 0), (3, 0), (0, 1), (1, 1)):
                got, want = steps.step(step, rank, 2), batches.step(step, rank, 2)
                assert ids_of(got) == ids_of(want)
                assert all(torch.equal(a.features, b.features) for a, b in zip(got, want, strict=True))


def test_loading_ahead_overlaps_with_use_and_ends_with_the_block(store):
    batches = source(store)
    asked = []
    batches.documents = lambda step: asked.append(step) or BatchSource.documents(batches, step)
    with Ahead(batches) as steps:
        steps.step(5)
        deadline = time.monotonic() + 5
        while len(asked) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert asked[:4] == [5, 6, 7, 8]  # before anybody asked for them
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())


def test_a_damaged_row_met_ahead_is_reported_at_its_own_step(store):
    class Damaged(BatchSource):
        def step(self, step, rank=0, world=1):
            if step == 2:
                raise ValueError("shard-00001.safetensors: row 'row-7' ...")
            return super().step(step, rank, world)

    with Ahead(Damaged(store, None, NEEDS, 0, 80, 40)) as steps:
        assert steps.step(0)
        assert steps.step(1)
        with pytest.raises(ValueError, match="row-7"):
            steps.step(2)


def test_an_error_in_the_loader_surfaces_at_the_item_it_belongs_to():
    def make():
        yield 1
        yield 2
        raise ValueError("shard-00007 is damaged")

    items = Prefetch(make)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ValueError, match="shard-00007 is damaged"):
        next(items)
    with pytest.raises(StopIteration):  # and not for ever
        next(items)
    assert not items._thread.is_alive()


def test_prefetching_runs_ahead_by_a_bounded_number_and_overlaps():
    made = []
    with Prefetch(lambda: (made.append(i) or i for i in range(100)), ahead=3) as items:
        assert next(items) == 0
        deadline = time.monotonic() + 5
        while len(made) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(made) == 5  # one taken, three waiting, one in hand


def test_leaving_early_ends_the_thread():
    before = threading.active_count()
    with Prefetch(lambda: iter(range(10**9)), ahead=1) as items:
        assert next(items) == 0
    assert not items._thread.is_alive()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(items)


# -- token statistics --------------------------------------------------------------------------------------------------
def test_token_stats_count_supervised_tokens_and_pairs_within_a_row():
    rows = [
        Row("a", "chat", [5, 1, 2, 1, 2, 9], [0, 0, 1, 1, 1, 0]),
        Row("b", "chat", [2, 2, 3], [1, 1, 0]),  # its first token has no previous token: counted, but in no pair
    ]
    stats = token_stats(rows, 10)
    slow_counts, slow_pairs = Counter(), Counter()
    for each in rows:
        for i, (token, on) in enumerate(zip(each.input_ids, each.loss_mask, strict=True)):
            if on:
                slow_counts[token] += 1
                if i:
                    slow_pairs[each.input_ids[i - 1], token] += 1
    assert stats.counts.tolist() == [slow_counts[v] for v in range(10)] == [0, 1, 4, 0, 0, 0, 0, 0, 0, 0]
    pairs = {tuple(pair): n for pair, n in zip(stats.bigrams.tolist(), stats.bigram_counts.tolist(), strict=True)}
    assert pairs == slow_pairs == {(1, 2): 2, (2, 1): 1, (2, 2): 1}
    assert stats.counts.dtype == stats.bigrams.dtype == stats.bigram_counts.dtype == torch.int64


def test_token_stats_of_silent_rows_are_zero_and_foreign_ids_are_refused():
    stats = token_stats([SILENT], 264)
    assert int(stats.counts.sum()) == 0
    assert stats.bigrams.shape == (0, 2)
    with pytest.raises(ValueError, match="token id 97 in the rows, the target's vocabulary has 50 ids"):
        token_stats([SILENT], 50)
    with pytest.raises(ValueError, match="no rows"):
        token_stats([], 50)


def test_target_mass_is_the_sum_of_the_targets_probabilities_at_supervised_labels(target, stores):
    found = target_mass(source(stores["float32"]), target)
    wanted = torch.zeros(264, dtype=torch.float64)
    for each in ROWS:
        probs = target.model(torch.tensor([list(each.input_ids)])).logits[0].softmax(-1)
        for label in range(1, len(each.input_ids)):
            if each.loss_mask[label]:
                wanted += probs[label - 1]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    stats = token_stats(ROWS, 264)
    assert torch.equal(stats.expected, stats.counts)
    assert torch.equal(stats._replace(target_mass=found).expected, stats.counts + found)
    few = target_mass(source(stores["float32"]), target, max_tokens=50)
    assert 50 <= few.sum() < 50 + max(len(each.input_ids) for each in ROWS)
