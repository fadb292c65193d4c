"""From chats to token rows: reading, the chat template, and the loss mask.

Which tokens are supervised. For every assistant turn i two texts are rendered with the tokenizer's chat template:

    prompt_i = template(messages[:i], add_generation_prompt)      what a server puts in front of the answer
    full_i   = template(messages[:i + 1])                         the same chat with the answer

The answer is what follows prompt_i in full_i, up to and including the end-of-turn token: the tokens that the target
would have to generate. Text inside messages is never searched for markers. When full_i does not begin with prompt_i,
the target could not have produced this answer behind that prompt, and the turn is counted under a named reason. One
case is served all the same: an answer with reasoning of its own where the prompt ends in an empty think block; there
the answer begins at the first token that differs from the prompt.

Which turns share a row. Turn i + 1 joins the row of turn i when full_{i+1} begins with the very ids of full_i up to its
end of turn. Templates that rewrite history (Qwen3 drops earlier thinking) break this; the chat is then split, and every
turn is supervised in exactly the context it would be served in.

Generation marks (`{% generation %}`), where a template has them, can only narrow an answer: marks often include template
text (an empty think block) or leave out the end of turn, while the prompt says what a server really sends.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

SHIPPED = "shipped:"
_RESERVED = {"tokenize", "add_generation_prompt", "tools", "documents", "chat_template", "conversation", "return_dict"}


class Source(BaseModel):
    """Where chats come from. A plain string in a recipe is the `path` alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: str  # .jsonl, .json or .parquet file, folder in Hub layout, Hub id "org/name", or "shipped:prompts_train"
    split: str | None = None  # Hub ids and folders only; None = "train"; slices such as "train[:5%]" work
    revision: str | None = None  # Hub ids only: branch, tag or commit; None = the newest
    limit: int | None = Field(default=None, ge=1)  # chats; the first so many are taken, None = all
    kind: str | None = None  # prompt kind of chats whose row names none; None = "chat"
    bad_rows: Literal["stop", "count"] = "stop"  # a row of unknown shape stops the run, or is counted as dropped

    @model_validator(mode="before")
    @classmethod
    def _plain_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class ChatConfig(BaseModel):
    """How chats become prompts and rows; the same settings serve regenerate and the plain conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict
    )  # handed to the template, e.g. {enable_thinking: false}
    system: str | None = None  # put in front of chats without a system message; None keeps the template's own default
    last_turn_only: bool = False  # supervise only the last answer: history answers lack the reasoning served ones have

    @field_validator("template_kwargs")
    @classmethod
    def _no_reserved(cls, value: dict[str, Any]) -> dict[str, Any]:
        if wrong := sorted(_RESERVED & set(value)):
            raise ValueError(f"{', '.join(wrong)}: set by draftsmith, not a template argument; remove it")
        return value


@dataclass(frozen=True)
class Chat:
    """One conversation. messages: role, content (text), and for tools tool_calls / tool_call_id / name;
    reasoning stands in `reasoning_content`. Successive user messages are turns that wait for an answer."""

    id: str
    kind: str
    messages: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]] | None = None
    where: str = ""  # "file:line", for errors and for the row's meta


@dataclass(frozen=True)
class Row:
    """Exact token ids and, per id, 1 where the assistant produced it (end-of-turn included), else 0."""

    id: str
    kind: str
    input_ids: Sequence[int]
    loss_mask: Sequence[int]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def num_supervised(self) -> int:
        return sum(self.loss_mask)


@dataclass(frozen=True)
class Dropped:
    """Something that cannot be used: `reason` is what is counted, `where` the chat it happened in."""

    reason: str
    where: str = ""


@dataclass
class Tally:
    """What became of the chats that were read. `reasons` counts chats and single answers that were dropped."""

    chats: int = 0
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, row: Row) -> None:
        self.rows += 1
        self.tokens += len(row.input_ids)
        self.supervised += row.num_supervised


# -- rows on disk ----------------------------------------------------------------------------------------------------
def write_rows(path: str | Path, rows: Iterable[Row]) -> Path:
    """Write rows as JSONL under a temporary name, then rename: the file is complete or absent. Returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(row_to_json(row) + "\n")
    temporary.replace(path)
    return path


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a file that write_rows or regenerate wrote; iter_rows reads a large one piece by piece."""
    return list(iter_rows(path))


def iter_rows(path: str | Path) -> Iterator[Row]:
    """Rows one by one; a line that is no row is an error that names file and line."""
    for where, value in _lines(Path(path)):
        yield row_from_dict(value, where)


def row_to_json(row: Row) -> str:
    return json.dumps(
        {**asdict(row), "input_ids": list(row.input_ids), "loss_mask": list(row.loss_mask)}, ensure_ascii=False
    )


def row_from_dict(value: Any, where: str) -> Row:
    """A Row from its JSON object, checked: ids and mask are of one length, the mask is 0 / 1."""
    names = {"id", "kind", "input_ids", "loss_mask", "meta"}
    if not isinstance(value, dict) or set(value) != names:
        got = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{where}: not a token row: got {got}, wanted {sorted(names)}; give a rows.jsonl file")
    ids, mask = value["input_ids"], value["loss_mask"]
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        sizes = [len(x) if isinstance(x, list) else type(x).__name__ for x in (ids, mask)]
        raise ValueError(f"{where}: input_ids and loss_mask must be lists of one length, got {sizes[0]} and {sizes[1]}")
    if not all(type(i) is int and i >= 0 for i in ids) or not set(mask) <= {0, 1}:
        raise ValueError(f"{where}: input_ids must be integers >= 0 and loss_mask 0 or 1; write the file again")
    return Row(str(value["id"]), str(value["kind"]), tuple(ids), tuple(mask), value["meta"])


# -- reading chats ---------------------------------------------------------------------------------------------------
def read_chats(source: Source | str) -> Iterator[Chat | Dropped]:
    """Chats of a source in file order. Dropped appears only with `bad_rows: count`; else a bad row is an error.

    Row shapes: {"messages": [...]}, ShareGPT {"conversations": [{"from", "value"}, ...]}, {"prompt": text or messages},
    {"turns": [text, ...]}; optional "tools" (list, or a list as JSON text), "id", "kind", "system".
    """
    source = Source(path=source) if isinstance(source, str) else source
    number = 0
    for where, value in islice(_values(source), source.limit):
        number += 1
        try:
            yield _chat(value, where, source.kind or "chat")
        except ValueError as error:
            if source.bad_rows == "stop":
                raise
            yield Dropped("unreadable row" + str(error).removeprefix(where)[:80], where)
    if number == 0:
        raise ValueError(f"{source.path}: holds no chats; expected one JSON object a line, or a set with rows")


def fingerprint(source: Source) -> dict[str, Any]:
    """What determines a source's chats, for stage keys: its settings and a content hash (or the Hub's commit)."""
    kind, path = _locate(source)
    if kind == "hub":
        from huggingface_hub import HfApi

        digest = str(HfApi().dataset_info(source.path, revision=source.revision).sha)
    else:
        sha = hashlib.sha256()
        for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
            sha.update(file.relative_to(path).as_posix().encode() + b"\0")
            with open(file, "rb") as stream:
                sha.update(hashlib.file_digest(stream, "sha256").digest())
        digest = sha.hexdigest()
    return source.model_dump(mode="json", exclude={"path", "bad_rows"}) | {"content": digest}


def _locate(source: Source) -> tuple[Literal["lines", "json", "parquet", "folder", "hub"], Path]:
    """How a source is read, and its path; settings that would have no effect are refused."""
    path = Path(source.path).expanduser()
    if source.path.startswith(SHIPPED):
        here = Path(__file__).parent
        path = here / (source.path.removeprefix(SHIPPED) + ".jsonl")
        if not path.is_file():
            names = ", ".join(SHIPPED + p.stem for p in sorted(here.glob("prompts_*.jsonl")))
            raise ValueError(f"{source.path}: no such shipped prompts; there are {names}")
    kinds: dict[str, Literal["lines", "json", "parquet"]] = {".jsonl": "lines", ".json": "json", ".parquet": "parquet"}
    if path.is_dir():
        _no_effect(source, ("revision",), "a local folder")
        return "folder", path
    if path.is_file() or path.suffix in kinds:
        _no_effect(source, ("split", "revision"), "a local file")
        if not path.is_file():
            raise ValueError(f"{source.path}: no such file (looked from {Path.cwd()})")
        if path.suffix not in kinds:
            raise ValueError(f"{source.path}: cannot read {path.suffix or 'this'} files; give {', '.join(kinds)}")
        return kinds[path.suffix], path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source.path):
        raise ValueError(f"{source.path}: no such file or folder, and not a Hub id such as org/name")
    return "hub", path


def _no_effect(source: Source, names: tuple[str, ...], what: str) -> None:
    for name in names:
        if (value := getattr(source, name)) is not None:
            raise ValueError(f"{source.path}: {name} {value!r} has no effect on {what}; remove it")


def _values(source: Source) -> Iterator[tuple[str, Any]]:
    kind, path = _locate(source)
    if kind == "lines":
        yield from _lines(path)
    elif kind == "json":
        try:
            values = json.loads(path.read_text(encoding="utf-8-sig"))
        except ValueError as error:
            raise ValueError(f"{path}: not JSON: {error}; a file with one object a line is named .jsonl") from None
        if not isinstance(values, list):
            raise ValueError(f"{path}: must hold a list of chats, got {type(values).__name__}")
        yield from ((f"{path}[{i}]", value) for i, value in enumerate(values))
    else:
        yield from _dataset(source, kind, path)


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """("file:line", JSON value) of every line that is not blank. Types may differ freely from line to line."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file (looked from {Path.cwd()})")
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield where, json.loads(text)
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8: {error.reason} at byte {error.start}; save as UTF-8") from None
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}; repair the line") from None


def _dataset(source: Source, kind: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Rows read by `datasets`. Arrow fills the keys a struct lacks with null, so null keys are taken out again."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    split = source.split or "train"
    try:
        if kind == "parquet":
            rows = load_dataset("parquet", data_files=str(path), split="train")
        elif kind == "folder":
            rows = load_dataset(str(path), split=split)
        else:
            rows = load_dataset(source.path, split=split, revision=source.revision)
    except (ValueError, OSError, DatasetsError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        what = f"split {split!r}, revision {source.revision!r}"
        hint = "check name, split and revision; give a .jsonl file itself to have it read line by line"
        raise ValueError(f"{source.path} ({what}): datasets could not read it: {first}; {hint}") from error
    for number, row in enumerate(rows):
        yield f"{source.path}[{number}]", _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


# -- one row of a file -> Chat ---------------------------------------------------------------------------------------
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_ROLES |= {"observation": "tool", "function": "tool", "function_response": "tool", "tool_response": "tool"}
_ROLES |= {role: role for role in ("system", "developer", "user", "assistant", "tool", "function_call")}


def _chat(value: Any, where: str, kind: str) -> Chat:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be a JSON object, got {type(value).__name__}")
    shapes = ("messages", "conversations", "prompt", "turns")
    name = next((n for n in shapes if value.get(n) is not None), None)
    if name is None:
        raise ValueError(f"{where}: none of {', '.join(shapes)} in the row; it has {', '.join(value) or 'no keys'}")
    turns = value[name]
    if name == "prompt" and isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    if not isinstance(turns, list) or not turns:
        got = "an empty list" if turns == [] else type(turns).__name__
        raise ValueError(f"{where}: {name!r} must be a non-empty list, got {got}")
    if name == "turns":
        turns = [{"role": "user", "content": turn} for turn in turns]
    messages = [_message(turn, f"{where}: {name}[{i}]") for i, turn in enumerate(turns)]
    if isinstance(value.get("system"), str) and value["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": value["system"]})
    given = value.get("id")
    tools = _tools(value.get("tools"), where)
    label = where.rsplit("/", 1)[-1] if given is None else str(given)
    return Chat(label, str(value.get("kind") or kind), tuple(messages), tools, where)


def _message(turn: Any, where: str) -> dict[str, Any]:
    """One message in the form chat templates expect; see Chat."""
    if not isinstance(turn, dict):
        raise ValueError(f"{where} must be an object with role and content, got {type(turn).__name__}")
    turn = dict(turn)
    if "from" in turn:
        turn = {"role": turn.pop("from"), "content": turn.pop("value", None), **turn}
    role = _ROLES.get(str(turn.get("role")).lower())
    if role is None:
        raise ValueError(f"{where}: role {turn.get('role')!r} is unknown; known: {', '.join(sorted(_ROLES))}")
    content = turn.get("content")
    if role == "function_call":  # ShareGPT writes a call as the text of a turn of its own
        return {"role": "assistant", "content": "", "tool_calls": [_call(content, where)]}
    turn["role"] = role
    if (calls := turn.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise ValueError(f"{where}: 'tool_calls' must be a list, got {type(calls).__name__}")
        turn["tool_calls"] = [_call(call, where) for call in calls]
    if not turn.get("tool_calls"):
        turn.pop("tool_calls", None)
    if turn.get("reasoning") and not turn.get("reasoning_content"):
        turn["reasoning_content"] = turn["reasoning"]
    turn.pop("reasoning", None)
    if not turn.get("reasoning_content"):
        turn.pop("reasoning_content", None)
    if content is None and (role != "assistant" or not {"tool_calls", "reasoning_content"} & set(turn)):
        raise ValueError(f"{where}: a {role} message needs 'content', got none")
    turn["content"] = _text(content, where)
    return turn


def _text(content: Any, where: str) -> str:
    """Message text; a list of text parts is joined, anything that is not text is refused."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"{where}: 'content' must be text, got {type(content).__name__}")
    parts = [part if isinstance(part, str) else part.get("text") for part in content if isinstance(part, str | dict)]
    if len(parts) < len(content) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{where}: 'content' has parts that are not text; drafts are trained on text only")
    return "\n".join(part for part in parts if part is not None)


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object: templates (and vLLM) want no JSON text here."""
    if isinstance(call, str):
        call = _json(call, f"{where}: function_call")
    if not isinstance(call, dict):
        raise ValueError(f"{where}: a tool call must be an object, got {type(call).__name__}")
    call = dict(call)
    holder = call["function"] = dict(call["function"]) if isinstance(call.get("function"), dict) else None
    if holder is None:
        del call["function"]
        holder = call
    arguments = holder.get("arguments")
    if isinstance(arguments, str):
        holder["arguments"] = _json(arguments or "{}", f"{where}: 'arguments' of a tool call")
    elif arguments is not None and not isinstance(arguments, dict):
        raise ValueError(f"{where}: 'arguments' must be an object or JSON text, got {type(arguments).__name__}")
    return call


def _tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    if isinstance(tools, str) and tools.strip():
        tools = _json(tools, f"{where}: 'tools'")
    if not tools and (tools is None or isinstance(tools, list | str)):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        got = f"a list with {tools!r:.40}" if isinstance(tools, list) else type(tools).__name__
        raise ValueError(f"{where}: 'tools' must be a list of tool schemas (or that list as JSON text), got {got}")
    return tools


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error} in {text!r:.60}") from None


# -- the chat template -----------------------------------------------------------------------------------------------
class TemplateRefused(ValueError):
    """The chat template raised on this chat; the message is what is counted."""


class Template:
    """The tokenizer's chat template under a ChatConfig: text and ids exactly as a server with this template has them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: ChatConfig):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path or 'this target'} has no chat template, so chats cannot be "
                "rendered; set target.chat_template to the Jinja file your server uses"
            )
        self.tokenizer = tokenizer
        self.config = config
        specials = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(specials | set(tokenizer.all_special_ids))
        self.has_marks = bool(re.search(r"\{%-?\s*generation\b", str(tokenizer.chat_template)))
        self.end_id = self._find_end_id()

    def messages(self, chat: Chat) -> list[dict[str, Any]]:
        """The chat's messages with the configured system prompt in front where the chat has none."""
        messages = list(chat.messages)
        if self.config.system is not None and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": self.config.system})
        return messages

    def text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool) -> str:
        """Rendered text; prompt: with the generation prompt at the end. Raises TemplateRefused."""
        return self._apply(messages, tools, tokenize=False, add_generation_prompt=prompt)

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text; the template has already written the begin-of-text token."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, with markers such as <think>, without the end of turn."""
        ids = list(ids)
        while ids and ids[-1] in self.special_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def answer_end(self, ids: Sequence[int], start: int) -> int:
        """Where the answer that begins at `start` and runs to the end of `ids` ends, end-of-turn token included.

        Only the tail of special and white-space tokens is looked at: the template's end-of-turn token in it, else its
        first special token. A template that writes none ends the answer in front of the white space.
        """
        tail = len(ids)
        while tail > start and (
            ids[tail - 1] in self.special_ids or not str(self.tokenizer.decode(ids[tail - 1])).strip()
        ):
            tail -= 1
        special = [k for k in range(tail, len(ids)) if ids[k] in self.special_ids]
        ends = [k for k in special if ids[k] == self.end_id] or special
        return ends[0] + 1 if ends else tail

    def marks(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, ids: list[int]) -> list[int]:
        """The template's own generation marks, one per id, or [] when they do not belong to exactly these ids."""
        out = self._apply(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(out["assistant_masks"]) if list(out["input_ids"]) == ids else []

    def _apply(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, **options, **self.config.template_kwargs)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:  # whatever Jinja code raises
            raise TemplateRefused(f"chat template raised {type(error).__name__}: {str(error)[:120]}") from error

    def _find_end_id(self) -> int | None:
        """The end-of-turn token, from a two-message chat; None when the template refuses it or writes no such token."""
        probe = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
        try:
            ids = self.encode(self.text(probe, None, prompt=False))
        except TemplateRefused:
            return None
        self.end_id = None
        end = self.answer_end(ids, 0)
        return ids[end - 1] if ids and ids[end - 1] in self.special_ids else None


# -- chats -> rows ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Answer:
    """One assistant turn: the ids of the chat up to it, and the half-open range that the assistant produced."""

    ids: list[int]
    start: int
    end: int
    turn: int  # index of the message


def rows_from_chats(
    chats: Iterable[Chat | Dropped],
    tokenizer: PreTrainedTokenizerBase,
    config: ChatConfig,
    tally: Tally,
    max_len: int | None = None,
    min_supervised: int = 1,
    vocab_size: int | None = None,
) -> Iterator[Row]:
    """Rows of all chats; `tally` counts what was dropped and why.

    max_len cuts rows from the right; rows with fewer than min_supervised supervised tokens are dropped; vocab_size is
    the number of rows of the target's embedding. Raises at the end when not one token is supervised.
    """
    template = Template(tokenizer, config)
    for chat in chats:
        tally.chats += 1
        for made in [chat] if isinstance(chat, Dropped) else to_rows(chat, template):
            row = made if isinstance(made, Dropped) else limit_row(made, max_len, min_supervised)
            if isinstance(row, Dropped):
                tally.reasons[row.reason] += 1
                continue
            check_ids(row, tokenizer, vocab_size)
            tally.add(row)
            yield row
    check_supervised(tally)


def to_rows(chat: Chat, template: Template) -> list[Row | Dropped]:
    """The rows of one chat (several when the template rewrites history) and its answers that cannot be used."""
    messages = template.messages(chat)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        return [Dropped("no assistant turn (prompts need regenerate)", chat.where)]
    out: list[Row | Dropped] = []
    answers: list[_Answer] = []
    try:
        for turn in turns[-1:] if template.config.last_turn_only else turns:
            made = _answer(template, messages, chat, turn)
            (answers if isinstance(made, _Answer) else out).append(made)  # type: ignore[arg-type]
    except TemplateRefused as error:
        return [Dropped(str(error), chat.where)]
    groups = _share_rows(answers)
    for group in groups:
        suffix = f"/{group[0].turn}" if len(groups) > 1 else ""
        out.append(make_row(chat, suffix, group[-1].ids, [(a.start, a.end) for a in group]))
    return out


def make_row(chat: Chat, suffix: str, ids: Sequence[int], spans: list[tuple[int, int]], **meta: Any) -> Row:
    """A Row whose supervised tokens are the half-open `spans`."""
    mask = [0] * len(ids)
    for start, end in spans:
        mask[start:end] = [1] * (end - start)
    return Row(chat.id + suffix, chat.kind, tuple(ids), tuple(mask), {"from": chat.where, **meta})


def limit_row(row: Row, max_len: int | None, min_supervised: int) -> Row | Dropped:
    """The row cut to max_len tokens, or Dropped when too little of it is supervised."""
    ids, mask = row.input_ids[:max_len], row.loss_mask[:max_len]
    num, where = sum(mask), str(row.meta.get("from", row.id))
    if num == 0 and row.num_supervised:
        return Dropped(f"no supervised token within max_len {max_len}", where)
    if num < max(1, min_supervised):
        return Dropped(f"fewer than {max(1, min_supervised)} supervised tokens", where)
    return row if len(ids) == len(row.input_ids) else Row(row.id, row.kind, ids, mask, row.meta)


def check_ids(row: Row, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None) -> None:
    """Refuse token ids past the target's embedding, before any work is done with them."""
    if vocab_size is not None and (worst := max(row.input_ids, default=0)) >= vocab_size:
        raise ValueError(
            f"{row.meta.get('from', row.id)}: token {tokenizer.convert_ids_to_tokens(worst)!r} has id {worst}, the target's "
            f"embedding has {vocab_size} rows (ids 0..{vocab_size - 1}); use the tokenizer the target was made with"
        )


def check_supervised(tally: Tally) -> None:
    if tally.supervised == 0:
        why = "; ".join(f"{num} x {reason}" for reason, num in tally.reasons.most_common(5)) or "no chats"
        raise ValueError(f"0 trainable tokens in {tally.chats} samples: {why}; look at a chat and at the chat template")


def _answer(template: Template, messages: list[dict[str, Any]], chat: Chat, turn: int) -> _Answer | Dropped:
    """The assistant turn `turn`, found by comparing the rendering with it and the prompt in front of it."""
    prompt = template.text(messages[:turn], chat.tools, prompt=True)
    full = template.text(messages[: turn + 1], chat.tools, prompt=False)
    if missing := _left_out(messages[turn], full):
        return Dropped(f"answer: the chat template leaves out {missing}", chat.where)
    prompt_ids, ids = template.encode(prompt), template.encode(full)
    start = len(prompt_ids)
    if not full.startswith(prompt):
        before = template.text(messages[:turn], chat.tools, prompt=False)
        if not _reasoning(messages[turn]) or len(commonprefix([prompt, full])) <= len(before):
            return Dropped("answer: the chat template's answer does not continue its generation prompt", chat.where)
        start = len(commonprefix([prompt_ids, ids]))
    elif ids[:start] != prompt_ids:  # a token across the border: a server could not have produced it
        ids = prompt_ids + template.encode(full[len(prompt) :])
    if template.has_marks:
        marks = template.marks(messages[: turn + 1], chat.tools, ids)
        start = next((k for k in range(start, len(marks)) if marks[k]), start)
    return _Answer(ids, start, template.answer_end(ids, start), turn)


def _reasoning(message: dict[str, Any]) -> str:
    """The reasoning of an assistant message, from `reasoning_content` or from think tags in the content."""
    before, tag, _ = message["content"].partition("</think>")
    return str(message.get("reasoning_content") or (before.removeprefix("<think>") if tag else "")).strip()


def _left_out(message: dict[str, Any], full: str) -> str | None:
    """What of an assistant message is not in its rendering: training on the rest would teach another answer."""
    if _reasoning(message) not in full:
        return "the reasoning"
    names = [call.get("function", call).get("name") for call in message.get("tool_calls", [])]
    return "the tool calls" if any(name and name not in full for name in names) else None


def _share_rows(answers: list[_Answer]) -> list[list[_Answer]]:
    """Answers grouped by row: one joins the row before it when its ids begin with that row's up to its last answer."""
    groups: list[list[_Answer]] = []
    for answer in answers:
        last = groups[-1][-1] if groups else None
        if last is not None and answer.ids[: last.end] == last.ids[: last.end]:
            groups[-1].append(answer)
        else:
            groups.append([answer])
    return groups


# -- for people ------------------------------------------------------------------------------------------------------
def drop_table(tally: Tally) -> Table:
    """Why chats or single answers were dropped, most frequent first."""
    from rich.table import Table

    table = Table(title=f"dropped, out of {tally.chats:,} chats", title_justify="left")
    table.add_column("reason")
    table.add_column("number", justify="right")
    for reason, num in tally.reasons.most_common():
        table.add_row(reason, f"{num:,}")
    if not tally.reasons:
        table.add_row("nothing", "0")
    return table


def show_row(row: Row, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The row's text, supervised tokens in bold green, the rest dim."""
    from rich.text import Text

    text = Text()
    start = 0
    while start < len(row.input_ids):
        end = start
        while end < len(row.input_ids) and row.loss_mask[end] == row.loss_mask[start]:
            end += 1  # runs are decoded whole: one letter may be several tokens
        piece = tokenizer.decode(list(row.input_ids[start:end]), skip_special_tokens=False)
        text.append(str(piece), style="bold green" if row.loss_mask[start] else "dim")
        start = end
    return text
