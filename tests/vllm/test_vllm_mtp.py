"""MTP modules in a real vLLM. Protects: that our runtime measures what vLLM will accept, family by family.

    make vllm-test          (or: pytest -m vllm tests/vllm/test_vllm_mtp.py, with .venv-vllm in place)

Oracles: the checkpoints of tests/mtp_tiny.py, whose acceptance is known in advance, give exactly that in vLLM. They prove
the order of the halves, the hidden state that is fed, the zeroed embedding at position 0 and the norms.
Tuned modules: half right, so that refused, partly and wholly accepted proposals all occur; exported into the target's
own checkpoint, vLLM accepts round by round what our runtime accepts. They prove the block: RoPE, masks, experts, chains.
Gated delta targets and several modules run in vLLM's second runner only, which needs Triton's interpreter here; there
gated delta layers take bfloat16 alone, so those targets have oracles and no tuned modules.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mtp_tiny
import pytest
import torch
import transformers
from mtp_tiny import expected_rounds, make, prompts
from served import GREEDY
from tiny import alphabet_rows, randomise_norms, teach, tokenizer

from draftsmith.eval.runtime import decode, decode_plain
from draftsmith.models import export
from draftsmith.models.draft import Batch
from draftsmith.models.mtp import Mtp, MtpConfig
from draftsmith.models.target import Target, TargetConfig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

NUM, TOKENS, TRAIN_STEPS = 3, 20, 40
Modules = Literal["first", "each"]
FIRST_RUNNER = ("mimo", "glm4_moe", "ernie4_5", "deepseek_v3")
SECOND_RUNNER = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
ORACLES = ("embed", "hidden")


class Tuned(NamedTuple):
    """What our side says about a tuned module. rounds: per prompt [[num_proposed, num_accepted], ...]."""

    case: dict[str, Any]
    ids: list[list[int]]
    rounds: list[list[list[int]]]


def case(name: str, target: Path, draft: str | None, num: int = NUM, **more: Any) -> dict[str, Any]:
    about = {"method": "mtp", "num_speculative_tokens": num, "max_tokens": TOKENS, "prompts": prompts()}
    return {"name": name, "target": str(target), "draft": draft, **about, **more}


def tune(kind: str, folder: Path, modules: Modules = "first", num_modules: int = 1) -> Tuned:
    """A random target, a module trained on its answers until it is half right, and both together as one checkpoint."""
    settings = mtp_tiny.config(kind, big=True)
    settings.initializer_range = 0.1  # layers matter, and greedy choices are clear
    if num_modules > 1:
        settings.num_nextn_predict_layers = num_modules
    if kind == "deepseek_v3":
        for key, value in mtp_tiny.SERVED.items():
            setattr(settings, key, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(settings).float()
    place = folder / f"{kind}-{modules}-random"
    randomise_norms(model).save_pretrained(place)
    tokenizer().save_pretrained(place)
    target = load(place)
    random = torch.Generator().manual_seed(7)
    starts = [torch.randint(0, 256, (n,), generator=random).tolist() for n in (1, 3, 4, 6, 9, 12)]
    answers = decode_plain(target, starts, GREEDY, 30, ignore_eos=True, batch_size=len(starts))
    rows = [[*start, *one.ids] for start, one in zip(starts, answers, strict=True)]
    steps = min(NUM, num_modules) if modules == "each" else NUM
    draft = Mtp(MtpConfig(init="new", init_std=0.1, modules=modules, ttt_steps=steps), target.spec)
    target.bind(draft)
    draft.initialise(None, torch.Generator().manual_seed(0))
    train(draft, target, rows)
    out = folder / f"{kind}-{modules}-tuned"
    export.write(draft, target.spec, out, num_speculative_tokens=steps)
    served = load(out)
    found = Mtp(MtpConfig(modules=modules, ttt_steps=steps), served.spec)
    served.bind(found)
    found.initialise(None, torch.Generator())
    decoded = decode(served, found.eval(), starts, steps, GREEDY, TOKENS, ignore_eos=True, batch_size=len(starts))
    one = case(f"tuned-{kind}-{modules}", out, "target", steps, prompts=starts, native_rope=kind == "deepseek_v3")
    return Tuned(one, [d.ids for d in decoded], [[list(r) for r in d.rounds] for d in decoded])


def train(draft: Mtp, target: Target, rows: list[list[int]], steps: int = TRAIN_STEPS) -> None:
    """A few steps on all rows at once."""
    states = torch.cat([last for _, last in target.capture(rows, draft.needs) if last is not None])
    bounds = torch.tensor([0, *map(len, rows)]).cumsum(0).tolist()
    ids = torch.tensor([token for row in rows for token in row])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), positions, tuple(bounds), last_hidden=states)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(steps):
        loss = draft(batch, draft.counts(batch))["loss"].sum
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def recover(folder: Path) -> list[dict[str, Any]]:
    """Cases "damaged" and "recovered": a taught target with a module of noise, and the same after fine-tuning."""
    place = folder / "taught"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(mtp_tiny.config("mimo", big=True)).float()
    teach(model).save_pretrained(place)
    tokenizer().save_pretrained(place)
    target = load(place)
    random = torch.Generator().manual_seed(3)
    starts, held_out = (alphabet_rows(num, 6, random).tolist() for num in (12, 6))
    answers = decode_plain(target, starts, GREEDY, 40, ignore_eos=True, batch_size=len(starts))
    draft = Mtp(MtpConfig(init="new", init_std=0.1), target.spec)
    target.bind(draft)
    draft.initialise(None, torch.Generator().manual_seed(0))
    cases = []
    for name, steps in (("damaged", 0), ("recovered", 120)):
        train(draft, target, [[*start, *one.ids] for start, one in zip(starts, answers, strict=True)], steps)
        export.write(draft, target.spec, folder / name, num_speculative_tokens=NUM)
        cases.append(case(name, folder / name, "target", prompts=held_out))
    return cases


def load(place: Path) -> Target:
    return Target.load(TargetConfig(name=str(place), dtype="float32"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


@pytest.fixture(scope="session")
def tuned(folder: Path) -> dict[str, Tuned]:
    return {kind: tune(kind, folder) for kind in FIRST_RUNNER}


@pytest.fixture(scope="session")
def first_runner(vllm: Callable[..., Any], folder: Path, tuned: dict[str, Tuned]) -> dict[str, dict[str, Any]]:
    cases = []
    for kind in FIRST_RUNNER:
        places = {oracle: make(kind, oracle, folder / f"{kind}-{oracle}", big=True) for oracle in ORACLES}
        cases += [case(f"{kind}-{oracle}", place, "target") for oracle, place in places.items()]
        cases.append(case(f"{kind}-alone", places["embed"], None))
        cases += [tuned[kind].case, {**tuned[kind].case, "name": f"tuned-{kind}-alone", "draft": None}]
    place = make("glm4_moe", "embed", folder / "two-modules-first", big=True, num_modules=2)
    return vllm([*cases, *recover(folder), case("two-modules", place, "target", 2)])


@pytest.fixture(scope="session")
def two_modules(folder: Path) -> Tuned:
    return tune("glm4_moe", folder, "each", 2)


@pytest.fixture(scope="session")
def second_runner(vllm: Callable[..., Any], folder: Path, two_modules: Tuned) -> dict[str, dict[str, Any]]:
    cases = []
    for kind in SECOND_RUNNER:
        for oracle in ORACLES:
            place = make(kind, oracle, folder / f"{kind}-{oracle}", big=True)
            cases.append(case(f"{kind}-{oracle}", place, "target", dtype="bfloat16"))
    place = make("glm4_moe", "embed", folder / "two-modules-second", big=True, num_modules=2)
    return vllm([*cases, case("two-modules", place, "target", 2), two_modules.case], v2=True)


def check_oracle(result: dict[str, Any], kind: str, oracle: str) -> None:
    assert result["error"] is None
    assert result["ids"] == [[(p[-1] + 1 + i) % mtp_tiny.VOCAB for i in range(TOKENS)] for p in prompts()]
    want = [[list(pair) for pair in expected_rounds(kind, oracle, p, TOKENS, NUM)] for p in prompts()]
    assert result["rounds"] == want


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("kind", FIRST_RUNNER)
def test_a_checkpoint_of_known_acceptance_has_exactly_that_in_vllm(
    first_runner: dict[str, Any], kind: str, oracle: str
) -> None:
    check_oracle(first_runner[f"{kind}-{oracle}"], kind, oracle)
    assert first_runner[f"{kind}-{oracle}"]["ids"] == first_runner[f"{kind}-alone"]["ids"]


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("kind", SECOND_RUNNER)
def test_a_gated_delta_checkpoint_of_known_acceptance_has_exactly_that_in_vllm(
    second_runner: dict[str, Any], kind: str, oracle: str
) -> None:
    check_oracle(second_runner[f"{kind}-{oracle}"], kind, oracle)


@pytest.mark.parametrize("kind", FIRST_RUNNER)
def test_vllm_accepts_round_by_round_what_our_runtime_accepts(
    first_runner: dict[str, Any], tuned: dict[str, Tuned], kind: str
) -> None:
    want, got = tuned[kind], first_runner[f"tuned-{kind}-first"]
    assert got["error"] is None
    assert got["ids"] == want.ids == first_runner[f"tuned-{kind}-alone"]["ids"]
    assert got["rounds"] == want.rounds
    accepted = {a for row in want.rounds for _, a in row}
    assert {0, NUM} <= accepted
    assert accepted & set(range(1, NUM))


def test_a_damaged_module_recovers_in_vllm_from_under_30_to_over_90_percent(first_runner: dict[str, Any]) -> None:
    survival = {}
    for name in ("damaged", "recovered"):
        result = first_runner[name]
        assert result["error"] is None
        survival[name] = [accepted / result["num_drafts"] for accepted in result["accepted_per_position"]]
    print(survival)
    assert sum(survival["damaged"]) / NUM < 0.3
    assert min(survival["recovered"]) > 0.9
    assert first_runner["damaged"]["ids"] == first_runner["recovered"]["ids"]


def test_the_first_runner_takes_the_first_of_two_modules(first_runner: dict[str, Any]) -> None:
    """The second module is broken; the first is right in every slot."""
    assert first_runner["two-modules"]["error"] is None
    pairs = [tuple(pair) for row in first_runner["two-modules"]["rounds"][1:] for pair in row]
    assert set(pairs) == {(2, 2)}


def test_the_second_runner_takes_each_module_in_its_turn(second_runner: dict[str, Any]) -> None:
    assert second_runner["two-modules"]["error"] is None
    pairs = [tuple(pair) for row in second_runner["two-modules"]["rounds"][1:] for pair in row]
    assert set(pairs) == {(2, 1)}


def test_tuned_modules_in_their_turn_are_accepted_as_in_our_runtime(
    second_runner: dict[str, Any], two_modules: Tuned
) -> None:
    got = second_runner[two_modules.case["name"]]
    assert got["error"] is None
    assert got["ids"] == two_modules.ids
    assert got["rounds"] == two_modules.rounds
    assert {a for row in two_modules.rounds for _, a in row} == {0, 1, 2}
