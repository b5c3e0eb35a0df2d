"""A 54.8 M-parameter Kimi Linear, float32, two threads: training step and greedy decoding against transformers.

Both run the same weights: transformers' model is saved and loaded here, so that losses and tokens are compared too.
"""

import math
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillion_moe import checkpoint
from trillion_moe.bench.clock import alternate, ratio, summary
from trillion_moe.model import Model, init_caches, loss
from trillion_moe.sampling import Sampler, SamplingConfig
from trillion_moe.steps import Decoding, decode_steps, prefill_step
from trillion_moe.transforms.targets import places

CONFIG = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "linear_head_dim": 64,
    "linear_num_heads": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "mlp_layer_types": ["dense"] + ["sparse"] * 7,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TRAIN_TOKENS, BATCH, PROMPT, NEW = 512, 4, 64, 64


def measure(rounds: int = 5, threads: int = 2) -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    theirs = transformers_model()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        model = load(Path(folder))
    return {"train": _train(model, theirs, rounds), "decode": _decode(model, theirs, rounds)}


def transformers_model() -> Any:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    config = AutoConfig.for_model("kimi_linear", **CONFIG)
    config._experts_implementation = "grouped_mm"
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()


def load(folder: Path) -> Model:
    cfg = checkpoint.read_config(folder)
    return checkpoint.load_into(Model(cfg), folder, cfg)


def _train(model: Model, theirs: Any, rounds: int) -> dict[str, Any]:
    """Forward and backward of 512 tokens with every gradient."""
    import torch  # pyright: ignore[reportMissingImports]

    ids = np.random.default_rng(0).integers(3, CONFIG["vocab_size"], (1, TRAIN_TOKENS)).astype(np.int32)
    torch_ids = torch.tensor(ids, dtype=torch.long)
    step = jax.jit(jax.value_and_grad(lambda m, t: loss(m, {"tokens": t}, remat=False)[0]))
    forward = jax.jit(lambda m, t: loss(m, {"tokens": t}, remat=False)[0])
    start = time.perf_counter()
    compiled = step.lower(model, ids).compile()
    compile_s = time.perf_counter() - start

    def their_step():
        theirs.zero_grad(set_to_none=True)
        value = theirs(input_ids=torch_ids, labels=torch_ids).loss
        value.backward()
        return float(value)

    def their_forward():
        with torch.no_grad():
            return float(theirs(input_ids=torch_ids, labels=torch_ids).loss)

    square = jnp.ones((2048, 2048), jnp.float32)
    gemm = jax.jit(jnp.matmul)
    seconds = alternate(
        {
            "transformers": their_step,
            "ours": lambda: compiled(model, ids),
            "transformers forward": their_forward,
            "ours forward": lambda: forward(model, ids),
            "gemm": lambda: gemm(square, square),
        },
        rounds,
    )
    flops, rate = step_flops(model, TRAIN_TOKENS), 2 * 2048**3 / min(seconds["gemm"])
    memory = compiled.memory_analysis()
    return {
        "what": f"forward + backward of {TRAIN_TOKENS} tokens, float32",
        **{name: summary(s) for name, s in seconds.items()},
        "faster": ratio(seconds["transformers"], seconds["ours"]),
        "forward_faster": ratio(seconds["transformers forward"], seconds["ours forward"]),
        "compile_s": compile_s,
        "gemm_gflops": rate / 1e9,
        "share_of_gemm_rate": flops / min(seconds["ours"]) / rate,
        "temporaries_mb": memory.temp_size_in_bytes / 1e6,
        "loss": {"ours": float(forward(model, ids)), "transformers": their_forward()},
    }


def step_flops(model: Model, tokens: int) -> float:
    """Of the matrix products of one forward and backward, experts by the share a token uses; attention left out."""
    moe, multiplied = model.config.moe, 0.0
    for place in places(model)[0]:
        if place.group is not None:
            share = moe.top_k / moe.num_experts if place.group == "routed_experts" else 1
            multiplied += share * math.prod(place.leaf.shape)
    return 6 * tokens * multiplied


def _decode(model: Model, theirs: Any, rounds: int) -> dict[str, Any]:
    """Greedy, batch 4, prompts of 64 tokens, 64 new ones; the time includes the prefill."""
    import torch  # pyright: ignore[reportMissingImports]

    ids = np.random.default_rng(1).integers(3, CONFIG["vocab_size"], (BATCH, PROMPT)).astype(np.int32)
    torch_ids = torch.tensor(ids, dtype=torch.long)
    greedy = Sampler.of([SamplingConfig()] * BATCH, ids.tolist(), CONFIG["vocab_size"])

    @jax.jit
    def ours(model, ids, steps):
        logits, caches = prefill_step(model, ids, None, init_caches(model, BATCH, PROMPT + NEW))
        left, failed = jnp.full(BATCH, steps, jnp.int32), jnp.zeros(BATCH, bool)
        return decode_steps(model, Decoding(logits, caches, greedy, left, failed), jnp.zeros(0, int), steps, room=NEW)[
            0
        ]

    def transformers():
        with torch.no_grad():
            return theirs.generate(
                input_ids=torch_ids,
                attention_mask=torch.ones_like(torch_ids),
                do_sample=False,
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                eos_token_id=None,
            )[:, PROMPT:].numpy()

    start = time.perf_counter()
    found = np.asarray(ours(model, ids, NEW))
    compile_s = time.perf_counter() - start
    same = int((found == transformers()).all(axis=1).sum())
    seconds = alternate({"transformers": transformers, "ours": lambda: ours(model, ids, NEW)}, rounds)
    return {
        "what": f"greedy decode, batch {BATCH}, prompt {PROMPT}, {NEW} new tokens, float32",
        **{name: summary(s) for name, s in seconds.items()},
        "faster": ratio(seconds["transformers"], seconds["ours"]),
        "tokens_per_s": {name: BATCH * NEW / min(s) for name, s in seconds.items()},
        "compile_s": compile_s,
        "rows_with_equal_tokens": f"{same} of {BATCH}",
    }
