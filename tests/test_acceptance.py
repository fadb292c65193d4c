"""Protects what acceptance numbers mean, and how a server's counters are read. Run: pytest tests/test_acceptance.py"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from draftsmith.data.chat import Row
from draftsmith.eval.acceptance import (
    Counts,
    EvalConfig,
    acceptance_object,
    acceptance_table,
    pool,
    prompts_of,
    read_counters,
    samples,
    served,
    summarise,
)
from draftsmith.eval.runtime import Decoded
from draftsmith.models.sampling import Sampler

KEYS = [
    "method", "num_prompts", "num_rounds", "num_speculative_tokens", "num_proposed", "num_accepted", "num_tokens",
    "temperature", "top_k", "top_p", "max_new_tokens", "acceptance_length", "survival", "conditional",
]  # fmt: skip


def answer(rounds, num_tokens):
    return Decoded(3, [0] * num_tokens, rounds, "length")


def test_the_bonus_token_is_counted_once_and_only_in_the_acceptance_length():
    """Four rounds with 3, 1, 0, 2 accepted of 3: 1.5 accepted proposals and 2.5 tokens a round, rate 6/12."""
    found = summarise([answer([(3, 3), (3, 1), (3, 0), (3, 2)], 11)], ["x"], 3, Sampler(), 64)
    assert found["acceptance_length"] == 2.5
    assert (found["num_accepted"], found["num_proposed"], found["num_rounds"]) == (6, 12, 4)
    assert found["survival"] == [3 / 4, 2 / 4, 1 / 4]
    assert found["conditional"] == [3 / 4, 2 / 3, 1 / 2]
    assert 1 + sum(found["survival"]) == found["acceptance_length"]


def test_a_draft_that_is_always_wrong_has_length_one():
    found = summarise([answer([(4, 0)] * 19, 20)], ["x"], 4, Sampler(), 20)
    assert found["acceptance_length"] == 1.0
    assert found["num_accepted"] == 0
    assert found["survival"] == found["conditional"] == [0.0] * 4


def test_with_a_variable_number_of_proposals_conditional_counts_only_verified_slots():
    """Slot 2 was verified once behind an accepted slot 1: the round (1, 1) says nothing about it."""
    found = summarise([answer([(1, 1), (2, 2), (2, 0), (0, 0)], 8)], ["x"], 2, Sampler(), 64)
    assert found["survival"] == [2 / 4, 1 / 4]
    assert found["conditional"] == [2 / 3, 1 / 1]
    assert found["acceptance_length"] == 1 + 3 / 4


def test_the_object_pools_rounds_over_prompts_and_names_everything():
    answers = [answer([(2, 2)] * 3, 10), answer([(2, 0)] * 9, 10), answer([(2, 1)] * 5, 11)]
    found = summarise(answers, ["code", "code", "story"], 2, Sampler(0.7, 20, 0.9), 10)
    assert list(found) == [*KEYS, "by_kind"]
    assert {kind: list(part) for kind, part in found["by_kind"].items()} == {"code": KEYS, "story": KEYS}
    assert found["by_kind"]["code"]["acceptance_length"] == 1 + 6 / 12  # not the mean of 3 and 1
    assert (found["num_prompts"], found["num_tokens"], found["num_rounds"]) == (3, 31, 17)
    assert (found["temperature"], found["top_k"], found["top_p"], found["max_new_tokens"]) == (0.7, 20, 0.9, 10)
    json.dumps(found)


def test_acceptance_length_from_conditional_rates_is_one_plus_their_running_products():
    counts = Counts(survivors=[0.8, 0.4, 0.2], tested=[1, 0.8, 0.4], num_rounds=1)
    assert counts.conditional == pytest.approx([0.8, 0.5, 0.5])
    assert counts.acceptance_length == pytest.approx(2.4)


def test_impossible_rounds_are_our_own_mistake():
    with pytest.raises(AssertionError, match=r"round \(2, 3\)"):
        Counts.of([(2, 3)], 4, 3)


def test_no_rounds_give_numbers_all_the_same():
    found = summarise([answer([], 1)], ["x"], 2, Sampler(), 1)
    assert (found["acceptance_length"], found["survival"]) == (1.0, [0.0, 0.0])


def test_several_drafts_stand_in_one_table():
    one = acceptance_object("runtime", pool([("code", Counts.of([(2, 1)], 3, 2))], 2), 2, Sampler(), 64)
    two = acceptance_object("exact", pool([("code", Counts.of([(3, 3)], 5, 3))], 3), 3, Sampler(), 64)
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(acceptance_table({"mine": one, "theirs": two}))
    text = console.export_text()
    for word in ("mine", "theirs", "runtime", "exact", "code", "slot 3", "1.00 (1.00)", "greedy", "4.00"):
        assert word in text


def test_prompts_end_where_the_first_answer_begins():
    rows = [
        Row("a", "code", (1, 2, 3, 4, 5), (0, 0, 1, 1, 0)),
        Row("b", "chat", (1, 2, 3, 4, 5), (0, 1, 0, 0, 1)),
    ]
    assert prompts_of(rows) == ([[1, 2], [1]], ["code", "chat"])
    assert prompts_of(rows, 1) == ([[1, 2]], ["code"])
    with pytest.raises(ValueError, match="row c: has no answer"):
        prompts_of([Row("c", "chat", (1, 2), (0, 0))])


def test_options_without_effect_are_refused():
    with pytest.raises(ValueError, match="top_k, top_p: no effect at temperature 0"):
        EvalConfig(top_k=5, top_p=0.9)
    with pytest.raises(ValueError, match="draft_sampling: no effect at temperature 0"):
        EvalConfig(draft_sampling=False)
    with pytest.raises(ValueError, match="repetition_penalty"):
        EvalConfig(repetition_penalty=1.3)
    assert EvalConfig(temperature=1.0, top_k=5).sampler().top_k == 5


# -- served ----------------------------------------------------------------------------------------------------------

HEAD = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
"""


class FakeServer(ThreadingHTTPServer):
    """Counts like vLLM with K=2: every completion of n tokens takes rounds of (2 proposed, 1 accepted)."""

    def __init__(self, speculates=True, stranger=False):
        super().__init__(("127.0.0.1", 0), Handler)
        self.speculates, self.stranger = speculates, stranger
        self.rounds, self.tokens, self.seen, self.lock = 1000, 5000, [], threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def exposition(self):
        lines = [f'vllm:generation_tokens_total{{engine="0",model_name="m\\"x"}} {float(self.tokens)}']
        if self.speculates:
            for engine, share in (("0", 0.25), ("1", 0.75)):
                label = f'engine="{engine}",model_name="m\\"x"'
                n = self.rounds * share
                lines += [
                    f"vllm:spec_decode_num_drafts_total{{{label}}} {n}",
                    f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {2 * n}",
                    f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {n}",
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="0"}} {0.75 * n}',
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="1"}} {0.25 * n}',
                ]
            lines.append('vllm:spec_decode_num_drafts_total{engine="0",model_name="another"} 77')
        return HEAD + "\n".join(lines) + "\nvllm:spec_decode_num_drafts_created{} 1.7e9\n"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def reply(self, body, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        if self.path == "/v1/models":
            return self.reply(json.dumps({"data": [{"id": 'm"x'}]}))
        return self.reply(self.server.exposition()) if self.path == "/metrics" else self.reply("no", 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append(body)
            self.server.rounds += 4
            self.server.tokens += body["max_tokens"] + (1 if self.server.stranger else 0)
        return self.reply(json.dumps({"usage": {"completion_tokens": body["max_tokens"]}}))


@pytest.fixture
def server():
    started = []

    def start(**kwargs):
        started.append(FakeServer(**kwargs))
        return started[-1]

    yield start
    for each in started:
        each.shutdown()
        each.server_close()


def test_served_acceptance_is_the_difference_of_the_servers_counters(server):
    fake = server()
    config = EvalConfig(max_new_tokens=9, ignore_eos=True)
    told = []
    found = served(fake.url + "/v1", [[1, 2], [3], [4]], ["code", "story", "code"], config, progress=told.append)
    assert list(found) == [*KEYS, "by_kind"]
    assert found["method"] == "served"
    assert (found["num_prompts"], found["num_rounds"], found["num_proposed"], found["num_tokens"]) == (3, 12, 24, 27)
    assert found["acceptance_length"] == pytest.approx(2.0)
    assert found["survival"] == pytest.approx([0.75, 0.25])
    assert found["conditional"] == pytest.approx([0.75, 1 / 3])
    assert found["by_kind"]["code"]["num_rounds"] == 8
    assert found["num_speculative_tokens"] == 2
    assert told == [9, 9, 9]
    assert sorted(body["prompt"] for body in fake.seen) == [[1, 2], [3], [4]]
    assert fake.seen[0]["model"] == 'm"x'
    assert fake.seen[0]["ignore_eos"] is True
    assert "top_k" not in fake.seen[0]


def test_sampling_settings_are_sent(server):
    fake = server()
    served(fake.url, [[1]], ["x"], EvalConfig(temperature=0.8, top_k=7, top_p=0.9, seed=3))
    assert {k: fake.seen[0][k] for k in ("temperature", "top_k", "top_p", "seed")} == {
        "temperature": 0.8, "top_k": 7, "top_p": 0.9, "seed": 3,
    }  # fmt: skip


def test_a_server_without_speculation_is_named(server):
    with pytest.raises(ValueError, match="does not speculate; start it with --speculative-config"):
        served(server(speculates=False).url, [[1]], ["x"], EvalConfig())


def test_other_users_of_the_server_are_noticed(server):
    with pytest.raises(ValueError, match=r"generated 10 tokens while we asked for 9: somebody else"):
        served(server(stranger=True).url, [[1]], ["x"], EvalConfig(max_new_tokens=9))


def test_another_number_of_proposals_at_the_server_is_refused(server):
    with pytest.raises(ValueError, match=r"server proposes 2 tokens a round, eval.num_speculative_tokens is 1"):
        served(server().url, [[1]], ["x"], EvalConfig(num_speculative_tokens=1))


def test_a_server_that_is_not_there_is_said_so():
    with pytest.raises(ValueError, match=r"/v1/models: no answer .* is the server up"):
        served("http://127.0.0.1:9", [[1]], ["x"], EvalConfig())
    with pytest.raises(ValueError, match="give an address such as"):
        served("localhost", [[1]], ["x"], EvalConfig())


def test_the_exposition_format_is_read_with_escapes_and_timestamps():
    text = 'a_total{x="q\\"\\\\\\n",y="{,}"} 1e3 1700000000\nb 2\n# c 3\nd{} NaN\n'
    found = list(samples(text))
    assert found[0] == ("a_total", {"x": 'q"\\\n', "y": "{,}"}, 1000.0)
    assert found[1] == ("b", {}, 2.0)
    assert [name for name, _, _ in found] == ["a_total", "b", "d"]
    assert read_counters("b 2\n", "m") is None
