"""States from a server: whatever goes wrong between server, disk and us, no wrong state gets into a cache.

Run: pytest tests/test_server_capture.py

The server here is a fake: it answers as vLLM's hidden-states connector does, with states of a tiny target in this process,
and misbehaves on request. tests/vllm/test_vllm_capture.py asks a real vLLM.
"""

from __future__ import annotations

import fcntl
import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import save_target, target_model, tokenizer
from typer.testing import CliRunner

from draftsmith.data import server_capture
from draftsmith.data.batches import Ahead, BatchSource
from draftsmith.data.capture import CaptureConfig, capture, describe
from draftsmith.data.chat import Row
from draftsmith.data.regenerate import ServerError
from draftsmith.data.server_capture import ServerStates, layer_ids, serve_command
from draftsmith.models.draft import Needs
from draftsmith.models.target import Target, TargetConfig, check_spread
from draftsmith.train import cli
from draftsmith.train.stages import Stages

NEEDS = Needs(aux_layers=(0, 2, 3))
NUM_LAYERS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("target")
    save_target(target_model("qwen3", num_hidden_layers=NUM_LAYERS), tokenizer(), place)
    return place


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(TargetConfig(name=str(folder), dtype="float32"))


@pytest.fixture(scope="module")
def ends(folder: Path) -> Target:
    return Target.load(TargetConfig(name=str(folder), dtype="float32", ends_only=True))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    random = torch.Generator().manual_seed(3)
    lengths = [5, 17, 9, 30, 2, 11, 21, 8]
    ids = [torch.randint(0, 256, (n,), generator=random).tolist() for n in lengths]
    return [Row(f"r{i}", "any", row, [0] + [1] * (len(row) - 1), {}) for i, row in enumerate(ids)]


class FakeServer(ThreadingHTTPServer):
    """Answers with states of `layers`. fault: called with (number of the request, server) before each reply; what it
    returns says what goes wrong: an HTTP status, or one of the words that `states` and `write` know."""

    daemon_threads = True

    def __init__(self, target: Target, layers: list[int], shared: Path, fault: Callable[[int], Any]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.layers, self.shared, self.fault = target, layers, shared, fault
        self.num_requests, self.under_way, self.most_under_way, self.most_files = 0, 0, 0, 0
        self.lock = threading.Lock()

    def states(self, ids: list[int]) -> tuple[torch.Tensor, int]:
        """[T, L, D] and the greedy next token."""
        seen: dict[str, torch.Tensor] = {}
        norm = self.target.core.norm.register_forward_pre_hook(lambda _, args: seen.update(last=args[0]))
        with self.lock:
            out = self.target.forward(torch.tensor([ids]), needs=Needs(aux_layers=tuple(range(NUM_LAYERS))))
        norm.remove()
        assert out.features is not None
        every = [*out.features[0].unflatten(-1, (NUM_LAYERS, -1)).unbind(1), seen["last"][0]]
        following = int(self.target.logits(out.last_hidden[0, -1]).argmax())
        return torch.stack([every[k] for k in self.layers], 1), following

    def write(self, ids: list[int], path: Path, fault: Any) -> int:
        states, following = self.states(ids)
        seen = [*ids[:-1], ids[-1] ^ 1] if fault == "wrong id" else ids[1:] if fault == "cut ids" else ids
        if fault == "few layers":
            states = states[:, 1:]
        if fault == "half":
            states = states.bfloat16()
        lock = open(str(path) + ".lock", "w") if fault != "no lock" else None  # noqa: SIM115
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)

        def finish() -> None:
            if fault == "slow":
                time.sleep(0.1)
            if fault == "torn":
                path.write_bytes(b"not a safetensors file")
            elif fault not in ("no file", "no lock", "dead"):
                save_file({"hidden_states": states.contiguous(), "token_ids": torch.tensor(seen)}, path)
            if lock is not None and fault != "dead":
                lock.close()

        if fault in ("slow", "dead"):
            self.held = threading.Thread(target=finish, daemon=True)
            self.lock_of_the_dead = lock
            self.held.start()
        else:
            finish()
        return following


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            number = server.num_requests
            server.num_requests += 1
            server.under_way += 1
            server.most_under_way = max(server.most_under_way, server.under_way)
            server.most_files = max(server.most_files, len(list(server.shared.glob("*.safetensors"))))
        fault = server.fault(number)
        if isinstance(fault, int):
            return self.reply(fault, {"error": {"message": "not now"}})
        path = server.shared / f"cmpl-{number}.safetensors"
        following = server.write(body["prompt"], path, fault)
        assert body["max_tokens"] == 1
        reply: dict[str, Any] = {"choices": [{"token_ids": [following], "finish_reason": "length"}]}
        if fault != "no connector":  # the server's own name of the folder, which need not be ours
            reply["kv_transfer_params"] = {
                "hidden_states_path": "/" if fault == "no name" else f"/mnt/other/{path.name}"
            }
        self.reply(200, reply)

    def reply(self, status: int, value: dict[str, Any]) -> None:
        with self.server.lock:
            self.server.under_way -= 1
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


Serve = Callable[..., tuple[FakeServer, CaptureConfig]]


@pytest.fixture
def serve(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """serve(fault=..., layers=..., **config) -> (server, the config that asks it)."""
    monkeypatch.setattr(server_capture, "APPEARS_S", 0.5)
    running = []

    def start(
        fault: Callable[[int], Any] = lambda number: None, layers: list[int] | None = None, **config: Any
    ) -> tuple[FakeServer, CaptureConfig]:
        shared = tmp_path / "shared"
        shared.mkdir(exist_ok=True)
        server = FakeServer(target, layers or [*NEEDS.aux_layers, NUM_LAYERS], shared, fault)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        usual = {"retries": 2, "backoff_s": 0.001, "dtype": "float32", "shard_tokens": 40, "concurrency": 4}
        address = f"http://127.0.0.1:{server.server_port}"
        return server, CaptureConfig(server=address, shared_path=str(shared), **{**usual, **config})

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def in_process(config: CaptureConfig) -> CaptureConfig:
    return CaptureConfig(dtype=config.dtype, shard_tokens=config.shard_tokens)


# -- what is right comes through -------------------------------------------------------------------------------------
def test_a_server_gives_the_same_cache_as_the_target_in_process(target, rows, serve, tmp_path):
    server, config = serve()
    ours = capture(rows, target, NEEDS, tmp_path / "server", config)
    truth = capture(rows, target, NEEDS, tmp_path / "local", in_process(config))
    assert ours.manifest.keys() == truth.manifest.keys()
    for i in range(len(rows)):
        assert torch.equal(ours.row(i).input_ids, truth.row(i).input_ids)
        torch.testing.assert_close(ours.row(i).features, truth.row(i).features, rtol=0, atol=1e-5)
        torch.testing.assert_close(ours.row(i).last_hidden, truth.row(i).last_hidden, rtol=0, atol=1e-5)
    assert list(server.shared.iterdir()) == []  # files and locks are gone
    assert server.num_requests == len(rows) + 1  # and one for the probe


def test_the_ends_of_the_target_suffice(target, ends, rows, serve, tmp_path):
    _, config = serve()
    ours = capture(rows, ends, NEEDS, tmp_path / "ends", config)
    truth = capture(rows, target, NEEDS, tmp_path / "local", in_process(config))
    for i in range(len(rows)):
        torch.testing.assert_close(ours.row(i).features, truth.row(i).features, rtol=0, atol=1e-5)
        torch.testing.assert_close(ours.row(i).last_hidden, truth.row(i).last_hidden, rtol=0, atol=1e-5)


@pytest.mark.parametrize("needs", [Needs(aux_layers=(1,), last_hidden=False), Needs()])
def test_only_the_layers_that_are_needed_are_asked_for(target, rows, serve, tmp_path, needs):
    _, config = serve(layers=layer_ids(needs, NUM_LAYERS))
    row = capture(rows, target, needs, tmp_path / "states", config).row(0)
    assert (row.features is None) == (not needs.aux_layers)
    assert (row.last_hidden is None) == (not needs.last_hidden)


def test_live_rows_come_from_the_server_and_are_forgotten(target, rows, serve):
    server, config = serve()
    live = BatchSource(rows, target, NEEDS, 0, 60, 60, config)
    local = BatchSource(rows, target, NEEDS, 0, 60, 60, in_process(config))
    with Ahead(live) as ahead:
        for step in range(5):
            [batch], [truth] = ahead.step(step), local.step(step)
            assert batch.row_ids == truth.row_ids
            torch.testing.assert_close(batch.features, truth.features, rtol=0, atol=1e-5)
            torch.testing.assert_close(batch.last_hidden, truth.last_hidden, rtol=0, atol=1e-5)
    assert list(server.shared.iterdir()) == []


def test_no_more_requests_and_files_than_allowed_are_under_way(target, rows, serve, tmp_path):
    server, config = serve(concurrency=3, shard_tokens=1000, fault=lambda number: "slow")
    capture(rows, target, NEEDS, tmp_path / "states", config)
    assert 2 <= server.most_under_way <= 3
    assert server.most_files <= 3


@pytest.mark.parametrize("source", ["cache", "live"])
def test_a_recipe_trains_with_the_ends_of_its_target_and_a_server(folder, serve, tmp_path, monkeypatch, source):
    """From chats to a trained draft, without a layer of the target in this process."""
    monkeypatch.chdir(tmp_path)
    server, config = serve(layers=[1, 3, 5, NUM_LAYERS])
    chats = [[("user", f"say {c}"), ("assistant", c * 9)] for c in "abcd"]
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in chat]}) for chat in chats]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    values = {
        "target.name": folder,
        "target.ends_only": "true",
        "draft.aux_layers": "[1,3,5]",
        "data.train": tmp_path / "chats.jsonl",
        "data.evaluation": "{heldout: " + str(tmp_path / "chats.jsonl") + "}",
        "data.regenerate": "null",
        "data.source": source,
        "data.capture.server": config.server,
        "data.capture.shared_path": config.shared_path,
        "train.steps": 2,
        "train.warmup_steps": 1,
    }
    for _ in range(2):  # the second time everything is found
        stages = Stages.from_recipe("tiny-eagle3", [f"{k}={v}" for k, v in values.items()], smoke=True)
        stages.train()
    captured = len(chats) + 1  # the held-out rows are the same, so they are found; one is the probe
    assert server.num_requests == captured if source == "cache" else server.num_requests > captured
    assert (stages.draft_folder() / "draft.safetensors").is_file()
    assert list(server.shared.iterdir()) == []


# -- faults that pass ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fault", [503, 429, "no file", "torn", "slow"])
def test_passing_faults_are_waited_out(target, rows, serve, tmp_path, fault):
    server, config = serve(fault=lambda number: fault if number % 3 == 2 else None, concurrency=1)
    found = capture(rows, target, NEEDS, tmp_path / "states", config)
    assert len(found) == len(rows)
    repeated = server.num_requests - len(rows) - 1
    assert repeated == 0 if fault == "slow" else repeated >= 3
    assert list(server.shared.iterdir()) == []


def test_a_capture_that_failed_goes_on_where_it_stopped(target, rows, serve, tmp_path):
    _, broken = serve(fault=lambda number: None if number < 5 else 503, concurrency=1)
    with pytest.raises(ServerError, match="no answer after 3 attempts, last HTTP 503: not now.*start the same command"):
        capture(rows, target, NEEDS, tmp_path / "states", broken)
    server, config = serve()
    assert len(capture(rows, target, NEEDS, tmp_path / "states", config)) == len(rows)
    assert server.num_requests < len(rows) + 1


# -- faults that do not ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("wrong id", r"5 token ids came, 5 were sent, and they differ from position 4 on .*prompt truncation"),
        ("cut ids", r"4 token ids came, 5 were sent, and they differ from position 0"),
        (
            "few layers",
            r"states \[5, 3, \d+\], wanted \[5, 4, \d+\]: \[tokens, layers \[0, 2, 3, 6\], width\].*--target-only",
        ),
        ("half", r"states in torch.bfloat16, the target is torch.float32; give the server the same --dtype"),
        ("no connector", r"names no hidden_states_path \(choices\).*without hidden-states connector.*--target-only"),
        ("no name", r"names no file of states but '/'"),
        ("no file", r"no states after 3 attempts: .*gave its lock free but wrote no file.*server's log"),
        ("no lock", r"no states after 3 attempts: .*is data.capture.shared_path the folder"),
        ("torn", r"no states after 3 attempts: .*SafetensorError"),
        ("dead", r"no states after 3 attempts: .*still being written after 0.6 s"),
        (400, r"HTTP 400: not now \(prompt of 5 ids\)"),
    ],
)
def test_lasting_faults_end_the_capture_with_their_cause(target, rows, serve, tmp_path, fault, message):
    server, config = serve(
        fault=lambda number: fault if number else None, concurrency=1, timeout_s=0.6 if fault == "dead" else 30
    )
    with pytest.raises(ServerError, match=message):
        capture(rows, target, NEEDS, tmp_path / "states", config)
    left = list(server.shared.iterdir())
    assert left == [] or fault in ("no connector", "no name")  # then nobody knows the file's name


@pytest.mark.parametrize("layers", [[0, 3, 2, 6], [0, 2, 4, 6], [0, 1, 2, 6]])
def test_other_layers_than_asked_for_are_found_out_by_the_probe(target, rows, serve, tmp_path, layers):
    _, config = serve(layers=layers)
    column = next(i for i, (a, b) in enumerate(zip(layers, [0, 2, 3, 6], strict=True)) if a != b)
    with pytest.raises(
        ServerError, match=f"column {column} should be layer .*nearest is layer {layers[column]} .*--target-only"
    ):
        capture(rows, target, NEEDS, tmp_path / "states", config)


def test_without_layers_the_probe_still_proves_both_ends(ends, rows, serve, tmp_path):
    _, config = serve(layers=[1, 2, 3, 6])
    with pytest.raises(ServerError, match="column 0 should be the embedding"):
        capture(rows, ends, NEEDS, tmp_path / "a", config)
    _, config = serve(layers=[0, 2, 3, 1])
    with pytest.raises(ServerError, match="the last column is not layer 6"):
        capture(rows, ends, NEEDS, tmp_path / "b", config)
    _, config = serve(layers=[0, 3, 2, 6])
    assert "not compared" in ServerStates(ends, NEEDS, config).probe()


def test_other_weights_are_found_out(rows, serve, tmp_path):
    other = target_model("qwen3", seed=1, num_hidden_layers=NUM_LAYERS)
    _, config = serve()
    with pytest.raises(ServerError, match="other weights|another target"):
        capture(rows, Target(other, tokenizer(), TargetConfig(name="other")), NEEDS, tmp_path / "states", config)


def test_a_folder_that_is_not_there_is_named(target, rows, serve, tmp_path):
    server, config = serve()
    gone = config.model_copy(update={"shared_path": str(tmp_path / "gone")})
    with pytest.raises(ServerError, match="gone: no such folder; data.capture.shared_path"):
        capture(rows, target, NEEDS, tmp_path / "states", gone)


def test_drafts_that_read_keys_and_values_are_refused(target):
    with pytest.raises(ValueError, match="reads keys and values of the target.*capture in process"):
        layer_ids(Needs(aux_layers=(1,), target_kv_layers=(2,)), NUM_LAYERS)


# -- settings and command --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"concurrency": 4}, "concurrency 4 has no effect with server unset"),
        ({"shared_path": "/x"}, "shared_path '/x' has no effect with server unset"),
        ({"server": "localhost:1", "shared_path": "/x"}, "server must be a URL such as http://localhost:8000"),
        ({"server": "http://a:1"}, "server needs shared_path"),
        (
            {"server": "http://a:1", "shared_path": "/x", "batch_tokens": 9},
            "batch_tokens 9 has no effect with a server",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(config, message):
    with pytest.raises(ValueError, match=message):
        CaptureConfig(**config)


def test_a_cache_does_not_depend_on_who_is_asked(target, rows):
    one = CaptureConfig(server="http://a:1", shared_path="/x", concurrency=3, model="m")
    assert describe(target, NEEDS, one, rows) == describe(target, NEEDS, CaptureConfig(), rows)


def test_the_command_names_layers_dtype_port_and_folder(ends, folder):
    config = CaptureConfig(server="http://localhost:8123/v1", shared_path="/dev/shm/states")
    words = serve_command(ends, NEEDS, config, max_len=64)
    said = dict(zip(words[3::2], words[4::2], strict=False))
    assert words[:3] == ["vllm", "serve", str(folder)]
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3, 6]}},
    }
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": "/dev/shm/states"}
    assert (said["--port"], said["--dtype"], said["--max-model-len"]) == ("8123", "float32", "65")
    assert "--no-enable-prefix-caching" in words
    with pytest.raises(ValueError, match="data.capture.server and data.capture.shared_path must say where"):
        serve_command(ends, NEEDS, CaptureConfig(), max_len=64)


def test_serve_target_only_prints_the_recipe_s_layers(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["data.capture.server=http://localhost:8123", f"data.capture.shared_path={tmp_path}"]
    recipe = ["tiny-eagle3", f"target.name={folder}", "target.dtype=float32", "draft.aux_layers=[1,3,5]"]
    result = CliRunner().invoke(cli.app, ["serve", *recipe, *asked, "--target-only"])
    assert result.exit_code == 0, result.output
    [line] = result.stdout.splitlines()
    words = shlex.split(line)
    layers = json.loads(words[words.index("--speculative-config") + 1])["draft_model_config"]["hf_config"]
    assert layers == {"eagle_aux_hidden_state_layer_ids": [1, 3, 5, 6]}


def test_serve_target_only_start_runs_what_it_prints(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vllm = tmp_path / "bin" / "vllm"
    vllm.parent.mkdir()
    vllm.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > said\nexit 7\n')
    vllm.chmod(0o755)
    monkeypatch.setenv("PATH", str(vllm.parent), prepend=":")
    asked = ["data.capture.server=http://localhost:8123", f"data.capture.shared_path={tmp_path}"]
    arguments = ["serve", "tiny-eagle3", f"target.name={folder}", "target.dtype=float32", *asked, "--target-only"]
    printed = CliRunner().invoke(cli.app, arguments).stdout
    assert CliRunner().invoke(cli.app, [*arguments, "--start"]).exit_code == 7  # the server's own
    assert (tmp_path / "said").read_text().splitlines() == shlex.split(printed)[1:]


def test_the_command_needs_a_server_in_the_recipe(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["serve", "tiny-eagle3", f"target.name={folder}", "--target-only"])
    assert isinstance(result.exception, ValueError)
    assert "data.capture.server and data.capture.shared_path must say" in str(result.exception)


# -- a target spread over devices ------------------------------------------------------------------------------------
def test_a_balanced_target_gives_the_same_states(target, folder, rows):
    """On this machine there is one device to balance over; several GPUs were not run by us."""
    spread = Target.load(TargetConfig(name=str(folder), dtype="float32", device="balanced"))
    ids = [row.input_ids for row in rows[:3]]
    for ours, truth in zip(spread.capture(ids, NEEDS), target.capture(ids, NEEDS), strict=True):
        assert torch.equal(ours[0], truth[0])
        assert torch.equal(ours[1], truth[1])


def test_a_balanced_target_is_refused_where_it_cannot_work(folder, monkeypatch):
    with pytest.raises(ValueError, match="does not fit the GPUs of this node, model.layers.1"):
        check_spread("big", {"model.layers.0": 0, "model.layers.1": "cpu"})
    with pytest.raises(ValueError, match="no effect with target.ends_only"):
        Target.load(TargetConfig(name=str(folder), device="balanced", ends_only=True))
    with pytest.raises(ValueError, match="'tensor_parallel' is no device; use auto, cpu, cuda:0 or balanced"):
        Target.load(TargetConfig(name=str(folder), device="tensor_parallel"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="but 2 processes were started; run `draftsmith capture` without a launcher"):
        Target.load(TargetConfig(name=str(folder), device="balanced"))
