"""Protects the way to the Hub: what is sent, what never is, and what a broken push says. Run: pytest tests/test_hub.py

The Hub here is tests/fake_hub.py, spoken to by the real huggingface_hub over HTTP.
"""

import socket

import huggingface_hub
import pytest
from fake_hub import TOKEN, FakeHub, online
from huggingface_hub import HfApi, constants

from draftsmith.eval import hub
from draftsmith.eval.hub import HubError, Private, check_repo_id, private_parts, push, refuse_private

# huggingface_hub 2.4 hands LFS bodies to its HTTP library in a way that the library is about to rename
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "my-org/my-draft"
HOME = "/" + "home"  # put together here: no file of this project holds such a path
CARD = "---\nlicense: mit\nbase_model:\n- some-org/target\n---\n\n# A draft\n"


@pytest.fixture
def network(monkeypatch):
    with online(monkeypatch):
        yield


@pytest.fixture
def server(network):
    with FakeHub() as found:
        yield found


@pytest.fixture
def folder(tmp_path):
    """An export, and things beside it that are nobody's business."""
    place = tmp_path / "export"
    place.mkdir()
    (place / "README.md").write_text(CARD)
    (place / "config.json").write_text("{}")
    (place / "provenance.json").write_text('{"a": 1}')
    (place / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}" + bytes(range(256)))
    for stranger in (
        "optimizer.safetensors",
        "training_state.json",
        "state.pt",
        "x.bin",
        ".env",
        "notes.txt",
        "config.json.tmp",
    ):
        (place / stranger).write_text("mine")
    return place


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def send(folder, server, **options):
    return push(folder, REPO, message="a draft", token=TOKEN, endpoint=server.url, **options)


PUBLISHED = ["README.md", "config.json", "model.safetensors", "provenance.json"]


def test_a_push_makes_the_repository_and_one_commit_of_the_export_alone(folder, server):
    found = send(folder, server, base_model="some-org/target")
    assert sorted(server.repos[REPO]["main"]) == PUBLISHED
    assert server.repos[REPO]["main"]["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert server.repos[REPO]["main"]["README.md"].decode() == CARD
    assert [c["message"] for c in server.commits] == ["a draft"]
    assert found == (f"{server.url}/{REPO}", f"{1:040x}", None)
    assert not server.private[REPO]


def test_a_private_repository_is_made_private(folder, server):
    send(folder, server, private=True)
    assert server.private[REPO]


def test_a_second_push_sends_only_what_changed(folder, server):
    send(folder, server)
    (folder / "provenance.json").write_text('{"a": 2}')
    send(folder, server)
    assert server.commits[1]["files"] == ["provenance.json"]
    assert sum(asked.startswith("PUT /lfs/") for asked in server.asked) == 1


def test_a_revision_is_a_branch_that_is_made_when_it_is_new(folder, server):
    send(folder, server, revision="v2")
    send(folder, server, revision="v2")
    assert sorted(server.repos[REPO]["v2"]) == PUBLISHED
    assert server.repos[REPO]["main"] == {}


def test_a_pull_request_leaves_main_alone(folder, server):
    send(folder, server)
    (folder / "README.md").write_text(CARD + "better\n")
    found = send(folder, server, create_pr=True)
    assert found.pull_request == f"{server.url}/{REPO}/discussions/1"
    assert server.repos[REPO]["main"]["README.md"].decode() == CARD
    assert server.repos[REPO]["refs/pr/1"]["README.md"].decode() == CARD + "better\n"


@pytest.mark.parametrize(
    ("place", "faults", "message"),
    [
        (
            "/commit/",
            [500],
            r"Hub, uploading \(my-org/my-draft\): HTTP 500: planned by the test. Run the same command again",
        ),
        (
            "/commit/",
            ["drop"],
            r"Hub, uploading \(my-org/my-draft\): no answer \(\w+: .+\). Run the same command again",
        ),
        ("PUT /lfs/", ["drop"] * 9, r"uploading .*no answer .*what the Hub has already is not sent twice"),
        ("PUT /lfs/", [500] * 9, r"uploading .*HTTP 500"),
        ("/lfs/objects/batch", [503] * 9, r"uploading .*HTTP 503"),
        ("/preupload/", [401], r"uploading .*HTTP 401: .*hf auth login"),
        ("/api/repos/create", [500], r"making the repository .*HTTP 500"),
        ("/api/whoami", [401], r"who you are .*HTTP 401: .*hf auth login"),
        ("/api/whoami", ["drop"] * 9, r"who you are .*no answer"),
        ("/api/models/some-org/target", [502] * 9, r"whether the base model some-org/target exists .*HTTP 502"),
        ("/commit/", [412], r"uploading .*HTTP 412: .*Mend what it names"),
        ("/commit/", [409], r"uploading .*HTTP 409: .*Somebody changed it meanwhile"),
    ],
)
def test_a_push_that_breaks_off_says_where_changes_nothing_and_can_be_repeated(folder, server, place, faults, message):
    before = contents(folder)
    server.faults = {place: list(faults)}
    with pytest.raises(HubError, match=message) as told:
        send(folder, server, base_model="some-org/target")
    assert f"{folder} is complete and unchanged." in str(told.value)
    assert TOKEN not in str(told.value)
    assert contents(folder) == before
    assert server.repos.get(REPO, {"main": {}})["main"] == {}  # nothing is half there
    server.faults = {}
    send(folder, server, base_model="some-org/target")
    assert sorted(server.repos[REPO]["main"]) == PUBLISHED
    assert len(server.commits) == 1


def test_a_short_fault_of_the_object_store_is_survived(folder, server):
    server.faults = {"PUT /lfs/": [500, "drop", 503]}
    send(folder, server)
    assert sorted(server.repos[REPO]["main"]) == PUBLISHED


def test_a_commit_whose_answer_was_lost_is_not_made_twice(folder, server):
    server.faults = {"/commit/": ["late"]}
    with pytest.raises(HubError, match="no answer"):
        send(folder, server)
    assert len(server.commits) == 1
    found = send(folder, server)
    assert len(server.commits) == 1
    assert found.url == f"{server.url}/{REPO}"


def test_a_wrong_token_is_named_and_not_shown(folder, server):
    with pytest.raises(HubError, match=r"who you are .*HTTP 401.*HF_TOKEN") as told:
        push(folder, REPO, message="a draft", token=TOKEN + "x", endpoint=server.url)
    assert TOKEN not in str(told.value)
    assert server.asked == ["GET /api/whoami-v2"]


def test_without_a_token_the_push_says_how_to_log_in(folder, server, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(HubError, match=r"who you are .*hf auth login"):
        push(folder, REPO, message="a draft", endpoint=server.url)


def test_a_token_that_can_only_read_is_refused_before_anything_is_made(folder, server):
    server.role = "read"
    with pytest.raises(ValueError, match="token of tester can only read; make one that writes"):
        send(folder, server)
    assert not server.repos


def test_a_base_model_that_is_not_public_is_refused_before_anything_is_made(folder, server):
    with pytest.raises(ValueError, match=r"base_model some-org/absent is not on http.*target.published_name"):
        send(folder, server, base_model="some-org/absent")
    assert not server.repos


def test_a_namespace_of_others_is_refused_by_the_hub_and_explained(folder, server):
    with pytest.raises(HubError, match=r"making the repository \(not-mine/draft\): HTTP 403: .*organisation's name"):
        push(folder, "not-mine/draft", message="a draft", token=TOKEN, endpoint=server.url)


def test_a_server_that_is_not_there(folder, network):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(HubError, match=r"who you are .*no answer \(ConnectError"):
        push(folder, REPO, message="a draft", token=TOKEN, endpoint=url)


def test_offline_mode_is_named(folder):
    with pytest.raises(HubError, match="offline mode is enabled.*Unset HF_HUB_OFFLINE to push"):
        push(folder, REPO, message="a draft", token=TOKEN, endpoint="http://127.0.0.1:1")


def test_a_pull_request_against_a_branch_is_refused(folder, server):
    with pytest.raises(ValueError, match="--pr opens a pull request against main, --revision v2 .*give one"):
        send(folder, server, create_pr=True, revision="v2")
    assert server.asked == []


def test_a_folder_without_card_is_not_pushed(folder, server):
    (folder / "README.md").unlink()
    with pytest.raises(ValueError, match=r"no README.md and config.json here \(config.json, .*release it first"):
        send(folder, server)
    assert server.asked == []


@pytest.mark.parametrize(
    "name", ["draft", "a/b/c", "my org/x", "org/--x", "org/x.git", "-org/x", "org/", "org/x..y", "http://h/x"]
)
def test_repository_names_that_the_hub_refuses(name):
    with pytest.raises(ValueError, match="expected ORG/NAME"):
        check_repo_id(name)


@pytest.mark.parametrize("name", ["my-org/my-draft", "a/b", "Qwen/Qwen3-8B-speculator.eagle3", "org/x_1.0"])
def test_repository_names_that_the_hub_takes(name):
    check_repo_id(name)
    huggingface_hub.utils.validate_repo_id(name)


def test_a_library_that_lacks_what_is_needed_is_named(folder, monkeypatch):
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, repo_id, folder_path: None)
    with pytest.raises(HubError, match=r"HfApi.upload_folder takes no revision, create_pr.*install huggingface_hub>=1"):
        push(folder, REPO, message="a draft", token=TOKEN)


# -- nothing private ---------------------------------------------------------------------------------------------------

LEAKS = {
    "a Hugging Face token": "key hf_" + "aB3" * 10,
    "an API key": "sk-" + "proj-" + "aB3" * 10,
    "an AWS key": "AKIA" + "ABCD" * 4,
    "a Google key": "AIza" + "x" * 35,
    "a GitHub token": "ghp_" + "aB3" * 12,
    "a Slack token": "xoxb-" + "1234567890-abc",
    "a private key": "-----BEGIN RSA " + "PRIVATE KEY-----",
    "a password or key": '"wandb_api_key": "' + "0123456789abcdef" + '"',
    "an authorization header": "Authorization: Bearer " + "a1b2c3d4" * 4,
}


@pytest.mark.parametrize("what", LEAKS)
@pytest.mark.parametrize("name", ["README.md", "recipe.yaml", "config.json"])
def test_secrets_are_found_and_not_repeated(tmp_path, what, name):
    (tmp_path / name).write_text(f"first\n  {LEAKS[what]}\n")
    with pytest.raises(Private, match=rf"{name}:2: '[^']+\.\.\.' looks like {what}") as told:
        refuse_private(tmp_path)
    assert LEAKS[what][-12:] not in str(told.value)


@pytest.mark.parametrize(
    "text",
    [f"{HOME}/ann/data", '"path": "/mnt/big/rows.jsonl"', "model=/srv/x", "=/root" + "/x", "~/models/llama", r"C:\Users\ann\x", "file:///etc/x",
     "--out /tmp/run-3", "(/data/x)"],
)  # fmt: skip
def test_paths_of_this_machine_are_found(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    assert "is a path of this machine" in " ".join(private_parts(tmp_path / "README.md"))


def test_names_of_user_and_host_are_found_but_not_in_public_names(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpubox7.lab.example")
    monkeypatch.setattr("getpass.getuser", lambda: "annette")
    card = tmp_path / "README.md"
    card.write_text("annette/my-draft\nmade by Annette\non GPUBOX7\n")
    found = list(private_parts(card, ["annette/my-draft"]))
    assert found == [
        "README.md:2: 'Annette' is the name of this user",
        "README.md:3: 'GPUBOX7' is the name of this host",
    ]


def test_names_that_are_plain_words_are_no_names(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr("getpass.getuser", lambda: "root")
    (tmp_path / "README.md").write_text("root mean square on localhost\n")
    refuse_private(tmp_path)


def test_what_cards_usually_say_is_not_taken_for_a_secret(tmp_path):
    (tmp_path / "README.md").write_text(
        "tokens/s and/or 1/2, https://huggingface.co/mnt/x, org/model, `/v1/completions`, mask_token_id: 151669\n"
        "num_speculative_tokens: 5, api_key_env: null, data.regenerate.api_key_env=KEY, top-k / top-p, K = 3\n"
        "sha256 " + "ab" * 32 + " git " + "0f" * 20 + "\n"
    )
    refuse_private(tmp_path)


def test_the_header_of_a_tensor_file_is_read_and_its_tensors_are_not(tmp_path):
    head = f'{{"__metadata__":{{"from":"{HOME}/ann/x"}}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + f" {HOME}/bob/y ".encode())
    found = list(private_parts(tmp_path / "model.safetensors"))
    assert len(found) == 1
    assert f"{HOME}/ann/x" in found[0]


def test_the_files_of_a_push_are_listed_as_they_are_sent(folder):
    assert [path.name for path in hub.files(folder)] == PUBLISHED
