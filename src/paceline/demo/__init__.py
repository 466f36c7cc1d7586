"""The product's promise on real images: several processes train what one process would have trained.

`two_trainings` ties it together, `demo_training` is what every rank runs, `progress_pipe` is how a rank reports,
`comparison` says what came out, `screen` shows it. Nothing is imported here: a rank needs neither the launcher nor the
screen.
"""
