"""Parameter servers: processes that sum what ranks push, and may step an optimizer with it; and the way to them.

A server imports numpy, and torch only if it is given an optimizer to step.
"""

ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
    *("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
)
"""Classes of torch.optim that treat every element of a parameter by itself, which servers step."""
