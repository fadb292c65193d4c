"""MTP heads: every family's facts, training against decoding, fine-tuning, and tensors put back where they were.

Run: pytest tests/test_mtp.py
The tiny checkpoints of tests/mtp_tiny.py are right for one known reason, so each fact of a family shows as acceptance.
The same checkpoints run in a real vLLM in tests/vllm/test_vllm_mtp.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mtp_tiny
import pytest
import torch
import transformers
from mtp_tiny import KINDS, expected_rounds, make, prompts
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import alphabet_rows, randomise_norms, teach, tokenizer

from draftsmith.eval import exact
from draftsmith.eval.runtime import decode, decode_plain
from draftsmith.models import export, mtp_checkpoint
from draftsmith.models.cache import HybridCache
from draftsmith.models.draft import Batch, Captured, Needs, family, load_draft, save_draft
from draftsmith.models.mtp import Mtp, MtpConfig
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import Target, TargetConfig

GREEDY = Sampler(0.0)
HYBRID = ("qwen3_5", "qwen3_next")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers reports MTP tensors as unexpected when it loads a trunk."""
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    yield
    transformers.utils.logging.set_verbosity(level)


def load(place: Path | str) -> Target:
    return Target.load(TargetConfig(name=str(place), dtype="float32"))


def native(target: Target, **config: Any) -> Mtp:
    """The module that the target brings along."""
    draft = Mtp(MtpConfig(**config), target.spec)
    target.bind(draft)
    draft.initialise(None, torch.Generator().manual_seed(0))
    return draft.eval()


def random_target(kind: str, place: Path, **config: Any) -> Target:
    """A target that does something in every layer; made once per place."""
    if not place.exists():
        settings = mtp_tiny.config(kind)
        settings.initializer_range = 0.1
        for key, value in config.items():
            setattr(settings, key, value)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = transformers.AutoModelForCausalLM.from_config(settings).float().eval()
        randomise_norms(model).save_pretrained(place)
        tokenizer().save_pretrained(place)
    return load(place)


def new_module(target: Target, **config: Any) -> Mtp:
    return native(target, init="new", init_std=0.1, **config)


def pack(target: Target, rows: list[list[int]], mask: list[list[int]] | None = None) -> Batch:
    states = target.capture(rows, Needs())
    bounds = [0]
    for row in rows:
        bounds.append(bounds[-1] + len(row))
    supervised = [[1] * len(row) for row in rows] if mask is None else mask
    return Batch(
        input_ids=torch.tensor([t for row in rows for t in row]),
        loss_mask=torch.tensor([m for row in supervised for m in row], dtype=torch.bool),
        positions=torch.cat([torch.arange(len(row)) for row in rows]),
        bounds=tuple(bounds),
        last_hidden=torch.cat([last for _, last in states if last is not None]),
    )


def some_rows(lengths: tuple[int, ...] = (9, 14, 7)) -> list[list[int]]:
    return [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


class Forced(Sampler):
    """Proposes the given tokens and notes their probabilities."""

    def __init__(self, tokens: list[int]):
        super().__init__(1.0)
        self.tokens, self.noted = list(tokens), list[float]()

    def draw(self, probs: torch.Tensor) -> torch.Tensor:
        token = self.tokens.pop(0) if self.tokens else 0
        self.noted.append(float(probs[0, token]))
        return torch.tensor([token])


def decoded_chain(
    draft: Mtp, row: list[int], states: torch.Tensor, anchor: int, num: int, cuts: list[int]
) -> list[float]:
    """Probabilities of the tokens after the anchor, with the committed tokens taken in at `cuts`."""
    state, start = draft.start(1, 8), 0  # small, so that it has to grow
    for cut in [*[c for c in cuts if c < anchor], anchor]:
        sampler = Forced(row[anchor + 1 :] if cut == anchor else [5] * num)
        tokens = torch.tensor([row[start + 1 : cut + 1]])
        draft.propose(state, tokens, Captured(None, states[None, start:cut], torch.tensor([cut - start])), num, sampler)
        start = cut
    return sampler.noted[: len(row) - 1 - anchor]


# -- facts of the families -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("oracle", ["embed", "hidden"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_known_acceptance_has_exactly_that(kind: str, oracle: str, folder: Path) -> None:
    target = load(make(kind, oracle, folder / f"{kind}-{oracle}"))
    draft = native(target)
    starts = prompts()
    plain = decode_plain(target, starts, GREEDY, 20, ignore_eos=True, batch_size=4)
    found = decode(target, draft, starts, 3, GREEDY, 20, ignore_eos=True, batch_size=4)
    assert [one.ids for one in found] == [one.ids for one in plain]
    assert [one.ids[:2] for one in found] == [[(p[-1] + 1) % 264, (p[-1] + 2) % 264] for p in starts]
    assert [one.rounds for one in found] == [expected_rounds(kind, oracle, p, 20, 3) for p in starts]


@pytest.mark.parametrize("num", [1, 2, 5, 7])
def test_an_untouched_module_is_measured_at_any_number_of_proposals(num: int, folder: Path) -> None:
    target = load(_once("mimo", "embed", folder))
    found = decode(target, native(target), prompts()[1:], num, GREEDY, 24, ignore_eos=True, batch_size=3)
    assert [one.rounds for one in found] == [expected_rounds("mimo", "embed", p, 24, num) for p in prompts()[1:]]


def _once(kind: str, oracle: str, folder: Path, num_modules: int = 1) -> Path:
    place = folder / f"again-{kind}-{oracle}-{num_modules}"
    return place if place.exists() else make(kind, oracle, place, num_modules=num_modules)


def test_of_two_modules_the_first_serves_every_step_or_each_its_own(folder: Path) -> None:
    """The second module of the checkpoint is broken, so acceptance shows which one was used."""
    target = load(_once("glm4_moe", "embed", folder, num_modules=2))
    starts = prompts()[1:]
    first = decode(target, native(target), starts, 2, GREEDY, 12, ignore_eos=True)
    assert {pair for one in first for pair in one.rounds} == {(2, 2)}
    each = native(target, modules="each", ttt_steps=2)
    assert each.max_proposal == 2
    found = decode(target, each, starts, 2, GREEDY, 12, ignore_eos=True)
    assert {pair for one in found for pair in one.rounds} == {(2, 1)}


# -- training --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_probabilities_of_step_by_step_decoding(kind: str, folder: Path) -> None:
    target = random_target(kind, folder / f"random-{kind}")
    draft, rows = new_module(target), some_rows()
    batch = pack(target, rows)
    _compare_with_decoding(draft, rows, batch)


def test_training_of_several_modules_gives_the_probabilities_of_decoding(folder: Path) -> None:
    target = random_target("glm4_moe", folder / "random-two", num_nextn_predict_layers=3)
    draft, rows = new_module(target, modules="each", ttt_steps=3), some_rows()
    assert len(draft.mtp) == 3
    _compare_with_decoding(draft, rows, pack(target, rows))


def _compare_with_decoding(draft: Mtp, rows: list[list[int]], batch: Batch) -> None:
    anchors = torch.cat([torch.arange(a + 1, b - 1) for a, b in batch.docs])
    found = [part.draft for part in draft.slot_probs(batch, anchors, 3, Sampler(1.0))]
    trained = dict(zip(anchors.tolist(), torch.cat(found).tolist(), strict=True))
    assert batch.last_hidden is not None
    for (start, end), row in zip(batch.docs, rows, strict=True):
        states = batch.last_hidden[start:end]
        for anchor in range(1, len(row) - 1):
            want = decoded_chain(draft, row, states, anchor, 3, cuts=[1, 2, 5, 6])
            assert trained[start + anchor][: len(want)] == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("kind", ["qwen3_5", "deepseek_v3", "ernie4_5"])
def test_gradients_reach_every_trainable_tensor_and_the_target_stays_as_it_was(kind: str, folder: Path) -> None:
    target = random_target(kind, folder / f"random-{kind}")
    before = target.weights_sha256()
    draft = new_module(target, loss={"ce": 0.5, "kl": 1.0, "tv": 0.5}).train()
    batch = pack(target, some_rows((20, 30, 25)))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    draft(batch, draft.counts(batch))["loss"].sum.backward()
    assert [name for name, p in draft.named_parameters() if p.grad is None or not p.grad.abs().sum()] == []
    optimizer.step()
    assert target.weights_sha256() == before
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert not any(name.startswith(("embed", "lm_head")) for name, _ in draft.named_parameters())


@pytest.mark.parametrize("modules", ["first", "each"])
def test_packed_documents_are_kept_apart(modules: str, folder: Path) -> None:
    target = random_target("glm4_moe", folder / "random-two", num_nextn_predict_layers=3)
    draft, rows = new_module(target, modules=modules), some_rows()
    mask = [[0, 0, 0, *[1] * (len(row) - 3)] for row in rows]
    together = pack(target, rows, mask)
    denominators = draft.counts(together)
    whole = draft(together, denominators)
    parts = [draft(pack(target, [row], [m]), denominators) for row, m in zip(rows, mask, strict=True)]
    for name, term in whole.items():
        assert float(sum(part[name].sum for part in parts).detach()) == pytest.approx(
            float(term.sum.detach()), abs=1e-5
        )


def test_step_weights_are_powers_of_the_decay(folder: Path) -> None:
    target = random_target("mimo", folder / "random-mimo")
    draft = new_module(target, position_decay=0.5, ttt_steps=3)
    batch = pack(target, some_rows())
    found = draft(batch, draft.counts(batch))
    means = [float(found[f"loss_{s}"].sum / found[f"loss_{s}"].count) for s in range(3)]
    assert float(found["loss"].sum.detach()) == pytest.approx(means[0] + 0.5 * means[1] + 0.25 * means[2], rel=1e-5)


def test_a_batch_without_supervision_costs_nothing_and_reaches_every_tensor(folder: Path) -> None:
    target = random_target("mimo", folder / "random-mimo")
    draft, rows = new_module(target), some_rows()
    batch = pack(target, rows, [[0] * len(row) for row in rows])
    found = draft(batch, draft.counts(batch))
    found["loss"].sum.backward()
    assert float(found["loss"].sum.detach()) == 0
    assert all(p.grad is not None and not p.grad.any() for p in draft.parameters())


def test_exact_acceptance_is_that_of_the_runtime(folder: Path) -> None:
    target = random_target("qwen3_5", folder / "random-qwen3_5")
    draft = new_module(target)
    starts = [row[:6] for row in some_rows((9, 10, 11))]
    answers = decode_plain(target, starts, GREEDY, 30, ignore_eos=True, batch_size=3)
    rows = [[*start, *one.ids] for start, one in zip(starts, answers, strict=True)]
    fit(draft, pack(target, rows), 40, 3e-3)
    decoded = decode(target, draft, starts, 3, GREEDY, 30, ignore_eos=True)
    accepted = {a for one in decoded for _, a in one.rounds}
    assert {0, 3} <= accepted, f"a half-right module is wanted, it accepts {accepted}"
    masks = [[0] * 6 + [1] * 30 for _ in rows]
    batch = pack(target, rows, masks)
    batch.row_ids = ("a", "b", "c")
    found = exact.exact(draft, [batch], dict.fromkeys("abc", "x"), 3, GREEDY, 30)
    rounds = [pair for one in decoded for pair in one.rounds_within_text]
    assert found["num_rounds"] == pytest.approx(len(rounds))
    assert found["num_accepted"] == pytest.approx(sum(a for _, a in rounds))


def fit(draft: Mtp, batch: Batch, steps: int, lr: float) -> None:
    draft.train()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=lr, weight_decay=0.0)
    with torch.enable_grad():
        for _ in range(steps):
            loss = draft(batch, draft.counts(batch))["loss"].sum
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    draft.eval()


# -- targets with gated delta layers ---------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", HYBRID)
def test_greedy_decoding_equals_the_target_alone_on_many_prompts(kind: str, folder: Path) -> None:
    target = random_target(kind, folder / f"random-{kind}")
    starts = some_rows((1, 2, 3, 5, 8, 13, 21, 34, 55, 70, 9, 17, 26, 33, 12, 4))
    plain = decode_plain(target, starts, GREEDY, 24, ignore_eos=True, batch_size=5)
    draft = new_module(target)
    rows = [[*start, *one.ids] for start, one in zip(starts, plain, strict=True)]
    fit(draft, pack(target, rows), 12, 1e-2)
    for num_prompts, batch_size in ((3, 1), (16, 16)):
        found = decode(target, draft, starts[:num_prompts], 3, GREEDY, 24, ignore_eos=True, batch_size=batch_size)
        assert [one.ids for one in found] == [one.ids for one in plain[:num_prompts]]
    assert len({a for one in found for _, a in one.rounds}) >= 3, (
        "rejection, part and whole acceptance should all occur"
    )


@pytest.mark.parametrize("kind", HYBRID)
def test_rolled_back_states_are_those_of_a_cache_that_never_saw_the_rejected_tokens(kind: str, folder: Path) -> None:
    target = random_target(kind, folder / f"random-{kind}")
    rows = torch.tensor([some_rows((12,))[0], some_rows((13,))[0][:12]])
    cache = target.new_cache(2, 32)
    assert isinstance(cache, HybridCache)
    target.forward(rows[:, :6], cache)
    cache.advance([4, 6])  # ragged: the second row keeps everything
    wrong = torch.full((2, 4), 9)
    wrong[0, :2], wrong[1, :1] = rows[0, 4:6], rows[1, 6:7]
    target.forward(wrong, cache)
    cache.advance([2, 1])
    assert cache.num_replayed > 0
    target.forward(wrong, cache)  # and once more without any that stays
    cache.advance([0, 0])
    after = torch.stack([rows[0, 6:9], rows[1, 7:10]])
    found = target.forward(after, cache).last_hidden
    for row, (ids, length) in enumerate(zip(rows, (6, 7), strict=True)):
        want = target.forward(ids[None, : length + 3]).last_hidden[0, length:]
        assert torch.allclose(found[row], want, atol=2e-5)


def test_rows_of_a_hybrid_cache_are_kept_and_never_cut(folder: Path) -> None:
    target = random_target("qwen3_5", folder / "random-qwen3_5")
    ids = torch.tensor(some_rows((8, 8))[:1] + [some_rows((9,))[0][:8]] + [some_rows((10,))[0][:8]])
    cache = target.new_cache(3, 16)
    target.forward(ids[:, :5], cache)
    cache.advance([5, 5, 5])
    cache.keep([2, 1])
    found = target.forward(ids[[2, 1], 5:], cache).last_hidden
    want = target.forward(ids).last_hidden[[2, 1], 5:]
    assert torch.allclose(found, want, atol=2e-5)
    with pytest.raises(ValueError, match="cannot be cut to .* take back tokens of the last pass with advance"):
        cache.truncate([3, 3])


# -- tensors go back where they were ---------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_the_export_is_the_checkpoint_with_only_the_module_changed(kind: str, folder: Path, tmp_path: Path) -> None:
    place = _once(kind, "embed", folder)
    target = load(place)
    draft = native(target)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(1.5)
    out = tmp_path / "export"
    export.write(draft, target.spec, out, num_speculative_tokens=2)
    report = json.loads((out / mtp_checkpoint.REPORT).read_text())
    assert report["rewritten"] == ["model-00002-of-00002.safetensors"]
    assert report["linked"] == ["model-00001-of-00002.safetensors"]
    assert os.path.samefile(out / report["linked"][0], place / report["linked"][0])
    before, after = _tensors(place), _tensors(out)
    assert before.keys() == after.keys()
    ours = draft.checkpoint_tensors()
    assert report["changed"].keys() == ours.keys()
    assert report["same"] == len(before.keys() - ours.keys())
    for name, tensor in before.items():
        same = torch.equal(tensor, after[name])
        assert same == (name not in ours or torch.equal(tensor, tensor * 1.5)), name
    assert json.loads((out / "config.json").read_text()) == json.loads((place / "config.json").read_text())
    reloaded = load(out)
    assert reloaded.weights_sha256() == target.weights_sha256()
    found = export.load(out, reloaded.spec, reloaded.embedding)
    assert export.first_difference(draft.state_dict(), found.state_dict()) is None
    assert '"method": "mtp", "num_speculative_tokens": 2' in export.serve_command(out)


def _tensors(place: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(place.glob("*.safetensors")):
        found |= load_file(path)
    return found


def test_a_target_without_a_module_gets_a_new_one_in_a_shard_of_its_own(folder: Path, tmp_path: Path) -> None:
    target = random_target("qwen3_5", folder / "random-qwen3_5")
    with pytest.raises(ValueError, match=r"no MTP tensors under .*mtp\.fc.*set draft.init: new"):
        native(target)
    draft = new_module(target)
    export.write(draft, target.spec, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["mtp_num_hidden_layers"] == 1
    with safe_open(tmp_path / "out" / mtp_checkpoint.ADDED, "pt") as shard:
        assert set(shard.keys()) == set(draft.checkpoint_tensors())
    again = load(tmp_path / "out")
    assert again.weights_sha256() == target.weights_sha256()
    assert native(again).config.init == "checkpoint"


def test_a_plain_qwen2_becomes_a_mimo_when_it_gets_a_module(folder: Path, tmp_path: Path) -> None:
    target = random_target("mimo", folder / "random-mimo")
    export.write(new_module(target), target.spec, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["MiMoForCausalLM"]
    assert config["num_nextn_predict_layers"] == 1


def test_block_quantised_tensors_are_read_wide_and_written_in_bfloat16(folder: Path, tmp_path: Path) -> None:
    source = _once("mimo", "embed", folder)
    place = tmp_path / "quantised"
    place.mkdir()
    for path in source.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    name, file = "model.mtp_layers.0.mlp.up_proj.weight", "model-00002-of-00002.safetensors"
    tensors = load_file(place / file)
    wide = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([[0.5], [2.0]])
    low = (wide / scale.repeat_interleave(wide.shape[0] // 2, 0)).to(torch.float8_e4m3fn)
    save_file({**tensors, name: low, f"{name}_scale_inv": scale}, place / file)
    index = json.loads((place / "model.safetensors.index.json").read_text())
    index["weight_map"][f"{name}_scale_inv"] = file
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((place / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [48, 64]}
    (place / "config.json").write_text(json.dumps(config))

    target = load(source)
    draft = native(target, checkpoint=str(place))
    assert torch.allclose(draft.checkpoint_tensors()[name], wide, atol=0.3)
    export.write(draft, target.spec, tmp_path / "out")
    written = _tensors(tmp_path / "out")
    assert written[name].dtype == torch.bfloat16
    assert f"{name}_scale_inv" not in written
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == [name.removesuffix(".weight")]


def test_only_an_earlier_export_is_replaced_and_never_the_target(folder: Path, tmp_path: Path) -> None:
    place = _once("mimo", "embed", folder)
    target = load(place)
    draft = native(target)
    out = tmp_path / "out"
    export.write(draft, target.spec, out)
    export.write(draft, target.spec, out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ValueError, match="mine exists and has no mtp-report.json; choose an empty place"):
        export.write(draft, target.spec, tmp_path / "mine")
    with pytest.raises(ValueError, match="exists and has no mtp-report.json"):
        export.write(draft, target.spec, place)
    bad = tmp_path / "my-eagle3-mimo"
    export.write(draft, target.spec, bad)
    with pytest.raises(ValueError, match="holds 'eagle-'|holds 'eagle3'.*rename it"):
        export.serve_command(bad)


def test_a_draft_folder_gives_the_same_module_back(folder: Path, tmp_path: Path) -> None:
    target = random_target("deepseek_v3", folder / "random-deepseek_v3")
    draft = new_module(target)
    save_draft(draft, tmp_path / "draft")
    found = load_draft(tmp_path / "draft", target.spec)
    assert export.first_difference(draft.state_dict(), found.state_dict()) is None
    assert family("mtp") is Mtp


# -- fine-tuning -----------------------------------------------------------------------------------------------------
def test_a_damaged_module_recovers_from_under_30_to_over_90_percent(folder: Path, tmp_path: Path) -> None:
    """A taught target whose module is noise: acceptance at K=3 before and after, in the runtime and from the export."""
    place = folder / "taught"
    model = transformers.Qwen2ForCausalLM(mtp_tiny.config("mimo"))
    teach(model).save_pretrained(place)
    tokenizer().save_pretrained(place)
    target = load(place)
    before_hash = target.weights_sha256()
    starts = [row.tolist() for n in (4, 6, 9) for row in alphabet_rows(4, n, torch.Generator().manual_seed(n))]
    held_out = [row.tolist() for n in (5, 8) for row in alphabet_rows(3, n, torch.Generator().manual_seed(n))]
    answers = decode_plain(target, starts, GREEDY, 40, ignore_eos=True, batch_size=12)
    rows = [[*start, *one.ids] for start, one in zip(starts, answers, strict=True)]
    draft = new_module(target)
    before = survival(target, draft, held_out)
    fit(draft, pack(target, rows), 120, 3e-3)
    after = survival(target, draft, held_out)
    assert sum(before) / 3 < 0.3
    assert min(after) > 0.9
    assert target.weights_sha256() == before_hash
    export.write(draft, target.spec, tmp_path / "tuned")
    served = load(tmp_path / "tuned")
    found = export.load(tmp_path / "tuned", served.spec, served.embedding)
    served.bind(found)
    assert survival(served, found.eval(), held_out) == pytest.approx(after, abs=0.05)


def survival(target: Target, draft: Any, starts: list[list[int]]) -> list[float]:
    """Share of rounds in which slot 1, 2, 3 was accepted."""
    found = decode(target, draft, starts, 3, GREEDY, 40, ignore_eos=True, batch_size=len(starts))
    rounds = [accepted for one in found for _, accepted in one.rounds]
    return [sum(a > k for a in rounds) / len(rounds) for k in range(3)]


# -- refusals --------------------------------------------------------------------------------------------------------
def test_a_target_that_no_server_reads_mtp_for_is_refused(tmp_path: Path) -> None:
    from tiny import save_target, target_model

    target = load(save_target(target_model("llama"), tokenizer(), tmp_path / "llama"))
    with pytest.raises(ValueError, match="no server reads MTP tensors for a llama target .* known: qwen3_5_text"):
        Mtp(MtpConfig(), target.spec)


def test_more_steps_than_modules_are_refused(folder: Path) -> None:
    target = load(_once("glm4_moe", "embed", folder, num_modules=2))
    with pytest.raises(ValueError, match="ttt_steps 3: with modules: each a step is a module, and .* has 2"):
        Mtp(MtpConfig(modules="each"), target.spec)


def test_a_module_that_lacks_a_tensor_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    target = load(_once("mimo", "embed", folder))
    draft = native(target)
    tensors = draft.checkpoint_tensors()
    del tensors["model.mtp_layers.0.input_proj.weight"]
    tensors["model.mtp_layers.0.strange.weight"] = torch.zeros(1)
    with pytest.raises(
        ValueError, match=r"lacks \['mtp.0.proj.weight'\], not expected \['mtp.0.block.strange.weight'\]"
    ):
        draft.load_named(tensors, "here")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": {"mse": 1.0}}, "mse is not a loss"),
        ({"loss": {"kl": 0.0}}, "one of them > 0"),
        ({"init": "new", "checkpoint": "x"}, "checkpoint: x has no effect with init: new"),
        ({"lk_eta": 2.0}, "lk_eta has no effect without loss.lk"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MtpConfig(**settings)


def test_mimo_is_loaded_as_a_qwen2_and_refused_when_its_trunk_does_not_fit(folder: Path, tmp_path: Path) -> None:
    source = _once("mimo", "embed", folder)
    same = tmp_path / "mimo"
    same.mkdir()
    for path in source.iterdir():
        (same / path.name).write_bytes(path.read_bytes())
    config = json.loads((same / "config.json").read_text())
    config |= {"model_type": "mimo", "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
    (same / "config.json").write_text(json.dumps(config))
    target = load(same)
    assert target.weights_sha256() == load(source).weights_sha256()
    assert native(target).style.hidden_first
    name = "model-00001-of-00002.safetensors"
    save_file({**load_file(same / name), "model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, same / name)
    index = json.loads((same / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.self_attn.q_norm.weight"] = name
    (same / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"a mimo trunk is read as a qwen2.*q_norm.weight.*does not fit"):
        load(same)
