"""What splits one denoising step over several ranks: attention, weights, blocks and branches of guidance."""
