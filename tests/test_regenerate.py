"""Protects the target's own answers: exact ids, several turns, resuming at any point, and a server that fails at times.

Run: pytest tests/test_regenerate.py
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from tiny import EMPTYTHINK, IM_END, PLAIN, target_model, tokenizer

from draftsmith.data.chat import Chat, ChatConfig, Dropped, Row, read_rows
from draftsmith.data.regenerate import (
    Answer,
    LocalEngine,
    RegenerateConfig,
    ServerEngine,
    ServerError,
    regenerate,
    split_turns,
)
from draftsmith.models.target import Target, TargetConfig

STRIPS_TAIL = (  # rewrites history: the text of earlier answers is cut to its first letter
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ (m.content[:1] if m.role == 'assistant' else m.content) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def prompts(num: int) -> list[Chat]:
    """Chats of one and of two turns."""
    return [
        Chat(f"p{i}", "odd" if i % 2 else "even", tuple(user(f"{t}{i}") for t in "ab"[: 1 + i % 2]), None, f"file:{i}")
        for i in range(num)
    ]


class Scripted:
    """An engine that answers from the last letters of the prompt, so that every answer is known in advance."""

    wave, workers, eos_ids, max_context = 3, 1, (), None

    def __init__(self, stop_after: int | None = None, unfinished: bool = False):
        self.calls: list[tuple[int, int]] = []  # (number of prompts, seed)
        self.stop_after, self.unfinished = stop_after, unfinished

    def answer(self, prompts, stop_ids, seed) -> list[Answer]:
        if self.stop_after is not None and len(self.calls) >= self.stop_after:
            raise KeyboardInterrupt
        self.calls.append((len(prompts), seed))
        return [self.one(list(prompt)) for prompt in prompts]

    def one(self, prompt: list[int]) -> Answer:
        letters = [i for i in prompt if 97 <= i < 123][-3:]
        return Answer(letters, "length") if self.unfinished else Answer([*letters, IM_END], "stop")

    def settings(self) -> dict:
        return {"engine": "scripted"}


def run(folder: Path, chats, engine=None, template=PLAIN, chat_config=None, about=None, progress=None, **config):
    made = regenerate(
        chats,
        engine or Scripted(),
        tokenizer(template),
        chat_config or ChatConfig(),
        RegenerateConfig(**{"max_new_tokens": 8} | config),
        folder,
        about or {"source": "x"},
        progress,
    )
    return read_rows(made)


def answers(row: Row) -> list[str]:
    """The supervised runs of a row as text."""
    groups = itertools.groupby(zip(row.input_ids, row.loss_mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer().decode([i for i, _ in group]) for mask, group in groups if mask]


# -- which ids, which rows -------------------------------------------------------------------------------------------
def test_a_row_holds_the_ids_that_were_seen_and_produced(tmp_path):
    seen = []

    class Spy(Scripted):
        def one(self, prompt):
            seen.append(prompt)
            return super().one(prompt)

    (row,) = run(tmp_path, prompts(1), Spy())
    rendered = tokenizer().apply_chat_template([user("a0")], add_generation_prompt=True, return_dict=False)
    assert seen == [rendered]
    assert list(row.input_ids) == rendered + [97 + ord(c) - ord("a") for c in "ant"] + [IM_END]
    assert sum(row.loss_mask) == 4
    assert row.loss_mask[-4:] == (1, 1, 1, 1)
    assert (row.id, row.kind) == ("p0", "even")
    assert row.meta == {"from": "file:0", "finish": ["stop"], "regenerated": True}


def test_turns_are_answered_in_order_and_share_a_row_when_the_ids_agree(tmp_path):
    (row,) = run(tmp_path, prompts(2)[1:])
    assert answers(row) == ["ant<|im_end|>", "ant<|im_end|>"]
    text = tokenizer().decode(row.input_ids)
    assert text.index("a1") < text.index("ant<|im_end|>") < text.index("b1")
    assert row.meta["finish"] == ["stop", "stop"]


def test_a_template_that_rewrites_history_gives_one_exact_row_per_turn(tmp_path):
    first, second = run(tmp_path, prompts(2)[1:], template=STRIPS_TAIL)
    assert (first.id, second.id) == ("p1/0", "p1/1")
    assert answers(first) == ["ant<|im_end|>"]
    assert answers(second) == ["ant<|im_end|>"]
    assert "assistant\na<|im_end|>\n<|im_start|>user\nb1" in tokenizer().decode(second.input_ids)


def test_an_answer_that_encodes_to_other_ids_than_were_produced_starts_a_new_row(tmp_path):
    class Odd(Scripted):
        def one(self, prompt):
            return Answer([0xE4, 0x62, IM_END], "stop")  # a byte that is no UTF-8: its text encodes to other ids

    first, second = run(tmp_path, prompts(2)[1:], Odd())
    assert list(first.input_ids[-3:]) == [0xE4, 0x62, IM_END]
    assert 0xE4 not in second.input_ids[:-3]
    assert sum(first.loss_mask) == sum(second.loss_mask) == 3


def test_an_empty_think_block_of_the_prompt_is_not_supervised(tmp_path):
    (row,) = run(tmp_path, prompts(2)[1:], template=EMPTYTHINK)
    assert answers(row) == ["ant<|im_end|>", "ant<|im_end|>"]


def test_last_turn_only_supervises_the_last_answer(tmp_path):
    (row,) = run(tmp_path, prompts(2)[1:], chat_config=ChatConfig(last_turn_only=True))
    assert answers(row) == ["ant<|im_end|>"]
    assert tokenizer().decode(row.input_ids).count("ant<|im_end|>") == 2


def test_an_answer_cut_at_the_limit_is_kept_and_flagged(tmp_path):
    (row,) = run(tmp_path, prompts(2)[1:], Scripted(unfinished=True))
    assert row.meta["finish"] == ["length", "length"]
    assert answers(row) == ["ant", "ant"]


def test_recorded_answers_are_replaced_and_recorded_tool_results_kept():
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    tool, system, said = (
        {"role": "tool", "content": "1"},
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "x"},
    )
    assert split_turns([system, user("a"), said, user("b"), said]) == [[system, user("a")], [user("b")]]
    assert split_turns([user("a"), call, tool, tool, said, user("b")]) == [[user("a"), call, tool, tool], [user("b")]]
    assert split_turns([user("a"), call]) == [[user("a")]]
    assert split_turns([user("a"), user("b")]) == [[user("a")], [user("b")]]
    assert split_turns([system]) == []


def test_what_cannot_be_answered_is_counted_by_reason(tmp_path):
    chats = [
        Chat("s", "k", ({"role": "system", "content": "only"},)),
        Chat("long", "k", (user("x" * 100),)),
        Dropped("unreadable row", "file:3"),
        *prompts(1),
    ]
    engine = Scripted()
    engine.max_context = 60
    rows = run(tmp_path, chats, engine)
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert [row.id for row in rows] == ["p0"]
    assert counts == {
        "chats": 4,
        "rows": 1,
        "tokens": len(rows[0].input_ids),
        "supervised": 4,
        "finish": {"stop": 1},
        "dropped": {
            "no user turn to answer": 1,
            "prompt leaves less than max_new_tokens of the 60 tokens of context": 1,
            "unreadable row": 1,
        },
    }


def test_nothing_answered_at_all_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="0 trainable tokens in 1 samples: 1 x no user turn to answer"):
        run(tmp_path, [Chat("s", "k", ({"role": "system", "content": "only"},))])


# -- resuming --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stop_after", range(6))
def test_an_interrupted_run_goes_on_to_the_same_rows(tmp_path, stop_after):
    whole = run(tmp_path / "whole", prompts(8))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", prompts(8), Scripted(stop_after))
    assert not (tmp_path / "cut" / "rows.jsonl").exists()
    assert run(tmp_path / "cut", prompts(8)) == whole
    assert (tmp_path / "cut/rows.jsonl").read_bytes() == (tmp_path / "whole/rows.jsonl").read_bytes()


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.3, 0.5, 0.77, 0.999])
def test_a_run_killed_while_writing_loses_and_doubles_nothing(tmp_path, kept):
    whole = run(tmp_path / "whole", prompts(8))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", prompts(8), Scripted(4))
    log = tmp_path / "cut" / "answers.jsonl"
    log.write_bytes(log.read_bytes()[: int(kept * log.stat().st_size)])
    assert run(tmp_path / "cut", prompts(8)) == whole
    answered = [json.loads(line)["chat"] for line in log.read_text().splitlines()]
    assert sorted(answered) == list(range(8))


def test_a_group_with_an_unfinished_chat_is_answered_again_with_the_same_seed(tmp_path):
    first = Scripted()
    run(tmp_path / "a", prompts(6), first)
    log = tmp_path / "a" / "answers.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:4]))
    (tmp_path / "a" / "counts.json").unlink()
    again = Scripted()
    run(tmp_path / "a", prompts(6), again)
    assert again.calls == first.calls[2:]
    assert len({seed for _, seed in first.calls}) == 4


def test_a_finished_folder_is_left_alone(tmp_path):
    run(tmp_path, prompts(3))
    idle = Scripted(stop_after=0)
    assert len(run(tmp_path, prompts(3), idle)) == 3
    assert idle.calls == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 9}, "sampling.max_new_tokens = 8, this run has 9"),
        ({"temperature": 0.5}, "sampling.temperature = 0.0, this run has 0.5"),
        ({"about": {"source": "y"}}, "about.source = 'x', this run has 'y'"),
        ({"chat_config": ChatConfig(system="s")}, "chat.system = None, this run has 's'"),
        ({"chat_config": ChatConfig(template_kwargs={"a": 1})}, "chat.template_kwargs = {}, this run has None"),
        ({"template": EMPTYTHINK}, "template_sha256 = "),
    ],
)
def test_other_settings_on_resume_are_refused_with_key_and_both_values(tmp_path, change, message):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, prompts(8), Scripted(2))
    with pytest.raises(ValueError, match=f"was begun with {message}.*use another folder"):
        run(tmp_path, prompts(8), **change)


def test_settings_are_written_before_the_first_answer_and_record_everything(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, prompts(1), Scripted(0), chat_config=ChatConfig(template_kwargs={"enable_thinking": False}))
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["sampling"]["temperature"] == 0.0
    assert settings["chat"]["template_kwargs"] == {"enable_thinking": False}
    assert settings["stop_ids"] == [IM_END]
    assert settings["about"] == {"source": "x"}


def test_a_source_that_changed_since_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, prompts(8), Scripted(2))
    with pytest.raises(ValueError, match=r"chat 0 \(file:1\) is not the one that was answered before"):
        run(tmp_path, prompts(8)[1:])
    with pytest.raises(ValueError, match="chat 2 was answered before, the source now ends after 2 chats"):
        run(tmp_path, prompts(2))


def test_a_damaged_line_and_a_second_process_are_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, prompts(8), Scripted(2))
    with open(tmp_path / "answers.jsonl", "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is answering into this folder"):
            run(tmp_path, prompts(8))
        fcntl.flock(file, fcntl.LOCK_UN)
        file.write(b"#")
    with pytest.raises(ValueError, match=r"answers\.jsonl:1: damaged line"):
        run(tmp_path, prompts(8))


def test_progress_tells_chats_and_tokens_and_what_was_done_before(tmp_path):
    told = []
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, prompts(6), Scripted(2), progress=lambda chats, tokens: told.append((chats, tokens)))
    assert told == [(1, 4), (1, 8), (1, 4)]
    run(tmp_path, prompts(6), progress=lambda chats, tokens: told.append((chats, tokens)))
    assert told[3:] == [(3, 0), (1, 8), (1, 4), (1, 8)]


# -- the target in this process --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def target() -> Target:
    return Target(target_model("llama", seed=3), tokenizer(), TargetConfig(name="tiny", device="cpu"))


def test_local_answers_are_the_targets_greedy_continuation(tmp_path, target):
    config = RegenerateConfig(max_new_tokens=6, batch_size=3)
    made = regenerate(prompts(5), LocalEngine(target, config), tokenizer(), ChatConfig(), config, tmp_path, {})
    for row in read_rows(made):
        ids, mask = torch.tensor(row.input_ids), torch.tensor(row.loss_mask).bool()
        with torch.no_grad():
            best = target.model(ids[None]).logits[0].argmax(-1)
        assert torch.equal(best[:-1][mask[1:]], ids[1:][mask[1:]])
        assert mask.sum() > 0


def test_local_sampled_answers_do_not_depend_on_an_interruption(tmp_path, target):
    config = RegenerateConfig(max_new_tokens=6, batch_size=2, temperature=1.0, seed=5)

    class Interrupted(LocalEngine):
        left = 2

        def answer(self, *args):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return super().answer(*args)

    def go(folder, engine, config=config):
        return read_rows(regenerate(prompts(6), engine, tokenizer(), ChatConfig(), config, folder, {}))

    whole = go(tmp_path / "whole", LocalEngine(target, config))
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "cut", Interrupted(target, config))
    assert go(tmp_path / "cut", LocalEngine(target, config)) == whole
    other = config.model_copy(update={"seed": 6})
    assert go(tmp_path / "other", LocalEngine(target, other), other) != whole


# -- a server --------------------------------------------------------------------------------------------------------
class Server(ThreadingHTTPServer):
    """A completions server; `faults` are given out one per request, then it answers like Scripted."""

    daemon_threads = True

    def __init__(self, faults=(), reply=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults, self.reply = iter(faults), reply or {}
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            fault = next(self.server.faults, None)
            self.server.bodies.append(body)
            self.server.keys.append(self.headers["Authorization"])
        if fault == "hang up":
            self.connection.close()
            return
        if fault == "half":
            self._send(200, b'{"choices": [')
        elif fault is not None:
            self._send(fault, json.dumps({"error": {"message": "not now"}}).encode())
        else:
            answer = Scripted().one(body["prompt"])
            choice = {"text": "?", "finish_reason": answer.finish, "token_ids": answer.ids}
            choice |= {"prompt_token_ids": body["prompt"]} | self.server.reply
            choice = {k: v for k, v in choice.items() if v is not None}
            self._send(200, json.dumps({"choices": [choice]}).encode())

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass

    def handle(self):
        with contextlib.suppress(OSError, ValueError):  # the connection that "hang up" closed
            super().handle()


@pytest.fixture
def serve() -> Iterator:
    servers = []

    def start(*args, **options) -> Server:
        servers.append(Server(*args, **options))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def server_config(server: Server, **more) -> RegenerateConfig:
    return RegenerateConfig(server=server.url, max_new_tokens=8, concurrency=4, backoff_s=0.001, **more)


def ask(folder: Path, server: Server, chats, **more) -> list[Row]:
    config = server_config(server, **more)
    engine = ServerEngine(config, "the/target")
    return read_rows(regenerate(chats, engine, tokenizer(), ChatConfig(), config, folder, {}))


def test_a_failing_server_gives_the_same_rows_as_a_good_one(tmp_path, serve):
    faults = [None, 503, None, 429, "hang up", None, 500, "half", None, 502, "hang up"]
    server = serve(faults)
    rows = ask(tmp_path / "server", server, prompts(12))
    local = run(tmp_path / "local", prompts(12))
    assert rows == local
    assert len(server.bodies) == 18 + sum(fault is not None for fault in faults)


def test_a_request_asks_for_exact_ids_and_leaves_no_parameter_to_the_server(tmp_path, serve):
    server = serve()
    ask(tmp_path, server, prompts(1), temperature=0.7, top_k=5, top_p=0.9)
    (body,) = server.bodies
    assert body["model"] == "the/target"
    assert body["prompt"] == tokenizer().apply_chat_template(
        [user("a0")], add_generation_prompt=True, return_dict=False
    )
    assert (body["return_token_ids"], body["add_special_tokens"], body["stop_token_ids"]) == (True, False, [IM_END])
    assert (body["temperature"], body["top_k"], body["top_p"], body["max_tokens"]) == (0.7, 5, 0.9, 8)
    assert (body["min_p"], body["repetition_penalty"], body["presence_penalty"]) == (0.0, 1.0, 0.0)
    assert server.keys == [None]


def test_the_key_comes_from_the_named_environment_variable(tmp_path, serve, monkeypatch):
    server = serve()
    with pytest.raises(ValueError, match="the environment variable TEST_KEY is not set"):
        ask(tmp_path, server, prompts(1), api_key_env="TEST_KEY")
    monkeypatch.setenv("TEST_KEY", "abc")
    ask(tmp_path, server, prompts(1), api_key_env="TEST_KEY")
    assert server.keys == ["Bearer abc"]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"token_ids": None}, "holds no token ids .*return_token_ids"),
        ({"prompt_token_ids": [1]}, "saw 1 prompt ids, 21 were sent"),
        ({"finish_reason": "abort"}, "finish_reason 'abort', wanted 'stop' or 'length'"),
    ],
)
def test_a_reply_without_exact_ids_is_refused(tmp_path, serve, reply, message):
    with pytest.raises(ServerError, match=message):
        ask(tmp_path, serve(reply=reply), prompts(3))


def test_a_final_fault_is_not_retried_and_shows_what_the_server_said(tmp_path, serve):
    server = serve([404] * 20)
    with pytest.raises(ServerError, match=r"/v1/completions: HTTP 404: not now"):
        ask(tmp_path, server, prompts(1))
    assert len(server.bodies) == 1


def test_a_server_that_stays_away_ends_in_an_error_and_what_was_answered_is_kept(tmp_path, serve):
    server = serve([*[None] * 6, *[503] * 1000])
    with pytest.raises(
        ServerError, match="no answer after 3 attempts, last HTTP 503: not now.*finished chats and shards are kept"
    ):
        ask(tmp_path, server, prompts(12), retries=2)
    kept = len((tmp_path / "answers.jsonl").read_text().splitlines())
    assert kept > 0
    assert ask(tmp_path, serve(), prompts(12), retries=5) == run(tmp_path / "local", prompts(12))
    gone = RegenerateConfig(server="http://127.0.0.1:9", retries=1, backoff_s=0.001)
    with pytest.raises(ServerError, match="no answer after 2 attempts, last .*refused"):
        ServerEngine(gone, "m").answer([[1]], [], 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"top_p": 0.9}, "top_p 0.9 has no effect with temperature 0"),
        ({"concurrency": 4}, "concurrency 4 has no effect with server unset"),
        ({"server": "localhost:8000"}, "server must be a URL such as http://localhost:8000, got 'localhost:8000'"),
        ({"max_new_tokens": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(config, message):
    with pytest.raises(ValueError, match=message):
        RegenerateConfig(**config)


def test_a_stage_key_follows_the_sampling_and_not_the_patience():
    one = RegenerateConfig(server="http://a:1", concurrency=4)
    assert one.key() == RegenerateConfig(server="http://b:2", retries=1, batch_size=8).key()
    assert one.key() != RegenerateConfig().key()
    assert one.key() != RegenerateConfig(server="http://a:1", temperature=1.0).key()
    assert RegenerateConfig().key() != RegenerateConfig(batch_size=8).key()
