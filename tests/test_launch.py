"""Protects launch files and what a run takes from a launch: accelerate reads them, and asks for what they say.
Run: pytest tests/test_launch.py"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from toy import config

from draftsmith.train import preflight, strategy

RECIPES = Path(__file__).parents[1] / "recipes"
FILES = sorted(RECIPES.glob("launch-*.yaml"))
ASKED = {
    "launch-1gpu": "single",
    "launch-rocm-8gpu-ddp": "ddp",
    "launch-rocm-8gpu-fsdp2": "fsdp2",
    "launch-rocm-8gpu-zero1": "zero1",
    "launch-rocm-8gpu-zero2": "zero2",
    "launch-rocm-2node": "ddp",
}


def arguments(path: Path, *more: str) -> argparse.Namespace:
    given = ["--config_file", str(path), *more, "-m", "draftsmith.train", "tiny-eagle3"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    return args


def environment(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What accelerate's launcher would hand to the ranks."""
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    args = arguments(path)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""  # as accelerate's launch_command fills it in
        return prepare_deepspeed_cmd_env(args)[1]
    return prepare_multi_gpu_env(args)


def test_every_launch_file_is_there():
    assert {path.stem for path in FILES} == set(ASKED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerates_own_loader_reads_a_launch_file(path):
    read = load_config_from_file(str(path))
    ranks = {"launch-1gpu": 1, "launch-rocm-2node": 16}.get(path.stem, 8)
    assert read.num_processes == ranks
    assert read.mixed_precision == "no", "the recipe decides"
    assert "Not run by us" in path.read_text()
    assert f"--config_file recipes/{path.name}" in path.read_text()
    assert arguments(path).num_processes == ranks


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_launch_file_asks_for_the_strategy_of_its_name(path, monkeypatch):
    given = {**environment(path, monkeypatch), "WORLD_SIZE": "1" if path.stem == "launch-1gpu" else "8"}
    assert strategy.asked("auto", given) == ASKED[path.stem]
    if path.stem != "launch-1gpu":
        other = "ddp" if ASKED[path.stem] != "ddp" else "fsdp2"
        if ASKED[path.stem] != "ddp":
            with pytest.raises(ValueError, match=f"train.strategy is {other}, but the launch configuration asks for"):
                strategy.asked(other, given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "asks for FSDP version 1: set fsdp_version: 2"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
            "fsdp_cpu_ram_efficient_loading: true has no place here .* set it to false",
        ),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            "ZeRO-3 is refused: .* use zero_stage 1 or 2, or FSDP2",
        ),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"},
            "zero_stage 0 is not 1 or 2; without sharding use distributed_type MULTI_GPU",
        ),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"},
            "deepspeed_config_file, which would be ignored",
        ),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
            "offload_optimizer_device has no effect here",
        ),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "sets ACCELERATE_USE_MEGATRON_LM; draftsmith trains on one process"),
    ],
)
def test_what_no_run_can_have_is_refused_with_the_reason(given, message):
    with pytest.raises(ValueError, match=message):
        strategy.asked("auto", {"WORLD_SIZE": "8", **given})


def test_a_wish_of_the_recipe_needs_ranks_and_no_launch_file():
    assert strategy.asked("zero1", {"WORLD_SIZE": "2"}) == "zero1"
    assert strategy.asked("auto", {"WORLD_SIZE": "2"}) == "ddp"
    assert strategy.asked("auto", {}) == strategy.asked("ddp", {}) == "single"
    with pytest.raises(ValueError, match="fsdp2 spreads a run over ranks, but one process started"):
        strategy.asked("fsdp2", {})


def test_muon_under_zero_cannot_be_clipped():
    clipped = config(optimizer="muon")
    with pytest.raises(ValueError, match=r"train.clip is 1.0, but DeepSpeed orthogonalises .*: set train.clip=null"):
        strategy.check_combination("zero2", clipped)
    with pytest.raises(ValueError, match=r"muon_ns_steps is 3, but DeepSpeed's Muon always makes 5"):
        strategy.check_combination("zero1", config(optimizer="muon", clip=None, muon_ns_steps=3))
    for name in ("ddp", "fsdp2", "single"):
        strategy.check_combination(name, clipped)
    strategy.check_combination("zero2", config())
    strategy.check_combination("zero2", config(optimizer="muon", clip=None))


# -- the shell files -----------------------------------------------------------------------------------------------
def sourced(**given: str) -> dict[str, str]:
    """The environment after `source recipes/launch-rocm-env.sh` in a bare one."""
    script = f"set -eu; source {RECIPES}/launch-rocm-env.sh; env"
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": "/usr/bin:/bin", **given}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


@pytest.mark.parametrize("fabric", [None, *preflight.FABRICS])
def test_the_shell_file_sets_what_doctor_compares_with(fabric):
    found = sourced(**({"DRAFTSMITH_FABRIC": fabric} if fabric else {}))
    wanted = {**preflight.ROCM_NODE, **(preflight.FABRICS[fabric] if fabric else {})}
    assert {name: found[name] for name in wanted} == {n: found[n] if v is None else v for n, v in wanted.items()}
    assert ("NCCL_IB_GID_INDEX" in found) == (fabric is not None)
    assert found["HIP_VISIBLE_DEVICES"] == found["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert "ROCR_VISIBLE_DEVICES" not in found
    assert sourced(DRAFTSMITH_GPU="gfx950")["RCCL_WARP_SPEED_AUTO"] == "0"


def test_what_is_set_already_stays():
    found = sourced(HIP_VISIBLE_DEVICES="2,3", NCCL_MIN_NCHANNELS="32")
    assert (found["HIP_VISIBLE_DEVICES"], found["CUDA_VISIBLE_DEVICES"], found["NCCL_MIN_NCHANNELS"]) == (
        "2,3",
        "2,3",
        "32",
    )


def test_every_variable_of_the_shell_file_has_its_reason():
    lines = (RECIPES / "launch-rocm-env.sh").read_text().splitlines()
    assert [line for line in lines if re.match(r"\s*default [A-Z]", line) and "#" not in line] == []


@pytest.mark.parametrize("name", ["launch-rocm-env.sh", "launch-rocm-slurm.sh"])
def test_the_shell_files_parse_and_say_that_they_were_not_run(name):
    assert subprocess.run(["bash", "-n", str(RECIPES / name)]).returncode == 0
    assert "Not run by us" in (RECIPES / name).read_text()


def test_the_slurm_script_starts_one_launcher_a_node(tmp_path):
    """With fake scontrol and srun; the launcher's line is what accelerate parses."""
    for command, body in {
        "scontrol": "echo node-a; echo node-b",
        "srun": 'shift; export SLURM_NODEID=1; exec "$@"',
        "accelerate": 'printf "%s\\n" "$@"',
    }.items():
        (tmp_path / command).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / command).chmod(0o755)
    given = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_NNODES": "4",
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NODELIST": "n",
    }
    command = ["bash", "recipes/launch-rocm-slurm.sh", "tiny-eagle3", "--out", "runs/a b"]
    done = subprocess.run(command, env=given, cwd=RECIPES.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[0] == "launch"
    args = launch_command_parser().parse_args(words[1:])
    assert (args.num_machines, args.num_processes, args.machine_rank) == (4, 32, 1)
    assert (args.main_process_ip, args.main_process_port) == ("node-a", 22345)
    assert args.training_script == "draftsmith.train"
    assert args.training_script_args == ["tiny-eagle3", "--out", "runs/a b"]
