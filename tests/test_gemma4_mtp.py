"""Gemma 4 drafters: what they are fed with, what they see, training against decoding, and the file that servers read.

Run: pytest tests/test_gemma4_mtp.py
The tiny drafters of tests/gemma4_tiny.py are right for one known reason, so each fact shows as acceptance. transformers'
own candidate generator runs beside our runtime here, a real vLLM in tests/vllm/test_vllm_gemma4.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gemma4_tiny as tiny4
import pytest
import torch
import transformers
from gemma4_tiny import VOCAB, WINDOW, pack, prompts, save, some_rows, starts_of
from safetensors.torch import load_file
from tiny import save_target, target_model, tokenizer
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Generator

from draftsmith.data.batches import BatchSource
from draftsmith.data.capture import CaptureConfig, capture
from draftsmith.data.chat import Row
from draftsmith.eval import exact
from draftsmith.eval.runtime import decode, decode_plain
from draftsmith.models import export
from draftsmith.models.draft import Batch, Captured, family, load_draft, save_draft
from draftsmith.models.gemma4_mtp import Gemma4Mtp, Gemma4MtpConfig
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import Target, TargetConfig

GREEDY, NUM = Sampler(0.0), 3
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 2}


def load(place: Path | str) -> Target:
    return Target.load(TargetConfig(name=str(place), dtype="float32", published_name="org/tiny"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gemma4")
    save(tiny4.counting_target(), place / "counting")
    for kind in tiny4.ORACLES:
        save(tiny4.oracle(kind), place / kind)
    target = tiny4.random_target()
    save(target, place / "random")
    save(tiny4.random_assistant(target), place / "assistant")
    save(tiny4.random_assistant(target, **ORDERED), place / "ordered")
    return place


@pytest.fixture(scope="module")
def counting(folder: Path) -> Target:
    return load(folder / "counting")


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load(folder / "random")


@pytest.fixture(scope="module")
def tuned(target: Target, folder: Path) -> Gemma4Mtp:
    return tiny4.tune(target, folder / "assistant", 40)


def drafter(target: Target, place: Path, **config: Any) -> Gemma4Mtp:
    draft = Gemma4Mtp(Gemma4MtpConfig(checkpoint=str(place), **config), target.spec)
    target.bind(draft)
    draft.initialise(None, torch.Generator())
    return draft.eval()


def assisted(target: Any, assistant: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], list[list[int]]]:
    """(new tokens, what transformers' generator proposed in each round) of a greedy answer."""
    proposed: list[list[int]] = []
    original = Generator.get_candidates

    def noted(self: Generator, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, input_ids, *args, **kwargs)
        if found[1] is not None:
            proposed.append(found[0][0, input_ids.shape[1] :].tolist())
        return found

    assistant.generation_config.num_assistant_tokens = NUM
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generator, "get_candidates", noted)
        settings = {"do_sample": False, "max_new_tokens": num_tokens, "eos_token_id": None, "pad_token_id": 0}
        ids = torch.tensor([prompt])  # transformers would take a token like the padding for padding
        out = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, **settings)
    return out[0, len(prompt) :].tolist(), proposed


# -- what a drafter is fed with --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", tiny4.ORACLES)
def test_a_drafter_of_known_acceptance_has_exactly_that(kind: str, folder: Path, counting: Target) -> None:
    draft = drafter(counting, folder / kind)
    for prompt, one in zip(
        prompts(), decode(counting, draft, prompts(), NUM, GREEDY, 17, ignore_eos=True, batch_size=4), strict=True
    ):
        assert one.ids == [(prompt[-1] + 1 + i) % VOCAB for i in range(17)]
        assert set(one.rounds) == {(NUM, 0 if kind == "early" else NUM)}


@pytest.mark.parametrize("kind", tiny4.ORACLES)
def test_transformers_feeds_the_anchor_and_not_the_token_before_it(kind: str, folder: Path) -> None:
    """The question that trainers answer differently: `early` is right only where x[t] stands beside z[t]."""
    target = transformers.AutoModelForCausalLM.from_pretrained(folder / "counting")
    assistant = transformers.AutoModelForCausalLM.from_pretrained(folder / kind)
    for prompt in prompts():
        ids, proposed = assisted(target, assistant, prompt, 9)
        assert ids == [(prompt[-1] + 1 + i) % VOCAB for i in range(9)]
        matches = [(p - q) % VOCAB for p, q in zip(proposed[0], ids[1:], strict=False)]
        assert matches == [1 if kind == "early" else 0, *matches[1:]]
        assert kind == "early" or set(matches) == {0}


@pytest.mark.parametrize("name", ["assistant", "ordered"])
def test_transformers_queries_stand_at_the_anchor(name: str, folder: Path, target: Target) -> None:
    """First round after a prompt within the window, where its generator sees exactly the committed keys."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "random")
    assistant = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
    differs = 0
    for seed in range(6):
        prompt = torch.randint(0, 256, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
        _, proposed = assisted(model, assistant, prompt, 6)
        for position in ("anchor", "state"):
            ours = _first_proposal(target, drafter(target, folder / name, query_position=position), prompt)
            assert position == "state" or ours == proposed[0]
            differs += position == "state" and ours != proposed[0]
    assert differs  # so the position matters to these drafters


def test_transformers_hands_over_the_key_of_a_rejected_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why rounds after a rejection are compared with vLLM alone: the keys before the anchor are as many as its position."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "random")
    assistant = transformers.AutoModelForCausalLM.from_pretrained(folder / "assistant")
    seen, forward = [], assistant.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        keys = kwargs["shared_kv_states"]["full_attention"][0]
        seen.append((int(kwargs["position_ids"]), keys.shape[2]))
        return forward(*args, **kwargs)

    monkeypatch.setattr(assistant, "forward", noted)
    prompt = torch.randint(0, 256, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    ids, proposed = assisted(model, assistant, prompt, 9)
    assert proposed[0][0] != ids[1]
    assert seen[:NUM] == [(12, 12)] * NUM
    assert seen[NUM] == (13, 14)


def _first_proposal(target: Target, draft: Gemma4Mtp, prompt: list[int]) -> list[int]:
    cache = target.new_cache(1, len(prompt))
    out = target.forward(torch.tensor([prompt]), cache)
    cache.advance([len(prompt)])
    token = target.logits(out.last_hidden[:, -1]).argmax(-1)
    tokens = torch.cat([torch.tensor([prompt[1:]], dtype=torch.int64), token[:, None]], 1)
    captured = Captured(None, out.last_hidden, torch.tensor([len(prompt)]), cache)
    return draft.propose(None, tokens, captured, NUM, GREEDY).ids[0].tolist()


def test_a_cluster_head_offers_the_tokens_of_the_best_clusters_alone(folder: Path, target: Target) -> None:
    draft = drafter(target, folder / "ordered")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "ordered")
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, want = draft.logits(hidden), theirs.masked_embedding(hidden, theirs.lm_head.weight)
    inside = ours.isfinite()
    assert inside.sum(-1).unique().tolist() == [2 * VOCAB // 8]
    torch.testing.assert_close(ours[inside], want[inside])
    assert want[~inside].max() < want[inside].min()


# -- keys and values -------------------------------------------------------------------------------------------------
def test_captured_keys_and_values_are_those_of_the_cache_and_of_transformers(folder: Path, target: Target) -> None:
    needs = drafter(target, folder / "assistant").needs
    assert needs.target_kv_layers == (2, 3)  # of six layers the last two write none
    rows = some_rows()
    together = target.states(rows, needs, max_batch_tokens=1000)
    for row, batched, alone in zip(rows, together, target.states(rows, needs, max_batch_tokens=1), strict=True):
        cache = target.new_cache(1, len(row))
        target.forward(torch.tensor([row]), cache)
        cache.advance([len(row)])
        truth = target.model(torch.tensor([row]), return_shared_kv_states=True).shared_kv_states
        for layer, kind in ((2, "sliding_attention"), (3, "full_attention")):
            for part in (0, 1):
                want = truth[kind][part][0].transpose(0, 1)
                torch.testing.assert_close(alone.target_kv[layer][part], want)
                torch.testing.assert_close(batched.target_kv[layer][part], want, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(cache.keys_values(layer)[part][0].transpose(0, 1), want)


def test_a_cache_on_disk_gives_the_batches_of_the_live_target(folder: Path, target: Target, tmp_path: Path) -> None:
    draft = drafter(target, folder / "assistant")
    rows = [Row(f"row-{i}", "chat", ids, [0, *[1] * (len(ids) - 1)], {}) for i, ids in enumerate(some_rows())]
    config = CaptureConfig(shard_tokens=20)
    store = capture(rows, target, draft.needs, tmp_path / "cache", config)
    assert store is not None
    stored, live = (BatchSource(data, target, draft.needs, 0, 100, 100, config) for data in (store, rows))
    for a, b in zip(stored.step(0), live.step(0), strict=True):
        assert a.target_kv.keys() == b.target_kv.keys() == {2, 3}
        for layer in a.target_kv:
            for mine, other in zip(a.target_kv[layer], b.target_kv[layer], strict=True):
                assert torch.equal(mine, other)
                assert mine.dtype == torch.bfloat16
                assert mine.shape == (2, 46, 32 if layer == 2 else 64)
    empty = stored.step(0, rank=5, world=6)
    assert empty[0].target_kv[3][0].shape == (2, 0, 64)
    with pytest.raises(ValueError, match=r"keys and values of layers \[2, 3\] in the cache, the draft needs \[\]"):
        BatchSource(store, None, replace(draft.needs, target_kv_layers=()), 0, 100, 100)


# -- training and decoding -------------------------------------------------------------------------------------------
def slots(draft: Gemma4Mtp, batch: Batch, anchors: list[int], num: int = NUM) -> torch.Tensor:
    """[n, num] probabilities of the tokens that follow."""
    found = draft.slot_probs(batch, torch.tensor(anchors), num, Sampler(1.0))
    return torch.cat([part.draft for part in found])


def test_a_query_sees_keys_up_to_its_state_and_within_the_window(folder: Path, target: Target) -> None:
    draft = drafter(target, folder / "assistant")
    batch = pack(target, draft.needs, some_rows((30,)))
    anchor = 22
    before = slots(draft, batch, [anchor])

    def disturbed(layer: int, at: int) -> bool:
        kv = {k: (keys.clone(), values) for k, (keys, values) in batch.target_kv.items()}
        kv[layer][0][:, at] += 1.0
        return not torch.equal(slots(draft, replace(batch, target_kv=kv), [anchor]), before)

    assert not disturbed(2, anchor)
    assert not disturbed(3, anchor)
    assert disturbed(2, anchor - 1)
    assert disturbed(3, anchor - 1)
    assert disturbed(2, anchor - WINDOW)
    assert not disturbed(2, anchor - WINDOW - 1)
    assert disturbed(3, 0)


def test_exact_acceptance_is_that_of_the_runtime_alone_and_batched(target: Target, tuned: Gemma4Mtp) -> None:
    """Half-right drafts: rejected, partly and wholly accepted rounds occur, and what training computes decides them."""
    starts = starts_of(6)
    decoded = decode(target, tuned, starts, NUM, GREEDY, 24, ignore_eos=True, batch_size=6)
    plain = decode_plain(target, starts, GREEDY, 24, ignore_eos=True)
    assert [d.ids for d in decoded] == [d.ids for d in plain]
    alone = decode(target, tuned, starts, NUM, GREEDY, 24, ignore_eos=True, batch_size=1)
    assert [d.rounds for d in decoded] == [d.rounds for d in alone]
    accepted = {a for d in decoded for _, a in d.rounds}
    assert {0, NUM} <= accepted
    assert accepted & {1, 2}
    for start, one in zip(starts, decoded, strict=True):
        row = [*start, *one.ids]
        batch = pack(target, tuned.needs, [row])
        anchors = torch.arange(len(start), len(row) - 1)
        best = torch.cat([part.argmax for part in tuned.slot_probs(batch, anchors, NUM, GREEDY)])
        at = len(start)
        for _, num_accepted in one.rounds:
            if at + NUM + 1 >= len(row):
                break
            right = [int(best[at - len(start), k]) == row[at + 1 + k] for k in range(NUM)]
            assert (right.index(False) if False in right else NUM) == num_accepted
            at += num_accepted + 1


def test_exact_evaluation_agrees_with_the_runtime(target: Target, tuned: Gemma4Mtp) -> None:
    start = starts_of(3)[2]
    [one] = decode(target, tuned, [start], NUM, GREEDY, 24, ignore_eos=True)
    batch = pack(target, tuned.needs, [[*start, *one.ids]], [[0] * len(start) + [1] * len(one.ids)])
    found = exact.exact(tuned, [replace(batch, row_ids=("a",))], {"a": "chat"}, NUM, GREEDY, 24)
    rounds = one.rounds_within_text
    assert found["acceptance_length"] == pytest.approx(sum(a + 1 for _, a in rounds) / len(rounds), abs=1e-6)


def test_packed_documents_are_kept_apart(target: Target, tuned: Gemma4Mtp) -> None:
    rows = some_rows()
    whole = pack(target, tuned.needs, rows)
    counts = tuned.counts(whole)
    parts = [tuned(pack(target, tuned.needs, [row]), counts)["loss"].sum for row in rows]
    torch.testing.assert_close(tuned(whole, counts)["loss"].sum, torch.stack(parts).sum())


@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_reach_every_trainable_tensor_and_no_other(folder: Path, target: Target, steps: int) -> None:
    hash_before = target.weights_sha256()
    mixed = {"kl": 0.5, "ce": 0.2, "lk": 0.3}
    draft = drafter(target, folder / "assistant", ttt_steps=steps, loss=mixed).train()
    batch = pack(target, draft.needs, some_rows())
    draft(batch, draft.counts(batch))["loss"].sum.backward()
    for name, parameter in draft.named_parameters():
        frozen = name == "lm_head.weight" or (steps == 1 and name == "post_projection.weight")
        assert parameter.requires_grad != frozen, name
        assert (parameter.grad is None) == frozen, name
        assert frozen or float(parameter.grad.abs().sum()) > 0, name
    assert not {"lm_head.weight", "post_projection.weight"} <= {
        n for n, p in draft.named_parameters() if p.grad is not None
    }
    assert target.weights_sha256() == hash_before


def test_a_batch_of_one_round_or_none_still_reaches_every_tensor(folder: Path, target: Target) -> None:
    draft = drafter(target, folder / "assistant")
    row = some_rows((9,))[0]
    for supervised in (0, 2):
        batch = pack(target, draft.needs, [row], [[0] * (9 - supervised) + [1] * supervised])
        terms = draft(batch, draft.counts(batch))
        terms["loss"].sum.backward()
        assert all(p.grad is not None for p in draft.parameters() if p.requires_grad)
        assert bool(terms["loss"].sum > 0) == (supervised == 2)
        draft.zero_grad()


def test_round_weights_are_powers_of_the_decay(folder: Path, target: Target) -> None:
    draft = drafter(target, folder / "assistant", position_decay=0.5)
    batch = pack(target, draft.needs, some_rows())
    terms = draft(batch, draft.counts(batch))
    want = sum(0.5**s * float(terms[f"loss_{s}"].sum / terms[f"loss_{s}"].count) for s in range(3))
    assert terms["loss"].sum.item() == pytest.approx(want, rel=1e-5)


def test_a_new_drafter_starts_from_the_targets_head_and_learns(target: Target) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2}
    draft = Gemma4Mtp(Gemma4MtpConfig(init="new", init_std=0.1, **sizes), target.spec)
    target.bind(draft)
    draft.initialise(None, torch.Generator().manual_seed(0))
    assert draft.lm_head.weight.requires_grad
    assert not draft.pretrained
    states = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    _, directions = torch.linalg.eigh(target.head.T @ target.head)
    inside = states @ directions[:, -32:]
    torch.testing.assert_close(
        draft.logits(inside), (inside @ directions[:, -32:].T) @ target.head.T, rtol=1e-3, atol=1e-3
    )
    batch = pack(target, draft.needs, some_rows())
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = draft(batch, draft.counts(batch))["loss"].sum
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


# -- files -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["assistant", "ordered"])
def test_training_runtime_and_export_agree_and_transformers_reads_the_file(
    name: str, folder: Path, target: Target, tmp_path: Path
) -> None:
    draft = drafter(target, folder / name, ttt_steps=4)
    with torch.no_grad():
        draft.norm.weight.mul_(1.1)
    out = tmp_path / "out"
    export.write(draft, target.spec, out, dtype="float32", published_name="org/tiny")
    for prompt in (starts_of(2)[1], starts_of(3)[2]):  # within the window and beyond it
        assert export.compare(draft, out, target, prompt) is None
    before, after = load_file(folder / name / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert [n for n in before if not torch.equal(before[n], after[n])] == ["model.norm.weight"]
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert type(theirs).__name__ == "Gemma4AssistantForCausalLM"
    torch.testing.assert_close(theirs.model.norm.weight, draft.norm.weight)
    command = export.serve_command(out)
    assert json.loads(command.split("--speculative-config ")[1].strip("'")) == {
        "method": "mtp",
        "model": str(out),
        "num_speculative_tokens": 4,
    }
    text = (out / "config.json").read_text()
    assert str(folder) not in text


def test_a_published_drafter_is_loaded_from_its_folder(folder: Path, target: Target) -> None:
    found = export.load(folder / "assistant", target.spec, target.embedding)
    want = drafter(target, folder / "assistant").state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in found.state_dict().items())


def test_a_draft_folder_gives_the_same_drafter_back_without_its_checkpoint(
    folder: Path, target: Target, tmp_path: Path
) -> None:
    place = save(tiny4.random_assistant(target.model), tmp_path / "gone")
    draft = drafter(target, place)
    save_draft(draft, tmp_path / "draft")
    for path in place.iterdir():
        path.unlink()
    again = load_draft(tmp_path / "draft", target.spec)
    assert again.state_dict().keys() == draft.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in draft.state_dict().items())
    assert family("gemma4_mtp") is Gemma4Mtp


def test_a_draft_trained_for_the_other_position_is_not_exported_unasked(
    folder: Path, target: Target, tmp_path: Path
) -> None:
    draft = drafter(target, folder / "assistant", query_position="anchor")
    with pytest.raises(ValueError, match=r"queries stand at the state's position.*Use force"):
        export.write(draft, target.spec, tmp_path / "out")
    with pytest.raises(ValueError, match="no speculators layout"):
        export.write(drafter(target, folder / "assistant"), target.spec, tmp_path / "out", format="speculators")


# -- refusals --------------------------------------------------------------------------------------------------------
def test_other_targets_and_drafters_of_other_targets_are_refused(folder: Path, target: Target, tmp_path: Path) -> None:
    llama = load(save_target(target_model("llama"), tokenizer(), tmp_path / "llama"))
    with pytest.raises(ValueError, match=r"keys and values of a Gemma 4 target, .*llama is a llama"):
        Gemma4Mtp(Gemma4MtpConfig(init="new"), llama.spec)
    wide = tiny4.text_config(num_key_value_heads=1, global_head_dim=32)
    other = tiny4.build(transformers.Gemma4AssistantForCausalLM, tiny4.assistant_config(wide), 0)
    place = save(other, tmp_path / "other")
    with pytest.raises(
        ValueError,
        match=r"another target.*num_key_value_heads of layer 0 1 \(the target's: 2\).*head_dim of layer 2 32",
    ):
        drafter(target, place)
    with pytest.raises(ValueError, match="not one of"):
        drafter(target, folder / "random")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "checkpoint: give the drafter to start from"),
        ({"checkpoint": "x", "hidden_size": 8}, "hidden_size has no effect with init: checkpoint"),
        ({"init": "new", "checkpoint": "x"}, "checkpoint: x has no effect with init: new"),
        ({"init": "new", "loss": {"mse": 1.0}}, "mse is not a loss"),
        ({"init": "new", "lk_eta": 2.0}, "lk_eta has no effect without loss.lk"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Gemma4MtpConfig(**settings)
