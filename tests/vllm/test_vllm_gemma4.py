"""Gemma 4 drafters in a real vLLM. Protects: that our runtime measures what vLLM will accept.

    make vllm-test          (or: pytest -m vllm tests/vllm/test_vllm_gemma4.py, with .venv-vllm in place)

Oracles: drafters of tests/gemma4_tiny.py, whose acceptance is known in advance, give exactly that in vLLM. They prove that
the anchor stands beside the state, which state it is, and what is fed back. A tuned drafter, half right, proves the rest:
whose keys are read, how far a query sees, where it stands, rollback. It is exported, and vLLM accepts round by round what
our runtime accepts with `query_position: state`; with `anchor`, transformers' way, the rounds would be others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gemma4_tiny as tiny4
import pytest
from gemma4_tiny import VOCAB, prompts, save, starts_of
from served import GREEDY

from draftsmith.eval.runtime import decode
from draftsmith.models import export
from draftsmith.models.gemma4_mtp import Gemma4Mtp
from draftsmith.models.target import Target, TargetConfig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

NUM, TOKENS, TRAIN_STEPS = 3, 30, 40
Rounds = list[list[list[int]]]


def case(name: str, target: Path, draft: Path | None, **more: Any) -> dict[str, Any]:
    about = {"method": "mtp", "num_speculative_tokens": NUM, "max_tokens": TOKENS, "prompts": prompts()}
    return {"name": name, "target": str(target), "draft": None if draft is None else str(draft), **about, **more}


def load(place: Path) -> Target:
    return Target.load(TargetConfig(name=str(place), dtype="float32", published_name="org/tiny"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gemma4")


@pytest.fixture(scope="module")
def tuned(folder: Path) -> dict[str, tuple[list[list[int]], Rounds]]:
    """{query position: (ids, rounds)} of our runtime, with the drafter that stands in folder / "tuned"."""
    model = tiny4.random_target()
    target = load(save(model, folder / "random"))
    draft = tiny4.tune(target, save(tiny4.random_assistant(model), folder / "start"), TRAIN_STEPS, NUM)
    export.write(draft, target.spec, folder / "tuned", dtype="float32", published_name="org/tiny")
    found = {}
    for position in ("state", "anchor"):
        served = export.load(folder / "tuned", target.spec, target.embedding)
        assert isinstance(served, Gemma4Mtp)
        served.config = served.config.model_copy(update={"query_position": position})
        target.bind(served)
        starts = starts_of(6)
        decoded = decode(target, served.eval(), starts, NUM, GREEDY, TOKENS, ignore_eos=True, batch_size=len(starts))
        found[position] = [d.ids for d in decoded], [[list(r) for r in d.rounds] for d in decoded]
    return found


@pytest.fixture(scope="module")
def results(vllm: Callable[..., Any], folder: Path, tuned: Any) -> dict[str, dict[str, Any]]:
    counting = save(tiny4.counting_target(), folder / "counting")
    cases = [case(kind, counting, save(tiny4.oracle(kind), folder / kind)) for kind in tiny4.ORACLES]
    for name, draft in (("tuned", folder / "tuned"), ("alone", None)):
        cases.append(case(name, folder / "random", draft, prompts=starts_of(6)))
    return vllm(cases)


@pytest.mark.parametrize("kind", tiny4.ORACLES)
def test_a_drafter_of_known_acceptance_has_exactly_that_in_vllm(results: dict[str, Any], kind: str) -> None:
    found = results[kind]
    assert found["error"] is None
    assert found["ids"] == [[(p[-1] + 1 + i) % VOCAB for i in range(TOKENS)] for p in prompts()]
    accepted = 0 if kind == "early" else NUM
    num_rounds = -(-(TOKENS - 1) // (accepted + 1))
    assert found["rounds"] == [[[NUM, accepted]] * num_rounds] * len(prompts())


def test_vllm_accepts_round_by_round_what_our_runtime_accepts(results: dict[str, Any], tuned: Any) -> None:
    ids, rounds = tuned["state"]
    assert results["tuned"]["error"] is None
    assert results["tuned"]["unfilled"] == []
    assert results["tuned"]["ids"] == ids == results["alone"]["ids"]
    assert results["tuned"]["rounds"] == rounds
    accepted = {a for row in rounds for _, a in row}
    assert {0, NUM} <= accepted
    assert accepted & set(range(1, NUM))


def test_queries_at_the_anchor_would_be_accepted_otherwise(results: dict[str, Any], tuned: Any) -> None:
    """So the test above tells the two positions apart."""
    assert results["tuned"]["rounds"] != tuned["anchor"][1]
