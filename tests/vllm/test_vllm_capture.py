"""States captured from a real vLLM server. Protects: that its files mean what we take them for.

    make vllm-test          (or: pytest -m vllm tests/vllm/test_vllm_capture.py, with .venv-vllm in place)

The server is started with our own command (`serve_command`), on the CPU, with the connector of cpu_connector.py: vLLM's own
needs a GPU for its copies. Everything else is vLLM's: engine, layer ids, files, locks.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from served import SIZES
from tiny import save_target, target_model, tokenizer

from draftsmith.data.batches import BatchSource
from draftsmith.data.capture import CaptureConfig, capture
from draftsmith.data.chat import Row
from draftsmith.data.regenerate import ServerError
from draftsmith.data.server_capture import ServerStates, serve_command
from draftsmith.models.draft import Needs
from draftsmith.models.target import Target, TargetConfig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NEEDS = Needs(aux_layers=(0, 1, 3))
STARTS_S = 600  # a busy machine of two cores imports vLLM in a minute
LIVES_S = 880
MAX_LEN = 96


class Server(NamedTuple):
    place: Path  # of the target
    config: CaptureConfig


@pytest.fixture(scope="module")
def server(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A vLLM server of a tiny target; the whole process group is gone afterwards, however the tests end."""
    folder = tmp_path_factory.mktemp("capture")
    (folder / "states").mkdir()
    place = folder / "target"
    save_target(target_model("qwen3", **SIZES), tokenizer(), place)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    config = CaptureConfig(
        server=address,
        shared_path=str(folder / "states"),
        dtype="float32",
        shard_tokens=100,
        concurrency=4,
        timeout_s=120,
    )
    ends = Target.load(TargetConfig(name=str(place), dtype="float32", ends_only=True))
    words = serve_command(ends, NEEDS, config, MAX_LEN, "CpuHiddenStatesConnector", "cpu_connector")
    # the CPU build's `vllm` cannot find its own version; the module behind `vllm serve` does not ask for it
    words[:2] = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    words += ["--host", "127.0.0.1", "--max-num-seqs", "4", "--enforce-eager"]
    words = ["timeout", "--kill-after=10", str(LIVES_S), *words]  # should this process be killed, the server ends too
    surroundings = {
        "PYTHONPATH": str(Path(__file__).parent),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    log = folder / "server.log"
    with open(log, "w") as out:
        process = subprocess.Popen(
            words, cwd=folder, env={**os.environ, **surroundings}, stdout=out, stderr=out, start_new_session=True
        )
    try:
        await_server(process, address, log)
        yield Server(place, config)
    finally:
        stop(process)


def await_server(process: subprocess.Popen, address: str, log: Path) -> None:
    end = time.monotonic() + STARTS_S
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start (exit status {process.poll()}):\n{log.read_text()[-4000:]}")


def stop(process: subprocess.Popen) -> None:
    """End the server and the engine processes it started: its process group is its own."""
    for sign, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait(20)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    random = torch.Generator().manual_seed(5)
    lengths = [3, 40, 17, MAX_LEN, 1, 64, 25, 33, 2, 16]  # 16: a block of vLLM's cache, exactly
    ids = [torch.randint(0, 256, (n,), generator=random).tolist() for n in lengths]
    return [Row(f"r{i}", "any", row, [1] * len(row), {}) for i, row in enumerate(ids)]


def load(server: Server, **more: bool) -> Target:
    return Target.load(TargetConfig(name=str(server.place), dtype="float32", **more))


@pytest.mark.parametrize("ends_only", [False, True])
def test_shards_from_the_server_equal_those_captured_in_process(server, rows, tmp_path, ends_only) -> None:
    found = capture(rows, load(server, ends_only=ends_only), NEEDS, tmp_path / "server", server.config)
    in_process = CaptureConfig(dtype="float32", shard_tokens=100)
    truth = capture(rows, load(server), NEEDS, tmp_path / "local", in_process)
    assert found is not None
    assert truth is not None
    assert found.row_ids == truth.row_ids
    assert found.manifest.keys() == truth.manifest.keys()
    gaps = []
    for i in range(len(rows)):
        ours, theirs = found.row(i), truth.row(i)
        assert torch.equal(ours.input_ids, theirs.input_ids)
        assert torch.equal(ours.loss_mask, theirs.loss_mask)
        gaps += [float((a - b).abs().max()) for a, b in ((ours[2], theirs[2]), (ours[3], theirs[3]))]
    print("largest difference", max(gaps))
    assert max(gaps) < 1e-4
    assert list(Path(str(server.config.shared_path)).iterdir()) == []


def test_live_batches_ask_the_server_and_leave_nothing(server, rows) -> None:
    target = load(server)
    live = BatchSource(rows, target, NEEDS, 0, 100, 100, server.config)
    local = BatchSource(rows, target, NEEDS, 0, 100, 100, CaptureConfig(dtype="float32"))
    for step in range(3):
        for batch, truth in zip(live.step(step), local.step(step), strict=True):
            assert batch.row_ids == truth.row_ids
            torch.testing.assert_close(batch.features, truth.features, rtol=0, atol=1e-4)
            torch.testing.assert_close(batch.last_hidden, truth.last_hidden, rtol=0, atol=1e-4)
    assert list(Path(str(server.config.shared_path)).iterdir()) == []


def test_the_probe_knows_the_servers_layers_from_others(server) -> None:
    target = load(server)
    asked = ServerStates(target, NEEDS, server.config)
    assert asked.probe().startswith("whole")
    following = int(target.logits(target.forward(torch.tensor([[5, 6, 7]])).last_hidden[0, -1]).argmax())
    assert asked._ask([5, 6, 7]).following == following
    with pytest.raises(ServerError, match="column 1 should be layer 2.*nearest is layer 1"):
        ServerStates(target, Needs(aux_layers=(0, 2, 3)), server.config).probe()
    with pytest.raises(ServerError, match=r"wanted \[32, 3, 64\]"):
        ServerStates(target, Needs(aux_layers=(0, 1)), server.config).probe()
