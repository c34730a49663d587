"""Greedy sampling in vLLM's model runner V2, which asks the model state for a sampler.

vLLM's sampler copies all logits to float32 if a request has ``min_tokens``, and finds the argmax in blocks of 1,024
logits. Here one op samples a batch whose requests are all greedy and whose logits are not modified otherwise. vLLM's
own, with its states and warm-up, samples all other batches. A step in which all requests decode, want nothing but
tokens and have logits that nothing modifies, also with a temperature of 1, takes a short way around what else vLLM's
sampler does, which takes the host longer than sampling.
"""

from __future__ import annotations

import copy
import inspect
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from atom_core.kernels.greedy_tokens import GREEDY_TOKENS, Barred, GreedyTokensKernel, GreedyTokensSpec

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

logger = logging.getLogger("vllm.atom_plugin")


class GreedySampler(Sampler):
    """``sampler`` with a faster path for batches of greedy requests. It shares all state of ``sampler``.

    ``min_tokens`` is read from vLLM's tables. vLLM itself says whether a request's logits are modified in another way,
    so a modification that a later version adds is not missed.
    """

    def __init__(self, sampler: Sampler, kernel: GreedyTokensKernel) -> None:
        self.__dict__.update(sampler.__dict__)
        self.kernel = kernel
        self.bias = _bias_of(sampler)
        self.greedy = np.zeros_like(self.needs_logits_processing)
        #: Requests that want nothing but tokens, of logits as they are: the likeliest, or one by its probability.
        self.plain = np.zeros_like(self.needs_logits_processing)
        #: Whether a request came after the last :meth:`apply_staged_writes`.
        self.has_new = True
        #: int32 ``[max_num_reqs]``, ones and zeros: how many tokens a request that decodes has sampled and rejected.
        #: None until the first step that needs them.
        self.counts: tuple[torch.Tensor, torch.Tensor] | None = None
        names = list(inspect.signature(sampler.sample).parameters)
        #: What vLLM's :meth:`sample` takes behind positions, of which it reads nothing where no logits are modified.
        self.unread = (None,) * (names.index("return_logprobs") - names.index("pos") - 1)

    def add_request(self, req_idx: int, *args: Any) -> None:
        """See vLLM; the last argument is the request's ``SamplingParams``."""
        self.has_new = True
        *others, params = args
        free = params
        if params.min_tokens:
            free = copy.copy(params)
            free.min_tokens = 0
        # Each state may be added only once: penalties would count the request's tokens twice.
        super().add_request(req_idx, *others, free)
        changed = self.needs_logits_processing[req_idx]
        if free is not params:
            self.bias.add_request(req_idx, *args)
            self.needs_logits_processing[req_idx] |= self.bias.use_logit_bias[req_idx]
            # If a grammar allows only the end of the text, vLLM lets a request end before its min_tokens.
            changed = changed or params.structured_outputs is not None
        self.greedy[req_idx] = self.sampling_states.temperature.np[req_idx] == 0.0 and not changed
        asks_more = params.min_tokens or self.get_logprobs_dims(np.array([req_idx])) is not None
        self.plain[req_idx] = not (changed or asks_more)

    def apply_staged_writes(self) -> None:
        """See vLLM, which copies a dozen tables in each step; only new requests change them.

        On an H200 the copies took a tenth of the host's time for a step of one request.
        """
        if self.has_new:
            super().apply_staged_writes()
            self.has_new = False

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        """See vLLM.

        Where no request is in its prompt, each has one token sampled and none rejected, which vLLM has a kernel find.
        """
        requests = input_batch.idx_mapping_np
        asks_more = self.compute_nans or self.return_sampling_mask or self.trace_replay_state is not None
        if asks_more or input_batch.has_prefill or not self.plain[requests].all():
            return super().__call__(logits, input_batch)
        if self.counts is None:
            lengths, most = input_batch.seq_lens, len(self.plain)
            self.counts = lengths.new_ones(most), lengths.new_zeros(most)
        sampled, rejected = (it[: input_batch.num_reqs] for it in self.counts)
        tokens = self.kernel(logits) if self.greedy[requests].all() else self._drawn(logits, input_batch)
        return SamplerOutput(
            sampled_token_ids=tokens.view(-1, 1),
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=sampled,
            num_rejected=rejected,
        )

    def _drawn(self, logits: torch.Tensor, input_batch: InputBatch) -> torch.Tensor:
        """vLLM's choice, by each request's seed, where no logits are modified: so nothing reads the input's tokens."""
        rows = input_batch.expanded_idx_mapping, input_batch.idx_mapping, input_batch.idx_mapping_np
        pos = input_batch.positions[input_batch.logits_indices]
        tokens: torch.Tensor = super().sample(logits, *rows, pos, *self.unread)[0]
        return tokens

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
        """See vLLM; returns the tokens and the logits."""
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
        """vLLM's tables of the stop tokens that requests must not sample before their ``min_tokens``."""
        bias = self.bias
        return Barred(bias.min_lens.gpu, bias.num_stop_token_ids.gpu, bias.stop_token_ids.gpu)

    def warm_up(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compile the kernel. vLLM's warm-up does not reach it, because its requests use all sampling features.

        The dtype of request indices depends on the version of vLLM.
        """
        logits = torch.zeros(2, vocab_size, dtype=dtype, device=device)
        positions = torch.zeros(2, dtype=torch.int64, device=device)
        self.kernel(logits)
        for requests in (positions, positions.int()):
            self.kernel(logits, requests, positions, self.barred())


def _bias_of(sampler: Sampler) -> LogitBiasState:
    """The state of ``sampler`` with ``min_tokens``; vLLM 0.30 has no list of processors."""
    states = (*getattr(sampler, "logits_processors", ()), *vars(sampler).values())
    return next(it for it in states if isinstance(it, LogitBiasState))


class AtomModelState(DefaultModelState):
    """vLLM's default model state, with :class:`GreedySampler`."""

    def custom_sampler(self, sampler: Sampler) -> tuple[Sampler, None] | None:
        """See vLLM. Speculation, watermarks and users' own logits processors use vLLM's own sampler."""
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
