"""vLLM's batch in the core's form, with the plans of the mixers that read it."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from atom_core.batch import Batch, HostLengths
from atom_core.mixers.base import TokenMixer


class BatchBuilder:
    """What all our metadata builders have in common; each is one of vLLM's builders as well."""

    reorder_batch_threshold: int | None

    def take_mixers(self, layer_names: list[str], vllm_config: VllmConfig) -> None:
        """Plan for the mixers of these layers."""
        layers = vllm_config.compilation_config.static_forward_context
        mixers: list[TokenMixer] = [layers[name].mixer for name in layer_names]
        self.planners = {key: mixer for mixer in mixers if (key := mixer.plan_key()) is not None}
        self.gives_host_lengths = any(mixer.plans_by_host_lengths for mixer in mixers)

    @property
    def decode_threshold(self) -> int:
        """How many tokens a request that decodes may bring."""
        return self.reorder_batch_threshold or 1

    def host_lengths(self, common: CommonAttentionMetadata) -> HostLengths | None:
        """None where nothing is planned by them, and where all requests decode, as in captured graphs."""
        lengths = common.seq_lens_cpu_upper_bound if self.gives_host_lengths else None
        if lengths is None or common.max_query_len <= self.decode_threshold:
            return None
        count = common.num_reqs
        return HostLengths(common.query_start_loc_cpu[: count + 1].tolist(), lengths[:count].tolist())

    def batch(self, common: CommonAttentionMetadata, **cached: Any) -> Batch:
        """The step with ``cached``, which says where pages or states lie."""
        decodes, _, decode_tokens, _ = split_decodes_and_prefills(common, self.decode_threshold)
        batch = Batch(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            num_requests=common.num_reqs,
            num_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_decode_requests=decodes,
            num_decode_tokens=decode_tokens,
            host=self.host_lengths(common),
            **cached,
        )
        return self.planned(batch)

    def planned(self, batch: Batch) -> Batch:
        """The step with the mixers' plans."""
        if not self.planners:
            return batch
        return batch.with_plans({key: mixer.plan(batch) for key, mixer in self.planners.items()})
