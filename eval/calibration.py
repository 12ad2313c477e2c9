"""What a head's confidences are worth: what it said of its drafts, and what became of them.

    python eval/calibration.py --target DIR --head DIR --prompts FILE --out runs/calibration

For heads that give confidences (DSpark). scripts/calibrate.py sets them right. Everything is set as
for `specjax eval`; timing stays out.
"""

import sys

from rich.console import Console
from rich.table import Table

from specjax import eval as door
from specjax.cli import run_door
from specjax.config import Config


def body(config: Config) -> int:
    """Evaluate, and print the bins of every run that has confidences."""
    quick = config.override(
        {"Eval.time_shares": False, "Eval.repeats": 1}, "in eval/calibration.py"
    )
    evaluation = quick.build("Eval")
    quick.check_all_used()
    from specjax.evaluation import runner

    rows = runner.run(evaluation, quick.operative())
    console = Console()
    for row in rows:
        found = row.get("calibration")
        if row["head"] == "none":
            continue
        if not found:
            console.print(f"{row['head_source']}: no confidences")
            continue
        title = f"{row['head_source']}: calibration error {found['expected_calibration_error']:.4f}"
        grid = Table(title=title, box=None, title_justify="left")
        for name in ("drafts", "said", "accepted"):
            grid.add_column(name, justify="right")
        for each in found["bins"]:
            shares = (f"{each[name]:.3f}" for name in ("confidence", "accepted"))
            grid.add_row(f"{each['count']:,}", *shares)
        console.print(grid)
        errors = found["expected_calibration_error_per_position"]
        console.print("by position:", " ".join(f"{error:.4f}" for error in errors))
    return int(any(row["error"] for row in rows))


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return run_door(
        body,
        argv,
        usage=__doc__ or "",
        names=("Eval", "Target", "Engine"),
        short={name: key for name, key in door.SHORT.items() if key.startswith("Eval.")},
        default=door.DEFAULT,
    )


if __name__ == "__main__":
    sys.exit(main())
