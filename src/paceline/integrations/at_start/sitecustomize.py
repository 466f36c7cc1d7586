"""Run by Python itself at the start of a rank of `paceline run --replace-ddp`; see the package's docstring.

Then it steps aside: the folder leaves `sys.path`, and a `sitecustomize` of the user's or the system's own is run as
it would have been.
"""

import importlib
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _FOLDER]

_found_on = list(sys.path)
sys.path.append(str(_FOLDER.parents[2]))  # where paceline lies, also if it is imported from a checkout
from paceline.integrations import at_start  # noqa: E402

sys.path[:] = _found_on
at_start.apply_environment()

_ourselves = sys.modules.pop(__name__)
try:
    importlib.import_module(__name__)  # the next one on the path
except ImportError as _error:
    if _error.name != __name__:
        raise
finally:
    sys.modules.setdefault(__name__, _ourselves)
