"""The surface of torch's DistributedDataParallel: private names, logging keys, state-dict names, hooks, dynamo."""
