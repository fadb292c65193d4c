"""The target's own answers to the prompts, as token rows whose ids are exactly those the target saw and produced.

Every user turn is answered in order; recorded answers are replaced, except recorded tool calls whose results follow
(those results belong to those calls, so they stay as context). The prompt of a turn is the whole chat so far, rendered
as a server would render it, with the generated text in the history. Nothing is encoded twice in one row:

    turn 1   prompt ids + output ids                                   a row
    turn 2   prompt ids begin with exactly the ids of that row?  yes:  the row goes on, both answers supervised
                                                                 no:   a row of its own, only this answer supervised

(no: the template rewrites history, or the text of an answer encodes to other ids than were produced).

    folder/settings.json   what determines the answers; written first; a run with other settings is refused
    folder/answers.jsonl   one line per finished chat, appended as chats finish; a cut last line is discarded on resume
    folder/rows.jsonl      the rows in the order of the chats; written when all chats are finished
    folder/counts.json     chats, rows, tokens, how answers ended, what was dropped

Chats are answered in fixed groups (`Engine.wave` of them); a group with an unfinished chat is answered again as a whole.
So neither greedy nor sampled answers of the local engine depend on where a run was interrupted.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import os
import queue
import random
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftsmith.data.chat import (
    Chat,
    ChatConfig,
    Dropped,
    Row,
    Tally,
    Template,
    TemplateRefused,
    check_supervised,
    make_row,
    row_to_json,
)
from draftsmith.models.sampling import Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from draftsmith.models.target import Target

FORMAT = 1  # version of the folder
SETTINGS, ANSWERS, ROWS, COUNTS = "settings.json", "answers.jsonl", "rows.jsonl", "counts.json"
_RETRIED = {408, 425, 429, 500, 502, 503, 504}  # overload and passing faults; every other status is final
_SERVER_ONLY = ("model", "concurrency", "retries", "backoff_s", "timeout_s", "api_key_env")


class RegenerateConfig(BaseModel):
    """How answers are drawn, and by whom."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    temperature: float = Field(default=0.0, ge=0)  # 0 = greedy, what acceptance is measured with by default
    top_k: int = Field(default=0, ge=0)  # tokens; 0 = off
    top_p: float = Field(default=1.0, gt=0, le=1)  # probability mass; 1 = off
    seed: int = Field(default=0, ge=0)  # of sampled answers; each group of chats derives its own from it
    max_new_tokens: int = Field(default=512, ge=1)  # tokens per answer; one that reaches it is kept, finish = "length"
    max_context: int | None = Field(default=None, ge=2)  # tokens of prompt + answer; None = what the target can hold
    batch_size: int = Field(default=64, ge=1)  # chats answered together in process; 64 was fastest on a CPU core
    server: str | None = None  # URL of an OpenAI-compatible server (http://host:8000); None = in this process
    model: str | None = None  # name the server knows the target by; None = target.name
    concurrency: int = Field(default=32, ge=1)  # requests in flight; enough to keep one server's batch full
    retries: int = Field(default=8, ge=0)  # per request, on overload and connection faults; about 4 minutes in all
    backoff_s: float = Field(default=1.0, gt=0)  # seconds before the first retry; doubles each time, at most 60
    timeout_s: float = Field(default=600.0, gt=0)  # seconds one request may take; long answers need minutes
    api_key_env: str | None = None  # environment variable that holds the server's key; None = no key is sent

    @model_validator(mode="after")
    def _no_idle_option(self) -> RegenerateConfig:
        fields = type(self).model_fields
        idle = {name: "temperature 0" for name in ("top_k", "top_p") if self.temperature == 0}
        idle |= {name: "server unset" for name in _SERVER_ONLY if self.server is None}
        for name, why in idle.items():
            if (value := getattr(self, name)) != fields[name].default:
                raise ValueError(f"{name} {value!r} has no effect with {why}; remove it")
        if self.server is not None and not self.server.startswith(("http://", "https://")):
            raise ValueError(f"server must be a URL such as http://localhost:8000, got {self.server!r}")
        return self

    def key(self) -> dict[str, Any]:
        """What determines the answers, for stage keys: who is asked how often and how long does not."""
        idle = {"server", "concurrency", "retries", "backoff_s", "timeout_s", "api_key_env"}
        engine = {"batch_size"} if self.server is not None else set()
        return self.model_dump(mode="json", exclude=idle | engine) | {"server": self.server is not None}


class Answer(NamedTuple):
    """Generated ids, the stop token included, and how they ended."""

    ids: list[int]
    finish: Literal["stop", "length"]


class Engine(Protocol):
    """Who answers: `wave` chats are handed over together, `workers` such groups are in flight."""

    wave: int
    workers: int
    eos_ids: Collection[int]
    max_context: int | None

    def answer(self, prompts: Sequence[Sequence[int]], stop_ids: Collection[int], seed: int) -> list[Answer]:
        """One answer per prompt, in order."""

    def settings(self) -> dict[str, Any]:
        """What of this engine determines the answers."""


# -- engines ---------------------------------------------------------------------------------------------------------
class LocalEngine:
    """The target in this process."""

    workers = 1

    def __init__(self, target: Target, config: RegenerateConfig):
        self.target, self.config = target, config
        self.wave = config.batch_size
        self.eos_ids = target.spec.eos_ids
        self.max_context = config.max_context or target.spec.max_positions

    def answer(self, prompts: Sequence[Sequence[int]], stop_ids: Collection[int], seed: int) -> list[Answer]:
        config = self.config
        generator = torch.Generator(self.target.device).manual_seed(seed)
        sampler = Sampler(config.temperature, config.top_k, config.top_p, generator)
        found = self.target.generate(prompts, config.max_new_tokens, sampler, stop_ids, batch_size=self.wave)
        return [Answer(ids, "stop" if ids and ids[-1] in stop_ids else "length") for ids in found]

    def settings(self) -> dict[str, Any]:
        spec = self.target.spec
        about = {"engine": "local", "target": spec.name, "revision": spec.revision, "batch_size": self.wave}
        hashes = {"config_sha256": spec.config_sha256, "tokenizer_sha256": spec.tokenizer_sha256}
        return about | hashes | {"dtype": str(self.target.dtype).removeprefix("torch.")}


class ServerError(ValueError):
    """The server cannot give what is needed, after all retries."""


class ServerEngine:
    """An OpenAI-compatible completions server that takes and returns token ids (vLLM).

    Prompts go out as ids and the reply must hold the ids of prompt and answer, so nothing is encoded twice. Every
    sampling parameter is sent, because vLLM otherwise takes those of the model's generation config.
    """

    wave = 1  # each chat on its own: answers are written as soon as their chat is finished

    def __init__(self, config: RegenerateConfig, model: str, eos_ids: Collection[int] = ()):
        assert config.server is not None
        base = config.server.rstrip("/")
        self.url = (base if base.endswith("/v1") else base + "/v1") + "/completions"
        self.config, self.model, self.eos_ids = config, config.model or model, eos_ids
        self.workers, self.max_context = config.concurrency, config.max_context
        self.headers = {"Content-Type": "application/json"}
        if config.api_key_env is not None:
            if not (key := os.environ.get(config.api_key_env)):
                raise ValueError(f"api_key_env: the environment variable {config.api_key_env} is not set; set it")
            self.headers["Authorization"] = f"Bearer {key}"

    def answer(self, prompts: Sequence[Sequence[int]], stop_ids: Collection[int], seed: int) -> list[Answer]:
        return [self._complete(list(prompt), sorted(stop_ids), seed + i) for i, prompt in enumerate(prompts)]

    def settings(self) -> dict[str, Any]:
        return {"engine": "server", "model": self.model}

    def _complete(self, prompt: list[int], stop_ids: list[int], seed: int) -> Answer:
        config = self.config
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": config.max_new_tokens}
        body |= {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p, "seed": seed}
        body |= {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        body |= {"stop_token_ids": stop_ids, "return_token_ids": True, "add_special_tokens": False}
        reply = self.post(body)
        choice = (reply.get("choices") or [{}])[0]
        ids, seen = choice.get("token_ids"), choice.get("prompt_token_ids")
        if ids is None or seen is None:
            raise ServerError(
                f"{self.url}: the reply holds no token ids ({', '.join(sorted(choice)) or 'no choices'}), and text "
                "alone does not say which ids were produced; use a server that knows return_token_ids (vLLM >= 0.10.2)"
            )
        if seen != prompt:
            raise ServerError(
                f"{self.url}: the server saw {len(seen)} prompt ids, {len(prompt)} were sent and they differ; "
                "start it without prompt truncation and with the target's own tokenizer"
            )
        finish = choice.get("finish_reason")
        if finish not in ("stop", "length"):
            raise ServerError(f"{self.url}: finish_reason {finish!r}, wanted 'stop' or 'length'; look at its log")
        return Answer(ids, finish)

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """The reply's JSON object; waits and tries again on faults that may pass."""
        request = urllib.request.Request(self.url, json.dumps(body).encode(), self.headers)
        problem, wait = "", 0.0
        for attempt in range(self.config.retries + 1):
            if attempt:
                time.sleep(max(wait, self.delay(attempt)))
                wait = 0.0
            try:
                with urllib.request.urlopen(request, timeout=self.config.timeout_s) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code}: {_message(error)}"
                if error.code not in _RETRIED:
                    raise ServerError(f"{self.url}: {problem} (prompt of {len(body['prompt'])} ids)") from None
                wait = _seconds(error.headers.get("Retry-After"))
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:  # OSError: refused, timed out
                problem = f"{type(error).__name__}: {error}"
        raise ServerError(
            f"{self.url}: no answer after {self.config.retries + 1} attempts, last {problem}; see that the server runs, "
            "then start the same command again: finished chats and shards are kept"
        )

    def delay(self, attempt: int) -> float:
        """Exponential back-off with jitter, so that many clients do not come back at once."""
        return min(60.0, self.config.backoff_s * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)


def _message(error: urllib.error.HTTPError) -> str:
    """What the server says about a fault, shortened."""
    text = error.read(2000).decode("utf-8", "replace")
    try:
        found = json.loads(text)
        text = str(found.get("error", found).get("message", text))
    except (ValueError, AttributeError):
        pass
    return text.strip()[:300] or str(error.reason)


def _seconds(retry_after: str | None) -> float:
    """A Retry-After header in seconds; its date form is left to the back-off."""
    return min(300.0, float(retry_after)) if retry_after is not None and retry_after.isdigit() else 0.0


# -- the stage -------------------------------------------------------------------------------------------------------
def regenerate(
    chats: Iterable[Chat | Dropped],
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    chat_config: ChatConfig,
    config: RegenerateConfig,
    folder: str | Path,
    about: dict[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Answer every chat and return the path of rows.jsonl; goes on where an earlier run of the same settings stopped.

    about: what else determines the rows (the source's fingerprint); part of the settings.
    progress: told (number of chats finished, number of tokens they were answered with) as it happens; chats of an
    earlier run are reported first, with 0 tokens.
    """
    folder = Path(folder)
    template = Template(tokenizer, chat_config)
    ends = {*engine.eos_ids, tokenizer.eos_token_id, template.end_id}
    stop_ids = sorted(i for i in ends if i is not None)
    check_settings(folder, _settings(engine, template, config, stop_ids, about))
    if (folder / COUNTS).is_file():
        return folder / ROWS
    report = progress or (lambda chats, tokens: None)
    with _open_log(folder / ANSWERS) as log:
        if log.done:
            report(len(log.done), 0)

        def work(wave: list[tuple[int, Chat | Dropped]]) -> list[dict[str, Any]]:
            return _answer_wave(wave, engine, template, config, stop_ids)

        waves = _unfinished(_waves(chats, engine.wave), log)
        for lines in as_finished(work, waves, engine.workers):
            for line in lines:
                if line["chat"] not in log.done:
                    log.write(line)
                    report(1, line["tokens"])
        log.sync()
        return _finish(folder, log)


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a new folder, or refuse those that differ from the ones it was begun with."""
    path = folder / SETTINGS
    settings = json.loads(json.dumps(settings))  # as they will be read back
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, json.dumps(settings, indent=2, ensure_ascii=False))
        return
    old, new = _flat(json.loads(path.read_text(encoding="utf-8"))), _flat(settings)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            raise ValueError(
                f"{folder}: was begun with {key} = {old.get(key)!r}, this run has {new.get(key)!r}; "
                "go back to the old value or use another folder"
            )


def _settings(
    engine: Engine, template: Template, config: RegenerateConfig, stop_ids: list[int], about: dict[str, Any]
) -> dict[str, Any]:
    sampling = ("temperature", "top_k", "top_p", "seed", "max_new_tokens")
    return {
        "format": FORMAT,
        "sampling": {name: getattr(config, name) for name in sampling} | {"max_context": engine.max_context},
        "engine": engine.settings(),
        "stop_ids": stop_ids,
        "chat": template.config.model_dump(mode="json"),
        "template_sha256": hashlib.sha256(str(template.tokenizer.chat_template).encode()).hexdigest(),
        "about": about,
    }


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """{"a.b": leaf} of nested dicts."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    return {k: v for name, part in value.items() for k, v in _flat(part, f"{prefix}.{name}".lstrip(".")).items()}


def _write(path: Path, text: str) -> None:
    """Complete or absent: written beside, flushed, renamed."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


# -- answering -------------------------------------------------------------------------------------------------------
@dataclass
class _Dialogue:
    """A chat while it is being answered. `turns` holds, per answer, the messages that come in front of it."""

    index: int
    chat: Chat
    turns: list[list[dict[str, Any]]]
    history: list[dict[str, Any]] = field(default_factory=list)
    parts: list[tuple[list[int], list[tuple[int, int]], list[str]]] = field(default_factory=list)  # ids, spans, finish
    dropped: str | None = None
    tokens: int = 0

    def take(self, prompt: list[int], answer: Answer, text: str) -> None:
        """Add an answer: to the row so far when the prompt begins with exactly its ids, else as a new row."""
        ids = prompt + answer.ids
        span = (len(prompt), len(ids))
        if self.parts and prompt[: len(self.parts[-1][0])] == self.parts[-1][0]:
            _, spans, finish = self.parts[-1]
            self.parts[-1] = (ids, [*spans, span], [*finish, answer.finish])
        else:
            self.parts.append((ids, [span], [answer.finish]))
        self.tokens += len(answer.ids)
        self.history.append({"role": "assistant", "content": text})


def split_turns(messages: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Per answer to give, the messages in front of it since the answer before; see the rule at the top of this file."""
    turns: list[list[dict[str, Any]]] = []
    pending: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        following = messages[i + 1] if i + 1 < len(messages) else {"role": "end"}
        calls_tool = message["role"] == "assistant" and "tool_calls" in message and following["role"] == "tool"
        if message["role"] == "assistant" and not calls_tool:
            continue
        pending.append(message)
        recorded_call = "tool_calls" in following and i + 2 < len(messages) and messages[i + 2]["role"] == "tool"
        if message["role"] in ("user", "tool") and following["role"] != "tool" and not recorded_call:
            turns.append(pending)
            pending = []
    return turns


def _answer_wave(
    wave: list[tuple[int, Chat | Dropped]],
    engine: Engine,
    template: Template,
    config: RegenerateConfig,
    stop_ids: list[int],
) -> list[dict[str, Any]]:
    """The lines of answers.jsonl for a group of chats."""
    unreadable = [_line(index, chat, [], [chat.reason], 0) for index, chat in wave if isinstance(chat, Dropped)]
    open_chats = [(index, chat) for index, chat in wave if isinstance(chat, Chat)]
    dialogues = [_Dialogue(index, chat, split_turns(template.messages(chat))) for index, chat in open_chats]
    for turn in range(max((len(d.turns) for d in dialogues), default=0)):
        asked = [(d, prompt) for d in dialogues if (prompt := _prompt(d, turn, engine, template, config))]
        if not asked:
            break
        seed = _seed(config.seed, wave[0][0], turn)
        answers = engine.answer([prompt for _, prompt in asked], stop_ids, seed)
        for (dialogue, prompt), answer in zip(asked, answers, strict=True):
            if answer.ids:
                dialogue.take(prompt, answer, template.decode(answer.ids))
            else:
                dialogue.dropped = "answer: empty"
    return unreadable + [_lines_of(dialogue, template.config.last_turn_only) for dialogue in dialogues]


def _prompt(
    dialogue: _Dialogue, turn: int, engine: Engine, template: Template, config: RegenerateConfig
) -> list[int] | None:
    """The prompt ids of a turn, or None when the dialogue has no such turn or cannot go on (its `dropped` says why)."""
    if turn >= len(dialogue.turns) or dialogue.dropped:
        return None
    dialogue.history += dialogue.turns[turn]
    try:
        prompt = template.encode(template.text(dialogue.history, dialogue.chat.tools, prompt=True))
    except TemplateRefused as error:
        dialogue.dropped = str(error)
        return None
    if engine.max_context is not None and len(prompt) + config.max_new_tokens > engine.max_context:
        dialogue.dropped = f"prompt leaves less than max_new_tokens of the {engine.max_context} tokens of context"
        return None
    return prompt


def _lines_of(dialogue: _Dialogue, last_turn_only: bool) -> dict[str, Any]:
    chat, parts = dialogue.chat, dialogue.parts
    dropped = [dialogue.dropped] if dialogue.dropped else []
    if not dialogue.turns:
        dropped = ["no user turn to answer"]
    if last_turn_only:
        complete = bool(parts) and sum(len(spans) for _, spans, _ in parts) == len(dialogue.turns)
        parts = [(ids, spans[-1:], finish[-1:]) for ids, spans, finish in parts[-1:]] if complete else []
    rows = [
        make_row(chat, f"/{k}" if len(parts) > 1 else "", ids, spans, finish=finish, regenerated=True)
        for k, (ids, spans, finish) in enumerate(parts)
    ]
    return _line(dialogue.index, chat, rows, dropped, dialogue.tokens)


def _line(index: int, chat: Chat | Dropped, rows: list[Row], dropped: list[str], tokens: int) -> dict[str, Any]:
    texts = [json.loads(row_to_json(row)) for row in rows]
    return {"chat": index, "sha256": _digest(chat), "tokens": tokens, "dropped": dropped, "rows": texts}


def _digest(chat: Chat | Dropped) -> str:
    about = (chat.where, chat.reason) if isinstance(chat, Dropped) else (chat.kind, chat.messages, chat.tools)
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _seed(*parts: int) -> int:
    """A seed of its own for every (seed, group, turn), 0..2^62."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 2


def _waves(chats: Iterable[Chat | Dropped], size: int) -> Iterator[list[tuple[int, Chat | Dropped]]]:
    wave: list[tuple[int, Chat | Dropped]] = []
    for item in enumerate(chats):
        wave.append(item)
        if len(wave) == size:
            yield wave
            wave = []
    if wave:
        yield wave


def _unfinished(waves: Iterable[list[tuple[int, Chat | Dropped]]], log: _Log) -> Iterator[list]:
    """The groups with work left; a chat that is not the one answered under its number is an error."""
    seen = 0
    for wave in waves:
        for index, chat in wave:
            seen += 1
            if log.done.get(index, (_digest(chat), 0))[0] != _digest(chat):
                raise ValueError(
                    f"{log.path}: chat {index} ({chat.where}) is not the one that was answered before; "
                    "restore the source or use another folder"
                )
        if any(index not in log.done for index, _ in wave):
            yield wave
    if extra := [index for index in log.done if index >= seen]:
        raise ValueError(
            f"{log.path}: chat {min(extra)} was answered before, the source now ends after {seen} chats; "
            "restore the source or use another folder"
        )


def as_finished(work: Callable[[list], list], items: Iterable[list], workers: int) -> Iterator[list]:
    """work(item) of every item, in the order they finish, at most `workers` at a time; its errors are raised here."""
    if workers == 1:
        yield from map(work, items)
        return
    todo: queue.Queue[list | None] = queue.Queue()
    finished: queue.Queue[tuple[list, BaseException | None]] = queue.Queue()

    def serve() -> None:
        while (item := todo.get()) is not None:
            try:
                finished.put((work(item), None))
            except BaseException as error:  # carried over to the thread that asked
                finished.put(([], error))

    def next_result() -> list:
        result, error = finished.get()
        if error is not None:
            raise error
        return result

    for _ in range(workers):  # daemons: Ctrl-C does not wait for requests under way
        threading.Thread(target=serve, daemon=True).start()
    running = 0
    try:
        for item in items:
            todo.put(item)
            running += 1
            if running > workers:
                yield next_result()
                running -= 1
        for _ in range(running):
            yield next_result()
    finally:
        while not todo.empty():
            todo.get_nowait()
        for _ in range(workers):
            todo.put(None)


# -- answers.jsonl ---------------------------------------------------------------------------------------------------
class _Log:
    """The append-only file of finished chats. done: {chat number: (digest, offset of its line)}."""

    def __init__(self, path: Path, file: IO[bytes]):
        self.path, self.file = path, file
        self.done: dict[int, tuple[str, int]] = {}
        self.synced = time.monotonic()
        self._read()

    def _read(self) -> None:
        offset = 0
        self.file.seek(0)
        for number, line in enumerate(self.file, 1):
            if not line.endswith(b"\n"):  # the run was killed while it wrote this line
                break
            try:
                value = json.loads(line)
                index, digest = value["chat"], value["sha256"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{self.path}:{number}: damaged line; remove the folder and start again") from None
            if index in self.done:
                raise ValueError(f"{self.path}:{number}: chat {index} stands here twice; remove the folder")
            self.done[index] = (digest, offset)
            offset += len(line)
        self.file.truncate(offset)
        self.file.seek(offset)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line; it is on disk within five seconds of work, so a power cut costs that much."""
        self.done[line["chat"]] = (line["sha256"], self.file.tell())
        self.file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self.file.flush()
        if time.monotonic() - self.synced > 5.0:
            self.sync()

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.synced = time.monotonic()

    def lines(self) -> Iterator[dict[str, Any]]:
        """All lines in the order of the chats."""
        for index in sorted(self.done):
            self.file.seek(self.done[index][1])
            yield json.loads(self.file.readline())


@contextmanager
def _open_log(path: Path) -> Iterator[_Log]:
    """The log, locked: two processes on one folder would answer every chat twice."""
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path.parent}: another process is answering into this folder; wait for it") from None
        log = _Log(path, file)
        try:
            yield log
        finally:
            log.sync()


def _finish(folder: Path, log: _Log) -> Path:
    """Write rows.jsonl and counts.json from the log; the counts last, they say that the stage is finished."""
    tally, finish = Tally(chats=len(log.done)), Counter[str]()
    temporary = folder / (ROWS + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        for line in log.lines():
            tally.reasons.update(line["dropped"])
            for value in line["rows"]:
                tally.add(Row(**value))
                finish.update(value["meta"]["finish"])
                file.write(json.dumps(value, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    check_supervised(tally)
    temporary.replace(folder / ROWS)
    counts = {"chats": tally.chats, "rows": tally.rows, "tokens": tally.tokens, "supervised": tally.supervised}
    _write(folder / COUNTS, json.dumps(counts | {"finish": finish, "dropped": tally.reasons}, indent=2))
    return folder / ROWS
