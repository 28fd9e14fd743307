"""Draft heads: flax.nnx modules whose parameters travel as plain pytrees."""
