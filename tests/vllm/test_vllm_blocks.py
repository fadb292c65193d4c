"""DFlash and DSpark exports in a real vLLM. Protects: that what we write is what vLLM computes, slot by slot.

    make vllm-test          (or: pytest -m vllm tests/vllm/test_vllm_blocks.py, with .venv-vllm in place)

DFlash runs in both of vLLM's runners, DSpark in the second one only, which needs Triton's interpreter here. For both
layouts, both vocabularies and every window rule: each parameter of the draft is filled, greedy ids equal those without
speculation, and vLLM accepts round by round what our runtime accepts. The drafts are half right, so refused, partly
and wholly accepted proposals all occur; one dialogue learnt by heart is accepted whole. All in fp32, no end of text.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from served import Expected, answers, case, expect, make_target, prompts, train
from tiny import MASK

from draftsmith.models import export
from draftsmith.models.draft import family
from draftsmith.models.target import Target

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore:export. (vLLM has no shifted dflash|sliding and full layers)"),
]

FIRST_TOKENS, SECOND_TOKENS = 40, 20
REDUCED = {"head": "trainable", "draft_vocab": 64}
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}


class Case(NamedTuple):
    target: str
    layout: str
    draft: dict[str, Any]


INFILL = {"family": "dflash", "layout": "infill"}
SHIFTED = {"family": "dspark", "layout": "shifted", "markov_start": "bigrams"}
FIRST: dict[str, Case] = {  # vLLM's first runner
    "dflash-plain": Case("llama", "plain", INFILL),
    "dflash-speculators": Case("qwen3", "speculators", INFILL | REDUCED | {"aux_layers": (1, 3)}),
    "window-plain": Case("llama", "plain", INFILL | {"sliding_window": 8}),
    "window-speculators": Case("qwen3", "speculators", INFILL | {"sliding_window": 8, "head": "trainable"}),
    "whole-block-window-plain": Case("qwen3", "plain", INFILL | {"sliding_window": 8, "causal": False}),
}
SECOND: dict[str, Case] = {  # its second one, interpreted: slow, so fewer of them and shorter answers
    "dspark-plain": Case("llama", "plain", SHIFTED),
    "dspark-speculators": Case("qwen3", "speculators", SHIFTED | REDUCED | {"aux_layers": (0, 2)}),
    "dspark-infill": Case("qwen3", "speculators", SHIFTED | {"layout": "infill", "confidence": False}),
    "dflash-shifted": Case("llama", "plain", INFILL | {"layout": "shifted"} | REDUCED),
    "dflash-mixed": Case("qwen3", "plain", INFILL | MIXED),
}
CASES = FIRST | SECOND
LEARNT = {"dflash-learnt": FIRST["dflash-plain"], "dspark-learnt": SECOND["dspark-plain"]}
ALL = (*CASES, *LEARNT)


def is_second(name: str) -> bool:
    return name in SECOND or name == "dspark-learnt"


def make(name: str, one: Case, target: Target, folder: Path, starts: list[list[int]]) -> Expected:
    """Train, export, and say what our runtime does with the export."""
    cls = family(one.draft["family"])
    sizes = {"block_len": 4, "num_layers": 2, "mask_token_id": MASK, "anchor_rate": 1.0}
    sizes |= {"markov_rank": 8} if one.draft["family"] == "dspark" else {}
    draft = cls(cls.Config(**(sizes | one.draft)), target.spec)
    if name in LEARNT:
        train(draft, target, answers(target, starts, 50), steps=60, lr=3e-3)
    else:
        train(draft, target, answers(target, starts, 30), steps=14, lr=2e-3)
    assert draft.max_proposal is not None
    out, num, tokens = folder / name, draft.max_proposal, SECOND_TOKENS if is_second(name) else FIRST_TOKENS
    found = expect(name, target, draft, out, one.layout, starts, num, tokens)
    return found._replace(case=found.case | {"method": json.loads(speculation(out))["method"]})


def speculation(out: Path) -> str:
    """The --speculative-config that we tell users."""
    return shlex.split(export.serve_command(out))[4]


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Expected]:
    """Targets, drafts trained for a second or two, their exports and our runtime's numbers, by case name."""
    folder = tmp_path_factory.mktemp("blocks")
    targets = {kind: make_target(kind, folder / kind) for kind in ("llama", "qwen3")}
    few = [*prompts()[:3], *prompts()[-2:]]
    starts = {name: prompts()[-1:] if name in LEARNT else few if is_second(name) else prompts() for name in ALL}
    return {name: make(name, one, targets[one.target], folder, starts[name]) for name, one in (CASES | LEARNT).items()}


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]
HOLES: dict[str, tuple[str, Change]] = {  # parameter that stays unset in vLLM: (export, what is taken out of it)
    "model.hidden_norm.weight": ("dflash-plain", lambda _, tensors: tensors.pop("hidden_norm.weight")),
    "draft_id_to_target_id": ("dflash-speculators", lambda _, tensors: tensors.pop("d2t")),
}
FAULTS: dict[str, tuple[str, Change]] = {  # what vLLM takes without a word
    "aux ids without the shift": (
        "dflash-plain",
        lambda config, _: config["dflash_config"].update(
            target_layer_ids=[k + 1 for k in config["dflash_config"]["target_layer_ids"]]
        ),
    ),
    "window not told": (
        "window-plain",
        lambda config, _: config.update(layer_types=["full_attention"] * 2) or config["dflash_config"].pop("causal"),
    ),
    "layout not told": ("dspark-infill", lambda config, _: config.update(sample_from_anchor=True)),
}


def changed(base: Expected, name: str, change: Change, folder: Path) -> dict[str, Any]:
    """The case of a base export with a change in its files."""
    source, out = Path(base.case["draft"]), folder / name.replace(" ", "-")
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    change(config, tensors)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return {**base.case, "name": name, "draft": str(out)}


@pytest.fixture(scope="session")
def served(
    vllm: Any, expected: dict[str, Expected], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What vLLM reports, by case name; targets alone under `alone:<folder>`; the second runner's DFlash as dflash-both."""
    folder = tmp_path_factory.mktemp("changed")
    cases: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for name, one in expected.items():
        cases[is_second(name)].append(one.case)
    for name, (base, change) in (HOLES | FAULTS).items():
        cases[is_second(base)].append(changed(expected[base], name, change, folder))
    for place in sorted({one.case["target"] for one in expected.values()}):
        cases[False].append(case(f"alone:{place}", place, None, prompts=prompts(), max_tokens=FIRST_TOKENS))
    both = expected["dflash-plain"].case
    cases[True].append({**both, "name": "dflash-both", "prompts": both["prompts"][:3], "max_tokens": SECOND_TOKENS})
    return vllm(cases[False]) | vllm(cases[True], v2=True)


@pytest.mark.parametrize("name", ALL)
def test_every_parameter_of_the_draft_is_filled(served: dict[str, Any], name: str) -> None:
    assert served[name]["error"] is None
    assert served[name]["unfilled"] == []
    assert served[name]["filled"]


@pytest.mark.parametrize("name", ALL)
def test_greedy_ids_equal_those_without_speculation(
    served: dict[str, Any], expected: dict[str, Expected], name: str
) -> None:
    one = expected[name].case
    alone = dict(zip(map(tuple, prompts()), served[f"alone:{one['target']}"]["ids"], strict=True))
    assert served[name]["ids"] == [alone[tuple(start)][: one["max_tokens"]] for start in one["prompts"]]


@pytest.mark.parametrize("name", ALL)
def test_vllm_accepts_round_by_round_what_our_runtime_accepts(
    served: dict[str, Any], expected: dict[str, Expected], name: str
) -> None:
    want, got = expected[name], served[name]
    assert got["ids"] == want.ids
    assert got["rounds"] == want.rounds
    rounds = [accepted for row in want.rounds for _, accepted in row]
    assert got["accepted_per_position"] == [
        sum(a > k for a in rounds) for k in range(want.case["num_speculative_tokens"])
    ]


def test_dflash_is_accepted_alike_in_both_runners(served: dict[str, Any], expected: dict[str, Expected]) -> None:
    want, got = expected["dflash-plain"], served["dflash-both"]
    assert got["error"] is None
    assert got["ids"] == [ids[:SECOND_TOKENS] for ids in want.ids[:3]]
    for row, long in zip(got["rounds"], want.rounds, strict=False):
        assert row == long[: len(row)]


@pytest.mark.parametrize("name", CASES)
def test_half_right_drafts_are_refused_and_partly_and_wholly_accepted(expected: dict[str, Expected], name: str) -> None:
    accepted = {a for row in expected[name].rounds for _, a in row}
    num = expected[name].case["num_speculative_tokens"]
    assert {0, num} <= accepted
    assert accepted & set(range(1, num))


@pytest.mark.parametrize("name", LEARNT)
def test_a_dialogue_learnt_by_heart_is_accepted_whole(
    served: dict[str, Any], expected: dict[str, Expected], name: str
) -> None:
    num = expected[name].case["num_speculative_tokens"]
    assert {tuple(pair) for pair in expected[name].rounds[0]} == {(num, num)}
    assert served[name]["accepted_per_position"] == [served[name]["num_drafts"]] * num


@pytest.mark.parametrize("parameter", HOLES)
def test_a_missing_tensor_is_named_although_vllm_runs_on(served: dict[str, Any], parameter: str) -> None:
    assert served[parameter]["error"] is None
    assert served[parameter]["unfilled"] == [parameter]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_misspelt_export_is_accepted_differently(
    served: dict[str, Any], expected: dict[str, Expected], fault: str
) -> None:
    """Without this, equal rounds would prove little."""
    want, got = expected[FAULTS[fault][0]], served[fault]
    assert got["error"] is None
    assert got["ids"] == want.ids
    assert got["rounds"] != want.rounds
