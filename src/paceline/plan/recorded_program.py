"""Run by `script_recording` in a process of its own: a user's script, whose steps are recorded until there are enough.

python -m paceline.plan.recorded_program TRACE NUM_STEPS SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

from paceline.observe.workload_recording import record_workload


def main(words: list[str]) -> None:
    """Record and run."""
    trace, num_steps, script, *arguments = words
    recording = record_workload(trace, int(num_steps), Path(script).stem)

    def end() -> None:
        raise SystemExit(0)  # what the script has open is closed on the way out

    recording.when_done(end)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)  # as if python had been given the script
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        seen = {"num_forwards": recording.num_forwards, "num_steps": recording.num_steps}
        Path(f"{trace}.seen").write_text(json.dumps(seen))
        recording.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
