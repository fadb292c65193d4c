"""Protects the shipped prompts: the numbers per kind, and that no evaluation prompt leaks into training.

Run: pytest tests/test_prompts.py
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

from draftsmith.data.chat import Chat, read_chats

KINDS = ("explain", "list", "story", "math", "code")
TEMPLATES = {  # the wording of training and held-out prompts; groups are the fillings
    "explain": [r"Explain (.+) in two sentences\."],
    "list": [r"List five facts about (.+)\."],
    "story": [r"Write a short story about an? (\w+) who (.+)\."],
    "math": [
        r"(\w+) has (\d+) (\w+), gives away (\d+) and then gets (\d+) more\. How many \3 does \1 have now\?",
        r"A shop sells (\w+) for (\d+) dollars each\. How much do (\d+) \1 cost in total\?",
        r"A (\w+) travels at (\d+) kilometres per hour for (\d+) hours\. How far does it go\?",
    ],
    "code": [r"Write a Python function that returns (.+)\."],
}


def prompts(name: str) -> list[tuple[str, str]]:
    chats = list(read_chats(f"shipped:prompts_{name}"))
    assert all(isinstance(chat, Chat) and len(chat.messages) == 1 for chat in chats)
    return [(chat.kind, chat.messages[0]["content"]) for chat in chats if isinstance(chat, Chat)]


def fillings(kind: str, prompt: str) -> tuple[str, ...] | None:
    found = [match for template in TEMPLATES[kind] if (match := re.fullmatch(template, prompt))]
    return found[0].groups() if found else None


def word_triples(prompt: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", prompt.lower())
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


@pytest.mark.parametrize(("name", "per_kind"), [("train", 90), ("heldout", 10), ("newwording", 10)])
def test_every_kind_has_its_number_of_distinct_prompts(name, per_kind):
    found = prompts(name)
    assert Counter(kind for kind, _ in found) == dict.fromkeys(KINDS, per_kind)
    assert len({prompt for _, prompt in found}) == len(found)


def test_kinds_alternate_so_that_a_limit_keeps_them_balanced():
    found = prompts("train")
    assert all(tuple(kind for kind, _ in found[i : i + 5]) == KINDS for i in range(0, len(found), 5))


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_train_and_heldout_follow_the_same_templates(name):
    assert [prompt for kind, prompt in prompts(name) if fillings(kind, prompt) is None] == []


def test_no_heldout_prompt_is_in_training():
    """A tenth of one pool, drawn at random: other prompts in the same templates, often with a sibling in training."""
    assert not {prompt for _, prompt in prompts("train")} & {prompt for _, prompt in prompts("heldout")}


def test_new_wording_shares_no_template_and_no_three_words_with_training():
    trained = set().union(*(word_triples(prompt) for _, prompt in prompts("train") + prompts("heldout")))
    for kind, prompt in prompts("newwording"):
        assert all(fillings(other, prompt) is None for other in (kind, *KINDS))
        assert not word_triples(prompt) & trained, prompt
