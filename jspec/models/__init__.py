"""Targets: configuration, weights, tokenizer, and the one transformer that serves them."""
