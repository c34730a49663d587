"""vLLM starts a request on a page that another fills in the same step, and once more when nothing else runs.

`check` runs it, in a process of its own; the rest of this file is what runs there.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUM_TOP = 20


def check(options: Mapping[str, Any], environ: Mapping[str, str], tolerance: float) -> None:
    """Assert that there was such a step, and that the request's first token is as likely as without the other.

    Args:
        options: arguments of `LLM`.
        environ: variables to set beside those of this process.
        tolerance: how far apart logarithms of probabilities may be.
    """
    from tests.integration.preloaded import run_script

    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environ}
    with tempfile.TemporaryDirectory() as folder:
        given, wanted = Path(folder, "options.json"), Path(folder, "found.json")
        given.write_text(json.dumps(dict(options)))
        finished = run_script(Path(__file__), [str(given), str(wanted)], variables, 400.0)
        assert finished.returncode == 0, finished.tail()
        found = json.loads(wanted.read_text())
    page, step = found["page"], found["steps"][0]
    fills, reads = (step["lengths"].index(length) for length in (page, page + 1))
    assert divmod(step["slots"][fills], page) == (step["pages"][reads][0], page - 1)
    both = found["beside"].keys() & found["alone"].keys()
    assert len(both) >= NUM_TOP * 3 / 4
    off = max(abs(found["beside"][token] - found["alone"][token]) for token in both)
    assert off <= tolerance, f"logarithms of probabilities are up to {off:.3g} apart"


def watch() -> list[dict[str, Any]]:
    """The steps of two requests from now on: lengths, slots of the new tokens, and pages."""
    from atom_plugin.vllm.attention_backends import AtomMetadataBuilder

    steps: list[dict[str, Any]] = []
    build = AtomMetadataBuilder.build

    def build_and_note(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        metadata = build(self, common_prefix_len, common, fast_build)
        lengths = [length for length in common.seq_lens.tolist() if length]  # the others are padding
        if len(lengths) == 2:
            slots = common.slot_mapping[: common.num_actual_tokens].tolist()
            pages = common.block_table_tensor[:2].tolist()
            steps.append({"lengths": lengths, "slots": slots[:2], "pages": pages})
        return metadata

    AtomMetadataBuilder.build = build_and_note
    return steps


def main() -> None:
    """Run one engine."""
    from vllm import LLM, SamplingParams

    given, wanted = map(Path, sys.argv[1:])
    llm = LLM(**json.loads(given.read_text()), async_scheduling=False, enable_prefix_caching=True)
    steps, engine = watch(), llm.llm_engine
    page = engine.vllm_config.cache_config.block_size
    prompt = list(range(40, 40 + page - 2))
    sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=NUM_TOP)
    engine.add_request(
        "fills", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    )
    tokens: dict[str, Any] = {}
    reader: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = output.outputs[0]
        known = [*prompt, *tokens["fills"].token_ids]
        if len(known) == page:
            reader = [*known, 50]
            engine.add_request("reads", {"prompt_token_ids": reader}, sampling)
    assert llm.reset_prefix_cache()
    alone = llm.generate({"prompt_token_ids": reader}, sampling)[0].outputs[0]
    first = [
        {str(token): logprob.logprob for token, logprob in found.logprobs[0].items()}
        for found in (tokens["reads"], alone)
    ]
    wanted.write_text(json.dumps({"page": page, "steps": steps, "beside": first[0], "alone": first[1]}))


if __name__ == "__main__":
    main()
