"""The product's promise on real images: several processes train what one process would have trained.

`comparison` runs both trainings and reports, `training` is what every rank runs, `images` are what it trains on.
"""
