"""Run a checkpoint without a serving framework, for tests, ``atom-plugin check`` and ``atom-plugin bench``.

Greedy decoding of one batch over its own paged cache, up to a token count, without a scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from atom_core.batch import Batch, HostLengths, Pages, States
from atom_core.cache import (
    SHUFFLED,
    Cache,
    CacheSpec,
    KeyValueSpec,
    KVCacheView,
    LatentCacheView,
    LatentSpec,
    StateSpec,
    StateView,
)
from atom_core.checkpoint import Checkpoint, config_of
from atom_core.config import ModelConfig
from atom_core.kernels import kernel_set
from atom_core.kernels.select import Target
from atom_core.layers.parameters import ParameterLayer
from atom_core.loading import UNQUANTIZED, check_files, check_update
from atom_core.mixers.base import KernelAttention, RadixAttention, TokenMixer
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import load_model_class
from atom_core.quant import QuantConfig, read_quantization
from atom_core.runtime import Runtime
from atom_core.updates import ModelWeights
from atom_core.weights import unread_layers

logger = logging.getLogger(__name__)

#: Standard deviation of random weights, as at the start of training.
RANDOM_SPREAD = 0.02
#: Numbers of random FP8 memory that are drawn at once.
_PART = 1 << 26


def build_runtime(
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    kernels: Mapping[str, str] | None = None,
    target: Target | None = None,
    cache_dtype: torch.dtype | None = None,
    quant: QuantConfig = UNQUANTIZED,
    with_aiter: bool = True,
) -> Runtime:
    """A runtime of one rank whose attention takes its cache from the step.

    Args:
        device: where parameters go; the meta device lays a model out without memory.
        dtype: of weights and activations.
        max_model_len: the longest sequence.
        kernels: forced implementations by op, as in ``ATOM_KERNELS``.
        target: the device that kernels are chosen for; None: ``device``.
        cache_dtype: of the cache; None: ``dtype``.
        quant: of the linear layers.
        with_aiter: see :func:`atom_core.kernels.kernel_set`.
    """
    return Runtime(
        device=device,
        dtype=dtype,
        kernels=kernel_set(target or Target.of(device), kernels, with_aiter=with_aiter),
        bind=RadixAttention,
        max_model_len=max_model_len,
        cache_dtype=cache_dtype or dtype,
        quant=quant,
    )


def random_codes(name: str) -> tuple[int, int]:
    """The range of a packed tensor's bytes, its end excluded: any codes, and scales near 2^-8."""
    return (117, 122) if name.endswith(("_scale", "_scales")) else (0, 256)


def random_model(config: ModelConfig, runtime: Runtime, seed: int = 0) -> DecoderForCausalLM:
    """A model of random weights, ready to run: matrices and biases around 0, norms around 1."""
    model = load_model_class(config.architecture)(config, runtime)
    generator = torch.Generator(runtime.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            parameter.data.random_(*random_codes(name), generator=generator)
            continue
        centre = 1.0 if parameter.dim() == 1 and not name.endswith("bias") else 0.0
        values = torch.empty(parameter.shape, dtype=runtime.dtype, device=runtime.device)
        parameter.data.copy_(values.normal_(centre, RANDOM_SPREAD, generator=generator))
    finalize(model)
    return model


def mixers(model: torch.nn.Module) -> list[TokenMixer]:
    """The token mixers that run on our kernels, one a layer; a framework's own attention plans for itself."""
    return [module.mixer for module in model.modules() if isinstance(module, KernelAttention)]


def random_memory(
    shape: Sequence[int],
    dtype: torch.dtype,
    drawn_in: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Normal random values of any dtype; those of FP8 are drawn in 16 bits, in parts, so that these take little memory.

    Args:
        shape, dtype, device: of the tensor.
        drawn_in: what torch draws where it draws no numbers of ``dtype``.
        generator: of the device; None: torch's own.
    """
    values = torch.empty(shape, dtype=dtype, device=device)
    if dtype.itemsize > 1:
        return values.normal_(generator=generator)
    for part in torch.split(values, max(1, _PART * len(values) // values.numel())):
        part.copy_(torch.empty(part.shape, dtype=drawn_in, device=device).normal_(generator=generator))
    return values


def empty_caches(
    model: torch.nn.Module,
    runtime: Runtime,
    num_pages: int | Mapping[int | None, int],
    page_size: int,
    num_states: int = 0,
    *,
    random: bool = False,
) -> dict[int, Cache]:
    """Each layer's cache by its index: random values, or NaN, which reveals reads of unwritten elements.

    ``num_pages``: of each layer, or by the layer's window. ``num_states``: requests that have a state, in the slots
    from 1 on.
    """

    def pages(window: int | None) -> int:
        return num_pages if isinstance(num_pages, int) else num_pages[window]

    def memory(*shape: int, dtype: torch.dtype = runtime.cache_dtype) -> torch.Tensor:
        if not random:
            return torch.full(shape, float("nan"), dtype=dtype, device=runtime.device)
        return random_memory(shape, dtype, runtime.dtype, runtime.device)

    def cache(spec: CacheSpec) -> Cache:
        if isinstance(spec, StateSpec):
            each = zip(spec.shapes, spec.dtypes, strict=True)
            return StateView(tuple(memory(num_states + 1, *shape, dtype=dtype) for shape, dtype in each))
        if isinstance(spec, LatentSpec):
            return LatentCacheView(memory(pages(None), page_size, spec.row))
        assert isinstance(spec, KeyValueSpec)
        heads, dim = spec.num_kv_heads, spec.head_dim
        if spec.order == SHUFFLED:
            both = memory(pages(spec.window), 2, heads * page_size * dim)  # a page's keys, then its values
            return KVCacheView.of_shuffled(both[:, 0], both[:, 1], heads, page_size)
        return KVCacheView.of_packed(memory(pages(spec.window), heads, page_size, 2 * dim), dim)

    return {mixer.layer_index: cache(mixer.cache_spec) for mixer in mixers(model)}


def plan(model: torch.nn.Module, batch: Batch) -> Batch:
    """``batch`` with the plans of the model's mixers, one for all layers of a kind."""
    planners = {mixer.plan_key(): mixer for mixer in mixers(model)}
    return batch.with_plans({key: mixer.plan(batch) for key, mixer in planners.items() if key is not None})


def finalize(model: torch.nn.Module) -> None:
    """Convert every layer's loaded weights to the form that its kernel reads."""
    for module in model.modules():
        if isinstance(module, ParameterLayer):
            module.close_weights()


@dataclass(frozen=True)
class Step:
    """One step of the runner: the batch, and every layer's pages."""

    batch: Batch
    caches: Mapping[int, Cache]

    def lookup(self, mixer: TokenMixer) -> tuple[Batch, Cache]:
        """See :class:`atom_core.mixers.base.Step`."""
        return self.batch, self.caches[mixer.layer_index]


class Runner:
    """A model and its cache.

    Args:
        directory: a checkpoint directory with ``config.json`` and safetensors files.
        dtype: the dtype to run in.
        device: the device to run on.
        max_model_len: the longest sequence; None: the config's ``max_position_embeddings``.
        page_size: tokens a page.
        kernels: forced implementations by op.
        cache_dtype: the dtype of the cache; None: ``dtype``.
        quantization: quantise an unquantised checkpoint while it is loaded ("fp8").
        target: the device that kernels are chosen for; None: ``device``.
        with_aiter: see :func:`atom_core.kernels.kernel_set`.

    Raises:
        ValueError: the checkpoint is not supported.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        max_model_len: int | None = None,
        page_size: int = 16,
        kernels: Mapping[str, str] | None = None,
        cache_dtype: torch.dtype | None = None,
        quantization: str | None = None,
        target: Target | None = None,
        with_aiter: bool = True,
    ) -> None:
        self.directory = directory
        hf = config_of(directory)
        quant = read_quantization(hf, quantization)
        self.config = read_model_config(hf)
        check_files(self.config, directory, quant=quant)
        self.max_model_len = max_model_len or self.config.max_position
        device = device or torch.device("cpu")
        self.runtime = build_runtime(device, dtype, self.max_model_len, kernels, target, cache_dtype, quant, with_aiter)
        self.page_size = page_size
        self.model: DecoderForCausalLM = load_model_class(self.config.architecture)(self.config, self.runtime)
        self.weights = ModelWeights(self.model)
        self.weights.load(Checkpoint.open(directory).load(), str(directory))
        self.weights.close()
        if line := unread_layers(self.model, str(directory)):
            logger.warning(line)

    def reload(self, directory: Path) -> None:
        """Replace the weights by those of another checkpoint of the same model.

        Raises:
            ValueError: they do not fit; the old ones stay.
        """
        check_update(self.weights, self.config, directory, self.runtime.quant, self.directory)
        self.weights.update(Checkpoint.open(directory).load(), str(directory), whole=True, checked=True)

    def caches(self, num_requests: int) -> dict[int, Cache]:
        """Empty pages and states for ``num_requests`` sequences of full length, a layer each."""
        pages = num_requests * -(-self.max_model_len // self.page_size)
        return empty_caches(self.model, self.runtime, pages, self.page_size, num_requests)

    def batch(self, cached: Sequence[int], new: Sequence[int]) -> Batch:
        """The batch in which request ``r`` has ``cached[r]`` tokens in the cache and brings ``new[r]``."""
        per_request = -(-self.max_model_len // self.page_size)
        device = self.runtime.device
        slots = [
            request * per_request * self.page_size + position
            for request, (before, count) in enumerate(zip(cached, new, strict=True))
            for position in range(before, before + count)
        ]
        lengths = [before + count for before, count in zip(cached, new, strict=True)]
        starts = [0, *accumulate(new)]
        return Batch(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            pages=Pages(
                torch.arange(len(new) * per_request, dtype=torch.int32, device=device).view(len(new), -1),
                torch.tensor(slots, dtype=torch.int64, device=device),
            ),
            num_requests=len(new),
            num_tokens=sum(new),
            max_query_len=max(new),
            max_seq_len=max(lengths),
            states=States(torch.arange(1, len(new) + 1, dtype=torch.int32, device=device)[:, None]),
            host=HostLengths(starts, lengths),
        )

    @torch.inference_mode()
    def step(self, caches: Mapping[int, Cache], cached: Sequence[int], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run each request's new ``tokens`` after its ``cached`` ones: hidden states ``[T, hidden]``."""
        new = [len(row) for row in tokens]
        batch = plan(self.model, self.batch(cached, new))
        positions = [
            position for before, count in zip(cached, new, strict=True) for position in range(before, before + count)
        ]
        device = self.runtime.device
        hidden = self.model(
            torch.tensor([token for row in tokens for token in row], device=device),
            torch.tensor(positions, device=device),
            Step(batch, caches),
        )
        assert isinstance(hidden, torch.Tensor)
        return hidden

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits at every position of one sequence, ``[T, vocabulary]``."""
        return self.model.logits(self.step(self.caches(1), [0], [tokens]))

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """The ``num_tokens`` most likely tokens after each prompt.

        Raises:
            ValueError: a prompt is empty, or would grow past ``max_model_len``.
        """
        for prompt in prompts:
            if not 0 < len(prompt) <= self.max_model_len - num_tokens:
                raise ValueError(
                    f"A prompt has {len(prompt)} tokens; with {num_tokens} to generate and "
                    f"max_model_len={self.max_model_len}, it must have 1 to {self.max_model_len - num_tokens}."
                )
        caches = self.caches(len(prompts))
        cached = [0] * len(prompts)
        step_tokens: list[Sequence[int]] = list(prompts)
        results: list[list[int]] = [[] for _ in prompts]
        for _ in range(num_tokens):
            hidden = self.step(caches, cached, step_tokens)
            cached = [before + len(row) for before, row in zip(cached, step_tokens, strict=True)]
            last = torch.tensor([len(row) for row in step_tokens]).cumsum(0) - 1
            chosen = self.model.logits(hidden[last.to(hidden.device)]).argmax(-1).tolist()
            for result, token in zip(results, chosen, strict=True):
                result.append(token)
            step_tokens = [[token] for token in chosen]
        return results
