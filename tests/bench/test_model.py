"""The benchmark measures what it says."""

import json

from trillion_moe.bench import model as bench


def test_the_stated_model_and_sizes(goldens) -> None:
    stated = json.loads((goldens / "config" / "bench_config.json").read_text())
    assert stated["config"].items() <= bench.CONFIG.items()
    assert bench.CONFIG.keys() - stated["config"].keys() == {"pad_token_id", "bos_token_id", "eos_token_id"}
    sizes = [stated["train_len"], *(stated["decode"][name] for name in ("batch", "prompt", "new_tokens"))]
    assert sizes == [bench.TRAIN_TOKENS, bench.BATCH, bench.PROMPT, bench.NEW]
