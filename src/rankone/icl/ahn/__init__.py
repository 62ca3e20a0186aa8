"""Ahn, Cheng, Daneshmand, Sra 2023, "Transformers learn to implement preconditioned gradient
descent for in-context learning" (arXiv 2306.00297), reproduced: `reproduce_ahn`."""
