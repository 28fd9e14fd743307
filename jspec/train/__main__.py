"""``python -m jspec.train``: from a target to a draft head, in stages that can be run apart and resumed.

text     the target writes its training text
head     the head is trained on it
export   the best checkpoint becomes a head that ``python -m jspec.run --head`` takes, with figures
"""

import sys
from collections.abc import Sequence

from jspec.device import keep_compilations, pick_accelerator, weights_dtype
from jspec.mesh import mesh_of
from jspec.models.load import load_target
from jspec.options import exit_status
from jspec.train.options import STAGES, parse
from jspec.train.stages import export_trained, train_head, write_library


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0, 2 for a user's error or a full disk or memory, 130 for Ctrl-C."""

    def work():
        options, stages = parse(argv)
        pick_accelerator(options.accel)
        keep_compilations()
        dtype = weights_dtype(options.dtype)
        target = load_target(options.target, dtype, mesh_of(options.mesh))
        run = {"text": write_library, "head": train_head, "export": export_trained}
        for stage in STAGES:
            if stage in stages:
                run[stage](options, target)

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
