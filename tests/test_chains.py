"""Protects models/chains.py: which rows of a chain are supervised and what they see. Run: pytest tests/test_chains.py"""

import numpy as np
import pytest
import torch

from draftsmith.models.chains import Plan, by_documents, supervised_steps


def slow_steps(mask: list[int], bounds: list[int], most: int) -> list[int]:
    """The rule as it is written: step s of row t iff the mask is 1 at t+1 .. t+2+s, all in t's document."""
    out = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        for t in range(start, end):
            steps = 0
            while steps < most and t + 2 + steps < end and all(mask[t + 1 : t + 3 + steps]):
                steps += 1
            out.append(steps)
    return out


def test_the_example_of_two_prompt_and_four_answer_tokens():
    mask = np.array([0, 0, 1, 1, 1, 1], dtype=bool)
    assert supervised_steps(mask, (0, 6), 3).tolist() == [0, 3, 2, 1, 0, 0]


def test_the_first_draft_of_an_answer_is_supervised_and_nothing_past_its_end():
    mask = np.array([0, 0, 0, 0, 1, 1, 1, 0], dtype=bool)  # an answer in tokens 4..6
    assert supervised_steps(mask, (0, 8), 1).tolist() == [0, 0, 0, 1, 1, 0, 0, 0]  # labels 5 and 6


@pytest.mark.parametrize("seed", range(20))
def test_supervised_steps_equal_the_rule_on_random_packs(seed):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 12, size=4)
    bounds = [0, *np.cumsum(lengths).tolist()]
    mask = generator.random(bounds[-1]) < 0.75
    for most in (1, 3, 7):
        assert supervised_steps(mask, bounds, most).tolist() == slow_steps(mask.astype(int).tolist(), bounds, most)


def test_a_plan_reads_each_document_up_to_its_last_chain_and_no_other():
    bounds = (0, 6, 9, 16)
    mask = np.array([0, 0, 1, 1, 1, 0] + [0, 0, 0] + [0, 1, 1, 1, 0, 1, 1], dtype=bool)
    steps = supervised_steps(mask, bounds, 2)
    rows = np.flatnonzero(steps)
    assert rows.tolist() == [1, 2, 9, 10, 13]
    plan = Plan.of(rows, steps[rows], bounds, torch.device("cpu"))
    assert plan.context.tolist() == [0, 1, 2, 9, 10, 11, 12, 13]
    assert plan.context[plan.rows].tolist() == rows.tolist()
    assert [tuple(span) for span in plan.prefix] == [(0, 0, 0, 3), (3, 3, 3, 8)]
    assert [tuple(span) for span in plan.steps[0].spans] == [(0, 1, 0, 2), (3, 3, 2, 4), (3, 7, 4, 5)]
    assert plan.steps[1].rows.tolist() == [0, 2]
    assert plan.steps[1].kept.tolist() == [0, 2]
    assert [tuple(span) for span in plan.steps[1].spans] == [(0, 1, 0, 1), (3, 3, 1, 2)]
    assert plan.teachers.tolist() == [2, 3, 10, 11, 14]
    for s, step in enumerate(plan.steps):  # the teacher of step s stands at t + 1 + s
        assert plan.teachers[step.teachers].tolist() == (rows[step.rows.numpy()] + 1 + s).tolist()


def test_anchors_are_cut_between_documents_only():
    doc = np.array([0, 0, 0, 1, 1, 2, 5, 5, 5, 5, 5])
    parts = [list(range(11))[part] for part in by_documents(doc, 5)]
    assert parts == [[0, 1, 2, 3, 4], [5], [6, 7, 8, 9, 10]]
