"""DeepSeek-V2-Lite, V2 and V3: dense multi-head latent attention."""
