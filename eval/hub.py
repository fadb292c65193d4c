"""The Hugging Face Hub: one repository, one commit of an export folder, and errors that say how to go on.

The order is chosen so that the cheap refusals come first: who we are, whether the base model exists, then the repository,
the branch, the files. Nothing here writes to the local folder, so a push that breaks off is simply run again; files that
the Hub has already are not sent twice.

Works with huggingface_hub 1 and 2; what is used of it is looked up before the first request.
"""

from __future__ import annotations

import getpass
import importlib
import inspect
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from huggingface_hub import HfApi

ALLOW = ("*.safetensors", "*.json", "*.yaml", "README.md", "chat_template.jinja", "merges.txt", "vocab.txt")
IGNORE = ("optimizer*", "training_state*", "*.pt", "*.bin", "*.pth", "*.tmp", ".*")
WANTED = {  # what is called, and with which arguments
    "whoami": ("token",),
    "repo_exists": ("repo_id",),
    "create_repo": ("repo_id", "private", "exist_ok"),
    "create_branch": ("repo_id", "branch", "exist_ok"),
    "upload_folder": (
        "repo_id", "folder_path", "revision", "create_pr", "commit_message", "allow_patterns", "ignore_patterns",
    ),
}  # fmt: skip


class HubError(RuntimeError):
    """The Hub refused or did not answer; says at which step, with which answer, and what to do."""


class Private(ValueError):
    """Files that would publish a secret or what belongs to this machine; says where."""


class Pushed(NamedTuple):
    """url: of the repository. commit: its hash. pull_request: its address, None when committed directly."""

    url: str
    commit: str
    pull_request: str | None


def push(
    folder: Path,
    repo_id: str,
    *,
    message: str,
    base_model: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
    endpoint: str | None = None,
) -> Pushed:
    """Upload the export in `folder` to `repo_id` as one commit; the repository is made when it does not exist.

    private: of a repository that is made now; None = the account's default. revision: branch, made when it does not
    exist; None = main. create_pr: open a pull request against main instead of committing. base_model: must exist on the
    Hub. token, endpoint: None = those of the login and of HF_ENDPOINT.
    """
    check_repo_id(repo_id)
    if create_pr and revision not in (None, "main"):
        raise ValueError(
            f"--pr opens a pull request against main, --revision {revision} commits to a branch; give one of them"
        )
    names = [path.name for path in files(folder)]
    if not {"README.md", "config.json"} <= set(names):
        raise ValueError(
            f"{folder}: no README.md and config.json here ({', '.join(names) or 'empty'}); release it first"
        )
    api = _api(token, endpoint)
    with _explained("who you are", repo_id, folder):
        _check_identity(api.whoami())
    if base_model is not None:
        with _explained(f"whether the base model {base_model} exists", repo_id, folder):
            if not api.repo_exists(base_model):
                raise ValueError(
                    f"base_model {base_model} is not on {api.endpoint}, or this account may not see it; set "
                    f"target.published_name to the target's public name"
                )
    with _explained("making the repository", repo_id, folder):
        api.create_repo(repo_id, private=private, exist_ok=True)
    if revision not in (None, "main"):
        with _explained(f"making the branch {revision}", repo_id, folder):
            api.create_branch(repo_id, branch=str(revision), exist_ok=True)
    with _explained("uploading", repo_id, folder):
        info = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            create_pr=create_pr,
            commit_message=message,
            allow_patterns=list(ALLOW),
            ignore_patterns=list(IGNORE),
        )
    return Pushed(f"{api.endpoint}/{repo_id}", str(info.oid), info.pr_url)


def files(folder: Path) -> list[Path]:
    """The files of the folder that a push uploads, in order of their names."""
    found = [p for p in sorted(Path(folder).iterdir()) if p.is_file()]
    return [p for p in found if any(p.match(a) for a in ALLOW) and not any(p.match(i) for i in IGNORE)]


def check_repo_id(repo_id: str) -> None:
    """Refuse what the Hub would refuse, before anything is written or sent."""
    one = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
    if not re.fullmatch(f"{one}/{one}", repo_id) or "--" in repo_id or ".." in repo_id or repo_id.endswith(".git"):
        raise ValueError(
            f"--push {repo_id}: expected ORG/NAME (letters, digits, single - _ .), for example my-org/my-draft"
        )


def _api(token: str | None, endpoint: str | None) -> HfApi:
    """A client whose methods take the arguments used here."""
    from huggingface_hub import HfApi, __version__

    for method, arguments in WANTED.items():
        known = inspect.signature(getattr(HfApi, method, lambda: None)).parameters
        missing = [name for name in arguments if name not in known]
        if missing:
            raise HubError(
                f"huggingface_hub {__version__}: HfApi.{method} takes no {', '.join(missing)}; install huggingface_hub>=1"
            )
    return HfApi(endpoint=endpoint, token=token)


def _check_identity(who: dict) -> None:
    """Refuse a token that can only read. Fine-grained tokens say nothing here; the Hub itself judges them."""
    role = ((who.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise ValueError(
            f"the token of {who.get('name')} can only read; make one that writes at https://huggingface.co/settings/tokens "
            f"and log in again (`hf auth login`)"
        )


@contextmanager
def _explained(step: str, repo_id: str, folder: Path) -> Iterator[None]:
    """Turn the errors of one step into a HubError that names it and says what stands."""
    try:
        yield
    except (RuntimeError, OSError, _transport_error()) as error:
        wrapped = type(error) is RuntimeError and error.__cause__  # huggingface_hub's form for the fault of one file
        raise HubError(_message(step, repo_id, folder, wrapped or error)) from error


def _transport_error() -> type[Exception]:
    """The base error of the HTTP library that huggingface_hub uses: httpx in 1.x, httpx2 in 2.x."""
    from huggingface_hub import get_session

    return importlib.import_module(type(get_session()).__module__.partition(".")[0]).HTTPError


def _message(step: str, repo_id: str, folder: Path, error: BaseException) -> str:
    response = getattr(error, "response", None)
    status = None if response is None else response.status_code
    said = getattr(error, "server_message", None) or _first_line(error)
    what = f"HTTP {status}: {said}" if status else f"no answer ({type(error).__name__}: {said})"
    if type(error).__name__ in ("LocalTokenNotFoundError", "OfflineModeIsEnabled"):
        what = said
    return f"Hub, {step} ({repo_id}): {what}. {_advice(status, error)} {folder} is complete and unchanged."


def _advice(status: int | None, error: BaseException) -> str:
    name = type(error).__name__
    if name == "OfflineModeIsEnabled":
        return "Unset HF_HUB_OFFLINE to push;"
    if status == 401 or name == "LocalTokenNotFoundError":
        return "Log in with a token that may write (`hf auth login`, or HF_TOKEN);"
    if status == 403:
        return "This account may not write there: check the organisation's name and the token's rights;"
    if status == 404:
        return "Check the name, and that this account may see it;"
    if status == 409:
        return "Somebody changed it meanwhile; run the same command again;"
    if status is not None and 400 <= status < 500:
        return "Mend what it names and run the same command again;"
    return "Run the same command again; what the Hub has already is not sent twice;"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# -- nothing private -------------------------------------------------------------------------------------------------------

SECRETS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{20,}",
    "an API key": r"\b(?:sk|pk|rk)-(?:[a-z]+-)*[A-Za-z0-9_-]{20,}",
    "an AWS key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a Google key": r"\bAIza[0-9A-Za-z_-]{35}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,})",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password or key": (
        r"(?i)\b[\w-]*(?:api[_-]?key|access[_-]?token|auth[_-]?token|secret|password|passwd)[\"']?\s*[:=]\s*"
        r"[\"']?(?!null\b|none\b|true\b|false\b)[^\s\"',}]{6,}"
    ),
    "an authorization header": r"(?i)\bbearer\s+[A-Za-z0-9._-]{16,}",
}
_USUAL_ROOTS = (
    "home Users root mnt media tmp var opt data work workspace scratch srv nfs lustre gpfs net private usr etc"
)
_COMMON_NAMES = "root user users admin ubuntu debian localhost runner docker jovyan nobody build test"


def refuse_private(folder: Path, allowed: Sequence[str] = ()) -> None:
    """Raise Private when a file of the folder would publish a secret, a path, a user or a host name.

    allowed: public names (of the target, of the repository) in which a user's name may well occur.
    """
    faults = [fault for path in sorted(folder.iterdir()) for fault in private_parts(path, allowed)]
    if faults:
        raise Private(
            f"{folder.parent}: the export would publish what belongs to this machine or is secret:\n"
            + "\n".join(f"  - {fault}" for fault in faults)
            + "\nTake it out of the recipe or of README.md and release again"
        )


def private_parts(path: Path, allowed: Iterable[str] = ()) -> Iterator[str]:
    """One line for everything in a file that should not leave the machine; secrets are not shown in full."""
    text = _text_of(path)
    for name in allowed:
        text = text.replace(name, "")
    rules = {f"looks like {what}": pattern for what, pattern in SECRETS.items()}
    rules["is a path of this machine"] = _local_pattern()
    rules |= {
        f"is the name of this {what}": rf"(?i)(?<![\w-]){re.escape(name)}(?![\w-])" for what, name in _own_names()
    }
    for number, line in enumerate(text.splitlines(), 1):
        for what, pattern in rules.items():
            if found := re.search(pattern, line):
                shown = found[0] if what.startswith("is") else found[0][:6] + "..."
                yield f"{path.name}:{number}: {shown!r} {what}"


def _text_of(path: Path) -> str:
    """The text of a file; of a safetensors file the header, which is text, too."""
    if path.suffix == ".safetensors":
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return file.read(length).decode("utf-8", "replace")
    return path.read_text(encoding="utf-8", errors="replace")


def _local_pattern() -> str:
    roots = {*_USUAL_ROOTS.split(), *(name for name in os.listdir("/") if name not in ("v1", "v2"))}
    names = "|".join(re.escape(name) for name in sorted(roots, key=len, reverse=True))
    return rf"(?<![\w.:/~-])(?:/(?:{names})(?:/[\w.@+-]+)+|~/[\w.@+-]+|[A-Za-z]:\\[\w.\\ -]+)|file://"


def _own_names() -> list[tuple[str, str]]:
    """("user" | "host", name) of this machine, without names that are plain words."""
    found = [("host", socket.gethostname()), ("host", socket.gethostname().partition(".")[0])]
    with suppress(OSError, KeyError, ImportError):  # a container's user id without a name
        found.append(("user", getpass.getuser()))
    return [
        (what, name)
        for what, name in dict.fromkeys(found)
        if len(name) > 3 and name.lower() not in _COMMON_NAMES.split()
    ]
