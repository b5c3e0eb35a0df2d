"""The operators of a model, each with its implementations and its cases."""

from trillion_moe.config import ModelConfig
from trillion_moe.ops import IMPLEMENTATIONS
from trillion_moe.verify import products, rowwise, sequences
from trillion_moe.verify.cases import Operator

XLA = ("xla",)
ONE_ROUNDING = "sums are float32: all that is rounded is the result, and in between the input of an activation"
LARGE_SCORES = "queries and keys are rounded before they are multiplied: the larger the scores, the more that weighs"
ALWAYS_WIDE = "computed in float32 in every dtype: only a gradient is rounded"


def operators_of(cfg: ModelConfig) -> tuple[Operator, ...]:
    """All that a model of this config runs, in the order of the table.

    One with packed experts multiplies adapters on them as they are, so that both grouped products are its.
    """
    found: list[Operator] = []
    if cfg.moe is not None:
        experts = {"experts": cfg.moe.num_experts}
        table = {"grouped_matmul": products.dense}
        if cfg.quantization is not None:
            table["grouped_matmul_mxfp4"] = products.packed
        found += [
            Operator(
                name, IMPLEMENTATIONS[name], cases, products.numbers, experts, ("tokens", "experts"),
                factor={"bfloat16": 0.5}, because=ONE_ROUNDING,
            )
            for name, cases in table.items()
        ]  # fmt: skip
        found.append(
            _plain("router", rowwise.router, rowwise.router_numbers, factor={"bfloat16": 0.25}, because=ALWAYS_WIDE)
        )
    if "kda" in cfg.attention:
        heads, names = {"heads": cfg.kda.num_heads}, IMPLEMENTATIONS["kda"]
        found.append(Operator("kda", names, sequences.kda, sequences.kda_numbers, heads, ("tokens", "heads")))
    if "mla" in cfg.attention:
        heads = cfg.mla.num_heads
        found.append(
            _heads("mla", sequences.mla, sequences.mla_numbers, heads, factor={"bfloat16": 2.0}, because=LARGE_SCORES)
        )
    if cfg.attn_res_block is not None:
        found.append(_plain("attn_res", rowwise.attn_res, rowwise.attn_res_numbers))
    found.append(_plain(cfg.activation, rowwise.activation, rowwise.activation_numbers))
    found.append(_plain("rms_norm", rowwise.norm, rowwise.norm_numbers))
    if cfg.vision is not None:
        heads = cfg.vision.num_heads
        found.append(_heads("vision_attention", sequences.vision_attention, sequences.vision_numbers, heads))
        found.append(_plain("patch_embedding", rowwise.patch_embedding, rowwise.patch_numbers))
    vocab, scaled = {"vocab": cfg.vocab_size}, ("tokens", "vocab")
    numbers = rowwise.cross_entropy_numbers
    found.append(Operator("cross_entropy", XLA, rowwise.cross_entropy, numbers, vocab, scaled))
    return tuple(found)


def _plain(name, cases, numbers, **more) -> Operator:
    return Operator(name, XLA, cases, numbers, {}, **more)


def _heads(name, cases, numbers, heads: int, **more) -> Operator:
    return Operator(name, XLA, cases, numbers, {"heads": heads}, ("tokens", "heads"), **more)
