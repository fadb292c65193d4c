"""Target states from a vLLM server: for targets that do not fit beside training, or that a server runs faster.

    row ids -> POST /v1/completions, one token -> path of a file -> wait for its lock -> read -> remove -> verify

The server runs vLLM's `extract_hidden_states` with a hidden-states connector (`serve_command` prints its command). It
writes one file a request on a disk that both sides see: `hidden_states` [T, L, D], one column a layer, and `token_ids`
[T]. The columns are the draft's aux layers, ascending, and then layer N: the state after the last of N layers, in front
of the final norm, which the target's own norm turns into last hidden here. Layer ids are those of models/target.py.

At most `data.capture.concurrency` requests are under way, and a file is removed as soon as it is read; so no more files
than that lie on the disk, however slowly the rows are consumed.

Shapes: T tokens of a row, L layers asked for, D target width, A aux layers.
"""

from __future__ import annotations

import fcntl
import json
import shlex
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.data.regenerate import RegenerateConfig, ServerEngine, ServerError, as_finished
from draftsmith.models.draft import Needs
from draftsmith.models.export import extraction_config
from draftsmith.models.target import States, Target

if TYPE_CHECKING:
    from draftsmith.data.capture import CaptureConfig

CONNECTOR = "ExampleHiddenStatesConnector"  # vLLM's own; needs a GPU
PROBE_TOKENS = 32  # long enough that attention matters, short enough to cost nothing
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}
"""Largest |server - transformers| / |transformers| of a layer's states in the probe. Measured on the CPU (SmolLM2-135M,
30 layers, vLLM 0.32): 0 to 0.016 in bfloat16, where the nearest other layer is 0.17 or more away."""
APPEARS_S = 5.0  # seconds until a file that another machine wrote is seen through a network file system
SUFFIX, LOCK = ".safetensors", ".lock"
GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sent with every request: vLLM otherwise takes what the model's generation config says."""


# -- the server ------------------------------------------------------------------------------------------------------
def layer_ids(needs: Needs, num_layers: int) -> list[int]:
    """What a server must give for these needs, in column order: the aux layers, then N for last hidden."""
    if needs.target_kv_layers:
        raise ValueError(
            "data.capture.server: this draft reads keys and values of the target, which servers do not give; capture in "
            "process, without data.capture.server"
        )
    return [*needs.aux_layers, *([num_layers] if needs.last_hidden else [])]


def serve_command(
    target: Target,
    needs: Needs,
    config: CaptureConfig,
    max_len: int,
    connector: str = CONNECTOR,
    module: str | None = None,
) -> list[str]:
    """The command, word by word, of the server that gives what `needs` asks for.

    max_len: tokens of the longest row; a request takes one more. connector, module: a connector that is not vLLM's own
    and the module that holds it.
    """
    if config.server is None or config.shared_path is None:
        raise ValueError(
            "data.capture.server and data.capture.shared_path must say where the server listens and where it leaves its "
            "files, e.g. data.capture.server=http://localhost:8000 data.capture.shared_path=/dev/shm/states"
        )
    place = str(target.folder or target.config.name)
    address = urlsplit(config.server)
    port = address.port or (443 if address.scheme == "https" else 80)
    speculative = extraction_config(layer_ids(needs, target.num_layers))
    transfer: dict[str, Any] = {"kv_connector": connector, "kv_role": "kv_producer"}
    transfer |= {} if module is None else {"kv_connector_module_path": module}
    transfer |= {"kv_connector_extra_config": {"shared_storage_path": str(Path(config.shared_path).absolute())}}
    words = ["vllm", "serve", place, "--served-model-name", config.model or target.config.name, "--port", str(port)]
    words += [] if target.config.revision is None else ["--revision", target.config.revision]
    words += ["--dtype", str(target.dtype).removeprefix("torch.")]
    words += ["--max-model-len", str(min(max_len + 1, target.spec.max_positions)), "--no-enable-prefix-caching"]
    words += ["--speculative-config", json.dumps(speculative)]
    return [*words, "--kv-transfer-config", json.dumps(transfer)]


def shell(words: Sequence[str]) -> str:
    """The command as a line for a shell."""
    return shlex.join(words)


# -- the client ------------------------------------------------------------------------------------------------------
class Unwritten(Exception):
    """The server's file is not there or cannot be read; asking again may help."""


class Found(NamedTuple):
    """What came for one row: states [T, L, D], and the token the server chose after it."""

    states: Tensor
    following: int | None


class ServerStates:
    """Asks a server for states; `states` is what Target.states is, so either can stand behind a capture.

    target: gives spec, final norm and head; its layers only serve the probe, so `target.ends_only` is enough. Before the
    first rows, a probe prompt proves the server's layers: against the whole target where it is loaded, else as far as
    embedding and head can tell (see `probe`).
    """

    def __init__(self, target: Target, needs: Needs, config: CaptureConfig):
        assert config.server is not None
        assert config.shared_path is not None
        self.target, self.spec, self.config = target, target.spec, config
        self.folder = Path(config.shared_path).absolute()
        self.layers = layer_ids(needs, target.num_layers)
        asking = {name: getattr(config, name) for name in ("server", "model", "retries", "backoff_s", "timeout_s")}
        self.engine = ServerEngine(RegenerateConfig(**asking, api_key_env=config.api_key_env), target.config.name)
        self._probed = False
        self._lock = threading.Lock()

    def states(self, rows: Sequence[Tensor | Sequence[int]], needs: Needs, max_batch_tokens: int = 0) -> list[States]:
        """What `needs` asks for of every row, in the order given, on the CPU. max_batch_tokens: the server's business."""
        assert layer_ids(needs, self.target.num_layers) == self.layers
        if not rows:
            return []
        with self._lock:
            if not self._probed:
                self.probe()
                self._probed = True
        found: dict[int, States] = {}

        def work(item: list) -> list:
            place, ids = item
            return [place, self._split(self._ask(ids).states, needs)]

        items = ([i, torch.as_tensor(ids).tolist()] for i, ids in enumerate(rows))
        for place, states in as_finished(work, items, min(self.config.concurrency, len(rows))):
            found[place] = states
        return [found[i] for i in range(len(rows))]

    def _split(self, states: Tensor, needs: Needs) -> States:
        """[T, L, D] -> features [T, A*D], and last hidden [T, D] after the final norm."""
        num_aux = len(needs.aux_layers)
        features = states[:, :num_aux].flatten(1) if num_aux else None
        last_hidden = self.target.normed(states[:, num_aux].to(self.target.device)).cpu() if needs.last_hidden else None
        return States(features, last_hidden, {})

    # -- one request ---------------------------------------------------------------------------------------------
    def _ask(self, ids: list[int]) -> Found:
        """The states of one row; asks again when the server's file does not come."""
        if len(ids) >= self.spec.max_positions:
            raise ValueError(
                f"a row of {len(ids)} tokens: a server must also generate one, and {self.spec.name} has "
                f"{self.spec.max_positions} positions; lower data.max_len to {self.spec.max_positions - 1}"
            )
        body = {"model": self.engine.model, "prompt": ids, "max_tokens": 1, **GREEDY}
        body |= {"return_token_ids": True, "add_special_tokens": False}
        problem: Exception | None = None
        for attempt in range(self.config.retries + 1):
            if attempt:
                time.sleep(self.engine.delay(attempt))
            reply = self.engine.post(body)
            path = self._path(reply)
            try:
                tensors = read_states(path, self.config.timeout_s)
            except Unwritten as error:
                problem = error
                continue
            self._verify(tensors, ids, path)
            following = (reply.get("choices") or [{}])[0].get("token_ids") or [None]
            return Found(tensors["hidden_states"], following[0])
        raise ServerError(
            f"{self.engine.url}: no states after {self.config.retries + 1} attempts: {problem}; look at the server's log "
            "and at the room on that disk, then start the same command again: finished shards are kept"
        )

    def _path(self, reply: dict[str, Any]) -> Path:
        """Where the file lies as seen from here: the server's name for it, in our view of the shared folder."""
        named = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not named:
            raise ServerError(
                f"{self.engine.url}: the reply names no hidden_states_path ({', '.join(sorted(reply)) or 'empty'}); the "
                "server runs without hidden-states connector; start it with `draftsmith serve RECIPE --target-only`"
            )
        if not named.endswith(SUFFIX):  # it will be removed, so nothing else may be meant
            raise ServerError(
                f"{self.engine.url}: the reply names no file of states but {named!r}; look at its connector"
            )
        return self.folder / Path(named).name

    def _verify(self, tensors: dict[str, Tensor], ids: list[int], path: Path) -> None:
        """Refuse states of other tokens, of another number of layers, width or dtype."""
        states, seen = tensors.get("hidden_states"), tensors.get("token_ids")
        where = f"{self.engine.url}: {path.name}"
        if states is None or seen is None:
            raise ServerError(
                f"{where}: holds {sorted(tensors)}, wanted hidden_states and token_ids; check vLLM's version"
            )
        seen_ids = seen.tolist()
        if seen_ids != ids:
            at = next(
                (i for i, (a, b) in enumerate(zip(seen_ids, ids, strict=False)) if a != b), min(len(seen_ids), len(ids))
            )
            raise ServerError(
                f"{where}: {len(seen_ids)} token ids came, {len(ids)} were sent, and they differ from position {at} on "
                f"({seen_ids[at : at + 3]}, sent {ids[at : at + 3]}); start the server without prompt truncation, and "
                "let nobody else write into data.capture.shared_path"
            )
        want = (len(ids), len(self.layers), self.spec.hidden_size)
        if tuple(states.shape) != want:
            raise ServerError(
                f"{where}: states {list(states.shape)}, wanted {list(want)}: [tokens, layers {self.layers}, width]; start "
                "the server with `draftsmith serve RECIPE --target-only`, which knows the layers"
            )
        if states.dtype != self.target.dtype:
            raise ServerError(
                f"{where}: states in {states.dtype}, the target is {self.target.dtype}; give the server the same --dtype, "
                "or set target.dtype to the server's"
            )

    # -- are they the right layers? ------------------------------------------------------------------------------
    def probe(self) -> str:
        """Prove the server's layers on one prompt, and say how far.

        Where the whole target is loaded, every column must be nearest to its own layer among all of them and agree with
        it. Without the layers between, state 0 must be the embedding, and the head on the last column must choose the
        token the server chose; the order of aux layers between them is then as the server says.
        """
        ids = self._probe_ids()
        found = self._ask(ids)
        self._check_ends(ids, found)
        if self.target.config.ends_only:
            return "ends: the target's layers are not loaded, so aux layers in between were not compared"
        truth = self._truth(ids)  # [T, N + 1, D]; N after the final norm
        states = found.states.to(truth.device)
        tolerance = TOLERANCE[self.target.dtype]
        for column, layer in enumerate(self.layers):
            ours = states[:, column]
            if layer == self.target.num_layers:
                distances = {layer: distance(self.target.normed(ours), truth[:, layer])}
            else:
                distances = {k: distance(ours, truth[:, k]) for k in range(self.target.num_layers)}
            nearest = min(distances, key=lambda k: distances[k])
            if nearest != layer or distances[layer] > tolerance:
                raise ServerError(
                    f"{self.engine.url}: column {column} should be layer {layer}, but is off by {distances[layer]:.2g} "
                    f"(at most {tolerance:g}); the nearest is layer {nearest} ({distances[nearest]:.2g}). The server runs "
                    "other layers or other weights; start it with `draftsmith serve RECIPE --target-only`"
                )
        return "whole: every layer compared with transformers"

    def _check_ends(self, ids: list[int], found: Found) -> None:
        """State 0 is the scaled embedding; state N gives the token that the server chose."""
        if 0 in self.layers and not self.target.positions_learned:
            rows = self.target.embedding[torch.tensor(ids, device=self.target.device)] * self.spec.embedding_scale
            if (gap := distance(found.states[:, 0].to(rows.device), rows)) > TOLERANCE[self.target.dtype]:
                raise ServerError(
                    f"{self.engine.url}: column 0 should be the embedding, but is off by {gap:.2g}; the server runs other "
                    "layers or another target"
                )
        if self.layers[-1] == self.target.num_layers and found.following is not None:
            last = self.target.normed(found.states[-1, -1].to(self.target.device))
            logits = self.target.logits(last).float()
            short = float(logits.max() - logits[found.following])
            if short > 10 * TOLERANCE[self.target.dtype] * float(logits.std()):
                raise ServerError(
                    f"{self.engine.url}: after the final norm the last column chooses token {int(logits.argmax())}, the "
                    f"server chose {found.following}; the last column is not layer {self.target.num_layers}, or the server "
                    "runs other weights"
                )

    def _truth(self, ids: list[int]) -> Tensor:
        num_layers, width = self.target.num_layers, self.spec.hidden_size
        out = self.target.forward(torch.tensor([ids]), needs=Needs(aux_layers=tuple(range(num_layers))))
        assert out.features is not None
        between = out.features[0].unflatten(-1, (num_layers, width))
        return torch.cat([between, out.last_hidden[0, :, None]], 1)

    def _probe_ids(self) -> list[int]:
        """Ids spread over the vocabulary of the tokenizer, without its special tokens."""
        tokenizer = self.target.tokenizer
        special = set(tokenizer.all_special_ids)
        usual = [i for i in range(min(len(tokenizer), self.spec.vocab_size)) if i not in special]
        num = min(PROBE_TOKENS, self.spec.max_positions - 1)
        return [usual[(i * len(usual) // num + 7 * i) % len(usual)] for i in range(num)]


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Median over tokens of |ours - theirs| / |theirs|: a token with outlier channels does not decide."""
    gap = (ours.float() - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1).clamp_min(1e-12)
    return float(gap.median())


def read_states(path: Path, timeout_s: float) -> dict[str, Tensor]:
    """The tensors of a file that the server may still be writing; file and lock are gone afterwards, whatever happens.

    The server holds an exclusive lock on `path`.lock until the file is complete. Raises Unwritten when the file does not
    come within timeout_s, or is damaged.
    """
    lock = path.with_name(path.name + LOCK)
    try:
        await_lock(lock, path, timeout_s)
        _appears(path, "the server gave its lock free but wrote no file")
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise Unwritten(f"{path}: {type(error).__name__}: {error}") from error
    finally:
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)


def await_lock(lock: Path, path: Path, timeout_s: float) -> None:
    """Return once the writer has let go of the lock."""
    end = time.monotonic() + timeout_s
    if not path.parent.is_dir():
        raise ServerError(f"{path.parent}: no such folder; data.capture.shared_path must be where the server writes")
    _appears(lock, "is data.capture.shared_path the folder that the server writes into, as seen from here?")
    with open(lock) as file:
        wait = 0.001
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    raise Unwritten(f"{path}: still being written after {timeout_s:g} s") from None
                time.sleep(wait)
                wait = min(0.05, 2 * wait)


def _appears(path: Path, otherwise: str) -> None:
    """Wait a moment for a file that network file systems may show late."""
    end = time.monotonic() + APPEARS_S
    while not path.exists():
        if time.monotonic() > end:
            raise Unwritten(f"no {path}: {otherwise}")
        time.sleep(0.02)
