"""Pictures of the command line: runs commands, and keeps what they print as SVG. `python docs/screens.py` makes all.

Rich draws the terminal. The fonts that it would fetch from the network are taken out: a reader's own will do.
A film shows each line when the command printed it, and then stays as it is. Pauses are shortened to `_LONGEST_S`.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

GUIDE = Path(__file__).parent / "guide"
_DIES = """
import os, signal, torch, torch.distributed as dist
from paceline import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 1))
for step in range(5):
    if dist.get_rank() == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.randn(4, 8)).sum().backward()
"""
# The picture, the command that is shown, and how wide the terminal is. Progress, on standard error, is left out; so
# is everything else there, except for the command whose error is shown.
SCREENS = (
    ("screen-run", "paceline run --nproc-per-node 2 train.py", 100),
    (
        "screen-plan",
        "paceline plan resnet50 --to 64 --rate 10Gbit --batch 32 --epoch-samples 1281167 --price 2.5",
        132,
    ),
    ("screen-demo", "paceline demo --epochs 2", 80),
)
# The same as a film.
FILMS = (
    ("film-survive", "paceline demo survive", 72),
    ("film-doctor", "paceline demo doctor", 96),
)
_LONGEST_S = 0.6


def film(name: str, command: str, width: int) -> str:
    """Return what a command prints as a picture whose lines appear one after another."""
    environment = os.environ | {"COLUMNS": str(width), "FORCE_COLOR": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONUNBUFFERED"] = "1"
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    now_s, last_s, delays_s = 0.0, time.monotonic(), []
    with subprocess.Popen(
        command.split(), env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        for line in itertools.chain([f"\x1b[1m$ {command}\x1b[0m"], process.stdout):
            now_s, last_s = now_s + min(_LONGEST_S, time.monotonic() - last_s), time.monotonic()
            text = Text.from_ansi(line.rstrip())
            delays_s += [now_s] * len(console.render_lines(text))
            console.print(text)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    svg = re.sub(
        r'(<text class="[^"]*)("[^>]*clip-path="url\(#[\w-]*-line-(\d+)\)")',
        rf"\1 {name}-at\3\2",
        _without_fonts(console.export_svg(title="paceline", unique_id=name)),
    )
    rules = [f".{name}-at{i} {{ animation-delay: {at_s:.1f}s }}" for i, at_s in enumerate(delays_s)]
    style = (
        "<style>@keyframes appear { from { opacity: 0.2 } }\n@media (prefers-reduced-motion: no-preference) {\n"
        f'[class*="{name}-at"] {{ animation: appear 1ms backwards }}\n' + "\n".join(rules) + "\n}</style>"
    )
    return svg.replace("<defs>", f"{style}\n<defs>", 1)


def screen(name: str, command: str, width: int, folder: Path) -> str:
    """Return what a command prints as a picture."""
    environment = os.environ | {"COLUMNS": str(width), "FORCE_COLOR": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command.split(),
        cwd=folder,
        env=environment,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if name == "screen-run" else subprocess.DEVNULL,
    )
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(shortened(done.stdout, folder)))
    return _without_fonts(console.export_svg(title="paceline", unique_id=name))


def _without_fonts(svg: str) -> str:
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def shortened(output: str, folder: Path) -> str:
    """Leave out progress that was drawn over, and the temporary folder's name."""
    lines = [line.rpartition("\r")[2] for line in output.replace(f"{folder}/", "").splitlines()]
    plain = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in lines]
    is_progress = [bool(re.match(r"\s*$|rank \d+ ", line)) for line in plain]
    return "\n".join(line for line, left_out in zip(lines, is_progress, strict=True) if not left_out)


def main(names: list[str]) -> None:
    """Make all pictures, or those that are named."""
    for name, command, width in SCREENS:
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "train.py").write_text(_DIES)
            path = GUIDE / f"{name}.svg"
            path.write_text(screen(name, command, width, Path(folder)))
        sys.stdout.write(f"{path}\n")
    for name, command, width in FILMS:
        if not names or name in names:
            path = GUIDE / f"{name}.svg"
            path.write_text(film(name, command, width))
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
