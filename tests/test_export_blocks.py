"""Exports of DFlash and DSpark. Protects: the alignment, window and heads that a server reads are those of training.

pytest tests/test_export_blocks.py          (a real vLLM reads the same exports in tests/vllm)
Targets have 6 layers, width 48 and 264 tokens; the mask token is 263. Aux ids (1, 2, 4) are outputs of layers 0, 1, 3.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import (
    LAYOUTS,
    PROMPT,
    edit,
    foreign,
    initialised,
    proposal,
    reload,
    served_config,
    target_of,
    write,
)
from safetensors.torch import load_file
from tiny import MASK, randomise_norms
from torch import Tensor
from transformers import AutoConfig

from draftsmith.models import export
from draftsmith.models.draft import Draft, family
from draftsmith.models.target import Target

REDUCED = {"head": "trainable", "draft_vocab": 64}
MIXED = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {"family": "dflash", "layout": "infill"},
    "dflash reduced": {"family": "dflash", "layout": "infill", **REDUCED},
    "dflash shifted": {"family": "dflash", "layout": "shifted"},
    "dflash shifted reduced": {"family": "dflash", "layout": "shifted", **REDUCED},
    "dflash window": {"family": "dflash", "layout": "infill", "sliding_window": 5},
    "dflash window, all slots seen": {"family": "dflash", "layout": "infill", "sliding_window": 5, "causal": False},
    "dflash causal": {"family": "dflash", "layout": "infill", "causal": True},
    "dspark": {"family": "dspark", "layout": "shifted"},
    "dspark reduced": {"family": "dspark", "layout": "shifted", **REDUCED},
    "dspark infill": {"family": "dspark", "layout": "infill", "confidence": False},
    "dspark mixed": {"family": "dspark", "layout": "shifted", **MIXED},
    "dspark causal": {"family": "dspark", "layout": "shifted", "causal": True, "head": "trainable"},
}
AS_DSPARK = pytest.mark.filterwarnings("ignore:export. vLLM has no shifted dflash drafts")
TWO_RUNNERS = pytest.mark.filterwarnings("ignore:export. sliding and full layers")


def draft_of(target: Target, name: str = "dflash", **keys: Any) -> Draft:
    """A block draft of VARIANTS with random weights, norms and heads, bound to the target."""
    values = {"block_len": 4, "num_layers": 2, "aux_layers": (1, 2, 4), "mask_token_id": MASK} | VARIANTS[name] | keys
    if values["family"] == "dspark":
        values = {"markov_rank": 8} | values
    cls = family(values["family"])
    draft = initialised(cls(cls.Config(**values), target.spec), target)
    randomise_norms(draft)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for part, tensor in draft.named_parameters():
            if part.startswith(("markov", "confidence")):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
    return draft.eval()


def offered(draft: Draft, target: Target) -> tuple[Tensor, Tensor]:
    assert draft.max_proposal is not None
    return proposal(draft, target, draft.max_proposal)


def assert_same(draft: Draft, again: Draft, target: Target) -> None:
    for want, got in zip(offered(draft, target), offered(again, target), strict=True):
        assert torch.equal(want, got)
    want, got = (one.neutral()[0] for one in (draft, again))
    for about in (want, got):
        about.pop("training")
    assert want == got
    assert type(draft) is type(again)


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("qwen3")


# -- written and read back -------------------------------------------------------------------------------------------
@AS_DSPARK
@TWO_RUNNERS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", VARIANTS)
def test_an_export_proposes_what_the_draft_proposes(target: Target, tmp_path: Path, layout: str, name: str) -> None:
    draft = draft_of(target, name)
    again = reload(write(draft, target, tmp_path / "out", layout), target)
    assert_same(draft, again, target)
    assert again.config == draft.config.model_copy(update=again.config.model_dump())  # no field that only one has
    assert again.neutral()[0]["training"] == draft.neutral()[0]["training"]


@AS_DSPARK
@TWO_RUNNERS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", VARIANTS)
def test_training_runtime_and_export_agree(target: Target, tmp_path: Path, layout: str, name: str) -> None:
    draft = draft_of(target, name)
    out = write(draft, target, tmp_path / "out", layout, "bfloat16")
    assert export.compare(draft, out, target, PROMPT) is None


def test_plain_dflash_is_spelt_as_vllm_reads_it(target: Target, tmp_path: Path) -> None:
    out = write(draft_of(target), target, tmp_path / "out", dtype="bfloat16")
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["block_size"] == 4
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [0, 1, 3], "causal": False}
    assert "eagle_aux_hidden_state_layer_ids" not in config  # it would be taken without the shift
    assert config["layer_types"] == ["full_attention"] * 2
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    norms = {f"layers.{i}.self_attn.{n}_norm.weight" for i in range(2) for n in "qk"}
    assert norms | {"fc.weight", "hidden_norm.weight", "norm.weight"} <= tensors.keys()
    assert not [n for n in tensors if re.match(r"model\.|mask_hidden|mask_embedding|embed|lm_head|verifier", n)]


def test_plain_dspark_is_spelt_as_vllm_reads_it(target: Target, tmp_path: Path) -> None:
    out = write(draft_of(target, "dspark reduced"), target, tmp_path / "out")
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert config["architectures"] == ["Qwen3DSparkModel"]  # any other would be taken for DeepSeek-V4's
    want = {"model_type": "qwen3", "block_size": 4, "mask_token_id": MASK, "target_layer_ids": [0, 1, 3]}
    want |= {"sample_from_anchor": True, "markov_rank": 8, "markov_head_type": "vanilla", "draft_vocab_size": 64}
    want |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    assert {key: config[key] for key in want} == want
    assert "dflash_config" not in config
    assert tensors["markov_head.markov_w1.weight"].shape == (264, 8)
    assert tensors["markov_head.markov_w2.weight"].shape == (64, 8)
    assert tensors["confidence_head.proj.weight"].shape == (1, 48 + 8)
    assert tensors["confidence_head.proj.bias"].shape == (1,)


@pytest.mark.parametrize(("name", "from_anchor"), [("dflash", False), ("dspark", True), ("dspark infill", False)])
def test_the_speculators_layout_counts_aux_ids_and_says_the_layout(
    target: Target, tmp_path: Path, name: str, from_anchor: bool
) -> None:
    config = json.loads((write(draft_of(target, name), target, tmp_path, "speculators") / "config.json").read_text())
    assert "model_type" not in config
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    assert config["speculators_model_type"] == VARIANTS[name]["family"]
    assert config["aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["mask_token_id"] == MASK
    assert config["sample_from_anchor"] is from_anchor
    assert "dflash_config" not in config
    assert "target_layer_ids" not in config


def test_windows_stand_where_vllm_looks_for_them(target: Target, tmp_path: Path) -> None:
    config = served_config(write(draft_of(target, "dflash window"), target, tmp_path / "window"))
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert config["sliding_window"] == 5
    assert config["dflash_config"]["causal"] is True
    assert AutoConfig.from_pretrained(tmp_path / "window").sliding_window == 5  # null unless use_sliding_window
    raw = json.loads(
        (write(draft_of(target, "dflash window"), target, tmp_path / "s", "speculators") / "config.json").read_text()
    )
    assert raw["sliding_window_non_causal"] is False
    assert raw["transformer_layer_config"]["sliding_window"] == 5


@AS_DSPARK
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "method", "num"),
    [("dflash", "dflash", 3), ("dflash shifted", "dspark", 4), ("dspark", "dspark", 4), ("dspark infill", "dspark", 3)],
)
def test_the_serve_command_names_method_and_the_proposals_of_the_block(
    target: Target, tmp_path: Path, layout: str, name: str, method: str, num: int
) -> None:
    out = write(draft_of(target, name), target, tmp_path / "out", layout)
    words = shlex.split(export.serve_command(out))
    assert words[:4] == ["vllm", "serve", "org/tiny", "--speculative-config"]
    assert json.loads(words[4]) == {"method": method, "model": str(out), "num_speculative_tokens": num}
    if layout == "speculators":
        config = json.loads((out / "config.json").read_text())["speculators_config"]
        assert config["proposal_methods"][0]["speculative_tokens"] == num
        assert config["verifier"]["name_or_path"] == "org/tiny"
        assert config["algorithm"] == method


def test_fewer_proposals_than_the_block_has_are_noted(target: Target, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="with 2 proposals a round instead of 3 vLLM runs a shorter block.*_tokens 3"):
        write(draft_of(target), target, tmp_path / "out", num_speculative_tokens=2)
    write(
        draft_of(target, "dflash causal"), target, tmp_path / "causal", num_speculative_tokens=2
    )  # slots see no later one
    with pytest.raises(ValueError, match="at most 3, what one pass can propose, got 4"):
        write(draft_of(target), target, tmp_path / "more", num_speculative_tokens=4)


# -- shifted DFlash --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shifted_dflash_is_written_as_dspark_that_adds_nothing(target: Target, tmp_path: Path, layout: str) -> None:
    draft = draft_of(target, "dflash shifted reduced")
    with pytest.warns(UserWarning, match="no shifted dflash drafts: written as a dspark draft with a zero Markov head"):
        out = write(draft, target, tmp_path / "out", layout)
    config, tensors = served_config(out), load_file(out / "model.safetensors")
    assert config["markov_rank"] == 1
    assert config["sample_from_anchor"] is True
    assert config["enable_confidence_head"] is False
    assert not tensors["markov_head.markov_w1.weight"].any()
    assert tensors["markov_head.markov_w2.weight"].shape == (64, 1)
    edit(out, lambda config, _: config.pop("draftsmith"))  # as a server sees it: a DSpark draft
    served = reload(out, target)
    assert served.config.family == "dspark"
    for want, got in zip(offered(draft, target), offered(served, target), strict=True):
        assert torch.equal(want, got)


@AS_DSPARK
def test_a_markov_head_in_a_shifted_dflash_file_is_noticed(target: Target, tmp_path: Path) -> None:
    out = write(draft_of(target, "dflash shifted"), target, tmp_path / "out")
    edit(out, lambda _, tensors: tensors["markov_head.markov_w2.weight"].add_(1))
    with pytest.raises(ValueError, match=r"markov_w2\.weight of a dflash draft must be zero"):
        reload(out, target)


# -- what vLLM does not serve ----------------------------------------------------------------------------------------
def test_drafts_without_query_and_key_norms_are_refused_unless_forced(target: Target, tmp_path: Path) -> None:
    draft = draft_of(target, qk_norm=False)
    with pytest.raises(ValueError, match=r"norm query and key heads.*draft\.qk_norm: true.*force"):
        write(draft, target, tmp_path / "out")
    with pytest.warns(UserWarning, match="norm query and key heads"):
        out = write(draft, target, tmp_path / "out", force=True)
    assert_same(draft, reload(out, target), target)


@TWO_RUNNERS
def test_windows_of_both_kinds_need_the_plain_layout(target: Target, tmp_path: Path) -> None:
    draft = draft_of(target, **MIXED)
    with pytest.raises(ValueError, match="one causal switch for all layers; write the plain one"):
        write(draft, target, tmp_path / "out", "speculators")
    assert_same(draft, reload(write(draft, target, tmp_path / "out"), target), target)


def test_sliding_and_full_layers_need_the_second_runner(target: Target, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="VLLM_USE_V2_MODEL_RUNNER=1"):
        write(draft_of(target, **MIXED), target, tmp_path / "out")


def test_what_a_target_does_to_embeddings_and_logits_is_not_served(target: Target, tmp_path: Path) -> None:
    """Gemma: rows of the embedding are scaled; the frozen head's logits are capped before the Markov bias comes."""
    spec = replace(target.spec, embedding_scale=7.0, logit_softcap=3.0)
    for name, cap in (("dspark", True), ("dspark reduced", False), ("dflash", False)):
        draft = draft_of(target, name)
        with pytest.raises(ValueError, match="reads? embedding rows as they are.*times 7") as problem:
            export.write(draft, spec, tmp_path / "out")
        assert ("without the soft-cap 3" in str(problem.value)) is cap
    gemma = target_of("gemma3")
    with pytest.raises(ValueError, match="Gemma3ForCausalLM hands out no aux states"):
        write(draft_of(gemma), gemma, tmp_path / "out")


# -- the public cases ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["dflash reduced", "dspark reduced"])
def test_a_tied_target_does_not_tie_the_draft_and_the_vocabulary_stands_in_the_file(
    tmp_path: Path, layout: str, name: str
) -> None:
    target = target_of("qwen3", tie_word_embeddings=True)
    draft = draft_of(target, name)
    out = write(draft, target, tmp_path / "out", layout)
    tensors, kept = load_file(out / "model.safetensors"), draft.neutral()[1]["draft_vocab"]
    assert served_config(out)["tie_word_embeddings"] is False
    assert served_config(out)["draft_vocab_size"] == 64
    assert torch.equal(tensors["lm_head.weight"], draft.neutral()[1]["lm_head.weight"])
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(tensors["d2t"] + torch.arange(64), kept)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), kept)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_scaling_head_dim_and_position_limit_are_the_targets(tmp_path: Path, layout: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e6}
    target = target_of("qwen3", rope_parameters=yarn)  # 4 heads of 16 on a width of 48
    draft = draft_of(target, max_positions=64)
    out = write(draft, target, tmp_path / "out", layout)
    config = served_config(out)
    assert {k: config["rope_parameters"][k] for k in yarn} == yarn
    assert config["rope_theta"] == 1e6
    assert config["head_dim"] == 16
    assert load_file(out / "model.safetensors")["layers.0.self_attn.q_proj.weight"].shape == (64, 48)
    assert config["max_position_embeddings"] == target.spec.max_positions == 512
    assert torch.equal(offered(draft, target)[1], offered(reload(out, target), target)[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aux", [(1, 2, 4), (0, 1, 2, 5)])
def test_aux_ids_and_fc_agree(target: Target, tmp_path: Path, layout: str, aux: tuple[int, ...]) -> None:
    out = write(draft_of(target, aux_layers=aux), target, tmp_path / "out", layout)
    config = served_config(out)
    ids = (
        config["aux_hidden_state_layer_ids"] if layout == "speculators" else config["dflash_config"]["target_layer_ids"]
    )
    assert ids == [k - (layout == "plain") for k in aux]
    assert load_file(out / "model.safetensors")["fc.weight"].shape == (48, len(aux) * config["target_hidden_size"])
    change = (
        (lambda c, _: c["aux_hidden_state_layer_ids"].append(6))
        if layout == "speculators"
        else (lambda c, _: c["dflash_config"]["target_layer_ids"].append(5))
    )  # the teacher's layer, appended by mistake
    with pytest.raises(ValueError, match=r"fc\.weight .* instead of"):
        reload(edit(out, change), target)


def test_an_embedding_in_the_file_must_be_the_targets(target: Target, tmp_path: Path) -> None:
    out = write(draft_of(target, "dspark"), target, tmp_path / "out")
    edit(out, lambda _, tensors: tensors.update({"embed_tokens.weight": target.embedding.clone()}))
    reload(out, target)
    edit(out, lambda _, tensors: tensors["embed_tokens.weight"].add_(1))
    with pytest.raises(ValueError, match="differs from the target's embedding"):
        reload(out, target)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_no_local_path_reaches_a_file(tmp_path: Path, layout: str, name: str) -> None:
    local = target_of("qwen3", name=str(tmp_path / "target"))
    with pytest.warns(UserWarning, match=r"target\.published_name"):
        out = write(draft_of(local, name), local, tmp_path / "out", layout)
    text = b"".join(p.read_bytes() for p in out.iterdir()).decode("latin-1")
    assert str(tmp_path) not in text
    assert str(Path.home()) + "/" not in text


@pytest.mark.parametrize("name", ["dflash window", "dspark reduced"])
def test_transformers_reads_the_plain_config_offline(
    target: Target, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = AutoConfig.from_pretrained(write(draft_of(target, name), target, tmp_path / "out"))
    assert config.model_type == "qwen3"
    assert config.num_hidden_layers == 2
    assert config.block_size == 4


# -- faults ----------------------------------------------------------------------------------------------------------
Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
FAULTS: dict[str, tuple[str, Change, str]] = {  # name: (variant, what is changed in the file, what is said)
    "fc": ("dflash", lambda c, t: t.pop("fc.weight"), r"missing: fc\.weight"),
    "hidden norm": ("dflash", lambda c, t: t.pop("hidden_norm.weight"), r"missing: hidden_norm\.weight"),
    "one q_norm": ("dflash", lambda c, t: t.pop("layers.1.self_attn.q_norm.weight"), r"missing: layers\.1\.self_attn\.q_norm"),
    "d2t": ("dspark reduced", lambda c, t: t.pop("d2t"), r"missing: draft_vocab"),
    "head": ("dflash reduced", lambda c, t: t.pop("lm_head.weight"), r"missing: lm_head\.weight"),
    "mask_hidden": ("dflash", lambda c, t: t.update(mask_hidden=torch.zeros(1)), r"not known: mask_hidden"),
    "markov": ("dspark", lambda c, t: t.pop("markov_head.markov_w1.weight"), r"missing: markov_head\.markov_w1"),
    "rank": ("dspark", lambda c, t: c.update(markov_rank=4), r"markov_w1\.weight \(264, 8\) instead of \(264, 4\)"),
    "gated": ("dspark", lambda c, t: c.update(markov_head_type="gated"), r"'gated'.*only vanilla"),
    "block size": ("dflash", lambda c, t: c.pop("block_size"), r"lacks block_size"),
    "mask": ("dspark", lambda c, t: c.pop("mask_token_id"), r"lacks mask_token_id"),
    "target layers": ("dspark", lambda c, t: c.pop("target_layer_ids"), r"names no target layers"),
    "window": ("dflash window", lambda c, t: c.pop("sliding_window"), r"lacks sliding_window"),
    "sinks": ("dflash", lambda c, t: c["dflash_config"].update(attention_sink_bias=True), r"attention_sink_bias True"),
    "interleaved": ("dflash", lambda c, t: c.update(is_neox_style=False), r"is_neox_style False"),
    "dflash2": ("dflash", lambda c, t: c.update(architectures=["DFlash2DraftModel"]), r"DFlash2DraftModel is not one of"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_refused_by_name(target: Target, tmp_path: Path, fault: str) -> None:
    name, change, message = FAULTS[fault]
    out = edit(write(draft_of(target, name), target, tmp_path / "out"), change)
    with pytest.raises(ValueError, match=message) as problem:
        export.load(out, target.spec, target.embedding)
    assert str(out) in str(problem.value)


SHIFTS: dict[str, tuple[str, Change, str]] = {  # what a server would take without a word
    "aux ids off by one": ("dflash", lambda c, t: c["dflash_config"].update(target_layer_ids=[1, 2, 4]), "aux_layers"),
    "another layout": ("dspark", lambda c, t: c.update(sample_from_anchor=False), "layout"),
    "no layout": ("dspark infill", lambda c, t: c.pop("sample_from_anchor"), "layout"),
    "another mask": ("dspark", lambda c, t: c.update(mask_token_id=262), "mask_token_id"),
    "another block": ("dflash", lambda c, t: c.update(block_size=5), "block_len"),
    "causal": ("dflash", lambda c, t: c["dflash_config"].update(causal=True), "causal"),
    "window": ("dflash window", lambda c, t: c.update(sliding_window=9), "sliding_window"),
    "rope": ("dflash", lambda c, t: c["rope_parameters"].update(rope_theta=7.0), "layer"),
    "confidence off": ("dspark", lambda c, t: c.update(enable_confidence_head=False), "confidence"),
    "w2": ("dspark", lambda c, t: t["markov_head.markov_w2.weight"].neg_(), "markov_head.markov_w2.weight"),
    "d2t": ("dflash reduced", lambda c, t: (t["d2t"].add_(1), t.pop("t2d")), "draft_vocab"),
}  # fmt: skip


@pytest.mark.parametrize("fault", SHIFTS)
def test_a_wrong_key_or_tensor_is_named_by_the_comparison(target: Target, tmp_path: Path, fault: str) -> None:
    name, change, part = SHIFTS[fault]
    draft = draft_of(target, name)
    found = export.compare(draft, edit(write(draft, target, tmp_path / "out"), change), target, PROMPT)
    assert found is not None
    assert part in found


def test_a_wrong_tensor_after_writing_is_named(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = export.save_file

    def damaged(tensors: dict[str, Tensor], *args: Any, **more: Any) -> None:
        name = "confidence_head.proj.bias"
        written({**tensors, name: tensors[name] + 1}, *args, **more)

    monkeypatch.setattr(export, "save_file", damaged)
    with pytest.raises(RuntimeError, match=r"confidence_head\.proj\.bias"):
        write(draft_of(target, "dspark"), target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- other people's files --------------------------------------------------------------------------------------------
def test_dflash_as_z_lab_spells_it_is_read(target: Target, tmp_path: Path) -> None:
    """No layout, no vocabulary size, an auto_map of their own code, one theta."""
    draft = draft_of(target)

    def change(config: dict[str, Any], _: Any) -> None:
        for key in ("draft_vocab_size", "target_hidden_size", "rope_parameters", "use_sliding_window"):
            del config[key]
        del config["dflash_config"]["causal"]
        config |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "num_target_layers": 6, "sliding_window": None}

    assert_same(draft, reload(foreign(tmp_path / "out", target, draft, change), target), target)


def test_dspark_as_deepspec_spells_it_is_read(target: Target, tmp_path: Path) -> None:
    """The shifted layout is not written down, and the class has another name."""
    draft = draft_of(target, "dspark")

    def change(config: dict[str, Any], _: Any) -> None:
        del config["sample_from_anchor"], config["draft_vocab_size"]
        config["architectures"] = ["DSparkDraftModel"]

    assert_same(draft, reload(foreign(tmp_path / "out", target, draft, change), target), target)


@pytest.mark.parametrize("name", ["dflash reduced", "dspark infill"])
def test_files_of_the_speculators_library_are_read(target: Target, tmp_path: Path, name: str) -> None:
    """The infill layout is not written down; the target's embedding and norm came along; layers say llama."""
    draft = draft_of(target, name)

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del config["sample_from_anchor"]
        config.pop("sliding_window_non_causal", None)
        config["transformer_layer_config"]["model_type"] = "llama"
        del config["transformer_layer_config"]["layer_types"]
        tensors["embed_tokens.weight"] = target.embedding.clone()
        tensors["verifier_norm.weight"] = torch.ones(48)

    assert_same(draft, reload(foreign(tmp_path / "out", target, draft, change, "speculators"), target), target)


def test_windows_spelt_by_use_swa_are_read(target: Target, tmp_path: Path) -> None:
    """Such drafts let every slot see the whole block."""
    draft = draft_of(target, "dflash window, all slots seen")

    def change(config: dict[str, Any], _: Any) -> None:
        for key in ("layer_types", "sliding_window", "use_sliding_window"):
            del config[key]
        del config["dflash_config"]["causal"]
        config["dflash_config"] |= {"use_swa": True, "swa_window_size": 5}

    again = reload(foreign(tmp_path / "out", target, draft, change), target)
    assert again.neutral()[0]["sliding_window"] == 5
    assert again.neutral()[0]["causal"] == [False, False]
    assert_same(draft, again, target)


def test_a_confidence_head_that_reads_the_state_alone_is_read(target: Target, tmp_path: Path) -> None:
    draft = draft_of(target, "dspark")
    with torch.no_grad():
        draft.get_parameter("confidence_head.proj.weight")[:, 48:] = 0

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["confidence_head_with_markov"] = False
        tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"][:, :48].clone()

    again = reload(foreign(tmp_path / "out", target, draft, change), target)
    assert_same(draft, again, target)
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
