"""LoRA training of the 54.8 M-parameter Kimi Linear against transformers + PEFT: same weights, adapter, batch, AdamW.

The adapter is exported here and loaded by PEFT, so that the first losses are equal. Later ones differ for routed
experts: PEFT trains one fused parameter per layer, with an A of its own for each expert, where ours share theirs.
"""

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from trillion_moe.bench.clock import alternate, ratio, summary
from trillion_moe.bench.model import CONFIG, TRAIN_TOKENS, load, transformers_model
from trillion_moe.checkpoint import export_adapter
from trillion_moe.steps import train_step
from trillion_moe.transforms import LoRAConfig, add_lora, combine, partition

TARGETS = {
    "attention, shared experts, dense layers": LoRAConfig(),
    "routed experts": LoRAConfig(targets=("routed_experts",)),
}
RATE = 2e-4


def measure(rounds: int = 5, threads: int = 2) -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        transformers_model().save_pretrained(folder / "base")
        return {what: _compare(folder, lora, rounds) for what, lora in TARGETS.items()}


def _compare(folder: Path, lora: LoRAConfig, rounds: int) -> dict[str, Any]:
    adapter = folder / lora.targets[0]
    trainable, frozen = partition(add_lora(load(folder / "base"), lora, jax.random.key(0)), trainable="lora")
    random = np.random.default_rng(0)  # not as adapters begin, without effect, which PEFT could not be seen to load
    trainable = jax.tree.map(lambda a: a + 1e-2 * random.standard_normal(a.shape, np.float32), trainable)
    export_adapter(adapter, combine(trainable, frozen))
    ids = np.random.default_rng(1).integers(3, CONFIG["vocab_size"], (1, TRAIN_TOKENS)).astype(np.int32)
    ours = Ours(trainable, frozen, ids)
    theirs = _theirs(folder / "base", adapter, ids)
    losses = {"ours": [], "PEFT": []}
    seconds = alternate(
        {"PEFT": lambda: losses["PEFT"].append(theirs()), "ours": lambda: losses["ours"].append(ours.step())}, rounds
    )
    return {
        "what": f"LoRA of rank {lora.rank} on {', '.join(lora.targets)}: updates of {TRAIN_TOKENS} tokens, float32",
        "parameters": sum(a.size for a in jax.tree.leaves(trainable)),
        **{name: summary(s) for name, s in seconds.items()},
        "faster": ratio(seconds["PEFT"], seconds["ours"]),
        "tokens_per_s": {name: TRAIN_TOKENS / min(s) for name, s in seconds.items()},
        "compile_s": ours.compile_s,
        "losses": losses,
    }


class Ours:
    """The adapter and its optimizer's state, compiled."""

    def __init__(self, trainable: Any, frozen: Any, ids: np.ndarray):
        optimizer = optax.flatten(optax.adamw(RATE, weight_decay=0))
        self.state = jax.tree.map(np.array, trainable), optimizer.init(trainable)
        self.frozen, self.batch = frozen, {"tokens": ids}
        step = jax.jit(partial(train_step, optimizer, remat=False), donate_argnums=(0, 2))
        start = time.perf_counter()
        self.compiled = step.lower(self.state[0], frozen, self.state[1], self.batch).compile()
        self.compile_s = time.perf_counter() - start

    def step(self) -> float:
        *self.state, metrics = self.compiled(self.state[0], self.frozen, self.state[1], self.batch)
        return float(metrics["loss"])


def _theirs(base: Path, adapter: Path, ids: np.ndarray) -> Any:
    import torch  # pyright: ignore[reportMissingImports]
    from peft import PeftModel  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    loaded = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="grouped_mm"
    )
    model = PeftModel.from_pretrained(loaded, adapter, is_trainable=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0)
    tokens = torch.tensor(ids, dtype=torch.long)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return float(loss)

    return step
