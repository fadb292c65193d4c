"""vLLM's hidden-states connector without a GPU: it copies and writes in place, where vLLM's own pins memory and waits for
a CUDA stream. Loaded by the server of test_vllm_capture.py, in vLLM's environment."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock


class Done:
    """An event that has already happened."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuHiddenStatesConnector(stock.ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: stock.PendingSave) -> None:
        first = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (first + torch.arange(self._block_size)).flatten()
        states = stock.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}, pending.filename)
        self._req_copy_events[pending.req_id] = Done()
        held = self._lock_fds.pop(pending.req_id, None)
        if held is not None:
            os.close(held)  # the client waits for this
