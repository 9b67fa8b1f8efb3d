"""A round, in reading order: server, silo, trainer, batches, gradients, aggregate, evaluate."""
