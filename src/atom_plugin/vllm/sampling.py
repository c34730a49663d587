"""Greedy requests in vLLM's newer model runner, which asks a model's own state for a sampler.

vLLM's sampler copies all logits to float32 where a request has a least length, and looks for the largest by programs of
1,024 logits each. A batch that takes the likeliest tokens alone, and whose logits nothing else changes, is served by
one op here. Any other goes to vLLM's own sampler, whose states and warm-up are kept as they are.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from atom_core.kernels.greedy_tokens import GREEDY_TOKENS, Barred, GreedyTokensKernel, GreedyTokensSpec

logger = logging.getLogger("vllm.atom_plugin")


class GreedySampler(Sampler):
    """``sampler``, but for batches of greedy requests; it shares all that ``sampler`` holds.

    Of least lengths vLLM's tables are read; whether a request needs anything else vLLM itself is asked, so what a
    later version may add is not missed.
    """

    def __init__(self, sampler: Sampler, kernel: GreedyTokensKernel) -> None:
        self.__dict__.update(sampler.__dict__)
        self.kernel = kernel
        self.bias = _bias_of(sampler)
        self.greedy = np.zeros_like(self.needs_logits_processing)

    def add_request(self, req_idx: int, *args: Any) -> None:
        """See vLLM; the last argument is the request's parameters."""
        *others, params = args
        free = params
        if params.min_tokens:
            free = copy.copy(params)
            free.min_tokens = 0
        # Once each: what counts a request's tokens for penalties would count them twice.
        super().add_request(req_idx, *others, free)
        changed = self.needs_logits_processing[req_idx]
        if free is not params:
            self.bias.add_request(req_idx, *args)
            self.needs_logits_processing[req_idx] |= self.bias.use_logit_bias[req_idx]
            # Where a grammar leaves a request nothing but its end, vLLM lets it end before its least length.
            changed = changed or params.structured_outputs is not None
        self.greedy[req_idx] = self.sampling_states.temperature.np[req_idx] == 0.0 and not changed

    def sample(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        *args: Any,
        return_logprobs: bool = False,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See vLLM: tokens, and the logits that they are of."""
        if return_logprobs or self.return_sampling_mask or not self.greedy[idx_mapping_np].all():
            rows = (logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos)
            sampled: tuple[torch.Tensor, torch.Tensor] = super().sample(
                *rows, *args, return_logprobs=return_logprobs, **options
            )
            return sampled
        barred = None
        if self.bias.num_stop_token_ids.np[idx_mapping_np].any():
            barred = self.barred()
        return self.kernel(logits, expanded_idx_mapping, pos, barred), logits

    def barred(self) -> Barred:
        """vLLM's tables of what requests must not take before they have their least length."""
        bias = self.bias
        return Barred(bias.min_lens.gpu, bias.num_stop_token_ids.gpu, bias.stop_token_ids.gpu)

    def warm_up(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compile the kernel, which no batch of vLLM's warm-up reaches: its requests have everything at once.

        Versions of vLLM number requests by other integers.
        """
        logits = torch.zeros(2, vocab_size, dtype=dtype, device=device)
        positions = torch.zeros(2, dtype=torch.int64, device=device)
        self.kernel(logits, positions, positions)
        for requests in (positions, positions.int()):
            self.kernel(logits, requests, positions, self.barred())


def _bias_of(sampler: Sampler) -> LogitBiasState:
    """Where ``sampler`` keeps least lengths; vLLM 0.30 has no list of processors."""
    states = (*getattr(sampler, "logits_processors", ()), *vars(sampler).values())
    return next(it for it in states if isinstance(it, LogitBiasState))


class AtomModelState(DefaultModelState):
    """What vLLM has for a model that has no state of its own, with :class:`GreedySampler`."""

    def custom_sampler(self, sampler: Sampler) -> tuple[Sampler, None] | None:
        """See vLLM; drafts are verified, texts watermarked, and users' own processors asked by vLLM's own."""
        processors = getattr(sampler, "logits_processors", ())
        if not all(type(it).__module__.startswith("vllm.") for it in processors):
            return None
        if type(sampler) is not Sampler or self.vllm_config.speculative_config is not None:
            return None
        spec, runtime = GreedyTokensSpec(self.model_config.get_vocab_size()), self.model.runtime
        greedy = GreedySampler(sampler, runtime.kernels.select(GREEDY_TOKENS, spec))
        if runtime.tensor_parallel.rank == 0:
            chosen = runtime.kernels.chosen(GREEDY_TOKENS, spec)
            logger.info("Batches of greedy requests are sampled by %s: %s", GREEDY_TOKENS.name, chosen)
        greedy.warm_up(spec.vocab_size, runtime.head_dtype or runtime.dtype, self.device)
        return greedy, None
