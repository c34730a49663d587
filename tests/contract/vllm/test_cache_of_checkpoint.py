"""Whose word counts for the dtype of the cache: the user's, then the checkpoint's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from atom_plugin.vllm.routing import _take_cache_dtype_of_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}


def resolved(scheme, asked="auto"):
    """The cache's dtype of a checkpoint with `scheme` where the user has `asked` for one."""
    config = SimpleNamespace(
        quant_config=SimpleNamespace(kv_cache_scheme=scheme), cache_config=SimpleNamespace(cache_dtype=asked)
    )
    _take_cache_dtype_of_checkpoint(config)
    return config.cache_config.cache_dtype


def test_a_checkpoint_s_word_counts_where_the_user_says_nothing():
    assert resolved(SCHEME) == "fp8"
    assert resolved(None) == "auto"


@pytest.mark.parametrize("asked", ["bfloat16", "fp8_e5m2"])
@pytest.mark.parametrize("scheme", [SCHEME, SCHEME | {"num_bits": 4}])
def test_the_user_s_word_counts_before_it(scheme, asked):
    assert resolved(scheme, asked) == asked


def test_an_unquantised_checkpoint_says_nothing():
    config = SimpleNamespace(quant_config=None, cache_config=SimpleNamespace(cache_dtype="auto"))
    _take_cache_dtype_of_checkpoint(config)
    assert config.cache_config.cache_dtype == "auto"


@pytest.mark.parametrize(
    "other", [{"num_bits": 4}, {"type": "int"}, {"strategy": "attn_head"}, {"symmetric": False}], ids=str
)
def test_a_scheme_that_we_have_not_is_refused(other):
    with pytest.raises(ValueError, match=r"kv_cache_scheme is .* Set --kv-cache-dtype"):
        resolved(SCHEME | other)
