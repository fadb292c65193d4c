"""Capture: run the target over token rows and keep its states in a feature cache (data/shards.py).

The rows are cut into shards by their lengths alone, and rank r of n makes shards r, r + n, r + 2n, ... So the files do
not depend on the number of ranks, nor on where an earlier capture was killed.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftsmith.data.chat import Row
from draftsmith.data.server_capture import ServerStates
from draftsmith.data.shards import (
    CODEC,
    DTYPES,
    FORMAT,
    NORM,
    FeatureStore,
    ShardWriter,
    StoredRow,
    Verify,
    check_states,
    disk_full,
    shard_name,
)
from draftsmith.models.draft import Needs
from draftsmith.models.target import Target

CPU = torch.device("cpu")
_SERVER_ONLY = ("shared_path", "model", "concurrency", "retries", "backoff_s", "timeout_s", "api_key_env")


class CaptureConfig(BaseModel):
    """How the target's states are computed and stored (`data.capture:`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the stored states. bfloat16 is what targets run in, and half the disk."""
    shard_tokens: int = Field(default=16384, ge=1)
    """Tokens of one shard: what is lost when a capture is killed. 0.5 GiB with three layers of an 8B target."""
    batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one pass of the target, padding included. None = one row a pass: no padding, and states that do not
    depend on which rows run together, so `cache` and `live` agree bit for bit. On a CPU core that is also the fastest
    (135M target, rows of 60-200 tokens: 630 tok/s, against 550 with 2,048 and 510 with 4,096 tokens a pass). On a GPU
    with short rows a budget may be faster; then cache and live agree up to rounding."""
    verify: Verify = "full"
    """How shards are checked when a cache is opened: "full" hashes them, "size" only looks at their sizes."""
    server: str | None = None
    """URL of a vLLM server that computes the states (http://host:8000); None = the target in this process. Its command:
    `draftsmith serve RECIPE --target-only`. The same weights give the same states up to rounding, so no stage depends
    on who is asked."""
    shared_path: str | None = None
    """Folder that the server leaves its files in, as seen from here; they are removed once read. /dev/shm on one node."""
    model: str | None = None
    """Name the server knows the target by; None = target.name."""
    concurrency: int = Field(default=32, ge=1)
    """Requests under way, and so the most files in shared_path; enough to keep one server's batch full."""
    retries: int = Field(default=8, ge=0)
    """Per request, on overload, connection faults and files that do not come; about 4 minutes in all."""
    backoff_s: float = Field(default=1.0, gt=0)
    """Seconds before the first retry; doubles each time, at most 60."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds one request, and then its file, may take."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key; None = no key is sent."""

    @model_validator(mode="after")
    def _no_idle_option(self) -> CaptureConfig:
        fields = type(self).model_fields
        if self.server is None:
            for name in _SERVER_ONLY:
                if (value := getattr(self, name)) != fields[name].default:
                    raise ValueError(f"{name} {value!r} has no effect with server unset; remove it")
            return self
        if not self.server.startswith(("http://", "https://")):
            raise ValueError(f"server must be a URL such as http://localhost:8000, got {self.server!r}")
        if self.batch_tokens is not None:
            raise ValueError(f"batch_tokens {self.batch_tokens} has no effect with a server, which batches as it likes")
        if self.shared_path is None:
            raise ValueError(
                "server needs shared_path: the folder that the server leaves its files in, as seen from here, e.g. "
                "/dev/shm/states"
            )
        return self


def describe(target: Target, needs: Needs, config: CaptureConfig, rows: Sequence[Row]) -> dict[str, Any]:
    """Everything that determines a feature cache: the stage's key, its manifest's header, what a reader expects."""
    spec = target.spec
    return {
        "format": FORMAT,
        "target": {
            "name": spec.name,
            "revision": spec.revision,
            "config_sha256": spec.config_sha256,
            "weights_fingerprint": None if target.config.ends_only else weights_fingerprint(target.model),
            "dtype": str(target.dtype).removeprefix("torch."),
            "hidden_size": spec.hidden_size,
        },
        "tokenizer_sha256": spec.tokenizer_sha256,
        "aux_layers": list(needs.aux_layers),
        "last_hidden": needs.last_hidden,
        "norm": NORM,
        "dtype": config.dtype,
        "codec": CODEC,
        "shard_tokens": config.shard_tokens,
        "batch_tokens": config.batch_tokens,
        "rows_sha256": checksum(rows),
    } | ({"target_kv": [[k, *target.kv_shape(k)] for k in needs.target_kv_layers]} if needs.target_kv_layers else {})


def capture(
    rows: Sequence[Row],
    target: Target,
    needs: Needs,
    folder: Path,
    config: CaptureConfig,
    rank: int = 0,
    world: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureStore | None:
    """Capture this rank's share of the rows into `folder`, and open the cache once every shard is there.

    Running it again goes on where it stopped, makes damaged shards anew, and does nothing when all is well. A folder
    that was made under other settings is refused. Returns None while another rank still has shards to write: wait for
    all ranks, then use FeatureStore.open.
    progress: called with (tokens done, tokens in all) of this rank after each shard.
    """
    folder = Path(folder)
    assert 0 <= rank < world, f"rank {rank} of {world}"
    check_needs(target, needs)
    check_rows(rows, target)
    header = describe(target, needs, config, rows)
    shards = plan_shards([len(row.input_ids) for row in rows], config.shard_tokens)
    writer = ShardWriter(folder, header, len(shards), rank)
    giver = states_giver(target, needs, config)

    mine = [index for index in range(len(shards)) if index % world == rank]
    sizes = {index: sum(len(rows[i].input_ids) for i in shards[index]) for index in mine}
    missing = [index for index in mine if not writer.has(index, config.verify)]
    kv_width = sum(2 * math.prod(target.kv_shape(k)) for k in needs.target_kv_layers)
    check_room(folder, sum(sizes[index] for index in missing), needs, target.spec.hidden_size, config, kv_width)
    total = sum(sizes.values())
    done = total - sum(sizes[index] for index in missing)
    for index in missing:
        chosen = [rows[i] for i in shards[index]]
        writer.write(index, states_of(chosen, giver, needs, config, str(folder / shard_name(index))))
        done += sizes[index]
        if progress is not None:
            progress(done, total)
    return FeatureStore.open(folder, header, verify="size") if writer.finish() else None


def states_giver(target: Target, needs: Needs, config: CaptureConfig) -> Target | ServerStates:
    """Who computes the states: the target in this process, or the server that the config names."""
    return target if config.server is None else ServerStates(target, needs, config)


def states_of(
    rows: Sequence[Row],
    giver: Target | ServerStates,
    needs: Needs,
    config: CaptureConfig,
    where: str,
    device: torch.device = CPU,
) -> list[StoredRow]:
    """The rows with their target states, on `device`, in the cache's dtype. `where` stands in front of errors."""
    ids = [torch.tensor(row.input_ids, dtype=torch.int64) for row in rows]
    captured = giver.states(ids, needs, max_batch_tokens=config.batch_tokens or 1)
    dtype = DTYPES[config.dtype]
    stored = []
    for row, tokens, (features, last_hidden, target_kv) in zip(rows, ids, captured, strict=True):
        with_states = StoredRow(
            tokens.to(device),
            torch.tensor(row.loss_mask, dtype=torch.bool, device=device),
            None if features is None else features.to(device, dtype),
            None if last_hidden is None else last_hidden.to(device, dtype),
            row.id,
            {layer: (k.to(device, dtype), v.to(device, dtype)) for layer, (k, v) in target_kv.items()},
        )
        check_states(with_states, needs.aux_layers, giver.spec.hidden_size, where)
        stored.append(with_states)
    return stored


def plan_shards(lengths: Sequence[int], shard_tokens: int) -> list[range]:
    """Consecutive rows up to shard_tokens tokens a shard; a longer row is a shard of its own."""
    shards, start, size = [], 0, 0
    for i, length in enumerate(lengths):
        if i > start and size + length > shard_tokens:
            shards.append(range(start, i))
            start, size = i, 0
        size += length
    return [*shards, range(start, len(lengths))] if lengths else []


def check_needs(target: Target, needs: Needs) -> None:
    """Refuse what a cache does not hold, and layers that the target does not have."""
    if not needs.aux_layers and not needs.last_hidden:
        raise ValueError("this draft needs neither aux layers nor the last hidden state: there is nothing to capture")
    target.needs_ok(needs)


def check_rows(rows: Sequence[Row], target: Target) -> None:
    """Refuse rows that the target cannot read; the error names the row."""
    if not rows:
        raise ValueError("no rows to capture: all samples were dropped, or the data is empty")
    vocab_size, max_positions = target.spec.vocab_size, target.spec.max_positions
    for row in rows:
        num_tokens = len(row.input_ids)
        if num_tokens != len(row.loss_mask):
            raise ValueError(f"row {row.id!r}: {num_tokens} token ids but {len(row.loss_mask)} loss mask entries")
        if num_tokens == 0:
            raise ValueError(f"row {row.id!r}: no tokens")
        if num_tokens > max_positions:
            raise ValueError(
                f"row {row.id!r}: {num_tokens} tokens, the target reads {max_positions}; lower data.max_len"
            )
        if not 0 <= min(row.input_ids) <= max(row.input_ids) < vocab_size:
            bad = next(i for i in row.input_ids if not 0 <= i < vocab_size)
            raise ValueError(
                f"row {row.id!r}: token id {bad}, the target {target.spec.name} embeds {vocab_size} ids; "
                "tokenizer and model do not belong together"
            )


def check_room(
    folder: Path, num_tokens: int, needs: Needs, hidden_size: int, config: CaptureConfig, kv_width: int = 0
) -> None:
    """Refuse before any work a capture that cannot fit on the disk. kv_width: keys and values of a token, as numbers."""
    needed = num_tokens * token_bytes(needs, hidden_size, config, kv_width)
    if needed > shutil.disk_usage(folder).free:
        raise disk_full(folder / "shards", needed)


def token_bytes(needs: Needs, hidden_size: int, config: CaptureConfig, kv_width: int = 0) -> int:
    """Disk bytes of one token in a shard: states, id (int32) and loss mask."""
    numbers = (len(needs.aux_layers) + needs.last_hidden) * hidden_size + kv_width
    return numbers * DTYPES[config.dtype].itemsize + 5


def checksum(rows: Iterable[Row]) -> str:
    """sha256 over ids, token ids and loss masks of the rows, in order: the part of a stage's key that is data."""
    digest = hashlib.sha256()
    for row in rows:
        name = row.id.encode()
        digest.update(np.array([len(name), len(row.input_ids), len(row.loss_mask)], "<i8").tobytes() + name)
        digest.update(np.array(row.input_ids, "<i8").tobytes() + np.array(row.loss_mask, "<i1").tobytes())
    return digest.hexdigest()


def weights_fingerprint(model: torch.nn.Module) -> str:
    """A hash of 64 values of every parameter: tells a retrained target of the same name and config from the old one."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        values = parameter.detach().flatten()
        sample = values[:: max(1, len(values) // 64)][:64].to("cpu", torch.float32)
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()
