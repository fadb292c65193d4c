"""Batches: which documents an optimizer step trains on, packed into micro-batches, from the cache or the live target.

    epoch e     a permutation of the rows, drawn from (seed, e)
    step        the next documents of the permutation while they fit into `batch_tokens`; at least one
    micro-batch documents of the step side by side on one token axis, at most `pack_tokens`; at least one document

`batch_tokens` is the one knob for the size of a step: it is global, and neither ranks nor micro-batches change which
documents a step holds. A document is never split, and one that is longer than the budget is a step of its own. For
steps of about four answers, give four times their mean length. Everything follows from (seed, step), so resuming needs
no state.

Shapes: T packed tokens, D target width, A aux layers, V target vocabulary.
"""

from __future__ import annotations

import hashlib
import heapq
import queue
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, count
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

from draftsmith.data.capture import CaptureConfig, check_needs, check_rows, states_giver, states_of
from draftsmith.data.chat import ChatConfig, Row, Source
from draftsmith.data.regenerate import RegenerateConfig
from draftsmith.data.shards import DTYPES, FeatureStore, StoredRow, num_labels
from draftsmith.models.draft import Batch, Needs, TokenStats
from draftsmith.models.target import Target

T = TypeVar("T")


class DataConfig(BaseModel):
    """The recipe's `data:` section: which chats, how they become rows, and where target states come from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: tuple[Source, ...] = Field(min_length=1)
    """Chats to train on: one source or a list, whose rows are joined in this order."""
    evaluation: dict[str, Source] = {}
    """Chats that acceptance is measured on, by the name results carry: {heldout: ..., newwording: ...}."""
    chat: ChatConfig = ChatConfig()
    regenerate: RegenerateConfig | None = None
    """How the target answers the prompts anew; None = train on the answers in the chats."""
    capture: CaptureConfig = CaptureConfig()
    source: Literal["cache", "live"] = "cache"
    """Where states come from: captured once to disk, or the target runs beside training. The same numbers; live saves
    the disk, the cache saves running the target again in every epoch."""
    max_len: int = Field(default=2048, ge=2)
    """Tokens of a row; longer ones are cut. Answers to common prompts are shorter."""
    min_supervised: int = Field(default=1, ge=1)
    """Supervised tokens that a row must have to be kept."""

    @field_validator("train", mode="before")
    @classmethod
    def _one_source(cls, value: Any) -> Any:
        return value if isinstance(value, (list, tuple)) else [value]


class LiveRows:
    """Rows whose states the target, or a server, computes when they are read; the same numbers as from a FeatureStore.

    The states go through the cache's dtype (data.capture.dtype) and stay on the target's device.
    """

    def __init__(self, rows: Sequence[Row], target: Target, needs: Needs, config: CaptureConfig):
        check_needs(target, needs)
        check_rows(rows, target)
        self.rows, self.needs, self.config = rows, needs, config
        self.giver = states_giver(target, needs, config)
        self.runs_ahead = config.server is not None  # the target in this process competes with training for its device
        self.lengths = [len(row.input_ids) for row in rows]
        self.labels = [num_labels(row.loss_mask) for row in rows]
        self.aux_layers = needs.aux_layers
        self.has_last_hidden = needs.last_hidden
        self.hidden_size = target.spec.hidden_size
        self.kv_shapes = {k: target.kv_shape(k) for k in needs.target_kv_layers}
        self.dtype = DTYPES[config.dtype]
        self.device = target.device

    def read(self, indices: Sequence[int]) -> list[StoredRow]:
        chosen = [self.rows[i] for i in indices]
        return states_of(chosen, self.giver, self.needs, self.config, "live target", self.device) if chosen else []


class BatchSource:
    """The batches of a training run: `step(i, rank, world)` gives a rank's micro-batches of optimizer step i.

    data: a FeatureStore, or rows, whose states then come from `target`.
    seed: of the order. batch_tokens: most tokens of a step, over all ranks. pack_tokens: most of a micro-batch.
    Rows in which a draft can learn to predict no token (shards.num_labels) are left out: `num_rows` are kept,
    `num_dropped` are not.
    """

    def __init__(
        self,
        data: FeatureStore | Sequence[Row],
        target: Target | None,
        needs: Needs,
        seed: int,
        batch_tokens: int,
        pack_tokens: int,
        config: CaptureConfig | None = None,
    ):
        self.data = open_rows(data, target, needs, config or CaptureConfig())
        self.seed, self.batch_tokens, self.pack_tokens = seed, batch_tokens, pack_tokens
        self.kept = [i for i, num in enumerate(self.data.labels) if num]
        self.num_rows = len(self.kept)
        self.num_dropped = len(self.data.labels) - self.num_rows
        self.num_tokens = sum(self.data.lengths[i] for i in self.kept)
        if not self.kept:
            raise ValueError(
                f"0 trainable tokens in {len(self.data.labels)} samples: none has two assistant tokens in a row; look "
                "at the rows with `draftsmith inspect RECIPE`"
            )
        self._first_steps = [0]  # of each epoch whose length is known, and of the one after it
        self._plans: dict[int, list[list[int]]] = {}
        self._lock = threading.Lock()

    # -- order ---------------------------------------------------------------------------------------------------
    @property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch. Others may differ by a few, as documents fall together differently."""
        return self.num_steps(1)

    def num_steps(self, epochs: float) -> int:
        """Steps of the first `epochs` epochs, at least 1; a part of an epoch counts by its share of steps."""
        whole = int(epochs)
        first, after = self._first_step(whole), self._first_step(whole + 1) if epochs > whole else 0
        return max(1, first + round((epochs - whole) * (after - first)) if epochs > whole else first)

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to; no step holds documents of two."""
        return self._find(step)[0]

    def documents(self, step: int) -> list[int]:
        """Indices into the data of the documents of a step, in stream order: a function of (seed, step)."""
        epoch, first = self._find(step)
        return self._plan(epoch)[step - first]

    def _find(self, step: int) -> tuple[int, int]:
        """(epoch, its first step) of a step."""
        assert step >= 0, f"step {step}"
        epoch = 0
        while self._first_step(epoch + 1) <= step:
            epoch += 1
        return epoch, self._first_step(epoch)

    def _first_step(self, epoch: int) -> int:
        while len(self._first_steps) <= epoch:
            last = len(self._first_steps) - 1
            following = self._first_steps[last] + len(self._plan(last))
            with self._lock:  # the prefetching thread and the loop may both come here
                if len(self._first_steps) == last + 1:
                    self._first_steps.append(following)
        return self._first_steps[epoch]

    def _plan(self, epoch: int) -> list[list[int]]:
        """The documents of every step of an epoch."""
        with self._lock:
            if epoch not in self._plans:
                if len(self._plans) >= 2:
                    self._plans.pop(min(self._plans))
                order = [self.kept[i] for i in permutation(len(self.kept), self.seed, epoch)]
                lengths = [self.data.lengths[i] for i in order]
                limits = cut(lengths, self.batch_tokens)
                self._plans[epoch] = [order[a:b] for a, b in zip(limits[:-1], limits[1:], strict=True)]
            return self._plans[epoch]

    # -- batches -------------------------------------------------------------------------------------------------
    def step(self, step: int, rank: int = 0, world: int = 1) -> list[Batch]:
        """This rank's micro-batches of an optimizer step, the same number on every rank.

        Over all ranks they hold each document of the step once. Where a step has fewer documents than there are
        ranks, the others get an empty batch: no documents, right widths and dtypes.
        """
        documents = self.documents(step)
        bins = fill_bins([self.data.lengths[i] for i in documents], self.pack_tokens, world)[rank::world]
        rows = self.data.read([documents[place] for each in bins for place in each])  # one read a step
        batches, start = [], 0
        for each in bins:
            batches.append(pack(rows[start : start + len(each)], self.data, number("draw", self.seed, step)))
            start += len(each)
        return batches

    def steps(self, first: int, rank: int = 0, world: int = 1, ahead: int = 2) -> Prefetch[list[Batch]]:
        """The micro-batches of steps first, first + 1, ... without end, loaded `ahead` of their use by a thread."""
        pin = self.data.device.type == "cpu" and torch.cuda.is_available()

        def load() -> Iterator[list[Batch]]:
            for i in count(first):
                batches = self.step(i, rank, world)
                yield [pinned(batch) for batch in batches] if pin else batches

        return Prefetch(load, ahead)

    def every_row(self) -> Iterator[Batch]:
        """All kept rows once, in stored order, in batches of at most pack_tokens: for evaluation."""
        limits = cut([self.data.lengths[i] for i in self.kept], self.pack_tokens)
        for a, b in zip(limits[:-1], limits[1:], strict=True):
            yield pack(self.data.read(self.kept[a:b]), self.data)


def open_rows(
    data: FeatureStore | Sequence[Row], target: Target | None, needs: Needs, config: CaptureConfig
) -> FeatureStore | LiveRows:
    """The reader for `data`, once it is known to give what the draft needs."""
    if not isinstance(data, FeatureStore):
        if target is None:
            raise ValueError("rows without states need a target that computes them (data.source: live)")
        return LiveRows(data, target, needs, config)
    for words, have, want in (
        ("aux layers", list(data.aux_layers), list(needs.aux_layers)),
        ("last hidden", data.has_last_hidden, needs.last_hidden),
        ("keys and values of layers", list(data.kv_shapes), list(needs.target_kv_layers)),
    ):
        if have != want:
            raise ValueError(f"{data.folder}: {words} {have} in the cache, the draft needs {want}; capture again")
    return data


def permutation(num: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(num), drawn from (seed, epoch)."""
    generator = torch.Generator().manual_seed(number("order", seed, epoch))
    return torch.randperm(num, generator=generator).tolist()


def number(purpose: str, seed: int, index: int) -> int:
    """A seed of 56 bits that follows from its arguments."""
    digest = hashlib.sha256(f"{purpose} {seed} {index}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def cut(lengths: Sequence[int], budget: int) -> list[int]:
    """Limits of consecutive groups of at most `budget` tokens, or of one longer document: [0, ..., len(lengths)]."""
    ends = list(accumulate(lengths))
    limits = [0]
    while limits[-1] < len(ends):
        start = limits[-1]
        before = ends[start - 1] if start else 0
        limits.append(max(start + 1, bisect_right(ends, before + budget)))
    return limits


def fill_bins(lengths: Sequence[int], pack_tokens: int, world: int) -> list[list[int]]:
    """Spread documents over micro-batches: a multiple of `world` bins, as evenly filled as longest-first makes them.

    Returns the documents' places in each bin, ascending. A bin holds at most pack_tokens, or one longer document; bins
    are empty only where there are fewer documents than bins.
    """
    least = min(-(-sum(lengths) // pack_tokens), len(lengths))
    num_bins = world * max(1, -(-least // world))
    longest_first = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    while True:
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        loads = [(0, b) for b in range(num_bins)]
        for place in longest_first:
            load, b = loads[0]
            bins[b].append(place)
            heapq.heapreplace(loads, (load + lengths[place], b))
        if all(len(bins[b]) <= 1 or load <= pack_tokens for load, b in loads):
            return [sorted(each) for each in bins]
        num_bins += world


def pack(rows: Sequence[StoredRow], data: FeatureStore | LiveRows, seed: int = 0) -> Batch:
    """Rows side by side on one token axis, kept apart by `bounds`; no rows give an empty batch of the same widths."""
    lengths = [len(row.input_ids) for row in rows]
    device, width = data.device, data.hidden_size

    def join(parts: list[Tensor], empty_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.cat(parts) if parts else torch.empty(empty_shape, dtype=dtype, device=device)

    features = [row.features for row in rows if row.features is not None]
    last_hidden = [row.last_hidden for row in rows if row.last_hidden is not None]
    num_features = len(data.aux_layers) * width

    def kv(layer: int, part: int) -> Tensor:
        heads, head_dim = data.kv_shapes[layer]
        joined = join([row.target_kv[layer][part] for row in rows], (0, heads, head_dim), data.dtype)
        return joined.transpose(0, 1)  # [Hkv, T, E]

    return Batch(
        input_ids=join([row.input_ids for row in rows], (0,), torch.int64),
        loss_mask=join([row.loss_mask for row in rows], (0,), torch.bool),
        positions=join([torch.arange(n, device=device) for n in lengths], (0,), torch.int64),
        bounds=(0, *accumulate(lengths)),
        features=join(features, (0, num_features), data.dtype) if data.aux_layers else None,
        last_hidden=join(last_hidden, (0, width), data.dtype) if data.has_last_hidden else None,
        target_kv={layer: (kv(layer, 0), kv(layer, 1)) for layer in data.kv_shapes},
        row_ids=tuple(row.row_id for row in rows),
        seed=seed,
    )


def pinned(batch: Batch) -> Batch:
    """The batch in page-locked memory, from where a GPU copies while it computes."""
    for name in ("input_ids", "loss_mask", "positions", "features", "last_hidden"):
        tensor = getattr(batch, name)
        if tensor is not None:
            setattr(batch, name, tensor.pin_memory())
    batch.target_kv = {layer: (k.pin_memory(), v.pin_memory()) for layer, (k, v) in batch.target_kv.items()}
    return batch


class Prefetch(Generic[T]):
    """An iterator whose items a background thread makes ahead of time.

    At most `ahead` items wait. An error in the thread is raised by the `next` that would have given the item. Use it
    in a `with` block, or call `close`: then the thread ends, also when items are left.
    """

    def __init__(self, make: Callable[[], Iterable[T]], ahead: int = 2):
        self._queue: queue.Queue[tuple[str, T | BaseException | None]] = queue.Queue(max(1, ahead))
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(make,), name="prefetch", daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[], Iterable[T]]) -> None:
        try:
            for item in make():
                if not self._put(("item", item)):
                    return
            self._put(("end", None))
        except BaseException as error:  # handed to the consumer, which raises it
            self._put(("error", error))

    def _put(self, message: tuple[str, T | BaseException | None]) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(message, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Prefetch[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        kind, value = self._queue.get()
        if kind == "item":
            return value  # type: ignore[return-value]
        self.close()
        if isinstance(value, BaseException):
            raise value
        raise StopIteration

    def close(self) -> None:
        """End the thread and forget what it made."""
        self._ended = True
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ahead:
    """A BatchSource whose next steps are loaded while the current one trains; `step` gives what the source's would.

    Reading a cache and asking a server run ahead; the live target in this process competes with training for the same
    device. Use it in a `with`.
    """

    def __init__(self, source: BatchSource, ahead: int = 2):
        self.source, self.ahead = source, ahead
        self._next: tuple[int, int, int] | None = None
        self._steps: Prefetch[list[Batch]] | None = None

    def step(self, step: int, rank: int = 0, world: int = 1) -> list[Batch]:
        if isinstance(self.source.data, LiveRows) and not self.source.data.runs_ahead:
            return self.source.step(step, rank, world)
        if self._steps is None or self._next != (step, rank, world):  # the first call, or out of order
            self.close()
            self._steps = self.source.steps(step, rank, world, self.ahead)
        self._next = None
        batches = next(self._steps)
        self._next = (step + 1, rank, world)
        return batches

    def close(self) -> None:
        """End the thread; a later `step` starts another."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@torch.no_grad()
def target_mass(source: BatchSource, target: Target, max_tokens: int = 32768) -> Tensor:
    """[V] float64: the target's probability of each token, summed over supervised positions of the rows.

    At most max_tokens positions are read, in an order that the source's seed draws.
    """
    mass = torch.zeros(target.spec.vocab_size, dtype=torch.float64, device=target.device)
    seen = 0
    for i in permutation(len(source.kept), source.seed, 0):
        [row] = source.data.read([source.kept[i]])
        assert row.last_hidden is not None, "the source was made for a draft that reads the last hidden"
        before = row.loss_mask[1:].nonzero()[:, 0]  # the rows whose next token is supervised
        logits = target.logits(row.last_hidden[before.to(row.last_hidden.device)].to(target.device))
        mass += logits.float().softmax(-1).sum(0)
        seen += len(before)
        if seen >= max_tokens:
            break
    return mass.cpu()


def token_stats(rows: Iterable[Row], vocab_size: int) -> TokenStats:
    """How often each token, and each (previous, token) pair, is supervised in the rows. Pairs stay within a row."""
    rows = list(rows)
    ids = [np.asarray(row.input_ids, np.int64) for row in rows]
    if not ids:
        raise ValueError("no rows to count tokens in")
    tokens = torch.from_numpy(np.concatenate(ids))
    mask = torch.from_numpy(np.concatenate([np.asarray(row.loss_mask, bool) for row in rows]))
    if int(tokens.max()) >= vocab_size:
        raise ValueError(f"token id {int(tokens.max())} in the rows, the target's vocabulary has {vocab_size} ids")
    counts = torch.bincount(tokens[mask], minlength=vocab_size)
    has_previous = mask.clone()
    has_previous[torch.tensor([0, *accumulate(len(x) for x in ids)][:-1])] = False
    places = has_previous.nonzero()[:, 0]
    pairs, bigram_counts = torch.unique(tokens[places - 1] * vocab_size + tokens[places], return_counts=True)
    return TokenStats(counts, torch.stack([pairs // vocab_size, pairs % vocab_size], 1), bigram_counts)
