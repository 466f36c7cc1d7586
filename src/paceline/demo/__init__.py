"""The product's promises, shown in a minute each.

| command | driver | what every rank runs |
|---|---|---|
| `paceline demo` | `comparison` | `training`, on `images` |
| `paceline demo survive` | `survival` | `surviving_rank` |
| `paceline demo doctor` | `slow_rank` | `slow_script`, which imports nothing of Paceline |
"""
