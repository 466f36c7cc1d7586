"""The product's promise on real images: several processes train what one process would have trained.

`data` loads images, `training` is what every rank runs, `messages` is how a rank reports, `comparison` says what
came out, `show` puts it on the screen and `report` in a folder; `run` ties them together.
"""

from paceline.demo.data import Images, load_images
from paceline.demo.run import DemoSettings, run_demo
from paceline.demo.show import Screen

__all__ = ["DemoSettings", "Images", "Screen", "load_images", "run_demo"]
