"""Where data comes from. Every sampler takes a `torch.Generator` or a seed."""
