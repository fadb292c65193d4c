"""The target's key/value cache, with exact rollback.

Every row owns a fixed stretch of columns and its own length; new keys are written behind that length. Sliding layers
keep all columns too and are masked by their window. So taking back rejected tokens means not counting them:

    columns   0 1 2 3 4 5 6          forward writes columns 3, 4, 5; nothing counts yet
    row 0     k k k|n n n            advance([2]) accepts two of them
    row 0     k k k k k|             the next forward overwrites column 5

Gated delta layers (Qwen3-Next, Qwen3.5) keep one running state a row instead of columns, out of which a token cannot be
taken. HybridCache keeps the state from before a pass and what went into the layer during it; `advance` then replays
the tokens that stay. Only these layers run again, not their layers' MLPs, and not at all where every token stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache


class TargetCache(Cache):
    """Keys and values of B rows of at most max_len tokens, for one target.

    lengths: [B] int64 on the device, the tokens that count; `host_lengths` is the same as a list. Forward passes never
    change them: `advance` does, once it is known which of the written tokens stay.
    """

    def __init__(self, batch_size: int, max_len: int, num_layers: int, device: torch.device):
        super().__init__(layers=[])
        self.max_len = max_len
        self.num_layers = num_layers
        self.device = device
        self.host_lengths = [0] * batch_size
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._keys: list[Tensor | None] = [None] * num_layers  # [B at the start, Hkv, max_len + 1, E]
        self._values: list[Tensor | None] = [None] * num_layers
        self._place: tuple[int, int, Tensor | None] = (0, 0, None)

    # -- one forward pass ------------------------------------------------------------------------------------------
    def begin(self, num_new: int, lengths: Sequence[int] | None = None) -> None:
        """Say where the next forward pass writes: num_new columns behind each row's length, `lengths` of them real.

        Padded tokens of a row that is nearly full go to a spare last column that no real token ever sees.
        """
        if lengths is None:
            fullest = max(self.host_lengths, default=0) + num_new
        else:
            fullest = max((a + b for a, b in zip(self.host_lengths, lengths, strict=True)), default=0)
        if fullest > self.max_len:
            raise ValueError(
                f"the cache holds {self.max_len} tokens per row, this pass needs {fullest} "
                f"(longest row {max(self.host_lengths)}, {num_new} new); ask new_cache for a larger max_len"
            )
        start = self.host_lengths[0] if self.host_lengths else 0
        end = min(max(self.host_lengths, default=0) + num_new, self.max_len + 1)
        if self.uniform and start + num_new == end:
            self._place = (start, end, None)  # all rows alike: a plain slice
            return
        columns = self.lengths[:, None] + torch.arange(num_new, device=self.device)
        self._place = (start, end, columns.clamp_(max=self.max_len))  # [B, N]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the forward pass announced by `begin`."""
        yield

    @property
    def uniform(self) -> bool:
        """Whether all rows have the same length."""
        return len(set(self.host_lengths)) <= 1

    @property
    def key_len(self) -> int:
        """Columns that the pass announced by `begin` sees."""
        return self._place[1]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write [B, Hkv, N, E] behind each row's length; returns views [B, Hkv, key_len, E]."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if keys is None or values is None:
            keys = self._keys[layer_idx] = self._room(key_states)
            values = self._values[layer_idx] = self._room(value_states)
        batch_size = key_states.shape[0]
        start, end, columns = self._place
        keys, values = keys[:batch_size], values[:batch_size]
        if columns is None:
            keys[:, :, start:end] = key_states
            values[:, :, start:end] = value_states
        else:
            rows = torch.arange(batch_size, device=columns.device)[:, None]
            keys[rows, :, columns] = key_states.transpose(1, 2)  # indexed dimensions come first: [B, N, Hkv, E]
            values[rows, :, columns] = value_states.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def _room(self, states: Tensor) -> Tensor:
        """Zeros, because a masked NaN would still spoil the weighted sum of values."""
        batch_size, num_heads, _, width = states.shape
        return states.new_zeros(batch_size, num_heads, self.max_len + 1, width)

    # -- between passes --------------------------------------------------------------------------------------------
    def advance(self, num: Tensor | Sequence[int]) -> None:
        """Count num[b] >= 0 of the tokens written last in row b; what was written behind them is forgotten."""
        steps = num.tolist() if isinstance(num, Tensor) else list(num)
        self._count([a + b for a, b in zip(self.host_lengths, steps, strict=True)])

    def truncate(self, lengths: Tensor | Sequence[int]) -> None:
        """Cut every row to lengths[b], at most what it holds."""
        wanted = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
        assert all(new <= old for new, old in zip(wanted, self.host_lengths, strict=True)), "rows cannot grow by a cut"
        self._count(wanted)

    def _count(self, lengths: list[int]) -> None:
        assert all(0 <= n <= self.max_len for n in lengths), f"lengths {lengths} outside 0..{self.max_len}"
        self.host_lengths = lengths
        self.lengths = torch.tensor(lengths, dtype=torch.int64, device=self.device)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the given rows, in the given order. Rows that stay where they are cost nothing."""
        moved = [(to, source) for to, source in enumerate(rows) if to != source]
        if moved:
            to = torch.tensor([t for t, _ in moved], device=self.device)
            source = torch.tensor([s for _, s in moved], device=self.device)
            longest = max(self.host_lengths[s] for _, s in moved)
            for buffer in (*self._keys, *self._values):
                if buffer is not None:
                    buffer[to, :, :longest] = buffer[source, :, :longest]
        self._count([self.host_lengths[s] for s in rows])

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Read-only views [B, Hkv, longest row, E] of one layer; columns past a row's length are not its own."""
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None, f"layer {layer} has not run yet"
        assert values is not None, f"layer {layer} has not run yet"
        num, longest = len(self.host_lengths), max(self.host_lengths, default=0)
        return keys[:num, :, :longest], values[:num, :, :longest]

    # -- what transformers asks a cache (5.8 to 5.24) ---------------------------------------------------------------
    def __len__(self) -> int:
        return self.num_layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.host_lengths, default=0)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.key_len, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.max_len

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.max_len

    @property
    def batch_size(self) -> int:
        return len(self.host_lengths)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self._keys[0] is not None

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self.num_layers


class PassCache(TargetCache):
    """Stands in for a cache in one pass over whole rows: keys and values of the `wanted` layers are held as they come."""

    def __init__(self, batch_size: int, num_new: int, num_layers: int, device: torch.device, wanted: Sequence[int]):
        super().__init__(batch_size, num_new, num_layers, device)
        self.wanted = frozenset(wanted)
        self.begin(num_new)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        if layer_idx in self.wanted:
            self._keys[layer_idx], self._values[layer_idx] = key_states, value_states
        return key_states, value_states


class State(NamedTuple):
    """Running state of one gated delta layer. conv: [B, C, kernel], its last inputs; recurrent: [B, H, Ek, Ev]."""

    conv: Tensor
    recurrent: Tensor

    def of(self, rows: Tensor) -> State:
        return State(self.conv[rows], self.recurrent[rows])


class HybridCache(TargetCache):
    """A TargetCache for targets with gated delta layers, which roll back by snapshot and replay.

    mixers: {layer: its gated delta module}. A pass leaves the committed states alone: what it computes stands in
    `_behind` until `advance` says how many tokens stay.
    """

    def __init__(
        self, batch_size: int, max_len: int, num_layers: int, device: torch.device, mixers: Mapping[int, nn.Module]
    ):
        super().__init__(batch_size, max_len, num_layers, device)
        self.mixers = mixers
        self.num_replayed = 0  # rows of gated delta layers that were computed a second time
        self._committed: dict[int, State] = {}  # absent = nothing yet, a state of zeros
        self._behind: dict[int, State] = {}
        self._inputs: dict[int, Tensor] = {}  # [B, N, D] of the last pass
        self._num_new = 0

    def begin(self, num_new: int, lengths: Sequence[int] | None = None) -> None:
        super().begin(num_new, lengths)
        self._behind, self._inputs, self._num_new = {}, {}, num_new

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what goes into every gated delta layer."""

        def listen(layer: int) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
                self._inputs[layer] = args[0] if args else kwargs["hidden_states"]

            return hook

        handles = [m.register_forward_pre_hook(listen(i), with_kwargs=True) for i, m in self.mixers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def advance(self, num: Tensor | Sequence[int]) -> None:
        steps = num.tolist() if isinstance(num, Tensor) else list(num)
        super().advance(steps)
        assert max(steps, default=0) <= self._num_new, f"{steps} tokens stay of a pass over {self._num_new}"
        if all(n == self._num_new for n in steps):
            self._committed |= self._behind
        else:
            for layer in self.mixers:
                self._committed[layer] = self._replayed(layer, steps)
        self._behind, self._inputs, self._num_new = {}, {}, 0

    def _replayed(self, layer: int, steps: list[int]) -> State:
        """The layer's state after the first steps[b] tokens of row b of the last pass."""
        behind = self._behind[layer]
        before = self._committed.get(layer, State(torch.zeros_like(behind.conv), torch.zeros_like(behind.recurrent)))
        conv, recurrent = before.conv.clone(), before.recurrent.clone()
        for n in sorted(set(steps) - {0}):
            rows = torch.tensor([b for b, m in enumerate(steps) if m == n], device=self.device)
            after = behind.of(rows)
            if n < self._num_new:
                again = _Replay(before.of(rows))
                self.mixers[layer](hidden_states=self._inputs[layer][rows, :n], cache=again, attention_mask=None)
                assert again.conv is not None
                assert again.recurrent is not None
                after = State(again.conv, again.recurrent)
                self.num_replayed += len(rows) * n
            conv[rows], recurrent[rows] = after
        return State(conv, recurrent)

    def truncate(self, lengths: Tensor | Sequence[int]) -> None:
        wanted = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
        if wanted != self.host_lengths:
            raise ValueError(
                f"rows of {self.host_lengths} tokens cannot be cut to {wanted}: their gated delta layers keep one running "
                f"state; take back tokens of the last pass with advance"
            )

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.device)
        self._committed = {layer: state.of(index) for layer, state in self._committed.items()}
        self._behind, self._inputs, self._num_new = {}, {}, 0

    # -- what transformers' gated delta layers ask a cache ---------------------------------------------------------
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        found = self._committed.get(layer_idx)
        return None if found is None else found.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        found = self._committed.get(layer_idx)
        return None if found is None else found.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # so that the layer does not update its convolution in place

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **_: Any
    ) -> Tensor:
        """Inputs [B, C, N] of the convolution; returns them behind the last ones."""
        full = joined(self.get_conv_state(layer_idx), conv_states, conv_kernel_size)
        self._behind[layer_idx] = State(full[..., -conv_kernel_size:], full)
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self._behind[layer_idx] = State(self._behind[layer_idx].conv, recurrent_states)
        return recurrent_states


class _Replay:
    """Stands in for the cache while one gated delta layer runs again from a given state."""

    def __init__(self, state: State):
        self.conv: Tensor | None = state.conv
        self.recurrent: Tensor | None = state.recurrent

    def get_conv_state(self, *_: Any, **__: Any) -> Tensor | None:
        return self.conv

    def get_recurrent_state(self, *_: Any, **__: Any) -> Tensor | None:
        return self.recurrent

    def is_recording_past(self, *_: Any) -> bool:
        return True

    def update_conv_state(self, conv_states: Tensor, *_: Any, conv_kernel_size: int = 0, **__: Any) -> Tensor:
        full = joined(self.conv, conv_states, conv_kernel_size)
        self.conv = full[..., -conv_kernel_size:]
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        self.recurrent = recurrent_states
        return recurrent_states


def joined(before: Tensor | None, new: Tensor, kernel: int) -> Tensor:
    """[B, C, kernel + N]: the last inputs of a convolution, zeros where there were none, and the new ones."""
    if before is None:
        before = new.new_zeros(*new.shape[:2], kernel)
    return torch.cat([before, new], -1)
