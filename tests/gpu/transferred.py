"""A trainer beside a vLLM engine that is sent weights by vLLM's own weight transfers: what runs in a process.

    python transferred.py BACKEND OLD NEW OPTIONS FOUND
    python transferred.py fresh NEW NEW OPTIONS FOUND

BACKEND is ipc or nccl; by nccl the trainer's tensors are on a GPU behind those of the engine's ranks. FOUND is a file
to write JSON to: what the engine answers at first, with the new weights, with the old ones once they were sent, and
with the new ones again. Of a fresh engine there is but the first.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from tests.integration.vllm.updated import PROMPTS, _tensors


class Folder(WeightSource):
    """The tensors of a checkpoint, and later of another one of the same model, on a GPU."""

    def __init__(self, folder: str, device: str) -> None:
        self.device = device
        self.turn_to(folder)

    def turn_to(self, folder: str) -> None:
        """What is sent from now on."""
        self.tensors = {name: tensor.to(self.device) for name, tensor in _tensors(folder)}

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes and shapes."""
        return [ParamMeta(name=name, dtype=it.dtype, shape=tuple(it.shape)) for name, it in self.tensors.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each."""
        return iter(self.tensors.items())


class Client:
    """An engine of this process, as a trainer calls it."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Both ends meet."""
        self.llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def start_weight_update(self) -> None:
        """Once an update."""
        self.llm.collective_rpc("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Once or more often."""
        self.llm.collective_rpc("update_weights", kwargs={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Once an update."""
        self.llm.collective_rpc("finish_weight_update")


def _trainer(backend: str, llm: LLM, source: Folder, ranks: int) -> Any:
    client = Client(llm)
    if backend == "ipc":
        return IPCTrainerWeightTransferEngine.trainer_init(IPCTrainerInitInfo(rank=0), client=client, source=source)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    init = NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=port, world_size=1 + ranks)
    trainer = NCCLTrainerWeightTransferEngine.trainer_init(init, client=client, source=source)
    # vLLM goes on without a word, and sends nothing, where NCCL lacks one of the functions that it wants.
    assert not trainer.model_update_group.disabled, "vLLM 0.33 sends weights by NCCL 2.29.7 or newer"
    return trainer


def _answers(llm: LLM) -> list[Any]:
    """One prompt at a time: batches differ in last bits, and who asks does not say which prompts share a step."""
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5)
    outputs = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0] for prompt in PROMPTS]
    return [
        (list(it.token_ids), [sorted((token, found.logprob) for token, found in at.items()) for at in it.logprobs])
        for it in outputs
    ]


def main() -> None:
    """Send the new weights, the old and the new once more."""
    backend, old, new, given, wanted = sys.argv[1:]
    options = json.loads(given)
    shape = {"kv_cache_memory_bytes": 64 * 2**20, "max_model_len": 256, "enable_prefix_caching": False}
    transfer = {} if backend == "fresh" else {"weight_transfer_config": {"backend": backend}}
    llm = LLM(old, **{"model_impl": "atom", **shape, **transfer, **options})
    found = [_answers(llm)]
    if backend != "fresh":
        ranks = options.get("tensor_parallel_size", 1)
        device = f"cuda:{ranks if backend == 'nccl' else 0}"
        torch.cuda.set_device(device)
        source = Folder(new, device)
        trainer = _trainer(backend, llm, source, ranks)
        for folder in (new, old, new):
            source.turn_to(folder)
            trainer.send_weights()
            found.append(_answers(llm))
    Path(wanted).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
