"""Exports. Protects: what a server reads is what was trained, in both layouts, ours and other people's files.

pytest tests/test_export.py          (a real vLLM reads the same exports in tests/vllm)
"""

from __future__ import annotations

import getpass
import json
import re
import shlex
import shutil
import socket
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
from safetensors.torch import load_file, save_file
from tiny import randomise_norms
from torch import Tensor
from transformers import AutoConfig

from draftsmith.models import export
from draftsmith.models.draft import Draft, save_draft
from draftsmith.models.eagle3 import Eagle3
from draftsmith.models.target import Target

REDUCED = {"draft_vocab": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "full vocabulary": {},
    "reduced vocabulary": REDUCED,
    "two layers, four aux layers": {"num_layers": 2, "aux_layers": (1, 2, 3, 5)},
    "norms of EAGLE-3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "one norm before fc": {"norm_before_fc": True},
}


def draft_of(target: Target, **keys: Any) -> Draft:
    """An EAGLE-3 draft with random weights and norms, bound to the target."""
    draft = initialised(Eagle3(Eagle3.Config(**keys), target.spec), target)
    randomise_norms(draft)
    return draft.eval()


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of()


# -- written and read back -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keys", VARIANTS.values(), ids=VARIANTS)
def test_an_export_proposes_what_the_draft_proposes(
    target: Target, tmp_path: Path, layout: str, keys: dict[str, Any]
) -> None:
    draft = draft_of(target, **keys)
    again = reload(write(draft, target, tmp_path / "out", layout), target)
    for want, got in zip(proposal(draft, target), proposal(again, target), strict=True):
        assert torch.equal(want, got)
    assert again.neutral()[0] == draft.neutral()[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_qwen3_draft_keeps_its_query_and_key_norms(tmp_path: Path, layout: str) -> None:
    target = target_of("qwen3")
    draft = draft_of(target)
    out = write(draft, target, tmp_path / "out", layout)
    assert any(name.endswith("q_norm.weight") for name in load_file(out / "model.safetensors"))
    assert served_config(out)["model_type"] == "qwen3"
    assert torch.equal(proposal(draft, target)[1], proposal(reload(out, target), target)[1])


def test_the_plain_layout_is_spelt_as_vllm_reads_it(target: Target, tmp_path: Path) -> None:
    out = write(draft_of(target, aux_layers=(2, 3), **REDUCED), target, tmp_path / "out", dtype="bfloat16")
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3]
    assert config["num_aux_hidden_states"] == 2
    assert config["norm_before_residual"] is False
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert {t.dtype for n, t in tensors.items() if n not in ("d2t", "t2d")} == {torch.bfloat16}
    assert "midlayer.self_attn.q_proj.weight" in tensors
    assert not [n for n in tensors if n.startswith(("model.", "embed", "verifier"))]


def test_the_speculators_layout_has_no_model_type_at_the_top(target: Target, tmp_path: Path) -> None:
    out = write(draft_of(target, aux_layers=(2, 3), norm_before_residual=True), target, tmp_path / "out", "speculators")
    config = json.loads((out / "config.json").read_text())
    assert "model_type" not in config
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 2  # ignored by vLLM at the top level
    assert config["norm_before_residual"] is True
    assert "layers.0.self_attn.q_proj.weight" in load_file(out / "model.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_old_and_new_readers_find_the_same_rope(target: Target, tmp_path: Path, layout: str) -> None:
    config = served_config(write(draft_of(target), target, tmp_path / "out", layout))
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == target.spec.rope["rope_theta"]


def test_later_layers_and_biases_fill_every_parameter_of_the_server_class(tmp_path: Path) -> None:
    target = target_of("qwen2")
    draft = draft_of(target, num_layers=2)
    tensors = load_file(write(draft, target, tmp_path / "out") / "model.safetensors")
    assert torch.equal(tensors["layers.1.hidden_norm.weight"], torch.ones(48))
    assert torch.equal(proposal(draft, target)[1], proposal(reload(tmp_path / "out", target), target)[1])


def test_a_wrong_tensor_after_writing_is_named(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = export.save_file

    def damaged(tensors: dict[str, Tensor], *args: Any, **more: Any) -> None:
        written({**tensors, "norm.weight": tensors["norm.weight"] + 1}, *args, **more)

    monkeypatch.setattr(export, "save_file", damaged)
    with pytest.raises(RuntimeError, match=r"norm\.weight"):
        write(draft_of(target), target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- the public cases ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tied_target_does_not_tie_the_draft(tmp_path: Path, layout: str) -> None:
    target = target_of(tie_word_embeddings=True)
    draft = draft_of(target, **REDUCED)
    out = write(draft, target, tmp_path / "out", layout)
    assert served_config(out)["tie_word_embeddings"] is False
    head = load_file(out / "model.safetensors")["lm_head.weight"]
    assert head.shape == (64, 48)
    assert torch.equal(head, draft.neutral()[1]["lm_head.weight"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_vocabulary_stands_in_the_weights_file(target: Target, tmp_path: Path, layout: str) -> None:
    draft = draft_of(target, **REDUCED)
    out = write(draft, target, tmp_path / "out", layout)
    tensors, kept = load_file(out / "model.safetensors"), draft.neutral()[1]["draft_vocab"]
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(tensors["d2t"] + torch.arange(64), kept)
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].shape == (264,)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), kept)
    moved = shutil.copytree(out, tmp_path / "elsewhere" / "draft")
    assert torch.equal(proposal(reload(moved, target), target)[0], proposal(draft, target)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_scaling_of_the_target_survives(tmp_path: Path, layout: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e6}
    target = target_of(rope_parameters=yarn)
    draft = draft_of(target)
    out = write(draft, target, tmp_path / "out", layout)
    config = served_config(out)
    assert {k: config["rope_parameters"][k] for k in yarn} == yarn
    assert config["rope_scaling"]["factor"] == 4.0
    assert torch.equal(proposal(draft, target)[1], proposal(reload(out, target), target)[1])


def test_head_dim_is_written_and_gives_the_shapes(tmp_path: Path) -> None:
    target = target_of("qwen3", head_dim=16)  # 4 heads of 16 on a width of 48
    out = write(draft_of(target), target, tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    assert served_config(out)["head_dim"] == 16
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 96)
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (32, 96)
    assert tensors["midlayer.self_attn.o_proj.weight"].shape == (48, 64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_position_limit_is_at_least_the_targets(target: Target, tmp_path: Path, layout: str) -> None:
    draft = draft_of(target)
    short = draft.neutral()[0]
    short["layer"] = {**short["layer"], "max_position_embeddings": 64}
    tensors = draft.neutral()[1]
    draft.neutral = lambda: (short, tensors)  # type: ignore[method-assign]
    out = write(draft, target, tmp_path / "out", layout)
    assert served_config(out)["max_position_embeddings"] == target.spec.max_positions == 512


def test_an_embedding_in_the_file_must_be_the_targets(target: Target, tmp_path: Path) -> None:
    out = write(draft_of(target), target, tmp_path / "out")
    assert "embed_tokens.weight" not in load_file(out / "model.safetensors")
    edit(out, lambda _, tensors: tensors.update({"embed_tokens.weight": target.embedding.clone()}))
    reload(out, target)
    with pytest.warns(UserWarning, match="not compared"):
        export.load(out, target.spec)
    edit(out, lambda _, tensors: tensors["embed_tokens.weight"].add_(1))
    with pytest.raises(ValueError, match="differs from the target's embedding"):
        reload(out, target)


def test_a_draft_of_another_width_is_refused(target: Target, tmp_path: Path) -> None:
    wide = target_of(hidden_size=64, head_dim=16)
    with pytest.raises(ValueError, match=r"width 48 is not the target's 64"):
        export.write(draft_of(target), wide.spec, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("aux", [(1, 2, 4), (1, 2, 3, 4)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_aux_ids_and_fc_agree(target: Target, tmp_path: Path, layout: str, aux: tuple[int, ...]) -> None:
    out = write(draft_of(target, aux_layers=aux), target, tmp_path / "out", layout)
    config, fc = served_config(out), load_file(out / "model.safetensors")["fc.weight"]
    assert config["eagle_aux_hidden_state_layer_ids"] == list(aux)
    assert config["num_aux_hidden_states"] == len(aux)
    assert fc.shape == (48, len(aux) * config["target_hidden_size"])


def test_a_file_whose_aux_ids_and_fc_disagree_is_refused(target: Target, tmp_path: Path) -> None:
    out = write(draft_of(target, aux_layers=(1, 2, 3)), target, tmp_path / "out")
    edit(out, lambda config, _: config.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 6]))
    with pytest.raises(ValueError, match=r"fc\.weight \(48, 144\) instead of \(48, 192\)"):
        reload(out, target)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_speculation_length_and_the_serve_command_can_be_derived(
    target: Target, tmp_path: Path, layout: str
) -> None:
    out = write(draft_of(target, ttt_steps=4), target, tmp_path / "my draft", layout)
    words = shlex.split(export.serve_command(out))
    assert words[:4] == ["vllm", "serve", "org/tiny", "--speculative-config"]
    assert json.loads(words[4]) == {"method": "eagle3", "model": str(out), "num_speculative_tokens": 4}
    words = shlex.split(export.serve_command(out, "/models/local", 2))
    assert words[2] == "/models/local"
    assert json.loads(words[4])["num_speculative_tokens"] == 2
    if layout == "speculators":
        config = json.loads((out / "config.json").read_text())["speculators_config"]
        assert config["proposal_methods"][0]["speculative_tokens"] == 4
        assert config["verifier"] == {"name_or_path": "org/tiny", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_local_path_reaches_a_file(tmp_path: Path, layout: str) -> None:
    local = target_of(name=str(tmp_path / "target"))
    draft = draft_of(local)
    with pytest.warns(UserWarning, match=r"target\.published_name"):
        out = write(draft, local, tmp_path / "out", layout)
    text = b"".join(p.read_bytes() for p in out.iterdir()).decode("latin-1")
    assert str(tmp_path) not in text
    assert str(Path.home()) + "/" not in text
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
    user = getpass.getuser()
    assert not re.search(rf'"[^"]*/{re.escape(user)}\b', text)
    with pytest.raises(ValueError, match="give the target"):
        export.serve_command(out)
    named = write(draft, local, tmp_path / "named", layout, published_name="org/public")
    assert export.serve_command(named).split()[2] == "org/public"
    with pytest.raises(ValueError, match="published_name must be a Hub id"):
        write(draft, local, tmp_path / "bad", layout, published_name=str(tmp_path))


def test_transformers_reads_the_plain_config_offline(target: Target, tmp_path: Path) -> None:
    out = write(draft_of(target, **REDUCED), target, tmp_path / "out", dtype="bfloat16")
    config = AutoConfig.from_pretrained(out)
    assert config.model_type == "llama"
    assert config.dtype == torch.bfloat16
    assert config.rope_parameters["rope_theta"] == target.spec.rope["rope_theta"]
    assert config.draft_vocab_size == 64


@pytest.mark.parametrize("size", [None, 64, 100])
def test_the_head_has_the_vocabulary_of_its_own_config(target: Target, tmp_path: Path, size: int | None) -> None:
    out = write(draft_of(target, draft_vocab=size), target, tmp_path / "out")
    assert served_config(out)["draft_vocab_size"] == (size or 264)
    if size:
        assert load_file(out / "model.safetensors")["lm_head.weight"].shape == (size, 48)


# -- other people's files --------------------------------------------------------------------------------------------
def test_a_plain_file_in_eagles_own_spelling_is_read(target: Target, tmp_path: Path) -> None:
    """Architecture of the target, ids in eagle_config only, embedding included, no head_dim, one theta."""
    draft = draft_of(target, aux_layers=(1, 2, 4), **REDUCED)

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["architectures"] = ["LlamaForCausalLM"]
        for key in ("eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "head_dim", "rope_parameters"):
            del config[key]
        for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size"):
            del config[key]
        tensors["embed_tokens.weight"] = target.embedding.clone()

    again = reload(foreign(tmp_path / "out", target, draft, change), target)
    assert torch.equal(proposal(draft, target)[1], proposal(again, target)[1])


def test_a_plain_file_with_default_aux_layers_is_read(target: Target, tmp_path: Path) -> None:
    deep = target_of(num_hidden_layers=8)
    draft = draft_of(deep, aux_layers=(2, 4, 5))

    def change(config: dict[str, Any], _: Any) -> None:
        del config["eagle_config"], config["eagle_aux_hidden_state_layer_ids"]

    assert reload(foreign(tmp_path / "out", deep, draft, change), deep).needs.aux_layers == (2, 4, 5)


def test_a_speculators_file_without_the_switch_normalises_before_the_residual(target: Target, tmp_path: Path) -> None:
    draft = draft_of(target, norm_before_residual=True)

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del config["norm_before_residual"]
        config["architectures"] = ["Eagle3Speculator"]
        tensors["verifier_norm.weight"] = torch.ones(48)  # left over from training
        tensors["t2d"] = torch.ones(264, dtype=torch.bool)

    out = foreign(tmp_path / "out", target, draft, change, "speculators")
    assert torch.equal(proposal(draft, target)[1], proposal(reload(out, target), target)[1])


def test_several_shards_are_read(target: Target, tmp_path: Path) -> None:
    draft = draft_of(target)
    out = write(draft, target, tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    (out / "model.safetensors").unlink()
    names = sorted(tensors)
    for i, part in enumerate((names[::2], names[1::2]), 1):
        save_file({n: tensors[n] for n in part}, out / f"model-0000{i}-of-00002.safetensors")
    assert torch.equal(proposal(draft, target)[1], proposal(reload(out, target), target)[1])


def test_our_own_draft_folder_is_read_too(target: Target, tmp_path: Path) -> None:
    draft = draft_of(target)
    save_draft(draft, tmp_path / "draft")
    assert torch.equal(proposal(draft, target)[1], proposal(reload(tmp_path / "draft", target), target)[1])


def test_our_own_export_is_read_without_the_target(target: Target, tmp_path: Path) -> None:
    draft = export.load(write(draft_of(target), target, tmp_path / "out"))
    assert draft.target.hidden_size == 48
    assert draft.target.name == "org/tiny"


# -- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, t: t.pop("fc.weight"), r"missing: fc\.weight"),
        (lambda c, t: t.pop("d2t"), r"missing: draft_vocab"),
        (lambda c, t: t.update({"foo.weight": torch.zeros(1)}), r"not known: foo\.weight"),
        (lambda c, t: t.update({"norm.weight": torch.ones(3)}), r"norm\.weight \(3,\) instead of \(48,\)"),
        (lambda c, t: t["d2t"].add_(500), r"ascending target ids below 264"),
        (lambda c, t: t.update({"t2d": torch.ones(264, dtype=torch.bool)}), r"d2t and t2d name different tokens"),
        (lambda c, t: c.pop("rms_norm_eps"), r"lacks rms_norm_eps"),
        (lambda c, t: c.update(layer_types=["sliding_attention"]), r"only full attention"),
        (
            lambda c, t: c.update(architectures=["FooModel"]) or t.update(x=t.pop("fc.weight")),
            r"FooModel is not one of",
        ),
    ],
    ids=["fc", "d2t missing", "extra", "shape", "d2t range", "t2d", "eps", "sliding", "architecture"],
)
def test_a_faulty_file_is_refused_by_name(
    target: Target, tmp_path: Path, change: Callable[..., Any], message: str
) -> None:
    out = edit(write(draft_of(target, **REDUCED), target, tmp_path / "out"), change)
    with pytest.raises(ValueError, match=message) as problem:
        export.load(out, target.spec, target.embedding)
    assert str(out) in str(problem.value)


def test_folders_that_hold_no_draft_are_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither draft\.json .* nor config\.json"):
        export.load(tmp_path, target.spec)
    out = write(draft_of(target), target, tmp_path / "out")
    (out / "model.safetensors").rename(out / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin may hold code"):
        export.load(out, target.spec)


def test_a_file_of_another_program_needs_the_target(target: Target, tmp_path: Path) -> None:
    out = foreign(tmp_path / "out", target, draft_of(target), lambda c, t: None)
    with pytest.raises(ValueError, match="give the target"):
        export.load(out)


def test_the_target_must_be_the_one_the_draft_was_made_for(target: Target, tmp_path: Path) -> None:
    out = write(draft_of(target), target, tmp_path / "out")
    with pytest.raises(ValueError, match=r"vocab_size 264 \(this target: 300\)"):
        export.load(out, replace(target.spec, vocab_size=300))


def test_targets_without_aux_outputs_are_refused_unless_forced(tmp_path: Path) -> None:
    target = target_of("gemma3")
    draft = draft_of(target)
    if draft.neutral()[0]["layer"]["hidden_act"] != "silu":
        pytest.fail("a draft's MLP is SwiGLU whatever the target's is")
    with pytest.raises(ValueError, match=r"Gemma3ForCausalLM hands out no aux states"):
        write(draft, target, tmp_path / "out")
    with pytest.warns(UserWarning, match="Gemma3ForCausalLM"):
        write(draft, target, tmp_path / "out", force=True)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_values_that_do_not_fit_are_named(target: Target, tmp_path: Path) -> None:
    draft = draft_of(target)
    with torch.no_grad():
        draft.get_parameter("norm.weight")[0] = 1e6
    with pytest.raises(ValueError, match=r"norm\.weight holds values that are not finite in torch\.float16"):
        write(draft, target, tmp_path / "out", dtype="float16")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"layout": "gguf"}, "plain or speculators, got 'gguf'"),
        ({"dtype": "int8"}, "float32, bfloat16, float16, got 'int8'"),
        ({"num_speculative_tokens": 0}, "at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(target: Target, tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write(draft_of(target), target, tmp_path / "out", **more)


def test_only_an_earlier_export_is_replaced(target: Target, tmp_path: Path) -> None:
    draft = draft_of(target)
    out = write(draft, target, tmp_path / "out")
    (out / "README.md").write_text("card")
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "half").write_text("left by a killed export")
    write(draft, target, out, "speculators")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes\.txt"):
        write(draft, target, out)
    (out / "notes.txt").unlink()
    edit(out, lambda config, _: config.pop("draftsmith"))
    with pytest.raises(ValueError, match="another program"):
        write(draft, target, out)


# -- training, runtime and export on one prompt ----------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_runtime_and_export_agree(target: Target, tmp_path: Path, layout: str, dtype: str) -> None:
    draft = draft_of(target, **REDUCED)
    assert export.compare(draft, write(draft, target, tmp_path / "out", layout, dtype), target, PROMPT) is None


def test_the_first_differing_tensor_is_named(target: Target, tmp_path: Path) -> None:
    draft = draft_of(target)
    out = edit(write(draft, target, tmp_path / "out"), lambda _, t: t["midlayer.mlp.up_proj.weight"][0].add_(0.1))
    found = export.compare(draft, out, target, PROMPT)
    assert found is not None
    assert "layers.0.mlp.up_proj.weight" in found


def test_a_differing_config_key_is_named(target: Target, tmp_path: Path) -> None:
    draft = draft_of(target)
    out = edit(write(draft, target, tmp_path / "out"), lambda c, _: c.update(norm_before_residual=True))
    found = export.compare(draft, out, target, PROMPT)
    assert found is not None
    assert "norm_before_residual is False in training, True" in found


def test_a_difference_between_training_and_decoding_is_found(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = draft_of(target)
    out = write(draft, target, tmp_path / "out")
    slot_probs = Eagle3.slot_probs

    def shifted(self: Eagle3, *args: Any) -> Any:
        for slots in slot_probs(self, *args):
            slots.draft[:, 1] += 0.01
            yield slots

    monkeypatch.setattr(Eagle3, "slot_probs", shifted)
    found = export.compare(draft, out, target, PROMPT, num=3)
    assert found is not None
    assert found.startswith("training and runtime: slot 2")


def test_a_difference_inside_the_reloaded_draft_is_found(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = draft_of(target)
    out = write(draft, target, tmp_path / "out")
    load = export.load

    def other(*args: Any) -> Draft:
        changed = load(*args)
        with torch.no_grad():
            changed.get_parameter("fc.weight").mul_(1.5)
        return changed

    monkeypatch.setattr(export, "load", other)
    found = export.compare(draft, out, target, PROMPT)
    assert found is not None
    assert found.startswith("runtime and export")
