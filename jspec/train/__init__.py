"""Training draft heads: text that the target writes, its features, losses and the loop (``python -m jspec.train``).

options = TrainOptions(target="smollm2-135m", library="library", run="run")
target = jspec.load(options.target)
write_library(options, target)
train_head(options, target)
head = jspec.load_head(export_trained(options, target), target)
"""

from jspec.train.data import BatchConfig, read_texts
from jspec.train.loop import Trainer
from jspec.train.losses import LossConfig
from jspec.train.optim import OptimConfig
from jspec.train.options import HeadOptions, TrainOptions
from jspec.train.stages import export_trained, open_run, train_head, write_library
from jspec.train.text import TextConfig

__all__ = [
    "BatchConfig",
    "HeadOptions",
    "LossConfig",
    "OptimConfig",
    "TextConfig",
    "TrainOptions",
    "Trainer",
    "export_trained",
    "open_run",
    "read_texts",
    "train_head",
    "write_library",
]
