"""An engine whose weights are changed while it runs: what runs in a process of `test_updates.py`.

It begins with the old version, whose fresh answers are known then. Each call goes to the new version or back: back,
answers must be the fresh ones, and there those of every other call. Log probabilities say which weights a model has,
bit for bit.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.integration.scripts import run_given

PROMPTS = ["12 + 5 =", "The capital of France is the city of Paris, and", "b c d e"]
#: Tensors of a trainer's bucket: few enough that layers come in several.
BUCKET = 11


def _tensors(folder: str) -> list[tuple[str, Any]]:
    from safetensors.torch import load_file

    return [it for path in sorted(Path(folder).glob("*.safetensors")) for it in load_file(path).items()]


def _buckets(folder: str, size: int = BUCKET) -> list[list[tuple[str, Any]]]:
    tensors = _tensors(folder)
    return [tensors[first : first + size] for first in range(0, len(tensors), size)]


def _flattened(bucket: list[tuple[str, Any]]) -> tuple[dict[str, Any], Any]:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    flat = FlattenedTensorBucket(named_tensors=bucket)
    return {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}, flat


class Updating:
    """One engine, and the calls; each asserts that SGLang reports success, but for :meth:`refused`."""

    def __init__(self, folder: str, options: Mapping[str, Any]) -> None:
        import sglang

        pool = {"max_total_tokens": 16384, "mem_fraction_static": 0.6}
        self.engine = sglang.Engine(model_path=folder, **{"device": "cpu", "log_level": "info", **pool, **options})
        self.ranks = options.get("tp_size", 1)
        self.group: Any = None

    def answers(self) -> list[Any]:
        """What says which weights it has; one prompt at a time, for batches differ in last bits."""
        self.engine.flush_cache()
        sampling = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
        wanted = {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0}
        found = [self.engine.generate(prompt, sampling, **wanted) for prompt in PROMPTS]
        end = time.monotonic() + 10
        while not self.engine.flush_cache().success:  # it may not know yet that all have been answered
            assert time.monotonic() < end
        kept = ("output_token_logprobs", "output_top_logprobs", "input_token_logprobs", "spec_num_correct_drafts")
        return [[it["output_ids"], *(it["meta_info"].get(name) for name in kept)] for it in found]

    def _done(self, result: tuple[Any, ...]) -> None:
        assert result[0], result[1]

    def disk(self, folder: str) -> None:
        """`update_weights_from_disk`."""
        self._done(self.engine.update_weights_from_disk(folder))

    def one_list(self, folder: str) -> None:
        """`update_weights_from_tensor`, once."""
        self._session(lambda: self._done(self.engine.update_weights_from_tensor(_tensors(folder))))

    def buckets(self, folder: str) -> None:
        """`update_weights_from_tensor`, several times."""

        def send() -> None:
            for bucket in _buckets(folder):
                self._done(self.engine.update_weights_from_tensor(bucket))

        self._session(send)

    def flattened(self, folder: str) -> None:
        """The same with buckets of one tensor each."""
        from sglang.srt.utils import MultiprocessingSerializer

        def send() -> None:
            for bucket in _buckets(folder):
                payload = [MultiprocessingSerializer.serialize(_flattened(bucket)[0]) for _ in range(self.ranks)]
                self._done(self.engine.update_weights_from_tensor(payload, load_format="flattened_bucket"))

        self._session(send)

    def distributed(self, folder: str) -> None:
        """`update_weights_from_distributed`: this process is the trainer."""
        import torch
        from sglang.srt.utils import init_custom_process_group

        if self.group is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            world, backend = 1 + self.ranks, self._trainers_backend()
            made: list[Any] = []
            join = threading.Thread(
                target=lambda: made.append(
                    init_custom_process_group(
                        backend, f"tcp://127.0.0.1:{port}", world_size=world, rank=0, group_name="trainer"
                    )
                )
            )
            join.start()
            self._done(self.engine.init_weights_update_group("127.0.0.1", port, 1, world, "trainer", backend))
            join.join()
            (self.group,) = made

        def send() -> None:
            for bucket in _buckets(folder):
                _, flat = _flattened(bucket)
                tensor = flat.get_flattened_tensor()
                if self._trainers_backend() == "nccl":
                    tensor = tensor.to(f"cuda:{self.ranks}")
                sent = threading.Thread(
                    target=lambda tensor=tensor: torch.distributed.broadcast(tensor, src=0, group=self.group)
                )
                sent.start()
                names = [name for name, _ in bucket]
                dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
                shapes = [list(tensor.shape) for _, tensor in bucket]
                self._done(
                    self.engine.update_weights_from_distributed(
                        names, dtypes, shapes, "trainer", load_format="flattened_bucket"
                    )
                )
                sent.join()

        self._session(send)

    def wiped(self, folder: str) -> None:
        """`check_weights`, as far as SGLang has it on a CPU: numbers that it wiped out come again."""
        self._check("reset_tensors")
        self.buckets(folder)

    def compared(self, folder: str) -> None:
        """`check_weights`: an update from the same folder once more leaves each number as it was."""
        self.disk(folder)
        self._check("snapshot")
        self._check("reset_tensors")
        self.buckets(folder)
        self._check("compare")

    def released(self, folder: str) -> None:
        """`release_memory_occupation` and `resume_memory_occupation`, with an update behind them."""
        self.engine.release_memory_occupation()
        self.engine.resume_memory_occupation()
        self.disk(folder)

    def _check(self, action: str) -> None:
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        tokenizer = self.engine.tokenizer_manager
        self._done(self.engine.loop.run_until_complete(tokenizer.check_weights(CheckWeightsReqInput(action=action))))

    def _trainers_backend(self) -> str:
        """NCCL, where the trainer has a GPU that no rank has."""
        import torch

        return "nccl" if torch.cuda.device_count() > self.ranks else "gloo"

    def _session(self, send: Callable[[], None]) -> None:
        self._done(self.engine.begin_weight_update())
        send()
        self._done(self.engine.end_weight_update())

    def refused(self, folder: str) -> str:
        """What is said of a bad folder."""
        updated, message, *_ = self.engine.update_weights_from_disk(folder)
        return "" if updated else message

    def refused_bucket(self, folder: str, *, first: bool) -> str:
        """What is said of a bucket that does not fit, with which an update begins or goes on."""
        good, bad, *_ = _buckets(folder)
        bad[0] = (bad[0][0], bad[0][1][:-1].contiguous())
        self._done(self.engine.begin_weight_update())
        if not first:
            self._done(self.engine.update_weights_from_tensor(good))
        updated, message = self.engine.update_weights_from_tensor(bad)
        self._done(self.engine.end_weight_update())
        return "" if updated else message


CALLS = ("disk", "one_list", "buckets", "flattened", "distributed", "wiped")
#: What SGLang has on a GPU alone.
GPU_CALLS = (*CALLS, "compared", "released")


def run_case(
    old: str,
    new: str,
    bad: dict[str, str],
    options: dict[str, Any],
    infinite: str | None = None,
    no_drafts: str | None = None,
) -> dict[str, Any]:
    """Every call on one engine that began with ``old``.

    ``infinite`` is a folder that is found bad while it is read, ``no_drafts`` is ``new`` without the layer that drafts.
    """
    it = Updating(old, options)
    try:
        of_old = it.answers()
        it.disk(new)
        of_new = it.answers()
        found: dict[str, Any] = {"differ": of_new != of_old}
        for call in GPU_CALLS if options.get("device") == "cuda" else CALLS:
            getattr(it, call)(old)
            found[call] = [it.answers() == of_old]
            getattr(it, call)(new)
            found[call].append(it.answers() == of_new)
        found["refused"] = {fault: it.refused(folder) for fault, folder in bad.items()}
        found["after refusals"] = it.answers() == of_new
        if no_drafts is not None:
            found["without drafts"] = [it.refused(no_drafts), it.answers() == of_new]
        if infinite is not None:
            it.disk(new)
            found["broken off"] = [it.refused(infinite), it.answers() == of_new]
        found["refused first"] = it.refused_bucket(old, first=True)
        found["after a refused first bucket"] = it.answers() == of_new
        found["refused later"] = it.refused_bucket(old, first=False)
        it.buckets(old)
        found["after a refused later bucket"] = it.answers() == of_old
        prefixed = "model.language_model.norm.weight"
        named = [it.engine.get_weights_by_name(name, 3) for name in (prefixed, "model.norm.weight")]
        found["by its name in a wrapper"] = named[0] == named[1] is not None
        names = [name for name, _ in _tensors(old) if name.endswith(("proj.weight", "norm.weight"))][:12]
        found["by name"] = {name: it.engine.get_weights_by_name(name, 3) for name in names}
    finally:
        it.engine.shutdown()
    return found


if __name__ == "__main__":
    run_given(run_case)
