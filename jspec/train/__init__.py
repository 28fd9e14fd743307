"""Training draft heads: text that the target writes, its features, losses and the loop (``python -m jspec.train``)."""
