"""Our DistributedDataParallel under other frameworks: Accelerate, Hugging Face's Trainer, Lightning, any script.

Importing this package imports none of them, and no torch.
"""
