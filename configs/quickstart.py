"""The model of `make quickstart`: three small layers with all of Kimi K3's parts, and its vocabulary."""

from trillion_moe.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig, VisionConfig

ENGLISH = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
GERMAN = ("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun")
QUESTION = "Which digit?"

_WORDS = ("message", "assistant", "response", "image", " role", '="', "user", "Which", " digit", "28")
TOKENS = [bytes([i]) for i in range(256)] + [word.encode() for word in _WORDS]
"""Every byte, so that any text can be asked, and the words around an answer, in one token each."""

_NAMED = (
    *(("[BOS]", True), ("[EOS]", True), ("<|end_of_msg|>", True), ("<|open|>", False), ("<|close|>", False)),
    *(("<|sep|>", False), ("<|media_begin|>", True), ("<|media_content|>", True), ("<|media_end|>", True)),
    *(("<|media_pad|>", True), ("[UNK]", True), ("[PAD]", True)),
)
CONTROL = {name: (len(TOKENS) + i, special) for i, (name, special) in enumerate(_NAMED)}
"""Kimi K3's control tokens: id, and whether decoding may skip it. As in K3, there is room for 256."""


def config() -> ModelConfig:
    """Three layers with all of K3's parts: KDA, gated MLA, latent MoE, attention residuals, vision."""
    vision = VisionConfig(
        hidden_size=64, num_layers=2, num_heads=2, qkv_size=64, mlp_size=128, patch_size=14, text_hidden_size=64,
        pos_emb_height=4, pos_emb_width=4, pos_emb_time=4,
    )  # fmt: skip
    bos, eos, pad, media = (CONTROL[name][0] for name in ("[BOS]", "<|end_of_msg|>", "[PAD]", "<|media_pad|>"))
    return ModelConfig(
        model_type="kimi_k3", vocab_size=len(TOKENS) + 256, hidden_size=64, num_layers=3, dense_hidden_size=128,
        attention=("kda", "mla", "kda"), mlp=("dense", "moe", "moe"),
        activation="situ", situ_beta=4.0, situ_linear_beta=25.0, attn_res_block=2, rms_norm_eps=1e-5, dtype="float32",
        bos_id=bos, eos_ids=(eos,), pad_id=pad, media_id=media, initializer_range=0.05,
        kda=KDAConfig(
            num_heads=3, head_dim=16, conv_width=4, gate_lower_bound=-5.0, full_rank_gate=True, a_log_shape=(4,),
        ),
        mla=MLAConfig(
            num_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
            output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=8, top_k=2, hidden_size=64, latent_size=32, latent_norm=True, num_shared=1, scaling_factor=1.0,
        ),
        vision=vision,
    )  # fmt: skip
