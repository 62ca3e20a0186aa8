"""Training of whole models: recipes, the loop, checkpoints, tables."""
