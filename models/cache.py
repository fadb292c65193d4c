"""The target's key/value cache, with exact rollback.

Every row owns a fixed stretch of columns and its own length; new keys are written behind that length. Sliding layers
keep all columns too and are masked by their window. So taking back rejected tokens means not counting them:

    columns   0 1 2 3 4 5 6          forward writes columns 3, 4, 5; nothing counts yet
    row 0     k k k|n n n            advance([2]) accepts two of them
    row 0     k k k k k|             the next forward overwrites column 5
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
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
