"""The product's promise on real images: several processes train what one process would have trained.

`data` loads images, `training` is what every rank runs, `messages` is how a rank reports, `comparison` says what
came out, `show` puts it on the screen, `summary` makes rows and figures of it, `run` ties them together. Nothing is
imported here: a rank needs neither the launcher nor the screen.
"""
