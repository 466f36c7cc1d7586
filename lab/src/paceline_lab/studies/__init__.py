"""Studies: does a claim hold? The large-batch study's accuracies, and figures of papers measured again.

`description` says what every study has, and runs it. `store` keeps finished training runs. `large_batch` (with
`large_batch_plan`, `large_batch_rows`, `tasks`, `claims`, `trial_training`) measures accuracy; what is behind
`cluster_study` measures time on emulated hosts: `catalogue` lists those by name.
"""
