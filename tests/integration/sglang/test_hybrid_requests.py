"""A server of a hybrid's checkpoint of text and images: text is answered, a request with an image is refused."""

from __future__ import annotations

import httpx
import pytest

from tests.hybrid_checkpoints import Expected, make_hybrid, some_tokens
from tests.integration.server import SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

COUNT = 8
PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PROMPT = some_tokens(70, 70)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The server, ready and thus warmed up by a text of SGLang's, and its checkpoint's folder."""
    folder = make_hybrid(tmp_path_factory.mktemp("wrapper") / "it", "qwen3_5_vl")
    limits = ("--max-total-tokens", "4096", "--max-mamba-cache-size", "40", "--chunked-prefill-size", "64")
    with SglangServer(folder, *limits, "--disable-cuda-graph", "--dtype", "float32", "--sleep-on-idle") as server:
        yield server, folder


def generate(server, **body):
    sampling = {"temperature": 0, "max_new_tokens": COUNT, "min_new_tokens": COUNT}
    return httpx.post(f"{server.url}/generate", json={"sampling_params": sampling, **body}, timeout=60)


def test_text_is_answered_and_an_image_is_refused_in_one_line(served):
    server, folder = served
    (expected,) = Expected.of(folder).greedy([PROMPT], COUNT)
    assert generate(server, input_ids=PROMPT).json()["output_ids"] == expected
    for body in ({"input_ids": PROMPT}, {"text": "What is in the image?"}, {"text": ["One", "and another"]}):
        refused = generate(server, **body, image_data=PIXEL)
        assert refused.status_code == 400, refused.text
        message = refused.json()["error"]["message"]
        assert message == (
            "atom-plugin serves only the text of Qwen3_5ForConditionalGeneration: a request cannot have images, video "
            "or sound."
        )
    # The server goes on.
    assert generate(server, input_ids=PROMPT).json()["output_ids"] == expected
    assert len(generate(server, text="What is in the image?").json()["output_ids"]) == COUNT


def test_so_is_one_of_the_standard_client(served):
    server, _ = served
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
    body = {"model": "it", "messages": [{"role": "user", "content": content}], "max_tokens": COUNT}
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert refused.status_code == 400, refused.text
    assert "only supports text input" in refused.json()["message"]  # SGLang's own line
