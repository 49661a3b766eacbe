"""DeepSeek-V3.2: latent attention to the rows that a layer's own index picks."""
