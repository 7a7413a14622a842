"""The result of an evaluation as figures, as JSON and as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from services.cli.control import EpisodeResult
from services.cli.wilson import wilson
from services.common.bundle import Version
from services.common.seeds import evaluation_seed


def held_out(tasks: Sequence[str], episodes: int, base: int) -> list[tuple[str, int]]:
    """(task, seed) of the held-out episodes: tasks in turn, seeds that neither training nor demonstrations use."""
    return [(tasks[index % len(tasks)], evaluation_seed(index, base)) for index in range(episodes)]


def figures(
    version: Version, results: Sequence[EpisodeResult], t: float = 0.0, trained_steps: int = 0
) -> dict[str, Any]:
    """All figures of an evaluation, JSON-able. Failed episodes count as no success, and are counted.

    success_once: succeeded at any step. success_at_end: succeeded at the last step, the horizon. Intervals are
    Wilson's, 95 %. t, trained_steps: when in the run it was made.
    """
    overall = _rates(results)
    tasks = sorted({result.task for result in results})
    per_task = {task: _rates([result for result in results if result.task == task]) for task in tasks}
    return {
        "version": str(version),
        "t": round(t, 3),
        "trained_steps": trained_steps,
        **overall,
        "tasks": per_task if len(tasks) > 1 else {},
        "results": [asdict(result) for result in results],
    }


def _rates(results: Sequence[EpisodeResult]) -> dict[str, Any]:
    total = len(results)
    once, at_end = sum(r.success_once for r in results), sum(r.success_at_end for r in results)
    return {
        "episodes": total,
        "failed": sum(bool(r.failure) for r in results),
        "success_once": once / total if total else 0.0,
        "success_once_interval": list(wilson(once, total)),
        "success_at_end": at_end / total if total else 0.0,
        "success_at_end_interval": list(wilson(at_end, total)),
        "mean_return": sum(r.reward_sum for r in results) / total if total else 0.0,
        "mean_steps": sum(r.steps for r in results) / total if total else 0.0,
    }


def brief(result: Mapping[str, Any]) -> str:
    """Success and its interval in a few words."""
    low, high = result["success_once_interval"]
    return f"{result['success_once']:.2f} (95 %: {low:.2f} to {high:.2f})"


def table(result: Mapping[str, Any]) -> str:
    """The figures for a terminal, one row per task and one for all."""
    head = ("", "episodes", "success once", "95 % interval", "at end", "95 % interval", "return", "steps", "failed")
    rows = [head, *(_row(task, rates) for task, rates in result["tasks"].items()), _row("all", result)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _row(name: str, rates: Mapping[str, Any]) -> tuple[str, ...]:
    once, end = rates["success_once_interval"], rates["success_at_end_interval"]
    return (
        name,
        str(rates["episodes"]),
        f"{rates['success_once']:.3f}",
        f"{once[0]:.3f} to {once[1]:.3f}",
        f"{rates['success_at_end']:.3f}",
        f"{end[0]:.3f} to {end[1]:.3f}",
        f"{rates['mean_return']:.2f}",
        f"{rates['mean_steps']:.1f}",
        str(rates["failed"]),
    )
