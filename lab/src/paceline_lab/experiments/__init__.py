"""Experiments: measured claims of Paceline, and figures of papers measured again.

`registry` lists them all with their questions, `runner` runs them, and `options` has what their command lines share.
"""
