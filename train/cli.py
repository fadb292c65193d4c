"""The `draftsmith` command. Every verb is thin: it reads the recipe and calls one function of train/stages.py.

Heavy imports happen inside the verbs, so `draftsmith --help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from draftsmith.train.stages import Stages

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train, prove and ship draft models for speculative decoding.\n\n"
    "One recipe (a YAML file) serves every stage. Start with: [bold]draftsmith run quickstart[/bold]",
)

RECIPE = typer.Argument(help="Path of a recipe, or the name of a shipped one (quickstart, tiny-eagle3, ...).")
OVERRIDES = typer.Argument(help="Overrides, e.g. train.lr=1e-3 data.source=live.", metavar="[SECTION.KEY=VALUE]...")
OUT = typer.Option("--out", help="Run folder; default runs/<recipe name>.")
SMOKE = typer.Option("--smoke", help="The same code with a minute of work.")
JSON = typer.Option("--json", help="Print machine-readable JSON instead of tables.")
TARGET = typer.Option("--target", help="Instead of a recipe: Hub id, folder or GGUF of the target.")
DRAFT = typer.Option("--draft", help="Instead of a recipe: a draft folder or an export.")
PROMPTS = typer.Option("--prompts", help="Prompts to use: JSONL, Parquet, Hub id or shipped:NAME.")

Overrides = Annotated[list[str] | None, OVERRIDES]
Recipe = Annotated[str, RECIPE]
MaybeRecipe = Annotated[str | None, RECIPE]
Out = Annotated[Path | None, OUT]
Smoke = Annotated[bool, SMOKE]
Json = Annotated[bool, JSON]
TargetOption = Annotated[str | None, TARGET]
DraftOption = Annotated[str | None, DRAFT]
PromptsOption = Annotated[str | None, PROMPTS]


def _stages(
    recipe: str | None,
    overrides: list[str] | None,
    out: Path | None,
    smoke: bool = False,
    quiet: bool = False,
    target: str | None = None,
    draft: str | None = None,
    prompts: str | None = None,
) -> Stages:
    from transformers.utils import logging

    from draftsmith.train.stages import Stages

    logging.disable_progress_bar()
    overrides = list(overrides or [])
    if recipe is not None and "=" in recipe:  # `accept --target T --draft D eval.num_prompts=10` has no recipe
        overrides.insert(0, recipe)
        recipe = None
    if recipe is None:
        if not target or not draft:
            raise typer.BadParameter("give a recipe, or both --target and --draft")
        return Stages.for_draft(target, draft, prompts, overrides, out, quiet=quiet)
    if target or draft:
        raise typer.BadParameter("give either a recipe or --target and --draft, not both")
    return Stages.from_recipe(recipe, overrides, out, smoke=smoke, prompts=prompts, quiet=quiet)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"draftsmith {installed('draftsmith')}")
        raise typer.Exit()


@app.command()
def run(
    recipe: Recipe, overrides: Overrides = None, out: Out = None, smoke: Smoke = False, json_: Json = False
) -> None:
    """Do every stage that is not done yet: answers, features, training, acceptance, proof, export, report.

    Example: draftsmith run tiny-eagle3
    """
    stages = _stages(recipe, overrides, out, smoke, quiet=json_)
    result = stages.run()
    if json_:
        _print_json(result)


@app.command()
def plan(recipe: Recipe, overrides: Overrides = None, smoke: Smoke = False, json_: Json = False) -> None:
    """Disk, memory, time and break-even of a recipe, before anything is spent.

    Example: draftsmith plan tiny-eagle3
    """
    stages = _stages(recipe, overrides, None, smoke, quiet=json_)
    result = stages.plan()
    if json_:
        _print_json(result)


@app.command()
def regenerate(recipe: Recipe, overrides: Overrides = None, out: Out = None, smoke: Smoke = False) -> None:
    """Let the target answer the recipe's prompts; the answers are what a draft learns from.

    Example: draftsmith regenerate tiny-eagle3
    """
    _stages(recipe, overrides, out, smoke).regenerate()


@app.command()
def capture(recipe: Recipe, overrides: Overrides = None, out: Out = None, smoke: Smoke = False) -> None:
    """Keep the target's hidden states of every row on disk (answers are made first where they are missing).

    Example: draftsmith capture tiny-eagle3
    On several ranks: accelerate launch -m draftsmith.train.cli capture RECIPE
    """
    _stages(recipe, overrides, out, smoke).capture()


@app.command()
def inspect(
    recipe: Recipe,
    overrides: Overrides = None,
    smoke: Smoke = False,
    row: Annotated[int, typer.Option(help="Which row to show, from 0.")] = 0,
) -> None:
    """Show a training row with its supervised tokens coloured, and why rows were dropped.

    Example: draftsmith inspect tiny-eagle3 --row 3
    """
    _stages(recipe, overrides, None, smoke).inspect(row)


@app.command()
def train(recipe: Recipe, overrides: Overrides = None, out: Out = None, smoke: Smoke = False) -> None:
    """Train the draft; the same program as `accelerate launch -m draftsmith.train RECIPE`, on one process.

    Example: draftsmith train tiny-eagle3
    """
    _stages(recipe, overrides, out, smoke).train()


@app.command()
def accept(
    recipe: MaybeRecipe = None,
    overrides: Overrides = None,
    out: Out = None,
    smoke: Smoke = False,
    json_: Json = False,
    target: TargetOption = None,
    draft: DraftOption = None,
    prompts: PromptsOption = None,
    server: Annotated[
        str | None, typer.Option(help="Measure a running vLLM server instead, e.g. http://host:8000.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Another draft of the same target (run, step, draft or export), in one table; can be repeated."
        ),
    ] = None,
) -> None:
    """Measure acceptance per prompt kind and slot by decoding with the real target.

    Example: draftsmith accept tiny-eagle3 eval.num_prompts=2
    Two drafts in one table and figure: draftsmith accept tiny-dspark --against runs/tiny-dflash
    """
    stages = _stages(recipe, overrides, out, smoke, json_, target, draft, prompts)
    result = stages.accept(server=server, against=against or ())
    if json_:
        _print_json(result)


@app.command()
def certify(
    recipe: MaybeRecipe = None,
    overrides: Overrides = None,
    out: Out = None,
    smoke: Smoke = False,
    json_: Json = False,
    target: TargetOption = None,
    draft: DraftOption = None,
    prompts: PromptsOption = None,
) -> None:
    """Prove that speculation does not change the target's output; writes certificate.json.

    Example: draftsmith certify tiny-eagle3
    """
    result = _stages(recipe, overrides, out, smoke, json_, target, draft, prompts).certify()
    if json_:
        _print_json(result)
    if not result["passed"]:
        raise typer.Exit(1)


@app.command()
def speed(
    recipe: MaybeRecipe = None,
    overrides: Overrides = None,
    out: Out = None,
    smoke: Smoke = False,
    json_: Json = False,
    target: TargetOption = None,
    draft: DraftOption = None,
    prompts: PromptsOption = None,
) -> None:
    """Measure pass times and the speed-up over the same loop without a draft; finds the best number of proposals.

    Example: draftsmith speed tiny-eagle3
    """
    result = _stages(recipe, overrides, out, smoke, json_, target, draft, prompts).speed()
    if json_:
        _print_json(result)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the target.")],
    target: Annotated[str, TARGET],
    draft: Annotated[str, DRAFT],
    num: Annotated[
        int | None, typer.Option("--num", help="Proposals per round; default: what the draft was trained for.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 128,
    raw: Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.")] = False,
) -> None:
    """Decode one prompt speculatively in the terminal; accepted tokens are coloured.

    Example: draftsmith generate --target tiny:llama --draft runs/tiny-eagle3/export "abc"
    """
    stages = _stages(None, [], None, target=target, draft=draft)
    stages.generate(prompt, num, temperature, max_new_tokens, raw)


@app.command()
def export(
    recipe: MaybeRecipe = None,
    overrides: Overrides = None,
    out: Out = None,
    smoke: Smoke = False,
    target: TargetOption = None,
    draft: DraftOption = None,
    format_: Annotated[
        Literal["plain", "speculators"], typer.Option("--format", help="Which of the two layouts that vLLM reads.")
    ] = "plain",
    force: Annotated[bool, typer.Option("--force", help="Write even what vLLM is known not to serve.")] = False,
) -> None:
    """Write the folder that vLLM loads, read it back, compare, and print the serve command.

    Example: draftsmith export tiny-eagle3 --format speculators
    """
    _stages(recipe, overrides, out, smoke, target=target, draft=draft).export(format_, force)


@app.command()
def calibrate(
    recipe: MaybeRecipe = None,
    overrides: Overrides = None,
    out: Out = None,
    smoke: Smoke = False,
    json_: Json = False,
    target: TargetOption = None,
    draft: DraftOption = None,
    prompts: PromptsOption = None,
) -> None:
    """Calibrate the confidences of a draft (DSpark) on held-out prompts; writes calibration.json beside the draft.

    Example: draftsmith calibrate tiny-dspark
    """
    result = _stages(recipe, overrides, out, smoke, json_, target, draft, prompts).calibrate()
    if json_:
        _print_json(result)


@app.command()
def release(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    smoke: Smoke = False,
    json_: Json = False,
    push: Annotated[
        str | None, typer.Option("--push", metavar="ORG/NAME", help="Upload to this repository of the Hub.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="The repository is private if it is made now.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch to commit to; default main.")] = None,
    pr: Annotated[bool, typer.Option("--pr", help="Open a pull request instead of committing.")] = False,
    license_: Annotated[
        str | None, typer.Option("--license", metavar="ID", help="Licence of the draft, e.g. apache-2.0.")
    ] = None,
    overwrite_card: Annotated[
        bool, typer.Option("--overwrite-card", help="Write README.md anew although somebody edited it.")
    ] = False,
) -> None:
    """Check the bar, the certificate and the weights, export, write the model card; without --push a dry run.

    Example: draftsmith release tiny-eagle3 --license apache-2.0
    """
    stages = _stages(recipe, overrides, out, smoke, quiet=json_)
    result = stages.release(push, private, revision, pr, license_, overwrite_card)
    if json_:
        _print_json(result)


@app.command()
def serve(
    recipe: MaybeRecipe = None,
    overrides: Overrides = None,
    out: Out = None,
    smoke: Smoke = False,
    target: TargetOption = None,
    draft: DraftOption = None,
    start: Annotated[bool, typer.Option("--start", help="Start the server instead of printing the command.")] = False,
    target_only: Annotated[
        bool, typer.Option("--target-only", help="The server that data.capture.server asks for the target's states.")
    ] = False,
) -> None:
    """Print (or start) the right vLLM command for the exported draft, or for capturing from its target.

    Example: draftsmith serve tiny-eagle3
    """
    stages = _stages(recipe, overrides, out, smoke, target=target, draft=draft, quiet=target_only)
    stages.serve(start, target_only)


@app.command()
def report(recipe: Recipe, overrides: Overrides = None, out: Out = None, smoke: Smoke = False) -> None:
    """Write report.html from the files of the run: one page with tables and figures.

    Example: draftsmith report tiny-eagle3
    """
    _stages(recipe, overrides, out, smoke).report()


@app.command()
def doctor(json_: Json = False) -> None:
    """Check the environment: torch build, devices, libraries, memory; one cause and one cure per line.

    Example: draftsmith doctor
    """
    from draftsmith.train import preflight

    code = preflight.doctor(as_json=json_)
    raise typer.Exit(code)


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit code 0 done, 1 failed, 2 wrong usage; DRAFTSMITH_DEBUG=1 shows the traceback of an error."""
    from draftsmith.recipes import RecipeError

    try:
        code = app(args=arguments, standalone_mode=False)
    except RecipeError as error:
        code = _fail(error, 2)
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("interrupted; the same command continues", err=True)
        code = 1
    except Exception as error:
        shown = getattr(error, "format_message", None)  # click's own usage errors
        if shown is not None:
            typer.echo(f"error: {shown()}", err=True)
            code = getattr(error, "exit_code", 2)
        elif isinstance(error, (ValueError, RuntimeError, OSError, ImportError)):
            code = _fail(error, 1)
        else:
            raise
    sys.exit(code if isinstance(code, int) else 0)


def _fail(error: Exception, code: int) -> int:
    if os.environ.get("DRAFTSMITH_DEBUG"):
        raise error
    typer.echo(f"error: {error}", err=True)
    return code


if __name__ == "__main__":
    main()
