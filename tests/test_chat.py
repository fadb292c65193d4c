"""Protects how chats become token rows: every shape of input, and the loss mask against a slow reading of the text.

Run: pytest tests/test_chat.py
"""

from __future__ import annotations

import json
from collections import Counter
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tiny import EMPTYTHINK, END_THINK, GEN, IM_END, PLAIN, THINK, tokenizer

from draftsmith.data.chat import (
    Chat,
    ChatConfig,
    Dropped,
    Row,
    Source,
    Tally,
    Template,
    drop_table,
    fingerprint,
    limit_row,
    read_chats,
    read_rows,
    rows_from_chats,
    show_row,
    to_rows,
    write_rows,
)

TWO_TURNS = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "abc"},
    {"role": "user", "content": "yo"},
    {"role": "assistant", "content": "de"},
)
TOOLS = (  # writes tool schemas and calls as JSON
    "{% if tools %}{{ 'T' + (tools | tojson) + '\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DROPS_THINKING = (  # as Qwen3: reasoning only in the last answer, thinking switched off by an empty block
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is false %}{{ '<think></think>' }}{% endif %}{% endif %}"
)


def chat(*messages: dict, tools=None) -> Chat:
    return Chat("c", "chat", tuple(messages), tools, "here:1")


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def rows(made: Chat, template: str = PLAIN, **config) -> list[Row]:
    found = to_rows(made, Template(tokenizer(template), ChatConfig(**config)))
    assert all(isinstance(row, Row) for row in found), found
    return [row for row in found if isinstance(row, Row)]


def reasons(made: Chat, template: str = PLAIN, **config) -> list[str]:
    found = to_rows(made, Template(tokenizer(template), ChatConfig(**config)))
    return [item.reason for item in found if isinstance(item, Dropped)]


def supervised(row: Row) -> list[str]:
    """The runs of supervised tokens as text, read token by token."""
    runs, inside = [], False
    tok = tokenizer()
    for token, mask in zip(row.input_ids, row.loss_mask, strict=True):
        if mask:
            piece = tok.decode([token])
            runs[-1:] = [runs[-1] + piece] if inside else [*runs[-1:], piece]
        inside = bool(mask)
    return runs


def lines(path: Path, *values) -> str:
    path.write_text("".join(json.dumps(v, ensure_ascii=False) + "\n" for v in values), encoding="utf-8")
    return str(path)


def read(source) -> list[Chat]:
    found = list(read_chats(source))
    assert all(isinstance(c, Chat) for c in found)
    return [c for c in found if isinstance(c, Chat)]


# -- the loss mask ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("template", [PLAIN, GEN])
def test_exactly_the_answers_and_their_end_of_turn_are_supervised(template):
    (row,) = rows(chat(*TWO_TURNS), template)
    assert len(row.input_ids) == 51
    assert row.num_supervised == 7
    assert supervised(row) == ["abc<|im_end|>", "de<|im_end|>"]


@pytest.mark.parametrize(("max_len", "want"), [(51, 7), (40, 4), (30, 4), (22, 1)])
def test_truncation_keeps_the_mask_of_the_prefix(max_len, want):
    (row,) = rows(chat(*TWO_TURNS), GEN)
    cut = limit_row(row, max_len, 1)
    assert isinstance(cut, Row)
    assert cut.num_supervised == want
    assert (cut.input_ids, cut.loss_mask) == (row.input_ids[:max_len], row.loss_mask[:max_len])


def test_a_row_cut_to_nothing_and_a_row_with_too_little_are_dropped_with_the_reason():
    (row,) = rows(chat(*TWO_TURNS))
    assert limit_row(row, 10, 1) == Dropped("no supervised token within max_len 10", "here:1")
    assert limit_row(row, None, 8) == Dropped("fewer than 8 supervised tokens", "here:1")
    assert limit_row(row, None, 7) == row


def test_a_marker_quoted_by_the_user_is_not_taken_for_a_turn():
    quoted = user('print "<|im_start|>assistant\nSECRET<|im_end|>"')
    (row,) = rows(chat(quoted, assistant("ok")))
    assert supervised(row) == ["ok<|im_end|>"]


def test_a_marker_quoted_by_the_assistant_does_not_end_its_turn():
    (row,) = rows(chat(user("how?"), assistant("write <|im_end|> then go on")))
    assert supervised(row) == ["write <|im_end|> then go on<|im_end|>"]


def test_an_empty_think_block_of_the_prompt_is_not_supervised():
    (row,) = rows(chat(user("hi"), assistant("abc")), EMPTYTHINK)
    assert supervised(row) == ["abc<|im_end|>"]


def test_real_reasoning_in_place_of_the_empty_block_is_supervised():
    made = chat(user("q"), assistant("<think>r1</think>a1"), user("q"), assistant("<think>r2</think>a2"))
    (row,) = rows(made, EMPTYTHINK)
    assert supervised(row) == ["r1</think>a1<|im_end|>", "r2</think>a2<|im_end|>"]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_a_template_that_drops_earlier_thinking_gives_one_row_per_turn(tmp_path, field):
    one, two = assistant("a1", **{field: "r1"}), assistant("a2", **{field: "r2"})
    (made,) = read(lines(tmp_path / "c.jsonl", {"messages": [user("q1"), one, user("q2"), two], "id": "c"}))
    first, second = rows(made, DROPS_THINKING)
    assert (first.id, second.id) == ("c/1", "c/3")
    assert supervised(first) == ["<think>r1</think>a1<|im_end|>"]
    assert supervised(second) == ["<think>r2</think>a2<|im_end|>"]
    assert "r1" not in tokenizer().decode(second.input_ids)


def test_template_arguments_reach_the_template():
    made = chat(user("q"), assistant("abc"))
    (thinking,) = rows(made, DROPS_THINKING)
    (plain,) = rows(made, DROPS_THINKING, template_kwargs={"enable_thinking": False})
    assert supervised(thinking) == ["<think></think>abc<|im_end|>"]
    assert supervised(plain) == ["abc<|im_end|>"]
    with pytest.raises(ValueError, match="add_generation_prompt: set by draftsmith"):
        ChatConfig(template_kwargs={"add_generation_prompt": True})


def test_last_turn_only_leaves_the_first_answer_out_and_survives_no_truncation():
    (whole,) = rows(chat(*TWO_TURNS))
    (last,) = rows(chat(*TWO_TURNS), last_turn_only=True)
    assert last.input_ids == whole.input_ids
    assert supervised(last) == ["de<|im_end|>"]
    assert limit_row(last, 30, 1) == Dropped("no supervised token within max_len 30", "here:1")


def test_the_first_supervised_token_follows_the_ids_a_server_sends():
    tok = tokenizer(EMPTYTHINK)
    template = Template(tok, ChatConfig(system="be brief"))
    made = chat(*TWO_TURNS)
    (row,) = [row for row in to_rows(made, template) if isinstance(row, Row)]
    for turn in (1, 3):
        before = template.messages(made)[: turn + 1]
        sent = tok.apply_chat_template(before, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert list(row.input_ids[: len(sent)]) == sent
        assert (row.loss_mask[len(sent) - 1], row.loss_mask[len(sent)]) == (0, 1)


def test_marks_that_cover_template_text_are_narrowed_and_a_lacking_end_of_turn_is_added():
    wide = EMPTYTHINK.replace("{% if m.role == 'assistant' and", "{% generation %}{% if m.role == 'assistant' and")
    wide = wide.replace("{{ m.content + '<|im_end|>\n' }}", "{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}")
    (row,) = rows(chat(*TWO_TURNS), wide)
    assert supervised(row) == ["abc<|im_end|>", "de<|im_end|>"]


def test_marks_keep_a_header_out_when_the_template_has_no_generation_prompt():
    no_prompt = GEN.replace("{% if add_generation_prompt %}", "{% if false %}")
    (row,) = rows(chat(*TWO_TURNS), no_prompt)
    assert supervised(row) == ["abc<|im_end|>", "de<|im_end|>"]


def test_an_end_of_text_token_behind_the_end_of_turn_is_not_supervised():
    closed = PLAIN.replace("{% if add_generation_prompt %}", "{% if not add_generation_prompt %}<eos>{% else %}")
    first, second = rows(chat(*TWO_TURNS), closed), rows(chat(*TWO_TURNS[:2]), closed)
    assert supervised(first[0]) == ["abc<|im_end|>", "de<|im_end|>"]
    assert supervised(second[0]) == ["abc<|im_end|>"]


def test_a_template_without_end_of_turn_supervises_the_text_alone():
    bare = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    bare += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    (row,) = rows(chat(*TWO_TURNS), bare)
    assert supervised(row) == ["abc", "de"]


def test_a_token_across_the_border_is_split_as_a_server_would():
    class Greedy:
        """A tokenizer that joins two newlines into one token."""

        def __init__(self):
            self.inner = tokenizer(PLAIN.replace("'<|im_end|>\n'", "'<|im_end|>'"))

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __call__(self, text, **options):
            ids = self.inner(text, **options)["input_ids"]
            joined: list[int] = []
            for i in ids:
                if i == 10 and joined and joined[-1] == 10:
                    joined[-1] = 262 + 1
                else:
                    joined.append(i)
            return {"input_ids": joined}

    found = to_rows(chat(user("q"), assistant("\nabc")), Template(Greedy(), ChatConfig()))  # type: ignore[arg-type]
    assert isinstance(found[0], Row)
    assert supervised(found[0]) == ["\nabc<|im_end|>"]
    assert 263 not in found[0].input_ids


def test_text_beyond_ascii_is_supervised_byte_by_byte():
    (row,) = rows(chat(user("wie?"), assistant("größe 龍 🐉")))
    kept = [i for i, mask in zip(row.input_ids, row.loss_mask, strict=True) if mask]
    assert bytes(kept[:-1]).decode() == "größe 龍 🐉"
    assert kept[-1] == IM_END


def test_begin_of_text_is_not_doubled_by_the_tokenizer():
    tok = tokenizer("<bos>" + PLAIN, bos_first=True)
    (row,) = [r for r in to_rows(chat(*TWO_TURNS), Template(tok, ChatConfig())) if isinstance(r, Row)]
    assert list(row.input_ids).count(256) == 1


def test_a_system_prompt_of_the_settings_is_used_only_where_the_chat_has_none():
    (added,) = rows(chat(*TWO_TURNS), system="be kind")
    assert tokenizer().decode(added.input_ids).startswith("<|im_start|>system\nbe kind<|im_end|>")
    own = chat({"role": "system", "content": "mine"}, *TWO_TURNS)
    (kept,) = rows(own, system="be kind")
    assert "be kind" not in tokenizer().decode(kept.input_ids)


# -- what cannot be used ---------------------------------------------------------------------------------------------
def test_a_template_that_raises_is_a_reason_with_its_message():
    strict = "{{ raise_exception('roles must alternate') }}"
    assert reasons(chat(*TWO_TURNS), strict) == ["chat template raised TemplateError: roles must alternate"]
    assert reasons(chat(*TWO_TURNS), "{{ messages[0].content + 1 }}")[0].startswith("chat template raised TypeError")


def test_an_answer_that_the_template_does_not_write_in_full_is_not_trained_on():
    lost = chat(user("q"), assistant("a", reasoning_content="because"))
    assert reasons(lost) == ["answer: the chat template leaves out the reasoning"]
    call = assistant("", tool_calls=[{"function": {"name": "clock", "arguments": {}}}])
    made = chat(user("q"), call, {"role": "tool", "content": "9"}, assistant("nine"))
    found = to_rows(made, Template(tokenizer(PLAIN), ChatConfig()))
    assert [x.reason for x in found if isinstance(x, Dropped)] == [
        "answer: the chat template leaves out the tool calls"
    ]
    assert [supervised(x) for x in found if isinstance(x, Row)] == [["nine<|im_end|>"]]


def test_an_answer_that_cannot_follow_the_generation_prompt_is_not_trained_on():
    opens_thinking = PLAIN.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'")
    want = "answer: the chat template's answer does not continue its generation prompt"
    assert reasons(chat(user("q"), assistant("a")), opens_thinking) == [want]


def test_a_missing_template_says_what_to_set():
    with pytest.raises(ValueError, match="no chat template.*set target.chat_template"):
        Template(tokenizer(None), ChatConfig())


def test_nothing_supervised_in_all_is_an_error_with_the_reasons():
    tally = Tally()
    made = [chat(user("q")), chat(*TWO_TURNS)]
    with pytest.raises(ValueError, match="0 trainable tokens in 2 samples: 1 x no assistant turn.*max_len 5"):
        list(rows_from_chats(made, tokenizer(), ChatConfig(), tally, max_len=5))


def test_the_tally_counts_and_the_table_shows_what_was_dropped():
    tally = Tally()
    made = [chat(user("q")), chat(*TWO_TURNS), chat(user("q")), Dropped("unreadable row", "x:1")]
    kept = list(rows_from_chats(made, tokenizer(), ChatConfig(), tally))
    assert (tally.chats, tally.rows, tally.tokens, tally.supervised) == (4, len(kept), 51, 7)
    assert tally.reasons == Counter({"no assistant turn (prompts need regenerate)": 2, "unreadable row": 1})
    console = Console(file=StringIO(), width=100)
    console.print(drop_table(tally))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "out of 4 chats" in shown
    assert "no assistant turn (prompts need regenerate)" in shown


def test_an_id_past_the_embedding_is_refused_with_token_id_and_size():
    made = [chat(user("q"), assistant("<think>r</think>a"))]
    with pytest.raises(ValueError, match=r"here:1: token '</think>' has id 262.*260 rows"):
        list(rows_from_chats(made, tokenizer(), ChatConfig(), Tally(), vocab_size=260))
    (row,) = rows_from_chats(made, tokenizer(), ChatConfig(), Tally(), vocab_size=320)
    assert {THINK, END_THINK} <= set(row.input_ids)


# -- reading ---------------------------------------------------------------------------------------------------------
def test_every_shape_of_row_gives_the_same_chat(tmp_path):
    share = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "abc"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, assistant("abc")]
    found = read(
        lines(
            tmp_path / "c.jsonl",
            {"messages": [user("hi"), assistant("abc")]},
            {"conversations": share, "kind": "small talk", "id": 7},
            {"messages": parts},
        )
    )
    assert [c.messages for c in found] == [(user("hi"), assistant("abc"))] * 3
    assert [(c.id, c.kind) for c in found] == [("c.jsonl:1", "chat"), ("7", "small talk"), ("c.jsonl:3", "chat")]
    assert found[1].where == f"{tmp_path}/c.jsonl:2"


def test_prompts_without_answers_are_read(tmp_path):
    source = lines(
        tmp_path / "p.jsonl",
        {"prompt": "one"},
        {"turns": ["one", "two"]},
        {"prompt": [user("one")], "system": "s"},
        {"messages": [user("one"), assistant("x"), user("two")]},
    )
    roles = ["".join(m["role"][0] for m in c.messages) for c in read(Source(path=source, kind="mine"))]
    assert roles == ["u", "uu", "su", "uau"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hello"}, "'messages' must be a non-empty list, got str"),
        ({"messages": []}, "'messages' must be a non-empty list, got an empty list"),
        ({"text": "hello"}, "none of messages, conversations, prompt, turns in the row; it has text"),
        ([1], "must be a JSON object, got list"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, r"messages\[0\]: role 'wizard' is unknown; known: "),
        ({"messages": [{"role": "user"}]}, "a user message needs 'content', got none"),
        ({"messages": [{"role": "user", "content": 3}]}, "'content' must be text, got int"),
        ({"messages": [user("x")], "tools": {"name": "f"}}, "'tools' must be a list of tool schemas.*got dict"),
        ({"messages": [user("x")], "tools": "[not json"}, "'tools' is not JSON"),
        ({"messages": [user("x")], "tools": [3]}, r"'tools' must be a list of tool schemas.*got a list with \[3\]"),
        ({"messages": [assistant("", tool_calls=[{"name": "f", "arguments": "{"}])]}, "'arguments'.* is not JSON"),
        ({"turns": [[{"type": "image"}]]}, "parts that are not text"),
    ],
)
def test_a_bad_row_is_an_error_with_file_line_and_field(tmp_path, row, message):
    source = lines(tmp_path / "bad.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(ValueError, match=rf"bad\.jsonl:2: .*{message}"):
        read(source)
    counted = list(read_chats(Source(path=source, bad_rows="count")))
    assert isinstance(counted[0], Chat)
    assert isinstance(counted[1], Dropped)
    assert counted[1].where.endswith("bad.jsonl:2")


def test_a_line_that_is_no_json_and_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n\n{"prompt": \n')
    with pytest.raises(ValueError, match=r"a\.jsonl:3: not JSON: .* repair the line"):
        read(str(tmp_path / "a.jsonl"))
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl:1: not UTF-8"):
        read(str(tmp_path / "b.jsonl"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"path": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({"path": "nowhere"}, "nowhere: no such file or folder, and not a Hub id"),
        ({"path": "shipped:nothing"}, "no such shipped prompts; there are .*shipped:prompts_train"),
        ({"path": "shipped:prompts_train", "split": "train"}, "split 'train' has no effect on a local file"),
        ({"path": "shipped:prompts_train", "revision": "main"}, "revision 'main' has no effect"),
    ],
)
def test_a_source_that_cannot_be_read_says_why(source, message):
    with pytest.raises(ValueError, match=message):
        read(Source(**source))


def test_empty_and_foreign_files_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no chats"):
        read(str(tmp_path / "empty.jsonl"))
    (tmp_path / "chats.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"cannot read \.csv files; give \.jsonl, \.json, \.parquet"):
        read(str(tmp_path / "chats.csv"))


def test_arguments_of_different_types_in_different_rows_stay_as_they_are(tmp_path):
    def calls(arguments) -> dict:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [user("q"), {"role": "assistant", "content": None, "tool_calls": [call]}]}

    source = lines(tmp_path / "t.jsonl", calls({"time": "x"}), calls({"time": 5, "n": 1}), calls('{"time": 5, "n": 1}'))
    texts = [supervised(rows(c, TOOLS)[0])[0] for c in read(source)]
    assert '"arguments": {"time": "x"}' in texts[0]
    assert '"arguments": {"time": 5, "n": 1}' in texts[1]
    assert texts[2] == texts[1]
    assert "null" not in texts[0]


def test_a_type_that_changes_late_in_a_long_file_is_read(tmp_path):
    path = tmp_path / "long.jsonl"
    early = json.dumps({"id": None, "messages": [user("x" * 200), assistant("y")]}) + "\n"
    path.write_text(early * 3000 + json.dumps({"id": "late", "messages": [user("x"), assistant("y")]}) + "\n")
    ids = [c.id for c in read(str(path))]
    assert len(ids) == 3001
    assert (ids[0], ids[-1]) == ("long.jsonl:1", "late")


def test_tools_as_list_and_as_json_text_give_the_same_ids_and_none_equals_empty(tmp_path):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    given = [[tool], json.dumps([tool]), [], None, ""]
    values = [{"messages": list(TWO_TURNS), "tools": t} for t in given] + [{"messages": list(TWO_TURNS)}]
    made = [rows(c, TOOLS)[0].input_ids for c in read(lines(tmp_path / "t.jsonl", *values))]
    assert made[0] == made[1]
    assert made[2] == made[3] == made[4] == made[5]
    assert made[0] != made[2]


def test_a_call_without_content_and_with_null_content_give_the_same_row(tmp_path):
    def row(**content) -> dict:
        call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}], **content}
        return {"messages": [user("q"), call, {"role": "tool", "content": "1"}, assistant("one")], "id": "x"}

    absent, null = (rows(c, TOOLS)[0] for c in read(lines(tmp_path / "n.jsonl", row(), row(content=None))))
    assert (absent.input_ids, absent.loss_mask) == (null.input_ids, null.loss_mask)
    assert supervised(absent)[1] == "one<|im_end|>"
    assert '"name": "f"' in supervised(absent)[0]


def test_a_sharegpt_function_call_is_a_tool_call(tmp_path):
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "1"},
        {"from": "gpt", "value": "one"},
    ]
    (made,) = read(lines(tmp_path / "s.jsonl", {"conversations": turns}))
    assert [m["role"] for m in made.messages] == ["user", "assistant", "tool", "assistant"]
    assert made.messages[1]["tool_calls"] == [{"name": "f", "arguments": {"a": 1}}]


# -- other kinds of sources ------------------------------------------------------------------------------------------
@pytest.fixture
def hub_folder(tmp_path, monkeypatch) -> Path:
    """A data set in Hub layout with two splits, and the datasets cache inside tmp_path."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "org" / "set"
    (folder / "data").mkdir(parents=True)
    call = assistant("", tool_calls=[{"function": {"name": "f", "arguments": '{"a": 1}'}}])
    values = [{"messages": [user("q"), call]}, {"messages": list(TWO_TURNS)}]
    for split, rows_of in (("train", values), ("test", [{"messages": [user("t"), assistant("u")]}])):
        datasets.Dataset.from_list(rows_of).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


def test_a_folder_in_hub_layout_is_read_by_split(hub_folder):
    train = read(str(hub_folder))
    assert [len(c.messages) for c in train] == [2, 4]
    assert train[0].messages[1]["tool_calls"] == [{"function": {"name": "f", "arguments": {"a": 1}}}]
    assert train[1].messages == TWO_TURNS
    (test,) = read(Source(path=str(hub_folder), split="test"))
    assert test.messages[0]["content"] == "t"
    assert len(read(Source(path=str(hub_folder), split="train[:1]"))) == 1


def test_an_unknown_split_names_split_and_what_there_is(hub_folder):
    with pytest.raises(ValueError, match=r"split 'dev', revision None\): datasets could not read it: Unknown split"):
        read(Source(path=str(hub_folder), split="dev"))
    with pytest.raises(ValueError, match="revision 'v2' has no effect on a local folder"):
        read(Source(path=str(hub_folder), revision="v2"))


def test_a_parquet_file_and_a_json_list_are_read(hub_folder, tmp_path):
    (chat_of_parquet,) = read(str(hub_folder / "data" / "test-00000-of-00001.parquet"))
    assert chat_of_parquet.messages == (user("t"), assistant("u"))
    path = tmp_path / "list.json"
    path.write_text(json.dumps([{"messages": list(TWO_TURNS)}, {"prompt": "x"}]))
    assert [c.where for c in read(str(path))] == [f"{path}[0]", f"{path}[1]"]
    path.write_text('{"prompt": "x"}')
    with pytest.raises(ValueError, match="must hold a list of chats, got dict"):
        read(str(path))


def test_a_hub_id_is_asked_for_with_its_split_and_revision(monkeypatch):
    import datasets

    asked = {}

    def load(*args, **options):
        asked.update(options, args=args)
        return [{"messages": list(TWO_TURNS), "tools": None}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    (made,) = read(Source(path="org/name", split="train_sft", revision="abc"))
    assert asked == {"args": ("org/name",), "split": "train_sft", "revision": "abc"}
    assert made.where == "org/name[0]"


def test_limit_takes_the_first_chats_and_a_fingerprint_follows_the_content(tmp_path):
    source = lines(tmp_path / "f.jsonl", {"prompt": "a"}, {"prompt": "b"})
    assert len(read(Source(path=source, limit=1))) == 1
    before = fingerprint(Source(path=source))
    assert before == fingerprint(Source.model_validate(source))
    assert before != fingerprint(Source(path=source, limit=1))
    lines(tmp_path / "g.jsonl", {"prompt": "a"}, {"prompt": "b"})
    assert before == fingerprint(Source(path=str(tmp_path / "g.jsonl")))
    lines(tmp_path / "f.jsonl", {"prompt": "a"}, {"prompt": "c"})
    assert before != fingerprint(Source(path=source))


# -- rows on disk and on screen --------------------------------------------------------------------------------------
def test_rows_survive_the_disk(tmp_path):
    made = rows(chat(*TWO_TURNS))
    assert read_rows(write_rows(tmp_path / "rows.jsonl", made)) == made
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": [1]}, "must be lists of one length, got 2 and 1"),
        ({"loss_mask": [1, 2]}, "loss_mask 0 or 1"),
        ({"input_ids": [1, -2]}, "integers >= 0"),
        ({"extra": 1}, r"not a token row: got \['extra', "),
    ],
)
def test_a_damaged_row_is_named_by_file_and_line(tmp_path, change, message):
    good = {"id": "a", "kind": "k", "input_ids": [1, 2], "loss_mask": [0, 1], "meta": {}}
    path = lines(tmp_path / "rows.jsonl", good, good | change)
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{message}"):
        read_rows(path)


def test_shown_rows_colour_exactly_the_supervised_text():
    (row,) = rows(chat(user("hi"), assistant("größe")))
    text = show_row(row, tokenizer())
    green = [text.plain[s.start : s.end] for s in text.spans if "green" in str(s.style)]
    assert green == ["größe<|im_end|>"]
    assert text.plain == tokenizer().decode(row.input_ids)
