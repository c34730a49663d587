"""vLLM's own sampler in front of ours: which batches it leaves to the op, and what the op is given of its tables."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from atom_core.kernels import kernel_set
from atom_core.kernels.select import Target
from atom_plugin.vllm import sampling
from atom_plugin.vllm.hybrid_model_state import AtomHybridModelState
from atom_plugin.vllm.models import AtomQwen3ForCausalLM, AtomQwen3NextForCausalLM

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

REQUESTS, VOCABULARY, END = 6, 64, 7
GREEDY = {"temperature": 0.0, "ignore_eos": True, "stop_token_ids": [END]}

#: What a request asks for beside the likeliest tokens, and whether those are what it gets.
LEFT_TO_VLLM = {
    "a temperature": {"temperature": 0.5},
    "any token": {"temperature": 1.0},
    "a bias": {"logit_bias": {3: 1.0}},
    "some tokens alone": {"allowed_token_ids": [3, 4]},
    "a penalty": {"presence_penalty": 0.5},
    "a bias and a least length": {"logit_bias": {3: 1.0}, "min_tokens": 4},
    "some tokens alone and a least length": {"allowed_token_ids": [3, 4], "min_tokens": 4},
    "a grammar and a least length": {"structured_outputs": StructuredOutputsParams(regex="a*"), "min_tokens": 4},
}
SERVED = {"nothing": {}, "a least length": {"min_tokens": 4}, "a seed": {"seed": 3}, "a length": {"max_tokens": 3}}


class Op:
    """In place of the kernel, remembers what it is called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, logits, requests=None, positions=None, barred=None):
        given = (it if it is None else it.tolist() for it in (requests, positions))
        self.calls.append((*given, barred))
        return logits.argmax(1)


@pytest.fixture
def theirs(monkeypatch):
    """vLLM's sampler on a CPU, where memory is neither pinned nor has a device's view, and nothing can be launched."""
    plain = torch.zeros

    def unpinned(*size, pin_memory=False, **options):
        return plain(*size, **options)

    monkeypatch.setattr(buffer_utils, "get_accelerator_view_from_cpu_tensor", lambda tensor: tensor)
    monkeypatch.setattr(torch, "zeros", unpinned)
    device = torch.device("cpu")
    states = RequestState(REQUESTS, 128, 64, 0, VOCABULARY, device)
    given = {"max_num_reqs": REQUESTS, "vocab_size": VOCABULARY, "device": device, "req_states": states}
    if "vllm_config" in inspect.signature(Sampler).parameters:
        given["vllm_config"] = SimpleNamespace(reasoning_config=None)
    return Sampler(**given)


@pytest.fixture
def ours(theirs):
    return sampling.GreedySampler(theirs, Op())


def add(sampler, index, **asked):
    """A request with a prompt of ten tokens."""
    sampler.req_states.prompt_len.np[index] = 10
    params = SamplingParams(**{**GREEDY, **asked})
    old = "prompt_len" in inspect.signature(Sampler.add_request).parameters
    sampler.add_request(index, *((10,) if old else ()), params)


def sample(sampler, rows, monkeypatch, **options):
    """Tokens of a step of the requests `rows`, or None where vLLM's own method is asked."""
    asked = []
    monkeypatch.setattr(Sampler, "sample", lambda *args, **named: asked.append((args, named)) or (None, None))
    index, rows_np = torch.tensor(rows, dtype=torch.int32), np.array(rows)
    logits = torch.zeros(len(rows), VOCABULARY)
    logits[:, 5] = 1
    rest = [index, index] + [rows_np] * ("seq_lens_upper_bound_np" in inspect.signature(Sampler.sample).parameters)
    tokens, _ = sampler.sample(logits, index, index, rows_np, index.long() + 20, *rest, **options)
    if asked:
        (args, named), *none = asked
        assert not none
        assert args[1:][:1] == (logits,)
        assert len(args) - 1 == 5 + len(rest)
        assert named == {"return_logprobs": False, **options}
    return None if tokens is None else tokens.tolist()


@pytest.mark.parametrize("asked", SERVED.values(), ids=list(SERVED))
def test_the_likeliest_tokens_are_the_ops(ours, asked, monkeypatch):
    add(ours, 2, **asked)
    add(ours, 1)
    assert sample(ours, [2, 1], monkeypatch) == [5, 5]
    ((requests, positions, _),) = ours.kernel.calls
    assert (requests, positions) == ([2, 1], [22, 21])


@pytest.mark.parametrize("asked", LEFT_TO_VLLM.values(), ids=list(LEFT_TO_VLLM))
def test_one_request_that_asks_for_more_leaves_its_batch_to_vllm(ours, asked, monkeypatch):
    add(ours, 2, **asked)
    add(ours, 1)
    assert sample(ours, [2, 1], monkeypatch) is None
    assert sample(ours, [1], monkeypatch) == [5]
    add(ours, 2)
    assert sample(ours, [2, 1], monkeypatch) == [5, 5]


def test_tables_are_copied_when_a_request_is_new_and_at_no_other_step(ours, monkeypatch):
    copied = []
    theirs = Sampler.apply_staged_writes
    monkeypatch.setattr(Sampler, "apply_staged_writes", lambda self: copied.append(True) or theirs(self))
    table = ours.sampling_states.temperature
    for request, temperature in ((2, 0.5), (1, 0.25)):
        add(ours, request, temperature=temperature, stop_token_ids=[])
        ours.apply_staged_writes()
        assert table.gpu[request] == temperature
        copied.clear()
        kept = table.gpu
        ours.apply_staged_writes()
        assert not copied
        assert table.gpu is kept


def writes(function):
    """Whether a method of vLLM's changes a table, or has a change of one wait for `apply_staged_writes`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and node.attr.startswith("stage_write"):
            return True
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            table = target.value if isinstance(target, ast.Subscript) else None
            if isinstance(table, ast.Attribute) and table.attr == "np":
                return True
    return False


def attributes(node):
    """Of `self`, that a part of a method names."""
    named = (it for it in ast.walk(node) if isinstance(it, ast.Attribute))
    return {it.attr for it in named if isinstance(it.value, ast.Name) and it.value.id == "self"}


def waiting(method):
    """What a method assigns to attributes of `self`, or adds to lists that are such."""
    found = set()
    for node in ast.walk(method):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name for target in targets if isinstance(target, ast.Attribute) for name in attributes(target)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("append", "add"):
            found |= attributes(node.func.value)
    return found


def test_only_new_requests_change_vllms_tables():
    """Which is what `GreedySampler.apply_staged_writes` rests on."""
    found = set()
    for path in Path(inspect.getfile(Sampler)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and writes(node):
                found.add((path.stem, node.name))
            if isinstance(node, ast.ClassDef):
                methods = {it.name: it for it in node.body if isinstance(it, ast.FunctionDef)}
                applied = attributes(methods.pop("apply_staged_writes", ast.Pass()))
                methods.pop("__init__", None)
                found |= {(path.stem, name) for name, it in methods.items() if waiting(it) & applied}
    assert {name for _, name in found} == {"add_request"}, found
    assert {"states", "logit_bias", "penalties"} <= {module for module, _ in found}


def test_probabilities_are_vllms_to_tell(ours, monkeypatch):
    add(ours, 0)
    assert sample(ours, [0], monkeypatch, return_logprobs=True) is None
    ours.return_sampling_mask = True
    assert sample(ours, [0], monkeypatch) is None


def batch_of(rows, prompts=()):
    """vLLM's batch of a step of the requests `rows`, of which `prompts` are still in their prompts of 20 tokens."""
    index, count = torch.tensor(rows, dtype=torch.int32), len(rows)
    prefilling = np.array([row in prompts for row in rows])
    starts = torch.arange(count + 1, dtype=torch.int32)
    return SimpleNamespace(
        num_reqs=count,
        idx_mapping=index,
        idx_mapping_np=np.array(rows),
        expanded_idx_mapping=index,
        expanded_local_pos=torch.zeros_like(index),
        positions=torch.full((count,), 24),
        input_ids=torch.zeros(count, dtype=torch.int32),
        logits_indices=torch.arange(count),
        cu_num_logits=starts,
        cu_num_logits_np=starts.numpy(),
        seq_lens=torch.tensor([15 if row in prompts else 25 for row in rows], dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.full((count,), 25),
        is_prefilling_np=prefilling,
        has_prefill=bool(prefilling.any()),
    )


def counted(monkeypatch):
    """Stand in for what vLLM launches behind its sampling, and remember whether it was asked."""
    asked = []

    def sampled_and_rejected(num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len):
        asked.append(idx_mapping.tolist())
        num_sampled = torch.where(seq_lens < prefill_len[idx_mapping.long()], 0, num_sampled)
        rejected = torch.where(seq_lens < prefill_len[idx_mapping.long()], 0, cu_num_logits.diff() - num_sampled)
        return num_sampled, rejected

    monkeypatch.setattr("vllm.v1.worker.gpu.sample.sampler.get_num_sampled_and_rejected", sampled_and_rejected)
    return asked


def run(sampler, batch):
    """What a step of `batch` gives; token 5 is the likeliest."""
    logits = torch.zeros(batch.num_reqs, VOCABULARY)
    logits[:, 5] = 1
    return sampler(logits, batch)


def drawn(logits, requests, temperature, seeds, positions, **options):
    """In place of vLLM's choice by seeds, which is launched: any function of what it is given."""
    assert logits.dtype == torch.float32
    assert not options["apply_temperature"]
    mine = requests.long()
    return (logits.argmax(1) + 10 * temperature[mine].long() * (1 + seeds[mine] + positions)) % VOCABULARY


@pytest.mark.parametrize("likeliest", [True, False])
def test_a_step_of_plain_requests_gives_what_vllms_way_gives(ours, monkeypatch, likeliest):
    asked = counted(monkeypatch)
    monkeypatch.setattr("vllm.v1.worker.gpu.sample.sampler.gumbel_sample", drawn)
    for row in (2, 1):
        add(ours, row, **({} if likeliest else {"temperature": float(row == 1), "seed": 3}))
        ours.req_states.prefill_len.gpu[row] = 20
    ours.apply_staged_writes()
    batch = batch_of([2, 1])
    # Nothing reads the tokens that led here.
    batch.input_ids = None
    short = run(ours, batch)
    assert asked == []
    ours.plain[:] = False
    long = run(ours, batch_of([2, 1]))
    assert asked == [[2, 1]]
    assert ours.kernel.calls == ([(None, None, None), ([2, 1], [24, 24], None)] if likeliest else [])
    assert short.sampled_token_ids.tolist() == [[5], [5 if likeliest else (5 + 10 * 28) % VOCABULARY]]
    assert vars(short).keys() == vars(long).keys()
    for name, wanted in vars(long).items():
        found = getattr(short, name)
        if wanted is None:
            assert found is None
        else:
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    "asked",
    [
        *(it for it in LEFT_TO_VLLM.values() if it != {"temperature": 1.0}),
        *({"temperature": 1.0, **it} for it in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"min_tokens": 4})),
        *({"min_tokens": 4}, {"logprobs": 0}, {"logprobs": 2}, {"logprob_token_ids": [3]}),
    ],
    ids=str,
)
def test_one_request_that_asks_for_more_has_its_step_go_vllms_way(ours, asked, monkeypatch):
    add(ours, 2, **asked)
    add(ours, 1)
    assert ours.plain.tolist() == [False, True, False, False, False, False]
    theirs = []
    monkeypatch.setattr(Sampler, "__call__", lambda *args: theirs.append(args))
    batch = batch_of([2, 1])
    run(ours, batch)
    assert [it for _, _, it in theirs] == [batch]
    add(ours, 2)
    assert run(ours, batch).sampled_token_ids.tolist() == [[5], [5]]


@pytest.mark.parametrize("name", ["compute_nans", "return_sampling_mask", "trace_replay_state", "a prompt"])
def test_a_step_of_which_vllm_tells_more_than_tokens_goes_its_way(ours, name, monkeypatch):
    add(ours, 0)
    add(ours, 1)
    theirs = []
    monkeypatch.setattr(Sampler, "__call__", lambda *args: theirs.append(args))
    assert hasattr(ours, name) or name == "a prompt"
    setattr(ours, name, True)
    run(ours, batch_of([0, 1], prompts=[1] if name == "a prompt" else []))
    assert len(theirs) == 1


def test_a_least_length_bars_what_would_end_a_request(ours, monkeypatch):
    add(ours, 3, min_tokens=4)
    add(ours, 1)
    sample(ours, [1], monkeypatch)
    sample(ours, [1, 3], monkeypatch)
    (_, _, without), (_, _, barred) = ours.kernel.calls
    assert without is None
    ours.bias.min_lens.copy_to_uva()
    ours.bias.num_stop_token_ids.copy_to_uva()
    until, counts, tokens = ours.barred()
    assert [it.shape for it in barred] == [it.shape for it in (until, counts, tokens)]
    assert (until[3], counts.tolist()) == (14, [0, 0, 0, 1, 0, 0])
    assert tokens.shape[0] == REQUESTS
    assert tokens.stride(1) == 1


def test_each_request_is_counted_once(ours):
    add(ours, 2, presence_penalty=0.5, min_tokens=4)
    assert ours.penalties_state._new_penalties_reqs == [2]
    assert ours.needs_logits_processing[2]
    assert ours.bias.min_lens.np[2] == 14


def test_vllms_states_are_shared(ours, theirs):
    add(ours, 4, temperature=0.25)
    assert theirs.sampling_states.temperature.np[4] == 0.25
    assert theirs.needs_logits_processing[4]
    assert isinstance(ours, Sampler)


def state(speculative=None):
    """A state whose engine need not be started to ask it for a sampler."""
    it = sampling.AtomModelState.__new__(sampling.AtomModelState)
    it.vllm_config = SimpleNamespace(speculative_config=speculative)
    it.model_config = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
    kernels = kernel_set(Target("cpu", "x86_64"))
    runtime = SimpleNamespace(kernels=kernels, tensor_parallel=SimpleNamespace(rank=0))
    runtime.dtype = runtime.head_dtype = torch.float32
    it.model, it.dtype, it.device = SimpleNamespace(runtime=runtime), torch.float32, "cpu"
    return it


def test_the_state_is_what_vllm_would_have_but_for_the_sampler(theirs, caplog):
    caplog.set_level("INFO", logger=sampling.logger.name)
    model = AtomQwen3ForCausalLM.__new__(AtomQwen3ForCausalLM)
    assert resolve_model_state_cls(None, model) is sampling.AtomModelState
    assert sampling.AtomModelState.__mro__[1] is DefaultModelState
    hybrid = AtomQwen3NextForCausalLM.__new__(AtomQwen3NextForCausalLM)
    assert resolve_model_state_cls(None, hybrid) is AtomHybridModelState
    assert AtomHybridModelState.__mro__[2:4] == (MambaHybridModelState, DefaultModelState)
    greedy, rejection = state().custom_sampler(theirs)
    assert isinstance(greedy, sampling.GreedySampler)
    assert rejection is None
    assert "greedy_tokens: reference" in caplog.text


def test_drafts_and_watermarks_have_vllms_own(theirs):
    class Watermarked(Sampler):
        pass

    assert state(speculative=object()).custom_sampler(theirs) is None
    assert state().custom_sampler(Watermarked.__new__(Watermarked)) is None
    theirs.logits_processors = [object()]
    assert state().custom_sampler(theirs) is None
