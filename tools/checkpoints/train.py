"""Train one tiny checkpoint of a model family and score it on the held-out questions.

python tools/checkpoints/train.py --family qwen3 --out tests/checkpoints/qwen3

Works on CUDA or CPU. The learning rate decays to zero over `--steps` or `--max-minutes`, whichever ends first, because
the decay is what makes the answers confident.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from card import HELDOUT, add_scores, read_card, write_card
from hybrid import as_published, delta_rule, long_memory, rule_of, seen_by_attention
from mtp import MtpLayer, add_to_checkpoint, drafting_layers, load_from_checkpoint, loss_of_draft
from packing import IGNORE, training_rows
from tokenizer import EOS, PAD, build_tokenizer, save_tokenizer
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GenerationConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "truncate": False,
}
#: What Transformers takes where none are given; GPT-OSS's makers state both, and vLLM's own model asks for them.
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
SHARED = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}


#: Of the mixtures: eight small experts, of which a token has two.
EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 4, "router_aux_loss_coef": 0.0}
#: Of DeepSeek's: attention over latents of 64 numbers, one dense layer and then mixtures.
LATENTS = {
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
#: Of the hybrids: three layers of Gated DeltaNet, one of attention with an output gate.
LINEAR = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "head_dim": 64,
}
HYBRIDS = ("qwen3_next", "qwen3_5")
FAMILIES = (
    *("qwen3", "llama", "qwen2", "mistral", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3"),
    *HYBRIDS,
)
#: Of the hybrids' training rows, so many have notes.
NOTES = 0.6
#: Of the loss on the token after the next, beside that on the next.
DRAFT_LOSS = 0.5


def family_config(family: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """A config that keeps what sets the family apart: its norm, bias, rope or attention window."""
    shared = SHARED | {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "qwen3":
        return Qwen3Config(**shared, num_hidden_layers=5, head_dim=64, rope_parameters=ROPE)
    if family == "llama":
        tied = shared | {"tie_word_embeddings": True}
        return LlamaConfig(**tied, num_hidden_layers=6, head_dim=32, rope_parameters=LLAMA3_ROPE)
    if family == "qwen2":
        return Qwen2Config(**shared, num_hidden_layers=6, rope_parameters=ROPE)
    if family == "mistral":
        return MistralConfig(**shared, num_hidden_layers=6, head_dim=32, sliding_window=64, rope_parameters=ROPE)
    if family == "qwen3_moe":
        mixture = {"num_experts": 8, "moe_intermediate_size": 64, "norm_topk_prob": True, "mlp_only_layers": [1]}
        return Qwen3MoeConfig(**shared, **EXPERTS, **mixture, head_dim=64, rope_parameters=ROPE)
    if family == "gpt_oss":
        mixture = {"num_local_experts": 8, "intermediate_size": 64}
        rope = YARN_ROPE | BETAS
        return GptOssConfig(**shared | EXPERTS | mixture, head_dim=64, sliding_window=64, rope_parameters=rope)
    if family == "glm4_moe":
        mixture = {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
        }
        mixture |= {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
        scores = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5}
        heads = {"head_dim": 32, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5}
        rope = ROPE | {"partial_rotary_factor": 0.5}
        experts = {key: value for key, value in EXPERTS.items() if key != "router_aux_loss_coef"}
        return Glm4MoeConfig(**shared, **experts, **mixture, **scores, **heads, rope_parameters=rope)
    if family == "deepseek_v2":
        scores = {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False, "n_shared_experts": 2}
        rope = {key: value for key, value in YARN_ROPE.items() if key != "truncate"}
        rope |= {"mscale": 0.707, "mscale_all_dim": 0.707}
        return DeepseekV2Config(**shared | LATENTS, **scores, q_lora_rank=None, rope_parameters=rope)
    if family == "deepseek_v3":
        scores = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "n_shared_experts": 1}
        scores |= {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
        drafts = {"num_nextn_predict_layers": 1}
        return DeepseekV3Config(**shared | LATENTS, **scores, **drafts, q_lora_rank=96, rope_parameters=ROPE)
    rope = ROPE | {"partial_rotary_factor": 0.25}
    if family == "qwen3_next":
        mixture = EXPERTS | {"num_experts": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
        mixture |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        return Qwen3NextConfig(**shared | LINEAR | mixture, rope_parameters=rope)
    if family == "qwen3_5":
        rope |= {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
        return Qwen3_5TextConfig(**shared | LINEAR, mtp_num_hidden_layers=1, rope_parameters=rope)
    raise ValueError(f"unknown family {family!r}")


def shares_of_all(experts: torch.nn.Module, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """``[T, E]``: each expert's share of each token's answer, zero of those that were not chosen."""
    shares = top_k_weights.new_zeros(len(top_k_weights), experts.num_experts)
    return shares.scatter(1, top_k_index, top_k_weights)


def every_expert(
    experts: torch.nn.Module, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Each expert on each token, times its share: eight small ones at once take less time than they take to sort."""
    shares = shares_of_all(experts, top_k_index, top_k_weights)
    gate, up = torch.einsum("th,eih->tei", hidden, experts.gate_up_proj).chunk(2, -1)
    inner = experts.act_fn(gate) * up * shares.unsqueeze(-1).to(gate.dtype)
    return torch.einsum("tei,ehi->th", inner, experts.down_proj).to(hidden.dtype)


def every_transposed_expert(
    experts: torch.nn.Module, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The same of GPT-OSS's, whose weights lie the other way round and have biases."""
    shares = shares_of_all(experts, top_k_index, top_k_weights)
    both = torch.einsum("th,ehi->tei", hidden, experts.gate_up_proj) + experts.gate_up_proj_bias
    inner = experts._apply_gate(both) * shares.unsqueeze(-1).to(both.dtype)
    of_biases = shares @ experts.down_proj_bias
    return (torch.einsum("tei,eih->th", inner, experts.down_proj) + of_biases).to(hidden.dtype)


#: How the experts of each family are trained; others' one after the other.
ALL_AT_ONCE = {
    "deepseek_v2": every_expert,
    "deepseek_v3": every_expert,
    "gpt_oss": every_transposed_expert,
    "qwen3_next": every_expert,
}


def new_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Random weights; biases start away from zero so that the trained model depends on them.

    So do the corrections of experts' scores, which no gradient moves.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention(config))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    long_memory(model)
    return model


def attention(config: PreTrainedConfig) -> str:
    """Which of Transformers' attentions: only one of them has sinks."""
    return "eager" if config.model_type == "gpt_oss" else "sdpa"


def learning_rate(progress: float, peak: float, warmup: float = 0.03) -> float:
    """Linear warm-up, then linear decay to zero."""
    return peak * min(progress / warmup, (1 - progress) / (1 - warmup))


def captured(step: Callable[[], tuple[torch.Tensor, ...]]) -> Callable[[], tuple[torch.Tensor, ...]]:
    """The step as one CUDA graph, whose results are in the same tensors each time. Before, it is taken three times."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> tuple[torch.Tensor, ...]:
        graph.replay()
        return results

    return replay


def train(
    model: PreTrainedModel,
    draft: MtpLayer | None,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    args: argparse.Namespace,
) -> int:
    """Train both in place and return the number of steps taken.

    The draft's loss moves the model too, which so comes to know early what the token after the next will be.
    """
    device = inputs.device
    hybrid = args.family in HYBRIDS
    # A hybrid's scan over chunks is many small kernels, which take longer to launch than to run.
    graph = hybrid and device.type == "cuda"
    seen = seen_by_attention(args.batch, args.length, device) if hybrid else None
    masks = {"full_attention": seen, "linear_attention": None} if hybrid else None
    parameters = [*model.parameters(), *(draft.parameters() if draft else ())]
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    rate = torch.zeros((), device=device)
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True, capturable=graph)
    generator = torch.Generator().manual_seed(args.seed)
    index = torch.zeros(args.batch, dtype=torch.long, device=device)

    def take_step() -> tuple[torch.Tensor, ...]:
        """On the rows of `index`; the loss, and that of the draft."""
        optimizer.zero_grad(set_to_none=True)
        tokens, wanted = inputs[index].long(), targets[index].long()
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=not graph):
            hidden = model.model(input_ids=tokens, attention_mask=masks, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden)
            ahead = (loss_of_draft(model, draft, hidden, tokens, wanted, seen),) if draft else ()
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), ignore_index=IGNORE)
        (loss + DRAFT_LOSS * sum(ahead)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return (loss.detach(), *(one.detach() for one in ahead))

    model.train()
    step_taken = captured(take_step) if graph else take_step
    begin = time.monotonic()
    order = torch.empty(0, dtype=torch.long)
    steps: int = args.steps
    for step in range(steps):
        elapsed = (time.monotonic() - begin) / 60
        progress = max(step / steps, elapsed / args.max_minutes)
        if progress >= 1:
            return step
        rate.fill_(learning_rate(progress, args.learning_rate))
        if len(order) < args.batch:
            order = torch.randperm(len(inputs), generator=generator)
        index.copy_(order[: args.batch])
        order = order[args.batch :]
        losses = step_taken()
        if step % args.log_every == 0:
            told = " draft ".join(f"{one.item():.4f}" for one in losses)
            print(f"{args.family} step {step} loss {told} minutes {elapsed:.2f}", flush=True)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, default=HELDOUT)
    parser.add_argument("--init", type=Path, help="go on from this checkpoint instead of random weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--max-minutes", type=float, default=60.0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=100000, help="training rows to generate; reused every epoch")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) // 4))
    parser.add_argument("--no-score", action="store_true", help="leave the scores to card.py")
    parser.add_argument("--log-every", type=int, default=200)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = build_tokenizer()
    begin = time.monotonic()
    notes = NOTES if args.family in HYBRIDS else 0.0
    rows = training_rows(tokenizer.backend_tokenizer, args.rows, args.length, args.seed, args.workers, notes)
    inputs, targets = (torch.from_numpy(array).to(args.device) for array in rows)
    print(f"{args.family} {len(inputs)} rows in {time.monotonic() - begin:.1f} s", flush=True)

    earlier = read_card(args.init) if args.init else {}
    if args.init:
        model = AutoModelForCausalLM.from_pretrained(args.init, dtype=torch.float32)
    else:
        model = new_model(family_config(args.family, tokenizer))
    model.to(args.device)
    if args.family in ALL_AT_ONCE:
        ALL_EXPERTS_FUNCTIONS["every_expert"] = ALL_AT_ONCE[args.family]
        model.config._experts_implementation = "every_expert"
    draft = None
    if drafting_layers(model.config):
        draft = load_from_checkpoint(model, args.init) if args.init else MtpLayer(model)
    with rule_of(model, delta_rule) if args.family in HYBRIDS else nullcontext():
        steps = train(model, draft, inputs, targets, args)

    args.out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(args.out)
    if draft:
        add_to_checkpoint(draft.to(torch.bfloat16), args.out, model.config)
    (args.out / "model.safetensors").chmod(0o644)
    if args.family in HYBRIDS:
        as_published(args.out / "config.json")
    save_tokenizer(tokenizer, args.out)

    card = {
        "family": args.family,
        "architecture": model.config.architectures[0],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": "bfloat16",
        "seed": args.seed,
        "steps": steps,
        "batch": args.batch,
        "sequence_length": args.length,
        "training_rows": len(inputs),
        "peak_learning_rate": args.learning_rate,
        "data": "synthetic, made by tools/checkpoints/task.py; held-out questions are disjoint from training",
        "special_tokens": {"eos": EOS, "pad": PAD},
    }
    if args.init:
        card["continued_from"] = {key: earlier[key] for key in ("seed", "steps", "training_rows")}
    write_card(args.out, card)
    if not args.no_score:
        print(json.dumps(add_scores(args.out, args.heldout, args.device)), flush=True)


if __name__ == "__main__":
    main()
