"""What kernels are compiled anew for changes where their tiles do, and is what launches take."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from atom_core.batch import BatchShape
from atom_core.kernels.aiter_library import LooksUpTokens
from atom_core.kernels.attention import PagedAttentionSpec
from atom_core.kernels.compile_keys import attention_keys, specialized
from atom_core.kernels.experts import EXPERTS, ExpertsSpec
from atom_core.kernels.fp8_block_linear import FP8_BLOCK_LINEAR, Fp8BlockLinearSpec
from atom_core.kernels.gated_delta_net import GatedDeltaNetSpec
from atom_core.kernels.linear import LINEAR, LinearSpec
from atom_core.kernels.mxfp4_linear import MXFP4_LINEAR, Mxfp4LinearSpec
from atom_core.kernels.select import Target

CPU, HOPPER, MI300 = torch.device("cpu"), Target("cuda", "sm90"), Target("rocm", "gfx942")


def built(op, spec, target=HOPPER):
    """Triton's kernel of a call."""
    return next(it for it in op.implementations if it.name == "triton").build(spec, target)


def changes(kernel, most=1100):
    """Numbers of tokens from which the keys of a prompt are others than those of one token less."""
    keys = [list(kernel.compile_keys(BatchShape((tokens,), 4096), CPU)) for tokens in range(1, most)]
    return [at + 2 for at, (one, other) in enumerate(pairwise(keys)) if one != other]


def test_products_change_with_their_tiles():
    assert changes(built(LINEAR, LinearSpec(4096, 4096, False, torch.bfloat16))) == [2, 17]
    spec = Fp8BlockLinearSpec(4096, 4096, False, torch.bfloat16)
    few = [at for at in changes(built(FP8_BLOCK_LINEAR, spec)) if at <= 65 or at in (129, 513)]
    assert few == [2, 17, 33, 65, 129, 513]
    spec = Mxfp4LinearSpec(4096, 4096, False, False, torch.bfloat16)
    assert changes(built(MXFP4_LINEAR, spec)) == [17, 33, 65, 129, 513]
    assert changes(built(MXFP4_LINEAR, spec, MI300)) == [17, 33, 65, 129]


def test_a_head_goes_by_requests():
    head = built(LINEAR, LinearSpec(4096, 4096, False, torch.bfloat16, few_rows=True))
    assert not changes(head)
    assert len({*head.compile_keys(BatchShape((1,), 64), CPU), *head.compile_keys(BatchShape((1, 1), 64), CPU)}) == 2


def test_experts_go_by_tokens_of_all_data_parallel_ranks():
    spec = ExpertsSpec(0, 128, 2048, 768, 8, "silu", False, torch.bfloat16, total=128)
    kernel = built(EXPERTS, spec)
    one = BatchShape((34,), 4096)
    assert list(kernel.compile_keys(one, CPU)) == list(kernel.compile_keys(BatchShape((17,), 4096, 0, 2), CPU))
    assert list(kernel.compile_keys(one, CPU)) != list(kernel.compile_keys(replace(one, data_parallel_size=2), CPU))


@pytest.mark.parametrize(("value", "key"), [(1, (True, False)), (7, (False, False)), (32, (False, True))])
def test_an_integer_is_compiled_anew_for_one_and_for_multiples_of_sixteen(value, key):
    assert specialized(value) == key


def test_a_kernel_of_aiters_has_a_key_for_each_power_of_two():
    assert changes(LooksUpTokens(), 40) == [2, 3, 5, 9, 17, 33]


def test_an_attention_kernel_that_states_nothing_has_one_key_of_its_own():
    one, other = object(), object()
    shape = BatchShape((1,), 64)
    assert attention_keys(one, shape, CPU) == attention_keys(one, BatchShape((9,), 99), CPU)
    assert attention_keys(one, shape, CPU) != attention_keys(other, shape, CPU)


def test_attention_of_few_queries_changes_where_keys_are_shared_out():
    from atom_core.kernels.attention.triton_kernel import TritonAttention

    spec = PagedAttentionSpec(8, 2, 128, 1.0, torch.bfloat16, torch.bfloat16)
    kernel = TritonAttention(spec, nvidia=True, overlap=True)
    keys = {
        (new, length): attention_keys(kernel, BatchShape((new,), length, 1), CPU)[0]
        for new in (1, 4, 5)
        for length in (64, 65, 4096)
    }
    assert keys[1, 64] == keys[4, 64] != keys[4, 65] == keys[1, 4096]
    assert keys[5, 64] == keys[5, 4096] not in (keys[1, 64], keys[1, 4096])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prompts_on_hopper_go_by_their_tile(monkeypatch, head_dim):
    from atom_core.kernels.attention import hopper, triton_kernel

    monkeypatch.setattr(hopper, "why_no_gluon", lambda: None)
    for module in (hopper, triton_kernel):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    spec = PagedAttentionSpec(16, 2, head_dim, 1.0, torch.bfloat16, torch.bfloat16)
    kernel = triton_kernel.TritonAttention(spec, nvidia=True, overlap=True, hopper=True)
    shapes = [BatchShape((new,), length) for new in (9, 512, 2048) for length in (new, 8192)]
    tiles = [kernel.prompts.tile(shape, CPU) for shape in shapes]
    assert set(tiles) == set(hopper._TILES[head_dim])
    keys = [{key for _, key in attention_keys(kernel, shape, CPU)} for shape in shapes]
    assert all(tile in found for tile, found in zip(tiles, keys, strict=True))


def test_gated_delta_net_goes_by_tokens_of_a_request_and_rows_of_a_state():
    from atom_core.kernels.gated_delta_net.triton_prefill import TritonGatedDeltaNet

    spec = GatedDeltaNetSpec(16, 32, 128, 128, 4, torch.bfloat16, torch.float32)
    kernel = TritonGatedDeltaNet(spec, nvidia=True, overlap=True)

    def keys(*queries):
        return set(kernel.attention_compile_keys(BatchShape(queries, 4096), CPU))

    one, two, drafts, prompt = keys(1), keys(1, 1), keys(3, 3), keys(300)
    assert keys(*[1] * 200) == two
    assert len(one | two | drafts | prompt) == 4
    assert keys(1, 1, 300) == two | prompt
    assert kernel.decode.takes(BatchShape((8,), 4096))
    assert not kernel.decode.takes(BatchShape((1, 9), 4096))


def test_gated_delta_net_of_many_requests_on_hopper_has_a_key_of_its_own(monkeypatch):
    from atom_core.kernels.gated_delta_net import hopper
    from atom_core.kernels.gated_delta_net.triton_prefill import TritonGatedDeltaNet

    monkeypatch.setattr(hopper, "why_no_gluon", lambda: None)
    spec = GatedDeltaNetSpec(16, 32, 128, 128, 4, torch.bfloat16, torch.float32)
    kernel = TritonGatedDeltaNet(spec, nvidia=True, overlap=True, hopper=True)

    def keys(*queries):
        return set(kernel.attention_compile_keys(BatchShape(queries, 4096), CPU))

    few, many = keys(*[1] * 8), keys(*[1] * hopper._MIN_REQUESTS)
    assert keys(*[1] * 200) == many
    assert len(few | many | keys(*[2] * 200)) == 3
    assert keys(*[1] * 200, 300) == many | keys(300)
    for other in (replace(spec, num_value_heads=128), replace(spec, key_dim=64), replace(spec, conv_width=3)):
        assert not hopper.HopperGatedDeltaDecode.fits(other)
