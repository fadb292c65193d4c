"""EAGLE-3 exports in a real vLLM. Protects: that what we write is what vLLM computes.

    make vllm-test          (or: pytest -m vllm tests/vllm, with .venv-vllm in place)

For a Llama and a Qwen3 target and both layouts: every parameter of the draft is filled; greedy ids equal those without
speculation; vLLM accepts, round by round, exactly what our runtime accepts on the same prompts. The drafts are half
right, so that refused, partly and wholly accepted proposals all occur. All in fp32, end-of-text ignored.
The last round needs no exception: vLLM, like our runtime, proposes all K tokens although fewer are wanted, and counts
what the target accepted before the limit cuts the text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from served import GREEDY, NUM, VOCAB, Expected, answers, case, expect, make_target, prompts, train

from draftsmith.data.chat import Chat, ChatConfig, Template, read_chats
from draftsmith.eval.runtime import decode
from draftsmith.models import export
from draftsmith.models.eagle3 import Eagle3
from draftsmith.models.target import Target, TargetConfig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {  # name: (target, layout, keys of the draft's config)
    "llama-plain": ("llama", "plain", {"norm_before_fc": True}),
    "llama-speculators": ("llama", "speculators", {"draft_vocab": 64, "norm_before_residual": True}),
    "qwen3-plain": ("qwen3", "plain", {"draft_vocab": 64, "fc_norm": True, "norm_output": True}),
    "qwen3-speculators": ("qwen3", "speculators", {"num_layers": 2, "aux_layers": (1, 3), "head": "frozen"}),
    "yarn-plain": ("yarn", "plain", {"norm_before_residual": True, "attention_bias": True}),
}
ORACLES = ("oracle-plain", "oracle-speculators")


def bigram(model: Any) -> Any:
    """Make the model an exact bigram table: its layers add nothing and the token after t is always order[t]."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        order = bigram_order()
        embedding = torch.randn(model.get_input_embeddings().weight.shape, generator=torch.Generator().manual_seed(3))
        model.get_input_embeddings().weight.copy_(embedding)
        model.get_output_embeddings().weight[order] = embedding
    return model


def bigram_order() -> torch.Tensor:
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))


def bigram_draft(target: Target) -> Eagle3:
    """A draft that is right once a round: it knows the token after the next one from the embedding (aux layer 0), and
    offers it again in every later slot, because its layer adds nothing to the state."""
    config = Eagle3.Config(aux_layers=(0, 1, 2))
    draft = Eagle3(config, target.spec)
    draft.bind(target.embedding, target.head)
    neutral, tensors = draft.neutral()
    width, order = target.spec.hidden_size, bigram_order()
    tensors = {name: torch.ones_like(t) if "norm" in name else torch.zeros_like(t) for name, t in tensors.items()}
    tensors["fc.weight"][:, :width] = torch.eye(width)
    tensors["lm_head.weight"] = torch.zeros(VOCAB, width)
    tensors["lm_head.weight"][order[order]] = target.embedding
    oracle = Eagle3.from_neutral(neutral, tensors, target.spec)
    oracle.bind(target.embedding, target.head)
    return oracle


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Expected]:
    """Targets, drafts trained for a second or two, their exports and our runtime's numbers, by case name."""
    folder = tmp_path_factory.mktemp("eagle3")
    targets = {
        "llama": make_target("llama", folder / "llama"),
        "qwen3": make_target("qwen3", folder / "qwen3"),
        "yarn": make_target("llama", folder / "yarn", rope_parameters=YARN),
    }
    found = {}
    for name, (kind, layout, keys) in CASES.items():
        target = targets[kind]
        rows = answers(target, prompts(), 30)
        draft = Eagle3(Eagle3.Config(**keys), target.spec)
        train(draft, target, rows, steps=26)
        found[name] = expect(name, target, draft, folder / name, layout, prompts())

    target = make_target("qwen3", folder / "bigram", bigram)
    for name in ORACLES:
        layout = name.removeprefix("oracle-")
        found[name] = expect(name, target, bigram_draft(target), folder / name, layout, prompts())

    target = targets["llama"]  # one dialogue, trained until every proposal is accepted
    start = prompts()[-1:]
    draft = Eagle3(Eagle3.Config(), target.spec)
    train(draft, target, answers(target, start, 50), steps=150, lr=3e-3)
    found["one-dialogue"] = expect("one-dialogue", target, draft, folder / "one-dialogue", "plain", start)
    return found


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]
HOLES: dict[str, tuple[str, Change]] = {  # parameter that stays unset in vLLM: (export, what is taken out of it)
    "model.fc.weight": ("llama-plain", lambda _, tensors: tensors.pop("fc.weight")),
    "model.layers.0.self_attn.qkv_proj.weight": (
        "llama-plain",
        lambda _, tensors: tensors.pop("midlayer.self_attn.k_proj.weight"),
    ),
    "draft_id_to_target_id": ("qwen3-plain", lambda _, tensors: tensors.pop("d2t")),
}
FAULTS: dict[str, tuple[str, Change]] = {  # what is spelt wrong: (export, the change), silent in vLLM
    "residual": ("llama-speculators", lambda config, _: config.update(norm_before_residual=False)),
    "aux layers": ("qwen3-speculators", lambda config, _: config.update(eagle_aux_hidden_state_layer_ids=[2, 3])),
    "offsets": ("qwen3-plain", lambda _, tensors: tensors["d2t"].zero_()),
}


def changed(one: Expected, name: str, change: Change, folder: Path) -> dict[str, Any]:
    """A case whose draft is a changed copy of another case's export."""
    source, place = Path(one.case["draft"]), folder / name
    place.mkdir(parents=True)
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    change(config, tensors)
    (place / "config.json").write_text(json.dumps(config))
    save_file(tensors, place / "model.safetensors")
    return {**one.case, "name": name, "draft": str(place)}


@pytest.fixture(scope="session")
def served(
    vllm: Any, expected: dict[str, Expected], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What vLLM reports, by case name; the targets alone under `alone:<folder>`; HOLES and FAULTS under their keys."""
    folder = tmp_path_factory.mktemp("changed")
    targets = {one.case["target"] for one in expected.values()}
    cases = [case(f"alone:{place}", place, None, prompts=prompts()) for place in sorted(targets)]
    cases += [one.case for one in expected.values()]
    cases += [changed(expected[base], name, change, folder) for name, (base, change) in (HOLES | FAULTS).items()]
    return vllm(cases)


ALL = (*CASES, *ORACLES, "one-dialogue")


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
    alone = served[f"alone:{one['target']}"]
    plain = {tuple(start): ids for start, ids in zip(prompts(), alone["ids"], strict=True)}
    assert served[name]["ids"] == [plain[tuple(start)] for start in one["prompts"]]


@pytest.mark.parametrize("name", ALL)
def test_vllm_accepts_round_by_round_what_our_runtime_accepts(
    served: dict[str, Any], expected: dict[str, Expected], name: str
) -> None:
    want, got = expected[name], served[name]
    assert got["ids"] == want.ids
    assert got["rounds"] == want.rounds
    rounds = [accepted for row in want.rounds for _, accepted in row]
    assert got["num_drafts"] == len(rounds)
    assert got["accepted_per_position"] == [sum(a > k for a in rounds) for k in range(NUM)]


@pytest.mark.parametrize("name", CASES)
def test_half_right_drafts_are_refused_and_partly_and_wholly_accepted(expected: dict[str, Expected], name: str) -> None:
    accepted = {a for row in expected[name].rounds for _, a in row}
    assert {0, NUM} <= accepted
    assert accepted & set(range(1, NUM))


@pytest.mark.parametrize("name", ORACLES)
def test_the_bigram_oracle_is_right_exactly_once_a_round(served: dict[str, Any], name: str) -> None:
    assert {tuple(pair) for row in served[name]["rounds"] for pair in row} == {(NUM, 1)}
    assert served[name]["accepted_per_position"] == [served[name]["num_drafts"], 0, 0]


def test_a_dialogue_learnt_by_heart_is_accepted_whole(served: dict[str, Any]) -> None:
    assert served["one-dialogue"]["accepted_per_position"] == [served["one-dialogue"]["num_drafts"]] * NUM


@pytest.mark.parametrize("parameter", HOLES)
def test_a_missing_tensor_is_named_although_vllm_runs_on(served: dict[str, Any], parameter: str) -> None:
    assert served[parameter]["error"] is None
    assert served[parameter]["unfilled"] == [parameter]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_misspelt_export_is_accepted_differently(
    served: dict[str, Any], expected: dict[str, Expected], fault: str
) -> None:
    """The faults that vLLM does not report: without this, equal rounds would prove little."""
    want, got = expected[FAULTS[fault][0]], served[fault]
    assert got["error"] is None
    assert got["ids"] == want.ids
    assert got["rounds"] != want.rounds


# -- the quick start's draft on the real 135M target -----------------------------------------------------------------
REAL_NUM, REAL_TOKENS, REAL_PROMPTS = 5, 64, 10


@pytest.fixture(scope="session")
def quickstart() -> Path:
    """The quick start's run folder: trained at the first call, kept in cache/ and reused by every test after that."""
    run = ROOT / "cache" / "tests" / "quickstart"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    for verb in ("train", "export"):
        command = [sys.executable, "-P", "-m", "draftsmith.train.cli", verb, "quickstart", "--out", str(run)]
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=1400, env=environment)
        assert done.returncode == 0, f"draftsmith {verb} quickstart:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return run


@pytest.mark.slow
def test_the_quick_start_draft_is_accepted_in_vllm_within_two_percent_of_our_runtime(
    quickstart: Path, vllm: Any
) -> None:
    section = yaml.safe_load((quickstart / "recipe.yaml").read_text())["target"]
    target = Target.load(TargetConfig(**{**section, "dtype": "float32", "device": "cpu"}))
    draft = export.load(quickstart / "export", target.spec, target.embedding)
    target.bind(draft)
    template = Template(target.tokenizer, ChatConfig())
    starts = []
    for chat in islice(read_chats("shipped:prompts_heldout"), REAL_PROMPTS):
        assert isinstance(chat, Chat)
        first = [m for m in template.messages(chat) if m["role"] != "assistant"][:1]
        starts.append(template.encode(template.text(first, None, prompt=True)))
    decoded = decode(target, draft, starts, REAL_NUM, GREEDY, REAL_TOKENS, ignore_eos=True)
    assert target.folder is not None
    one = case("quickstart", target.folder, quickstart / "export", REAL_NUM, prompts=starts, max_tokens=REAL_TOKENS)
    got = vllm([{**one, "max_model_len": 1024}])["quickstart"]
    assert got["error"] is None
    assert got["unfilled"] == []

    same = [i for i, ids in enumerate(got["ids"]) if ids == decoded[i].ids]
    assert len(same) >= 0.8 * len(starts), "fp32 answers of vLLM and of our runtime should be the same text"
    ours = [list(pair) for i in same for pair in decoded[i].rounds]
    theirs = [pair for i in same for pair in got["rounds"][i]]
    lengths = [1 + sum(a for _, a in rounds) / len(rounds) for rounds in (ours, theirs)]
    print(json.dumps({"acceptance_length": {"runtime": lengths[0], "vllm": lengths[1]}, "prompts": len(same)}))
    assert lengths[1] == pytest.approx(lengths[0], rel=0.02)
