"""Layouts of published models, whose pages the benchmarks of the data plane move."""

from kvtier.layouts import Layout, mla, swa_c4_c128

__all__ = ["V4_FLASH_RATIOS", "v3", "v4_flash"]

V4_FLASH_RATIOS = (0, 0, *(4, 128) * 20, 4)
"""What each of the 43 layers of DeepSeek-V4-Flash compresses."""


def v4_flash() -> Layout:
    """Pages of 256 tokens, 998,208 bytes."""
    return swa_c4_c128(layer_ratios=V4_FLASH_RATIOS)


def v3() -> Layout:
    """DeepSeek-V3's 61 layers: pages of 64 tokens."""
    return mla(layers=61, latent_dim=512, rope_dim=64)
