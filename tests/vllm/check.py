"""Run drafts in a real vLLM and report what it saw: JSON in, JSON out, nothing of draftsmith.

    VENV/bin/python tests/vllm/check.py CASES.json RESULTS.json [--v2]

--v2 runs the newer model runner through Triton's interpreter, because there is no Triton for CPUs: slow, and no setting
that vLLM supports, but the only one here for gated delta layers and for several MTP modules.

CASES.json is a list of cases, all of them run in this one process (importing vLLM costs more than a case):
    {"name": "...", "target": DIR, "draft": DIR or null (or "target": its own MTP module, with method "mtp"), "method": "eagle3", "num_speculative_tokens": 3,
     "prompts": [[ids], ...], "max_tokens": 40, "dtype": "float32", "max_model_len": 256, "native_rope": true or absent}
RESULTS.json is a list of the same length and order:
    ids: the new tokens of each prompt (greedy, end-of-text ignored)
    rounds: per prompt [[num_proposed, num_accepted], ...], one pair a verification, in order
    num_drafts, accepted_per_position: vLLM's own counters over all prompts
    filled, shared, unfilled: parameters of the draft that the checkpoint filled, that are the target's, that nothing
        filled (vLLM says nothing about those and runs on uninitialised memory)
    error: what was raised instead, or null

vLLM keeps proposing num_speculative_tokens when fewer tokens are still wanted, and counts what the target accepted
before the token limit cuts the text. So the last round of a prompt is counted like every other one.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where the two wrappers below are seen
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def watch_loading(seen: dict) -> None:
    """Note which parameters of the draft no tensor of its checkpoint filled.

    The top-level draft module is loaded by AutoWeightsLoader, which returns the names it filled; vLLM drops them. A
    name counts as filled when only a part came (q_proj of qkv_proj), so every float is NaN before and looked at after.
    """
    import torch
    from vllm.model_executor.models.utils import AutoWeightsLoader

    load_weights = AutoWeightsLoader.load_weights

    @torch.no_grad()
    def counted(self, *args, **kwargs):
        module, kind = self.module, type(self.module).__name__
        is_draft = any(word in kind for word in ("Eagle3", "DFlash", "DSpark", "Gemma4MTP")) and hasattr(
            module, "lm_head"
        )
        floats = {n: p for n, p in module.named_parameters() if p.is_floating_point()} if is_draft else {}
        for parameter in floats.values():
            parameter.fill_(float("nan"))
        filled = set(load_weights(self, *args, **kwargs))
        if is_draft:
            names = {name for name, _ in module.named_parameters()}
            holes = {name for name, parameter in floats.items() if parameter.isnan().any()}
            own = {
                "embed_tokens": getattr(module, "has_own_embed_tokens", False),
                "lm_head": getattr(module, "has_own_lm_head", False),
            }
            missing = sorted(names - filled | holes)
            shared = [name for name in missing if any(part in name and not mine for part, mine in own.items())]
            seen.update(filled=sorted(names - set(missing)), shared=shared)
            seen["unfilled"] = [name for name in missing if name not in shared and "mask_embedding" not in name]
        return filled

    AutoWeightsLoader.load_weights = counted


def watch_rounds(rounds: list) -> None:
    """Note (request id, proposed, accepted) of every verification, where the scheduler counts them."""
    from vllm.v1.core.sched.scheduler import Scheduler

    count = Scheduler.make_spec_decoding_stats

    def counted(self, stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id):
        if num_draft_tokens:
            rounds.append((request_id, num_draft_tokens, num_accepted_tokens))
        return count(self, stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id)

    Scheduler.make_spec_decoding_stats = counted


STAND_IN = """
import importlib.abc, importlib.machinery, sys

class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

class Nothing(metaclass=Anything):
    pass

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        inside = name.startswith("torchvision.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inside else None

    def exec_module(self, module):
        module.__getattr__ = __getattr__

sys.meta_path.insert(0, Finder())
"""


def stand_in_for_torchvision(folder: Path) -> None:
    """Qwen3.5's class imports torchvision for pictures, which no test shows it: give it a package that is empty.

    Written to disk because vLLM looks at model classes in a process of its own.
    """
    import importlib.util

    if importlib.util.find_spec("torchvision") is not None:
        return
    (folder / "torchvision").mkdir(parents=True, exist_ok=True)
    (folder / "torchvision" / "__init__.py").write_text(STAND_IN)
    about = folder / "torchvision-0.28.0.dist-info" / "METADATA"  # transformers asks for the version
    about.parent.mkdir(exist_ok=True)
    about.write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path.insert(0, str(folder))


def counters(llm) -> dict:
    """vLLM's speculation counters, cumulative over the process: {name: number or list}."""
    found = {}
    for metric in llm.get_metrics():
        if "spec_decode_" in metric.name:
            found[metric.name.split("spec_decode_")[1]] = metric.values if hasattr(metric, "values") else metric.value
    return found


def speculation(case: dict) -> dict | None:
    if case["draft"] is None:
        return None
    wanted = {key: case[key] for key in ("method", "num_speculative_tokens")}
    return wanted if case["draft"] == "target" else {**wanted, "model": case["draft"]}


def interpret_triton() -> None:
    """Let vLLM's second runner start on a CPU: it asks whether Triton has an active driver, then interprets kernels."""
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    import triton.backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=Driver)


def run(case: dict, seen: dict, rounds: list) -> dict:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if case.get("native_rope"):
        # the CPU kernel of 0.32 turns a strided slice wrongly, and latent attention (DeepSeek) gives it one; stays for
        # the cases behind this one
        RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    seen.clear()
    rounds.clear()
    result: dict = {"name": case["name"], "error": None}
    started = time.perf_counter()
    llm = None
    try:
        llm = LLM(
            model=case["target"],
            speculative_config=speculation(case),
            dtype=case.get("dtype", "float32"),
            max_model_len=case.get("max_model_len", 256),
            max_num_seqs=max(4, len(case["prompts"])),
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=False,
            seed=0,
        )
        before = counters(llm) if case["draft"] else {}
        sampling = SamplingParams(temperature=0.0, max_tokens=case["max_tokens"], ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in case["prompts"]]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        result["ids"] = [list(output.outputs[0].token_ids) for output in outputs]
        if case["draft"]:
            after = counters(llm)
            zeros = [0] * case["num_speculative_tokens"]
            positions = zip(after["num_accepted_tokens_per_pos"], before.get("num_accepted_tokens_per_pos") or zeros)
            result["accepted_per_position"] = [new - old for new, old in positions]
            result["num_drafts"] = after["num_drafts"] - before.get("num_drafts", 0)
            # the engine appends a random part to the request id that the caller sees
            result["rounds"] = [
                [[num, accepted] for name, num, accepted in rounds if name.split("-")[0] == output.request_id]
                for output in outputs
            ]
            result.update(seen)
    except Exception as problem:
        result["error"] = f"{type(problem).__name__}: {problem}"
        result.update(seen)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    result["seconds"] = round(time.perf_counter() - started, 1)
    return result


def main() -> None:
    cases_path, results_path = map(Path, sys.argv[1:3])
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if "--v2" in sys.argv:
        interpret_triton()
    stand_in_for_torchvision(results_path.parent / "stand-in")
    cases = json.loads(cases_path.read_text())
    seen: dict = {}
    rounds: list = []
    watch_loading(seen)
    watch_rounds(rounds)
    results = []
    for case in cases:
        results.append(run(case, seen, rounds))
        print(f"{case['name']}: {results[-1]['error'] or 'ran'}, {results[-1]['seconds']} s", flush=True)
        results_path.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
