"""Protects what leaves the house: only proven drafts, told honestly, without a trace of this machine.

pytest tests/test_release.py        (the upload itself: tests/test_hub.py)
"""

import getpass
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from fake_hub import TOKEN, FakeHub, online
from huggingface_hub import ModelCard
from tiny import randomise_norms, save_target, target_model, tokenizer

from draftsmith.data.batches import DataConfig
from draftsmith.eval.acceptance import Counts, EvalConfig, acceptance_object
from draftsmith.eval.card import ReleaseConfig, is_generated, mode, seal
from draftsmith.eval.certify import tensors_sha256
from draftsmith.eval.hub import Private, push
from draftsmith.eval.release import NotReady, public, release
from draftsmith.eval.schedule import read_calibration, write_calibration
from draftsmith.models import export
from draftsmith.models.draft import TokenStats, family
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import Target, TargetConfig
from draftsmith.recipes import Recipe, read
from draftsmith.train import cli
from draftsmith.train.loop import TrainConfig
from draftsmith.train.material import SECTIONS
from draftsmith.train.stages import Stages

PUBLIC = "some-org/tiny-target"
KEYS = {
    "eagle3": {"draft_vocab": 64, "aux_layers": (1, 2, 3)},
    "dflash": {"mask_token_id": 263, "layout": "infill", "block_len": 4, "num_layers": 1, "aux_layers": (1, 2)},
    "dspark": {
        "mask_token_id": 263, "layout": "shifted", "block_len": 3, "num_layers": 1, "aux_layers": (1, 2), "markov_rank": 8,
    },
}  # fmt: skip
FAMILIES = [name for name in KEYS if name in export.DIALECTS]


@pytest.fixture(scope="module")
def target():
    return Target(target_model("qwen3"), tokenizer(), TargetConfig(name=PUBLIC, dtype="float32", device="cpu"))


def draft_of(target, name="eagle3"):
    cls = family(name)
    draft = cls(cls.Config(family=name, **KEYS[name]), target.spec)
    target.bind(draft)
    pairs = torch.tensor([[a, (a + 1) % 264] for a in range(264)])
    stats = TokenStats(torch.arange(264) % 50 + 1, pairs, torch.ones(264, dtype=torch.int64))
    draft.initialise(stats, torch.Generator().manual_seed(0))
    return randomise_norms(draft).eval()


def recipe_of(draft, header="Run by us.", **sections):
    values = {
        "target": {"name": PUBLIC},
        "draft": draft.config.model_dump(),
        "data": {
            "train": ["shipped:prompts_tiny", {"path": "some-org/chats", "split": "train", "limit": 50}],
            "evaluation": {"heldout": "shipped:prompts_tiny_heldout"},
            "regenerate": {"max_new_tokens": 40},
            "chat": {"template_kwargs": {"enable_thinking": False}},
        },
        "eval": {"num_speculative_tokens": 3, "bar": 1.5},
        "train": {"steps": 6},
        "release": {"license": "apache-2.0"},
    }
    for name, keys in sections.items():
        values[name] = values[name] | keys
    models = {
        "target": TargetConfig,
        "data": DataConfig,
        "eval": EvalConfig,
        "train": TrainConfig,
        "release": ReleaseConfig,
    }
    read_ = {name: model(**values[name]) for name, model in models.items()}
    return Recipe("my-recipe", Path("my-recipe.yaml"), header, read_ | {"draft": draft.config})


def counts(survivors, rounds):
    tested = [rounds, *survivors[:-1]]
    return Counts(survivors, tested, num_prompts=2, num_rounds=rounds, num_proposed=3 * rounds, num_tokens=90)


def acceptance_of(draft, num=3, **more):
    """Acceptance length 1 + (120 + 60 + 30) / 100 / 2 = 2.05."""
    kinds = {"code": counts([70, 40, 20], 100), "chat": counts([50, 20, 10], 100)}
    found = acceptance_object("runtime", kinds, num, Sampler(), 64)
    return found | {"draft_sha256": tensors_sha256(draft)} | more


def certificate_of(draft, **more):
    greedy = {"dtype": "float32", "num_prompts": 4, "num_tokens": 96, "num_mismatches": 0, "num_ties": 0}
    found = {"greedy": [greedy], "sampled": {"num_draws": 256, "p_value": 0.7}, "target": draft.target.name}
    return found | {"draft_sha256": tensors_sha256(draft), "passed": True} | more


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture
def draft(target):
    return draft_of(target)


@pytest.fixture
def run(tmp_path, draft):
    return run_of(tmp_path / "run", draft)


def run_of(folder, draft):
    write(folder / "acceptance-runtime.json", acceptance_of(draft))
    write(folder / "certificate.json", certificate_of(draft))
    write(
        folder / "provenance.json",
        {
            "run_id": "abc", "time": "2026-11-30T06:00:00+00:00", "git": "f" * 40, "hardware": "2 cores", "resumed": [],
            "command": [f"{folder}/bin/draftsmith", "run", "my-recipe", "--out", str(folder), f"data.train={folder}/x.jsonl"],
            "versions": {"torch": "2.13.0", "draftsmith": "0.1.0"}, "data": {"train": "0" * 64}, "last_run_seconds": 61.2,
        },
    )  # fmt: skip
    return folder


# -- the export --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["plain", "speculators"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_proven_draft_becomes_a_complete_export(tmp_path, target, name, layout):
    draft = draft_of(target, name)
    run = run_of(tmp_path / "run", draft)
    found = release(run, draft, target.spec, recipe_of(draft, release={"format": layout}))
    assert set(found.files) == {
        "README.md", "certificate.json", "config.json", "model.safetensors", "provenance.json", "recipe.yaml",
    }  # fmt: skip
    assert found.files["model.safetensors"] == (run / "export" / "model.safetensors").stat().st_size
    assert {path.name for path in (run / "export").iterdir()} == set(found.files)
    assert not (run / "release.tmp").exists()
    assert found.base_model == PUBLIC
    loaded = export.load(run / "export", target.spec)
    assert type(loaded) is type(draft)
    told = json.loads((run / "export" / "provenance.json").read_text())
    assert told["export"]["tensors_sha256"] == tensors_sha256(loaded)
    assert told["draft_sha256"] == tensors_sha256(draft)
    assert json.loads((run / "export" / "certificate.json").read_text()) == certificate_of(draft)


def test_the_export_is_written_again_and_nothing_else_is_touched(run, draft, target):
    release(run, draft, target.spec, recipe_of(draft))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "provenance.json"}
    release(run, draft, target.spec, recipe_of(draft))
    assert {path: path.read_bytes() for path in before} == before


def test_the_recipe_in_the_export_can_be_read_again(run, draft, target):
    release(run, draft, target.spec, recipe_of(draft), license="mit")
    again = read(run / "export" / "recipe.yaml", (), SECTIONS)
    assert again.release.license == "mit"
    assert again.resolved()["train"] == recipe_of(draft).resolved()["train"]
    assert again.draft == draft.config


def test_a_strangers_folder_is_not_replaced(run, draft, target):
    write(run / "export" / "thesis.json", {})
    with pytest.raises(ValueError, match=r"export exists and holds thesis.json"):
        release(run, draft, target.spec, recipe_of(draft))
    assert (run / "export" / "thesis.json").is_file()


def test_a_calibration_of_these_tensors_goes_along(run, draft, target, tmp_path):
    write_calibration(tmp_path, {"temperatures": [1.5]}, tensors_sha256(draft))
    found = release(run, draft, target.spec, recipe_of(draft), draft_folder=tmp_path)
    assert "calibration.json" in found.files
    loaded = export.load(run / "export", target.spec)
    for one in (draft, loaded):  # it serves the draft of the run and the rounded one of the export
        assert read_calibration(run / "export", tensors_sha256(one))["temperatures"] == [1.5]
    write_calibration(tmp_path, {"temperatures": [1.5]}, "0" * 64)
    assert "calibration.json" not in release(run, draft, target.spec, recipe_of(draft), draft_folder=tmp_path).files


# -- the gate ----------------------------------------------------------------------------------------------------------


def refused(run, draft, target, recipe=None, **options):
    with pytest.raises(NotReady) as told:
        release(run, draft, target.spec, recipe or recipe_of(draft), **options)
    assert not (run / "export").exists()
    assert not (run / "release.tmp").exists()
    return str(told.value)


def test_a_missed_bar_says_by_how_much(run, draft, target):
    text = refused(run, draft, target, recipe_of(draft, eval={"bar": 2.3}))
    assert "acceptance length 2.050 is 0.250 below the recipe's bar of 2.3 (K=3, " in text
    assert "lower eval.bar" in text


def test_a_bar_that_is_just_reached_passes(run, draft, target):
    release(run, draft, target.spec, recipe_of(draft, eval={"bar": 2.05}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"acceptance_length": float("nan")}, "below the recipe's bar"),
        ({"num_speculative_tokens": 4}, "measured with K=4, the export would serve K=3; run `draftsmith accept` again"),
        ({"schedule": "threshold"}, "was made with eval.schedule threshold, servers verify every proposal"),
        ({"draft_sha256": "1" * 64}, "was made for other tensors (111111111111), this draft's are"),
        ({"draft_sha256": None}, "does not say for which tensors"),
    ],
)
def test_acceptance_of_something_else_is_refused(run, draft, target, change, message):
    write(run / "acceptance-runtime.json", acceptance_of(draft) | change)
    assert message in refused(run, draft, target)


def test_a_missing_measurement_names_the_command(run, draft, target):
    (run / "acceptance-runtime.json").unlink()
    assert "acceptance-runtime.json is missing: run `draftsmith accept` first" in refused(run, draft, target)


def test_a_missing_certificate_names_the_command(run, draft, target):
    (run / "certificate.json").unlink()
    text = refused(run, draft, target)
    assert (
        "certificate.json is missing: nothing proves that this draft is lossless; run `draftsmith certify` first"
        in text
    )


def test_a_failed_certificate_is_repeated(run, draft, target):
    failed = certificate_of(draft, passed=False)
    failed["greedy"][0]["num_mismatches"] = 2
    write(run / "certificate.json", failed)
    text = refused(run, draft, target)
    assert "certificate.json failed: float32: 4 prompts" in text
    assert "2 at anything else" in text


def test_a_certificate_of_other_tensors_is_refused(run, draft, target):
    with torch.no_grad():
        next(draft.parameters()).mul_(1 + 1e-6)
    text = refused(run, draft, target)
    assert "certificate.json was made for other tensors" in text
    assert "acceptance-runtime.json was made for other tensors" in text


def test_a_certificate_for_scheduled_verification_is_not_one_for_servers(run, draft, target):
    write(run / "certificate.json", certificate_of(draft, schedule="hardware"))
    assert "certificate.json was made with eval.schedule hardware" in refused(run, draft, target)


def test_a_recipe_with_a_schedule_is_told_how_to_measure_for_servers(run, draft, target):
    (run / "acceptance-runtime.json").unlink()
    text = refused(run, draft, target, recipe_of(draft, eval={"schedule": "hardware"}))
    assert "run `draftsmith accept` with `eval.schedule=none` first" in text


def test_a_certificate_of_another_target_is_refused(run, draft, target):
    write(run / "certificate.json", certificate_of(draft, target="some-org/other"))
    assert "was made with the target some-org/other, this one is some-org/tiny-target" in refused(run, draft, target)


def test_weights_that_are_not_finite_are_named(run, draft, target):
    with torch.no_grad():
        draft.fc.weight[0, :2] = torch.tensor([float("nan"), float("inf")])
    assert f"fc.weight: 2 of {draft.fc.weight.numel()} values are NaN or infinite" in refused(run, draft, target)


def test_an_export_that_reads_back_differently_is_refused(run, draft, target, monkeypatch):
    honest = export.load

    def broken(folder, spec=None, embedding=None):
        found = honest(folder, spec, embedding)
        with torch.no_grad():
            found.fc.weight[0, 0] += 1
        return found

    monkeypatch.setattr(export, "load", broken)
    assert "tensor fc.weight of the export reads back differently" in refused(run, draft, target)


def test_a_licence_is_asked_for_and_never_invented(run, draft, target):
    silent = recipe_of(draft, release={"license": None})
    assert "no licence was given, and none is invented" in refused(run, draft, target, silent)
    assert "--license ID" in refused(run, draft, target, silent)
    assert "'MIT License' is not an id of the Hub" in refused(run, draft, target, silent, license="MIT License")
    found = release(run, draft, target.spec, silent, license="mit")
    assert ModelCard(found.card).data.license == "mit"


def test_everything_that_is_missing_is_said_at_once(run, draft, target):
    (run / "certificate.json").unlink()
    (run / "acceptance-runtime.json").unlink()
    text = refused(run, draft, target, recipe_of(draft, release={"license": None}))
    assert text.count("\n  - ") == 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"license": "other"}, "needs license_name and license_link"),
        ({"license": "mit", "license_name": "X"}, "belong to"),
    ],
)
def test_a_licence_that_is_other_has_a_name_and_a_text(keys, message):
    with pytest.raises(ValueError, match=message):
        ReleaseConfig(**keys)


# -- the card ----------------------------------------------------------------------------------------------------------


def test_the_front_matter_says_what_is_known_and_nothing_else(run, draft, target):
    found = release(run, draft, target.spec, recipe_of(draft, release={"language": ["en"], "tags": ["code"]}))
    head = ModelCard(found.card).data.to_dict()
    assert head == {
        "license": "apache-2.0",
        "library_name": "vllm",
        "base_model": [PUBLIC],
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "vllm", "eagle3", "draftsmith", "code"],
        "language": ["en"],
        "datasets": ["some-org/chats"],
    }
    bare = recipe_of(
        draft, data={"train": ["shipped:prompts_tiny", "rows/mine.jsonl"]}, release={"format": "speculators"}
    )
    head = ModelCard(release(run, draft, target.spec, bare).card).data.to_dict()
    assert not {"language", "datasets", "base_model_relation"} & head.keys()
    assert head["library_name"] == "speculators"
    assert "speculators" in head["tags"]


def test_the_card_says_what_a_user_has_to_know(run, draft, target):
    card = release(run, draft, target.spec, recipe_of(draft), repo_id="my-org/my-draft").card
    for text in (
        "# my-draft\n",
        f"EAGLE-3 draft model for speculative decoding with [{PUBLIC}](https://huggingface.co/{PUBLIC}), made for answers "
        "with thinking off",
        "neither a finetune nor an adapter, a quantisation or a merge",
        f'vllm serve {PUBLIC} --speculative-config \'{{"method": "eagle3", "model": "my-org/my-draft", '
        '"num_speculative_tokens": 3}\'',
        "Acceptance length = 1 + accepted proposals / rounds",
        "| all | 4 | 200 | 2.05 | 0.60 (0.60) | 0.30 (0.50) | 0.15 (0.50) |",
        "| chat | 2 | 100 | 1.80 | 0.50 (0.50) | 0.20 (0.40) | 0.10 (0.50) |",
        "| code | 2 | 100 | 2.30 | 0.70 (0.70) | 0.40 (0.57) | 0.20 (0.50) |",
        "The release demanded an acceptance length of 1.5.",
        "[some-org/chats](https://huggingface.co/datasets/some-org/chats), split train, the first 50 chats",
        "Answers: the target's own, regenerated in process, greedy, at most 40 tokens each.",
        "Hardware: 2 cores; all stages together 61 s.",
        "draftsmith train recipe.yaml",
        "token for token the same",
        "256 draws",
        "Measured in draftsmith's runtime; no server was measured.",
        "The draft proposes from 64 of 264 tokens.",
    ):
        assert text in card
    assert "were not run by" not in card
    assert "quantised copy" not in card


def test_tables_are_tables(run, draft, target):
    """Every row of a table has as many cells as its head, and an empty line stands before it."""
    lines = release(run, draft, target.spec, recipe_of(draft)).card.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("|") and not lines[i - 1].startswith("|")]
    assert starts
    for i in starts:
        assert lines[i - 1] == ""
        assert set(lines[i + 1]) <= set("| -:")
        end = next(j for j in range(i, len(lines)) if not lines[j].startswith("|"))
        assert len({line.count("|") for line in lines[i:end]}) == 1


def test_other_prompt_sets_and_methods_have_their_tables_the_measured_one_first(run, draft, target):
    write(run / "acceptance-runtime-newwording.json", acceptance_of(draft))
    write(run / "acceptance-exact.json", acceptance_of(draft, method="exact"))
    write(
        run / "acceptance-served.json", acceptance_of(draft, method="served", draft_sha256="0" * 64)
    )  # of another draft
    card = release(run, draft, target.spec, recipe_of(draft)).card
    titles = re.findall(r"^\*\*(.*?): acceptance length 2.05\*\* \((\w+)", card, re.MULTILINE)
    assert titles == [("held-out prompts", "decoded"), ("newwording", "decoded"), ("held-out prompts", "expected")]


def test_a_quantised_target_and_a_recipe_that_nobody_ran_are_told(tmp_path, draft, target):
    run = run_of(tmp_path / "run", draft)
    recipe = recipe_of(draft, "Not run by us.", target={"name": "package:pkg/Tiny.Q4_1.gguf", "published_name": PUBLIC})
    card = release(run, draft, target.spec, recipe).card
    assert f"is `Tiny.Q4_1.gguf`, a quantised copy. That is another model than {PUBLIC}: with {PUBLIC} itself" in card
    assert "settings were not run by those who wrote it" in card


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"enable_thinking": True}, "made for answers with thinking on (chat template: enable_thinking=True)"),
        ({"thinking": False}, "made for answers with thinking off (chat template: thinking=False)"),
        ({}, "in the chat template's default mode"),
        ({"effort": "low"}, "in the chat template's default mode with effort='low'"),
    ],
)
def test_the_mode_comes_from_the_chat_template(draft, arguments, words):
    assert mode(recipe_of(draft, data={"chat": {"template_kwargs": arguments}})) == words


def test_a_card_that_was_edited_is_kept_until_it_is_said_otherwise(run, draft, target):
    generated = release(run, draft, target.spec, recipe_of(draft))
    assert is_generated(generated.card)
    assert generated.notes == ()
    edited = generated.card.replace("# tiny-target-eagle3", "# The draft of my life")
    (run / "export" / "README.md").write_text(edited)
    kept = release(run, draft, target.spec, recipe_of(draft))
    assert kept.card == edited == (run / "export" / "README.md").read_text()
    assert "edited by hand and is kept as it is; --overwrite-card writes it anew" in kept.notes[0]
    assert len(kept.notes) == 1
    again = release(run, draft, target.spec, recipe_of(draft), overwrite_card=True)
    assert again.card == generated.card
    (run / "export" / "README.md").write_text("# Mine\n")
    assert "may be those of another draft" in release(run, draft, target.spec, recipe_of(draft)).notes[1]


def test_an_edited_card_outlives_another_export(run, draft, target):
    release(run, draft, target.spec, recipe_of(draft))
    (run / "export" / "README.md").write_text("# Mine\n")
    export.write(draft, target.spec, run / "export")
    assert (run / "export" / "README.md").read_text() == "# Mine\n"


def test_a_generated_card_knows_itself():
    card = seal("a\nb\n")
    assert is_generated(card)
    assert not is_generated(card.replace("b", "c"))
    assert not is_generated("a\nb\n")
    assert not is_generated(card + "more\n")


# -- nothing private ---------------------------------------------------------------------------------------------------


def test_a_secret_in_the_recipe_stops_the_release_and_leaves_no_export(run, draft, target):
    recipe = recipe_of(draft, data={"chat": {"system": "use " + "hf_" + "aB3" * 10}})
    with pytest.raises(Private, match=r"recipe.yaml:\d+: 'hf_aB3...' looks like a Hugging Face token"):
        release(run, draft, target.spec, recipe)
    assert not (run / "export").exists()
    assert not (run / "release.tmp").exists()


def test_a_secret_in_an_edited_card_stops_the_release_and_leaves_the_old_export(run, draft, target):
    release(run, draft, target.spec, recipe_of(draft))
    (run / "export" / "README.md").write_text("# Mine, made in /mnt/ann/stuff\n")
    before = {path.name: path.read_bytes() for path in (run / "export").iterdir()}
    with pytest.raises(Private, match="README.md:1: '/mnt/ann/stuff' is a path of this machine"):
        release(run, draft, target.spec, recipe_of(draft))
    assert {path.name: path.read_bytes() for path in (run / "export").iterdir()} == before


def test_paths_and_servers_are_cut_to_what_may_be_told():
    assert public({"/a/b": ["/srv/x/y.jsonl", "data.train=/mnt/x.jsonl", "~/models/m", r"C:\Users\x\m"]}) == {
        "b": ["y.jsonl", "data.train=x.jsonl", "m", "m"]
    }
    assert public("server=http://gpu7:8000/v1 http://10.0.0.3/x https://box/v1") == (
        "server=http://SERVER/v1 http://SERVER/x https://SERVER/v1"
    )
    for text in ("https://huggingface.co/a/b", "shipped:prompts_train", "a/b", "tok/s", "train.lr=1e-3", "~5"):
        assert public(text) == text


def test_a_target_without_a_public_name_is_refused(tmp_path, target, draft):
    """H-HB-1, in part: the verifier recorded as a local folder could be served by nobody else."""
    folder = save_target(target.model, target.tokenizer, tmp_path / "private-llama")
    local = Target.load(TargetConfig(name=folder, dtype="float32", device="cpu"))
    mine = draft_of(local)
    run = run_of(tmp_path / "run", mine)
    text = refused(run, mine, local, recipe_of(mine, target={"name": folder}))
    assert "has no public name, so nobody else could serve the draft; set target.published_name" in text


# -- the whole way -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of every stage from a target in a local folder, without a network (H-HB-1, H-HB-2)."""
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    work = tmp_path_factory.mktemp("ann-private-work")
    folder = save_target(target_model("llama"), tokenizer(), work / "my-secret-llama")
    recipe = work / "mine.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "target": {"name": folder, "dtype": "float32", "published_name": PUBLIC},
                "draft": {"family": "eagle3", "draft_vocab": 64},
                "data": {
                    "train": str(_chats(work / "chats.jsonl")),
                    "evaluation": {"heldout": str(work / "chats.jsonl")},
                    "regenerate": {"max_new_tokens": 16},
                    "max_len": 64,
                },
                "eval": {
                    "num_speculative_tokens": 2, "max_new_tokens": 12, "certify_prompts": 2, "certify_tokens": 8,
                    "certify_contexts": 1, "certify_draws": 100, "bar": 1.0,
                },
                "train": {"steps": 3, "batch_tokens": 128, "warmup_steps": 1, "tracker": "none"},
            }
        )
    )  # fmt: skip
    before = Path.cwd()
    os.chdir(work)
    try:
        stages = Stages.from_recipe(str(recipe), (), work / "run", quiet=True)
        stages.train()
        stages.accept()
        stages.certify()
        yield stages
    finally:
        os.chdir(before)


def _chats(path):
    lines = [
        {"id": str(i), "messages": [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]}
        for i, word in enumerate(["abc", "hello", "rain", "north"])
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_without_a_network_a_local_target_goes_all_the_way_to_an_export_that_names_nothing_private(trained):
    result = trained.release(license="apache-2.0")
    assert result["pushed"] is None
    assert result["base_model"] == PUBLIC
    folder = Path(result["folder"])
    private = ("ann-private-work", "my-secret-llama", str(Path.home()), str(trained.out.parent))
    names = [n for n in (getpass.getuser(), socket.gethostname()) if n not in ("root", "localhost")]
    for path in folder.iterdir():
        held = path.read_bytes()
        for word in (*private, *names):
            assert word.encode() not in held, f"{word} stands in {path.name}"
    told = json.loads((folder / "config.json").read_text())
    assert PUBLIC in json.dumps(told)
    config = transformers.AutoConfig.from_pretrained(folder)  # the strict validation of the installed libraries
    assert config.hidden_size == trained.target.spec.hidden_size


def test_options_of_a_push_without_a_push_are_refused(trained):
    with pytest.raises(ValueError, match="--private, --revision and --pr have no effect without --push ORG/NAME"):
        trained.release(private=True, license="mit")


@pytest.fixture
def server():
    with FakeHub() as found:
        found.models.add(PUBLIC)
        yield found


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # see tests/test_hub.py
@pytest.mark.parametrize("name", FAMILIES)
def test_a_draft_of_every_family_arrives_as_it_was_exported(tmp_path, target, server, monkeypatch, name):
    draft = draft_of(target, name)
    found = release(run_of(tmp_path / "run", draft), draft, target.spec, recipe_of(draft), repo_id="my-org/my-draft")
    with online(monkeypatch):
        push(found.folder, "my-org/my-draft", message="a draft", base_model=PUBLIC, token=TOKEN, endpoint=server.url)
    sent = server.repos["my-org/my-draft"]["main"]
    assert sent == {path.name: path.read_bytes() for path in found.folder.iterdir()}
    for file, content in sent.items():
        (tmp_path / "got").mkdir(exist_ok=True)
        (tmp_path / "got" / file).write_bytes(content)
    assert tensors_sha256(export.load(tmp_path / "got")) == tensors_sha256(export.load(found.folder))


def draftsmith(trained, server, *arguments):
    """The real command in a process of its own, with the local Hub in the environment."""
    environment = os.environ | {
        "HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "draftsmith.train.cli", *arguments, "--out", str(trained.out)]
    return subprocess.run(command, env=environment, cwd=trained.out.parent, capture_output=True, text=True, timeout=200)


def test_the_command_pushes_what_the_dry_run_showed(trained, server):
    found = draftsmith(
        trained, server, "release", "mine.yaml", "--push", "my-org/my-draft", "--private", "--license", "mit", "--json"
    )
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert result["pushed"]["url"] == f"{server.url}/my-org/my-draft"
    assert server.private["my-org/my-draft"]
    sent = server.repos["my-org/my-draft"]["main"]
    assert {name: len(content) for name, content in sent.items()} == result["files"]
    assert sent["README.md"].decode() == result["card"]
    assert '"model": "my-org/my-draft"' in result["card"]
    assert re.fullmatch(r"mine: acceptance length \d\.\d\d", server.commits[0]["message"])
    assert TOKEN not in found.stdout + found.stderr


def test_a_refusal_of_the_command_is_one_message_and_exit_code_1(trained, server):
    found = draftsmith(trained, server, "release", "mine.yaml", "eval.bar=9.5", "--push", "my-org/other")
    assert found.returncode == 1
    assert re.search(r"acceptance length \d\.\d{3} is \d\.\d{3} below the recipe's bar of 9.5", found.stderr)
    assert "no licence was given" in found.stderr
    assert "Traceback" not in found.stderr
    assert server.asked == []


def test_the_help_of_release_names_every_option(capsys):
    with pytest.raises(SystemExit) as code:
        cli.main(["release", "--help"])
    assert code.value.code == 0
    text = capsys.readouterr().out
    for option in ("--push", "--private", "--revision", "--pr", "--license", "--overwrite-card"):
        assert option in text
