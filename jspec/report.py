"""What a run amounts to: metrics, the JSON report, tables."""

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jspec import __version__
from jspec.comparison import Comparison
from jspec.device import device_name
from jspec.driver import Finished, Stream
from jspec.exactness import Difference
from jspec.mesh import fetchable
from jspec.tree import SOURCES

# Metrics of outcomes, pooled: sums over prompts, then the ratio.


def acceptance_length(outcomes: Sequence[Finished]) -> float:
    """Tau: tokens emitted a round, bonus included, before a stop or the limit cuts the last round."""
    return _ratio(sum(x.emitted for x in outcomes), sum(x.rounds for x in outcomes))


def accepted_by_depth(outcomes: Sequence[Finished]) -> list[float]:
    """The share of rounds whose accepted path reached depth 0, 1, ...; they add up to tau."""
    rounds = sum(x.rounds for x in outcomes)
    return [_ratio(n, rounds) for n in _pooled(x.by_depth for x in outcomes)]


def accepted_by_rank(outcomes: Sequence[Finished]) -> list[float]:
    """The share of accepted nodes that were their parent's 1st, 2nd, ... child; the last entry: or a later one."""
    counts = _pooled(x.by_rank for x in outcomes)
    return [_ratio(n, sum(counts)) for n in counts]


def accepted_by_source(outcomes: Sequence[Finished]) -> dict[str, float]:
    """The share of accepted nodes by who proposed them."""
    counts = _pooled(x.by_source for x in outcomes)
    return {name: _ratio(n, sum(counts)) for name, n in zip(SOURCES, counts)}


def bucket_histogram(stream: Stream) -> dict[str, int]:
    """Rounds by the rows of the verify forward they ran in; on a mesh, those of all data shards."""
    buckets = stream.plan.row_buckets(stream.state.rows.done.shape[0] // stream.plan.shards)
    counts = np.asarray(fetchable(stream.state.histogram)).reshape(-1, len(buckets)).sum(axis=0)
    return {str(b): int(n) for b, n in zip(buckets, counts)}


def tokens_per_second(outcomes: Sequence[Finished], stream: Stream) -> float:
    """New tokens a second of decoding; compilation and prefill are left out."""
    return _ratio(sum(len(x.tokens) for x in outcomes), stream.decode_seconds)


def _pooled(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts)]


def _ratio(top: int | float, bottom: int | float) -> float:
    return float(top / bottom) if bottom else 0.0


# The JSON report.


def summarize(run: Comparison) -> dict[str, Any]:
    """The report's "summary". What needs a baseline, or ``profile``, is None without it.

    Raises:
      ValueError: nothing was decoded yet.
    """
    outcomes, stream = run.ours.outcomes, run.ours.stream
    if stream is None:
        raise ValueError("run has not been run yet: call its run()")
    speed = tokens_per_second(outcomes, stream)
    plain = identical = excused = None
    if run.reference:
        plain = tokens_per_second(run.reference.outcomes, run.reference.stream)
        identical = f"{sum(d is None for d in run.differences)}/{len(run.differences)}"
        excused = sum(d.excused for d in run.differences if d)
    return {
        "acceptance_length": acceptance_length(outcomes),
        "accepted_by_depth": accepted_by_depth(outcomes),
        "accepted_by_rank": accepted_by_rank(outcomes),
        "accepted_by_source": accepted_by_source(outcomes),
        "draft_passes": int(np.sum(fetchable(stream.state.draft_passes))),
        "rows_verified": sum(x.verified for x in outcomes),
        "bucket_histogram": bucket_histogram(stream),
        "tokens_per_second": speed,
        "ar_tokens_per_second": plain,
        "speedup": None if plain is None else _ratio(speed, plain),
        "identical_to_ar": identical,
        "excused": excused,
        "compile_seconds": stream.compile_seconds,
        "prefill_seconds": stream.prefill_seconds,
        "step_seconds": stream.step_seconds if any(stream.step_seconds.values()) else None,
    }


def summarize_prompt(
    id: str, text: str, one: Finished, difference: Difference | None, compared: bool
) -> dict[str, Any]:
    """One of the report's "results". ``compared``: whether there was a baseline to differ from."""
    return {
        "id": id,
        "prompt_tokens": one.prompt_tokens,
        "tokens": one.tokens,
        "text": text,
        "rounds": one.rounds,
        "acceptance_length": one.acceptance_length,
        "seconds": one.seconds,
        "identical_to_ar": difference is None if compared else None,
        "first_difference": difference
        and {
            "position": difference.position,
            "gap": difference.gap if np.isfinite(difference.gap) else None,  # JSON has no infinity
            "excused": difference.excused,
        },
    }


def check_writable(path: Path) -> None:
    """Finds out before the work whether a report can be written there.

    Raises:
      ValueError: it cannot.
    """
    try:
        if path.is_file() and _is_stdout(path):
            raise ValueError(f"cannot write {path}: it is standard output, where the text goes")
        if path.is_file() or path.is_dir():  # not a pipe: it would wait for a reader
            path.open("a").close()
        if path.is_file() or not path.exists():
            tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ValueError(f"cannot write {path}: {_reason(error)}") from None


def _is_stdout(path: Path) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(1))
    except OSError:  # it is closed
        return False


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Writes a report, all of it or nothing.

    Raises:
      OSError: it cannot be written.
    """
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        if path.exists() and not path.is_file():  # a pipe or a device
            path.write_text(text, encoding="utf-8")
            return
        place = path.resolve()  # a link keeps pointing to it
        partial = place.with_name(f".jspec-{os.getpid()}.partial")  # not longer than a name may be
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, place)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        raise OSError(f"cannot write {path}: {_reason(error)}") from None


def _reason(error: OSError | RuntimeError) -> str:
    return getattr(error, "strerror", None) or str(error)


def describe_run() -> dict[str, str]:
    """The versions and the machine of this process, as the report names them."""
    return {
        "version": __version__,
        "jax": jax.__version__,
        "accel": jax.default_backend(),
        "device": device_name(),
    }


# Tables.


def print_report(report: dict[str, Any], console: Console) -> None:
    """The report as tables for the terminal: a row a prompt, then the summary."""
    console.print(_prompt_table(report["results"]))
    console.print(_summary_table(report))


def _prompt_table(results: Sequence[dict[str, Any]]) -> Table:
    table = Table("prompt", box=box.SIMPLE_HEAD)
    for name in ("read", "new", "rounds", "tokens/round", "seconds", "as ar"):
        table.add_column(name, justify="right")
    for one in results:
        counts = (one["prompt_tokens"], len(one["tokens"]), one["rounds"])
        numbers = (f"{one['acceptance_length']:.2f}", f"{one['seconds']:.2f}")
        table.add_row(escape(one["id"]), *map(str, counts), *numbers, _verdict(one))
    return table


def _verdict(result: dict[str, Any]) -> str:
    """Whether a prompt's tokens are autoregressive decoding's."""
    if (where := result["first_difference"]) is None:
        return {True: "same", None: "-"}[result["identical_to_ar"]]
    gap = "" if where["gap"] is None else f", gap {where['gap']:.1e}"
    return f"differ at {where['position']}{gap}"


def _summary_table(report: dict[str, Any]) -> Table:
    summary = report["summary"]
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column()

    def add(name, value):
        if value is not None:
            table.add_row(name, escape(str(value)))

    drawn = "greedy" if not report["temperature"] else f"temperature {report['temperature']:g}"
    add("target", f"{report['target']}, {report['dtype']}, {drawn}, batch {report['batch']}")
    add("device", f"{report['accel']}: {report['device']}")
    head = "" if report["head"] is None else f", head {report['head']}"
    smart = "on" if report["smart"] else "off"
    used = f"budget {report['budget']}{head}, smart {smart}, graft {report['graft']}"
    add("method", f"{report['method']}, {used}")
    add("acceptance length", f"{summary['acceptance_length']:.2f} tokens a round")
    shares = " ".join(f"{share:.2f}" for share in summary["accepted_by_depth"][1:])
    add("rounds that reach depth 1, 2, ...", shares or None)
    used = {b: n for b, n in summary["bucket_histogram"].items() if n}
    add("rounds by rows", ", ".join(f"{n} of {b}" for b, n in used.items()))
    speed = f"{summary['tokens_per_second']:.1f} tokens/s"
    if summary["speedup"] is not None:
        plain = summary["ar_tokens_per_second"]
        speed += f", {summary['speedup']:.2f}x autoregressive decoding ({plain:.1f} tokens/s)"
    add("speed" if not summary["step_seconds"] else "speed, step by step", speed)
    excused = f" ({summary['excused']} more but for near-ties)" if summary["excused"] else ""
    add("identical to ar", summary["identical_to_ar"] and summary["identical_to_ar"] + excused)
    compiled, read = summary["compile_seconds"], summary["prefill_seconds"]
    add("not in the speed", f"compile and warm up {compiled:.1f} s, prefill {read:.1f} s")
    if steps := summary["step_seconds"]:
        total = sum(steps.values())
        parts = (f"{name} {100 * _ratio(t, total):.1f} %" for name, t in steps.items())
        add("steps of a round", ", ".join(parts))
    return table


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown; floats with two digits, all columns but the first to the right."""
    lines = [header, [":--"] + ["--:"] * (len(header) - 1), *rows]

    def cell(value):
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines) + "\n"


def ratio_interval(
    tops: Sequence[float | int] | np.ndarray,
    bottoms: Sequence[float | int] | np.ndarray,
    *,
    level: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """The bootstrap interval of ``sum(tops) / sum(bottoms)``, prompts resampled (percentile method).

    Args:
      tops: one a prompt: tokens emitted, say.
      bottoms: likewise, positive: rounds, or seconds.
      level: of confidence.
      samples: bootstrap samples.
      seed: of the resampling.
    """
    tops, bottoms = np.asarray(tops, float), np.asarray(bottoms, float)
    picks = np.random.default_rng(seed).integers(len(tops), size=(samples, len(tops)))
    ratios = tops[picks].sum(axis=1) / bottoms[picks].sum(axis=1)
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
