"""The name and version in a trace's header: `workload_recording` writes them, `plan` reads them, without torch."""

TRACE_FORMAT, TRACE_VERSION = "paceline trace", 1
NUM_WARM_UP = 2  # steps at the beginning, which do not count
