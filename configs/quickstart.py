"""The model of `make quickstart`: six small layers with all of Kimi K3's parts, and the meaning of its token ids."""

from trillion_moe.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig, VisionConfig

PAD, BOS, EOS, MEDIA, ASK = range(5)
LETTERS = "abcdefghijklmnopqrstuvwxyzü"
"""Ids 5 and up."""


def config() -> ModelConfig:
    """Six layers with all of K3's parts: KDA, gated MLA, latent MoE, attention residuals, vision."""
    vision = VisionConfig(
        hidden_size=64, num_layers=2, num_heads=2, qkv_size=64, mlp_size=128, patch_size=14, text_hidden_size=64,
        pos_emb_height=4, pos_emb_width=4, pos_emb_time=4,
    )  # fmt: skip
    return ModelConfig(
        model_type="kimi_k3", vocab_size=64, hidden_size=64, num_layers=6, dense_hidden_size=128,
        attention=("kda", "mla") * 3, mlp=("dense",) + ("moe",) * 5,
        activation="situ", situ_beta=4.0, situ_linear_beta=25.0, attn_res_block=2, rms_norm_eps=1e-5, dtype="float32",
        bos_id=BOS, eos_ids=(EOS,), pad_id=PAD, media_id=MEDIA, initializer_range=0.05,
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
