"""Thresholds of ``graft``, calibrated by decoding and kept on the disk: ``python -m jspec.thresholds``."""
